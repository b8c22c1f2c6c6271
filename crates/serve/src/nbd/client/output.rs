//! Answers on their way to a client. Answers that the client does not read wait here, without the disk.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use ferrite_io::arena::{Arena, Span};
use ferrite_io::pool::Buf;
use ferrite_io::socket::{self, Piece};

use super::requests::Slot;
use ferrite_nbd::wire::Head;

/// An answer, or a part of one.
pub(super) struct Reply {
    pub(super) head: Head,
    /// Data in the arena that follow the head.
    pub(super) data: Option<(Buf, Span)>,
    /// Bytes on the heap that follow the data.
    pub(super) tail: Vec<u8>,
    /// The request that ends when this answer is sent.
    pub(super) ends: Option<Slot>,
}

impl Reply {
    pub(super) fn new(head: Head, ends: Option<Slot>) -> Reply {
        Reply { head, data: None, tail: Vec::new(), ends }
    }

    fn len(&self) -> usize {
        let data = self.data.as_ref().map_or(0, |(_, span)| span.len());
        self.head.bytes().len() + data + self.tail.len()
    }

    /// Returns the pieces of the answer without its first `skip` bytes.
    fn pieces(&self, mut skip: usize) -> impl Iterator<Item = Piece<'_>> {
        let data = self.data.as_ref().map(|(_, span)| Piece::Memory(*span));
        let pieces = [Some(Piece::Bytes(self.head.bytes())), data, Some(Piece::Bytes(&self.tail))];
        pieces.into_iter().flatten().filter_map(move |piece| {
            let len = match &piece {
                Piece::Bytes(bytes) => bytes.len(),
                Piece::Memory(span) => span.len(),
            };
            let skipped = skip.min(len);
            skip -= skipped;
            (skipped < len).then(|| match piece {
                Piece::Bytes(bytes) => Piece::Bytes(&bytes[skipped..]),
                Piece::Memory(span) => Piece::Memory(span.slice(skipped, len - skipped)),
            })
        })
    }
}

/// The answers that were not sent yet, in order.
#[derive(Default)]
pub(super) struct Output {
    replies: VecDeque<Reply>,
    /// How many bytes of the first answer were sent.
    sent: usize,
}

impl Output {
    pub(super) fn push(&mut self, reply: Reply) {
        self.replies.push_back(reply);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// Sends as much as the socket has room for, and adds the answers that were sent whole to
    /// `done`. Returns `false` if there was no room for all.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        arena: &Arena,
        done: &mut Vec<Reply>,
    ) -> io::Result<bool> {
        while !self.replies.is_empty() {
            let sent = self.sent;
            let skips = std::iter::once(sent).chain(std::iter::repeat(0));
            let pieces =
                self.replies.iter().zip(skips).flat_map(|(reply, skip)| reply.pieces(skip));
            match socket::send(socket, arena, pieces) {
                Ok(bytes) => self.advance(bytes, done),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    fn advance(&mut self, bytes: usize, done: &mut Vec<Reply>) {
        self.sent += bytes;
        while let Some(reply) = self.replies.front()
            && self.sent >= reply.len()
        {
            self.sent -= reply.len();
            done.extend(self.replies.pop_front());
        }
    }

    /// Removes and returns the answers that were not sent whole.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Reply> {
        self.sent = 0;
        self.replies.drain(..)
    }
}
