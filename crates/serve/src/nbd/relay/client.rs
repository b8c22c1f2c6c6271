//! A client of a relay, and its link to the current worker.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::super::negotiation::MAX_REQUEST_BYTES;
use super::super::server::COURTESY;
use super::handshake::Handshake;
use super::requests::{PendingRequest, Progress, Requests};
use super::stream::{Got, Inbox, MAX_PIECES, Ready, Watched, send};
use ferrite_nbd::wire::{ReplyTo, command, error};

/// The pause after a link that ended at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Rounds of work for one client before the others get their turn.
const ROUNDS: usize = 16;
/// After this many ended links in a row without progress, the client is dropped: its request may be
/// what ends them.
const MAX_TRIES: u32 = 8;

/// The link to the worker.
enum Link {
    /// There is no link. One is requested at this time.
    None(Instant),
    /// A link was requested from the keeper.
    Asked,
    Open(Open),
}

struct Open {
    socket: OwnedFd,
    inbox: Inbox,
    since: Instant,
    /// Bytes of the client's handshake that were sent on this link.
    client_bytes: usize,
    /// Bytes of the server's handshake that were received on this link again.
    server_bytes: usize,
    progress: Progress,
}

/// The next part of the client's requests.
enum Incoming {
    Request,
    /// The data of a write.
    Data(PendingRequest),
    /// The data of a write that was refused: this number of bytes.
    Dropped {
        left: u64,
        to: ReplyTo,
    },
}

/// A client and its link.
pub(super) struct Client {
    socket: OwnedFd,
    inbox: Inbox,
    handshake: Handshake,
    /// Links that have ended before a greeting or the reply to an option. A worker sends no
    /// greeting while the guest's device model has the image.
    tries: u32,
    /// The client's deadline, if it has to do something.
    until: Option<Instant>,
    incoming: Incoming,
    requests: Requests,
    /// Replies that the client was not sent in full.
    out: VecDeque<Vec<u8>>,
    out_bytes: usize,
    sent_bytes: usize,
    link: Link,
    /// Whether no more is read from the client.
    leaves: bool,
    /// Whether the client does not read any more.
    gone: bool,
    /// Whether the client has to be dropped.
    broken: bool,
    /// Whether there may be more to do at once.
    again: bool,
}

/// The link cannot be used any more.
struct Broken;

impl Client {
    pub(super) fn new(socket: OwnedFd) -> Client {
        Client {
            socket,
            inbox: Inbox::new(),
            handshake: Handshake::new(),
            tries: 0,
            until: None,
            incoming: Incoming::Request,
            requests: Requests::default(),
            out: VecDeque::new(),
            out_bytes: 0,
            sent_bytes: 0,
            link: Link::None(Instant::now()),
            leaves: false,
            gone: false,
            broken: false,
            again: false,
        }
    }

    /// Whether a link is to be requested now. Notes that it was.
    pub(super) fn wants_link(&mut self, now: Instant) -> bool {
        let wants = matches!(self.link, Link::None(at) if at <= now);
        if wants {
            self.link = Link::Asked;
        }
        wants
    }

    /// Takes the keeper's reply: a link or none.
    pub(super) fn link(&mut self, socket: Option<OwnedFd>) {
        let now = Instant::now();
        self.link = match socket {
            Some(socket) => Link::Open(Open {
                socket,
                inbox: Inbox::new(),
                since: now,
                client_bytes: 0,
                server_bytes: 0,
                progress: Progress::new(),
            }),
            None => Link::None(now + PAUSE),
        };
        self.again = true;
    }

    /// Whether the client is gone, or has to be dropped.
    pub(super) fn is_over(&self) -> bool {
        let is_done = self.requests.is_empty() && (self.gone || self.out.is_empty());
        self.broken || (self.leaves && is_done)
    }

    /// Whether the worker has all requests of the client that there was room for.
    fn is_left_to_worker(&self) -> bool {
        matches!(&self.link, Link::Open(open) if self.is_agreed(open) && !self.has_more_for(open))
    }

