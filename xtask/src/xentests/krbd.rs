//! A guest whose disk is an image of Ceph by domain 0's kernel, as `rbd map --exclusive` makes it (docs/distributed.md). The
//! cluster runs on this machine, in one network namespace with the emulator, whose network domain 0 reaches it by.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::shared::{KILL_WORKER, LOAD};
use super::toolstack::{USE, running_guest};
use crate::{checks, needs, programs::Programs};
use ferrite_xenhost::disk::Backend;
use ferrite_xenhost::packages::{self, as_root};
use ferrite_xenhost::qemu::Hardware;
use ferrite_xenhost::root::{self, TRIXIE};
use ferrite_xenhost::steps::{self, cargo, step};
use ferrite_xenhost::{Program, XenHost};

/// The cluster's address, of the namespace's loopback interface. Domain 0's own network is another one.
const ADDRESS: &str = "192.0.2.77";
const CARD: [&str; 4] =
    ["-netdev", "user,id=ceph,net=10.0.77.0/24", "-device", "virtio-net-pci,netdev=ceph,romfile="];
/// Domain 0's side of the card, by which the emulator forwards to this machine's addresses.
const NETWORK: &str = "modprobe virtio_net; card=$(ls /sys/class/net | grep -v -m 1 '^lo$'); \
     ip link set $card up; ip addr add 10.0.77.15/24 dev $card; ip route add default via 10.0.77.2";
const IMAGE: &str = "p/web1";
const MIB: u32 = 64;
const DEVICE: &str = "/dev/rbd0";

/// Builds what the test needs, and runs it in a network namespace of its own.
pub(crate) fn test() -> Result<()> {
    packages::ensure(&[packages::XEN_HOST, needs::DIST, needs::CEPH])?;
    root::ensure(TRIXIE)?;
    let mut build = cargo();
    build.args(["build", "--locked", "--workspace", "--example", "ceph"]);
    let cluster = Programs::built_by(build.arg("--message-format=json"))?;
    let cluster = cluster.binary("testkit", "ceph")?;
    let package = checks::programs_of_the_host(false)?.swap_remove(0);
    let enter =
        format!("ip link set lo up && ip addr add {ADDRESS}/32 dev lo && exec \"$0\" krbd \"$@\"");
    let mut namespace = as_root("unshare");
    namespace.args(["--net", "sh", "-c", &enter]).arg(std::env::current_exe()?);
    steps::run(namespace.arg(cluster).arg(package.file))
}

/// The test, in a network namespace where [`ADDRESS`] is. It has the cluster's program, and the package for domain 0.
pub(crate) fn test_here(cluster: &Path, package: PathBuf) -> Result<()> {
    let root = root::ensure(TRIXIE)?;
    let cluster = step("start a Ceph cluster", || Cluster::start(cluster))?;
    let programs = [Program { name: "ferrite.deb", file: package }];
    let mut xenhost =
        XenHost::boot_at(Hardware::default(), &root, &programs, &CARD.map(String::from))?;
    let mut bench = Bench::new(&mut xenhost, Backend::Ferrite);
    let result = on_krbd(&mut bench, &cluster);
    if result.is_err() {
        steps::say(bench.evidence());
    }
    result
}

