//! A guest whose disk has a daemon, a keeper and a worker, all of which are killed.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::frames::{self, Protocol};
use ferrite_host::process::take_given;
use ferrite_io::engines::test_engine;
use ferrite_keeper::{ALIVE_FD, CLIENT_CHANNEL_FD, DiskSpec, Keeper, LINE_FD, SECOND_FD};
use ferrite_loopback::front::FrontOptions;
use ferrite_loopback::machine::DiskPaths;
use ferrite_loopback::{BackendHandle, CopyWith, Loopback};
use ferrite_serve::blkif::lifecycle::{
    EngineFactory, Lines, OpenFailure, Opened, Outcome, ServeError, follow, retire, work,
};
use ferrite_serve::log_limit::LogLimits;
use ferrite_serve::waker::Waker;
use ferrite_testkit::processes::{Guest, RUN_DIR, World, env, go_on, inherited, open};
use ferrite_testkit::rig::{follow_config, work_config};
use ferrite_testkit::{PATIENCE, images};
use ferrite_xen::hypervisor::{DomId, GrantRef, Hypervisor, HypervisorError, Link};
use ferrite_xen::mover::Moving;
use ferrite_xen::store::Store;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, waitpid};

const DEVID: u32 = 202 << 8;
/// The guests' descriptors, for workers.
const GUESTS: &str = "FERRITE_TEST_GUESTS";
/// The daemon's connection to the store.
const STORE: &str = "FERRITE_TEST_STORE";
const IMAGE: &str = "FERRITE_TEST_IMAGE";

fn is_of_no_role() -> bool {
    std::env::var_os(GUESTS).is_none()
}

fn spec() -> DiskSpec {
    let worker = ["--exact", "worker_process", "--nocapture", "--test-threads=1"];
    DiskSpec {
        socket: PathBuf::from(env(RUN_DIR)).join("keeper.sock"),
        run_dir: env(RUN_DIR).into(),
        worker: worker.map(str::to_owned).to_vec(),
        sandbox: None,
        relay: None,
        group: None,
        public: None,
        preopens: Vec::new(),
    }
}

/// The daemon: it follows the disk, and starts a keeper whenever there is none.
#[test]
fn daemon_process() {
    if is_of_no_role() {
        return;
    }
    // The following descriptors of guests stay: the keeper gets them.
    let connection = env(STORE).split(';').next().unwrap().parse().unwrap();
    let mut store = Store::from_fd(take_given(connection).unwrap());
    let config = follow_config(&DiskPaths::new(DomId(1), DEVID));
    let (stop, log_limits, spec) = (Waker::new().unwrap(), LogLimits::default(), spec());
    let mut lost = None;
    loop {
        let Ok(keeper) = Keeper::connect(&spec.socket) else {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "keeper_process", "--nocapture", "--test-threads=1"]);
            // The former one may be ending.
            let _ = spec.start(command);
            lost = None;
            continue;
        };
        let Ok(line) = keeper.line(lost) else { continue };
        match follow(&mut store, line.fd.as_fd(), &config, &log_limits, &stop) {
            Ok(outcome) => {
                assert_eq!(outcome, Outcome::Unplugged);
                return keeper.end().unwrap();
            }
            Err(ServeError::WorkerLost(_)) => lost = Some(line.start),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn keeper_process() {
    if is_of_no_role() {
        return;
    }
    // The handle of the guests is passed on.
    let guests = inherited(SECOND_FD);
    let Err(e) = ferrite_keeper::run(&guests);
    eprintln!("{e}");
    std::process::exit(1);
}

#[test]
fn worker_process() {
    if is_of_no_role() {
        return;
    }
    let [line, alive, client_channel] =
        [LINE_FD, ALIVE_FD, CLIENT_CHANNEL_FD].map(|fd| take_given(fd).unwrap());
    let handle = BackendHandle::from_arg(&env(GUESTS)).unwrap();
    let loopback = Loopback::new(CopyWith::Memcpy);
    handle.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    let alive = Arc::new(alive);
    let mut open = |_| {
        while flock(&alive, FlockOperation::NonBlockingLockExclusive).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Opened { disk: open(env(IMAGE).as_ref()), engine: engines(alive.clone()) })
    };
    let config = work_config(DomId(1), env(RUN_DIR).into());
    let second = take_given(SECOND_FD).unwrap();
    let lines = Lines { first: &line, second: &second };
    let _ = work(lines, &client_channel, &loopback, &config, &mut open);
}

/// A resource that is used up.
struct UsedUp;

