//! Disks whose storage does not answer, as their counters show: requests are in flight, and none is answered any more.
//!
//! A worker whose storage hangs cannot be asked, since it may hang, too. Its counters are a file. They are looked at
//! rarely: a look at a thousand disks takes milliseconds.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ferrite_serve::counters::snapshot::Snapshot;

use crate::Shared;
use crate::state::DiskId;
use crate::table::{Entry, Phase};

/// How often all counters are looked at.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// Storage that answers nothing for so long hangs.
const LONG: Duration = Duration::from_secs(5);

/// The disks that had requests in flight, by the last look.
#[derive(Default)]
pub(crate) struct Hanging(Mutex<BTreeMap<DiskId, Waiting>>);

/// A disk with requests in flight.
struct Waiting {
    /// The requests that it had answered.
    answered: u64,
    since: SystemTime,
    /// The time of the same look, by the monotonic clock.
    seen: Instant,
}

impl Hanging {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiskId, Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the counters of all served disks, which `read` reads.
    pub(crate) fn look(&self, shared: &Shared, read: impl Fn(DiskId) -> Option<Snapshot>) {
        let is_served = |entry: &Entry| entry.phase == Phase::Served;
        let served = |disks: &BTreeMap<DiskId, Entry>| -> Vec<DiskId> {
            disks.iter().filter(|(_, entry)| is_served(entry)).map(|(id, _)| *id).collect()
        };
        let disks = shared.table.read(served);
        self.lock().retain(|id, _| disks.binary_search(id).is_ok());
        for id in disks {
            let (answered, in_flight) = read(id).as_ref().map_or((0, 0), requests);
            self.note(id, answered, in_flight);
        }
    }

    fn note(&self, id: DiskId, answered: u64, in_flight: u64) {
        let mut waiting = self.lock();
        if in_flight == 0 {
            waiting.remove(&id);
        } else if waiting.get(&id).is_none_or(|before| before.answered != answered) {
            let (since, seen) = (SystemTime::now(), Instant::now());
            waiting.insert(id, Waiting { answered, since, seen });
        }
    }

    /// The requests of a disk that hangs, by these counters, and since when it does. `None`: it does not, or for a short
    /// time.
    pub(crate) fn of(&self, id: DiskId, counters: &Snapshot) -> Option<(u64, SystemTime)> {
        let (answered, in_flight) = requests(counters);
        self.hangs(id, answered, in_flight, LONG)
    }

    fn hangs(
        &self,
        id: DiskId,
        answered: u64,
        in_flight: u64,
        long: Duration,
    ) -> Option<(u64, SystemTime)> {
        let waiting = self.lock();
        let before = waiting.get(&id)?;
        let is_same = in_flight > 0 && before.answered == answered;
        (is_same && before.seen.elapsed() >= long).then_some((in_flight, before.since))
    }
}

/// The numbers of answered requests and of those in flight. Requests that wait for space are not in flight.
fn requests(counters: &Snapshot) -> (u64, u64) {
    let kinds = counters.kinds();
    let sum = |of: fn(&ferrite_serve::counters::snapshot::KindCounts) -> u64| {
        kinds.iter().fold(0_u64, |sum, (_, kind)| sum.wrapping_add(of(kind)))
    };
    let in_flight = sum(|kind| kind.in_flight());
    (sum(|kind| kind.completed), in_flight.saturating_sub(counters.counts.waiting_for_space()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: DiskId = DiskId { domid: 3, devid: 51712 };

    #[test]
    fn a_disk_hangs_if_requests_are_in_flight_and_none_was_answered_since_the_last_look() {
        let hanging = Hanging::default();
        let hangs = |answered, in_flight| {
            hanging.hangs(DISK, answered, in_flight, Duration::ZERO).map(|(requests, _)| requests)
        };
        assert_eq!(hangs(7, 2), None);
        hanging.note(DISK, 7, 2);
        assert_eq!((hangs(7, 3), hangs(8, 2), hangs(7, 0)), (Some(3), None, None));
        assert_eq!(hanging.hangs(DISK, 7, 2, Duration::from_secs(600)), None);
        // The time is that of the first look that saw it.
        let since = hanging.hangs(DISK, 7, 2, Duration::ZERO);
        hanging.note(DISK, 7, 4);
        assert_eq!(hanging.hangs(DISK, 7, 2, Duration::ZERO), since);
        hanging.note(DISK, 9, 1);
        assert_eq!((hangs(7, 2), hangs(9, 1)), (None, Some(1)));
        hanging.note(DISK, 9, 0);
        assert_eq!(hangs(9, 1), None);
    }
}
