//! Disks as block devices of domain 0: made, used, and removed by `ferrite disk device`.

use super::{Bench, Case, deaths, expect_eq, ferrite};
use crate::docs;
use anyhow::{Context as _, Result, bail};

pub(super) const CASES: &[Case] = &[
    ferrite(
        "device/a-file-system-on-a-disk-survives-dead-workers-a-dead-daemon-and-an-upgrade",
        |bench| deaths(bench, "nbd", [1, 4]),
    ),
    ferrite(
        "device/a-file-system-by-ublk-survives-dead-workers-a-dead-daemon-and-an-upgrade",
        |bench| deaths(bench, "ublk", [1, 2]),
    ),
    ferrite("device/a-device-by-ublk-in-use-stays-and-a-left-one-is-cleaned", cleaned_ublk),
    ferrite(
        "device/a-device-in-use-stays-a-left-one-is-cleaned-and-others-are-not-touched",
        cleaned,
    ),
    ferrite("device/a-disk-that-grows-under-a-mounted-device-shows-its-size-in-the-next", grown),
    ferrite("device/the-recipes-as-printed", as_printed),
    ferrite("device/the-kinds-that-this-kernel-has-as-the-doctor-says", kinds),
];

const IMAGE: &str = "/lab/device.qcow2";

/// Files with checksums, past the cache and through it.
const WRITE: &str = "for direct in 0 1; do fio --name=v$direct --directory=/mnt/dev --ioengine=libaio --direct=$direct \
     --rw=randrw --bs=4k-64k --size=6m --nrfiles=2 --iodepth=16 --fsync=16 --randrepeat=1 --verify=crc32c \
     --verify_fatal=1 --do_verify=1 --minimal 2>&1 || exit 1; done";

fn make(bench: &mut Bench<'_>, by: &str, connections: u32) -> Result<String> {
    bench
        .xenhost
        .sh(&format!("rm -f {IMAGE}; ferrite image create {IMAGE} 320M; mkdir -p /mnt/dev"))?;
    let made = format!("ferrite disk device {IMAGE} --load --by {by} --connections {connections}");
    Ok(bench.xenhost.sh(&made)?.trim().to_owned())
}

fn kill_daemon(bench: &mut Bench<'_>) -> Result<()> {
    let daemon = bench.daemon.context("a daemon")?.to_string();
    deaths::kill_daemon(bench, &daemon)
}

/// Only the image of the disk is left, and other programs find it whole.
fn unmount_and_check(bench: &mut Bench<'_>, device: &str, check: &str) -> Result<()> {
    bench.xenhost.sh_for(
        &format!(
            "set -e; umount /mnt/dev; {check} {device} 2>&1; sum=$(sha256sum < {device}); blkdiscard {device}; \
             ferrite disk device --remove {device}; ferrite image check {IMAGE}; qemu-img check -q {IMAGE}; \
             [ $(stat -c %b {IMAGE}) -lt 8192 ]; [ -z \"$(tap-ctl list)\" ]; ! ls -d /run/ferrite/devices 2>/dev/null; \
             rm {IMAGE}; rmdir /mnt/dev /run/blktap-control/tapdisk"
        ),
        300,
    )
    .map(drop)
}

/// Whether the kernel has the ublk driver. That of Debian 12 has not: see [`kinds`].
fn has_ublk(bench: &mut Bench<'_>) -> Result<bool> {
    let has = bench.xenhost.sh("modprobe -n -q ublk_drv && echo yes; true")?;
    Ok(has.contains("yes"))
}

fn deaths(bench: &mut Bench<'_>, by: &str, connections: [u32; 2]) -> Result<()> {
    if by == "ublk" && !has_ublk(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let systems = [("mkfs.ext4 -q", "e2fsck -fn"), ("mkfs.xfs -q", "xfs_repair -n")];
    for (connections, (make_fs, check)) in connections.into_iter().zip(systems) {
        let device = make(bench, by, connections)?;
        bench.xenhost.sh_for(&format!("{make_fs} {device} && mount {device} /mnt/dev"), 120)?;
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
        unmount_and_check(bench, &device, check)?;
        nothing_is_left(bench, make_fs)?;
    }
    Ok(())
}

/// The journal of an image that was closed is gone. The evidence is the processes that hold one that is not, and the
/// end of its workers.
fn nothing_is_left(bench: &mut Bench<'_>, what: &str) -> Result<()> {
    let left = bench.xenhost.sh(
        "cd /run/ferrite/images && for file in $(ls); do ls -il $file; od -A d -t x8z -N 512 $file; \
         grep \":$(stat -c %i $file) \" /proc/locks; for fd in /proc/[0-9]*/fd/*; do \
         [ \"$(readlink $fd)\" = $PWD/$file ] && echo $fd; done; done; true",
    )?;
    if !left.is_empty() {
        let log = bench.xenhost.sh("tail -n 200 /tmp/daemon.log")?;
        bail!("{what}: left in /run/ferrite/images:\n{left}\n{log}");
    }
    Ok(())
}

fn cleaned(bench: &mut Bench<'_>) -> Result<()> {
    bench.start_daemon()?;
    let device = make(bench, "nbd", 1)?;
    // Another program's device is beside it.
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
    let again =
        bench.xenhost.sh(&format!("ferrite disk device {IMAGE} --by nbd 2>&1 && exit 1; true"))?;
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
         pkill qemu-nbd; rm /lab/other.raw; ferrite image check {IMAGE}",
        device.trim_start_matches("/dev/")
    ))?;
    let device = make(bench, "nbd", 1)?;
    cleaned_without_record(bench, &device)
}

