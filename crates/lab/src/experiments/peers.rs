//! Programs that serve disks, compared by one client and one protocol.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use ferrite_xenhost::packages;

use super::findings::{Findings, Row};
use super::lab::{Image, Lab, Medium};
use super::{Experiment, How};
use crate::compare::fio::{self, Job};
use crate::compare::nbd::{Client, Server};
use crate::compare::rounds::{Plan, Rounds, Sample};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "peers",
    shows: "What qemu-nbd, qemu-storage-daemon, nbdkit and Ferrite make of one file, by NBD, and fio without a server.",
    source: "Nobody has published these: they are the programs that a host without Xen has for the same task.",
    differs: "There is no published figure to compare with; fio has no second process between it and the file, so no server \
              reaches it at one request in flight.",
    how: How::Here(run),
};

const IMAGE_MIB: usize = 256;
const FIO: &str = "fio";
const OURS: &str = "ferrite";
/// The loads in fio's words: mode and block size.
const LOADS: [(&str, &str); 2] = [("randread", "4k"), ("read", "1m")];
const DEPTHS: [u32; 3] = [1, 8, 32];
const FORMATS: [&str; 3] = ["raw", "vhd", "qcow2"];
const SERVERS: [&str; 4] = ["qemu-nbd", "qemu-storage-daemon", "nbdkit", OURS];
/// The unit of an image in another format, as other programs make it.
const QCOW2_CLUSTER_BYTES: u32 = 65536;
const VHD_BLOCK_BYTES: u32 = 2 << 20;

fn run(lab: &Lab) -> Result<Findings> {
    let mut findings = Findings::default();
    let servers = present(lab, &mut findings.missing);
    if packages::find(FIO).is_none() {
        findings.missing.push("all of it: fio, the client, is not installed".into());
        return Ok(findings);
    }
    let raw = lab.image(Medium::Memory, IMAGE_MIB)?;
    let vhd = lab.converted(&raw, "disk.vhd", VHD_BLOCK_BYTES)?;
    let qcow2 = lab.converted(&raw, "disk.qcow2", QCOW2_CLUSTER_BYTES)?;
    let depths = lab.some(&DEPTHS);
    for (format, image) in FORMATS.into_iter().zip([&raw, &vhd, &qcow2]) {
        let servers: Vec<&str> = servers.iter().copied().filter(|s| serves(s, format)).collect();
        for load in LOADS {
            let mut plan = Plan::new(format!("peers, {format}, {} {}", load.0, load.1));
            for depth in &depths {
                plan = add(plan, lab, image, format, load, *depth, &servers);
            }
            let rounds = lab.measure(plan)?;
            findings.rows.extend(rows(&rounds, format, load, &depths, &servers));
        }
    }
    Ok(findings)
}

/// The servers that are installed; missing ones are named.
fn present(lab: &Lab, missing: &mut Vec<String>) -> Vec<&'static str> {
    let is_there = |name: &str| match name {
        OURS => lab.program().is_ok(),
        _ => packages::find(name).is_some(),
    };
    let (there, not): (Vec<&str>, Vec<&str>) = SERVERS.iter().partition(|name| is_there(name));
    missing.extend(not.into_iter().map(|name| format!("{name}: it is not installed")));
    if there.contains(&"nbdkit") {
        missing.push("nbdkit on VHD and qcow2: it does not read them".into());
    }
    there
}

fn serves(server: &str, format: &str) -> bool {
    server != "nbdkit" || format == "raw"
}

fn key(peer: &str, depth: u32) -> String {
    format!("{peer}, depth {depth}")
}

fn add<'a>(
    mut plan: Plan<'a>,
    lab: &'a Lab,
    image: &'a Image,
    format: &'static str,
    (mode, block): (&'static str, &'static str),
    depth: u32,
    servers: &[&'static str],
) -> Plan<'a> {
    let seconds = lab.settings.seconds;
    if format == "raw" {
        let alone = move || -> Result<Sample> {
            let image = image.path().to_str().context("the image's path is no text")?;
            fio::run(&Job { image, mode, block, depth, direct: false, timed: false }, seconds)
        };
        plan = plan.add(key(FIO, depth), alone);
    }
    for server in servers.iter().copied() {
        plan = plan.add(key(server, depth), move || {
            let client = Client { mode, block, depth, mib: IMAGE_MIB, seconds };
            start(lab, server, image.path(), format)?.run(&client)
        });
    }
    plan
}

/// Each run has a server of its own, as only one at a time may open an image.
fn start(lab: &Lab, server: &str, image: &Path, format: &str) -> Result<Server> {
    let socket = image.with_extension("sock");
    let format = if format == "vhd" { "vpc" } else { format };
    let mut command = match server {
        OURS => Command::new(lab.program()?),
        _ => Command::new(server),
    };
    let (file, at) = (image.display(), socket.display());
    match server {
        "qemu-nbd" => {
            command.args([
                "--persistent",
                "--aio=io_uring",
                "--cache=writeback",
                "--format",
                format,
            ]);
            command.arg("--socket").arg(&socket).arg(image);
        }
        "qemu-storage-daemon" => {
            command.arg("--blockdev");
            command.arg(format!("driver=file,node-name=file,filename={file},aio=io_uring"));
            command.arg("--blockdev").arg(format!("driver={format},node-name=disk,file=file"));
            command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={at}"));
            command.args(["--export", "type=nbd,id=export,node-name=disk,name=,writable=on"]);
        }
        "nbdkit" => {
            command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
            command.arg("file").arg(image);
        }
        _ => {
            command.args(["export", "nbd"]).arg(image).arg("--socket").arg(&socket);
        }
    }
    Server::start(&mut command, &socket)
}

/// A rate and a cost for each, and their ratios to ours.
fn rows(
    rounds: &Rounds,
    format: &str,
    (mode, block): (&str, &str),
    depths: &[u32],
    servers: &[&'static str],
) -> Vec<Row> {
    let mut rows = Vec::new();
    let alone = (format == "raw").then_some(FIO);
    for depth in depths {
        let name = |peer: &str| format!("{format}, {block} {mode}, depth {depth}: {peer}");
        for peer in alone.into_iter().chain(servers.iter().copied()) {
            let of = |figure: fn(Sample) -> f64| rounds.each(|r| figure(r.of(&key(peer, *depth))));
            rows.push(Row::new(name(peer), "IOPS", &of(|sample| sample.iops)));
            let cost = format!("{}, processor a request", name(peer));
            rows.push(Row::new(cost, "us", &of(|sample| sample.cpu_us)));
        }
        let peers = alone.into_iter().chain(servers.iter().copied());
        for peer in peers.filter(|peer| *peer != OURS && servers.contains(&OURS)) {
            let over =
                rounds.each(|r| r.of(&key(OURS, *depth)).iops / r.of(&key(peer, *depth)).iops);
            rows.push(Row::new(name(&format!("ferrite over {peer}")), "times", &over));
        }
    }
    rows
}
