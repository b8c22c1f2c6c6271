//! Several disks that share one keeper and one worker. The test's worker only reports its process
//! number.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_host::frames::Protocol;
use ferrite_host::names::{open, with_handed};
use ferrite_keeper::{DiskSpec, Group, Keeper, Line, Preopen, WorkerChannel, WorkerEvent};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};

const ROLE: &str = "FERRITE_KEEPER_TEST_ROLE";

/// Messages of these tests.
const RAW: Protocol = Protocol { name: "a test", max_bytes: 1000, max_files: 1 };

#[test]
fn keeper_process() {
    if std::env::var_os(ROLE).is_some() {
        let Err(e) = ferrite_keeper::run(&[]);
        eprintln!("keeper: {e}");
        std::process::exit(1);
    }
}

/// Replies to each message on a line with the process number, the disk's name and the files that
/// came with it.
#[test]
fn worker_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let channel = WorkerChannel::take().unwrap();
    let mut all = 0;
    loop {
        match channel.next() {
            Ok(WorkerEvent::All) => all += 1,
            Ok(WorkerEvent::Command(mut stream)) => {
                stream.write_all(format!("{} {all}", std::process::id()).as_bytes()).unwrap();
            }
            Ok(WorkerEvent::Disk(disk)) => {
                std::thread::spawn(move || {
                    let name = disk.arguments[0].clone();
                    let path = disk.arguments[1].clone();
                    let look = || open(&path, OFlags::RDONLY, Mode::empty());
                    let handed = with_handed(disk.handed, || [look(), look()]);
                    let handed = handed.map(|file| {
                        let mut text = String::new();
                        File::from(file.ok()?).read_to_string(&mut text).ok()?;
                        Some(text)
                    });
                    let said = format!("{} {name} {handed:?}", std::process::id());
                    while RAW.receive(&disk.line).is_ok() {
                        RAW.try_send(&disk.line, said.as_bytes(), &[]).unwrap();
                    }
                });
            }
            Err(_) => std::process::exit(0),
        }
    }
}

struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("text"), "x").unwrap();
        World { dir }
    }

    fn spec(&self, name: &str) -> DiskSpec {
        let at = |name: &str| self.dir.path().join(name);
        let worker = ["--exact", "worker_process", "--nocapture", "--test-threads=1"];
        let group = Group {
            socket: at("keepers/store.sock"),
            run_dir: at("store"),
            worker: worker.map(str::to_owned).to_vec(),
            commands: Some(at("stores/s.")),
        };
        let text = at("text");
        DiskSpec {
            socket: at("keepers").join(format!("{name}.sock")),
            run_dir: at(name),
            worker: vec![name.to_owned(), text.to_str().unwrap().to_owned()],
            sandbox: None,
            relay: None,
            group: Some(group),
            public: None,
            preopens: vec![Preopen { path: text, flags: OFlags::RDONLY.bits(), count: 1 }],
        }
    }

    fn start(&self, name: &str) -> io::Result<Keeper> {
        let spec = self.spec(name);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "keeper_process", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, "1").env("MALLOC_ARENA_MAX", "1");
        spec.start(command)?;
        Keeper::connect(&spec.socket)
    }

    fn left(&self) -> Vec<PathBuf> {
        fn all(dir: &std::path::Path) -> Vec<PathBuf> {
            let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            entries.flat_map(|path| if path.is_dir() { all(&path) } else { vec![path] }).collect()
        }
        all(self.dir.path()).into_iter().filter(|path| !path.ends_with("text")).collect()
    }

    fn command(&self) -> String {
        let socket = fs::read_dir(self.dir.path().join("stores")).unwrap().next().unwrap();
        let mut said = String::new();
        let mut stream = UnixStream::connect(socket.unwrap().path()).unwrap();
        stream.read_to_string(&mut said).unwrap();
        said
    }
}

