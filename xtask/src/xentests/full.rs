//! Full storage under thin images: their guest gets the effect of `on_full`, and other guests are not affected.

use super::guests::verifying;
use super::toolstack::{running_guest, xl_knows_us};
use super::xl::wait_for_none;
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::{Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::steps;

pub(super) const CASES: &[Case] = &[
    ferrite("full/a-qcow2-fails-a-vhd-waits-and-other-guests-go-on", |bench| {
        both_policies(bench, "qcow2", "vhd")
    }),
    ferrite("full/a-vhd-fails-a-qcow2-waits-and-other-guests-go-on", |bench| {
        both_policies(bench, "vhd", "qcow2")
    }),
];

/// MiB that a guest writes; there is space for half of it.
const PIECES: u32 = 12;
const SPACE: u32 = 6;

/// In the guest: a MiB that is unique on the disk.
const PIECE: &str = "[ -e /tmp/data ] || dd if=/dev/urandom of=/tmp/data bs=1M count=1 2>/dev/null; \
     piece() { (echo $1; cat /tmp/data) | head -c 1048576; }; \
     put() { piece $1 | dd of=$disk bs=1M seek=$1 count=1 iflag=fullblock oflag=direct 2>/tmp/why; }; \
     is_there() { piece $1 >/tmp/$1 && dd if=$disk bs=1M skip=$1 count=1 iflag=direct 2>/dev/null | \
     cmp - /tmp/$1 && rm /tmp/$1; }";

/// An image on a file system of its own.
struct Small {
    folder: String,
    format: &'static str,
    image: String,
}

impl Small {
    /// Fills the file system except for some MiB.
    fn make(bench: &mut Bench<'_>, name: &str, format: &'static str) -> Result<Small> {
        let folder = format!("/lab/full-{name}");
        let image = format!("{folder}/a.{format}");
        bench.xenhost.sh(&format!(
            "set -e; truncate -s 64M {folder}.fs; mkfs.ext4 -q -m 0 {folder}.fs; mkdir {folder}; \
             mount -o loop {folder}.fs {folder}; ferrite image create {image} 64M; \
             fallocate -l $(($(stat -f -c '%a * %S' {folder}) - ({SPACE} << 20))) {folder}/other"
        ))?;
        Ok(Small { folder, format, image })
    }

    fn make_space(&self, bench: &mut Bench<'_>) -> Result<()> {
        bench.xenhost.sh(&format!("rm {}/other", self.folder)).map(drop)
    }

    /// The disk's configuration for xl.
    fn words(&self, name: &str) -> String {
        let (format, target) = match self.format {
            "qcow2" => ("raw", format!("qcow2:{}", self.image)),
            format => (format, self.image.clone()),
        };
        format!("vdev={name},format={format},backendtype=tap,script=block-ferrite,target={target}")
    }

    /// The detached image is intact for us and for QEMU, which reads the same data as the guest.
    fn check(&self, bench: &mut Bench<'_>, pieces: u32, sum: &str) -> Result<()> {
        let (image, raw) = (&self.image, "/lab/full-image.raw");
        bench.xenhost.sh(&format!("ferrite image check {image}"))?;
        let qemu = match self.format {
            "qcow2" => format!("qemu-img check -q -f qcow2 {image} && qemu-img convert -f qcow2"),
            _ => "qemu-img convert -f vpc".to_owned(),
        };
        let found = bench.xenhost.sh_for(
            &format!("{qemu} -O raw {image} {raw} && head -c {pieces}M {raw} | md5sum"),
            120,
        )?;
        expect_eq("the image's content, by QEMU", &found.as_str(), &sum)
    }
}

/// One guest has both disks, another one uses storage that is not full.
fn both_policies(bench: &mut Bench<'_>, fails: &'static str, waits: &'static str) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let fails = Small::make(bench, "error", fails)?;
    let waits = Small::make(bench, "wait", waits)?;
    bench.start_daemon_with(&format!("[images.\"{}\"]\non_full = \"wait\"\n", waits.image))?;
    let image = bench.image(128)?;
    let (mut other, _disk) = bench.guest_of_xl(&GuestOptions::default(), &image)?;
    let mut guest = running_guest(bench)?;
    for (small, name) in [(&fails, "xvda"), (&waits, "xvdb")] {
        let attach = format!("xl block-attach {} '{}'", guest.name(), small.words(name));
        bench.xenhost.sh(&attach)?;
        let there = format!("until [ -b /dev/{name} ]; do sleep 0.2; done");
        guest.sh(bench.xenhost, &there, 60)?;
    }
    let written = has_errors(bench, &mut guest)?;
    detached(bench, &mut guest, &fails, "xvda", written)?;
    works(bench, &mut other)?;
    has_waits(bench, &mut guest, &mut other, &waits)?;
    detached(bench, &mut guest, &waits, "xvdb", PIECES)?;

    guest.check_blkfront(bench.xenhost)?;
    guest.destroy(bench.xenhost)?;
    other.destroy(bench.xenhost)?;
    wait_for_none(bench, "the end of the disks")
}

/// A write without space is an error for the guest. All earlier data are there, and can be overwritten. Returns the
/// number of pieces that are there.
fn has_errors(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<u32> {
    let until_full = format!(
        "disk=/dev/xvda; {PIECE}; n=0; while [ $n -lt {PIECES} ] && put $n; do n=$((n + 1)); done; \
         grep -q 'Input/output error' /tmp/why && put 0 && \
         for i in $(seq 0 $((n - 1))); do is_there $i || exit 1; done && echo $n"
    );
    let written: u32 = guest.sh(bench.xenhost, &until_full, 300)?.parse()?;
    steps::say(format!("{written} MiB were written when {SPACE} MiB were full"));
    if written == 0 || written > SPACE {
        bail!("{written} MiB were written, where there is space for {SPACE}");
    }
    Ok(written)
}

/// A write without space is answered when there is some. Requests that need none continue, and so do other guests; the
/// successor of a killed worker continues the wait.
fn has_waits(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    other: &mut Guest,
    small: &Small,
) -> Result<()> {
    let disk = Disk::of_toolstack(guest, DiskOptions::new(&small.image, "xvdb"))?;
    let each = |what: &str, last: u32| {
        format!("disk=/dev/xvdb; {PIECE}; for i in $(seq 0 {last}); do {what} $i || exit 1; done")
    };
    let under_way = guest.begin(bench.xenhost, &each("put", PIECES - 1), 600)?;
    let full = format!(
        "ferrite disk show {}/xvdb | grep '^waits for  *space on its storage'",
        guest.domid()
    );
    bench.xenhost.wait_until("requests that wait for space", &full, 120)?;
    guest.sh(bench.xenhost, &each("is_there", 0), 60).context("a disk that waits is read")?;
    works(bench, other)?;
    disk.kill_worker(bench.xenhost)?;
    bench.xenhost.wait_until("the next worker's requests wait", &full, 60)?;
    works(bench, other)?;
    small.make_space(bench)?;
    guest.finish_ok(bench.xenhost, &under_way).context("writes that waited for space")?;
    bench.xenhost.sh(&format!("! {full}"))?;
    guest.sh(bench.xenhost, &each("is_there", PIECES - 1), 120).map(drop)
}

/// The other guest writes, and reads its data.
fn works(bench: &mut Bench<'_>, other: &mut Guest) -> Result<()> {
    let verify = verifying("/dev/xvda", "");
    other.sh(bench.xenhost, &verify, 120).map(drop).context("a guest beside a full disk")
}

/// The guest has released the disk, and the image has the guest's data.
fn detached(
    bench: &mut Bench<'_>,
    guest: &mut Guest,
    small: &Small,
    name: &str,
    pieces: u32,
) -> Result<()> {
    let read = format!("dd if=/dev/{name} bs=1M count={pieces} iflag=direct 2>/dev/null | md5sum");
    let sum = guest.sh(bench.xenhost, &read, 120)?;
    // xl gives up after ten seconds, in which a busy emulator makes little progress.
    let detach = format!("ferrite disk detach --timeout 60 {}/{name}", guest.domid());
    bench.xenhost.sh_for(&detach, 90)?;
    small.check(bench, pieces, &sum).with_context(|| format!("the image of {name}"))
}
