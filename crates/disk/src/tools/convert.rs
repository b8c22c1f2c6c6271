//! Copies of disks, in whichever format.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;

use ferrite_io::arena::Span;
use ferrite_io::shared_lock::SharedLock;

use super::create::done;
use super::desk::{BUFFER_BYTES, Desk, Stop, all};
use super::extents::{What, look};
use super::files::{NewFile, Over, is_device, same_file};
use super::resume::{PARTIAL, Resume, Source};
use super::{Done, NewImage, Progress, Workshop, broken, unsuitable};
use crate::{Disk, DiskError, ErrorKind, ImageName, Port, SECTOR_BYTES};

/// Pieces on their way at a time.
const IN_FLIGHT: usize = 16;
/// Bytes of a piece, at most: a buffer.
const PIECE: u64 = BUFFER_BYTES as u64;
/// What is all zeros in units of this many bytes is not written.
const ZERO_UNIT: usize = 64 << 10;
/// After so many bytes they are made durable, so that an interrupted conversion can go on there.
const SYNC_EVERY: u64 = 1 << 30;

/// How to convert.
#[derive(Clone, Debug, Default)]
pub struct Convert {
    /// What is at the destination may be lost.
    pub force: bool,
    /// Go on where an interrupted conversion ended.
    pub resume: bool,
    /// All of the destination's space at once.
    pub fixed: bool,
    /// The unit of allocation; none: the usual one.
    pub unit_bytes: Option<u32>,
}

/// The two disks, and how far it is.
struct Copying<'a> {
    shop: &'a Workshop<'a>,
    from: (&'a Disk, Port),
    to: (&'a Disk, Port),
    /// Whoever has it looks for the next piece.
    looking: SharedLock,
    next: Cell<u64>,
    end: u64,
    /// Where the pieces begin that are on their way.
    in_flight: RefCell<BTreeSet<u64>>,
    stop: Stop,
    unsynced: Cell<u64>,
    syncing: Cell<bool>,
    state: RefCell<Resume>,
    path: &'a Path,
}

impl Workshop<'_> {
    /// Copies what `from` reads as into a new image `to`, its chain flattened. What is zeros is
    /// neither read, where that is known, nor written.
    ///
    /// The image is called `to` when it is complete and durable. Until then it is `to.partial`,
    /// with a state file beside it that [`Convert::resume`] goes on from.
    ///
    /// # Errors
    /// `Refused`: `to` exists, or an earlier conversion's remains. `Io` with `Interrupted` if the
    /// progress said to stop: what there is can be resumed. Those of the two images.
    pub fn convert(
        &self,
        from: &ImageName,
        to: &ImageName,
        how: &Convert,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot convert {} to {}", from.path.display(), to.path.display());
        let cannot = |e| broken(what(), e);
        if same_file(&from.path, &to.path).is_ok_and(|same| same) {
            let help = "name another destination";
            return Err(unsuitable(what(), "both are the same file", help));
        }
        let source = self.open(from, true)?;
        let bytes = source.sectors() * SECTOR_BYTES;
        let fresh = Resume {
            sources: sources(&source, from).map_err(cannot)?,
            format: to.format.name().into(),
            virtual_bytes: bytes,
            done_bytes: 0,
        };
        let (file, state) = self.destination(to, how, fresh)?;
        let name = ImageName { format: to.format, path: file.path().to_owned() };
        // No journal: what is not durable is written again.
        let target = Disk::open_image(&name, &crate::OpenOptions::default())?;
        let mut desk = Desk::new(self, IN_FLIGHT).map_err(cannot)?;
        let copying = Copying {
            shop: self,
            from: (&source, desk.port(&source).map_err(cannot)?),
            to: (&target, desk.port(&target).map_err(cannot)?),
            looking: SharedLock::new(),
            next: Cell::new(state.done_bytes),
            end: bytes,
            in_flight: RefCell::default(),
            stop: Stop::default(),
            unsynced: Cell::new(0),
            syncing: Cell::new(false),
            state: RefCell::new(state),
            path: &to.path,
        };
        let buffers = (0..IN_FLIGHT).map(|_| desk.buffer()).collect::<io::Result<Vec<_>>>();
        let buffers = buffers.map_err(cannot)?;
        let copied = desk.run(copying.run(&buffers));
        if let Err(e) = copied {
            file.keep();
            return Err(interrupted(what(), e, &to.path));
        }
        drop(target);
        file.finish()?;
        Resume::remove(&to.path).map_err(cannot)?;
        Ok(done(to, bytes, Vec::new()))
    }

    /// The file to write to, and how far it is.
    fn destination(
        &self,
        to: &ImageName,
        how: &Convert,
        fresh: Resume,
    ) -> Result<(NewFile<'_>, Resume), DiskError> {
        let what = || format!("cannot convert to {}", to.path.display());
        let file = self.old_file(&to.path, PARTIAL, Over::forced(how.force))?;
        let exists = !is_device(&to.path) && file.path().symlink_metadata().is_ok();
        let refuse =
            |why: String, help: &str| Err(DiskError::new(ErrorKind::Refused, what(), why, help));
        if how.resume && exists {
            return match Resume::load(&to.path) {
                Some(state) if (Resume { done_bytes: 0, ..state.clone() }) == fresh => {
                    Ok((file, state))
                }
                Some(_) => refuse(
                    "the source has changed since, or it was another conversion".into(),
                    "start again with --force",
                ),
                None => refuse(
                    format!("{} does not say how far it is", file.path().display()),
                    "start again with --force",
                ),
            };
        }
        if exists && !how.force {
            let why =
                format!("{} is there, of a conversion that was interrupted", file.path().display());
            file.keep();
            return refuse(why, "go on with --resume, or start again with --force");
        }
        let cannot = |e| broken(what(), e);
        if !is_device(&to.path) {
            if exists {
                // Locked, if somebody is at work on it.
                file.open()?;
                self.directory.remove(file.path()).map_err(cannot)?;
            }
            self.directory.create_new(file.path()).map_err(cannot)?;
        }
        let new = NewImage { fixed: how.fixed, unit_bytes: how.unit_bytes, ..NewImage::default() };
        self.write_new(&file, to.format, &new, None, fresh.virtual_bytes)?;
        Ok((file, fresh))
    }
}

