//! Exports of other servers as disks: nbdkit, qemu-nbd, and our own.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ferrite_testkit::places;
use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::pages;

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

fn ferrite(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG");
    command
}

#[track_caller]
fn ok(args: &[&str]) -> String {
    let output = ferrite(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(args: &[&str]) -> String {
    let output = ferrite(args).output().unwrap();
    assert!(!output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A process that is killed when this is dropped.
struct Process(Child);

impl Process {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder with a server's socket.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: places::dir_in_memory() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The names of its files.
    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.dir.path()).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn uri(&self, socket: &str, more: &str) -> String {
        format!("nbd+unix:///?socket={}{more}", self.text(socket))
    }

    /// Starts nbdkit at `socket`, and waits until it listens. None: it is not installed.
    fn nbdkit(&self, socket: &str, args: &[&str]) -> Option<Process> {
        let path = self.text(socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix", &path]).args(args);
        self.start(command, "nbdkit", socket)
    }

    /// Starts qemu-nbd on this socket, for any number of clients.
    fn qemu_nbd(&self, socket: &str, args: &[&str]) -> Option<Process> {
        let path = self.text(socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared", "8", "--socket", &path]).args(args);
        self.start(command, "qemu-nbd", socket)
    }

    fn start(&self, mut command: Command, program: &str, socket: &str) -> Option<Process> {
        installed(program, Command::new(program).arg("--version").output())?;
        let _ = fs::remove_file(self.path(socket));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let process = Process(child);
        let end = Instant::now() + PATIENCE;
        while std::os::unix::net::UnixStream::connect(self.path(socket)).is_err() {
            assert!(Instant::now() < end, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(process)
    }

    /// Exports disks by our own server, which writes its log to `NAME.log`.
    fn export(&self, socket: &str, args: &[&str]) -> Process {
        let path = self.text(socket);
        let mut command = ferrite(&["export", "nbd", "--socket", &path]);
        let mut child = command.args(args).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening at") {
            assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        let mut file = fs::File::create(self.path(&format!("{socket}.log"))).unwrap();
        std::thread::spawn(move || std::io::copy(&mut log, &mut file));
        Process(child)
    }

    /// What an export has logged since it listens.
    fn log(&self, socket: &str) -> String {
        fs::read_to_string(self.path(&format!("{socket}.log"))).unwrap_or_default()
    }

    #[track_caller]
    fn wait_for(&self, socket: &str, text: &str) {
        let end = Instant::now() + PATIENCE;
        while !self.log(socket).contains(text) {
            assert!(Instant::now() < end, "no {text:?} in {}", self.log(socket));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A raw image with data, zeros, and data again at its end.
    fn source(&self, name: &str, bytes: usize) -> String {
        let mut all = vec![0; bytes];
        for (i, byte) in all.iter_mut().enumerate() {
            if i < MIB || i >= bytes - 4096 {
                *byte = (i / 512 * 7 + i) as u8 | 1;
            }
        }
        fs::write(self.path(name), all).unwrap();
        self.text(name)
    }
}

/// A client of an export that has done the first part of its script, and waits.
struct Client(Child);

impl Client {
    /// It does the second part.
    fn go_on(&self, place: &Place) {
        fs::write(place.path("go"), "").unwrap();
    }

    fn succeeds(self) {
        let output = self.0.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Place {
    /// Starts a client of an export, and waits until it has done `first`. None: there is no nbdsh.
    fn client(&self, uri: &str, first: &str, then: &str) -> Option<Client> {
        installed("nbdsh", Command::new("/usr/bin/nbdsh").arg("--version").output())?;
        let (ready, go) = (self.text("ready"), self.text("go"));
        let script = format!(
            "import os, time\nh.connect_uri('{uri}')\n{first}\nopen('{ready}', 'w').close()\n\
             while not os.path.exists('{go}'): time.sleep(0.01)\n{then}"
        );
        let mut command = Command::new("/usr/bin/nbdsh");
        command.env("PATH", "/usr/bin:/bin").args(["-c", &script]).stderr(Stdio::piped());
        let client = Client(command.spawn().unwrap());
        let end = Instant::now() + PATIENCE;
        while !self.path("ready").exists() {
            assert!(Instant::now() < end, "the client does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(client)
    }
}

/// Runs a script of nbdsh with `h` connected to the socket.
fn nbdsh(uri: &str, script: &str) -> Option<Output> {
    let script = format!("h.connect_uri('{uri}')\n{script}");
    let mut command = Command::new("/usr/bin/nbdsh");
    command.env("PATH", "/usr/bin:/bin").args(["-c", &script]);
    installed("nbdsh", command.output())
}

#[track_caller]
fn nbdsh_ok(uri: &str, script: &str) {
    let Some(output) = nbdsh(uri, script) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// fio writes at random and verifies. None: it is not installed.
fn fio(uri: &str, more: &[&str]) -> Option<Command> {
    installed("fio", Command::new("fio").arg("--version").output())?;
    let mut command = Command::new("fio");
    command.args(["--name=v", "--ioengine=nbd", "--rw=randrw", "--verify=crc32c", "--bs=4k"]);
    command.args(["--iodepth=16", "--verify_backlog=64", "--output-format=terse"]);
    command.arg(format!("--uri={uri}")).args(more);
    command.current_dir("/tmp").stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(command)
}

#[track_caller]
fn verified(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("verify"), "{output:?}");
}

#[test]
fn disks_are_copied_to_exports_and_from_them_and_are_the_same() {
    let place = Place::new();
    let source = place.source("source.img", 16 * MIB);
    let Some(_memory) = place.nbdkit("memory", &["memory", "16M"]) else { return };
    let memory = place.uri("memory", "");
    let why = refused(&["image", "convert", &source, &memory]);
    assert!(why.contains("add -n"), "{why}");
    ok(&["image", "convert", "-n", &source, &memory]);
    ok(&["image", "compare", &source, &memory]);
    for name in ["copy.img", "copy.vhd", "copy.qcow2"] {
        let copy = place.text(name);
        ok(&["image", "convert", &memory, &copy]);
        ok(&["image", "compare", &copy, &source]);
    }
    // A part of a block differs now.
    nbdsh_ok(&memory, "h.pwrite(b'x' * 512, 3 * 1024 * 1024)");
    let output = ferrite(&["image", "compare", &source, &memory]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let info = ok(&["image", "info", "--json", &memory]);
    assert!(info.contains("16777216") && info.contains("\"nbd\""), "{info}");
}

#[test]
fn what_a_server_says_to_be_a_hole_is_not_read_from_it() {
    let place = Place::new();
    let source = place.source("source.img", 64 * MIB);
    let qcow2 = place.text("source.qcow2");
    ok(&["image", "convert", &source, &qcow2]);
    let Some(_server) = place.qemu_nbd("qemu", &["--read-only", "--format=qcow2", &qcow2]) else {
        return;
    };
    let stats = place.text("stats");
    let upstream = place.text("qemu");
    let through =
        ["--filter=stats", "nbd", &format!("socket={upstream}"), &format!("statsfile={stats}")];
    let Some(mut counted) = place.nbdkit("counted", &through) else { return };
    let copy = place.text("copy.img");
    ok(&["image", "convert", &place.uri("counted", ""), &copy]);
    ok(&["image", "compare", &copy, &source]);
    assert!(fs::metadata(&copy).unwrap().blocks() * 512 < 4 * MIB as u64);
    counted.signal(Signal::TERM);
    counted.0.wait().unwrap();
    let stats = fs::read_to_string(&stats).unwrap();
    let read = stats.lines().find(|line| line.starts_with("read:")).unwrap();
    // It has 1 MiB and 4 KiB of data in clusters of 64 KiB.
    assert!(!read.contains("GiB") && read.contains("MiB"), "{read}");
    let mib: f64 = read.split_whitespace().rev().find_map(|word| word.parse().ok()).unwrap_or(0.0);
    assert!(mib < 64.0, "{read}");
}

#[test]
fn a_name_or_a_server_that_is_wrong_is_told_in_a_line_with_the_cure() {
    let place = Place::new();
    let image = place.source("source.img", 2 * MIB);
    let (socket, odd, coarse) = (place.text("none"), place.text("odd"), place.text("coarse"));
    let info = |uri: &str| refused(&["image", "info", uri]);
    let why = info(&format!("nbd+unix:///?socket={socket}"));
    assert!(why.contains("there is no socket") && why.contains("start the server"), "{why}");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let why = info(&format!("nbd+unix:///?socket={socket}"));
    assert!(why.contains("no server listens"), "{why}");
    let why = info("nbd://127.0.0.1:1/?plain=yes");
    assert!(why.contains("no server listens at 127.0.0.1, port 1"), "{why}");
    let why = info("nbd://127.0.0.1:1/");
    assert!(why.contains("nbds://") && why.contains("plain=yes"), "{why}");
    let Some(_named) = place.qemu_nbd("named", &["--format=raw", "-x", "a", "-r", &image]) else {
        return;
    };
    let named = place.text("named");
    let why = info(&format!("nbd+unix:///b?socket={named}"));
    assert!(why.contains("no such export") && why.contains("\"b\""), "{why}");
    let uri = format!("nbd+unix:///a?socket={named}");
    ok(&["image", "info", &uri]);
    let why = refused(&["image", "convert", "-n", &image, &uri]);
    assert!(why.contains("read-only"), "{why}");
    let Some(_odd) = place.nbdkit("odd", &["memory", "1000"]) else { return };
    let why = info(&format!("nbd+unix:///?socket={odd}"));
    assert!(why.contains("1000 bytes") && why.contains("round-up"), "{why}");
    let policy = [
        "--filter=blocksize-policy",
        "memory",
        "1M",
        "blocksize-minimum=64K",
        "blocksize-preferred=64K",
    ];
    let Some(_coarse) = place.nbdkit("coarse", &policy) else { return };
    let why = info(&format!("nbd+unix:///?socket={coarse}"));
    assert!(why.contains("smallest block is 65536") && why.contains("--filter=blocksize"), "{why}");
}

#[test]
fn a_server_with_large_blocks_delays_and_short_transfers_serves_a_verified_disk() {
    let place = Place::new();
    let filters = ["--filter=delay", "--filter=blocksize-policy"];
    let settings =
        ["rdelay=1ms", "wdelay=2ms", "blocksize-minimum=4096", "blocksize-maximum=65536"];
    let strict = "blocksize-error-policy=error";
    let args = [&filters[..], &["memory", "32M"], &settings, &[strict]].concat();
    let Some(_server) = place.nbdkit("slow", &args) else { return };
    let _export = place.export("out", &[&format!("d={}", place.uri("slow", ""))]);
    let out = place.uri("out", "");
    let Some(mut load) = fio(&out, &["--size=16M", "--bsrange=512-256k", "--bs_unaligned=0"])
    else {
        return;
    };
    verified(&load.output().unwrap());
}

#[test]
fn a_guests_data_survive_a_server_that_is_killed_and_started_again() {
    let place = Place::new();
    let disk = place.text("disk.img");
    fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let serve = || place.nbdkit("kit", &["file", &disk]);
    let Some(mut server) = serve() else { return };
    let uri = place.uri("kit", "&drain_s=0");
    let _export = place.export("out", &[&format!("d={uri}")]);
    let load = fio(&place.uri("out", ""), &["--size=64M", "--time_based", "--runtime=6"]);
    let Some(mut load) = load else { return };
    let load = load.spawn().unwrap();
    for _ in 0..4 {
        std::thread::sleep(Duration::from_secs(1));
        server.kill();
        std::thread::sleep(Duration::from_millis(200));
        server = serve().unwrap();
    }
    verified(&load.wait_with_output().unwrap());
    assert!(place.log("out").matches("connected again").count() >= 3, "{}", place.log("out"));
}

#[test]
fn a_stopped_server_is_given_up_after_its_deadline_and_requests_go_on_when_it_is_back() {
    let place = Place::new();
    let Some(server) = place.nbdkit("kit", &["memory", "16M"]) else { return };
    let uri = place.uri("kit", "&deadline_s=1&drain_s=0");
    let _export = place.export("out", &[&format!("d={uri}")]);
    let out = place.uri("out", "");
    // The client stays, and with it the connection to the server that it reads by.
    let client =
        place.client(&out, "h.pwrite(b'a' * 4096, 0)", "assert h.pread(4096, 0) == b'a' * 4096");
    let Some(client) = client else { return };
    server.signal(Signal::STOP);
    client.go_on(&place);
    place.wait_for("out", "did not answer a request in time");
    server.signal(Signal::CONT);
    client.succeeds();
}

#[test]
fn requests_fail_when_a_server_stays_away_and_succeed_when_it_is_back() {
    let place = Place::new();
    let disk = place.text("disk.img");
    fs::write(&disk, vec![7; MIB]).unwrap();
    let serve = || place.nbdkit("kit", &["file", &disk]);
    let Some(mut server) = serve() else { return };
    let out = place.uri("out", "");
    let uri = place.uri("kit", "&reconnect_s=1&drain_s=0");
    let _export = place.export("out", &[&format!("d={uri}")]);
    nbdsh_ok(&out, "assert h.pread(512, 0) == b'\\x07' * 512");
    server.kill();
    let failed = nbdsh(&out, "h.pread(512, 0)").unwrap();
    assert!(!failed.status.success() && place.log("out").contains("no connection for 1 s"));
    server = serve().unwrap();
    let end = Instant::now() + PATIENCE;
    while !nbdsh(&out, "h.pread(512, 0)").unwrap().status.success() {
        assert!(Instant::now() < end, "{}", place.log("out"));
    }
    drop(server);
}

#[test]
fn an_export_that_has_another_size_after_a_reconnection_is_another_disk() {
    let place = Place::new();
    let disk = place.text("disk.img");
    fs::write(&disk, vec![7; MIB]).unwrap();
    let serve = || place.nbdkit("kit", &["file", &disk]);
    let Some(mut server) = serve() else { return };
    let _export = place.export("out", &[&format!("d={}", place.uri("kit", "&drain_s=0"))]);
    let out = place.uri("out", "");
    // The client is there all the time: its session is the one that connects again.
    let reading = "assert h.pread(512, 0) == b'\\x07' * 512";
    nbdsh_ok(&out, reading);
    server.kill();
    fs::File::options().write(true).open(&disk).unwrap().set_len(2 << 20).unwrap();
    server = serve().unwrap();
    assert!(!nbdsh(&out, reading).unwrap().status.success());
    // The log is written beside the answers.
    let end = Instant::now() + PATIENCE;
    while !place.log("out").contains("2097152 bytes, and had 1048576") {
        assert!(Instant::now() < end, "{}", place.log("out"));
    }
    server.kill();
    fs::File::options().write(true).open(&disk).unwrap().set_len(MIB as u64).unwrap();
    server = serve().unwrap();
    assert!(!nbdsh(&out, reading).unwrap().status.success(), "it stays failed");
    drop(server);
}

/// A server whose first write of all is held for three seconds, and whose later connections are not.
fn holding_server(place: &Place, socket: &str) -> Option<Process> {
    let disk = place.text("held.img");
    fs::File::create(&disk).unwrap().set_len(MIB as u64).unwrap();
    let once = place.text("once");
    let write = format!(
        "pwrite=t=$(mktemp {disk}.XXXXXX); cat > $t; if mkdir {once} 2>/dev/null; then sleep 3; fi; \
         dd of={disk} if=$t bs=64K seek=$4 oflag=seek_bytes conv=notrunc status=none; rm $t"
    );
    let read =
        format!("pread=dd if={disk} skip=$4 count=$3 iflag=count_bytes,skip_bytes status=none");
    place.nbdkit(
        socket,
        &[
            "eval",
            "get_size=echo 1M",
            "thread_model=echo parallel",
            "can_write=exit 0",
            "can_multi_conn=exit 0",
            &write,
            &read,
        ],
    )
}

/// A is written, its connection is cut, A is written again and then B: what is there in the end.
fn after_a_held_write(place: &Place, settings: &str) -> Option<String> {
    let _server = holding_server(place, "kit")?;
    let _export = place.export("out", &[&format!("d={}", place.uri("kit", settings))]);
    let out = place.uri("out", "");
    nbdsh_ok(&out, "h.pwrite(b'A' * 512, 0)\nh.pwrite(b'B' * 512, 0)");
    // Each write has a file while it is under way.
    let is_under_way = || place.names().iter().any(|name| name.starts_with("held.img."));
    wait_until("the end of the held write", || !is_under_way());
    let held = fs::read(place.path("held.img")).unwrap();
    Some(String::from_utf8_lossy(&held[..1]).into_owned())
}

#[test]
fn a_write_that_an_old_connection_holds_comes_back_only_where_nobody_waits_for_it() {
    // The write is held for three seconds, and the server is given up after one.
    let Some(last) = after_a_held_write(&Place::new(), "&deadline_s=1&drain_s=0") else { return };
    assert_eq!(last, "A", "this is what drain_s is there for");
    let last = after_a_held_write(&Place::new(), "&deadline_s=1&drain_s=5");
    assert_eq!(last.as_deref(), Some("B"));
}

/// A raw image's blocks are those of its first bytes.
fn first_bytes(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()[..4].to_vec()
}

#[test]
fn our_own_server_ends_what_an_old_connection_has_before_it_answers_a_new_one() {
    let place = Place::new();
    let disk = place.text("disk.img");
    fs::write(&disk, vec![0; MIB]).unwrap();
    let inner = place.export("inner", &[&disk]);
    let uri = place.uri("inner", "&deadline_s=1&drain_s=86400&session=guest-1");
    let _outer = place.export("outer", &[&format!("d={uri}")]);
    let outer = place.uri("outer", "");
    let then = "h.pwrite(b'B' * 512, 0)\nh.pwrite(b'C' * 512, 0)";
    let client = place.client(&outer, "h.pwrite(b'A' * 512, 0)", then);
    let Some(client) = client else { return };
    inner.signal(Signal::STOP);
    client.go_on(&place);
    place.wait_for("outer", "did not answer a request in time");
    inner.signal(Signal::CONT);
    client.succeeds();
    assert_eq!(first_bytes(&place.path("disk.img")), b"CCCC");
    // With another's server it would have waited for the time of drain_s: a day.
    assert!(place.log("outer").contains("connected again"), "{}", place.log("outer"));
}

const PAGE: &str = include_str!("../../../../docs/access.md");

#[track_caller]
fn recipe(title: &str) {
    let (_, section) = PAGE.split_once(&format!("\n## {title}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    // The system's Python has the module of nbdsh.
    let script = pages::commands(section).replace("nbdsh -c", "/usr/bin/nbdsh -c");
    assert!(script.contains("ferrite "));
    pages::run(&format!("PATH=$(echo $PATH | cut -d: -f1):/usr/bin:/bin\n{script}"));
}

#[test]
fn the_recipe_for_several_disks_of_one_process_works() {
    recipe("Serve several disks from one process");
}

#[test]
fn the_recipe_for_a_disk_of_qemu_nbd_works() {
    if installed("qemu-nbd", Command::new("qemu-nbd").arg("--version").output()).is_some() {
        recipe("Take a disk from qemu-nbd");
    }
}

#[test]
fn the_recipe_for_a_disk_on_another_host_works() {
    if installed("nbdsh", Command::new("/usr/bin/nbdsh").arg("--version").output()).is_some() {
        recipe("Put a guest's disk on another host");
    }
}

/// Certificates of an authority for `localhost` and for a client, by the recipe of the page.
fn certificates(place: &Place) -> Option<()> {
    installed("openssl", Command::new("openssl").arg("version").output())?;
    let (_, section) = PAGE.split_once("\n### Certificates\n").unwrap();
    let script = pages::commands(section.split("\n### ").next().unwrap());
    let mut bash = Command::new("bash");
    let output = bash.args(["-eu", "-c", &script]).current_dir(place.dir.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(())
}

#[test]
fn an_export_by_tls_is_a_disk_and_its_server_is_who_it_says() {
    let place = Place::new();
    let Some(()) = certificates(&place) else { return };
    let source = place.source("source.img", 4 * MIB);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = place.text("server");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--port", &port.to_string()]);
    command.args(["--ipaddr", "127.0.0.1", "--tls=require", "--tls-verify-peer"]);
    command.args([&format!("--tls-certificates={server}"), "file", &source]);
    let Some(_) = installed("nbdkit", Command::new("nbdkit").arg("--version").output()) else {
        return;
    };
    let _kit = Process(command.stdin(Stdio::null()).spawn().unwrap());
    let end = Instant::now() + PATIENCE;
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < end, "nbdkit does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let uri = |host: &str, folder: &str| {
        format!("nbds://{host}:{port}/?tls-certificates={}", place.text(folder))
    };
    let copy = place.text("copy.qcow2");
    ok(&["image", "convert", &uri("localhost", "backup"), &copy]);
    ok(&["image", "compare", &copy, &source]);
    let _export = place.export("out", &[&format!("d={}", uri("127.0.0.1", "backup"))]);
    nbdsh_ok(
        &place.uri("out", ""),
        "h.pwrite(b'x' * 4096, 0)\nassert h.pread(4096, 0) == b'x' * 4096",
    );
    // Another name of the same host is not in the certificate.
    let why = refused(&["image", "info", &uri("127.0.0.2", "backup")]);
    assert!(why.contains("127.0.0.2") || why.contains("certificate"), "{why}");
    let plain = format!("nbd://127.0.0.1:{port}/?plain=yes");
    let why = refused(&["image", "info", &plain]);
    assert!(why.contains("encrypted") && why.contains("nbds://"), "{why}");
    fs::create_dir(place.path("strangers")).unwrap();
    let why = refused(&["image", "info", &uri("localhost", "strangers")]);
    assert!(why.contains("certificates") && why.contains("ca-cert.pem"), "{why}");
}
