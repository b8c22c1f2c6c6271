//! Replies on their way to a client. A thread of librbd that ends a request sends its reply if the socket has room, and never
//! waits; a thread of the connection sends the rest.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ferrite_nbd::wire::Head;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::budget::Permit;

/// A reply. Its request's part of the budget is given back when it is sent.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) head: Head,
    pub(crate) data: Vec<u8>,
    pub(crate) _permit: Option<Permit>,
}

#[derive(Debug, Default)]
struct Queue {
    replies: VecDeque<Reply>,
    /// Bytes of the first one that are sent.
    sent: usize,
    /// Nothing is sent any more.
    closed: bool,
}

/// The replies of a connection.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Outbox {
    /// Sends a reply now, or later.
    pub(crate) fn push(&self, socket: impl AsFd, reply: Reply) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        queue.replies.push_back(reply);
        // Behind others it waits for the thread, which is waiting for the socket.
        if queue.replies.len() == 1 && !queue.send(&socket) && !queue.closed {
            self.changed.notify_one();
        }
    }

    /// Sends what the socket had no room for, until the connection is closed.
    pub(crate) fn run(&self, socket: impl AsFd) {
        loop {
            let mut queue = self.lock();
            while queue.replies.is_empty() && !queue.closed {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            if queue.closed {
                return;
            }
            if queue.send(&socket) {
                continue;
            }
            drop(queue);
            // It ends with the socket, too.
            let _ = poll(&mut [PollFd::new(&socket, PollFlags::OUT)], None);
        }
    }

    /// Drops all replies, and those to come.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.close();
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Sends as much as the socket takes. Whether that is all.
    fn send(&mut self, socket: &impl AsFd) -> bool {
        while let Some(reply) = self.replies.front() {
            let head = reply.head.bytes();
            let (skipped, total) = (self.sent.min(head.len()), head.len() + reply.data.len());
            let parts =
                [IoSlice::new(&head[skipped..]), IoSlice::new(&reply.data[self.sent - skipped..])];
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                // The client is gone, which its reader sees.
                Err(_) => {
                    self.close();
                    return true;
                }
            }
            if self.sent == total {
                self.sent = 0;
                self.replies.pop_front();
            }
        }
        true
    }

    fn close(&mut self) {
        self.closed = true;
        self.replies.clear();
    }
}
