//! The one interface to asynchronous storage I/O.
//!
//! An engine belongs to one thread. Operations are queued with [`Engine::push`], handed to the
//! kernel in one batch by [`Engine::submit`], and come back from [`Engine::reap`] in any order.
//! Data operations name memory by [`Span`], a range of the [`Arena`](crate::arena::Arena) that
//! the engine was built with; the engine keeps the arena alive until the kernel is done with it,
//! so no caller can free memory under a running transfer.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::arena::Span;
use crate::computing::Work;

/// The submitter's mark on an operation, found again on its completion; opaque to the engine.
pub type Token = u64;

/// Index of a file in the engine's table, from [`Engine::add_file`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u32);

/// One operation. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read at `offset` into `buf`. Completes with the bytes read; 0 is end of file.
    Read {
        /// Where from.
        file: FileId,
        /// Byte offset in the file.
        offset: u64,
        /// Where to.
        buf: Span,
    },
    /// Write `buf` at `offset`. Completes with the bytes written.
    Write {
        /// Where to.
        file: FileId,
        /// Byte offset in the file.
        offset: u64,
        /// Where from.
        buf: Span,
    },
    /// `fdatasync`: everything written before, and the size it needs, is on the medium.
    Sync {
        /// Which file.
        file: FileId,
    },
    /// Give the range back to the file system; it reads as zeros (`FALLOC_FL_PUNCH_HOLE`).
    PunchHole {
        /// Which file.
        file: FileId,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The range reads as zeros, and stays allocated where it can (`FALLOC_FL_ZERO_RANGE`).
    ZeroRange {
        /// Which file.
        file: FileId,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The range has space of its own, zeros where there was none (`fallocate`).
    Allocate {
        /// Which file.
        file: FileId,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The file reaches to the end of the range then. Otherwise it keeps its size (`KEEP_SIZE`).
        extends: bool,
    },
    /// The file ends here: what was beyond is gone, what was missing reads as zeros
    /// (`ftruncate`). It blocks, so engines run it beside the queue.
    SetLen {
        /// Which file.
        file: FileId,
        /// Bytes.
        len: u64,
    },
    /// A hint to a block device that the range is unused (`BLKDISCARD`). The ioctl blocks, so
    /// engines run it beside the queue.
    Discard {
        /// Which device.
        file: FileId,
        /// First byte, a multiple of the logical block.
        offset: u64,
        /// Bytes, likewise.
        len: u64,
    },
    /// Complete once, when the descriptor becomes readable.
    Readable {
        /// Which descriptor; it must stay open until the operation has completed.
        fd: i32,
    },
    /// Complete once, `after` from the moment of submission.
    Timer {
        /// How long.
        after: Duration,
    },
}

impl Op {
    /// Whether what a [`Op::Readable`] waits for has come, for engines that look themselves. Where
    /// the kernel cannot say, it has.
    pub fn is_readable(&self) -> bool {
        let Op::Readable { fd } = *self else { return false };
        // SAFETY: it is the operation's contract that the descriptor stays open until its end, and
        // a negative one is not borrowed.
        fd < 0 || is_readable(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(true)
    }
}

/// Spans that one vectored operation takes at most.
pub const MAX_VECTORED: usize = 16;

/// The direction of a vectored operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// The end of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token that it was pushed with.
    pub token: Token,
    /// As from the kernel: the byte count (0 where there is none) or `-errno`.
    pub raw: i32,
}

impl Completion {
    /// The byte count, or the error that the kernel gave.
    pub fn result(&self) -> io::Result<u32> {
        u32::try_from(self.raw).map_err(|_| io::Error::from_raw_os_error(-self.raw))
    }
}

/// A batch-wise interface to the kernel's asynchronous I/O; see the module text.
pub trait Engine {
    /// Its name in reports: `io_uring`, `aio`, `sim`.
    fn name(&self) -> &'static str;

    /// Adds a file to the table; it stays open until the engine is dropped and its last
    /// operation has ended, so that a lock held through it covers both.
    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId>;

    /// Keeps this open until the engine has gone and its last operation has ended, also if the
    /// process is killed: a lock on it says that there is I/O yet. An engine whose I/O the end of its
    /// process waits for has nothing to do.
    ///
    /// # Errors
    /// The kernel's.
    fn hold(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let _ = file;
        Ok(())
    }

    /// Lets go of all files, on none of which an operation may be in flight. The next that is added
    /// has index 0 again. A lock that was held through one comes free a moment later, if nobody else
    /// has that open: at the latest when the engine waits again.
    ///
    /// # Errors
    /// The kernel's; the files stay.
    fn clear_files(&mut self) -> io::Result<()>;

    /// Lets the engine hold on to the pages of `region`, so that transfers from and to it need
    /// not look them up; one region at a time. They stay resident until
    /// [`unpin`](Engine::unpin). Nothing else depends on it, and an engine may not care.
    fn pin(&mut self, region: Span) {
        let _ = region;
    }

    /// Ends [`pin`](Engine::pin); no transfer from or to the region may be in flight. `false`:
    /// the pages cannot be let go, and their memory must not be given back to the system.
    fn unpin(&mut self) -> bool {
        true
    }

    /// Queues the reading of `bytes`, at most 8, from `fd`, which must not block and has as many, for the
    /// next submission, before what is queued later; they are dropped. It completes only if it fails, so
    /// that a wait is not ended by it, or with fewer bytes. `false`: this engine saves nothing by it, and
    /// the caller reads for itself.
    fn drain(&mut self, token: Token, fd: i32, bytes: u32) -> bool {
        let _ = (token, fd, bytes);
        false
    }

    /// Queues the writing of four bytes to `fd`, which must not block, for the next submission.
    /// It completes only if it fails. `false`: as for [`drain`](Engine::drain).
    fn put(&mut self, token: Token, fd: i32, word: u32) -> bool {
        let _ = (token, fd, word);
        false
    }

    /// Queues one operation. Never fails: what is wrong with it comes back as its completion.
    /// A full submission queue is submitted first.
    fn push(&mut self, token: Token, op: Op);

    /// Queues one transfer between the file from byte `offset` on and `bufs`, one after the other.
    /// It completes once, with the bytes moved of all of them, and may be short as any transfer.
    ///
    /// # Panics
    /// With more than [`MAX_VECTORED`] spans.
    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    );

    /// Has `work` done beside this thread, on one of a few that the process has for it. It completes
    /// with 0, or with `EIO` if it has panicked. It goes on if the engine is dropped before.
    fn compute(&mut self, token: Token, work: Work);

    /// Calls off the [`Readable`](Op::Readable) and [`Timer`](Op::Timer) operations with this
    /// token, so that a descriptor may be closed, say. Each still completes: with `ECANCELED`, or
    /// as it would have if that was first. Other operations are not touched.
    fn cancel(&mut self, token: Token);

    /// Hands everything queued to the kernel and returns without waiting.
    fn submit(&mut self) -> io::Result<()>;

    /// Like [`submit`](Engine::submit), then waits for at least one completion or the end of
    /// `timeout`, whichever is first. With nothing in flight and no timeout it returns at once.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Moves all completions that are there to the end of `out`.
    fn reap(&mut self, out: &mut Vec<Completion>);

    /// Whether [`reap`](Engine::reap), after a [`submit`](Engine::submit), may find something: a
    /// look at memory, without a system call, that a caller may repeat as often as it likes. What
    /// waits for a descriptor or a time may be seen by `submit` only.
    fn may_reap(&mut self) -> bool;

    /// Operations pushed and not yet reaped.
    fn in_flight(&self) -> usize;
}

/// Whether `fd` has something to read now.
pub(crate) fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut fds, Some(&now))? > 0)
}
