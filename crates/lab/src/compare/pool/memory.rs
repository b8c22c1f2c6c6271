//! Memory: of a guest's backend whose disk is in a pool, of the process that has a disk, and of a server of many disks.

use std::process::Command;

use anyhow::{Context as _, Result};
use ferrite_xenhost::steps::{self, step};

use super::super::Setup;
use super::super::image::filled;
use super::super::result::{Measurement, Target};
use super::super::rounds::Plan;
use super::net::peak_mib;
use super::servers::Pool;
use super::{PART, worst};

const DISK_MIB: usize = 64;
/// Disks of one backend at rest, as for other disks behind NBD.
const GUESTS: u32 = 8;
const REST: &str = "--guests 8 --rest 8";
/// Disks of a server, and how many of them are written.
const DISKS: usize = 100;
const WRITTEN: usize = 20;

/// Runs all measurements.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let pool = Pool::start(setup, 2, None)?;
    let raw = pool.dir.path().join("raw.img");
    filled(&raw, DISK_MIB)?;
    let raw = raw.to_str().context("the path of a folder of the system is text")?.to_owned();
    let mut rows = vec![at_rest(&pool, &raw)?];
    rows.extend(step(&format!("a server of {DISKS} disks"), || many(&pool, &raw))?);
    Ok(rows)
}

/// A backend above the same one with raw files.
fn at_rest(pool: &Pool<'_>, raw: &str) -> Result<Measurement> {
    pool.create("rest", DISK_MIB as u64, &["--replicas", "2"])?;
    let disk = pool.name("rest");
    let name = format!("{GUESTS} disks at rest: a backend's memory a disk (PSS) above raw files");
    let rounds = Plan::new(name.clone())
        .add("raw", || pool.bench(raw, REST))
        .add("ferrite", || pool.bench(&disk, REST))
        .run(pool.setup.runs.min(3))?;
    let more = rounds.each(|round| {
        let kib = round.of("ferrite").rest_pss_kib - round.of("raw").rest_pss_kib;
        kib / 1024.0 / f64::from(GUESTS)
    });
    Ok(Measurement::of_runs(PART, name, "MiB", &more).target(Target::AtMost(16.0)))
}

/// Mirrors that are open at a time, the first of them written in full.
fn many(pool: &Pool<'_>, raw: &str) -> Result<Vec<Measurement>> {
    let mut owners = Vec::new();
    for number in 0..DISKS {
        let disk = format!("many-{number}");
        pool.create(&disk, DISK_MIB as u64, &["--replicas", "2"])?;
        let (owner, socket) = pool.own(&disk)?;
        if number < WRITTEN {
            let uri = format!("nbd+unix:///?socket={}", socket.display());
            steps::output(Command::new("nbdcopy").args([raw, &uri]))?;
        }
        owners.push(owner);
    }
    let of_server = peak_mib(pool.server(0)?.id())?;
    let of_owners: Vec<f64> =
        owners[..WRITTEN].iter().map(|owner| peak_mib(owner.id())).collect::<Result<_>>()?;
    let server = format!("a server of {DISKS} open disks, {WRITTEN} of them written: peak memory");
    Ok(vec![
        Measurement::new(PART, server, of_server, "MiB").target(Target::AtMost(64.0)),
        worst(
            "the process that has a disk, which is written: peak memory".to_owned(),
            "MiB",
            &of_owners,
        ),
    ])
}
