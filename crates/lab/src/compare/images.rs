//! Compares images with metadata with raw ones, on the same path.

mod huge;

use super::Setup;
use super::image;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Rounds, Sample};
use anyhow::{Context, Result};
use ferrite_xenhost::steps::{self, step};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const PART: &str = "images";
const MIB: usize = 1024;
/// Layers of the chain above its base.
const CHAIN: u32 = 20;
/// The size of the layers: each has nearly all of its blocks, so together they take twenty times that much of this
/// machine's memory.
const CHAIN_MIB: usize = 512;

/// Runs all measurements, in memory and in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let disk = steps::target_dir().join("bench");
    fs::create_dir_all(&disk)?;
    let mut rows = Vec::new();
    for (medium, dir) in [("tmpfs", Path::new("/dev/shm")), ("disk", &disk)] {
        let dir = Folder::make(dir)?;
        let set = Set::make(setup, medium, &dir.0, MIB)?;
        rows.extend(set.full()?);
        rows.extend(set.interleaved()?);
        if medium == "disk" {
            rows.extend(set.fresh()?);
            rows.extend(set.convert()?);
            rows.extend(huge::open(setup, &dir.0)?);
        }
    }
    let dir = Folder::make(Path::new("/dev/shm"))?;
    rows.extend(Set::make(setup, "tmpfs", &dir.0, CHAIN_MIB)?.chains()?);
    Ok(rows)
}

