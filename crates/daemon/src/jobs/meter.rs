//! How far a job is, and how fast.

use std::collections::VecDeque;
use std::time::Duration;

/// The time that a rate is the mean of.
const WINDOW: Duration = Duration::from_secs(10);
/// Most samples: a process that reports more often is measured over a shorter time.
const MAX_SAMPLES: usize = 64;

/// The progress of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter {
    /// Bytes that are done.
    pub(super) done: u64,
    /// All bytes that are to be done.
    pub(super) all: u64,
    /// Times and bytes of the last reports, the oldest first.
    samples: VecDeque<(u64, u64)>,
}

impl Meter {
    /// A job that had come so far when its state was written.
    pub(super) fn new(done: u64, all: u64) -> Meter {
        Meter { done, all, samples: VecDeque::new() }
    }

    /// Takes a report.
    pub(super) fn note(&mut self, now_ns: u64, done: u64, all: u64) {
        if done < self.done {
            self.samples.clear();
        }
        (self.done, self.all) = (done, all);
        self.samples.push_back((now_ns, done));
        let oldest = now_ns.saturating_sub(WINDOW.as_nanos() as u64);
        while self.samples.len() > MAX_SAMPLES
            || self.samples.front().is_some_and(|(at, _)| *at < oldest)
        {
            self.samples.pop_front();
        }
    }

    /// Forgets how fast the job was: it rests, or has another limit.
    pub(super) fn forget_rate(&mut self) {
        self.samples.clear();
    }

    /// Bytes a second. A job without reports slows down.
    pub(super) fn rate(&self, now_ns: u64) -> u64 {
        let (Some((first_ns, first)), Some((last_ns, last))) =
            (self.samples.front(), self.samples.back())
        else {
            return 0;
        };
        // A report is due each second.
        let silent = now_ns.saturating_sub(*last_ns) > 3_000_000_000;
        let end_ns = if silent { now_ns } else { *last_ns };
        let took_ns = end_ns.saturating_sub(*first_ns);
        match took_ns {
            0 => 0,
            _ => (u128::from(last - first) * 1_000_000_000 / u128::from(took_ns)) as u64,
        }
    }

    /// Seconds until all is done, if that can be told.
    pub(super) fn left_s(&self, now_ns: u64) -> Option<u64> {
        let rate = self.rate(now_ns);
        (rate > 0).then(|| self.all.saturating_sub(self.done).div_ceil(rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_rate_is_that_of_the_last_seconds_and_falls_without_reports() {
        let mut meter = Meter::new(0, 0);
        assert_eq!((meter.rate(0), meter.left_s(0)), (0, None));
        for second in 0..20 {
            let fast = if second < 10 { 1000 } else { 10 };
            let done = meter.done + fast;
            meter.note(second * S, done, 20_000);
        }
        assert_eq!(meter.rate(19 * S), 10);
        assert_eq!(meter.left_s(19 * S), Some((20_000 - meter.done).div_ceil(10)));
        assert_eq!(meter.rate(29 * S), 5);
        meter.forget_rate();
        assert_eq!(meter.left_s(29 * S), None);
    }

    #[test]
    fn a_job_that_begins_again_has_no_old_rate() {
        let mut meter = Meter::new(0, 0);
        meter.note(0, 0, 100);
        meter.note(S, 90, 100);
        assert_eq!(meter.rate(S), 90);
        meter.note(2 * S, 5, 100);
        assert_eq!((meter.rate(2 * S), meter.done), (0, 5));
        let most = u64::MAX;
        meter.note(3 * S, most, most);
        assert_eq!(meter.left_s(3 * S), Some(0));
    }
}
