//! This program in the roles of keeper, worker and daemon, and helpers for tests of these
//! processes.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferrite_daemon::config::DiskOptions;
use ferrite_daemon::control::protocol::PhaseName;
use ferrite_daemon::keepers::{Programs, StoreWorker};
use ferrite_daemon::orphan;
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Assignment, Failure};
use ferrite_disk::{
    Disk, ErrorKind, ImageName, MirrorOptions, OpenOptions, client_of, mirror_target, server_of,
};
use ferrite_host::names;
use ferrite_host::process::take_given;
use ferrite_host::sandbox::{Means, user_of, user_of_tap};
use ferrite_image_tools::stores::Change;
use ferrite_image_tools::stores::served::ServedStore;
use ferrite_io::engines::test_engine;
use ferrite_keeper::{
    ALIVE_FD, AssignedDisk, CLIENT_CHANNEL_FD, DataServer, DiskSpec, FenceTerms, LINE_FD,
    MirrorFiles, Preopen, SECOND_FD, WorkerChannel, WorkerEvent, WorkerSandbox, become_relay,
    drop_privileges,
};
use ferrite_loopback::machine::DiskPaths;
use ferrite_loopback::{CopyWith, GuestHandle, Loopback};
use ferrite_serve::blkif::lifecycle::{
    EngineFactory, Lines, OpenFailure, Opened, Opening, OpeningKind, Start, TABLE, WorkConfig,
    run_dir_name, work_from,
};
use ferrite_serve::counters::{remember_process, stats_file};
use ferrite_serve::nbd::relay;
use ferrite_store::journal::Name;
use ferrite_store::owned::StoreKey;
use ferrite_testkit::rig::{mover, moving, work_config};
use ferrite_testkit::{PATIENCE, wait_until};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::Budget;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::host::{A_WHILE, GUESTS, Host, STORE, connect};

pub const MIB: u64 = 1 << 20;

/// A worker's variable: the pages that all disks together, and this disk alone, may map.
pub const MAPS: &str = "FERRITE_TEST_MAPS";

/// A worker's variable: the milliseconds that a guest waits for the host that it comes from.
pub const WAIT_FOR_HOST_MS: &str = "FERRITE_TEST_WAIT_FOR_HOST_MS";

/// A worker's variable: the stub domain whose guest's disk it serves.
pub const STUB: &str = "FERRITE_TEST_STUB";

/// A daemon's variable: the path of the program `ferrite`, which exports disks. Without it none is exported.
pub const PROGRAM: &str = "FERRITE_TEST_PROGRAM";

/// Starts this program as keeper and worker.
pub struct Roles;

/// The first argument of a keeper. The other roles have their own.
const KEEPER: &str = "--keeper";
/// `O_RDWR | O_CREAT`.
const CREATE_TO_WRITE: u32 = 0o102;
const WORKER: &str = "--worker";
const STORE_WORKER: &str = "--store-worker";
const RELAY: &str = "--relay";

