//! Compares a volume of a store with raw, on the same disk and path: the targets of issue 14.

use super::Setup;
use super::image;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Rounds, Sample};
use anyhow::{Context, Result, ensure};
use ferrite_xenhost::steps::{self, step};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const PART: &str = "store";
/// The map of such a volume is 12 MiB: 8 bytes a block of V2P, and 16 of P2M.
const VOLUME_MIB: usize = 2048;
/// The memory of a store by default.
const MEMORY: &str = "--metadata-cache 16M";
/// A volume whose V2P has 128 MiB, 8 times the memory, though it has few blocks.
const WIDE: &str = "64G";
/// The blocks of that volume, at random places: of 20 leaves of V2P 19 exist.
const WIDE_BLOCKS: u64 = 100_000;
const DISTINCT: &str = "--mode randwrite --depth 32 --distinct --force-overwrite";
const CHURN: &str = "--mode churn --depth 32 --distinct --force-overwrite";
/// The size of a store with free room.
const ROOM: &str = "16G";
const SNAPSHOTS: usize = 100;

/// Runs all measurements, in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let parent = steps::target_dir().join("bench");
    std::fs::create_dir_all(&parent)?;
    let folder = tempfile::Builder::new().prefix("ferrite-bench-store-").tempdir_in(&parent)?;
    let set = Set::make(setup, folder.path())?;
    let mut rows = set.reads()?;
    rows.extend(set.writes()?);
    rows.extend(set.snapshots()?);
    // There may be no room for both.
    drop(std::fs::remove_file(&set.raw));
    rows.extend(set.full()?);
    Ok(rows)
}

/// The same content as a raw image and as a volume.
struct Set<'a> {
    setup: &'a Setup,
    raw: String,
    store: String,
    full: String,
}

