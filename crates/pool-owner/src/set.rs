//! A set of copies: the shell of its owner's state machine.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_pool::wire::{BLOCK_BYTES, Kind, MAX_PAYLOAD, regions_to_bytes};
use ferrite_pool::{
    Blocks, Config, ConnId, DRIFT, Data, Effect, Event, Failure, Io, MemberId, Members, OpId,
    Owner, OwnerId, Record, Reply, Request, RequestId, Revision, Rules, TRUST, Wanted as Asks,
};

pub(crate) use ferrite_pool::wire::region_bytes;

use crate::link::{Link, Payload};
use crate::member::Place;
use crate::parts::{Ended, Part};
use crate::records::{Records, Wanted};

/// A server that has not answered for so long is lost.
const PATIENCE: u64 = 2_800_000_000;
/// A server that has gone may be back within this.
const GRACE: u64 = 700_000_000;
const EIO: i32 = 5;

/// The operation of a part of a request on a set, in bytes of the set.
pub(crate) enum Wish {
    Read { start: u64, bytes: u64 },
    Write { start: u64, data: Payload, bytes: u64 },
    Zero { start: u64, bytes: u64 },
    Flush,
}

/// A set in use.
pub(crate) struct Set {
    /// For people: the disk, and the number of the set.
    name: String,
    /// The record's key.
    key: String,
    records: Records,
    /// The clock, in nanoseconds.
    now: fn() -> u64,
    inner: Mutex<Inner>,
}

struct Inner {
    machine: Owner,
    places: BTreeMap<MemberId, Place>,
    /// The threads of the copies.
    threads: BTreeMap<MemberId, Sender<()>>,
    /// The record as it was checked, until the state machine has taken it.
    found: Option<(Revision, Record)>,
    links: BTreeMap<ConnId, (MemberId, Arc<Link>)>,
    requests: BTreeMap<RequestId, Asked>,
    /// The data of reads.
    data: BTreeMap<OpId, Arc<Vec<u8>>>,
    /// Number of the last connection, and of the last request.
    numbers: u64,
    /// The members as the log has reported them.
    known: Option<(Members, Members)>,
    failure: Option<Failure>,
    /// Nothing is done any more.
    is_over: bool,
}

/// A part that is under way.
struct Asked {
    part: Part,
    content: Content,
}

/// The content that a request writes.
enum Content {
    Nothing,
    Zeros,
    Bytes(Payload),
}

impl Set {
    /// A set of copies of `bytes` each, which `me` is to have. Its record was `found`.
    pub(crate) fn new(
        (name, key): (String, String),
        places: BTreeMap<MemberId, Place>,
        bytes: u64,
        me: OwnerId,
        found: (Revision, Record),
        records: Records,
        now: fn() -> u64,
    ) -> Arc<Set> {
        // The first effect is to read the record, which was read already.
        let (machine, _) = Owner::start(Config {
            me,
            trust: TRUST.as_nanos() as u64,
            drift: DRIFT.as_nanos() as u64,
            patience: PATIENCE,
            grace: GRACE,
            region_blocks: region_bytes(bytes) / BLOCK_BYTES,
            copy_blocks: u64::from(MAX_PAYLOAD) / BLOCK_BYTES,
            disk_blocks: bytes / BLOCK_BYTES,
            min: 1,
            rules: Rules::default(),
        });
        let inner = Inner {
            machine,
            places,
            threads: BTreeMap::new(),
            found: Some(found),
            links: BTreeMap::new(),
            requests: BTreeMap::new(),
            data: BTreeMap::new(),
            numbers: 0,
            known: None,
            failure: None,
            is_over: false,
        };
        let inner = Mutex::new(inner);
        Arc::new(Set { name, key, records, now, inner })
    }

    /// Takes the disk. Each copy has a thread that connects.
    pub(crate) fn begin(self: &Arc<Set>, threads: BTreeMap<MemberId, Sender<()>>) {
        let mut inner = self.lock();
        inner.threads = threads;
        let found = inner.found.take();
        drop(inner);
        self.happened(Event::Record(found));
    }

    /// A further copy, whose thread waits.
    pub(crate) fn add(&self, place: Place, thread: Sender<()>) {
        let mut inner = self.lock();
        inner.threads.insert(place.member, thread);
        inner.places.insert(place.member, place);
    }

    /// Whether the record has a copy, as committed, or may have it soon.
    pub(crate) fn has(&self, member: MemberId) -> bool {
        let inner = self.lock();
        let record = inner.machine.record().map(|(_, record)| record);
        let has = |it: &Record| it.in_sync.contains(&member) || it.out.contains(&member);
        inner.machine.is_changing() || record.is_none_or(has)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) fn places(&self) -> Vec<Place> {
        self.lock().places.values().cloned().collect()
    }

