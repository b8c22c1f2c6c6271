//! The process that has a disk.
//!
//! Its steps: it reads the record and takes the disk over by a change of it ([`take_over`]), opens the members
//! ([`links`]), makes regions equal that may differ ([`regions`]), and serves requests ([`tasks`]). A member that fails
//! is dropped ([`links`]), and one that comes back is brought in sync ([`returning`]). Copies that the
//! map adds or takes away are those of [`copies`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::record::{Change, Settled};
use crate::rules::{Rule, Rules};
use crate::{
    Blocks, ConnId, MemberId, Members, OpId, OwnerId, Record, Region, Reply, Request, Revision,
    Said,
};

mod copies;
mod links;
mod pace;
mod regions;
mod returning;
mod take_over;
mod tasks;

use copies::Copies;
use links::Link;
use pace::Pace;
use returning::Return;
use tasks::{Task, TaskId};

/// The settings of an owner.
#[derive(Clone, Debug)]
pub struct Config {
    /// The owner. Another number for each start.
    pub me: OwnerId,
    /// For how long a confirmed generation may be relied on (R5), in nanoseconds.
    pub trust: u64,
    /// By how much more another host's clock may count in that time, in nanoseconds.
    pub drift: u64,
    /// After this time without an answer a member counts as lost, in nanoseconds.
    pub patience: u64,
    /// A lost member that is not back after this time leaves, in nanoseconds.
    pub grace: u64,
    /// Blocks of a region.
    pub region_blocks: u64,
    /// Most blocks that are copied at a time. A region is copied in as many pieces as it takes.
    pub copy_blocks: u64,
    /// Blocks of the disk.
    pub disk_blocks: u64,
    /// With fewer members in sync the disk waits.
    pub min: usize,
    /// The rules.
    pub rules: Rules,
}

/// A request of the disk's user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A read.
    Read(Blocks),
    /// A write.
    Write(Blocks),
    /// Makes earlier answered writes durable.
    Flush,
}

/// Why an owner serves no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another process has the disk.
    Superseded,
    /// All members in sync may have lost what was answered and not flushed.
    Incomplete,
    /// The record does not exist.
    NoRecord,
}

/// An event.
#[derive(Clone, Debug)]
pub enum Event {
    /// The answer to [`Effect::Read`].
    Record(Option<(Revision, Record)>),
    /// The answer to [`Effect::Transact`].
    Said(Said),
    /// A member is connected.
    Connected(MemberId, ConnId),
    /// It cannot be connected now.
    Unconnected(MemberId),
    /// A connection has ended.
    Ended(ConnId),
    /// An answer of a member.
    Reply(ConnId, Reply),
    /// The copies that the disk is to have. Known ones may be told again.
    Copies {
        /// The copies that stay. New ones are admitted, and filled.
        stay: Members,
        /// Those that leave when all others are in sync.
        leave: Members,
    },
    /// A request of the disk's user.
    Request(RequestId, Wanted),
    /// Time has passed. At least eight times in [`Config::trust`].
    Tick,
}

/// An order to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Read the record, linearizably; an error is tried again.
    Read,
    /// Put the record if its revision still is `compare`. One at a time.
    Transact {
        /// The revision to compare.
        compare: Revision,
        /// The record to put.
        record: Record,
    },
    /// Connect to a member.
    Connect(MemberId),
    /// End a connection. [`Event::Ended`] does not follow.
    Close(ConnId),
    /// Send a message to a member.
    Send(ConnId, Request),
    /// A read is answered, with the data that this operation has found.
    AnswerRead(RequestId, OpId),
    /// A write or a flush is answered.
    Answer(RequestId),
    /// A request fails.
    Fail(RequestId, Failure),
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// Waits for the record.
    Asking,
    /// Waits for the outcome of the take-over.
    TakingOver,
    /// Opens the members.
    Opening {
        since: u64,
    },
    /// Serves, from this time on.
    Serving {
        from: u64,
    },
    Failed(Failure),
}

/// The purpose of a change of the record.
#[derive(Debug)]
enum Purpose {
    TakeOver,
    Drop(Members),
    Return(MemberId),
    Admit(Members),
    Leave(Members),
}

