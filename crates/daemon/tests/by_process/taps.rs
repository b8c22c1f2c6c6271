//! Taps: disks that are open before their guest and after it, as XAPI drives them.

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use ferrite_daemon::Step;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{TapDone, TapRow, TapRows, Upgraded};
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::{PATIENCE, images, scale, wait_until};
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use crate::host::{self, Host, works};
use crate::load::Load;
use crate::roles::{MIB, is_alive, kill, kill_pid, worker};

/// The environment variable with the seed of the random orders.
const SEED: &str = "FERRITE_TEST_SEED";

/// A tap, as a storage manager knows it.
#[derive(Clone, Copy)]
struct Tap {
    pid: u32,
    minor: u32,
}

impl Tap {
    /// Makes a tap that is not open yet.
    fn attach(host: &Host) -> Tap {
        let allocated: TapDone = host.call("tap.allocate", &json!({})).unwrap();
        let spawned: TapDone = host.call("tap.spawn", &json!({})).unwrap();
        let tap = Tap { pid: spawned.pid.unwrap(), minor: allocated.minor.unwrap() };
        tap.call(host, "attach", None).unwrap();
        tap
    }

    fn open(host: &Host, image: &str) -> Tap {
        let tap = Tap::attach(host);
        tap.call(host, "open", Some(image)).unwrap();
        tap
    }

    fn call(self, host: &Host, verb: &str, image: Option<&str>) -> Result<TapDone, ClientError> {
        let Tap { pid, minor } = self;
        let params = json!({ "pid": pid, "minor": minor, "image": image, "timeout_s": 20 });
        host.call(&format!("tap.{verb}"), &params)
    }

    fn row(self, host: &Host) -> TapRow {
        let rows: TapRows = host.call("tap.list", &json!({})).unwrap();
        rows.taps.into_iter().find(|row| row.minor == Some(self.minor)).unwrap_or_default()
    }

    fn state(self, host: &Host) -> Option<u32> {
        self.row(host).state
    }

    /// The path of its socket, which is data: it is the socket itself, and no link.
    fn socket(self, host: &Host) -> PathBuf {
        let socket = host.paths().blktap().join(format!("nbd{}.{}", self.pid, self.minor));
        assert!(socket.symlink_metadata().unwrap().file_type().is_socket());
        socket
    }

    fn client(self, host: &Host) -> Client {
        let mut client = Client::over(UnixStream::connect(self.socket(host)).unwrap());
        client.go(true);
        client
    }

    /// Attaches a guest's disk as xenopsd does: its script names the tap.
    fn join(self, host: &Host, domid: u16) -> DiskPaths {
        let params = "nbd:unix:/run/blktap-control/nbd/sr/vdi:exportname=vdi";
        let socket = self.socket(host);
        let keys = [
            ("script", "/usr/libexec/xenopsd/block"),
            ("physical-device-path", socket.to_str().unwrap()),
            ("hotplug-status", "connected"),
        ];
        host.attach_with(domid, 0, params, &keys)
    }

    /// Closes, detaches and frees it.
    fn end(self, host: &Host) {
        self.call(host, "close", None).unwrap();
        assert_eq!(self.state(host), Some(0x2));
        self.call(host, "detach", None).unwrap();
        wait_until("its process's end", || !is_alive(self.pid as i32));
        host.call::<TapDone>("tap.free", &json!({ "minor": self.minor })).unwrap();
        assert_eq!(self.row(host), TapRow::default());
    }
}

/// Unplugs a guest's disk as xenopsd does: the backend removes its directory when the frontend is
/// gone.
fn leave(host: &Host, disk: &DiskPaths) {
    host.machine().unplug(disk).unwrap();
    host.wait_for_state(disk, 6);
    host.store().remove(&disk.frontend).unwrap();
    let backend = || host.store().read(&format!("{}/state", disk.backend)).unwrap();
    wait_until("the end of the directory", || backend().is_none());
}

fn start(host: &Host) -> Child {
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    daemon
}

fn read(client: &mut Client, offset: u64) -> Vec<u8> {
    let cookie = client.send(command::READ, 0, offset, 4096, &[]);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (cookie, 0));
    reply.data
}

