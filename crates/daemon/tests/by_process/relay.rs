//! NBD clients whose disk's worker is killed or replaced by another program. They see only a pause.

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use ferrite_daemon::control::protocol::Upgraded;
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_keeper::nbd_socket;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::programs::installed;
use ferrite_testkit::{Pace, images, wait_until};
use serde_json::json;

use crate::host::{self, Host};
use crate::load::Load;
use crate::roles::{self, MIB, end, is_alive, keeper, kill, kill_pid, relay_of, worker};

/// Requests of a client at a time.
const DEPTH: usize = 8;
/// Number of clients. The guest works on the first MiB, and each client on a MiB of its own.
const CLIENTS: usize = 3;
/// Deaths of workers, for each of two programs. After more of them a keeper pauses before the next
/// worker.
const DEATHS: usize = 10;

fn stream(host: &Host, disk: &DiskPaths) -> UnixStream {
    let name = host::id(disk).file_name();
    UnixStream::connect(nbd_socket(&host.paths().run.join(name))).expect("a process listens")
}

fn client(host: &Host, disk: &DiskPaths, structured: bool) -> Client {
    let mut client = Client::over(stream(host, disk));
    client.go(structured);
    client
}

/// A client in any form of requests and replies.
fn client_in_form(host: &Host, disk: &DiskPaths, number: usize) -> Client {
    if number % 3 < 2 {
        return client(host, disk, number.is_multiple_of(3));
    }
    let mut client = Client::over(stream(host, disk));
    client.go_extended(&["base:allocation", "qemu:allocation-depth"]);
    client
}

/// A client that writes and reads back in a loop, several requests at a time.
struct Busy {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<Client>,
}

