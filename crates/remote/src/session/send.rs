//! Requests on their way into the socket.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::rc::Rc;
use std::time::Instant;

use ferrite_io::socket::{MAX_PIECES, Piece, send};
use ferrite_nbd::client::Command;
use ferrite_nbd::wire::REQUEST_BYTES;

use super::op::Op;
use super::{Inner, Lost, Session};

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

    /// What is left, as pieces.
    fn pieces<'a>(&'a self, to: &mut Vec<Piece<'a>>) {
        if self.done < REQUEST_BYTES {
            to.push(Piece::Bytes(&self.head[self.done..]));
        }
        let Some((op, skip, len)) = &self.data else { return };
        let mut at = self.done.saturating_sub(REQUEST_BYTES);
        while at < *len {
            let Some(span) = op.memory(skip + at) else { return };
            let span = span.slice(0, span.len().min(len - at));
            to.push(Piece::Memory(span));
            at += span.len();
        }
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
    pub(super) async fn send_all(&self, socket: BorrowedFd<'_>) -> Lost {
        loop {
            let sent = {
                let mut inner = self.inner.borrow_mut();
                inner.hand_over();
                let mut pieces = Vec::with_capacity(MAX_PIECES);
                inner.outgoing.iter().for_each(|request| request.pieces(&mut pieces));
                match pieces.is_empty() {
                    true => None,
                    false => Some(send(socket, &self.memory, pieces.into_iter())),
                }
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
