//! Disks by NBD: served beside qemu-nbd, by TLS beside nbdkit (`tls.rs`), and as the data of a disk (`remote.rs`). The
//! client of both servers of a row is the same, and so is the server of both clients. They run in turn.

use super::Setup;
use super::fio;
use super::image::filled;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Sample};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::packages::{self, Need};
use ferrite_xenhost::steps;
use rustix::process::{Pid, Signal, kill_process};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

mod remote;
mod tls;

const PART: &str = "nbd";
const IMAGE_MIB: usize = 512;
/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(30);
/// What this part needs besides those of all parts.
const NEEDS: &[Need] = &[
    ("qemu-nbd", "qemu-utils"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdkit", "nbdkit"),
    ("openssl", "openssl"),
];

/// A load: fio's name for it, the block size, the requests in flight, and the target.
struct Load(&'static str, &'static str, u32, f64);

/// The loads of a raw disk in a place whose target for random reads is the first number.
fn loads(reads: f64) -> [Load; 6] {
    [
        Load("randread", "4k", 32, reads),
        Load("randwrite", "4k", 32, 1.3),
        Load("randread", "4k", 1, 1.1),
        Load("randwrite", "4k", 1, 1.0),
        Load("read", "1m", 8, 1.0),
        Load("write", "1m", 8, 1.0),
    ]
}

const VHD: Load = Load("randwrite", "4k", 8, 4.0);

/// A server, until this is dropped.
pub(crate) struct Server {
    child: Child,
    place: Place,
}

/// Where a server listens.
enum Place {
    Unix(PathBuf),
    Tcp(u16),
}

impl Place {
    fn listens(&self) -> bool {
        match self {
            Place::Unix(path) => UnixStream::connect(path).is_ok(),
            Place::Tcp(port) => TcpStream::connect(("127.0.0.1", *port)).is_ok(),
        }
    }
}

/// A TCP port that no process listens at now.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
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
        if let Place::Unix(socket) = &self.place {
            let _ = std::fs::remove_file(socket);
        }
    }
}

impl Server {
    /// Starts a server on a Unix socket.
    ///
    /// # Errors
    /// It ends, or does not listen.
    pub(crate) fn start(command: &mut Command, socket: &Path) -> Result<Server> {
        let _ = std::fs::remove_file(socket);
        Server::start_at(command, Place::Unix(socket.to_owned()))
    }

