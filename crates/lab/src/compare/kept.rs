//! Disks as in the daemon, each with a keeper and a worker without rights: compared with the same disk served by one
//! process, and the memory of many at rest.

use super::Setup;
use super::image;
use super::result::{Measurement, Target};
use super::rounds::Plan;
use anyhow::Result;

const PART: &str = "kept";
const TMPFS: &str = "/dev/shm";
const IMAGE_MIB: usize = 512;
const DISKS: u32 = 30;
/// All four queues work, and then rest for longer than buffers are kept.
const REST: &str = "--kept --queues 4 --guests 30 --rest 8";

/// Runs all measurements: 4 KiB random reads, 32 in flight.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    // Workers open the image by its name.
    let folder = tempfile::Builder::new().prefix("ferrite-bench-").tempdir_in(TMPFS)?;
    let path = folder.path().join("disk.img");
    image::filled(&path, IMAGE_MIB)?;
    let image = path.display().to_string();
    let mut rows = Vec::new();
    for (medium, image) in [("raw on tmpfs", image.as_str()), ("null", "null:")] {
        let run = |options: &'static str| move || setup.ferrite.bench(image, options);
        let rounds = Plan::new(format!("{medium}: serve, and keeper and worker"))
            .add("serve", run(""))
            .add("kept", run("--kept"))
            .run(setup.runs)?;
        let name = |what| format!("{medium}, 4 KiB randread, depth 32: {what}");
        let iops = |of: &'static str| rounds.each(|r| r.of(of).iops);
        let rate = Measurement::of_runs(PART, name("rate"), "IOPS", &iops("kept"))
            .against_runs("one process", &iops("serve"))
            .target(Target::AtLeast(0.98));
        let cpu = |of: &'static str| rounds.each(|r| r.of(of).cpu_us);
        let cpu = Measurement::of_runs(PART, name("CPU a request"), "us", &cpu("kept"))
            .against_runs("one process", &cpu("serve"));
        rows.extend([rate, cpu]);
    }
    let rest = Plan::new("disks at rest")
        .add("rest", || setup.ferrite.bench_for(2.0, &image, REST))
        .run(setup.runs.min(3))?;
    let mib = rest.each(|r| r.of("rest").rest_pss_kib / 1024.0 / f64::from(DISKS));
    let name = format!("{DISKS} disks at rest after I/O, four queues each: memory a disk (PSS)");
    rows.push(Measurement::of_runs(PART, name, "MiB", &mib).target(Target::AtMost(3.0)));
    Ok(rows)
}
