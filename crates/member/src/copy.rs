//! A copy in use: the shell of its state machine. Threads of its own do what that says.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_pool::wire::{
    BLOCK_BYTES, HASH_PIECE, Header, Kind, regions_from_bytes, regions_to_bytes,
};
use ferrite_pool::{
    Blocks, BootId, ConnId, Data, Generation, Io, Member, MemberEffect as Effect, OpId, OwnerId,
    Reply, Request as Message, RequestId, Rules, Stored,
};
use rustix::io::Errno;

use crate::Fault;
use crate::folder::{Files, Folder};
use crate::link::{Link, Room};
use crate::medium::Medium;
use crate::state::{Fixed, Slot};

/// Most threads of a copy.
const MAX_THREADS: usize = 4;
/// How long a thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(5);
/// Address space of a thread's stack.
const STACK_BYTES: usize = 256 << 10;
/// Bytes that are compared and hashed at a time.
const PIECE: usize = 256 << 10;

/// A copy in use.
pub(crate) struct Copy {
    fixed: Fixed,
    medium: Medium,
    inner: Mutex<Inner>,
    more: Condvar,
}

struct Inner {
    machine: Member,
    /// The number of the newest state in the file.
    number: u64,
    links: BTreeMap<ConnId, Arc<Link>>,
    requests: BTreeMap<(ConnId, OpId), Arc<Request>>,
    /// The results of reads and hashes.
    found: BTreeMap<(ConnId, OpId), Vec<u8>>,
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Why nothing works any more.
    failed: Option<Fault>,
}

/// A request of an owner.
pub(crate) struct Request {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) _room: Room,
}

enum Job {
    Store(Stored),
    /// Asks the medium whether no other host has it, and then the state machine (R5).
    Confirm(ConnId, OpId),
    Medium(ConnId, OpId, Io, Arc<Request>),
}

