//! Tasks under way: requests, and the owner's own work.

use std::collections::{BTreeMap, BTreeSet};

use super::{Effect, Owner, Phase, RequestId, Wanted};
use crate::rules::Rule;
use crate::{Blocks, Data, Io, MemberId, Members, OpId, Region};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TaskId(pub(super) u64);

/// Operations on members that belong together.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) kind: Kind,
    /// The operations that are not done yet, by the members that have to do them.
    pub(super) waits: BTreeMap<MemberId, Io>,
    /// The blocks that no other task may touch, or may not write to (`false`).
    pub(super) holds: Option<(Blocks, bool)>,
}

#[derive(Debug)]
pub(super) enum Kind {
    Write(RequestId),
    /// A read, and which operation has found its data.
    Read {
        request: RequestId,
        found: Option<OpId>,
    },
    /// A flush, and the regions that are clean when it is done, if the record is the same then.
    Flush {
        request: RequestId,
        clears: BTreeSet<Region>,
        epoch: u64,
    },
    /// A piece of a region that is to be copied is read. `to` is a member that returns; without it the region is made equal on all.
    CopyRead {
        region: Region,
        to: Option<MemberId>,
        source: MemberId,
        found: Option<OpId>,
    },
    /// It is written.
    CopyWrite {
        region: Region,
        to: Option<MemberId>,
    },
    /// A step of a member's return.
    Step {
        member: MemberId,
        found: BTreeSet<Region>,
    },
    /// The member is told that it is complete.
    Complete,
}

impl Task {
    /// Whether it needs what this operation has found.
    pub(super) fn needs(&self, op: OpId) -> bool {
        let is_own = match self.kind {
            Kind::Read { found, .. } | Kind::CopyRead { found, .. } => found == Some(op),
            _ => false,
        };
        let is_asked = |io: &Io| matches!(io, Io::Repair { data, .. } if *data == Data::OfRead(op));
        is_own || self.waits.values().any(is_asked)
    }

    /// The request that it carries out.
    pub(super) fn request(&self) -> Option<RequestId> {
        match self.kind {
            Kind::Write(request) | Kind::Read { request, .. } | Kind::Flush { request, .. } => {
                Some(request)
            }
            _ => None,
        }
    }
}

impl Owner {
    /// The members that writes go to: those in sync, and the one that returns.
    pub(super) fn write_set(&self) -> Members {
        let mut members = self.maybe_in_sync();
        members.extend(self.returning.as_ref().map(|it| it.member));
        members
    }

    /// The member in sync that is best read from: the one with the fewest operations under way. Equal ones take turns.
    pub(super) fn source(&self) -> Option<MemberId> {
        let usable = |member: &MemberId| self.links.get(member).is_some_and(|l| l.is_usable());
        let mut open: Vec<(usize, MemberId)> =
            self.readable().into_iter().filter(usable).map(|member| (0, member)).collect();
        for (_, of) in self.ops.values() {
            open.iter_mut().filter(|(_, member)| member == of).for_each(|(busy, _)| *busy += 1);
        }
        // A read takes two numbers, one of its task and one of its operation.
        let turn = usize::try_from(self.last_id / 2).unwrap_or(0) % open.len().max(1);
        open.rotate_left(turn);
        open.into_iter().min_by_key(|(busy, _)| *busy).map(|(_, member)| member)
    }

    pub(super) fn begin(&mut self, task: Task) -> TaskId {
        let id = TaskId(self.next_id());
        let waits = task.waits.clone();
        self.tasks.insert(id, task);
        for (member, io) in waits {
            self.send(id, member, io);
        }
        id
    }

    /// A member was opened again: it gets what it has not answered.
    pub(super) fn send_again(&mut self, member: MemberId) {
        let all = self.tasks.iter();
        let of = all.filter_map(|(id, task)| Some((*id, task.waits.get(&member)?.clone())));
        let of: Vec<(TaskId, Io)> = of.collect();
        for (id, io) in of {
            self.send(id, member, io);
        }
    }

    /// Whether a task holds blocks against this use.
    pub(super) fn is_held(&self, blocks: Blocks, writes: bool) -> bool {
        self.tasks
            .values()
            .filter_map(|task| task.holds)
            .any(|(held, for_writing)| held.overlap(blocks) && (writes || for_writing))
    }

    /// Begins the requests that nothing stands against.
    pub(super) fn begin_requests(&mut self) {
        if !matches!(self.phase, Phase::Serving { from } if from <= self.now) {
            return;
        }
        self.equalise();
        let mut waiting: Vec<Blocks> = Vec::new();
        for (id, wanted) in std::mem::take(&mut self.queue) {
            let blocks = match wanted {
                Wanted::Read(blocks) | Wanted::Write(blocks) => Some(blocks),
                Wanted::Flush => None,
            };
            let is_behind = blocks.is_some_and(|b| waiting.iter().any(|other| other.overlap(b)));
            if is_behind || !self.begin_request(id, wanted) {
                waiting.extend(blocks);
                self.queue.push_back((id, wanted));
            }
        }
    }

