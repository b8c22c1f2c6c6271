//! Keepers as processes, with workers that only report their process number.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use ferrite_host::frames::{Frame, Protocol};
use ferrite_host::names;
use ferrite_host::process::{Fork, fork, take_given};
use ferrite_host::sandbox::{Means, user_of};
use ferrite_keeper::{
    ALIVE, ALIVE_FD, DiskSpec, Keeper, LINE_FD, Line, WorkerSandbox, drop_privileges,
};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::net::{SendFlags, send};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process, prlimit,
    set_child_subreaper, set_parent_process_death_signal, waitpid,
};

const PATIENCE: Duration = Duration::from_secs(30);
const ROLE: &str = "FERRITE_KEEPER_TEST_ROLE";

/// Messages of these tests.
const RAW: Protocol = Protocol { name: "a test", max_bytes: 1000, max_files: 1 };

/// Keepers become children of this process when their parents end. Only one test at a time may
/// count them.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn keeper_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let Err(e) = ferrite_keeper::run(&[]);
    eprintln!("keeper: {e}");
    std::process::exit(1);
}

/// Replies to each message with the process number or with what the message asks for. It exits at
/// `end`.
#[test]
fn worker_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    if std::env::var_os("FERRITE_SANDBOX").is_some() {
        go_on_in_a_child();
        assert!(drop_privileges(Means::default()).unwrap().is_some());
    }
    let line = take_given(LINE_FD).unwrap();
    let alive = take_given(ALIVE_FD).unwrap();
    while flock(&alive, FlockOperation::NonBlockingLockExclusive).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    loop {
        let Ok(Frame { bytes: asked, .. }) = RAW.receive(&line) else { std::process::exit(0) };
        match &*asked {
            b"end" => std::process::exit(7),
            b"place" => {
                let traced = ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"].map(std::env::var_os);
                let place = std::env::current_dir().unwrap();
                let place = format!("{} {:?}", place.display(), traced);
                RAW.try_send(&line, place.as_bytes(), &[]).unwrap();
            }
            b"socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
            _ if asked.starts_with(b"open ") => {
                let path = std::str::from_utf8(&asked[5..]).unwrap();
                let opened = names::open(path, OFlags::RDWR, Mode::empty());
                let answer = opened.map_or_else(|e| format!("{e:?}"), |_| "opened".to_owned());
                RAW.try_send(&line, answer.as_bytes(), &[]).unwrap();
            }
            _ => RAW.try_send(&line, format!("{}", std::process::id()).as_bytes(), &[]).unwrap(),
        }
    }
}

/// Only a process with one thread can give up its rights, and tests run on a second thread. So a
/// child goes on, and the first process exits as the child does.
fn go_on_in_a_child() {
    if fork().unwrap() == Fork::Child {
        return set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    }
    // The line has to end with the child.
    drop([LINE_FD, ALIVE_FD].map(|fd| take_given(fd).unwrap()));
    let (_, status) = rustix::process::wait(WaitOptions::empty()).unwrap().unwrap();
    std::process::exit(status.exit_status().unwrap_or(1));
}

struct World {
    dir: tempfile::TempDir,
    spec: DiskSpec,
    _alone: MutexGuard<'static, ()>,
}

impl World {
    fn new() -> World {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        static ADOPT: Once = Once::new();
        ADOPT.call_once(|| set_child_subreaper(Some(rustix::process::getpid())).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let worker = ["--exact", "worker_process", "--nocapture", "--test-threads=1"];
        let spec = DiskSpec {
            socket: dir.path().join("keepers/vbd-1-2.sock"),
            run_dir: dir.path().join("vbd-1-2"),
            worker: worker.map(str::to_owned).to_vec(),
            sandbox: None,
            relay: None,
            group: None,
            public: None,
            preopens: Vec::new(),
        };
        World { dir, spec, _alone: alone }
    }

    fn start_as(&self, binary: &Path) -> io::Result<Keeper> {
        let mut command = Command::new(binary);
        command.args(["--exact", "keeper_process", "--nocapture", "--test-threads=1"]);
        // One heap: the allocator of another thread opens files.
        command.env(ROLE, "1").env("MALLOC_ARENA_MAX", "1");
        command.envs(["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"].map(|name| (name, "1")));
        self.spec.start(command)?;
        Keeper::connect(&self.spec.socket)
    }

    fn start(&self) -> Keeper {
        self.start_as(&std::env::current_exe().unwrap()).unwrap()
    }

    fn files(&self) -> Vec<PathBuf> {
        fn all(dir: &Path) -> Vec<PathBuf> {
            let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            entries.flat_map(|path| if path.is_dir() { all(&path) } else { vec![path] }).collect()
        }
        all(self.dir.path())
    }
}

/// A failed test leaves no process behind.
impl Drop for World {
    fn drop(&mut self) {
        if let Ok(keeper) = Keeper::connect(&self.spec.socket) {
            let _ = keeper.end();
        }
    }
}

fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    assert!(comes_true(is_so), "{what}");
}

