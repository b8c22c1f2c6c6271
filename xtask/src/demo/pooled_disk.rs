//! A guest's disk is one of a pool of two servers, and one of them is killed while the guest writes.

use anyhow::{Result, ensure};

use ferrite_xenhost::guest::GuestOptions;

use super::{LIMIT_S, Shown, end_with, start};
use crate::xentests::Bench;
use crate::xentests::guests::{begin_verifying, stop_verifying};
use crate::xentests::pooled;

const NAME: &str = "pool:lab/web1";

/// Kills a server and the process that has the disk under a guest's writes; at the end both copies are equal.
pub(super) fn show(bench: &mut Bench<'_>, shown: &mut Shown) -> Result<()> {
    pooled::start(bench, &["a", "b"])?;
    bench.xenhost.sh_for("ferrite pool create lab/web1 256M", LIMIT_S)?;
    let words = format!("format=raw,script=block-ferrite,target={NAME}");
    let options = GuestOptions::default();
    let (mut guest, disk) = start(bench, &options, NAME, &words)?;
    let under_way = begin_verifying(bench, &mut guest)?;
    pooled::kill(bench, "b")?;
    let missing = "ferrite pool status lab/web1 | grep -q ': out'";
    shown.timed("go on without a killed server", || {
        bench.xenhost.wait_until("one copy", missing, 60)
    })?;
    let owner = "kill -KILL $(pgrep -f 'ferrite pool .*own' | head -n 1)";
    bench.xenhost.sh(owner)?;
    disk.kill_worker(bench.xenhost)?;
    pooled::serve(bench, "b")?;
    shown.timed("bring its copy up to date", || pooled::until_whole(bench))?;
    stop_verifying(bench, &mut guest, &under_way)?;
    end_with(bench, &mut guest, "cmp /lab/server-a/web1-*.raw /lab/server-b/web1-*.raw")?;
    let status = bench.xenhost.sh("ferrite pool status lab/web1")?;
    ensure!(status.matches("in sync").count() == 2, "{status}");
    pooled::stop(bench)?;
    shown.fact(
        "PV guest, its disk",
        "on two servers of a pool; one, the disk's process and the worker killed while fio wrote and verified: no mismatch, copies equal",
    );
    Ok(())
}
