//! A measurement: the real backend, driven by guests that are processes of this machine.
//!
//! This process is the backend, as `ferrite serve` is: lifecycle, a thread per queue, the engine. Only the hypervisor
//! is the loopback's. Each guest is a child process (`host.rs` starts it, `guest.rs` runs there) that keeps the rings
//! full (`load.rs`) and returns its counts. So the processor time of this process is the backend's alone.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite::exit::{Code, Failure};
use ferrite::{engine, signals};
use ferrite_disk::{Disk, MirrorOptions, OpenOptions, mirror_target};
use ferrite_host::clock::{Clock, SystemClock};
use rustix::time::{ClockId, clock_gettime};
use signal_hook::iterator::Signals;

use super::cli::BenchArgs;
use super::host::{self, Host};
use super::idle;
use super::tally::Tally;
use super::task::{self, Times};
use crate::report::{self, Aside, Report};

/// The time limit for steps that should take no time, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// The time from the start signal to the first request, so that all guests have received it.
pub(super) const LEAD_NS: u64 = 50_000_000;
/// The time from the first request to the first count: pages get touched, caches warm.
pub(super) const RAMP_NS: u64 = 250_000_000;

/// The time limit for reading the memory of all backends.
const MEASURING_NS: u64 = 2_000_000_000;
/// The folder in the run directory for answered changes that are not yet in the image.
pub(super) const IMAGES: &str = "images";

/// Measures, and prints the result.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let signals = signals::listen()?;
    let stopped = signals::flag()?;
    let measured = measure(args, signals);
    // Ctrl-C ends the guests' processes as well: their errors are not the reason.
    if stopped.load(Ordering::Relaxed) {
        return Err(interrupted());
    }
    measured
}

pub(crate) fn interrupted() -> Failure {
    Failure {
        code: Code::INTERRUPTED,
        what: "cannot finish the measurement".into(),
        why: "interrupted".into(),
        help: "run it again".into(),
        errno: None,
    }
}

fn measure(args: &BenchArgs, signals: Signals) -> Result<(), Failure> {
    let run_dir = host::run_dir()?;
    let began_ns = SystemClock.now_ns();
    let disk = open(args, run_dir.path())?;
    let open_ns = SystemClock.now_ns() - began_ns;
    let tasks = task::split(args, &disk)?;
    let kind = engine::choose(args.engine, args.poll_storage, &disk)?;
    let medium = report::Medium::of(&disk, kind, open_ns);
    let mut host = Host::start(args, disk, kind, &tasks, run_dir, signals)?;
    let (idle_rss_kib, idle_file_kib) = (idle::rss_kib(), idle::file_kib());
    let idle = args.idle.map(|seconds| host.leave_idle(seconds)).transpose()?;
    if args.steps.is_some() {
        return count_steps(host);
    }
    let start_ns = SystemClock.now_ns() + LEAD_NS;
    let from_ns = start_ns + RAMP_NS;
    let until_ns = from_ns + Duration::from_secs_f64(args.seconds).as_nanos() as u64;
    let rest_ns = args.rest.map(|seconds| (seconds * 1e9) as u64);
    let leave_ns = until_ns + rest_ns.map_or(0, |rest| rest + MEASURING_NS);
    host.go(Times { start_ns, from_ns, until_ns, leave_ns })?;
    host.watch(from_ns)?;
    let (before, counts) = (host.cpu_time(), host.counts());
    let late_ns = before.at_ns - from_ns;
    host.watch(until_ns)?;
    let late_ns = late_ns.max(SystemClock.now_ns() - until_ns);
    let cpu_ns = before.rate_until(&host.cpu_time()) * (until_ns - from_ns) as f64;
    let counts = host.counts().since(&counts);
    let rest_pss_kib = match rest_ns {
        Some(rest) => {
            host.watch(until_ns + rest)?;
            Some(host.pss_kib())
        }
        None => None,
    };
    let tally = host.finish()?;
    host.close()?;
    let segments_per_copy = host.segments_per_copy();
    let aside = Aside {
        counts,
        late_ns,
        idle_rss_kib,
        idle_file_kib,
        idle,
        rest_pss_kib,
        segments_per_copy,
    };
    let report = Report::new(args, &tasks[0], medium, &tally, cpu_ns, aside)?;
    print(&if args.json { report.json()? } else { report.text() })?;
    judge(&tally)
}

/// Runs guests that send their requests in steps, without times.
fn count_steps(mut host: Host) -> Result<(), Failure> {
    host.go(Times { start_ns: 0, from_ns: 0, until_ns: 0, leave_ns: 0 })?;
    let tally = host.finish()?;
    host.close()?;
    print(&format!("{} requests\n", tally.ios))?;
    judge(&tally)
}

fn judge(tally: &Tally) -> Result<(), Failure> {
    match tally.errors {
        0 => Ok(()),
        errors => Err(Failure::new(
            "the measurement is spoilt",
            format!("{errors} requests failed"),
            "-v shows what the backend made of them",
        )),
    }
}

/// Opens the image, read-only if that is enough, so that measuring loses no data.
pub(super) fn open(args: &BenchArgs, state_dir: &Path) -> Result<Disk, Failure> {
    let usual = OpenOptions::default();
    let options = OpenOptions {
        read_only: !args.mode.writes(),
        state_dir: Some(state_dir.join(IMAGES)),
        parents: args.parents.allowed()?,
        metadata_bytes: args.metadata_cache.unwrap_or(usual.metadata_bytes),
        ..usual
    };
    let disk = Disk::open(&args.image, &options)?;
    if args.mode.writes() && !matches!(disk, Disk::Null(_)) && !args.force_overwrite {
        return Err(Failure {
            code: Code::USAGE,
            what: format!("refused to write to {}", args.image),
            why: "this mode overwrites what the image holds".to_owned(),
            help: "use an image without needed data and say --force-overwrite, or measure null:"
                .to_owned(),
            errno: None,
        });
    }
    let (Some(target), Some(map)) = (&args.mirror, &args.mirror_map) else { return Ok(disk) };
    let mirror = MirrorOptions { target: mirror_target(target)?, map: map.clone() };
    Ok(disk.mirrored(&mirror, &options)?)
}

/// The processor time of a process, and when it was read. All of its threads count, including those that have ended and
/// those that io_uring starts in the kernel.
pub(crate) struct CpuTime {
    pub(super) cpu_ns: u64,
    pub(super) at_ns: u64,
}

impl CpuTime {
    pub(crate) fn now() -> CpuTime {
        let t = clock_gettime(ClockId::ProcessCPUTime);
        let cpu_ns = t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64;
        CpuTime { cpu_ns, at_ns: SystemClock.now_ns() }
    }

    /// Processors in use since then: 1 is one, all the time.
    pub(crate) fn rate_until_now(&self) -> f64 {
        self.rate_until(&CpuTime::now())
    }

    /// Processors in use from then to `now`.
    pub(super) fn rate_until(&self, now: &CpuTime) -> f64 {
        (now.cpu_ns - self.cpu_ns) as f64 / (now.at_ns - self.at_ns).max(1) as f64
    }
}

fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print the result", e, "check where standard output goes"))
        }
        _ => Ok(()),
    }
}
