//! Data that are behind a connection instead of in a file.
//!
//! A [`Remote`] is what one reactor has of them: a session, say, with its own tasks on that reactor. It is
//! registered beside files ([`Reactor::add_remote`]), and operations with its [`FileId`] go to it, those
//! of the hot path and those of tasks. Each gets a [`Reply`], by which the remote completes it with the
//! token that it was pushed with. So the code above need not know where data are.
//!
//! [`Reactor::add_remote`]: crate::reactor::Reactor::add_remote
//! [`FileId`]: crate::engine::FileId

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::Span;
use crate::engine::{MAX_VECTORED, Op, Transfer};
use crate::reactor::{Io, Reply};
use crate::scratch::Scratch;

/// Where data are: what a reactor registers as one of its files.
#[derive(Clone, Debug)]
pub enum Backing {
    /// In an open file or device.
    File(Arc<OwnedFd>),
    /// Behind a connection.
    Remote(Arc<dyn RemoteFactory>),
}

/// The part of a remote that all reactors have in common. It makes the part of each.
pub trait RemoteFactory: fmt::Debug + Send + Sync {
    /// The part that a reactor's operations go to. This does not wait: operations that come before there is a
    /// connection wait for that in the remote. `io` is of that reactor, for tasks and their operations.
    /// `scratch` is memory of its arena, shared with the tasks of the disk. A piece must be held until the
    /// operations on it have ended.
    ///
    /// # Errors
    /// Out of a resource. The reactor cannot use the disk.
    fn connect(&self, io: Io, scratch: Scratch) -> io::Result<Rc<dyn Remote>>;
}

/// A request to a remote. Offsets and lengths are bytes. Spans are of the reactor's arena, at least one and
/// at most [`MAX_VECTORED`]. They belong to the operation until its reply, and no code makes references to
/// their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Read from `offset` on into `bufs`, one after the other. The reply is the bytes read; fewer are
    /// allowed, 0 is the end of the data.
    Read {
        /// Byte offset.
        offset: u64,
        /// Where to.
        bufs: &'a [Span],
    },
    /// Write `bufs`, one after the other, from `offset` on. The reply is the bytes written; fewer are allowed.
    Write {
        /// Byte offset.
        offset: u64,
        /// Where from.
        bufs: &'a [Span],
    },
    /// All writes with a reply so far, by this remote or another of its factory, are durable. The reply is 0.
    Sync,
    /// The range reads as zeros, and need not keep its space. The reply is 0.
    PunchHole {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The range reads as zeros, and keeps its space where it can. The reply is 0.
    ZeroRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The range is not needed any more. The reply is 0.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Say whether the beginning of the range has data, by [`Reply::allocation`]. `EOPNOTSUPP`: that is
    /// not known.
    Allocation {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// The beginning of a range of a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes, more than 0.
    pub len: u64,
    /// It reads as zeros, and takes no space.
    pub zeros: bool,
}

/// The most bytes that one allocation speaks of.
const MAX_ALLOCATION: u64 = (1 << 30) - 1;

impl Allocation {
    /// As the number of a completion.
    pub(crate) fn encode(self) -> i32 {
        (self.len.min(MAX_ALLOCATION) as i32) << 1 | i32::from(self.zeros)
    }

    /// From such a number. `None`: it is no answer.
    pub(crate) fn decode(number: u32) -> Option<Allocation> {
        let len = u64::from(number >> 1);
        (len > 0).then_some(Allocation { len, zeros: number & 1 != 0 })
    }
}

/// One reactor's part of a remote. Its work is tasks on that reactor, which end soon after
/// [`end`](Remote::end), or when the reactor drops them.
pub trait Remote {
    /// Takes a request. It never waits. The reply may come at once or at any later time, but it comes: a
    /// request has a deadline of the remote's own. A reply with an error says that no operation uses the
    /// request's memory any more.
    ///
    /// A `Reply` that is dropped is one with `EIO`. Requests in flight together have no order.
    fn begin(&self, request: Request<'_>, reply: Reply);

    /// The reactor lets go of it: closes the connection, and has the tasks end. Nothing is in flight, unless
    /// the reactor itself is dropped: then no task waits for replies. The other side may still execute what
    /// was sent. Where that matters, the factory takes account of it.
    fn end(&self);
}

/// Hands an operation over, or completes it if a remote has no such thing.
pub(crate) fn begin(remote: &dyn Remote, op: Op, reply: Reply) {
    match op {
        Op::Read { offset, buf, .. } => {
            begin_transfer(remote, Transfer::Read, offset, &[buf], reply)
        }
        Op::Write { offset, buf, .. } => {
            begin_transfer(remote, Transfer::Write, offset, &[buf], reply);
        }
        Op::Sync { .. } => remote.begin(Request::Sync, reply),
        Op::PunchHole { offset, len, .. } => {
            remote.begin(Request::PunchHole { offset, len }, reply)
        }
        Op::ZeroRange { offset, len, .. } => {
            remote.begin(Request::ZeroRange { offset, len }, reply)
        }
        Op::Discard { offset, len, .. } => remote.begin(Request::Discard { offset, len }, reply),
        Op::Allocate { .. } | Op::SetLen { .. } => reply.errno(libc::EOPNOTSUPP),
        Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => reply.errno(libc::EINVAL),
    }
}

/// Hands a transfer over.
pub(crate) fn begin_transfer(
    remote: &dyn Remote,
    transfer: Transfer,
    offset: u64,
    bufs: &[Span],
    reply: Reply,
) {
    assert!(bufs.len() <= MAX_VECTORED, "{} spans in one operation", bufs.len());
    match transfer {
        _ if bufs.is_empty() => reply.done(0),
        Transfer::Read => remote.begin(Request::Read { offset, bufs }, reply),
        Transfer::Write => remote.begin(Request::Write { offset, bufs }, reply),
    }
}
