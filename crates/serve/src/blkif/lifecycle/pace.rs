//! How often xenstore is asked for one disk.
//!
//! Each time that a connected guest writes its state, whatever it writes, all keys of its rings are
//! read again; each connection costs this host threads and memory besides. xenstored serves all
//! guests with one thread. So each disk has so many requests a second, and saves up those that it
//! does not need. Once they are used up, it waits until the last ones are paid for. What the guest
//! writes meanwhile is one reading afterwards: only its last state counts. Its queues are threads of
//! their own, and go on.

use std::time::Duration;

use ferrite_xen::store::StoreError;

use super::inbox::Wait;
use super::{Backend, ServeError};
use crate::log_limit::limited;

/// What one request costs of the time that has passed, in nanoseconds: 1,000 a second.
const REQUEST_NS: i64 = 1_000_000;
/// Requests that can be saved up: some fifty connections of an ordinary guest.
const SAVED: i64 = 10_000;
/// What a connection costs beside its requests, in requests.
const CONNECTION: i64 = 100;

/// One disk's account with xenstore.
#[derive(Debug)]
pub(super) struct Pace {
    /// In nanoseconds; below 0 there is something to be paid for.
    balance_ns: i64,
    /// When it was so.
    at_ns: u64,
    /// The requests that are paid for.
    requests: u64,
}

impl Pace {
    /// With everything saved up; `requests` were made before.
    pub(super) fn new(now_ns: u64, requests: u64) -> Pace {
        Pace { balance_ns: SAVED * REQUEST_NS, at_ns: now_ns, requests }
    }

    /// A connection was tried.
    pub(super) fn connection(&mut self) {
        self.balance_ns -= CONNECTION * REQUEST_NS;
    }

    /// How long to wait before the next look, with so many requests made by now.
    pub(super) fn debt(&mut self, now_ns: u64, requests: u64) -> Option<Duration> {
        let earned_ns = now_ns.saturating_sub(self.at_ns).min((SAVED * REQUEST_NS) as u64) as i64;
        let spent = requests.saturating_sub(self.requests) as i64;
        (self.at_ns, self.requests) = (now_ns, requests);
        let balance_ns = (self.balance_ns + earned_ns).min(SAVED * REQUEST_NS);
        self.balance_ns = balance_ns - spent * REQUEST_NS;
        (self.balance_ns < 0).then(|| Duration::from_nanos(self.balance_ns.unsigned_abs()))
    }
}

impl Backend<'_> {
    /// Whether xenstore was asked too often, and is left alone until that is paid for. The toolstack's
    /// changes are looked at as they come. The guest cannot cause these: we write only after a look
    /// at its state.
    pub(super) fn owes(&mut self) -> Result<bool, ServeError> {
        let now_ns = self.clock.now_ns();
        let Some(debt) = self.pace.debt(now_ns, self.store.requests()) else { return Ok(false) };
        if !matches!(self.wait, Wait::Debt(_)) {
            limited!(
                warn,
                self.log_limits.pace,
                now_ns,
                "the guest changes its state too often: it is followed as far as 1000 requests to \
                 xenstore in a second go"
            );
        }
        self.wait = Wait::Debt(debt);
        self.drain_watches()?;
        Ok(!(self.directory_moved && self.is_at_end()?))
    }

    /// Whether the disk has gone, or is to go and nobody holds it. Leaves what the guest has written
    /// for the next look.
    fn is_at_end(&mut self) -> Result<bool, StoreError> {
        let moved = self.moved;
        let look = self.look()?;
        self.moved |= moved;
        Ok(look.gone || look.is_unwanted() && !look.is_held())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn what_was_saved_up_is_spent_at_once_and_then_a_thousand_a_second() {
        let mut pace = Pace::new(7, 3);
        assert_eq!(pace.debt(7, 3 + 10_000), None);
        assert_eq!(pace.debt(7, 3 + 10_500), Some(Duration::from_millis(500)));
        assert_eq!(pace.debt(7 + SECOND_NS / 4, 10_503), Some(Duration::from_millis(250)));
        assert_eq!(pace.debt(7 + SECOND_NS / 2, 10_503), None);
        assert_eq!(pace.debt(7 + SECOND_NS / 2, 10_504), Some(Duration::from_millis(1)));
    }

    #[test]
    fn no_more_is_saved_up_however_long_nothing_is_asked() {
        let mut pace = Pace::new(0, 0);
        assert_eq!(pace.debt(u64::MAX / 2, 0), None);
        assert_eq!(pace.debt(u64::MAX / 2, 10_001), Some(Duration::from_millis(1)));
    }

    #[test]
    fn connections_cost_more_than_their_requests() {
        let mut pace = Pace::new(0, 0);
        (0..100).for_each(|_| pace.connection());
        assert_eq!(pace.debt(0, 0), None);
        pace.connection();
        assert_eq!(pace.debt(0, 0), Some(Duration::from_millis(100)));
    }

    #[test]
    fn a_disk_at_rest_is_looked_at_once_a_second_for_ever() {
        let mut pace = Pace::new(0, 0);
        for second in 1..100_000 {
            assert_eq!(pace.debt(second * SECOND_NS, second * 10), None);
        }
    }
}
