//! Disks of running guests that get snapshots, are merged, grow, and are limited, while fio writes and verifies.

use super::guests::{begin_verifying, migrate, stop_verifying, wait_for_requests};
use super::toolstack::xl_knows_us;
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::guest::{Guest, GuestOptions};

pub(super) const CASES: &[Case] = &[
    ferrite("changes/pv-snapshots-merged-grown-and-limited-under-verify", paravirtual),
    ferrite("changes/pvh-migrated-while-its-chain-is-merged-under-verify", migrated).on_amd(),
];

/// The disk's image in MiB, at first and when it has grown.
const MIB: [u64; 2] = [256, 320];
/// The limit that the guest sees, in requests a second, and how long it is watched, in seconds.
const LIMIT: [u64; 2] = [20, 10];

fn guest(bench: &mut Bench<'_>, options: &GuestOptions, format: &str) -> Result<Guest> {
    bench.start_daemon()?;
    let image = format!("/lab/leaf.{format}");
    let make = format!("rm -f /lab/*.{format}; ferrite image create {image} {}M", MIB[0]);
    bench.xenhost.sh(&make)?;
    let words = match format {
        "vhd" => format!("format=vhd,script=block-ferrite,target={image}"),
        _ => format!("format=raw,script=block-ferrite,target=qcow2:{image}"),
    };
    Ok(bench.guest_of_words(options, &image, &words, |_, _| Ok(()))?.0)
}

/// Takes three snapshots of the guest's disk, with writes after each.
fn snapshots(bench: &mut Bench<'_>, guest: &mut Guest, format: &str) -> Result<()> {
    for n in 1..=3 {
        let disk = format!("{}/xvda", guest.name());
        let snapshot = format!("ferrite disk snapshot {disk} /lab/snapshot{n}.{format} 2>&1");
        bench.xenhost.sh_for(&snapshot, 120)?;
        wait_for_requests(bench, guest, 64)?;
    }
    Ok(())
}

/// The names of the images of the disk's chain, in one line.
fn chain(bench: &mut Bench<'_>, format: &str) -> Result<String> {
    let info = format!("ferrite image info -U /lab/leaf.{format} --json");
    let told = bench.xenhost.sh(&info)?;
    let told: serde_json::Value = serde_json::from_str(&told).context("odd information")?;
    let images = told["chain"].as_array().context("no chain")?;
    let names = images.iter().filter_map(|image| image["path"].as_str());
    Ok(names.map(|path| path.rsplit('/').next().unwrap_or(path)).collect::<Vec<_>>().join(" "))
}

fn paravirtual(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let mut guest = guest(bench, &GuestOptions::default(), "vhd")?;
    let disk = format!("{}/xvda", guest.name());
    let under_way = begin_verifying(bench, &mut guest)?;
    snapshots(bench, &mut guest, "vhd")?;
    let merge = format!(
        "ferrite disk coalesce {disk} --from /lab/snapshot2.vhd --to /lab/snapshot1.vhd 2>&1"
    );
    bench.xenhost.sh_for(&merge, 300)?;
    let merged = "leaf.vhd snapshot3.vhd snapshot1.vhd";
    expect_eq("the chain", &chain(bench, "vhd")?.as_str(), &merged)?;
    bench.xenhost.sh_for(&format!("ferrite disk resize {disk} {}M 2>&1", MIB[1]), 120)?;
    let seen = "for n in $(seq 300); do [ $(blockdev --getsize64 /dev/xvda) = BYTES ] && exit 0; \
                sleep 0.1; done; blockdev --getsize64 /dev/xvda; exit 1";
    let bytes = (MIB[1] << 20).to_string();
    guest.sh(bench.xenhost, &seen.replace("BYTES", &bytes), 60)?;
    stop_verifying(bench, &mut guest, &under_way)?;
    is_limited(bench, &mut guest, &disk)?;
    end(bench, &mut guest, "vhd")
}

/// The guest reads as fast as it can, and gets no more than the limit in the time that it is watched.
fn is_limited(bench: &mut Bench<'_>, guest: &mut Guest, disk: &str) -> Result<()> {
    let [limit, seconds] = LIMIT;
    bench.xenhost.sh(&format!("ferrite disk limit {disk} --iops {limit}"))?;
    let read = format!(
        "before=$(awk '{{print $1}}' /sys/block/xvda/stat); timeout {seconds} fio --name=r \
         --ioengine=libaio --direct=1 --rw=randread --bs=4k --iodepth=8 --time_based \
         --runtime=1000 --filename=/dev/xvda --size=64m --minimal >/dev/null 2>&1; \
         echo $(($(awk '{{print $1}}' /sys/block/xvda/stat) - before))"
    );
    let reads = guest.sh(bench.xenhost, &read, 120)?;
    let reads: u64 = reads.parse().with_context(|| format!("odd answer: {reads}"))?;
    // The guest's clock, the start of fio and its end are in these seconds, too.
    let most = limit * (seconds + 5);
    if !(limit..=most).contains(&reads) {
        bail!("{reads} reads in {seconds} s, and {limit} a second were allowed");
    }
    bench.xenhost.sh(&format!("ferrite disk limit {disk} --none")).map(drop)
}

fn migrated(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let image = "/lab/leaf.qcow2";
    bench.xenhost.sh(&format!("rm -f /lab/*.qcow2; ferrite image create {image} {}M", MIB[0]))?;
    let words = format!("format=raw,script=block-ferrite,target=qcow2:{image}");
    let (mut guest, mut disk) =
        bench.guest_of_words(&GuestOptions::pvh(), image, &words, |_, _| Ok(()))?;
    let under_way = begin_verifying(bench, &mut guest)?;
    snapshots(bench, &mut guest, "qcow2")?;
    let merge = format!(
        "ferrite disk coalesce {}/xvda --from /lab/snapshot3.qcow2 --to /lab/snapshot1.qcow2 \
         --speed 1M --background 2>&1",
        guest.name()
    );
    bench.xenhost.sh(&merge)?;
    migrate(bench, &mut guest, &mut disk)?;
    bench.xenhost.sh_for("ferrite job limit 1 none; ferrite job wait 1 2>&1", 300)?;
    expect_eq("the chain", &chain(bench, "qcow2")?.as_str(), &"leaf.qcow2 snapshot1.qcow2")?;
    stop_verifying(bench, &mut guest, &under_way)?;
    end(bench, &mut guest, "qcow2")
}

fn end(bench: &mut Bench<'_>, guest: &mut Guest, format: &str) -> Result<()> {
    guest.check_blkfront(bench.xenhost)?;
    guest.destroy(bench.xenhost)?;
    bench.xenhost.wait_until("the end of the disk", "[ -z \"$(ls /run/ferrite/disks)\" ]", 60)?;
    let check = format!("ferrite image check --chain /lab/leaf.{format} && rm /lab/*.{format}");
    bench.xenhost.sh(&check).map(drop)
}