/// A folder of this program, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn make(parent: &Path) -> Result<Folder> {
        let path = parent.join(format!("ferrite-bench-images-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that cannot be removed stays.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The same contents as raw, VHD and qcow2, every block written.
struct Set<'a> {
    setup: &'a Setup,
    medium: &'static str,
    dir: &'a Path,
    raw: String,
    vhd: String,
    qcow2: String,
}

impl<'a> Set<'a> {
    fn make(setup: &'a Setup, medium: &'static str, dir: &'a Path, mib: usize) -> Result<Set<'a>> {
        let raw = file(dir, "full.raw");
        step(&format!("fill an image of {mib} MiB on {medium}"), || {
            image::filled(raw.as_ref(), mib)
        })?;
        let set = Set {
            setup,
            medium,
            dir,
            raw,
            vhd: file(dir, "full.vhd"),
            qcow2: file(dir, "full.qcow2"),
        };
        for to in [&set.vhd, &set.qcow2] {
            set.image(&["convert", &set.raw, to])?;
        }
        Ok(set)
    }

    /// Runs `ferrite image`.
    fn image(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.setup.ferrite.program());
        steps::output(command.arg("image").args(arguments))
    }

    /// Measures some images in turn, by one load.
    fn race(&self, name: &str, images: &[(&'static str, &str)], load: &str) -> Result<Rounds> {
        let mut plan = Plan::new(format!("{}: {name}", self.medium));
        for (name, image) in images {
            plan = plan.add(*name, move || self.setup.ferrite.bench(image, load));
        }
        plan.run(self.setup.runs)
    }

    fn rate(
        &self,
        name: String,
        rounds: &Rounds,
        ours: &str,
        peer: &str,
        least: f64,
    ) -> Measurement {
        let iops = |of: &str| rounds.each(|r| r.of(of).iops);
        Measurement::of_runs(PART, format!("{}, {name}", self.medium), "IOPS", &iops(ours))
            .against_runs(peer, &iops(peer))
            .target(Target::AtLeast(least))
    }

    fn full(&self) -> Result<Vec<Measurement>> {
        let images = [("raw", &*self.raw), ("vhd", &*self.vhd), ("qcow2", &*self.qcow2)];
        let mut rows = Vec::new();
        for (mode, depth) in
            [("randread", 1), ("randread", 32), ("randwrite", 1), ("randwrite", 32)]
        {
            let load = format!("--mode {mode} --depth {depth} --force-overwrite");
            let name = format!("4 KiB {mode}, depth {depth}");
            let rounds = self.race(&name, &images, &load)?;
            for (format, least) in [("vhd", 0.95), ("qcow2", 0.9)] {
                let name = format!("{name}: full {format}");
                rows.push(self.rate(name, &rounds, format, "raw", least));
            }
        }
        Ok(rows)
    }

    /// Partly filled images, and chains of many snapshots with writes to each.
    fn chains(&self) -> Result<Vec<Measurement>> {
        let (partial, chain) = (file(self.dir, "partial.vhd"), file(self.dir, "chain.vhd"));
        step("make a partly filled VHD and a chain", || {
            self.image(&["create", &partial, &format!("{CHAIN_MIB}M")])?;
            self.scatter(&partial)?;
            self.image(&["convert", &self.raw, &chain])?;
            for i in 0..CHAIN {
                let parent = file(self.dir, &format!("chain-{i}.vhd"));
                self.image(&["snapshot", &chain, &parent])?;
                self.scatter(&chain)?;
            }
            Ok(())
        })?;
        let images = [("full", &*self.vhd), ("partial", &*partial), ("chain", &*chain)];
        let mut rows = Vec::new();
        for depth in [1, 32] {
            let load = format!("--mode randread --depth {depth}");
            let rounds = self.race(&format!("chains, depth {depth}"), &images, &load)?;
            let name = |what| format!("4 KiB randread, depth {depth}: {what}");
            rows.push(self.rate(name("partly filled VHD"), &rounds, "partial", "full", 0.95));
            let what = "VHD behind a chain of 20";
            rows.push(self.rate(name(what), &rounds, "chain", "full", 0.8));
        }
        Ok(rows)
    }

    /// Writes to random places, for a moment.
    fn scatter(&self, image: &str) -> Result<()> {
        let load = "--mode randwrite --depth 32 --force-overwrite";
        self.setup.ferrite.bench_for(0.1, image, load).map(drop)
    }

    /// Writes to a new, empty disk, from the first moment on. It is compared with a full disk of its format, and with
    /// an empty raw file.
    fn fresh(&self) -> Result<Vec<Measurement>> {
        let load = "--mode randwrite --depth 32 --force-overwrite";
        let full =
            |image: &'static str| move || self.setup.ferrite.bench(&file(self.dir, image), load);
        let fresh = |format: &'static str| {
            move || -> Result<Sample> {
                let image = file(self.dir, &format!("fresh.{format}"));
                self.image(&["create", "--force", &image, "16G"])?;
                self.setup.ferrite.bench(&image, load)
            }
        };
        let rounds = Plan::new("disk: fresh images")
            .add("full raw", full("full.raw"))
            .add("full vhd", full("full.vhd"))
            .add("full qcow2", full("full.qcow2"))
            .add("fresh raw", fresh("raw"))
            .add("fresh vhd", fresh("vhd"))
            .add("fresh qcow2", fresh("qcow2"))
            .run(self.setup.runs)?;
        let name = |of: &str| format!("4 KiB randwrite, depth 32: {of}");
        let p99 = |of: &str| {
            let values = |of: &str| rounds.each(|r| r.of(of).p99_us);
            Measurement::of_runs(PART, format!("disk, {}: p99", name(of)), "us", &values(of))
                .against_runs("fresh raw", &values("fresh raw"))
        };
        let rate = |of, peer, least| self.rate(name(of), &rounds, of, peer, least);
        // The cost that the file system adds for unwritten space.
        let iops = |of: &str| rounds.each(|r| r.of(of).iops);
        let raw = format!("disk, {}", name("fresh raw"));
        let raw = Measurement::of_runs(PART, raw, "IOPS", &iops("fresh raw"));
        Ok(vec![
            rate("fresh vhd", "full vhd", 0.6),
            rate("fresh vhd", "fresh raw", 0.6),
            p99("fresh vhd").target(Target::AtMost(4.0)),
            rate("fresh qcow2", "full qcow2", 0.4),
            rate("fresh qcow2", "fresh raw", 0.4),
            p99("fresh qcow2"),
            raw.against_runs("full raw", &iops("full raw")),
        ])
    }

    /// Contiguous blocks of the disk that come out of order: a stretch of 112 KiB at once, as a guest's block layer
    /// sends it.
    fn interleaved(&self) -> Result<Vec<Measurement>> {
        let run = |options: &'static str| {
            let options = format!("--batch --depth 28 --block 4K {options}");
            move || self.setup.ferrite.bench(&self.vhd, &options)
        };
        let rounds = Plan::new(format!("{}: interleaved reads of a VHD", self.medium))
            .add("merging", run("--mode interleaved"))
            .add("without merging", run("--mode interleaved --no-merge"))
            .add("sequential", run("--mode read"))
            .run(self.setup.runs)?;
        let row = |peer, least| {
            let name = format!("112 KiB interleaved in 4 KiB reads, VHD, beside {peer}");
            self.rate(name, &rounds, "merging", peer, least)
        };
        Ok(vec![row("without merging", 3.0), row("sequential", 1.0 / 1.2)])
    }

    fn convert(&self) -> Result<Vec<Measurement>> {
        let raw = &*self.raw;
        let to = file(self.dir, "converted.vhd");
        let timed = |run: &dyn Fn() -> Result<()>| -> Result<Sample> {
            let began = Instant::now();
            run()?;
            // A rate, so that ratios read like all others: MiB per second.
            Ok(Sample { iops: MIB as f64 / began.elapsed().as_secs_f64(), ..Sample::UNKNOWN })
        };
        let ours = || self.image(&["convert", "--force", &self.raw, &to]).map(drop);
        let theirs = || {
            let mut command = Command::new("qemu-img");
            command.args(["convert", "-f", "raw", "-O", "vpc", "-T", "none", "-t", "none"]);
            steps::output(command.args([raw, &to])).map(drop)
        };
        let rounds = Plan::new("disk: raw to VHD")
            .add("ferrite", || timed(&ours))
            .add("qemu-img", || timed(&theirs))
            .run(self.setup.runs)?;
        let rate = |of: &str| rounds.each(|r| r.of(of).iops);
        let row = Measurement::of_runs(PART, "disk, convert raw to VHD", "MiB/s", &rate("ferrite"));
        Ok(vec![row.against_runs("qemu-img", &rate("qemu-img")).target(Target::AtLeast(1.0))])
    }
}

fn file(dir: &Path, name: &str) -> String {
    dir.join(name).display().to_string()
}
