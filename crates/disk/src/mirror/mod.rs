//! A disk whose writes go to a second one, too, while the rest of it is copied there (docs/internals/mirror.md).
//!
//! * `map`: which regions may differ, in a file that the daemon reads.
//! * `regions`: the writers of each region now, and whether the target has it.
//! * `settling`: the map that survives a power cut.
//! * `copy`: the thread that copies the regions which the target lacks.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use ferrite_disk_base::{DiskError, Format, ImageName, OpenOptions, Port, SECTOR_BYTES};
use ferrite_io::arena::Span;
use ferrite_io::remote::Backing;
use ferrite_store::background::ServiceEngine;

use crate::Disk;

mod copy;
mod map;
mod regions;
mod settling;

use copy::Background;
use map::Map;
pub use map::{MirrorFile, MirrorState, MirrorStatus, REGION_BYTES};
use regions::Regions;

/// Bytes that are zeroed by one change: it holds a region for each MiB.
const ZEROED_AT_ONCE: u64 = 64 << 20;

/// Where the target of a mirror is, and its map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorOptions {
    /// The target.
    pub target: ImageName,
    /// The file that [`MirrorFile::create`] has made.
    pub map: PathBuf,
}

/// The name of a target, with the times after which a server counts as failed. A lost connection has to be a failure
/// here: unflushed writes may be lost with it, and are copied again.
///
/// # Errors
/// It is no name of an image.
pub fn mirror_target(text: &str) -> Result<ImageName, DiskError> {
    let name = ImageName::parse(text)?;
    let Some(export) = name.export() else { return Ok(name) };
    let mut text = export.to_owned();
    for (key, value) in [("reconnect_s", 0), ("deadline_s", 10)] {
        if !text.contains(&format!("{key}=")) {
            let sign = if text.contains('?') { '&' } else { '?' };
            text += &format!("{sign}{key}={value}");
        }
    }
    ImageName::parse(&text)
}

/// See the module text.
pub struct Mirror {
    pair: Arc<Pair>,
    /// The thread of the copy.
    background: Mutex<Option<Background>>,
}

/// The two disks.
struct Pair {
    source: Disk,
    target: Option<Disk>,
    regions: Regions,
    /// The index of the source's dirty map that names what the target may lack.
    durable: Option<usize>,
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror").field("source", &self.pair.source).finish_non_exhaustive()
    }
}

impl Disk {
    /// This disk with a mirror. A target that cannot be opened is no error: the guest must not wait for it. The map says
    /// why, and the daemon has the disk opened again later.
    ///
    /// # Errors
    /// The map cannot be opened: without it, writes would be missing in the target unseen.
    pub fn mirrored(
        self,
        mirror: &MirrorOptions,
        options: &OpenOptions,
    ) -> Result<Disk, DiskError> {
        if self.read_only() {
            return Ok(self);
        }
        let bytes = self.sectors() * SECTOR_BYTES;
        let map = Map::open(&mirror.map, bytes).map_err(|e| no_map(mirror, e))?;
        let options = OpenOptions {
            // The map names the regions that the target lacks after a worker's death.
            state_dir: None,
            format_said: true,
            // A server that cannot end a killed worker's connections is waited for (`drain_s`), if there was such a worker.
            taken_over: options.taken_over && !(map.is_fresh && mirror.target.export().is_some()),
            ..options.clone()
        };
        // Writes that an earlier worker had under way may be on one of the two only. The copy would not include them.
        let opened = match map.only_writes && map.was_left {
            true => Err(unfit(
                &mirror.target,
                "the process that had it has ended".to_owned(),
                "begin the mirror anew",
            )),
            false => open_target(&self, &mirror.target, &options)
                .and_then(|target| check_identity(&mirror.target, target, &map)),
        };
        let target = match opened {
            Ok(target) => Some(target),
            Err(e) => {
                tracing::warn!("the mirror has no target now: {e}; {}", e.help());
                map.say_why(&format!("{e}; {}", e.help()));
                None
            }
        };
        let durable = settling::join(&self, &map);
        if durable.is_none() && map.name().is_some() {
            tracing::warn!(
                "after a power cut the mirror has to begin anew: its dirty map is gone or void"
            );
        }
        map.say_kept(durable.is_some());
        let regions = Regions::new(map, target.is_none());
        let pair = Arc::new(Pair { source: self, target, regions, durable });
        pair.say();
        Ok(Disk::Mirror(Box::new(Mirror { pair, background: Mutex::new(None) })))
    }
}