/// An owner: see the crate.
#[derive(Debug)]
pub struct Owner {
    config: Config,
    now: u64,
    phase: Phase,
    record: Option<(Revision, Record)>,
    change: Option<(Change, Purpose)>,
    links: BTreeMap<MemberId, Link>,
    returning: Option<Return>,
    copies: Option<Copies>,
    queue: VecDeque<(RequestId, Wanted)>,
    tasks: BTreeMap<TaskId, Task>,
    /// Operations without an answer, with their task and member.
    ops: BTreeMap<OpId, (TaskId, MemberId)>,
    /// Regions that have a bit on some member.
    dirty: BTreeSet<Region>,
    /// Regions that may differ between members in sync (R7).
    unequal: BTreeSet<Region>,
    /// Where the copy of a region goes on that is copied in part: to all, or to a member that returns.
    copied_to: BTreeMap<(Option<MemberId>, Region), u64>,
    pace: Pace,
    /// Counts the changes of the record.
    epoch: u64,
    last_id: u64,
    effects: Vec<Effect>,
}

impl Owner {
    /// An owner that has asked for nothing yet. Returns it, and what is to be done first.
    pub fn start(config: Config) -> (Owner, Vec<Effect>) {
        let owner = Owner {
            config,
            now: 0,
            phase: Phase::Asking,
            record: None,
            change: None,
            links: BTreeMap::new(),
            returning: None,
            copies: None,
            queue: VecDeque::new(),
            tasks: BTreeMap::new(),
            ops: BTreeMap::new(),
            dirty: BTreeSet::new(),
            unequal: BTreeSet::new(),
            copied_to: BTreeMap::new(),
            pace: Pace::default(),
            epoch: 0,
            last_id: 0,
            effects: Vec::new(),
        };
        (owner, vec![Effect::Read])
    }

