//! Backends as in the daemon: a keeper and its worker for each guest, in processes of their own
//! (docs/internals/processes.md). The worker has dropped all rights, and this process follows it.

use std::os::fd::{AsFd as _, RawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use ferrite::exit::Failure;
use ferrite_disk::CONFIGURED_PARENTS;
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::process::take_given;
use ferrite_host::sandbox::{Means, user_of};
use ferrite_keeper::{
    ALIVE_FD, CLIENT_CHANNEL_FD, DiskSpec, Keeper, LINE_FD, SECOND_FD, WorkerSandbox,
};
use ferrite_loopback::{CopyWith, GuestHandle, Loopback};
use ferrite_serve::blkif::lifecycle::{
    FollowConfig, Lines, OpenFailure, Opened, Outcome, ServeError, follow, work,
};
use ferrite_serve::counters::{Counts, remember_process, snapshot, stats_file};
use ferrite_serve::log_limit::LogLimits;
use ferrite_serve::waker::Waker;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::Store;
use rustix::fs::{FlockOperation, flock};

use super::cli::{BenchArgs, Cli, KeptArgs};
use super::host::{self, DEVID};
use super::measure;

/// The environment variable with the guest's handle, for keeper and worker.
pub(crate) const GUEST: &str = "FERRITE_BENCH_GUEST";
/// Descriptors up to this belong to the keeper and the worker themselves.
const OWN_FDS: RawFd = 7;
/// How often a worker tries to get the lock of a predecessor.
const ASK_AGAIN: Duration = Duration::from_millis(5);

/// One guest's keeper. It ends, and its worker with it, when this is dropped.
pub(crate) struct Kept {
    keeper: Option<Keeper>,
    /// The processes: keeper and worker.
    pids: [u32; 2],
    stats: PathBuf,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.end();
        }
    }
}

impl Kept {
    /// Starts them for this guest, with `run_dir` for all files of the disk. The second result follows it.
    pub(crate) fn start(
        args: &BenchArgs,
        guest: GuestHandle,
        run_dir: &Path,
    ) -> Result<(Kept, Following), Failure> {
        let spec = spec(args, guest.domid(), run_dir)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg("keeper");
        let text = guest.pass_to(&mut command);
        command.env(GUEST, text);
        spec.start(command).map_err(|e| cannot("start a keeper", e))?;
        let keeper = Keeper::connect(&spec.socket).map_err(|e| cannot("reach the keeper", e))?;
        let line = keeper.line(None).map_err(|e| cannot("have a worker", e))?;
        let pid = line.keeper as u32;
        let pids = [pid, child_of(pid).unwrap_or_default()];
        let kept = Kept { keeper: Some(keeper), pids, stats: stats_file(run_dir) };
        Ok((kept, Following(line)))
    }

    /// The counts of the worker.
    pub(crate) fn counts(&self) -> Counts {
        snapshot::read(&self.stats).map_or(Counts::default(), |snapshot| snapshot.counts)
    }

    /// The processor time of both.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        let ticks = |pid: &u32| snapshot::process(*pid).map_or(0, |process| process.cpu_ticks);
        self.pids.iter().map(ticks).sum()
    }

    /// The memory of both in KiB, with shared pages in parts, and without the guests' memory, which is not mapped on
    /// Xen.
    pub(crate) fn pss_kib(&self) -> u64 {
        self.pids.iter().map(|pid| super::idle::pss_kib(*pid)).sum()
    }
}

/// A control connection to be followed.
pub(crate) struct Following(ferrite_keeper::Line);

impl Following {
    /// Follows until the guest is gone or `stop` is woken.
    pub(crate) fn follow(
        &self,
        store: &mut Store,
        config: &FollowConfig,
        stop: &Waker,
    ) -> Result<Outcome, ServeError> {
        follow(store, self.0.fd.as_fd(), config, &LogLimits::default(), stop)
    }
}

fn child_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

