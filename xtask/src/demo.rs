//! `cargo xtask demo`: on a real Xen host xl attaches a disk that the daemon serves to a Linux guest. The serving
//! process is killed during writes; all data is as written. `--all` adds snapshots, the other kinds of guests,
//! a migration, a clone.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;

use ferrite_xenhost::XenHost;
use ferrite_xenhost::bootdisk;
use ferrite_xenhost::disk::{Backend, Disk};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::packages;
use ferrite_xenhost::qemu::Processor;
use ferrite_xenhost::root::{self, Suite};
use ferrite_xenhost::steps::{self, step};

use crate::xentests::guests::{begin_verifying, migrate, stop_verifying};
use crate::xentests::{Bench, pooled};
use crate::{checks, needs};

mod moved_disk;
mod pooled_disk;

/// The store of the guests that share data, with one volume.
const STORE: &str = "/lab/demo.store";

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

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct DemoArguments {
    /// Further guests: PVH on a qcow2, which migrates; two on a store, one of them a clone; HVM on a raw image.
    /// A disk moves to a second daemon.
    #[arg(long)]
    all: bool,
}

/// The text before the demonstration.
const FIRST: &str = "\
This demonstration shows that a Linux guest loses nothing when the process that serves its disk is killed:
  1. QEMU emulates a Xen host on this machine: the hypervisor, domain 0 with Ferrite's package, xl.
  2. xl starts a PV guest, whose disk is a VHD that `ferrite daemon` serves.
  3. The guest makes an ext4 and writes files with checksums. In the middle of it the disk's worker is killed.
  4. The guest reads all files back from the disk, and both the file system and the image are checked.";

/// The additional text for `--all`.
const MORE: &str = "\
     The PV guest's disk gets two snapshots while it runs, and they are merged under it. After the guest's end
     the disk is mounted in domain 0, which finds the guest's files.
  5. A PVH guest on a qcow2 migrates to this same host while it writes and verifies.
  6. The disk of a running guest, a volume of a store, is cloned; the clone boots a guest of its own.
  7. An HVM guest boots from a raw image by its firmware, and its worker is killed.
  8. The disk of a running guest moves to a second daemon by TLS while the guest writes and verifies.
  9. A guest's disk is on two servers of a pool; one of them is killed while the guest writes and verifies.";

