//! One connection to xenstore: requests out, replies and watch events in.
//!
//! The descriptor does not block; every wait is a poll with a deadline. One request is on its way
//! at a time, but replies are still matched by number: one that timed out may be answered later.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::Clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::error::{Broken, StoreError, What};
use super::watches::Watches;
use super::wire::{
    Decoder, ErrorName, HEADER_BYTES, Message, MessageType, PAYLOAD_MAX, split_string,
};

/// Replies that are not waited for any more and that have not come; with more, the server is gone.
const ABANDONED_MAX: usize = 16;
/// Bytes taken from the descriptor in one read. Nearly all messages are shorter. They are on the stack, which each
/// thread with a connection keeps: a host has a thread for each disk.
const READ_BYTES: usize = PAYLOAD_MAX / 2;
/// Reads in one look for watch events, so that a flood cannot keep the caller here.
const READS_PER_POLL: usize = 128;

/// The other end of the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    /// A stream socket to a server.
    Socket,
    /// /dev/xen/xenbus. The kernel takes a message of at most 4096 bytes with its header, refuses
    /// some requests by the result of write(2), and never reports itself as writable to poll(2).
    Device,
}

pub(super) struct Connection {
    fd: OwnedFd,
    transport: Transport,
    decoder: Decoder,
    pub(super) watches: Watches,
    last_request_id: u32,
    /// All that were ever made.
    pub(super) requests: u64,
    /// The request whose reply is waited for.
    awaited: Option<u32>,
    reply: Option<Message>,
    abandoned: Vec<u32>,
    dead: Option<String>,
    pub(super) timeout: Duration,
    pub(super) clock: Arc<dyn Clock>,
}

impl Connection {
    pub(super) fn new(fd: OwnedFd, timeout: Duration, clock: Arc<dyn Clock>) -> Self {
        let is_device = fstat(&fd)
            .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::CharacterDevice);
        let nonblocking = fcntl_getfl(&fd).and_then(|f| fcntl_setfl(&fd, f | OFlags::NONBLOCK));
        Connection {
            fd,
            transport: if is_device { Transport::Device } else { Transport::Socket },
            decoder: Decoder::new(),
            watches: Watches::default(),
            last_request_id: 0,
            requests: 0,
            awaited: None,
            reply: None,
            abandoned: Vec::new(),
            dead: nonblocking.err().map(|e| io::Error::from(e).to_string()),
            timeout,
            clock,
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.is_some()
    }

    /// Sends a request and waits for its reply.
    pub(super) fn request(
        &mut self,
        what: What<'_>,
        kind: MessageType,
        transaction_id: u32,
        payload: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        let message = self.prepare(what, kind, transaction_id, payload)?;
        let deadline_ns = self.deadline_ns();
        let id = message.header.request_id;
        self.awaited = Some(id);
        let result = self.exchange(what, &message, deadline_ns);
        self.awaited = None;
        if matches!(result, Err(StoreError::Timeout { .. })) {
            self.abandon(id);
        }
        let reply = result?;
        match reply.header.kind() {
            Ok(MessageType::Error) => Err(StoreError::refused(what, &reply.payload)),
            Ok(k) if k == kind => Ok(reply.payload),
            _ => {
                let got = reply.header.number;
                let why = format!("a reply of type {got} to a request of type {}", kind.number());
                Err(self.give_up(Broken::Protocol(why)).at(what))
            }
        }
    }

    /// Sends a request whose outcome does not matter, and does not wait for its reply.
    pub(super) fn send_and_forget(
        &mut self,
        what: What<'_>,
        kind: MessageType,
        transaction_id: u32,
        payload: &[u8],
    ) {
        let Ok(message) = self.prepare(what, kind, transaction_id, payload) else { return };
        let deadline_ns = self.deadline_ns();
        if self.send(what, &message, deadline_ns).is_ok() {
            self.abandon(message.header.request_id);
        }
    }

    fn prepare(
        &mut self,
        what: What<'_>,
        kind: MessageType,
        transaction_id: u32,
        payload: &[u8],
    ) -> Result<Message, StoreError> {
        if let Some(why) = &self.dead {
            return Err(StoreError::Dead { what: what.to_string(), why: why.clone() });
        }
        let limit = match self.transport {
            Transport::Socket => PAYLOAD_MAX,
            Transport::Device => PAYLOAD_MAX - HEADER_BYTES,
        };
        if payload.len() > limit {
            return Err(StoreError::invalid(what, "path and value are too long for one message"));
        }
        // 0 is the number of watch events.
        self.last_request_id = self.last_request_id.checked_add(1).unwrap_or(1);
        self.requests += 1;
        Ok(Message::new(kind, self.last_request_id, transaction_id, payload))
    }

    fn exchange(
        &mut self,
        what: What<'_>,
        message: &Message,
        deadline_ns: u64,
    ) -> Result<Message, StoreError> {
        self.send(what, message, deadline_ns)?;
        loop {
            self.pump().map_err(|b| self.give_up(b).at(what))?;
            if let Some(reply) = self.reply.take() {
                return Ok(reply);
            }
            if !self.wait(PollFlags::IN, deadline_ns).map_err(|b| self.give_up(b).at(what))? {
                return Err(self.timed_out(what));
            }
        }
    }

