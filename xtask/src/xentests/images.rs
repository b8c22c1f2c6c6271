//! Disks in images: chains with a history, served to a real guest.

use super::recovery::{THREE_KILLS, killed_under_verify};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};

pub(super) const CASES: &[Case] = &[
    ferrite("images/a-vhd-leaf-killed-three-times-under-verify", vhd_killed),
    ferrite("images/a-qcow2-leaf-killed-three-times-under-verify", qcow2_killed),
    ferrite("images/a-vhd-leaf-changes-and-its-parent-does-not", vhd_parent),
    ferrite("images/a-qcow2-leaf-changes-and-its-parent-does-not", qcow2_parent),
    ferrite("images/a-discard-gives-a-vhd-file-its-space-back", discard),
];

const MIB: u32 = 256;

/// An image with data, made read-only, and a leaf on it.
struct Chain {
    parent: String,
    leaf: String,
    /// The checksum of the parent's file.
    sum: String,
}

impl Chain {
    fn make(bench: &mut Bench<'_>, extension: &str) -> Result<Chain> {
        let file = |name: &str| format!("/lab/{name}.{extension}");
        let (parent, leaf) = (file("parent"), file("leaf"));
        let filled = "/lab/filled.raw";
        bench.xenhost.sh(&format!(
            "rm -f {parent} {leaf} {filled}; truncate -s {MIB}M {filled}; \
             dd if=/dev/urandom of={filled} bs=1M count=8 conv=notrunc 2>/dev/null; \
             dd if=/dev/urandom of={filled} bs=64k seek=1537 count=9 conv=notrunc 2>/dev/null; \
             ferrite image convert {filled} {parent} && \
             ferrite image create --parent {parent} {leaf}"
        ))?;
        let sum = bench.xenhost.sh(&format!("sha256sum <{parent}"))?;
        Ok(Chain { parent, leaf, sum })
    }

    fn attach(&self, bench: &mut Bench<'_>) -> Result<(Guest, Disk)> {
        bench.guest_with(&GuestOptions::default(), DiskOptions::new(&self.leaf, "xvda"))
    }

    /// After the disk was unplugged: the chain is intact, and the parent unchanged.
    fn check(&self, bench: &mut Bench<'_>) -> Result<()> {
        let Chain { parent, leaf, sum } = self;
        // Space that a killed backend had set aside stays allocated: 3.
        let check = format!("ferrite image check {leaf} || [ $? = 3 ]");
        bench.xenhost.sh(&check).context("the leaf")?;
        bench.xenhost.sh(&format!("ferrite image check {parent}")).context("the parent")?;
        expect_eq("the parent's checksum", &bench.xenhost.sh(&format!("sha256sum <{parent}"))?, sum)
    }
}

fn vhd_killed(bench: &mut Bench<'_>) -> Result<()> {
    killed(bench, "vhd")
}

fn qcow2_killed(bench: &mut Bench<'_>) -> Result<()> {
    killed(bench, "qcow2")
}

fn killed(bench: &mut Bench<'_>, extension: &str) -> Result<()> {
    let chain = Chain::make(bench, extension)?;
    let (mut guest, mut disk) = chain.attach(bench)?;
    killed_under_verify(bench, &mut guest, &mut disk, &THREE_KILLS)?;
    disk.unplug(bench.xenhost)?;
    chain.check(bench)
}

fn vhd_parent(bench: &mut Bench<'_>) -> Result<()> {
    parent_stays(bench, "vhd")
}

fn qcow2_parent(bench: &mut Bench<'_>) -> Result<()> {
    parent_stays(bench, "qcow2")
}

/// The guest reads the parent's data, overwrites parts of it and around it, and finds both after the disk was unplugged
/// and plugged in again.
fn parent_stays(bench: &mut Bench<'_>, extension: &str) -> Result<()> {
    let chain = Chain::make(bench, extension)?;
    let (mut guest, mut disk) = chain.attach(bench)?;
    let host = |part: &str| format!("dd if=/lab/filled.raw bs=64k {part} 2>/dev/null | sha256sum");
    let here =
        |part: &str| format!("dd if=/dev/xvda iflag=direct bs=64k {part} 2>/dev/null | sha256sum");
    for part in ["count=128", "skip=1536 count=16"] {
        let (expected, found) =
            (bench.xenhost.sh(&host(part))?, guest.sh(bench.xenhost, &here(part), 120)?);
        expect_eq("what the guest reads of the parent", &found, &expected)?;
    }
    guest.sh(
        bench.xenhost,
        "for at in 3 17 130 1538 1545 2047; do dd if=/dev/urandom of=/dev/xvda bs=4k count=5 \
         seek=$((at * 16 + 5)) oflag=direct 2>/dev/null || exit 1; done; sync",
        120,
    )?;
    let whole = "sha256sum </dev/xvda";
    let written = guest.sh(bench.xenhost, whole, 300)?;
    disk.unplug(bench.xenhost)?;
    chain.check(bench)?;
    let _again = bench.plug(&mut guest, DiskOptions::new(&chain.leaf, "xvda"))?;
    expect_eq("the disk after a replug", &guest.sh(bench.xenhost, whole, 300)?, &written)
}

fn discard(bench: &mut Bench<'_>) -> Result<()> {
    let image = "/lab/thin.vhd";
    bench.xenhost.sh(&format!("rm -f {image}; ferrite image create {image} {MIB}M"))?;
    let (mut guest, mut disk) =
        bench.guest_with(&GuestOptions::default(), DiskOptions::new(image, "xvda"))?;
    let used = |bench: &mut Bench<'_>| -> Result<u64> {
        Ok(bench.xenhost.sh(&format!("sync {image}; du -k {image} | cut -f1"))?.parse()?)
    };
    guest.sh(
        bench.xenhost,
        "dd if=/dev/urandom of=/dev/xvda bs=1M count=32 oflag=direct 2>/dev/null && sync",
        120,
    )?;
    let full = used(bench)?;
    guest.sh(bench.xenhost, "blkdiscard -f -o 4194304 -l 25165824 /dev/xvda && sync", 60)?;
    let freed = used(bench)?;
    // More than four extents do not fit into an inode of ext4: the holes need a block for them.
    let list_kib = 4;
    if full < 32 << 10 || freed + (24 << 10) > full + list_kib {
        bail!("the image took {full} KiB, and {freed} KiB after 24 MiB of it were discarded");
    }
    let sum = "dd if=/dev/xvda iflag=direct bs=1M count=24 skip=4 2>/dev/null | sha256sum";
    let zeros = "dd if=/dev/zero bs=1M count=24 2>/dev/null | sha256sum";
    let (found, expected) =
        (guest.sh(bench.xenhost, sum, 60)?, guest.sh(bench.xenhost, zeros, 60)?);
    expect_eq("what was discarded", &found, &expected)?;
    disk.unplug(bench.xenhost)?;
    bench.xenhost.sh(&format!("ferrite image check {image}")).map(drop)
}