    /// The latest time for the next call of [`go_on`](Self::go_on).
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let link = match self.link {
            Link::None(at) => Some(at),
            _ => None,
        };
        let again = self.again.then_some(now);
        [link, again, self.deadline()].into_iter().flatten().min()
    }

    /// The client's deadline, if it has to do something now.
    fn deadline(&self) -> Option<Instant> {
        let is_due = match self.leaves {
            true => self.requests.is_empty(),
            false => self.handshake.is_clients_turn(),
        };
        self.until.filter(|_| is_due)
    }

    /// The events to wait for on the client's socket.
    pub(super) fn watch_client(&self) -> Watched<'_> {
        if self.gone {
            return None;
        }
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, self.takes_more());
        flags.set(PollFlags::OUT, !self.out.is_empty());
        Some((self.socket.as_fd(), flags))
    }

    pub(super) fn watch_link(&self) -> Watched<'_> {
        let Link::Open(open) = &self.link else { return None };
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.has_more_for(open));
        Some((open.socket.as_fd(), flags))
    }

    fn has_more_for(&self, open: &Open) -> bool {
        open.client_bytes < self.handshake.client_bytes.len()
            || (self.is_agreed(open) && self.requests.are_to_be_sent(&open.progress))
    }

    /// Whether the worker has repeated the whole handshake that the client knows.
    fn is_agreed(&self, open: &Open) -> bool {
        self.handshake.is_through() && open.server_bytes == self.handshake.server_bytes.len()
    }

    /// Whether a worker serves the client.
    fn is_served(&self) -> bool {
        matches!(&self.link, Link::Open(open) if self.is_agreed(open))
    }

    /// Whether more bytes of the client could be used now.
    fn takes_more(&self) -> bool {
        let room = match &self.incoming {
            Incoming::Request if self.handshake.is_through() => self.next_request().is_none(),
            Incoming::Request => self.handshake.is_clients_turn(),
            _ => true,
        };
        room && !self.leaves
    }

    /// Does everything that can be done now.
    pub(super) fn go_on(&mut self, ready: Ready, now: Instant) {
        if ready.is_nothing() {
            return;
        }
        self.again = false;
        self.gone |= ready.gone;
        let is_late = self.deadline().is_some_and(|until| until <= now);
        // A client that is gone was promised only the requests that are under way.
        self.broken |= is_late || (self.gone && !self.is_served());
        for _ in 0..ROUNDS {
            if self.is_over() {
                return;
            }
            let had_none = self.requests.is_empty();
            let mut more = self.read_client();
            more |= self.use_link(now);
            more |= self.send_replies();
            if self.leaves && self.requests.is_empty() && !had_none {
                self.until = Some(now + COURTESY);
            }
            if !more {
                // Requests that wait for space end with the link. Otherwise they would overwrite
                // newer data of others later (`requests.rs`, 5).
                self.broken |= self.gone && self.is_left_to_worker();
                return;
            }
        }
        self.again = true;
    }

    /// Reads the client's bytes as far as there is room. Returns whether there were any.
    fn read_client(&mut self) -> bool {
        let mut more = self.understand();
        if self.takes_more() {
            match self.inbox.receive(&self.socket) {
                Got::Bytes => more = true,
                Got::Nothing => {}
                Got::End => self.leave(),
            }
        }
        more
    }

    /// Stops reading from the client. It still gets the replies that it was promised.
    fn leave(&mut self) {
        self.leaves = true;
        self.incoming = Incoming::Request;
        self.until = Some(Instant::now() + COURTESY);
    }

    fn understand(&mut self) -> bool {
        let mut more = false;
        while !self.leaves {
            let went_on = match self.handshake.is_through() {
                true => self.understand_request(),
                false => match self.handshake.read_client(&mut self.inbox) {
                    Ok(went_on) => went_on,
                    Err(_) => {
                        self.leave();
                        true
                    }
                },
            };
            if !went_on {
                break;
            }
            more = true;
        }
        more
    }

    /// The next request, if it is in the inbox in full.
    fn next_request(&self) -> Option<&[u8]> {
        self.inbox.peek(self.handshake.form.request_bytes())
    }

    fn understand_request(&mut self) -> bool {
        match std::mem::replace(&mut self.incoming, Incoming::Request) {
            Incoming::Request => self.begin_request(),
            Incoming::Data(mut held) => {
                let before = held.data.len();
                let all = held.data_bytes();
                self.inbox.pour(&mut held.data, all);
                let (now, went_on) = (held.data.len(), held.data.len() > before);
                if now == all {
                    self.requests.add(held);
                    return true;
                }
                self.incoming = Incoming::Data(held);
                went_on
            }
            Incoming::Dropped { left, to } => {
                let here = left.min(self.inbox.left().len() as u64);
                self.inbox.skip(here as usize);
                if here == left {
                    self.put(to.error(error::INVALID, false).bytes().to_vec());
                    return true;
                }
                self.incoming = Incoming::Dropped { left: left - here, to };
                here > 0
            }
        }
    }

    fn begin_request(&mut self) -> bool {
        let form = self.handshake.form;
        let Some(head) = self.next_request() else { return false };
        let raw = form.parse(head).filter(|raw| raw.command != command::DISCONNECT);
        // The client disconnects, or the beginning of its next request is unknown.
        let Some(raw) = raw else {
            self.leave();
            return true;
        };
        let held = PendingRequest::new(form, head, &raw);
        if !self.requests.have_room(&held, self.out.len(), self.out_bytes) {
            return false;
        }
        self.inbox.skip(form.request_bytes());
        let data_bytes = form.data_bytes(&raw);
        if data_bytes > MAX_REQUEST_BYTES.into() {
            // The worker would refuse it, and its data are not stored (nbd-rules.md 3).
            let to = ReplyTo { form, cookie: raw.cookie, offset: raw.offset };
            self.incoming = Incoming::Dropped { left: data_bytes, to };
        } else if data_bytes > 0 {
            self.incoming = Incoming::Data(held);
        } else {
            self.requests.add(held);
        }
        true
    }

    /// Sends and receives on the link. Returns whether there was anything.
    fn use_link(&mut self, now: Instant) -> bool {
        let mut open = match std::mem::replace(&mut self.link, Link::Asked) {
            Link::Open(open) => open,
            none => {
                self.link = none;
                return false;
            }
        };
        match self.exchange(&mut open) {
            Ok(more) => {
                self.link = Link::Open(open);
                more
            }
            Err(Broken) => {
                self.lose(&open, now);
                true
            }
        }
    }

    fn exchange(&mut self, open: &mut Open) -> Result<bool, Broken> {
        let mut more = false;
        let client_bytes = &self.handshake.client_bytes[open.client_bytes..];
        if !client_bytes.is_empty() {
            let sent = send(&open.socket, &[IoSlice::new(client_bytes)]).map_err(|_| Broken)?;
            open.client_bytes += sent;
            more |= sent > 0;
        } else if self.is_agreed(open) {
            more |= self.requests.send(&open.socket, &mut open.progress).map_err(|_| Broken)?;
        }
        let got = open.inbox.receive(&open.socket);
        more |= self.read_link(open)?;
        match got {
            Got::Bytes => Ok(true),
            Got::Nothing => Ok(more),
            // Bytes that came before the end were used.
            Got::End => Err(Broken),
        }
    }

    /// Uses the worker's bytes. Returns whether there was anything new.
    fn read_link(&mut self, open: &mut Open) -> Result<bool, Broken> {
        let mut more = false;
        loop {
            let known = &self.handshake.server_bytes[open.server_bytes..];
            let count = known.len().min(open.inbox.left().len());
            if open.inbox.left()[..count] != known[..count] {
                // The worker serves another disk than the client knows, such as one that has grown.
                self.broken = true;
                return Ok(true);
            }
            open.inbox.skip(count);
            open.server_bytes += count;
            if count < known.len() {
                return Ok(more);
            }
            if self.handshake.is_through() {
                break;
            }
            match self.handshake.read_server(&mut open.inbox) {
                Ok(Some(new)) => {
                    open.server_bytes = self.handshake.server_bytes.len();
                    open.client_bytes = open.client_bytes.min(self.handshake.client_bytes.len());
                    let new = self.handshake.server_bytes[new].to_vec();
                    self.put(new);
                }
                Ok(None) => return Ok(more),
                Err(_) => return Err(Broken),
            }
            more = true;
            self.tries = 0;
            // The deadline is for the whole handshake.
            self.until.get_or_insert_with(|| Instant::now() + COURTESY);
            if self.handshake.is_over() {
                self.leave();
                return Ok(true);
            }
        }
        while let Some(answer) =
            self.requests.read_replies(&mut open.inbox, &mut open.progress).map_err(|_| Broken)?
        {
            more = true;
            self.put(answer);
        }
        Ok(more)
    }

    /// Handles the end of a link. The next one is requested.
    fn lose(&mut self, open: &Open, now: Instant) {
        let waits = self.handshake.is_asked() || self.handshake.server_bytes.is_empty();
        if open.server_bytes == self.handshake.server_bytes.len() && waits {
            self.tries += 1;
        }
        // The client waits for the relay now.
        self.until = self.until.filter(|_| self.leaves);
        let is_poison = !self.requests.begin_again(&open.progress) || self.tries >= MAX_TRIES;
        // There is no client to read the replies.
        self.broken |= is_poison || self.gone;
        let pause = if now.duration_since(open.since) < PAUSE { PAUSE } else { Duration::ZERO };
        self.link = Link::None(now + pause);
    }

    fn put(&mut self, answer: Vec<u8>) {
        if !self.gone && !answer.is_empty() {
            self.out_bytes += answer.len();
            self.out.push_back(answer);
        }
    }

    /// Sends replies to the client. Returns whether there was room for any.
    fn send_replies(&mut self) -> bool {
        if self.out.is_empty() {
            return false;
        }
        let skips = std::iter::once(self.sent_bytes).chain(std::iter::repeat(0));
        let pieces = self.out.iter().zip(skips).take(MAX_PIECES);
        let pieces: Vec<_> =
            pieces.map(|(answer, sent_bytes)| IoSlice::new(&answer[sent_bytes..])).collect();
        let Ok(mut sent) = send(&self.socket, &pieces) else {
            self.gone = true;
            self.out.clear();
            (self.out_bytes, self.sent_bytes) = (0, 0);
            return true;
        };
        let more = sent > 0;
        sent += self.sent_bytes;
        while let Some(first) = self.out.front()
            && sent >= first.len()
        {
            sent -= first.len();
            self.out_bytes -= first.len();
            self.out.pop_front();
        }
        self.sent_bytes = sent;
        more
    }
}
