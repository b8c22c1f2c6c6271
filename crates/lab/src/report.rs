//! The result as text and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ferrite_disk::Disk;
use ferrite_disk::size::Human;
use ferrite_io::engines::EngineKind;
use ferrite_serve::counters::Counts;
use ferrite_serve::polling::wake_up_ns;
use serde::{Deserialize, Serialize};

use crate::run::cli::{BenchArgs, Mode};
use crate::run::idle::Idle;
use crate::run::tally::{Counter, Tally};
use crate::run::task::Task;
use ferrite::exit::Failure;

/// Printed with every figure.
pub(crate) const WHERE: &str = "loopback, not Xen";

/// The medium of a run.
pub(crate) struct Medium {
    /// Its description in one line.
    description: String,
    /// Whether I/O bypasses the page cache.
    direct: bool,
    /// The engine.
    engine: EngineKind,
    /// The time of opening it.
    open_us: f64,
}

impl Medium {
    pub(crate) fn of(disk: &Disk, engine: EngineKind, open_ns: u64) -> Medium {
        Medium {
            description: disk.to_string(),
            direct: disk.direct(),
            engine,
            open_us: us(open_ns),
        }
    }
}

/// The largest delay of the counters, as part of the counted time, that is not reported.
const LATE_PART: f64 = 0.05;

/// Figures of the backend that do not belong to requests.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    pub(crate) counts: Counts,
    /// The delay of the counters relative to the guests' counted time.
    pub(crate) late_ns: u64,
    pub(crate) idle_rss_kib: Option<u64>,
    pub(crate) idle_file_kib: Option<u64>,
    pub(crate) idle: Option<Idle>,
    /// Memory of all backends, connected and at rest after the load.
    pub(crate) rest_pss_kib: Option<u64>,
    pub(crate) segments_per_copy: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

impl Latency {
    pub(crate) fn of(counter: &Counter) -> Latency {
        Latency {
            mean: round(counter.mean_ns() / 1000.0),
            p50: us(counter.quantile_ns(0.50)),
            p99: us(counter.quantile_ns(0.99)),
            p999: us(counter.quantile_ns(0.999)),
            max: us(counter.max_ns()),
        }
    }
}

/// All figures of a run: the fields of the JSON, which scripts and comparisons depend on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    schema: u32,
    #[serde(rename = "where")]
    place: String,
    pub(crate) iops: f64,
    mib_per_s: f64,
    /// Processor time of the whole process, the kernel's workers for its rings included.
    pub(crate) backend_cpu_us_per_io: f64,
    /// Processor time of the guests' queue threads.
    pub(crate) guest_cpu_us_per_io: f64,
    pub(crate) lat_us: Latency,
    /// Memory of the whole process, when all guests were connected and had sent nothing.
    pub(crate) idle_rss_kib: Option<u64>,
    /// The part of it that is file pages: the program.
    idle_file_kib: Option<u64>,
    /// Wake-ups of the backend without requests; only with --idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle: Option<Idle>,
    /// Memory of all backends, connected and at rest after the load; shared pages count in parts.
    #[serde(default)]
    pub(crate) rest_pss_kib: Option<u64>,
    /// Whether disks had keepers and workers.
    #[serde(default)]
    kept: bool,
    /// The cost of waking a thread here, as measured by the backend.
    pub(crate) wake_up_us: f64,
    /// The average, including the ramp.
    pub(crate) segments_per_copy: Option<f64>,
    pub(crate) ios: u64,
    errors: u64,
    mover: String,
    copy_with: String,
    image: String,
    disk: String,
    direct: bool,
    /// The time of opening the image: for a format with metadata, of reading its tables.
    pub(crate) open_us: f64,
    engine: String,
    mode: Mode,
    block_bytes: u32,
    guests: u32,
    queues: u32,
    load_queues: u32,
    depth: u32,
    batch: bool,
    ring_order: u32,
    indirect: u32,
    guest_poll_us: u32,
    poll_us: String,
    /// The queues' counters in the counted time, by name.
    pub(crate) counts: BTreeMap<String, u64>,
    /// The delay of these counters relative to the counted time: the machine was busy.
    late_us: f64,
    memory_bytes: usize,
    seconds: f64,
    version: String,
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn us(ns: u64) -> f64 {
    round(ns as f64 / 1000.0)
}

