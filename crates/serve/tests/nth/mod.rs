//! Calls for a resource that fail when it is their turn: the n-th of its kind, around the real
//! engine, hypervisor and store.

#![allow(unreachable_pub, reason = "as in every module of tests")]

use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{Completion, Engine, FileId, Op, Token, Transfer};
use ferrite_loopback::Loopback;
use ferrite_serve::blkif::lifecycle::EngineFactory;
use ferrite_xen::hypervisor::{
    CopySegment, Direction, DomId, GNTST_GENERAL_ERROR, GrantRef, Hypervisor, HypervisorError,
    Link, RingMemory, STATUS_UNTOUCHED,
};
use ferrite_xen::mover::Moving;
use ferrite_xen::store::Store;
use ferrite_xen::store::wire::{Decoder, ErrorName, Message};

pub const EINTR: i32 = 4;
pub const EIO: i32 = 5;
pub const EAGAIN: i32 = 11;
pub const ENOMEM: i32 = 12;
pub const ENOSPC: i32 = 28;

/// What can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A storage engine is built.
    MakeEngine,
    /// It takes a file.
    AddFile,
    /// It hands operations to the kernel without waiting.
    Submit,
    /// The same, and waits.
    Wait,
    /// An operation on storage ends.
    Storage,
    /// An operation ends that waited for a descriptor.
    Readable,
    /// A ring is mapped and a channel bound.
    Connect,
    /// Grants are copied.
    Copy,
    /// One of them is.
    CopySegment,
    /// The guest is sent an event.
    Notify,
    /// The guest's event is taken.
    TakeEvent,
    /// Its events are let through again.
    Rearm,
    /// The store is asked for anything.
    Store,
}

/// From the n-th call of one kind on, so many fail.
#[derive(Debug)]
pub struct Nth {
    pub call: Call,
    pub n: u64,
    pub times: u64,
    pub errno: i32,
    seen: AtomicU64,
}

impl Nth {
    pub fn new(call: Call, n: u64, times: u64, errno: i32) -> Arc<Nth> {
        Arc::new(Nth { call, n, times, errno, seen: AtomicU64::new(0) })
    }

    /// Whether there were so many calls that one failed.
    pub fn was_reached(&self) -> bool {
        self.seen.load(Ordering::SeqCst) >= self.n
    }

    /// Counts a call; the error number that it fails with.
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

/// Engines as a [`Plan`](super::rig::Plan) takes them.
pub fn engines(nth: &Arc<Nth>) -> EngineFactory {
    let (nth, engines) = (nth.clone(), super::rig::engines());
    Arc::new(move |arena, entries| {
        nth.check(Call::MakeEngine)?;
        let inner = engines(arena, entries)?;
        Ok(Box::new(FailingEngine { inner, nth: nth.clone(), failed: Vec::new() }))
    })
}

struct FailingEngine {
    inner: Box<dyn Engine>,
    nth: Arc<Nth>,
    failed: Vec<Completion>,
}

impl Engine for FailingEngine {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn add_file(&mut self, file: Arc<OwnedFd>) -> io::Result<FileId> {
        self.nth.check(Call::AddFile)?;
        self.inner.add_file(file)
    }

    fn clear_files(&mut self) -> io::Result<()> {
        self.inner.clear_files()
    }

    fn push(&mut self, token: Token, op: Op) {
        let call = match op {
            Op::Readable { .. } | Op::Timer { .. } => Call::Readable,
            _ => Call::Storage,
        };
        match self.nth.errno(call) {
            Some(errno) => self.failed.push(Completion { token, raw: -errno }),
            None => self.inner.push(token, op),
        }
    }

    fn push_vectored(
        &mut self,
        token: Token,
        transfer: Transfer,
        file: FileId,
        offset: u64,
        bufs: &[Span],
    ) {
        match self.nth.errno(Call::Storage) {
            Some(errno) => self.failed.push(Completion { token, raw: -errno }),
            None => self.inner.push_vectored(token, transfer, file, offset, bufs),
        }
    }

    fn cancel(&mut self, token: Token) {
        self.inner.cancel(token);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.nth.check(Call::Submit)?;
        self.inner.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.nth.check(Call::Wait)?;
        match self.failed.is_empty() {
            true => self.inner.wait(timeout),
            false => self.inner.submit(),
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.failed);
        self.inner.reap(out);
    }

    fn may_reap(&mut self) -> bool {
        !self.failed.is_empty() || self.inner.may_reap()
    }

    fn in_flight(&self) -> usize {
        self.failed.len() + self.inner.in_flight()
    }
}

/// The way to guests.
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

/// What the hypervisor says of one page that it did not copy, for want of this or that.
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

/// A way to the store behind `server`, which refuses the n-th request itself.
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

/// Until the end of the stream, or of whom they are for.
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
