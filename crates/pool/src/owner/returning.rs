//! A member that was out, and is brought in sync (R8).

use std::collections::BTreeSet;

use super::tasks::{Kind, Task, TaskId};
use super::{Owner, Purpose};
use crate::rules::Rule;
use crate::{Io, MemberId, Region};

/// How many regions are looked at for the next one to copy.
const LOOK_AT: usize = 64;

/// The return of one member. Writes go to it from the beginning.
#[derive(Debug)]
pub(super) struct Return {
    pub(super) member: MemberId,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Writes that were begun before, and do not go to it, end.
    Draining(BTreeSet<TaskId>),
    /// The others tell their dirty regions.
    Asking,
    /// Regions are copied; when none is left, its bits become `union`.
    Copying {
        left: BTreeSet<Region>,
        union: BTreeSet<Region>,
    },
    Marking,
    Flushing,
    /// The record is being changed.
    Committing,
}

impl Owner {
    pub(super) fn may_begin_return(&self) -> bool {
        self.returning.is_none() && self.change.is_none()
    }

    /// A member that is out was opened.
    pub(super) fn begin_return(&mut self, member: MemberId) {
        if self.returning.is_some() {
            return;
        }
        let writes = self.tasks.iter().filter(|(_, task)| matches!(task.holds, Some((_, true))));
        self.copied_to.retain(|(to, _), _| *to != Some(member));
        let stage = Stage::Draining(writes.map(|(id, _)| *id).collect());
        self.returning = Some(Return { member, stage });
    }

    /// The member is lost again, before its return could be committed.
    pub(super) fn give_up_return(&mut self, member: MemberId) {
        self.returning = None;
        self.without(&[member].into());
    }

    pub(super) fn go_on_returning(&mut self) {
        let Some(Return { member, stage }) = &mut self.returning else { return };
        let member = *member;
        match stage {
            Stage::Draining(tasks) => {
                // A copy has two tasks, and the second one goes to this member, too.
                tasks.retain(|id| self.tasks.contains_key(id));
                if tasks.is_empty() {
                    *stage = Stage::Asking;
                    let waits = self.in_sync().into_iter().map(|m| (m, Io::Bits)).collect();
                    self.begin_step(member, waits);
                }
            }
            Stage::Copying { left, .. } => match left.is_empty() {
                true => self.mark_union(member),
                false => {
                    // The first ones may be held by requests.
                    let left: Vec<Region> = left.iter().copied().take(LOOK_AT).collect();
                    for region in left {
                        let Some(most) = self.piece(false) else { break };
                        self.begin_copy(region, Some(member), most);
                    }
                }
            },
            Stage::Committing if self.change.is_none() => self.commit_return(member),
            _ => {}
        }
    }

    fn begin_step(&mut self, member: MemberId, waits: std::collections::BTreeMap<MemberId, Io>) {
        let kind = Kind::Step { member, found: BTreeSet::new() };
        self.begin(Task { kind, waits, holds: None });
    }

    /// A step is done, or no member has to answer it any more.
    pub(super) fn step_done(&mut self, of: MemberId, found: BTreeSet<Region>) {
        let own = self.links.get(&of).map(|link| link.dirty.clone()).unwrap_or_default();
        let (copies, takes_own) = (self.keep(Rule::Copy), self.keep(Rule::OwnBits));
        let Some(Return { member, stage }) = &mut self.returning else { return };
        if *member != of {
            return;
        }
        match stage {
            Stage::Asking => {
                let mut union = found;
                union.extend(own.into_iter().filter(|_| takes_own));
                self.dirty.extend(&union);
                let left = if copies { union.clone() } else { BTreeSet::new() };
                *stage = Stage::Copying { left, union };
            }
            Stage::Marking => {
                *stage = Stage::Flushing;
                self.begin_step(of, [(of, Io::Flush)].into());
            }
            Stage::Flushing => *stage = Stage::Committing,
            _ => {}
        }
    }

    /// A region was copied to the member.
    pub(super) fn copied_to(&mut self, of: MemberId, region: Region) {
        if let Some(Return { member, stage: Stage::Copying { left, .. } }) = &mut self.returning
            && *member == of
        {
            left.remove(&region);
        }
    }

    fn mark_union(&mut self, of: MemberId) {
        let marks = self.keep(Rule::Union);
        let Some(Return { stage, .. }) = &mut self.returning else { return };
        let before = std::mem::replace(stage, Stage::Marking);
        let Stage::Copying { union, .. } = before else { return };
        let io = Io::Mark(if marks { union } else { BTreeSet::new() });
        self.begin_step(of, [(of, io)].into());
    }

    fn commit_return(&mut self, member: MemberId) {
        self.transact(Purpose::Return(member), |record| {
            record.out.remove(&member);
            record.in_sync.insert(member);
        });
    }

    /// The record has the member in sync.
    pub(super) fn returned(&mut self, member: MemberId) {
        self.returning = None;
        let waits = [(member, Io::Complete)].into();
        self.begin(Task { kind: Kind::Complete, waits, holds: None });
    }
}
