//! The OpenMetrics of disks, read by parsers that are not ours alone.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use ferrite_seeing::folder::Sample;
use ferrite_seeing::metrics::{Attached, Host, Job, text_of};
use ferrite_serve::counters::Counts;
use ferrite_serve::counters::histogram::BUCKETS;
use ferrite_serve::counters::snapshot::{Boot, KindCounts, Process, Snapshot};
use ferrite_testkit::openmetrics::{Family, parse};
use ferrite_testkit::programs::skipped;

/// Where Debian has the parser of those who made the format.
const PYTHON: &str = "/usr/bin/python3";
const THEIRS: &str = "/usr/lib/python3/dist-packages/prometheus_client/openmetrics/parser.py";
const PARSE: &str = "import sys; from prometheus_client.openmetrics.parser import *; \
    print(sum(len(f.samples) for f in text_string_to_metric_families(sys.stdin.read())))";

fn sample(name: &str, kind: KindCounts) -> Sample {
    let snapshot = Snapshot {
        disk: name.into(),
        image: "/a".into(),
        pid: 1,
        started: 100,
        boot: Boot::default(),
        made_unix_s: 1000,
        counts: Counts { polls: 7, polled_ns: 1_500_000_000, ..Counts::default() },
        full_since_unix_s: None,
        limits: [500, 0, 0, 0, 0, 1 << 20],
        reads: kind,
        writes: KindCounts::default(),
        flushes: kind,
        discards: KindCounts::default(),
    };
    let process = Some(Process { started: 100, cpu_ticks: 250 });
    Sample { snapshot, process, at: Instant::now(), age_s: 1.0, process_age_s: 1.0 }
}

fn host(image: &str) -> Host {
    let disk = Attached {
        domid: 3,
        devid: 51712,
        phase: "failed",
        starts: 4,
        keeper: Some(std::process::id()),
        image: Some(image.to_owned()),
        format: Some("vhd"),
    };
    let phases = &["starting", "served", "failed"];
    let (done_bytes, all_bytes, kind) = (1 << 20, 1 << 22, "coalesce");
    let (paused, troubled) = (true, true);
    let job = Job { domid: 3, devid: 51712, kind, done_bytes, all_bytes, paused, troubled };
    let (version, disks, jobs) = ("1.2.3".into(), vec![disk], vec![job]);
    let ended_jobs = vec![("coalesce", "done", 4), ("coalesce", "failed", 2)];
    Host { version, phases, disks, jobs, ended_jobs, ..Host::default() }
}