fn comes_true(mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn has_ended(socket: impl AsFd) -> bool {
    RAW.receive(socket).is_err_and(|e| e.kind() == ErrorKind::UnexpectedEof)
}

fn say(line: &OwnedFd, text: &str) -> String {
    RAW.try_send(line, text.as_bytes(), &[]).unwrap();
    let answer = RAW.receive(line).unwrap().bytes;
    String::from_utf8(answer).unwrap()
}

/// The process number of the worker.
fn worker(line: &Line) -> i32 {
    say(&line.fd, "who").parse().unwrap()
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// Stops a child of this process, and waits until it has stopped.
fn stop(pid: i32) {
    let pid = Pid::from_raw(pid).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped());
}

/// Waits for the exit of a child of this process.
fn reap(pid: i32) {
    waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap();
}

fn is_there(pid: i32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap()
}

fn parent(pid: i32) -> i32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().split(' ').nth(1).unwrap().parse().unwrap()
}

fn descriptors(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// The children of all threads, zombies included.
fn children(pid: i32) -> usize {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children = |path| fs::read_to_string(path).unwrap().split_whitespace().count();
    threads.map(|thread| children(thread.unwrap().path().join("children"))).sum()
}

/// Ends a keeper, and checks that it leaves nothing.
fn end(world: &World, keeper: Keeper, pid: i32) {
    keeper.end().unwrap();
    reap(pid);
    assert_eq!(world.files(), Vec::<PathBuf>::new());
    assert!(!world.spec.run_dir.exists());
}

#[test]
fn a_worker_that_ends_is_replaced_and_its_keeper_stays_what_it_was() {
    let world = World::new();
    let keeper = world.start();
    let mut line = keeper.line(None).unwrap();
    let process = line.keeper;
    assert_eq!(parent(worker(&line)), process);
    let before = descriptors(process);
    for round in 0..20 {
        let old = worker(&line);
        match round % 3 {
            0 => kill(old),
            1 => RAW.try_send(&line.fd, b"end", &[]).unwrap(),
            // The worker lives, but its follower reports it as lost.
            _ => {}
        }
        if round % 3 < 2 {
            assert!(has_ended(&line.fd));
        }
        let next = keeper.line(Some(line.start)).unwrap();
        assert_eq!((next.start, next.keeper), (line.start + 1, process));
        line = next;
        assert_ne!(worker(&line), old);
        assert!(!is_there(old));
        // Another client that reports an older loss gets the same line.
        assert_eq!(keeper.line(Some(line.start - 1)).unwrap().start, line.start);
    }
    assert_eq!((descriptors(process), children(process)), (before, 1));
    end(&world, keeper, process);
}

/// threats.md T27 and T28.
#[test]
fn a_worker_without_rights_asks_its_keeper_and_is_replaced_when_it_tries_more() {
    let mut world = World::new();
    let at = |name: &str| world.dir.path().join(name);
    let [images, secret] = ["images", "secret"].map(at);
    let [image, other] = [images.join("disk.img"), secret.join("disk.img")];
    for (folder, file) in [(&images, &image), (&secret, &other)] {
        fs::create_dir(folder).unwrap();
        fs::write(file, "x").unwrap();
    }
    world.spec.sandbox = Some(WorkerSandbox {
        image: image.clone(),
        writable: true,
        read: Vec::new(),
        journals: None,
        own_files: Vec::new(),
        root: at("empty"),
        user: user_of(1, 51712),
        servers: Vec::new(),
        mirror: None,
        fence: None,
    });
    let keeper = world.start();
    let mut line = keeper.line(None).unwrap();
    for _ in 0..3 {
        assert_eq!(say(&line.fd, &format!("open {}", image.display())), "opened");
        assert!(say(&line.fd, &format!("open {}", other.display())).contains("PermissionDenied"));
        RAW.try_send(&line.fd, b"socket", &[]).unwrap();
        assert!(has_ended(&line.fd));
        // The keeper holds the image meanwhile, and with it its lock.
        let held = format!("/proc/{}/fd", line.keeper);
        let held = fs::read_dir(held).unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        assert_eq!(held.filter(|path| *path == image).count(), 1);
        let next = keeper.line(Some(line.start)).unwrap();
        assert_eq!(next.start, line.start + 1);
        line = next;
    }
    let pid = line.keeper;
    keeper.end().unwrap();
    reap(pid);
}

#[test]
fn the_second_line_is_the_next_workers_when_a_worker_has_ended_and_ends_none() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    for start in line.start..line.start + 3 {
        let [second, again] = [(); 2].map(|()| keeper.second_line().unwrap());
        assert_eq!((second.start, again.start), (start, start));
        let first = keeper.line(None).unwrap();
        assert_eq!(first.start, start);
        kill(worker(&first));
        assert!(has_ended(&second.fd));
        // The keeper may not have noticed the exit yet. Then an early request gets the old line.
        loop {
            let next = keeper.second_line().unwrap();
            if next.start != start {
                assert_eq!(next.start, start + 1);
                break;
            }
            assert!(has_ended(&next.fd));
        }
    }
    let pid = line.keeper;
    keeper.end().unwrap();
    reap(pid);
}

