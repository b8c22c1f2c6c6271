//! Fails the n-th call for a resource: by wrappers of the real hypervisor and store, and by a rule for the engine.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferrite_io::arena::Arena;
use ferrite_loopback::Loopback;
use ferrite_testkit::errno::{EAGAIN, EINTR, ENOMEM, ENOSPC};
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use ferrite_xen::hypervisor::{
    CopySegment, Direction, DomId, GNTST_GENERAL_ERROR, GrantRef, Hypervisor, HypervisorError,
    Link, RingMemory, STATUS_UNTOUCHED,
};
use ferrite_xen::mover::Moving;
use ferrite_xen::store::Store;
use ferrite_xen::store::wire::{Decoder, ErrorName, Message};

/// The calls that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The end of an operation on storage.
    Storage,
    /// A call of the engine.
    Engine(Kind),
    /// Mapping a ring and binding a channel.
    Connect,
    /// Copying grants.
    Copy,
    /// Copying one segment.
    CopySegment,
    /// Sending the guest an event.
    Notify,
    /// Taking the guest's event.
    TakeEvent,
    /// Enabling events again.
    Rearm,
    /// Any request to the store.
    Store,
}

/// From the n-th call of one kind on, so many fail.
pub struct Nth {
    pub call: Call,
    pub n: u64,
    pub times: u64,
    pub errno: i32,
    seen: AtomicU64,
    /// The faults of the engine.
    pub faults: Faults,
}

impl fmt::Debug for Nth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Nth { call, n, times, errno, .. } = self;
        write!(f, "{call:?} {n}, {times} times, errno {errno}, {} seen", self.seen())
    }
}

impl Nth {
    pub fn new(call: Call, n: u64, times: u64, errno: i32) -> Arc<Nth> {
        let faults = Faults::none();
        let ops = match call {
            Call::Storage => Some(Ops::storage()),
            Call::Engine(kind) => Some(kind.into()),
            _ => None,
        };
        faults.set(ops.map(|ops| ops.fail(errno).after(n - 1).times(times)));
        Arc::new(Nth { call, n, times, errno, seen: AtomicU64::new(0), faults })
    }

    fn seen(&self) -> u64 {
        match self.call {
            Call::Storage => self.faults.seen(&Kind::STORAGE),
            Call::Engine(kind) => self.faults.seen(&[kind]),
            _ => self.seen.load(Ordering::SeqCst),
        }
    }

    /// Whether there were enough calls for a failure.
    pub fn was_reached(&self) -> bool {
        self.seen() >= self.n
    }

    /// Counts a call; returns its error number, if it fails.
    fn errno(&self, call: Call) -> Option<i32> {
        if call != self.call {
            return None;
        }
        let number = self.seen.fetch_add(1, Ordering::SeqCst) + 1;
        (self.n..self.n.saturating_add(self.times)).contains(&number).then_some(self.errno)
    }

    fn check(&self, call: Call) -> io::Result<()> {
        self.errno(call).map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

/// Wraps the access to guests.
pub struct FailingHypervisor {
    pub inner: Loopback,
    pub nth: Arc<Nth>,
}

impl Hypervisor for FailingHypervisor {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn connect(
        &self,
        domid: DomId,
        ring: &[GrantRef],
        port: u32,
        moving: &Moving,
    ) -> Result<Box<dyn Link>, HypervisorError> {
        self.nth.check(Call::Connect).map_err(|source| HypervisorError::Host {
            what: "map a ring".into(),
            source,
            hint: "it was made to fail",
        })?;
        let inner = self.inner.connect(domid, ring, port, moving)?;
        Ok(Box::new(FailingLink { inner, nth: self.nth.clone() }))
    }
}

struct FailingLink {
    inner: Box<dyn Link>,
    nth: Arc<Nth>,
}

/// The hypervisor's status of a page that it could not copy, for a lack of resources.
fn status(errno: i32) -> i16 {
    match errno {
        ENOMEM => -7,
        EAGAIN => -12,
        ENOSPC => -9,
        EINTR => STATUS_UNTOUCHED,
        _ => GNTST_GENERAL_ERROR,
    }
}

impl Link for FailingLink {
    fn ring(&self) -> RingMemory {
        self.inner.ring()
    }

    fn copy(
        &mut self,
        arena: &Arena,
        direction: Direction,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        self.nth.check(Call::Copy)?;
        for segment in segments {
            match self.nth.errno(Call::CopySegment) {
                Some(errno) => segment.status = status(errno),
                None => self.inner.copy(arena, direction, std::slice::from_mut(segment))?,
            }
        }
        Ok(())
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.event_fd()
    }

    fn take_event(&mut self) -> io::Result<bool> {
        self.nth.check(Call::TakeEvent)?;
        self.inner.take_event()
    }

    fn event_taken(&mut self) {
        self.inner.event_taken();
    }

    fn rearm(&mut self) -> io::Result<()> {
        self.nth.check(Call::Rearm)?;
        self.inner.rearm()
    }

    fn notify(&mut self) -> io::Result<()> {
        self.nth.check(Call::Notify)?;
        self.inner.notify()
    }
}

/// A connection to the store through `server`, which refuses the n-th request itself.
pub fn store(server: OwnedFd, nth: &Arc<Nth>) -> Store {
    let (client, ours) = UnixStream::pair().unwrap();
    let server = UnixStream::from(server);
    server.set_nonblocking(false).unwrap();
    let replies = Arc::new(Mutex::new(ours.try_clone().unwrap()));
    std::thread::spawn({
        let (server, replies) = (server.try_clone().unwrap(), replies.clone());
        move || {
            each_message(&server, |message| send(&replies, message));
            let _ = replies.lock().unwrap().shutdown(std::net::Shutdown::Both);
        }
    });
    std::thread::spawn({
        let nth = nth.clone();
        move || {
            let name = ErrorName::from_errno(nth.errno).unwrap_or(ErrorName::TooBig);
            each_message(&ours, |message| match nth.errno(Call::Store) {
                Some(_) => send(&replies, &Message::error(&message.header, name)),
                None => (&server).write_all(&message.encode()),
            });
            let _ = server.shutdown(std::net::Shutdown::Both);
        }
    });
    Store::from_fd(client.into())
}

fn send(to: &Mutex<UnixStream>, message: &Message) -> io::Result<()> {
    to.lock().unwrap().write_all(&message.encode())
}

/// Reads messages until the end of either stream.
fn each_message(mut from: &UnixStream, mut f: impl FnMut(&Message) -> io::Result<()>) {
    let mut decoder = Decoder::new();
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        decoder.push(&bytes[..n]);
        while let Some(message) = decoder.next_message().unwrap() {
            if f(&message).is_err() {
                return;
            }
        }
    }
}
