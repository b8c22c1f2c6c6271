//! A guest on one host and its disk on another one: two network namespaces with a cable between them. Root's rights are
//! needed, and ip, nsenter and nft.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::deep::{self, Deep};
use crate::far::{At, Far, Server, children, inside};
use crate::tls::{self, Pki};

const GUESTS: &str = "10.77.38.1";
const DISKS: &str = "10.77.38.2";
const PORT: u16 = 10809;

/// The cable and its two ends. It is gone when this is dropped.
struct Cable {
    guests: String,
    disks: String,
    /// The program that runs this one on the guests' host.
    script: PathBuf,
    _dir: TempDir,
}

impl Cable {
    /// `None`: not here.
    fn new(name: &str) -> Option<Cable> {
        installed("ip", Command::new("ip").arg("-V").output())?;
        installed("nft", Command::new("nft").arg("-v").output())?;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: network namespaces are root's");
            return None;
        }
        let number = std::process::id();
        let (guests, disks) = (format!("{name}g{number}"), format!("{name}d{number}"));
        // /dev/shm may be mounted without programs.
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("daemon");
        let program = std::env::current_exe().unwrap();
        let text = format!(
            "#!/bin/sh\nexec nsenter --net=/run/netns/{guests} '{}' \"$@\"\n",
            program.display()
        );
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let cable = Cable { guests, disks, script, _dir: dir };
        let (guests, disks) = (&cable.guests, &cable.disks);
        run(&format!(
            "ip netns add {guests} && ip netns add {disks} &&
             ip -n {guests} link add cable type veth peer name cable netns {disks} &&
             ip -n {guests} addr add {GUESTS}/24 dev cable && ip -n {disks} addr add {DISKS}/24 dev cable &&
             ip -n {guests} link set cable up && ip -n {disks} link set cable up &&
             ip -n {guests} link set lo up && ip -n {disks} link set lo up"
        ));
        Some(cable)
    }

    /// Loses all that the guests' host sends, without a word.
    fn cut(&self) {
        self.rule("policy drop;", "");
    }

    fn rule(&self, policy: &str, rule: &str) {
        run(&format!(
            "nsenter --net=/run/netns/{} nft 'add table inet cut; \
             add chain inet cut out {{ type filter hook output priority 0; {policy} }}; {rule}'",
            self.guests
        ));
    }

    /// Loses what the connections send that there are now, and nothing of later ones. Returns their ports here.
    fn cut_connections(&self) -> Vec<String> {
        let ports: Vec<String> = self.sockets().into_iter().map(|(port, _)| port).collect();
        assert!(!ports.is_empty());
        let rule = format!("add rule inet cut out tcp sport {{ {} }} drop", ports.join(", "));
        self.rule("", &rule);
        ports
    }

    /// The guests' host's connections to the server, also those that are closed: the port here, and the bytes that the
    /// kernel has still to send.
    fn sockets(&self) -> Vec<(String, u64)> {
        let mut ss = inside(&self.guests, "ss");
        let said = tls::ok(ss.args(["-Htan", &format!("dport = :{PORT}")]));
        let row = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            (words[3].rsplit(':').next().unwrap().to_owned(), words[2].parse().unwrap())
        };
        said.lines().map(row).collect()
    }

    fn mend(&self) {
        run(&format!("nsenter --net=/run/netns/{} nft delete table inet cut", self.guests));
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for namespace in [&self.guests, &self.disks] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
    }
}

#[track_caller]
fn run(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {output:?}");
}

/// A guest on one host whose disk is on the other.
struct Two {
    cable: Cable,
    pki: Pki,
    far: Far,
    image: PathBuf,
    server: Option<Server>,
    disk: DiskPaths,
    load: Deep,
}

impl Two {
    fn new(name: &str, settings: &str) -> Option<Two> {
        let (cable, pki) = (Cable::new(name)?, Pki::new()?);
        pki.server("far", "ca", "365", &format!("IP:{DISKS}"));
        let mut far = Far::of(&[DISKS]);
        far.program = Some(cable.script.clone());
        far.start();
        let image = far.path("disk.qcow2");
        let size = deep::BYTES.to_string();
        tls::ok(&mut tls::ferrite(&["image", "create", image.to_str().unwrap(), &size]));
        let server = Some(serve(&cable, &pki, &image));
        let folder = pki.path("client");
        let uri = format!("nbds://{DISKS}/?tls-certificates={}{settings}", folder.display());
        let (disk, load) = far.load(&uri);
        Some(Two { cable, pki, far, image, server, disk, load })
    }

    /// Something of one host dies, and then something of the other.
    fn death(&mut self, number: usize) {
        match number % 4 {
            0 => self.far.kill_worker(&self.disk),
            1 => assert!(self.far.kill_tunnels(&self.disk) > 0),
            2 => self.far.restart(),
            _ => self.far.kill_keeper(&self.disk),
        }
        self.load.wait_for_progress();
        let server = self.server.take().unwrap();
        let tunnel = children(server.pid(), "tunnel").first().copied();
        match tunnel.filter(|_| number % 2 == 1) {
            // The next one is started for the next client.
            Some(tunnel) => {
                kill_process(Pid::from_raw(tunnel).unwrap(), Signal::KILL).unwrap();
                self.server = Some(server);
            }
            None => {
                drop(server);
                self.server = Some(serve(&self.cable, &self.pki, &self.image));
            }
        }
        self.load.wait_for_progress();
    }

