//! Compares the path to a real disk, past the page cache, with fio.

use super::Setup;
use super::fio::{self, Job};
use super::image::Image;
use super::result::{Measurement, Target};
use super::rounds::Plan;
use anyhow::Result;
use ferrite_xenhost::steps;

const PART: &str = "disk";
const IMAGE_MIB: usize = 2048;

/// A load: fio's name for it, the block size in fio's and ferrite's spelling and in the table, and
/// the requests in flight.
struct Load {
    mode: &'static str,
    block: &'static str,
    shown: &'static str,
    depth: u32,
}

const fn random(mode: &'static str, depth: u32) -> Load {
    Load { mode, block: "4k", shown: "4 KiB", depth }
}

const fn sequential(mode: &'static str) -> Load {
    Load { mode, block: "1m", shown: "1 MiB", depth: 8 }
}

const LOADS: &[Load] = &[
    random("randread", 8),
    random("randread", 32),
    random("randwrite", 8),
    random("randwrite", 32),
    sequential("read"),
    sequential("write"),
];

const POLLING: &str = "polling";

/// Runs all measurements, in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let image = Image::make(&steps::target_dir().join("bench"), IMAGE_MIB)?;
    let image = image.path();
    let mut rows = Vec::new();
    for mode in ["randread", "randwrite"] {
        rows.extend(one_at_a_time(setup, &image, mode)?);
    }
    for load in LOADS {
        rows.push(many_at_a_time(setup, &image, load)?);
    }
    rows.extend(engines(setup, &image)?);
    rows.extend(merging(setup, &image)?);
    Ok(rows)
}

impl Load {
    fn job<'a>(&self, image: &'a str) -> Job<'a> {
        let Load { mode, block, depth, .. } = *self;
        Job { image, mode, block, depth, direct: true, timed: depth == 1 }
    }

    fn options(&self) -> String {
        let Load { mode, block, depth, .. } = self;
        format!("--mode {mode} --block {block} --depth {depth} --force-overwrite")
    }

    fn name(&self) -> String {
        format!("disk, {} {}, depth {}", self.shown, self.mode, self.depth)
    }
}

fn many_at_a_time(setup: &Setup, image: &str, load: &Load) -> Result<Measurement> {
    let rounds = Plan::new(load.name())
        .add("fio", || fio::run(&load.job(image), setup.seconds))
        .add("ferrite", || setup.ferrite.bench(image, &load.options()))
        .run(setup.runs)?;
    let ours = rounds.each(|r| r.of("ferrite").iops);
    let row = Measurement::of_runs(PART, load.name() + ": rate", "IOPS", &ours)
        .against_runs("fio", &rounds.each(|r| r.of("fio").iops));
    // With small requests no disk behind another process reaches fio: part `bound` has their target.
    Ok(if load.block == "1m" { row.target(Target::AtLeast(0.95)) } else { row })
}

/// The time that the path adds to a single request in flight. The guest stays awake: the time that this machine takes
/// to wake it does not belong to the backend.
fn one_at_a_time(setup: &Setup, image: &str, mode: &'static str) -> Result<Vec<Measurement>> {
    let load = random(mode, 1);
    // The ways of waiting, their options, and the time that each may add.
    let waits = [("events", "--poll-us 0", 20.0), (POLLING, "--poll-us auto", 10.0)];
    let mut plan = Plan::new(load.name()).add("fio", || fio::run(&load.job(image), setup.seconds));
    for (name, options, _) in &waits {
        let options = format!("{} --guest-poll 1000 {options}", load.options());
        plan = plan.add(*name, move || setup.ferrite.bench(image, &options));
    }
    let rounds = plan.run(setup.runs)?;
    let rows = |(wait, _, most): &(&str, &str, f64)| {
        let row = |what: &str, added: &[f64]| {
            let name = format!("{}, {wait}: added to fio's {what} latency", load.name());
            Measurement::of_runs(PART, name, "us", added)
        };
        let mean = rounds.each(|r| r.of(wait).lat_us - r.of("fio").lat_us);
        let p50 = rounds.each(|r| r.of(wait).p50_us - r.of("fio").p50_us);
        [row("mean", &mean).target(Target::AtMost(*most)), row("median", &p50)]
    };
    let mut rows: Vec<_> = waits.iter().flat_map(rows).collect();
    let wake_up = rounds.each(|r| r.of(POLLING).wake_up_us);
    let name = format!("{}, beside this: waking a thread here takes", load.name());
    rows.push(Measurement::of_runs(PART, name, "us", &wake_up));
    Ok(rows)
}

fn engines(setup: &Setup, image: &str) -> Result<Vec<Measurement>> {
    let mut rows = Vec::new();
    for mode in ["randread", "randwrite"] {
        let load = random(mode, 32);
        let run = |engine: &'static str| {
            let options = format!("{} --engine {engine}", load.options());
            move || setup.ferrite.bench(image, &options)
        };
        let rounds = Plan::new(format!("{}: engines", load.name()))
            .add("io_uring", run("uring"))
            .add("aio", run("aio"))
            .run(setup.runs)?;
        let ours = rounds.each(|r| r.of("aio").iops);
        let row = Measurement::of_runs(PART, load.name() + ", aio: rate", "IOPS", &ours)
            .against_runs("io_uring", &rounds.each(|r| r.of("io_uring").iops));
        rows.push(row.target(Target::AtLeast(0.85)));
    }
    Ok(rows)
}

/// Merges adjacent requests of a sweep into one operation, or not.
fn merging(setup: &Setup, image: &str) -> Result<Vec<Measurement>> {
    let load = random("read", 32);
    let run = |option: &'static str| {
        let options = format!("{} {option}", load.options());
        move || setup.ferrite.bench(image, &options)
    };
    let rounds = Plan::new(format!("{}: merging", load.name()))
        .add("apart", run("--no-merge"))
        .add("merged", run(""))
        .run(setup.runs)?;
    let ours = rounds.each(|r| r.of("merged").iops);
    let row = Measurement::of_runs(PART, load.name() + ", merging: rate", "IOPS", &ours);
    Ok(vec![row.against_runs("--no-merge", &rounds.each(|r| r.of("apart").iops))])
}
