//! Compares backups with copies by qemu-img and nbdcopy of the same data to the same file system.

use super::Setup;
use super::image;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Rounds, Sample};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::packages::{self, Need};
use ferrite_xenhost::steps::{self, step};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PART: &str = "backup";
const MIB: u64 = 1 << 20;
/// The unit of scattered changes: that of the dirty maps in memory.
const BLOCK: u64 = 64 << 10;
/// One block of so many is changed before an incremental backup.
const CHANGED: u64 = 100;
/// How often the memory of a process is looked at.
const LOOK: Duration = Duration::from_millis(10);

const NBDCOPY: &[Need] = &[("nbdcopy", "libnbd-bin"), ("qemu-nbd", "qemu-utils")];

/// Runs all measurements, in the build folder's file system. The disk has so many GiB.
pub(super) fn run(setup: &Setup, gib: u32) -> Result<Vec<Measurement>> {
    packages::ensure(&[NBDCOPY])?;
    let parent = steps::target_dir().join("bench");
    let path = parent.join(format!("ferrite-bench-backup-{}", std::process::id()));
    fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    let bench = Bench { setup, dir: Folder(path), mib: u64::from(gib) * 1024 };
    let mut rows = bench.full()?;
    rows.extend(bench.restored()?);
    fs::remove_file(bench.file("half.raw"))?;
    rows.extend(bench.incremental()?);
    Ok(rows)
}

/// A folder of this program, removed at the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that cannot be removed stays.
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Bench<'a> {
    setup: &'a Setup,
    dir: Folder,
    mib: u64,
}

impl Bench<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    fn file(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn backup(&self, arguments: &[&str]) -> Result<Sample> {
        let mut command = Command::new(self.setup.ferrite.program());
        self.timed(command.args(["backup", "--quiet"]).args(arguments))
    }

    /// Runs a program whose results are durable when it ends. Its rate is in MiB of the disk per second.
    fn timed(&self, command: &mut Command) -> Result<Sample> {
        command.current_dir(&self.dir.0).stdout(Stdio::null());
        let began = Instant::now();
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let status = PathBuf::from(format!("/proc/{}/status", child.id()));
        let mut rss = 0.0_f64;
        let ended = loop {
            if let Some(kib) = peak_kib(&status) {
                rss = rss.max(kib);
            }
            match child.try_wait()? {
                Some(ended) => break ended,
                None => std::thread::sleep(LOOK),
            }
        };
        let seconds = began.elapsed().as_secs_f64();
        if !ended.success() {
            bail!("{command:?}: {ended}");
        }
        Ok(Sample { iops: self.mib as f64 / seconds, idle_rss_kib: rss, ..Sample::UNKNOWN })
    }

    /// A new file or folder of this name for a run.
    fn anew(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match path.symlink_metadata() {
            Ok(meta) if meta.is_dir() => fs::remove_dir_all(path)?,
            Ok(_) => fs::remove_file(path)?,
            Err(_) => {}
        }
        Ok(())
    }

    /// `nbdcopy` between two servers on images.
    fn nbdcopy(&self, from: [&str; 2], to: [&str; 2]) -> Result<Sample> {
        let mut command = Command::new("nbdcopy");
        command.args(["--flush", "--", "[", "qemu-nbd", "-r", "--cache=none", "--aio=native"]);
        command.args(["-f", from[0], from[1], "]"]);
        command.args(["[", "qemu-nbd", "--cache=none", "--aio=native", "--discard=unmap"]);
        self.timed(command.args(["-f", to[0], to[1], "]"]))
    }

    fn convert(&self, from: [&str; 2], to: [&str; 2]) -> Result<Sample> {
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-T", "none", "-t", "none", "-f", from[0], "-O", to[0]]);
        self.timed(command.args([from[1], to[1]]))
    }

    /// A full backup of a raw image whose every other 4 MiB are written, as a qcow2 image.
    fn full(&self) -> Result<Vec<Measurement>> {
        let (mib, half) = (self.mib, self.path("half.raw"));
        step(&format!("fill every other 4 MiB of an image of {mib} MiB"), || {
            half_full(&half, mib)
        })?;
        let ours = || {
            self.anew("b")?;
            self.backup(&["create", "--no-map", "half.raw", "b", "--name", "one"])
        };
        let theirs = || {
            self.anew("theirs.qcow2")?;
            self.convert(["raw", "half.raw"], ["qcow2", "theirs.qcow2"])
        };
        let copied = || {
            self.anew("copied.qcow2")?;
            let mut create = Command::new("qemu-img");
            create.current_dir(&self.dir.0).args(["create", "-q", "-f", "qcow2", "copied.qcow2"]);
            steps::output(create.arg(format!("{mib}M")))?;
            self.nbdcopy(["raw", "half.raw"], ["qcow2", "copied.qcow2"])
        };
        let rounds = Plan::new("full backups of a half-empty image")
            .add("ferrite", ours)
            .add("qemu-img", theirs)
            .add("nbdcopy", copied)
            .run(self.setup.runs)?;
        for name in ["theirs.qcow2", "copied.qcow2"] {
            self.anew(name)?;
        }
        Ok(against_both("full, half-empty", &rounds))
    }

    /// The backup that `full` has left is restored into a raw image.
    fn restored(&self) -> Result<Vec<Measurement>> {
        let ours = || {
            self.anew("out.raw")?;
            self.backup(&["restore", "b", "out.raw"])
        };
        let theirs = || {
            self.anew("out.raw")?;
            self.convert(["qcow2", "b/one.qcow2"], ["raw", "out.raw"])
        };
        let copied = || {
            self.anew("out.raw")?;
            File::create(self.path("out.raw"))?.set_len(self.mib * MIB)?;
            self.nbdcopy(["qcow2", "b/one.qcow2"], ["raw", "out.raw"])
        };
        let rounds = Plan::new("restores of a half-empty image")
            .add("ferrite", ours)
            .add("qemu-img", theirs)
            .add("nbdcopy", copied)
            .run(self.setup.runs)?;
        for name in ["out.raw", "b"] {
            self.anew(name)?;
        }
        Ok(against_both("restore, half-empty", &rounds))
    }

    /// An incremental backup after 1 % of the disk was changed, in one place or in blocks all over it.
    fn incremental(&self) -> Result<Vec<Measurement>> {
        let disk = self.path("full.raw");
        step(&format!("fill an image of {} MiB", self.mib), || {
            image::filled(&disk, usize::try_from(self.mib)?).map(drop)
        })?;
        let changed = |scattered: bool| -> Result<Sample> {
            let mut server = Changes::begin(self)?;
            server.write(self.mib * MIB, scattered)?;
            server.end()?;
            self.backup(&["create", "full.raw", "b", "--incremental"])
        };
        let full = || {
            self.anew("b")?;
            self.backup(&["create", "full.raw", "b", "--full"])
        };
        let rounds = Plan::new("incremental backups of a full image")
            .add("full", full)
            .add("one place", || changed(false))
            .add("scattered", || changed(true))
            .run(self.setup.runs)?;
        let time = |of: &str| rounds.each(|r| self.mib as f64 / r.of(of).iops * 1e3);
        let row = |of: &str| {
            let name = format!("incremental, 1 % changed, {of}: time");
            Measurement::of_runs(PART, name, "ms", &time(of)).against_runs("full", &time("full"))
        };
        let memory = rounds.each(|r| r.of("full").idle_rss_kib / 1024.0);
        Ok(vec![
            row("one place").target(Target::AtMost(0.03)),
            row("scattered"),
            Measurement::of_runs(PART, "full: memory", "MiB", &memory).target(Target::AtMost(64.0)),
        ])
    }
}

