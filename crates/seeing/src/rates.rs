//! The rates of a disk between two samples.

use std::collections::BTreeMap;

use ferrite_serve::counters::histogram::{BUCKETS, quantile_ns};
use ferrite_serve::counters::snapshot::{KindCounts, Snapshot};
use ferrite_serve::path::limit::NAMES;
use rustix::param::clock_ticks_per_second;
use serde::Serialize;

use crate::folder::Sample;

/// Bytes of a sector.
const SECTOR: f64 = 512.0;

/// The rates of one kind of request. Latencies are in microseconds, from the ring to the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KindRates {
    /// Answers per second.
    pub per_s: f64,
    /// Bytes per second of successful requests.
    pub bytes_per_s: f64,
    /// The mean latency; `None` without requests, as all latencies.
    pub mean_us: Option<f64>,
    /// The median latency.
    pub p50_us: Option<f64>,
    /// The latency that one request in a hundred exceeds.
    pub p99_us: Option<f64>,
    /// The latency that one request in a thousand exceeds.
    pub p999_us: Option<f64>,
    /// Requests in flight at the second sample.
    pub in_flight: u64,
    /// Requests answered with an error.
    pub errors: u64,
}

/// The rates of a disk between two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Its name: `vbd-DOMID-DEVID`.
    pub disk: String,
    /// Its name for users, who may type it as well. `disk` until another is set.
    pub name: String,
    /// The image.
    pub image: String,
    /// The process that serves it, or did last.
    pub pid: u32,
    /// Whether that process is running.
    pub alive: bool,
    /// The time between the samples, in seconds.
    pub seconds: f64,
    /// Reads.
    pub read: KindRates,
    /// Writes.
    pub write: KindRates,
    /// Flushes without data.
    pub flush: KindRates,
    /// Discards.
    pub discard: KindRates,
    /// Reads and writes together.
    pub data: KindRates,
    /// Requests in flight, on average.
    pub queue_depth: f64,
    /// Requests that waited for metadata, in percent of those that need metadata.
    pub metadata_miss_percent: Option<f64>,
    /// Polls that found work, in percent.
    pub poll_hit_percent: Option<f64>,
    /// Processor time of the process, in percent of one processor; `None` without a process.
    pub cpu_percent: Option<f64>,
    /// The disk's limits in a second by name, if it has some.
    pub limits: BTreeMap<&'static str, u64>,
    /// Requests that began to wait for the limit, in percent of those that were answered; `None`
    /// without a limit.
    pub limit_waits_percent: Option<f64>,
    /// Requests that were answered with an error or refused.
    pub errors: u64,
}

impl Rates {
    /// The rates since `before`; without it, or if that belongs to another disk of this name, since the counters began.
    pub fn between(before: Option<&Sample>, now: &Sample) -> Rates {
        let before = before.filter(|before| is_same(&before.snapshot, &now.snapshot));
        let seconds = match before {
            Some(before) => now.at.saturating_duration_since(before.at).as_secs_f64(),
            None => now.age_s,
        };
        // Guards the first second of a disk, and two samples at once.
        let per = 1.0 / seconds.max(0.001);
        let kinds = now.snapshot.kinds();
        let deltas = match before {
            Some(before) => {
                let before = before.snapshot.kinds();
                [0, 1, 2, 3].map(|i| kinds[i].1.since(before[i].1))
            }
            None => kinds.map(|(_, kind)| *kind),
        };
        let rates = [0, 1, 2, 3].map(|i| kind(&deltas[i], kinds[i].1, per));
        let counts = match before {
            Some(before) => now.snapshot.counts.since(&before.snapshot.counts),
            None => now.snapshot.counts,
        };
        let [read, write, flush, discard] = rates;
        let both = plus(&deltas[0], &deltas[1]);
        let mut data = kind(&both, &both, per);
        data.in_flight = read.in_flight.saturating_add(write.in_flight);
        let busy_ns = deltas.iter().map(|kind| kind.sum_ns as f64).sum::<f64>();
        let errors = deltas.iter().fold(counts.refused, |n, kind| n.saturating_add(kind.errors));
        let limits = NAMES.into_iter().zip(now.snapshot.limits);
        let limits: BTreeMap<_, _> = limits.filter(|(_, limit)| *limit > 0).collect();
        let waited =
            percent(counts.limit_waits, counts.requests.saturating_sub(counts.limit_waits));
        Rates {
            limit_waits_percent: if limits.is_empty() { None } else { waited },
            limits,
            disk: now.snapshot.disk.clone(),
            name: now.snapshot.disk.clone(),
            image: now.snapshot.image.clone(),
            pid: now.snapshot.pid,
            alive: now.process.is_some(),
            seconds,
            read,
            write,
            flush,
            discard,
            data,
            queue_depth: busy_ns * per / 1e9,
            metadata_miss_percent: percent(counts.metadata_misses, counts.metadata_hits),
            poll_hit_percent: percent(counts.hits, counts.polls.saturating_sub(counts.hits)),
            cpu_percent: cpu_percent(before, now, seconds),
            errors,
        }
    }
}