impl Copy {
    pub(crate) fn new(files: Files, boot: BootId) -> Copy {
        let Files { medium, slot: Slot { number, fixed, stored } } = files;
        if stored.incomplete {
            medium.forget_memory();
        }
        let machine = Member::new(stored, boot, fixed.region_blocks(), Rules::default());
        let inner = Inner {
            machine,
            number,
            links: BTreeMap::new(),
            requests: BTreeMap::new(),
            found: BTreeMap::new(),
            jobs: VecDeque::new(),
            threads: 0,
            idle: 0,
            failed: None,
        };
        Copy { fixed, medium, inner: Mutex::new(inner), more: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of a region.
    pub(crate) fn region_bytes(&self) -> u64 {
        self.fixed.region_bytes
    }

    /// Begins a session of `generation`.
    pub(crate) fn open(
        self: &Arc<Copy>,
        conn: ConnId,
        link: &Arc<Link>,
        header: Header,
    ) -> Result<(), Fault> {
        let mut inner = self.lock();
        if let Some(failed) = &inner.failed {
            return Err(failed.clone());
        }
        inner.links.insert(conn, link.clone());
        let (generation, owner) = (Generation(header.start), OwnerId(header.len));
        let effects = inner.machine.request(conn, Message::Open { generation, owner });
        self.carry_out(&mut inner, effects);
        Ok(())
    }

    /// Takes a request within a session.
    pub(crate) fn request(self: &Arc<Copy>, conn: ConnId, request: Request) -> Result<(), Fault> {
        let io = self.io(&request)?;
        let op = OpId(request.header.op);
        let mut inner = self.lock();
        if inner.requests.contains_key(&(conn, op)) {
            return Err(refused(format!("request {} is under way already", op.0)));
        }
        if inner.machine.is_session(conn) {
            inner.requests.insert((conn, op), Arc::new(request));
        }
        if matches!(io, Io::Confirm) && self.medium.asks_who_has_it().is_some() {
            inner.jobs.push_back(Job::Confirm(conn, op));
            self.see_to_threads(&mut inner);
            return Ok(());
        }
        let effects = inner.machine.request(conn, Message::Io { op, io });
        self.carry_out(&mut inner, effects);
        Ok(())
    }

    /// A connection has ended.
    pub(crate) fn ended(self: &Arc<Copy>, conn: ConnId) {
        let mut inner = self.lock();
        let effects = inner.machine.ended(conn);
        inner.forget(conn);
        self.carry_out(&mut inner, effects);
        if self.medium.has_failed() {
            self.more.notify_all();
        }
    }

    /// Removes the copy for good, if this connection has its session.
    pub(crate) fn remove(self: &Arc<Copy>, conn: ConnId, folder: &Folder) -> Result<(), Fault> {
        // The lock is held, so that no later owner's session begins meanwhile.
        let mut inner = self.lock();
        if !inner.machine.is_session(conn) {
            return Err(refused("it is not the session's".to_owned()));
        }
        self.go(&mut inner, folder)
    }

    /// Removes the copy for good, also under the session of an owner.
    pub(crate) fn discard(self: &Arc<Copy>, folder: &Folder) -> Result<(), Fault> {
        let mut inner = self.lock();
        self.go(&mut inner, folder)?;
        let links: Vec<_> = inner.links.keys().copied().collect();
        links.into_iter().for_each(|conn| inner.close(conn));
        Ok(())
    }

    /// Its identifier.
    pub(crate) fn id(&self) -> [u8; 16] {
        self.fixed.id
    }

    fn go(&self, inner: &mut Inner, folder: &Folder) -> Result<(), Fault> {
        folder.remove(&self.fixed)?;
        let gone = Fault::new("cannot use a copy", "it was removed", "see ferrite pool status");
        inner.failed = Some(gone.with(Errno::STALE));
        Ok(())
    }

    /// The operation of a request, checked.
    fn io(&self, request: &Request) -> Result<Io, Fault> {
        let Header { kind, op, start, len, .. } = request.header;
        let bytes = match kind {
            Kind::Write | Kind::Repair => request.payload.len() as u64,
            _ => len,
        };
        let blocks = || {
            let end = start.checked_add(bytes).filter(|end| *end <= self.fixed.size);
            let is_whole = bytes > 0 && (start | bytes).is_multiple_of(BLOCK_BYTES);
            let end = end.filter(|_| is_whole).ok_or_else(|| {
                refused(format!("{bytes} bytes at {start} of {} are not allowed", self.fixed.size))
            })?;
            Ok(Blocks { start: start / BLOCK_BYTES, end: end / BLOCK_BYTES })
        };
        let regions = || {
            let regions =
                regions_from_bytes(&request.payload).map_err(|e| refused(e.to_string()))?;
            match regions.iter().all(|region| region.0 < self.fixed.regions()) {
                true => Ok(regions.into_iter().collect()),
                false => Err(refused("a region lies behind the end".to_owned())),
            }
        };
        let data = Data::OfRequest(RequestId(op));
        Ok(match kind {
            Kind::Write | Kind::Zero => Io::Write { blocks: blocks()?, data },
            Kind::Repair => Io::Repair { blocks: blocks()?, data },
            Kind::Read | Kind::Hash => Io::Read { blocks: blocks()? },
            Kind::Flush => Io::Flush,
            Kind::Confirm => Io::Confirm,
            Kind::Bits => Io::Bits,
            Kind::Mark => Io::Mark(regions()?),
            Kind::Clear => Io::Clear(regions()?),
            Kind::Complete => Io::Complete,
            other => return Err(refused(format!("{other:?} is no request of a session"))),
        })
    }

    /// Carries out what the state machine says, in its order.
    fn carry_out(self: &Arc<Copy>, inner: &mut Inner, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Store(stored) => inner.jobs.push_front(Job::Store(stored)),
                Effect::Start(conn, op, io) => {
                    if let Some(request) = inner.requests.get(&(conn, op)) {
                        inner.jobs.push_back(Job::Medium(conn, op, io, request.clone()));
                    }
                }
                Effect::Send(conn, reply) => self.send(inner, conn, reply),
                Effect::Close(conn) => inner.close(conn),
            }
        }
        self.see_to_threads(inner);
    }

    fn send(&self, inner: &mut Inner, conn: ConnId, reply: Reply) {
        let (kind, op, start, len, payload) = match reply {
            Reply::Opened { incomplete, dirty } => {
                let payload = regions_to_bytes(dirty);
                (Kind::Opened, OpId(0), u64::from(incomplete), self.region_bytes(), payload)
            }
            Reply::Refused { stored } => (Kind::Refused, OpId(0), stored.0, 0, Vec::new()),
            Reply::Done { op } => {
                (Kind::Done, op, 0, 0, inner.found.remove(&(conn, op)).unwrap_or_default())
            }
            Reply::Bits { op, dirty } => (Kind::Dirty, op, 0, 0, regions_to_bytes(dirty)),
        };
        let request = inner.requests.remove(&(conn, op));
        if let Some(link) = inner.links.get(&conn) {
            let header = Header { kind, op: op.0, start, len, payload: payload.len() as u32 };
            link.answer(header, payload, request);
        }
    }

