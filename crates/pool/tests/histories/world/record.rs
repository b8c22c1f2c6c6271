//! The record's key, and what its changes become.

use ferrite_pool::{Failure, Owner, Record, Revision, Said};

use super::{TROUBLE, What, World};

impl World {
    pub(super) fn record_after(&mut self, host: usize) -> u64 {
        let cut = self.hosts[host].no_record_until.saturating_sub(self.now);
        cut + self.soon()
    }

    fn outcome_after(&self, host: usize) -> u64 {
        self.hosts[host].no_outcome_until.saturating_sub(self.now)
    }

    /// Carries out a transaction, or not (`kind` 2), or later (3), and says so, or that it is not known.
    pub(super) fn transacted(&mut self, host: usize, compare: Revision, record: Record, kind: u64) {
        match kind {
            3 => {
                let delay = self.random.between(20, 1500);
                self.at(delay, What::Transacted(usize::MAX, compare, record, 1));
            }
            2 => {}
            _ if compare.0 == self.revision => {
                self.revision += 1;
                self.record = record;
                if kind == 0 {
                    let delay = self.soon() + self.outcome_after(host);
                    self.at(delay, What::Said(host, Said::Won(Revision(self.revision))));
                }
            }
            _ => {
                if kind == 0 {
                    let said = Said::Lost(Revision(self.revision), self.record.clone());
                    let delay = self.soon();
                    self.at(delay, What::Said(host, said));
                }
            }
        }
        if kind != 0 && host != usize::MAX {
            let delay = self.random.between(1, 200);
            self.at(delay, What::Said(host, Said::Unknown));
        }
    }

    /// A change of an owner that is dead may be carried out late, and supersede the last one.
    pub(super) fn start_another(&mut self) {
        let failure = self.last_owner().and_then(Owner::failure);
        if self.calm && failure == Some(Failure::Superseded) && self.now < TROUBLE + 3_000 {
            self.start_owner();
        }
    }
}
