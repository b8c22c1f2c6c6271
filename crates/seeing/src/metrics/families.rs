//! The metrics: their names, and the sources of their values.
//!
//! A file of counters may have any content. Counters may go back, which a reader takes for a restart.

use std::fmt;

use ferrite_serve::counters::histogram::{BUCKETS, bucket_start_ns};
use ferrite_serve::counters::snapshot::{KindCounts, process};
use ferrite_serve::path::limit::NAMES;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabel as _, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use rustix::param::clock_ticks_per_second;

use super::{Attached, Everything, Host, Job};
use crate::folder::Sample;

/// Bytes of a sector.
const SECTOR: f64 = 512.0;

/// The public name of a field of `Counts`.
struct Counted {
    field: &'static str,
    name: &'static str,
    help: &'static str,
    /// Nanoseconds in the field, seconds in the metric.
    is_time: bool,
}

const fn number(field: &'static str, name: &'static str, help: &'static str) -> Counted {
    Counted { field, name, help, is_time: false }
}

const fn time(field: &'static str, name: &'static str, help: &'static str) -> Counted {
    Counted { field, name, help, is_time: true }
}

/// All fields but `requests`, which is the sum of the metrics by kind.
const COUNTED: [Counted; 26] = [
    number("sweeps", "sweeps", "Turns that took at least one request off a ring"),
    number("transfers", "transfers", "Operations given to the storage for data"),
    number("merged", "merged_requests", "Requests that shared an operation with another"),
    number("metadata_hits", "metadata_hits", "Requests whose place was known from memory"),
    number("metadata_misses", "metadata_misses", "Requests that waited for an image's metadata"),
    number("v2p_hits", "v2p_hits", "Entries of a store's V2P that were in memory"),
    number("v2p_misses", "v2p_misses", "Leaves of a store's V2P that had to be read"),
    number("p2m_hits", "p2m_hits", "Entries of a store's P2M that were in memory"),
    number("p2m_misses", "p2m_misses", "Leaves of a store's P2M that had to be read"),
    number("discard_parts", "discard_parts", "Parts that discards were done in"),
    number("polls", "polls", "Polls for work before a sleep"),
    number("hits", "poll_hits", "Polls that found work"),
    time("polled_ns", "polling", "Time spent polling"),
    number("sleeps", "sleeps", "Sleeps of queues"),
    number("throttles", "throttles", "Times that the disk had used its processor time"),
    time("throttled_ns", "throttled", "Time that nothing was taken for that reason"),
    number("events", "events", "Events taken from the guest"),
    number("held_events", "held_events", "Times that events were held back"),
    number("notifications", "notifications", "Events sent to the guest"),
    number("releases", "memory_releases", "Times that buffers were given back to the system"),
    number("refused", "refused_requests", "Requests that ask for what the disk does not do"),
    number("shortages", "buffer_shortages", "Times that no buffer was free for a request"),
    number("space_waits", "space_waits", "Requests that had to wait for space on a full storage"),
    number("space_waits_ended", "space_waits_ended", "Those of them that wait no more"),
    number("limit_waits", "limit_waits", "Requests that had to wait for the disk's limit"),
    time("limit_waited_ns", "limit_waited", "Time that queues took nothing for that reason"),
];

/// The labels of a disk, and one more.
struct Labels<'a> {
    name: &'a str,
    domid: u64,
    device: u64,
    more: &'a [(&'static str, &'a str)],
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, to: &mut LabelSetEncoder) -> fmt::Result {
        ("disk", self.name).encode(to.encode_label())?;
        ("domid", self.domid).encode(to.encode_label())?;
        ("device", self.device).encode(to.encode_label())?;
        self.more.iter().try_for_each(|label| label.encode(to.encode_label()))
    }
}

impl<'a> Labels<'a> {
    fn of(disk: &'a Sample, more: &'a [(&'static str, &'a str)]) -> Labels<'a> {
        let (domid, device) = disk.ids();
        Labels { name: &disk.snapshot.disk, domid: domid.into(), device: device.into(), more }
    }
}

