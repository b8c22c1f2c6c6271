//! A client of a relay, and its link to the worker that there is now.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::super::negotiation::MAX_REQUEST_BYTES;
use super::super::server::COURTESY;
use super::super::wire::{Head, REQUEST_BYTES, RawRequest, command, error};
use super::handshake::Handshake;
use super::requests::{Held, Progress, Requests};
use super::stream::{Got, Inbox, MAX_PIECES, Ready, Watched, send};

/// A link that ends at once is not followed by another at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Rounds of what there is to do for one client, before the others have their turn.
const ROUNDS: usize = 16;
/// What a client asks for and does not get while so many links end, one after the other, may be what
/// ends them.
const MAX_TRIES: u32 = 8;

/// The way to the worker.
enum Link {
    /// None. One is asked for then.
    None(Instant),
    /// The keeper was asked for one.
    Asked,
    Open(Open),
}

struct Open {
    socket: OwnedFd,
    inbox: Inbox,
    since: Instant,
    /// Of what the client has said in its handshake, so many bytes were said here, too,
    asked: usize,
    /// and so many of what it was told were told again.
    said: usize,
    progress: Progress,
}

/// What comes from a client next, in its requests.
enum Coming {
    Request,
    /// The data of a write.
    Data(Held),
    /// Those of one that was refused: so many bytes.
    Dropped {
        left: usize,
        cookie: u64,
    },
}

/// See the module's text.
pub(super) struct Client {
    socket: OwnedFd,
    inbox: Inbox,
    handshake: Handshake,
    /// Links that have ended before there was a greeting, or the answer to an option. A worker that
    /// serves nobody beside the guest's device model greets nobody.
    tries: u32,
    /// The client may take until then, if it has to do something.
    until: Option<Instant>,
    coming: Coming,
    requests: Requests,
    /// What it was not told yet, and so many bytes of that it was.
    out: VecDeque<Vec<u8>>,
    out_bytes: usize,
    told: usize,
    link: Link,
    /// Nothing more is taken from it.
    leaves: bool,
    /// It does not hear any more.
    gone: bool,
    /// It cannot be served on.
    broken: bool,
    /// There may be more to do at once.
    again: bool,
}

/// It is not to be gone on with.
struct Broken;

impl Client {
    pub(super) fn new(socket: OwnedFd) -> Client {
        Client {
            socket,
            inbox: Inbox::new(),
            handshake: Handshake::new(),
            tries: 0,
            until: None,
            coming: Coming::Request,
            requests: Requests::default(),
            out: VecDeque::new(),
            out_bytes: 0,
            told: 0,
            link: Link::None(Instant::now()),
            leaves: false,
            gone: false,
            broken: false,
            again: false,
        }
    }

    /// Whether the keeper is to be asked for a link. It counts as asked then.
    pub(super) fn wants_link(&mut self, now: Instant) -> bool {
        let wants = matches!(self.link, Link::None(at) if at <= now);
        if wants {
            self.link = Link::Asked;
        }
        wants
    }

    /// The keeper has answered.
    pub(super) fn link(&mut self, socket: Option<OwnedFd>) {
        let now = Instant::now();
        self.link = match socket {
            Some(socket) => Link::Open(Open {
                socket,
                inbox: Inbox::new(),
                since: now,
                asked: 0,
                said: 0,
                progress: Progress::new(),
            }),
            None => Link::None(now + PAUSE),
        };
        self.again = true;
    }

    /// It has gone, or has to.
    pub(super) fn is_over(&self) -> bool {
        let is_done = self.requests.is_empty() && (self.gone || self.out.is_empty());
        self.broken || (self.leaves && is_done)
    }

    /// The worker has what the client has asked for, as far as there was room for it.
    fn is_left_to_worker(&self) -> bool {
        matches!(&self.link, Link::Open(open) if self.is_agreed(open) && !self.has_more_for(open))
    }