impl Programs for Roles {
    fn keeper(&self, _: DiskId, _: &DiskSpec) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(KEEPER);
        // The daemon's descriptors are inherited: it is a child of the test.
        command
    }

    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, Failure> {
        let image = disk.image.name().into_string().unwrap();
        let (id, run, first) = (disk.id, disk.run_dir().display(), disk.qemu_first);
        let mirror = disk.mirror.as_ref();
        let mirror = mirror.map(|it| format!("{}>{}", it.map.display(), it.target));
        let (mirror, full) = (mirror.unwrap_or_default(), disk.options.on_full);
        let disk = format!("{id}|{run}|{first}|{full}|{mirror}|{image}");
        Ok(vec![WORKER.to_owned(), disk])
    }

    fn store_worker(
        &self,
        disk: &Assignment<'_>,
        run: &Path,
        StoreKey(device, inode): StoreKey,
    ) -> Result<StoreWorker, Failure> {
        let worker = [STORE_WORKER, run.to_str().unwrap(), disk.image.file().to_str().unwrap()];
        let commands = Some(run.join(format!("stores/{device}-{inode}.")));
        let preopens = vec![Preopen { path: run.join("budget"), flags: CREATE_TO_WRITE, count: 2 }];
        Ok(StoreWorker { worker: worker.map(str::to_owned).to_vec(), commands, preopens })
    }

    fn options(&self, worker: &[String]) -> Option<DiskOptions> {
        let on_full = worker.last()?.split('|').nth(3)?.parse().ok()?;
        Some(DiskOptions { on_full, ..DiskOptions::default() })
    }

    fn relay(&self) -> Vec<String> {
        vec![RELAY.to_owned()]
    }

    fn exporter(&self, disk: DiskId) -> Option<Command> {
        let mut command = Command::new(std::env::var_os(PROGRAM)?);
        command.arg("exporter").arg(disk.to_string());
        Some(command)
    }

    fn sandbox(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<WorkerSandbox>, Failure> {
        let stats = stats_file(run_dir);
        let is_volume = disk.image.volume().is_some();
        Ok(Some(WorkerSandbox {
            image: disk.image.file().to_owned(),
            writable: writable || is_volume,
            read: disk.config().parent_folders.clone(),
            journals: (!is_volume).then(|| disk.run_dir().join("images")),
            own_files: vec![stats.with_extension("new"), stats],
            root: disk.run_dir().join("empty"),
            user: match disk.id.minor_of_tap() {
                Some(minor) => user_of_tap(minor),
                None => user_of(disk.id.domid, disk.id.devid),
            },
            servers: servers(disk, !writable),
            fence: fence_terms(disk),
            mirror: disk.mirror.as_ref().map(|it| {
                let name = ImageName::parse(&it.target).unwrap();
                let server = name.export().and_then(|uri| server_of(uri, false));
                MirrorFiles {
                    map: it.map.clone(),
                    image: server.is_none().then_some(name.path),
                    servers: server.as_ref().and_then(DataServer::of).into_iter().collect(),
                }
            }),
        }))
    }
}

/// How the keeper reserves the image's LUN, as the real program finds it out.
fn fence_terms(disk: &Assignment<'_>) -> Option<FenceTerms> {
    let terms = disk.options.fence.terms(&disk.config().fence_records())?;
    Some(FenceTerms { weak: terms.weak, records: terms.records })
}

/// The server of an export, as the real program finds it out.
fn servers(disk: &Assignment<'_>, read_only: bool) -> Vec<DataServer> {
    let server = disk.image.export().and_then(|_| server_of(disk.image.path.to_str()?, read_only));
    server.as_ref().and_then(DataServer::of).into_iter().collect()
}

/// Descriptors of guests that this process was started with.
fn guests() -> Vec<i32> {
    let text = std::env::var(GUESTS).unwrap();
    let text = text.split_once(';').map_or("", |(_, guests)| guests);
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    // Other numbers in the text are domains'. Inherited descriptors have higher numbers.
    numbers
        .filter(|fd| *fd > SECOND_FD && std::fs::exists(format!("/proc/self/fd/{fd}")).unwrap())
        .collect()
}

// The role is taken before `main`, since tests run on a second thread. Only a process with one
// thread can give up its rights. Besides, children of a keeper's first thread would end with an
// upgrade.
ferrite_loopback::before_main!(be_what_is_asked_for);

/// Takes the role that the first argument names. See [`Roles`].
fn be_what_is_asked_for() {
    match std::env::args().nth(1).as_deref() {
        Some(KEEPER) => {
            let Err(e) = ferrite_keeper::run(&guests());
            eprintln!("keeper: {e}");
            std::process::exit(1);
        }
        Some(WORKER) => be_a_worker(),
        Some(STORE_WORKER) => be_a_store_worker(),
        Some(RELAY) => {
            let keeper = become_relay().unwrap();
            // The relay ends with its keeper.
            let _ = relay(&keeper);
            std::process::exit(0);
        }
        _ => {}
    }
}

