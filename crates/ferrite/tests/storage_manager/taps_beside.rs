//! What a tap's writes go to besides its image: the log of changed blocks (`tap-ctl open -C`, `cbt-util`), and the second
//! disk of storage motion (`-2`), whose connection XAPI passes. The test plays XAPI's storage manager and XAPI.

use std::collections::BTreeSet;
use std::fs;
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::wait_until;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};

use crate::tapped::{Daemon, MIB};

const BLOCK: u64 = 64 << 10;
/// Bytes of a server's message of the old style.
const GREETING_BYTES: usize = 152;

/// A server's message of the old style, whose flags say that it has flags.
fn greeting(bytes: u64) -> Vec<u8> {
    let mut greeting = b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".to_vec();
    greeting.extend(bytes.to_be_bytes());
    greeting.extend([0, 0, 0, 1]);
    greeting.resize(GREETING_BYTES, 0);
    greeting
}

fn kill(pid: u32) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

/// The process that has a tap's image open.
fn worker(path: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let has_it = |process: &fs::DirEntry| {
        let files = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        files
            .map(|file| fs::read_link(file.path()))
            .any(|name| name.is_ok_and(|name| name == Path::new(path)))
    };
    let pid = |process: fs::DirEntry| process.file_name().to_str()?.parse().ok();
    processes.filter(has_it).find_map(pid)
}

/// A tap that is attached.
struct Tap<'a> {
    daemon: &'a Daemon,
    pid: u32,
    minor: u32,
    image: String,
}

impl<'a> Tap<'a> {
    fn new(daemon: &'a Daemon, minor: u32) -> Tap<'a> {
        let image = daemon.image(&format!("of-{minor}"), "vhd");
        assert!(daemon.tap_ctl("allocate").status.success());
        let pid = daemon.spawn();
        daemon.says(&format!("attach -p {pid} -m {minor}"), "");
        Tap { daemon, pid, minor, image }
    }

    fn line(&self, verb: &str, more: &str) -> String {
        let (pid, minor) = (self.pid, self.minor);
        format!("{verb} -p {pid} -m {minor} {more}").trim_end().to_owned()
    }

    fn open(&self, more: &str) {
        let more = format!("-a vhd:{} {more}", self.image);
        self.daemon.says(&self.line("open", more.trim_end()), "");
    }

    fn says(&self, verb: &str, more: &str) {
        self.daemon.says(&self.line(verb, more), "");
    }

    fn client(&self) -> Client {
        self.daemon.client(self.pid, self.minor)
    }

    fn stats(&self) -> serde_json::Value {
        let output = self.daemon.tap_ctl(&self.line("stats", ""));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn mirror_failed(&self) -> bool {
        self.stats()["nbd_mirror_failed"] == 1
    }

    fn state(&self) -> String {
        let output = self.daemon.tap_ctl(&format!("list -m {}", self.minor));
        let line = String::from_utf8(output.stdout).unwrap();
        let words = line.split_whitespace().find_map(|word| word.strip_prefix("state="));
        words.unwrap_or_default().to_owned()
    }
}

/// `cbt-util`, and a folder with logs.
struct Logs<'a>(&'a Daemon);

impl<'a> Logs<'a> {
    fn new(daemon: &'a Daemon) -> Logs<'a> {
        fs::create_dir_all(daemon.dir.path().join("logs/folder")).unwrap();
        Logs(daemon)
    }

    fn call(&self, line: &str) -> Output {
        let mut command = Command::new(self.0.dir.path().join("cbt-util"));
        command.args(line.split(' ')).current_dir(self.0.dir.path().join("logs")).output().unwrap()
    }

    fn says(&self, line: &str, expected: &str) {
        let output = self.call(line);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (String::from_utf8(output.stdout).unwrap().as_str(), errors.as_str()),
            (expected, "")
        );
        assert!(output.status.success(), "{line}");
    }

    fn fails(&self, line: &str, errno: i32) {
        let output = self.call(line);
        assert_eq!(output.status.code(), Some(errno), "{line}");
        assert!(output.stdout.is_empty() && output.stderr.starts_with(b"cbt-util: "), "{line}");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.dir.path().join("logs").join(name)
    }