#[test]
fn a_worker_has_the_descriptors_that_it_was_given_and_no_others() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    let worker = worker(&line);
    let fds = fs::read_dir(format!("/proc/{worker}/fd")).unwrap();
    let mut fds: Vec<u32> =
        fds.map(|fd| fd.unwrap().file_name().into_string().unwrap().parse().unwrap()).collect();
    fds.sort_unstable();
    assert_eq!(fds, [0, 1, 2, 3, 4, 6, 7]);
    let alive = world.spec.run_dir.join(ALIVE);
    let theirs = fs::File::open(&alive).unwrap();
    assert!(flock(&theirs, FlockOperation::NonBlockingLockExclusive).is_err());
    // The stopped keeper starts no other worker, which would lock the file as well.
    stop(line.keeper);
    kill(worker);
    let is_free = || flock(&theirs, FlockOperation::NonBlockingLockExclusive).is_ok();
    let came_free = comes_true(is_free);
    kill_process(Pid::from_raw(line.keeper).unwrap(), Signal::CONT).unwrap();
    assert!(came_free, "the lock comes free");
    drop(theirs);
    end(&world, keeper, line.keeper);
}

/// A caught panic must not open files that the worker may not open.
#[test]
fn a_worker_is_in_no_folder_that_goes_away_and_looks_for_no_files_when_it_panics() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    assert_eq!(say(&line.fd, "place"), "/ [None, None]");
    let place = fs::read_link(format!("/proc/{}/cwd", line.keeper)).unwrap();
    assert_eq!(place, Path::new("/"));
    end(&world, keeper, line.keeper);
}

/// How often this process has blocked. One that spins does not block.
fn waits(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn a_keeper_without_descriptors_waits_for_some_and_goes_on() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    let pid = Pid::from_raw(line.keeper);
    let free = (0..).find(|fd| !fs::exists(format!("/proc/{}/fd/{fd}", line.keeper)).unwrap());
    let none = Rlimit { current: free, ..getrlimit(Resource::Nofile) };
    let before = prlimit(pid, Resource::Nofile, none).unwrap();
    // The backlog has room for this connection, but the keeper has no descriptor for it.
    let other = Keeper::connect(&world.spec.socket).unwrap();
    let looks = waits(line.keeper);
    wait_until("it waits", || waits(line.keeper) > looks + 20);
    prlimit(pid, Resource::Nofile, before).unwrap();
    assert_eq!(other.spec().unwrap(), world.spec);
    drop(other);
    end(&world, keeper, line.keeper);
}

#[test]
fn a_keeper_that_is_killed_takes_its_worker_along_and_another_takes_its_place() {
    let world = World::new();
    for _ in 0..3 {
        let keeper = world.start();
        let line = keeper.line(None).unwrap();
        let worker = worker(&line);
        assert!(world.start_as(&std::env::current_exe().unwrap()).is_err(), "there is one");
        kill(line.keeper);
        reap(line.keeper);
        assert!(has_ended(keeper.fd()));
        // The worker is a child of this process now.
        reap(worker);
    }
    let keeper = world.start();
    let pid = keeper.line(None).unwrap().keeper;
    end(&world, keeper, pid);
}

