//! The engines for disk I/O, if the kernel does not offer the best one.

use super::recovery::{Load, killed_under_verify};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Result, bail};
use ferrite_xenhost::guest::GuestOptions;

pub(super) const CASES: &[Case] =
    &[ferrite("engines/aio-is-taken-where-io-uring-is-disabled", without_uring)];

/// Since Linux 6.6; before that io_uring can only be disabled by a flag.
const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";

fn without_uring(bench: &mut Bench<'_>) -> Result<()> {
    bench.xenhost.serve_arguments.clear();
    if bench.xenhost.dom0(&format!("test -e {SWITCH}"), 20)?.status != 0 {
        bench.xenhost.serve_arguments = "--engine aio".into();
        return served_by_aio(bench);
    }
    bench.xenhost.sh(&format!("echo 2 >{SWITCH}"))?;
    let result = doctor_says_so(bench).and_then(|()| served_by_aio(bench));
    bench.xenhost.sh(&format!("echo 0 >{SWITCH}"))?;
    result
}

fn doctor_says_so(bench: &mut Bench<'_>) -> Result<()> {
    let told = bench.xenhost.sh("ferrite doctor")?;
    for word in ["kernel.io_uring_disabled", "disk I/O goes through aio", "guests can be served"] {
        if !told.contains(word) {
            bail!("ferrite doctor does not say {word:?}:\n{told}");
        }
    }
    Ok(())
}

/// A guest that verifies its writes, and whose backend is killed and restarted meanwhile.
fn served_by_aio(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, mut disk) = bench.guest_with_image(&GuestOptions::default(), 256)?;
    let log = disk.backend_log(bench.xenhost)?;
    if !log.contains("disk I/O goes through aio") {
        bail!("the backend does not say that it uses aio:\n{log}");
    }
    let load = Load { kills: 1, options: "--fsync=64", large: "--bs=128k --size=16m" };
    killed_under_verify(bench, &mut guest, &mut disk, &load)?;
    // fio has written data at 64 MiB.
    guest.sh(bench.xenhost, "blkdiscard -f -o 67108864 -l 8388608 /dev/xvda", 60)?;
    let sum = |from: &str| format!("dd if={from} bs=1M count=8 2>/dev/null | sha256sum");
    let found = guest.sh(bench.xenhost, &sum("/dev/xvda skip=64"), 60)?;
    let zeros = guest.sh(bench.xenhost, &sum("/dev/zero"), 60)?;
    expect_eq("what was discarded", &found, &zeros)
}