impl Report {
    /// Combines the figures of a run.
    ///
    /// # Errors
    /// There is nothing to report.
    pub(crate) fn new(
        args: &BenchArgs,
        task: &Task,
        medium: Medium,
        tally: &Tally,
        cpu_ns: f64,
        aside: Aside,
    ) -> Result<Report, Failure> {
        let counter = Counter::of(std::slice::from_ref(tally));
        let ios = counter.ios();
        if ios == 0 {
            let why = match tally.errors {
                0 => format!("no request ended within {} s", args.seconds),
                n => format!("all {n} requests failed"),
            };
            let help = "measure for longer (--seconds); -v shows what the backend has to say";
            return Err(Failure::new("nothing was measured", why, help));
        }
        let iops = ios as f64 / args.seconds;
        Ok(Report {
            schema: 1,
            place: WHERE.into(),
            iops: iops.round(),
            mib_per_s: round(iops * f64::from(args.block) / f64::from(1 << 20)),
            backend_cpu_us_per_io: round(cpu_ns / 1000.0 / ios as f64),
            guest_cpu_us_per_io: round(tally.cpu_ns as f64 / 1000.0 / ios as f64),
            lat_us: Latency::of(&counter),
            idle_rss_kib: aside.idle_rss_kib,
            idle_file_kib: aside.idle_file_kib,
            idle: aside.idle,
            rest_pss_kib: aside.rest_pss_kib,
            kept: args.kept,
            wake_up_us: us(wake_up_ns()),
            segments_per_copy: aside.segments_per_copy.map(round),
            ios,
            errors: tally.errors,
            mover: args.mover.to_string(),
            copy_with: args.copy_with.to_string(),
            image: args.image.clone(),
            disk: medium.description,
            direct: medium.direct,
            open_us: medium.open_us,
            engine: medium.engine.name().into(),
            mode: args.mode,
            block_bytes: args.block,
            guests: args.guests,
            queues: args.queues,
            load_queues: task.parts.len() as u32,
            depth: args.depth,
            batch: args.batch,
            ring_order: task.ring_order,
            indirect: args.indirect,
            guest_poll_us: task.poll_us,
            poll_us: args.tuning.poll_us.to_string(),
            counts: aside.counts.named().map(|(name, count)| (name.to_owned(), count)).collect(),
            late_us: us(aside.late_ns),
            memory_bytes: args.memory.memory.bytes(),
            seconds: args.seconds,
            version: env!("CARGO_PKG_VERSION").into(),
        })
    }

    /// The report as JSON.
    ///
    /// # Errors
    /// A number that JSON cannot express: a bug.
    pub(crate) fn json(&self) -> Result<String, Failure> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(|e| {
            Failure::new("cannot print the result as JSON", e, "run it without --json")
        })
    }

    /// The report in a few lines.
    pub(crate) fn text(&self) -> String {
        let many = |n: u32, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let mut text = format!("{WHERE}\n");
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:<8} {value}");
        };
        line("disk", self.disk.clone());
        line(
            "load",
            format!(
                "{} of {}, {}, {} each, {} {} each, ring order {}, {} s",
                format!("{:?}", self.mode).to_lowercase(),
                Human(self.block_bytes.into()),
                many(self.guests, "guest"),
                many(self.queues, "queue"),
                self.depth,
                if self.batch { "at once" } else { "in flight" },
                self.ring_order,
                self.seconds
            ),
        );
        line("by", format!("{}, mover {}, copies by {}", self.engine, self.mover, self.copy_with));
        line("rate", format!("{:.0} IOPS, {:.0} MiB/s", self.iops, self.mib_per_s));
        let Latency { mean, p50, p99, p999, max } = self.lat_us;
        line(
            "latency",
            format!(
                "mean {mean:.1} us, p50 {p50:.0} us, p99 {p99:.0} us, p99.9 {p999:.0} us, max {max:.0} us"
            ),
        );
        line(
            "CPU",
            format!(
                "{:.2} us a request in the backend, {:.2} us in the guests, which poll for {} us",
                self.backend_cpu_us_per_io, self.guest_cpu_us_per_io, self.guest_poll_us
            ),
        );
        let count = |name| self.counts.get(name).copied().unwrap_or(0);
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        line(
            "waiting",
            format!(
                "polled {} times ({:.0} % found work), {:.0} % of a processor; slept {} times",
                count("polls"),
                100.0 * share(count("hits"), count("polls")),
                count("polled_ns") as f64 / 1e7 / self.seconds,
                count("sleeps"),
            ),
        );
        line(
            "batches",
            format!(
                "{:.1} requests a sweep, {:.1} an operation; {:.2} events sent a request",
                share(count("requests"), count("sweeps")),
                share(count("requests"), count("transfers")),
                share(count("notifications"), count("requests")),
            ),
        );
        if let Some(kib) = self.idle_rss_kib {
            line("memory", format!("{} resident before the first request", Human(kib << 10)));
        }
        if let Some(idle) = &self.idle {
            let (switches, seconds) = (idle.context_switches, idle.seconds);
            line("idle", format!("{switches} context switches in {seconds} s"));
        }
        if self.late_us / 1e6 > self.seconds * LATE_PART {
            let ms = self.late_us / 1e3;
            line(
                "busy",
                format!("counters of the backend were read {ms:.0} ms late: run it again"),
            );
        }
        line("errors", self.errors.to_string());
        text
    }
}
