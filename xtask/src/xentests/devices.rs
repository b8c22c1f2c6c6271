//! Disks as block devices of domain 0: made, used, and removed by `ferrite disk device`.

use super::{Bench, Case, deaths, expect_eq, ferrite};
use anyhow::{Context as _, Result, bail};

pub(super) const CASES: &[Case] = &[
    ferrite(
        "device/a-file-system-on-a-disk-survives-dead-workers-a-dead-daemon-and-an-upgrade",
        deaths,
    ),
    ferrite(
        "device/a-device-in-use-stays-a-left-one-is-cleaned-and-others-are-not-touched",
        cleaned,
    ),
];

const IMAGE: &str = "/lab/device.qcow2";

/// Files with checksums, past the cache and through it.
const WRITE: &str = "for direct in 0 1; do fio --name=v$direct --directory=/mnt/dev --ioengine=libaio --direct=$direct \
     --rw=randrw --bs=4k-64k --size=6m --nrfiles=2 --iodepth=16 --fsync=16 --randrepeat=1 --verify=crc32c \
     --verify_fatal=1 --do_verify=1 --minimal 2>&1 || exit 1; done";

fn make(bench: &mut Bench<'_>, connections: u32) -> Result<String> {
    bench
        .xenhost
        .sh(&format!("rm -f {IMAGE}; ferrite image create {IMAGE} 128M; mkdir -p /mnt/dev"))?;
    let made = format!("ferrite disk device {IMAGE} --load --connections {connections}");
    Ok(bench.xenhost.sh(&made)?.trim().to_owned())
}

fn kill_daemon(bench: &mut Bench<'_>) -> Result<()> {
    let daemon = bench.daemon.context("a daemon")?.to_string();
    deaths::kill_daemon(bench, &daemon)
}

/// What is left of the disk is its image, which other programs find whole.
fn unmount_and_check(bench: &mut Bench<'_>, device: &str) -> Result<()> {
    bench.xenhost.sh_for(
        &format!(
            "set -e; umount /mnt/dev; e2fsck -fn {device} 2>&1; sum=$(sha256sum < {device}); blkdiscard {device}; \
             ferrite disk device --remove {device}; ferrite image check {IMAGE}; qemu-img check -q {IMAGE}; \
             [ $(stat -c %b {IMAGE}) -lt 8192 ]; [ -z \"$(tap-ctl list)\" ]; ! ls -d /run/ferrite/devices 2>/dev/null; \
             rm {IMAGE}; rmdir /mnt/dev /run/blktap-control/tapdisk"
        ),
        300,
    )
    .map(drop)
}

fn deaths(bench: &mut Bench<'_>) -> Result<()> {
    bench.start_daemon()?;
    for connections in [1, 4] {
        let device = make(bench, connections)?;
        bench.xenhost.sh_for(&format!("mkfs.ext4 -q {device} && mount {device} /mnt/dev"), 120)?;
        bench.xenhost.sh(&format!("({WRITE}) >/tmp/fio.log 2>&1; echo $? >/tmp/fio.rc &"))?;
        for _ in 0..5 {
            bench.xenhost.sh("sleep 1; kill -9 $(pgrep -f '[f]errite worker' | head -n 1)")?;
        }
        kill_daemon(bench)?;
        bench.start_daemon()?;
        bench
            .xenhost
            .sh("ferrite upgrade; sleep 1; kill -9 $(pgrep -f '[f]errite worker' | head -n 1)")?;
        bench.xenhost.wait_until("the end of fio", "[ -e /tmp/fio.rc ]", 600)?;
        let done = bench
            .xenhost
            .sh("cat /tmp/fio.rc; tail -n 5 /tmp/fio.log; rm /tmp/fio.rc /tmp/fio.log")?;
        if !done.starts_with("0\n") {
            bail!("fio on {device}: {done}");
        }
        unmount_and_check(bench, &device)?;
    }
    Ok(())
}

fn cleaned(bench: &mut Bench<'_>) -> Result<()> {
    bench.start_daemon()?;
    let device = make(bench, 1)?;
    // Somebody else's device stands beside it.
    bench.xenhost.sh("set -e; qemu-img create -q -f raw /lab/other.raw 8M; \
         qemu-nbd -f raw -k /tmp/other.sock --persistent --fork /lab/other.raw; \
         nbd-client -unix /tmp/other.sock /dev/nbd9 2>&1")?;
    bench.xenhost.sh(&format!(
        "mkfs.ext4 -q {device} && mount {device} /mnt/dev && echo kept > /mnt/dev/file"
    ))?;
    let refused =
        bench.xenhost.sh(&format!("ferrite disk device --remove {device} 2>&1 && exit 1; true"))?;
    if !refused.contains("mounted at /mnt/dev") {
        bail!("a mounted device: {refused}");
    }
    let open = bench.xenhost.sh(&format!(
        "umount /mnt/dev; (exec 7<{device}; ferrite disk device --remove {device} 2>&1 && exit 1; true) && \
         mount {device} /mnt/dev"
    ))?;
    if !open.contains("open in process") {
        bail!("a device that a program has open: {open}");
    }
    let again = bench.xenhost.sh(&format!("ferrite disk device {IMAGE} 2>&1 && exit 1; true"))?;
    if !again.contains(&device) {
        bail!("a second device of an image: {again}");
    }
    // A keeper that is killed takes its connections along. The device gets new ones.
    bench.xenhost.sh_for(
        "set -e; pid=$(tap-ctl list | sed 's/.*pid=\\([0-9]*\\).*/\\1/'); kill -9 $pid; \
         sync -f /mnt/dev; echo 3 > /proc/sys/vm/drop_caches; [ $(cat /mnt/dev/file) = kept ]",
        300,
    )?;
    kill_daemon(bench)?;
    bench.xenhost.sh("umount /mnt/dev")?;
    bench.start_daemon()?;
    let listed = bench.xenhost.sh("ferrite disk devices --json | grep -c '\"device\"'")?;
    expect_eq("the devices after a restart", &listed.trim(), &"1")?;
    let removed = bench.xenhost.sh("ferrite disk devices --clean")?;
    expect_eq("the removed devices", &removed.trim(), &format!("{device} is removed").as_str())?;
    bench.xenhost.sh(&format!(
        "set -e; [ $(cat /sys/block/{}/size) = 0 ]; [ $(cat /sys/block/nbd9/size) = 16384 ]; nbd-client -d /dev/nbd9 2>&1; \
         pkill qemu-nbd; rm /lab/other.raw; ferrite image check {IMAGE}; rm {IMAGE}; rmdir /mnt/dev; \
         rmdir /run/blktap-control/tapdisk",
        device.trim_start_matches("/dev/")
    ))?;
    Ok(())
}
