//! Subjects measured in turn. A disturbance of the machine affects adjacent runs alike, so ratios are taken within a
//! round, and medians over the rounds.

use anyhow::Result;
use ferrite_xenhost::steps::step;

/// One run. A figure that a run does not give is NaN, and so meets no target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Requests per second.
    pub(crate) iops: f64,
    /// Processor time per request of the serving process.
    pub(crate) cpu_us: f64,
    /// Processor time per request of the guests.
    pub(crate) guest_cpu_us: f64,
    /// The mean latency.
    pub(crate) lat_us: f64,
    /// The median latency.
    pub(crate) p50_us: f64,
    /// The latency that one request of a hundred exceeds.
    pub(crate) p99_us: f64,
    /// The latency that one request of a thousand exceeds.
    pub(crate) p999_us: f64,
    /// The longest latency.
    pub(crate) max_us: f64,
    /// The time of opening the image.
    pub(crate) open_us: f64,
    /// The cost of waking a thread on this machine.
    pub(crate) wake_up_us: f64,
    /// Segments per grant copy.
    pub(crate) segments_per_copy: f64,
    /// The share of the requests for which metadata had to be read first.
    pub(crate) misses: f64,
    /// Pages of a store's P2M that were read.
    pub(crate) p2m_misses: f64,
    /// Entries of a store's P2M that were found in memory.
    pub(crate) p2m_hits: f64,
    /// Operations on the storage, per request.
    pub(crate) operations: f64,
    /// Resident memory before the first request.
    pub(crate) idle_rss_kib: f64,
    /// Context switches of the idle backend.
    pub(crate) idle_switches: f64,
    /// Memory of all backends, at rest after the load.
    pub(crate) rest_pss_kib: f64,
    /// Instructions per request of the backend's own code.
    pub(crate) instructions: f64,
}

impl Sample {
    /// A sample without any figure.
    pub(crate) const UNKNOWN: Sample = Sample {
        iops: f64::NAN,
        cpu_us: f64::NAN,
        guest_cpu_us: f64::NAN,
        lat_us: f64::NAN,
        p50_us: f64::NAN,
        p99_us: f64::NAN,
        p999_us: f64::NAN,
        max_us: f64::NAN,
        open_us: f64::NAN,
        wake_up_us: f64::NAN,
        segments_per_copy: f64::NAN,
        misses: f64::NAN,
        p2m_misses: f64::NAN,
        p2m_hits: f64::NAN,
        operations: f64::NAN,
        idle_rss_kib: f64::NAN,
        idle_switches: f64::NAN,
        rest_pss_kib: f64::NAN,
        instructions: f64::NAN,
    };
}

type Run<'a> = Box<dyn Fn() -> Result<Sample> + 'a>;

/// The subjects to be measured in turn.
pub(crate) struct Plan<'a> {
    title: String,
    series: Vec<(String, Run<'a>)>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(title: impl Into<String>) -> Plan<'a> {
        Plan { title: title.into(), series: Vec::new() }
    }

    /// Adds a subject, by the name of its samples.
    pub(crate) fn add(
        mut self,
        name: impl Into<String>,
        run: impl Fn() -> Result<Sample> + 'a,
    ) -> Plan<'a> {
        self.series.push((name.into(), Box::new(run)));
        self
    }

    /// Measures everything once per round.
    ///
    /// # Errors
    /// The first run that fails.
    pub(crate) fn run(self, rounds: u32) -> Result<Rounds> {
        let what = format!("{}, {rounds} rounds of {}", self.title, self.series.len());
        step(&what, || self.measure(rounds, |_| Ok(())))
    }

    /// Measures without printing; `before` is called before each run with its name.
    ///
    /// # Errors
    /// The first run that fails, or `before`.
    pub(crate) fn measure(
        self,
        rounds: u32,
        mut before: impl FnMut(&str) -> Result<()>,
    ) -> Result<Rounds> {
        let mut samples = Vec::new();
        for _ in 0..rounds {
            let mut round = Vec::new();
            for (name, run) in &self.series {
                before(name)?;
                round.push(run()?);
            }
            samples.push(round);
        }
        Ok(Rounds { names: self.series.into_iter().map(|(name, _)| name).collect(), samples })
    }

    pub(crate) fn title(&self) -> &str {
        &self.title
    }

    /// The number of subjects.
    pub(crate) fn len(&self) -> usize {
        self.series.len()
    }
}

/// All samples.
pub(crate) struct Rounds {
    names: Vec<String>,
    samples: Vec<Vec<Sample>>,
}

/// One round's samples.
pub(crate) struct Round<'a> {
    names: &'a [String],
    samples: &'a [Sample],
}

impl Round<'_> {
    /// The sample of this name.
    ///
    /// # Panics
    /// If there is none: a bug of the caller.
    pub(crate) fn of(&self, name: &str) -> Sample {
        match self.names.iter().position(|n| n == name) {
            Some(i) => self.samples[i],
            None => panic!("{name:?} is none of {:?}", self.names),
        }
    }
}

impl Rounds {
    /// A figure of each round.
    pub(crate) fn each(&self, figure: impl Fn(&Round<'_>) -> f64) -> Vec<f64> {
        let round = |samples| Round { names: &self.names, samples };
        self.samples.iter().map(|samples| figure(&round(samples))).collect()
    }

    /// The one of `names` with the largest median.
    pub(crate) fn best<'n>(
        &self,
        names: &[&'n str],
        figure: impl Fn(Sample) -> f64,
    ) -> Option<&'n str> {
        let median_of = |name: &str| median(&self.each(|round| figure(round.of(name))));
        names.iter().copied().max_by(|a, b| median_of(a).total_cmp(&median_of(b)))
    }
}

/// The median; the mean of both middle values of an even number.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => f64::NAN,
        (n, half) if n % 2 == 1 => sorted[half],
        (_, half) => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn the_median_does_not_see_outliers() {
        assert_eq!(median(&[5.0, 1.0, 900.0]), 5.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 900.0]), 3.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn runs_take_turns_and_ratios_stay_within_a_round() {
        let order = RefCell::new(String::new());
        let load = Cell::new(1.0);
        let run = |name: &'static str, iops: f64| {
            let (order, load) = (&order, &load);
            move || {
                order.borrow_mut().push_str(name);
                Ok(Sample { iops: iops * load.get(), ..Sample::UNKNOWN })
            }
        };
        let plan = Plan::new("a test").add("a", run("a", 100.0)).add("b", run("b", 50.0));
        // The machine gets slower with each round.
        let slower = || {
            load.set(load.get() / 2.0);
            Ok(Sample::UNKNOWN)
        };
        let rounds = plan.add("load", slower).run(3).unwrap();
        assert_eq!(*order.borrow(), "ababab");
        assert_eq!(rounds.each(|r| r.of("a").iops), [100.0, 50.0, 25.0]);
        assert_eq!(rounds.each(|r| r.of("b").iops / r.of("a").iops), [0.5; 3]);
        assert_eq!(rounds.best(&["b", "a"], |s| s.iops), Some("a"));
    }

    #[test]
    fn a_run_that_fails_ends_the_rounds() {
        let plan = Plan::new("a test").add("bad", || anyhow::bail!("no disk"));
        assert!(plan.run(2).is_err_and(|e| format!("{e:#}").contains("no disk")));
    }
}
