//! Copies that come and go: the map of the disk names others than the record.
//!
//! A new copy is out of sync first. All its regions are dirty by its own bits, so its return (R8) fills it. A copy that leaves
//! does so when all that stay are in sync.

use super::{Effect, Link, Owner, Purpose};
use crate::Members;

/// The copies that the map has.
#[derive(Clone, Debug)]
pub(super) struct Copies {
    /// The copies that stay.
    pub(super) stay: Members,
    /// The copies that others replace.
    pub(super) leave: Members,
}

impl Owner {
    /// Brings the record to the state of the map, by one change at a time.
    pub(super) fn change_copies(&mut self) {
        if !self.may_begin_return() {
            return;
        }
        let (Some(Copies { stay, leave }), Some((_, record))) = (&self.copies, &self.record) else {
            return;
        };
        let known: Members = record.in_sync.union(&record.out).copied().collect();
        let new: Members = stay.difference(&known).copied().collect();
        if !new.is_empty() {
            let admitted = new.clone();
            return self.transact(Purpose::Admit(new), |record| record.out.extend(admitted));
        }
        let gone: Members = leave.intersection(&known).copied().collect();
        if gone.is_empty() || stay.is_empty() || !stay.is_subset(&record.in_sync) {
            return;
        }
        let left = gone.clone();
        self.transact(Purpose::Leave(gone), |record| {
            record.in_sync.retain(|member| !left.contains(member));
            record.out.retain(|member| !left.contains(member));
        });
    }

    /// The record has these members, out of sync.
    pub(super) fn admitted(&mut self, new: &Members) {
        self.links.extend(new.iter().map(|member| (*member, Link::new(self.now))));
    }

    /// The record has these members no more.
    pub(super) fn have_left(&mut self, gone: &Members) {
        for member in gone {
            let conn = self.links.remove(member).and_then(|mut link| link.close());
            self.effects.extend(conn.map(Effect::Close));
        }
        self.ops.retain(|_, (_, of)| !gone.contains(of));
        // It was opened while its leave was not settled.
        if self.returning.as_ref().is_some_and(|it| gone.contains(&it.member)) {
            self.returning = None;
        }
        if self.in_sync().len() == 1 {
            self.unequal.clear();
        }
        self.without(gone);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::{
        Blocks, Config, ConnId, Effect, Event, Generation, MemberId, Owner, OwnerId, Record, Reply,
        Request, RequestId, Revision, Rules, Said, Wanted,
    };

    #[test]
    fn nothing_waits_for_a_copy_that_is_opened_while_it_leaves() {
        let (mut owner, _) = Owner::start(Config {
            me: OwnerId(1),
            trust: 1_000,
            drift: 10,
            patience: 500,
            grace: 100,
            region_blocks: 2,
            copy_blocks: 2,
            disk_blocks: 4,
            min: 1,
            rules: Rules::default(),
        });
        let (stays, leaves) = ((MemberId(0), ConnId(1)), (MemberId(1), ConnId(2)));
        let record = Record {
            generation: Generation(0),
            owner: OwnerId(0),
            in_sync: [stays.0].into(),
            out: [leaves.0].into(),
            nonce: 0,
        };
        let opened = || Reply::Opened { incomplete: false, dirty: BTreeSet::new() };
        let write = Wanted::Write(Blocks { start: 0, end: 1 });
        let events = [
            Event::Record(Some((Revision(1), record))),
            Event::Said(Said::Won(Revision(2))),
            Event::Connected(stays.0, stays.1),
            Event::Reply(stays.1, opened()),
            Event::Tick,
            Event::Connected(leaves.0, leaves.1),
            Event::Copies { stay: [stays.0].into(), leave: [leaves.0].into() },
            Event::Reply(leaves.1, opened()),
            Event::Said(Said::Won(Revision(3))),
            Event::Request(RequestId(1), write),
        ];
        let mut effects = Vec::new();
        for (time, event) in (1..).zip(events) {
            effects = owner.handle(time, event);
        }
        let mut answered = Vec::new();
        for effect in effects {
            if let Effect::Send(conn, Request::Io { op, .. }) = effect {
                answered.extend(owner.handle(20, Event::Reply(conn, Reply::Done { op })));
            }
        }
        assert!(answered.contains(&Effect::Answer(RequestId(1))), "{owner:?}");
    }
}