impl<'a> Set<'a> {
    fn make(setup: &'a Setup, dir: &Path) -> Result<Set<'a>> {
        let file = |name: &str| dir.join(name).display().to_string();
        let (raw, store, full) = (file("disk.raw"), file("pool.store"), file("full.store"));
        let set = Set { setup, raw, store, full };
        step(&format!("fill a raw image and two volumes of {VOLUME_MIB} MiB"), || {
            image::filled(set.raw.as_ref(), VOLUME_MIB)?;
            set.fill(&set.store, ROOM)?;
            // One volume leaves a tenth of the store free, besides the journal. Half of that is for the store's own
            // work.
            set.fill(&set.full, &format!("{}M", VOLUME_MIB * 119 / 100))
        })?;
        Ok(set)
    }

    fn ferrite(&self, arguments: &[&str]) -> Result<String> {
        steps::output(Command::new(self.setup.ferrite.program()).args(arguments))
    }

    /// A new store with the image as a volume.
    fn fill(&self, store: &str, size: &str) -> Result<()> {
        self.ferrite(&["store", "create", store, "--size", size])?;
        self.ferrite(&["image", "convert", &self.raw, &format!("store:{store}#disk")])?;
        // Equal blocks would be measured as a gain of deduplication.
        let stats = self.ferrite(&["store", "stats", store, "--json"])?;
        let stats: Value = serde_json::from_str(&stats)?;
        let of = |name: &str| stats[name].as_u64().context("stats lack a figure");
        let whole = (VOLUME_MIB << 20) as u64;
        let (mapped, distinct) = (of("mapped_bytes")?, of("distinct_bytes")?);
        ensure!((mapped, distinct) == (whole, whole), "{mapped} bytes, {distinct} distinct");
        Ok(())
    }

    fn volume(&self, name: &str) -> String {
        format!("store:{}#{name}", self.store)
    }

    /// A run on a volume of a store without garbage.
    fn bench(&self, store: &str, volume: &str, load: &str) -> Result<Sample> {
        self.ferrite(&["store", "gc", store])?;
        self.setup.ferrite.bench(&format!("store:{store}#{volume}"), load)
    }

    /// Measures a volume and raw in turn, by one load.
    fn race(&self, name: &str, load: &str, volume: &str) -> Result<Rounds> {
        let ours = format!("{load} {MEMORY}");
        Plan::new(format!("store: {name}"))
            .add("raw", || self.setup.ferrite.bench(&self.raw, load))
            .add("store", || self.bench(&self.store, volume, &ours))
            .run(self.setup.runs)
    }

    /// Makes a volume whose map does not fit into memory.
    fn widen(&self) -> Result<()> {
        self.ferrite(&["store", "create", &format!("{}#wide", self.store), WIDE])?;
        let load = format!("{DISTINCT} {MEMORY}");
        step(&format!("write to {WIDE_BLOCKS} blocks of a volume of {WIDE}"), || {
            // Each run writes the same blocks in the same order.
            let mut seconds = 4.0;
            while self.mapped("wide")? < WIDE_BLOCKS * 4096 {
                self.setup.ferrite.bench_for(seconds, &self.volume("wide"), &load)?;
                seconds *= 2.0;
            }
            Ok(())
        })
    }

    /// Bytes that a volume has mapped.
    fn mapped(&self, volume: &str) -> Result<u64> {
        let stats = self.ferrite(&["store", "stats", &self.store, "--json"])?;
        let stats: Value = serde_json::from_str(&stats)?;
        let volumes = stats["volumes"].as_array().context("stats lack volumes")?;
        let its = volumes.iter().find(|its| its["name"] == volume);
        its.and_then(|its| its["mapped_bytes"].as_u64()).context("stats lack a volume")
    }

    fn reads(&self) -> Result<Vec<Measurement>> {
        let name = "1 MiB reads of what was written in order, depth 8";
        let rounds = self.race(name, "--mode read --block 1M --depth 8", "disk")?;
        let mut rows = vec![rate(name, &rounds, "raw", 0.9)];
        let name = "4 KiB random reads, depth 32";
        let rounds = self.race(name, "--mode randread --depth 32", "disk")?;
        rows.push(rate(name, &rounds, "raw", 0.9));
        rows.push(cpu(name, &rounds).target(Target::AtMost(1.5)));
        Ok(rows)
    }

    fn writes(&self) -> Result<Vec<Measurement>> {
        self.widen()?;
        let same = "--mode randwrite --depth 32 --force-overwrite";
        let flushed = "--mode flush --depth 1 --distinct --force-overwrite";
        let loads = [
            ("4 KiB random writes, depth 32", DISTINCT, "disk", 0.7),
            ("4 KiB random writes, depth 32, map 8 times its memory", DISTINCT, "wide", 0.35),
            ("4 KiB random writes of what it has, depth 32", same, "disk", 1.2),
            ("4 KiB random writes, depth 1, each flushed", flushed, "disk", 0.6),
        ];
        let mut rows = Vec::new();
        for (name, load, volume, least) in loads {
            let rounds = self.race(name, load, volume)?;
            rows.push(rate(name, &rounds, "raw", least));
            rows.push(cpu(name, &rounds));
        }
        Ok(rows)
    }

    /// Two clones of one volume, one of which has had many snapshots, with writes in between.
    fn snapshots(&self) -> Result<Vec<Measurement>> {
        let load = format!("{DISTINCT} {MEMORY}");
        step(&format!("make {SNAPSHOTS} snapshots"), || {
            let disk = format!("{}#disk", self.store);
            for clone in ["none", "many"] {
                self.ferrite(&["store", "clone", &disk, clone])?;
            }
            for i in 0..SNAPSHOTS {
                let many = format!("{}#many", self.store);
                self.ferrite(&["store", "snapshot", &many, &format!("s{i}")])?;
                if i % 10 == 0 {
                    self.setup.ferrite.bench_for(0.1, &self.volume("many"), &load)?;
                }
            }
            Ok(())
        })?;
        let name = format!("4 KiB random writes, depth 32, of a volume with {SNAPSHOTS} snapshots");
        let rounds = Plan::new(format!("store: {name}"))
            .add("none", || self.bench(&self.store, "none", &load))
            .add("store", || self.bench(&self.store, "many", &load))
            .run(self.setup.runs)?;
        Ok(vec![rate(&name, &rounds, "none", 0.9)])
    }

    /// A store that has to collect garbage during writes.
    fn full(&self) -> Result<Vec<Measurement>> {
        let beside_empty = |name: &str, load: &str| {
            let load = format!("{load} {MEMORY}");
            let full = format!("store:{}#disk", self.full);
            Plan::new(format!("store: {name}"))
                .add("empty", || self.bench(&self.store, "disk", &load))
                .add("store", || self.setup.ferrite.bench(&full, &load))
                .run(self.setup.runs)
        };
        let writes = "4 KiB random writes, depth 32, nine tenths full";
        let reads = "4 KiB random reads beside as many overwrites, nine tenths full: 99 % are answered within";
        let rounds = beside_empty(reads, CHURN)?;
        let p99 = |of: &str| rounds.each(|r| r.of(of).p99_us);
        let late = Measurement::of_runs(PART, reads, "us", &p99("store"))
            .against_runs("empty", &p99("empty"))
            .target(Target::AtMost(3.0));
        Ok(vec![rate(writes, &beside_empty(writes, DISTINCT)?, "empty", 0.5), late])
    }
}

fn row(name: &str, rounds: &Rounds, peer: &str) -> Measurement {
    let iops = |of: &str| rounds.each(|r| r.of(of).iops);
    Measurement::of_runs(PART, name, "IOPS", &iops("store")).against_runs(peer, &iops(peer))
}

fn rate(name: &str, rounds: &Rounds, peer: &str, least: f64) -> Measurement {
    row(name, rounds, peer).target(Target::AtLeast(least))
}

fn cpu(name: &str, rounds: &Rounds) -> Measurement {
    let cpu = |of: &str| rounds.each(|r| r.of(of).cpu_us);
    let name = format!("{name}: CPU a request");
    Measurement::of_runs(PART, name, "us", &cpu("store")).against_runs("raw", &cpu("raw"))
}