    fn end(self) {
        assert_eq!(self.load.errors(), 0);
        self.far.end(&self.disk, self.load);
    }
}

fn serve(cable: &Cable, pki: &Pki, image: &std::path::Path) -> Server {
    let mut command = inside(&cable.disks, env!("CARGO_BIN_EXE_ferrite"));
    command.args([
        "export",
        "nbd",
        image.to_str().unwrap(),
        "--listen",
        &format!("{DISKS}:{PORT}"),
    ]);
    command.args(["--tls", pki.path("far").to_str().unwrap()]);
    Server::start(command, At::From(&cable.guests, DISKS, PORT)).unwrap()
}

/// It would wait for a day before anything is sent again, if our server were not told which client comes back.
const FENCED: &str = "&drain_s=86400";

#[test]
fn a_disk_on_another_host_survives_three_deaths_on_each() {
    let Some(mut two) = Two::new("a", FENCED) else { return };
    (0..3).for_each(|number| two.death(number));
    two.end();
}

#[test]
#[ignore = "a minute: cargo xtask nightly"]
fn a_disk_on_another_host_survives_twenty_deaths_on_each() {
    let Some(mut two) = Two::new("b", FENCED) else { return };
    (0..20).for_each(|number| two.death(number));
    two.end();
}

#[test]
fn a_cable_that_is_cut_for_longer_than_the_deadline_is_a_pause_for_the_guest() {
    let Some(two) = Two::new("c", "&drain_s=86400&deadline_s=1") else { return };
    for _ in 0..2 {
        two.cable.cut();
        std::thread::sleep(Duration::from_millis(1500));
        two.cable.mend();
        two.load.wait_for_progress();
    }
    two.end();
}

#[test]
#[ignore = "a server is stopped for 20 s: cargo xtask nightly"]
fn a_server_that_is_stopped_for_longer_than_its_deadline_is_a_pause_for_the_guest() {
    let Some(two) = Two::new("s", "&drain_s=86400&deadline_s=5&reconnect_s=60") else { return };
    let server = two.server.as_ref().unwrap();
    server.signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(20));
    server.signal(Signal::CONT);
    two.load.wait_for_progress();
    two.end();
}

/// A guest's disk is on nbdkit, which does not know which client its connections are of. Requests that were not sent
/// when a connection was given up would be executed behind newer writes, if the kernel went on to send them.
fn lost_bytes_stay_lost(name: &str, has_tls: bool) {
    let (Some(cable), Some(pki)) = (Cable::new(name), Pki::new()) else { return };
    if installed("ss", Command::new("ss").arg("-V").output()).is_none() {
        return;
    }
    pki.server("far", "ca", "365", &format!("IP:{DISKS}"));
    let mut far = Far::of(&[DISKS]);
    far.program = Some(cable.script.clone());
    far.start();
    let mut kit = inside(&cable.disks, "nbdkit");
    kit.args(["-f", "-i", DISKS, "-p", &PORT.to_string()]);
    let (scheme, more) = match has_tls {
        true => {
            kit.args(["--tls=require", "--tls-verify-peer"]);
            kit.arg(format!("--tls-certificates={}", pki.path("far").display()));
            ("nbds", format!("tls-certificates={}", pki.path("client").display()))
        }
        false => ("nbd", "plain=yes".to_owned()),
    };
    kit.args(["memory", &deep::BYTES.to_string()]);
    if installed("nbdkit", Command::new("nbdkit").arg("--version").output()).is_none() {
        return;
    }
    let _server = Server::start(kit, At::From(&cable.guests, DISKS, PORT)).unwrap();
    let settings = "drain_s=2&deadline_s=1&reconnect_s=60";
    let (disk, load) = far.load(&format!("{scheme}://{DISKS}/?{more}&{settings}"));
    let lost = cable.cut_connections();
    let is_lost = |port: &String| lost.contains(port);
    wait_until("bytes that cannot be sent", || {
        cable.sockets().iter().any(|(port, bytes)| is_lost(port) && *bytes > 0)
    });
    // A flush and the writes before it go by the next connection, when `drain_s` is over.
    load.wait_for_progress();
    let left: Vec<_> = cable.sockets().into_iter().filter(|(port, _)| is_lost(port)).collect();
    assert!(left.iter().all(|(_, bytes)| *bytes == 0), "{left:?}");
    cable.mend();
    load.wait_for_progress();
    assert_eq!(load.errors(), 0);
    far.end(&disk, load);
}

#[test]
fn what_a_lost_connection_had_not_sent_never_reaches_another_server() {
    lost_bytes_stay_lost("l", false);
}

#[test]
fn what_a_lost_connection_by_tls_had_not_sent_never_reaches_another_server() {
    lost_bytes_stay_lost("t", true);
}