    /// Writes all of `message`, reading what comes meanwhile: a server that waits for its own
    /// output to be read must not wait for ever.
    fn send(
        &mut self,
        what: What<'_>,
        message: &Message,
        deadline_ns: u64,
    ) -> Result<(), StoreError> {
        let bytes = message.encode();
        let mut sent = 0;
        while sent < bytes.len() {
            match self.write(&bytes[sent..]) {
                Ok(n) => sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.pump().map_err(|b| self.give_up(b).at(what))?;
                    let flags = PollFlags::IN | PollFlags::OUT;
                    if !self.wait(flags, deadline_ns).map_err(|b| self.give_up(b).at(what))? {
                        if sent > 0 {
                            self.dead = Some("a request was cut off".to_owned());
                        }
                        return Err(self.timed_out(what));
                    }
                }
                Err(e) => return Err(self.write_failed(what, e, sent)),
            }
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match self.transport {
            // A server that is gone must not end this process by SIGPIPE.
            Transport::Socket => rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL),
            Transport::Device => rustix::io::write(&self.fd, bytes),
        }
    }

    /// The device refuses a request by the result of write(2) and stays usable.
    fn write_failed(&mut self, what: What<'_>, error: Errno, sent: usize) -> StoreError {
        let name = ErrorName::from_errno(error.raw_os_error());
        match (self.transport, name) {
            (Transport::Device, Some(name)) if sent == 0 && name != ErrorName::Io => {
                StoreError::named(what, name)
            }
            _ => self.give_up(Broken::Io(error.into())).at(what),
        }
    }

    /// Takes what has arrived in one read, without waiting. `false` if nothing had.
    fn pump(&mut self) -> Result<bool, Broken> {
        let mut buffer = [0u8; READ_BYTES];
        let got = loop {
            match rustix::io::read(&self.fd, &mut buffer) {
                Ok(0) => return Err(Broken::Protocol("it closed the connection".to_owned())),
                Ok(n) => break n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(e) => return Err(Broken::Io(e.into())),
            }
        };
        self.decoder.push(&buffer[..got]);
        while let Some(message) = self.decoder.next_message()? {
            self.dispatch(message)?;
        }
        Ok(true)
    }

    fn dispatch(&mut self, message: Message) -> Result<(), Broken> {
        // Not by request number: the kernel's device leaves it unset in events.
        if message.header.kind()? == MessageType::WatchEvent {
            let (path, rest) = split_string(&message.payload).ok_or_else(bad_event)?;
            let (token, _) = split_string(rest).ok_or_else(bad_event)?;
            self.watches.fired(path, token);
            return Ok(());
        }
        let id = message.header.request_id;
        if self.awaited == Some(id) && self.reply.is_none() {
            self.reply = Some(message);
            return Ok(());
        }
        match self.abandoned.iter().position(|a| *a == id) {
            Some(at) => {
                self.abandoned.swap_remove(at);
                Ok(())
            }
            None => Err(Broken::Protocol(format!("a reply to request {id}, which was not made"))),
        }
    }

    /// Waits until one of `flags` holds; `false` once the deadline has passed, even if one does:
    /// a flood of events must not keep the caller here for ever.
    fn wait(&self, flags: PollFlags, deadline_ns: u64) -> Result<bool, Broken> {
        loop {
            let left = Duration::from_nanos(deadline_ns.saturating_sub(self.clock.now_ns()));
            if left.is_zero() {
                return Ok(false);
            }
            let timeout =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match poll(&mut [PollFd::new(&self.fd, flags)], Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(e) => return Err(Broken::Io(e.into())),
            }
        }
    }

    /// Takes watch events in, without waiting: all that has arrived, or as many as a fair share.
    pub(super) fn receive_events(&mut self, what: What<'_>) -> Result<(), StoreError> {
        if let Some(why) = &self.dead {
            return Err(StoreError::Dead { what: what.to_string(), why: why.clone() });
        }
        for _ in 0..READS_PER_POLL {
            if !self.pump().map_err(|b| self.give_up(b).at(what))? {
                break;
            }
        }
        Ok(())
    }

    /// The reply to `id` is not waited for any more.
    fn abandon(&mut self, id: u32) {
        if self.abandoned.len() == ABANDONED_MAX {
            self.dead = Some(format!("{ABANDONED_MAX} requests were never answered"));
            return;
        }
        self.abandoned.push(id);
    }

    fn deadline_ns(&self) -> u64 {
        let timeout_ns = u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX);
        self.clock.now_ns().saturating_add(timeout_ns)
    }

    fn timed_out(&self, what: What<'_>) -> StoreError {
        StoreError::Timeout { what: what.to_string(), seconds: self.timeout.as_secs() }
    }

    /// Marks the connection dead.
    pub(super) fn give_up(&mut self, broken: Broken) -> Broken {
        self.dead = Some(broken.to_string());
        broken
    }
}

fn bad_event() -> Broken {
    Broken::Protocol("a watch event without path and token".to_owned())
}