/// The arguments of a disk's worker.
struct Told {
    domid: DomId,
    devid: u32,
    run: PathBuf,
    qemu_first: bool,
    on_full: String,
    /// The map and the target.
    mirror: Option<(PathBuf, String)>,
    image: String,
}

impl Told {
    fn by(what: &str) -> Told {
        let what: Vec<&str> = what.splitn(6, '|').collect();
        let [id, run, first, on_full, mirror, image] = what[..] else { panic!("{what:?}") };
        let (domid, devid) = id.split_once('/').unwrap();
        let domid = if domid == "tap" { DomId::NONE } else { DomId(domid.parse().unwrap()) };
        Told {
            domid,
            devid: devid.parse().unwrap(),
            run: run.into(),
            qemu_first: first == "true",
            on_full: on_full.to_owned(),
            mirror: mirror.split_once('>').map(|(map, to)| (map.into(), to.to_owned())),
            image: image.to_owned(),
        }
    }

    fn run_dir(&self) -> PathBuf {
        self.run.join(run_dir_name(self.domid, self.devid))
    }

    fn start(&self) -> Start {
        let disk = DiskId { domid: self.domid.0, devid: self.devid };
        let store = PathBuf::from(std::env::var(STORE).unwrap());
        orphan::start(&self.run, disk, || connect(&store)())
    }

    fn config(&self) -> WorkConfig {
        let mut config = work_config(self.domid, self.run_dir());
        config.on_full = self.on_full.parse().unwrap();
        config.stays = self.domid == DomId::NONE;
        if let Ok(ms) = std::env::var(WAIT_FOR_HOST_MS) {
            config.wait_for_host = Duration::from_millis(ms.parse().unwrap());
        }
        if let Ok(maps) = std::env::var(MAPS) {
            let (of_host, of_disk) = maps.split_once('/').unwrap();
            let numbers = (of_host.parse().unwrap(), of_disk.parse().unwrap());
            let path = self.run.join("map-budget");
            let budget = Budget::of_host(&path, numbers.0, numbers.1).unwrap();
            config.moving = moving(mover(), budget);
        }
        config
    }

    fn open(&self, alive: &Arc<OwnedFd>, how: Opening) -> Result<Opened, OpenFailure> {
        while flock(alive, FlockOperation::NonBlockingLockExclusive).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let options = OpenOptions {
            read_only: how.read_only,
            // Another process may hold a store for long. The short wait lets tests see the message.
            wait_for_lock: match how.kind {
                OpeningKind::AfterLook => None,
                _ if self.image.starts_with("store:") => Some(A_WHILE),
                _ => Some(PATIENCE),
            },
            client: self.image.starts_with("nbd:").then(|| client_of(&self.run_dir())).flatten(),
            state_dir: Some(self.run.join("images")),
            // Of an export the successor of a killed worker waits.
            taken_over: !self.image.starts_with("nbd:")
                || names::exists(self.run_dir().join(TABLE)),
            qemu_first: self.qemu_first,
            index_bytes: 1 << 20,
            unlocked: how.kind == OpeningKind::Look,
            ..OpenOptions::default()
        };
        let disk = Disk::open(&self.image, &options).map_err(|e| OpenFailure {
            what: format!("cannot open {}", self.image),
            why: e.to_string(),
            help: "-".to_owned(),
            in_use: e.kind() == ErrorKind::InUse,
            errno: e.errno().map(Errno::raw_os_error),
        })?;
        let disk = match &self.mirror {
            Some((map, target)) if how.kind != OpeningKind::Look => {
                let options = OpenOptions {
                    wait_for_lock: Some(PATIENCE),
                    taken_over: true,
                    ..OpenOptions::default()
                };
                let target = mirror_target(target).unwrap();
                disk.mirrored(&MirrorOptions { target, map: map.clone() }, &options).unwrap()
            }
            _ => disk,
        };
        let kind = test_engine();
        if !kind.holds() || self.domid == DomId::NONE {
            disk.let_go();
        }
        Ok(Opened { disk, engine: engine(alive) })
    }
}

