//! Volumes of a store as disks of several guests, which one process serves.

use super::guests::wait_for_requests;
use super::{Bench, Case, expect_eq, ferrite, wait_for_node};
use anyhow::{Context, Result, bail, ensure};
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions, Job};
use serde_json::Value;

/// By night, as two guests that verify take minutes where other tests take one.
pub(super) const CASES: &[Case] =
    &[ferrite("store/two-guests-on-clones-of-a-snapshot-killed-under-verify", clones).by_night()];

const STORE: &str = "/lab/pool.store";
/// What the guests' disks were cloned from has random data there, and nothing behind it.
const FILLED_MIB: u64 = 8;
const DISK_MIB: u64 = 64;
/// Each guest writes the second half of that data, and more behind it. The first half it leaves alone.
const KEPT_MIB: u64 = FILLED_MIB / 2;
const KILLS: u32 = 3;
/// Requests of a guest between one death and the next.
const BETWEEN: u32 = 16;

fn clones(bench: &mut Bench<'_>) -> Result<()> {
    let source = bench.image(DISK_MIB as u32)?;
    bench.xenhost.sh_for(
        &format!(
            "head -c {FILLED_MIB}M /dev/urandom | dd of={source} conv=notrunc bs=1M 2>/dev/null && \
             ferrite store create {STORE} --size 1G && ferrite image convert {source} store:{STORE}#web && \
             ferrite store snapshot {STORE}#web monday && ferrite store clone {STORE}#monday a && \
             ferrite store clone {STORE}#monday b"
        ),
        300,
    )?;
    let mut pair = start_pair(bench, &GuestOptions::default(), STORE, ["a", "b"])?;
    let kept = bench.xenhost.sh(&format!("head -c {KEPT_MIB}M {source} | sha256sum"))?;
    let mut jobs = Vec::new();
    for guest in &mut pair.guests {
        jobs.push(begin_verifying(bench, guest)?);
    }
    for _ in 0..KILLS {
        pair.serving.crash_backend(bench.xenhost)?;
        pair.serving.start_backend(bench.xenhost)?;
        for guest in &mut pair.guests {
            wait_for_requests(bench, guest, BETWEEN)?;
        }
    }
    for (guest, job) in pair.guests.iter_mut().zip(&jobs) {
        guest.sh(bench.xenhost, "touch /tmp/stop", 60)?;
        guest.finish_ok(bench.xenhost, job).context("fio that verifies")?;
        let read =
            format!("dd if=/dev/xvda bs=1M count={KEPT_MIB} iflag=direct 2>/dev/null | sha256sum");
        let sum = guest.sh(bench.xenhost, &read, 120)?;
        expect_eq("what the guest left alone", &sum, &kept)?;
    }
    pair.end(bench)?;
    bench.xenhost.sh_for(&format!("ferrite store check --deep {STORE}"), 300)?;
    bench.xenhost.sh_for(&format!("ferrite image compare store:{STORE}#monday {source}"), 300)?;
    let shared = shared_bytes(bench, STORE)?;
    // Of the four volumes that have it: what neither guest has written is there once.
    let least = (3 * KEPT_MIB) << 20;
    ensure!(shared >= least, "the volumes share {shared} bytes, not {least}");
    Ok(())
}

/// Two guests whose disks one process serves.
struct Pair {
    guests: [Guest; 2],
    /// The disk whose process serves both.
    serving: Disk,
}

impl Pair {
    /// Ends the guests, and with the second of them the process.
    fn end(&mut self, bench: &mut Bench<'_>) -> Result<()> {
        for guest in &mut self.guests {
            guest.check_blkfront(bench.xenhost)?;
            guest.destroy(bench.xenhost)?;
        }
        self.serving.wait_backend_gone(bench.xenhost)
    }
}

/// Boots two guests, each with a volume of a store.
fn start_pair(
    bench: &mut Bench<'_>,
    options: &GuestOptions,
    store: &str,
    volumes: [&str; 2],
) -> Result<Pair> {
    let mut guests = [bench.paused_guest(options)?, bench.paused_guest(options)?];
    let [first, second] =
        volumes.map(|name| DiskOptions::new(&format!("store:{store}#{name}"), "xvda"));
    let beside = bench.attach_beside(&guests[1], second)?;
    let arguments = beside.of_serve();
    let serving = bench.attach(&guests[0], DiskOptions { arguments, ..first })?;
    for guest in &guests {
        guest.unpause(bench.xenhost)?;
    }
    for (guest, disk) in guests.iter_mut().zip([&serving, &beside]) {
        guest.wait_ready(bench.xenhost)?;
        disk.wait_connected(bench.xenhost)?;
        wait_for_node(bench.xenhost, guest, disk)?;
    }
    Ok(Pair { guests, serving })
}

/// The guest writes blocks of its own and verifies them, again and again, until there is /tmp/stop. It is at work
/// when this returns.
fn begin_verifying(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<Job> {
    let verify = format!(
        "fio --name=verify --ioengine=libaio --direct=1 --rw=randwrite --bsrange=4k-64k --size={FILLED_MIB}m \
         --io_size=2m --offset={KEPT_MIB}m --iodepth=32 --randseed={} --verify=crc32c --verify_fatal=1 \
         --do_verify=1 --filename=/dev/xvda --minimal",
        guest.domid()
    );
    let until_told = format!("until [ -e /tmp/stop ]; do {verify} || exit 1; done");
    let job = guest.begin(bench.xenhost, &until_told, 1500)?;
    wait_for_requests(bench, guest, BETWEEN)?;
    Ok(job)
}

/// What the volumes have together, less what that is when equal blocks count once.
fn shared_bytes(bench: &mut Bench<'_>, store: &str) -> Result<u64> {
    let told = bench.xenhost.sh_for(&format!("ferrite store stats --json {store}"), 120)?;
    let stats: Value = serde_json::from_str(&told).with_context(|| format!("odd: {told}"))?;
    match (stats["mapped_bytes"].as_u64(), stats["distinct_bytes"].as_u64()) {
        (Some(mapped), Some(distinct)) => Ok(mapped.saturating_sub(distinct)),
        _ => bail!("odd statistics: {told}"),
    }
}
