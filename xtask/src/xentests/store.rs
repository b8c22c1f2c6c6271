//! Volumes of a store as disks of several guests, served by one process.

use super::guests::wait_for_requests;
use super::toolstack::{running_guest, xl_knows_us};
use super::xl::wait_for_none;
use super::{Bench, Case, expect_eq, ferrite, wait_for_node};
use anyhow::{Context, Result, bail, ensure};
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions, Job};
use serde_json::Value;

pub(super) const CASES: &[Case] = &[
    ferrite("store/two-clones-of-one-guest-and-their-worker-killed", two_disks_of_one_guest),
    ferrite("store/two-guests-on-clones-of-a-snapshot-killed-under-verify", clones),
    ferrite("store/the-daemons-worker-killed-under-two-guests-and-one-detached", by_daemon),
];

pub(super) const STORE: &str = "/lab/pool.store";
/// The source of the guests' clones has random data there, and nothing after it.
const FILLED_MIB: u64 = 8;
const DISK_MIB: u64 = 64;
/// Each guest writes the second half of that data, and more after it, and leaves the first half unchanged.
const KEPT_MIB: u64 = FILLED_MIB / 2;
const KILLS: u32 = 3;
/// Requests of a guest between two kills.
const BETWEEN: u32 = 16;

/// A store with the volumes `a` and `b`, clones of the snapshot `monday`. Returns the image of their common content.
fn make_store(bench: &mut Bench<'_>) -> Result<String> {
    make_store_of(bench, DISK_MIB, 0)
}

/// Such a store, whose volumes have `mib` MiB and random data from `filled_from` MiB on.
pub(super) fn make_store_of(bench: &mut Bench<'_>, mib: u64, filled_from: u64) -> Result<String> {
    let source = bench.image(mib as u32)?;
    bench.xenhost.sh_for(
        &format!(
            "head -c {FILLED_MIB}M /dev/urandom | \
             dd of={source} conv=notrunc bs=1M seek={filled_from} iflag=fullblock 2>/dev/null && \
             ferrite store create {STORE} --size 1G && ferrite image convert {source} store:{STORE}#web && \
             ferrite store snapshot {STORE}#web monday && ferrite store clone {STORE}#monday a && \
             ferrite store clone {STORE}#monday b"
        ),
        300,
    )?;
    Ok(source)
}

/// Both clones are disks of one guest. Their worker is killed while the guest writes one of them.
fn two_disks_of_one_guest(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let source = make_store(bench)?;
    let sum =
        |mib: u64, file: &str| format!("dd if={file} bs=1M count={mib} 2>/dev/null | sha256sum");
    let kept = bench.xenhost.sh(&sum(KEPT_MIB, &source))?;
    let filled = bench.xenhost.sh(&sum(FILLED_MIB, &source))?;
    let mut guest = running_guest(bench)?;
    for (name, volume) in [("xvda", "a"), ("xvdb", "b")] {
        bench.xenhost.sh(&format!(
            "xl block-attach {} 'vdev={name},backendtype=tap,format=raw,script=block-ferrite,\
             target=store:{STORE}#{volume}'",
            guest.name()
        ))?;
        guest.sh(bench.xenhost, &format!("until [ -b /dev/{name} ]; do sleep 0.2; done"), 60)?;
    }
    let disk = Disk::of_toolstack(&guest, DiskOptions::new(STORE, "xvda"))?;
    let job = begin_verifying(bench, &mut guest)?;
    disk.kill_worker(bench.xenhost)?;
    wait_for_requests(bench, &mut guest, BETWEEN)?;
    stop_verifying(bench, &mut guest, &job, &kept)?;
    let other = guest.sh(bench.xenhost, &sum(FILLED_MIB, "/dev/xvdb"), 120)?;
    expect_eq("the clone that was not written", &other, &filled)?;
    guest.check_blkfront(bench.xenhost)?;
    guest.destroy(bench.xenhost)?;
    wait_for_none(bench, "the end of both disks")?;
    check_store(bench, &source)
}

fn clones(bench: &mut Bench<'_>) -> Result<()> {
    let source = make_store(bench)?;
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
        stop_verifying(bench, guest, job, &kept)?;
    }
    pair.end(bench)?;
    check_store(bench, &source)
}

