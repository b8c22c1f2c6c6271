//! Exports of a server as disks: a guest's requests beside fio's and nbdcopy's on the same server.

use super::super::Setup;
use super::super::image::filled;
use super::super::result::{Measurement, Target};
use super::super::rounds::{Plan, Rounds};
use super::{Client, IMAGE_MIB, PART, Server, copied, nbdcopy};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// Disks at rest whose memory is counted.
const DISKS: u32 = 8;
const REST: &str = "--guests 8 --rest 8 --force-overwrite";

/// Runs all measurements on a disk in the memory of nbdkit.
pub(super) fn run(setup: &Setup, dir: &Path) -> Result<Vec<Measurement>> {
    let image = dir.join("raw.img");
    filled(&image, IMAGE_MIB)?;
    let socket = dir.join("nbdkit.sock");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--unix"]).arg(&socket);
    let server = Server::start(command.args(["memory", &format!("{IMAGE_MIB}M")]), &socket)?;
    // The whole disk has data: what a server calls a hole need not be read.
    let raw = image.to_str().context("the path of a folder of the system is text")?;
    nbdcopy(&[raw, &server.uri()])?;
    let mut rows = Vec::new();
    for mode in ["randread", "randwrite"] {
        rows.extend(requests(setup, &server, mode)?);
    }
    rows.push(copies(setup, &server, dir)?);
    rows.push(memory(setup, &server, raw)?);
    std::fs::remove_file(&image)?;
    Ok(rows)
}

/// A load of a guest whose disk is the export, beside fio: the rate with many requests, and the time of a single one.
fn requests(setup: &Setup, server: &Server, mode: &'static str) -> Result<Vec<Measurement>> {
    let uri = server.uri();
    let both = |depth: u32| -> Result<Rounds> {
        let client = Client { mode, block: "4k", depth, mib: IMAGE_MIB, seconds: setup.seconds };
        let options = format!("--mode {mode} --depth {depth} --force-overwrite");
        Plan::new(format!("NBD disk, 4k {mode}, depth {depth}"))
            .add("fio", || if depth == 1 { server.run_timed(&client) } else { server.run(&client) })
            .add("ferrite", || setup.ferrite.bench(&uri, &options))
            .run(setup.runs)
    };
    let rounds = both(32)?;
    let iops = |of: &str| rounds.each(|round| round.of(of).iops);
    let name = format!("NBD disk of nbdkit, 4k {mode}, depth 32: rate");
    let rate = Measurement::of_runs(PART, name, "IOPS", &iops("ferrite"))
        .against_runs("fio's nbd engine", &iops("fio"))
        .target(Target::AtLeast(0.95));
    let rounds = both(1)?;
    let more = rounds.each(|round| round.of("ferrite").lat_us - round.of("fio").lat_us);
    let name =
        format!("NBD disk of nbdkit, 4k {mode}, depth 1: latency above that of fio's nbd engine");
    let latency = Measurement::of_runs(PART, name, "us", &more).target(Target::AtMost(30.0));
    Ok(vec![rate, latency])
}

/// A copy of the whole export to a file, by our client and by nbdcopy, 32 requests at once.
fn copies(setup: &Setup, server: &Server, dir: &Path) -> Result<Measurement> {
    let (uri, to) = (server.uri(), dir.join("copy.img"));
    let to = to.to_str().context("the path of a folder of the system is text")?;
    let new = || {
        // There is none before the first copy.
        let _ = std::fs::remove_file(to);
    };
    let theirs = || {
        new();
        // It writes to files that are there only.
        std::fs::File::create(to)?.set_len((IMAGE_MIB << 20) as u64)?;
        nbdcopy(&["--requests=32", &uri, to])
    };
    let ours = || {
        new();
        copied(setup.ferrite.program(), &["image", "convert", &uri, to])
    };
    let name = "NBD disk of nbdkit, copy to a file on tmpfs: rate";
    let rounds = Plan::new(name).add("nbdcopy", theirs).add("ferrite", ours).run(setup.runs)?;
    new();
    let rate = |of: &str| rounds.each(|round| round.of(of).iops);
    Ok(Measurement::of_runs(PART, name, "MB/s", &rate("ferrite"))
        .against_runs("nbdcopy", &rate("nbdcopy"))
        .target(Target::AtLeast(0.95)))
}

/// The memory of a disk at rest, above that of a raw file.
fn memory(setup: &Setup, server: &Server, raw: &str) -> Result<Measurement> {
    let uri = server.uri();
    let name = format!("{DISKS} NBD disks at rest: memory a disk (PSS) above raw files");
    let rounds = Plan::new(name.clone())
        .add("raw", || setup.ferrite.bench_for(2.0, raw, REST))
        .add("ferrite", || setup.ferrite.bench_for(2.0, &uri, REST))
        .run(setup.runs.min(3))?;
    let pss = |of: &str| rounds.each(|round| round.of(of).rest_pss_kib);
    let more = pss("ferrite").into_iter().zip(pss("raw"));
    let mib: Vec<f64> = more.map(|(ours, raw)| (ours - raw) / 1024.0 / f64::from(DISKS)).collect();
    Ok(Measurement::of_runs(PART, name, "MiB", &mib).target(Target::AtMost(16.0)))
}