    /// When it is to be gone on with at the latest.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let link = match self.link {
            Link::None(at) => Some(at),
            _ => None,
        };
        let again = self.again.then_some(now);
        [link, again, self.deadline()].into_iter().flatten().min()
    }

    /// When it has to have done what it is waited for.
    fn deadline(&self) -> Option<Instant> {
        let is_due = match self.leaves {
            true => self.requests.is_empty(),
            false => self.handshake.is_clients_turn(),
        };
        self.until.filter(|_| is_due)
    }

    /// What its socket is waited for.
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
        open.asked < self.handshake.asked.len()
            || (self.is_agreed(open) && self.requests.are_to_be_sent(&open.progress))
    }

    /// The worker has agreed to all that the client knows.
    fn is_agreed(&self, open: &Open) -> bool {
        self.handshake.is_through() && open.said == self.handshake.said.len()
    }

    /// There is a worker that works for it.
    fn is_served(&self) -> bool {
        matches!(&self.link, Link::Open(open) if self.is_agreed(open))
    }

    /// Whether more bytes of the client's could be understood now.
    fn takes_more(&self) -> bool {
        let room = match &self.coming {
            Coming::Request if self.handshake.is_through() => self.next_request().is_none(),
            Coming::Request => self.handshake.is_clients_turn(),
            _ => true,
        };
        room && !self.leaves
    }

    /// Does what there is to do.
    pub(super) fn go_on(&mut self, ready: Ready, now: Instant) {
        if ready.is_nothing() {
            return;
        }
        self.again = false;
        self.gone |= ready.gone;
        let is_late = self.deadline().is_some_and(|until| until <= now);
        // Who is gone was promised nothing that is not under way.
        self.broken |= is_late || (self.gone && !self.is_served());
        for _ in 0..ROUNDS {
            if self.is_over() {
                return;
            }
            let had_none = self.requests.is_empty();
            let mut more = self.hear_client();
            more |= self.use_link(now);
            more |= self.tell();
            if self.leaves && self.requests.is_empty() && !had_none {
                self.until = Some(now + COURTESY);
            }
            if !more {
                // What waits for space ends with the link. Else it would be carried out over newer data
                // of others (`requests.rs`, 5).
                self.broken |= self.gone && self.is_left_to_worker();
                return;
            }
        }
        self.again = true;
    }

    /// Takes what the client says, as far as there is room for it. Whether there was something.
    fn hear_client(&mut self) -> bool {
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

    /// Nothing more is taken from it. What it was promised it gets.
    fn leave(&mut self) {
        self.leaves = true;
        self.coming = Coming::Request;
        self.until = Some(Instant::now() + COURTESY);
    }

    fn understand(&mut self) -> bool {
        let mut more = false;
        while !self.leaves {
            let went_on = match self.handshake.is_through() {
                true => self.understand_request(),
                false => match self.handshake.hear_client(&mut self.inbox) {
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

    /// What stands first in the inbox, if it is a request, and whole.
    fn next_request(&self) -> Option<&[u8; REQUEST_BYTES]> {
        self.inbox.peek(REQUEST_BYTES).and_then(|bytes| bytes.try_into().ok())
    }

    fn understand_request(&mut self) -> bool {
        match std::mem::replace(&mut self.coming, Coming::Request) {
            Coming::Request => self.begin_request(),
            Coming::Data(mut held) => {
                let before = held.data.len();
                let all = held.data_bytes();
                self.inbox.pour(&mut held.data, all);
                let (now, went_on) = (held.data.len(), held.data.len() > before);
                if now == all {
                    self.requests.add(held);
                    return true;
                }
                self.coming = Coming::Data(held);
                went_on
            }
            Coming::Dropped { left, cookie } => {
                let here = self.inbox.left().len().min(left);
                self.inbox.skip(here);
                if here == left {
                    self.put(Head::simple(cookie, error::INVALID).bytes().to_vec());
                    return true;
                }
                self.coming = Coming::Dropped { left: left - here, cookie };
                here > 0
            }
        }
    }

    fn begin_request(&mut self) -> bool {
        let Some(head) = self.next_request() else { return false };
        let raw = RawRequest::parse(head).filter(|raw| raw.command != command::DISCONNECT);
        // It wants no more; or where its next request begins is unknown.
        let Some(raw) = raw else {
            self.leave();
            return true;
        };
        let held = Held::new(head, &raw);
        if !self.requests.have_room(&held, self.out.len(), self.out_bytes) {
            return false;
        }
        self.inbox.skip(REQUEST_BYTES);
        if raw.command == command::WRITE && raw.len > MAX_REQUEST_BYTES {
            // The worker would refuse it, and nobody holds its data (nbd-rules.md 3).
            self.coming = Coming::Dropped { left: raw.len as usize, cookie: raw.cookie };
        } else if held.data_bytes() > 0 {
            self.coming = Coming::Data(held);
        } else {
            self.requests.add(held);
        }
        true
    }

    /// Talks with the worker. Whether there was something to say or to hear.
    fn use_link(&mut self, now: Instant) -> bool {
        let mut open = match std::mem::replace(&mut self.link, Link::Asked) {
            Link::Open(open) => open,
            none => {
                self.link = none;
                return false;
            }
        };
        match self.talk(&mut open) {
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

    fn talk(&mut self, open: &mut Open) -> Result<bool, Broken> {
        let mut more = false;
        let asked = &self.handshake.asked[open.asked..];
        if !asked.is_empty() {
            let sent = send(&open.socket, &[IoSlice::new(asked)]).map_err(|_| Broken)?;
            open.asked += sent;
            more |= sent > 0;
        } else if self.is_agreed(open) {
            more |= self.requests.send(&open.socket, &mut open.progress).map_err(|_| Broken)?;
        }
        let got = open.inbox.receive(&open.socket);
        more |= self.hear_link(open)?;
        match got {
            Got::Bytes => Ok(true),
            Got::Nothing => Ok(more),
            // What it has said before counts.
            Got::End => Err(Broken),
        }
    }

    /// Takes what the worker has said. Whether something new was there.
    fn hear_link(&mut self, open: &mut Open) -> Result<bool, Broken> {
        let mut more = false;
        loop {
            let known = &self.handshake.said[open.said..];
            let count = known.len().min(open.inbox.left().len());
            if open.inbox.left()[..count] != known[..count] {
                // It serves another disk than the one that the client knows: one that has grown, say.
                self.broken = true;
                return Ok(true);
            }
            open.inbox.skip(count);
            open.said += count;
            if count < known.len() {
                return Ok(more);
            }
            if self.handshake.is_through() {
                break;
            }
            match self.handshake.hear_server(&mut open.inbox) {
                Ok(Some(at)) => {
                    open.said = self.handshake.said.len();
                    let new = self.handshake.said[at..].to_vec();
                    self.put(new);
                }
                Ok(None) => return Ok(more),
                Err(_) => return Err(Broken),
            }
            more = true;
            self.tries = 0;
            // For all of it, from its beginning on.
            self.until.get_or_insert_with(|| Instant::now() + COURTESY);
            if self.handshake.is_over() {
                self.leave();
                return Ok(true);
            }
        }
        while let Some(answer) =
            self.requests.hear(&mut open.inbox, &mut open.progress).map_err(|_| Broken)?
        {
            more = true;
            self.put(answer);
        }
        Ok(more)
    }

    /// A link has ended. The next one is asked for.
    fn lose(&mut self, open: &Open, now: Instant) {
        let waits = self.handshake.is_asked() || self.handshake.said.is_empty();
        if open.said == self.handshake.said.len() && waits {
            self.tries += 1;
        }
        // It waits for us now.
        self.until = self.until.filter(|_| self.leaves);
        let is_poison = !self.requests.begin_again(&open.progress) || self.tries >= MAX_TRIES;
        // Nobody would hear the answers.
        self.broken |= is_poison || self.gone;
        let pause = if now.duration_since(open.since) < PAUSE { PAUSE } else { Duration::ZERO };
        self.link = Link::None(now + pause);
    }

    fn put(&mut self, answer: Vec<u8>) {
        if !self.gone {
            self.out_bytes += answer.len();
            self.out.push_back(answer);
        }
    }

    /// Tells the client what it has to hear. Whether there was room for some.
    fn tell(&mut self) -> bool {
        if self.out.is_empty() {
            return false;
        }
        let skips = std::iter::once(self.told).chain(std::iter::repeat(0));
        let pieces = self.out.iter().zip(skips).take(MAX_PIECES);
        let pieces: Vec<_> = pieces.map(|(answer, told)| IoSlice::new(&answer[told..])).collect();
        let Ok(mut sent) = send(&self.socket, &pieces) else {
            self.gone = true;
            self.out.clear();
            (self.out_bytes, self.told) = (0, 0);
            return true;
        };
        let more = sent > 0;
        sent += self.told;
        while let Some(first) = self.out.front()
            && sent >= first.len()
        {
            sent -= first.len();
            self.out_bytes -= first.len();
            self.out.pop_front();
        }
        self.told = sent;
        more
    }
}
