//! Frames on a stream socket that does not block: each is one line.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How often a wait looks whether it is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes that are read at a time.
const READ_BYTES: usize = 16 << 10;

/// The lines that come on a stream. Bytes behind a line stay here for the next one.
#[derive(Debug, Default)]
pub struct Lines {
    buffer: Vec<u8>,
}

impl Lines {
    /// Receives one line of at most `max_bytes`, its end included, for as long as `goes_on` says.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer has ended, also in the middle of a line. `InvalidData`: the line is
    /// longer, and nothing behind it can be read. `TimedOut`: `goes_on` has said no.
    pub fn receive(
        &mut self,
        stream: &UnixStream,
        max_bytes: usize,
        mut goes_on: impl FnMut() -> bool,
    ) -> io::Result<Vec<u8>> {
        let mut seen = 0;
        loop {
            let end = self.buffer[seen..].iter().position(|byte| *byte == b'\n');
            match end.map(|at| seen + at + 1) {
                Some(len) if len <= max_bytes => {
                    let rest = self.buffer.split_off(len);
                    return Ok(std::mem::replace(&mut self.buffer, rest));
                }
                None if self.buffer.len() < max_bytes => {}
                _ => return Err(super::too_long("this connection", max_bytes)),
            }
            seen = self.buffer.len();
            let mut bytes = [0; READ_BYTES];
            let room = bytes.len().min(max_bytes - seen);
            match { stream }.read(&mut bytes[..room]) {
                Ok(0) => return Err(super::ended()),
                Ok(read) => self.buffer.extend_from_slice(&bytes[..read]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if !goes_on() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    wait_for(stream, PollFlags::IN)?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Err(super::ended()),
                Err(e) => return Err(e),
            }
        }
    }
}

/// Sends a line, whose end is added to it, within `timeout`.
///
/// # Errors
/// `TimedOut`: the peer does not read. Otherwise it has ended.
pub fn send(stream: &UnixStream, mut line: Vec<u8>, timeout: Duration) -> io::Result<()> {
    line.push(b'\n');
    let (mut left, end) = (&line[..], Instant::now() + timeout);
    while !left.is_empty() {
        match { stream }.write(left) {
            Ok(written) => left = &left[written..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                wait_for(stream, PollFlags::OUT)?;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Whether the peer reads nothing any more.
pub fn has_ended(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// Waits for this, for [`POLL_INTERVAL`] at most.
fn wait_for(stream: &UnixStream, flags: PollFlags) -> io::Result<()> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.subsec_nanos().into() };
    match poll(&mut [PollFd::new(stream, flags)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
