//! Disks on a Ceph cluster, which these tests start (`ferrite_testkit::ceph`): `cargo xtask nightly --only rbd`. Without Ceph:
//! `crates/rbd/tests/program.rs`.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::ceph::{Cluster, POOL};
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::deep::Deep;
use crate::far::{self, At, Far, Server, children};
use crate::pages;
use crate::roles;

const MIB: usize = 1 << 20;
/// NBD's `EIO`.
const IO: u32 = 5;
/// What a helper may have resident. The rest of the time is Ceph's: see docs/distributed.md.
const HELPER_KIB: u64 = 64 << 10;

/// The page's commands, with a folder of Ceph's own that is this cluster's.
#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn the_commands_of_the_page_work() {
    let Some(cluster) = Cluster::shared() else { return };
    let page = include_str!("../../../../docs/distributed.md");
    let (page, _) = page.split_once("\n## A device of the kernel\n").unwrap();
    let commands = pages::commands(page);
    assert!(commands.contains("ferrite image convert"));
    let folder = cluster.folder().display();
    // The keys are where Ceph looks for them by itself.
    let script = format!(
        "mkdir -p /etc/ceph\nmount -t tmpfs t /etc/ceph\n\
         sed '/admin.keyring/d' {folder}/ceph.conf >/etc/ceph/ceph.conf\n\
         cp {folder}/admin.keyring /etc/ceph/ceph.client.admin.keyring\n{commands}"
    );
    let file = cluster.path("page.sh");
    fs::write(&file, script).unwrap();
    pages::run(&format!("unshare -m bash -eux {}", file.display()));
}

fn ferrite(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG").output().unwrap()
}

