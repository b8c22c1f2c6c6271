//! The processor time that a disk may spend on polling.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use ferrite_host::shares::Shares;

/// The period of a budget, in nanoseconds.
const PERIOD_NS: u64 = 100_000_000;
/// A unit that was not used for this long is given back, in nanoseconds.
pub(crate) const HELD_NS: u64 = 100_000_000;
/// How long not to ask again after a refusal, in nanoseconds.
const REFUSED_NS: u64 = 100_000_000;

/// The processor time that all queues of a disk together may spend on polling. It is counted in
/// periods of 100 ms. A poll is never cut short, so a period may exceed the budget by one window.
///
/// The budget of all disks of a host together is handed out in units of one processor. A disk
/// claims units while it polls, and gives them back a moment after its last poll.
#[derive(Debug)]
pub struct Budget {
    limit_ns: u64,
    spent: Line<Spent>,
    host: Option<Host>,
}

/// A value on cache lines of its own: all queues write it, and it lies beside values that they only
/// read.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line<T>(T);

#[derive(Debug, Default)]
struct Spent {
    period: AtomicU64,
    ns: AtomicU64,
}

#[derive(Debug)]
struct Host {
    shares: Shares,
    claimed: Mutex<Vec<u32>>,
    /// Number of claimed units.
    units: AtomicU32,
    refused_until_ns: AtomicU64,
    /// The time of the last poll of any queue.
    polled_ns: Line<AtomicU64>,
}

/// Processors that all disks of a host may poll with by default: half of them, and at least one.
pub fn host_units() -> u32 {
    let cpus = ferrite_host::processors::count();
    (cpus / 2).max(1) as u32
}

impl Budget {
    /// A budget in percent of one processor.
    pub fn new(percent: u32) -> Budget {
        let limit_ns = PERIOD_NS / 100 * u64::from(percent);
        Budget { limit_ns, spent: Line::default(), host: None }
    }

    /// A budget that is also limited by the host's units.
    pub fn shared(percent: u32, shares: Shares) -> Budget {
        let host = Host {
            shares,
            claimed: Mutex::default(),
            units: AtomicU32::new(0),
            refused_until_ns: AtomicU64::new(0),
            polled_ns: Line::default(),
        };
        Budget { host: Some(host), ..Budget::new(percent) }
    }

    /// Whether units have to be given back.
    pub(crate) fn is_shared(&self) -> bool {
        self.host.is_some()
    }

    /// Whether budget is left in this period.
    pub(crate) fn is_left(&self, now_ns: u64) -> bool {
        let period = now_ns / PERIOD_NS;
        let spent = &self.spent.0;
        // Two queues may both begin a period. The loss of one's time in between does not matter.
        if spent.period.load(Relaxed) != period {
            spent.period.store(period, Relaxed);
            spent.ns.store(0, Relaxed);
        }
        let spent_ns = spent.ns.load(Relaxed);
        spent_ns < self.limit_ns
            && self.host.as_ref().is_none_or(|host| host.covers(spent_ns, now_ns))
    }

    /// Charges polling time that ended now.
    pub(crate) fn spend(&self, ns: u64, now_ns: u64) {
        self.spent.0.ns.fetch_add(ns, Relaxed);
        if let Some(host) = &self.host {
            host.polled_ns.0.store(now_ns, Relaxed);
        }
    }

    /// Gives back units that no queue has used for a while.
    pub(crate) fn give_back_unused(&self, now_ns: u64) {
        if let Some(host) = &self.host
            && now_ns.saturating_sub(host.polled_ns.0.load(Relaxed)) >= HELD_NS
        {
            host.give_back();
        }
    }

    /// Gives back all units.
    pub(crate) fn give_back(&self) {
        if let Some(host) = &self.host {
            host.give_back();
        }
    }
}

impl Host {
    /// Whether the units cover more than the spent time. Claims another one if necessary.
    fn covers(&self, spent_ns: u64, now_ns: u64) -> bool {
        spent_ns < u64::from(self.units.load(Relaxed)) * PERIOD_NS || self.claim(now_ns)
    }

