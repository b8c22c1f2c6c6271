//! One connection: its requests go to the medium, and its replies come back in any order.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_nbd::client::Session as Name;
use ferrite_nbd::wire::{Head, REQUEST_BYTES, RawRequest, command, error, flag};
use rustix::net::{Shutdown, shutdown};

use crate::budget::Permit;
use crate::greeting::{MAX_REQUEST_BYTES, Offer, greet, read_exact};
use crate::links::Links;
use crate::outbox::{Message, Outbox};
use crate::{Done, Medium, Request, What};

/// How long a new connection waits for the end of those that it replaces. The client tries again.
const REPLACING: Duration = Duration::from_secs(8);
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

#[derive(Default)]
struct Gate {
    closed: bool,
    in_flight: usize,
    name: Option<Name>,
}

/// A reply. Its request's part of the budget is given back when it is sent.
struct Reply {
    head: Head,
    data: Vec<u8>,
    _permit: Permit,
}

impl Message for Reply {
    fn head(&self) -> &[u8] {
        self.head.bytes()
    }

    fn data(&self) -> &[u8] {
        &self.data
    }
}

/// See the module text.
pub(crate) struct Session {
    socket: OwnedFd,
    outbox: Outbox<Reply>,
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl Session {
    pub(crate) fn new(socket: OwnedFd) -> Session {
        let (outbox, gate, changed) = (Outbox::default(), Mutex::default(), Condvar::new());
        Session { socket, outbox, gate, changed }
    }

    /// Serves the client until it leaves.
    pub(crate) fn run<M: Medium>(self: &Arc<Self>, links: &Arc<Links<M>>) {
        let Some(bytes) = links.medium().bytes() else { return self.close() };
        let offer = Offer { bytes, read_only: links.medium().is_read_only() };
        let greeted = greet(self.socket.as_fd(), &offer, |name| self.replace(links, name));
        if let Ok(Some(())) = greeted {
            let sender = self.clone();
            let started = std::thread::Builder::new()
                .name("replies".into())
                .spawn(move || sender.outbox.run(&sender.socket));
            // The first request that is malformed, and the end of the stream.
            if started.is_ok() {
                while self.next(links, bytes).is_some() {}
            }
        }
        self.close();
        self.wait(None);
    }

    /// Takes no more requests, and waits for those under way. False: not in time.
    pub(crate) fn end(&self, until: Instant) -> bool {
        self.close();
        self.wait(Some(until))
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more requests. The client sees the end of the stream.
    pub(crate) fn close(&self) {
        self.gate().closed = true;
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.outbox.close();
    }

    fn wait(&self, until: Option<Instant>) -> bool {
        let mut gate = self.gate();
        while gate.in_flight > 0 {
            let left =
                until.map_or(REPLACING, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            gate = self.changed.wait_timeout(gate, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends the connections that this one replaces: nothing of theirs may come after its first request.
    fn replace<M: Medium>(self: &Arc<Self>, links: &Links<M>, name: Name) -> bool {
        self.gate().name = Some(name);
        let until = Instant::now() + REPLACING;
        let is_old = |other: &&Arc<Session>| {
            !Arc::ptr_eq(other, self) && other.gate().name.is_some_and(|old| name.replaces(&old))
        };
        links.sessions().iter().filter(is_old).all(|old| old.end(until))
    }

    /// Handles one request. `None`: there is no next one.
    fn next<M: Medium>(self: &Arc<Self>, links: &Arc<Links<M>>, bytes: u64) -> Option<()> {
        let mut head = [0; REQUEST_BYTES];
        read_exact(self.socket.as_fd(), &mut head).ok()?;
        let raw = RawRequest::parse(&head)?;
        let moves = matches!(raw.command, command::READ | command::WRITE);
        if raw.command == command::DISCONNECT || (moves && raw.len > MAX_REQUEST_BYTES.into()) {
            return None;
        }
        let len = if moves { raw.len as usize } else { 0 };
        let permit = links.budget.take(len);
        let mut data = vec![0; len];
        if raw.command == command::WRITE {
            read_exact(self.socket.as_fd(), &mut data).ok()?;
        }
        match checked(&raw, links.medium(), bytes) {
            Ok(request) => self.submit(links, raw, request, data, permit),
            Err(e) => {
                let head = Head::simple(raw.cookie, e);
                self.outbox.push(&self.socket, Reply { head, data: Vec::new(), _permit: permit });
                Some(())
            }
        }
    }

    fn submit<M: Medium>(
        self: &Arc<Self>,
        links: &Arc<Links<M>>,
        raw: RawRequest,
        request: Request,
        data: Vec<u8>,
        permit: Permit,
    ) -> Option<()> {
        {
            let mut gate = self.gate();
            if gate.closed {
                return None;
            }
            gate.in_flight += 1;
        }
        let (session, of_done) = (self.clone(), links.clone());
        let done: Done = Box::new(move |result, data| {
            session.answer(of_done.medium(), raw, result, data, permit);
        });
        links.medium().submit(request, data, done);
        Some(())
    }

    fn answer(
        &self,
        medium: &impl Medium,
        raw: RawRequest,
        result: Result<usize, i32>,
        data: Vec<u8>,
        permit: Permit,
    ) {
        let code = match result {
            Ok(_) => 0,
            Err(e) => {
                medium.failed(e);
                if matches!(e, ENOSPC | EDQUOT) { error::NO_SPACE } else { error::IO }
            }
        };
        let data = if raw.command == command::READ && code == 0 { data } else { Vec::new() };
        let reply = Reply { head: Head::simple(raw.cookie, code), data, _permit: permit };
        self.outbox.push(&self.socket, reply);
        self.gate().in_flight -= 1;
        self.changed.notify_all();
    }
}

/// The request, if the medium may have it.
fn checked(raw: &RawRequest, medium: &impl Medium, bytes: u64) -> Result<Request, u32> {
    let what = match raw.command {
        command::READ => What::Read,
        command::WRITE => What::Write,
        command::TRIM => What::Discard,
        command::WRITE_ZEROES => What::Zero { thick: raw.has(flag::NO_HOLE) },
        command::FLUSH => What::Flush,
        _ => return Err(error::INVALID),
    };
    let changes = !matches!(what, What::Read | What::Flush);
    let fits = what == What::Flush
        || raw.len > 0 && raw.offset.checked_add(raw.len).is_some_and(|end| end <= bytes);
    let (offset, len) = if what == What::Flush { (0, 0) } else { (raw.offset, raw.len) };
    match () {
        () if !fits => Err(error::INVALID),
        () if changes && medium.is_read_only() => Err(error::PERM),
        () if medium.has_lost() => Err(error::IO),
        () => Ok(Request { what, offset, len, durable: changes && raw.has(flag::FUA) }),
    }
}
