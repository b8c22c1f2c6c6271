//! The disk that an HVM guest boots from: a boot loader, the kernel, and the guests' RAM disk.

use crate::XenHost;
use crate::channel::quote;
use crate::guest::{GuestOptions, kernel_arguments};
use crate::packages::as_root;
use crate::steps::run_logged;
use anyhow::{Context, Result};
use std::path::Path;

/// The programs that make the disk without mounting it: they write into a FAT in a file.
pub(crate) const PACKAGES: [&str; 4] = ["syslinux", "syslinux-common", "mtools", "dosfstools"];

/// The disk in dom0's root, without the boot's own init, which [`write`] adds.
const TEMPLATE: &str = "/boot/guest-disk.raw";

/// The offset of its one partition: 1 MiB.
const PARTITION_AT: &str = "1048576";

/// Makes the disk, within the root. The space after the partition is for tests.
pub(crate) const RECIPE: &str = r#"
umask 022
at=$1 disk=$2 base=$3
rm -f "$disk"
truncate -s 48M "$disk.part"
mkfs.fat -F 32 -n BOOT "$disk.part"
mcopy -i "$disk.part" /boot/guest-vmlinuz ::vmlinuz
mcopy -i "$disk.part" "$base" ::base.gz
truncate -s 49M "$disk"
printf 'label: dos\nstart=1MiB, type=c, bootable\n' | sfdisk -q "$disk"
dd if=/usr/lib/syslinux/mbr/mbr.bin of="$disk" conv=notrunc
dd if="$disk.part" of="$disk" bs=1M seek=1 conv=notrunc,sparse
rm "$disk.part" "$base"
syslinux --install --offset "$at" "$disk"
"#;

/// Makes the template in the finished root.
pub(crate) fn make(tree: &Path, base: &Path, log: &Path) -> Result<()> {
    let within = "/boot/guest.cpio.gz";
    run_logged(as_root("cp").arg(base).arg(tree.join(&within[1..])), log)?;
    // syslinux passes files to mtools by their names in /proc. The mount ends with the command.
    let mut shell = as_root("unshare");
    let mounted = "mount -t proc proc \"$0/proc\"; exec chroot \"$0\" /bin/sh -ec \"$@\"";
    shell.args(["--mount", "sh", "-ec", mounted]).arg(tree);
    shell.args([RECIPE, "bootdisk", PARTITION_AT, TEMPLATE, within]);
    run_logged(&mut shell, log).context("cannot make the disk that HVM guests boot from")
}

/// Completes a copy of the disk for a guest with `options`, in dom0: `mib` MiB at `path`.
pub fn write(xenhost: &mut XenHost, options: &GuestOptions, path: &str, mib: u32) -> Result<()> {
    let arguments = kernel_arguments(xenhost, options);
    let loader = format!(
        "DEFAULT guest\nPROMPT 0\nTIMEOUT 1\nLABEL guest\n KERNEL vmlinuz\n INITRD init.img,base.gz\n \
         APPEND {arguments}\n"
    );
    let (path, loader) = (quote(path), quote(&loader));
    let part = format!("{path}@@{PARTITION_AT}");
    xenhost
        .sh(&format!(
            "set -e; cp --sparse=always {TEMPLATE} {path}; truncate -s {mib}M {path}; \
             mcopy -i {part} /lab/init.img ::init.img; \
             printf %s {loader} >/tmp/syslinux.cfg; mcopy -i {part} /tmp/syslinux.cfg ::syslinux.cfg"
        ))
        .map(drop)
}
