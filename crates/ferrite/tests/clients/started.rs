//! `ferrite export nbd` as it is started: by systemd, by users, and with many clients at once.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::places;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

const PAGE: &str = include_str!("../../../../docs/nbd.md");

fn ferrite(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG").env_remove("XDG_RUNTIME_DIR");
    command
}

/// A new image, and the path of a socket.
struct Place {
    dir: TempDir,
    image: PathBuf,
    socket: PathBuf,
}

impl Place {
    fn new(name: &str) -> Place {
        let dir = places::dir_in_memory();
        let (image, socket) = (dir.path().join(name), dir.path().join("nbd.sock"));
        let made = ferrite(&["image", "create", image.to_str().unwrap(), "64M"]).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        Place { dir, image, socket }
    }

    fn image(&self) -> &str {
        self.image.to_str().unwrap()
    }

    fn at_socket(&self, more: &[&str]) -> Command {
        let args = ["export", "nbd", self.image(), "--socket", self.socket.to_str().unwrap()];
        let mut command = ferrite(&args);
        command.args(more);
        command
    }

    fn client(&self) -> Client {
        let mut client = Client::over(UnixStream::connect(&self.socket).unwrap());
        client.go(true);
        client
    }
}

/// A started server, killed at the end of a test.
struct Started(Child);

impl Started {
    /// Starts it, and waits until it listens. Returns what it has said, too.
    fn of(mut command: Command) -> (Started, String) {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening at") {
            assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        (Started(child), said)
    }

    fn end(mut self, signal: Signal) -> bool {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
        self.0.wait().unwrap().success()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command as systemd starts it: with this descriptor as its third, and so many announced.
fn activated(passed: OwnedFd, count: u32, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ exec \"$@\"";
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ferrite")]).args(args);
    command.stdin(passed).env("LISTEN_FDS", count.to_string()).env_remove("RUST_LOG");
    command
}

fn fails(mut command: Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_socket_that_systemd_passes_is_used_and_left() {
    let place = Place::new("disk.qcow2");
    let listener = UnixListener::bind(&place.socket).unwrap();
    // The command of the unit in the documentation.
    let (_, line) = PAGE.split_once("\nExecStart=/usr/bin/ferrite ").unwrap();
    let line = line.lines().next().unwrap().replace("/srv/disk.qcow2", place.image());
    let args: Vec<_> = line.split(' ').collect();
    assert!(args.contains(&place.image()));
    let start = || activated(listener.try_clone().unwrap().into(), 1, &args);
    // This client waits for the server that it has started.
    let early = UnixStream::connect(&place.socket).unwrap();
    let (server, said) = Started::of(start());
    assert!(said.contains("the socket of systemd"), "{said}");
    let mut client = Client::over(early);
    client.go(true);
    client.write(512, &[7; 512]);
    // A killed one, too, is followed by the next on the same socket.
    assert!(!server.end(Signal::KILL));
    let (server, _) = Started::of(start());
    assert_eq!(place.client().read(0, 1024), [[0; 512], [7; 512]].concat());
    assert!(server.end(Signal::TERM));
    assert!(place.socket.exists() && !place.dir.path().join("nbd.sock.lock").exists());
}

#[test]
fn what_is_passed_and_no_listening_socket_is_refused() {
    let place = Place::new("disk.img");
    let listener = UnixListener::bind(&place.socket).unwrap();
    let export = ["export", "nbd", place.image()];
    let listening = || OwnedFd::from(listener.try_clone().unwrap());
    let (code, text) = fails(activated(listening(), 2, &export));
    assert!(code == Some(1) && text.contains("it has passed 2 of them"), "{text}");
    let both = [&export[..], &["--socket", "other.sock"]].concat();
    let (code, text) = fails(activated(listening(), 1, &both));
    assert!(code == Some(2) && text.contains("leave out --socket"), "{text}");
    let connected = OwnedFd::from(UnixStream::connect(&place.socket).unwrap());
    let file = OwnedFd::from(File::open(&place.image).unwrap());
    for passed in [connected, file] {
        let (code, text) = fails(activated(passed, 1, &export));
        assert!(code == Some(1) && text.contains("Accept=no"), "{text}");
    }
    let (code, text) = fails(ferrite(&export));
    assert!(code == Some(2) && text.contains("name one (--socket PATH or --listen"), "{text}");
    // Sockets for another process are none.
    let mut others = ferrite(&export);
    let (code, text) = fails({
        others.env("LISTEN_FDS", "1").env("LISTEN_PID", "1");
        others
    });
    assert!(code == Some(2) && text.contains("systemd has passed none"), "{text}");
}

/// The user `nobody`.
const USER: u32 = 65534;

/// The command, run by that user with this folder.
fn by_user(mut command: Command, runtime: &Path) -> Command {
    command.uid(USER).gid(USER).env("XDG_RUNTIME_DIR", runtime);
    command
}

#[test]
fn a_users_killed_export_has_lost_nothing_when_that_user_starts_it_again() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can run a program as another user");
        return;
    }
    for name in ["disk.qcow2", "disk.vhd"] {
        let place = Place::new(name);
        let runtime = place.dir.path().join("runtime");
        fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
        for path in [place.dir.path(), &place.image, &runtime] {
            chown(path, Some(USER), Some(USER)).unwrap();
        }
        let (server, said) = Started::of(by_user(place.at_socket(&[]), &runtime));
        let folder = runtime.join("ferrite/images");
        assert!(said.contains(&format!("kept in {}", folder.display())), "{said}");
        place.client().write(1 << 20, &[7; 4096]);
        assert!(!server.end(Signal::KILL));
        let list = ferrite(&["image", "journal", "list"]);
        let listed = by_user(list, &runtime).output().unwrap();
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        assert!(listed.contains(place.image()), "{listed}");
        let (server, _) = Started::of(by_user(place.at_socket(&[]), &runtime));
        assert_eq!(place.client().read(1 << 20, 4096), [7; 4096]);
        assert!(server.end(Signal::TERM));
        let check = by_user(ferrite(&["image", "check", place.image()]), &runtime).output();
        assert!(check.unwrap().status.success());
    }
}

#[test]
fn a_folder_that_others_may_write_to_keeps_no_journal() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can run a program as another user");
        return;
    }
    let place = Place::new("disk.qcow2");
    for path in [place.dir.path(), &place.image] {
        chown(path, Some(USER), Some(USER)).unwrap();
    }
    fs::set_permissions(place.dir.path(), Permissions::from_mode(0o777)).unwrap();
    let (code, text) = fails(by_user(place.at_socket(&[]), place.dir.path()));
    assert!(code == Some(1) && text.contains("others than this user may change"), "{text}");
    assert!(!place.socket.exists());
}

