//! Reads and writes of sockets that never wait, or not longer than until a moment.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, send, sendmsg, shutdown,
};

use crate::{End, Fault};

/// The time for all of a handshake.
pub(crate) const GREETING: Duration = Duration::from_secs(10);

/// A socket that is read and written without waiting: `WouldBlock` then.
pub(crate) struct Socket<'a>(pub(crate) &'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0, into, RecvFlags::DONTWAIT)?.0)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(sendmsg(self.0, pieces, &mut SendAncillaryBuffer::default(), flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a read or write that does not wait has nothing to do now.
pub(crate) fn is_nothing(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A socket whose reads and writes wait until a moment.
pub(crate) struct Timed<'a> {
    pub(crate) socket: &'a OwnedFd,
    pub(crate) end: Instant,
    /// The other side, for the text of a timeout.
    pub(crate) whom: &'static str,
}

impl Timed<'_> {
    /// Fills `into`.
    pub(crate) fn read_exact(&self, into: &mut [u8]) -> Result<(), End> {
        let mut done = 0;
        while done < into.len() {
            match Socket(self.socket).read(&mut into[done..]) {
                Ok(0) => return Err(End::Left),
                Ok(count) => done += count,
                Err(e) if is_nothing(&e) => self.wait(PollFlags::IN)?,
                Err(_) => return Err(End::Left),
            }
        }
        Ok(())
    }

    pub(crate) fn read<const N: usize>(&self) -> Result<[u8; N], End> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads that many bytes, and drops them.
    pub(crate) fn skip(&self, mut count: usize) -> Result<(), End> {
        let mut dropped = [0; 1024];
        while count > 0 {
            let now = count.min(dropped.len());
            self.read_exact(&mut dropped[..now])?;
            count -= now;
        }
        Ok(())
    }

    pub(crate) fn write_all(&self, mut bytes: &[u8]) -> Result<(), End> {
        while !bytes.is_empty() {
            match Socket(self.socket).write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(e) if is_nothing(&e) => self.wait(PollFlags::OUT)?,
                Err(_) => return Err(End::Left),
            }
        }
        Ok(())
    }

    /// Waits until the socket can be read or written.
    pub(crate) fn wait(&self, flags: PollFlags) -> Result<(), End> {
        match wait_for(self.socket, flags, self.end) {
            true => Ok(()),
            false => Err(End::Refused(Fault::new(
                format!("the {} has not finished its handshake", self.whom),
                format!("{} s are over", GREETING.as_secs()),
                match self.whom {
                    "disk" => "ferrite disk list shows whether it is served or paused",
                    _ => "check the network between, and that it is a program of NBD with TLS",
                },
            ))),
        }
    }
}

/// Waits until the socket can be read or written. `false`: the time is over.
fn wait_for(socket: &OwnedFd, flags: PollFlags, end: Instant) -> bool {
    loop {
        let Some(left) = end.checked_duration_since(Instant::now()) else { return false };
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), flags)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Ends our side of a connection, and waits until the other side has read the rest and ended its own. A socket that
/// is closed with bytes in it tells the other side of an error, which loses what was sent last.
pub(crate) fn linger(socket: &OwnedFd, time: Duration) {
    if shutdown(socket, Shutdown::Write).is_err() {
        return;
    }
    let end = Instant::now() + time;
    let mut dropped = [0; 4096];
    while wait_for(socket, PollFlags::IN, end) {
        match Socket(socket).read(&mut dropped) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if is_nothing(&e) => {}
            Err(_) => return,
        }
    }
}
