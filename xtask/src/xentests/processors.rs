//! The limit of a disk's processor time in dom0, compared with a disk without a limit.

use super::{Bench, Case, ferrite, wait_for_node};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};

pub(super) const CASES: &[Case] = &[ferrite(
    "processors/a-bounded-disk-takes-its-share-and-is-unplugged-while-it-waits",
    bounded,
)];

/// Percent of one processor; the other disk takes several times as much of the Xen host's.
const PERCENT: u32 = 5;

/// The processor time of the unlimited disk at the comparison.
const TICKS_TO_COMPARE: u64 = 40;

/// The same reads from both disks, until these are gone.
const ENDLESS_READS: &str = "fio --ioengine=libaio --direct=1 --rw=randread --bs=4k --iodepth=32 \
     --size=64m --time_based --runtime=1000 --minimal \
     --name=bounded --filename=/dev/xvda --name=free --filename=/dev/xvdb";

fn bounded(bench: &mut Bench<'_>) -> Result<()> {
    let mut guest = bench.paused_guest(&GuestOptions::default())?;
    let mut held = attach(bench, &guest, "xvda", &format!("-v --cpu {PERCENT}"))?;
    let mut free = attach(bench, &guest, "xvdb", "-v")?;
    guest.unpause(bench.xenhost)?;
    guest.wait_ready(bench.xenhost)?;
    for disk in [&held, &free] {
        disk.wait_connected(bench.xenhost)?;
        wait_for_node(bench.xenhost, &mut guest, disk)?;
    }
    let before = (processor_ticks(bench, &held)?, processor_ticks(bench, &free)?);
    let _endless = guest.begin(bench.xenhost, ENDLESS_READS, 1000)?;
    let mut count = 1000;
    let of_free = loop {
        wait_for_reads(bench, &mut guest, count)?;
        // dom0's clock counts few ticks while its machine hangs.
        match processor_ticks(bench, &free)? - before.1 {
            ticks if ticks < TICKS_TO_COMPARE && count < 5000 => count += 500,
            ticks => break ticks,
        }
    };
    let of_held = processor_ticks(bench, &held)? - before.0;
    let reads = (reads(bench, &mut guest, "xvda")?, reads(bench, &mut guest, "xvdb")?);
    if reads.0 * 2 > reads.1 || of_held * 2 > of_free {
        bail!(
            "with --cpu {PERCENT}, {} reads in {of_held} ticks of a processor; the disk beside \
             it: {} reads in {of_free}",
            reads.0,
            reads.1
        );
    }
    // Its ring always has waiting requests.
    held.unplug(bench.xenhost).context("unplugging the disk that is held back")?;
    wait_for_reads(bench, &mut guest, reads.1 + 200)?;
    // Linux may keep a read that it began while the disk was removed, and with it all work of its xenstore thread: the
    // other disk is removed with the guest.
    guest.destroy(bench.xenhost)?;
    free.remove_after_destroy(bench.xenhost)?;
    for (disk, is_held) in [(&held, true), (&free, false)] {
        let log = disk.backend_log(bench.xenhost)?;
        if !log.contains("since the start: ") || log.contains("(--cpu)") != is_held {
            bail!("{} was held back: {}; its log:\n{log}", disk.node(), !is_held);
        }
    }
    Ok(())
}

fn attach(
    bench: &mut Bench<'_>,
    guest: &Guest,
    name: &'static str,
    arguments: &str,
) -> Result<Disk> {
    let image = bench.image(64)?;
    let options = DiskOptions { arguments: arguments.into(), ..DiskOptions::new(&image, name) };
    bench.attach(guest, options)
}

/// The processor time of the disk's process, in dom0's clock ticks.
fn processor_ticks(bench: &mut Bench<'_>, disk: &Disk) -> Result<u64> {
    let pid = disk.pid().context("no process serves the disk")?;
    Ok(bench.xenhost.sh(&format!("awk '{{print $14+$15}}' /proc/{pid}/stat"))?.parse()?)
}

/// Reads of a disk that the guest has finished.
fn reads(bench: &mut Bench<'_>, guest: &mut Guest, name: &str) -> Result<u64> {
    let count = format!("awk '{{print $1}}' /sys/block/{name}/stat");
    Ok(guest.sh(bench.xenhost, &count, 30)?.parse()?)
}

/// Waits until the guest has finished so many reads of the unlimited disk.
fn wait_for_reads(bench: &mut Bench<'_>, guest: &mut Guest, count: u64) -> Result<()> {
    let command = format!(
        "until [ $(awk '{{print $1}}' /sys/block/xvdb/stat) -ge {count} ]; do sleep 0.1; done"
    );
    guest.sh(bench.xenhost, &command, 200).map(drop)
}
