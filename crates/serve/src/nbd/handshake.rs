//! The handshake of a client on its socket, in bounded time.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::negotiation::{Agreed, Manners, Negotiation, Next, Offer};
use super::sessions::{Named, Sessions};
use crate::waker::Waker;

/// Bytes that are read at a time.
const READ_BYTES: usize = 8 << 10;

/// A client that has finished the handshake.
pub(super) struct Greeted<'a> {
    pub(super) agreed: Agreed,
    /// Held until nothing of the client is under way any more.
    pub(super) session: Option<Named<'a>>,
    /// The first bytes of its requests, which came with its last option.
    pub(super) input: Vec<u8>,
}

/// Does the handshake with a client on a socket that does not block. `None`: the client is gone or
/// wants nothing more, `stop` was woken, or the time is over.
///
/// # Errors
/// Errors of the socket.
pub(super) fn greet<'a>(
    mut socket: &UnixStream,
    offers: Vec<Offer>,
    manners: Manners,
    sessions: Option<&'a Sessions>,
    stop: &Waker,
    limit: Duration,
) -> io::Result<Option<Greeted<'a>>> {
    let end = Instant::now() + limit;
    let (mut input, mut out) = (Vec::new(), Vec::new());
    let mut negotiation = Negotiation::new(offers, manners, &mut out);
    let (mut next, mut session) = (Next::More, None);
    let mut buffer = [0; READ_BYTES];
    loop {
        let flags = if out.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        if !wait(socket, flags, stop, end)? {
            return Ok(None);
        }
        if !out.is_empty() {
            match socket.write(&out) {
                Ok(bytes) => drop(out.drain(..bytes)),
                Err(e) if is_nothing(&e) => {}
                Err(e) => return Err(e),
            }
        } else {
            match socket.read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(bytes) => input.extend_from_slice(&buffer[..bytes]),
                Err(e) if is_nothing(&e) => {}
                Err(e) => return Err(e),
            }
            next = negotiation.go_on(&mut input, &mut out);
            while let Next::Session(name) = next {
                let Some(sessions) = sessions else {
                    negotiation.session_refused(&mut out);
                    next = negotiation.go_on(&mut input, &mut out);
                    continue;
                };
                let left = end.saturating_duration_since(Instant::now());
                session = sessions.begin(name, socket, left)?;
                if session.is_none() {
                    return Ok(None);
                }
                negotiation.session_began(&mut out);
                next = negotiation.go_on(&mut input, &mut out);
            }
        }
        // Replies are sent before anything that follows from them.
        match next {
            Next::Close if out.is_empty() => return Ok(None),
            Next::Requests(agreed) if out.is_empty() => {
                return Ok(Some(Greeted { agreed, session, input }));
            }
            _ => {}
        }
    }
}

fn is_nothing(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Waits for the socket. `false`: the handshake has to end.
fn wait(socket: &UnixStream, flags: PollFlags, stop: &Waker, end: Instant) -> io::Result<bool> {
    loop {
        let Some(left) = end.checked_duration_since(Instant::now()) else { return Ok(false) };
        let left =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let socket = PollFd::from_borrowed_fd(socket.as_fd(), flags);
        let mut fds = [socket, PollFd::from_borrowed_fd(stop.fd(), PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        if !fds[1].revents().is_empty() {
            return Ok(false);
        }
        if !fds[0].revents().is_empty() {
            return Ok(true);
        }
    }
}
