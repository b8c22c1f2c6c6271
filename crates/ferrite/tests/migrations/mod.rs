//! Two hosts between which disks move: both on this machine, each with daemon, run folder, images and certificates.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use ferrite_daemon::config::DiskOptions;
use ferrite_daemon::control::protocol::{Migration, MigrationList};
use ferrite_daemon::keepers::{Programs, StoreWorker};
use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Assignment, Failure, Step};
use ferrite_disk::StoreKey;
use ferrite_keeper::{DiskSpec, WorkerSandbox};
use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::host::{CONFIG, Host};
use crate::live::{self, Lab};
use crate::roles::{self, Roles};
use crate::tls::Pki;

/// Runs a daemon, if the environment asks for one.
pub fn be_a_daemon() {
    live::be_a_daemon_of(Box::new(Exporting));
}

// A daemon starts tunnels from its own program, which is this one in a test.
ferrite_loopback::before_main!(be_a_tunnel);

fn be_a_tunnel() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == "tunnel") {
        let failed =
            Command::new(env!("CARGO_BIN_EXE_ferrite")).arg("tunnel").args(arguments).exec();
        eprintln!("tunnel: {failed}");
        std::process::exit(1);
    }
}

/// The roles of this program, and the real exporter.
struct Exporting;

impl Programs for Exporting {
    fn keeper(&self, disk: DiskId, spec: &DiskSpec) -> Command {
        Roles.keeper(disk, spec)
    }
    fn exporter(&self, disk: DiskId) -> Option<Command> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("exporter").arg(disk.to_string());
        Some(command)
    }
    fn worker(&self, disk: &Assignment<'_>) -> Result<Vec<String>, Failure> {
        Roles.worker(disk)
    }
    fn store_worker(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        store: StoreKey,
    ) -> Result<StoreWorker, Failure> {
        Roles.store_worker(disk, run_dir, store)
    }
    fn options(&self, worker: &[String]) -> Option<DiskOptions> {
        Roles.options(worker)
    }
    fn relay(&self) -> Vec<String> {
        Roles.relay()
    }
    fn sandbox(
        &self,
        disk: &Assignment<'_>,
        run_dir: &Path,
        writable: bool,
    ) -> Result<Option<WorkerSandbox>, Failure> {
        Roles.sandbox(disk, run_dir, writable)
    }
}

/// Certificates, and the port of the receiver.
pub struct Places {
    pki: Pki,
    port: u16,
}

impl Places {
    /// `None`: not here.
    pub fn new() -> Option<Places> {
        let pki = Pki::new()?;
        let names = format!("DNS:localhost,IP:127.0.0.1,IP:{THERE}");
        pki.server("host", "ca", "365", &names);
        let alternative = ["subjectAltName=DNS:a.example", "extendedKeyUsage=clientAuth"];
        pki.sign("host", "ca", "365", "client", &alternative);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Some(Places { pki, port })
    }

    fn config(&self, name: &str, more: &str) -> PathBuf {
        let path = self.pki.path(name);
        let folder = self.pki.path("host");
        fs::write(&path, format!("[migration]\ncertificates = {folder:?}\n{more}")).unwrap();
        path
    }

    /// The sender: a host whose guest has a disk.
    pub fn lab(&self) -> Lab {
        self.lab_to("localhost", &[])
    }

