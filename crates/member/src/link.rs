//! The socket of a connection, and the room for what is under way.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_pool::wire::{Header, MAX_REQUESTS};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_keepalive, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

/// Most bytes under way of one connection, and of all. A connection may always have one request, whatever others have.
const CONNECTION_BYTES: usize = 4 << 20;
const SERVER_BYTES: usize = 24 << 20;
/// How often a thread that receives looks whether its time is up.
const TURN: Duration = Duration::from_secs(2);
/// Time for a message, once its first byte is there, and for an answer to leave.
const MESSAGE_TIME: Duration = Duration::from_secs(30);

/// Answers with no more data than this are sent by the thread that has them.
const SMALL_BYTES: usize = 16 << 10;

/// The room that all connections share.
#[derive(Default)]
pub(crate) struct Budget {
    used: Mutex<usize>,
    changed: Condvar,
}

/// The requests and bytes that a connection has under way. It is guarded by the budget's lock.
#[derive(Default)]
struct Used {
    requests: usize,
    bytes: usize,
}

/// A connection's socket.
pub(crate) struct Link {
    socket: OwnedFd,
    budget: Arc<Budget>,
    used: Mutex<Used>,
    is_closed: AtomicBool,
    outbox: Sender<Out>,
    /// Messages that the thread that sends has, or is to have.
    queued: Mutex<usize>,
}

/// The room that a request takes until its answer has left.
pub(crate) struct Room {
    link: Arc<Link>,
    bytes: usize,
}

/// The work for the thread that sends.
pub(crate) enum Out {
    /// Send this. The room is free then.
    Message(Header, Vec<u8>, Option<Arc<crate::copy::Request>>),
    /// Send the rest of an answer.
    Rest(Vec<u8>),
    /// End the connection.
    End,
}

impl Link {
    pub(crate) fn new(
        socket: OwnedFd,
        budget: Arc<Budget>,
        outbox: Sender<Out>,
    ) -> io::Result<Link> {
        set_socket_timeout(&socket, Timeout::Recv, Some(TURN))?;
        set_socket_timeout(&socket, Timeout::Send, Some(MESSAGE_TIME))?;
        // A peer whose machine has gone is noticed. A tunnel's socket knows no such thing.
        let _ = set_socket_keepalive(&socket, true);
        let (used, is_closed) = (Mutex::default(), AtomicBool::new(false));
        Ok(Link { socket, budget, used, is_closed, outbox, queued: Mutex::new(0) })
    }

    /// Sends an answer, or queues it. It does not wait.
    pub(crate) fn answer(
        &self,
        header: Header,
        payload: Vec<u8>,
        of: Option<Arc<crate::copy::Request>>,
    ) {
        let mut queued = self.queued.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Out::Message(header, payload, of);
        // Behind others it would overtake them.
        if *queued == 0
            && let Out::Message(header, payload, _) = &out
            && payload.len() <= SMALL_BYTES
        {
            let mut bytes = header.to_bytes().to_vec();
            bytes.extend(payload);
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match send(&self.socket, &bytes, flags) {
                Ok(sent) if sent == bytes.len() => return,
                Ok(sent) => out = Out::Rest(bytes.split_off(sent)),
                // The thread finds the same error, and ends the connection.
                Err(_) => {}
            }
        }
        *queued += 1;
        // That thread has ended with the connection.
        let _ = self.outbox.send(out);
    }

    fn sent_one(&self) {
        *self.queued.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }

    /// Takes nothing more from the other side. Queued messages still leave, then the connection ends.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        // It may have ended by itself.
        let _ = shutdown(&self.socket, Shutdown::Read);
        let _ = self.outbox.send(Out::End);
        // The lock orders this behind a look at `is_closed`.
        drop(self.budget.used.lock().unwrap_or_else(PoisonError::into_inner));
        self.budget.changed.notify_all();
    }

    /// Fills `into`. With `idle` it waits for the first byte as long as it takes.
    ///
    /// # Errors
    /// The connection has ended, or took too long.
    pub(crate) fn receive(&self, into: &mut [u8], idle: bool, by: Instant) -> io::Result<()> {
        let (mut at, mut by) = (0, by);
        while at < into.len() {
            if self.is_closed.load(Ordering::Acquire) {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            match recv(&self.socket, &mut into[at..], RecvFlags::empty()) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((received, _)) => {
                    if at == 0 && idle {
                        by = message_end();
                    }
                    at += received;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let is_late = Instant::now() > by && !(idle && at == 0);
            if is_late && at < into.len() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Sends all of it.
    ///
    /// # Errors
    /// The connection has ended, or takes too long.
    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_part(bytes, SendFlags::NOSIGNAL)
    }

    /// The header leaves with the payload: alone it would be a packet, and wake the other side.
    fn send_message(&self, header: &Header, payload: &[u8]) -> io::Result<()> {
        let more = if payload.is_empty() { SendFlags::empty() } else { SendFlags::MORE };
        self.send_part(&header.to_bytes(), SendFlags::NOSIGNAL | more)?;
        self.send(payload)
    }

    fn send_part(&self, mut bytes: &[u8], flags: SendFlags) -> io::Result<()> {
        let by = message_end();
        while !bytes.is_empty() {
            match send(&self.socket, bytes, flags) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            if Instant::now() > by {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Waits for room. `None`: the connection has ended.
    pub(crate) fn room(self: &Arc<Link>, bytes: usize) -> Option<Room> {
        let mut all = self.budget.used.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if self.is_closed.load(Ordering::Acquire) {
                return None;
            }
            let mut own = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = own.requests < MAX_REQUESTS
                && own.bytes + bytes <= CONNECTION_BYTES
                && *all + bytes <= SERVER_BYTES;
            if fits || own.requests == 0 {
                own.requests += 1;
                own.bytes += bytes;
                *all += bytes;
                return Some(Room { link: self.clone(), bytes });
            }
            drop(own);
            all = self.budget.changed.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let budget = &self.link.budget;
        *budget.used.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        let mut own = self.link.used.lock().unwrap_or_else(PoisonError::into_inner);
        own.requests -= 1;
        own.bytes -= self.bytes;
        drop(own);
        budget.changed.notify_all();
    }
}

/// Sends what is queued until the end of the connection.
pub(crate) fn send_all(link: &Link, queue: &Receiver<Out>) {
    while let Ok(out) = queue.recv() {
        let sent = match out {
            Out::Message(header, payload, request) => {
                let sent = link.send_message(&header, &payload);
                drop(request);
                sent
            }
            Out::Rest(bytes) => link.send(&bytes),
            Out::End => break,
        };
        if sent.is_err() {
            break;
        }
        link.sent_one();
    }
    link.is_closed.store(true, Ordering::Release);
    let _ = shutdown(&link.socket, Shutdown::Both);
    link.close();
}

pub(crate) fn message_end() -> Instant {
    Instant::now() + MESSAGE_TIME
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use ferrite_pool::wire::Kind;

    use super::*;

    #[test]
    fn a_small_answer_does_not_overtake_a_queued_one() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (outbox, queue) = channel();
        let link = Arc::new(Link::new(ours.into(), Arc::default(), outbox).unwrap());
        let mut wanted = Vec::new();
        for (op, bytes) in [(1, 8), (2, SMALL_BYTES + 1), (3, 8), (4, 0)] {
            let header = Header { kind: Kind::Done, op, start: 0, len: 0, payload: bytes as u32 };
            let data = vec![op as u8; bytes];
            wanted.extend(header.to_bytes());
            wanted.extend(&data);
            link.answer(header, data, None);
        }
        link.close();
        let mut sent = Vec::new();
        std::thread::scope(|scope| {
            let link = &link;
            scope.spawn(move || send_all(link, &queue));
            theirs.read_to_end(&mut sent).unwrap();
        });
        assert!(sent == wanted, "{} of {} bytes", sent.len(), wanted.len());
    }
}