/// xl attaches the disks, and one process of the daemon serves both. It is killed, commands work on the store in use,
/// and one disk is detached and attached again while the other is in use.
fn by_daemon(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let source = make_store(bench)?;
    let kept = bench.xenhost.sh(&format!("head -c {KEPT_MIB}M {source} | sha256sum"))?;
    let words = |name| format!("format=raw,script=block-ferrite,target=store:{STORE}#{name}");
    let options = GuestOptions::default();
    let (mut one, disk) = bench.guest_of_words(&options, STORE, &words("a"), |_, _| Ok(()))?;
    let (mut two, beside) = bench.guest_of_words(&options, STORE, &words("b"), |_, _| Ok(()))?;
    let of_one = begin_verifying(bench, &mut one)?;
    let of_two = begin_verifying(bench, &mut two)?;
    for killed in [&disk, &beside] {
        killed.kill_worker(bench.xenhost)?;
        for guest in [&mut one, &mut two] {
            wait_for_requests(bench, guest, BETWEEN)?;
        }
    }
    let worker = bench.xenhost.sh(&disk.worker())?;
    expect_eq("the worker of the second disk", &bench.xenhost.sh(&beside.worker())?, &worker)?;
    for command in ["snapshot {}#a tuesday", "check --deep {}", "gc {}"] {
        let command = command.replace("{}", STORE);
        bench.xenhost.sh_for(&format!("ferrite store {command}"), 300)?;
    }
    wait_for_requests(bench, &mut one, BETWEEN)?;
    stop_verifying(bench, &mut two, &of_two, &kept)?;
    let whole =
        format!("dd if=/dev/xvda bs=1M count={DISK_MIB} iflag=direct 2>/dev/null | sha256sum");
    let before = two.sh(bench.xenhost, &whole, 300)?;
    let name = two.name().to_owned();
    bench.xenhost.sh(&format!("xl block-detach {name} xvda"))?;
    bench.xenhost.wait_until("one disk", "[ $(ls /run/ferrite/disks | wc -l) = 1 ]", 60)?;
    wait_for_requests(bench, &mut one, BETWEEN)?;
    let again = format!("vdev=xvda,backendtype=tap,{}", words("b"));
    bench.xenhost.sh(&format!("xl block-attach {name} '{again}'"))?;
    wait_for_node(bench.xenhost, &mut two, &beside)?;
    expect_eq("the disk that came again", &two.sh(bench.xenhost, &whole, 300)?, &before)?;
    expect_eq("the worker of the first disk", &bench.xenhost.sh(&disk.worker())?, &worker)?;
    stop_verifying(bench, &mut one, &of_one, &kept)?;
    for guest in [&mut one, &mut two] {
        guest.check_blkfront(bench.xenhost)?;
        guest.destroy(bench.xenhost)?;
    }
    wait_for_none(bench, "the end of both disks")?;
    check_store(bench, &source)
}

/// The store is intact, the snapshot is unchanged, and unwritten data are stored once.
pub(super) fn check_store(bench: &mut Bench<'_>, source: &str) -> Result<()> {
    bench.xenhost.sh_for(&format!("ferrite store check --deep {STORE}"), 300)?;
    bench.xenhost.sh_for(&format!("ferrite image compare store:{STORE}#monday {source}"), 300)?;
    let shared = shared_bytes(bench, STORE)?;
    // At least four volumes have it: data that neither guest has written are stored once.
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
    /// Ends the guests, and the process with the second one.
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

/// The guest repeatedly writes blocks of its own and verifies them, until /tmp/stop exists. It has begun when this
/// returns.
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

/// It has verified its writes, and the rest is unchanged.
fn stop_verifying(bench: &mut Bench<'_>, guest: &mut Guest, job: &Job, kept: &str) -> Result<()> {
    guest.sh(bench.xenhost, "touch /tmp/stop", 60)?;
    guest.finish_ok(bench.xenhost, job).context("fio that verifies")?;
    let read =
        format!("dd if=/dev/xvda bs=1M count={KEPT_MIB} iflag=direct 2>/dev/null | sha256sum");
    let sum = guest.sh(bench.xenhost, &read, 120)?;
    expect_eq("what the guest left alone", &sum.as_str(), &kept)
}

/// The bytes of all volumes, less the bytes of their different blocks.
fn shared_bytes(bench: &mut Bench<'_>, store: &str) -> Result<u64> {
    let told = bench.xenhost.sh_for(&format!("ferrite store stats --json {store}"), 120)?;
    let stats: Value = serde_json::from_str(&told).with_context(|| format!("odd: {told}"))?;
    match (stats["mapped_bytes"].as_u64(), stats["distinct_bytes"].as_u64()) {
        (Some(mapped), Some(distinct)) => Ok(mapped.saturating_sub(distinct)),
        _ => bail!("odd statistics: {told}"),
    }
}
