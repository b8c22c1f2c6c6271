//! The processor time of this host that a disk may use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ferrite_host::clock::Clock;

use crate::polling::{Budget, HostView, PollWindow};

/// How often the used processor time is read, in nanoseconds.
const CHECK_NS: u64 = 1_000_000;
/// The time whose share can be saved up, in nanoseconds, as with the kernel's own limit (CFS).
const SAVED_NS: u64 = 100_000_000;
/// The longest wait that a debt causes, in nanoseconds. Debt beyond it is forgiven. A machine that
/// stood still counts that time as used, and a guest's disk must not pause for minutes because of
/// it.
const LONGEST_WAIT_NS: u64 = 10_000_000_000;
/// The time beyond its share that a disk gets when it is to be closed, in nanoseconds. It is more
/// than the requests of full rings need.
const FAREWELL_NS: u64 = 1_000_000_000;

/// The limits of one disk.
#[derive(Debug)]
pub struct Processors {
    /// The budget for polling.
    pub polling: Budget,
    /// The load of all the host's processors, if it is known. All disks of a process may share it.
    pub host: Option<Arc<HostView>>,
    /// The limit of all processor time, if there is one. All disks of a process share it.
    limit: OnceLock<Arc<Limit>>,
    /// The polling window that was set while the disk is served: 0 for none, 1 for
    /// [`PollWindow::Auto`], otherwise two more than the microseconds.
    window: AtomicU32,
    /// The disk was told to close, and got its extra time for that.
    forgiven: AtomicBool,
}

impl Default for Processors {
    /// Returns one processor to poll with, and no other limit.
    fn default() -> Self {
        Processors::new(Budget::new(100), None, None)
    }
}

impl Processors {
    /// Makes the limits of a disk: its polling budget, the view of the host, and the limit of its
    /// process.
    pub fn new(
        polling: Budget,
        host: Option<Arc<HostView>>,
        limit: Option<Arc<Limit>>,
    ) -> Processors {
        let limit = limit.map_or_else(OnceLock::new, OnceLock::from);
        let (window, forgiven) = (AtomicU32::new(0), AtomicBool::new(false));
        Processors { polling, host, limit, window, forgiven }
    }

    /// Sets the polling window of a disk that is served. Its queues notice it when they have no
    /// work.
    pub(crate) fn set_window(&self, window: PollWindow) {
        let number = match window {
            PollWindow::Auto => 1,
            PollWindow::Fixed(us) => us.saturating_add(2),
        };
        self.window.store(number, Relaxed);
    }

    /// The polling window that was set, if one was.
    pub(crate) fn window(&self) -> Option<PollWindow> {
        match self.window.load(Relaxed) {
            0 => None,
            1 => Some(PollWindow::Auto),
            number => Some(PollWindow::Fixed(number - 2)),
        }
    }

    /// Sets the limit of the process in percent of one processor; 0 for none.
    pub(crate) fn set_limit(&self, percent: u32, clock: &Arc<dyn Clock>) {
        if percent > 0 || self.limit.get().is_some() {
            self.limit.get_or_init(|| Arc::new(Limit::new(percent, clock.clone()))).set(percent);
        }
    }

    /// Returns for how long no request may be started.
    pub(crate) fn debt(&self, now_ns: u64) -> Option<Duration> {
        self.limit.get()?.debt(now_ns)
    }

    /// Forgives the debt and one second of future use, once, because the disk is to be closed.
    /// Linux closes a disk without waiting for the requests on its rings, and unplugs no other disk
    /// if they are never answered. A guest that does not close the disk has its normal share again
    /// afterwards.
    pub(crate) fn forgive(&self, now_ns: u64) {
        if let Some(limit) = self.limit.get()
            && !self.forgiven.swap(true, Relaxed)
        {
            limit.forgive(now_ns);
        }
    }

