//! Reads and writes of a socket that do not block.

use std::io::{self, IoSlice};
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// Bytes that are received at a time.
const INBOX_BYTES: usize = 64 << 10;
/// Pieces that are sent at a time.
pub(super) const MAX_PIECES: usize = 32;

/// A socket and the events to wait for.
pub(super) type Watched<'a> = Option<(BorrowedFd<'a>, PollFlags)>;

/// The events of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    /// Whether its socket can be read or written, or is closed.
    pub(super) client: bool,
    /// Whether the client is gone.
    pub(super) gone: bool,
    /// Whether its link can be read or written, or is closed.
    pub(super) link: bool,
    /// Whether a time is over, or something was left to do.
    pub(super) due: bool,
}

impl Ready {
    pub(super) fn is_nothing(self) -> bool {
        !(self.client || self.link || self.due)
    }
}

/// Bytes that were received and not used yet.
pub(super) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// The result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Got {
    Bytes,
    /// There is nothing now, or no room for it.
    Nothing,
    /// The other end is closed.
    End,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        Inbox { bytes: vec![0; INBOX_BYTES].into(), start: 0, end: 0 }
    }

    pub(super) fn left(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// The next `count` bytes, if all of them have come. At most [`INBOX_BYTES`].
    pub(super) fn peek(&self, count: usize) -> Option<&[u8]> {
        self.left().get(..count)
    }

    pub(super) fn skip(&mut self, count: usize) {
        self.start += count.min(self.end - self.start);
    }

    /// Moves bytes to `into`, until that has `all` bytes.
    pub(super) fn pour(&mut self, into: &mut Vec<u8>, all: usize) {
        let count = all.saturating_sub(into.len()).min(self.end - self.start);
        into.extend_from_slice(&self.left()[..count]);
        self.skip(count);
    }

    pub(super) fn receive(&mut self, socket: &OwnedFd) -> Got {
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.end == self.bytes.len() {
            return Got::Nothing;
        }
        match recv(socket, &mut self.bytes[self.end..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => Got::End,
            Ok((count, _)) => {
                self.end += count;
                Got::Bytes
            }
            Err(Errno::AGAIN | Errno::INTR) => Got::Nothing,
            Err(_) => Got::End,
        }
    }
}

/// Sends as much as there is room for.
///
/// # Errors
/// The other end is gone.
pub(super) fn send(socket: &OwnedFd, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags) {
        Ok(count) => Ok(count),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(e) => Err(e.into()),
    }
}
