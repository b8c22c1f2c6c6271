//! `ferrite disk export`: a disk of the daemon for clients of other hosts. There is no Xen here: the disk is a tap.

#[allow(dead_code, reason = "a module of several tests, not all of which use all")]
mod tls;

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::nbd::{ACK, Client, command, contexts, option};
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use tls::{Outward, Pki, ferrite};

/// A daemon with one tap of 4 MiB.
struct Daemon {
    child: Child,
    pki: Pki,
}

impl Daemon {
    fn new() -> Option<Daemon> {
        let pki = Pki::new()?;
        symlink(env!("CARGO_BIN_EXE_ferrite"), pki.path("tap-ctl")).unwrap();
        let toml = format!("state_folder = {:?}\n", pki.path("state"));
        fs::write(pki.path("ferrite.toml"), toml).unwrap();
        File::create_new(pki.path("web.raw")).unwrap().set_len(4 << 20).unwrap();
        let child = start(&pki);
        let daemon = Daemon { child, pki };
        daemon.wait();
        assert!(daemon.tap(&format!("aio:{}", daemon.pki.path("web.raw").display())));
        Some(daemon)
    }

    /// Makes a tap of an image. Returns whether that worked.
    fn tap(&self, image: &str) -> bool {
        let mut command = Command::new(self.pki.path("tap-ctl"));
        let command = command.args(["create", "-a", image, "--run-dir"]).arg(self.run());
        let output = command.output().unwrap();
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        output.status.success()
    }

    /// A place to listen that is free now.
    fn free_place(&self) -> String {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
    }

    fn run(&self) -> PathBuf {
        self.pki.path("run")
    }

    fn wait(&self) {
        wait_until("the daemon", || self.disk(&["list", "--json"]).stdout.starts_with(b"{"));
    }

    fn disk(&self, args: &[&str]) -> Output {
        let mut command = ferrite(&["disk"]);
        command.args(args).arg("--run-dir").arg(self.run()).output().unwrap()
    }

    /// Exports the disk by TLS. Returns the port.
    fn export(&self, more: &[&str]) -> u16 {
        let folder = self.pki.path("server");
        let args = ["export", "tap/0", "--listen", "127.0.0.1:0", "--tls"];
        let output = self.disk(&[&args[..], &[folder.to_str().unwrap()], more].concat());
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        said.trim().rsplit(':').next().unwrap().parse().unwrap()
    }

    #[track_caller]
    fn fails(&self, code: i32, args: &[&str], why: &str) {
        let output = self.disk(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && said.contains(why), "{args:?}: {output:?}");
    }

    /// What nbdinfo says of an export.
    fn info(&self, port: u16, name: &str, folder: &str) -> Output {
        let folder = self.pki.path(folder);
        let uri = format!("nbds://localhost:{port}/{name}?tls-certificates={}", folder.display());
        Command::new("nbdinfo").args(["--json", &uri]).output().unwrap()
    }

    /// Kills the disk's worker.
    fn kill_worker(&self) {
        let run = self.run();
        let run = run.as_os_str().as_encoded_bytes();
        let has = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|w| w == part);
        let is_worker = |process: &std::path::Path| {
            let words = fs::read(process.join("cmdline")).unwrap_or_default();
            has(&words, b"\0worker\0") && has(&words, run)
        };
        let all = fs::read_dir("/proc").unwrap().flatten();
        let worker = all.map(|process| process.path()).find(|process| is_worker(process));
        let worker = worker.expect("a worker");
        let pid: i32 = worker.file_name().unwrap().to_str().unwrap().parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }

    #[track_caller]
    fn serves(&self, port: u16, name: &str) -> String {
        let output = self.info(port, name, "client");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains("4194304"), "{output:?}");
        said
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.disk(&["unexport", "tap/0"]);
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Keepers and exporters live on.
        let run = self.run();
        let run = run.as_os_str().as_encoded_bytes();
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            let is_ours = environment.windows(run.len()).any(|w| w == run);
            let pid = process.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.and_then(Pid::from_raw).filter(|_| is_ours) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

