//! The path from ring to storage on tmpfs and without storage: compared with fio and with bare copies, and with several
//! queues.

use super::Setup;
use super::burners::Burners;
use super::fio::{self, Job};
use super::image::Image;
use super::result::{Measurement, Target};
use super::rounds::Plan;
use anyhow::Result;
use std::path::Path;

const PART: &str = "loopback";
/// tmpfs, and the image on it.
const TMPFS: &str = "/dev/shm";
const IMAGE_MIB: usize = 1024;
/// The disk without storage.
const NULL: &str = "null:";

/// Runs all measurements: 4 KiB random reads, 32 in flight.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let image = Image::make(Path::new(TMPFS), IMAGE_MIB)?;
    let image = image.path();
    let mut rows = beside_fio(setup, &image)?;
    rows.extend(beside_bare_copies(setup)?);
    for (medium, image) in [("tmpfs", image.as_str()), ("null", NULL)] {
        rows.extend(queues(setup, medium, image)?);
        rows.extend(movers(setup, medium, image)?);
    }
    rows.extend(without_idle_processors(setup, &image)?);
    Ok(rows)
}

fn beside_fio(setup: &Setup, image: &str) -> Result<Vec<Measurement>> {
    let fio = |direct| {
        let job = Job { image, mode: "randread", block: "4k", depth: 32, direct, timed: false };
        move || fio::run(&job, setup.seconds)
    };
    let ferrite = |options: &'static str| move || setup.ferrite.bench(image, options);
    let (direct, cached) = ("fio --direct=1", "fio --direct=0");
    let rounds = Plan::new("tmpfs: fio and ferrite")
        .add(direct, fio(true))
        .add(cached, fio(false))
        .add("memcpy", ferrite("--copy-with memcpy"))
        .add("process-vm", ferrite("--copy-with process-vm"))
        .run(setup.runs)?;
    let peer = rounds.best(&[direct, cached], |sample| sample.iops).unwrap_or(direct);
    let mut rows = Vec::new();
    for (copy_with, cpu) in [("memcpy", 1.0), ("process-vm", 1.3)] {
        let name = |what| format!("tmpfs, 4 KiB randread, depth 32, {copy_with}: {what}");
        let ours = rounds.each(|r| r.of(copy_with).iops);
        let row = Measurement::of_runs(PART, name("rate"), "IOPS", &ours);
        let row = row.against_runs(peer, &rounds.each(|r| r.of(peer).iops));
        rows.push(row.target(Target::AtLeast(1.0)));
        let ours = rounds.each(|r| r.of(copy_with).cpu_us);
        let row = Measurement::of_runs(PART, name("CPU a request"), "us", &ours);
        let row = row.against_runs(peer, &rounds.each(|r| r.of(peer).cpu_us));
        rows.push(row.target(Target::AtMost(cpu)));
    }
    Ok(rows)
}

/// The cost of the rings, the checks and the bookkeeping: compared with bare copies.
fn beside_bare_copies(setup: &Setup) -> Result<Vec<Measurement>> {
    let ferrite = &setup.ferrite;
    let batches = ferrite.bench(NULL, "--copy-with process-vm")?.segments_per_copy;
    let batch = if batches.is_finite() { batches.round().max(1.0) as u32 } else { 16 };
    let rounds = Plan::new("null: bare copies and ferrite")
        .add("bare memcpy", || ferrite.bare("memcpy", batch))
        .add("memcpy", || ferrite.bench(NULL, "--copy-with memcpy"))
        .add("bare process_vm", || ferrite.bare("process-vm", batch))
        .add("process-vm", || ferrite.bench(NULL, "--copy-with process-vm"))
        .run(setup.runs)?;
    let name = "null, 4 KiB randread, depth 32, memcpy: rate";
    let ours = rounds.each(|r| r.of("memcpy").iops);
    let memcpy = Measurement::of_runs(PART, name, "blocks/s", &ours)
        .against_runs("bare memcpy loop", &rounds.each(|r| r.of("bare memcpy").iops))
        .target(Target::AtLeast(0.25));
    let name = "null, 4 KiB randread, depth 32, process-vm: time a block";
    let ours = rounds.each(|r| 1e6 / r.of("process-vm").iops);
    let peer = format!("bare loop of {batch} pages a call");
    let process_vm = Measurement::of_runs(PART, name, "us", &ours)
        .against_runs(peer, &rounds.each(|r| r.of("bare process_vm").lat_us))
        .target(Target::AtMost(1.3));
    Ok(vec![memcpy, process_vm])
}