    /// Returns whether polling leaves enough processor time for the work.
    pub(crate) fn may_poll(&self) -> bool {
        self.limit.get().is_none_or(|limit| limit.has_plenty())
    }
}

/// A limit of the processor time of the whole process, shared by all disks that it serves.
///
/// Time earns a share, and the time that threads used is owed. In debt, queues take no requests.
/// Requests under way continue, and are paid for afterwards. The used time is read once a
/// millisecond, by one queue for all.
pub struct Limit {
    /// 0: there is no limit.
    percent: AtomicU64,
    clock: Arc<dyn Clock>,
    account: Mutex<Account>,
    /// When to read the used time again.
    check_at_ns: AtomicU64,
    /// When the debt will be paid.
    paid_at_ns: AtomicU64,
    /// At least half of what can be saved up is available.
    plenty: AtomicBool,
}

struct Account {
    at_ns: u64,
    used_ns: u64,
    balance_ns: i64,
    /// Time that is used up before any debt counts.
    free_ns: u64,
}

impl std::fmt::Debug for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Limit({} %)", self.percent.load(Relaxed))
    }
}

impl Limit {
    /// Makes a limit of `percent` percent of one processor, at least one percent.
    pub fn new(percent: u32, clock: Arc<dyn Clock>) -> Limit {
        let percent = u64::from(percent.max(1));
        let account = Account {
            at_ns: clock.now_ns(),
            used_ns: clock.process_cpu_ns(),
            balance_ns: (SAVED_NS * percent / 100) as i64,
            free_ns: 0,
        };
        Limit {
            percent: AtomicU64::new(percent),
            clock,
            account: Mutex::new(account),
            check_at_ns: AtomicU64::new(0),
            paid_at_ns: AtomicU64::new(0),
            plenty: AtomicBool::new(true),
        }
    }

    /// Changes the limit. Old debt is forgiven.
    fn set(&self, percent: u32) {
        let mut account = self.account.lock().unwrap_or_else(PoisonError::into_inner);
        if self.percent.swap(percent.into(), Relaxed) == u64::from(percent) {
            return;
        }
        account.at_ns = self.clock.now_ns();
        account.used_ns = self.clock.process_cpu_ns();
        account.balance_ns = (SAVED_NS * u64::from(percent) / 100) as i64;
        self.plenty.store(true, Relaxed);
        self.paid_at_ns.store(0, Relaxed);
        self.check_at_ns.store(if percent == 0 { u64::MAX } else { 0 }, Relaxed);
    }

    fn has_plenty(&self) -> bool {
        self.plenty.load(Relaxed)
    }

    fn debt(&self, now_ns: u64) -> Option<Duration> {
        if now_ns >= self.check_at_ns.load(Relaxed) {
            self.account(now_ns);
        }
        let left_ns = self.paid_at_ns.load(Relaxed).saturating_sub(now_ns);
        (left_ns > 0).then(|| Duration::from_nanos(left_ns))
    }

    /// See [`Processors::forgive`].
    fn forgive(&self, now_ns: u64) {
        let mut account = self.account.lock().unwrap_or_else(PoisonError::into_inner);
        account.free_ns = FAREWELL_NS;
        account.used_ns = self.clock.process_cpu_ns();
        account.balance_ns = account.balance_ns.max(0);
        self.paid_at_ns.store(now_ns, Relaxed);
        self.check_at_ns.store(now_ns, Relaxed);
    }

