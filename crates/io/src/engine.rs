//! The one interface to asynchronous storage I/O.
//!
//! An engine belongs to one thread. Operations are queued with [`Engine::push`], handed to the
//! kernel in one batch by [`Engine::submit`], and come back from [`Engine::reap`] in any order.
//! Data operations name memory by [`Span`], a range of the [`Arena`](crate::arena::Arena) that
//! the engine was built with. The engine keeps the arena alive until the kernel is done with it,
//! so no caller can free memory under a running transfer.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::arena::Span;
use crate::computing::Work;

/// The submitter's mark on an operation, found again on its completion; opaque to the engine.
pub type Token = u64;

/// Index of a file in the engine's table, from [`Engine::add_file`]; or of a remote, from
/// [`Reactor::add_remote`](crate::reactor::Reactor::add_remote).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u32);

/// Says that the rest of a [`FileId`] is an index of the reactor's remotes. It is not the highest bit, so
/// that twice the number fits in 32 bits.
const REMOTE_BIT: u32 = 1 << 30;

impl FileId {
    /// That of a remote.
    pub(crate) fn of_remote(index: u32) -> FileId {
        FileId(index | REMOTE_BIT)
    }

    /// The index of the remote. `None`: it is a file of the engine.
    pub(crate) fn remote(self) -> Option<usize> {
        (self.0 & REMOTE_BIT != 0).then_some((self.0 & !REMOTE_BIT) as usize)
    }
}

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
    /// The file ends here: bytes beyond are gone, bytes that were missing read as zeros
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
    /// Complete once, when the descriptor takes bytes, or is connected, or in error.
    Writable {
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
    /// The file that it is for. `None`: it waits for a descriptor or a time.
    pub fn file(&self) -> Option<FileId> {
        match *self {
            Op::Read { file, .. }
            | Op::Write { file, .. }
            | Op::Sync { file }
            | Op::PunchHole { file, .. }
            | Op::ZeroRange { file, .. }
            | Op::Allocate { file, .. }
            | Op::SetLen { file, .. }
            | Op::Discard { file, .. } => Some(file),
            Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => None,
        }
    }

    /// Whether what an [`Op::Readable`] or [`Op::Writable`] waits for has come, for engines that look
    /// themselves. Where the kernel cannot say, it has.
    pub fn is_ready(&self) -> bool {
        let (fd, flags) = match *self {
            Op::Readable { fd } => (fd, PollFlags::IN),
            Op::Writable { fd } => (fd, PollFlags::OUT),
            _ => return false,
        };
        // SAFETY: it is the operation's contract that the descriptor stays open until its end, and
        // a negative one is not borrowed.
        fd < 0 || is_ready(unsafe { BorrowedFd::borrow_raw(fd) }, flags).unwrap_or(true)
    }
}

/// Spans that one vectored operation takes at most.
pub const MAX_VECTORED: usize = 16;

/// The direction of a vectored operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// From the file or socket to memory.
    Read,
    /// From memory to the file or socket.
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
    /// has index 0 again. A lock that was held through one comes free a moment later, if it is not open
    /// elsewhere: at the latest when the engine waits again.
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

    /// Queues one operation. Never fails: an error comes back as its completion.
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

    /// Queues the sending of `bufs`, one after the other, on a connected stream socket
    /// ([`Transfer::Write`]), or the receiving into them. It waits until the socket takes or has a byte,
    /// and completes with the bytes moved. These may be fewer than asked for; 0 of a receive is the end of
    /// the stream. A peer that is gone is an error (`EPIPE`, `ECONNRESET`), and no signal.
    ///
    /// Two sends at a time on one socket, or two receives, have no order. `shutdown` of the socket ends
    /// both, and so does [`cancel`](Engine::cancel). The engine keeps the socket open until the operation
    /// has ended. Sockets that do not block (`O_NONBLOCK`) may complete with `EAGAIN` instead of waiting.
    ///
    /// # Panics
    /// With more than [`MAX_VECTORED`] spans.
    fn push_stream(
        &mut self,
        token: Token,
        transfer: Transfer,
        socket: &Arc<OwnedFd>,
        bufs: &[Span],
    );

    /// Has `work` done beside this thread, on one of a few that the process has for it. It completes
    /// with 0, or with `EIO` if it has panicked. It goes on if the engine is dropped before.
    fn compute(&mut self, token: Token, work: Work);

    /// Calls off the [`Readable`](Op::Readable), [`Writable`](Op::Writable) and [`Timer`](Op::Timer)
    /// operations with this token, and those of [`push_stream`](Engine::push_stream), so that a descriptor
    /// may be closed, say. Each still completes: with `ECANCELED`, or as it would have if that was first.
    /// The memory of a stream is in use until then. Other operations are not touched.
    fn cancel(&mut self, token: Token);

    /// Hands everything queued to the kernel and returns without waiting.
    fn submit(&mut self) -> io::Result<()>;

    /// Like [`submit`](Engine::submit), then waits for at least one completion or the end of
    /// `timeout`, whichever is first. With nothing in flight and no timeout it returns at once.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Moves all completions that are there to the end of `out`.
    fn reap(&mut self, out: &mut Vec<Completion>);

    /// Whether [`reap`](Engine::reap), after a [`submit`](Engine::submit), may find something: a
    /// look at memory, without a system call, that a caller may repeat as often as it likes. Waits
    /// for a descriptor or a time may be seen by `submit` only.
    fn may_reap(&mut self) -> bool;

    /// Operations pushed and not yet reaped.
    fn in_flight(&self) -> usize;
}

/// Whether `fd` has something to read now.
#[cfg(test)]
pub(crate) fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    is_ready(fd, PollFlags::IN)
}

fn is_ready(fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, flags)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut fds, Some(&now))? > 0)
}