/// Checks that nothing of any tap is left.
fn nothing_is_left(host: &Host) {
    let names = |folder: &Path| -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let run = host.paths().run;
    // A keeper that has ended takes its files along a moment later.
    wait_until("the end of the keepers' files", || names(&run.join("keepers")).is_empty());
    for folder in ["keepers", "disks", "names", "images"] {
        assert_eq!(names(&run.join(folder)), BTreeSet::new(), "{folder}");
    }
    let left = names(&run).into_iter().filter(|n| n.starts_with("tap-") || n.starts_with("spare-"));
    assert_eq!(left.count(), 0, "{:?}", names(&run));
    assert_eq!(names(&host.paths().blktap()), BTreeSet::from(["tapdisk".to_owned()]));
    assert_eq!(names(&host.paths().blktap().join("tapdisk")), BTreeSet::new());
}

fn qcow2(host: &Host) -> PathBuf {
    let folder = host.image("qcow2");
    std::fs::create_dir(&folder).unwrap();
    images::make(&folder, "qcow2", 4 * MIB)
}

#[test]
fn a_guest_joins_a_tap_and_leaves_it_while_clients_stay() {
    let host = Host::new(2);
    let daemon = start(&host);
    let image = qcow2(&host);
    let tap = Tap::open(&host, &format!("qcow2:{}", image.display()));
    let mut client = tap.client(&host);
    assert_eq!(read(&mut client, 8 * 512), [0; 4096]);
    for (domid, stamp) in [(1, 3), (2, 4)] {
        let disk = tap.join(&host, domid);
        let mut front = host.connect(&disk);
        works(&mut front, stamp);
        assert_eq!(read(&mut client, 8 * 512), [stamp; 4096]);
        // The tap waits for its guest.
        let params = json!({ "pid": tap.pid, "minor": tap.minor, "timeout_s": 0 });
        let e = host.call::<TapDone>("tap.detach", &params).unwrap_err();
        assert!(e.to_string().contains("is open"), "{e}");
        front.close(PATIENCE).unwrap();
        leave(&host, &disk);
        assert_eq!(read(&mut client, 8 * 512), [stamp; 4096]);
        assert_eq!(tap.state(&host), Some(0));
    }
    drop(client);
    tap.end(&host);
    nothing_is_left(&host);
    images::check(&image);
    kill(daemon);
}

#[test]
fn a_tap_stays_paused_whichever_process_ends_and_goes_on_by_name() {
    let host = Host::new(1);
    let mut daemon = start(&host);
    let image = qcow2(&host);
    let mut tap = Tap::open(&host, &format!("qcow2:{}", image.display()));
    let disk = tap.join(&host, 1);
    let load = Load::start(&host, &disk);
    load.wait_for_progress();
    for victim in ["nothing", "worker", "daemon", "keeper"] {
        tap.call(&host, "pause", None).unwrap();
        assert_eq!(tap.state(&host), Some(0x2a), "{victim}");
        let keeper = tap.row(&host).pid.unwrap() as i32;
        match victim {
            "worker" => kill_pid(worker(keeper).unwrap()),
            "keeper" => kill_pid(keeper),
            "daemon" => {
                kill(daemon);
                daemon = start(&host);
            }
            _ => {}
        }
        assert_eq!(tap.state(&host), Some(0x2a), "{victim}");
        // The image is another file, under the same name.
        images::check(&image);
        let next = image.with_extension("next");
        std::fs::copy(&image, &next).unwrap();
        std::fs::rename(&next, &image).unwrap();
        let bad = host.image("bad.qcow2");
        std::fs::write(&bad, [7; 4096]).unwrap();
        let bad = format!("qcow2:{}", bad.display());
        tap.call(&host, "unpause", Some(&bad)).unwrap_err();
        assert_eq!(tap.state(&host), Some(0x22a), "{victim}");
        assert_eq!(tap.row(&host).args, Some(bad), "{victim}");
        let named = format!("qcow2:{}", image.display());
        tap.call(&host, "unpause", Some(&named)).unwrap();
        assert_eq!(tap.state(&host), Some(0), "{victim}");
        assert_eq!(tap.row(&host).args, Some(named), "{victim}");
        load.wait_for_progress();
    }
    load.end();
    leave(&host, &disk);
    // The keeper was killed, and scripts go on with the old number.
    let now = tap.row(&host).pid.unwrap();
    assert_ne!(now, tap.pid);
    tap.client(&host);
    tap.call(&host, "close", None).unwrap();
    tap.call(&host, "detach", None).unwrap();
    tap.pid = now;
    wait_until("its process's end", || !is_alive(now as i32));
    host.call::<TapDone>("tap.free", &json!({ "minor": tap.minor })).unwrap();
    nothing_is_left(&host);
    kill(daemon);
}

