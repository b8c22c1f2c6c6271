//! fio with checksums over every shape of ring: block sizes, queues, ring orders, indirect segments.

use super::{Bench, Case, any, expect_eq};
use anyhow::{Result, bail};
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};

/// Six guests in which every pair of values of the three parameters occurs.
pub(super) const CASES: &[Case] = &[
    any("fio/1-queue-order-0-no-indirect", |bench| shape(bench, 1, 0, 0)),
    any("fio/1-queue-order-4-indirect-32", |bench| shape(bench, 1, 4, 32)),
    any("fio/1-queue-order-0-indirect-256", |bench| shape(bench, 1, 0, 256)),
    any("fio/2-queues-order-4-no-indirect", |bench| shape(bench, 2, 4, 0)),
    any("fio/2-queues-order-0-indirect-32", |bench| shape(bench, 2, 0, 32)),
    any("fio/2-queues-order-4-indirect-256", |bench| shape(bench, 2, 4, 256)),
    any("fio/fsync-reaches-the-medium", fsync_reaches_the_medium),
];

/// Block size and bytes for each of the two jobs; some hundred requests each, because an emulated host answers some
/// hundred per second.
const SIZES: &[(&str, &str)] =
    &[("512", "96k"), ("4k", "1m"), ("16k", "3m"), ("64k", "6m"), ("256k", "8m"), ("1m", "16m")];

/// Space of each block size on the disk.
const AREA_MIB: u32 = 128;

/// The options of all verifying runs: two jobs, each pinned to its processor and so to its queue.
const COMMON: &str = "--ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
     --iodepth=32 --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --randrepeat=1 \
     --thread --group_reporting --minimal";

fn shape(bench: &mut Bench<'_>, queues: u32, ring_order: u32, indirect: u32) -> Result<()> {
    let options = GuestOptions {
        queues: Some(queues),
        ring_order: Some(ring_order),
        indirect: Some(indirect),
        ..GuestOptions::default()
    };
    let areas = SIZES.len() as u32 + 1;
    let image = bench.image(areas * AREA_MIB)?;
    let (mut guest, disk) = bench.guest_with(&options, DiskOptions::new(&image, "xvda"))?;
    check_negotiated(bench, &mut guest, &disk, &options)?;
    // One run of fio for all sizes: a start takes a second here.
    let mut command = format!("fio {COMMON} --filename={} --offset_increment=64m", disk.node());
    for (area, (block, bytes)) in SIZES.iter().enumerate() {
        command += &format!(
            " --name=bs{block} --stonewall --rw=randwrite --bs={block} --size={bytes} --offset={}m",
            area as u32 * AREA_MIB
        );
    }
    command += &format!(
        " --name=mixed --stonewall --rw=write --bsrange=512-256k --blockalign=512 \
         --verify_interval=512 --size=4m --offset={}m",
        (areas - 1) * AREA_MIB
    );
    guest.sh(bench.xenhost, &command, 900).map(drop)
}

/// Checks the negotiated options: a test of options is worthless if the guest got others.
fn check_negotiated(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    disk: &Disk,
    options: &GuestOptions,
) -> Result<()> {
    let front = disk.frontend();
    let keys = bench.xenhost.sh(&format!(
        "for key in multi-queue-num-queues ring-page-order; do \
         xenstore-read {front}/$key 2>/dev/null || echo 0; done"
    ))?;
    // Linux writes no key for one queue or a ring of one page.
    let queues = options.queues.filter(|queues| *queues > 1).unwrap_or(0);
    let order = options.ring_order.unwrap_or(0);
    expect_eq("queues and ring order in xenstore", &keys, &format!("{queues}\n{order}"))?;
    let log = guest.blkfront_log(bench.xenhost)?;
    let wanted = match options.indirect {
        Some(0..=11) => "indirect descriptors: disabled",
        _ => "indirect descriptors: enabled",
    };
    let is_persistent = bench.xenhost.serve_arguments.contains("--mover persistent");
    let grants = match bench.backend {
        Backend::Ferrite if is_persistent => "persistent grants: enabled",
        Backend::Ferrite => "persistent grants: disabled",
        _ => "persistent grants: ",
    };
    if let Some(missing) = [wanted, grants].into_iter().find(|text| !log.contains(text)) {
        bail!("blkfront did not say {missing:?}:\n{log}");
    }
    let limit = guest.sh(bench.xenhost, "cat /sys/block/xvda/queue/max_segments", 20)?;
    let segments = options.indirect.filter(|indirect| *indirect > 11).unwrap_or(11);
    expect_eq("segments a request", &limit, &segments.to_string())
}

/// A flush of the guest must cause flushes of the block device below.
fn fsync_reaches_the_medium(bench: &mut Bench<'_>) -> Result<()> {
    let device = bench.xenhost.scratch(ferrite_xenhost::SCRATCH_512)?;
    let (mut guest, disk) =
        bench.guest_with(&GuestOptions::default(), DiskOptions::new(&device, "xvda"))?;
    let cache = guest.sh(bench.xenhost, "cat /sys/block/xvda/queue/write_cache", 20)?;
    expect_eq("the guest's write cache", &cache.as_str(), &"write back")?;
    // The 16th number of a block device's statistics counts finished flushes.
    let finished = |name: &str| format!("awk '{{print $16}}' /sys/block/{name}/stat");
    let of_medium = finished(device.trim_start_matches("/dev/"));
    let of_guest = finished("xvda");
    let medium_before: u64 = bench.xenhost.sh(&of_medium)?.parse()?;
    let guest_before: u64 = guest.sh(bench.xenhost, &of_guest, 20)?.parse()?;
    let command = format!(
        "fio --name=sync --filename={} --ioengine=libaio --direct=1 --rw=randwrite --bs=4k \
         --size=1m --iodepth=4 --fsync=8 --verify=crc32c --verify_fatal=1 --do_verify=1 --minimal",
        disk.node()
    );
    guest.sh(bench.xenhost, &command, 300)?;
    let sent = guest.sh(bench.xenhost, &of_guest, 20)?.parse::<u64>()? - guest_before;
    let done = bench.xenhost.sh(&of_medium)?.parse::<u64>()? - medium_before;
    // 256 writes, with a flush after each eight.
    if sent < 31 || done < sent {
        bail!("the guest sent {sent} flushes, and the medium did {done}");
    }
    Ok(())
}