fn start(pki: &Pki) -> Child {
    let mut command = ferrite(&["daemon", "--run-dir"]);
    command.arg(pki.path("run")).arg("--config").arg(pki.path("ferrite.toml"));
    let log = File::options().create(true).append(true).open(pki.path("log")).unwrap();
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn has_nbdinfo() -> bool {
    ferrite_testkit::programs::peer("nbdinfo", &["--version"]).is_some()
}

#[test]
fn a_disk_is_exported_by_tls_under_its_name_until_that_ends() {
    let Some(mut daemon) = Daemon::new().filter(|_| has_nbdinfo()) else { return };
    let port = daemon.export(&["--read-only"]);
    let said = daemon.serves(port, "web");
    assert!(said.contains("\"is_read_only\": true"), "{said}");
    daemon.serves(port, "");
    assert!(!daemon.info(port, "other", "client").status.success());
    // Without a certificate of the authority there is nothing to read.
    fs::create_dir(daemon.pki.path("none")).unwrap();
    let ca = daemon.pki.path("ca/ca-cert.pem");
    fs::copy(ca, daemon.pki.path("none/ca-cert.pem")).unwrap();
    assert!(!daemon.info(port, "web", "none").status.success());
    daemon.fails(4, &["export", "tap/0", "--plain", "--listen", "127.0.0.1:0"], "exported already");
    // It goes on without a daemon, and the next one knows it.
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    daemon.serves(port, "web");
    daemon.child = start(&daemon.pki);
    daemon.wait();
    let pid = || {
        let output = daemon.disk(&["exports", "--json"]);
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        rows["exports"][0]["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32))
    };
    wait_until("the exporter", || pid().is_some());
    // Another process listens there when that one is killed.
    let first = pid().unwrap();
    kill_process(first, Signal::KILL).unwrap();
    wait_until("the next exporter", || pid().is_some_and(|next| next != first));
    daemon.serves(port, "web");
    assert!(daemon.disk(&["unexport", "tap/0"]).status.success());
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    daemon.fails(3, &["unexport", "tap/0"], "is not exported");
}

#[test]
fn a_client_of_an_export_goes_on_when_the_disks_worker_is_killed() {
    let Some(daemon) = Daemon::new() else { return };
    let port = daemon.export(&[]);
    let mut outward = Outward::to(&daemon.pki, "client", "localhost", port);
    assert_eq!(outward.client.go(true).0, 4 << 20);
    for round in 1..=3 {
        let data = vec![round; 64 << 10];
        outward.client.write(u64::from(round) << 20, &data);
        daemon.kill_worker();
        assert!(outward.client.read(u64::from(round) << 20, data.len() as u32) == data);
    }
}

/// What has changed by the disk's map `m`, whose number this is: offsets and lengths in KiB.
fn changed_map(client: &mut Client, number: u32) -> Result<Vec<(u64, u64)>, u32> {
    let reply = client.call(command::BLOCK_STATUS, 0, 0, 4 << 20, &[]);
    if reply.error != 0 {
        return Err(reply.error);
    }
    let (context, extents) = &reply.contexts[0];
    assert_eq!(*context, number);
    let (mut at, mut parts) = (0, Vec::new());
    for (len, state) in extents {
        if *state != 0 {
            parts.push((at >> 10, len >> 10));
        }
        at += len;
    }
    Ok(parts)
}

/// Chooses the disk's map `m`. Returns its number.
fn choose_map(client: &mut Client) -> u32 {
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(ACK, vec![])]);
    let queries = contexts("", &["ferrite:dirty-m"]);
    let answers = client.option(option::SET_META_CONTEXT, &queries);
    assert_eq!(answers.len(), 2, "the map is offered");
    client.go(false);
    u32::from_be_bytes(answers[0].1[..4].try_into().unwrap())
}

#[test]
fn dirty_maps_of_a_running_disk_are_contexts_also_after_its_worker_was_killed() {
    let Some(daemon) = Daemon::new() else { return };
    let change = |verb: &str| {
        let output = daemon.disk(&["dirty", verb, "tap/0", "m"]);
        assert!(output.status.success(), "{output:?}");
    };
    change("add");
    let port = daemon.export(&[]);
    let folders = fs::read_dir(daemon.run()).unwrap().flatten();
    let socket = folders.map(|folder| folder.path().join("nbd")).find(|path| path.exists());
    let socket = socket.expect("the disk's own socket");
    let connect = || Client::over(UnixStream::connect(&socket).unwrap());
    let mut own = connect();
    let mut outward = Outward::to(&daemon.pki, "client", "localhost", port);
    let number = choose_map(&mut own);
    assert_eq!(choose_map(&mut outward.client), number);
    own.write(64 << 10, &[7; 512]);
    for client in [&mut own, &mut outward.client] {
        assert_eq!(changed_map(client, number), Ok(vec![(64, 64)]));
    }
    daemon.kill_worker();
    outward.client.write(1 << 20, &[7; 512]);
    for client in [&mut own, &mut outward.client] {
        assert_eq!(changed_map(client, number), Ok(vec![(64, 64), (1024, 64)]));
    }
    let mut plain = connect();
    plain.go(true);
    // The map that they know is gone. A client that asked for none goes on.
    change("clear");
    assert!(own.is_closed() && outward.client.is_closed());
    assert_eq!(plain.read(64 << 10, 512), [7; 512]);
    let mut newer = connect();
    let next = choose_map(&mut newer);
    assert_ne!(next, number);
    assert_eq!(changed_map(&mut newer, next), Ok(vec![]));
    daemon.kill_worker();
    newer.write(2 << 20, &[7; 512]);
    assert_eq!(changed_map(&mut newer, next), Ok(vec![(2048, 64)]));
}

