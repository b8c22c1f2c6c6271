//! Ranges of the disk that one request at a time writes.
//!
//! A write that begins or ends inside a block of the medium reads the block, changes a part of it
//! and writes it back. No other write to that block may come in between. Only these writes need
//! that, and most disks never see one. So the ranges are locked from the first of them on: it runs
//! alone (`alone.rs`), and switches the locks on while all other paths are idle. A path that has
//! work under way hence finds the switch as it was when it took that work, and the disks without
//! such writes pay one load a sweep.
//!
//! A request locks one range, from before its first operation until its last one has ended. It
//! waits behind earlier requests of any path that overlap it, those that still wait included. So no request is
//! overtaken for ever, and none waits for a request that waits for it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::RequestPath;
use super::flight::Ticket;
use super::work::Action;

/// The number of a lock: later ones are larger.
pub(super) type LockId = u64;

/// A locked range, or one that is waited for.
#[derive(Debug)]
struct Claim {
    range: Range<u64>,
    /// The index of the path.
    member: usize,
    held: bool,
}

impl Claim {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
}

/// The locked ranges of a device.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    on: AtomicBool,
    claims: Mutex<BTreeMap<LockId, Claim>>,
}

impl Ranges {
    /// Whether requests lock the ranges that they write.
    #[inline]
    pub(super) fn are_locked(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Has all requests lock their ranges from now on. The caller has the disk alone.
    pub(super) fn switch_on(&self) {
        self.on.store(true, Ordering::Release);
    }

    fn claims(&self) -> MutexGuard<'_, BTreeMap<LockId, Claim>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a range for a path. Returns whether it is locked now; else the path is told later.
    fn claim(&self, range: Range<u64>, member: usize) -> (LockId, bool) {
        let mut claims = self.claims();
        let id = claims.last_key_value().map_or(0, |(last, _)| last + 1);
        let held = !claims.values().any(|other| other.overlaps(&range));
        claims.insert(id, Claim { range, member, held });
        (id, held)
    }

    fn is_held(&self, id: LockId) -> bool {
        self.claims().get(&id).is_some_and(|claim| claim.held)
    }

    /// Releases a range. Returns the paths whose requests have got theirs by that.
    fn release(&self, id: LockId) -> Vec<usize> {
        let mut claims = self.claims();
        match claims.remove(&id) {
            Some(claim) => pass_on(&mut claims, &claim.range),
            None => Vec::new(),
        }
    }

    /// Drops all claims of a path that has ended. Returns the paths that have got ranges by that.
    pub(super) fn forget(&self, member: usize) -> Vec<usize> {
        let mut claims = self.claims();
        let own: Vec<_> =
            claims.iter().filter(|(_, claim)| claim.member == member).map(|(id, _)| *id).collect();
        let dropped: Vec<_> = own.iter().filter_map(|id| claims.remove(id)).collect();
        dropped.iter().flat_map(|claim| pass_on(&mut claims, &claim.range)).collect()
    }
}

/// Gives a range that was released to those who waited for it, the earliest first.
fn pass_on(claims: &mut BTreeMap<LockId, Claim>, released: &Range<u64>) -> Vec<usize> {
    let waits = |claim: &Claim| !claim.held && claim.overlaps(released);
    let waiting: Vec<_> =
        claims.iter().filter(|(_, claim)| waits(claim)).map(|(id, _)| *id).collect();
    let mut told = Vec::new();
    for id in waiting {
        let range = &claims[&id].range;
        let is_free = !claims.range(..id).any(|(_, earlier)| earlier.overlaps(range));
        if let (true, Some(claim)) = (is_free, claims.get_mut(&id)) {
            claim.held = true;
            told.push(claim.member);
        }
    }
    told
}

impl RequestPath {
    /// Locks the range of a request that storage is about to begin, if it writes one. `None`: it
    /// waits, and [`take_unlocked`](Self::take_unlocked) goes on with it.
    pub(super) fn lock_range(&mut self, ticket: Ticket) -> Option<Ticket> {
        let flight = self.flights.get(&ticket);
        let writes =
            matches!(flight.work.action, Action::Write | Action::FlushThenWrite | Action::Zero);
        if !writes || flight.lock.is_some() {
            return Some(ticket);
        }
        let (from, bytes) = match flight.layout {
            Some(layout) => (layout.offset, layout.blocks.len() as u64),
            None => (flight.work.offset(), flight.work.bytes()),
        };
        let device = self.member.device();
        let (id, held) = device.ranges.claim(from..from + bytes, self.member.index());
        flight.lock = Some(id);
        if held {
            return Some(ticket);
        }
        self.unlocked.push(ticket);
        None
    }

    /// Goes on with requests that have got their ranges.
    pub(super) fn take_unlocked(&mut self) {
        let mut waiting = std::mem::take(&mut self.unlocked);
        for ticket in waiting.drain(..) {
            let id = self.flights.see(&ticket).lock;
            match id.is_some_and(|id| self.member.device().ranges.is_held(id)) {
                true => self.ready.push(ticket),
                false => self.unlocked.push(ticket),
            }
        }
    }

    /// Releases the range of a request whose operations have ended.
    pub(super) fn release_range(&mut self, id: LockId) {
        let device = self.member.device();
        device.wake(&device.ranges.release(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_are_had_one_after_the_other_in_the_order_of_their_claims() {
        let ranges = Ranges::default();
        let (first, held) = ranges.claim(0..512, 0);
        assert!(held);
        let (second, held) = ranges.claim(0..4096, 1);
        assert!(!held);
        // It overlaps only the one that waits, and does not overtake it.
        let (third, held) = ranges.claim(1024..1536, 2);
        assert!(!held);
        assert!(ranges.claim(4096..8192, 3).1, "neighbours do not overlap");
        assert_eq!(ranges.release(first), [1]);
        assert!(ranges.is_held(second) && !ranges.is_held(third));
        assert_eq!(ranges.release(second), [2]);
        assert!(ranges.is_held(third));
    }

    #[test]
    fn what_a_path_had_claimed_is_free_when_it_ends() {
        let ranges = Ranges::default();
        assert!(ranges.claim(0..512, 0).1);
        let (waits, held) = ranges.claim(0..512, 1);
        assert!(!held && !ranges.claim(0..512, 0).1);
        assert_eq!(ranges.forget(0), [1]);
        assert!(ranges.is_held(waits));
        assert!(ranges.forget(1).is_empty() && ranges.claims().is_empty());
    }
}
