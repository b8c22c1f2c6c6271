//! Compares NBD disks with qemu-nbd's: files of the same length, the same client, in turn.

use super::Setup;
use super::fio;
use super::image::filled;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Sample};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::steps;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PART: &str = "nbd";
const IMAGE_MIB: usize = 512;
/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(30);

/// A load: fio's name for it, the block size, the requests in flight, and the target.
struct Load(&'static str, &'static str, u32, f64);

const LOADS: &[Load] = &[
    Load("randread", "4k", 32, 1.3),
    Load("randwrite", "4k", 32, 1.3),
    Load("randread", "4k", 1, 1.0),
    Load("randwrite", "4k", 1, 1.0),
    Load("read", "1m", 8, 1.0),
    Load("write", "1m", 8, 1.0),
];
const VHD: Load = Load("randwrite", "4k", 8, 4.0);

/// A server, until this is dropped.
pub(crate) struct Server {
    child: Child,
    socket: PathBuf,
}

/// A load of fio's nbd engine.
pub(crate) struct Client {
    /// The value of `--rw`.
    pub(crate) mode: &'static str,
    /// The value of `--bs`.
    pub(crate) block: &'static str,
    pub(crate) depth: u32,
    pub(crate) mib: usize,
    pub(crate) seconds: f64,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It ends in good order: otherwise a journal of a removed image would stay.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// It ends, or does not listen.
    pub(crate) fn start(command: &mut Command, socket: &Path) -> Result<Server> {
        let _ = std::fs::remove_file(socket);
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {command:?}"))?;
        let mut server = Server { child, socket: socket.to_owned() };
        let end = Instant::now() + PATIENCE;
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{command:?} ended with {status}");
            }
            if Instant::now() > end {
                bail!("{command:?} does not listen");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    fn ferrite(setup: &Setup, image: &Path) -> Result<Server> {
        let socket = image.with_extension("ferrite.sock");
        let mut command = Command::new(setup.ferrite.program());
        command.args(["export", "nbd"]).arg(image).arg("--socket").arg(&socket);
        Server::start(&mut command, &socket)
    }

    fn qemu(image: &Path, format: &str, cache: &str) -> Result<Server> {
        let socket = image.with_extension("qemu.sock");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--aio=io_uring", "--shared=4", "--format", format]);
        command.arg(format!("--cache={cache}")).arg("--socket").arg(&socket).arg(image);
        Server::start(&mut command, &socket)
    }

    /// Runs fio on the server.
    ///
    /// # Errors
    /// fio failed, or the server has ended.
    pub(crate) fn run(&self, client: &Client) -> Result<Sample> {
        let Client { mode, block, depth, mib, seconds } = client;
        let uri = format!("nbd+unix:///?socket={}", self.socket.display());
        let mut command = Command::new("fio");
        command.args(["--name=peer", "--ioengine=nbd", "--norandommap", "--time_based"]);
        command.args(["--output-format=json", "--ramp_time=0.3", "--gtod_reduce=1", "--thread"]);
        command.arg(format!("--uri={uri}")).arg(format!("--rw={mode}"));
        command.arg(format!("--bs={block}")).arg(format!("--iodepth={depth}"));
        command.arg(format!("--runtime={}ms", (seconds * 1000.0).round()));
        command.arg(format!("--size={mib}m"));
        fio::watched(&mut command, Some(self.child.id()), mode, *seconds)
    }
}

impl Load {
    fn client(&self, setup: &Setup) -> Client {
        let Load(mode, block, depth, _) = *self;
        Client { mode, block, depth, mib: IMAGE_MIB, seconds: setup.seconds }
    }
}

/// Runs all measurements, on tmpfs and in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let memory = TempDir::new_in("/dev/shm")?;
    let on_disk = steps::target_dir().join("bench");
    std::fs::create_dir_all(&on_disk)?;
    let on_disk = TempDir::new_in(on_disk)?;
    let mut rows = Vec::new();
    for (place, dir, cache) in [("tmpfs", &memory, "writeback"), ("disk", &on_disk, "none")] {
        let (ours, theirs) = (dir.path().join("ours.img"), dir.path().join("theirs.img"));
        drop((filled(&ours, IMAGE_MIB)?, filled(&theirs, IMAGE_MIB)?));
        let ours = Server::ferrite(setup, &ours)?;
        let theirs = Server::qemu(&theirs, "raw", cache)?;
        for load in LOADS {
            rows.push(row(
                setup,
                place,
                load,
                || ours.run(&load.client(setup)),
                || theirs.run(&load.client(setup)),
            )?);
        }
    }
    rows.push(fresh_vhd(setup, memory.path())?);
    Ok(rows)
}

fn row(
    setup: &Setup,
    place: &str,
    load: &Load,
    ours: impl Fn() -> Result<Sample>,
    theirs: impl Fn() -> Result<Sample>,
) -> Result<Measurement> {
    let Load(mode, block, depth, target) = load;
    let name = format!("nbd, {place}, {block} {mode}, depth {depth}");
    let plan = Plan::new(name.clone()).add("qemu-nbd", theirs).add("ferrite", ours);
    let rounds = plan.run(setup.runs)?;
    let iops = |of: &str| rounds.each(|round| round.of(of).iops);
    let row = Measurement::of_runs(PART, name + ": rate", "IOPS", &iops("ferrite"));
    Ok(row.against_runs("qemu-nbd", &iops("qemu-nbd")).target(Target::AtLeast(*target)))
}

/// Writes into new space: each run has an image of its own.
fn fresh_vhd(setup: &Setup, dir: &Path) -> Result<Measurement> {
    let make = |name: &str| {
        let image = dir.join(name);
        let _ = std::fs::remove_file(&image);
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "vpc"]).arg(&image).arg(format!("{IMAGE_MIB}M"));
        let made = command.status().context("cannot start qemu-img")?;
        if !made.success() {
            bail!("qemu-img ended with {made}");
        }
        Ok(image)
    };
    let ours = || Server::ferrite(setup, &make("ours.vhd")?)?.run(&VHD.client(setup));
    let theirs = || Server::qemu(&make("theirs.vhd")?, "vpc", "writeback")?.run(&VHD.client(setup));
    row(setup, "fresh VHD on tmpfs", &VHD, ours, theirs)
}