/// Runs the demonstration; its last line is PASS or FAIL.
pub(crate) fn run(arguments: &DemoArguments) -> Result<ExitCode> {
    println!("{FIRST}");
    if arguments.all {
        println!("{MORE}");
    }
    println!();
    packages::ensure(&[packages::XEN_HOST, needs::DIST])?;
    if arguments.all {
        packages::ensure(&[needs::ETCD])?;
    }
    let (root, package) = std::thread::scope(|scope| {
        let root = scope.spawn(|| root::ensure(Suite::by_name("trixie")?));
        let package = checks::build_package();
        (root.join().unwrap_or_else(|_| Err(anyhow!("a panic"))), package)
    });
    let (root, package) = (root?, package?);
    // Only a host with this processor has PVH and HVM guests.
    let processor = if arguments.all { Processor::Amd } else { Processor::Plain };
    let etcd = arguments.all.then(pooled::etcd).flatten();
    let programs: Vec<_> = std::iter::once(package).chain(etcd).collect();
    let mut xenhost = XenHost::boot_on(processor, &root, &programs)?;
    let result = demonstrate(&mut xenhost, arguments.all);
    println!();
    match result {
        Ok(shown) => {
            for (what, value) in &shown.facts {
                println!("{what:<22} {value}");
            }
            for (what, seconds) in &shown.times {
                println!("{:<34} {seconds:.1} s", format!("time to {what}"));
            }
            println!("{:<34} {:.0} s", "time in all, build included", steps::elapsed_s());
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

fn demonstrate(xenhost: &mut XenHost, all: bool) -> Result<Shown> {
    let mut shown = Shown::default();
    let bench = &mut Bench::new(xenhost, Backend::Ferrite);
    if all {
        moved_disk::prepare(bench)?;
        let tables = [moved_disk::TABLES, pooled::TABLE].concat();
        bench.start_daemon_with(&tables)?;
    } else {
        bench.start_daemon()?;
    }
    let xen = bench.xenhost.sh("xl info xen_version; uname -r")?.replace('\n', ", Linux ");
    shown.fact("host", format!("Xen {xen}, emulated by QEMU; xl, ferrite daemon"));
    paravirtual(bench, &mut shown, all)?;
    if all {
        migrated(bench, &mut shown)?;
        cloned(bench, &mut shown)?;
        with_firmware(bench, &mut shown)?;
        moved_disk::show(bench, &mut shown)?;
        pooled_disk::show(bench, &mut shown)?;
    }
    Ok(shown)
}

/// A PV guest on a VHD, with files in a file system.
fn paravirtual(bench: &mut Bench<'_>, shown: &mut Shown, all: bool) -> Result<()> {
    let image = "/lab/demo.vhd";
    bench.xenhost.sh(&format!("rm -f {image}; ferrite image create {image} 1G"))?;
    let words = format!("format=vhd,script=block-ferrite,target={image}");
    let options = GuestOptions::default();
    let (mut guest, disk) =
        shown.timed("start the PV guest", || start(bench, &options, image, &words))?;
    let kernel = guest.sh(bench.xenhost, "uname -r", LIMIT_S)?;
    shown.fact("guests", format!("Linux {kernel}, its own blkfront"));
    shown.timed("partition, make ext4", || make_file_system(bench, &mut guest))?;
    let written = shown.timed("write, with the worker killed", || {
        let job = guest.begin(bench.xenhost, WRITE, LIMIT_S)?;
        // At this point only some files are written: the checksums are the last.
        let some = "until [ -e /mnt/file3 ]; do sleep 0.1; done; [ ! -e /tmp/sums ]";
        guest.sh(bench.xenhost, some, LIMIT_S)?;
        disk.kill_worker(bench.xenhost)?;
        if all {
            snapshot(bench, &guest, "/lab/demo-first.vhd")?;
        }
        guest.finish_ok(bench.xenhost, &job)
    })?;
    if all {
        snapshot(bench, &guest, "/lab/demo-second.vhd")?;
        let merge = format!("ferrite disk coalesce {}/xvda 2>&1", guest.name());
        shown.timed("merge two snapshots of it", || bench.xenhost.sh_for(&merge, LIMIT_S))?;
        shown.fact("its snapshots", "two taken while it ran, one of them merged into the other");
    }
    let verified =
        shown.timed("remount, read, verify", || guest.sh(bench.xenhost, VERIFY, LIMIT_S))?;
    if written != "8" || verified != "8" {
        bail!("8 files were to be written and verified, not {written} and {verified}");
    }
    guest.sh(bench.xenhost, "cd / && umount /mnt && e2fsck -fn /dev/xvda1", LIMIT_S)?;
    shown.fact(
        "PV guest, VHD",
        "8 files of random data, 60 MiB, the worker killed meanwhile: all as written, ext4 clean",
    );
    let sums = guest.sh(bench.xenhost, "cat /tmp/sums", LIMIT_S)?;
    end(bench, &mut guest, image)?;
    if all {
        shown.timed("find its files in domain 0", || find_files(bench, image, &sums))?;
        shown.fact(
            "its disk in domain 0",
            "a block device by the kernel's NBD client: 8 files as written",
        );
    }
    Ok(())
}

/// Mounts the disk of a guest that has ended, and compares its files with these checksums.
fn find_files(bench: &mut Bench<'_>, image: &str, sums: &str) -> Result<()> {
    let command = format!(
        "set -e; device=$(ferrite disk device --load --read-only {image}); partx -u $device; udevadm settle; \
         mkdir -p /mnt/guest; mount -o ro ${{device}}p1 /mnt/guest; cd /mnt/guest; sha256sum -c --quiet - <<'SUMS'\n{sums}\nSUMS\n\
         cd /; umount /mnt/guest; rmdir /mnt/guest; ferrite disk device --remove $device"
    );
    bench.xenhost.sh_for(&command, LIMIT_S).map(drop)
}

fn snapshot(bench: &mut Bench<'_>, guest: &Guest, name: &str) -> Result<()> {
    let snapshot = format!("rm -f {name}; ferrite disk snapshot {}/xvda {name} 2>&1", guest.name());
    bench.xenhost.sh_for(&snapshot, LIMIT_S).map(drop)
}

/// A file system in a partition of the guest's disk, at /mnt.
fn make_file_system(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let partition = "printf 'label: gpt\\n,\\n' | sfdisk -q --wipe always /dev/xvda";
    guest.sh(bench.xenhost, partition, LIMIT_S)?;
    let make = "until [ -b /dev/xvda1 ]; do sleep 0.2; done; \
                load-ext4 && mkfs.ext4 -q /dev/xvda1 && mount /dev/xvda1 /mnt";
    guest.sh(bench.xenhost, make, LIMIT_S).map(drop)
}

/// A PVH guest on a qcow2 moves to this same host while it writes and verifies.
fn migrated(bench: &mut Bench<'_>, shown: &mut Shown) -> Result<()> {
    let image = "/lab/demo.qcow2";
    bench.xenhost.sh(&format!("rm -f {image}; ferrite image create {image} 1G"))?;
    let words = format!("format=raw,script=block-ferrite,target=qcow2:{image}");
    let options = GuestOptions::pvh();
    let (mut guest, mut disk) =
        shown.timed("start the PVH guest", || start(bench, &options, image, &words))?;
    let under_way = begin_verifying(bench, &mut guest)?;
    shown.timed("migrate it to this host", || migrate(bench, &mut guest, &mut disk))?;
    stop_verifying(bench, &mut guest, &under_way)?;
    shown.fact("PVH guest, qcow2", "migrated while fio wrote and verified: no mismatch");
    end(bench, &mut guest, image)
}

/// Clones the disk of a guest. The clone boots another guest, and both continue from the same state.
fn cloned(bench: &mut Bench<'_>, shown: &mut Shown) -> Result<()> {
    let create = format!(
        "rm -f {STORE}; ferrite store create {STORE} --size 2G && ferrite store create {STORE}#web 256M"
    );
    bench.xenhost.sh(&create)?;
    let options = GuestOptions::default();
    let words = |volume| format!("format=raw,script=block-ferrite,target=store:{STORE}#{volume}");
    let (mut web, disk) = start(bench, &options, STORE, &words("web"))?;
    make_file_system(bench, &mut web)?;
    web.sh(bench.xenhost, &format!("({WRITE}) && cp /tmp/sums /mnt && sync"), LIMIT_S)?;
    shown.timed("clone a disk in use", || {
        bench.xenhost.sh(&format!("ferrite store clone {STORE}#web copy"))
    })?;
    let (mut copy, _) =
        shown.timed("boot its clone", || start(bench, &options, STORE, &words("copy")))?;
    copy.sh(bench.xenhost, "load-ext4 && mount /dev/xvda1 /mnt && cp /mnt/sums /tmp", LIMIT_S)?;
    disk.kill_worker(bench.xenhost)?;
    for guest in [&mut web, &mut copy] {
        // Neither guest reads the other's writes.
        let own = "hostname >/mnt/own && cat /proc/sys/kernel/random/uuid >>/mnt/own && \
                   sha256sum /mnt/own >/tmp/own && sync";
        guest.sh(bench.xenhost, own, LIMIT_S)?;
    }
    for guest in [&mut web, &mut copy] {
        let verified = guest.sh(bench.xenhost, VERIFY, LIMIT_S)?;
        guest.sh(bench.xenhost, "sha256sum -c -s /tmp/own && cd / && umount /mnt", LIMIT_S)?;
        guest.sh(bench.xenhost, "e2fsck -fn /dev/xvda1", LIMIT_S)?;
        ensure!(verified == "8", "8 files were to be verified, not {verified}");
    }
    let (mapped, stored) = space(bench)?;
    ensure!(
        2 * stored < 3 * mapped / 2,
        "of {mapped} bytes {stored} are stored: nothing is shared"
    );
    shown.fact(
        "two PV guests, store",
        format!(
            "one disk cloned under its guest, their worker killed: all as written; {} MiB in {}",
            mapped >> 20,
            stored >> 20
        ),
    );
    web.check_blkfront(bench.xenhost)?;
    web.destroy(bench.xenhost)?;
    end_with(bench, &mut copy, &format!("ferrite store check --deep {STORE}"))
}

/// The bytes of the store's volumes, and the space that they take.
fn space(bench: &mut Bench<'_>) -> Result<(u64, u64)> {
    let stats = bench.xenhost.sh(&format!("ferrite store stats --json {STORE}"))?;
    let stats: Value = serde_json::from_str(&stats).with_context(|| format!("odd: {stats}"))?;
    let of = |name: &str| stats[name].as_u64().with_context(|| format!("no {name} in {stats}"));
    Ok((of("mapped_bytes")?, of("stored_bytes")?))
}

/// An HVM guest boots from its raw image by QEMU, and then uses its rings.
fn with_firmware(bench: &mut Bench<'_>, shown: &mut Shown) -> Result<()> {
    let (image, options) = ("/lab/demo.raw", GuestOptions::hvm());
    bootdisk::write(bench.xenhost, &options, image, 256)?;
    let words = format!("format=raw,target={image}");
    let (mut guest, disk) =
        shown.timed("boot the HVM guest", || start(bench, &options, image, &words))?;
    shown.timed("kill the worker under it", || {
        let under_way = begin_verifying(bench, &mut guest)?;
        disk.kill_worker(bench.xenhost)?;
        stop_verifying(bench, &mut guest, &under_way)
    })?;
    shown.fact(
        "HVM guest, raw",
        "booted from it by SeaBIOS; the worker killed while fio wrote and verified: no mismatch",
    );
    end(bench, &mut guest, image)
}

/// Starts a guest with the disk that xl attaches.
fn start(
    bench: &mut Bench<'_>,
    options: &GuestOptions,
    image: &str,
    words: &str,
) -> Result<(Guest, Disk)> {
    bench.guest_of_words(options, image, words, |_, _| Ok(()))
}

/// Checks that neither the guest nor a check of its image reports an error.
fn end(bench: &mut Bench<'_>, guest: &mut Guest, image: &str) -> Result<()> {
    end_with(bench, guest, &format!("ferrite image check {image}"))
}

/// Checks that with this command.
fn end_with(bench: &mut Bench<'_>, guest: &mut Guest, check: &str) -> Result<()> {
    guest.check_blkfront(bench.xenhost)?;
    guest.destroy(bench.xenhost)?;
    bench.xenhost.wait_until("the end of the disk", "[ -z \"$(ls /run/ferrite/disks)\" ]", 60)?;
    bench.xenhost.sh(check).map(drop)
}
