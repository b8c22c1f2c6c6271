//! One connection: its requests go to librbd, and its replies come back in any order.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_nbd::client::Session as Name;
use ferrite_nbd::wire::{Head, REQUEST_BYTES, RawRequest, command, error, flag};
use rustix::net::{Shutdown, shutdown};

use crate::budget::Permit;
use crate::ffi::Done;
use crate::greeting::{MAX_REQUEST_BYTES, Offer, greet, read_exact};
use crate::outbox::{Outbox, Reply};
use crate::serve::Disk;

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

/// See the module text.
pub(crate) struct Session {
    socket: OwnedFd,
    outbox: Outbox,
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl Session {
    pub(crate) fn new(socket: OwnedFd) -> Session {
        let (outbox, gate, changed) = (Outbox::default(), Mutex::default(), Condvar::new());
        Session { socket, outbox, gate, changed }
    }

    /// Serves the client until it leaves.
    pub(crate) fn run(self: &Arc<Self>, disk: &Arc<Disk>) {
        let Ok(bytes) = disk.opened.image.bytes() else { return self.close() };
        let offer = Offer { bytes, read_only: disk.opened.read_only };
        let greeted = greet(self.socket.as_fd(), &offer, |name| self.replace(disk, name));
        if let Ok(Some(())) = greeted {
            let sender = self.clone();
            let started = std::thread::Builder::new()
                .name("replies".into())
                .spawn(move || sender.outbox.run(&sender.socket));
            // The first request that is malformed, and the end of the stream.
            if started.is_ok() {
                while self.next(disk, bytes).is_some() {}
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
    fn replace(self: &Arc<Self>, disk: &Disk, name: Name) -> bool {
        self.gate().name = Some(name);
        let until = Instant::now() + REPLACING;
        let is_old = |other: &&Arc<Session>| {
            !Arc::ptr_eq(other, self) && other.gate().name.is_some_and(|old| name.replaces(&old))
        };
        disk.sessions().iter().filter(is_old).all(|old| old.end(until))
    }

    /// Handles one request. `None`: there is no next one.
    fn next(self: &Arc<Self>, disk: &Arc<Disk>, bytes: u64) -> Option<()> {
        let mut head = [0; REQUEST_BYTES];
        read_exact(self.socket.as_fd(), &mut head).ok()?;
        let raw = RawRequest::parse(&head)?;
        let moves = matches!(raw.command, command::READ | command::WRITE);
        if raw.command == command::DISCONNECT || (moves && raw.len > MAX_REQUEST_BYTES.into()) {
            return None;
        }
        let len = if moves { raw.len as usize } else { 0 };
        let permit = disk.budget.take(len);
        let mut data = vec![0; len];
        if raw.command == command::WRITE {
            read_exact(self.socket.as_fd(), &mut data).ok()?;
        }
        match checked(&raw, disk, bytes) {
            Ok(()) => self.submit(disk, raw, data, permit),
            Err(e) => {
                let head = Head::simple(raw.cookie, e);
                self.outbox
                    .push(&self.socket, Reply { head, data: Vec::new(), _permit: Some(permit) });
                Some(())
            }
        }
    }

    fn submit(
        self: &Arc<Self>,
        disk: &Arc<Disk>,
        raw: RawRequest,
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
        let (session, of_done) = (self.clone(), disk.clone());
        let answer: Done =
            Box::new(move |result, data| session.answer(&of_done, raw, result, data, permit));
        let image = &disk.opened.image;
        let done: Done = match raw.has(flag::FUA) && raw.command != command::READ {
            // The write first, then a flush; the answer when both are done.
            true => {
                let disk = disk.clone();
                Box::new(move |result, data| match result {
                    Ok(_) => disk.opened.image.flush(answer),
                    failed => answer(failed, data),
                })
            }
            false => answer,
        };
        match raw.command {
            command::READ => image.read(raw.offset, data, done),
            command::WRITE => image.write(raw.offset, data, done),
            command::TRIM => image.discard(raw.offset, raw.len, done),
            command::WRITE_ZEROES => {
                image.zero(raw.offset, raw.len as usize, raw.has(flag::NO_HOLE), done);
            }
            _ => image.flush(done),
        }
        Some(())
    }

    fn answer(
        &self,
        disk: &Disk,
        raw: RawRequest,
        result: Result<usize, i32>,
        data: Vec<u8>,
        permit: Permit,
    ) {
        let code = match result {
            Ok(_) => 0,
            Err(e) => {
                disk.failed(e);
                if matches!(e, ENOSPC | EDQUOT) { error::NO_SPACE } else { error::IO }
            }
        };
        let data = if raw.command == command::READ && code == 0 { data } else { Vec::new() };
        let reply = Reply { head: Head::simple(raw.cookie, code), data, _permit: Some(permit) };
        self.outbox.push(&self.socket, reply);
        self.gate().in_flight -= 1;
        self.changed.notify_all();
    }
}

/// Whether a request may go to the cluster.
fn checked(raw: &RawRequest, disk: &Disk, bytes: u64) -> Result<(), u32> {
    let changes = matches!(raw.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    let is_known = changes || matches!(raw.command, command::READ | command::FLUSH);
    let fits = raw.command == command::FLUSH
        || raw.len > 0 && raw.offset.checked_add(raw.len).is_some_and(|end| end <= bytes);
    match () {
        () if !is_known || !fits => Err(error::INVALID),
        () if changes && disk.opened.read_only => Err(error::PERM),
        () if disk.has_lost() => Err(error::IO),
        () => Ok(()),
    }
}