    /// Begins a request, if nothing stands against it now.
    fn begin_request(&mut self, request: RequestId, wanted: Wanted) -> bool {
        let orders = self.keep(Rule::Order);
        match wanted {
            Wanted::Write(blocks) => {
                if orders && self.is_held(blocks, true) {
                    return false;
                }
                self.begin_write(request, blocks);
            }
            Wanted::Read(blocks) => {
                let mut regions = blocks.regions(self.config.region_blocks);
                let is_unequal = regions.any(|region| self.unequal.contains(&region));
                if is_unequal || (orders && self.is_held(blocks, false)) {
                    return false;
                }
                let Some(source) = self.source() else { return false };
                let waits = [(source, Io::Read { blocks })].into();
                let kind = Kind::Read { request, found: None };
                self.begin(Task { kind, waits, holds: Some((blocks, false)) });
            }
            Wanted::Flush => {
                let waits = self.maybe_in_sync().into_iter().map(|m| (m, Io::Flush)).collect();
                let (clears, epoch) = (self.clean_after_flush(), self.epoch);
                self.begin(Task {
                    kind: Kind::Flush { request, clears, epoch },
                    waits,
                    holds: None,
                });
            }
        }
        true
    }

    fn begin_write(&mut self, request: RequestId, blocks: Blocks) {
        let regions: BTreeSet<Region> = blocks.regions(self.config.region_blocks).collect();
        self.note_write(&regions);
        let io = Io::Write { blocks, data: Data::OfRequest(request) };
        let waits = self.write_set().into_iter().map(|member| (member, io.clone())).collect();
        self.begin(Task { kind: Kind::Write(request), waits, holds: Some((blocks, true)) });
    }

    /// An operation is done.
    pub(super) fn op_done(&mut self, op: OpId, member: MemberId, bits: Option<BTreeSet<Region>>) {
        let Some((id, _)) = self.ops.remove(&op).filter(|(_, of)| *of == member) else { return };
        let Some(task) = self.tasks.get_mut(&id) else { return };
        match (&mut task.kind, bits) {
            (Kind::Read { found, .. } | Kind::CopyRead { found, .. }, _) => *found = Some(op),
            (Kind::Step { found, .. }, Some(dirty)) => found.extend(dirty),
            _ => {}
        }
        task.waits.remove(&member);
        self.finish_if_done(id);
    }

    /// Reads from these members go to others.
    pub(super) fn read_elsewhere(&mut self, members: &Members) {
        let waits = |task: &Task| task.waits.keys().any(|member| members.contains(member));
        let reads = |task: &Task| matches!(task.kind, Kind::Read { .. } | Kind::CopyRead { .. });
        let all = self.tasks.iter().filter(|(_, task)| reads(task) && waits(task));
        let ids: Vec<TaskId> = all.map(|(id, _)| *id).collect();
        self.ops.retain(|_, (id, _)| !ids.contains(id));
        for id in ids {
            if let Some(task) = self.tasks.remove(&id) {
                self.finish(task);
            }
        }
    }

    /// Nothing waits for these members any more.
    pub(super) fn without(&mut self, members: &Members) {
        let ids: Vec<TaskId> = self.tasks.keys().copied().collect();
        for id in ids {
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            let before = task.waits.len();
            task.waits.retain(|member, _| !members.contains(member));
            if task.waits.len() < before {
                self.finish_if_done(id);
            }
        }
    }

    fn finish_if_done(&mut self, id: TaskId) {
        let Some(task) = self.tasks.get(&id).filter(|task| task.waits.is_empty()) else { return };
        if let Kind::Read { found: Some(_), .. } = task.kind {
            // It holds its blocks until it is answered.
            return;
        }
        if let Some(task) = self.tasks.remove(&id) {
            self.finish(task);
        }
    }

    fn finish(&mut self, task: Task) {
        match task.kind {
            Kind::Write(request) => self.effects.push(Effect::Answer(request)),
            Kind::Read { request, .. } => {
                // Its member was dropped: another one is read from.
                if let Some((blocks, _)) = task.holds {
                    self.queue.push_front((request, Wanted::Read(blocks)));
                }
            }
            Kind::Flush { request, clears, epoch } => {
                self.effects.push(Effect::Answer(request));
                self.clear(clears, epoch);
            }
            Kind::CopyRead { region, to, source, found } => {
                if let Some((blocks, _)) = task.holds {
                    self.copy_read(region, to, source, found, blocks);
                }
            }
            Kind::CopyWrite { region, to } => {
                if let Some((blocks, _)) = task.holds {
                    self.copied(region, to, blocks);
                }
            }
            Kind::Step { member, found } => self.step_done(member, found),
            Kind::Complete => {}
        }
    }

    /// R5: reads are answered while every member in sync has confirmed the generation lately.
    pub(super) fn answer_reads(&mut self) {
        let (now, trust) = (self.now, self.config.trust);
        let is_proven = |member: &MemberId| {
            let proof = self.links.get(member).and_then(|link| link.proof);
            proof.is_some_and(|begun| now < begun + trust)
        };
        if self.keep(Rule::Proof) && !self.maybe_in_sync().iter().all(is_proven) {
            return;
        }
        let effects = &mut self.effects;
        self.tasks.retain(|_, task| match task.kind {
            Kind::Read { request, found: Some(op) } if task.waits.is_empty() => {
                effects.push(Effect::AnswerRead(request, op));
                false
            }
            _ => true,
        });
    }
}
