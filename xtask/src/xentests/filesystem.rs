//! Usual uses of disks: partitions, ext4, mounting, growing.

use super::{Bench, Case, any, expect_eq};
use anyhow::{Result, bail};
use ferrite_xenhost::guest::Guest;

pub(super) const CASES: &[Case] = &[
    any("filesystem/partitions-ext4-and-checksums-survive-a-remount", partitions),
    any("filesystem/a-mounted-disk-grows", grows),
];

/// Makes files of many sizes in /mnt and their checksums in /tmp/sums.
const WRITE_FILES: &str = "for n in 1 2 3 4 5 6 7 8; do \
     dd if=/dev/urandom of=/mnt/file$n bs=$((n * 37000)) count=5 2>/dev/null; done; \
     mkdir /mnt/dir; for n in $(seq 40); do echo \"small file $n\" >/mnt/dir/$n; done; \
     (cd /mnt && find . -type f | sort | xargs sha256sum) >/tmp/sums; wc -l </tmp/sums; sync";

/// Reads everything back from the disk and compares.
const CHECK_FILES: &str = "echo 3 >/proc/sys/vm/drop_caches; cd /mnt && sha256sum -c -s /tmp/sums";

fn partitions(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, _disk) = bench.default_guest(512)?;
    let mut sh = |command: &str| guest.sh(bench.xenhost, command, 300);
    sh("load-ext4")?;
    sh("printf 'label: gpt\\n,200M\\n,\\n' | sfdisk -q --wipe always /dev/xvda")?;
    sh("until [ -b /dev/xvda2 ]; do sleep 0.2; done")?;
    sh("mkfs.ext4 -q /dev/xvda1 && mkfs.ext4 -q /dev/xvda2")?;
    sh("mount /dev/xvda1 /mnt")?;
    expect_eq("files written", &sh(WRITE_FILES)?.as_str(), &"48")?;
    sh("umount /mnt && e2fsck -fn /dev/xvda1 && e2fsck -fn /dev/xvda2")?;
    sh("blockdev --flushbufs /dev/xvda && mount /dev/xvda1 /mnt")?;
    sh(CHECK_FILES)?;
    sh("umount /mnt").map(drop)
}

fn grows(bench: &mut Bench<'_>) -> Result<()> {
    let (mut guest, disk) = bench.default_guest(256)?;
    guest.sh(bench.xenhost, "load-ext4 && mkfs.ext4 -q /dev/xvda && mount /dev/xvda /mnt", 120)?;
    guest.sh(bench.xenhost, WRITE_FILES, 120)?;
    bench.xenhost.sh(&format!("truncate -s 448M {}", disk.image()))?;
    disk.notice_growth(bench.xenhost)?;
    wait_for_size(bench, &mut guest, 448 << 20)?;
    guest.sh(bench.xenhost, "resize2fs /dev/xvda", 120)?;
    let blocks: u64 = guest.sh(bench.xenhost, "df -k /mnt | awk 'END{print $2}'", 20)?.parse()?;
    if blocks < 400 << 10 {
        bail!("the file system has {blocks} KiB after it has grown to 448 MiB");
    }
    // The new space can be used, and the old data are unchanged.
    guest.sh(bench.xenhost, "dd if=/dev/zero of=/mnt/big bs=1M count=280 && sync", 300)?;
    guest.sh(bench.xenhost, CHECK_FILES, 120)?;
    guest.sh(bench.xenhost, "cd / && umount /mnt && e2fsck -fn /dev/xvda", 120).map(drop)
}

fn wait_for_size(bench: &mut Bench<'_>, guest: &mut Guest, bytes: u64) -> Result<()> {
    let command = format!(
        "for n in $(seq 120); do [ $(blockdev --getsize64 /dev/xvda) = {bytes} ] && exit 0; \
         sleep 0.5; done; blockdev --getsize64 /dev/xvda; exit 1"
    );
    guest.sh(bench.xenhost, &command, 90).map(drop)
}