impl Busy {
    fn start(mut client: Client, from: u64) -> Busy {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (end, counted) = (stop.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            work(&mut client, from, &end, &counted);
            client
        });
        Busy { stop, done, thread }
    }

    fn wait_for_progress(&self) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until("progress of a client", || self.done.load(Ordering::Relaxed) > before + 2);
    }

    fn end(self) -> Client {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// A place on the disk with one request at a time.
struct Slot {
    from: u64,
    stamp: u8,
    bytes: u32,
    /// The operation of the request in flight.
    asked: u16,
    cookie: u64,
}

impl Slot {
    fn ask(&mut self, client: &mut Client, command: u16) {
        let data = match command {
            command::WRITE => vec![self.stamp; self.bytes as usize],
            _ => Vec::new(),
        };
        let bytes = if command == command::FLUSH { 0 } else { self.bytes };
        self.asked = command;
        self.cookie = client.send(command, 0, self.from, bytes, &data);
    }
}

fn work(client: &mut Client, from: u64, stop: &AtomicBool, done: &AtomicU64) {
    let mut random = SplitMix64::new(from);
    let room = MIB / DEPTH as u64;
    let slot = |i| Slot {
        from: from + i as u64 * room,
        stamp: 0,
        bytes: room as u32,
        asked: command::WRITE,
        cookie: 0,
    };
    let mut slots: Vec<Slot> = (0..DEPTH).map(slot).collect();
    slots.iter_mut().for_each(|slot| slot.ask(client, command::WRITE));
    let (mut under_way, mut pace) = (DEPTH, Pace::default());
    while under_way > 0 {
        let reply = client.reply();
        assert_eq!(reply.error, 0);
        let slot = slots.iter_mut().find(|slot| slot.cookie == reply.cookie).unwrap();
        if slot.asked == command::READ {
            assert!(are_all(&reply.data, slot.stamp), "at {}", slot.from);
            assert_eq!(reply.data.len(), slot.bytes as usize);
            done.fetch_add(1, Ordering::Relaxed);
            pace.after_request();
            if stop.load(Ordering::Relaxed) {
                under_way -= 1;
                continue;
            }
        }
        let next = match slot.asked {
            command::READ if random.below(4) == 0 => command::WRITE_ZEROES,
            command::READ => command::WRITE,
            command::WRITE if random.below(8) == 0 => command::FLUSH,
            _ => command::READ,
        };
        match next {
            command::WRITE => slot.stamp = slot.stamp.wrapping_add(1).max(1),
            command::WRITE_ZEROES => slot.stamp = 0,
            _ => {}
        }
        slot.ask(client, next);
    }
}

/// A guest and clients that use one disk.
struct Scene {
    host: Host,
    daemon: std::process::Child,
    disk: DiskPaths,
    image: std::path::PathBuf,
    load: Load,
    busy: Vec<Busy>,
}

impl Scene {
    fn new(format: &str) -> Scene {
        let host = Host::new(1);
        let folder = host.image(format);
        std::fs::create_dir(&folder).unwrap();
        let image = images::make(&folder, format, (CLIENTS as u64 + 2) * MIB);
        let daemon = host.spawn(None);
        let kind = if format == "raw" { "aio" } else { format };
        let disk = host.attach(1, 0, &format!("{kind}:{}", image.display()));
        let load = Load::start(&host, &disk);
        let busy = (0..CLIENTS)
            .map(|i| Busy::start(client_in_form(&host, &disk, i), (i as u64 + 1) * MIB));
        let busy = busy.collect();
        Scene { host, daemon, disk, image, load, busy }
    }

    fn all_go_on(&self) {
        self.load.wait_for_progress();
        self.busy.iter().for_each(Busy::wait_for_progress);
    }

    fn end(self, format: &str) {
        let mut clients: Vec<Client> = self.busy.into_iter().map(Busy::end).collect();
        self.load.end();
        clients.iter_mut().for_each(Client::flush);
        let keeper = keeper(&self.host, &self.disk);
        assert!(relay_of(keeper).is_some_and(is_alive));
        drop(clients);
        wait_until("no relay without clients", || relay_of(keeper).is_none());
        end(&self.host, &[self.disk], &[keeper]);
        if format != "raw" {
            images::check(&self.image);
        }
        kill(self.daemon);
    }
}

#[test]
fn clients_go_on_when_a_worker_is_killed() {
    for format in ["raw", "qcow2"] {
        let scene = Scene::new(format);
        scene.all_go_on();
        let keeper = keeper(&scene.host, &scene.disk);
        let relay = relay_of(keeper);
        for round in 0..20 {
            let mut next = None;
            wait_until("a worker", || {
                next = worker(keeper).filter(|pid| is_alive(*pid));
                next.is_some()
            });
            kill_pid(next.unwrap());
            // Some workers are killed before they have opened the image.
            if round % 4 != 0 {
                scene.all_go_on();
            }
        }
        scene.all_go_on();
        assert_eq!(relay_of(keeper), relay, "it is the same one all the time");
        scene.end(format);
    }
}

#[test]
fn clients_go_on_when_their_disk_gets_another_program() {
    let scene = Scene::new("qcow2");
    scene.all_go_on();
    let keeper = keeper(&scene.host, &scene.disk);
    let relay = relay_of(keeper);
    let other = scene.host.dir.path().join("other");
    host::copy_program(&std::env::current_exe().unwrap(), &other);
    for binary in [other.clone(), std::env::current_exe().unwrap()] {
        let done: Upgraded =
            scene.host.call("upgrade", &json!({ "binary": binary.to_str().unwrap() })).unwrap();
        assert_eq!(done.upgraded, [host::id(&scene.disk)], "{done:?}");
        assert_eq!(std::fs::read_link(format!("/proc/{keeper}/exe")).unwrap(), binary);
        scene.all_go_on();
        assert_eq!(relay_of(keeper), relay);
        // The keeper still has the relay, and gives it new clients.
        let mut one_more = client(&scene.host, &scene.disk, true);
        one_more.flush();
    }
    scene.end("qcow2");
}

#[test]
fn a_relay_that_is_killed_takes_its_clients_along_and_nobody_else() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = roles::attach(&host, 1);
    let load = Load::start(&host, &disk);
    let keeper = keeper(&host, &disk);
    let worker_before = worker(keeper);
    for _ in 0..3 {
        let mut clients: Vec<Client> = (0..4).map(|_| client(&host, &disk, true)).collect();
        clients.iter_mut().for_each(|client| client.write(2 * MIB, &[7; 4096]));
        kill_pid(relay_of(keeper).unwrap());
        assert!(clients.iter_mut().all(Client::is_closed));
        load.wait_for_progress();
        let mut next = client(&host, &disk, true);
        assert_eq!(next.read(2 * MIB, 4096), [7; 4096]);
    }
    assert_eq!(worker(keeper), worker_before);
    load.end();
    wait_until("no relay without clients", || relay_of(keeper).is_none());
    end(&host, &[disk], &[keeper]);
    kill(daemon);
}