impl Hypervisor for UsedUp {
    fn name(&self) -> &'static str {
        "used up"
    }

    fn is_used_up(&self) -> bool {
        true
    }

    fn connect(
        &self,
        _: DomId,
        _: &[GrantRef],
        _: u32,
        _: &Moving,
    ) -> Result<Box<dyn Link>, HypervisorError> {
        panic!("no frontend is to be connected")
    }
}

const LINE: Protocol = Protocol { name: "the line", max_bytes: 1000, max_files: 0 };

/// A line to a worker in a thread, which cannot open its image.
struct OnALine {
    line: OwnedFd,
    _second: OwnedFd,
    worker: JoinHandle<Result<(), ServeError>>,
}

impl OnALine {
    fn new(hypervisor: impl Hypervisor + 'static) -> OnALine {
        let ((line, theirs), (_second, second)) =
            (frames::pair().unwrap(), frames::pair().unwrap());
        let worker = std::thread::spawn(move || {
            let dir = tempfile::tempdir().unwrap();
            let config = work_config(DomId(1), dir.path().join("run"));
            let failure = || OpenFailure {
                what: "a".into(),
                why: "no Xen".into(),
                help: "b".into(),
                in_use: false,
                errno: None,
            };
            let (client_channel, _) = frames::pair().unwrap();
            let lines = Lines { first: &theirs, second: &second };
            work(lines, &client_channel, &hypervisor, &config, &mut |_| Err(failure()))
        });
        OnALine { line, _second, worker }
    }

    fn receive(&self) -> std::io::Result<String> {
        Ok(String::from_utf8(LINE.receive(&self.line)?.bytes).unwrap())
    }

    fn answer(&self, what: &str) -> String {
        let request = format!("{{\"number\":1,\"what\":{what}}}");
        LINE.send(&self.line, request.as_bytes(), &[]).unwrap();
        self.receive().unwrap()
    }
}

#[test]
fn a_worker_that_can_connect_nobody_any_more_says_why_and_ends() {
    let end = OnALine::new(UsedUp);
    // Nothing has failed yet.
    assert!(end.answer("\"Retire\"").contains("Done"));
    let failed = end.answer("{\"Open\":{\"read_only\":false}}");
    assert!(failed.contains("no Xen"), "{failed}");
    assert!(end.receive().is_err());
    assert!(matches!(end.worker.join().unwrap(), Err(ServeError::Host { .. })));
}

#[test]
fn a_worker_refuses_a_daemon_of_a_version_too_far_away_and_goes_on() {
    let end = OnALine::new(Loopback::new(CopyWith::Memcpy));
    let newer = end.answer("{\"Open\":{\"read_only\":false,\"version\":4}}");
    assert!(newer.contains("speaks version 4 of the line, and this one 1 and 2"), "{newer}");
    let next = end.answer("{\"Open\":{\"read_only\":false,\"version\":3}}");
    assert!(next.contains("no Xen"), "{next}");
}

fn engines(alive: Arc<OwnedFd>) -> EngineFactory {
    let kind = test_engine();
    Arc::new(move |arena, entries| {
        let mut engine = kind.open(arena, entries)?;
        engine.hold(alive.as_fd())?;
        Ok(engine)
    })
}

/// A disk's processes.
struct Host<'a> {
    world: &'a World,
    daemon: Option<Child>,
}

impl Host<'_> {
    fn new(world: &World) -> Host<'_> {
        Host { world, daemon: Some(daemon(world)) }
    }

    fn keeper(&self) -> Keeper {
        let socket = self.world.run_dir().join("keeper.sock");
        wait_for("a keeper", || Keeper::connect(&socket).ok())
    }

    /// The keeper's process id, and the worker's.
    fn processes(&self) -> (i32, i32) {
        wait_for("a worker", || {
            let keeper = self.keeper().line(None).ok()?.keeper;
            Some((keeper, *children(keeper).first()?))
        })
    }

    fn kill_worker(&self) {
        let (_, worker) = self.processes();
        kill(worker);
        wait_for("an end", || (!is_there(worker)).then_some(()));
    }

    fn kill_keeper(&self) {
        let (keeper, worker) = self.processes();
        kill(keeper);
        reap(keeper);
        // Its worker ends with it, and is reaped here.
        reap(worker);
    }

    fn start_daemon(&mut self) {
        self.daemon = Some(daemon(self.world));
    }

    fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        assert_eq!(daemon.wait().unwrap().signal(), Some(9), "it has ended by itself");
    }
}

/// A failed test leaves no processes behind.
impl Drop for Host<'_> {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
            let socket = self.world.run_dir().join("keeper.sock");
            let _ = Keeper::connect(&socket).and_then(Keeper::end);
        }
    }
}

