//! A server that has a copy of a disk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::rules::{Rule, Rules};
use crate::{BootId, ConnId, Generation, Io, OpId, OwnerId, Region, Reply, Request};

/// A member's state on its medium, beside the data. It is written as a whole, or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Of the last session.
    pub generation: Generation,
    /// The owner of that session.
    pub owner: Option<OwnerId>,
    /// The start of the operating system in which that was. `None`: the copy is new.
    pub boot: Option<BootId>,
    /// Whether the copy may lack what was answered (R10).
    pub incomplete: bool,
    /// The regions that may differ from other copies.
    pub dirty: BTreeSet<Region>,
}

/// An order to the caller of a [`Member`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write this durably, then call [`Member::stored`]. There is one at a time.
    Store(Stored),
    /// Begin a read, a write or a flush on the medium, then call [`Member::done`]. Of a repair, only compare the medium
    /// with the data, then call [`Member::compared`].
    Start(ConnId, OpId, Io),
    /// Send an answer.
    Send(ConnId, Reply),
    /// End a connection.
    Close(ConnId),
}

/// A session that waits for the end of earlier I/O, and for its own record.
#[derive(Debug)]
struct Opening {
    conn: ConnId,
    generation: Generation,
    owner: OwnerId,
    /// The record is written, or is about to be.
    is_noted: bool,
}

/// An operation of a connection.
#[derive(Debug)]
struct Op {
    conn: ConnId,
    op: OpId,
    io: Io,
}

/// A member: see the crate.
#[derive(Debug)]
pub struct Member {
    /// The state on the medium.
    durable: Stored,
    /// The state that is being written.
    storing: Option<Stored>,
    /// The state that the medium should have.
    wanted: Stored,
    boot: BootId,
    region_blocks: u64,
    rules: Rules,
    opening: Option<Opening>,
    /// The connection of the session. (More than one only where a test leaves a rule out.)
    session: BTreeSet<ConnId>,
    /// On the medium.
    under_way: BTreeMap<(ConnId, OpId), Io>,
    /// They wait for the record: writes for their bits, others for what they have changed.
    waiting: VecDeque<Op>,
    effects: Vec<Effect>,
}

impl Member {
    /// A member as it starts, with what its medium has, in this start of the operating system.
    pub fn new(stored: Stored, boot: BootId, region_blocks: u64, rules: Rules) -> Member {
        Member {
            durable: stored.clone(),
            storing: None,
            wanted: stored,
            boot,
            region_blocks,
            rules,
            opening: None,
            session: BTreeSet::new(),
            under_way: BTreeMap::new(),
            waiting: VecDeque::new(),
            effects: Vec::new(),
        }
    }

    /// Takes a message.
    pub fn request(&mut self, conn: ConnId, request: Request) -> Vec<Effect> {
        match request {
            Request::Open { generation, owner } => self.open(conn, generation, owner),
            Request::Io { op, io } => {
                let is_session = self.session.contains(&conn);
                if is_session || !self.rules.keep(Rule::Fence) {
                    self.io(conn, op, io);
                } else {
                    self.effects.push(Effect::Close(conn));
                }
            }
        }
        self.go_on()
    }

    /// A connection has ended.
    pub fn ended(&mut self, conn: ConnId) -> Vec<Effect> {
        self.session.remove(&conn);
        if self.opening.as_ref().is_some_and(|opening| opening.conn == conn) {
            self.opening = None;
        }
        self.waiting.retain(|op| op.conn != conn);
        self.go_on()
    }

    /// The state of [`Effect::Store`] is durable.
    pub fn stored(&mut self) -> Vec<Effect> {
        if let Some(stored) = self.storing.take() {
            self.durable = stored;
        }
        self.go_on()
    }

    /// The medium has done an operation.
    pub fn done(&mut self, conn: ConnId, op: OpId) -> Vec<Effect> {
        if self.under_way.remove(&(conn, op)).is_some() {
            self.answer(conn, Reply::Done { op });
        }
        self.go_on()
    }

    /// A repair was compared: the medium has its data, or other data.
    pub fn compared(&mut self, conn: ConnId, op: OpId, is_same: bool) -> Vec<Effect> {
        match self.under_way.remove(&(conn, op)) {
            Some(_) if is_same => self.answer(conn, Reply::Done { op }),
            // An operation of a session that has ended is not begun any more.
            Some(Io::Repair { blocks, data })
                if self.session.contains(&conn) || !self.rules.keep(Rule::Fence) =>
            {
                let io = Io::Write { blocks, data };
                if self.rules.keep(Rule::Union) {
                    self.io(conn, op, io);
                } else {
                    // A test leaves out that the bits of others become this one's.
                    self.under_way.insert((conn, op), io.clone());
                    self.effects.push(Effect::Start(conn, op, io));
                }
            }
            _ => {}
        }
        self.go_on()
    }

    /// Whether a connection is the session's.
    pub fn is_session(&self, conn: ConnId) -> bool {
        self.session.contains(&conn)
    }

    /// The medium may have lost what was answered: a flush has failed. The copy is no source any more, as after R10, and
    /// the session ends.
    pub fn lost(&mut self) -> Vec<Effect> {
        self.wanted.incomplete = true;
        for conn in std::mem::take(&mut self.session) {
            self.end(conn);
        }
        if let Some(opening) = self.opening.take() {
            self.end(opening.conn);
        }
        self.go_on()
    }

