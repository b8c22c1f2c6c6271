//! Messages on their way through a socket. A thread that has one sends it if the socket has room, and never waits; a thread of
//! the connection sends the rest.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// A message. It is dropped when it is sent, with what it holds.
pub trait Message {
    /// Its head.
    fn head(&self) -> &[u8];
    /// The data behind its head.
    fn data(&self) -> &[u8];
}

#[derive(Debug)]
struct Queue<M> {
    messages: VecDeque<M>,
    /// Bytes of the first one that are sent.
    sent: usize,
    /// Nothing is sent any more.
    closed: bool,
}

/// The messages of a connection.
#[derive(Debug)]
pub struct Outbox<M> {
    queue: Mutex<Queue<M>>,
    changed: Condvar,
}

impl<M> Default for Outbox<M> {
    fn default() -> Outbox<M> {
        let queue = Queue { messages: VecDeque::new(), sent: 0, closed: false };
        Outbox { queue: Mutex::new(queue), changed: Condvar::new() }
    }
}

impl<M: Message> Outbox<M> {
    /// Sends a message now, or later.
    pub fn push(&self, socket: impl AsFd, message: M) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        queue.messages.push_back(message);
        // Behind others it waits for the thread, which is waiting for the socket.
        if queue.messages.len() == 1 && !queue.send(&socket) && !queue.closed {
            self.changed.notify_one();
        }
    }

    /// Sends what the socket had no room for, until the connection is closed.
    pub fn run(&self, socket: impl AsFd) {
        loop {
            let mut queue = self.lock();
            while queue.messages.is_empty() && !queue.closed {
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

    /// Drops all messages, and those to come.
    pub fn close(&self) {
        let mut queue = self.lock();
        queue.close();
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Queue<M>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Message> Queue<M> {
    /// Sends as much as the socket takes. Whether that is all.
    fn send(&mut self, socket: &impl AsFd) -> bool {
        while let Some(message) = self.messages.front() {
            let (head, data) = (message.head(), message.data());
            let (skipped, total) = (self.sent.min(head.len()), head.len() + data.len());
            let parts =
                [IoSlice::new(&head[skipped..]), IoSlice::new(&data[self.sent - skipped..])];
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
                self.messages.pop_front();
            }
        }
        true
    }

    fn close(&mut self) {
        self.closed = true;
        self.messages.clear();
    }
}