    /// A consistent log of the tests' images.
    fn make(&self, name: &str) -> String {
        self.says(&format!("create -n {name} -s {}", 4 * MIB), "");
        self.says(&format!("set -n {name} -f 1"), "");
        self.path(name).display().to_string()
    }

    fn bits(&self, name: &str) -> Vec<usize> {
        let bits = self.call(&format!("get -n {name} -b")).stdout;
        (0..bits.len() * 8).filter(|bit| bits[bit / 8] >> (bit % 8) & 1 != 0).collect()
    }

    fn is_consistent(&self, name: &str) -> bool {
        self.call(&format!("get -n {name} -f")).stdout == b"1\n"
    }
}

#[test]
fn cbt_util_makes_reads_changes_and_joins_logs() {
    let daemon = Daemon::new();
    let logs = Logs::new(&daemon);
    let [one, two] =
        ["8d4b5c62-9c1e-4f0e-a2c5-000000000001", "8d4b5c62-9c1e-4f0e-a2c5-000000000002"];
    logs.says(&format!("create -n log -s {}", 64 * MIB), "");
    assert_eq!(fs::metadata(logs.path("log")).unwrap().len(), 176);
    logs.says("get -n log -s", "67108864\n");
    logs.says("get -n log -p", "00000000-0000-0000-0000-000000000000\n");
    logs.says("get -n log -f", "0\n");
    logs.says(&format!("set -n log -p {one} -c {two} -f 1"), "");
    logs.says("get -n log -p", &format!("{one}\n"));
    logs.says("get -n log -c", &format!("{two}\n"));
    logs.says("get -n log -f", "1\n");
    assert_eq!(logs.call("get -n log -b").stdout, [0; 128]);
    // Bits of a parent and a larger child.
    let mut bytes = fs::read(logs.path("log")).unwrap();
    bytes[48 + 5] = 0x81;
    fs::write(logs.path("log"), &bytes).unwrap();
    logs.says(&format!("create -n child -s {}", 128 * MIB), "");
    logs.says("coalesce -p log -c child", "");
    assert_eq!(logs.bits("child"), [40, 47]);
    logs.fails("coalesce -p child -c log", 22);
    logs.says(&format!("set -n log -s {}", 128 * MIB), "");
    assert_eq!(
        (logs.bits("log"), fs::metadata(logs.path("log")).unwrap().len()),
        (vec![40, 47], 304)
    );
    logs.fails(&format!("set -n log -s {}", 64 * MIB), 22);
    // `create` overwrites a log.
    logs.says(&format!("create -n log -s {MIB}"), "");
    assert_eq!(fs::metadata(logs.path("log")).unwrap().len(), 50);
    for (line, errno) in [
        ("get -n none -p", 2),
        ("set -n none -f 1", 2),
        ("create -n /no/such/folder -s 1", 2),
        ("create -n folder -s 1", 21),
        ("get -n folder -p", 21),
        ("get -n log", 22),
        ("get -n log -p -c", 22),
        ("get -p", 22),
        ("set -n log", 22),
        ("set -n log -f 2", 22),
        ("set -n log -p word", 22),
        ("create -n log", 22),
        ("create -n log -s 0", 22),
        ("create -n log -s 1T", 22),
        ("coalesce -p log", 22),
        ("get -n log -x", 22),
        ("drop -n log", 22),
    ] {
        logs.fails(line, errno);
    }
    for garbage in [&[7; 47][..], &[7; 100], &bytes[..100], &[0; 64], b""] {
        fs::write(logs.path("garbage"), garbage).unwrap();
        for verb in ["get -n garbage -b", "set -n garbage -f 1", "coalesce -p garbage -c child"] {
            logs.fails(verb, 22);
        }
    }
    logs.fails("coalesce -p child -c garbage", 22);
    assert!(logs.call("set -h").status.success());
}

#[test]
fn writes_are_in_the_log_which_is_consistent_again_at_the_close() {
    let daemon = Daemon::new();
    let (logs, tap) = (Logs::new(&daemon), Tap::new(&daemon, 0));
    let [log, other] = ["log", "other"].map(|name| logs.make(name));
    tap.open(&format!("-C {log}"));
    assert!(!logs.is_consistent("log"), "a power cut now would lose changes");
    let mut client = tap.client();
    client.write(0, &[1; 4096]);
    client.write(MIB, &[2; 2 * BLOCK as usize]);
    client.read(3 * MIB, 4096);
    let zeros = client.call(command::WRITE_ZEROES, 0, 2 * MIB, BLOCK as u32, &[]);
    assert_eq!(zeros.error, 0);
    // The storage manager reads a log in a pause, and may name another one for what follows.
    tap.says("pause", "");
    assert_eq!((logs.bits("log"), logs.is_consistent("log")), (vec![0, 16, 17, 32], true));
    tap.says("unpause", &format!("-c {other}"));
    client.write(4 * MIB - 512, &[3; 512]);
    tap.says("pause", "");
    assert_eq!((logs.bits("other"), logs.is_consistent("other")), (vec![63], true));
    tap.says("unpause", "");
    client.write(BLOCK, &[4; 512]);
    tap.says("pause", "");
    tap.says("unpause", &format!("-c {other}"));
    client.write(0, &[5; 512]);
    drop(client);
    tap.says("close", "");
    assert_eq!((logs.bits("log"), logs.bits("other")), (vec![0, 16, 17, 32], vec![0, 63]));
    assert!(logs.is_consistent("log") && logs.is_consistent("other"));
    // SM marks a log itself before it opens the disk: that is left as it is.
    logs.says("set -n log -f 0", "");
    tap.open(&format!("-C {log}"));
    tap.says("close", "");
    assert!(!logs.is_consistent("log"));
    // A disk that is only read changes no log.
    tap.open(&format!("-R -C {other}"));
    assert!(logs.is_consistent("other"));
    tap.says("close", "");
    tap.says("detach", "");
}

#[test]
fn changes_are_in_the_log_after_the_death_of_worker_and_daemon() {
    let mut daemon = Daemon::new();
    let log = Logs::new(&daemon).make("log");
    let (mut client, pid, image) = {
        let tap = Tap::new(&daemon, 0);
        tap.open(&format!("-C {log}"));
        (tap.client(), tap.pid, tap.image)
    };
    client.write(0, &[1; 512]);
    kill(worker(&image).unwrap());
    client.write(BLOCK, &[2; 512]);
    daemon.restart();
    client.write(2 * BLOCK, &[3; 512]);
    kill(worker(&image).unwrap());
    client.write(3 * BLOCK, &[4; 512]);
    let logs = Logs::new(&daemon);
    assert!(!logs.is_consistent("log") && logs.bits("log").is_empty());
    drop(client);
    daemon.says(&format!("close -p {pid} -m 0"), "");
    assert_eq!((logs.bits("log"), logs.is_consistent("log")), (vec![0, 1, 2, 3], true));
    // The tap's process is killed, and the tap is freed.
    daemon.says(&format!("open -p {pid} -m 0 -a vhd:{image} -C {log}"), "");
    daemon.client(pid, 0).write(9 * BLOCK, &[5; 512]);
    daemon.says(&format!("destroy -p {pid} -m 0"), "");
    assert_eq!(logs.bits("log"), [0, 1, 2, 3, 9]);
}

#[test]
fn a_log_that_does_not_fit_is_refused_and_the_tap_opens_without_it() {
    let daemon = Daemon::new();
    let (logs, tap, second) = (Logs::new(&daemon), Tap::new(&daemon, 0), Tap::new(&daemon, 1));
    let log = logs.make("log");
    let folder = logs.path("").display().to_string();
    logs.says(&format!("create -n smaller -s {MIB}"), "");
    fs::write(logs.path("short"), [0; 20]).unwrap();
    fs::write(logs.path("garbage"), [7; 4096]).unwrap();
    fs::write(logs.path("cut"), &fs::read(&log).unwrap()[..52]).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        logs.path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let open =
        |tap: &Tap<'_>, log: &str| tap.line("open", &format!("-a vhd:{} -C {log}", tap.image));
    for (name, errno) in [
        ("none", 2),
        ("", 21),
        ("short", 22),
        ("garbage", 22),
        ("cut", 22),
        ("pipe", 22),
        ("smaller", 22),
    ] {
        daemon.fails(&open(&tap, &format!("{folder}/{name}")), errno);
    }
    assert_eq!(fs::read(logs.path("garbage")).unwrap(), [7; 4096]);
    tap.open(&format!("-C {log}"));
    // By any name.
    std::os::unix::fs::symlink(&log, logs.path("link")).unwrap();
    daemon.fails(&open(&second, &format!("{folder}/link")), 16);
    second.open("");
    // A log that becomes unreadable while the disk is open: the close fails until it is there.
    let mut client = tap.client();
    client.write(0, &[1; 512]);
    fs::rename(&log, logs.path("away")).unwrap();
    fs::write(&log, [7; 10]).unwrap();
    daemon.fails(&tap.line("pause", ""), 22);
    client.write(BLOCK, &[2; 512]);
    fs::rename(logs.path("away"), &log).unwrap();
    tap.says("pause", "");
    assert_eq!((logs.bits("log"), logs.is_consistent("log")), (vec![0, 1], true));
    // The verbs need no log that was removed.
    tap.says("unpause", &format!("-c {log}"));
    client.write(0, &[3; 512]);
    fs::remove_file(&log).unwrap();
    drop(client);
    for tap in [&tap, &second] {
        tap.says("close", "");
        tap.says("detach", "");
    }
}

/// Passes a descriptor as XAPI does.
fn pass(daemon: &Daemon, socket: &str, name: &str, fd: BorrowedFd<'_>) {
    let stream = UnixStream::connect(daemon.blktap().join(socket)).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let text = [IoSlice::new(name.as_bytes())];
    sendmsg(&stream, &text, &mut control, SendFlags::empty()).unwrap();
}

/// Passes the sender's end.
fn pass_target(tap: &Tap<'_>, name: &str, fd: impl AsFd) {
    let passed = tap.daemon.dir.path().join("run/passed");
    let names = || -> BTreeSet<_> {
        fs::read_dir(&passed)
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name())
            .collect()
    };
    let before = names();
    pass(tap.daemon, &format!("nbdclient{}", tap.pid), name, fd.as_fd());
    // Earlier ones may go at the same time.
    wait_until("its process", || names().difference(&before).next().is_some());
}

