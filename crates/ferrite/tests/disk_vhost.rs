//! `ferrite disk export --vhost-user`: a disk of the daemon for a guest of QEMU, whose front end and driver are simulated.
//! There is no Xen here: the disk is a tap. And devices by a driver that this machine need not have.

mod tapped;

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use ferrite_keeper::{Keeper, socket_name};
use ferrite_serve::others::{Newcomer, is_over, status, told};
use ferrite_testkit::vhost::{Ask, Driver, FrontEnd, Guest, kind, message};
use ferrite_testkit::{PATIENCE, images, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use tapped::{Daemon, read, write};

const ENTRIES: u16 = 64;
const QUEUES: u16 = 2;

/// A daemon with one tap, which is exported.
struct World {
    daemon: Daemon,
    pid: u32,
    image: PathBuf,
}

impl World {
    fn new(format: &str) -> World {
        let daemon = Daemon::new();
        let image = daemon.image("a", format);
        let kind = if format == "raw" { "aio" } else { format };
        let made = daemon.tap_ctl(&format!("create -a {kind}:{image}"));
        assert!(made.status.success(), "{made:?}");
        let listed = String::from_utf8(daemon.tap_ctl("list").stdout).unwrap();
        let pid = listed.split_once("pid=").unwrap().1.split(' ').next().unwrap();
        World { pid: pid.parse().unwrap(), image: image.into(), daemon }
    }

    fn socket(&self) -> PathBuf {
        self.daemon.dir.path().join("vhost.sock")
    }

    fn disk(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("disk").args(args).arg("--run-dir").arg(self.daemon.dir.path().join("run"));
        command.env_remove("RUST_LOG").output().unwrap()
    }

    #[track_caller]
    fn export(&self, more: &[&str]) {
        let socket = self.socket();
        let args = ["export", "tap/0", "--vhost-user", socket.to_str().unwrap()];
        let output = self.disk(&[&args[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.trim_end(), socket.to_str().unwrap());
    }

    #[track_caller]
    fn fails(&self, args: &[&str], code: i32, why: &str) {
        let output = self.disk(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && said.contains(why), "{args:?}: {output:?}");
    }

    /// The process number of the disk's worker.
    fn worker(&self) -> i32 {
        let run = self.daemon.dir.path().join("run");
        let run = run.as_os_str().as_encoded_bytes();
        let has = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|w| w == part);
        let is_worker = |process: &Path| {
            let words = fs::read(process.join("cmdline")).unwrap_or_default();
            has(&words, b"\0worker\0") && has(&words, run)
        };
        let all = fs::read_dir("/proc").unwrap().flatten();
        let worker = all.map(|process| process.path()).find(|process| is_worker(process));
        let worker = worker.expect("a worker");
        worker.file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    fn kill_worker(&self) {
        let pid = self.worker();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
}

/// A guest of QEMU, which connects again with its memory, its rings and its table of requests in flight.
struct Machine {
    guest: Arc<Guest>,
    table: (Vec<u8>, OwnedFd),
    drivers: Vec<Driver>,
    front: FrontEnd,
}

impl Machine {
    fn new(socket: &Path) -> Machine {
        let guest = Guest::new(Driver::memory_bytes(QUEUES, ENTRIES));
        let front = FrontEnd::connect(socket);
        let features = front.agree(0);
        let table = front.new_inflight(QUEUES, ENTRIES);
        let drivers: Vec<_> =
            (0..QUEUES).map(|number| Driver::new(&guest, number, ENTRIES, features)).collect();
        let machine = Machine { guest, table, drivers, front };
        machine.start();
        machine
    }

    fn start(&self) {
        self.front.give(&self.guest);
        assert!(self.front.order(message::SET_INFLIGHT_FD, &self.table.0, &[self.table.1.as_fd()]));
        for driver in &self.drivers {
            assert!(self.front.start(driver, driver.used_index()));
        }
    }

    /// Connects again, when the worker has ended.
    fn again(&mut self, socket: &Path) {
        assert!(self.front.is_closed());
        wait_until("the next worker", || {
            self.front = FrontEnd::connect(socket);
            self.front.is_served()
        });
        self.front.agree(0);
        self.start();
    }
}

#[test]
fn a_guest_of_qemu_keeps_a_disk_of_the_daemon_over_dead_workers_and_a_dead_daemon() {
    let mut world = World::new("qcow2");
    world.export(&["--queues", "2", "--name", "disk-7"]);
    let socket = world.socket();
    let mut machine = Machine::new(&socket);
    let driver = &mut machine.drivers[0];
    let name = Ask { kind: kind::GET_ID, room: 20, ..Ask::flush() };
    assert_eq!(driver.call(&name).1, b"disk-7\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(driver.call(&Ask::write(0, &[7; 4096])).0, 0);
    // A client of NBD has the same disk.
    let mut client = world.daemon.client(world.pid, 0);
    write(&mut client, 8);
    assert_eq!(machine.drivers[1].call(&Ask::read(8, 4096)), (0, vec![8; 4096]));
    for round in 1..4u8 {
        // Some of them are under way when the worker dies.
        let driver = &mut machine.drivers[0];
        let heads: Vec<u16> = (0..4)
            .map(|slot| {
                let ask = Ask::write(64 + slot as u64 * 256, &[round; 128 << 10]);
                let head = driver.prepare(slot, &ask);
                driver.offer(head);
                head
            })
            .collect();
        world.kill_worker();
        machine.again(&socket);
        let driver = &mut machine.drivers[0];
        let mut answered: Vec<u16> = heads.iter().map(|_| driver.wait_used().0).collect();
        answered.sort_unstable();
        let mut heads = heads;
        heads.sort_unstable();
        assert_eq!(answered, heads);
        for slot in 0..4u64 {
            let read = driver.call(&Ask::read(64 + slot * 256, 128 << 10));
            assert!(read.0 == 0 && read.1.iter().all(|byte| *byte == round), "{round}");
        }
    }
    // The next daemon does not take a second front end for the first.
    world.daemon.restart();
    assert_eq!(machine.drivers[0].call(&Ask::read(0, 4096)), (0, vec![7; 4096]));
    let listed = world.daemon.disk(&["exports", "--json"]);
    assert!(listed.contains(&format!("\"vhost_user\": \"{}\"", socket.display())), "{listed}");
    world.kill_worker();
    machine.again(&socket);
    assert_eq!(machine.drivers[1].call(&Ask::read(8, 4096)), (0, vec![8; 4096]));
    assert_eq!(read(&mut client), [8; 4096]);
    let ended = world.disk(&["unexport", "tap/0"]);
    assert!(ended.status.success(), "{ended:?}");
    assert!(machine.front.is_closed() && !socket.exists());
    assert!(!world.daemon.disk(&["exports", "--json"]).contains("vhost"));
    drop(client);
    let closed = world.daemon.tap_ctl(&format!("destroy -p {} -m 0", world.pid));
    assert!(closed.status.success(), "{closed:?}");
    images::check(&world.image);
}

#[test]
fn one_front_end_is_served_at_a_time_and_a_detached_disk_has_none() {
    let world = World::new("raw");
    world.export(&["--read-only", "--queues", "2"]);
    let socket = world.socket();
    let mut machine = Machine::new(&socket);
    assert_ne!(machine.drivers[0].call(&Ask::write(0, &[1; 512])).0, 0);
    assert_eq!(machine.drivers[0].call(&Ask::read(0, 512)), (0, vec![0; 512]));
    // The second one is connected, and is served when the first has gone.
    let second = FrontEnd::connect(&socket);
    second.send(&FrontEnd::encode(message::GET_QUEUE_NUM, &[]), &[]);
    assert_eq!(machine.drivers[0].call(&Ask::read(0, 512)), (0, vec![0; 512]));
    drop(machine);
    assert_eq!(second.answer(message::GET_QUEUE_NUM).expect("an answer").number(), 2);
    assert!(world.daemon.tap_ctl(&format!("destroy -p {} -m 0", world.pid)).status.success());
    assert!(second.is_closed());
    wait_until("the end of the export", || !socket.exists());
}

#[test]
fn what_cannot_be_exported_by_vhost_user_is_refused_with_the_reason() {
    let world = World::new("raw");
    let socket = world.socket();
    let name = socket.to_str().unwrap();
    let taken = world.daemon.dir.path().join("taken");
    let _listener = UnixListener::bind(&taken).unwrap();
    let plain = world.daemon.dir.path().join("plain");
    fs::write(&plain, "text").unwrap();
    let at = |path: &Path| path.to_str().unwrap().to_owned();
    world.fails(&["export", "tap/0", "--vhost-user", &at(&taken)], 4, "a program listens there");
    world.fails(&["export", "tap/0", "--vhost-user", &at(&plain)], 4, "no socket");
    assert_eq!(fs::read(&plain).unwrap(), b"text");
    let missing = world.daemon.dir.path().join("none/socket");
    world.fails(&["export", "tap/0", "--vhost-user", &at(&missing)], 1, "make its folder");
    let long = format!("/{}", "x".repeat(107));
    world.fails(&["export", "tap/0", "--vhost-user", &long], 1, "at most 107 bytes");
    world.fails(&["export", "tap/9", "--vhost-user", name], 3, "not attached");
    for wrong in [["--queues", "0"], ["--queues", "17"], ["--listen", "127.0.0.1:0"]] {
        let args = [&["export", "tap/0", "--vhost-user", name][..], &wrong].concat();
        assert_eq!(world.disk(&args).status.code(), Some(2), "{wrong:?}");
    }
    assert!(!socket.exists());
    world.export(&[]);
    world.fails(&["export", "tap/0", "--vhost-user", name], 4, "exported already");
    world.fails(&["export", "tap/0", "--listen", "127.0.0.1:0", "--plain"], 4, "exported already");
}

/// A machine without the driver, as this one may be, is told what to do.
#[test]
fn a_device_of_a_driver_that_is_not_there_is_refused_with_the_cure() {
    if Path::new("/dev/ublk-control").exists() {
        return;
    }
    let world = World::new("raw");
    world.fails(&["device", "tap/0", "--by", "ublk"], 1, "ublk driver is not loaded");
    world.fails(&["device", "tap/0", "--by", "ublk"], 1, "--by nbd");
    world.fails(&["device", "--remove", "/dev/ublkb0"], 3, "no device of a disk of ferrite");
    // Nothing is left of it.
    let run = world.daemon.dir.path().join("run");
    assert!(!run.join("devices").exists());
    assert!(world.daemon.tap_ctl(&format!("destroy -p {} -m 0", world.pid)).status.success());
}

/// A worker without rights serves a device by calls that it has. This machine need not have the driver: a file that knows
/// none of the driver's commands is the device.
#[test]
fn a_worker_without_rights_lives_on_when_a_device_knows_no_commands() {
    let world = World::new("raw");
    let worker = world.worker();
    let run = world.daemon.dir.path().join("run");
    let keeper = Keeper::connect(&run.join("keepers").join(socket_name("tap-0"))).unwrap();
    let newcomer = Newcomer::Device { number: 7, queues: 2, depth: 64, read_only: false };
    let about = serde_json::to_string(&newcomer).unwrap();
    for _ in 0..3 {
        let file = File::options().read(true).write(true).open("/dev/zero").unwrap();
        let [theirs, ours] = status().unwrap();
        keeper.client(&about, &[theirs.as_fd(), file.as_fd()]).unwrap();
        drop((theirs, file));
        told(&ours, PATIENCE).expect("the worker says what has become of it");
        wait_until("the end of the device", || is_over(&ours));
        assert_eq!(world.worker(), worker);
    }
}
