//! A guest's disk moves to a second daemon of the same domain 0, with its own run folder and folder of images. It knows no
//! Xen, as if it were on another host; the two daemons know each other by TLS.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use ferrite_xenhost::disk::ended;
use ferrite_xenhost::guest::GuestOptions;

use super::{LIMIT_S, Shown, end_with, start};
use crate::xentests::Bench;
use crate::xentests::guests::{begin_verifying, stop_verifying};
use crate::xentests::remotes::{TLS, put_certificates};

/// What the first daemon is told of the second.
pub(super) const TABLES: &str =
    "[migration]\ncertificates = \"/lab/tls/host\"\nhosts = { b = \"127.0.0.1:10810\" }\n";
/// The configuration of the second daemon.
const SECOND: &str = "state_folder = \"/lab/second-state\"\nimage_folders = [\"/lab/second\"]\n[migration]\nlisten = \"127.0.0.1:10810\"\n\
     certificates = \"/lab/tls/host\"\nfolder = \"/lab/second\"\nfrom = [\"a.example\"]\n";
const RUN: &str = "/run/ferrite-second";
const IMAGE: &str = "/lab/moved.qcow2";
const THERE: &str = "/lab/second/moved.qcow2";

/// Makes the certificates that both daemons use.
pub(super) fn prepare(bench: &mut Bench<'_>) -> Result<()> {
    put_certificates(bench)?;
    let one = format!("cd {TLS} && mkdir -p host && cp server/* host && cp client/* host");
    bench.xenhost.sh(&one).map(drop)
}

/// Starts the second daemon, and returns its process id.
fn start_second(bench: &mut Bench<'_>) -> Result<u32> {
    let pid = bench.xenhost.sh(&format!(
        "mkdir -p /lab/second /lab/second-state && cat >/lab/second.toml <<'EOF'\n{SECOND}EOF\n\
         XENSTORED_PATH=/nonexistent setsid ferrite daemon --config /lab/second.toml --run-dir {RUN} \
         </dev/null >/tmp/second.log 2>&1 & echo $!"
    ))?;
    let answers = format!("ferrite migrate list --run-dir {RUN}");
    bench.xenhost.wait_until("the second daemon", &answers, 60)?;
    pid.parse().with_context(|| format!("odd answer: {pid}"))
}

/// Moves the disk while its guest writes, and kills the workers of both daemons under it.
pub(super) fn show(bench: &mut Bench<'_>, shown: &mut Shown) -> Result<()> {
    let make = format!("rm -rf {IMAGE} /lab/second; ferrite image create {IMAGE} 256M");
    bench.xenhost.sh(&make)?;
    let second = start_second(bench)?;
    let words = format!("format=raw,script=block-ferrite,target=qcow2:{IMAGE}");
    let options = GuestOptions::default();
    let (mut guest, disk) = start(bench, &options, IMAGE, &words)?;
    let under_way = begin_verifying(bench, &mut guest)?;
    let name = guest.name().to_owned();
    let migrate = format!("ferrite migrate {name}/xvda b --name moved.qcow2 2>&1");
    shown
        .timed("move its disk to the second daemon", || bench.xenhost.sh_for(&migrate, LIMIT_S))?;
    let status = bench.xenhost.sh(&format!("ferrite migrate status {name}/xvda"))?;
    ensure!(status.contains("the other host has the disk"), "{status}");
    let listed = bench.xenhost.sh("ferrite disk list")?;
    ensure!(listed.contains("nbds://127.0.0.1:"), "the guest's disk is not there:\n{listed}");
    disk.kill_worker(bench.xenhost)?;
    stop_verifying(bench, &mut guest, &under_way)?;
    end_with(bench, &mut guest, &format!("test -e {IMAGE}.ferrite-moved"))?;
    let known = bench.xenhost.sh(&format!("ferrite migrate list --json --run-dir {RUN}"))?;
    let known: Value = serde_json::from_str(&known).with_context(|| format!("odd: {known}"))?;
    let id = known["migrations"][0]["id"].as_str().with_context(|| format!("no id: {known}"))?;
    // The export of the disk ends: no guest uses it any more.
    bench.xenhost.sh(&format!("ferrite migrate forget {id} --run-dir {RUN}"))?;
    bench.xenhost.wait_until("an image at rest", &format!("ferrite image check {THERE}"), 60)?;
    bench.xenhost.sh(&format!("kill -TERM {second}"))?;
    bench.xenhost.wait_until("the end of the second daemon", &ended(second), 60)?;
    shown.fact(
        "PV guest, its disk",
        "moved to a second daemon by TLS while fio wrote and verified, its worker killed: no mismatch",
    );
    Ok(())
}