/// Guests sleep at once here: their polling would count as the cost of a request.
fn queues(setup: &Setup, medium: &str, image: &str) -> Result<Vec<Measurement>> {
    let run = |options: &'static str| move || setup.ferrite.bench(image, options);
    let rounds = Plan::new(format!("{medium}: queues"))
        .add("one", run("--guest-poll 0"))
        .add("two", run("--guest-poll 0 --queues 2"))
        .add("one offered", run("--queues 1"))
        .add("one of four", run("--queues 4 --load-queues 1"))
        .run(setup.runs)?;
    let name = |what| format!("{medium}, 4 KiB randread, depth 32, {what}");
    // With one queue the slower of front and back determines the rate; with two, two processors share the work of both.
    let bound = rounds.each(|r| {
        let one = r.of("one");
        let (front, back) = (one.guest_cpu_us, one.cpu_us);
        one.iops * 2.0 * front.max(back) / (front + back)
    });
    let ours = rounds.each(|r| r.of("two").iops);
    let rate = Measurement::of_runs(PART, name("two queues: rate"), "IOPS", &ours)
        .against_runs("bound by one queue's costs", &bound)
        .target(Target::AtLeast(0.9));
    let ours = rounds.each(|r| r.of("two").cpu_us);
    let cpu = Measurement::of_runs(PART, name("two queues: CPU a request"), "us", &ours)
        .against_runs("one queue", &rounds.each(|r| r.of("one").cpu_us))
        .target(Target::AtMost(1.1));
    let ours = rounds.each(|r| r.of("one of four").iops);
    let one_job = Measurement::of_runs(PART, name("one job, four queues: rate"), "IOPS", &ours)
        .against_runs("one queue", &rounds.each(|r| r.of("one offered").iops))
        .target(Target::AtLeast(0.95));
    Ok(vec![rate, cpu, one_job])
}

/// Compares the ways to move data, for small requests and for large ones.
fn movers(setup: &Setup, medium: &str, image: &str) -> Result<Vec<Measurement>> {
    let mut rows = Vec::new();
    for (block, depth) in [(4, 32), (128, 8)] {
        let run = |mover: &'static str| {
            let options = format!("--block {block}K --depth {depth} --mover {mover}");
            move || setup.ferrite.bench(image, &options)
        };
        let rounds = Plan::new(format!("{medium}: movers, {block} KiB"))
            .add("copy", run("copy"))
            .add("map", run("map"))
            .add("persistent", run("persistent"))
            .run(setup.runs)?;
        for mover in ["map", "persistent"] {
            let name =
                |what| format!("{medium}, {block} KiB randread, depth {depth}, {mover}: {what}");
            let ours = rounds.each(|r| r.of(mover).iops);
            let peers = rounds.each(|r| r.of("copy").iops);
            let rate = Measurement::of_runs(PART, name("rate"), "IOPS", &ours);
            rows.push(rate.against_runs("copy", &peers));
            let ours = rounds.each(|r| r.of(mover).cpu_us);
            let peers = rounds.each(|r| r.of("copy").cpu_us);
            let cpu = Measurement::of_runs(PART, name("CPU a request"), "us", &ours);
            rows.push(cpu.against_runs("copy", &peers));
        }
    }
    Ok(rows)
}

/// Polling must not cost anything on a machine without an idle processor.
fn without_idle_processors(setup: &Setup, image: &str) -> Result<Vec<Measurement>> {
    let _burners = Burners::start();
    let mut rows = Vec::new();
    for depth in [1, 32] {
        let run = |poll: &'static str| {
            let options = format!("--guest-poll 0 --depth {depth} --poll-us {poll}");
            move || setup.ferrite.bench(image, &options)
        };
        let rounds = Plan::new(format!("tmpfs: polling with no idle processor, depth {depth}"))
            .add("0", run("0"))
            .add("auto", run("auto"))
            .run(setup.runs)?;
        let name = format!("tmpfs, 4 KiB randread, depth {depth}, no idle CPU, polling: rate");
        let ours = rounds.each(|r| r.of("auto").iops);
        let row = Measurement::of_runs(PART, name, "IOPS", &ours)
            .against_runs("--poll-us 0", &rounds.each(|r| r.of("0").iops));
        rows.push(row.target(Target::AtLeast(0.98)));
    }
    Ok(rows)
}
