//! The engine on io_uring, Linux 5.11 and newer.
//!
//! * The ring is set up disabled and enabled by the first call that enters the kernel, so an
//!   engine may be built on one thread and used on another. From then on it belongs to that
//!   thread (`SINGLE_ISSUER`), which must also drop it.
//! * A region of the arena can be registered as a fixed buffer ([`Engine::pin`]), and files are
//!   registered in a table: a transfer then looks up neither pages nor descriptors. Where the
//!   kernel or the memlock limit does not allow one of them, the engine works without; see
//!   [`UringFeatures`].
//! * Data that the kernel is given to read (the time of a timer) are in memory of the engine; it
//!   reads them while it takes the entry from the queue (`IORING_FEAT_SUBMIT_STABLE`).
//! * Dropping the engine performs what was submitted, calls off what waits, and returns when the
//!   kernel is done with the arena and the files.

mod enter;
mod entry;
mod passthrough;
mod pin;
mod polled;
mod setup;
mod table;
#[cfg(test)]
mod tests;
mod watch;
mod words;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use io_uring::types::{Fd, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::arena::{Arena, Span};
use crate::computing::Work;
use crate::engine::{Completion, Engine, FileId, MAX_VECTORED, Op, Token, Transfer};
use crate::offload::{Call, Offload};
use entry::{Messages, Vectors};
pub use passthrough::NvmeUring;
pub use polled::PolledUring;
use setup::Step;
pub(crate) use setup::try_out;
pub use setup::{SetupError, UringFeatures, probe};
use table::{Kind, Table};
use words::{DRAIN, PUT, Words};

/// Places in the table of fixed files; further files are used by descriptor.
const FIXED_FILES: u32 = 64;
/// And one more, for the file that is held.
const PLACES: u32 = FIXED_FILES + 1;

/// `user_data` of entries that are not in the table: the watch on the helper thread's eventfd,
const WATCH: u64 = u64::MAX;
/// cancellations,
const CANCEL: u64 = u64::MAX - 1;
/// and the watch on another ring.
const RING: u64 = u64::MAX - 2;

/// The longest time that is asked of the kernel, in seconds: far below where it would overflow.
const MAX_TIME_S: u64 = 1 << 32;

/// Arenas that the kernel may still use although their engine is gone; see `drop`.
static KEPT: Mutex<Vec<Arc<Arena>>> = Mutex::new(Vec::new());

/// An entry of the submission queue before it is one.
#[derive(Debug)]
enum Sqe {
    Op { index: u32, op: Op },
    Vectored { index: u32, transfer: Transfer, file: FileId, offset: u64, bufs: Box<[Span]> },
    Stream { index: u32, transfer: Transfer, bufs: Box<[Span]> },
    Cancel { target: u64 },
    Watch,
    Ring { fd: RawFd },
}

struct File {
    fd: Arc<OwnedFd>,
    fixed: bool,
}

/// The engine on io_uring; see the module text.
pub struct Uring {
    ring: IoUring,
    features: UringFeatures,
    enabled: bool,
    /// Completions are found only by entering the kernel (`IORING_SETUP_IOPOLL`); it then takes
    /// reads and writes of polled devices, and nothing else.
    polled: bool,
    files: Vec<File>,
    table: Table,
    /// Entries given to the ring (the kernel may not have looked yet) without a completion.
    pending: usize,
    /// Entries given to the ring, ever; wraps.
    queued: u32,
    /// The times of timers, by place in the submission queue: a place is used again only after
    /// the kernel has taken the entry, and with it has read the time.
    times: Box<[Timespec]>,
    words: Words,
    /// The memory of vectored transfers, by place in the submission queue likewise.
    vectors: Vectors,
    /// And the message headers of what is sent.
    messages: Messages,
    /// Entries that did not fit into the submission queue while the kernel took nothing.
    spill: VecDeque<Sqe>,
    /// Completions that were taken from the ring to make room, or never got there.
    backlog: Vec<Completion>,
    /// The memory that is registered as fixed buffer 0.
    pinned: Option<Span>,
    /// Started by the first operation that needs it.
    offload: Option<Offload>,
    /// Whether the ring watches the helper thread's eventfd.
    watching: bool,
    /// Whether it watches another ring.
    watching_ring: bool,
    /// Last, so that it is unmapped after the ring is gone.
    arena: Arc<Arena>,
}

fn timespec(t: Duration) -> Timespec {
    Timespec::new().sec(t.as_secs().min(MAX_TIME_S)).nsec(t.subsec_nanos())
}

fn errno_of(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

impl Uring {
    /// A ring of `entries` (a power of two, or it is rounded up; the kernel's maximum is kept)
    /// whose operations use the memory of `arena`. More operations than that may be in flight.
    ///
    /// # Errors
    /// A [`SetupError`] inside, if this kernel has no usable io_uring.
    pub fn new(arena: Arc<Arena>, entries: u32) -> io::Result<Uring> {
        Self::with_tables(arena, entries, false)
    }

    fn with_tables(arena: Arc<Arena>, entries: u32, polled: bool) -> io::Result<Uring> {
        let mut uring = Self::without_tables(arena, &setup::STEPS, entries, polled)?;
        uring.register_files();
        Ok(uring)
    }

    /// One that uses files by descriptor and memory by address.
    fn without_tables(
        arena: Arc<Arena>,
        steps: &[Step],
        entries: u32,
        polled: bool,
    ) -> io::Result<Uring> {
        let (ring, features) = setup::build(steps, entries, polled)?;
        let sq_entries = features.sq_entries;
        let times = vec![Timespec::new(); sq_entries as usize].into();
        Ok(Uring {
            ring,
            features,
            enabled: false,
            polled,
            files: Vec::new(),
            table: Table::default(),
            pending: 0,
            queued: 0,
            times,
            words: Words::new(sq_entries),
            vectors: Vectors::default(),
            messages: Messages::default(),
            spill: VecDeque::new(),
            backlog: Vec::new(),
            pinned: None,
            offload: None,
            watching: false,
            watching_ring: false,
            arena,
        })
    }

    fn register_files(&mut self) {
        let submitter = self.ring.submitter();
        let registered = match submitter.register_files_sparse(PLACES) {
            Ok(()) => true,
            // Before Linux 5.19 an empty place is a descriptor of -1.
            Err(_) => submitter.register_files(&[-1; PLACES as usize]).is_ok(),
        };
        self.features.fixed_files = if registered { FIXED_FILES } else { 0 };
    }

    /// The features that the kernel gave this ring.
    pub fn features(&self) -> UringFeatures {
        self.features.clone()
    }

    fn is_full(&mut self) -> bool {
        self.ring.submission().is_full()
    }

    /// Makes room for one entry in the submission queue, if nothing has spilled over that is to
    /// go first. Whether there is.
    fn has_room(&mut self) -> bool {
        if self.spill.is_empty() && !self.is_full() {
            return true;
        }
        if let Err(e) = self.submit() {
            // The caller's own submit will fail the same way.
            tracing::debug!("submitting a full queue: {e}");
        }
        self.spill.is_empty() && !self.is_full()
    }

    /// Puts an entry into the submission queue, after those that spilled over.
    fn queue(&mut self, sqe: Sqe) {
        if self.has_room() {
            self.queue_now(sqe);
        } else {
            self.spill.push_back(sqe);
        }
    }

    /// Puts an entry into the submission queue, which has room.
    fn queue_now(&mut self, sqe: Sqe) {
        let entry = match sqe {
            Sqe::Op { index, op } => match self.entry(op) {
                Ok(entry) => entry.user_data(u64::from(index)),
                Err(errno) => return self.fail(u64::from(index), errno),
            },
            Sqe::Vectored { index, transfer, file, offset, bufs } => {
                return self.put_vectored(index, transfer, file, offset, &bufs);
            }
            Sqe::Stream { index, transfer, bufs } => {
                return self.put_stream(index, transfer, &bufs);
            }
            Sqe::Cancel { target } => opcode::AsyncCancel::new(target).build().user_data(CANCEL),
            Sqe::Ring { fd } => {
                opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build().user_data(RING)
            }
            Sqe::Watch => match &self.offload {
                Some(offload) => opcode::PollAdd::new(Fd(offload.wake_fd()), libc::POLLIN as u32)
                    .build()
                    .user_data(WATCH),
                None => return,
            },
        };
        self.hand_over(&entry);
    }

    /// Puts a vectored transfer into the submission queue, which has room.
    fn put_vectored(
        &mut self,
        index: u32,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        match self.vectored(transfer, file, offset, bufs) {
            Ok(entry) => self.hand_over(&entry.user_data(u64::from(index))),
            Err(errno) => self.fail(u64::from(index), errno),
        }
    }

    /// Puts a transfer of a socket into the submission queue, which has room.
    fn put_stream(&mut self, index: u32, transfer: Transfer, bufs: &[Span]) {
        match self.stream(index, transfer, bufs) {
            Ok(entry) => self.hand_over(&entry.user_data(u64::from(index))),
            Err(errno) => self.fail(u64::from(index), errno),
        }
    }

    /// The place in the submission queue of the next entry.
    fn place(&self) -> usize {
        self.queued as usize % self.features.sq_entries as usize
    }

    /// The last step into the submission queue, which has room.
    fn hand_over(&mut self, entry: &squeue::Entry) {
        // SAFETY: data is in the arena, which `drop` keeps until the operation has ended; times,
        // vectors and message headers are in self.times, self.vectors and self.messages, see there;
        // nothing else is pointed to.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "an entry was put into a full submission queue");
        self.queued = self.queued.wrapping_add(1);
        self.pending += 1;
    }

    /// Completes an operation that never gets to the kernel.
    fn fail(&mut self, index: u64, errno: i32) {
        if let Some((token, _)) = self.table.remove(index) {
            self.backlog.push(Completion { token, raw: -errno });
        }
    }

    /// Moves what spilled over into the submission queue, as far as it fits.
    fn unspill(&mut self) {
        while !self.spill.is_empty() && !self.is_full() {
            if let Some(sqe) = self.spill.pop_front() {
                self.queue_now(sqe);
            }
        }
    }

    /// Whether completions wait in the ring.
    fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Whether a reap would find something.
    fn has_backlog_or_completions(&mut self) -> bool {
        !self.backlog.is_empty() || self.has_completions()
    }

    /// Takes the ring's completions. Returns whether there was any, of whatever kind.
    fn collect(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut watch_ended = false;
        let mut seen = 0;
        for cqe in self.ring.completion() {
            seen += 1;
            match cqe.user_data() {
                CANCEL => {}
                WATCH => watch_ended = true,
                RING => self.watching_ring = false,
                // Not waited for, so not among the pending ones.
                which @ (PUT | DRAIN) => {
                    seen -= 1;
                    out.extend(self.words.failed(which, cqe.result()));
                }
                index => match self.table.remove(index) {
                    Some((token, kind)) => {
                        out.push(Completion { token, raw: meaning(kind, cqe.result()) });
                    }
                    None => tracing::error!(index, "the kernel completed what was not asked for"),
                },
            }
        }
        self.pending -= seen;
        if watch_ended {
            self.take_offloaded(out);
        }
        seen > 0
    }

    /// Makes room in the completion queue. Returns whether there was something in it.
    fn make_room(&mut self) -> bool {
        let mut backlog = std::mem::take(&mut self.backlog);
        let any = self.collect(&mut backlog);
        // `collect` itself may have put something there.
        backlog.append(&mut self.backlog);
        self.backlog = backlog;
        any
    }

    /// Calls off what waits and sees everything else to its end.
    fn finish(&mut self) -> io::Result<()> {
        let waits: Vec<u64> = self.table.waits().map(|(index, _)| index).collect();
        for target in waits {
            self.queue(Sqe::Cancel { target });
        }
        if self.watching_ring {
            self.queue(Sqe::Cancel { target: RING });
        }
        if self.words.may_drain() {
            self.queue(Sqe::Cancel { target: DRAIN });
        }
        // The watch on the helper thread ends with its last call.
        while self.pending > 0 || !self.spill.is_empty() {
            if self.has_completions() {
                self.make_room();
            } else {
                self.backlog.clear();
                self.wait_until(None)?;
            }
        }
        Ok(())
    }
}

/// The meaning of the kernel's result for callers: waiting has no count, and a time that is over is
/// no error.
fn meaning(kind: Kind, result: i32) -> i32 {
    match kind {
        Kind::Poll if result > 0 => 0,
        Kind::Timer if result == -libc::ETIME => 0,
        _ => result,
    }
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    /// Registers the file in the ring's table where there is room. The ring then holds the open
    /// file itself, and with it a lock taken by `flock`, until the ring is gone. The kernel keeps
    /// a ring until its last operation has ended: of a process that was killed, too. So a process
    /// that gets the lock knows that nothing of an earlier process is still being written. The
    /// price: a lock comes free a moment after its process or engine has ended, so a process that
    /// wants it tries for a while before giving up.
    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        let id = u32::try_from(self.files.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let fixed = id < self.features.fixed_files
            && match self.ring.submitter().register_files_update(id, &[file.as_raw_fd()]) {
                Ok(_) => true,
                Err(e) => {
                    tracing::debug!("file {id} is not registered with the ring: {e}");
                    false
                }
            };
        self.files.push(File { fd: file, fixed });
        Ok(FileId(id))
    }

    fn hold(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        // The ring lets go of what is registered after its last operation.
        self.ring.submitter().register_files_update(FIXED_FILES, &[file.as_raw_fd()])?;
        Ok(())
    }

    fn clear_files(&mut self) -> io::Result<()> {
        // One in the middle may have been refused: the places behind it are the ring's all the same.
        if let Some(last) = self.files.iter().rposition(|file| file.fixed) {
            self.ring.submitter().register_files_update(0, &vec![-1; last + 1])?;
        }
        self.files.clear();
        Ok(())
    }

    fn pin(&mut self, region: Span) {
        self.pin_region(region);
    }

    fn drain(&mut self, token: Token, fd: i32, bytes: u32) -> bool {
        self.drain_word(token, fd, bytes)
    }

    fn put(&mut self, token: Token, fd: i32, word: u32) -> bool {
        self.put_word(token, fd, word)
    }

    fn unpin(&mut self) -> bool {
        self.unpin_region()
    }

    fn push(&mut self, token: Token, op: Op) {
        let kind = match op {
            Op::Discard { .. } | Op::SetLen { .. } => Kind::Offloaded,
            Op::Readable { .. } | Op::Writable { .. } => Kind::Poll,
            Op::Timer { .. } => Kind::Timer,
            _ => Kind::Data,
        };
        let index = self.table.insert(token, kind);
        match op {
            Op::Discard { file, offset, len } => {
                self.offload(index, file, Call::Discard { offset, len });
            }
            Op::SetLen { file, len } => self.offload(index, file, Call::SetLen { len }),
            op => self.queue(Sqe::Op { index, op }),
        }
    }

    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        assert!(bufs.len() <= MAX_VECTORED, "{} spans in one operation", bufs.len());
        let index = self.table.insert(token, Kind::Data);
        if self.has_room() {
            self.put_vectored(index, transfer, file, offset, bufs);
        } else {
            let bufs = bufs.into();
            self.spill.push_back(Sqe::Vectored { index, transfer, file, offset, bufs });
        }
    }

    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    ) {
        assert!(bufs.len() <= MAX_VECTORED, "{} spans in one operation", bufs.len());
        if bufs.is_empty() {
            return self.backlog.push(Completion { token, raw: 0 });
        }
        let index = self.table.insert_stream(token, socket.clone());
        if self.has_room() {
            self.put_stream(index, transfer, bufs);
        } else {
            self.spill.push_back(Sqe::Stream { index, transfer, bufs: bufs.into() });
        }
    }

