//! A queue whose disk has used its processor time takes nothing off its ring. What it has taken
//! goes on, and it ends when it is asked to.

use std::time::Duration;

use super::Queue;

/// Nothing is taken.
pub(super) struct Throttled {
    since_ns: u64,
    /// How long it will be before something is.
    pub(super) left: Duration,
}

impl Queue {
    pub(super) fn is_throttled(&self) -> bool {
        self.throttled.is_some() && !self.connection.stopping()
    }

    /// Finds out whether anything may be taken now; once a turn.
    pub(super) fn throttle(&mut self, now_ns: u64) {
        let debt = self.connection.processors.debt(now_ns);
        if debt.is_none() && self.throttled.is_none() {
            return;
        }
        let since_ns = self.throttled.take().map(|throttled| throttled.since_ns);
        match debt {
            Some(left) => {
                let since_ns = since_ns.unwrap_or(now_ns);
                self.throttled = Some(Throttled { since_ns, left });
            }
            None => {
                let counters = self.counters();
                counters.throttles.add(1);
                counters.throttled_ns.add(now_ns.saturating_sub(since_ns.unwrap_or(now_ns)));
            }
        }
    }
}
