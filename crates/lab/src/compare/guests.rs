//! Many guests on one machine: their rate together, and their cost when idle.

use super::Setup;
use super::image::Image;
use super::result::{Measurement, Target};
use super::rounds::Plan;
use anyhow::Result;
use std::path::Path;

const PART: &str = "guests";
const COUNTS: [&str; 5] = ["1", "2", "4", "8", "15"];
const IMAGE_MIB: usize = 1024;
/// The options of an idle disk: those of a Linux guest by default.
const IDLE: &str = "--queues 4 --load-queues 1 --depth 1 --idle 5";
const IDLE_GUESTS: u32 = 15;

/// Runs all measurements: 4 KiB random reads, 32 in flight for each guest.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let image = Image::make(Path::new("/dev/shm"), IMAGE_MIB)?;
    let mut rows = aggregate(setup, "null", "null:")?;
    rows.extend(aggregate(setup, "tmpfs", &image.path())?);
    rows.extend(at_rest(setup)?);
    Ok(rows)
}

fn aggregate(setup: &Setup, medium: &str, image: &str) -> Result<Vec<Measurement>> {
    let mut plan = Plan::new(format!("{medium}: 1 to 15 guests"));
    for guests in COUNTS {
        let options = format!("--guests {guests}");
        plan = plan.add(guests, move || setup.ferrite.bench(image, &options));
    }
    let rounds = plan.run(setup.runs)?;
    let best = rounds.best(&COUNTS, |sample| sample.iops).unwrap_or(COUNTS[0]);
    let many = |guests: &str| format!("{guests} guest{}", if guests == "1" { "" } else { "s" });
    let row = |guests: &str| {
        let name = format!("{medium}, 4 KiB randread, depth 32, {}: rate", many(guests));
        let ours = rounds.each(|r| r.of(guests).iops);
        Measurement::of_runs(PART, name, "IOPS", &ours)
            .against_runs(many(best), &rounds.each(|r| r.of(best).iops))
            .target(Target::AtLeast(0.9))
    };
    Ok(COUNTS.iter().map(|guests| row(guests)).collect())
}

fn at_rest(setup: &Setup) -> Result<Vec<Measurement>> {
    let run = |guests: u32| {
        let options = format!("{IDLE} --guests {guests}");
        move || setup.ferrite.bench("null:", &options)
    };
    let rounds =
        Plan::new("idle disks").add("one", run(1)).add("many", run(IDLE_GUESTS)).run(setup.runs)?;
    let mib = |kib: f64| kib / 1024.0;
    let program = rounds.each(|r| mib(r.of("one").idle_rss_kib));
    let further = rounds.each(|r| {
        let more = r.of("many").idle_rss_kib - r.of("one").idle_rss_kib;
        mib(more / f64::from(IDLE_GUESTS - 1))
    });
    let woken = rounds.each(|r| r.of("many").idle_switches);
    let row = |name: &str, unit, values: &[f64]| Measurement::of_runs(PART, name, unit, values);
    Ok(vec![
        row("idle, one disk, four queues, the program included: resident", "MiB", &program),
        row("idle, each further disk, four queues: resident", "MiB", &further)
            .target(Target::AtMost(8.0)),
        row("idle, 15 disks, four queues each: wake-ups in 5 s", "", &woken)
            .target(Target::AtMost(0.0)),
    ])
}