    fn account(&self, now_ns: u64) {
        let mut account = self.account.lock().unwrap_or_else(PoisonError::into_inner);
        // Another queue may have been faster, with a later time.
        let passed_ns = now_ns.saturating_sub(account.at_ns);
        let percent = self.percent.load(Relaxed);
        if passed_ns == 0 || percent == 0 {
            return;
        }
        let used_ns = self.clock.process_cpu_ns();
        let spent_ns = used_ns.saturating_sub(account.used_ns);
        let free_ns = spent_ns.min(account.free_ns);
        account.free_ns -= free_ns;
        let spent_ns = (spent_ns - free_ns) as i64;
        let most_ns = (SAVED_NS * percent / 100) as i64;
        let earned_ns = i64::try_from(u128::from(passed_ns) * u128::from(percent) / 100);
        let earned_ns = earned_ns.unwrap_or(i64::MAX);
        let balance_ns = account.balance_ns.saturating_add(earned_ns).min(most_ns) - spent_ns;
        account.balance_ns = balance_ns.max(-((LONGEST_WAIT_NS * percent / 100) as i64));
        (account.at_ns, account.used_ns) = (now_ns, used_ns);
        let debt_ns = account.balance_ns.min(0).unsigned_abs();
        let paid_at_ns = now_ns + (debt_ns * 100).div_ceil(percent);
        self.plenty.store(account.balance_ns >= most_ns / 2, Relaxed);
        self.paid_at_ns.store(paid_at_ns, Relaxed);
        self.check_at_ns.store(paid_at_ns.max(now_ns + CHECK_NS), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    /// A clock whose time and processor time the test sets.
    #[derive(Default)]
    struct World {
        now_ns: AtomicU64,
        cpu_ns: AtomicU64,
        asked: AtomicU64,
    }

    impl World {
        fn pass(&self, ns: u64, cpu_ns: u64) {
            self.now_ns.fetch_add(ns, Relaxed);
            self.cpu_ns.fetch_add(cpu_ns, Relaxed);
        }
    }

    impl Clock for World {
        fn now_ns(&self) -> u64 {
            self.now_ns.load(Relaxed)
        }
        fn sleep(&self, _: Duration) {}
        fn process_cpu_ns(&self) -> u64 {
            self.asked.fetch_add(1, Relaxed);
            self.cpu_ns.load(Relaxed)
        }
    }

    /// Returns the time that a process uses in ten seconds. It works on `threads` processors in
    /// steps of 10 us, whenever it may.
    fn used_in_ten_seconds(percent: u32, threads: u64) -> (u64, Arc<World>) {
        let world = Arc::new(World::default());
        let limit = Limit::new(percent, world.clone());
        while world.now_ns() < 10 * SECOND_NS {
            match limit.debt(world.now_ns()) {
                Some(left) => world.pass(left.as_nanos() as u64, 0),
                None => world.pass(10_000, threads * 10_000),
            }
        }
        (world.cpu_ns.load(Relaxed), world)
    }

    #[test]
    fn a_disk_gets_its_share_and_no_more_on_however_many_processors() {
        for (percent, threads) in [(1, 1), (10, 1), (50, 1), (50, 4), (99, 2), (200, 4), (250, 8)] {
            let (used_ns, _) = used_in_ten_seconds(percent, threads);
            let share_ns = 10 * SECOND_NS / 100 * u64::from(percent);
            let saved_ns = SAVED_NS / 100 * u64::from(percent);
            let step_ns = threads * (CHECK_NS + 10_000);
            assert!(used_ns >= share_ns, "{percent} %: {used_ns}");
            assert!(used_ns <= share_ns + saved_ns + step_ns, "{percent} %: {used_ns}");
        }
    }

    #[test]
    fn who_uses_less_than_the_share_is_never_held_back() {
        let (used_ns, world) = used_in_ten_seconds(100, 1);
        assert_eq!(used_ns, 10 * SECOND_NS);
        // The used time is read once a millisecond, not for each of a million steps.
        assert!(world.asked.load(Relaxed) <= 10_001);
    }

    #[test]
    fn no_more_is_saved_up_than_a_moments_share() {
        let world = Arc::new(World::default());
        let limit = Limit::new(50, world.clone());
        world.pass(1000 * SECOND_NS, 0);
        assert_eq!(limit.debt(world.now_ns()), None);
        world.pass(CHECK_NS, SAVED_NS / 2 + 7);
        assert_eq!(limit.debt(world.now_ns()), Some(Duration::from_nanos(14)));
    }

    #[test]
    fn no_debt_holds_a_disk_back_for_longer_than_ten_seconds() {
        let world = Arc::new(World::default());
        let limit = Limit::new(5, world.clone());
        world.pass(CHECK_NS, 3600 * SECOND_NS);
        assert_eq!(limit.debt(world.now_ns()), Some(Duration::from_secs(10)));
        world.pass(9 * SECOND_NS, 0);
        assert_eq!(limit.debt(world.now_ns()), Some(Duration::from_secs(1)));
        world.pass(SECOND_NS, 0);
        assert_eq!(limit.debt(world.now_ns()), None);
        // A smaller debt is paid in full.
        world.pass(CHECK_NS, SECOND_NS / 5);
        let owed = limit.debt(world.now_ns()).unwrap();
        assert!(owed > Duration::from_millis(3900) && owed <= Duration::from_secs(4), "{owed:?}");
    }

    #[test]
    fn a_disk_that_is_to_go_owes_nothing_and_has_a_second_once() {
        let world = Arc::new(World::default());
        let limit = Arc::new(Limit::new(50, world.clone()));
        let [one, other] =
            [(); 2].map(|()| Processors::new(Budget::new(0), None, Some(limit.clone())));
        world.pass(CHECK_NS, 4 * SECOND_NS);
        assert!(one.debt(world.now_ns()) > Some(Duration::from_secs(7)));
        one.forgive(world.now_ns());
        assert_eq!(one.debt(world.now_ns()), None);
        world.pass(CHECK_NS, FAREWELL_NS);
        assert_eq!(one.debt(world.now_ns()), None);
        world.pass(CHECK_NS, SECOND_NS);
        let owed = one.debt(world.now_ns());
        assert!(owed > Some(Duration::from_millis(1900)), "{owed:?}");
        one.forgive(world.now_ns());
        assert_eq!(one.debt(world.now_ns()), owed);
        // Another disk of the process closes later.
        assert_eq!(other.debt(world.now_ns()), owed);
        other.forgive(world.now_ns());
        assert_eq!(other.debt(world.now_ns()), None);
    }

    #[test]
    fn a_limit_and_a_window_are_set_changed_and_removed_while_a_disk_is_served() {
        let world = Arc::new(World::default());
        let clock: Arc<dyn Clock> = world.clone();
        let disk = Processors::default();
        let owed_after = |percent| {
            disk.set_limit(percent, &clock);
            assert_eq!(disk.debt(world.now_ns()), None, "what was owed is forgiven");
            world.pass(CHECK_NS, SECOND_NS);
            disk.debt(world.now_ns()).map(|owed| owed.as_millis())
        };
        assert_eq!(owed_after(0), None);
        // A tenth of a second's share was saved.
        assert_eq!(owed_after(50), Some(1900));
        assert_eq!(owed_after(200), Some(400));
        assert_eq!(owed_after(0), None);
        assert!(disk.may_poll());
        assert_eq!(owed_after(50), Some(1900));

        assert_eq!(disk.window(), None);
        for window in [PollWindow::Auto, PollWindow::Fixed(0), PollWindow::Fixed(70)] {
            disk.set_window(window);
            assert_eq!(disk.window(), Some(window));
        }
    }

    #[test]
    fn polling_leaves_half_of_it_for_work() {
        let world = Arc::new(World::default());
        let limit = Limit::new(100, world.clone());
        assert!(limit.has_plenty());
        world.pass(CHECK_NS, SAVED_NS / 2);
        assert_eq!(limit.debt(world.now_ns()), None);
        assert!(limit.has_plenty());
        world.pass(CHECK_NS, CHECK_NS + 1);
        assert_eq!(limit.debt(world.now_ns()), None);
        assert!(!limit.has_plenty());
    }
}
