//! The disk's user, and what it has to find at the end.

use ferrite_pool::{Blocks, Event, Failure, MemberId, Owner, RequestId, Wanted};

use super::{BLOCKS, MOST_OUTSTANDING, TROUBLE, What, World};
use crate::check::Access;

impl World {
    pub(super) fn client(&mut self, host: usize) {
        let is_last = host + 1 == self.hosts.len();
        if self.hosts[host].owner.is_none() || (self.calm && !is_last) {
            return;
        }
        let pause = self.random.between(5, 60);
        if !self.calm || self.now < TROUBLE + 500 {
            self.at(pause, What::Client(host));
        }
        let busy = self.hosts[host].outstanding.len() >= MOST_OUTSTANDING;
        if busy || self.hosts[host].paused_until > self.now {
            return;
        }
        let start = self.random.below(BLOCKS);
        let end = (start + self.random.between(1, 3)).min(BLOCKS);
        let blocks = Blocks { start, end };
        let wanted = match self.random.below(10) {
            0 => Wanted::Flush,
            1..=4 => Wanted::Write(blocks),
            _ => Wanted::Read(blocks),
        };
        self.ask(host, wanted);
    }

    pub(super) fn ask(&mut self, host: usize, wanted: Wanted) {
        let known = &mut self.hosts[host];
        known.requests += 1;
        let id = RequestId(known.requests);
        self.values += 1;
        let value = self.values;
        let (blocks, is_write) = match wanted {
            Wanted::Read(blocks) => (blocks.start..blocks.end, false),
            Wanted::Write(blocks) => (blocks.start..blocks.end, true),
            Wanted::Flush => (0..0, false),
        };
        known.values.insert(id, value);
        let first = self.accesses.len();
        let begun = self.stamp;
        let access = |block| Access { block, value, is_write, begun, ended: None };
        self.accesses.extend(blocks.map(access));
        let indices = (first..self.accesses.len()).collect();
        self.hosts[host].outstanding.insert(id, indices);
        self.tell(host, What::Client(host), Event::Request(id, wanted));
    }

    pub(super) fn last_owner(&self) -> Option<&Owner> {
        self.hosts.last().and_then(|host| host.owner.as_ref())
    }

    pub(super) fn is_over(&self) -> bool {
        if !self.calm || self.now < TROUBLE + 6_001 {
            return false;
        }
        let failed = self.last_owner().is_some_and(|owner| owner.failure().is_some());
        let idle = self.hosts.last().is_some_and(|host| host.outstanding.is_empty());
        failed || (idle && self.last_owner().is_some_and(Owner::is_settled))
    }

    pub(super) fn last_state(&self) -> Result<(), String> {
        let owner = self.last_owner().ok_or("there is no owner")?;
        match owner.failure() {
            // All members that were in sync have lost power: no answer is better than a wrong one.
            Some(Failure::Incomplete) => return Ok(()),
            Some(failure) => return Err(format!("the last owner has failed: {failure:?}")),
            None => {}
        }
        if !owner.is_settled() {
            return Err(format!("the disk does not come to rest: {owner:?}"));
        }
        if let Some((stay, _)) = &self.copies
            && self.record.in_sync != *stay
        {
            return Err(format!("the copies are not those that stay: {:?}", self.record));
        }
        for block in 0..BLOCKS {
            let gone =
                |id: &MemberId| self.copies.as_ref().is_some_and(|(_, left)| left.contains(id));
            let staying = self.servers.iter().filter(|(id, _)| !gone(id));
            let copies: Vec<u64> = staying.map(|(_, s)| s.content(block)).collect();
            if copies.iter().any(|copy| *copy != copies[0]) {
                return Err(format!("block {block} differs at the end: {copies:?}"));
            }
        }
        Ok(())
    }
}
