//! The costs of a dirty map and a mirror for the guest: writes of a disk with them, beside the same disk without.
//!
//! Two equal raw images, on tmpfs and in the build folder's file system. The rings are the loopback's. A mirror that has
//! all begins with a map in which no bit is set. One that copies begins with all bits set. Its run is short, so that
//! the copy lasts as long.

use super::Setup;
use super::image::filled;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Sample};
use anyhow::{Context, Result};
use ferrite_disk::MirrorFile;
use ferrite_xenhost::steps;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const PART: &str = "mirror";
const IMAGE_MIB: usize = 1024;
/// Where the bits of a mirror's map begin (docs/internals/mirror.md 1).
const BITS_AT: u64 = 4096;
/// The name of the dirty map of a mirror.
const MIRROR_MAP: &str = "mirror-bench";
/// The longest run with a copy beside it.
const COPY_SECONDS: f64 = 0.5;

/// The loads: their options, and their name.
const LOADS: [(&str, &str); 2] = [
    ("--mode randwrite --block 4K --depth 32", "4 KiB randwrite, depth 32"),
    ("--mode write --block 128K --depth 8", "128 KiB write, depth 8"),
];

/// Two images with the same contents, in a folder.
struct Pair<'a> {
    setup: &'a Setup,
    dir: &'a Path,
}

/// Runs all measurements.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let memory = TempDir::new_in("/dev/shm")?;
    let on_disk = steps::target_dir().join("bench");
    std::fs::create_dir_all(&on_disk)?;
    let on_disk = TempDir::new_in(on_disk)?;
    let mut rows = Vec::new();
    for (place, dir) in [("tmpfs", &memory), ("disk", &on_disk)] {
        let pair = Pair { setup, dir: dir.path() };
        for name in ["plain.img", "mapped.img", "target.img"] {
            drop(filled(&pair.path(name), IMAGE_MIB)?);
        }
        for load in LOADS {
            rows.push(pair.mapped(place, load)?);
            rows.extend(pair.mirrored(place, load)?);
        }
    }
    Ok(rows)
}

impl Pair<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn dirty(&self, verb: &str, map: &str) -> Result<()> {
        let mut command = Command::new(self.setup.ferrite.program());
        let image = self.path("mapped.img");
        match verb {
            "mirror" => command.args(["image", "mirror-map", "begin"]).arg(image).arg(map),
            verb => command.args(["image", "dirty", verb]).arg(image).arg(map),
        };
        steps::output(&mut command).map(drop)
    }

    fn bench(&self, image: &str, seconds: f64, options: &str) -> Result<Sample> {
        let image = self.path(image);
        let image = image.to_str().context("the folder's name is no text")?;
        self.setup.ferrite.bench_for(seconds, image, &format!("{options} --force-overwrite"))
    }

    /// A mirror whose target lacks all, or nothing.
    fn bench_mirror(&self, lacks: bool, seconds: f64, options: &str) -> Result<Sample> {
        let [map, target] = ["map", "target.img"].map(|name| self.path(name));
        let bytes = (IMAGE_MIB as u64) << 20;
        let file = MirrorFile::create(&map, bytes)?;
        file.set_name(Some(MIRROR_MAP))?;
        if !lacks {
            let bits = vec![0; IMAGE_MIB / 8];
            File::options().write(true).open(&map)?.write_all_at(&bits, BITS_AT)?;
        }
        let (map, target) = (map.display(), target.display());
        let options = format!("{options} --mirror {target} --mirror-map {map}");
        self.bench("mapped.img", seconds, &options)
    }

    fn mapped(&self, place: &str, (options, load): (&str, &str)) -> Result<Measurement> {
        let seconds = self.setup.seconds;
        self.dirty("add", "bench")?;
        let name = format!("{place}, {load}, with a dirty map: rate");
        let rounds = Plan::new(name.clone())
            .add("without", || self.bench("plain.img", seconds, options))
            .add("with", || self.bench("mapped.img", seconds, options))
            .run(self.setup.runs)?;
        self.dirty("remove", "bench")?;
        let iops = |of: &str| rounds.each(|round| round.of(of).iops);
        let row = Measurement::of_runs(PART, name, "IOPS", &iops("with"));
        Ok(row.against_runs("without", &iops("without")).target(Target::AtLeast(0.95)))
    }

    fn mirrored(&self, place: &str, (options, load): (&str, &str)) -> Result<Vec<Measurement>> {
        let seconds = self.setup.seconds;
        let short = seconds.min(COPY_SECONDS);
        self.dirty("mirror", MIRROR_MAP)?;
        let name = |what: &str| format!("{place}, {load}, {what}: rate");
        let rounds = Plan::new(format!("{place}, {load}, mirrors"))
            .add("one leg", || self.bench("plain.img", seconds, options))
            .add("has all", || self.bench_mirror(false, seconds, options))
            .add("one leg, short", || self.bench("plain.img", short, options))
            .add("copies", || self.bench_mirror(true, short, options))
            .run(self.setup.runs)?;
        self.dirty("remove", MIRROR_MAP)?;
        let row = |what: &str, of: &str, peer: &str, target| {
            let iops = |of: &str| rounds.each(|round| round.of(of).iops);
            let row = Measurement::of_runs(PART, name(what), "IOPS", &iops(of));
            row.against_runs(peer, &iops(peer)).target(Target::AtLeast(target))
        };
        Ok(vec![
            row("a mirror that has all", "has all", "one leg", 0.9),
            row("a mirror that copies at full speed", "copies", "one leg, short", 0.6),
        ])
    }
}