    /// Whether no owner has ever opened it. Before [`begin`](Set::begin).
    pub(crate) fn is_new(&self) -> bool {
        self.lock().found.as_ref().is_some_and(|(_, record)| record.generation.0 == 0)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a copy is in sync, as committed.
    pub(crate) fn is_in_sync(&self, member: MemberId) -> bool {
        let inner = self.lock();
        inner.machine.record().is_some_and(|(_, record)| record.in_sync.contains(&member))
    }

    /// Whether requests are begun, or why they never are.
    pub(crate) fn is_serving(&self) -> Result<bool, Failure> {
        let inner = self.lock();
        inner.machine.failure().map_or(Ok(inner.machine.is_serving()), Err)
    }

    /// Whether all is as it should be.
    #[cfg(test)]
    pub(crate) fn is_settled(&self) -> bool {
        self.lock().machine.is_settled()
    }

    /// Something has happened.
    pub(crate) fn happened(self: &Arc<Set>, event: Event) {
        let mut inner = self.lock();
        let ended = self.handle(&mut inner, event);
        drop(inner);
        ended.into_iter().for_each(Ended::tell);
    }

    /// A copy's server is connected.
    pub(crate) fn connected(self: &Arc<Set>, member: MemberId, link: &Arc<Link>) -> ConnId {
        let mut inner = self.lock();
        inner.numbers += 1;
        let conn = ConnId(inner.numbers);
        match inner.is_over {
            true => link.close(),
            false => drop(inner.links.insert(conn, (member, link.clone()))),
        }
        let ended = self.handle(&mut inner, Event::Connected(member, conn));
        drop(inner);
        ended.into_iter().for_each(Ended::tell);
        conn
    }

    /// A connection has ended.
    pub(crate) fn ended(self: &Arc<Set>, conn: ConnId) {
        let mut inner = self.lock();
        // The owner does not hear of the end of a connection that it has closed.
        if inner.links.remove(&conn).is_none() {
            return;
        }
        let ended = self.handle(&mut inner, Event::Ended(conn));
        drop(inner);
        ended.into_iter().for_each(Ended::tell);
    }

    /// A server has answered, with what was read.
    pub(crate) fn replied(self: &Arc<Set>, conn: ConnId, reply: Reply, data: Vec<u8>) {
        let mut inner = self.lock();
        if !inner.links.contains_key(&conn) {
            return;
        }
        if let (Reply::Done { op }, false) = (&reply, data.is_empty()) {
            inner.data.insert(*op, Arc::new(data));
        }
        let ended = self.handle(&mut inner, Event::Reply(conn, reply));
        drop(inner);
        ended.into_iter().for_each(Ended::tell);
    }

    /// Begins a part of a request.
    pub(crate) fn ask(self: &Arc<Set>, wish: Wish, part: Part) {
        let blocks = |start: u64, bytes: u64| Blocks {
            start: start / BLOCK_BYTES,
            end: (start + bytes) / BLOCK_BYTES,
        };
        let (wanted, content) = match wish {
            Wish::Read { start, bytes } => (Asks::Read(blocks(start, bytes)), Content::Nothing),
            Wish::Write { start, data, bytes } => {
                (Asks::Write(blocks(start, bytes)), Content::Bytes(data))
            }
            Wish::Zero { start, bytes } => (Asks::Write(blocks(start, bytes)), Content::Zeros),
            Wish::Flush => (Asks::Flush, Content::Nothing),
        };
        let mut inner = self.lock();
        if inner.is_over {
            drop(inner);
            return part.ended(Err(EIO)).tell();
        }
        inner.numbers += 1;
        let id = RequestId(inner.numbers);
        inner.requests.insert(id, Asked { part, content });
        let ended = self.handle(&mut inner, Event::Request(id, wanted));
        drop(inner);
        ended.into_iter().for_each(Ended::tell);
    }

    /// Stops for good. Returns the record if this owner has it, and no change of it is under way.
    pub(crate) fn stop(&self) -> Option<(Revision, Record)> {
        let mut inner = self.lock();
        inner.is_over = true;
        let links = std::mem::take(&mut inner.links);
        links.into_values().for_each(|(_, link)| link.close());
        let requests = std::mem::take(&mut inner.requests);
        let machine = &inner.machine;
        let is_known = machine.failure().is_none() && !machine.is_changing();
        let record = machine.record().cloned().filter(|_| is_known);
        drop(inner);
        requests.into_values().for_each(|asked| asked.part.ended(Err(EIO)).tell());
        record
    }

    /// Has the state machine take an event, and carries out what follows. The caller reports ended requests when the
    /// lock is free.
    fn handle(self: &Arc<Set>, inner: &mut Inner, event: Event) -> Vec<Ended> {
        if inner.is_over {
            return Vec::new();
        }
        let mut ended = Vec::new();
        for effect in inner.machine.handle((self.now)(), event) {
            self.carry_out(inner, effect, &mut ended);
        }
        let Inner { machine, data, .. } = inner;
        data.retain(|op, _| machine.needs(*op));
        self.log_changes(inner);
        ended
    }

    fn carry_out(self: &Arc<Set>, inner: &mut Inner, effect: Effect, ended: &mut Vec<Ended>) {
        match effect {
            // It was read before the start, and R11 needs no second look.
            Effect::Read => {}
            Effect::Transact { compare, record } => {
                // The thread lives as long as the process.
                let _ = self.records.send(Wanted { set: Arc::downgrade(self), compare, record });
            }
            Effect::Connect(member) => {
                let thread = inner.threads.get(&member);
                // Of a copy that the map has not any more it is never connected.
                let _ = thread.map(|thread| thread.send(()));
            }
            Effect::Close(conn) => {
                if let Some((_, link)) = inner.links.remove(&conn) {
                    link.close();
                }
            }
            Effect::Send(conn, request) => self.send(inner, conn, request),
            Effect::AnswerRead(id, op) => {
                let found = inner.data.remove(&op).map(Arc::unwrap_or_clone);
                if let Some(asked) = inner.requests.remove(&id) {
                    ended.push(asked.part.ended(found.ok_or(EIO)));
                }
            }
            Effect::Answer(id) => {
                if let Some(asked) = inner.requests.remove(&id) {
                    ended.push(asked.part.ended(Ok(Vec::new())));
                }
            }
            Effect::Fail(id, _) => {
                if let Some(asked) = inner.requests.remove(&id) {
                    ended.push(asked.part.ended(Err(EIO)));
                }
            }
        }
    }

    /// Sends a request to a copy's server.
    fn send(&self, inner: &Inner, conn: ConnId, request: Request) {
        let Some((member, link)) = inner.links.get(&conn) else { return };
        let none = || Payload::Own(Vec::new());
        let (op, io) = match request {
            Request::Open { generation, owner } => {
                let Some(place) = inner.places.get(member) else { return };
                let extent = Payload::Own(place.extent.to_bytes());
                return link.send(Kind::Open, 0, generation.0, owner.0, extent);
            }
            Request::Io { op, io } => (op, io),
        };
        let range = |blocks: Blocks| {
            (blocks.start * BLOCK_BYTES, (blocks.end - blocks.start) * BLOCK_BYTES)
        };
        let found = |data: Data| match data {
            Data::OfRequest(id) => match &inner.requests.get(&id)?.content {
                Content::Bytes(payload) => Some(Some(payload.clone())),
                Content::Zeros => Some(None),
                Content::Nothing => None,
            },
            Data::OfRead(op) => {
                inner.data.get(&op).map(|data| Some(Payload::Shared(data.clone(), 0..data.len())))
            }
        };
        let (kind, start, len, payload) = match io {
            Io::Write { blocks, data } => {
                let (start, len) = range(blocks);
                match found(data) {
                    Some(Some(payload)) => (Kind::Write, start, 0, payload),
                    Some(None) => (Kind::Zero, start, len, none()),
                    // It cannot be. The copy must not count as written.
                    None => return link.close(),
                }
            }
            Io::Repair { blocks, data } => match found(data) {
                Some(Some(payload)) => (Kind::Repair, range(blocks).0, 0, payload),
                _ => return link.close(),
            },
            Io::Read { blocks } => {
                let (start, len) = range(blocks);
                (Kind::Read, start, len, none())
            }
            Io::Flush => (Kind::Flush, 0, 0, none()),
            Io::Confirm => (Kind::Confirm, 0, 0, none()),
            Io::Bits => (Kind::Bits, 0, 0, none()),
            Io::Mark(regions) => (Kind::Mark, 0, 0, Payload::Own(regions_to_bytes(regions))),
            Io::Clear(regions) => (Kind::Clear, 0, 0, Payload::Own(regions_to_bytes(regions))),
            Io::Complete => (Kind::Complete, 0, 0, none()),
        };
        link.send(kind, op.0, start, len, payload);
    }

    /// Says what has become of the copies.
    fn log_changes(&self, inner: &mut Inner) {
        let name = &self.name;
        if let (Some(failure), None) = (inner.machine.failure(), inner.failure) {
            inner.failure = Some(failure);
            let why = match failure {
                Failure::Superseded => "another process has taken it",
                Failure::Incomplete => {
                    "all servers of its copies were restarted, and may have lost answered writes"
                }
                Failure::NoRecord => "it has no record",
            };
            tracing::error!("{name}: {why}: all requests fail from now on; end its user");
        }
        let Some((_, record)) = inner.machine.record() else { return };
        let is_known = inner
            .known
            .as_ref()
            .is_some_and(|(in_sync, out)| *in_sync == record.in_sync && *out == record.out);
        if is_known {
            return;
        }
        let now = (record.in_sync.clone(), record.out.clone());
        if let Some((in_sync, _)) = inner.known.replace(now.clone()) {
            let places = &inner.places;
            let server = |member: &MemberId| {
                places.get(member).map_or("of a removed copy", |place| place.server.as_str())
            };
            for member in in_sync.difference(&now.0) {
                tracing::warn!("{name}: the copy on {} is out of sync", server(member));
            }
            for member in now.0.difference(&in_sync) {
                tracing::info!("{name}: the copy on {} is in sync again", server(member));
            }
        }
    }
}
