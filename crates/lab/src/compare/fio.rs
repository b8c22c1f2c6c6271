//! Runs of fio with io_uring: the peer of all disks with a file.

use super::rounds::Sample;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The time from fio's start to its counting, about: its own start, and the ramp.
const START: Duration = Duration::from_millis(450);
/// fio's option for the ramp.
const RAMP: &str = "--ramp_time=0.3";

/// A job of fio.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job<'a> {
    pub(crate) image: &'a str,
    /// The value of `--rw`.
    pub(crate) mode: &'static str,
    /// The value of `--bs`.
    pub(crate) block: &'static str,
    pub(crate) depth: u32,
    /// Past the page cache.
    pub(crate) direct: bool,
    /// Whether each request is timed. Where it is not, fio is faster.
    pub(crate) timed: bool,
}

/// One run of so many seconds, in a thread of fio's own process: a job in a session of its own would get another share
/// of a busy machine than ferrite does.
///
/// # Errors
/// It failed, or its result is invalid.
pub(crate) fn run(job: &Job<'_>, seconds: f64) -> Result<Sample> {
    let mut command = Command::new("fio");
    watched(command.args(arguments(job, seconds)), None, job.mode, seconds)
}

/// One run of fio with the processor time per request of that process, or of fio itself.
///
/// # Errors
/// It failed, or its result is invalid.
pub(super) fn watched(
    fio: &mut Command,
    server: Option<u32>,
    mode: &str,
    seconds: f64,
) -> Result<Sample> {
    let fio = fio.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = fio.spawn().context("cannot start fio")?;
    let pid = server.unwrap_or(child.id());
    let part = |of: f64| Duration::from_secs_f64(seconds * of);
    std::thread::sleep(START + part(0.1));
    let (began, cpu) = (Instant::now(), cpu_s(pid));
    std::thread::sleep(part(0.7));
    let (took, cpu_after) = (began.elapsed().as_secs_f64(), cpu_s(pid));
    let output = child.wait_with_output().context("fio is lost")?;
    if !output.status.success() {
        bail!("fio ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let sample = parse(&String::from_utf8_lossy(&output.stdout), mode)?;
    let processors = (cpu_after? - cpu?) / took;
    Ok(Sample { cpu_us: processors * 1e6 / sample.iops, ..sample })
}

fn arguments(job: &Job<'_>, seconds: f64) -> Vec<String> {
    let mut all = vec![
        "--name=peer".to_owned(),
        format!("--filename={}", job.image),
        format!("--rw={}", job.mode),
        format!("--bs={}", job.block),
        format!("--iodepth={}", job.depth),
        format!("--direct={}", u32::from(job.direct)),
        format!("--runtime={}ms", (seconds * 1000.0).round()),
    ];
    let fixed = "--thread --ioengine=io_uring --fixedbufs --registerfiles --nonvectored=1 \
                 --norandommap --time_based --allow_file_create=0 --output-format=json";
    all.extend(fixed.split_whitespace().map(str::to_owned));
    all.push(RAMP.to_owned());
    let times = match job.timed {
        true => "--disable_slat=1 --lat_percentiles=1 --clat_percentiles=0 --percentile_list=50",
        false => "--gtod_reduce=1",
    };
    all.extend(times.split_whitespace().map(str::to_owned));
    all
}

/// IOPS, and the latencies if there are any. fio may print warnings before the JSON.
fn parse(text: &str, mode: &str) -> Result<Sample> {
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json)
        .with_context(|| format!("fio printed no JSON but {text:.300}"))?;
    let job = &report["jobs"][0];
    if job["error"].as_i64() != Some(0) {
        bail!("fio's job failed with error {}", job["error"]);
    }
    let way = &job[if mode.contains("write") { "write" } else { "read" }];
    let iops = way["iops"].as_f64().filter(|iops| *iops > 0.0);
    let iops = iops.with_context(|| format!("fio did nothing: {way}"))?;
    let us = |path: &str| {
        let ns = way["lat_ns"].pointer(path).and_then(Value::as_f64).filter(|ns| *ns > 0.0);
        ns.map_or(f64::NAN, |ns| ns / 1000.0)
    };
    let (lat_us, p50_us) = (us("/mean"), us("/percentile/50.000000"));
    Ok(Sample { iops, lat_us, p50_us, ..Sample::UNKNOWN })
}

/// The processor time of a process so far: of all its threads, including those that have ended. The kernel's workers
/// for its rings (iou-wrk) are threads of it, too. fio's own figures are those of the job's thread alone, and omit most
/// of io_uring's work on tmpfs.
fn cpu_s(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("it has ended")?;
    let ticks = cpu_ticks(&stat).with_context(|| format!("/proc/{pid}/stat holds {stat:?}"))?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// utime and stime: fields 14 and 15. The second field, the name, may have any characters; the last parenthesis ends
/// it.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::image::Image;

    const FAST: Job<'_> =
        Job { image: "", mode: "", block: "", depth: 1, direct: false, timed: false };

    const REPORT: &str = r#"fio: this is a note
        {"fio version": "fio-3.33", "jobs": [{"jobname": "peer", "error": 0,
         "read": {"iops": 510527.5, "lat_ns": {"min": 1, "mean": 61250.5, "N": 9,
          "percentile": {"50.000000": 60500}}},
         "write": {"iops": 0.0, "lat_ns": {"mean": 0.0}}}]}"#;

    #[test]
    fn figures_are_those_of_the_direction() {
        let read = parse(REPORT, "randread").unwrap();
        assert_eq!((read.iops, read.lat_us, read.p50_us), (510527.5, 61.2505, 60.5));
        assert!(parse(REPORT, "randwrite").is_err(), "nothing was written");
    }

    #[test]
    fn without_times_there_is_no_latency() {
        let report = REPORT.replace("61250.5", "0.0");
        assert!(parse(&report, "read").unwrap().lat_us.is_nan());
    }

    #[test]
    fn a_failed_job_is_no_result() {
        assert!(parse(&REPORT.replace("\"error\": 0", "\"error\": 5"), "read").is_err());
        assert!(parse("fio: pid 7 ended", "read").is_err());
        assert!(parse("{}", "read").is_err());
    }

    #[test]
    fn fio_understands_what_it_is_told() {
        if ferrite_xenhost::packages::find("fio").is_none() {
            return; // `cargo xtask test` and `cargo xtask bench` install it first.
        }
        let image = Image::make(&std::env::temp_dir(), 4).unwrap();
        let image = image.path();
        let job = Job { image: &image, mode: "randread", block: "4k", depth: 2, ..FAST };
        // The resolution of processor time is a hundredth of a second, and the machine may be busy.
        let fast = run(&job, 2.0).unwrap();
        assert!(fast.iops > 0.0 && fast.cpu_us > 0.0 && fast.lat_us.is_nan(), "{fast:?}");
        let timed = run(&Job { timed: true, mode: "randwrite", ..job }, 0.2).unwrap();
        assert!(timed.iops > 0.0 && timed.lat_us > 0.0 && timed.p50_us > 0.0, "{timed:?}");
    }

    #[test]
    fn a_process_may_have_any_name() {
        let stat = "71 (fio) R 1) S 1 71 71 0 -1 4194560 99 0 0 0 250 317 5 6 20 0 3 0 99";
        assert_eq!(cpu_ticks(stat), Some(567));
        assert_eq!(cpu_ticks("71 (fio"), None);
        assert!(cpu_s(std::process::id()).is_ok());
    }
}
