//! The daemon of such a host, and the programs that it starts: this program in other roles.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ferrite::exit::Failure as Refused;
use ferrite_daemon::config::{Config, DiskOptions};
use ferrite_daemon::keepers::{Keepers, Programs, StoreWorker};
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Assignment, Connect, Daemon, Failure, Paths};
use ferrite_disk::{CONFIGURED_PARENTS, StoreKey};
use ferrite_host::sandbox::user_of;
use ferrite_keeper::{DiskSpec, WorkerSandbox};
use ferrite_loopback::GuestHandle;
use ferrite_serve::counters::stats_file;
use ferrite_serve::waker::Waker;
use ferrite_xen::store::{Store, StoreError};

use super::Places;
use crate::run::kept::GUEST;

/// `ferrite-bench host-daemon`: the real daemon, for the guests in this folder.
pub(crate) fn daemon(folder: &Path) -> Result<(), Refused> {
    let cannot = |e: &dyn std::fmt::Display| {
        Refused::new("cannot be a daemon", e, "ferrite-bench host starts it")
    };
    let places = Places(folder.to_owned());
    let text = fs::read_to_string(places.guests()).map_err(|e| cannot(&e))?;
    let guest = |line: &str| {
        let (domid, offer) = line.split_once(' ')?;
        Some((domid.parse().ok()?, offer.to_owned()))
    };
    let guests = text.lines().map(guest).collect::<Option<_>>();
    let guests = guests.ok_or_else(|| cannot(&format!("{text:.80} names no guests")))?;
    let config = Config {
        image_folders: vec![places.images()],
        state_folder: places.state(),
        ..Config::default()
    };
    let run = places.run();
    let serving = Arc::new(Keepers::new(&run, Box::new(Roles { guests })));
    let socket = places.store();
    let connect: Connect = Box::new(move || {
        let unreachable = |e: std::io::Error| StoreError::Unreachable { tried: e.to_string() };
        Store::open_socket(&socket).map_err(unreachable)
    });
    let stop = Arc::new(Waker::new().map_err(|e| cannot(&e))?);
    let daemon = Daemon::new(config, Paths { run }, serving, connect, stop);
    daemon.and_then(|daemon| daemon.run(&|_| ())).map_err(|e| cannot(&e))
}

/// The environment variable by which the keeper takes its guest.
const OFFER: &str = "FERRITE_BENCH_OFFER";

/// `ferrite-bench host-keeper`: takes the guest of the disk, and becomes its keeper. The daemon has no descriptors of
/// guests, as with Xen: it could hand them over by a fork only, which costs the more the more disks it has.
pub(crate) fn keeper() -> Result<(), Refused> {
    let cannot = |e: &dyn std::fmt::Display| {
        Refused::new("cannot be a keeper", e, "the daemon of ferrite-bench host starts it")
    };
    let text = std::env::var(OFFER).map_err(|e| cannot(&e))?;
    let guest = GuestHandle::take_from(&text).map_err(|e| cannot(&e))?;
    let mut command = Command::new("/proc/self/exe");
    command.arg("keeper");
    let text = guest.pass_to(&mut command);
    Err(cannot(&command.env(GUEST, text).exec()))
}

/// Starts this program as keeper and worker.
struct Roles {
    /// How the guest of each domain is taken.
    guests: BTreeMap<u16, String>,
}

impl Programs for Roles {
    fn keeper(&self, disk: DiskId, _: &DiskSpec) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg("host-keeper").envs(self.guests.get(&disk.domid).map(|offer| (OFFER, offer)));
        command
    }

    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, Failure> {
        let run_dir = disk.run_dir().join(disk.id.file_name());
        let mut words = vec!["host-worker".to_owned(), "--run-dir".to_owned(), text(run_dir)?];
        words.extend(["--".to_owned(), text(disk.image.name())?]);
        words.extend(["--mode", "randrw", "--force-overwrite", "--queues", "4"].map(str::to_owned));
        Ok(words)
    }

    fn store_worker(
        &self,
        _: &Assignment<'_>,
        _: &Path,
        _: StoreKey,
    ) -> Result<StoreWorker, Failure> {
        Err(failure("this host has no stores"))
    }

    fn options(&self, _: &[String]) -> Option<DiskOptions> {
        None
    }

    fn relay(&self) -> Vec<String> {
        // No client of NBD comes.
        vec!["relay".to_owned()]
    }

    fn sandbox(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<WorkerSandbox>, Failure> {
        let stats = stats_file(run_dir);
        if let Some(folder) = stats.parent() {
            fs::create_dir_all(folder).map_err(|e| failure(&e.to_string()))?;
        }
        Ok(Some(WorkerSandbox {
            image: disk.image.file().to_owned(),
            writable,
            read: vec![PathBuf::from(CONFIGURED_PARENTS)],
            journals: Some(disk.run_dir().join("images")),
            own_files: vec![stats.with_extension("new"), stats],
            root: disk.run_dir().join("empty"),
            user: user_of(disk.id.domid, disk.id.devid),
            servers: Vec::new(),
            mirror: None,
            fence: None,
        }))
    }
}

fn text(path: impl Into<PathBuf>) -> Result<String, Failure> {
    path.into().into_os_string().into_string().map_err(|_| failure("a path is no UTF-8"))
}

fn failure(why: &str) -> Failure {
    Failure { why: why.to_owned(), help: "-".to_owned() }
}