fn no_map(mirror: &MirrorOptions, e: io::Error) -> DiskError {
    let what = format!("cannot open the map of a mirror, {}", mirror.map.display());
    let help = "cancel the mirror (ferrite job list, ferrite job cancel), and begin it anew";
    DiskError::new(ferrite_disk_base::ErrorKind::Io, what, e.to_string(), help).with_source(e)
}

/// Opens the target, if it can take the source's data.
fn open_target(source: &Disk, name: &ImageName, options: &OpenOptions) -> Result<Disk, DiskError> {
    let target = Disk::open_image(name, options)?;
    check_target(name, &target, source.sectors())?;
    if source.passthrough() || target.passthrough() {
        let why = "commands of NVMe are for disks alone";
        return Err(unfit(name, why.to_owned(), "use its block device (/dev/nvme0n1)"));
    }
    Ok(target)
}

/// Which file a target is; `None`: it is none, or cannot be examined.
pub fn target_identity(target: &Disk) -> Option<String> {
    let raw = target.image_file()?;
    ferrite_disk_base::dirty::found::identity(raw.fd(), raw.path()).ok()
}

/// Checks that the target is the file that it was: another one lacks what the map says that it has.
fn check_identity(name: &ImageName, target: Disk, map: &Map) -> Result<Disk, DiskError> {
    match target_identity(&target) {
        Some(identity) if !map.is_same_target(&identity) => {
            let help = "cancel the mirror, and begin it anew with this file";
            Err(unfit(name, "it is another file than when the mirror was begun".to_owned(), help))
        }
        _ => Ok(target),
    }
}

/// Checks that a disk can be the target of a mirror of so many sectors.
///
/// # Errors
/// It is smaller, read-only, without a medium, or takes one connection only.
pub fn check_target(name: &ImageName, target: &Disk, sectors: u64) -> Result<(), DiskError> {
    if matches!(name.format, Format::Store) || matches!(target, Disk::Null(_)) {
        let why = "volumes of stores cannot be targets".to_owned();
        let help =
            "give it by NBD: ferrite export nbd --socket SOCKET VOLUME; nbd+unix:///?socket=SOCKET";
        return Err(unfit(name, why, help));
    }
    if target.read_only() {
        let why = "it is read-only".to_owned();
        return Err(unfit(name, why, "make it writable, or name another one"));
    }
    if target.sectors() < sectors {
        let [has, wants] = [target.sectors(), sectors].map(|n| n * SECTOR_BYTES);
        let why = format!("it has {has} bytes, and the disk has {wants}");
        return Err(unfit(name, why, "make it as large as the disk (ferrite image resize)"));
    }
    let block = u64::from(target.block_bytes());
    if !(sectors * SECTOR_BYTES).is_multiple_of(block) {
        let why = format!("it has blocks of {block} bytes, and the disk is no multiple of that");
        return Err(unfit(name, why, "name a target with blocks of 512 bytes"));
    }
    if target.one_queue() {
        let why = "its server takes one connection to what is written (no multi-conn)".to_owned();
        let help = "have the server allow several: qemu-nbd --shared=8, ferrite export nbd";
        return Err(unfit(name, why, help));
    }
    Ok(())
}

fn unfit(name: &ImageName, why: String, help: &str) -> DiskError {
    let what = format!("{} cannot be the target of a mirror", name.path.display());
    DiskError::new(ferrite_disk_base::ErrorKind::Unsuitable, what, why, help)
}

impl Mirror {
    /// The disk that the guest has.
    pub fn source(&self) -> &Disk {
        &self.pair.source
    }

    /// The disk that gets all writes, too.
    pub fn target(&self) -> Option<&Disk> {
        self.pair.target.as_ref()
    }

    /// Both, as far as they are open.
    pub(crate) fn disks(&self) -> impl Iterator<Item = &Disk> {
        std::iter::once(self.source()).chain(self.target())
    }