#[test]
fn root_is_told_where_users_have_journals() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root sees all users' folders");
        return;
    }
    let user = Path::new("/run/user").join(format!("ferrite-test-{}", std::process::id()));
    let folder = user.join("ferrite/images");
    let list = || fails(ferrite(&["image", "journal", "list"]));
    let told = |text: &str| text.contains(folder.to_str().unwrap());
    fs::create_dir_all(&folder).unwrap();
    let (empty, without) = list();
    fs::write(folder.join("some.journal"), "").unwrap();
    let (code, text) = list();
    fs::remove_dir_all(&user).unwrap();
    assert!(empty == Some(0) && code == Some(0) && !told(&without), "{without}");
    assert!(told(&text) && text.contains("run this as that user"), "{text}");
}

/// A value of `/proc/PID/status` in KiB.
fn status_kib(pid: u32, key: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn memory_is_taken_for_what_clients_do_and_not_for_their_number() {
    let place = Place::new("disk.img");
    let (server, _) = Started::of(place.at_socket(&["--clients", "64"]));
    let mib = |key| status_kib(server.0.id(), key) / 1024;
    let mut clients: Vec<_> = (0..64).map(|_| place.client()).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        client.write(i as u64 * 4096, &[i as u8; 4096]);
        assert_eq!(client.read(i as u64 * 4096, 4096), [i as u8; 4096]);
    }
    let idle = mib("RssAnon:");
    assert!(idle < 64, "{idle} MiB for 64 clients with a request each");
    // Each client has 8 MiB in flight; together that exceeds the memory of all clients.
    for client in &mut clients {
        for at in 0..8 {
            client.send(command::READ, 0, at << 20, 1 << 20, &[]);
        }
    }
    for client in &mut clients {
        assert!((0..8).all(|_| client.reply().error == 0));
    }
    let busy = mib("RssAnon:");
    assert!(busy < 192, "{busy} MiB for 64 clients with 8 MiB each");
    drop(clients);
    assert!(server.end(Signal::TERM));
}
