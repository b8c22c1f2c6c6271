//! The media: write-protected files, and block devices of both sector sizes.

use super::{Bench, Case, any, expect_eq, ferrite};
use anyhow::{Result, bail};
use ferrite_xenhost::disk::DiskOptions;
use ferrite_xenhost::guest::GuestOptions;
use ferrite_xenhost::{SCRATCH_512, SCRATCH_4096};

pub(super) const CASES: &[Case] = &[
    any("media/a-read-only-disk-refuses-writes", read_only),
    any("media/block-device-with-512-byte-sectors", |bench| block_device(bench, SCRATCH_512)),
    // The kernel's backend passes 4096-byte sectors on to the guest; the unit on the ring is 512.
    ferrite("media/block-device-with-4096-byte-sectors", |bench| block_device(bench, SCRATCH_4096)),
];

fn read_only(bench: &mut Bench<'_>) -> Result<()> {
    let image = bench.image(64)?;
    bench
        .xenhost
        .sh(&format!("yes ferrite | dd of={image} bs=1M count=4 conv=notrunc iflag=fullblock"))?;
    let sum = format!("sha256sum <{image}");
    let before = bench.xenhost.sh(&sum)?;
    let options = DiskOptions { read_only: true, ..DiskOptions::new(&image, "xvda") };
    let (mut guest, _disk) = bench.guest_with(&GuestOptions::default(), options)?;
    let seen = guest.sh(bench.xenhost, "blockdev --getro /dev/xvda; sha256sum </dev/xvda", 200)?;
    expect_eq("read-only flag and checksum", &seen, &format!("1\n{before}"))?;
    // blockdev --setrw asks the guest's kernel to let writes through to the backend.
    for attempt in [
        "dd if=/dev/zero of=/dev/xvda bs=4k count=1 oflag=direct",
        "blockdev --setrw /dev/xvda && dd if=/dev/zero of=/dev/xvda bs=4k count=1 oflag=direct",
        "blockdev --setrw /dev/xvda && blkdiscard -f /dev/xvda",
    ] {
        if guest.run(bench.xenhost, attempt, 60)?.status == 0 {
            bail!("`{attempt}` succeeded on a read-only disk");
        }
    }
    expect_eq("the image's checksum", &bench.xenhost.sh(&sum)?, &before)
}

fn block_device(bench: &mut Bench<'_>, serial: &str) -> Result<()> {
    let device = bench.xenhost.scratch(serial)?;
    let (mut guest, disk) =
        bench.guest_with(&GuestOptions::default(), DiskOptions::new(&device, "xvda"))?;
    let sectors = guest.sh(
        bench.xenhost,
        "blockdev --getss /dev/xvda; blockdev --getsize64 /dev/xvda",
        20,
    )?;
    expect_eq("sector size and size", &sectors.as_str(), &"512\n536870912")?;
    let fio = format!(
        "fio --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --iodepth=16 --randrepeat=1 --minimal --filename={} \
         --name=small --rw=randwrite --bs=512 --size=256k --offset=0 \
         --name=middle --stonewall --rw=randwrite --bs=4k --size=2m --offset=16m \
         --name=large --stonewall --rw=randwrite --bs=128k --size=16m --offset=64m",
        disk.node()
    );
    guest.sh(bench.xenhost, &fio, 300)?;
    guest.sh(bench.xenhost, "mkfs.ext4 -q /dev/xvda && e2fsck -fn /dev/xvda", 200).map(drop)
}