/// Whether the later sample continues the earlier one.
fn is_same(before: &Snapshot, now: &Snapshot) -> bool {
    before.made_unix_s == now.made_unix_s
        && before.counts.requests <= now.counts.requests
        && before.counts.sweeps <= now.counts.sweeps
}

fn kind(delta: &KindCounts, now: &KindCounts, per_s: f64) -> KindRates {
    let quantile = |of| quantile_ns(&delta.histogram, of).map(|ns| ns as f64 / 1e3);
    let completed = delta.completed as f64;
    KindRates {
        per_s: completed * per_s,
        bytes_per_s: delta.sectors as f64 * SECTOR * per_s,
        mean_us: (delta.completed > 0).then(|| delta.sum_ns as f64 / completed / 1e3),
        p50_us: quantile(50_000),
        p99_us: quantile(99_000),
        p999_us: quantile(99_900),
        in_flight: now.in_flight(),
        errors: delta.errors,
    }
}

fn plus(a: &KindCounts, b: &KindCounts) -> KindCounts {
    let histogram: [u64; BUCKETS] =
        std::array::from_fn(|i| a.histogram[i].saturating_add(b.histogram[i]));
    KindCounts {
        submitted: a.submitted.saturating_add(b.submitted),
        completed: a.completed.saturating_add(b.completed),
        errors: a.errors.saturating_add(b.errors),
        sectors: a.sectors.saturating_add(b.sectors),
        sum_ns: a.sum_ns.saturating_add(b.sum_ns),
        max_ns: a.max_ns.max(b.max_ns),
        histogram,
    }
}

fn percent(of: u64, others: u64) -> Option<f64> {
    let all = of as f64 + others as f64;
    (all > 0.0).then(|| 100.0 * of as f64 / all)
}

