//! Compares the path to a real disk with the least that two processes can do (`crate::run::bound`): a shared ring, two
//! eventfds, io_uring with fixed buffers and files, and one copy per request. fio has no second process between it
//! and the disk, so no backend reaches fio.

use super::Setup;
use super::fio::{self, Job};
use super::image::Image;
use super::result::{Measurement, Target};
use super::rounds::Plan;
use anyhow::Result;
use ferrite_xenhost::steps;

const PART: &str = "bound";
const IMAGE_MIB: usize = 2048;
const DEPTHS: [u32; 3] = [1, 8, 32];
/// The waiting methods of both, and for how many microseconds both poll before they sleep.
const WAITS: [(&str, u32); 2] = [("events", 0), ("polling", 200)];

/// Runs all measurements, in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let image = Image::make(&steps::target_dir().join("bench"), IMAGE_MIB)?;
    let image = image.path();
    let mut rows = Vec::new();
    for (wait, poll_us) in WAITS {
        for mode in ["randread", "randwrite"] {
            for depth in DEPTHS {
                rows.extend(beside(setup, &image, mode, depth, wait, poll_us)?);
            }
        }
    }
    Ok(rows)
}

fn beside(
    setup: &Setup,
    image: &str,
    mode: &'static str,
    depth: u32,
    wait: &str,
    poll_us: u32,
) -> Result<Vec<Measurement>> {
    let options = format!("--mode {mode} --depth {depth} --force-overwrite --poll-us {poll_us}");
    let job = Job { image, mode, block: "4k", depth, direct: true, timed: false };
    let name = format!("disk, 4 KiB {mode}, depth {depth}, {wait}");
    let rounds = Plan::new(name.clone())
        .add("fio", || fio::run(&job, setup.seconds))
        .add("bound", || setup.ferrite.bound(image, &options))
        .add("ferrite", || setup.ferrite.bench(image, &options))
        .run(setup.runs)?;
    let ours = rounds.each(|r| r.of("ferrite").iops);
    let rate = |what: &str| Measurement::of_runs(PART, format!("{name}: {what}"), "IOPS", &ours);
    let bound = rounds.each(|r| r.of("bound").iops);
    let cpu = rounds.each(|r| r.of("ferrite").cpu_us);
    let late = rounds.each(|r| r.of("ferrite").p999_us);
    Ok(vec![
        rate("rate").against_runs("two processes", &bound).target(Target::AtLeast(0.95)),
        rate("rate, beside fio").against_runs("fio", &rounds.each(|r| r.of("fio").iops)),
        Measurement::of_runs(PART, format!("{name}: CPU a request"), "us", &cpu)
            .against_runs("two processes", &rounds.each(|r| r.of("bound").cpu_us)),
        Measurement::of_runs(PART, format!("{name}: 99.9 % are answered within"), "us", &late)
            .against_runs("two processes", &rounds.each(|r| r.of("bound").p999_us)),
    ])
}
