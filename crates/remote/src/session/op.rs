//! Operations of this thread, and the requests that they become.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use ferrite_io::arena::Span;
use ferrite_io::engine::MAX_VECTORED;
use ferrite_io::reactor::Reply;
use ferrite_io::remote::Allocation;
use ferrite_nbd::client::{Allocation as Extent, Command};

/// The meaning of an operation's reply if it succeeds.
#[derive(Clone, Copy)]
pub(super) enum Success {
    /// So many bytes were moved.
    Bytes(u32),
    /// The extents of the range's beginning, which the server tells.
    Allocation,
}

/// An operation: one request, or several if the server takes less at once.
pub(super) struct Op {
    reply: Cell<Option<Reply>>,
    success: Success,
    bufs: [Option<Span>; MAX_VECTORED],
    /// Requests that have not ended.
    left: Cell<u32>,
    /// The first error of a request.
    errno: Cell<Option<i32>>,
    pub(super) born: Instant,
}

impl Op {
    pub(super) fn new(reply: Reply, success: Success, bufs: &[Span], born: Instant) -> Rc<Op> {
        let mut all = [None; MAX_VECTORED];
        all.iter_mut().zip(bufs).for_each(|(slot, buf)| *slot = Some(*buf));
        Rc::new(Op {
            reply: Cell::new(Some(reply)),
            success,
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

    /// It becomes so many requests.
    pub(super) fn expect(&self, count: u32) {
        self.left.set(count);
    }

    /// It fails without a request.
    pub(super) fn fail(&self, errno: i32) {
        self.expect(1);
        self.ended(Some(errno), &[]);
    }

    /// One request has ended, with this error if any.
    pub(super) fn ended(&self, errno: Option<i32>, extents: &[Extent]) {
        if self.errno.get().is_none() {
            self.errno.set(errno);
        }
        self.left.set(self.left.get() - 1);
        if self.left.get() > 0 {
            return;
        }
        let Some(reply) = self.reply.take() else { return };
        match (self.errno.get(), self.success) {
            (Some(errno), _) => reply.errno(errno),
            (None, Success::Bytes(bytes)) => reply.done(bytes),
            (None, Success::Allocation) => reply.allocation(beginning(extents)),
        }
    }
}

/// The first extents, as far as they are equal: at least one, as the decoder sees to.
fn beginning(extents: &[Extent]) -> Allocation {
    let zeros = |extent: &Extent| extent.zero;
    let first = extents.first().is_some_and(zeros);
    let same = extents.iter().take_while(|extent| zeros(extent) == first);
    Allocation { len: same.map(|extent| extent.len).sum(), zeros: first }
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
        self.op.ended(errno, &[]);
    }
}