/// A family that is being encoded.
pub(super) struct Family<'a>(pub(super) MetricEncoder<'a>);

impl Family<'_> {
    fn counter(&mut self, labels: &Labels<'_>, value: u64) -> fmt::Result {
        self.0.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
    }

    fn counter_f64(&mut self, labels: &Labels<'_>, value: f64) -> fmt::Result {
        self.0.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
    }

    fn gauge(&mut self, labels: &Labels<'_>, value: f64) -> fmt::Result {
        self.0.encode_family(labels)?.encode_gauge(&value)
    }
}

impl Collector for Everything {
    fn encode(&self, mut to: DescriptorEncoder) -> fmt::Result {
        self.daemon(&mut to)?;
        self.attached(&mut to)?;
        self.jobs(&mut to)?;
        self.kinds(&mut to)?;
        self.counts(&mut to)?;
        self.limits(&mut to)?;
        self.processes(&mut to)?;
        self.interfaces(&mut to)
    }
}

/// Begins a metric, with these words before all its samples.
pub(super) fn begin<'a>(
    to: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &str,
    unit: Option<&'a Unit>,
    metric: MetricType,
) -> Result<Family<'a>, fmt::Error> {
    to.encode_descriptor(name, help, unit, metric).map(Family)
}

impl Everything {
    fn daemon(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Host { version, started_unix_s, has_xen, .. } = &self.host;
        begin(to, "ferrite_build", "The daemon's program", None, MetricType::Info)?
            .0
            .encode_info(&[("version", version.as_str())])?;
        let help = "When the daemon was started, since 1970";
        let unit = Some(&Unit::Seconds);
        begin(to, "ferrite_daemon_start_time", help, unit, MetricType::Gauge)?
            .0
            .encode_gauge(&(*started_unix_s as f64))?;
        if let Some(own) = process(std::process::id()) {
            let help = "Processor time of the daemon";
            begin(to, "ferrite_daemon_cpu", help, unit, MetricType::Counter)?
                .0
                .encode_counter::<NoLabelSet, _, f64>(&seconds(own.cpu_ticks), None)?;
        }
        let help = "Whether the daemon follows xenstore";
        begin(to, "ferrite_xenstore_connected", help, None, MetricType::Gauge)?
            .0
            .encode_gauge(&u32::from(*has_xen))?;
        let help = "Files in the folder of counters that cannot be shown";
        begin(to, "ferrite_skipped_files", help, None, MetricType::Gauge)?
            .0
            .encode_gauge(&self.skipped)
    }

    /// Metrics from the daemon.
    fn attached(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let names: Vec<String> = self.host.disks.iter().map(Attached::name).collect();
        let disks = || names.iter().zip(&self.host.disks);
        let help = "The phase of an attached disk is the one that is 1";
        let mut family = begin(to, "ferrite_disk_phase", help, None, MetricType::Gauge)?;
        for (name, disk) in disks() {
            for phase in self.host.phases {
                let value = if *phase == disk.phase { 1.0 } else { 0.0 };
                family.gauge(&disk.labels(name, &[("phase", phase)]), value)?;
            }
        }
        let help = "Starts that an attached disk has taken";
        let mut family = begin(to, "ferrite_disk_starts", help, None, MetricType::Counter)?;
        for (name, disk) in disks() {
            family.counter(&disk.labels(name, &[]), disk.starts)?;
        }
        let help = "Image and format of an attached disk";
        let mut family = begin(to, "ferrite_disk", help, None, MetricType::Info)?;
        for (name, disk) in disks() {
            let image = disk.image.as_deref().unwrap_or_default();
            let more = [("image", image), ("format", disk.format.unwrap_or_default())];
            family.0.encode_info(&disk.labels(name, &more))?;
        }
        let help = "Processor time of the keeper of a disk";
        let unit = Some(&Unit::Seconds);
        let mut family = begin(to, "ferrite_disk_keeper_cpu", help, unit, MetricType::Counter)?;
        for (name, disk) in disks() {
            if let Some(keeper) = disk.keeper.and_then(process) {
                family.counter_f64(&disk.labels(name, &[]), seconds(keeper.cpu_ticks))?;
            }
        }
        Ok(())
    }