    /// Wakes a thread for each job, or starts one.
    fn see_to_threads(self: &Arc<Copy>, inner: &mut Inner) {
        if inner.jobs.is_empty() {
            return;
        }
        // One for each: those that find nothing to do take the processor from the one that does.
        for _ in 0..inner.jobs.len().min(inner.idle) {
            self.more.notify_one();
        }
        let wanted = inner.jobs.len().saturating_sub(inner.idle);
        for _ in 0..wanted.min(MAX_THREADS - inner.threads) {
            let copy = self.clone();
            let thread = std::thread::Builder::new().name("copy".to_owned());
            match thread.stack_size(STACK_BYTES).spawn(move || copy.work()) {
                Ok(_) => inner.threads += 1,
                Err(e) if inner.threads == 0 => {
                    return self.fail(inner, "start a thread", &e);
                }
                Err(_) => {}
            }
        }
    }

    /// A thread's work.
    fn work(self: Arc<Copy>) {
        let mut inner = self.lock();
        loop {
            let Some(job) = inner.jobs.pop_front() else {
                if self.medium.has_failed() {
                    inner.threads -= 1;
                    return;
                }
                inner.idle += 1;
                let (guard, waited) =
                    self.more.wait_timeout(inner, IDLE).unwrap_or_else(PoisonError::into_inner);
                inner = guard;
                inner.idle -= 1;
                if waited.timed_out() && inner.jobs.is_empty() {
                    inner.threads -= 1;
                    return;
                }
                continue;
            };
            let number = inner.number + 1;
            if matches!(job, Job::Store(_)) {
                inner.number = number;
            }
            drop(inner);
            match job {
                Job::Store(stored) => {
                    let written = self.store(number, stored);
                    inner = self.lock();
                    match written {
                        Ok(()) => {
                            let effects = inner.machine.stored();
                            self.carry_out(&mut inner, effects);
                        }
                        // The state machine never hears of it, so nothing that waits for it begins.
                        Err(e) => self.fail(&mut inner, "write its state", &e),
                    }
                }
                Job::Confirm(conn, op) => {
                    let confirmed = self.medium.asks_who_has_it().map_or(Ok(()), |it| it.confirm());
                    inner = self.lock();
                    self.confirmed(&mut inner, conn, op, confirmed);
                }
                Job::Medium(conn, op, io, request) => {
                    let done = self.medium(&io, &request);
                    drop(request);
                    inner = self.lock();
                    self.did(&mut inner, conn, op, &io, done);
                }
            }
        }
    }

    /// Writes a state durably. The one before it stays, in the other slot.
    fn store(&self, number: u64, stored: Stored) -> io::Result<()> {
        let slot = Slot { number, fixed: self.fixed.clone(), stored };
        self.medium.write_state(number, &slot.to_bytes())
    }

    /// Does an operation on the medium. Of a repair it only compares.
    fn medium(&self, io: &Io, request: &Request) -> io::Result<Found> {
        let Header { kind, start, len, .. } = request.header;
        match io {
            Io::Write { .. } if kind == Kind::Zero => {
                self.medium.zero(start, len)?;
            }
            Io::Write { .. } => self.medium.write(&request.payload, start)?,
            Io::Repair { .. } => return self.compare(&request.payload, start).map(Found::IsSame),
            Io::Read { .. } if kind == Kind::Hash => {
                return self.hash(start, len).map(Found::Bytes);
            }
            Io::Read { .. } => {
                let mut bytes = vec![0; len as usize];
                self.medium.read(&mut bytes, start)?;
                return Ok(Found::Bytes(bytes));
            }
            _ => self.medium.flush()?,
        }
        Ok(Found::Nothing)
    }