/// A device without a record: its daemon has died in between, and the file was removed. The next daemon knows it by
/// the data that the kernel keeps for it.
fn cleaned_without_record(bench: &mut Bench<'_>, device: &str) -> Result<()> {
    kill_daemon(bench)?;
    bench.xenhost.sh("rm -r /run/ferrite/devices")?;
    bench.start_daemon()?;
    let removed = bench.xenhost.sh("ferrite disk devices --clean")?;
    expect_eq("the removed devices", &removed.trim(), &format!("{device} is removed").as_str())?;
    let is_gone = format!(
        "set -e; [ ! -e {device} ] || [ $(cat /sys/block/{}/size) = 0 ]; \
         tap-ctl destroy $(tap-ctl list | sed 's/pid=\\([0-9]*\\) minor=\\([0-9]*\\) .*/-p \\1 -m \\2/'); \
         ferrite image check {IMAGE}; rm {IMAGE}; rmdir /mnt/dev /run/blktap-control/tapdisk",
        device.trim_start_matches("/dev/")
    );
    bench.xenhost.sh(&is_gone).map(drop)
}

/// The same of a device of the ublk driver, which a killed keeper takes its worker from. A device that a daemon has made
/// before it died is known by its mark.
fn cleaned_ublk(bench: &mut Bench<'_>) -> Result<()> {
    if !has_ublk(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let device = make(bench, "ublk", 1)?;
    bench.xenhost.sh(&format!(
        "mkfs.ext4 -q {device} && mount {device} /mnt/dev && echo kept > /mnt/dev/file"
    ))?;
    let refused =
        bench.xenhost.sh(&format!("ferrite disk device --remove {device} 2>&1 && exit 1; true"))?;
    if !refused.contains("mounted at /mnt/dev") {
        bail!("a mounted device: {refused}");
    }
    bench.xenhost.sh_for(
        "set -e; pid=$(tap-ctl list | sed 's/.*pid=\\([0-9]*\\).*/\\1/'); kill -9 $pid; \
         sync -f /mnt/dev; echo 3 > /proc/sys/vm/drop_caches; [ $(cat /mnt/dev/file) = kept ]",
        300,
    )?;
    // Without a daemon the device waits for the next one.
    kill_daemon(bench)?;
    bench.xenhost.sh(
        "kill -9 $(pgrep -f '[f]errite worker' | head -n 1); (sync -f /mnt/dev; echo $? >/tmp/sync.rc) & sleep 3; \
         [ ! -e /tmp/sync.rc ] || cat /tmp/sync.rc",
    )?;
    bench.start_daemon()?;
    bench.xenhost.wait_until("a device that goes on", "[ -e /tmp/sync.rc ]", 120)?;
    bench.xenhost.sh("set -e; [ $(cat /tmp/sync.rc) = 0 ]; rm /tmp/sync.rc; umount /mnt/dev")?;
    cleaned_without_record(bench, &device)
}

/// A device keeps the size that it was made with. A mounted file system goes on, also after the worker's death that
/// ends the connections of before the growth. The next device is as large as the disk.
fn grown(bench: &mut Bench<'_>) -> Result<()> {
    bench.start_daemon()?;
    let device = make(bench, "nbd", 1)?;
    let size = format!("blockdev --getsize64 {device}");
    let before = bench
        .xenhost
        .sh(&format!("set -e; mkfs.ext4 -q {device}; mount {device} /mnt/dev; {size}"))?;
    let written = "dd if=/dev/urandom of=/mnt/dev/file bs=1M count=8 conv=fsync 2>/dev/null && \
                   sha256sum /mnt/dev/file >/tmp/sum";
    bench.xenhost.sh_for(
        &format!(
            "ferrite disk resize $(ferrite disk list | grep -o 'tap/[0-9]*' | head -n 1) 400M 2>&1 && {written}"
        ),
        120,
    )?;
    bench.xenhost.sh_for(
        "set -e; kill -9 $(pgrep -f '[f]errite worker' | head -n 1); sync -f /mnt/dev; \
         echo 3 > /proc/sys/vm/drop_caches; sha256sum -c --quiet /tmp/sum; rm /tmp/sum",
        300,
    )?;
    let after = bench.xenhost.sh(&size)?;
    expect_eq("the size of a device whose disk has grown", &after, &before)?;
    bench.xenhost.sh(&format!("umount /mnt/dev && ferrite disk device --remove {device}"))?;
    let next = bench.xenhost.sh(&format!("ferrite disk device {IMAGE}"))?;
    let size = bench.xenhost.sh(&format!("blockdev --getsize64 {next}"))?;
    expect_eq("the size of the next device", &size.trim(), &(400u64 << 20).to_string().as_str())?;
    bench
        .xenhost
        .sh_for(
            &format!(
                "set -e; e2fsck -fn {next} 2>&1; ferrite disk device --remove {next}; ferrite image check {IMAGE}; \
                 rm {IMAGE}; rmdir /mnt/dev /run/blktap-control/tapdisk"
            ),
            120,
        )
        .map(drop)
}

fn as_printed(bench: &mut Bench<'_>) -> Result<()> {
    bench.start_daemon()?;
    let run = |bench: &mut Bench<'_>, heading: &str| {
        let blocks = docs::ACCESS.commands(heading);
        let [commands] = &blocks[..] else { bail!("other blocks below {heading}: {blocks:?}") };
        bench.xenhost.sh_for(&format!("set -e; cd /lab; {commands}"), 300)
    };
    run(bench, "Look into a disk")?;
    // Another program finds the file system of the recipe.
    let seen = "set -e; cd /lab; ferrite image convert -q disk.qcow2 disk.img; \
                debugfs -R 'cat /file' disk.img 2>/dev/null; rm disk.qcow2 disk.img";
    let seen = bench.xenhost.sh_for(seen, 120)?;
    expect_eq("the file in the image", &seen.trim(), &"a file of domain 0")?;
    // A guest's disk with a partition, as the second recipe expects it.
    bench.xenhost.sh_for(
        "set -e; ferrite image create /srv/web1.vhd 64M; device=$(ferrite disk device /srv/web1.vhd); \
         printf 'label: gpt\\n,\\n' | sfdisk -q $device; partx -u $device; udevadm settle; \
         mkfs.ext4 -q ${device}p1; mount ${device}p1 /mnt; echo web1 >/mnt/of-the-guest; umount /mnt; \
         ferrite disk device --remove $device",
        300,
    )?;
    let listed = run(bench, "Rescue a guest's file system")?;
    if !listed.contains("of-the-guest") {
        bail!("the guest's file is not there: {listed}");
    }
    let check = "ferrite image check /srv/web1.vhd && rm /srv/web1.vhd && rmdir /run/blktap-control/tapdisk";
    bench.xenhost.sh(check).map(drop)
}

