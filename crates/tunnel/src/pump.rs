//! Moves bytes between TLS outside and a stream inside, both ways at once, with bounded buffers. A side that does not
//! read stops the other side's sending, and nothing else.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use rustls::Connection;

use crate::faults::{Peer, fault};
use crate::stream::{Socket, Timed, is_nothing, linger, timespec};
use crate::{End, Fault};

/// Bytes of TLS that were received: some of its longest records, so that a wake-up and a system call are for several.
const WIRE_BYTES: usize = 128 << 10;
/// Bytes in clear, in each direction.
const CLEAR_BYTES: usize = 128 << 10;
/// Most bytes of TLS that wait to be sent: those in clear, and what encryption adds.
const SEND_BYTES: usize = 144 << 10;
/// The time to read the last bytes after an end.
const GOODBYE: Duration = Duration::from_secs(10);
/// The same for a server. A client has had all answers that it waits for, and a write that it has given up must not
/// come late. This and the pause for the server's own end are over within the shortest useful `drain_s`.
const GOODBYE_TO_SERVER: Duration = Duration::from_millis(500);

/// Bounds the buffers that TLS has by itself.
pub(crate) fn bound(tls: &mut Connection) {
    tls.set_buffer_limit(Some(SEND_BYTES));
}

/// Does the handshake of TLS.
pub(crate) fn handshake(tls: &mut Connection, outside: &Timed<'_>, peer: Peer) -> Result<(), End> {
    loop {
        while tls.wants_write() {
            match tls.write_tls(&mut Socket(outside.socket)) {
                Ok(_) => {}
                Err(e) if is_nothing(&e) => outside.wait(PollFlags::OUT)?,
                Err(_) => return Err(End::Left),
            }
        }
        if !tls.is_handshaking() {
            return Ok(());
        }
        match tls.read_tls(&mut Socket(outside.socket)) {
            Ok(0) => return Err(End::Left),
            Ok(_) => {}
            Err(e) if is_nothing(&e) => outside.wait(PollFlags::IN)?,
            Err(_) => return Err(End::Left),
        }
        if let Err(e) = tls.process_new_packets() {
            say_why(tls, outside.socket);
            return Err(fault(&e, peer).into());
        }
    }
}

/// Sends the other side what TLS has to say of an error, as far as there is room.
fn say_why(tls: &mut Connection, outside: &OwnedFd) {
    while tls.wants_write() && tls.write_tls(&mut Socket(outside)).is_ok_and(|count| count > 0) {}
    linger(outside, Duration::from_secs(1));
}

/// Bytes that were received and not sent yet.
struct Buffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Buffer {
        Buffer { bytes: vec![0; bytes].into(), start: 0, end: 0 }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn left(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn room(&mut self) -> &mut [u8] {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
        &mut self.bytes[self.end..]
    }

    fn fill(&mut self, count: usize) {
        self.end += count;
    }

    fn skip(&mut self, count: usize) {
        self.start += count;
    }
}

/// One connection.
pub(crate) struct Pump<'a> {
    tls: &'a mut Connection,
    peer: Peer,
    outside: &'a OwnedFd,
    inside: &'a OwnedFd,
    /// TLS that has come.
    wire: Buffer,
    /// Bytes for inside.
    clear: Buffer,
    /// Bytes from inside, before they are encrypted.
    from_inside: Box<[u8]>,
    /// Whether the other side has said its last.
    outside_ended: bool,
    /// Whether that was told inside.
    told: bool,
    /// When the last bytes of inside have to be sent, after its end.
    until: Option<Instant>,
    /// Bytes that went inside.
    pub(crate) delivered: u64,
}

/// The sides that are ready without waiting.
#[derive(Clone, Copy, Default)]
struct Ready {
    outside: bool,
    inside: bool,
}

