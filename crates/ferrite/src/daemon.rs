//! `ferrite daemon`: all disks of a host, in the foreground.

use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_daemon::config::{self, CONFIGURED_BY, Config, DiskOptions};
use ferrite_daemon::jobs::{Means, Tools};
use ferrite_daemon::keepers::{Keepers, Programs, StoreWorker};
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Assignment, Daemon, Failure as DiskFailure, Passing, Paths};
use ferrite_keeper::{DiskSpec, WorkerSandbox};
use ferrite_serve::counters::FOLDER;
use ferrite_store::owned::StoreKey;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::real::HostDomains;
use ferrite_xen::store::Store;
use sd_notify::NotifyState;

use crate::cli::{DaemonArgs, ServeArgs};
use crate::controlled::ControlArgs;
use crate::exit::{Code, Failure};
use crate::options::{FencingArgs, MemoryArgs, StoreMemoryArgs, TuningArgs};
use crate::parents::ParentsArgs;
use crate::plain::one_line;
use crate::serve::{stop_on_signals, tell_of_processors};
use crate::vdev::Vbd;
use crate::worker::{arguments, store, told_by, worker_sandbox};
use crate::{EXPORTER, RELAY};

mod metrics;

/// systemd gets an unchanged status at most this often.
const ALIVE: Duration = Duration::from_secs(1);
/// The folder of the volumes of LVM.
const VOLUMES: &str = "/dev/mapper";

pub(crate) fn run(args: &DaemonArgs) -> Result<(), Failure> {
    let path = args.config.as_deref().unwrap_or(Path::new(config::PATH));
    let config = Config::load(path, args.config.is_some()).map_err(|e| {
        let (what, why) = match &e.key {
            Some(key) => (format!("{}: {key}", e.file.display()), e.why),
            None => (e.file.display().to_string(), e.why),
        };
        Failure::new(what, why, e.allowed).with_code(Code::USAGE)
    })?;
    let warnings = config.warnings(path, &args.places.run_dir);
    if args.check_config {
        for doubt in &warnings {
            eprintln!("ferrite: warning: {}", one_line(&doubt.to_string()));
        }
        match warnings.len() {
            _ if args.config.is_none() && !path.exists() => {
                println!("there is no {}: every key has its default", path.display());
            }
            0 => println!("{} is right", path.display()),
            warnings => println!("{} can be used; warnings: {warnings}", path.display()),
        }
        return Ok(());
    }
    warnings.iter().for_each(|doubt| tracing::warn!("{doubt}"));
    let stop = stop_on_signals()?;
    // Workers have another working directory.
    let run = std::path::absolute(&args.places.run_dir);
    let places = Paths { run: run.map_err(|e| cannot(&args.places.run_dir, &e))? };
    let (metrics_socket, stats) = (config.metrics_socket.clone(), places.run.join(FOLDER));
    let config_file = std::path::absolute(path).map_err(|e| cannot(path, &e))?;
    let ours = Ours { config: config_file };
    let keepers = Arc::new(Keepers::new(&places.run, Box::new(ours.clone())));
    let daemon = Daemon::new(config, places, keepers, Box::new(Store::open), stop)
        .map_err(|e| cannot(&args.places.run_dir, &e))?
        .with_jobs(Means::default().with_tools(Arc::new(ours)));
    let daemon = match HostDomains::open() {
        Ok(domains) => daemon.with_domains(Arc::new(domains)),
        Err(e) => {
            tracing::debug!("images of suspended guests stay open: {e}");
            daemon
        }
    };
    tell_of_processors(&args.places.run_dir);
    let _metrics = metrics_socket.and_then(|socket| metrics::serve(&daemon, &socket, &stats));
    let told = std::cell::RefCell::new((String::new(), Instant::now()));
    daemon
        .run(&|status| {
            let mut told = told.borrow_mut();
            if told.0 != status || told.1.elapsed() > ALIVE {
                *told = (status.to_owned(), Instant::now());
                tell_systemd(status);
            }
        })
        .map_err(|e| cannot(&args.places.run_dir, &e))?;
    tracing::info!("stopped; disks stay served, and the next daemon takes them over");
    Ok(())
}

/// Tells systemd, if it has started this process, that the daemon is ready and alive, and its status.
fn tell_systemd(status: &str) {
    let states = [NotifyState::Ready, NotifyState::Watchdog, NotifyState::Status(status)];
    if let Err(e) = sd_notify::notify(false, &states) {
        tracing::debug!("cannot tell systemd: {e}");
    }
}

