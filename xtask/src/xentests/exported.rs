//! Disks that domain 0 uses itself, by the kernel's NBD client.

use super::fenced::has;
use super::{Bench, Case, ferrite};
use anyhow::{Context, Result};
use ferrite_xenhost::disk::ended;

pub(super) const CASES: &[Case] = &[
    ferrite("export/a-vhd-is-mounted-in-domain-0-by-nbd-client", mounted),
    ferrite("export/libnbd-of-domain-0-uses-64-bit-lengths", extended),
];

/// Makes a file system, and has fio verify files in it, past the cache and through it. Their checksums are written
/// beside them.
const WRITE_FILES: &str = "mkfs.ext4 -q /dev/nbd0 && mkdir -p /mnt/nbd && \
     mount /dev/nbd0 /mnt/nbd && cd /mnt/nbd && for direct in 0 1; do \
     fio --name=verify$direct --directory=. --ioengine=libaio --direct=$direct --rw=randrw \
     --bs=4k-64k --size=4m --nrfiles=4 --iodepth=16 --fsync=32 --randrepeat=1 --verify=crc32c \
     --verify_fatal=1 --do_verify=1 --minimal 2>&1 || exit 1; done; \
     sha256sum verify* >sums && cd / && umount /mnt/nbd";

/// The written files are there, and the file system is intact.
const CHECK_FILES: &str = "mount /dev/nbd0 /mnt/nbd && cd /mnt/nbd && sha256sum -c --status sums && \
     cd / && umount /mnt/nbd && e2fsck -fn /dev/nbd0 2>&1";

/// Runs commands while /dev/nbd0 is connected to a socket.
fn with_nbd(bench: &mut Bench<'_>, socket: &str, commands: &str) -> Result<()> {
    bench.xenhost.sh(&format!("modprobe nbd && nbd-client -unix {socket} /dev/nbd0 2>&1"))?;
    let done = bench.xenhost.sh_for(commands, 300).map(drop);
    let gone = bench.xenhost.sh("umount /mnt/nbd 2>/dev/null; nbd-client -d /dev/nbd0 2>&1");
    done.and(gone.map(drop))
}

/// Starts an export of an image, and waits for its socket. Returns its process id.
fn export(bench: &mut Bench<'_>, image: &str, socket: &str) -> Result<u32> {
    let command = format!(
        "setsid ferrite export nbd {image} --socket {socket} </dev/null \
         >/tmp/export.log 2>&1 & echo $!"
    );
    let pid = bench.xenhost.sh(&command)?.parse()?;
    bench.xenhost.wait_until("a socket", &format!("[ -S {socket} ]"), 60)?;
    Ok(pid)
}

fn end_export(bench: &mut Bench<'_>, pid: u32) -> Result<()> {
    bench.xenhost.sh(&format!("kill -TERM {pid}"))?;
    bench.xenhost.wait_until("the end of the export", &ended(pid), 60)
}

/// Served twice, by two processes one after the other.
fn mounted(bench: &mut Bench<'_>) -> Result<()> {
    let (image, socket) = ("/lab/exported.vhd", "/tmp/exported.sock");
    bench.xenhost.sh(&format!("rm -f {image}; ferrite image create {image} 128M"))?;
    for commands in [WRITE_FILES, CHECK_FILES] {
        let pid = export(bench, image, socket)?;
        let done = with_nbd(bench, socket, commands);
        end_export(bench, pid)?;
        done.with_context(|| commands.to_owned())?;
        bench.xenhost.sh(&format!("ferrite image check {image}"))?;
    }
    bench.xenhost.sh(&format!("rm {image} /tmp/export.log; rmdir /mnt/nbd")).map(drop)
}

/// Requests longer than 4 GiB, which only extended heads can say.
const EXTENDED: [&str; 7] = [
    "assert h.get_extended_headers_negotiated()",
    "h.pwrite(b\"x\" * 65536, 5 << 30)",
    "found = []",
    "h.block_status_64(8 << 30, 0, lambda name, at, extents, error: found.extend(extents) or 0)",
    "assert found == [(5 << 30, 3), (65536, 0), ((3 << 30) - 65536, 3)], found",
    "h.zero(8 << 30, 0)",
    "assert h.pread(65536, 5 << 30) == bytes(65536)",
];

/// The libnbd of Debian 12 does not know them, so its host has no nbdsh.
fn extended(bench: &mut Bench<'_>) -> Result<()> {
    if !has(bench, "nbdsh")? {
        return Ok(());
    }
    let (image, socket) = ("/lab/extended.qcow2", "/tmp/extended.sock");
    bench.xenhost.sh(&format!("rm -f {image}; ferrite image create {image} 8G"))?;
    let pid = export(bench, image, socket)?;
    let steps = EXTENDED.map(|step| format!(" -c '{step}'")).concat();
    let uri = format!("nbd+unix:///extended?socket={socket}");
    let done = bench.xenhost.sh(&format!("nbdsh --base-allocation -u '{uri}'{steps} 2>&1"));
    end_export(bench, pid)?;
    done?;
    bench.xenhost.sh(&format!("ferrite image check {image} && rm {image} /tmp/export.log"))?;
    Ok(())
}
