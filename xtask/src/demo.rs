//! `cargo xtask demo`: on a real Xen host xl attaches disks that the daemon serves to Linux guests of all three
//! kinds. The process that serves a disk is killed in mid-write, and a guest moves; all data is as written.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Follow, Guest, GuestOptions, Job};
use ferrite_xenhost::packages;
use ferrite_xenhost::qemu::Processor;
use ferrite_xenhost::root::{self, Suite};
use ferrite_xenhost::steps::{self, step};
use ferrite_xenhost::{XenHost, bootdisk};

use crate::{checks, needs};

/// Limit of a command in the guest, in seconds; an emulated host can be slow.
const LIMIT_S: u64 = 600;

/// Random files of many sizes, 60 MiB together, and their checksums.
const WRITE: &str = "for n in 1 2 3 4 5 6 7 8; do \
     dd if=/dev/urandom of=/mnt/file$n bs=$((n * 353000)) count=5 conv=fsync 2>/dev/null || exit 1; done; \
     (cd /mnt && sha256sum file*) >/tmp/sums && sync && wc -l </tmp/sums";

/// Reads everything back from the disk, not from the guest's memory.
const VERIFY: &str = "cd / && umount /mnt && blockdev --flushbufs /dev/xvda && \
     echo 3 >/proc/sys/vm/drop_caches && mount /dev/xvda1 /mnt && cd /mnt && \
     sha256sum -c -s /tmp/sums && wc -l </tmp/sums";

/// Writes beyond what the guest has booted from, and verifies all of it, until it is told to stop.
const VERIFY_ON: &str = "until [ -e /tmp/stop ]; do fio --name=verify --ioengine=libaio --direct=1 \
     --rw=randwrite --bs=16k --size=2m --offset=64m --iodepth=32 --verify=crc32c --verify_fatal=1 \
     --do_verify=1 --filename=/dev/xvda --minimal || exit 1; done";