#[test]
fn what_a_client_was_answered_is_not_done_again_over_newer_data() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = roles::attach(&host, 1);
    let mut front = host.connect(&disk);
    let keeper = keeper(&host, &disk);
    let mut client = client(&host, &disk, true);
    for _ in 0..5 {
        // The block that the guest writes later, by `works`.
        client.write(4096, &[1; 4096]);
        host::works(&mut front, 2);
        kill_pid(worker(keeper).unwrap());
        assert_eq!(client.read(4096, 4096), [2; 4096]);
    }
    front.close(ferrite_testkit::PATIENCE).unwrap();
    end(&host, &[disk], &[keeper]);
    kill(daemon);
}

/// KiB of memory that a process shares with no other.
fn own_kib(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Private_Dirty:"));
    line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn clients_that_stall_keep_neither_others_nor_memory_nor_the_disk() {
    let scene = Scene::new("raw");
    let keeper = keeper(&scene.host, &scene.disk);
    let relay = relay_of(keeper).unwrap();
    let mut stalled: Vec<Client> =
        (0..8).map(|i| client_in_form(&scene.host, &scene.disk, i)).collect();
    for (i, stalled) in stalled.iter_mut().enumerate() {
        match i % 4 {
            // The client does not read its replies.
            0 | 1 => (0..20).for_each(|_| {
                stalled.send(command::READ, 0, 0, 1 << 20, &[]);
            }),
            // The client sends half of a write.
            2 => drop(stalled.send(command::WRITE, 0, 4 * MIB, 1 << 20, &[0; 1000])),
            // The client sends half of a request.
            _ => stalled.say(&ferrite_testkit::nbd::request(command::READ, 0, 9, 0, 512)[..20]),
        }
    }
    // One client does not even begin its handshake.
    let silent = stream(&scene.host, &scene.disk);
    for _ in 0..3 {
        scene.all_go_on();
        kill_pid(worker(keeper).unwrap());
    }
    scene.all_go_on();
    assert!(own_kib(relay) < (8 + CLIENTS as u64) * (6 << 10), "{} KiB", own_kib(relay));
    drop((stalled, silent));
    scene.end("raw");
}

/// Other programs, which connect once and do not reconnect.
#[test]
fn other_programs_notice_no_deaths() {
    let scene = Scene::new("raw");
    let keeper = keeper(&scene.host, &scene.disk);
    let socket = nbd_socket(&scene.host.paths().run.join(host::id(&scene.disk).file_name()));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let at = (CLIENTS as u64 + 1) * MIB;
    let mut qemu = vec!["-f".to_owned(), "raw".to_owned()];
    for stamp in 1..=100 {
        let of = |what: &str| format!("{what} -P {stamp} {at} 512k");
        qemu.extend(
            [of("write"), "flush".to_owned(), of("read")].map(|c| ["-c".to_owned(), c]).concat(),
        );
    }
    qemu.push(uri.clone());
    let nbdsh = format!(
        "h.connect_uri('{uri}')\nfor i in range(1, 201):\n  b = bytes([i]) * 262144\n  \
         h.pwrite(b, {})\n  assert h.pread(262144, {0}) == b\nh.shutdown()",
        at + MIB / 2
    );
    let nbdsh = vec!["-c".to_owned(), nbdsh];
    for (program, arguments) in [("/usr/bin/qemu-io", qemu), ("/usr/bin/nbdsh", nbdsh)] {
        let ended = AtomicBool::new(false);
        let output = std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..DEATHS {
                    if ended.load(Ordering::Relaxed) {
                        return;
                    }
                    if let Some(worker) = worker(keeper).filter(|pid| is_alive(*pid)) {
                        kill_pid(worker);
                    }
                    scene.all_go_on();
                }
            });
            let mut command = Command::new(program);
            // The system's Python has the module of nbdsh.
            let output = command.args(arguments).env("PATH", "/usr/bin:/bin").output();
            ended.store(true, Ordering::Relaxed);
            output
        });
        let Some(output) = installed(program, output) else { continue };
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success() && !said.contains("failed"), "{program}: {said}");
    }
    scene.end("raw");
}