/// A failed test leaves no process behind.
impl Drop for World {
    fn drop(&mut self) {
        for name in ["a", "b", "c"] {
            if let Ok(keeper) = Keeper::connect(&self.spec(name).socket) {
                let _ = keeper.end();
            }
        }
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The process number of the worker, as it reports it for this disk.
fn worker(line: &Line, name: &str) -> i32 {
    RAW.try_send(&line.fd, b"who", &[]).unwrap();
    let said = RAW.receive(&line.fd).unwrap().bytes;
    let said = String::from_utf8(said).unwrap();
    let (number, rest) = said.split_once(' ').unwrap_or_else(|| panic!("{said:?}"));
    assert_eq!(rest, format!("{name} [Some(\"x\"), Some(\"x\")]"));
    number.parse().unwrap()
}

fn is_at_its_end(line: &OwnedFd) -> bool {
    RAW.receive(line).is_err_and(|e| e.kind() == ErrorKind::UnexpectedEof)
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

fn is_there(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

#[test]
fn disks_of_a_group_have_one_worker_and_the_next_one_has_them_all() {
    let world = World::new();
    let keepers = ["a", "b", "c"].map(|name| (name, world.start(name).unwrap()));
    for start in 1..7 {
        let lines = keepers.each_ref().map(|(name, keeper)| (*name, keeper.line(None).unwrap()));
        let pids = lines.each_ref().map(|(name, line)| worker(line, name));
        assert_eq!(pids, [pids[0]; 3]);
        assert!(lines.iter().all(|(_, line)| line.start == start));
        assert!(lines.iter().all(|(_, line)| line.keeper == lines[0].1.keeper));
        if start % 2 == 0 {
            kill(pids[0]);
        }
        // Each follower reports the loss, and only the first report kills a worker.
        for (_, keeper) in &keepers {
            assert_eq!(keeper.line(Some(start)).unwrap().start, start + 1);
        }
        assert!(lines.iter().all(|(_, line)| is_at_its_end(&line.fd)));
    }
    for (_, keeper) in keepers {
        keeper.end().unwrap();
    }
    assert_eq!(world.left(), Vec::<PathBuf>::new());
}

#[test]
fn a_disk_that_leaves_is_not_noticed_and_one_that_was_not_closed_takes_the_worker_along() {
    let world = World::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| world.start(name).unwrap());
    let lines = [("a", &a), ("b", &b), ("c", &c)];
    let lines = lines.map(|(name, keeper)| (name, keeper.line(None).unwrap()));
    let pid = worker(&lines[0].1, "a");
    // The first disk started this keeper.
    a.leave().unwrap();
    assert!(!world.spec("a").socket.exists());
    assert_eq!(worker(&lines[1].1, "b"), pid);
    // The disk comes back, to the same worker.
    let a = world.start("a").unwrap();
    assert_eq!(worker(&a.line(None).unwrap(), "a"), pid);
    b.end().unwrap();
    assert!(is_at_its_end(&lines[2].1.fd));
    wait_until("the worker's end", || !is_there(pid));
    let next = c.line(Some(lines[2].1.start)).unwrap();
    let pid = worker(&next, "c");
    assert_eq!(worker(&a.line(None).unwrap(), "a"), pid);
    let keeper = next.keeper;
    c.leave().unwrap();
    assert!(is_there(pid));
    a.leave().unwrap();
    wait_until("the end of all", || !is_there(pid) && !is_there(keeper));
    assert_eq!(world.left(), Vec::<PathBuf>::new());
}

#[test]
fn a_disk_of_another_group_or_of_another_keeper_does_not_join() {
    let world = World::new();
    let keeper = world.start("a").unwrap();
    let socket = world.spec("a").group.unwrap().socket;
    let ask = |asked: &serde_json::Value| {
        let group = Keeper::connect(&socket).unwrap();
        RAW.try_send(group.fd(), &serde_json::to_vec(asked).unwrap(), &[]).unwrap();
        String::from_utf8(RAW.receive(group.fd()).unwrap().bytes).unwrap()
    };
    let mut foreign = world.spec("b");
    foreign.group.as_mut().unwrap().socket = "/elsewhere".into();
    assert!(ask(&serde_json::json!({ "Join": foreign })).contains("another group"));
    assert!(ask(&serde_json::json!({ "Join": world.spec("a") })).contains("No"), "it is there");
    for odd in [serde_json::json!("Keep"), serde_json::json!({ "Join": 1 }), serde_json::json!(7)] {
        assert!(ask(&odd).contains("a group takes no such request"), "{odd}");
    }
    let line = keeper.line(None).unwrap();
    worker(&line, "a");
    // A group has one keeper, also when its socket is removed.
    fs::remove_file(&socket).unwrap();
    assert!(world.start("b").is_err());
    keeper.end().unwrap();
}

#[test]
fn another_program_has_all_disks_of_the_group_and_its_commands() {
    let world = World::new();
    let [a, b] = ["a", "b"].map(|name| world.start(name).unwrap());
    let before = a.line(None).unwrap();
    let old = worker(&before, "a");
    assert_eq!(world.command(), format!("{old} 1"));
    let new = world.dir.path().join("text.new");
    fs::copy(std::env::current_exe().unwrap(), &new).unwrap();
    for _ in 0..2 {
        b.upgrade(&new).unwrap();
        // The connection that requested the program still belongs to the same disk.
        worker(&b.line(None).unwrap(), "b");
        assert_eq!(b.spec().unwrap(), world.spec("b"));
    }
    let [a, b] = ["a", "b"].map(|name| Keeper::connect(&world.spec(name).socket).unwrap());
    let [a_line, b_line] = [&a, &b].map(|keeper| keeper.line(None).unwrap());
    let pid = worker(&b_line, "b");
    assert_eq!((worker(&a_line, "a"), a_line.keeper), (pid, before.keeper));
    assert_eq!(fs::read_link(format!("/proc/{pid}/exe")).unwrap(), new);
    assert_eq!(world.command(), format!("{pid} 1"));
    assert_eq!(b.spec().unwrap(), world.spec("b"));
    fs::remove_file(&new).unwrap();
    a.leave().unwrap();
    b.leave().unwrap();
    wait_until("nothing", || world.left().is_empty());
}

#[test]
fn a_command_that_comes_while_there_is_no_worker_is_the_next_ones_or_ends() {
    let world = World::new();
    let keeper = world.start("a").unwrap();
    let line = keeper.line(None).unwrap();
    let pid = worker(&line, "a");
    kill(pid);
    wait_until("an answer", || {
        let said = world.command();
        assert!(!said.starts_with(&format!("{pid} ")), "{said}");
        !said.is_empty()
    });
    keeper.leave().unwrap();
}
