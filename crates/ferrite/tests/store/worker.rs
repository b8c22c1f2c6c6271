//! The real keeper and worker of a store, on a machine without Xen: the worker has dropped its rights when disks come
//! to it, and can use only the files that come with them.

use std::io::Read as _;
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use ferrite_host::sandbox::user_of_store;
use ferrite_keeper::{DiskSpec, Group, Keeper, Preopen, WorkerSandbox};
use ferrite_serve::blkif::lifecycle::part;
use ferrite_serve::waker::Waker;
use ferrite_testkit::{PATIENCE, wait_until};
use ferrite_xen::hypervisor::DomId;

struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// As the daemon makes it.
    fn spec(&self, domid: u16, options: &[&str]) -> DiskSpec {
        let run = self.at("run");
        let text = |path: PathBuf| path.into_os_string().into_string().unwrap();
        let of_run = format!("--run-dir={}", text(run.clone()));
        let name = format!("vbd-{domid}-51712");
        let group =
            ["store-worker".to_owned(), of_run.clone(), "--".to_owned(), text(self.at("s"))];
        let xen = format!("--xen={domid}/51712");
        let volume = format!("store:{}#v{domid}", text(self.at("s")));
        let options = options.iter().map(|option| (*option).to_owned());
        let worker = ["worker".to_owned(), xen, of_run].into_iter().chain(options);
        let worker = worker.chain(["--".to_owned(), volume]).collect();
        let budget = |name: &str| Preopen { path: run.join(name), flags: 0o102, count: 1 };
        DiskSpec {
            socket: run.join(format!("keepers/{name}.sock")),
            run_dir: run.join(&name),
            worker,
            sandbox: Some(WorkerSandbox {
                image: self.at("s"),
                writable: true,
                read: Vec::new(),
                journals: None,
                own_files: vec![run.join("stats").join(&name)],
                root: run.join("empty"),
                user: user_of_store(1, 1),
                servers: Vec::new(),
                mirror: None,
                fence: None,
            }),
            relay: None,
            group: Some(Group {
                socket: run.join("keepers/store-1-1.sock"),
                run_dir: run.join("store-1-1"),
                worker: group.to_vec(),
                commands: Some(run.join("stores/1-1.")),
            }),
            public: None,
            preopens: ["map-budget", "poll-budget", "memory-budget"].map(budget).to_vec(),
        }
    }

    fn start(&self, domid: u16, options: &[&str]) -> Keeper {
        let spec = self.spec(domid, options);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("keeper").arg("store-1-1").env_remove("RUST_LOG");
        spec.start(command).unwrap();
        Keeper::connect(&spec.socket).unwrap()
    }
}

/// A failed test leaves no processes behind.
impl Drop for World {
    fn drop(&mut self) {
        for domid in 1..=3 {
            if let Ok(keeper) = Keeper::connect(&self.spec(domid, &[]).socket) {
                let _ = keeper.end();
            }
        }
    }
}

/// Whether a thread of the worker answers.
fn is_served(keeper: &Keeper) -> bool {
    let line = keeper.second_line().unwrap();
    part(line.fd.as_fd(), DomId(99), &Waker::new().unwrap(), Some(PATIENCE)).is_ok()
}

#[test]
fn a_worker_without_rights_takes_disks_that_come_later() {
    let world = World { dir: tempfile::tempdir().unwrap() };
    std::fs::write(world.at("s"), "x").unwrap();
    let first = world.start(1, &[]);
    wait_until("the first disk", || is_served(&first));
    let start = first.line(None).unwrap().start;
    let later = world.start(2, &[]);
    let other = world.start(3, &["--mover=map", "--cpu=50", "--memory=4M", "--poll-us=0"]);
    for keeper in [&later, &other] {
        wait_until("a disk that comes later", || is_served(keeper));
    }
    // No process has ended because of that.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(first.line(None).unwrap().start, start);
    assert!(is_served(&first));
    // A command finds the worker's socket. This one sends no question.
    let socket = std::fs::read_dir(world.at("run/stores")).unwrap().next().unwrap().unwrap();
    let mut stream = UnixStream::connect(socket.path()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert!(said.contains("cannot understand the question"), "{said}");
    assert_eq!(first.line(None).unwrap().start, start);
    for keeper in [first, later] {
        keeper.leave().unwrap();
    }
    assert!(is_served(&other));
    assert_eq!(other.line(None).unwrap().start, start);
    other.leave().unwrap();
    let left = |folder: &str| std::fs::read_dir(world.at(folder)).unwrap().count();
    assert_eq!((left("run/keepers"), left("run/stores")), (0, 0));
}
