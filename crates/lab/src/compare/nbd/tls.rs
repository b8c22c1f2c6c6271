//! Disks by TLS: beside themselves in clear, and beside nbdkit. nbdcopy is the client, since it has TLS of another
//! library, which is the same for all.

use super::super::Setup;
use super::super::image::filled;
use super::super::result::{Measurement, Target};
use super::super::rounds::Plan;
use super::{IMAGE_MIB, PART, Place, Server, free_port, nbdcopy};
use anyhow::Result;
use ferrite_xenhost::certificates;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Requests of a MiB, eight at once, on one connection.
const REQUESTS: [&str; 3] = ["--connections=1", "--requests=8", "--request-size=1048576"];

/// Reads of a whole disk, and writes.
pub(super) fn run(setup: &Setup, dir: &Path) -> Result<Vec<Measurement>> {
    let certificates = dir.join("certificates");
    certificates::make(&certificates)?;
    let source = dir.join("source.img");
    filled(&source, IMAGE_MIB)?;
    let new = |name: &str| -> Result<PathBuf> {
        let image = dir.join(name);
        filled(&image, IMAGE_MIB)?;
        Ok(image)
    };
    let (plain, by_tls, theirs) = (new("plain.img")?, new("tls.img")?, new("nbdkit.img")?);
    let servers = [
        ("plain", ferrite(setup, &plain, None)?),
        ("ferrite", ferrite(setup, &by_tls, Some(&certificates))?),
        ("nbdkit", nbdkit(&theirs, &certificates)?),
    ];
    let uri = |server: &Server, by_tls: bool| match (by_tls, &server.place) {
        (true, Place::Tcp(port)) => {
            format!("nbds://localhost:{port}/?tls-certificates={}", certificates.display())
        }
        _ => server.uri(),
    };
    let source = source.display().to_string();
    let mut rows = Vec::new();
    for reads in [true, false] {
        let what = if reads { "reads" } else { "writes" };
        let mut plan = Plan::new(format!("TLS, 1 MiB {what}, depth 8"));
        for (name, server) in &servers {
            let uri = uri(server, *name != "plain");
            let source = source.clone();
            plan = plan.add(*name, move || {
                let (from, to) = if reads { (uri.as_str(), "null:") } else { (&*source, &*uri) };
                nbdcopy(&[&REQUESTS[..], &[from, to]].concat())
            });
        }
        let rounds = plan.run(setup.runs)?;
        let rate = |of: &str| rounds.each(|round| round.of(of).iops);
        for (peer, name, target) in
            [("plain", "TCP in clear", 0.7), ("nbdkit", "nbdkit --tls=require", 1.0)]
        {
            let title = format!("nbd by TLS, tmpfs, 1 MiB {what}, depth 8: rate");
            let row = Measurement::of_runs(PART, title, "MB/s", &rate("ferrite"));
            rows.push(row.against_runs(name, &rate(peer)).target(Target::AtLeast(target)));
        }
    }
    drop(servers);
    for image in [&plain, &by_tls, &theirs, Path::new(&source)] {
        std::fs::remove_file(image)?;
    }
    Ok(rows)
}

/// Our server at a TCP port: by TLS with the files of a folder, or in clear.
fn ferrite(setup: &Setup, image: &Path, certificates: Option<&Path>) -> Result<Server> {
    let port = free_port()?;
    let mut command = Command::new(setup.ferrite.program());
    command.args(["export", "nbd"]).arg(image).arg(format!("--listen=127.0.0.1:{port}"));
    match certificates {
        Some(folder) => command.arg("--tls").arg(folder),
        None => command.arg("--plain"),
    };
    Server::start_at(&mut command, Place::Tcp(port))
}

fn nbdkit(image: &Path, certificates: &Path) -> Result<Server> {
    let port = free_port()?;
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--ipaddr=127.0.0.1", "--tls=require", "--tls-verify-peer"]);
    command.arg(format!("--port={port}"));
    command.arg(format!("--tls-certificates={}", certificates.display()));
    command.arg("file").arg(image);
    Server::start_at(&mut command, Place::Tcp(port))
}
