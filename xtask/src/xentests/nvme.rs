//! Polled storage, on an emulated NVMe device in the dom0.

use super::recovery::{Load, killed_under_verify};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::SCRATCH_NVME;
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};

pub(super) const CASES: &[Case] = &[
    ferrite("nvme/iopoll-serves-a-verify-and-a-kill", iopoll),
    ferrite("nvme/passthrough-serves-a-verify-and-a-kill", |bench| passthrough(bench, false)),
    ferrite("nvme/polled-passthrough-serves-a-verify-and-a-kill", |bench| passthrough(bench, true)),
];

/// Loads the driver with a poll queue; returns the name of the device, such as `nvme0`.
fn load(bench: &mut Bench<'_>) -> Result<String> {
    let command = format!(
        "lsmod | grep -q '^nvme ' || modprobe nvme poll_queues=1
         for n in $(seq 100); do
             for d in /sys/class/nvme/nvme*; do
                 if grep -qs {SCRATCH_NVME} $d/serial && [ -b /dev/${{d##*/}}n1 ]; then
                     echo ${{d##*/}}; exit 0
                 fi
             done; sleep 0.1
         done; exit 1"
    );
    bench.xenhost.sh_for(&command, 60).context("the NVMe device does not come up in the dom0")
}

fn iopoll(bench: &mut Bench<'_>) -> Result<()> {
    bench.xenhost.serve_arguments.clear();
    let device = load(bench)?;
    let block = format!("{device}n1");
    let told = bench.xenhost.sh("ferrite doctor")?;
    if !told.contains(&format!("poll queues: {block}")) {
        bail!("ferrite doctor does not see the poll queue of {block}:\n{told}");
    }
    let options = DiskOptions {
        arguments: "--poll-storage".into(),
        ..DiskOptions::new(&format!("/dev/{block}"), "xvda")
    };
    let (mut guest, mut disk) = bench.guest_with(&GuestOptions::default(), options)?;
    let log = disk.backend_log(bench.xenhost)?;
    if !log.contains("disk I/O goes through io_uring polled") || log.contains("is not polled") {
        bail!("the backend does not poll:\n{log}");
    }
    let before = interrupts(bench, &device)?;
    verify(bench, &mut guest, &mut disk)?;
    let taken = interrupts(bench, &device)? - before;
    // Flushes and discards use interrupts, reads and writes do not.
    let count = format!("awk '{{print $1+$5}}' /sys/block/{block}/stat");
    let ios: u64 = bench.xenhost.sh(&count)?.parse()?;
    if ios < 1000 || taken > ios / 4 {
        bail!("{taken} interrupts for {ios} reads and writes: they are not polled");
    }
    Ok(())
}

fn passthrough(bench: &mut Bench<'_>, polled: bool) -> Result<()> {
    bench.xenhost.serve_arguments.clear();
    let device = load(bench)?;
    let node = format!("/dev/{}n1", device.replace("nvme", "ng"));
    let arguments = if polled { "--poll-storage" } else { "" }.into();
    let options = DiskOptions { arguments, ..DiskOptions::new(&node, "xvda") };
    let before = block_layer(bench, &device)?;
    let (mut guest, mut disk) = bench.guest_with(&GuestOptions::default(), options)?;
    let log = disk.backend_log(bench.xenhost)?;
    let engine = if polled { "io_uring nvme polled" } else { "io_uring nvme" };
    if !log.contains(&format!("disk I/O goes through {engine}\n")) {
        bail!("the backend does not send commands:\n{log}");
    }
    // Older kernels crash when a flush is among polled commands.
    let is_old = "[ $(uname -r | awk -F. '{ print $1 * 100 + $2 }') -lt 605 ]";
    let refused = polled && bench.xenhost.dom0(is_old, 20)?.status == 0;
    expect_eq("whether polling is refused", &log.contains("is not polled"), &refused)?;
    // No other program may open the namespace meanwhile.
    if bench.xenhost.dom0(&format!("mkfs.ext4 -q /dev/{device}n1"), 60)?.status == 0 {
        bail!("the namespace's block device is not claimed");
    }
    verify(bench, &mut guest, &mut disk)?;
    // Claiming the block device reads its partition table, and no more.
    let through = block_layer(bench, &device)? - before;
    if through > 100 {
        bail!("{through} requests went through the block layer");
    }
    Ok(())
}

/// Requests in the block device's own statistics.
fn block_layer(bench: &mut Bench<'_>, device: &str) -> Result<u64> {
    let count = format!("awk '{{print $1+$5}}' /sys/block/{device}n1/stat");
    Ok(bench.xenhost.sh(&count)?.parse()?)
}

/// Interrupts of the device's queues so far.
fn interrupts(bench: &mut Bench<'_>, device: &str) -> Result<u64> {
    let command = format!(
        "awk '/{device}q[1-9]/ {{ for (i = 2; $i ~ /^[0-9]+$/; i++) n += $i }} END {{ print n + 0 }}' \
         /proc/interrupts"
    );
    Ok(bench.xenhost.sh(&command)?.parse()?)
}

/// A guest that verifies its writes, and whose backend is killed and restarted meanwhile.
fn verify(bench: &mut Bench<'_>, guest: &mut Guest, disk: &mut Disk) -> Result<()> {
    let load = Load { kills: 1, options: "--fsync=64", large: "--bs=1m --size=16m" };
    killed_under_verify(bench, guest, disk, &load)?;
    guest.sh(bench.xenhost, "blkdiscard -f -o 134217728 -l 8388608 /dev/xvda", 100)?;
    let size = guest.sh(bench.xenhost, "blockdev --getsize64 /dev/xvda", 20)?;
    expect_eq("the disk's size", &size.as_str(), &"536870912")
}
