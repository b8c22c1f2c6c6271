//! A Ceph cluster in a temporary folder: a monitor, a manager and three OSDs that have their data in memory. It has one pool,
//! `p`, with three copies, and is at ports of one address, as a rule of 127.0.0.1. It takes 450 MB, and half a minute to start.
//!
//! It ends with the process that has started it, however that ends: a shell waits for the end of a pipe, kills the daemons
//! and removes the folder.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

// Also of another crate, which measures.
use super::programs::installed;

/// The OSDs.
pub const OSDS: usize = 3;
/// The pool.
pub const POOL: &str = "p";
/// A start of a cluster on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Reads process numbers, `-N` for one that has ended; kills all when the pipe ends, and removes the folder.
const REAPER: &str = "trap '' INT TERM HUP; all=' '; while read -r n; do case $n in -*) all=${all/ ${n#-} / };; \
                      *) all=\"$all$n \";; esac; done; kill -9 $all 2>/dev/null; sleep 0.3; rm -rf -- \"$0\"";

/// See the module's text.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    daemons: Mutex<BTreeMap<String, Child>>,
    reaper: Mutex<ChildStdin>,
}

/// The standard output of a command, which has to succeed.
#[track_caller]
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}{err}");
    out.trim().to_owned()
}

fn new_uuid() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().to_owned()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// The cluster of this process, which the first call starts. `None`: Ceph is not installed, which is reported, and an
    /// error if peers are required.
    #[track_caller]
    pub fn shared() -> Option<&'static Cluster> {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        for program in ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph", "rbd"] {
            installed(program, Command::new(program).arg("--version").output())?;
        }
        Some(SHARED.get_or_init(|| Cluster::start_at("127.0.0.1")))
    }

    /// A cluster at an address of this host.
    #[track_caller]
    pub fn start_at(address: &str) -> Cluster {
        let dir = tempfile::Builder::new().prefix("ferrite-ceph-").tempdir().unwrap().keep();
        let mut reaper = Command::new("bash");
        reaper.args(["-c", REAPER]).arg(&dir).process_group(0);
        let reaper = reaper.stdin(Stdio::piped()).spawn().unwrap().stdin.unwrap();
        let cluster = Cluster { dir, daemons: Mutex::default(), reaper: Mutex::new(reaper) };
        let port = TcpListener::bind((address, 0)).unwrap().local_addr().unwrap().port();
        let fsid = new_uuid();
        fs::write(cluster.conf(), configuration(&cluster.dir, &fsid, address, port)).unwrap();
        cluster.make_monitor(&fsid, address, port);
        cluster.start("mon.a");
        cluster.make_manager();
        cluster.start("mgr.x");
        for number in 0..OSDS {
            cluster.make_osd(number);
            cluster.start(&format!("osd.{number}"));
        }
        cluster.ceph(&["osd", "pool", "create", POOL, "8", "8"]);
        cluster.ceph(&["osd", "pool", "application", "enable", POOL, "rbd"]);
        cluster.wait_until_clean();
        cluster
    }

    fn make_monitor(&self, fsid: &str, address: &str, port: u16) {
        let (mon, admin) = (self.path("mon.keyring"), self.keyring());
        for (file, name, grants) in
            [(&mon, "mon.", &["mon"][..]), (&admin, "client.admin", &["mon", "osd", "mgr"][..])]
        {
            let mut tool = Command::new("ceph-authtool");
            tool.arg("--create-keyring").arg(file).args(["--gen-key", "-n", name]);
            for to in grants {
                tool.args(["--cap", to, "allow *"]);
            }
            succeed(&mut tool);
        }
        let mut tool = Command::new("ceph-authtool");
        succeed(tool.arg(&mon).arg("--import-keyring").arg(&admin));
        let (map, at) = (self.path("monmap"), format!("[v2:{address}:{port}]"));
        let mut tool = Command::new("monmaptool");
        succeed(tool.args(["--create", "--addv", "a", &at, "--fsid", fsid]).arg(&map));
        fs::create_dir(self.path("mon.a")).unwrap();
        let mut monitor = self.program("ceph-mon");
        monitor.args(["--mkfs", "-i", "a", "--monmap"]).arg(map).arg("--keyring").arg(mon);
        succeed(&mut monitor);
    }

    fn make_manager(&self) {
        fs::create_dir(self.path("mgr.x")).unwrap();
        let keyring = self.path("mgr.x/keyring");
        let grants = ["mon", "allow profile mgr", "osd", "allow *", "mds", "allow *", "-o"];
        let mut ceph = self.program("ceph");
        succeed(ceph.args(["auth", "get-or-create", "mgr.x"]).args(grants).arg(keyring));
    }

    fn make_osd(&self, number: usize) {
        let (name, uuid) = (format!("osd.{number}"), new_uuid());
        fs::create_dir(self.path(&name)).unwrap();
        let keyring = self.path(&name).join("keyring");
        let mut tool = Command::new("ceph-authtool");
        succeed(tool.arg("--create-keyring").arg(&keyring).args(["--gen-key", "-n", &name]));
        self.ceph(&["osd", "new", &uuid]);
        let grants =
            ["osd", "allow *", "mon", "allow profile osd", "mgr", "allow profile osd", "-i"];
        succeed(self.program("ceph").args(["auth", "add", &name]).args(grants).arg(keyring));
        let mut osd = self.program("ceph-osd");
        osd.args(["-i", &number.to_string(), "--mkfs", "--osd-uuid", &uuid]);
        succeed(osd.args(["--setuser", "root", "--setgroup", "root"]));
    }

    /// The cluster's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The configuration of its clients.
    pub fn conf(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// The key of the client `admin`, who may do all.
    pub fn keyring(&self) -> PathBuf {
        self.path("admin.keyring")
    }

    /// The folder that its files are in.
    pub fn folder(&self) -> &Path {
        &self.dir
    }

    /// The name of an image of the pool, as our programs take it.
    pub fn name(&self, image: &str, settings: &str) -> String {
        format!("rbd:{POOL}/{image}?conf={}{settings}", self.conf().display())
    }

    /// One of Ceph's programs with this cluster's configuration.
    pub fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("-c").arg(self.conf()).stdin(Stdio::null());
        command
    }

    /// Runs `ceph`, which has to succeed.
    #[track_caller]
    pub fn ceph(&self, args: &[&str]) -> String {
        succeed(self.program("ceph").args(["--connect-timeout", "60"]).args(args))
    }

    /// Runs `rbd`.
    pub fn try_rbd(&self, args: &[&str]) -> Output {
        self.program("rbd").args(args).output().unwrap()
    }

    /// Runs `rbd`, which has to succeed.
    #[track_caller]
    pub fn rbd(&self, args: &[&str]) -> String {
        succeed(self.program("rbd").args(args))
    }

    /// Makes an image of so many MiB in the pool.
    #[track_caller]
    pub fn image(&self, name: &str, mib: u64) {
        self.rbd(&["create", "--size", &format!("{mib}M"), &format!("{POOL}/{name}")]);
    }

    /// The bytes of an image as `rbd export` writes them.
    #[track_caller]
    pub fn content(&self, name: &str) -> Vec<u8> {
        let file = self.path(&format!("export-{}", name.replace('/', "-")));
        let _ = fs::remove_file(&file);
        let path = file.to_str().unwrap();
        self.rbd(&["export", "--no-progress", &format!("{POOL}/{name}"), path]);
        let bytes = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        bytes
    }

    /// Bytes of objects that an image has.
    #[track_caller]
    pub fn used(&self, name: &str) -> u64 {
        let said = self.rbd(&["du", "--format", "json", &format!("{POOL}/{name}")]);
        let field = said.rsplit_once("\"used_size\":").unwrap_or_else(|| panic!("{said}")).1;
        let digits: String = field.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    }

    /// Starts a daemon: `mon.a`, `mgr.x`, or `osd.` with a number. An OSD that was killed has lost its data in memory.
    pub fn start(&self, name: &str) {
        let (kind, id) = name.split_once('.').unwrap();
        let mut command = self.program(&format!("ceph-{kind}"));
        command.args(["-f", "-i", id]).stdout(Stdio::null()).stderr(Stdio::null());
        if kind != "mon" {
            command.args(["--setuser", "root", "--setgroup", "root"]);
        }
        let child = command.spawn().unwrap();
        self.reap_later(&child.id().to_string());
        lock(&self.daemons).insert(name.to_owned(), child);
    }

    /// Kills a daemon.
    pub fn kill(&self, name: &str) {
        let mut child = lock(&self.daemons).remove(name).expect("it runs");
        child.kill().unwrap();
        child.wait().unwrap();
        self.reap_later(&format!("-{}", child.id()));
    }

    /// Sends a signal to a daemon: a stopped one keeps its connections.
    pub fn signal(&self, name: &str, signal: Signal) {
        let daemons = lock(&self.daemons);
        kill_process(Pid::from_child(&daemons[name]), signal).unwrap();
    }

    fn reap_later(&self, line: &str) {
        lock(&self.reaper).write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Waits until all copies are there.
    #[track_caller]
    pub fn wait_until_clean(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let said = self.ceph(&["pg", "stat"]);
            // "9 pgs: 9 active+clean; ..."
            let mut words = said.split([' ', ';']);
            let (all, clean) = (words.next(), words.nth(1));
            if all == clean && said.contains("active+clean;") && all != Some("0") {
                return;
            }
            assert!(Instant::now() < end, "{said}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// The keyrings are in sections: one for all would be that of the manager and of the OSDs, too. With `autoscale` the manager would
/// split placement groups after some minutes, and requests would wait for a second then.
fn configuration(dir: &Path, fsid: &str, address: &str, port: u16) -> String {
    let dir = dir.display();
    format!(
        "[global]
fsid = {fsid}
mon host = v2:{address}:{port}
run dir = {dir}
log file = {dir}/$name.log
pid file = {dir}/$name.pid
admin socket = {dir}/$name.asok
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 3
osd pool default min size = 2
osd crush chooseleaf type = 0
ms bind msgr1 = false
public addr = {address}
cluster addr = {address}
mon allow pool delete = true
mon osd min down reporters = 1
osd heartbeat interval = 1
osd heartbeat grace = 6
osd objectstore = memstore
memstore device bytes = 1073741824
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mgr initial modules =
[mon]
mon data = {dir}/mon.a
keyring = {dir}/mon.keyring
[client]
keyring = {dir}/admin.keyring
log file =
admin socket =
[mgr]
mgr data = {dir}/mgr.x
keyring = {dir}/mgr.x/keyring
[osd]
osd data = {dir}/osd.$id
keyring = {dir}/osd.$id/keyring
"
    )
}