#[test]
fn doctor_says_what_is_wrong_with_exports_and_with_disks_on_other_servers() {
    let Some(daemon) = Daemon::new() else { return };
    // It fails where there is no Xen.
    let doctor = || {
        let output = ferrite(&["doctor", "--run-dir"]).arg(daemon.run()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // What it says in the line of a disk, and of what to do.
    let told = |of: &str| {
        let said = doctor();
        let at =
            said.lines().position(|line| line.contains(of)).unwrap_or_else(|| panic!("{said}"));
        said.lines().skip(at).take(2).collect::<Vec<_>>().join("\n").trim_start().to_owned()
    };
    let says = |of: &str, state: &str, what: &[&str]| {
        let told = told(of);
        assert!(told.starts_with(state), "{told}");
        assert!(what.iter().all(|what| told.contains(what)), "{told}");
    };
    assert!(!doctor().contains("exported as"));
    let port = daemon.export(&["--read-only"]);
    let export = format!("exported as web at 127.0.0.1:{port}, TLS by ");
    says(&export, "OK", &["read only"]);
    daemon.pki.server("soon", "ca", "5", "DNS:localhost");
    for file in ["server-cert.pem", "server-key.pem"] {
        let (from, to) = (daemon.pki.path("soon"), daemon.pki.path("server"));
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
    says(&export, "WARN", &["server-cert.pem expires within 14 days", "renew it"]);
    fs::remove_file(daemon.pki.path("server/server-key.pem")).unwrap();
    says(&export, "WARN", &["server-key.pem", "No such file"]);

    let image = daemon.pki.path("remote.raw");
    File::create_new(&image).unwrap().set_len(4 << 20).unwrap();
    let (socket, at) = (daemon.pki.path("remote.sock"), daemon.free_place());
    let servers = [
        (vec!["--socket".to_owned(), socket.display().to_string()], socket_uri(&socket)),
        (
            vec!["--listen".to_owned(), at.clone(), "--plain".to_owned()],
            format!("nbd://{at}/?plain=yes"),
        ),
    ];
    for (place, uri) in servers {
        let mut command = ferrite(&["export", "nbd", image.to_str().unwrap()]);
        let mut server = command.args(place).stderr(Stdio::null()).spawn().unwrap();
        wait_until("the tap", || daemon.tap(&format!("nbd:{uri}")));
        says(&uri, "OK", &[]);
        server.kill().unwrap();
        server.wait().unwrap();
        let _ = fs::remove_file(&socket);
        let why =
            if uri.contains("unix") { "there is no socket" } else { "has no connection to it now" };
        // The kernel ends the connection a moment after the server.
        wait_until("a warning", || told(&uri).starts_with("WARN"));
        says(&uri, "WARN", &[why, "start the server"]);
    }
}

fn socket_uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

#[test]
fn an_upgrade_leaves_an_export_with_its_clients_and_says_so() {
    let Some(daemon) = Daemon::new() else { return };
    let port = daemon.export(&[]);
    let mut outward = Outward::to(&daemon.pki, "client", "localhost", port);
    outward.client.go(true);
    let upgrade = |binary: &Path| {
        let mut command = ferrite(&["upgrade", "--binary"]);
        let output = command.arg(binary).arg("--run-dir").arg(daemon.run()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let same = Path::new(env!("CARGO_BIN_EXE_ferrite"));
    assert_eq!(upgrade(same), "");
    let next = daemon.pki.path("ferrite");
    fs::copy(same, &next).unwrap();
    let said = upgrade(&next);
    assert!(said.contains("the export of disk tap/0 goes on by the program before"), "{said}");
    outward.client.write(4096, &[5; 4096]);
    daemon.kill_worker();
    assert_eq!(outward.client.read(4096, 4096), [5; 4096]);
}

#[test]
fn an_export_that_cannot_be_says_why_and_leaves_nothing() {
    let Some(daemon) = Daemon::new() else { return };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = taken.local_addr().unwrap().to_string();
    let to = |listen: &str, how: &[&str], code, why: &str| {
        daemon.fails(code, &[&["export", "tap/0", "--listen", listen], how].concat(), why);
    };
    to(&place, &["--plain"], 4, "ss -ltnp");
    to("127.0.0.1:0", &["--tls", "/nowhere"], 1, "server-cert.pem");
    to("127.0.0.1:0", &[], 2, "--plain");
    to("10809", &["--plain"], 2, "0.0.0.0:10809");
    daemon.fails(3, &["export", "tap/9", "--plain", "--listen", "127.0.0.1:0"], "not attached");
    let listed = daemon.disk(&["exports", "--json"]);
    assert_eq!(
        String::from_utf8_lossy(&listed.stdout).split_whitespace().collect::<String>(),
        r#"{"exports":[]}"#
    );
    assert_eq!(fs::read_dir(daemon.run().join("exports")).unwrap().count(), 0);
}