    pub(crate) fn backings(&self) -> Vec<Backing> {
        self.pair.backings()
    }

    pub(crate) async fn read(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        self.pair.source.read(&self.pair.source_port(port), offset, buf).await
    }

    /// Writes to both disks at a time. It is answered when both have it, or when the source has it and the map says that
    /// the target lacks it.
    pub(crate) async fn write(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        let pair = &self.pair;
        let change = pair.regions.change(&port.io, offset, buf.len() as u64, true).await?;
        let from = pair.source_port(port);
        let (Some((target, to)), true) = (pair.target_port(port), change.both) else {
            let done = pair.source.write(&from, offset, buf).await;
            drop(change);
            pair.say();
            return done;
        };
        pair.source.mark(&from, offset, buf.len() as u64).await?;
        let both = both(pair.source.write(&from, offset, buf), target.write(&to, offset, buf));
        let (done, mirrored) = both.await;
        pair.settle(change, &done, mirrored);
        done
    }

    /// As [`write`](Self::write). `zeros` is memory that stays zero.
    pub(crate) async fn write_zeroes(
        &self,
        port: &Port,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let mut at = offset;
        while at < offset + len {
            let part = (offset + len - at).min(ZEROED_AT_ONCE);
            self.zero_part(port, at, part, zeros).await?;
            at += part;
        }
        Ok(())
    }

    async fn zero_part(&self, port: &Port, offset: u64, len: u64, zeros: Span) -> io::Result<()> {
        let pair = &self.pair;
        let change = pair.regions.change(&port.io, offset, len, true).await?;
        let from = pair.source_port(port);
        let (Some((target, to)), true) = (pair.target_port(port), change.both) else {
            let done = pair.source.write_zeroes(&from, offset, len, zeros).await;
            drop(change);
            pair.say();
            return done;
        };
        pair.source.mark(&from, offset, len).await?;
        let source = pair.source.write_zeroes(&from, offset, len, zeros);
        let (done, mirrored) = both(source, target.write_zeroes(&to, offset, len, zeros)).await;
        pair.settle(change, &done, mirrored);
        done
    }

    /// Discards in the source. Later reads there do not give the same on all disks, so these regions are copied again.
    pub(crate) async fn discard_part(&self, port: &Port, offset: u64, len: u64) -> io::Result<u64> {
        let pair = &self.pair;
        if pair.regions.map.only_writes {
            // It may be left out, and so both have the same.
            return Ok(len);
        }
        let len = len.min(ZEROED_AT_ONCE);
        let _change = pair.regions.change(&port.io, offset, len, false).await?;
        let done = pair.source.discard_part(&pair.source_port(port), offset, len).await;
        pair.say();
        done
    }

    /// Flushes both. While the target lacks regions, its own flushes are those of the copy.
    pub(crate) async fn flush(&self, port: &Port) -> io::Result<()> {
        let pair = &self.pair;
        let from = pair.source_port(port);
        if pair.regions.is_behind() || pair.regions.left() > 0 {
            return pair.source.flush(&from).await;
        }
        // A failed flush of the target is no failure of the guest's: the map says what the target may lack.
        let (done, ()) = both(pair.source.flush(&from), pair.flush_target(port)).await;
        done
    }

    /// The end of both. The map says that they are equal only if both are durable, and no region is missing.
    pub(crate) async fn close(&self, port: &Port) -> io::Result<()> {
        self.end_background();
        let pair = &self.pair;
        let closed = self.close_target(port).await;
        if closed {
            pair.settle_groups(port, true).await?;
        }
        pair.source.close(&pair.source_port(port)).await?;
        if closed && !pair.regions.is_behind() && pair.regions.map.count() == 0 {
            pair.regions.map.set_complete();
        }
        pair.say();
        Ok(())
    }

    /// The end of the target. Returns whether it is durable.
    async fn close_target(&self, port: &Port) -> bool {
        let pair = &self.pair;
        let Some((target, to)) = pair.target_port(port) else { return false };
        let number = pair.regions.begin_flush();
        match target.close(&to).await {
            Ok(()) => {
                pair.regions.flushed(number);
                true
            }
            Err(e) => {
                pair.target_failed("close", &e);
                false
            }
        }
    }