/// The files that the source is in.
fn sources(disk: &Disk, name: &ImageName) -> io::Result<Vec<Source>> {
    match disk {
        Disk::Image(image) => {
            image.layers().iter().map(|layer| Source::of(layer.medium().path())).collect()
        }
        _ => Ok(vec![Source::of(&name.path)?]),
    }
}

fn interrupted(what: String, e: io::Error, to: &Path) -> DiskError {
    if is_device(to) {
        return broken(what, e);
    }
    let kind = match e.kind() {
        io::ErrorKind::Interrupted => ErrorKind::Interrupted,
        _ => ErrorKind::Io,
    };
    let why = match e.kind() {
        io::ErrorKind::Interrupted => "interrupted".to_owned(),
        _ => e.to_string(),
    };
    let help = "go on with --resume when the cause is mended; what is done so far is beside the \
                destination, with .partial behind its name";
    DiskError::new(kind, what, why, help).with_source(e)
}

impl Copying<'_> {
    /// Copies everything, and makes the destination complete. Stopped early, what was copied is
    /// made durable all the same.
    async fn run(&self, buffers: &[Span]) -> io::Result<()> {
        let worker = |buf: &Span| -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
            let buf = *buf;
            Box::pin(async move {
                let done = self.work(buf).await;
                if done.is_err() {
                    self.stop.raise();
                }
                done
            })
        };
        let copied = all(buffers.iter().map(worker).collect()).await;
        match copied {
            Ok(()) => self.to.0.close(&self.to.1).await,
            Err(e) => {
                // The first trouble counts, not what follows from it.
                let _ = self.sync().await;
                Err(e)
            }
        }
    }

    /// One of the workers: takes pieces as long as there are any.
    async fn work(&self, buf: Span) -> io::Result<()> {
        while let Some((at, len)) = self.next().await? {
            let done = self.copy(at, buf.slice(0, len)).await;
            self.in_flight.borrow_mut().remove(&at);
            done?;
            self.unsynced.set(self.unsynced.get() + len as u64);
            if self.unsynced.get() >= SYNC_EVERY && !self.syncing.get() {
                self.sync().await?;
            }
        }
        Ok(())
    }

    /// The next piece that has data.
    async fn next(&self) -> io::Result<Option<(u64, usize)>> {
        let _held = self.looking.lock(&self.from.1.io).await?;
        loop {
            let at = self.next.get();
            if at >= self.end || self.stop.is_raised() {
                return Ok(None);
            }
            let progress = Progress { done_bytes: at, total_bytes: self.end };
            if !(self.shop.progress)(progress) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let piece = look(self.from.0, &self.from.1, at, self.end - at).await?;
            if piece.what == What::Zeros {
                self.next.set(at + piece.len);
                continue;
            }
            let len = piece.len.min(PIECE - at % PIECE);
            self.in_flight.borrow_mut().insert(at);
            self.next.set(at + len);
            return Ok(Some((at, len as usize)));
        }
    }

    async fn copy(&self, at: u64, buf: Span) -> io::Result<()> {
        let (disk, port) = &self.from;
        disk.read(port, at, buf).await?;
        let (disk, port) = &self.to;
        for (from, len) in self.runs(buf) {
            disk.write(port, at + from as u64, buf.slice(from, len)).await?;
        }
        Ok(())
    }

    /// The parts of a buffer that are not all zeros.
    fn runs(&self, buf: Span) -> impl Iterator<Item = (usize, usize)> {
        let memory = self.from.1.memory();
        let unit = move |at: usize| ZERO_UNIT.min(buf.len() - at);
        let zero = move |at: usize| memory.is_zero(buf.slice(at, unit(at)));
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < buf.len() && zero(at) {
                at += unit(at);
            }
            let from = at;
            while at < buf.len() && !zero(at) {
                at += unit(at);
            }
            (at > from).then_some((from, at - from))
        })
    }

    /// Makes durable what was copied, and says so in the state file. The order: what is complete
    /// is found, then synced, then noted.
    async fn sync(&self) -> io::Result<()> {
        self.syncing.set(true);
        self.unsynced.set(0);
        let first = self.in_flight.borrow().first().copied();
        let done_bytes = first.unwrap_or(self.next.get());
        let synced = self.to.0.flush(&self.to.1).await;
        self.syncing.set(false);
        synced?;
        let mut state = self.state.borrow_mut();
        state.done_bytes = done_bytes;
        if is_device(self.path) { Ok(()) } else { state.save(self.path) }
    }
}