/// Two ends of a connection, as XAPI makes it between hosts.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Connects two taps: the first one's writes can go to the second one. Returns the connection.
fn connect(source: &Tap<'_>, target: &Tap<'_>, name: &str) -> TcpStream {
    let (near, far) = connection();
    let server = format!("nbdserver{}.{}", target.pid, target.minor);
    pass(target.daemon, &server, name, far.as_fd());
    pass_target(source, name, &near);
    near
}

fn turn(tap: &Tap<'_>, more: &str) {
    tap.says("pause", "");
    tap.says("unpause", more);
}

#[test]
fn writes_go_to_both_disks_until_the_target_is_lost_and_the_guest_goes_on() {
    let mut daemon = Daemon::new();
    let connection = {
        let (source, target) = (Tap::new(&daemon, 0), Tap::new(&daemon, 1));
        source.open("");
        target.open("");
        let mut guest = source.client();
        guest.write(0, &[1; 4096]);
        let connection = connect(&source, &target, "dp-1");
        turn(&source, "-2 nbd:dp-1");
        guest.write(MIB, &[2; 4096]);
        guest.write(3 * MIB - 512, &[3; 2048]);
        let zeros = guest.call(command::WRITE_ZEROES, 0, MIB, 512, &[]);
        assert_eq!(zeros.error, 0);
        guest.flush();
        let mut other = target.client();
        assert_eq!(other.read(MIB, 1024), [[0; 512], [2; 512]].concat());
        assert_eq!(other.read(3 * MIB - 512, 2048), [3; 2048]);
        // Nothing is copied: XAPI does that.
        assert_eq!(other.read(0, 4096), [0; 4096]);
        let stats = source.stats();
        assert_eq!(
            (&stats["nbd_mirror_failed"], &stats["reqs_outstanding"]),
            (&0.into(), &0.into())
        );
        // It stays over a pause without a word of it.
        turn(&source, "");
        guest.write(MIB, &[4; 4096]);
        assert_eq!(other.read(MIB, 4096), [4; 4096]);
        assert!(!source.mirror_failed());
        connection
    };
    // Another daemon.
    daemon.restart();
    let rows = String::from_utf8(daemon.tap_ctl("list").stdout).unwrap();
    let pid = |minor: u32| {
        let row = rows.lines().find(|row| row.contains(&format!("minor={minor} "))).unwrap();
        row.strip_prefix("pid=").unwrap().split(' ').next().unwrap().parse().unwrap()
    };
    let tap = |minor: u32| Tap { daemon: &daemon, pid: pid(minor), minor, image: String::new() };
    let (source, target) = (tap(0), tap(1));
    let mut guest = source.client();
    guest.write(2 * MIB, &[5; 512]);
    assert_eq!(target.client().read(2 * MIB, 512), [5; 512]);
    assert!(!source.mirror_failed());
    // The connection is lost.
    connection.shutdown(Shutdown::Both).unwrap();
    guest.write(2 * MIB, &[6; 512]);
    wait_until("the failure", || source.mirror_failed());
    guest.write(2 * MIB, &[7; 512]);
    assert_eq!(guest.read(2 * MIB, 512), [7; 512]);
    assert_eq!(target.client().read(2 * MIB, 512), [5; 512]);
    turn(&source, "");
    assert!(source.mirror_failed(), "what was lost is not forgotten");
    turn(&source, "-2 null");
    assert!(!source.mirror_failed());
    guest.write(0, &[8; 512]);
    turn(&source, "-2 nbd:nobody");
    assert_eq!((source.state().as_str(), source.mirror_failed()), ("0", true));
    guest.write(0, &[9; 512]);
    assert_eq!(guest.read(0, 512), [9; 512]);
    for line in ["-2 nbd:", "-2 vhd:/a"] {
        source.says("pause", "");
        let errno = if line.ends_with('/') || line.ends_with('a') { 95 } else { 22 };
        daemon.fails(&source.line("unpause", line), errno);
        source.says("unpause", "");
    }
    drop(guest);
    for tap in [source, target] {
        tap.says("close", "");
        tap.says("detach", "");
    }
    wait_until("no socket", || !daemon.blktap().join(format!("nbdclient{}", pid(0))).exists());
}

