//! How long a worker that ends again and again stays away.

use std::time::{Duration, Instant};

/// A worker that has lived so long was of use.
const USEFUL: Duration = Duration::from_secs(10);
/// How many may end earlier than that, one after the other, before the pauses grow. Each may have had
/// its own reason: somebody who kills them.
const QUICK: u32 = 24;
/// The pause before that,
const FIRST: Duration = Duration::from_millis(5);
/// the next one, each twice as long as the one before,
const GROWS_FROM: Duration = Duration::from_millis(100);
/// and the longest.
const LONGEST: Duration = Duration::from_secs(5);
/// How often it is told that a worker has ended, once a few of them have.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// The few.
const TOLD_AT_ONCE: u32 = 5;

/// The ends of one disk's workers.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    /// Workers that have ended early since the last one that had not.
    quick: u32,
    told: Option<Instant>,
    /// Ends that were not told.
    untold: u32,
}

impl Pauses {
    /// A worker has lived so long. The pause before the next one; and, if it is to be told, how many ends
    /// were not told before.
    pub(crate) fn after(&mut self, lived: Duration, now: Instant) -> (Duration, Option<u32>) {
        self.quick = if lived < USEFUL { self.quick.saturating_add(1) } else { 1 };
        let doublings = self.quick.saturating_sub(QUICK + 1).min(16);
        let pause = match self.quick <= QUICK {
            true => FIRST,
            false => (GROWS_FROM * (1 << doublings)).min(LONGEST),
        };
        let due = self.told.is_none_or(|told| now.duration_since(told) >= TELL_AGAIN);
        if self.quick > TOLD_AT_ONCE && !due {
            self.untold += 1;
            return (pause, None);
        }
        self.told = Some(now);
        (pause, Some(std::mem::take(&mut self.untold)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_one_useful_worker_ends_that() {
        let mut pauses = Pauses::default();
        let now = Instant::now();
        let mut after = |lived| pauses.after(lived, now).0;
        let early: Vec<_> = (0..QUICK).map(|_| after(Duration::ZERO)).collect();
        assert_eq!(early, vec![FIRST; QUICK as usize]);
        let grown: Vec<_> = (0..20).map(|_| after(Duration::ZERO)).collect();
        assert_eq!(grown[..3], [GROWS_FROM, GROWS_FROM * 2, GROWS_FROM * 4]);
        assert!(grown.is_sorted());
        assert_eq!(grown[19], LONGEST);
        assert_eq!((0..1000).map(|_| after(Duration::ZERO)).max(), Some(LONGEST));
        assert_eq!(after(USEFUL), FIRST);
    }

    #[test]
    fn ten_thousand_ends_in_ten_minutes_are_a_few_lines_that_count_them_all() {
        let mut pauses = Pauses::default();
        let now = Instant::now();
        let told: Vec<u32> = (0..10_000)
            .filter_map(|i| pauses.after(Duration::ZERO, now + Duration::from_millis(60) * i).1)
            .collect();
        assert!(told.len() <= 16, "{told:?}");
        assert!(told.iter().sum::<u32>() + told.len() as u32 > 8_000, "{told:?}");
    }
}