/// The peak of a process's resident memory.
fn peak_kib(status: &Path) -> Option<f64> {
    let text = fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn against_both(what: &str, rounds: &Rounds) -> Vec<Measurement> {
    let rate = |of: &str| rounds.each(|r| r.of(of).iops);
    let row = |peer: &'static str, least| {
        Measurement::of_runs(PART, format!("{what}, against {peer}"), "MiB/s", &rate("ferrite"))
            .against_runs(peer, &rate(peer))
            .target(Target::AtLeast(least))
    };
    let memory = rounds.each(|r| r.of("ferrite").idle_rss_kib / 1024.0);
    let memory = Measurement::of_runs(PART, format!("{what}: memory"), "MiB", &memory);
    vec![row("qemu-img", 1.5), row("nbdcopy", 1.2), memory.target(Target::AtMost(64.0))]
}

fn half_full(path: &Path, mib: u64) -> Result<()> {
    let source = path.with_extension("noise");
    image::filled(&source, 4).map(drop)?;
    let noise = fs::read(&source)?;
    fs::remove_file(source)?;
    let file = File::create(path)?;
    file.set_len(mib * MIB)?;
    for at in (0..mib).step_by(8) {
        let mut piece = noise.clone();
        piece.chunks_mut(4096).for_each(|block| block[..8].copy_from_slice(&at.to_le_bytes()));
        file.write_all_at(&piece[..(mib - at).min(4) as usize * MIB as usize], at * MIB)?;
    }
    file.sync_all().context("cannot make it durable")
}

/// A server of the disk that is being changed, so that its maps record that.
struct Changes<'a> {
    bench: &'a Bench<'a>,
    server: std::process::Child,
}

impl<'a> Changes<'a> {
    fn begin(bench: &'a Bench<'a>) -> Result<Changes<'a>> {
        let mut command = Command::new(bench.setup.ferrite.program());
        command.args(["export", "nbd", "full.raw", "--socket", "s"]).current_dir(&bench.dir.0);
        let server = command.stdout(Stdio::null()).spawn()?;
        let end = Instant::now() + Duration::from_secs(30);
        while !bench.path("s").exists() {
            if Instant::now() > end {
                bail!("the export does not begin");
            }
            std::thread::sleep(LOOK);
        }
        Ok(Changes { bench, server })
    }

    fn write(&mut self, bytes: u64, scattered: bool) -> Result<()> {
        let mut commands = String::new();
        match scattered {
            false => {
                let (at, end) = (bytes / 2, bytes / 2 + bytes / CHANGED);
                for at in (at..end).step_by(MIB as usize) {
                    commands += &format!("write -P 7 {at} {}\n", MIB.min(end - at));
                }
            }
            true => {
                for at in (0..bytes).step_by((BLOCK * CHANGED) as usize) {
                    commands += &format!("write -P 9 {at} {BLOCK}\n");
                }
            }
        }
        let script = self.bench.path("commands");
        fs::write(&script, commands + "flush\n")?;
        let mut qemu = Command::new("qemu-io");
        qemu.args(["-f", "raw", "nbd+unix:///?socket=s"]).current_dir(&self.bench.dir.0);
        let done = qemu.stdin(File::open(script)?).stdout(Stdio::null()).status()?;
        if !done.success() {
            bail!("qemu-io: {done}");
        }
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        let mut command = Command::new("kill");
        steps::output(command.arg(self.server.id().to_string()))?;
        self.server.wait()?;
        Ok(())
    }
}