    fn compare(&self, wanted: &[u8], start: u64) -> io::Result<bool> {
        let mut bytes = vec![0; PIECE.min(wanted.len())];
        for (i, piece) in wanted.chunks(PIECE).enumerate() {
            let bytes = &mut bytes[..piece.len()];
            self.medium.read(bytes, start + (i * PIECE) as u64)?;
            if bytes != piece {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn hash(&self, start: u64, len: u64) -> io::Result<Vec<u8>> {
        let (mut bytes, mut hashes) = (vec![0; PIECE], Vec::new());
        let (mut at, end) = (start, start + len);
        while at < end {
            let piece_end = (at + HASH_PIECE).min(end);
            let mut hasher = blake3::Hasher::new();
            while at < piece_end {
                let bytes = &mut bytes[..(piece_end - at).min(PIECE as u64) as usize];
                self.medium.read(bytes, at)?;
                hasher.update(bytes);
                at += bytes.len() as u64;
            }
            hashes.extend(hasher.finalize().as_bytes());
        }
        Ok(hashes)
    }

    /// The medium has done an operation, or has not.
    fn did(
        self: &Arc<Copy>,
        inner: &mut Inner,
        conn: ConnId,
        op: OpId,
        io: &Io,
        done: io::Result<Found>,
    ) {
        let effects = match done {
            Ok(Found::IsSame(is_same)) => inner.machine.compared(conn, op, is_same),
            Ok(found) => {
                // Only for a connection that still is there: no other one would take it away.
                if let (Found::Bytes(bytes), true) = (found, inner.links.contains_key(&conn)) {
                    inner.found.insert((conn, op), bytes);
                }
                inner.machine.done(conn, op)
            }
            Err(e) => {
                let what = format!("the copy {} cannot do {io:?}", self.fixed.name);
                let help = "see the server's disk and its log";
                let fault = Fault::new(&what, &e, help).with(errno(&e));
                if let Some(link) = inner.links.get(&conn) {
                    fail(link, op.0, &fault);
                }
                if matches!(io, Io::Flush) {
                    let lost = inner.machine.lost();
                    self.carry_out(inner, lost);
                    tracing::error!("{fault}");
                    inner.failed = Some(fault);
                }
                // The session ends before the state machine hears of an end, so it answers nothing.
                inner.forget(conn);
                let ended = inner.machine.ended(conn);
                self.carry_out(inner, ended);
                self.more.notify_all();
                inner.machine.done(conn, op)
            }
        };
        self.carry_out(inner, effects);
    }

    /// The medium has said whether another host has it.
    fn confirmed(
        self: &Arc<Copy>,
        inner: &mut Inner,
        conn: ConnId,
        op: OpId,
        confirmed: io::Result<()>,
    ) {
        let effects = match confirmed {
            Ok(()) => inner.machine.request(conn, Message::Io { op, io: Io::Confirm }),
            Err(e) => {
                let what = format!("the copy {} cannot be confirmed", self.fixed.name);
                let fault = Fault::new(&what, &e, "see ferrite pool status").with(errno(&e));
                if let Some(link) = inner.links.get(&conn) {
                    fail(link, op.0, &fault);
                }
                inner.forget(conn);
                self.more.notify_all();
                inner.machine.ended(conn)
            }
        };
        self.carry_out(inner, effects);
    }

    /// Nothing works any more, until the server is started again.
    fn fail(&self, inner: &mut Inner, cannot: &str, e: &io::Error) {
        let what = format!("the copy {} cannot {cannot}", self.fixed.name);
        let fault =
            Fault::new(&what, e, "see the server's disk, and start ferrite pool serve again");
        tracing::error!("{fault}");
        for link in inner.links.values() {
            fail(link, 0, &fault);
        }
        inner.failed = Some(fault.with(errno(e)));
        inner.links.clear();
        inner.requests.clear();
        inner.found.clear();
        inner.jobs.clear();
    }
}

impl Inner {
    fn close(&mut self, conn: ConnId) {
        if let Some(link) = self.links.get(&conn) {
            link.close();
        }
        self.forget(conn);
    }

    /// A connection gets no answer any more. Its operations on the medium go on to their end.
    fn forget(&mut self, conn: ConnId) {
        self.links.remove(&conn);
        self.requests.retain(|(of, _), _| *of != conn);
        self.found.retain(|(of, _), _| *of != conn);
    }
}

/// The result of an operation on the medium.
enum Found {
    Nothing,
    IsSame(bool),
    Bytes(Vec<u8>),
}

/// Says why, and ends the connection.
pub(crate) fn fail(link: &Link, op: u64, fault: &Fault) {
    let text = fault.to_string().into_bytes();
    let start = fault.errno.raw_os_error() as u64;
    let header = Header { kind: Kind::Failed, op, start, len: 0, payload: text.len() as u32 };
    link.answer(header, text, None);
    link.close();
}

pub(crate) fn refused(why: String) -> Fault {
    Fault::new("a request is refused", why, "see docs/internals/pool.md").with(Errno::INVAL)
}

fn errno(e: &io::Error) -> Errno {
    Errno::from_io_error(e).unwrap_or(Errno::IO)
}
