//! The speed of a copy that others are not to notice.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferrite_host::clock::{Clock, SystemClock};

/// So long is slept at a time, so that a new speed counts soon, and a copy can be stopped.
const NAP: Duration = Duration::from_millis(20);

/// Bytes a second, which may change at any time; 0: no limit.
pub(super) struct Speed {
    bytes_per_s: Arc<AtomicU64>,
    /// Bytes that were copied and whose time is not over yet.
    ahead: Cell<u64>,
    /// The time up to which that is computed.
    then_ns: Cell<u64>,
}

impl Speed {
    pub(super) fn new(bytes_per_s: Arc<AtomicU64>) -> Speed {
        Speed { bytes_per_s, ahead: Cell::new(0), then_ns: Cell::new(SystemClock.now_ns()) }
    }

    /// Takes the time for so many bytes.
    pub(super) fn spend(&self, bytes: u64) {
        self.ahead.set(self.ahead.get().saturating_add(bytes));
    }

    /// Waits until the next bytes may be copied. Requests in flight go on meanwhile: the kernel does them. `false`:
    /// `go_on` says that the copy is to end.
    pub(super) fn wait(&self, go_on: impl Fn() -> bool) -> bool {
        loop {
            let (now, speed) = (SystemClock.now_ns(), self.bytes_per_s.load(Ordering::Relaxed));
            self.pass(now, speed);
            let Some(left_ns) = left_ns(self.ahead.get(), speed) else { return true };
            SystemClock.sleep(Duration::from_nanos(left_ns).min(NAP));
            if !go_on() {
                return false;
            }
        }
    }

    /// Lets the time until now pass.
    fn pass(&self, now_ns: u64, speed: u64) {
        let passed_ns = now_ns.saturating_sub(self.then_ns.get());
        let bytes = u128::from(passed_ns) * u128::from(speed) / 1_000_000_000;
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        // Short times are added up: they would be rounded to nothing.
        if speed == 0 || bytes > 0 {
            self.then_ns.set(now_ns);
            self.ahead.set(if speed == 0 { 0 } else { self.ahead.get().saturating_sub(bytes) });
        }
    }
}

/// The time that so many bytes take; `None`: none.
fn left_ns(ahead: u64, speed: u64) -> Option<u64> {
    let ns = (u128::from(ahead) * 1_000_000_000).checked_div(u128::from(speed))?;
    u64::try_from(ns).ok().or(Some(u64::MAX)).filter(|ns| *ns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_and_a_new_speed_counts_for_those_that_are_ahead() {
        let speed = Speed::new(Arc::default());
        speed.then_ns.set(0);
        speed.spend(1000);
        assert_eq!(left_ns(speed.ahead.get(), 100), Some(10_000_000_000));
        speed.pass(5_000_000_000, 100);
        assert_eq!(speed.ahead.get(), 500);
        // Nothing is lost of times that are too short for a byte.
        (1..=1000).for_each(|ms| speed.pass(5_000_000_000 + ms * 1_000_000, 100));
        assert_eq!(speed.ahead.get(), 400);
        assert_eq!(left_ns(speed.ahead.get(), 400), Some(1_000_000_000));
        assert_eq!(left_ns(speed.ahead.get(), 0), None);
        speed.pass(6_000_000_001, 0);
        assert_eq!((speed.ahead.get(), left_ns(0, 100)), (0, None));
    }
}