#[test]
fn two_guests_have_one_tap() {
    let host = Host::new(2);
    let daemon = start(&host);
    // No folder of the configuration has it: the program that opens a tap says what it is.
    let image = host.dir.path().join("elsewhere.img");
    std::fs::File::create(&image).unwrap().set_len(4 * MIB).unwrap();
    let tap = Tap::open(&host, &format!("aio:{}", image.display()));
    let disks = [1, 2].map(|domid| tap.join(&host, domid));
    let loads = [(0, 0), (1, 512)].map(|(i, first)| Load::from(&host, &disks[i], first));
    loads.iter().for_each(Load::wait_for_progress);
    kill_pid(worker(tap.pid as i32).unwrap());
    loads.iter().for_each(Load::wait_for_progress);
    tap.call(&host, "pause", None).unwrap();
    tap.call(&host, "unpause", None).unwrap();
    loads.iter().for_each(Load::wait_for_progress);
    loads.into_iter().for_each(Load::end);
    disks.iter().rev().for_each(|disk| leave(&host, disk));
    tap.end(&host);
    nothing_is_left(&host);
    kill(daemon);
}

#[test]
fn a_tap_is_served_on_after_the_death_of_each_process() {
    let host = Host::new(1);
    let mut daemon = start(&host);
    let image = host.make_image("a.img", 4 * MIB);
    let tap = Tap::open(&host, &format!("aio:{}", image.display()));
    let mut client = tap.client(&host);
    kill_pid(worker(tap.pid as i32).unwrap());
    assert_eq!(read(&mut client, 0), [0; 4096]);
    let disk = tap.join(&host, 1);
    let load = Load::start(&host, &disk);
    load.wait_for_progress();
    kill_pid(worker(tap.pid as i32).unwrap());
    load.wait_for_progress();
    kill(daemon);
    load.wait_for_progress();
    // Without a daemon, the next worker takes the guest over by itself.
    kill_pid(worker(tap.pid as i32).unwrap());
    load.wait_for_progress();
    daemon = start(&host);
    load.wait_for_progress();
    assert_eq!(tap.state(&host), Some(0));
    load.end();
    leave(&host, &disk);
    // Without a guest, the tap has clients of NBD only.
    assert!(tap.row(&host).worker.is_some());
    kill(daemon);
    for _ in 0..2 {
        kill_pid(worker(tap.pid as i32).unwrap());
        read(&mut client, 0);
    }
    daemon = start(&host);
    wait_until("the tap", || tap.state(&host) == Some(0));
    read(&mut client, 0);
    drop(client);
    tap.end(&host);
    nothing_is_left(&host);
    kill(daemon);
}

/// The threads of this name in a process.
fn threads(process: &Child, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.id())).unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|found| found.trim_end() == name).count()
}

#[test]
fn a_thread_publishes_counters_from_the_first_guest_of_a_tap_to_the_last() {
    let host = Host::new(1);
    let mut daemon = start(&host);
    let image = host.make_image("a.img", 4 * MIB);
    let tap = Tap::open(&host, &format!("aio:{}", image.display()));
    for _ in 0..2 {
        assert_eq!(threads(&daemon, "statistics"), 0);
        let disk = tap.join(&host, 1);
        let mut front = host.connect(&disk);
        assert_eq!(threads(&daemon, "statistics"), 1);
        kill(daemon);
        daemon = start(&host);
        wait_until("a thread", || threads(&daemon, "statistics") == 1);
        works(&mut front, 1);
        front.close(PATIENCE).unwrap();
        leave(&host, &disk);
        wait_until("the end of the thread", || threads(&daemon, "statistics") == 0);
    }
    tap.end(&host);
    nothing_is_left(&host);
    kill(daemon);
}

