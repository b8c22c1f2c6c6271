//! Copies from disk to disk: several pieces in flight at a time, zeros neither read nor written.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look, look_at_first};
use ferrite_disk_base::{Port, SECTOR_BYTES};
use ferrite_io::arena::Span;
use ferrite_io::shared_lock::SharedLock;

use super::io_context::{BUFFER_BYTES, IoContext, Stop, all};
use super::resume::Resume;
use super::room::Guard;
use super::salvage::Lost;
use super::speed::Speed;
use super::{ImageTools, Progress};

/// Pieces in flight at a time.
const IN_FLIGHT: usize = 16;
/// Bytes of a piece of data, at most.
const PIECE: u64 = BUFFER_BYTES as u64;
/// Bytes of a piece of zeros, at most.
const ZERO_PIECE: u64 = 256 << 20;
/// The unit of zeros that are not written, unless another one is asked for.
const ZERO_UNIT: usize = 64 << 10;
/// After so many bytes they are made durable, so that an interrupted copy can continue there.
const SYNC_EVERY: u64 = 1 << 30;
/// Bytes between two syncs of a copy whose speed is limited.
const SYNC_EVERY_AT_SPEED: u64 = 64 << 20;

/// The part of the source that is copied, and its meaning for the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The whole source, into a disk of zeros: zeros are skipped.
    Fill,
    /// The whole source, over other data: zeros are written.
    Replace,
    /// The data of the open layers, over other data: zeros that a layer has are written as zeros.
    Merge,
}

/// A part of the source.
#[derive(Clone, Copy)]
struct Piece {
    at: u64,
    len: u64,
    zeros: bool,
}