fn cannot(run: &Path, e: &std::io::Error) -> Failure {
    let what = format!("cannot run the daemon in {}", run.display());
    Failure::new(what, e, "run one daemon a host, as root, with tmpfs mounted on /run")
}

/// This program, which also runs as keeper and worker.
#[derive(Clone)]
pub(crate) struct Ours {
    /// The configuration, for helpers of a pool's disks: keepers and tools start these.
    pub(crate) config: PathBuf,
}

impl Tools for Ours {
    fn image(&self) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ferrite").arg("image").env(CONFIGURED_BY, &self.config);
        command
    }
}

impl Programs for Ours {
    /// The running program's file, also when another program has its name by now.
    fn keeper(&self, disk: DiskId, spec: &DiskSpec) -> Command {
        let mut command = Command::new("/proc/self/exe");
        // This argument only tells people who list processes which store it is.
        let of = spec.group.as_ref().and_then(|group| group.run_dir.file_name());
        let of = of.map_or_else(|| disk.to_string().into(), ToOwned::to_owned);
        command.arg0("ferrite").arg("keeper").arg(of).env(CONFIGURED_BY, &self.config);
        command
    }

    fn exporter(&self, disk: DiskId) -> Option<Command> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ferrite").arg(EXPORTER).arg(disk.to_string());
        Some(command)
    }

    fn passing(&self, passing: Passing) -> Option<Command> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ferrite").arg(ferrite_host::tunnel::COMMAND);
        match passing {
            Passing::Server => command.arg("passed-server"),
            Passing::ServerWithOptions => command.args(["passed-server", "--options"]),
            Passing::Client => command.arg("passed-client"),
        };
        Some(command)
    }

    fn store_worker(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        key: StoreKey,
    ) -> Result<StoreWorker, DiskFailure> {
        let args = serve_args(disk);
        let worker = store::arguments(&args, run_dir).ok_or_else(|| no_text(disk))?;
        let commands = Some(store::commands(run_dir, key));
        Ok(StoreWorker { worker, commands, preopens: store::preopens(&args, run_dir) })
    }

    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, DiskFailure> {
        arguments(&serve_args(disk), disk.run_dir()).ok_or_else(|| no_text(disk))
    }

    fn options(&self, worker: &[String]) -> Option<DiskOptions> {
        told_by(worker).map(|args| options(&args))
    }

    fn relay(&self) -> Vec<String> {
        vec![RELAY.to_owned()]
    }

    fn sandbox(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<WorkerSandbox>, DiskFailure> {
        let found = worker_sandbox(&serve_args(disk), run_dir, writable).map_err(|e| {
            let Failure { what, why, help, .. } = e;
            DiskFailure { why: format!("{what}: {why}"), help }
        })?;
        found.map(Some).ok_or_else(|| no_text(disk))
    }
}

fn no_text(disk: &Assignment<'_>) -> DiskFailure {
    DiskFailure {
        why: format!("the name of {} is not UTF-8", disk.image.path.display()),
        help: "rename the image, and correct the disk's target".to_owned(),
    }
}

/// The options as the configuration would give them.
pub(crate) fn options(args: &ServeArgs) -> DiskOptions {
    DiskOptions {
        queues: args.queues,
        ring_order: args.ring_order,
        indirect: u16::try_from(args.indirect).unwrap_or(u16::MAX),
        engine: args.engine,
        poll_storage: args.poll_storage,
        mover: args.mover,
        own_grants: args.own_grants,
        map_budget: args.map_budget,
        on_full: args.on_full,
        keep_allocated: args.keep_allocated,
        fence: args.fence.fence,
        memory: args.memory.memory,
        metadata_memory_mib: mib(args.store.metadata_memory),
        index_memory_mib: mib(args.store.index_memory),
        poll: args.tuning.poll_us,
        poll_cpu: args.tuning.poll_cpu,
        cpu: args.cpu,
        merge: !args.tuning.no_merge,
        limits: args.limit,
    }
}

pub(crate) fn mib(bytes: usize) -> u32 {
    u32::try_from(bytes >> 20).unwrap_or(u32::MAX)
}