#[test]
fn a_mirror_ends_with_its_worker_and_the_guest_goes_on() {
    let daemon = Daemon::new();
    let (source, target) = (Tap::new(&daemon, 0), Tap::new(&daemon, 1));
    target.open("");
    let connection = connect(&source, &target, "dp");
    source.open("-2 nbd:dp");
    let mut guest = source.client();
    guest.write(0, &[1; 512]);
    assert_eq!(target.client().read(0, 512), [1; 512]);
    kill(worker(&source.image).unwrap());
    guest.write(0, &[2; 512]);
    assert_eq!(guest.read(0, 512), [2; 512]);
    assert!(source.mirror_failed());
    // The target's worker may be killed: its clients go on.
    turn(&source, "-2 null");
    drop(connection);
    let _connection = connect(&source, &target, "dp-2");
    turn(&source, "-2 nbd:dp-2");
    kill(worker(&target.image).unwrap());
    guest.write(0, &[3; 512]);
    assert_eq!(target.client().read(0, 512), [3; 512]);
    assert!(!source.mirror_failed());
    drop(guest);
    source.says("close", "");
    target.says("close", "-f");
}

/// A server that sends these bytes, and nothing more until it is dropped.
fn server(bytes: &[u8]) -> (TcpStream, TcpStream) {
    let (near, mut far) = connection();
    far.write_all(bytes).unwrap();
    (near, far)
}

