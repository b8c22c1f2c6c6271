//! Discard frees space, and discarded ranges read as zeros.

use super::{Bench, Case, any, expect_eq};
use anyhow::{Context, Result, bail};

pub(super) const CASES: &[Case] = &[
    any("discard/whole-disk-gives-its-space-back", whole_disk),
    any("discard/a-part-leaves-its-neighbours-alone", a_part),
];

/// Fills `mib` MiB of the disk with a byte that is not zero.
const FILL: &str = "tr '\\0' F </dev/zero | dd of=/dev/xvda bs=1M iflag=fullblock oflag=direct";

/// KiB that an image takes on its file system.
fn used_kib(bench: &mut Bench<'_>, image: &str) -> Result<u64> {
    let used = bench.xenhost.sh(&format!("sync {image}; du -k {image} | cut -f1"))?;
    used.parse().with_context(|| format!("odd answer of du: {used}"))
}

fn whole_disk(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, disk) = bench.default_guest(128)?;
    guest.sh(bench.xenhost, &format!("{FILL} count=32 2>&1"), 200)?;
    let full = used_kib(bench, disk.image())?;
    if full < 32 << 10 {
        bail!("32 MiB were written, but the image takes {full} KiB");
    }
    guest.sh(bench.xenhost, "blkdiscard /dev/xvda", 120)?;
    // Counts nonzero bytes with direct reads, which bypass the guest's cache.
    let count = "dd if=/dev/xvda bs=1M count=33 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c";
    expect_eq("bytes that are not zero", &guest.sh(bench.xenhost, count, 200)?.as_str(), &"0")?;
    let left = used_kib(bench, disk.image())?;
    if left > 1024 {
        bail!("after the discard the image still takes {left} of {full} KiB");
    }
    Ok(())
}

fn a_part(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, _disk) = bench.default_guest(64)?;
    guest.sh(bench.xenhost, &format!("{FILL} count=4 2>&1"), 200)?;
    // From 64 KiB, 128 KiB long; then a range that is not a whole number of 4 KiB blocks.
    guest.sh(bench.xenhost, "blkdiscard -o 65536 -l 131072 /dev/xvda", 60)?;
    guest.run(bench.xenhost, "blkdiscard -o 1049088 -l 512 /dev/xvda", 60)?;
    let runs = "dd if=/dev/xvda bs=4k count=1024 iflag=direct 2>/dev/null >/tmp/disk; \
                for range in 0,65536 65536,131072 196608,852480 1049600,3144704; do \
                dd if=/tmp/disk iflag=skip_bytes,count_bytes skip=${range%,*} count=${range#*,} \
                bs=64k 2>/dev/null | tr -d F | wc -c; done";
    let got = guest.sh(bench.xenhost, runs, 120)?;
    expect_eq("zero bytes in each range", &got.as_str(), &"0\n131072\n0\n0")
}
