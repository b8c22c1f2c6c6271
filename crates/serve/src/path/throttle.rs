//! A path whose disk has used its processor time takes no requests. What it has taken goes on, and
//! it ends when it is asked to.

use std::time::Duration;

use super::RequestPath;

/// What keeps a path from taking requests.
#[derive(Default)]
pub(super) struct Hold {
    /// There are some, and no buffer for them, or the gate is closed.
    pub(super) stalled: bool,
    /// It is a buffer that they lack.
    pub(super) short: bool,
    /// The disk has used its processor time.
    throttled: Option<Throttled>,
}

struct Throttled {
    since_ns: u64,
    /// How long it will be before something is.
    left: Duration,
}

impl RequestPath {
    /// Whether nothing is to be taken now.
    pub fn is_throttled(&self) -> bool {
        self.hold.throttled.is_some() && !self.shared.stopping()
    }

    /// How long nothing is to be taken, if so.
    pub fn throttled_for(&self) -> Option<Duration> {
        self.hold.throttled.as_ref().map(|throttled| throttled.left)
    }

    /// Finds out whether anything may be taken now; once a turn.
    pub fn throttle(&mut self, now_ns: u64) {
        let debt = self.shared.processors.debt(now_ns);
        if debt.is_none() && self.hold.throttled.is_none() {
            return;
        }
        let since_ns = self.hold.throttled.take().map(|throttled| throttled.since_ns);
        match debt {
            Some(left) => {
                let since_ns = since_ns.unwrap_or(now_ns);
                self.hold.throttled = Some(Throttled { since_ns, left });
            }
            None => {
                let counters = self.counters();
                counters.throttles.add(1);
                counters.throttled_ns.add(now_ns.saturating_sub(since_ns.unwrap_or(now_ns)));
            }
        }
    }
}