    fn compute(&mut self, token: Token, work: Work) {
        self.compute_beside(token, work);
    }

    fn cancel(&mut self, token: Token) {
        let waits = self.table.waits();
        let targets: Vec<u64> = waits.filter(|(_, t)| *t == token).map(|(i, _)| i).collect();
        for target in targets {
            self.queue(Sqe::Cancel { target });
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.submit_all()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.wait_for(timeout)
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.backlog);
        self.collect(out);
    }

    fn may_reap(&mut self) -> bool {
        if !self.backlog.is_empty() || self.has_completions() {
            return true;
        }
        if self.polled && self.pending > 0 {
            return true;
        }
        let sq = self.ring.submission();
        sq.taskrun() || sq.cq_overflow()
    }

    fn in_flight(&self) -> usize {
        self.table.len() + self.backlog.len()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // Before the ring was enabled, the kernel has taken nothing.
        if self.enabled
            && let Err(e) = self.finish()
        {
            // Not on its thread, for one. The kernel may go on using the memory, so it stays.
            tracing::error!("io_uring dropped with operations in flight, memory is kept: {e}");
            self.words.abandon();
            KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(self.arena.clone());
            return;
        }
        // Waits for the helper thread: if the ring is disabled, its results were not waited for.
        self.offload = None;
        // A ring is taken down in the background after it was closed, which can take long. Done
        // here, the memory is unpinned and the files are let go when this returns, but for a file
        // that a worker thread of the kernel has not quite let go of after its last operation.
        let submitter = self.ring.submitter();
        let _ = submitter.unregister_buffers();
        let _ = submitter.unregister_files();
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uring")
            .field("features", &self.features)
            .field("in_flight", &self.in_flight())
            .finish()
    }
}