/// The bytes of the first version, and what is two versions newer.
#[test]
fn a_daemon_of_a_version_too_far_away_gets_no_line_and_ends_no_worker() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    let number = worker(&line);
    let ask = |request: String| {
        let other = Keeper::connect(&world.spec.socket).unwrap();
        RAW.send(other.fd(), request.as_bytes(), &[]).unwrap();
        RAW.receive(other.fd()).unwrap()
    };
    for version in ["", r#","version":1"#, r#","version":3"#] {
        let reply = ask(format!(r#"{{"Line":{{"lost":null{version}}}}}"#));
        assert_eq!(reply.files.len(), 1, "{version}");
    }
    let refused = ask(format!(r#"{{"Line":{{"lost":{},"version":4}}}}"#, line.start));
    assert_eq!(refused.files.len(), 0);
    let refused = String::from_utf8(refused.bytes).unwrap();
    let both = "speaks version 4 of a keeper's socket, and this one 1 and 2: install the releases";
    assert!(refused.contains(both), "{refused}");
    assert_eq!(worker(&line), number);
    let pid = line.keeper;
    end(&world, keeper, pid);
}

#[test]
fn who_asks_may_go_and_what_nobody_understands_is_answered() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    let before = descriptors(line.keeper);
    let number = worker(&line);
    for _ in 0..50 {
        let other = Keeper::connect(&world.spec.socket).unwrap();
        assert_eq!(other.spec().unwrap(), world.spec);
        for odd in [b"{}".as_slice(), b"\"Lin\"", &[b' '; 70_000]] {
            send(other.fd(), odd, SendFlags::NOSIGNAL).unwrap();
        }
        drop(other);
    }
    assert_eq!(worker(&line), number);
    wait_until("no descriptor of a client that has gone", || descriptors(line.keeper) == before);
    // More connections than the keeper holds. The follower's stays.
    let many: Vec<_> = (0..30).map(|_| Keeper::connect(&world.spec.socket).unwrap()).collect();
    assert_eq!(many[29].spec().unwrap(), world.spec);
    assert_eq!(keeper.line(None).unwrap().start, line.start);
    assert_eq!(many[29].line(None).unwrap().start, line.start);
    let last = Keeper::connect(&world.spec.socket).unwrap();
    drop((many, keeper));
    end(&world, last, line.keeper);
}

#[test]
fn the_program_goes_on_as_it_was_when_its_file_is_gone_and_as_another_when_that_is_asked() {
    let world = World::new();
    let old = world.dir.path().join("old");
    let new = world.dir.path().join("new");
    fs::copy(std::env::current_exe().unwrap(), &old).unwrap();
    fs::copy(std::env::current_exe().unwrap(), &new).unwrap();
    let exe = |pid: i32| fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let keeper = world.start_as(&old).unwrap();
    fs::remove_file(&old).unwrap();
    let line = keeper.line(None).unwrap();
    kill(worker(&line));
    let next = keeper.line(Some(line.start)).unwrap();
    assert!(exe(worker(&next)).to_str().unwrap().ends_with("old (deleted)"));

    // A file that is no program is refused, and only the worker is lost.
    let text = world.dir.path().join("text");
    fs::write(&text, "no program").unwrap();
    for none in [&text, &world.dir.path().join("none")] {
        keeper.upgrade(none).unwrap_err();
        let line = keeper.line(None).unwrap();
        assert_eq!((line.keeper, parent(worker(&line))), (next.keeper, next.keeper));
    }

    let before = keeper.line(None).unwrap();
    let descriptors_before = descriptors(before.keeper);
    keeper.upgrade(&new).unwrap();
    let line = keeper.line(None).unwrap();
    assert_eq!(line.keeper, before.keeper);
    assert!(line.start > before.start);
    assert_eq!((exe(line.keeper), exe(worker(&line))), (new.clone(), new.clone()));
    assert_eq!(descriptors(line.keeper), descriptors_before);
    assert_eq!(children(line.keeper), 1);
    assert_eq!(keeper.spec().unwrap(), world.spec);
    for file in [new, text] {
        fs::remove_file(file).unwrap();
    }
    end(&world, keeper, line.keeper);
}

#[test]
fn a_line_is_open_while_its_worker_is_not_there_yet() {
    let world = World::new();
    let keeper = world.start();
    let line = keeper.line(None).unwrap();
    let process = line.keeper;
    let mut at = line.start;
    for _ in 0..30 {
        at = keeper.line(Some(at)).unwrap().start;
    }
    let line = keeper.line(None).unwrap();
    assert!(line.start >= 2);
    RAW.try_send(line.fd.as_fd(), b"who", &[]).unwrap();
    let answer = RAW.receive(&line.fd).unwrap().bytes;
    assert!(!answer.is_empty());
    end(&world, keeper, process);
}
