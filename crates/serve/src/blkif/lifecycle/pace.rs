//! The rate of requests to xenstore for one disk.
//!
//! Each time a connected guest writes its state, all keys of its rings are read again. Each
//! connection costs this host threads and memory besides. xenstored serves all guests with one
//! thread. So each disk has a number of requests a second, and saves up those that it does not
//! need.
//!
//! When they are used up, the loop waits until the last ones are paid for. All writes of the guest
//! meanwhile cost one read: only its last state counts. Its queues have threads of their own, and
//! go on.

use std::time::Duration;

use ferrite_xen::store::StoreError;

use super::inbox::Wait;
use super::{Backend, ServeError};
use crate::log_limit::limited;

/// The cost of one request, in nanoseconds of passed time: 1,000 a second.
const REQUEST_NS: i64 = 1_000_000;
/// Most requests that can be saved up: some fifty connections of an ordinary guest.
const SAVED: i64 = 10_000;
/// The cost of a connection besides its requests, in requests.
const CONNECTION: i64 = 100;

/// One disk's account with xenstore.
#[derive(Debug)]
pub(super) struct Pace {
    /// The balance in nanoseconds. Below 0 there is a debt.
    balance_ns: i64,
    /// The time of that balance.
    at_ns: u64,
    /// Number of requests that the balance includes.
    requests: u64,
}

impl Pace {
    /// A full account. `requests` were made before.
    pub(super) fn new(now_ns: u64, requests: u64) -> Pace {
        Pace { balance_ns: SAVED * REQUEST_NS, at_ns: now_ns, requests }
    }

    /// Charges a connection.
    pub(super) fn connection(&mut self) {
        self.balance_ns -= CONNECTION * REQUEST_NS;
    }

    /// Charges the requests up to the number `requests`. Returns how long to wait before the next
    /// read.
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
    /// Whether there were too many requests to xenstore, which is then left alone. Changes of the
    /// toolstack are still handled: the guest cannot cause them, since the backend writes only
    /// after it has read the guest's state.
    pub(super) fn is_over_budget(&mut self) -> Result<bool, ServeError> {
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
        Ok(!(self.directory_changed && self.is_at_end()?))
    }

    /// Whether the disk is gone, or is to go and not held. A change of the guest's state is left
    /// for the next read.
    fn is_at_end(&mut self) -> Result<bool, StoreError> {
        let frontend_changed = self.frontend_changed;
        let snapshot = self.read_states()?;
        self.frontend_changed |= frontend_changed;
        Ok(snapshot.gone || snapshot.is_unwanted() && !snapshot.is_held())
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