    /// Why the owner serves no more. `None`: it does, or will.
    pub fn failure(&self) -> Option<Failure> {
        match self.phase {
            Phase::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// Whether all is as it should be: every member in sync, all regions equal, no request under way.
    pub fn is_settled(&self) -> bool {
        let record = self.record.as_ref().is_some_and(|(_, record)| record.out.is_empty());
        let serves = matches!(self.phase, Phase::Serving { from } if from <= self.now);
        let idle = self.tasks.is_empty() && self.queue.is_empty() && self.change.is_none();
        record && serves && idle && self.unequal.is_empty() && self.returning.is_none()
    }

    /// The record as this owner has committed it last. `None`: it has not read it yet.
    pub fn record(&self) -> Option<&(Revision, Record)> {
        self.record.as_ref()
    }

    /// Whether requests are begun.
    pub fn is_serving(&self) -> bool {
        matches!(self.phase, Phase::Serving { from } if from <= self.now)
    }

    /// Whether the data that this operation has found may still be asked for.
    pub fn needs(&self, op: OpId) -> bool {
        self.tasks.values().any(|task| task.needs(op))
    }

    /// Whether a change of the record is under way.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Takes what has happened, at this time, and returns what is to be done, in this order.
    pub fn handle(&mut self, now: u64, event: Event) -> Vec<Effect> {
        self.now = now;
        match (&self.phase, event) {
            (Phase::Failed(failure), Event::Request(id, _)) => {
                self.effects.push(Effect::Fail(id, *failure));
            }
            (Phase::Failed(_), Event::Connected(_, conn)) => {
                self.effects.push(Effect::Close(conn));
            }
            (Phase::Failed(_), _) => {}
            (_, event) => self.take(event),
        }
        self.go_on();
        std::mem::take(&mut self.effects)
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Record(found) if self.phase == Phase::Asking => self.take_over(found),
            Event::Record(found) => {
                // Asked for where R11 is left out.
                if let Some((revision, record)) = found {
                    self.said(Said::Lost(revision, record));
                }
            }
            Event::Said(said) => self.said(said),
            Event::Connected(member, conn) => self.connected(member, conn),
            Event::Unconnected(member) => self.unconnected(member),
            Event::Ended(conn) => self.ended(conn),
            Event::Reply(conn, reply) => self.replied(conn, reply),
            Event::Copies { stay, leave } => self.copies = Some(Copies { stay, leave }),
            Event::Request(id, wanted) => {
                self.pace.asked(self.now);
                self.queue.push_back((id, wanted));
            }
            Event::Tick => self.tick(),
        }
    }

    /// Does what is possible now.
    fn go_on(&mut self) {
        match self.phase {
            Phase::Opening { since } => self.judge_opened(since),
            Phase::Serving { .. } => {
                self.drop_lost();
                self.change_copies();
                self.go_on_returning();
                self.begin_requests();
                self.answer_reads();
            }
            _ => {}
        }
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn keep(&self, rule: Rule) -> bool {
        self.config.rules.keep(rule)
    }

    /// The members in sync, as committed.
    fn in_sync(&self) -> Members {
        self.record.as_ref().map(|(_, record)| record.in_sync.clone()).unwrap_or_default()
    }

    /// The members that may be in sync: as committed, and the one whose return may be committed.
    fn maybe_in_sync(&self) -> Members {
        let mut members = self.in_sync();
        if let Some((_, Purpose::Return(member))) = &self.change {
            members.insert(*member);
        }
        members
    }

    /// The members in sync that may be read from. One that may have left by a change whose outcome is not known yet is none: the
    /// next owner does not open it, so it goes on to answer this one.
    fn readable(&self) -> Members {
        let mut members = self.in_sync();
        if let Some((_, Purpose::Drop(gone) | Purpose::Leave(gone))) = &self.change
            && self.keep(Rule::ReadSettled)
        {
            members.retain(|member| !gone.contains(member));
        }
        members
    }

    /// Asks for a change of the record.
    fn transact(&mut self, purpose: Purpose, change: impl FnOnce(&mut Record)) {
        let nonce = self.next_id();
        let Some((revision, record)) = &self.record else { return };
        let mut wanted = record.clone();
        change(&mut wanted);
        wanted.nonce = nonce;
        let (compare, record) = (*revision, wanted.clone());
        if let Purpose::Drop(gone) | Purpose::Leave(gone) = &purpose
            && self.keep(Rule::ReadSettled)
        {
            self.read_elsewhere(&gone.clone());
        }
        self.change = Some((Change::new(compare, wanted), purpose));
        self.effects.push(Effect::Transact { compare, record });
    }

    /// Takes the outcome of a change.
    fn said(&mut self, said: Said) {
        let nonce = self.next_id();
        let rules = self.config.rules;
        let Some((change, _)) = &mut self.change else { return };
        match change.said(said, nonce, rules) {
            Settled::Again if rules.keep(Rule::Settle) => {
                let (compare, record) = (change.compare, change.record.clone());
                self.effects.push(Effect::Transact { compare, record });
            }
            Settled::Again => self.effects.push(Effect::Read),
            Settled::Lost => self.fail(Failure::Superseded),
            Settled::NotSeen => self.change_is_void(),
            Settled::Won(revision) => {
                if let Some((change, purpose)) = self.change.take() {
                    self.record = Some((revision, change.record));
                    self.epoch += 1;
                    self.won(purpose);
                }
            }
        }
    }

    fn won(&mut self, purpose: Purpose) {
        match purpose {
            Purpose::TakeOver => self.open_members(),
            Purpose::Drop(members) => self.dropped(&members),
            Purpose::Return(member) => self.returned(member),
            Purpose::Admit(new) => self.admitted(&new),
            Purpose::Leave(gone) => self.have_left(&gone),
        }
    }

    /// A test leaves R11 out: the change counts as not made.
    fn change_is_void(&mut self) {
        match self.change.take() {
            Some((_, Purpose::TakeOver)) => {
                self.phase = Phase::Asking;
                self.effects.push(Effect::Read);
            }
            Some((_, Purpose::Return(member))) => self.give_up_return(member),
            _ => {}
        }
    }

    /// Stops for good.
    fn fail(&mut self, failure: Failure) {
        self.phase = Phase::Failed(failure);
        let conns: Vec<ConnId> = self.links.values_mut().filter_map(Link::close).collect();
        self.effects.extend(conns.into_iter().map(Effect::Close));
        let queued = std::mem::take(&mut self.queue).into_iter().map(|(id, _)| id);
        let begun = std::mem::take(&mut self.tasks).into_values();
        let begun = begun.filter_map(|task| task.request());
        self.effects.extend(queued.chain(begun).map(|id| Effect::Fail(id, failure)));
        self.ops.clear();
        self.change = None;
        self.returning = None;
    }
}
