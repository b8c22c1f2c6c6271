//! The pauses between the starts of a worker that keeps ending.

use std::time::{Duration, Instant};

/// A worker that has lived this long ends the backoff.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// Early exits in a row before the pauses grow. Each of these may have its own reason, such as an
/// administrator's `kill`.
const EARLY_EXITS: u32 = 24;
/// The pause before the pauses grow.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// The first of the growing pauses. Each is twice as long as the one before.
const GROWTH_START: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Exits are logged at most once in this time, after [`LOGGED_AT_ONCE`] early ones.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Early exits in a row that are all logged.
const LOGGED_AT_ONCE: u32 = 5;

/// The exits of one disk's workers.
#[derive(Debug, Default)]
pub(crate) struct RestartBackoff {
    /// Early exits since the last worker that lived long enough.
    early_exits: u32,
    last_logged: Option<Instant>,
    /// Exits since the last logged one.
    unlogged: u32,
}

impl RestartBackoff {
    /// Notes the exit of a worker that has lived for `lived`. Returns the pause before the next
    /// start. With it comes, if this exit is to be logged, the number of unlogged exits before it.
    pub(crate) fn after(&mut self, lived: Duration, now: Instant) -> (Duration, Option<u32>) {
        self.early_exits =
            if lived < HEALTHY_AFTER { self.early_exits.saturating_add(1) } else { 1 };
        let doublings = self.early_exits.saturating_sub(EARLY_EXITS + 1).min(16);
        let pause = match self.early_exits <= EARLY_EXITS {
            true => FIRST_PAUSE,
            false => (GROWTH_START * (1 << doublings)).min(LONGEST_PAUSE),
        };
        let due = self.last_logged.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL);
        if self.early_exits > LOGGED_AT_ONCE && !due {
            self.unlogged += 1;
            return (pause, None);
        }
        self.last_logged = Some(now);
        (pause, Some(std::mem::take(&mut self.unlogged)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_one_useful_worker_ends_that() {
        let mut backoff = RestartBackoff::default();
        let now = Instant::now();
        let mut after = |lived| backoff.after(lived, now).0;
        let early: Vec<_> = (0..EARLY_EXITS).map(|_| after(Duration::ZERO)).collect();
        assert_eq!(early, vec![FIRST_PAUSE; EARLY_EXITS as usize]);
        let grown: Vec<_> = (0..20).map(|_| after(Duration::ZERO)).collect();
        assert_eq!(grown[..3], [GROWTH_START, GROWTH_START * 2, GROWTH_START * 4]);
        assert!(grown.is_sorted());
        assert_eq!(grown[19], LONGEST_PAUSE);
        assert_eq!((0..1000).map(|_| after(Duration::ZERO)).max(), Some(LONGEST_PAUSE));
        assert_eq!(after(HEALTHY_AFTER), FIRST_PAUSE);
    }

    #[test]
    fn ten_thousand_ends_in_ten_minutes_are_a_few_lines_that_count_them_all() {
        let mut backoff = RestartBackoff::default();
        let now = Instant::now();
        let logged: Vec<u32> = (0..10_000)
            .filter_map(|i| backoff.after(Duration::ZERO, now + Duration::from_millis(60) * i).1)
            .collect();
        assert!(logged.len() <= 16, "{logged:?}");
        assert!(logged.iter().sum::<u32>() + logged.len() as u32 > 8_000, "{logged:?}");
    }
}
