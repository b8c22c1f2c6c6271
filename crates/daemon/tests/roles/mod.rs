//! This program as keeper, worker and daemon, and those processes as tests see them.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;

use ferrite_daemon::config::DiskOptions;
use ferrite_daemon::control::protocol::PhaseName;
use ferrite_daemon::keeping::Programs;
use ferrite_daemon::orphan;
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Assignment, Failure};
use ferrite_disk::{Disk, OpenOptions};
use ferrite_io::engines::test_engine;
use ferrite_io::process::take_given;
use ferrite_io::sandbox::{Means, user_of};
use ferrite_keeper::{ALIVE_FD, DOOR_FD, LINE_FD, Names, SECOND_FD, become_relay, give_rights_up};
use ferrite_loopback::machine::DiskPaths;
use ferrite_loopback::{CopyWith, GuestHandle, Loopback};
use ferrite_serve::blkif::lifecycle::{Lines, OpenFailure, Opened, work_from};
use ferrite_serve::counters::{remember_process, stats_file};
use ferrite_serve::nbd::relay;
use ferrite_testkit::rig::{mover, moving, work_config};
use ferrite_testkit::{PATIENCE, wait_until};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::Budget;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::host::{GUESTS, Host, STORE, connect};

pub const MIB: u64 = 1 << 20;

/// Of a worker: the pages that it may map with all others of its host, and alone.
pub const MAPS: &str = "FERRITE_TEST_MAPS";

/// Of a worker: the stub domain whose guest's disk it serves.
pub const STUB: &str = "FERRITE_TEST_STUB";

/// Starts this program as keeper and worker.
pub struct Roles;

/// What the first argument is of each.
const KEEPER: &str = "--keeper";
const WORKER: &str = "--worker";
const RELAY: &str = "--relay";

impl Programs for Roles {
    fn keeper(&self, _: DiskId) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(KEEPER);
        // Of the daemon's own, which is a child of the test: what it inherited is handed on.
        command
    }

    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, Failure> {
        let image = disk.image.name().into_string().unwrap();
        let (id, run, first) = (disk.id, disk.run_dir().display(), disk.qemu_first);
        let disk = format!("{id}|{run}|{first}|{}|{image}", disk.options.on_full);
        Ok(vec![WORKER.to_owned(), disk])
    }

    fn options(&self, worker: &[String]) -> Option<DiskOptions> {
        let on_full = worker.last()?.split('|').nth(3)?.parse().ok()?;
        Some(DiskOptions { on_full, ..DiskOptions::default() })
    }

    fn relay(&self) -> Vec<String> {
        vec![RELAY.to_owned()]
    }

    fn names(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<Names>, Failure> {
        let stats = stats_file(run_dir);
        Ok(Some(Names {
            image: disk.image.path.clone(),
            writable,
            read: disk.config().parent_folders.clone(),
            journals: Some(disk.run_dir().join("images")),
            own_files: vec![stats.with_extension("new"), stats],
            root: disk.run_dir().join("empty"),
            user: user_of(disk.id.domid, disk.id.devid),
        }))
    }
}

/// Descriptors of guests that this process was started with.
fn guests() -> Vec<i32> {
    let text = std::env::var(GUESTS).unwrap();
    let text = text.split_once(';').map_or("", |(_, guests)| guests);
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    // A domain's number is none: those of descriptors that were inherited are higher.
    numbers
        .filter(|fd| *fd > SECOND_FD && std::fs::exists(format!("/proc/self/fd/{fd}")).unwrap())
        .collect()
}

// Tests run on a second thread. Only a process with one gives its rights up; and the children of a
// keeper's first thread would end when another one becomes another program.
ferrite_loopback::before_main!(be_what_is_asked_for);

/// See [`Roles`].
fn be_what_is_asked_for() {
    match std::env::args().nth(1).as_deref() {
        Some(KEEPER) => {
            let Err(e) = ferrite_keeper::run(&guests());
            eprintln!("keeper: {e}");
            std::process::exit(1);
        }
        Some(WORKER) => be_a_worker(),
        Some(RELAY) => {
            let keeper = become_relay().unwrap();
            // Its end is its keeper's.
            let _ = relay(&keeper);
            std::process::exit(0);
        }
        _ => {}
    }
}