#[test]
fn the_process_of_a_tap_that_is_not_open_gets_the_next_program_as_well() {
    let host = Host::new(0);
    let daemon = start(&host);
    let image = host.make_image("a.img", 4 * MIB);
    let named = format!("aio:{}", image.display());
    let (idle, open) = (Tap::attach(&host), Tap::open(&host, &named));
    let spare: TapDone = host.call("tap.spawn", &json!({})).unwrap();
    let spare = spare.pid.unwrap();
    let program = host.dir.path().join("next");
    host::copy_program(&std::env::current_exe().unwrap(), &program);
    let done: Upgraded = host.call("upgrade", &json!({ "binary": program })).unwrap();
    let ids: Vec<u32> = done.upgraded.iter().map(|id| id.devid).collect();
    assert_eq!((ids, done.failed), (vec![idle.minor, open.minor], vec![]));
    for pid in [idle.pid, open.pid, spare] {
        assert_eq!(std::fs::read_link(format!("/proc/{pid}/exe")).unwrap(), program);
    }
    open.end(&host);
    // The process that had no tap gets one.
    let allocated: TapDone = host.call("tap.allocate", &json!({})).unwrap();
    let next = Tap { pid: spare, minor: allocated.minor.unwrap() };
    next.call(&host, "attach", None).unwrap();
    next.call(&host, "open", Some(&named)).unwrap();
    assert_eq!(read(&mut next.client(&host), 0), [0; 4096]);
    next.end(&host);
    idle.call(&host, "open", Some(&named)).unwrap();
    assert_eq!(read(&mut idle.client(&host), 0), [0; 4096]);
    idle.end(&host);
    nothing_is_left(&host);
    kill(daemon);
}

/// Prints the taps and the files of the run directory if a test fails.
struct Told<'a>(&'a Host);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let rows: Result<TapRows, _> = self.0.call("tap.list", &json!({}));
            eprintln!("{rows:#?}");
            let _ = Command::new("ls").arg("-lR").arg(self.0.paths().run).status();
        }
    }
}

/// Twenty taps of one host, and what is done to them in a random order.
struct Orders {
    host: Host,
    daemon: Child,
    images: Vec<PathBuf>,
    programs: Vec<PathBuf>,
    random: SplitMix64,
}

impl Orders {
    const TAPS: usize = 20;
    const STEPS: usize = 40;

    fn new(seed: u64) -> Orders {
        // A guest would be connected to one worker only.
        let host = Host::new(0);
        let own = std::env::current_exe().unwrap();
        let programs = ["one", "other"].map(|name| host.dir.path().join(name));
        for copy in &programs {
            host::copy_program(&own, copy);
        }
        let images = (0..Self::TAPS).map(|i| host.make_image(&format!("{i}.img"), MIB)).collect();
        let (daemon, programs) = (start(&host), programs.to_vec());
        Orders { host, daemon, images, programs, random: SplitMix64::new(seed) }
    }

    /// The number of a process that serves this tap, if there is one.
    fn processes(&self, tap: Tap) -> Vec<i32> {
        let keeper = tap.row(&self.host).pid.map(|pid| pid as i32);
        let keeper = keeper.filter(|pid| is_alive(*pid));
        keeper.into_iter().chain(keeper.and_then(worker)).collect()
    }

    /// Does something to one of the taps. It may fail, as the tap may be in any state.
    fn step(&mut self, taps: &[Tap]) {
        let tap = taps[self.random.below(taps.len() as u64) as usize];
        let image = format!("aio:{}", self.images[tap.minor as usize].display());
        match self.random.below(12) {
            0..4 => drop(tap.call(&self.host, "open", Some(&image))),
            4..6 => drop(tap.call(&self.host, "pause", None)),
            6 | 7 => drop(tap.call(&self.host, "unpause", None)),
            8 => drop(tap.call(&self.host, "close", None)),
            9 => {
                let processes = self.processes(tap);
                if let Some(pid) = processes.get(self.random.below(2) as usize) {
                    kill_pid(*pid);
                }
            }
            10 => {
                let binary = &self.programs[self.random.below(2) as usize];
                let disk = json!({ "domid": 0x7ff4, "devid": tap.minor });
                let params = json!({ "disk": disk, "binary": binary });
                drop(self.host.call::<serde_json::Value>("upgrade", &params));
            }
            _ => {
                self.daemon.kill().unwrap();
                self.daemon.wait().unwrap();
                self.daemon = start(&self.host);
            }
        }
    }

    /// Closes, detaches and frees a tap, as far as it is there. `false`: it has come back meanwhile.
    fn is_freed(&self, tap: Tap) -> bool {
        // One whose keeper was killed while it had no image is not attached any more.
        if let Some(pid) = tap.row(&self.host).pid {
            // The next daemon knows only the keeper that it finds.
            let tap = Tap { pid, ..tap };
            tap.call(&self.host, "close", None).unwrap();
            tap.call(&self.host, "detach", None).unwrap();
        }
        let freed = self.host.call::<TapDone>("tap.free", &json!({ "minor": tap.minor }));
        freed.is_ok()
    }

