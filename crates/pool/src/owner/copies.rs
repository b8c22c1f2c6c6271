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
    /// Brings the record to what the map has, by one change at a time.
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
        if self.in_sync().len() == 1 {
            self.unequal.clear();
        }
        self.without(gone);
    }
}
