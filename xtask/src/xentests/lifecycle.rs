//! Disks that are attached and detached, and guests that end without closing them.

use super::{Bench, Case, any, expect_eq, ferrite};
use anyhow::{Result, bail};
use ferrite_xenhost::disk::{DiskOptions, ended};
use ferrite_xenhost::guest::GuestOptions;

pub(super) const CASES: &[Case] = &[
    any("lifecycle/unplugged-and-plugged-in-again", unplug_and_replug),
    any("lifecycle/destroyed-with-io-in-flight", destroyed),
    ferrite("lifecycle/destroyed-guest-leaves-nothing-open", nothing_left_open),
];

/// Writes that do not end by themselves.
pub(super) const ENDLESS_IO: &str = "fio --name=endless --ioengine=libaio --direct=1 --rw=randrw --bs=16k \
     --iodepth=32 --size=64m --time_based --runtime=1000 --filename=/dev/xvda --minimal";

fn unplug_and_replug(bench: &mut Bench<'_>) -> Result<()> {
    // An emulated processor takes half a second for the checksum of a MiB.
    let image = bench.image(16)?;
    let mut guest = bench.paused_guest(&GuestOptions::default())?;
    guest.unpause(bench.xenhost)?;
    guest.wait_ready(bench.xenhost)?;
    let mut sum = String::new();
    for round in 0..3 {
        let mut disk = bench.plug(&mut guest, DiskOptions::new(&image, "xvdb"))?;
        let read = guest.sh(bench.xenhost, "sha256sum </dev/xvdb", 120)?;
        if round > 0 {
            expect_eq("the disk's checksum after it came back", &read, &sum)?;
        }
        let write = format!(
            "dd if=/dev/urandom of=/dev/xvdb bs=64k count=16 seek={} oflag=direct 2>&1 && sync",
            round * 16
        );
        guest.sh(bench.xenhost, &write, 120)?;
        sum = guest.sh(bench.xenhost, "sha256sum </dev/xvdb", 120)?;
        disk.unplug(bench.xenhost)?;
        guest.sh(
            bench.xenhost,
            "for n in $(seq 100); do [ -b /dev/xvdb ] || exit 0; sleep 0.1; done; exit 1",
            30,
        )?;
    }
    expect_eq("the image's checksum", &bench.xenhost.sh(&format!("sha256sum <{image}"))?, &sum)
}

fn destroyed(bench: &mut Bench<'_>) -> Result<()> {
    for _ in 0..2 {
        let (mut guest, mut disk) = bench.default_guest(128)?;
        let _endless = guest.begin(bench.xenhost, ENDLESS_IO, 1000)?;
        wait_for_io(bench, &mut guest)?;
        guest.destroy(bench.xenhost)?;
        let gone = "[ $(xl list | wc -l) = 2 ]";
        disk.remove_after_destroy(bench.xenhost)?;
        bench.xenhost.wait_until("the destroyed guest gone, no zombie", gone, 60)?;
    }
    Ok(())
}

/// After the guest's end, the process that served it has no more open files than before.
fn nothing_left_open(bench: &mut Bench<'_>) -> Result<()> {
    let image = bench.image(128)?;
    let mut guest = bench.paused_guest(&GuestOptions::default())?;
    let mut disk = bench.attach(&guest, DiskOptions::new(&image, "xvda"))?;
    disk.wait_backend_state(bench.xenhost, 2)?;
    let Some(pid) = disk.pid() else { bail!("no process serves the disk") };
    let before = open_files(bench, pid)?;
    guest.unpause(bench.xenhost)?;
    guest.wait_ready(bench.xenhost)?;
    disk.wait_connected(bench.xenhost)?;
    let _endless = guest.begin(bench.xenhost, ENDLESS_IO, 1000)?;
    wait_for_io(bench, &mut guest)?;
    guest.destroy(bench.xenhost)?;
    let condition = format!(
        "{} || {{ [ $(ls /proc/{pid}/fd | wc -l) -le {before} ] && \
         ! grep -q xen/gntdev /proc/{pid}/maps; }}",
        ended(pid)
    );
    bench.xenhost.wait_until("open files and mapped grants back to base", &condition, 60)?;
    disk.remove_after_destroy(bench.xenhost)
}

fn open_files(bench: &mut Bench<'_>, pid: u32) -> Result<u64> {
    Ok(bench.xenhost.sh(&format!("ls /proc/{pid}/fd | wc -l"))?.parse()?)
}

/// Waits until requests are in flight.
fn wait_for_io(bench: &mut Bench<'_>, guest: &mut ferrite_xenhost::guest::Guest) -> Result<()> {
    let command =
        "until [ $(awk '{print $1+$5}' /sys/block/xvda/stat) -ge 200 ]; do sleep 0.1; done";
    guest.sh(bench.xenhost, command, 120).map(drop)
}
