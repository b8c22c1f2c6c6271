//! Disks that xl attaches, and the commands of the documentation.

use super::xl::wait_for_none;
use super::{Bench, Case, expect_eq, ferrite};
use crate::docs;
use anyhow::{Context, Result, bail};
use ferrite_xenhost::channel::quote;
use ferrite_xenhost::disk::{Disk, DiskOptions, ended};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::steps::say;

pub(super) const CASES: &[Case] = &[
    ferrite("lifecycle/attached-and-detached-by-xl", attached_by_xl),
    ferrite("lifecycle/connected-when-the-script-of-xl-says-so", connected_by_script),
    ferrite("lifecycle/domain-0-has-a-disk-and-xl-may-stand-still", domain_0),
    ferrite("docs/the-first-disk-of-the-readme-as-printed", first_disk_as_printed),
    ferrite("docs/a-disk-is-attached-by-xl-as-printed", xl_as_printed),
    ferrite("docs/a-disk-is-attached-by-hand-as-printed", by_hand_as_printed),
    ferrite("docs/a-disk-is-served-as-printed", served_as_printed),
];

/// Since 4.19 xl accepts a backend of this kind for disks; before, it refuses.
const FIRST_XEN_MINOR_WITH_TAP: u32 = 19;

/// In the guest: data written to the disk are read from it.
pub(super) const USE: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
     dd if=/dev/urandom of=/tmp/data bs=64k count=4 2>/dev/null; \
     dd if=/tmp/data of=/dev/xvdb bs=64k oflag=direct 2>/dev/null; \
     dd if=/dev/xvdb bs=64k count=4 iflag=direct 2>/dev/null | cmp - /tmp/data";

/// In the guest: succeeds if a write reaches the backend, whatever its own kernel does.
pub(super) const WRITE: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; blockdev --setrw /dev/xvdb; \
     dd if=/dev/zero of=/dev/xvdb bs=4k count=1 oflag=direct";

/// Whether xl accepts disks of this kind. If not, most cases have nothing to test, and the output says so.
pub(super) fn xl_knows_us(bench: &mut Bench<'_>) -> Result<bool> {
    let minor = bench.xenhost.sh("xl info | sed -n 's/^xen_minor *: *//p'")?;
    let minor = minor.trim().parse::<u32>().context("Xen")?;
    let knows = minor >= FIRST_XEN_MINOR_WITH_TAP;
    if !knows {
        say(format!(
            "xl of Xen 4.{minor} refuses backendtype=tap: the rest of this case is left out"
        ));
    }
    Ok(knows)
}

pub(super) fn running_guest(bench: &mut Bench<'_>) -> Result<Guest> {
    let mut guest = bench.paused_guest(&GuestOptions::default())?;
    guest.unpause(bench.xenhost)?;
    guest.wait_ready(bench.xenhost)?;
    Ok(guest)
}

/// The configuration of a disk for xl.
fn spec(image: &str, script: &str, access: &str) -> String {
    format!("format=raw,vdev=xvdb,backendtype=tap,script={script},access={access},target={image}")
}

fn attached_by_xl(bench: &mut Bench<'_>) -> Result<()> {
    let image = bench.image(64)?;
    if !xl_knows_us(bench)? {
        return refused_by_xl(bench, &image);
    }
    let mut guest = running_guest(bench)?;
    for access in ["w", "r", "w"] {
        let mut disk = bench.serve(&guest, DiskOptions::new(&image, "xvdb"))?;
        let spec = spec(&image, "block-ferrite", access);
        bench.xenhost.sh(&format!("xl block-attach {} {spec}", guest.name()))?;
        disk.wait_connected(bench.xenhost)?;
        match access {
            "w" => guest.sh(bench.xenhost, USE, 120).map(drop)?,
            _ => is_read_only(bench, &mut guest, &disk)?,
        }
        bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
        disk.wait_backend_gone(bench.xenhost)?;
        let directories = format!("{} {}", disk.frontend(), disk.backend_dir());
        bench
            .xenhost
            .sh(&format!("for d in {directories}; do ! xenstore-exists $d || exit 1; done"))?;
    }
    Ok(())
}