/// Runs the demonstration; its last line says PASS or FAIL.
pub(crate) fn run() -> Result<ExitCode> {
    packages::ensure(&[packages::XEN_HOST, needs::DIST])?;
    let package = checks::build_package()?;
    let root = root::ensure(Suite::by_name("trixie")?)?;
    let began = Instant::now();
    let mut xenhost = XenHost::boot_on(Processor::Amd, &root, &[package])?;
    let result = demonstrate(&mut xenhost);
    println!();
    match result {
        Ok(shown) => {
            for (what, value) in &shown.facts {
                println!("{what:<22} {value}");
            }
            for (what, seconds) in &shown.times {
                println!("{:<34} {seconds:.1} s", format!("time to {what}"));
            }
            println!("{:<34} {:.0} s", "time in all", began.elapsed().as_secs_f64());
            println!("\nPASS");
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            println!("{}", steps::chain(&error));
            println!("\nFAIL");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// The summary at the end.
#[derive(Default)]
struct Shown {
    facts: Vec<(&'static str, String)>,
    times: Vec<(&'static str, f64)>,
}

impl Shown {
    fn fact(&mut self, what: &'static str, value: impl Into<String>) {
        self.facts.push((what, value.into()));
    }

    fn timed<T>(&mut self, what: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let result = step(what, work);
        self.times.push((what, began.elapsed().as_secs_f64()));
        result
    }
}

fn demonstrate(xenhost: &mut XenHost) -> Result<Shown> {
    let mut shown = Shown::default();
    xenhost.start_daemon()?;
    let xen = xenhost.sh("xl info xen_version; uname -r")?.replace('\n', ", Linux ");
    shown.fact("host", format!("Xen {xen}, emulated by QEMU; xl, ferrite daemon"));
    paravirtual(xenhost, &mut shown)?;
    migrated(xenhost, &mut shown)?;
    with_firmware(xenhost, &mut shown)?;
    Ok(shown)
}

/// A PV guest on a VHD, with files in a file system.
fn paravirtual(xenhost: &mut XenHost, shown: &mut Shown) -> Result<()> {
    let image = "/lab/demo.vhd";
    xenhost.sh(&format!("rm -f {image}; ferrite image create {image} 1G"))?;
    let words = format!("format=vhd,script=block-ferrite,target={image}");
    let options = GuestOptions::default();
    let (mut guest, disk) =
        shown.timed("start the PV guest", || start(xenhost, &options, image, &words))?;
    let kernel = guest.sh(xenhost, "uname -r", LIMIT_S)?;
    shown.fact("guests", format!("Linux {kernel}, its own blkfront"));
    shown.timed("partition, make ext4", || {
        guest.sh(
            xenhost,
            "printf 'label: gpt\\n,\\n' | sfdisk -q --wipe always /dev/xvda",
            LIMIT_S,
        )?;
        let make = "until [ -b /dev/xvda1 ]; do sleep 0.2; done; \
                    load-ext4 && mkfs.ext4 -q /dev/xvda1 && mount /dev/xvda1 /mnt";
        guest.sh(xenhost, make, LIMIT_S)
    })?;
    let written = shown.timed("write, with the worker killed", || {
        let job = guest.begin(xenhost, WRITE, LIMIT_S)?;
        // Not all is written then: the sums come last.
        let some = "until [ -e /mnt/file3 ]; do sleep 0.1; done; [ ! -e /tmp/sums ]";
        guest.sh(xenhost, some, LIMIT_S)?;
        disk.kill_worker(xenhost)?;
        guest.finish_ok(xenhost, &job)
    })?;
    let verified = shown.timed("remount, read, verify", || guest.sh(xenhost, VERIFY, LIMIT_S))?;
    if written != "8" || verified != "8" {
        bail!("8 files were to be written and verified, not {written} and {verified}");
    }
    guest.sh(xenhost, "cd / && umount /mnt && e2fsck -fn /dev/xvda1", LIMIT_S)?;
    shown.fact(
        "PV guest, VHD",
        "8 files of random data, 60 MiB, the worker killed meanwhile: all as written, ext4 clean",
    );
    end(xenhost, &mut guest, image)
}

/// A PVH guest on a qcow2 moves to this same host while it writes and verifies.
fn migrated(xenhost: &mut XenHost, shown: &mut Shown) -> Result<()> {
    let image = "/lab/demo.qcow2";
    xenhost.sh(&format!("rm -f {image}; ferrite image create {image} 1G"))?;
    let words = format!("format=raw,script=block-ferrite,target=qcow2:{image}");
    let options = GuestOptions::pvh();
    let (mut guest, mut disk) =
        shown.timed("start the PVH guest", || start(xenhost, &options, image, &words))?;
    let job = guest.begin(xenhost, VERIFY_ON, LIMIT_S)?;
    shown.timed("migrate it to this host", || {
        let name = guest.name().to_owned();
        let migrate = format!("xl migrate -s '' {name} 'xl migrate-receive' 2>&1");
        let told = xenhost.sh_for(&migrate, LIMIT_S)?;
        if !told.contains("Migration successful.") {
            bail!("the migration went wrong:\n{told}");
        }
        guest.follow(xenhost, Follow::Migrated)?;
        disk.follow(&guest);
        disk.wait_connected(xenhost)
    })?;
    stop(xenhost, &mut guest, &job)?;
    shown.fact("PVH guest, qcow2", "migrated while fio wrote and verified: no mismatch");
    end(xenhost, &mut guest, image)
}

/// An HVM guest boots from its raw image by QEMU, and goes on by its rings.
fn with_firmware(xenhost: &mut XenHost, shown: &mut Shown) -> Result<()> {
    let (image, options) = ("/lab/demo.raw", GuestOptions::hvm());
    bootdisk::write(xenhost, &options, image, 256)?;
    let words = format!("format=raw,target={image}");
    let (mut guest, disk) =
        shown.timed("boot the HVM guest", || start(xenhost, &options, image, &words))?;
    shown.timed("kill the worker under it", || {
        let job = guest.begin(xenhost, VERIFY_ON, LIMIT_S)?;
        let some = "until [ $(awk '{print $5}' /sys/block/xvda/stat) -ge 64 ]; do sleep 0.1; done";
        guest.sh(xenhost, some, LIMIT_S)?;
        disk.kill_worker(xenhost)?;
        stop(xenhost, &mut guest, &job)
    })?;
    shown.fact(
        "HVM guest, raw",
        "booted from it by SeaBIOS; the worker killed while fio wrote and verified: no mismatch",
    );
    end(xenhost, &mut guest, image)
}

/// A guest that has booted, with the disk that xl attaches.
fn start(
    xenhost: &mut XenHost,
    options: &GuestOptions,
    image: &str,
    words: &str,
) -> Result<(Guest, Disk)> {
    let spec = format!("vdev=xvda,backendtype=tap,{words}");
    let mut guest = Guest::create_with(xenhost, options, &[spec])?;
    let disk = Disk::of_toolstack(&guest, DiskOptions::new(image, "xvda"))?;
    guest.unpause(xenhost)?;
    guest.wait_ready(xenhost)?;
    disk.wait_connected(xenhost)?;
    guest.sh(xenhost, "until [ -b /dev/xvda ]; do sleep 0.2; done", LIMIT_S)?;
    Ok((guest, disk))
}

/// Lets a guest end what it verifies.
fn stop(xenhost: &mut XenHost, guest: &mut Guest, job: &Job) -> Result<()> {
    guest.sh(xenhost, "touch /tmp/stop", LIMIT_S)?;
    guest.finish_ok(xenhost, job).map(drop).context("fio")
}

/// The guest has nothing to complain of, and neither has who checks its image.
fn end(xenhost: &mut XenHost, guest: &mut Guest, image: &str) -> Result<()> {
    guest.check_blkfront(xenhost)?;
    guest.destroy(xenhost)?;
    xenhost.wait_until("the end of the disk", "[ -z \"$(ls /run/ferrite/disks)\" ]", 60)?;
    xenhost.sh(&format!("ferrite image check {image}")).map(drop)
}