#[test]
fn targets_that_do_not_fit_are_failed_mirrors_and_nothing_more() {
    let daemon = Daemon::new();
    let (source, small) = (Tap::new(&daemon, 0), Tap::new(&daemon, 1));
    source.open("");
    let mut guest = source.client();
    let mut fails = |name: &str| {
        turn(&source, &format!("-2 nbd:{name}"));
        guest.write(0, &[1; 512]);
        assert_eq!((source.state().as_str(), source.mirror_failed()), ("0", true), "{name}");
        turn(&source, "-2 null");
    };
    // It is for reading only.
    small.open("-R");
    let _first = connect(&source, &small, "read-only");
    fails("read-only");
    let _smaller = {
        let (near, far) = server(&greeting(MIB));
        pass_target(&source, "smaller", &near);
        far
    };
    fails("smaller");
    let _odd = {
        let (near, far) = server(&greeting(4 * MIB + 100));
        pass_target(&source, "answers-nothing-good", &near);
        let mut far = far;
        // A reply without a request.
        far.write_all(&[7; 16]).unwrap();
        far
    };
    fails("answers-nothing-good");
    for (name, bytes) in [("magic", [7; GREETING_BYTES].to_vec()), ("gone", vec![7; 20])] {
        let (near, far) = server(&bytes);
        let socket = format!("nbdclient{}", source.pid);
        pass(&daemon, &socket, name, near.as_fd());
        drop(far);
        fails(name);
    }
    // A descriptor that is no connection.
    let file = fs::File::open("/dev/zero").unwrap();
    pass(&daemon, &format!("nbdclient{}", source.pid), "file", file.as_fd());
    fails("file");
    pass(&daemon, &format!("nbdserver{}.1", small.pid), "file", file.as_fd());
    // No descriptor, no message, and many of both.
    for _ in 0..1000 {
        let mut stream =
            UnixStream::connect(daemon.blktap().join(format!("nbdclient{}", source.pid))).unwrap();
        stream.write_all(b"none").unwrap();
    }
    let (near, _far) = connection();
    for count in 0..1000 {
        let name = format!("many-{count}");
        pass(&daemon, &format!("nbdclient{}", source.pid), &name, near.as_fd());
    }
    let passed = daemon.dir.path().join("run/passed");
    wait_until("some of them", || fs::read_dir(&passed).unwrap().count() > 0);
    guest.write(0, &[2; 512]);
    assert!(fs::read_dir(&passed).unwrap().count() <= 10);
    assert!(daemon.tap_ctl("list").status.success());
    drop(guest);
    for tap in [&source, &small] {
        tap.says("close", "");
        tap.says("detach", "");
    }
    wait_until("no process", || fs::read_dir(&passed).unwrap().count() == 0);
}