/// The worker and an OSD are killed under verification. Then the cluster shuts this host out, and the guest is told.
fn on_krbd(bench: &mut Bench<'_>, cluster: &Cluster) -> Result<()> {
    cluster.run("rbd", &["create", "--size", &format!("{MIB}M"), IMAGE])?;
    bench.xenhost.sh(NETWORK)?;
    let mapped = format!(
        "modprobe rbd && echo '{} name=admin,secret={},ms_mode=crc,exclusive p web1 -' \
         >/sys/bus/rbd/add_single_major && [ -b {DEVICE} ]",
        cluster.monitor()?,
        cluster.key()?,
    );
    bench.xenhost.sh(&mapped).context("the kernel's client")?;
    bench.start_daemon_with("")?;
    let mut guest = running_guest(bench)?;
    let words = "format=raw,vdev=xvdb,access=w,backendtype=tap,script=block-ferrite,target=";
    bench.xenhost.sh(&format!("xl block-attach {} '{words}{DEVICE}'", guest.name()))?;
    guest.sh(bench.xenhost, USE, 120)?;
    let load = guest.begin(bench.xenhost, LOAD, 240)?;
    bench.xenhost.sh(&format!("sleep 3; {KILL_WORKER}"))?;
    cluster.kill_osd(1)?;
    // The others notice it after some seconds. Requests wait until then.
    bench.xenhost.sh(&format!("sleep 12; {KILL_WORKER}"))?;
    guest.finish_ok(bench.xenhost, &load).context("fio's verification in the guest")?;
    let here = format!("dd if={DEVICE} bs=1M iflag=direct 2>/dev/null | sha256sum");
    let here = bench.xenhost.sh_for(&here, 120)?;
    let there = cluster.shell(&format!("rbd export --no-progress {IMAGE} - | sha256sum"))?;
    ensure!(here == there, "the cluster has other content than domain 0 reads");
    ensure!(cluster.shell(WRITE).is_err(), "another client could write to the image of a guest");
    let watcher = "rbd status p/web1 | sed -n 's/.*watcher=\\([^ ]*\\).*/\\1/p'";
    cluster.shell(&format!("ceph osd blocklist add $({watcher})"))?;
    let refused = "! dd if=/dev/zero of=/dev/xvdb bs=4k count=1 oflag=direct 2>/dev/null";
    guest.sh(bench.xenhost, refused, 120).context("a write of a host that was shut out")?;
    cluster.shell(WRITE).context("the next host's write")?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    bench.xenhost.sh("echo '0 force' >/sys/bus/rbd/remove_single_major").map(drop)
}

/// A write by another client of the cluster.
const WRITE: &str = "timeout 60 rbd bench --io-type write --io-size 4K --io-total 4K p/web1";

/// A cluster that ends with this value: its program ends with its standard input.
struct Cluster {
    program: Child,
    folder: PathBuf,
}

impl Cluster {
    fn start(program: &Path) -> Result<Cluster> {
        let mut program = Command::new(program)
            .arg(ADDRESS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the cluster")?;
        let mut line = String::new();
        let told = program.stdout.take().context("no output")?;
        BufReader::new(told).read_line(&mut line)?;
        let folder = PathBuf::from(line.trim_end());
        ensure!(folder.is_dir(), "the cluster has not started");
        Ok(Cluster { program, folder })
    }

    /// Runs one of Ceph's programs.
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command.env("CEPH_CONF", self.folder.join("ceph.conf"));
        steps::output(command.args(arguments))
    }

    /// Runs a line of the shell whose programs of Ceph know the cluster.
    fn shell(&self, line: &str) -> Result<String> {
        let output = self.run("bash", &["-o", "pipefail", "-ec", line])?;
        Ok(output.trim().to_owned())
    }

    /// The address of the monitor.
    fn monitor(&self) -> Result<String> {
        let conf = std::fs::read_to_string(self.folder.join("ceph.conf"))?;
        let monitor = conf.lines().find_map(|line| line.strip_prefix("mon host = v2:"));
        monitor.map(str::to_owned).context("no monitor in the cluster's configuration")
    }

    /// The key of the client `admin`.
    fn key(&self) -> Result<String> {
        self.run("ceph", &["auth", "print-key", "client.admin"]).map(|key| key.trim().to_owned())
    }

    /// Kills an OSD: what it had in memory is gone.
    fn kill_osd(&self, number: u32) -> Result<()> {
        let own = format!("ceph-osd -c {}/ceph.conf -f -i {number}( |$)", self.folder.display());
        self.run("pkill", &["-KILL", "-f", &own]).map(drop)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.program.stdin.take());
        // Without an end of it there is nothing that could be done.
        let _ = self.program.wait();
    }
}
