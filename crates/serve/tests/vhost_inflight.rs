//! A server of vhost-user that is killed under its guest. The front end connects to the next one with the same memory, rings
//! and table of requests in flight: each request is answered once, and answered writes are on the disk.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_host::clock::SystemClock;
use ferrite_serve::nbd::bind;
use ferrite_serve::path::device::Device;
use ferrite_serve::vhost;
use ferrite_serve::waker::Waker;
use ferrite_testkit::vhost::{Driver, FrontEnd, Guest, Load, message, options};
use ferrite_testkit::{PATIENCE, images, places, processes, rounds, wait_until};
use rustix::process::{Signal, getpid, kill_process};
use tempfile::TempDir;

const IMAGE: &str = "FERRITE_TEST_VHOST_IMAGE";
const SOCKET: &str = "FERRITE_TEST_VHOST_SOCKET";
const QUEUES: u16 = 2;
const ENTRIES: u16 = 64;
const BYTES: u64 = 64 << 20;
/// The point of a server's death, as `STEP ROUND`; empty: it does not park.
const DIES: &str = "FERRITE_TEST_VHOST_DIES";
/// The extension of a file that is there when the guest has connected.
const CONNECTED: &str = "connected";
/// The steps of a pause: a server may die before one.
const STEPS: [&str; 3] = ["park", "close", "go on"];

/// Not a test: the server.
#[test]
fn process_server() {
    let (Ok(image), Ok(socket)) = (std::env::var(IMAGE), std::env::var(SOCKET)) else { return };
    let image = Path::new(&image);
    let device = Arc::new(Device::new(processes::open(image), SystemClock::shared()));
    let bound = bind(Path::new(&socket)).unwrap();
    let dies = std::env::var(DIES).unwrap_or_default();
    std::thread::scope(|scope| {
        if !dies.is_empty() {
            scope.spawn(|| park_again_and_again(&device, image, &dies));
        }
        vhost::serve(&device, &options(), &bound.listener, &Waker::new().unwrap()).unwrap();
    });
}

/// Parks the disk and puts it back, and dies before that step.
fn park_again_and_again(device: &Arc<Device>, image: &Path, dies: &str) {
    for round in 0.. {
        // The guest has all of its queues, and is served in between.
        wait_until("a connected guest", || image.with_extension(CONNECTED).exists());
        std::thread::sleep(Duration::from_millis(20));
        let step = |step: &str| {
            if dies == format!("{step} {round}") {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
        };
        step("park");
        let (disk, away) = device.park(PATIENCE).unwrap();
        step("close");
        // A disk that is put back unchanged, one that was closed, and one that was left as by a death.
        let disk = match round % 3 {
            0 => disk,
            1 => {
                images::session(disk).close().unwrap();
                processes::open(image)
            }
            _ => {
                drop(disk);
                processes::open(image)
            }
        };
        step("go on");
        away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
    }
}

/// A server that is killed when this is dropped.
struct Server(Child);

impl Server {
    fn start(image: &Path, socket: &Path, dies: &str) -> Server {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["process_server", "--exact", "--nocapture"]).stdout(Stdio::null());
        command.env(IMAGE, image).env(SOCKET, socket).env(DIES, dies);
        Server(command.spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Connects with the table of before, as QEMU does it.
fn connect(
    socket: &Path,
    guest: &Guest,
    drivers: &[Driver],
    table: &(Vec<u8>, std::os::fd::OwnedFd),
) -> FrontEnd {
    let front = FrontEnd::connect(socket);
    front.agree(0);
    front.give(guest);
    assert!(front.order(message::SET_INFLIGHT_FD, &table.0, &[table.1.as_fd()]));
    for driver in drivers {
        assert!(front.start(driver, driver.used_index()));
    }
    front
}

/// A guest under load, and the process that serves it.
struct Story {
    image: PathBuf,
    socket: PathBuf,
    guest: Arc<Guest>,
    load: Load,
    table: (Vec<u8>, OwnedFd),
    served: Option<(Server, FrontEnd)>,
    _dir: TempDir,
}

impl Story {
    fn begin(format: &str, seed: u64) -> Story {
        let dir = places::dir_in_memory();
        let image = images::make(dir.path(), format, BYTES);
        let socket = dir.path().join("vhost.sock");
        let guest = Guest::new(Load::memory_bytes(QUEUES, ENTRIES));
        let server = Server::start(&image, &socket, "");
        let first = FrontEnd::connect(&socket);
        let features = first.agree(0);
        let table = first.new_inflight(QUEUES, ENTRIES);
        drop((first, server));
        let load = Load::new(&guest, QUEUES, ENTRIES, features, seed);
        Story { image, socket, guest, load, table, served: None, _dir: dir }
    }

    /// Starts the next server, and connects to it.
    fn serve(&mut self, dies: &str) {
        let connected = self.image.with_extension(CONNECTED);
        let _ = std::fs::remove_file(&connected);
        let server = Server::start(&self.image, &self.socket, dies);
        let front = connect(&self.socket, &self.guest, &self.load.drivers, &self.table);
        std::fs::write(connected, "").unwrap();
        self.served = Some((server, front));
    }

    fn turns(&mut self) {
        for _ in 0..10 + self.load.below(100) {
            self.load.turn();
        }
    }

    fn server_is_dead(&mut self) -> bool {
        let Some((server, _)) = &mut self.served else { return true };
        match server.0.try_wait().unwrap() {
            Some(status) => {
                assert_eq!(status.signal(), Some(9));
                true
            }
            None => false,
        }
    }

    fn end(mut self) {
        self.load.finish();
        self.served = None;
        images::check(&self.image);
        self.load.compare(&images::contents(&self.image));
    }
}

/// Servers that are killed in the middle of their work, and not at the end of the connection.
fn killed(format: &str, seed: u64, kills: u32) {
    let mut story = Story::begin(format, seed);
    for _ in 0..kills {
        story.serve("");
        story.turns();
        if let Some((server, front)) = story.served.take() {
            drop(server);
            drop(front);
        }
    }
    story.serve("");
    story.end();
}

/// Servers that die while they have parked the disk, before each of the steps: the guest's requests wait, and the next
/// server answers them.
fn dies_parked(format: &str, seed: u64) {
    let mut story = Story::begin(format, seed);
    for step in STEPS {
        for round in 0..3 {
            story.serve(&format!("{step} {round}"));
            // The guest goes on until its server is dead: its last requests then stay without an answer.
            let end = Instant::now() + PATIENCE;
            while !story.server_is_dead() {
                assert!(Instant::now() < end, "a server does not die before {step} {round}");
                story.load.turn_for(Duration::from_millis(20));
            }
            story.served = None;
        }
    }
    story.serve("");
    story.end();
}

#[test]
fn a_killed_servers_requests_are_answered_once_by_the_next_one() {
    for (seed, format) in ["raw", "qcow2"].into_iter().enumerate() {
        killed(format, seed as u64, rounds(25));
    }
}

#[test]
fn a_server_that_dies_while_its_disk_is_parked_leaves_pauses() {
    for (seed, format) in ["raw", "qcow2"].into_iter().enumerate() {
        dies_parked(format, 40 + seed as u64);
    }
}