    /// Begins the copy, as [`Disk::begin_service`] does. A second call changes nothing.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn begin_service(&self, engine: &ServiceEngine) -> io::Result<()> {
        self.pair.source.begin_service(engine)?;
        if self.pair.regions.map.only_writes {
            return Ok(());
        }
        let mut background = self.background.lock().unwrap_or_else(PoisonError::into_inner);
        if background.is_none() {
            *background = Some(Background::start(self.pair.clone(), engine.clone())?);
        }
        Ok(())
    }

    /// A part of what the thread of [`begin_service`](Self::begin_service) does, for callers that have no such thread:
    /// copies some regions, or flushes the target; with `settles`, then clears bits that survive a power cut. Each
    /// buffer holds up to [`REGION_BYTES`], a multiple of 4 KiB; `zeros` as for [`Disk::write_zeroes`].
    pub async fn work_once(&self, port: &Port, zeros: Span, buffers: &[Span], settles: bool) {
        copy::once(&self.pair, port, zeros, buffers, settles).await;
    }

    /// Ends the copy between two regions.
    pub(crate) fn end_background(&self) {
        let background = self.background.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(background) = background {
            background.end();
        }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.end_background();
    }
}

impl Pair {
    fn backings(&self) -> Vec<Backing> {
        let mut all = self.source.backings();
        all.extend(self.target.iter().flat_map(Disk::backings));
        all
    }

    /// The part of a port that is the source's.
    fn source_port(&self, port: &Port) -> Port {
        let files = self.source.backings().len();
        Port { files: port.files[..files].into(), ..port.clone() }
    }

    /// The target, with its part of a port.
    fn target_port(&self, port: &Port) -> Option<(&Disk, Port)> {
        let target = self.target.as_ref()?;
        let files = self.source.backings().len();
        Some((target, Port { files: port.files[files..].into(), ..port.clone() }))
    }

    /// Ends a change of both disks.
    fn settle(&self, change: regions::Change<'_>, source: &io::Result<()>, target: io::Result<()>) {
        match target {
            // The source may have a part of a failed write.
            Ok(()) if source.is_ok() => change.done(),
            Ok(()) => {
                drop(change);
                self.say();
            }
            Err(e) => {
                drop(change);
                self.target_failed("write to", &e);
            }
        }
    }

    /// Makes what the target has durable, and clears the bits of that.
    async fn flush_target(&self, port: &Port) {
        let Some((target, to)) = self.target_port(port) else { return };
        let number = self.regions.begin_flush();
        match target.flush(&to).await {
            Ok(()) => self.regions.flushed(number),
            Err(e) => self.target_failed("flush", &e),
        }
    }

    /// The target has failed: the guest goes on without it.
    fn target_failed(&self, what: &str, e: &io::Error) {
        if self.regions.fail() {
            tracing::warn!(
                "cannot {what} the mirror's target: {e}; the guest goes on with its own disk, and the \
                 target {}",
                match self.regions.map.only_writes {
                    true => "gets nothing more",
                    false => "gets what it lacks when it works again",
                }
            );
        }
        self.regions.map.say_why(&format!("cannot {what} the target: {e}"));
        self.say();
    }

    /// Tells the daemon how the mirror is.
    fn say(&self) {
        let left = self.regions.left();
        let state = match (&self.target, self.regions.is_behind(), left) {
            (None, _, _) => MirrorState::NoTarget,
            (_, true, _) => MirrorState::Behind,
            (_, false, 0) => MirrorState::InStep,
            _ => MirrorState::Copying,
        };
        if state == MirrorState::InStep {
            self.regions.map.say_why("");
        }
        self.regions.map.say(state, left);
    }
}

/// Runs two futures side by side, to the end of both.
async fn both<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut first, mut second) = (None, None);
    poll_fn(|cx| {
        if first.is_none()
            && let Poll::Ready(done) = a.as_mut().poll(cx)
        {
            first = Some(done);
        }
        if second.is_none()
            && let Poll::Ready(done) = b.as_mut().poll(cx)
        {
            second = Some(done);
        }
        match (first.take(), second.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (first, second) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}
