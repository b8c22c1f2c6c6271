//! Counts of requests, and their times.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longer times count as this, in nanoseconds.
const MAX_NS: u64 = 60_000_000_000;
/// Times are kept to three digits.
const DIGITS: u8 = 3;

/// Counts during a run.
pub(crate) struct Counter {
    ios: u64,
    errors: u64,
    max_ns: u64,
    times: Histogram<u64>,
}

impl Counter {
    pub(crate) fn new() -> Counter {
        let times = Histogram::new_with_bounds(1, MAX_NS, DIGITS).expect("bounds that make sense");
        Counter { ios: 0, errors: 0, max_ns: 0, times }
    }

    /// Counts a successful request.
    pub(crate) fn add(&mut self, took_ns: u64) {
        self.ios += 1;
        self.max_ns = self.max_ns.max(took_ns);
        self.times.saturating_record(took_ns);
    }

    /// Counts a failed one.
    pub(crate) fn add_error(&mut self) {
        self.errors += 1;
    }

    /// Adds the counts of another.
    pub(crate) fn merge(&mut self, tally: &Tally) {
        self.ios += tally.ios;
        self.errors += tally.errors;
        self.max_ns = self.max_ns.max(tally.max_ns);
        for (ns, count) in &tally.times {
            self.times.saturating_record_n(*ns, *count);
        }
    }

    /// The counts in a form for transport.
    pub(crate) fn tally(&self, cpu_ns: u64) -> Tally {
        let times = self.times.iter_recorded();
        Tally {
            ios: self.ios,
            errors: self.errors,
            max_ns: self.max_ns,
            cpu_ns,
            times: times.map(|t| (t.value_iterated_to(), t.count_at_value())).collect(),
        }
    }

    pub(crate) fn ios(&self) -> u64 {
        self.ios
    }

    pub(crate) fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The average; not more than the longest.
    pub(crate) fn mean_ns(&self) -> f64 {
        self.times.mean().min(self.max_ns as f64)
    }

    /// The time within which this share of all requests was done; not more than the longest.
    pub(crate) fn quantile_ns(&self, part: f64) -> u64 {
        self.times.value_at_quantile(part).min(self.max_ns)
    }
}

/// Counts of a guest or of a queue, for transport as text between processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) ios: u64,
    pub(crate) errors: u64,
    max_ns: u64,
    /// The processor time of the counting threads.
    pub(crate) cpu_ns: u64,
    /// (Nanoseconds, requests).
    times: Vec<(u64, u64)>,
}

impl Tally {
    /// The sum of several.
    pub(crate) fn sum(tallies: &[Tally]) -> Tally {
        Counter::of(tallies).tally(tallies.iter().map(|t| t.cpu_ns).sum())
    }
}

impl Counter {
    /// A counter with the sum of these.
    pub(crate) fn of(tallies: &[Tally]) -> Counter {
        let mut sum = Counter::new();
        tallies.iter().for_each(|t| sum.merge(t));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_survive_the_way_and_the_sum() {
        let mut all = Counter::new();
        let mut halves = [Counter::new(), Counter::new()];
        for i in 1..=10_000u64 {
            let ns = i * i;
            all.add(ns);
            halves[(i % 2) as usize].add(ns);
        }
        let sent: Vec<Tally> = halves
            .iter()
            .map(|half| serde_json::to_string(&half.tally(5)).unwrap())
            .map(|text| serde_json::from_str(&text).unwrap())
            .collect();
        let sum = Tally::sum(&sent);
        assert_eq!((sum.ios, sum.errors, sum.cpu_ns), (10_000, 0, 10));
        let sum = Counter::of(&[sum]);
        for part in [0.0, 0.5, 0.9, 0.99, 0.999, 1.0] {
            assert_eq!(sum.quantile_ns(part), all.quantile_ns(part), "{part}");
        }
        assert_eq!(sum.max_ns(), 100_000_000);
        let p50 = sum.quantile_ns(0.5) as f64;
        assert!((p50 / 25_000_000.0 - 1.0).abs() < 0.001, "{p50}");
        let mean = sum.mean_ns();
        assert!((mean / 33_338_333.5 - 1.0).abs() < 0.001, "{mean}");
    }

    #[test]
    fn times_out_of_range_count_as_the_longest() {
        let mut counter = Counter::new();
        counter.add(0);
        counter.add(u64::MAX);
        assert_eq!((counter.ios(), counter.max_ns()), (2, u64::MAX));
        assert!(counter.quantile_ns(1.0) >= MAX_NS);
    }
}