/// Both parsers take it, and find as much in it.
fn read(text: &str) -> Vec<Family> {
    let families = parse(text).unwrap();
    if !Path::new(THEIRS).exists() {
        skipped("python3-prometheus-client is not installed");
        return families;
    }
    let mut python = Command::new(PYTHON);
    python.args(["-c", PARSE]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = python.stdout(Stdio::piped()).spawn().unwrap();
    python.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let told = python.wait_with_output().unwrap();
    assert!(told.status.success(), "their parser does not take it: {text:.2000}");
    let theirs: usize = String::from_utf8(told.stdout).unwrap().trim().parse().unwrap();
    assert_eq!(theirs, families.iter().map(|family| family.samples.len()).sum::<usize>());
    families
}

fn value(families: &[Family], name: &str, labels: &[(&str, &str)]) -> f64 {
    let samples = families.iter().flat_map(|family| &family.samples);
    let mut found = samples.filter(|one| {
        let has = |(key, value): &(&str, &str)| one.labels.get(*key).is_some_and(|v| v == value);
        one.name == name && labels.iter().all(has)
    });
    let value = found.next().unwrap_or_else(|| panic!("{name} {labels:?}")).value;
    assert!(found.next().is_none(), "{name} {labels:?}");
    value
}

#[test]
fn all_that_is_counted_is_told_in_units_of_the_format() {
    let mut histogram = [0; BUCKETS];
    (histogram[0], histogram[40], histogram[BUCKETS - 1]) = (5, 3, 2);
    let (submitted, completed, errors) = (14, 10, 1);
    let (sectors, sum_ns, max_ns) = (80, 2_500_000_000, 9);
    let kind = KindCounts { submitted, completed, errors, sectors, sum_ns, max_ns, histogram };
    let families = read(&text_of(host("/srv/a.vhd"), vec![sample("vbd-3-51712", kind)]));
    let of = [("disk", "vbd-3-51712"), ("domid", "3"), ("device", "51712")];
    let read = [of.as_slice(), &[("kind", "read")]].concat();
    let disk = |name: &str| value(&families, name, &of);
    let kind = |name: &str| value(&families, name, &read);
    assert_eq!(kind("ferrite_disk_requests_total"), 10.0);
    assert_eq!(kind("ferrite_disk_request_errors_total"), 1.0);
    assert_eq!(kind("ferrite_disk_data_bytes_total"), 80.0 * 512.0);
    assert_eq!(kind("ferrite_disk_in_flight"), 4.0);
    assert_eq!(kind("ferrite_disk_latency_seconds_sum"), 2.5);
    assert_eq!(kind("ferrite_disk_latency_seconds_count"), 10.0);
    let le = |end: &'static str| [read.as_slice(), &[("le", end)]].concat();
    let bucket = |end| value(&families, "ferrite_disk_latency_seconds_bucket", &le(end));
    assert_eq!((bucket("1.28e-7"), bucket("2.56e-7"), bucket("+Inf")), (5.0, 5.0, 10.0));
    assert_eq!(disk("ferrite_disk_polls_total"), 7.0);
    assert_eq!(disk("ferrite_disk_polling_seconds_total"), 1.5);
    assert_eq!(disk("ferrite_disk_worker_alive"), 1.0);
    assert!(disk("ferrite_disk_worker_cpu_seconds_total") > 0.0);
    assert!(disk("ferrite_disk_keeper_cpu_seconds_total") >= 0.0);
    assert_eq!(disk("ferrite_disk_starts_total"), 4.0);
    for (phase, is) in [("starting", 0.0), ("served", 0.0), ("failed", 1.0)] {
        let labels = [of.as_slice(), &[("phase", phase)]].concat();
        assert_eq!(value(&families, "ferrite_disk_phase", &labels), is, "{phase}");
    }
    let job = [of.as_slice(), &[("kind", "coalesce")]].concat();
    assert_eq!(value(&families, "ferrite_disk_job_done_bytes", &job), f64::from(1 << 20));
    assert_eq!(value(&families, "ferrite_disk_job_all_bytes", &job), f64::from(1 << 22));
    assert_eq!(value(&families, "ferrite_disk_job_paused", &job), 1.0);
    assert_eq!(value(&families, "ferrite_disk_job_troubled", &job), 1.0);
    let failed = [("kind", "coalesce"), ("result", "failed")];
    assert_eq!(value(&families, "ferrite_jobs_total", &failed), 2.0);
    for (limit, is) in [("iops", 500.0), ("bytes_write", 1048576.0)] {
        let labels = [of.as_slice(), &[("limit", limit)]].concat();
        assert_eq!(value(&families, "ferrite_disk_limit", &labels), is, "{limit}");
    }
    let limits = families.iter().find(|family| family.name == "ferrite_disk_limit");
    assert_eq!(limits.map(|family| family.samples.len()), Some(2), "no limit is no sample");
    let info = [("image", "/srv/a.vhd"), ("format", "vhd")];
    assert_eq!(value(&families, "ferrite_disk_info", &info), 1.0);
    assert_eq!(value(&families, "ferrite_build_info", &[("version", "1.2.3")]), 1.0);
    // Each family has its samples, and is explained.
    for family in &families {
        assert!(!family.samples.is_empty() && !family.help.is_empty(), "{}", family.name);
        assert!(family.name.starts_with("ferrite_"), "{}", family.name);
    }
}

#[test]
fn any_numbers_and_names_are_told_so_that_they_can_be_read() {
    let all = KindCounts {
        submitted: 0,
        completed: u64::MAX,
        errors: u64::MAX,
        sectors: u64::MAX,
        sum_ns: u64::MAX,
        max_ns: u64::MAX,
        histogram: [u64::MAX; BUCKETS],
    };
    let mut disk = sample("vbd-3-51712", all);
    disk.process = None;
    disk.snapshot.made_unix_s = u64::MAX;
    let image = "/a\"b\\c\nferrite_disk_requests_total 1\n# EOF\n\u{1b}\u{2028}\u{fffd}{}";
    let families = read(&text_of(host(image), vec![disk]));
    assert_eq!(value(&families, "ferrite_disk_info", &[("image", image)]), 1.0);
    let count = value(
        &families,
        "ferrite_disk_latency_seconds_count",
        &[("disk", "vbd-3-51712"), ("kind", "read")],
    );
    assert_eq!(count, u64::MAX as f64);
}

#[test]
fn without_disks_there_is_the_daemon() {
    let families = read(&text_of(Host::default(), Vec::new()));
    assert_eq!(value(&families, "ferrite_xenstore_connected", &[]), 0.0);
}
