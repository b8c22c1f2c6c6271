//! What a disk may spend on looking.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The time over which a budget is counted, in nanoseconds.
const PERIOD_NS: u64 = 100_000_000;

/// Processor time that all queues of a disk together may spend on looking. Counted in periods of
/// 100 ms; a look that was begun is never cut short, so a period may end one window over.
#[derive(Debug)]
pub struct Budget {
    limit_ns: u64,
    period: AtomicU64,
    spent_ns: AtomicU64,
}

impl Budget {
    /// So many percent of one processor; 100 is one, all the time.
    pub fn new(percent: u32) -> Budget {
        let limit_ns = PERIOD_NS / 100 * u64::from(percent);
        Budget { limit_ns, period: AtomicU64::new(0), spent_ns: AtomicU64::new(0) }
    }

    /// Whether there is something left of this period.
    pub(crate) fn is_left(&self, now_ns: u64) -> bool {
        let period = now_ns / PERIOD_NS;
        // Two queues may both begin a period, and the loss of what one has spent in between is
        // nothing to care about.
        if self.period.swap(period, Relaxed) != period {
            self.spent_ns.store(0, Relaxed);
        }
        self.spent_ns.load(Relaxed) < self.limit_ns
    }

    /// Takes what was spent.
    pub(crate) fn spend(&self, ns: u64) {
        self.spent_ns.fetch_add(ns, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_comes_back_with_the_next_period() {
        let budget = Budget::new(50);
        assert!(budget.is_left(7));
        budget.spend(PERIOD_NS / 2 - 1);
        assert!(budget.is_left(PERIOD_NS - 1));
        budget.spend(1);
        assert!(!budget.is_left(PERIOD_NS - 1));
        assert!(budget.is_left(PERIOD_NS));
    }

    #[test]
    fn nothing_is_nothing() {
        assert!(!Budget::new(0).is_left(1));
    }
}