fn engine(alive: &Arc<OwnedFd>) -> EngineFactory {
    let (kind, alive) = (test_engine(), alive.clone());
    Arc::new(move |arena, entries| {
        let mut engine = kind.open(arena, entries)?;
        engine.hold(alive.as_fd())?;
        Ok(engine)
    })
}

/// Connects to these guests, each once.
fn reach(loopback: &Loopback, domids: &[DomId]) {
    static REACHED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut reached = REACHED.lock().unwrap();
    // The first entry is the store's descriptor, which belongs to the daemon.
    for guest in std::env::var(GUESTS).unwrap().split(';').skip(1) {
        let number = guest.split('/').next().unwrap().parse().unwrap();
        if domids.contains(&DomId(number)) && reached.insert(number) {
            let guest = GuestHandle::from_arg(guest).unwrap();
            // The memory of a killed worker is busy for a moment.
            while loopback.add(&guest).is_err() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

fn be_a_worker() {
    let line = take_given(LINE_FD).unwrap();
    let [alive, client_channel, second] =
        [ALIVE_FD, CLIENT_CHANNEL_FD, SECOND_FD].map(|fd| take_given(fd).unwrap());
    let alive = Arc::new(alive);
    let told = Told::by(&std::env::args().next_back().unwrap());
    let loopback = Loopback::new(CopyWith::Memcpy);
    let stub = std::env::var(STUB).ok().map(|stub| DomId(stub.parse().unwrap()));
    let mut guests: Vec<DomId> = [Some(told.domid), stub].into_iter().flatten().collect();
    if told.domid == DomId::NONE {
        // Any guest may join a tap.
        guests.extend((0..4).map(DomId));
    }
    reach(&loopback, &guests);
    let config = told.config();
    // The kernel's part of this is read before the rights are dropped.
    client_of(&told.run_dir());
    remember_process();
    let start = told.start();
    assert!(drop_privileges(Means::default()).unwrap().is_some());
    // The result does not matter: the worker ends with its keeper or by itself.
    let lines = Lines { first: &line, second: &second };
    let mut open = |how| told.open(&alive, how);
    let _ = work_from(start, lines, &client_channel, &loopback, &config, &mut open);
    std::process::exit(0);
}

/// Runs as `ferrite store-worker`. A command is the name of a snapshot of the first volume.
fn be_a_store_worker() -> ! {
    let channel = WorkerChannel::take().unwrap();
    let alive = Arc::new(take_given(ALIVE_FD).unwrap());
    let store = PathBuf::from(std::env::args().next_back().unwrap());
    let loopback = Arc::new(Loopback::new(CopyWith::Memcpy));
    remember_process();
    let mut disks = Vec::new();
    while let WorkerEvent::Disk(disk) = channel.next().unwrap() {
        let told = Told::by(disk.arguments.last().unwrap());
        let start = told.start();
        disks.push((disk, told, start));
    }
    let key = StoreKey::at(&store).unwrap();
    // Guests have to be connected before the rights are dropped. A real worker gets devices
    // instead.
    let file = store.canonicalize().unwrap().with_extension("guests");
    let guests = std::fs::read_to_string(file).unwrap();
    let guests = guests.split(' ').map(|domid| DomId(domid.parse().unwrap()));
    reach(&loopback, &guests.collect::<Vec<_>>());
    assert!(drop_privileges(Means::default()).unwrap().is_some());
    for (disk, told, start) in disks {
        serve_disk(*disk, told, start, &loopback, &alive);
    }
    loop {
        match channel.next() {
            Ok(WorkerEvent::Disk(disk)) => {
                let told = Told::by(disk.arguments.last().unwrap());
                serve_disk(*disk, told, Start::WaitForFollower, &loopback, &alive);
            }
            Ok(WorkerEvent::Command(stream)) => snapshot(key, &store, stream, &alive),
            Ok(WorkerEvent::All) => {}
            Err(_) => std::process::exit(0),
        }
    }
}

fn serve_disk(
    disk: AssignedDisk,
    told: Told,
    start: Start,
    loopback: &Arc<Loopback>,
    alive: &Arc<OwnedFd>,
) {
    let (loopback, alive) = (loopback.clone(), alive.clone());
    std::thread::spawn(move || {
        let AssignedDisk { line, second, client_channel, handed, .. } = disk;
        // The sandbox allows none of these files.
        let budget = told.run.join("budget");
        let open = || names::open(&budget, OFlags::RDWR, Mode::empty());
        let opened =
            names::with_handed(handed, || [open().is_ok(), open().is_ok(), open().is_ok()]);
        assert_eq!(opened, [true, true, false]);
        let config = told.config();
        let lines = Lines { first: &line, second: &second };
        let mut open = |how| told.open(&alive, how);
        let worked = work_from(start, lines, &client_channel, &*loopback, &config, &mut open);
        if let Err(e) = worked {
            eprintln!("worker of {}/{}: {e}", told.domid, told.devid);
            std::process::exit(1);
        }
    });
}

fn snapshot(key: StoreKey, store: &Path, mut stream: UnixStream, alive: &Arc<OwnedFd>) {
    let mut name = String::new();
    stream.set_nonblocking(false).unwrap();
    stream.read_to_string(&mut name).unwrap();
    let engine = engine(alive);
    let engine = |arena| engine(arena, 32);
    let joined = ServedStore::join(key, store, &engine);
    let said = joined.map(|served| {
        let change = Change::Snapshot(Name::new(&name).unwrap());
        served.and_then(|mut served| served.change(&Name::new("a").unwrap(), &change))
    });
    let said = match said {
        None => "not open".to_owned(),
        Some(said) => said.map_or_else(|e| e.to_string(), |_| "done".to_owned()),
    };
    stream.write_all(said.as_bytes()).unwrap();
}

pub fn attach(host: &Host, domid: u16) -> DiskPaths {
    let image = host.make_image(&format!("{domid}.img"), 4 * MIB);
    host.attach(domid, 0, &format!("aio:{}", image.display()))
}

pub fn kill(mut daemon: Child) {
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

/// The running keeper of a served disk, not one that was killed just now.
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
    children(keeper, WORKER).next().or_else(|| children(keeper, STORE_WORKER).next())
}

/// The relay of a keeper's NBD clients, if there are any.
pub fn relay_of(keeper: i32) -> Option<i32> {
    children(keeper, RELAY).next()
}

/// The children of a keeper, or of an exporter, in this role.
pub fn children(keeper: i32, role: &str) -> impl Iterator<Item = i32> {
    // A test program has several threads, each with children of its own.
    let threads = std::fs::read_dir(format!("/proc/{keeper}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    let children = children.collect::<String>();
    let pids = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<i32>>();
    // A zombie has no arguments.
    let is_so = move |pid: &i32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes())
    };
    let pids: Vec<i32> = pids.into_iter().filter(is_so).collect();
    pids.into_iter()
}

/// Kills a process, and waits until it is gone.
pub fn kill_pid(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_until("its end", || !is_alive(pid));
}

/// Kills a keeper, and waits until it and its worker are gone.
pub fn kill_keeper(keeper: i32) {
    let worker = worker(keeper);
    kill_pid(keeper);
    wait_until("its worker's end", || !worker.is_some_and(is_alive));
}

pub fn is_alive(pid: i32) -> bool {
    // This process does not reap it, so a zombie counts as gone.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// Detaches all disks, and checks that their keepers and files are gone.
pub fn end(host: &Host, disks: &[DiskPaths], keepers: &[i32]) {
    for disk in disks {
        host.detach(disk);
    }
    host.wait_for_no_disks();
    let sockets = host.paths().run.join("keepers");
    wait_until("no keepers", || {
        std::fs::read_dir(&sockets).unwrap().count() == 0 && !keepers.iter().any(|k| is_alive(*k))
    });
}
