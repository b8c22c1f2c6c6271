//! Operations of this thread, and the requests that they become.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Instant;

use ferrite_io::arena::Span;
use ferrite_io::engine::MAX_VECTORED;
use ferrite_io::reactor::Reply;
use ferrite_nbd::client::{Allocation, Command};

use crate::signal::Signal;

/// What an operation's result goes to.
pub(super) enum End {
    /// A reactor's operation, with the bytes of its result.
    Reply(Reply, u32),
    /// A task that asks for extents.
    Extents(Rc<Extents>),
}

/// The answer to a question for extents.
#[derive(Default)]
pub(super) struct Extents {
    pub(super) answer: RefCell<Option<io::Result<Vec<Allocation>>>>,
    pub(super) came: Signal,
}

/// An operation: one request, or several if the server takes less at once.
pub(super) struct Op {
    end: RefCell<Option<End>>,
    bufs: [Option<Span>; MAX_VECTORED],
    /// Requests that have not ended.
    left: Cell<u32>,
    /// The first error of a request.
    errno: Cell<Option<i32>>,
    pub(super) born: Instant,
}

impl Op {
    pub(super) fn new(end: End, bufs: &[Span], born: Instant) -> Rc<Op> {
        let mut all = [None; MAX_VECTORED];
        all.iter_mut().zip(bufs).for_each(|(slot, buf)| *slot = Some(*buf));
        Rc::new(Op {
            end: RefCell::new(Some(end)),
            bufs: all,
            left: Cell::new(0),
            errno: Cell::new(None),
            born,
        })
    }

    /// The memory from a byte of the operation on: what is left of the span that it is in.
    pub(super) fn memory(&self, at: usize) -> Option<Span> {
        let mut start = 0;
        for buf in self.bufs.iter().flatten() {
            if at < start + buf.len() {
                return Some(buf.slice(at - start, buf.len() - (at - start)));
            }
            start += buf.len();
        }
        None
    }

    /// One more request.
    pub(super) fn add(&self) {
        self.left.set(self.left.get() + 1);
    }

    /// One request has ended, with this error if any.
    pub(super) fn ended(&self, errno: Option<i32>, extents: Vec<Allocation>) {
        if self.errno.get().is_none() {
            self.errno.set(errno);
        }
        self.left.set(self.left.get() - 1);
        if self.left.get() > 0 {
            return;
        }
        match (self.end.take(), self.errno.get()) {
            (Some(End::Reply(reply, bytes)), None) => reply.done(bytes),
            (Some(End::Reply(reply, _)), Some(errno)) => reply.errno(errno),
            (Some(End::Extents(to)), errno) => {
                let answer = match errno {
                    None => Ok(extents),
                    Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                };
                to.answer.replace(Some(answer));
                to.came.raise();
            }
            (None, _) => {}
        }
    }
}

/// A request of an operation.
pub(super) struct Part {
    pub(super) op: Rc<Op>,
    pub(super) command: Command,
    /// Where its data begin in the operation's.
    pub(super) skip: usize,
    /// A server may have it: by this connection, or one before.
    pub(super) sent: bool,
    /// When it was handed to the present connection.
    pub(super) since: Instant,
}

impl Part {
    pub(super) fn ended(self, errno: Option<i32>) {
        self.op.ended(errno, Vec::new());
    }
}