    fn start_at(command: &mut Command, place: Place) -> Result<Server> {
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {command:?}"))?;
        let mut server = Server { child, place };
        let end = Instant::now() + PATIENCE;
        while !server.place.listens() {
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

    /// `ferrite export nbd` of an image, with its socket in `dir`.
    fn ferrite(setup: &Setup, image: &Path, dir: &Path) -> Result<Server> {
        let socket = dir.join("ferrite.sock");
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

    /// The server's export in clear.
    fn uri(&self) -> String {
        match &self.place {
            Place::Unix(socket) => format!("nbd+unix:///?socket={}", socket.display()),
            Place::Tcp(port) => format!("nbd://localhost:{port}/"),
        }
    }

    /// Runs fio on the server.
    ///
    /// # Errors
    /// fio failed, or the server has ended.
    pub(crate) fn run(&self, client: &Client) -> Result<Sample> {
        self.run_fio(client, &["--gtod_reduce=1"])
    }

    /// As [`run`](Self::run), with the time of each request.
    fn run_timed(&self, client: &Client) -> Result<Sample> {
        let times =
            "--disable_slat=1 --lat_percentiles=1 --clat_percentiles=0 --percentile_list=50";
        self.run_fio(client, &times.split_whitespace().collect::<Vec<_>>())
    }

    fn run_fio(&self, client: &Client, times: &[&str]) -> Result<Sample> {
        let Client { mode, block, depth, mib, seconds } = client;
        let uri = self.uri();
        let mut command = Command::new("fio");
        command.args(["--name=peer", "--ioengine=nbd", "--norandommap", "--time_based"]);
        command.args(["--output-format=json", "--ramp_time=0.3", "--thread"]).args(times);
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

/// A copy of a whole disk: its rate in MB/s as `iops`.
fn copied(program: &Path, args: &[&str]) -> Result<Sample> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
    let began = Instant::now();
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mb = (IMAGE_MIB << 20) as f64 / 1e6;
    Ok(Sample { iops: mb / began.elapsed().as_secs_f64(), ..Sample::UNKNOWN })
}

fn nbdcopy(args: &[&str]) -> Result<Sample> {
    copied(Path::new("nbdcopy"), args)
}

/// Runs all measurements, on tmpfs and in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    packages::ensure(&[NEEDS])?;
    let memory = TempDir::new_in("/dev/shm")?;
    let on_disk = steps::target_dir().join("bench");
    std::fs::create_dir_all(&on_disk)?;
    let on_disk = TempDir::new_in(on_disk)?;
    let mut rows = without_storage(setup, memory.path())?;
    for (place, dir, cache, reads) in
        [("tmpfs", &memory, "writeback", 3.0), ("disk", &on_disk, "none", 2.0)]
    {
        let (ours, theirs) = (dir.path().join("ours.img"), dir.path().join("theirs.img"));
        drop((filled(&ours, IMAGE_MIB)?, filled(&theirs, IMAGE_MIB)?));
        rows.extend(raw(setup, place, (&ours, &theirs), cache, reads)?);
        for (format, name) in [("qcow2", "qcow2"), ("vpc", "VHD")] {
            rows.extend(in_format(setup, place, dir.path(), (format, name), cache, reads)?);
        }
        drop((std::fs::remove_file(ours), std::fs::remove_file(theirs)));
    }
    rows.push(fresh_vhd(setup, memory.path())?);
    rows.extend(tls::run(setup, memory.path())?);
    rows.extend(remote::run(setup, memory.path())?);
    Ok(rows)
}

/// Disks without storage: what the client and the protocol leave.
fn without_storage(setup: &Setup, dir: &Path) -> Result<Vec<Measurement>> {
    let ours = Server::ferrite(setup, Path::new(&format!("null:{IMAGE_MIB}M")), dir)?;
    let socket = dir.join("null.qemu.sock");
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared=4", "--image-opts", "--socket"]).arg(&socket);
    command.arg(format!("driver=null-co,size={IMAGE_MIB}M,read-zeroes=on"));
    let theirs = Server::start(&mut command, &socket)?;
    let load = |depth| Load("randread", "4k", depth, 1.0);
    [32, 1].map(load).iter().map(|load| beside(setup, "null", load, &ours, &theirs)).collect()
}

/// Raw disks, and copies of them.
fn raw(
    setup: &Setup,
    place: &str,
    (ours, theirs): (&Path, &Path),
    cache: &str,
    reads: f64,
) -> Result<Vec<Measurement>> {
    let ours = Server::ferrite(setup, ours, ours.parent().context("it has a folder")?)?;
    let theirs = Server::qemu(theirs, "raw", cache)?;
    let each = loads(reads);
    let rows = each.iter().map(|load| beside(setup, place, load, &ours, &theirs));
    let mut rows = rows.collect::<Result<Vec<_>>>()?;
    let copy = |server: &Server| nbdcopy(&[&server.uri(), "null:"]);
    let name = format!("nbd, {place}, nbdcopy to nothing");
    let plan =
        Plan::new(name.clone()).add("qemu-nbd", || copy(&theirs)).add("ferrite", || copy(&ours));
    let rounds = plan.run(setup.runs)?;
    let rate = |of: &str| rounds.each(|round| round.of(of).iops);
    let row = Measurement::of_runs(PART, name + ": rate", "MB/s", &rate("ferrite"));
    rows.push(row.against_runs("qemu-nbd", &rate("qemu-nbd")).target(Target::AtLeast(1.3)));
    Ok(rows)
}

/// Disks of a format, full of data.
fn in_format(
    setup: &Setup,
    place: &str,
    dir: &Path,
    (format, name): (&str, &str),
    cache: &str,
    reads: f64,
) -> Result<Vec<Measurement>> {
    let full = |whose: &str| -> Result<PathBuf> {
        let image = dir.join(format!("{whose}.{}", if format == "vpc" { "vhd" } else { format }));
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-q", "-f", "raw", "-O", format]);
        steps::output(convert.arg(dir.join("ours.img")).arg(&image))?;
        Ok(image)
    };
    let images = [full("ours")?, full("theirs")?];
    let ours = Server::ferrite(setup, &images[0], dir)?;
    let theirs = Server::qemu(&images[1], format, cache)?;
    let place = format!("{name} on {place}");
    let loads = [Load("randread", "4k", 32, reads), Load("randwrite", "4k", 32, 1.3)];
    let rows = loads.iter().map(|load| beside(setup, &place, load, &ours, &theirs)).collect();
    drop((ours, theirs));
    images.iter().try_for_each(std::fs::remove_file)?;
    rows
}

/// A load on both servers.
fn beside(
    setup: &Setup,
    place: &str,
    load: &Load,
    ours: &Server,
    theirs: &Server,
) -> Result<Measurement> {
    let client = load.client(setup);
    row(setup, place, load, || ours.run(&client), || theirs.run(&client))
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
    let ours = || Server::ferrite(setup, &make("ours.vhd")?, dir)?.run(&VHD.client(setup));
    let theirs = || Server::qemu(&make("theirs.vhd")?, "vpc", "writeback")?.run(&VHD.client(setup));
    row(setup, "fresh VHD on tmpfs", &VHD, ours, theirs)
}