/// The guest reports a read-only disk and cannot write, and the image itself is open for reading only.
fn is_read_only(bench: &mut Bench<'_>, guest: &mut Guest, disk: &Disk) -> Result<()> {
    let sum = format!("sha256sum <{}", disk.image());
    let before = bench.xenhost.sh(&sum)?;
    let told = "until [ -b /dev/xvdb ]; do sleep 0.2; done; blockdev --getro /dev/xvdb";
    expect_eq("read-only flag", &guest.sh(bench.xenhost, told, 60)?.as_str(), &"1")?;
    if guest.run(bench.xenhost, WRITE, 60)?.status == 0 {
        bail!("a write succeeded on a disk that xl has attached with access=r");
    }
    expect_eq("the image's checksum", &bench.xenhost.sh(&sum)?, &before)?;
    let Some(pid) = disk.pid() else { bail!("no process serves the disk") };
    // The last digit of the flags: 0 is O_RDONLY.
    let modes = format!(
        "for fd in /proc/{pid}/fd/*; do [ \"$(readlink $fd)\" = {} ] && \
         sed -n 's/^flags:.*\\(.\\)$/\\1/p' /proc/{pid}/fdinfo/${{fd##*/}}; done; true",
        disk.image()
    );
    let modes = bench.xenhost.sh(&modes)?;
    if modes.is_empty() || modes.split_whitespace().any(|mode| mode != "0") {
        bail!("the image of a disk with access=r is open with the modes {modes:?}");
    }
    Ok(())
}

/// An older xl refuses the backend, and leaves nothing behind.
fn refused_by_xl(bench: &mut Bench<'_>, image: &str) -> Result<()> {
    let guest = bench.paused_guest(&GuestOptions::default())?;
    let spec = format!("format=raw,vdev=xvdb,backendtype=tap,target={image}");
    let command = format!("xl block-attach {} {spec} 2>&1", guest.name());
    let refused = bench.xenhost.dom0(&command, 60)?;
    if refused.status == 0 || !refused.stdout.contains("no suitable backend") {
        bail!("xl was expected to refuse {spec}, but ended with {}", refused.status);
    }
    let directory = format!("/local/domain/0/backend/vbd3/{}", guest.domid());
    bench.xenhost.sh(&format!("! xenstore-exists {directory}"))?;
    // A guest that never ran cannot be checked.
    guest.destroy(bench.xenhost)
}

/// A script that waits for /tmp/go before it runs ours.
const SLOW_SCRIPT: &str = "#!/bin/sh\n\
     [ \"$1\" = remove ] || until [ -e /tmp/go ]; do sleep 0.1; done\n\
     exec /etc/xen/scripts/block-ferrite \"$@\"\n";

/// xl compares the backend's state with 2 when it reads it, however late.
fn connected_by_script(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let image = bench.image(64)?;
    let mut guest = running_guest(bench)?;
    bench.xenhost.sh(&format!(
        "rm -f /tmp/go; printf %s {} >/tmp/slow; chmod 755 /tmp/slow",
        quote(SLOW_SCRIPT)
    ))?;
    let mut disk = bench.serve(&guest, DiskOptions::new(&image, "xvdb"))?;
    let spec = spec(&image, "/tmp/slow", "w");
    let xl = format!("xl block-attach {} {spec}", guest.name());
    let pid: u32 =
        bench.xenhost.sh(&format!("setsid {xl} >/tmp/xl.log 2>&1 & echo $!"))?.parse()?;
    let offered = format!("[ \"$(xenstore-read {}/state)\" = 3 ]", disk.frontend());
    bench.xenhost.wait_until("the guest's rings", &offered, 60)?;
    // When this has been noticed, the backend has read the guest's state, too.
    bench.xenhost.sh(&format!("truncate -s 65M {image}"))?;
    let noticed = format!("[ \"$(xenstore-read {}/sectors)\" = 133120 ]", disk.backend_dir());
    bench.xenhost.wait_until("the new size", &noticed, 60)?;
    let state = bench.xenhost.sh(&format!("xenstore-read {}/state", disk.backend_dir()))?;
    expect_eq("the state before the script has ended", &state.as_str(), &"2")?;
    bench.xenhost.sh("touch /tmp/go")?;
    bench.xenhost.wait_until("the end of xl", &ended(pid), 60)?;
    disk.wait_connected(bench.xenhost)?;
    guest.sh(bench.xenhost, USE, 120)?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    disk.wait_backend_gone(bench.xenhost)
}