impl<'a> Pump<'a> {
    pub(crate) fn new(
        tls: &'a mut Connection,
        peer: Peer,
        outside: &'a OwnedFd,
        inside: &'a OwnedFd,
    ) -> Pump<'a> {
        Pump {
            tls,
            peer,
            outside,
            inside,
            wire: Buffer::new(WIRE_BYTES),
            clear: Buffer::new(CLEAR_BYTES),
            from_inside: vec![0; CLEAR_BYTES].into(),
            outside_ended: false,
            told: false,
            until: None,
            delivered: 0,
        }
    }

    /// Moves bytes until both sides have ended.
    pub(crate) fn run(&mut self) -> Result<(), End> {
        let moved = self.move_all();
        match &moved {
            Ok(()) => linger(self.outside, self.goodbye()),
            Err(End::Refused(_)) => say_why(self.tls, self.outside),
            Err(End::Left) => {}
        }
        moved
    }

    fn move_all(&mut self) -> Result<(), End> {
        loop {
            let is_full = self.decrypt()?;
            self.send_inside()?;
            if is_full && self.clear.is_empty() {
                continue;
            }
            self.send_outside()?;
            if self.outside_ended && self.clear.is_empty() && !self.told {
                // It fails if inside has ended already.
                let _ = shutdown(self.inside, Shutdown::Write);
                self.told = true;
            }
            if self.until.is_some() && !self.tls.wants_write() {
                return Ok(());
            }
            let ready = self.wait()?;
            if ready.outside {
                self.receive_outside()?;
            }
            if ready.inside {
                self.receive_inside()?;
            }
        }
    }

    /// Decrypts what has come, as far as there is room. Returns whether there was not.
    fn decrypt(&mut self) -> Result<bool, End> {
        loop {
            let room = self.clear.room();
            if room.is_empty() {
                return Ok(true);
            }
            // Decrypted bytes go first: TLS keeps one record of them, and takes no other then.
            match self.tls.reader().read(room) {
                Ok(0) => {
                    self.outside_ended = true;
                    return Ok(false);
                }
                Ok(count) => {
                    self.clear.fill(count);
                    continue;
                }
                Err(e) if is_nothing(&e) => {}
                Err(e) => return Err(self.broken(&e)),
            }
            if self.wire.is_empty() {
                return Ok(false);
            }
            match self.tls.read_tls(&mut self.wire.left()) {
                Ok(count) => self.wire.skip(count),
                Err(e) => return Err(self.broken(&e)),
            }
            if let Err(e) = self.tls.process_new_packets() {
                return Err(fault(&e, self.peer).into());
            }
        }
    }

    /// The time that the other side has after the end of inside.
    fn goodbye(&self) -> Duration {
        match self.peer {
            Peer::Client => GOODBYE,
            Peer::Server => GOODBYE_TO_SERVER,
        }
    }

    fn broken(&self, e: &io::Error) -> End {
        Fault::new("a connection is lost", e, "connect again").into()
    }

    fn send_inside(&mut self) -> Result<(), End> {
        while !self.clear.is_empty() {
            match Socket(self.inside).write(self.clear.left()) {
                Ok(count) => {
                    self.clear.skip(count);
                    self.delivered += count as u64;
                }
                Err(e) if is_nothing(&e) => break,
                // Inside has ended. Its earlier bytes still go outside.
                Err(_) => {
                    self.clear.skip(self.clear.left().len());
                    self.outside_ended = true;
                }
            }
        }
        Ok(())
    }

    fn send_outside(&mut self) -> Result<(), End> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(self.outside)) {
                Ok(_) => {}
                Err(e) if is_nothing(&e) => break,
                Err(_) => return Err(End::Left),
            }
        }
        Ok(())
    }

    /// Waits until there is something to do.
    fn wait(&self) -> Result<Ready, End> {
        let flag = |wanted, flag| if wanted { flag } else { PollFlags::empty() };
        let is_sending = self.tls.wants_write();
        let outside = flag(!self.outside_ended && self.wire.is_empty(), PollFlags::IN)
            | flag(is_sending, PollFlags::OUT);
        let inside = flag(self.until.is_none() && !is_sending, PollFlags::IN)
            | flag(!self.clear.is_empty(), PollFlags::OUT);
        // The kernel tells of a lost connection also where nothing else is asked for. A side that has ended and is
        // not asked for anything is left out, since it would be told of again and again.
        let sides = [(self.outside, outside), (self.inside, inside)];
        let asked = sides.iter().filter(|(_, flags)| !flags.is_empty());
        let mut fds: Vec<PollFd<'_>> =
            asked.map(|(fd, flags)| PollFd::from_borrowed_fd(fd.as_fd(), *flags)).collect();
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(End::Left);
        }
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return Err(End::Left),
        }
        let mut events = fds.iter().map(PollFd::revents);
        let mut of = |asked: PollFlags| {
            let came = if asked.is_empty() { None } else { events.next() };
            asked.contains(PollFlags::IN)
                && came.is_some_and(|came| {
                    came.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
                })
        };
        Ok(Ready { outside: of(outside), inside: of(inside) })
    }

    fn receive_outside(&mut self) -> Result<(), End> {
        match Socket(self.outside).read(self.wire.room()) {
            Ok(0) => self.outside_ended = true,
            Ok(count) => self.wire.fill(count),
            Err(e) if is_nothing(&e) => {}
            Err(_) => return Err(End::Left),
        }
        Ok(())
    }

    fn receive_inside(&mut self) -> Result<(), End> {
        let count = match Socket(self.inside).read(&mut self.from_inside) {
            Ok(count) => count,
            Err(e) if is_nothing(&e) => return Ok(()),
            Err(_) => 0,
        };
        if count == 0 {
            self.tls.send_close_notify();
            self.until = Some(Instant::now() + self.goodbye());
            return Ok(());
        }
        // There is room for all of it: nothing waits to be sent.
        let written = self.tls.writer().write_all(&self.from_inside[..count]);
        written.map_err(|e| self.broken(&e))
    }
}