    /// Jobs of the daemon. Those that work have no label with their number: there would be new series
    /// without end.
    fn jobs(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Value = fn(&Job) -> f64;
        let gauges: [(&str, &str, Option<&Unit>, Value); 4] = [
            ("ferrite_disk_job_done", "Bytes done by a disk's job", Some(&Unit::Bytes), |job| {
                job.done_bytes as f64
            }),
            ("ferrite_disk_job_all", "All bytes of a disk's job", Some(&Unit::Bytes), |job| {
                job.all_bytes as f64
            }),
            ("ferrite_disk_job_paused", "Whether a disk's job rests", None, |job| {
                f64::from(u8::from(job.paused))
            }),
            (
                "ferrite_disk_job_troubled",
                "Whether something keeps a disk's job from its end",
                None,
                |job| f64::from(u8::from(job.troubled)),
            ),
        ];
        let name = |job: &Job| ferrite_serve::blkif::lifecycle::run_dir_name(job.domid, job.devid);
        let names: Vec<String> = self.host.jobs.iter().map(name).collect();
        for (metric, help, unit, value) in gauges {
            let mut family = begin(to, metric, help, unit, MetricType::Gauge)?;
            for (name, job) in names.iter().zip(&self.host.jobs) {
                let (domid, device) = (job.domid.into(), job.devid.into());
                let more = [("kind", job.kind)];
                family.gauge(&Labels { name, domid, device, more: &more }, value(job))?;
            }
        }
        let help = "Jobs that have ended since the daemon was started";
        let mut family = begin(to, "ferrite_jobs", help, None, MetricType::Counter)?;
        for (kind, result, number) in &self.host.ended_jobs {
            family
                .0
                .encode_family(&[("kind", *kind), ("result", *result)])?
                .encode_counter::<NoLabelSet, _, f64>(number, None)?;
        }
        Ok(())
    }

