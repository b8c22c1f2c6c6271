//! Requests on their way into the socket.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ferrite_io::socket::{Piece, send};
use ferrite_nbd::client::Command;
use ferrite_nbd::wire::REQUEST_BYTES;

use super::op::Op;
use super::{Inner, Lost, Session};
use crate::link::Link;

/// Requests that are put into the socket at once.
const BATCH: usize = 32;

/// A request, as far as it is not in the socket yet.
pub(super) struct Outgoing {
    head: [u8; REQUEST_BYTES],
    /// Its place in the table of requests.
    pub(super) slot: u16,
    /// Bytes of the head and the data that are in the socket.
    done: usize,
    /// The memory of its data: the operation, where they begin, their length.
    data: Option<(Rc<Op>, usize, usize)>,
}

impl Outgoing {
    fn bytes(&self) -> usize {
        REQUEST_BYTES + self.data.as_ref().map_or(0, |(_, _, len)| *len)
    }

    /// The bytes that are left, as pieces.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let head = self.head.get(self.done..).filter(|left| !left.is_empty()).map(Piece::Bytes);
        let mut at = self.done.saturating_sub(REQUEST_BYTES);
        let data = std::iter::from_fn(move || {
            let (op, skip, len) = self.data.as_ref()?;
            let left = len.checked_sub(at).filter(|left| *left > 0)?;
            let span = op.memory(skip + at)?;
            let span = span.slice(0, span.len().min(left));
            at += span.len();
            Some(Piece::Memory(span))
        });
        head.into_iter().chain(data)
    }
}

impl Inner {
    /// Hands waiting requests to the connection, as many as there is room for.
    fn hand_over(&mut self) {
        while self.outgoing.len() < BATCH && !self.waiting.is_empty() {
            let Some(command) = self.waiting.front().map(|part| part.command) else { return };
            let Some(ticket) = self.replies.begin(command) else { return };
            let Some(mut part) = self.waiting.pop_front() else { return };
            (part.sent, part.since) = (true, Instant::now());
            let data = match command {
                Command::Write { len, .. } => Some((part.op.clone(), part.skip, len as usize)),
                _ => None,
            };
            let head = command.encode(ticket.cookie());
            self.outgoing.push_back(Outgoing { head, slot: ticket.slot, done: 0, data });
            self.parts[usize::from(ticket.slot)] = Some(part);
        }
    }

    fn sent(&mut self, mut bytes: usize) {
        while let Some(first) = self.outgoing.front_mut().filter(|_| bytes > 0) {
            let part = bytes.min(first.bytes() - first.done);
            first.done += part;
            bytes -= part;
            if first.done == first.bytes() {
                self.outgoing.pop_front();
            }
        }
    }
}

impl Session {
    /// Sends what comes, until the connection is lost.
    pub(super) async fn send_all(&self, link: &Link) -> Lost {
        let socket = link.socket.as_fd();
        loop {
            let sent = {
                let mut inner = self.inner.borrow_mut();
                inner.hand_over();
                let pieces = inner.outgoing.iter().flat_map(Outgoing::pieces);
                link.is_between_requests.store(inner.outgoing.is_empty(), Ordering::Relaxed);
                (!inner.outgoing.is_empty()).then(|| send(socket, &self.memory, pieces))
            };
            match sent {
                None => self.to_send.wait().await,
                Some(Ok(bytes)) => {
                    self.inner.borrow_mut().sent(bytes);
                    self.to_watch.raise();
                }
                Some(Err(e)) if e.kind() == io::ErrorKind::WouldBlock => {
                    if let Err(e) = self.io.writable(socket.as_raw_fd()).await {
                        return Lost::Io(e);
                    }
                }
                Some(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Some(Err(e)) => return Lost::Io(e),
            }
        }
    }
}