    /// One order of steps. Nothing of it is left afterwards.
    fn run(&mut self) {
        let taps: Vec<Tap> = (0..Self::TAPS).map(|_| Tap::attach(&self.host)).collect();
        for tap in &taps {
            let image = format!("aio:{}", self.images[tap.minor as usize].display());
            tap.call(&self.host, "open", Some(&image)).unwrap();
        }
        for _ in 0..Self::STEPS {
            self.step(&taps);
        }
        let _told = Told(&self.host);
        let mut processes = Vec::new();
        for tap in taps {
            processes.extend(self.processes(tap));
            // An open tap whose keeper and daemon were killed together gets another keeper from the next daemon, and
            // has none until then.
            wait_until("the end of a tap", || self.is_freed(tap));
        }
        wait_until("the end of all processes", || !processes.iter().any(|pid| is_alive(*pid)));
        nothing_is_left(&self.host);
        for image in &self.images {
            let file = std::fs::File::open(image).unwrap();
            let lock = FlockOperation::NonBlockingLockExclusive;
            wait_until("no lock", || flock(&file, lock).is_ok());
        }
    }
}

/// The steps that the storage manager and accidents take, with each commit in two orders.
#[test]
fn orders_of_verbs_deaths_and_upgrades_leave_nothing() {
    let seed = std::env::var(SEED).map(|seed| seed.parse().unwrap());
    let seed = seed.unwrap_or_else(|_| SplitMix64::from_system().next_u64());
    println!("seed {seed}");
    let mut orders = Orders::new(seed);
    for _ in 0..2 * scale() {
        orders.run();
    }
    kill(orders.daemon);
}

#[test]
fn a_close_waits_for_the_guest_and_is_done_when_it_leaves() {
    let host = Host::new(1);
    let daemon = start(&host);
    let image = host.make_image("a.img", 4 * MIB);
    let tap = Tap::open(&host, &format!("aio:{}", image.display()));
    let disk = tap.join(&host, 1);
    let mut front = host.connect(&disk);
    works(&mut front, 1);
    let params = json!({ "pid": tap.pid, "minor": tap.minor, "timeout_s": 0 });
    let e = host.call::<TapDone>("tap.close", &params).unwrap_err();
    assert!(e.to_string().contains("disk 1/51712 has it"), "{e}");
    works(&mut front, 2);
    assert_eq!(tap.state(&host), Some(0));
    front.close(PATIENCE).unwrap();
    leave(&host, &disk);
    wait_until("its end", || tap.state(&host) == Some(0x2));
    tap.end(&host);
    nothing_is_left(&host);
    kill(daemon);
}

#[test]
fn a_tap_whose_daemon_dies_at_any_step_goes_on_or_is_as_before() {
    for step in [Step::StateWritten, Step::Kept, Step::Served, Step::Paused, Step::Forgotten] {
        let host = Host::new(1);
        let daemon = start(&host);
        let image = qcow2(&host);
        let named = format!("qcow2:{}", image.display());
        let tap = Tap::attach(&host);
        kill(daemon);
        let mut dying = host.spawn(Some(step));
        wait_until("the daemon", || host.status().is_ok());
        // Each is begun, and one of them is cut short.
        let verbs =
            [("open", Some(named.as_str())), ("pause", None), ("unpause", None), ("close", None)];
        let failed = verbs.iter().position(|(verb, image)| tap.call(&host, verb, *image).is_err());
        let failed = failed.unwrap_or_else(|| panic!("{step:?} was not reached"));
        dying.wait().unwrap();
        let daemon = start(&host);
        wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
        // The next daemon or the next call does a verb that was cut short.
        for (verb, image) in &verbs[failed..] {
            let settled = || matches!(tap.state(&host), Some(0 | 0x2 | 0x2a));
            wait_until("a state", settled);
            let open_already = *verb == "open" && tap.row(&host).args.is_some();
            let runs_already = *verb == "unpause" && tap.state(&host) == Some(0);
            if !open_already && !runs_already {
                tap.call(&host, verb, *image).unwrap_or_else(|e| panic!("{step:?} {verb}: {e}"));
            }
        }
        tap.end(&host);
        nothing_is_left(&host);
        images::check(&image);
        kill(daemon);
    }
}