    /// Counters by kind of request.
    fn kinds(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Requests that were answered, also with an error";
        let mut family = begin(to, "ferrite_disk_requests", help, None, MetricType::Counter)?;
        self.each_kind(|labels, kind| family.counter(labels, kind.completed))?;
        let help = "Requests that were answered with an error";
        let mut family = begin(to, "ferrite_disk_request_errors", help, None, MetricType::Counter)?;
        self.each_kind(|labels, kind| family.counter(labels, kind.errors))?;
        let (help, unit) = ("Data of requests that were done", Some(&Unit::Bytes));
        let mut family = begin(to, "ferrite_disk_data", help, unit, MetricType::Counter)?;
        self.each_kind(|labels, kind| family.counter_f64(labels, kind.sectors as f64 * SECTOR))?;
        let help = "Requests that were begun and are not answered";
        let mut family = begin(to, "ferrite_disk_in_flight", help, None, MetricType::Gauge)?;
        self.each_kind(|labels, kind| family.gauge(labels, kind.in_flight() as f64))?;
        let (help, unit) = ("From the ring to the answer", Some(&Unit::Seconds));
        let mut family = begin(to, "ferrite_disk_latency", help, unit, MetricType::Histogram)?;
        self.each_kind(|labels, kind| {
            let (count, buckets) = histogram(kind);
            let sum = kind.sum_ns as f64 / 1e9;
            family
                .0
                .encode_family(labels)?
                .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }

    fn each_kind(
        &self,
        mut tell: impl FnMut(&Labels<'_>, &KindCounts) -> fmt::Result,
    ) -> fmt::Result {
        for disk in &self.disks {
            for (name, kind) in disk.snapshot.kinds() {
                tell(&Labels::of(disk, &[("kind", name)]), kind)?;
            }
        }
        Ok(())
    }

    /// Counters of all requests together.
    fn counts(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for Counted { field, name, help, is_time } in &COUNTED {
            let name = format!("ferrite_disk_{name}");
            let unit = is_time.then_some(&Unit::Seconds);
            let mut family = begin(to, &name, help, unit, MetricType::Counter)?;
            for disk in &self.disks {
                let mut fields = disk.snapshot.counts.named();
                let value = fields.find(|(name, _)| name == field).map_or(0, |(_, value)| value);
                let labels = Labels::of(disk, &[]);
                match is_time {
                    true => family.counter_f64(&labels, value as f64 / 1e9)?,
                    false => family.counter(&labels, value)?,
                }
            }
        }
        Ok(())
    }

    /// The limits of disks, of those that have some.
    fn limits(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Requests or bytes that a disk may have in a second";
        let mut family = begin(to, "ferrite_disk_limit", help, None, MetricType::Gauge)?;
        for disk in &self.disks {
            for (name, limit) in NAMES.into_iter().zip(disk.snapshot.limits) {
                if limit > 0 {
                    family.gauge(&Labels::of(disk, &[("limit", name)]), limit as f64)?;
                }
            }
        }
        Ok(())
    }

    /// The counting processes, and their start times.
    fn processes(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Whether the process lives that serves the disk, or did last";
        let mut family = begin(to, "ferrite_disk_worker_alive", help, None, MetricType::Gauge)?;
        for disk in &self.disks {
            let alive = if disk.process.is_some() { 1.0 } else { 0.0 };
            family.gauge(&Labels::of(disk, &[]), alive)?;
        }
        let (help, unit) = ("Processor time of that process", Some(&Unit::Seconds));
        let mut family = begin(to, "ferrite_disk_worker_cpu", help, unit, MetricType::Counter)?;
        for disk in &self.disks {
            if let Some(process) = disk.process {
                family.counter_f64(&Labels::of(disk, &[]), seconds(process.cpu_ticks))?;
            }
        }
        let help = "When the disk's counters began, since 1970";
        let mut family = begin(to, "ferrite_disk_start_time", help, unit, MetricType::Gauge)?;
        for disk in &self.disks {
            family.gauge(&Labels::of(disk, &[]), disk.snapshot.made_unix_s as f64)?;
        }
        Ok(())
    }
}

impl Attached {
    fn name(&self) -> String {
        ferrite_serve::blkif::lifecycle::run_dir_name(self.domid, self.devid)
    }

    fn labels<'a>(&self, name: &'a str, more: &'a [(&'static str, &'a str)]) -> Labels<'a> {
        Labels { name, domid: self.domid.into(), device: self.devid.into(), more }
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / clock_ticks_per_second() as f64
}

/// The number of values, and the bound of each bucket. The encoder adds them up with a check for overflow: a hostile
/// file's excess is omitted.
fn histogram(kind: &KindCounts) -> (u64, [(f64, u64); BUCKETS]) {
    let mut all = 0u64;
    let buckets = std::array::from_fn(|i| {
        let n = kind.histogram[i].min(u64::MAX - all);
        all += n;
        let end = match i + 1 {
            BUCKETS => f64::INFINITY,
            next => bucket_start_ns(next) as f64 / 1e9,
        };
        (end, n)
    });
    (all, buckets)
}

#[cfg(test)]
mod tests {
    use ferrite_serve::counters::Counts;

    use super::*;

    #[test]
    fn every_counter_of_a_disk_has_a_metric() {
        for (field, _) in Counts::default().named() {
            let told = COUNTED.iter().filter(|counted| counted.field == field).count();
            assert_eq!(told, usize::from(field != "requests"), "{field}");
            let is_time = COUNTED.iter().any(|counted| counted.field == field && counted.is_time);
            assert_eq!(is_time, field.ends_with("_ns"), "{field}");
        }
    }

    #[test]
    fn a_histogram_of_any_numbers_can_be_added_up() {
        let kind = KindCounts { histogram: [u64::MAX / 3; BUCKETS], ..KindCounts::default() };
        let (count, buckets) = histogram(&kind);
        let sum = buckets.iter().try_fold(0u64, |sum, (_, n)| sum.checked_add(*n));
        assert_eq!((count, sum), (u64::MAX, Some(u64::MAX)));
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(buckets[BUCKETS - 1].0, f64::INFINITY);
    }
}
