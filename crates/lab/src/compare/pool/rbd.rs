//! Disks on Ceph: a guest's requests beside fio's rbd engine on the same image, which caches nothing either. The cluster is on
//! this machine, and has its data in memory.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use ferrite_xenhost::packages::{self, Need};
use ferrite_xenhost::steps::{self, step};

use super::super::Setup;
use super::super::fio;
use super::super::result::{Measurement, Target};
use super::super::rounds::{Plan, Sample};
use super::ceph::{Cluster, POOL};
use super::net::{child, peak_mib};
use super::pauses::{self, LOAD, MOST_ROUNDS, SECONDS};
use super::{GUEST, PART, worst};

const IMAGE: &str = "bench";
const IMAGE_MIB: u64 = 256;
const NEEDS: &[Need] = &[
    ("ceph-mon", "ceph-mon"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("rbd", "ceph-common"),
];
/// Block size for fio, and depth.
const LOADS: [(&str, u32); 3] = [("4k", 1), ("4k", 32), ("512k", 8)];

/// Runs all measurements.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    packages::ensure(&[NEEDS])?;
    setup.ferrite.build_beside("ferrite-rbd")?;
    let cluster = step("a cluster of three OSDs", || Cluster::shared().context("Ceph is missing"))?;
    cluster.image(IMAGE, IMAGE_MIB);
    let conf = cluster.path("uncached.conf");
    let text = fs::read_to_string(cluster.conf())?;
    fs::write(&conf, text.replace("[client]\n", "[client]\nrbd cache = false\n"))?;
    let theirs = |mode: &'static str, block: &str, depth: u32, seconds: f64| {
        let mut command = Command::new("fio");
        command.env("CEPH_CONF", &conf).args(["--name=peer", "--ioengine=rbd", "--thread"]);
        command.args([
            &format!("--pool={POOL}"),
            &format!("--rbdname={IMAGE}"),
            "--clientname=admin",
        ]);
        command.args([&format!("--rw={mode}"), &format!("--bs={block}")]);
        command.args([&format!("--iodepth={depth}"), "--output-format=json", "--norandommap"]);
        if seconds > 0.0 {
            let runtime = format!("--runtime={}ms", (seconds * 1000.0).round());
            command.args(["--time_based", "--ramp_time=0.3", &runtime]);
        }
        command
    };
    // Makes each object: librbd reads an object that was never written from no OSD.
    steps::output(&mut theirs("write", "4m", 4, 0.0))?;
    let name = cluster.name(IMAGE, "");
    let mut rows = Vec::new();
    for (block, depth) in LOADS {
        for mode in modes(block) {
            let row = format!("rbd, {block} {mode}, depth {depth}");
            let options = format!("--mode {mode} --block {block} --depth {depth}");
            let rounds = Plan::new(row.clone())
                .add("fio", || {
                    let mut fio = theirs(mode, block, depth, setup.seconds);
                    fio::watched(&mut fio, None, mode, setup.seconds)
                })
                .add("ferrite", || bench(setup, &name, &options))
                .run(setup.runs)?;
            let iops = |of: &str| rounds.each(|round| round.of(of).iops);
            let row = Measurement::of_runs(PART, row + ": rate", "IOPS", &iops("ferrite"));
            let row = row.against_runs("fio's rbd engine", &iops("fio"));
            rows.push(row.target(Target::AtLeast(0.9)));
        }
    }
    rows.extend(step("rbd, its helper killed", || helper(setup, &name))?);
    Ok(rows)
}

/// Small requests go anywhere, large ones in order.
fn modes(block: &str) -> [&'static str; 2] {
    if block == "4k" { ["randread", "randwrite"] } else { ["read", "write"] }
}

fn bench(setup: &Setup, name: &str, options: &str) -> Result<Sample> {
    setup.ferrite.bench(name, &format!("{options} {GUEST} --force-overwrite"))
}

/// A guest's pause when the helper is killed, and what the next one has had resident.
fn helper(setup: &Setup, name: &str) -> Result<Vec<Measurement>> {
    let (mut waits, mut peaks) = (Vec::new(), Vec::new());
    for _ in 0..setup.runs.min(MOST_ROUNDS) {
        let mut guest = setup.ferrite.bench_command(SECONDS, name, &format!("{LOAD} {GUEST}"));
        let guest = guest.arg("--force-overwrite").stdout(Stdio::piped()).stderr(Stdio::piped());
        let guest = guest.spawn().context("cannot start ferrite-bench")?;
        waits.push(pauses::longest(guest, |pid| {
            let helper = child(pid, "serve")?;
            peaks.push(peak_mib(helper)?);
            pauses::kill(helper)
        })?);
    }
    Ok(vec![
        pauses::pause_row("rbd, the disk's helper is killed", 3.0, &waits),
        worst("rbd, the helper: peak memory".to_owned(), "MiB", &peaks)
            .target(Target::AtMost(64.0)),
    ])
}
