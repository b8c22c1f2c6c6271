//! A pool on this machine: an etcd and servers as processes, each server a host of its own (`net.rs`), and its disks.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ferrite_xenhost::packages;
use ferrite_xenhost::steps;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::super::Setup;
use super::super::ferrite::parse;
use super::super::rounds::Sample;
use super::GUEST;
use super::net::{Net, address};

/// The pool's name.
const POOL: &str = "bench";
const PATIENCE: Duration = Duration::from_secs(60);
const NAMES: [&str; 3] = ["a", "b", "c"];

/// A process that ends with this.
pub(super) struct Ends(pub(super) Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Ends {
    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), signal)?)
    }
}

/// A pool whose servers are `a`, `b` and so on.
pub(super) struct Pool<'a> {
    pub(super) setup: &'a Setup,
    // Servers end before the namespaces that they are in.
    servers: Vec<Option<Ends>>,
    _etcd: Ends,
    net: Net,
    pub(super) dir: TempDir,
    id: String,
}

impl<'a> Pool<'a> {
    /// A pool of so many servers, at most three. `bytes_per_s`: what the link of each carries in each direction.
    pub(super) fn start(
        setup: &'a Setup,
        servers: usize,
        bytes_per_s: Option<u64>,
    ) -> Result<Self> {
        packages::ensure(&[&[("etcd", "etcd-server"), ("nbdcopy", "libnbd-bin")]])?;
        let net = Net::start(servers, bytes_per_s)?;
        // Syncs are no matter here: they are the medium's, as those of the raw disk beside it.
        let dir = TempDir::new_in("/dev/shm")?;
        let log = File::create(dir.path().join("etcd.log"))?;
        let mut etcd = net.middle.command("etcd");
        etcd.args(["--name", POOL, "--data-dir"]).arg(dir.path().join("etcd"));
        etcd.args(["--listen-client-urls", "http://0.0.0.0:2379"]);
        etcd.args(["--advertise-client-urls", &url("127.0.0.1")]);
        etcd.args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
        let etcd = etcd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let etcd = Ends(etcd.context("cannot start etcd")?);
        let none = (0..servers).map(|_| None).collect();
        let mut pool = Pool { setup, servers: none, _etcd: etcd, net, dir, id: String::new() };
        let end = Instant::now() + PATIENCE;
        let made = loop {
            match pool.ferrite(&["init", POOL, "--json"]) {
                Ok(said) => break said,
                Err(e) if Instant::now() > end => return Err(e.context("etcd does not answer")),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        let made: Value = serde_json::from_str(&made).context("ferrite pool init says no JSON")?;
        pool.id = made["id"].as_str().context("a pool without an identifier")?.to_owned();
        (0..servers).try_for_each(|number| pool.serve(number))?;
        Ok(pool)
    }

    /// A program in the middle, which all servers have a link to.
    pub(super) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.net.middle.command(program);
        command.stdin(Stdio::null());
        command
    }

    /// What `ferrite pool` says.
    pub(super) fn ferrite(&self, words: &[&str]) -> Result<String> {
        let mut command = self.command(self.setup.ferrite.program());
        command.arg("pool").args(words).args(["--etcd", &url("127.0.0.1")]);
        steps::output(command.args(["--etcd-plain", "--experimental"]))
    }

    /// Starts a server, or starts it again.
    pub(super) fn serve(&mut self, number: usize) -> Result<()> {
        let name = NAMES[number];
        let folder = self.dir.path().join(name);
        fs::create_dir_all(&folder)?;
        let at = |is_middle| address(number, is_middle).to_string();
        let mut command = self.net.others[number].command(self.setup.ferrite.program());
        command.args(["pool", "serve", "--experimental", "--name", name, "--pool", &self.id]);
        command.args(["--listen", &format!("{}:10811", at(false)), "--plain"]);
        command.args(["--etcd", &url(&at(true)), "--etcd-plain"]).arg(folder);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.context("cannot start a server")?;
        let mut ready = String::new();
        let out = child.stdout.take().context("it was piped")?;
        let server = Ends(child);
        BufReader::new(out).read_line(&mut ready)?;
        ensure!(ready.starts_with("ready: "), "the server {name} is not ready: {ready}");
        self.servers[number] = Some(server);
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.status(POOL)?;
            let all = status["servers"].as_array().into_iter().flatten();
            if all.into_iter().any(|it| it["name"] == name && !it["address"].is_null()) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the server {name} does not announce itself");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills a server as a crash does.
    pub(super) fn kill(&mut self, number: usize) -> Result<()> {
        self.servers[number].take().map(drop).context("the server does not run")
    }

    /// A server that runs.
    pub(super) fn server(&self, number: usize) -> Result<&Ends> {
        self.servers[number].as_ref().context("the server does not run")
    }

    fn status(&self, of: &str) -> Result<Value> {
        let said = self.ferrite(&["status", of, "--json"])?;
        serde_json::from_str(&said).context("ferrite pool status says no JSON")
    }

    /// Whether all copies of a disk are in sync.
    pub(super) fn is_whole(&self, disk: &str) -> Result<bool> {
        let status = self.status(&format!("{POOL}/{disk}"))?;
        status["whole"].as_bool().context("the status of a disk says no more `whole`")
    }

    /// Makes a disk.
    pub(super) fn create(&self, disk: &str, mib: u64, more: &[&str]) -> Result<()> {
        let (name, size) = (format!("{POOL}/{disk}"), format!("{mib}M"));
        self.ferrite(&[&["create", &name, &size], more].concat()).map(drop)
    }

    /// Has `ferrite pool repair` bring all copies of a closed disk in sync.
    pub(super) fn repair(&self, disk: &str) -> Result<()> {
        self.ferrite(&["repair", &format!("{POOL}/{disk}")]).map(drop)
    }

    /// Takes a disk from its owner.
    pub(super) fn steal(&self, disk: &str) -> Result<()> {
        self.ferrite(&["steal", &format!("{POOL}/{disk}")]).map(drop)
    }

    /// The name by which a program in the middle opens a disk.
    pub(super) fn name(&self, disk: &str) -> String {
        format!("pool:{POOL}/{disk}?etcd={}&plain=yes&experimental=yes", url("127.0.0.1"))
    }

    /// The process that has a disk, on a socket of its own.
    pub(super) fn own(&self, disk: &str) -> Result<(Ends, PathBuf)> {
        let socket = self.dir.path().join(format!("{disk}.own"));
        let mut command = self.command(self.setup.ferrite.program());
        command.args(["pool", "own", "--experimental", "--pool", POOL, "--disk", disk, "--plain"]);
        command.args(["--etcd", &url("127.0.0.1"), "--unix"]).arg(&socket);
        let owner = Ends(command.stdout(Stdio::null()).spawn().context("cannot start an owner")?);
        wait_for_socket(&socket)?;
        Ok((owner, socket))
    }

    /// A guest on a disk, as it is started: `ferrite-bench`, which prints its report when it ends.
    pub(super) fn guest(&self, image: &str, seconds: f64, options: &str) -> Command {
        let mut command = self.command(self.setup.ferrite.bench_program());
        command.args([image, "--json", "--force-overwrite", "--seconds", &seconds.to_string()]);
        command
            .args(options.split_whitespace().chain(GUEST.split(' ')))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// One run of a guest.
    pub(super) fn bench(&self, image: &str, options: &str) -> Result<Sample> {
        let mut command = self.guest(image, self.setup.seconds, options);
        sample(&command.output().context("cannot start ferrite-bench")?)
    }
}

/// The figures of a guest's process.
pub(super) fn sample(output: &Output) -> Result<Sample> {
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("ferrite-bench ended with {}: {said}", output.status);
    }
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// etcd's address.
fn url(host: &str) -> String {
    format!("http://{host}:2379")
}

/// Waits until a server listens at this socket.
pub(super) fn wait_for_socket(socket: &std::path::Path) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        ensure!(Instant::now() < end, "no server listens at {}", socket.display());
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