/// Every kernel makes a device by its NBD client. Without a ublk driver the error and the doctor say so.
/// The error names `--by nbd`, which does the same.
fn kinds(bench: &mut Bench<'_>) -> Result<()> {
    bench.start_daemon()?;
    let device = make(bench, "nbd", 1)?;
    if !device.starts_with("/dev/nbd") {
        bail!("a device by nbd: {device}");
    }
    let remove = format!(
        "dd if={device} bs=4k count=1 2>/dev/null | wc -c; printf 'label: gpt\\n,\\n' | sfdisk -q {device} && \
         ferrite disk device --remove {device}"
    );
    let read = bench.xenhost.sh(&remove)?;
    if !read.starts_with("4096") {
        bail!("a read of {device}: {read}");
    }
    let has = has_ublk(bench)?;
    let doctor = bench.xenhost.sh("ferrite doctor; true")?;
    let line = doctor.lines().find(|line| line.contains("devices, ublk")).unwrap_or_default();
    expect_eq("the doctor's view", &line.contains("this kernel has no ublk_drv"), &!has)?;
    if has {
        // It is taken where it is loaded, and shows the partitions that there are.
        let shown = bench.xenhost.sh(&format!(
            "set -e; modprobe ublk_drv; device=$(ferrite disk device {IMAGE}); \
             echo $device; udevadm settle; ls ${{device}}p1; ferrite disk device --remove $device"
        ))?;
        if !shown.starts_with("/dev/ublkb") {
            bail!("a device where the ublk driver is loaded: {shown}");
        }
    } else {
        for load in ["", "--load"] {
            let ask = format!("ferrite disk device {IMAGE} --by ublk {load} 2>&1 && exit 1; true");
            let refused = bench.xenhost.sh(&ask)?;
            if !refused.contains("ublk") || !refused.contains("--by nbd") {
                bail!("a device by ublk without its driver: {refused}");
            }
        }
    }
    let clean = format!(
        "[ -z \"$(tap-ctl list)\" ] && rm {IMAGE} && rmdir /mnt/dev /run/blktap-control/tapdisk"
    );
    bench.xenhost.sh(&clean).map(drop)
}