    /// The sender, which knows the receiver at this address. Its daemons have these variables.
    pub fn lab_to(&self, at: &str, more: &[(&'static str, &str)]) -> Lab {
        self.lab_of(&["base.qcow2", "a.qcow2"], at, more)
    }

    /// As [`lab_to`](Self::lab_to), with a disk of these images.
    pub fn lab_of(&self, chain: &[&str], at: &str, more: &[(&'static str, &str)]) -> Lab {
        let port = self.port;
        let hosts = format!(
            "hosts = {{ b = \"{at}:{port}\", gone = \"localhost:1\", wrong = \"127.0.0.2:{port}\" }}\n"
        );
        let config = self.config("sender.toml", &hosts);
        let config = (CONFIG, config.to_str().unwrap());
        Lab::with(chain, &[&[config], more].concat())
    }

    /// The receiver, whose daemon dies at this step.
    pub fn there(&self, die_at: Option<Step>) -> There {
        self.there_as("a.example", die_at)
    }

    /// The receiver behind a cable. Its daemon has these variables.
    pub fn there_behind(&self, cable: &Cable, more: Vec<(&'static str, String)>) -> There {
        let mut there = self.not_yet("a.example");
        (there.program, there.more, there.at) = (Some(cable.script.clone()), more, THERE);
        there.start(None);
        there
    }

    /// A receiver that takes disks of this host only.
    pub fn there_from(&self, from: &str) -> There {
        self.there_as(from, None)
    }

    fn there_as(&self, from: &str, die_at: Option<Step>) -> There {
        let mut there = self.not_yet(from);
        there.start(die_at);
        there
    }

    fn not_yet(&self, from: &str) -> There {
        let host = Host::new(1);
        let folder = host.image("");
        let more = format!(
            "listen = \"0.0.0.0:{}\"\nfolder = {folder:?}\nfrom = [{from:?}]\nports = [0, 0]\n\
             bases = [\"base.qcow2\"]\n",
            self.port
        );
        let config = self.config("receiver.toml", &more);
        let (program, more, at) = (None, Vec::new(), "127.0.0.1");
        There { host, config, daemon: None, port: self.port, program, more, at }
    }
}

/// The receiver.
pub struct There {
    pub host: Host,
    config: PathBuf,
    daemon: Option<Child>,
    port: u16,
    /// The program that is the daemon, if it is not this one.
    program: Option<PathBuf>,
    /// Variables of the daemon.
    more: Vec<(&'static str, String)>,
    /// Where it is reached.
    at: &'static str,
}

/// The receiver's address behind a cable, and the sender's.
pub const THERE: &str = "10.77.39.2";
const HERE: &str = "10.77.39.1";

/// A network namespace for the receiver, and a cable to it. Both are gone when this is dropped.
pub struct Cable {
    pub namespace: String,
    /// The program that runs this one there.
    script: PathBuf,
    _dir: tempfile::TempDir,
}

fn sh(script: &str) {
    let done = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(done.status.success(), "{script}: {done:?}");
}

impl Cable {
    /// `None`: not here.
    pub fn new() -> Option<Cable> {
        use std::os::unix::fs::PermissionsExt as _;
        installed("ip", Command::new("ip").arg("-V").output())?;
        installed("nft", Command::new("nft").arg("-v").output())?;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: network namespaces are root's");
            return None;
        }
        let namespace = format!("migrate{}", std::process::id());
        // /dev/shm may be mounted without programs.
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("daemon");
        let program = std::env::current_exe().unwrap();
        let text = format!(
            "#!/bin/sh\nexec nsenter --net=/run/netns/{namespace} '{}' \"$@\"\n",
            program.display()
        );
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let cable = Cable { namespace, script, _dir: dir };
        let name = &cable.namespace;
        sh(&format!(
            "ip netns add {name}
             ip link add {name} type veth peer name cable netns {name}
             ip addr add {HERE}/24 dev {name}
             ip link set {name} up
             ip -n {name} addr add {THERE}/24 dev cable
             ip -n {name} link set cable up
             ip -n {name} link set lo up"
        ));
        Some(cable)
    }

    /// The command that loses all that the receiver gets (`input`), or sends (`output`).
    pub fn cut(&self, way: &str) -> String {
        let name = &self.namespace;
        let of = if way == "input" { "iif" } else { "oif" };
        format!(
            "nsenter --net=/run/netns/{name} nft 'table inet cut {{ chain c {{ type filter hook {way} priority 0; \
             policy drop; {of} lo accept; }}; }}'"
        )
    }

    pub fn mend(&self) {
        sh(&format!("nsenter --net=/run/netns/{} nft delete table inet cut", self.namespace));
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).status();
    }
}

impl There {
    /// Starts a daemon, which dies at this step.
    pub fn start(&mut self, die_at: Option<Step>) {
        let config = self.config.to_str().unwrap();
        let mut more: Vec<(&str, &str)> =
            self.more.iter().map(|(name, to)| (*name, to.as_str())).collect();
        more.push((CONFIG, config));
        self.daemon = Some(match &self.program {
            None => self.host.spawn_with(die_at, &more),
            Some(program) => self.host.daemon_of(program).envs(more).spawn().unwrap(),
        });
        wait_until("a daemon", || self.host.status().is_ok_and(|status| status.xen));
        wait_until("a listener", || std::net::TcpStream::connect((self.at, self.port)).is_ok());
    }

    /// Whether the daemon has killed itself.
    pub fn has_died(&mut self) -> bool {
        let ended = self.daemon.as_mut().is_some_and(|it| it.try_wait().unwrap().is_some());
        if ended {
            self.daemon = None;
        }
        ended
    }

    /// Kills the daemon, and starts the next one.
    pub fn restart(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        self.start(None);
    }

    pub fn image(&self, name: &str) -> String {
        self.host.image(name).to_str().unwrap().to_owned()
    }

    /// The names of the files in the folder of images.
    pub fn images(&self) -> Vec<String> {
        let names = fs::read_dir(self.host.image("")).unwrap();
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Whether it has these images, and no others.
    pub fn has(&self, images: &[&str]) -> bool {
        let is_image = |name: &String| !name.ends_with(".ferrite-children");
        self.images().into_iter().filter(is_image).eq(images.iter().copied())
    }

    /// The one migration that it knows.
    pub fn only(&self) -> Migration {
        let mut all = list(&self.host);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    pub fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words).arg("--run-dir").arg(self.host.paths().run);
        command.env("XENSTORED_PATH", self.host.store_socket()).output().unwrap()
    }

    /// Kills the workers of all of its disks.
    pub fn kill_workers(&self) {
        for disk in self.host.disks() {
            let worker = disk.pid.and_then(|keeper| roles::worker(keeper.try_into().unwrap()));
            kill_process(Pid::from_raw(worker.unwrap()).unwrap(), Signal::KILL).unwrap();
        }
    }
}

impl Drop for There {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // Keepers and exporters live on.
        self.host.end_processes();
    }
}

/// The migrations that the daemon of a host knows. A daemon that is being started is waited for.
pub fn list(host: &Host) -> Vec<Migration> {
    let mut found = None;
    wait_until("a list of migrations", || {
        found = host.call::<MigrationList>("migrate.list", &json!({})).ok();
        found.is_some()
    });
    found.unwrap().migrations
}