/// Domain 0 as the guest of the daemon. xl pauses between its first write and its reading of our state: it finds 2, not
/// 4, however long that takes.
fn domain_0(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let image = bench.image(64)?;
    let spec = spec(&image, "block-ferrite", "w");
    let (front, back) =
        ("/local/domain/0/device/vbd/51728", "/local/domain/0/backend/vbd3/0/51728");
    let pid: u32 = bench
        .xenhost
        .sh(&format!(
            "modprobe xen-blkfront; setsid xl block-attach 0 {spec} >/tmp/xl.log 2>&1 & pid=$!; \
             until xenstore-exists {back}/state; do :; done; kill -STOP $pid; echo $pid"
        ))?
        .parse()?;
    bench.xenhost.wait_until(
        "rings",
        &format!("[ \"$(xenstore-read {front}/state)\" = 3 ]"),
        60,
    )?;
    let state = bench.xenhost.sh(&format!("xenstore-read {back}/state"))?;
    expect_eq("the state while xl stands still", &state.as_str(), &"2")?;
    bench.xenhost.sh(&format!("kill -CONT {pid}"))?;
    bench.xenhost.wait_until("the end of xl", &ended(pid), 60)?;
    bench.xenhost.wait_until(
        "a connection",
        &format!("[ \"$(xenstore-read {back}/state)\" = 4 ]"),
        60,
    )?;
    bench.xenhost.sh_for(USE, 120)?;
    bench.xenhost.sh("xl block-detach 0 xvdb && rm /tmp/data /tmp/xl.log")?;
    bench.xenhost.sh(&format!("! xenstore-exists {back} && ! xenstore-exists {front}")).map(drop)
}

