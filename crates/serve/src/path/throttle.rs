//! A path whose disk has used its processor time, or is at a [limit](super::limit), takes no
//! requests. Requests that were taken go on, and the path ends when it is asked to.

use std::time::Duration;

use super::RequestPath;

/// The reasons that keep a path from taking requests.
#[derive(Default)]
pub(super) struct Hold {
    /// Whether there are requests, but no buffer for them, or the gate is closed.
    pub(super) stalled: bool,
    /// Whether they lack a buffer.
    pub(super) short: bool,
    /// Set while the disk has used its processor time.
    throttled: Option<Throttled>,
}

struct Throttled {
    since_ns: u64,
    /// The time until requests are taken again.
    left: Duration,
}

impl RequestPath {
    /// Whether no requests may be taken now.
    pub fn is_throttled(&self) -> bool {
        (self.hold.throttled.is_some() || self.limited.is_held()) && !self.shared.stopping()
    }

    /// How long no requests may be taken. `None`: they may.
    pub fn throttled_for(&self, now_ns: u64) -> Option<Duration> {
        let throttled = self.hold.throttled.as_ref().map(|throttled| throttled.left);
        throttled.max(self.limited.left(now_ns))
    }

    /// Checks whether requests may be taken. Call it once a turn.
    pub fn throttle(&mut self, now_ns: u64) {
        if self.limited.is_held() {
            self.end_limited(now_ns);
        }
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
