//! The host's own interfaces, without a guest: grants, event channels, xenstore, `ferrite doctor`.

use super::{Bench, Case, ferrite};
use anyhow::{Result, bail};

pub(super) const CASES: &[Case] = &[
    ferrite("host/grants-channels-and-xenstore", interfaces),
    ferrite("host/doctor-finds-a-usable-xen", doctor),
];

fn interfaces(bench: &mut Bench<'_>) -> Result<()> {
    let told = bench.xenhost.sh_for("on_xen --ignored --test-threads=1", 300)?;
    // Without any test the program would succeed.
    if told.contains("running 0 tests") {
        bail!("there was nothing to run:\n{told}");
    }
    Ok(())
}

fn doctor(bench: &mut Bench<'_>) -> Result<()> {
    bench.xenhost.sh("ferrite doctor").map(drop)
}
