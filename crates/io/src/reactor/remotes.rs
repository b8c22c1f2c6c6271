//! The remotes of a reactor, and the replies to what is asked of them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::{Shared, TASK_BIT};
use crate::arena::Span;
use crate::engine::{Completion, FileId, Op, Token, Transfer};
use crate::remote::{self, Allocation, Remote, Request};

/// The remotes, and what is in flight on them.
#[derive(Default)]
pub(super) struct Remotes {
    /// Whether there are some: a look for operations on files.
    pub(super) any: Cell<bool>,
    list: RefCell<Vec<Rc<dyn Remote>>>,
    /// Requests without a reply.
    pub(super) in_flight: Cell<usize>,
    /// Replies are ignored from now on.
    closed: Cell<bool>,
}

impl Remotes {
    pub(super) fn add(&self, remote: Rc<dyn Remote>) -> FileId {
        let mut list = self.list.borrow_mut();
        list.push(remote);
        self.any.set(true);
        // A list of a disk's media: memory ends before 30 bits do.
        FileId::of_remote((list.len() - 1) as u32)
    }

    fn get(&self, file: FileId) -> Option<Rc<dyn Remote>> {
        self.list.borrow().get(file.remote()?).cloned()
    }

    /// Lets go of all, and ignores replies from now on: a request in flight has an unknown end, and a task that
    /// is dropped must not take it for a failure.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.clear();
    }

    /// Lets go of all.
    pub(super) fn clear(&self) {
        self.any.set(false);
        // One may complete requests while it ends, or is dropped.
        let list = self.list.take();
        list.iter().for_each(|remote| remote.end());
    }
}

/// Where a request's reply goes. One that is dropped without a reply is one with `EIO`.
#[must_use = "a request that is not replied to has failed"]
pub struct Reply {
    shared: Rc<Shared>,
    token: Token,
    /// Of the reply, as in a completion.
    raw: i32,
}

impl Reply {
    /// The request is done, with so many bytes moved, or 0 where it moves none.
    pub fn done(mut self, bytes: u32) {
        self.raw = i32::try_from(bytes).unwrap_or(i32::MAX);
    }

    /// The answer to [`Request::Allocation`](crate::remote::Request::Allocation).
    pub fn allocation(mut self, allocation: Allocation) {
        self.raw = allocation.encode();
    }

    /// The request has failed, with an error of `errno.h`.
    pub fn errno(mut self, errno: i32) {
        self.raw = -errno.abs();
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.shared.replied(Completion { token: self.token, raw: self.raw });
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("token", &self.token).finish()
    }
}

impl Shared {
    /// Begins what is for a remote.
    #[cold]
    pub(super) fn ask(self: &Rc<Self>, token: Token, op: Op) {
        let remote = op.file().and_then(|file| self.remotes.get(file));
        let reply = self.reply(token);
        match remote {
            Some(remote) => remote::begin(&*remote, op, reply),
            None => reply.errno(libc::EBADF),
        }
    }

    /// Begins a transfer that is for a remote.
    #[cold]
    pub(super) fn ask_vectored(
        self: &Rc<Self>,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        let reply = self.reply(token);
        match self.remotes.get(file) {
            Some(remote) => remote::begin_transfer(&*remote, transfer, offset, bufs, reply),
            None => reply.errno(libc::EBADF),
        }
    }

    /// Asks a remote for the allocation of a range.
    pub(super) fn ask_allocation(
        self: &Rc<Self>,
        token: Token,
        file: FileId,
        offset: u64,
        len: u64,
    ) {
        let reply = self.reply(token);
        match self.remotes.get(file) {
            Some(remote) => remote.begin(Request::Allocation { offset, len }, reply),
            None => reply.errno(libc::EBADF),
        }
    }

    fn reply(self: &Rc<Self>, token: Token) -> Reply {
        self.remotes.in_flight.set(self.remotes.in_flight.get() + 1);
        Reply { shared: self.clone(), token, raw: -libc::EIO }
    }

    fn replied(&self, completion: Completion) {
        self.remotes.in_flight.set(self.remotes.in_flight.get() - 1);
        if self.remotes.closed.get() {
            return;
        }
        if completion.token & TASK_BIT == 0 {
            return self.stash.borrow_mut().push(completion);
        }
        let slot = (completion.token & !TASK_BIT) as u32;
        let waker = self.slots.borrow_mut().complete(slot, completion.raw);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
