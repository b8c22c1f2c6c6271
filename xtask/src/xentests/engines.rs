//! The engines for disk I/O, where the kernel does not give the best of them.

use super::{Bench, Case, expect_eq, ferrite};
use crate::lab::guest::GuestOptions;
use anyhow::{Context, Result, bail};

pub(super) const CASES: &[Case] =
    &[ferrite("engines/aio-is-taken-where-io-uring-is-disabled", without_uring)];

/// Since Linux 6.6; before that io_uring can only be left out by flag.
const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";

fn without_uring(bench: &mut Bench<'_>) -> Result<()> {
    bench.lab.serve_arguments.clear();
    if bench.lab.dom0(&format!("test -e {SWITCH}"), 20)?.status != 0 {
        bench.lab.serve_arguments = "--engine aio".into();
        return served_by_aio(bench);
    }
    bench.lab.sh(&format!("echo 2 >{SWITCH}"))?;
    let result = doctor_says_so(bench).and_then(|()| served_by_aio(bench));
    bench.lab.sh(&format!("echo 0 >{SWITCH}"))?;
    result
}

fn doctor_says_so(bench: &mut Bench<'_>) -> Result<()> {
    let told = bench.lab.sh("ferrite doctor")?;
    for word in ["kernel.io_uring_disabled", "disk I/O goes through aio", "guests can be served"] {
        if !told.contains(word) {
            bail!("ferrite doctor does not say {word:?}:\n{told}");
        }
    }
    Ok(())
}

/// A guest that verifies what it writes, and whose backend is killed and started meanwhile.
fn served_by_aio(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, mut disk) = bench.guest_with_image(&GuestOptions::default(), 256)?;
    let log = disk.backend_log(bench.lab)?;
    if !log.contains("disk I/O goes through aio") {
        bail!("the backend does not say that it uses aio:\n{log}");
    }
    let fio = format!(
        "fio --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --iodepth=32 --randrepeat=1 --fsync=64 --thread --minimal --filename={} \
         --name=small --rw=randwrite --bs=4k --size=3m --offset=0 \
         --name=large --rw=randwrite --bs=128k --size=16m --offset=64m",
        disk.node()
    );
    let job = guest.begin(bench.lab, &fio, 600)?;
    let progress =
        "until [ $(awk '{print $1+$5}' /sys/block/xvda/stat) -ge 300 ]; do sleep 0.1; done";
    guest.sh(bench.lab, progress, 120).context("the guest's requests do not go on")?;
    disk.crash_backend(bench.lab)?;
    disk.start_backend(bench.lab)?;
    guest.finish_ok(bench.lab, &job).context("fio, with its backend killed once")?;
    // What fio has written at 64 MiB.
    guest.sh(bench.lab, "blkdiscard -f -o 67108864 -l 8388608 /dev/xvda", 60)?;
    let sum = |from: &str| format!("dd if={from} bs=1M count=8 2>/dev/null | sha256sum");
    let found = guest.sh(bench.lab, &sum("/dev/xvda skip=64"), 60)?;
    let zeros = guest.sh(bench.lab, &sum("/dev/zero"), 60)?;
    expect_eq("what was discarded", &found, &zeros)?;
    disk.wait_connected(bench.lab)
}
