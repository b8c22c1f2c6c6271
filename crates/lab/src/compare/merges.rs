//! A merge below the leaf of a disk that is in use, compared with QEMU's `block-commit` on the same images and load.
//!
//! The chain is qcow2: a leaf, an image with half of the disk's blocks, and a base with all of them. It is made once, and
//! copied for each run. The load is fio's by NBD: for as long as the merge takes, and alone before and after it.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, step};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Setup;
use super::nbd::Server;
use super::result::{Measurement, Target};

const PART: &str = "merges";
/// The size of the disk. The image that is merged has half as much.
const MIB: u64 = 1024;
/// The most that a merge may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// fio's load.
const LOAD: &str = "--rw=randrw --bs=4k --iodepth=16";
/// The limit of a merge whose guest is to notice little.
const SPEED: &str = "64M";
const NAMES: [&str; 3] = ["base.qcow2", "mid.qcow2", "leaf.qcow2"];

/// The result of one merge.
#[derive(Clone, Copy)]
struct Merged {
    /// MiB of the merged image in a second.
    rate: f64,
    /// The load's rate meanwhile, by that without a merge.
    kept: f64,
}

/// Runs all measurements.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    packages::ensure(&[&[("qemu-storage-daemon", "qemu-utils")]])?;
    let made = TempDir::new_in("/dev/shm")?;
    step(&format!("a chain of {MIB} MiB on tmpfs"), || make(setup, made.path()))?;
    let (mut ours, mut slow, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    step(&format!("merges of a running chain, {} rounds", setup.runs), || {
        for _ in 0..setup.runs {
            ours.push(by_ferrite(setup, made.path(), None)?);
            theirs.push(by_qemu(setup, made.path())?);
            slow.push(by_ferrite(setup, made.path(), Some(SPEED))?);
        }
        Ok(())
    })?;
    let rate = |of: &[Merged]| of.iter().map(|merged| merged.rate).collect::<Vec<_>>();
    let kept = |of: &[Merged]| of.iter().map(|merged| merged.kept).collect::<Vec<_>>();
    let row = |what: &str, unit, values: &[f64]| {
        Measurement::of_runs(PART, format!("qcow2, tmpfs, in use: {what}"), unit, values)
    };
    Ok(vec![
        row("merge below the leaf", "MiB/s", &rate(&ours))
            .against_runs("block-commit", &rate(&theirs))
            .target(Target::AtLeast(1.5)),
        row("the guest's rate meanwhile", "", &kept(&ours))
            .against("alone", 1.0)
            .target(Target::AtLeast(0.6)),
        row("the guest's rate meanwhile, QEMU", "", &kept(&theirs)).against("alone", 1.0),
        row(&format!("the guest's rate, --speed {SPEED}"), "", &kept(&slow))
            .against("alone", 1.0)
            .target(Target::AtLeast(0.9)),
    ])
}

/// Makes the chain: names of parents are relative, so that a copy is a chain of its own.
fn make(setup: &Setup, dir: &Path) -> Result<()> {
    let [base, mid, leaf] = NAMES;
    let size = format!("{MIB}M");
    let image = |arguments: &[&str]| {
        let mut command = Command::new(setup.ferrite.program());
        steps::output(command.current_dir(dir).arg("image").args(arguments)).map(drop)
    };
    image(&["create", base, &size])?;
    // Each second stretch of 1 MiB is the middle image's.
    let io = |name: &str, pattern: u8, step: usize| {
        let mut command = Command::new("qemu-io");
        command.current_dir(dir).args(["-f", "qcow2"]);
        for at in (0..MIB).step_by(step) {
            command.args(["-c", &format!("write -P {pattern} {at}M 1M")]);
        }
        steps::output(command.arg(name)).map(drop)
    };
    io(base, 1, 1)?;
    image(&["create", "--parent", base, mid])?;
    io(mid, 2, 2)?;
    image(&["create", "--parent", mid, leaf])
}

/// A copy of the chain, in the same file system.
fn copy(made: &Path) -> Result<TempDir> {
    let dir = TempDir::new_in("/dev/shm")?;
    for name in NAMES {
        fs::copy(made.join(name), dir.path().join(name)).context("cannot copy the chain")?;
    }
    Ok(dir)
}

fn by_ferrite(setup: &Setup, made: &Path, speed: Option<&str>) -> Result<Merged> {
    let dir = copy(made)?;
    let path = |name: &str| dir.path().join(name);
    let mut command = Command::new(setup.ferrite.program());
    command.args(["export", "nbd"]).arg(path(NAMES[2])).arg("--socket").arg(path("nbd"));
    let server = Server::start(command.arg("--control").arg(path("control")), &path("nbd"))?;
    let merged = measure(setup, &path("nbd"), || {
        let mut merge = Command::new(setup.ferrite.program());
        merge.args(["disk", "coalesce", "tap/0", "--from"]).arg(path(NAMES[1]));
        merge.arg("--to").arg(path(NAMES[0])).arg("--run-dir").arg(path("control"));
        merge.args(speed.iter().flat_map(|speed| ["--speed", speed]));
        steps::output(&mut merge).map(drop)
    });
    drop(server);
    merged
}