fn daemon(world: &World) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "daemon_process", "--nocapture", "--test-threads=1"]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let guests = world.machine.backend().unwrap().pass_to(&mut command);
    let store = world.machine.backend().unwrap().pass_to(&mut command);
    command.env(GUESTS, guests).env(STORE, store);
    command.env(IMAGE, world.image()).env(RUN_DIR, world.run_dir());
    command.spawn().unwrap()
}

fn wait_for<T>(what: &str, mut is_there: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is_there() {
            return found;
        }
        assert!(Instant::now() < end, "there is not {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

fn reap(pid: i32) {
    waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap();
}

fn is_there(pid: i32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap()
}

/// Returns the children of all threads, including dead ones that were not reaped.
fn children(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
    children.flat_map(|c| c.split(' ').filter_map(|c| c.parse().ok()).collect::<Vec<_>>()).collect()
}

fn descriptors(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Kills a process `times` times under a busy guest and prints the median of the guest's waits.
/// Then checks that no data are lost and no files are left.
fn die(times: usize, seed: u64, mut death: impl FnMut(&mut Host<'_>, usize)) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Keepers without a parent are this process's children.
    set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let world = World::with_format("vhd");
    let mut host = Host::new(&world);
    let options = FrontOptions { queues: 4, max_indirect: 64, ..FrontOptions::default() };
    let guest = Guest::connect(&world, &options, seed);
    let mut random = SplitMix64::new(seed);
    guest.wait_for(200);
    let mut pauses: Vec<Duration> = (0..times)
        .map(|i| {
            std::thread::sleep(Duration::from_micros(random.below(60_000)));
            let begin = Instant::now();
            death(&mut host, i);
            let before = guest.progress.load(Ordering::Relaxed);
            // Fewer answers than this were on the rings already.
            wait_for("an answer", || {
                (guest.progress.load(Ordering::Relaxed) > before + 200).then_some(())
            });
            begin.elapsed()
        })
        .collect();
    println!("pauses: {pauses:?}");
    pauses.sort_unstable();
    println!("median of {times}: {:?}", pauses[times / 2]);
    let (front, loads) = guest.stop();
    // Before the image is read: answered writes count, not only flushed ones.
    host.kill_daemon();
    host.kill_keeper();
    let contents = images::contents(&world.image());
    loads.iter().for_each(|load| load.check(&contents));
    host.start_daemon();
    let front = go_on(front, loads);
    let (keeper, worker) = host.processes();
    assert_eq!(children(keeper), [worker]);
    let last = host.daemon.take();
    drop(host);
    world.end(front, last.unwrap());
    reap(keeper);
    assert!(!is_there(worker));
    assert_eq!(children(std::process::id() as i32), Vec::<i32>::new(), "a process is left");
}

#[test]
fn a_worker_is_killed_twenty_times_and_its_guest_waits_a_moment() {
    let mut before = None;
    die(20, 1, |host, i| {
        let daemon = host.daemon.as_ref().unwrap().id() as i32;
        let now = || [host.processes().0, daemon].map(descriptors);
        let before: [usize; 2] = *before.get_or_insert_with(now);
        host.kill_worker();
        if i == 19 {
            // A connection of this process is closed there a moment later.
            wait_for("what there was", || (now() <= before).then_some(()));
        }
    });
}

#[test]
fn a_keeper_is_killed_three_times_with_its_worker_and_the_daemon_starts_the_next_one() {
    die(3, 2, |host, _| host.kill_keeper());
}

#[test]
fn a_daemon_is_killed_five_times_and_the_next_one_finds_who_serves() {
    die(5, 3, |host, _| {
        let before = host.processes();
        host.kill_daemon();
        host.start_daemon();
        assert_eq!(host.processes(), before);
    });
}

#[test]
fn all_die_at_once_three_times_and_a_daemon_brings_them_back() {
    die(3, 4, |host, _| {
        let (keeper, worker) = host.processes();
        kill(worker);
        kill(keeper);
        host.kill_daemon();
        reap(keeper);
        // One of the two has reaped it.
        let _ = waitpid(Pid::from_raw(worker), WaitOptions::empty());
        host.start_daemon();
    });
}

#[test]
fn a_worker_retires_and_another_binary_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("next");
    die(1, 5, |host, _| {
        fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
        host.kill_daemon();
        let keeper = host.keeper();
        let before = keeper.line(None).unwrap();
        retire(before.fd.as_fd(), &Waker::new().unwrap(), None).unwrap();
        assert!(host.world.run_dir().join("stopped").exists());
        keeper.upgrade(&binary).unwrap();
        host.start_daemon();
        let (process, worker) = host.processes();
        assert_eq!(process, before.keeper);
        let of_worker = || fs::read_link(format!("/proc/{worker}/exe")).ok();
        assert_eq!(of_worker().as_ref(), Some(&binary));
    });
}
