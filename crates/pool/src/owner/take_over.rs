//! Taking a disk over (R4).

use super::{Failure, Link, Owner, Phase, Purpose};
use crate::rules::Rule;
use crate::{Generation, Members, Record, Revision};

impl Owner {
    /// Takes the disk, if it has a record.
    pub(super) fn take_over(&mut self, found: Option<(Revision, Record)>) {
        if found.is_none() {
            return self.fail(Failure::NoRecord);
        }
        self.record = found;
        self.phase = Phase::TakingOver;
        let me = self.config.me;
        self.transact(Purpose::TakeOver, |record| {
            record.generation = Generation(record.generation.0 + 1);
            record.owner = me;
        });
    }

    /// The disk is taken: its members are opened, which ends the sessions of the owner before.
    pub(super) fn open_members(&mut self) {
        self.phase = Phase::Opening { since: self.now };
        let Some((_, record)) = &self.record else { return };
        let all = record.in_sync.union(&record.out).copied();
        self.links = all.map(|member| (member, Link::new(self.now))).collect();
        for member in self.in_sync() {
            self.connect(member);
        }
    }

    /// Serves if enough members are open. Those that are not are dropped first.
    pub(super) fn judge_opened(&mut self, since: u64) {
        if self.change.is_some() {
            return;
        }
        let in_sync = self.in_sync();
        let is = |wanted: fn(&Link) -> bool| -> Members {
            in_sync.iter().copied().filter(|m| self.links.get(m).is_some_and(wanted)).collect()
        };
        let (open, lost) = (is(Link::is_usable), is(|link| link.lost));
        if lost == in_sync {
            return self.fail(Failure::Incomplete);
        }
        let missing: Members = in_sync.difference(&open).copied().collect();
        // A member that refuses a connection needs no patience.
        let are_down = missing.iter().all(|m| self.links.get(m).is_some_and(Link::is_down));
        let time = if are_down { self.config.grace } else { self.config.patience };
        let is_over = self.now >= since + time;
        let is_judged = is_over || missing == lost;
        if !is_judged || open.is_empty() || open.len() < self.config.min {
            return;
        }
        if missing.is_empty() {
            return self.serve(self.now);
        }
        self.drop_members(missing);
    }

    /// Begins to serve at this time.
    pub(super) fn serve(&mut self, from: u64) {
        let in_sync = self.in_sync();
        let dirty = in_sync.iter().filter_map(|member| self.links.get(member));
        let dirty = dirty.flat_map(|link| link.dirty.iter().copied()).collect();
        self.dirty = dirty;
        // One copy cannot differ from others.
        if in_sync.len() > 1 && self.keep(Rule::EqualFirst) {
            self.unequal = self.dirty.clone();
        }
        self.phase = Phase::Serving { from };
    }
}