fn by_qemu(setup: &Setup, made: &Path) -> Result<Merged> {
    let dir = copy(made)?;
    let path = |name: &str| dir.path().join(name);
    let mut command = Command::new("qemu-storage-daemon");
    let mut below = None;
    for name in NAMES {
        let node = name.trim_end_matches(".qcow2");
        let mut blockdev = json!({
            "driver": "qcow2", "node-name": node,
            "file": { "driver": "file", "filename": path(name) },
        });
        if let Some(below) = below {
            blockdev["backing"] = json!(below);
        }
        command.arg("--blockdev").arg(blockdev.to_string());
        below = Some(node);
    }
    command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", path("nbd").display()));
    command.args(["--export", "type=nbd,id=disk,node-name=leaf,name=,writable=on"]);
    let qmp = format!("socket,path={},server=on,wait=off,id=qmp", path("qmp").display());
    command.arg("--chardev").arg(qmp).args(["--monitor", "chardev=qmp"]);
    let server = Server::start(&mut command, &path("nbd"))?;
    let merged = measure(setup, &path("nbd"), || commit(&path("qmp")));
    drop(server);
    merged
}

/// Has QEMU merge the middle image, and waits until it has.
fn commit(socket: &Path) -> Result<()> {
    let stream = UnixStream::connect(socket).context("cannot reach QEMU's monitor")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let arguments = json!({
        "job-id": "merge", "device": "leaf", "top-node": "mid", "base-node": "base",
    });
    for order in [
        json!({ "execute": "qmp_capabilities" }),
        json!({ "execute": "block-commit", "arguments": arguments }),
    ] {
        writeln!(&stream, "{order}")?;
    }
    for line in BufReader::new(&stream).lines() {
        let said: Value = serde_json::from_str(&line?)?;
        ensure!(said["error"].is_null(), "QEMU refuses: {said}");
        if said["event"] == json!("BLOCK_JOB_COMPLETED") {
            ensure!(said["data"]["error"].is_null(), "the merge has failed: {said}");
            return Ok(());
        }
    }
    bail!("QEMU has closed its monitor")
}

/// The rate of a load while `merge` is done, by that before and after it: the leaf fills, and is faster then.
fn measure(setup: &Setup, socket: &Path, merge: impl FnOnce() -> Result<()>) -> Result<Merged> {
    let alone = || {
        let load = Load::start(socket)?;
        std::thread::sleep(Duration::from_secs_f64(setup.seconds));
        load.end()
    };
    let before = alone()?;
    let load = Load::start(socket)?;
    // fio has begun when the merge does.
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    merge()?;
    let took = begun.elapsed().as_secs_f64();
    let beside = load.end()?;
    let usual = f64::midpoint(before, alone()?);
    Ok(Merged { rate: MIB as f64 / 2.0 / took, kept: beside / usual })
}

/// A running fio.
struct Load {
    child: Child,
    log: PathBuf,
}

impl Load {
    fn start(socket: &Path) -> Result<Load> {
        let log = socket.with_extension("fio");
        let mut command = Command::new("fio");
        command.args([
            "--name=load",
            "--ioengine=nbd",
            "--norandommap",
            "--time_based",
            "--thread",
        ]);
        command.args(["--output-format=json", "--gtod_reduce=1", "--runtime=600"]);
        command.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
        command.arg(format!("--size={MIB}m")).args(LOAD.split(' '));
        command.stdout(fs::File::create(&log)?).stderr(Stdio::inherit());
        Ok(Load { child: command.spawn().context("cannot start fio")?, log })
    }

    /// Ends it; its requests a second.
    fn end(mut self) -> Result<f64> {
        kill_process(Pid::from_child(&self.child), Signal::INT)?;
        self.child.wait()?;
        let text = fs::read_to_string(&self.log)?;
        // It says before that it was interrupted.
        let begin = text.find("{\n").context("fio has no result")?;
        let said: Value =
            serde_json::from_str(&text[begin..]).context("fio's result is no JSON")?;
        let job = &said["jobs"][0];
        ensure!(job["error"] == json!(0), "fio has failed: {}", job["error"]);
        let rate = |way: &str| job[way]["iops"].as_f64();
        rate("read").zip(rate("write")).map(|(read, write)| read + write).context("no rate")
    }
}