    fn open(&mut self, conn: ConnId, generation: Generation, owner: OwnerId) {
        let begun = self.opening.as_ref().map(|opening| (opening.generation, Some(opening.owner)));
        let (known, of) = begun.unwrap_or((self.wanted.generation, self.wanted.owner));
        let is_other = generation == known && of.is_some_and(|of| of != owner);
        if self.rules.keep(Rule::Fence) && (generation < known || is_other) {
            self.effects.push(Effect::Send(conn, Reply::Refused { stored: known }));
            self.effects.push(Effect::Close(conn));
            return;
        }
        // R1: older sessions end, and connections of this owner's that this one replaces.
        let replaces = generation > known || self.rules.keep(Rule::LateConnection);
        if replaces {
            for old in std::mem::take(&mut self.session) {
                self.end(old);
            }
        }
        if let Some(old) = self.opening.take() {
            self.end(old.conn);
        }
        self.opening = Some(Opening { conn, generation, owner, is_noted: false });
    }

    fn end(&mut self, conn: ConnId) {
        self.waiting.retain(|op| op.conn != conn);
        self.effects.push(Effect::Close(conn));
    }

    fn io(&mut self, conn: ConnId, op: OpId, io: Io) {
        match &io {
            Io::Write { blocks, .. } => {
                self.wanted.dirty.extend(blocks.regions(self.region_blocks))
            }
            Io::Mark(regions) => self.wanted.dirty.extend(regions),
            Io::Clear(regions) => {
                let writes = self.under_way.values().chain(self.waiting.iter().map(|op| &op.io));
                let busy = writes.filter_map(|io| match io {
                    Io::Write { blocks, .. } | Io::Repair { blocks, .. } => {
                        Some(blocks.regions(self.region_blocks))
                    }
                    _ => None,
                });
                let busy: BTreeSet<Region> = busy.flatten().collect();
                self.wanted
                    .dirty
                    .retain(|region| !regions.contains(region) || busy.contains(region));
                return self.answer(conn, Reply::Done { op });
            }
            Io::Complete => self.wanted.incomplete = false,
            Io::Confirm => return self.answer(conn, Reply::Done { op }),
            Io::Bits => {
                let dirty = self.wanted.dirty.clone();
                return self.answer(conn, Reply::Bits { op, dirty });
            }
            Io::Read { .. } | Io::Repair { .. } | Io::Flush => {}
        }
        self.waiting.push_back(Op { conn, op, io });
    }

    fn answer(&mut self, conn: ConnId, reply: Reply) {
        if self.session.contains(&conn) || !self.rules.keep(Rule::Fence) {
            self.effects.push(Effect::Send(conn, reply));
        }
    }

    /// Does what is possible now.
    fn go_on(&mut self) -> Vec<Effect> {
        self.note_opening();
        self.begin_ops();
        if self.storing.is_none() && self.wanted != self.durable {
            self.storing = Some(self.wanted.clone());
            self.effects.push(Effect::Store(self.wanted.clone()));
        }
        std::mem::take(&mut self.effects)
    }

    /// R1: the I/O of older sessions ends, the generation is durable, then OPEN is answered.
    fn note_opening(&mut self) {
        let drains = self.rules.keep(Rule::Drain);
        let Some(opening) = &mut self.opening else { return };
        if !opening.is_noted {
            if drains && self.session.is_empty() && !self.under_way.is_empty() {
                return;
            }
            opening.is_noted = true;
            self.wanted.generation = opening.generation;
            self.wanted.owner = Some(opening.owner);
            // R10: answered but unflushed writes may be lost with the memory of the earlier start.
            let is_new = self.wanted.boot.is_none();
            let was_restarted = self.wanted.boot != Some(self.boot);
            match self.rules.keep(Rule::StaysIncomplete) {
                true => self.wanted.incomplete |= was_restarted && !is_new,
                false => self.wanted.incomplete = was_restarted && !is_new,
            }
            if !self.rules.keep(Rule::Incomplete) {
                self.wanted.incomplete = false;
            }
            self.wanted.boot = Some(self.boot);
        }
        let is_durable = self.storing.is_none() && self.durable == self.wanted;
        if let Some(opening) = self.opening.take_if(|_| is_durable) {
            self.session.insert(opening.conn);
            let Stored { incomplete, dirty, .. } = self.durable.clone();
            self.effects.push(Effect::Send(opening.conn, Reply::Opened { incomplete, dirty }));
        }
    }

    /// Begins what has waited for the record long enough.
    fn begin_ops(&mut self) {
        let mut still = VecDeque::new();
        while let Some(op) = self.waiting.pop_front() {
            if !self.may_begin(&op.io) {
                still.push_back(op);
                continue;
            }
            match op.io {
                Io::Mark(_) | Io::Complete => self.answer(op.conn, Reply::Done { op: op.op }),
                io => {
                    self.under_way.insert((op.conn, op.op), io.clone());
                    self.effects.push(Effect::Start(op.conn, op.op, io));
                }
            }
        }
        self.waiting = still;
    }

    fn may_begin(&self, io: &Io) -> bool {
        match io {
            Io::Write { blocks, .. } => {
                // R6. The state that is being stored may lack a bit that the medium still has.
                let states = [Some(&self.durable), self.storing.as_ref(), Some(&self.wanted)];
                let regions: BTreeSet<Region> = blocks.regions(self.region_blocks).collect();
                !self.rules.keep(Rule::BitsFirst)
                    || states.into_iter().flatten().all(|stored| regions.is_subset(&stored.dirty))
            }
            Io::Mark(regions) => self.storing.is_none() && regions.is_subset(&self.durable.dirty),
            Io::Complete => self.storing.is_none() && !self.durable.incomplete,
            _ => true,
        }
    }
}
