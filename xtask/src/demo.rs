//! `cargo xtask demo`: a real Xen host serves a real disk to a real Linux guest.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use ferrite_xenhost::XenHost;
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::root::{self, Suite};
use ferrite_xenhost::steps::{self, step};
use ferrite_xenhost::{packages, release};

/// Limit of a command in the guest, in seconds; an emulated host can be slow.
const LIMIT_S: u64 = 300;

/// Random files of many sizes, 60 MiB together, and their checksums.
const WRITE: &str = "for n in 1 2 3 4 5 6 7 8; do \
     dd if=/dev/urandom of=/mnt/file$n bs=$((n * 353000)) count=5 2>/dev/null || exit 1; done; \
     (cd /mnt && sha256sum file*) >/tmp/sums && sync && wc -l </tmp/sums";

/// Reads everything back from the disk, not from the guest's memory.
const VERIFY: &str = "cd / && umount /mnt && blockdev --flushbufs /dev/xvda && \
     echo 3 >/proc/sys/vm/drop_caches && mount /dev/xvda1 /mnt && cd /mnt && \
     sha256sum -c -s /tmp/sums && wc -l </tmp/sums";

/// Runs the demonstration; its last line says PASS or FAIL.
pub(crate) fn run() -> Result<ExitCode> {
    packages::ensure(&[packages::XEN_HOST])?;
    let ferrite = release::build_ferrite()?;
    let root = root::ensure(Suite::by_name("trixie")?)?;
    let mut xenhost = XenHost::boot(&root, &[ferrite])?;
    let result = demonstrate(&mut xenhost);
    println!();
    match result {
        Ok(shown) => {
            for (what, value) in &shown.facts {
                println!("{what:<22} {value}");
            }
            for (what, seconds) in &shown.times {
                println!("{:<22} {seconds:.1} s", format!("time to {what}"));
            }
            println!("{:<22} {:.0} s", "time in all", steps::elapsed_s());
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
    let image = "/lab/demo.raw";
    xenhost.sh(&format!("rm -f {image}; truncate -s 1G {image}"))?;
    let (mut guest, disk) = shown.timed("start the guest", || start(xenhost, image))?;
    hosts(xenhost, &mut guest, &mut shown)?;
    features(xenhost, &mut guest, &disk, &mut shown)?;

    let mut sh = |xenhost: &mut XenHost, command: &str| guest.sh(xenhost, command, LIMIT_S);
    shown.timed("partition, make ext4", || {
        sh(xenhost, "printf 'label: gpt\\n,\\n' | sfdisk -q --wipe always /dev/xvda")?;
        sh(
            xenhost,
            "until [ -b /dev/xvda1 ]; do sleep 0.2; done; load-ext4 && mkfs.ext4 -q /dev/xvda1",
        )?;
        sh(xenhost, "mount /dev/xvda1 /mnt")
    })?;
    let written = shown.timed("write and sync", || sh(xenhost, WRITE))?;
    let verified = shown.timed("remount, read, verify", || sh(xenhost, VERIFY))?;
    if written != "8" || verified != "8" {
        bail!("8 files were to be written and verified, not {written} and {verified}");
    }
    shown
        .fact("data", "8 files of random data, 60 MiB, written, synced, remounted: all as written");

    let before = used_kib(xenhost, image)?;
    shown.timed("delete and discard", || sh(xenhost, "rm /mnt/file* && sync && fstrim /mnt"))?;
    let after = used_kib(xenhost, image)?;
    shown.fact("image file", format!("1 GiB, {before} KiB on disk; after discard {after} KiB"));
    if before < 60_000 || after + 50_000 > before {
        bail!("the image took {before} KiB and takes {after} KiB: it did not shrink");
    }
    sh(xenhost, "umount /mnt && e2fsck -fn /dev/xvda1")?;
    shown.fact("file system", "clean, by e2fsck in the guest");
    snapshot(xenhost, &mut guest, &mut shown)?;
    guest.check_blkfront(xenhost)?;
    Ok(shown)
}

/// A VHD, a snapshot of it, and the guest writing to the leaf: the parent stays as it was.
fn snapshot(xenhost: &mut XenHost, guest: &mut Guest, shown: &mut Shown) -> Result<()> {
    let (raw, leaf, parent) = ("/lab/vhd.raw", "/lab/leaf.vhd", "/lab/parent.vhd");
    shown.timed("make a VHD, snapshot it", || {
        xenhost.sh(&format!(
            "rm -f {leaf} {parent}; dd if=/dev/urandom of={raw} bs=1M count=16 2>/dev/null; \
             truncate -s 256M {raw}; ferrite image convert {raw} {leaf} && \
             ferrite image snapshot {leaf} {parent}"
        ))
    })?;
    let before = xenhost.sh(&format!("sha256sum <{parent}"))?;
    let mut disk = Disk::attach(xenhost, guest, Backend::Ferrite, DiskOptions::new(leaf, "xvdb"))?;
    disk.wait_connected(xenhost)?;
    let read = shown.timed("read and write the leaf", || {
        let command = "until [ -b /dev/xvdb ]; do sleep 0.2; done; sha256sum </dev/xvdb; \
             dd if=/dev/urandom of=/dev/xvdb bs=4k seek=1000 count=500 oflag=direct 2>/dev/null; \
             dd if=/dev/urandom of=/dev/xvdb bs=1M seek=100 count=4 oflag=direct 2>/dev/null; \
             sync; sha256sum </dev/xvdb";
        guest.sh(xenhost, command, LIMIT_S)
    })?;
    disk.unplug(xenhost)?;
    let (first, second) = read.split_once('\n').unwrap_or((&read, ""));
    if first != xenhost.sh(&format!("sha256sum <{raw}"))? || first == second {
        bail!("the guest read something else than what the parent holds, or wrote nothing");
    }
    let after =
        xenhost.sh(&format!("ferrite image check {leaf} >/dev/null && sha256sum <{parent}"))?;
    if after != before {
        bail!("the parent has changed: its checksum was {before} and is {after}");
    }
    let sizes = xenhost.sh(&format!("du -k {leaf} {parent} | awk '{{print $1}}'"))?;
    let sizes: Vec<_> = sizes.lines().collect();
    let (leaf, parent) =
        (sizes.first().copied().unwrap_or("?"), sizes.get(1).copied().unwrap_or("?"));
    shown.fact(
        "VHD snapshot",
        format!("6 MiB written to the leaf ({leaf} KiB); parent ({parent} KiB) as it was"),
    );
    Ok(())
}

fn start(xenhost: &mut XenHost, image: &str) -> Result<(Guest, Disk)> {
    let mut guest = Guest::create(xenhost, &GuestOptions::default())?;
    let disk = Disk::attach(xenhost, &guest, Backend::Ferrite, DiskOptions::new(image, "xvda"))?;
    guest.unpause(xenhost)?;
    guest.wait_ready(xenhost)?;
    disk.wait_connected(xenhost)?;
    Ok((guest, disk))
}

fn hosts(xenhost: &mut XenHost, guest: &mut Guest, shown: &mut Shown) -> Result<()> {
    let xen = xenhost.sh("xl info xen_version; uname -r")?;
    let guest = guest.sh(xenhost, "uname -r", LIMIT_S)?;
    let mut versions = xen.lines();
    let mut next = || versions.next().unwrap_or("unknown").trim().to_owned();
    let (xen, dom0) = (next(), next());
    shown.fact("host", format!("Xen {xen}, Linux {dom0}, emulated by QEMU"));
    shown.fact("guest", format!("Linux {guest}, its own blkfront"));
    Ok(())
}

fn features(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    disk: &Disk,
    shown: &mut Shown,
) -> Result<()> {
    let log = disk.backend_log(xenhost)?;
    let connected = log.lines().find_map(|line| line.split_once("connected: "));
    let Some((_, connected)) = connected else { bail!("ferrite did not connect:\n{log}") };
    shown.fact("connected", connected);
    let said = guest.blkfront_log(xenhost)?;
    let said = said.lines().find_map(|line| line.split_once("xvda: "));
    let Some((_, said)) = said else { bail!("blkfront said nothing of xvda") };
    shown.fact("blkfront says", said.trim_end_matches(';'));
    Ok(())
}

fn used_kib(xenhost: &mut XenHost, image: &str) -> Result<u64> {
    Ok(xenhost.sh(&format!("sync {image}; du -k {image} | cut -f1"))?.parse()?)
}