#[track_caller]
fn ok(args: &[&str]) {
    let output = ferrite(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
}

#[track_caller]
fn refused(args: &[&str]) -> String {
    let output = ferrite(args);
    assert!(!output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// The helper's program.
fn program() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_ferrite")).with_file_name("ferrite-rbd")
}

/// Bytes of which no two blocks are equal, with holes.
fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    let block = |at: usize| match at % 5 {
        0 => vec![0; 4096],
        _ => [&(at as u64).to_be_bytes()[..], &vec![seed ^ at as u8; 4088]].concat(),
    };
    (0..bytes / 4096).flat_map(block).collect()
}

fn write_file(dir: &TempDir, name: &str, bytes: &[u8]) -> String {
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// An export of an image, and a client.
struct Export {
    server: Server,
    socket: PathBuf,
    _dir: TempDir,
}

impl Export {
    fn of(name: &str, more: &[&str]) -> Export {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let server = Server::ours(Path::new(name), At::Socket(&socket), more);
        Export { server, socket, _dir: dir }
    }

    /// An export of another host: one with a `/run` of its own.
    fn of_another_host(name: &str) -> Export {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let (ferrite, at) = (env!("CARGO_BIN_EXE_ferrite"), socket.display());
        let script =
            format!("mount -t tmpfs t /run && exec {ferrite} export nbd '{name}' --socket {at}");
        let mut command = Command::new("unshare");
        command.args(["-m", "bash", "-c", &script]);
        let server = Server::start(command, At::Socket(&socket)).unwrap();
        Export { server, socket, _dir: dir }
    }

    fn client(&self) -> Client {
        let mut client = Client::over(UnixStream::connect(&self.socket).unwrap());
        client.go(false);
        client
    }

    fn helper(&self) -> i32 {
        let all = children(self.server.pid(), "serve");
        assert_eq!(all.len(), 1, "{all:?}");
        all[0]
    }
}

/// The most that a process has had resident.
fn peak_kib(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The client that has an image open for writing, as `ceph osd blocklist` takes it.
fn watcher(cluster: &Cluster, image: &str) -> String {
    let said = cluster.rbd(&["status", &format!("{POOL}/{image}")]);
    let (_, rest) = said.split_once("watcher=").unwrap_or_else(|| panic!("{said}"));
    rest.split(' ').next().unwrap().to_owned()
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn what_we_write_is_what_others_read_and_the_other_way() {
    let Some(cluster) = Cluster::shared() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (pattern(16 * MIB, 1), pattern(16 * MIB, 77));
    let file = write_file(&dir, "first", &first);
    cluster.image("content", 16);
    let name = cluster.name("content", "");
    ok(&["image", "convert", "-n", &file, &name]);
    assert!(cluster.content("content") == first, "rbd export has something else");
    // Ranges without writes have no objects, and read as zeros.
    cluster.rbd(&["snap", "create", "--no-progress", &format!("{POOL}/content@s")]);
    let file = write_file(&dir, "second", &second);
    ok(&["image", "convert", "-n", &file, &name]);
    assert!(cluster.content("content") == second);
    let out = dir.path().join("out");
    ok(&["image", "convert", &cluster.name("content@s", ""), out.to_str().unwrap()]);
    assert!(fs::read(&out).unwrap() == first, "the snapshot has something else");
    let said = refused(&["image", "convert", "-n", &file, &cluster.name("content@s", "")]);
    assert!(said.contains("read-only") || said.contains("snapshot"), "{said}");
    // Writers of others.
    cluster.image("bench", 16);
    let bench =
        ["--io-type", "write", "--io-size", "8K", "--io-total", "2M", "--io-pattern", "rand"];
    cluster.rbd(&[&["bench", "p/bench"][..], &bench].concat());
    ok(&["image", "convert", "--force", &cluster.name("bench", ""), out.to_str().unwrap()]);
    assert!(fs::read(&out).unwrap() == cluster.content("bench"));
    // fio verifies what it reads by its own headers: once by librbd, once by our server.
    let Some(_) = installed("fio", Command::new("fio").arg("--version").output()) else { return };
    cluster.image("fio", 16);
    let job =
        ["--name=j", "--rw=randwrite", "--bs=4k", "--size=8m", "--verify=crc32c", "--iodepth=16"];
    let run = |engine: &[&str]| {
        let mut fio = Command::new("fio");
        fio.args(job).args(engine).env("CEPH_CONF", cluster.conf()).current_dir(dir.path());
        let output = fio.output().unwrap();
        assert!(output.status.success(), "{engine:?}: {output:?}");
    };
    run(&["--ioengine=rbd", "--pool=p", "--rbdname=fio", "--clientname=admin", "--do_verify=0"]);
    let export = Export::of(&cluster.name("fio", ""), &[]);
    let uri = format!("--uri=nbd+unix:///?socket={}", export.socket.display());
    run(&["--ioengine=nbd", &uri, "--verify_only"]);
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn discards_and_zeros_give_space_back() {
    let Some(cluster) = Cluster::shared() else { return };
    cluster.image("space", 32);
    let export = Export::of(&cluster.name("space", ""), &[]);
    let mut client = export.client();
    let data = vec![7; MIB];
    for at in 0..24 {
        client.write(at * MIB as u64, &data);
    }
    client.flush();
    let full = cluster.used("space");
    assert!(full >= 24 * MIB as u64, "{full}");
    assert_eq!(client.call(command::TRIM, 0, 0, 8 * MIB as u32, &[]).error, 0);
    let trimmed = cluster.used("space");
    assert!(trimmed + 8 * MIB as u64 <= full, "{trimmed} of {full}");
    let at = 8 * MIB as u64;
    assert_eq!(client.call(command::WRITE_ZEROES, 0, at, 8 * MIB as u32, &[]).error, 0);
    let zeroed = cluster.used("space");
    assert!(zeroed + 8 * MIB as u64 <= trimmed, "{zeroed} of {trimmed}");
    assert!(client.read(0, 4 * MIB as u32).iter().all(|byte| *byte == 0));
    assert!(client.read(at, 4 * MIB as u32).iter().all(|byte| *byte == 0));
    assert!(client.read(2 * at, MIB as u32) == data);
    // A part of an object reads as zeros, too.
    assert_eq!(client.call(command::TRIM, 0, 2 * at, 4096, &[]).error, 0);
    assert!(client.read(2 * at, 4096).iter().all(|byte| *byte == 0));
    client.flush();
    drop(client);
    // It has no right of root, and gets none.
    for thread in fs::read_dir(format!("/proc/{}/task", export.helper())).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        assert!(!field("Uid:").split_whitespace().any(|user| user == "0"), "{status}");
        assert_eq!(field("CapEff:").trim(), "0000000000000000");
        assert_eq!(field("NoNewPrivs:").trim(), "1");
    }
    let peak = peak_kib(export.helper());
    println!("the helper had {peak} KiB resident");
    assert!(peak <= HELPER_KIB, "{peak} KiB");
}

/// A host whose guest works on an image of the cluster.
struct Guest {
    far: Far,
    disk: DiskPaths,
    load: Deep,
}

impl Guest {
    fn start(cluster: &Cluster, image: &str, settings: &str) -> Guest {
        cluster.image(image, 8);
        let mut far = Far::of(&[]);
        far.rbd = Some(format!("{POOL}|{}", cluster.folder().display()));
        far.start();
        let (disk, load) = far.load(&cluster.name(image, settings));
        Guest { far, disk, load }
    }

    fn helper(&self) -> Option<i32> {
        children(roles::keeper(&self.far.host, &self.disk), "serve").first().copied()
    }

    fn kill_helper(&self) {
        wait_until("a helper", || self.helper().is_some());
        roles::kill_pid(self.helper().unwrap());
    }
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn a_guest_loses_nothing_when_helper_worker_keeper_or_daemon_are_killed() {
    let Some(cluster) = Cluster::shared() else { return };
    let mut guest = Guest::start(cluster, "guest", "");
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        let begin = Instant::now();
        guest.kill_helper();
        guest.load.wait_for_progress();
        longest = longest.max(begin.elapsed());
    }
    println!("at most {longest:?} until the guest went on behind a killed helper");
    for _ in 0..3 {
        guest.far.kill_worker(&guest.disk);
        guest.load.wait_for_progress();
    }
    guest.far.kill_keeper(&guest.disk);
    guest.load.wait_for_progress();
    guest.far.restart();
    guest.load.wait_for_progress();
    assert_eq!(guest.load.errors(), 0);
    println!("the helper had {} KiB resident", peak_kib(guest.helper().unwrap()));
    guest.far.end(&guest.disk, guest.load);
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn a_guest_waits_for_an_osd_that_is_stopped() {
    let Some(cluster) = Cluster::shared() else { return };
    let guest = Guest::start(cluster, "osd", "");
    cluster.signal("osd.1", Signal::STOP);
    // The others report it after the grace, and two copies are enough.
    guest.load.wait_for_progress();
    guest.load.wait_for_progress();
    cluster.signal("osd.1", Signal::CONT);
    cluster.wait_until_clean();
    guest.load.wait_for_progress();
    assert_eq!(guest.load.errors(), 0);
    guest.far.end(&guest.disk, guest.load);
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn a_guest_sees_that_its_image_has_grown() {
    let Some(cluster) = Cluster::shared() else { return };
    let guest = Guest::start(cluster, "growth", "");
    let key = format!("{}/sectors", guest.disk.backend);
    let sectors = || guest.far.host.store().read_string(&key).unwrap();
    assert_eq!(sectors(), Some((8 * MIB / 512).to_string()));
    cluster.rbd(&["resize", "--no-progress", "--size", "12M", "p/growth"]);
    wait_until("the new size", || sectors() == Some((12 * MIB / 512).to_string()));
    guest.load.wait_for_progress();
    guest.far.kill_worker(&guest.disk);
    guest.load.wait_for_progress();
    assert_eq!(guest.load.errors(), 0);
    guest.far.end(&guest.disk, guest.load);
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn an_image_that_another_host_has_is_refused_until_it_is_taken_by_hand() {
    let Some(cluster) = Cluster::shared() else { return };
    cluster.image("lock", 8);
    let name = cluster.name("lock", "&reconnect_s=2");
    let there = Export::of_another_host(&name);
    let mut theirs = there.client();
    theirs.write(0, &[1; 4096]);
    let here = tempfile::tempdir().unwrap();
    let socket = here.path().join("s");
    let said = refused(&["export", "nbd", &name, "--socket", socket.to_str().unwrap()]);
    assert!(said.contains("is in use: the client"), "{said}");
    assert!(said.contains("ferrite-rbd steal"), "{said}");
    // Reading needs no lock.
    let reader = Export::of(&name, &["--read-only"]);
    assert!(reader.client().read(0, 4096) == [1; 4096]);
    let stolen = Command::new(program()).args(["steal", &name]).output().unwrap();
    let told = String::from_utf8_lossy(&stolen.stdout).into_owned();
    assert!(stolen.status.success() && told.contains("is shut out"), "{stolen:?}");
    let ours = Export::of(&name, &[]);
    let mut client = ours.client();
    client.write(4096, &[2; 4096]);
    client.flush();
    // Not one write of the other host lands, and no new helper of its disk takes the image back.
    for _ in 0..2 {
        assert_eq!(theirs.call(command::WRITE, 0, 4096, 4096, &[3; 4096]).error, IO);
        let helper = children(there.server.pid(), "serve");
        helper.into_iter().for_each(roles::kill_pid);
    }
    assert_eq!(theirs.call(command::WRITE, 0, 4096, 4096, &[3; 4096]).error, IO);
    assert!(client.read(4096, 4096) == [2; 4096]);
    assert!(cluster.content("lock")[4096..8192] == [2; 4096]);
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn a_client_that_is_shut_out_fails_its_disk_for_good() {
    let Some(cluster) = Cluster::shared() else { return };
    cluster.image("out", 8);
    let export = Export::of(&cluster.name("out", "&reconnect_s=2"), &[]);
    let mut client = export.client();
    client.write(0, &[1; 4096]);
    client.flush();
    cluster.ceph(&["osd", "blocklist", "add", &watcher(cluster, "out")]);
    let write =
        |client: &mut Client, byte| client.call(command::WRITE, 0, 0, 4096, &[byte; 4096]).error;
    // The OSDs learn of it one after the other.
    wait_until("an error", || write(&mut client, 9) == IO);
    // The next helper knows it, though the cluster would take it.
    roles::kill_pid(export.helper());
    for _ in 0..3 {
        assert_eq!(write(&mut client, 4), IO);
    }
    assert_eq!(client.call(command::FLUSH, 0, 0, 0, &[]).error, IO);
    drop((client, export));
    // A disk that is opened anew has no guest that remembers.
    let export = Export::of(&cluster.name("out", ""), &[]);
    let mut client = export.client();
    let left = client.read(0, 4096);
    assert!(left == [1; 4096] || left == [9; 4096], "{}", left[0]);
    client.write(0, &[2; 4096]);
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn an_image_that_cannot_be_served_is_refused_with_what_to_do() {
    let Some(cluster) = Cluster::shared() else { return };
    let try_to_serve = |name: &str| {
        let dir = tempfile::tempdir().unwrap();
        refused(&["export", "nbd", name, "--socket", dir.path().join("s").to_str().unwrap()])
    };
    cluster.rbd(&["create", "--size", "8M", "--image-feature", "layering", "p/unlocked"]);
    let said = try_to_serve(&cluster.name("unlocked", ""));
    assert!(said.contains("rbd feature enable p/unlocked exclusive-lock"), "{said}");
    // Settings of the image, or of its pool, overrule those of the client.
    cluster.image("cached", 8);
    cluster.rbd(&["config", "image", "set", "p/cached", "rbd_cache", "true"]);
    let said = try_to_serve(&cluster.name("cached", ""));
    assert!(said.contains("rbd config image remove p/cached rbd_cache"), "{said}");
    cluster.rbd(&["config", "image", "remove", "p/cached", "rbd_cache"]);
    cluster.rbd(&["config", "pool", "set", POOL, "rbd_cache", "true"]);
    let said = try_to_serve(&cluster.name("cached", ""));
    cluster.rbd(&["config", "pool", "remove", POOL, "rbd_cache"]);
    assert!(said.contains("rbd config pool remove p rbd_cache"), "{said}");
    for (name, cure) in [("none", "rbd create --size SIZE p/none"), ("none@s", "no image p/none@s")]
    {
        let said = try_to_serve(&cluster.name(name, ""));
        assert!(said.contains(cure), "{said}");
    }
    let conf = cluster.conf();
    let said = try_to_serve(&format!("rbd:none/i?conf={}", conf.display()));
    assert!(said.contains("has no pool none"), "{said}");
    let said = try_to_serve(&format!("rbd:p/i?conf={}&id=nobody", conf.display()));
    assert!(said.contains("id=NAME"), "{said}");
    // No process listens at the monitor's port: an error, before the client gives up.
    let text = fs::read_to_string(&conf).unwrap();
    let port = far::free_port();
    let dead: String = text
        .lines()
        .map(|line| match line.starts_with("mon host") {
            true => format!("mon host = v2:127.0.0.1:{port}\n"),
            false => format!("{line}\n"),
        })
        .collect();
    let file = cluster.path("dead.conf");
    fs::write(&file, dead).unwrap();
    let begin = Instant::now();
    let said = try_to_serve(&format!("rbd:p/i?conf={}", file.display()));
    println!("a dead monitor is told after {:?}", begin.elapsed());
    assert!(said.contains("check that the monitors run"), "{said}");
}

#[test]
#[ignore = "starts a Ceph cluster: cargo xtask nightly --only rbd"]
fn a_command_leaves_no_lock_and_no_helper() {
    let Some(cluster) = Cluster::shared() else { return };
    cluster.image("left", 8);
    let dir = tempfile::tempdir().unwrap();
    let file = write_file(&dir, "f", &pattern(8 * MIB, 3));
    ok(&["image", "convert", "-n", &file, &cluster.name("left", "")]);
    let said = cluster.rbd(&["status", "p/left"]);
    assert!(said.contains("Watchers: none"), "{said}");
    let locks = cluster.rbd(&["lock", "ls", "p/left"]);
    assert!(locks.is_empty(), "{locks}");
    let mut idle = Command::new(program());
    let idle = idle.args(["serve", "p/left"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(idle.status.code(), Some(2), "{idle:?}");
}
