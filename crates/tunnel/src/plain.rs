//! Moves bytes between a client in clear and a stream inside, both ways at once, with bounded buffers.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::stream::{Socket, is_nothing, timespec};

/// Bytes in each direction.
const BUFFER_BYTES: usize = 64 << 10;
/// The time for the last bytes, once the server has said its last.
const GOODBYE: Duration = Duration::from_secs(10);

/// One direction.
struct Way<'a> {
    from: &'a OwnedFd,
    to: &'a OwnedFd,
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// Nothing more comes.
    has_ended: bool,
    /// The other side was told so, or has gone itself.
    is_told: bool,
}

impl<'a> Way<'a> {
    fn new(from: &'a OwnedFd, to: &'a OwnedFd) -> Way<'a> {
        let bytes = vec![0; BUFFER_BYTES].into();
        Way { from, to, bytes, start: 0, end: 0, has_ended: false, is_told: false }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Moves what can be moved without waiting.
    fn advance(&mut self) {
        if self.is_empty() && !self.has_ended {
            match Socket(self.from).read(&mut self.bytes) {
                Ok(count) if count > 0 => (self.start, self.end) = (0, count),
                Err(e) if is_nothing(&e) => {}
                _ => self.has_ended = true,
            }
        }
        while !self.is_empty() {
            match Socket(self.to).write(&self.bytes[self.start..self.end]) {
                Ok(count) => self.start += count,
                Err(e) if is_nothing(&e) => return,
                // A side that does not listen any more is sent nothing more.
                Err(_) => (self.start, self.has_ended) = (self.end, true),
            }
        }
        if self.has_ended && !self.is_told {
            let _ = shutdown(self.to, Shutdown::Write);
            self.is_told = true;
        }
    }

    /// The side to wait for, and what for. `None`: this way has ended.
    fn waits_for(&self) -> Option<(&'a OwnedFd, PollFlags)> {
        match (self.is_empty(), self.has_ended) {
            (false, _) => Some((self.to, PollFlags::OUT)),
            (true, false) => Some((self.from, PollFlags::IN)),
            (true, true) => None,
        }
    }
}

/// Moves bytes until both sides have ended. Once the server has ended, the client has 10 s to do so.
pub(crate) fn pass(outside: &OwnedFd, inside: &OwnedFd) {
    let (mut inward, mut outward) = (Way::new(outside, inside), Way::new(inside, outside));
    let mut until = None;
    loop {
        inward.advance();
        outward.advance();
        if outward.has_ended && until.is_none() {
            until = Some(Instant::now() + GOODBYE);
        }
        let waited: Vec<_> =
            [inward.waits_for(), outward.waits_for()].into_iter().flatten().collect();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if waited.is_empty() || left == Some(Duration::ZERO) {
            return;
        }
        let mut fds: Vec<_> =
            waited.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd.as_fd(), *flags)).collect();
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}