/// Processor time since the earlier sample of the same process; without one, since the process was started.
fn cpu_percent(before: Option<&Sample>, now: &Sample, seconds: f64) -> Option<f64> {
    let process = now.process?;
    let same = |before: &&Sample| {
        before.snapshot.pid == now.snapshot.pid && before.snapshot.started == now.snapshot.started
    };
    let earlier = before.filter(same).and_then(|before| before.process);
    let (ticks, seconds) = match earlier {
        Some(earlier) => (process.cpu_ticks.saturating_sub(earlier.cpu_ticks), seconds),
        None => (process.cpu_ticks, now.process_age_s),
    };
    Some(100.0 * ticks as f64 / clock_ticks_per_second() as f64 / seconds.max(0.01))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ferrite_serve::counters::snapshot::{Boot, Process, parse};
    use ferrite_serve::counters::{Counters, Counts, stats_file};

    use super::*;

    fn sample(at: Instant, seconds: u64) -> Sample {
        Sample {
            snapshot: Snapshot {
                disk: "vbd-1-51712".into(),
                image: "/a.vhd".into(),
                pid: 7,
                started: 100,
                boot: Boot::default(),
                made_unix_s: 1000,
                counts: Counts::default(),
                full_since_unix_s: None,
                limits: [0; 6],
                reads: KindCounts::default(),
                writes: KindCounts::default(),
                flushes: KindCounts::default(),
                discards: KindCounts::default(),
            },
            process: Some(Process { started: 100, cpu_ticks: 0 }),
            at: at + Duration::from_secs(seconds),
            age_s: 10.0 + seconds as f64,
            process_age_s: 5.0 + seconds as f64,
        }
    }

    fn read(sample: &mut Sample, n: u64, sectors: u64, latency_bucket: usize, sum_ns: u64) {
        let reads = &mut sample.snapshot.reads;
        reads.submitted += n;
        reads.completed += n;
        reads.sectors += sectors;
        reads.sum_ns += sum_ns;
        reads.histogram[latency_bucket] += n;
        sample.snapshot.counts.requests += n;
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let start = Instant::now();
        let mut before = sample(start, 0);
        read(&mut before, 1000, 8000, 40, 1_000_000);
        let mut now = Sample { at: start + Duration::from_secs(2), ..before.clone() };
        read(&mut now, 200, 1600, 60, 4_000_000_000);
        now.snapshot.reads.submitted += 3;
        now.snapshot.counts.metadata_misses = 1;
        now.snapshot.counts.metadata_hits = 3;
        now.snapshot.counts.polls = 10;
        now.snapshot.counts.hits = 9;
        now.snapshot.counts.refused = 2;
        now.snapshot.flushes.errors = 1;
        now.process = Some(Process { started: 100, cpu_ticks: 2 * clock_ticks_per_second() });
        let rates = Rates::between(Some(&before), &now);
        assert_eq!((rates.seconds, rates.read.per_s, rates.write.per_s), (2.0, 100.0, 0.0));
        assert_eq!(rates.read.bytes_per_s, 1600.0 * 256.0);
        assert_eq!((rates.read.in_flight, rates.data.in_flight, rates.errors), (3, 3, 3));
        assert_eq!((rates.read.mean_us, rates.queue_depth), (Some(20_000.0), 2.0));
        assert_eq!((rates.metadata_miss_percent, rates.poll_hit_percent), (Some(25.0), Some(90.0)));
        assert_eq!(rates.cpu_percent, Some(100.0));
        assert!(rates.read.p50_us > Some(1000.0), "of those before there is nothing in it");
        assert_eq!((rates.write.p50_us, rates.data.p50_us), (None, rates.read.p50_us));
    }

    #[test]
    fn the_first_look_and_the_first_after_a_new_start_are_of_all_time() {
        let start = Instant::now();
        let mut now = sample(start, 0);
        read(&mut now, 100, 800, 40, 1_000);
        now.process = Some(Process { started: 100, cpu_ticks: clock_ticks_per_second() });
        let first = Rates::between(None, &now);
        assert_eq!((first.seconds, first.read.per_s, first.cpu_percent), (10.0, 10.0, Some(20.0)));
        let mut larger = now.clone();
        read(&mut larger, 100, 800, 40, 1_000);
        assert_eq!(Rates::between(Some(&larger), &now), first, "counters began again");
        larger = now.clone();
        larger.snapshot.made_unix_s -= 1;
        assert_eq!(Rates::between(Some(&larger), &now), first, "another disk of this name");
        let dead = Sample { process: None, ..now.clone() };
        let rates = Rates::between(Some(&now), &dead);
        assert_eq!((rates.cpu_percent, rates.alive, rates.read.per_s), (None, false, 0.0));
    }

    #[test]
    fn processor_time_of_a_new_process_is_its_own() {
        let start = Instant::now();
        let before = sample(start, 0);
        let mut now = sample(start, 2);
        now.snapshot.started = 900;
        now.process_age_s = 1.0;
        now.process = Some(Process { started: 900, cpu_ticks: clock_ticks_per_second() / 2 });
        assert_eq!(Rates::between(Some(&before), &now).cpu_percent, Some(50.0));
    }

    #[test]
    fn no_numbers_are_too_large() {
        let mut now = sample(Instant::now(), 0);
        let all = KindCounts {
            submitted: u64::MAX,
            completed: u64::MAX,
            errors: u64::MAX,
            sectors: u64::MAX,
            sum_ns: u64::MAX,
            max_ns: u64::MAX,
            histogram: [u64::MAX; BUCKETS],
        };
        let Snapshot { reads, writes, flushes, discards, .. } = &mut now.snapshot;
        [reads, writes, flushes, discards].into_iter().for_each(|kind| *kind = all);
        now.snapshot.counts.hits = u64::MAX;
        now.snapshot.counts.refused = u64::MAX;
        now.age_s = 0.0;
        let rates = Rates::between(None, &now);
        assert!(rates.read.per_s.is_finite() && rates.errors == u64::MAX);
        Rates::between(Some(&now), &sample(now.at, 0));
    }

    #[test]
    fn any_bytes_are_a_disk_or_a_reason_why_not() {
        let base = tempfile::tempdir().unwrap();
        let run_dir = base.path().join("vbd-1-51712");
        Counters::default().keep_in(&run_dir, "/a");
        let mut whole = std::fs::read(stats_file(&run_dir)).unwrap();
        // Three queues, with numbers of any size.
        whole[16] = 3;
        let mut random = 1u64;
        let mut next = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random >> 33
        };
        whole.extend((0..3 * 4096).map(|_| next() as u8));
        let (mut disks, mut reasons) = (0, 0);
        for _ in 0..3000 {
            let mut bytes = whole.clone();
            for _ in 0..next() % 4 {
                // Mostly changes where lengths and numbers are.
                let end = if next().is_multiple_of(2) { 300 } else { bytes.len() as u64 };
                bytes[(next() % end) as usize] = next() as u8;
            }
            if next().is_multiple_of(4) {
                bytes.truncate((next() % (whole.len() as u64 + 1)) as usize);
            }
            match parse(&bytes) {
                Ok(snapshot) => {
                    let now = Sample { snapshot, ..sample(Instant::now(), 0) };
                    let rates = Rates::between(None, &now);
                    assert!(rates.read.per_s >= 0.0 && rates.queue_depth.is_finite());
                    let later = sample(now.at, 1);
                    Rates::between(Some(&now), &later);
                    disks += 1;
                }
                Err(problem) => {
                    assert!(!problem.to_string().is_empty());
                    reasons += 1;
                }
            }
        }
        assert!(disks > 100 && reasons > 100, "{disks} {reasons}");
    }
}