fn be_a_worker() {
    let line = take_given(LINE_FD).unwrap();
    let [alive, door, second] = [ALIVE_FD, DOOR_FD, SECOND_FD].map(|fd| take_given(fd).unwrap());
    let what = std::env::args().next_back().unwrap();
    let what: Vec<&str> = what.splitn(5, '|').collect();
    let [id, run, first, on_full, image] = what[..] else { panic!("{what:?}") };
    let (domid, devid) = id.split_once('/').unwrap();
    let (domid, run) = (DomId(domid.parse().unwrap()), PathBuf::from(run));
    let run_dir = run.join(format!("vbd-{domid}-{devid}"));
    let loopback = Loopback::new(CopyWith::Memcpy);
    let stub = std::env::var(STUB).ok().map(|stub| DomId(stub.parse().unwrap()));
    // The store's descriptor is the daemon's, and before the guests'.
    for guest in std::env::var(GUESTS).unwrap().split(';').skip(1) {
        let guest = GuestHandle::from_arg(guest).unwrap();
        if guest.domid() == domid || Some(guest.domid()) == stub {
            // Until the memory of a worker that was killed is nobody's any more.
            while loopback.add(&guest).is_err() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
    let mut config = work_config(domid, run_dir);
    config.on_full = on_full.parse().unwrap();
    if let Ok(maps) = std::env::var(MAPS) {
        let (of_host, of_disk) = maps.split_once('/').unwrap();
        let numbers = (of_host.parse().unwrap(), of_disk.parse().unwrap());
        let budget = Budget::of_host(&run.join("map-budget"), numbers.0, numbers.1).unwrap();
        config.moving = moving(mover(), budget);
    }
    let kind = test_engine();
    remember_process();
    let disk = DiskId { domid: domid.0, devid: devid.parse().unwrap() };
    let store = PathBuf::from(std::env::var(STORE).unwrap());
    let start = orphan::start(&run, disk, || connect(&store)());
    assert!(give_rights_up(Means::default()).unwrap().is_some());
    let mut open = |read_only| {
        while flock(&alive, FlockOperation::NonBlockingLockExclusive).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let options = OpenOptions {
            read_only,
            wait_for_lock: Some(PATIENCE),
            state_dir: Some(run.join("images")),
            taken_over: true,
            qemu_first: first == "true",
            ..OpenOptions::default()
        };
        let failed = |e: &dyn std::fmt::Display| OpenFailure {
            what: format!("cannot open {image}"),
            why: e.to_string(),
            help: "-".to_owned(),
        };
        let disk = Disk::open(image, &options).map_err(|e| failed(&e))?;
        if !kind.holds() {
            disk.let_go();
        }
        let engine = Arc::new(move |arena, entries| kind.open(arena, entries));
        Ok(Opened { disk, engine })
    };
    // Its end is that of its keeper, or its own.
    let lines = Lines { first: &line, second: &second };
    let _ = work_from(start, lines, &door, &loopback, &config, &mut open);
    std::process::exit(0);
}

pub fn attach(host: &Host, domid: u16) -> DiskPaths {
    let image = host.make_image(&format!("{domid}.img"), 4 * MIB);
    host.attach(domid, 0, &format!("aio:{}", image.display()))
}

pub fn kill(mut daemon: Child) {
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

/// The keeper of a disk that is served: not one that was killed and is known yet.
pub fn keeper(host: &Host, disk: &DiskPaths) -> i32 {
    let mut keeper = 0;
    wait_until("a keeper with a worker", || {
        let served = host.wait_for_phase(disk, PhaseName::Served);
        keeper = served.pid.unwrap().try_into().unwrap();
        is_alive(keeper) && worker(keeper).is_some_and(is_alive)
    });
    keeper
}

pub fn worker(keeper: i32) -> Option<i32> {
    children(keeper, WORKER).next()
}

/// The relay of its NBD clients, while there are some.
pub fn relay_of(keeper: i32) -> Option<i32> {
    children(keeper, RELAY).next()
}

/// Those of its children that were started as this.
fn children(keeper: i32, role: &str) -> impl Iterator<Item = i32> {
    // A test program has threads besides.
    let threads = std::fs::read_dir(format!("/proc/{keeper}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    let children = children.collect::<String>();
    let pids = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<i32>>();
    // A dead one that nobody has asked for has no arguments.
    let is_so = move |pid: &i32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes())
    };
    let pids: Vec<i32> = pids.into_iter().filter(is_so).collect();
    pids.into_iter()
}

/// It is gone when this returns, and not only about to be.
pub fn kill_pid(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_until("its end", || !is_alive(pid));
}

/// Its worker, which ends a moment later, is gone as well.
pub fn kill_keeper(keeper: i32) {
    let worker = worker(keeper);
    kill_pid(keeper);
    wait_until("its worker's end", || !worker.is_some_and(is_alive));
}

pub fn is_alive(pid: i32) -> bool {
    // Nobody here reaps it, and a zombie is as good as gone.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// All disks are detached, and nothing is left of those who served them.
pub fn end(host: &Host, disks: &[DiskPaths], keepers: &[i32]) {
    for disk in disks {
        host.detach(disk);
    }
    host.wait_for_no_disks();
    let sockets = host.places().run.join("keepers");
    wait_until("no keepers", || {
        std::fs::read_dir(&sockets).unwrap().count() == 0 && !keepers.iter().any(|k| is_alive(*k))
    });
}