#[test]
fn a_tap_is_served_on_a_passed_connection_with_both_handshakes() {
    let daemon = Daemon::new();
    let tap = Tap::new(&daemon, 0);
    tap.open("");
    tap.client().write(0, &[5; 512]);
    let (mut near, far) = UnixStream::pair().unwrap();
    pass(&daemon, &format!("nbdserver{}.0", tap.pid), "x", far.as_fd());
    drop(far);
    let mut told = [0; GREETING_BYTES];
    near.read_exact(&mut told).unwrap();
    assert_eq!((&told[..24], told[27] & 1), (&greeting(4 * MIB)[..24], 1));
    near.write_all(&ferrite_testkit::nbd::request(command::READ, 0, 77, 0, 512)).unwrap();
    let mut reply = [0; 16 + 512];
    near.read_exact(&mut reply).unwrap();
    assert_eq!((&reply[8..16], &reply[16..]), (&77u64.to_be_bytes()[..], &[5; 512][..]));
    let (near, far) = UnixStream::pair().unwrap();
    pass(&daemon, &format!("nbdserver-new{}.0", tap.pid), "x", far.as_fd());
    drop(far);
    let mut client = Client::over(near);
    client.go(false);
    assert_eq!(client.read(0, 512), [5; 512]);
    drop(client);
    tap.says("close", "");
    tap.says("detach", "");
}