    fn claim(&self, now_ns: u64) -> bool {
        if now_ns < self.refused_until_ns.load(Relaxed) {
            return false;
        }
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(unit) = self.shares.claim(&claimed) else {
            self.refused_until_ns.store(now_ns + REFUSED_NS, Relaxed);
            return false;
        };
        claimed.push(unit);
        self.units.store(claimed.len() as u32, Relaxed);
        true
    }

    fn give_back(&self) {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        for unit in claimed.drain(..) {
            if let Err(e) = self.shares.release(unit) {
                tracing::warn!("cannot give a share of the host's polling back: {e}");
            }
        }
        self.units.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_comes_back_with_the_next_period() {
        let budget = Budget::new(50);
        assert!(budget.is_left(7));
        budget.spend(PERIOD_NS / 2 - 1, 7);
        assert!(budget.is_left(PERIOD_NS - 1));
        budget.spend(1, 8);
        assert!(!budget.is_left(PERIOD_NS - 1));
        assert!(budget.is_left(PERIOD_NS));
    }

    #[test]
    fn nothing_is_nothing() {
        assert!(!Budget::new(0).is_left(1));
    }

    /// Disks of a host with this number of units.
    fn disks<const N: usize>(units: u32, percent: u32) -> [Budget; N] {
        let file = tempfile::NamedTempFile::new().unwrap();
        [(); N].map(|()| Budget::shared(percent, Shares::open(file.path(), units).unwrap()))
    }

    #[test]
    fn as_many_disks_poll_as_the_host_has_units() {
        let disks: [Budget; 3] = disks(2, 100);
        assert_eq!(disks.each_ref().map(|disk| disk.is_left(1)), [true, true, false]);
        assert_eq!(disks.each_ref().map(|disk| disk.is_left(2)), [true, true, false]);
        // This happens when the backend ends.
        let [first, second, third] = disks;
        drop(first);
        assert!(!third.is_left(REFUSED_NS), "who was refused does not ask again at once");
        assert!(third.is_left(1 + REFUSED_NS) && second.is_left(1 + REFUSED_NS));
        assert!(disks_of_none_poll());
    }

    fn disks_of_none_poll() -> bool {
        let [disk]: [Budget; 1] = disks(0, 100);
        !disk.is_left(1)
    }

    #[test]
    fn a_unit_that_no_queue_uses_is_given_back_and_one_that_is_used_is_not() {
        let [a, b]: [Budget; 2] = disks(1, 100);
        assert!(a.is_left(1));
        a.spend(1, 50);
        // One queue has not polled since, and another has.
        a.give_back_unused(49 + HELD_NS);
        assert!(!b.is_left(49 + HELD_NS));
        a.give_back_unused(50 + HELD_NS);
        assert!(b.is_left(49 + HELD_NS + REFUSED_NS));
        assert!(!a.is_left(50 + 2 * HELD_NS));
        b.give_back();
        assert!(a.is_left(50 + 2 * HELD_NS + REFUSED_NS));
    }

    #[test]
    fn who_may_poll_with_two_processors_takes_the_second_unit_when_the_first_is_used_up() {
        let [a, b]: [Budget; 2] = disks(2, 150);
        assert!(a.is_left(1));
        a.spend(PERIOD_NS - 1, 2);
        assert!(a.is_left(3) && b.is_left(3));
        a.spend(1, 4);
        assert!(!a.is_left(5), "the other has it");
        b.give_back();
        assert!(!a.is_left(6), "it has just asked");
        a.give_back();
        assert!(a.is_left(5 + REFUSED_NS));
        a.spend(PERIOD_NS, 6 + REFUSED_NS);
        assert!(a.is_left(7 + REFUSED_NS));
        a.spend(PERIOD_NS / 2, 8 + REFUSED_NS);
        assert!(!a.is_left(9 + REFUSED_NS), "more than its own");
    }
}