/// The two disks, and the progress.
pub(super) struct Copying<'a> {
    tools: &'a ImageTools<'a>,
    mode: Mode,
    from: (&'a Disk, Port),
    to: (&'a Disk, Port),
    room: Guard,
    /// Held by the worker that writes, when there is little room.
    last_room: SharedLock,
    buffers: Vec<Span>,
    /// Memory that stays zero.
    zeros: Span,
    /// Held by the worker that looks for the next piece.
    looking: SharedLock,
    next: Cell<u64>,
    /// The end of the present run of data: computed once for each run, as some file systems (tmpfs) walk all of it for
    /// the answer.
    data_end: Cell<u64>,
    end: u64,
    /// A unit of this many bytes that is all zeros is not written.
    zero_unit: usize,
    /// The bytes of all pieces.
    copied: Cell<u64>,
    /// The offsets of pieces in flight.
    in_flight: RefCell<BTreeSet<u64>>,
    stop: Stop,
    unsynced: Cell<u64>,
    syncing: Cell<bool>,
    /// A flush has failed: the kernel may have dropped data, and reports that only once. Only the state noted before
    /// can be resumed.
    faulty: Cell<bool>,
    /// The ranges that could not be read, if the copy goes on in spite of that.
    lost: Option<&'a Lost>,
    /// After so many bytes they are made durable, and the progress is noted.
    sync_every: u64,
    /// Bytes a second.
    speed: Option<Speed>,
    /// The state to note, and the path beside which it is noted.
    notes: Option<(RefCell<Resume>, &'a Path)>,
}

impl<'a> Copying<'a> {
    pub(super) fn new(
        tools: &'a ImageTools<'a>,
        context: &mut IoContext,
        mode: Mode,
        from: &'a Disk,
        to: &'a Disk,
    ) -> io::Result<Copying<'a>> {
        let zeros = context.buffer()?;
        Ok(Copying {
            tools,
            mode,
            from: (from, context.port(from)?),
            to: (to, context.port(to)?),
            room: Guard::of(to),
            last_room: SharedLock::new(),
            buffers: (0..IN_FLIGHT).map(|_| context.buffer()).collect::<io::Result<_>>()?,
            zeros,
            looking: SharedLock::new(),
            next: Cell::new(0),
            data_end: Cell::new(0),
            end: from.sectors() * SECTOR_BYTES,
            zero_unit: ZERO_UNIT,
            copied: Cell::new(0),
            in_flight: RefCell::default(),
            stop: Stop::default(),
            unsynced: Cell::new(0),
            syncing: Cell::new(false),
            faulty: Cell::new(false),
            lost: None,
            sync_every: SYNC_EVERY,
            speed: None,
            notes: None,
        })
    }

    /// An I/O context with room for all buffers of a copy.
    pub(super) fn context(tools: &ImageTools<'_>) -> io::Result<IoContext> {
        IoContext::new(tools, IN_FLIGHT + 1)
    }

    /// Leaves out zeros in units of so many bytes.
    pub(super) fn skip_zeros_of(&mut self, unit: Option<u32>) {
        self.zero_unit = unit.map_or(ZERO_UNIT, |bytes| bytes as usize);
    }

    /// The bytes that were copied, zeros too.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied.get()
    }

    /// Takes what cannot be read for zeros, and notes it.
    pub(super) fn tolerate(&mut self, lost: &'a Lost) {
        self.lost = Some(lost);
    }

    /// Keeps to a speed, and notes the progress more often: others use the images meanwhile.
    pub(super) fn keep_to(&mut self, speed: Speed) {
        self.speed = Some(speed);
        self.sync_every = SYNC_EVERY_AT_SPEED;
    }

    /// Resumes from the state, and notes the progress beside `path`.
    pub(super) fn go_on(&mut self, state: Resume, path: &'a Path) {
        self.next.set(state.done_bytes);
        self.notes = Some((RefCell::new(state), path));
    }

    /// Copies everything, and completes the destination. If it is stopped or fails, the copied data are made durable
    /// nevertheless.
    pub(super) async fn run(&self) -> io::Result<()> {
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
        match all(self.buffers.iter().map(worker).collect()).await {
            Ok(()) => self.to.0.close(&self.to.1).await,
            Err(e) => {
                // The first error counts, not its consequences. The lower end of a merge stays in its chain, so it is
                // complete, and gives back what was set aside for more blocks.
                if self.sync().await.is_ok() && self.mode == Mode::Merge {
                    let _ = self.to.0.close(&self.to.1).await;
                }
                Err(e)
            }
        }
    }

    /// A worker: takes pieces as long as there are any.
    async fn work(&self, buf: Span) -> io::Result<()> {
        while let Some(piece) = self.next().await? {
            self.copy(piece, buf).await?;
            // A failed piece stays in the set: nothing after it counts as done.
            self.in_flight.borrow_mut().remove(&piece.at);
            self.unsynced.set(self.unsynced.get() + piece.len);
            if self.unsynced.get() >= self.sync_every && !self.syncing.get() {
                self.sync().await?;
            }
        }
        Ok(())
    }

    /// The next piece that has to be copied.
    async fn next(&self) -> io::Result<Option<Piece>> {
        let _held = self.looking.lock(&self.from.1.io).await?;
        loop {
            let at = self.next.get();
            if at >= self.end || self.stop.is_raised() {
                return Ok(None);
            }
            let progress = Progress { done_bytes: at, total_bytes: self.end };
            let go_on = || (self.tools.progress)(progress);
            if !go_on() || !self.speed.as_ref().is_none_or(|speed| speed.wait(go_on)) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let (what, len) = match self.data_end.get().checked_sub(at) {
                Some(len @ 1..) => (Some(What::Packed), len),
                _ => self.look(at).await?,
            };
            let whole = self.whole_blocks(len);
            let (zeros, most, len) = match what {
                Some(What::Zeros) if self.mode != Mode::Fill && whole > 0 => {
                    (true, ZERO_PIECE, whole)
                }
                Some(What::Zeros) | None if self.mode != Mode::Replace => {
                    self.next.set(at + len);
                    continue;
                }
                Some(What::Data(_) | What::Packed | What::Shared | What::Zeros) | None => {
                    let end = (at + len).next_multiple_of(self.block()).min(self.end);
                    self.data_end.set(end);
                    (false, PIECE, end - at)
                }
            };
            let len = len.min(most - at % most);
            if let (Some(speed), false) = (&self.speed, zeros) {
                speed.spend(len);
            }
            self.copied.set(self.copied.get() + len);
            self.in_flight.borrow_mut().insert(at);
            self.next.set(at + len);
            return Ok(Some(Piece { at, len, zeros }));
        }
    }

    /// The unit of pieces. Only devices have larger blocks than images have sectors.
    fn block(&self) -> u64 {
        match self.mode {
            Mode::Replace => u64::from(self.to.0.block_bytes()),
            Mode::Fill | Mode::Merge => SECTOR_BYTES,
        }
    }

    /// The whole blocks of a range.
    fn whole_blocks(&self, len: u64) -> u64 {
        len / self.block() * self.block()
    }

    /// The kind of the beginning of the rest, and its length; `None`: nothing to copy.
    async fn look(&self, at: u64) -> io::Result<(Option<What>, u64)> {
        let (disk, port) = &self.from;
        match (self.mode, disk) {
            (Mode::Merge, Disk::Image(image)) => {
                let layers = image.layers();
                let (piece, below) = look_at_first(layers, port, at, self.end - at).await?;
                Ok(piece.map_or((None, below), |piece| (Some(piece.what), piece.len)))
            }
            _ => match self.lost {
                Some(lost) => {
                    let (what, len) = lost.look((disk, port), at, self.end - at).await?;
                    Ok((Some(what), len))
                }
                None => look(disk, port, at, self.end - at).await.map(|p| (Some(p.what), p.len)),
            },
        }
    }

    /// The bytes of data that were not copied, at most.
    pub(super) async fn left_bytes(&self) -> io::Result<u64> {
        let failed = self.in_flight.borrow().first().copied();
        let (mut at, mut left) = (failed.unwrap_or(self.next.get()), 0);
        while at < self.end {
            let (what, len) = self.look(at).await?;
            if what.is_some_and(|what| what != What::Zeros) {
                left += len;
            }
            at += len;
        }
        Ok(left)
    }

    async fn copy(&self, piece: Piece, buf: Span) -> io::Result<()> {
        let (to, to_port) = &self.to;
        if piece.zeros {
            return to.write_zeroes(to_port, piece.at, piece.len, self.zeros).await;
        }
        let (from, from_port) = &self.from;
        let len = piece.len.next_multiple_of(self.block()) as usize;
        if len as u64 > piece.len {
            // The disk ends within a block of the device, which keeps what it has behind that, as with qemu-img.
            let last = len - self.block() as usize;
            let block = buf.slice(last, len - last);
            to.read(to_port, piece.at + last as u64, block).await?;
        }
        let read = buf.slice(0, piece.len as usize);
        match self.lost {
            Some(lost) => lost.read((from, from_port), piece.at, read).await?,
            None => from.read(from_port, piece.at, read).await?,
        }
        let buf = buf.slice(0, len);
        let _alone = match self.room.is_low(to, IN_FLIGHT as u64 * PIECE) {
            true => Some(self.last_room.lock(&to_port.io).await?),
            false => None,
        };
        self.room.check(to, piece.len)?;
        if self.mode != Mode::Fill {
            return to.write(to_port, piece.at, buf).await;
        }
        for (start, len) in self.runs(buf) {
            to.write(to_port, piece.at + start as u64, buf.slice(start, len)).await?;
        }
        Ok(())
    }

    /// The parts of a buffer that are not all zeros.
    fn runs(&self, buf: Span) -> impl Iterator<Item = (usize, usize)> {
        let memory = self.from.1.memory();
        let zero_unit = self.zero_unit;
        let unit = move |at: usize| zero_unit.min(buf.len() - at);
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

    /// Makes the copied data durable, and notes the progress. The order: the complete pieces are found, then synced,
    /// then noted.
    async fn sync(&self) -> io::Result<()> {
        if self.faulty.get() {
            return Err(io::Error::other("an earlier flush has failed"));
        }
        self.syncing.set(true);
        self.unsynced.set(0);
        let first = self.in_flight.borrow().first().copied();
        let done_bytes = first.unwrap_or(self.next.get());
        let synced = self.to.0.flush(&self.to.1).await;
        self.syncing.set(false);
        self.faulty.set(self.faulty.get() || synced.is_err());
        synced?;
        let Some((state, path)) = &self.notes else { return Ok(()) };
        let mut state = state.borrow_mut();
        state.done_bytes = done_bytes;
        state.save(path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use ferrite_disk_base::{Format, ImageName};
    use ferrite_simio::{Fault, On, SimWorld};

    use super::*;

    /// The kernel reports lost data once, and a later flush succeeds.
    #[test]
    fn nothing_is_noted_as_durable_after_a_flush_that_failed() {
        let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let [from, to] = ["from", "to"].map(|name| -> PathBuf {
            let path = dir.path().join(name);
            fs::write(&path, vec![1; 1 << 20]).unwrap();
            path
        });
        let world = SimWorld::new(1);
        let tools = ImageTools {
            fixed_size: false,
            parents: ferrite_disk_base::Parents::default(),
            directory: &world.directories(dir.path()),
            unlocked: false,
            engine: &|arena| Ok(world.engine(arena)),
            state_dir: None,
            progress: &|_| false,
        };
        let open = |path: &PathBuf, read_only| {
            tools.open(&ImageName { format: Format::Raw, path: path.clone() }, read_only).unwrap()
        };
        let (source, target) = (open(&from, true), open(&to, false));
        let mut context = Copying::context(&tools).unwrap();
        let mut copying = Copying::new(&tools, &mut context, Mode::Fill, &source, &target).unwrap();
        let state = Resume {
            sources: Vec::new(),
            journal: false,
            format: "raw".into(),
            virtual_bytes: 1 << 20,
            done_bytes: 4096,
        };
        copying.go_on(state, &to);
        let on = On::Sync;
        let fault = Fault { on, range: 0..u64::MAX, per_mille: 1000, errno: 5, times: 1 };
        world.set_faults(vec![fault]);
        context.run(copying.sync()).unwrap_err();
        // The stopped copy makes its data durable.
        context.run(copying.run()).unwrap_err();
        assert!(Resume::load(&to).is_none());
    }
}
