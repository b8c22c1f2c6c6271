//! A loopback machine with a daemon, which serves the disks in its own process.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

mod in_process;

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::slice::SliceIndex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_daemon::config::{Config, NbdOptions, NbdServer, RbdOptions, RbdPool};
use ferrite_daemon::control::client::{self, ClientError};
use ferrite_daemon::control::protocol::{Details, Disk as Listed, Disks, PhaseName, Status};
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Connect, Daemon, Paths, Serving, Step};
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths, LoopbackDomains};
use ferrite_loopback::{BackendHandle, CopyWith, GuestOptions, Loopback, Machine};
use ferrite_serve::waker::Waker;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::{PATIENCE, wait_until};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};
pub use in_process::InProcess;
use rustix::process::{Pid, Signal, getpid, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tempfile::TempDir;

/// The machine and its toolstack.
pub struct Host {
    machine: Arc<Mutex<Machine>>,
    pub dir: TempDir,
    /// The folder of its images.
    images: PathBuf,
    daemon: Option<Running>,
    serving: Option<Arc<InProcess>>,
    /// The connections to the store, in the order of their start.
    connections: Arc<Mutex<Vec<UnixStream>>>,
    /// The counters of their requests.
    requests: Arc<Mutex<Vec<Arc<AtomicU64>>>>,
    /// Whether the store's replies are withheld.
    silent: Arc<(Mutex<bool>, Condvar)>,
}

struct Running {
    stop: Arc<Waker>,
    thread: JoinHandle<io::Result<()>>,
}

impl Host {
    /// A machine with `guests` guests, numbered from 1, and without a daemon.
    pub fn new(guests: u32) -> Host {
        Host::with_guests(guests, GuestOptions::default())
    }

    /// A machine with guests of this kind, and without a daemon.
    pub fn with_guests(guests: u32, options: GuestOptions) -> Host {
        let mut machine = Machine::new().unwrap();
        for _ in 0..guests {
            machine.add_guest(options).unwrap();
        }
        let dir = dir_in_memory();
        let images = dir.path().join("images");
        std::fs::create_dir(&images).unwrap();
        let machine = Arc::new(Mutex::new(machine));
        let (connections, requests, silent) = Default::default();
        let (daemon, serving) = (None, None);
        let host = Host { machine, dir, images, daemon, serving, connections, requests, silent };
        host.listen();
        host
    }

    /// Another machine, with the images of this one on shared storage.
    pub fn another(&self, guests: u32) -> Host {
        let mut other = Host::new(guests);
        other.images.clone_from(&self.images);
        other
    }

    /// Listens at a socket to the store for other processes, as xenstored does.
    fn listen(&self) {
        let listener = UnixListener::bind(self.store_socket()).unwrap();
        // The thread ends with the machine, which it must not keep alive.
        let machine = Arc::downgrade(&self.machine);
        let (connections, silent) = (self.connections.clone(), self.silent.clone());
        let requests = self.requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                connections.lock().unwrap().push(stream.try_clone().unwrap());
                let Some(machine) = machine.upgrade() else { return };
                let (server, theirs) = UnixStream::pair().unwrap();
                theirs.set_nonblocking(true).unwrap();
                let counter = machine.lock().unwrap().serve_connection(theirs.into());
                requests.lock().unwrap().push(counter);
                let ways =
                    [(stream.try_clone().unwrap(), server.try_clone().unwrap()), (server, stream)];
                for (from, to) in ways {
                    let silent = silent.clone();
                    std::thread::spawn(move || forward(from, to, &silent));
                }
            }
        });
    }

    pub fn store_socket(&self) -> PathBuf {
        self.dir.path().join("xenstored")
    }

    /// Number of connections to the store so far.
    pub fn store_connections(&self) -> usize {
        self.connections.lock().unwrap().len()
    }

    /// Number of requests by these connections so far.
    pub fn store_requests(&self) -> u64 {
        self.requests.lock().unwrap().iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Ends these connections, in the order of their start.
    pub fn cut_store_connections(
        &self,
        which: impl SliceIndex<[UnixStream], Output = [UnixStream]>,
    ) {
        for connection in &self.connections.lock().unwrap()[which] {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Withholds or passes on the replies to the daemon's connections.
    pub fn silence_store(&self, silent: bool) {
        *self.silent.0.lock().unwrap() = silent;
        self.silent.1.notify_all();
    }

    pub fn paths(&self) -> Paths {
        Paths { run: self.dir.path().join("run") }
    }

    /// The machine. Do not hold the lock while waiting.
    pub fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap()
    }

    pub fn store(&self) -> Store {
        self.machine().store().unwrap()
    }

    pub fn config(&self) -> Config {
        let state_folder = self.dir.path().join("state");
        Config { image_folders: vec![self.images.clone()], state_folder, ..Config::default() }
    }

    pub fn image(&self, name: &str) -> PathBuf {
        self.images.join(name)
    }

    /// Creates a raw image.
    pub fn make_image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.image(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// Starts a daemon in a thread.
    pub fn start(&mut self) {
        let socket = self.store_socket();
        self.start_with(self.config(), connect(&socket));
        wait_until("xenstore", || self.status().is_ok_and(|status| status.xen));
    }

    pub fn start_with(&mut self, config: Config, connect: Connect) {
        self.start_as(config, connect, |daemon| daemon);
    }

    /// Starts a daemon that `adapt` has changed.
    pub fn start_as(
        &mut self,
        config: Config,
        connect: Connect,
        adapt: impl FnOnce(Daemon) -> Daemon,
    ) {
        let loopback = Arc::new(self.machine().loopback(CopyWith::Memcpy).unwrap());
        let serving = Arc::new(InProcess { loopback, removed: Mutex::default() });
        let stop = Arc::new(Waker::new().unwrap());
        let served: Arc<dyn Serving> = serving.clone();
        let daemon = Daemon::new(config, self.paths(), served, connect, stop.clone()).unwrap();
        let daemon = adapt(daemon);
        let thread = std::thread::spawn(move || daemon.run(&|_| ()));
        self.serving = Some(serving);
        self.daemon = Some(Running { stop, thread });
        wait_until("a control socket", || self.status().is_ok());
    }

    /// Stops the daemon. Guests keep their disks.
    pub fn stop(&mut self) {
        let Running { stop, thread } = self.daemon.take().unwrap();
        stop.wake();
        thread.join().unwrap().unwrap();
        self.serving = None;
    }

    /// Starts a daemon as a process: this program with the test `process_daemon`.
    pub fn spawn(&self, die_at: Option<Step>) -> Child {
        self.spawn_with(die_at, &[])
    }

    /// Starts a daemon as a process, with these variables in the environment of it and its
    /// children.
    pub fn spawn_with(&self, die_at: Option<Step>, more: &[(&str, &str)]) -> Child {
        let mut command = self.daemon_of(&std::env::current_exe().unwrap());
        command.envs(more.iter().copied());
        if let Some(step) = die_at {
            command.env(DIE_AT, format!("{step:?}"));
        }
        command.spawn().unwrap()
    }

    /// The daemon of a test program with the test `process_daemon`, as a process.
    pub fn daemon_of(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.args(["--exact", "process_daemon", "--nocapture", "--test-threads=1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let guests = self.machine().backend().unwrap().pass_to(&mut command);
        command.env(GUESTS, guests).env(STORE, self.store_socket());
        command.env(RUN, self.paths().run).env(IMAGES, &self.images);
        command
    }

    pub fn removed(&self) -> Vec<DiskId> {
        self.serving.as_ref().unwrap().removed.lock().unwrap().clone()
    }

    /// Attaches a disk as the toolstack does.
    pub fn attach(&self, domid: u16, index: u32, params: &str) -> DiskPaths {
        self.attach_with(domid, index, params, &[])
    }

    pub fn attach_with(
        &self,
        domid: u16,
        index: u32,
        params: &str,
        keys: &[(&'static str, &str)],
    ) -> DiskPaths {
        let backend_keys = keys.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        let disk =
            VirtualDisk { params: params.to_owned(), backend_keys, ..VirtualDisk::xvd(index) };
        self.machine().attach_disk(DomId(domid), disk).unwrap()
    }

    /// A frontend that has not connected yet.
    pub fn frontend(&self, disk: &DiskPaths) -> Frontend {
        let guest = self.machine().guest(disk.domid).unwrap();
        Frontend::new(guest, disk.devid).unwrap()
    }

    /// A connected frontend.
    pub fn connect(&self, disk: &DiskPaths) -> Frontend {
        let mut front = self.frontend(disk);
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        front
    }

    pub fn backend_state(&self, disk: &DiskPaths) -> u32 {
        self.machine().backend_state(disk).unwrap()
    }

    pub fn wait_for_state(&self, disk: &DiskPaths, state: u32) {
        wait_until(&format!("state {state} of {}", disk.backend), || {
            self.backend_state(disk) == state
        });
    }

    /// Detaches a disk as xl does: asks the guest, waits for 6, and removes the directories.
    pub fn detach(&self, disk: &DiskPaths) {
        self.machine().unplug(disk).unwrap();
        self.wait_for_state(disk, 6);
        self.machine().remove_disk(disk).unwrap();
    }

    pub fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        params: &impl Serialize,
    ) -> Result<T, ClientError> {
        client::call(&self.paths().control(), method, params, 2 * PATIENCE)
    }

    pub fn status(&self) -> Result<Status, ClientError> {
        self.call("daemon.status", &json!({}))
    }

    pub fn disks(&self) -> Vec<Listed> {
        self.call::<Disks>("disk.list", &json!({})).unwrap().disks
    }

    pub fn show(&self, disk: &DiskPaths) -> Result<Details, ClientError> {
        self.call("disk.show", &json!({ "disk": id(disk) }))
    }

    /// Waits until a disk is in this phase.
    pub fn wait_for_phase(&self, disk: &DiskPaths, phase: PhaseName) -> Listed {
        let mut found = None;
        wait_until(&format!("{phase:?} of {}", disk.backend), || {
            // A daemon that has just been started does not answer yet.
            let Ok(Disks { disks, .. }) = self.call("disk.list", &json!({})) else { return false };
            let listed = disks.into_iter();
            found = listed.clone().find(|l| l.disk == id(disk) && l.phase == phase);
            found.is_some()
        });
        found.unwrap()
    }

    pub fn wait_for_no_disks(&self) {
        wait_until("no disks", || self.disks().is_empty());
        wait_until("no leftovers", || self.leftovers().is_empty());
    }

    /// Kills all processes of a failed test, or of one that ends with its disks attached. They
    /// would live on, and a reader of this program's output would wait for them.
    pub fn end_processes(&self) {
        for pid in self.processes() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// The processes of this machine's daemons, and their children.
    pub fn processes(&self) -> Vec<Pid> {
        let ours = format!("{RUN}={}", self.paths().run.display());
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let of_entry = |process: std::fs::DirEntry| {
            let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
            let is_ours =
                environment.split(|byte| *byte == 0).any(|variable| variable == ours.as_bytes());
            let number = process.file_name().to_str().and_then(|name| name.parse().ok());
            number.filter(|_| is_ours).and_then(Pid::from_raw)
        };
        processes.filter_map(of_entry).collect()
    }

    /// The files of disks in the run directory.
    pub fn leftovers(&self) -> Vec<String> {
        let run = self.paths().run;
        let names = |dir: &Path| -> Vec<String> {
            let entries = std::fs::read_dir(dir).into_iter().flatten();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        let mut left = names(&run.join("disks"));
        left.extend(names(&run).into_iter().filter(|name| name.starts_with("vbd-")));
        left
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Keepers and workers outlive their daemon. A test may end with its disks attached, and with these running.
        self.end_processes();
        if let Some(Running { stop, thread }) = self.daemon.take() {
            stop.wake();
            if !std::thread::panicking() {
                thread.join().unwrap().unwrap();
            }
        }
    }
}

/// Copies a program to start it. A process of its own writes the copy: the kernel runs no program that is open for writing, as it
/// would be for a moment in each process that another test starts meanwhile.
pub fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").args([from, to]).status().unwrap().success());
}

pub fn id(disk: &DiskPaths) -> DiskId {
    DiskId { domid: disk.domid.0, devid: disk.devid }
}

/// Copies bytes, unless they are withheld.
fn forward(mut from: UnixStream, mut to: UnixStream, silent: &(Mutex<bool>, Condvar)) {
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        let held = silent.0.lock().unwrap();
        drop(silent.1.wait_while(held, |silent| *silent).unwrap());
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Connects to the store by its socket.
pub fn connect(socket: &Path) -> Connect {
    let socket = socket.to_owned();
    Box::new(move || {
        Store::open_socket(&socket).map_err(|e| StoreError::Unreachable { tried: e.to_string() })
    })
}

/// Writes a block and reads it back.
pub fn works(front: &mut Frontend, stamp: u8) {
    let buffer = front.space().buffer(1).unwrap();
    buffer.write(0, &[stamp; 4096]);
    let queue = &mut front.queues[0];
    queue.write(8, &buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    buffer.write(0, &[0; 4096]);
    queue.read(8, &buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    let mut data = vec![0; 4096];
    buffer.read(0, &mut data);
    assert!(data == [stamp; 4096]);
}

/// How long a test waits for an event that must not happen.
pub const A_WHILE: Duration = Duration::from_millis(50);
/// The steps at which a daemon is killed.
pub const STEPS: [Step; 5] =
    [Step::StateWritten, Step::Kept, Step::Served, Step::Paused, Step::Forgotten];

/// Lets a daemon kill this process at its next such step. The request is a file, which is removed
/// then.
pub fn kill_at(file: &Path, step: Step, victim: i32) {
    let new = file.with_extension("new");
    std::fs::write(&new, format!("{step:?} {victim}")).unwrap();
    std::fs::rename(new, file).unwrap();
}

/// Kills the process that [`kill_at`] has named.
fn kill_victim(step: Step) {
    let file = PathBuf::from(std::env::var(RUN).unwrap()).with_file_name("victim");
    let Ok(text) = std::fs::read_to_string(&file) else { return };
    let Some(victim) = text.strip_prefix(&format!("{step:?} ")) else { return };
    std::fs::remove_file(&file).unwrap();
    // The worker may have ended already, by an upgrade.
    let _ = kill_process(Pid::from_raw(victim.parse().unwrap()).unwrap(), Signal::KILL);
}

/// The environment variable with the guests, as `BackendHandle` describes them.
pub const GUESTS: &str = "FERRITE_TEST_GUESTS";
/// The environment variable with the path of the store's socket.
pub const STORE: &str = "FERRITE_TEST_STORE";
/// The environment variable with the run directory.
pub const RUN: &str = "FERRITE_TEST_RUN";
/// The environment variable with the folder of images.
pub const IMAGES: &str = "FERRITE_TEST_IMAGES";
/// The environment variable with the servers of NBD that disks may be on, each behind a comma. Certificates may be anywhere.
pub const NBD_SERVERS: &str = "FERRITE_TEST_NBD_SERVERS";
/// The environment variable with the configuration file whose tables `nbd`, `migration` and `pool` count.
pub const CONFIG: &str = "FERRITE_TEST_CONFIG";
/// The environment variable with the pools that disks may be in, each behind a comma, and behind a bar the folder of
/// Ceph's files.
pub const RBD: &str = "FERRITE_TEST_RBD";
/// The environment variable with the policy for full storage, if it is not the default.
pub const ON_FULL: &str = "FERRITE_TEST_ON_FULL";
/// The environment variable by which a daemon learns of suspended guests.
pub const SUSPENDS: &str = "FERRITE_TEST_SUSPENDS";
/// The environment variable with a step of a daemon and a command that is run at it: `STEP=COMMAND`.
pub const DO_AT: &str = "FERRITE_TEST_DO_AT";

/// Runs the command that the environment names for a step.
fn do_at(step: Step) {
    let Ok(text) = std::env::var(DO_AT) else { return };
    if let Some((at, command)) = text.split_once('=')
        && at == format!("{step:?}")
    {
        assert!(Command::new("sh").args(["-c", command]).status().unwrap().success());
    }
}

const DIE_AT: &str = "FERRITE_TEST_DIE_AT";

/// Runs a daemon that serves disks itself, if the environment asks for one.
pub fn be_a_daemon() {
    be_a_daemon_with(in_process);
}

/// Serves disks in the process of a daemon that the environment asks for.
pub fn in_process(_: &Path) -> Arc<dyn Serving> {
    let loopback = Loopback::new(CopyWith::Memcpy);
    let guests = std::env::var(GUESTS).unwrap();
    for guest in BackendHandle::from_arg(&guests).unwrap().guests {
        loopback.add(&guest).unwrap();
    }
    Arc::new(InProcess { loopback: Arc::new(loopback), removed: Mutex::default() })
}

/// Runs a daemon that serves disks by `serving`, if the environment asks for one.
pub fn be_a_daemon_with(serving: impl FnOnce(&Path) -> Arc<dyn Serving>) {
    be_a_daemon_as(serving, |daemon| daemon);
}

/// As [`be_a_daemon_with`], and `adapt` configures the daemon before it runs.
pub fn be_a_daemon_as(
    serving: impl FnOnce(&Path) -> Arc<dyn Serving>,
    adapt: impl FnOnce(Daemon) -> Daemon,
) {
    let env = |name: &str| std::env::var(name).unwrap();
    if std::env::var_os(GUESTS).is_none() {
        return;
    }
    let serving = serving(env(RUN).as_ref());
    let state_folder = Path::new(&env(RUN)).with_file_name("state");
    let image_folders = vec![env(IMAGES).into()];
    let mut config = Config { image_folders, state_folder, ..Config::default() };
    if let Ok(policy) = std::env::var(ON_FULL) {
        config.disks.on_full = policy.parse().unwrap();
    }
    if let Ok(servers) = std::env::var(NBD_SERVERS) {
        let servers = servers.split(',').map(|server| NbdServer::parse(server).unwrap());
        let certificate_folders = vec!["/".into()];
        config.nbd = NbdOptions { servers: servers.collect(), certificate_folders };
    }
    if let Ok(file) = std::env::var(CONFIG) {
        let file = Config::load(file.as_ref(), true).unwrap();
        config.migration = file.migration;
        config.pools = file.pools;
        if file.nbd != NbdOptions::default() {
            config.nbd = file.nbd;
        }
    }
    if let Some((pools, folder)) =
        std::env::var(RBD).ok().as_deref().and_then(|it| it.split_once('|'))
    {
        let pools = pools.split(',').map(|pool| RbdPool::parse(pool).unwrap()).collect();
        config.rbd = RbdOptions { pools, folders: vec![folder.into()] };
    }
    let paths = Paths { run: env(RUN).into() };
    let way = connect(env(STORE).as_ref());
    let stop = Arc::new(Waker::new().unwrap());
    let daemon = adapt(Daemon::new(config, paths, serving, way, stop).unwrap());
    let daemon = match std::env::var_os(SUSPENDS) {
        Some(_) => {
            let store = connect(env(STORE).as_ref())().unwrap();
            daemon.with_domains(Arc::new(LoopbackDomains::new(store)))
        }
        None => daemon,
    };
    let daemon = daemon.with_steps(|step| {
        if std::env::var(DIE_AT).is_ok_and(|at| at == format!("{step:?}")) {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        kill_victim(step);
        do_at(step);
    });
    daemon.run(&|_| ()).unwrap();
}