/// Runs blocks of commands in one shell of dom0, in a folder with an image `disk.img` and with the installed files of
/// the repository. `after` is called after each block.
fn type_in(
    bench: &mut Bench<'_>,
    blocks: &[String],
    mut after: impl FnMut(&mut Bench<'_>, usize) -> Result<()>,
) -> Result<()> {
    let mut script = "set -e\ncd /tmp/docs\n".to_owned();
    for (i, block) in blocks.iter().enumerate() {
        script += &format!("{block}touch done{i}\nuntil [ -e go{i} ]; do sleep 0.1; done\n");
    }
    let pid: u32 = bench
        .xenhost
        .sh(&format!(
            "rm -rf /tmp/docs; mkdir -p /tmp/docs/dist; cd /tmp/docs; truncate -s 64M disk.img; \
             cp /etc/xen/scripts/block-ferrite dist/; printf %s {} >script; \
             setsid bash script </dev/null >log 2>&1 & echo $!",
            quote(&script)
        ))?
        .parse()?;
    for (i, block) in blocks.iter().enumerate() {
        let done = format!("[ -e /tmp/docs/done{i} ]");
        bench.xenhost.wait_until("a block", &format!("{done} || {}", ended(pid)), 120)?;
        let said = bench.xenhost.sh("cat /tmp/docs/log")?;
        if bench.xenhost.dom0(&done, 20)?.status != 0 {
            bail!("these commands fail:\n{block}they say:\n{said}");
        }
        after(bench, i).with_context(|| format!("after\n{block}which said:\n{said}"))?;
        bench.xenhost.sh(&format!("touch /tmp/docs/go{i}"))?;
    }
    bench.xenhost.wait_until("the shell's end", &ended(pid), 60)?;
    bench.xenhost.wait_until("the end of ferrite", "! pgrep -x ferrite", 60)
}

/// The guest with the name from the documentation.
fn guest_g(bench: &mut Bench<'_>) -> Result<Guest> {
    let guest = running_guest(bench)?;
    bench.xenhost.sh(&format!("xl rename {} g", guest.domid()))?;
    Ok(guest)
}

/// The control domain of the tests has no systemd: the command of `ferrite.service` stands for `systemctl`.
fn first_disk_as_printed(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let mut guest = guest_g(bench)?;
    let blocks = docs::README.commands("First disk by xl");
    let [commands] = &blocks[..] else { bail!("other blocks than expected: {blocks:?}") };
    let [systemctl, attach @ ..] = &commands.lines().collect::<Vec<_>>()[..] else {
        bail!("no commands")
    };
    expect_eq("the first command", systemctl, &"systemctl enable --now ferrite")?;
    let service = include_str!("../../../dist/ferrite.service");
    let daemon = service.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let daemon = daemon.context("ferrite.service starts a program")?;
    let pid = bench.xenhost.sh(&format!(
        "rm -f /srv/disk.qcow2; setsid {daemon} </dev/null >/tmp/daemon.log 2>&1 & echo $!"
    ))?;
    bench.daemon = Some(pid.parse().with_context(|| format!("odd answer: {pid}"))?);
    bench.xenhost.wait_until("the daemon", "ferrite disk list", 60)?;
    bench.xenhost.sh(&attach.join(" && "))?;
    guest.sh(bench.xenhost, USE, 120)?;
    bench.xenhost.sh("xl block-detach g xvdb")?;
    wait_for_none(bench, "the end of the disk")?;
    attached_by_name(bench, &mut guest)?;
    bench.xenhost.sh("ferrite image check /srv/disk.qcow2 && rm /srv/disk.qcow2").map(drop)
}

/// Attaches the disk by `ferrite disk attach`, which calls xl, and the guest's name. A second attachment is refused before
/// xl is called.
fn attached_by_name(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let attach = "ferrite disk attach g xvdb disk.qcow2";
    let said = bench.xenhost.sh(&format!("cd /srv && {attach}"))?;
    expect_eq("the command", &said.trim(), &"disk g/xvdb is attached: qcow2:/srv/disk.qcow2")?;
    guest.sh(bench.xenhost, USE, 120)?;
    bench
        .xenhost
        .sh("ferrite disk list | grep -q ' g/xvdb  *served ' && ferrite disk show g/xvdb")?;
    let again = bench.xenhost.dom0(&format!("cd /srv && {attach} 2>&1"), 60)?;
    if again.status != 4 || !again.stdout.contains("the guest has a disk xvdb already") {
        bail!("a device that is taken: {}: {}", again.status, again.stdout);
    }
    // An image outside of the daemon's folders. The reason is the daemon's, and nothing stays in xenstore.
    let refused = "truncate -s 1M /tmp/no.img; ferrite disk attach g xvdc /tmp/no.img 2>&1";
    let refused = bench.xenhost.dom0(refused, 90)?;
    if refused.status != 1 || !refused.stdout.contains("is in none of the folders") {
        bail!("an image that is not served: {}: {}", refused.status, refused.stdout);
    }
    let directory = format!("/local/domain/{}/device/vbd/51744", guest.domid());
    bench.xenhost.sh(&format!("rm /tmp/no.img; ! xenstore-exists {directory}"))?;
    bench.xenhost.sh("ferrite disk detach g/xvdb")?;
    wait_for_none(bench, "the end of the disk that was attached by the guest's name")
}

fn xl_as_printed(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    let mut guest = guest_g(bench)?;
    let blocks = docs::SERVE.commands("Attaching a disk with xl");
    expect_eq("blocks of commands", &blocks.len(), &3)?;
    type_in(bench, &blocks, |bench, block| match block {
        1 => guest.sh(bench.xenhost, USE, 120).map(drop),
        _ => Ok(()),
    })
}

fn by_hand_as_printed(bench: &mut Bench<'_>) -> Result<()> {
    let mut guest = guest_g(bench)?;
    let blocks = docs::SERVE.commands("Attaching a disk by hand");
    expect_eq("blocks of commands", &blocks.len(), &2)?;
    type_in(bench, &blocks, |bench, block| match block {
        0 => guest.sh(bench.xenhost, USE, 120).map(drop),
        _ => bench.xenhost.sh("! xenstore-exists /local/domain/0/backend/vbd3/*").map(drop),
    })
}

/// There may be no such guest: the disk waits to be attached to it.
fn served_as_printed(bench: &mut Bench<'_>) -> Result<()> {
    let blocks = docs::SERVE.commands("A first disk");
    let [commands] = &blocks[..] else { bail!("other blocks than expected: {blocks:?}") };
    let lines: Vec<String> = commands.lines().map(|line| format!("{line}\n")).collect();
    let [doctor, serve] = &lines[..] else { bail!("other commands than expected:\n{commands}") };
    let serve = format!("timeout --preserve-status 5 {serve}");
    type_in(bench, &[doctor.clone(), serve], |_, _| Ok(()))
}