fn spec(args: &BenchArgs, domid: DomId, run_dir: &Path) -> Result<DiskSpec, Failure> {
    let run = run_dir.parent().unwrap_or(run_dir);
    let image = std::fs::canonicalize(&args.image).unwrap_or_else(|_| run.join("no image"));
    let stats = stats_file(run_dir);
    if let Some(folder) = stats.parent() {
        std::fs::create_dir_all(folder).map_err(|e| cannot("make a folder of counters", e))?;
    }
    let sandbox = WorkerSandbox {
        image,
        writable: args.mode.writes(),
        read: vec![PathBuf::from(CONFIGURED_PARENTS)],
        journals: Some(run.join(measure::IMAGES)),
        own_files: vec![stats.with_extension("new"), stats],
        root: run.join("empty"),
        user: user_of(domid.0, DEVID),
        servers: Vec::new(),
        mirror: None,
        fence: None,
    };
    let mut worker = vec!["worker".to_owned(), "--run-dir".to_owned(), text(run_dir)?];
    worker.push("--".to_owned());
    // The arguments of the whole measurement, of which the worker uses its part.
    worker.extend(std::env::args().skip(1));
    let socket = run_dir.with_extension("sock");
    let (run_dir, sandbox) = (run_dir.to_owned(), Some(sandbox));
    let (relay, group, preopens) = (None, None, Vec::new());
    Ok(DiskSpec { socket, run_dir, worker, sandbox, relay, public: None, group, preopens })
}

fn text(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| cannot("name the run directory", "no UTF-8"))
}

fn cannot(what: &str, e: impl std::fmt::Display) -> Failure {
    let help = "--kept takes root, as the daemon does; -v shows what the backend has to say";
    Failure::new(format!("cannot {what}"), e, help)
}

/// `ferrite-bench keeper`: a guest's descriptors are passed to each worker.
pub(crate) fn keeper() -> Result<(), Failure> {
    let text = std::env::var(GUEST).map_err(|e| cannot("be a keeper", e))?;
    let numbers = text.split_once('/').map_or("", |(_, fds)| fds);
    let fds = numbers.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    let fds: Vec<RawFd> = fds.collect();
    if fds.iter().any(|fd| *fd <= OWN_FDS) {
        return Err(cannot("be a keeper", format!("{text} names its own descriptors")));
    }
    match ferrite_keeper::run(&fds) {
        Ok(never) => match never {},
        Err(e) => Err(cannot("be a keeper", e)),
    }
}

/// Which workers have the image of a worker open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// All workers of a measurement.
    Shared,
    /// This worker alone, as in the daemon.
    Own,
}

/// `ferrite-bench worker`: as `ferrite worker`, with the loopback instead of Xen.
pub(crate) fn worker(kept: &KeptArgs, sharing: Sharing) -> Result<(), Failure> {
    remember_process();
    let words = std::iter::once(&kept.program).chain(&kept.words);
    let args = Cli::try_parse_from(words).map_err(|e| cannot("be a worker", e))?.bench;
    let given = |number| take_given(number).map_err(|e| cannot("be a worker", e));
    let (line, second, client_channel) =
        (given(LINE_FD)?, given(SECOND_FD)?, given(CLIENT_CHANNEL_FD)?);
    let alive = Arc::new(given(ALIVE_FD)?);
    let text = std::env::var(GUEST).map_err(|e| cannot("be a worker", e))?;
    let guest = GuestHandle::from_arg(&text).map_err(|e| cannot("reach the guest", e))?;
    let loopback = Loopback::new(args.copy_with);
    loopback.add(&guest).map_err(|e| cannot("reach the guest", e))?;
    let mut config = host::work_config(&args, guest.domid(), &kept.run_dir)?;
    config.closes = sharing == Sharing::Own;
    let means = Means { processes: args.copy_with == CopyWith::ProcessVm, ..Means::default() };
    ferrite_keeper::drop_privileges(means).map_err(|e| cannot("give rights up", e))?;
    let run = kept.run_dir.parent().unwrap_or(&kept.run_dir);
    let open = |_| {
        while flock(&alive, FlockOperation::NonBlockingLockExclusive).is_err() {
            SystemClock.sleep(ASK_AGAIN);
        }
        let disk = measure::open(&args, run)?;
        let kind = ferrite::engine::choose(args.engine, args.poll_storage, &disk)?;
        let alive = alive.clone();
        let engine = Arc::new(move |arena, entries| {
            let mut engine = kind.open(arena, entries)?;
            engine.hold(alive.as_fd())?;
            Ok(engine)
        });
        Ok(Opened { disk, engine })
    };
    let mut open = |read_only| {
        open(read_only).map_err(|Failure { what, why, help, .. }| OpenFailure {
            what,
            why,
            help,
            in_use: false,
            errno: None,
        })
    };
    let lines = Lines { first: &line, second: &second };
    work(lines, &client_channel, &loopback, &config, &mut open)
        .map_err(|e| cannot("serve the guest", e))
}