/// The options that `ferrite serve` would get for the disk.
fn serve_args(disk: &Assignment<'_>) -> ServeArgs {
    let options = &disk.options;
    let toolstack_locks = disk.ahead.is_some_and(|ahead| ahead.toolstack_locks);
    let folders =
        parent_folders(disk.config().parent_folders.clone(), toolstack_locks, &disk.image.path);
    ServeArgs {
        image: disk.image.name(),
        xen: Vbd { domain: DomId(disk.id.domid), device: disk.id.devid },
        read_only: false,
        qemu_first: disk.qemu_first,
        mirror: disk.mirror.as_ref().map(|mirror| mirror.target.clone()),
        mirror_map: disk.mirror.as_ref().map(|mirror| mirror.map.clone()),
        changes: disk.changes.clone(),
        toolstack_locks,
        queues: options.queues,
        ring_order: options.ring_order,
        indirect: u32::from(options.indirect),
        engine: options.engine,
        poll_storage: options.poll_storage,
        cpu: options.cpu,
        on_full: options.on_full,
        limit: options.limits,
        keep_allocated: options.keep_allocated,
        fence: FencingArgs { fence: options.fence, fence_records: disk.config().fence_records() },
        mover: options.mover,
        own_grants: options.own_grants,
        map_budget: options.map_budget,
        map_budget_host: disk.config().host.map_budget,
        memory: MemoryArgs {
            memory: options.memory,
            memory_host: disk.config().host.memory_mib.map(|mib| u64::from(mib) << 20),
        },
        store: StoreMemoryArgs {
            metadata_memory: (options.metadata_memory_mib as usize) << 20,
            index_memory: (options.index_memory_mib as usize) << 20,
        },
        parents: ParentsArgs::of(&folders),
        tuning: TuningArgs {
            poll_us: options.poll,
            poll_cpu: options.poll_cpu,
            poll_host: disk.config().host.poll_processors,
            no_merge: !options.merge,
        },
        control: ControlArgs { control: None },
        others: Vec::new(),
    }
}

/// The folders in which a disk's parents may be. Those of a storage manager's volumes are volumes of LVM, too, which it
/// alone makes and names.
fn parent_folders(mut folders: Vec<PathBuf>, toolstack_locks: bool, image: &Path) -> Vec<PathBuf> {
    let is_device = || image.metadata().is_ok_and(|found| found.file_type().is_block_device());
    if toolstack_locks && is_device() {
        folders.push(VOLUMES.into());
    }
    folders
}

#[cfg(test)]
mod tests {
    use ferrite_serve::memory::DataMemory;
    use ferrite_serve::path::full::OnFull;
    use ferrite_serve::polling::PollWindow;
    use ferrite_xen::mover::Mover;

    use super::*;

    #[test]
    fn parents_of_a_storage_managers_volumes_are_volumes_and_those_of_files_are_not() {
        let own = vec![PathBuf::from("/a")];
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(parent_folders(own.clone(), true, file.path()), own);
        let Ok(mut devices) = std::fs::read_dir("/sys/block") else { return };
        let device = devices.find_map(|device| {
            let device = Path::new("/dev").join(device.ok()?.file_name());
            device.exists().then_some(device)
        });
        let Some(device) = device else { return };
        assert_eq!(parent_folders(own.clone(), true, &device), ["/a", VOLUMES].map(PathBuf::from));
        assert_eq!(parent_folders(own.clone(), false, &device), own);
    }

    #[test]
    fn what_a_worker_was_told_is_what_its_settings_are() {
        let told = "worker --xen=3/51712 --queues=2 --ring-order=1 --indirect=32 --engine=aio \
                    --poll-storage --mover=map --own-grants=false --map-budget=7 --on-full=wait --keep-allocated --fence=weak-reservation --memory=3145728 \
                    --metadata-memory=5242880 --index-memory=6291456 \
                    --poll-us=9 --poll-cpu=20 --cpu=150 --limit=iops=500:900,bytes=65536 --no-merge --run-dir=/run/ferrite -- raw:/a";
        let told: Vec<String> = told.split_whitespace().map(str::to_owned).collect();
        let expected = DiskOptions {
            queues: 2,
            ring_order: 1,
            indirect: 32,
            engine: "aio".parse().unwrap(),
            poll_storage: true,
            mover: Mover::Map,
            own_grants: false,
            map_budget: 7,
            on_full: OnFull::Wait,
            keep_allocated: true,
            fence: ferrite_disk::Fencing::WeakReservation,
            memory: DataMemory::Bytes(3 << 20),
            metadata_memory_mib: 5,
            index_memory_mib: 6,
            poll: "9".parse::<PollWindow>().unwrap(),
            poll_cpu: 20,
            cpu: Some(150),
            merge: false,
            limits: "iops=500:900,bytes=65536".parse().unwrap(),
        };
        let ours = Ours { config: PathBuf::new() };
        assert_eq!(ours.options(&told), Some(expected));
        assert_eq!(ours.options(&["worker".to_owned(), "--colour=red".to_owned()]), None);
    }
}
