//! Rates of disks in a pool, by the guest's rings. Stripes and mirrors over links of a limited rate are compared with a
//! local raw disk under the same limit. Single writes are measured, too, and the guest's rate during a member's return.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::super::Setup;
use super::super::image::filled;
use super::super::result::{Measurement, Target};
use super::super::rounds::{Plan, Rounds, Sample};
use super::PART;
use super::servers::Pool;

/// What the link of a server carries in a second in each direction, and the local disk: that of a gigabit of Ethernet.
const LINK_BYTES: u64 = 112 << 20;
const DISK_MIB: usize = 256;
/// Disks of the loads, and how they are made.
const ONE: (&str, &[&str]) = ("one", &["--replicas", "1", "--on", "a"]);
const STRIPES: (&str, &[&str]) = ("stripes", &["--replicas", "1", "--stripes", "2"]);
const MIRROR: (&str, &[&str]) = ("mirror", &["--replicas", "2"]);
const LARGE: &str = "--block 512K --depth 16";
/// Loads beside a return: options, and name.
const BESIDE: [(&str, &str); 2] = [
    ("--mode randwrite --block 4K --depth 8", "4 KiB randwrite, depth 8"),
    ("--mode randwrite --block 64K --depth 8", "64 KiB randwrite, depth 8"),
];

/// Large requests over limited links.
pub(super) fn large(setup: &Setup) -> Result<Vec<Measurement>> {
    let pool = Pool::start(setup, 2, Some(LINK_BYTES))?;
    for (name, how) in [ONE, STRIPES, MIRROR] {
        pool.create(name, DISK_MIB as u64, how)?;
    }
    let raw = pool.dir.path().join("raw.img");
    filled(&raw, DISK_MIB)?;
    let raw = raw.to_str().context("the path of a folder of the system is text")?.to_owned();
    let mut rows = Vec::new();
    // The reads are of the data that were written first.
    for (mode, mirror) in [("write", 0.95), ("read", 1.85)] {
        let options = format!("--mode {mode} {LARGE}");
        let limited = format!("{options} --limit bytes={LINK_BYTES}");
        let mut plan = Plan::new(format!("pool, 512 KiB {mode} over links of 112 MiB/s"))
            .add("local", || pool.bench(&raw, &limited));
        for (name, _) in [ONE, STRIPES, MIRROR] {
            let (pool, options) = (&pool, options.clone());
            plan = plan.add(name, move || pool.bench(&pool.name(name), &options));
        }
        let rounds = plan.run(setup.runs)?;
        ensure!(pool.is_whole(MIRROR.0)?, "a copy of the mirror was lost: the machine is too busy");
        rows.extend([
            large_row(&rounds, mode, "one server", ONE.0),
            large_row(&rounds, mode, "two stripes", STRIPES.0).target(Target::AtLeast(1.85)),
            large_row(&rounds, mode, "a mirror of two", MIRROR.0).target(Target::AtLeast(mirror)),
        ]);
    }
    Ok(rows)
}

fn large_row(rounds: &Rounds, mode: &str, what: &str, of: &str) -> Measurement {
    let mib = |of: &str| rounds.each(|round| round.of(of).iops / 2.0);
    let name = format!("servers of 112 MiB/s, 512 KiB {mode}, {what}: rate");
    Measurement::of_runs(PART, name, "MiB/s", &mib(of))
        .against_runs("a local raw disk of 112 MiB/s", &mib("local"))
}

/// Single small requests, over links without a limit: the time of the path alone.
pub(super) fn single(setup: &Setup) -> Result<Vec<Measurement>> {
    let pool = Pool::start(setup, 2, None)?;
    for (name, how) in [ONE, MIRROR] {
        pool.create(name, DISK_MIB as u64, how)?;
    }
    let both = |mode: &str| {
        let options = format!("--mode {mode} --block 4K --depth 1");
        let mut plan = Plan::new(format!("pool, 4 KiB {mode}, depth 1"));
        for (name, _) in [ONE, MIRROR] {
            let (pool, options) = (&pool, options.clone());
            plan = plan.add(name, move || pool.bench(&pool.name(name), &options));
        }
        plan.run(setup.runs)
    };
    let row = |rounds: &Rounds, mode: &str| {
        let time = |of: &str| rounds.each(|round| round.of(of).p50_us);
        let name =
            format!("links without a limit, 4 KiB {mode}, depth 1, a mirror of two: median time");
        Measurement::of_runs(PART, name, "us", &time(MIRROR.0))
            .against_runs("one server", &time(ONE.0))
    };
    Ok(vec![
        row(&both("randwrite")?, "randwrite").target(Target::AtMost(1.4)),
        row(&both("randread")?, "randread"),
    ])
}

/// The guest's rate while a member that was gone gets all that it has missed.
pub(super) fn beside_return(setup: &Setup) -> Result<Vec<Measurement>> {
    // So that the copy lasts longer than a run, by its link's rate.
    let mib = ((setup.seconds + 5.0) * (LINK_BYTES >> 20) as f64) as u64;
    let mut pool = Pool::start(setup, 2, Some(LINK_BYTES))?;
    pool.create(MIRROR.0, mib, MIRROR.1)?;
    let name = pool.name(MIRROR.0);
    let mut rows = Vec::new();
    for (options, load) in BESIDE {
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..setup.runs {
            without.push(pool.bench(&name, options)?.iops);
            with.push(while_returning(&mut pool, &name, options)?.iops);
        }
        let name = format!("servers of 112 MiB/s, {load}, a member returns: rate");
        let row = Measurement::of_runs(PART, name, "IOPS", &with);
        rows.push(row.against_runs("without", &without).target(Target::AtLeast(0.5)));
    }
    Ok(rows)
}

fn while_returning(pool: &mut Pool<'_>, name: &str, options: &str) -> Result<Sample> {
    pool.kill(1)?;
    // All regions have writes that it misses.
    pool.bench(name, "--mode write --block 512K --depth 16")?;
    pool.serve(1)?;
    let sample = pool.bench(name, options)?;
    ensure!(
        !pool.is_whole(MIRROR.0)?,
        "the member was back before the end of the run: a larger disk"
    );
    pool.repair(MIRROR.0)?;
    // etcd and the servers come to rest.
    sleep(Duration::from_millis(200));
    Ok(sample)
}
