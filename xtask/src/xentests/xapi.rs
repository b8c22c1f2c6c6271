//! Guests whose disks XAPI attaches: a tap is opened first, and the guest's directories name it, as xenopsd writes them.
//! Here a script does what xenopsd and the storage manager do.

use super::guests::verifying;
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::Result;
use ferrite_xenhost::guest::{Guest, GuestOptions};

pub(super) const CASES: &[Case] = &[
    ferrite("xapi/pv-on-a-tap-snapshot-under-verify-and-domain-0-beside-it", |bench| {
        on_a_tap(bench, &GuestOptions::default())
    }),
    ferrite("xapi/pvh-on-a-tap-snapshot-under-verify-and-domain-0-beside-it", |bench| {
        on_a_tap(bench, &GuestOptions::pvh())
    })
    .on_amd(),
];

/// xvda of the guest, and the disk's image.
const DEVICE: u32 = 51712;
const IMAGE: &str = "/lab/leaf.vhd";

/// Opens a tap as the storage manager does, and prints its process and minor.
const ACTIVATE: &str = "set -e; minor=$(tap-ctl allocate); minor=${minor##*-}; pid=$(tap-ctl spawn); \
                        tap-ctl attach -p $pid -m $minor; tap-ctl open -p $pid -m $minor -a vhd:/lab/leaf.vhd; \
                        echo $pid $minor";

/// Takes a snapshot as the storage manager does: the leaf gets another name while the tap is paused, and two children.
const SNAPSHOT: &str = "set -e; cd /lab; tap-ctl pause -p PID -m MINOR; ln leaf.vhd base.vhd; \
                        ferrite compat vhd-util snapshot -n leaf.new -p base.vhd; mv leaf.new leaf.vhd; \
                        ferrite compat vhd-util snapshot -n snapshot.vhd -p base.vhd; \
                        ferrite compat vhd-util set -n base.vhd -f hidden -v 1; \
                        tap-ctl unpause -p PID -m MINOR -a vhd:/lab/leaf.vhd";

fn on_a_tap(bench: &mut Bench<'_>, options: &GuestOptions) -> Result<()> {
    bench.start_daemon()?;
    bench.xenhost.sh(&format!("rm -f /lab/*.vhd; ferrite image create {IMAGE} 256M"))?;
    let told = bench.xenhost.sh(ACTIVATE)?;
    let (pid, minor) = told.trim().split_once(' ').unwrap_or_default();
    let socket = format!("/run/blktap-control/nbd{pid}.{minor}");
    let mut guest = Guest::create_with(bench.xenhost, options, &[])?;
    bench.guests.push(guest.clone());
    guest.unpause(bench.xenhost)?;
    guest.wait_ready(bench.xenhost)?;
    attach(bench, guest.domid(), &socket)?;
    wait_for_disk(bench, &mut guest)?;
    let verify = verifying("/dev/xvda", "");
    let until_told = format!("until [ -e /tmp/stop ]; do {verify} || exit 1; done");
    let under_way = guest.begin(bench.xenhost, &until_told, 1500)?;
    wait_for_requests(bench, &mut guest)?;
    bench.xenhost.sh_for(&SNAPSHOT.replace("PID", pid).replace("MINOR", minor), 120)?;
    wait_for_requests(bench, &mut guest)?;
    // Domain 0 has the tap, too, as XAPI's bootloader and its import do.
    bench.xenhost.sh("modprobe xen-blkfront")?;
    attach(bench, 0, &socket)?;
    bench.xenhost.wait_until("domain 0's disk", "[ -b /dev/xvda ]", 60)?;
    bench.xenhost.sh_for("dd if=/dev/xvda of=/dev/null bs=64k count=16 iflag=direct 2>&1", 120)?;
    detach(bench, 0)?;
    wait_for_requests(bench, &mut guest)?;
    guest.sh(bench.xenhost, "touch /tmp/stop", 60)?;
    guest.finish_ok(bench.xenhost, &under_way)?;
    detach(bench, guest.domid())?;
    let listed = format!("pid={pid} minor={minor} state=0 args=vhd:{IMAGE}");
    expect_eq("tap-ctl list", &bench.xenhost.sh("tap-ctl list")?.trim(), &listed.as_str())?;
    bench.xenhost.sh(&format!(
        "set -e; tap-ctl close -p {pid} -m {minor}; tap-ctl detach -p {pid} -m {minor}; tap-ctl free -m {minor}; \
         [ -z \"$(tap-ctl list)\" ]; rmdir /run/blktap-control/tapdisk; \
         ! ls -d /run/ferrite/tap-* 2>/dev/null; [ -z \"$(ls /run/ferrite/keepers)\" ]; \
         for image in leaf snapshot base; do ferrite image check /lab/$image.vhd; done; rm /lab/*.vhd"
    ))?;
    guest.check_blkfront(bench.xenhost)?;
    guest.destroy(bench.xenhost)
}

/// Writes both directories as xenopsd does, and then what its script writes.
fn attach(bench: &mut Bench<'_>, domid: u32, socket: &str) -> Result<()> {
    let (front, back) = directories(domid);
    bench.xenhost.sh(&format!(
        "set -e; xenstore-write {front} '' {back} ''; \
         xenstore-chmod {front} n{domid} r0; xenstore-chmod {back} n0 r{domid}; \
         xenstore-write {back}/frontend {front} {back}/frontend-id {domid} {back}/online 1 {back}/removable 0 \
         {back}/bootable 1 {back}/dev xvda {back}/type vbd3 {back}/mode w {back}/discard-enable 0 \
         {back}/script /usr/libexec/xenopsd/block {back}/device-type disk \
         {back}/params nbd:unix:/run/blktap-control/nbd/sr/vdi:exportname=vdi; \
         xenstore-write {front}/backend {back} {front}/backend-id 0 {front}/virtual-device {DEVICE} \
         {front}/device-type disk {front}/trusted 1; \
         xenstore-write {front}/state 1; xenstore-write {back}/state 1; \
         xenstore-write {back}/physical-device-path {socket} {back}/hotplug-status connected"
    ))?;
    let connected = format!("[ \"$(xenstore-read {back}/state)\" = 4 ]");
    bench.xenhost.wait_until("the disk's connection", &connected, 60)
}

/// Unplugs the disk as xenopsd does. The backend removes its directory when the frontend is gone.
fn detach(bench: &mut Bench<'_>, domid: u32) -> Result<()> {
    let (front, back) = directories(domid);
    bench.xenhost.sh(&format!("xenstore-write {back}/online 0 {back}/state 5"))?;
    let closed = format!("[ \"$(xenstore-read {back}/state)\" = 6 ]");
    bench.xenhost.wait_until("the disk's end", &closed, 60)?;
    bench.xenhost.sh(&format!("xenstore-rm {front}"))?;
    let gone = format!("! xenstore-exists {back}/state");
    bench.xenhost.wait_until("the end of its directory", &gone, 60)
}

fn directories(domid: u32) -> (String, String) {
    (
        format!("/local/domain/{domid}/device/vbd/{DEVICE}"),
        format!("/local/domain/0/backend/vbd3/{domid}/{DEVICE}"),
    )
}

fn wait_for_disk(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let there = "for n in $(seq 300); do [ -b /dev/xvda ] && exit 0; sleep 0.1; done; exit 1";
    guest.sh(bench.xenhost, there, 60).map(drop)
}

fn wait_for_requests(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    super::guests::wait_for_requests(bench, guest, 64)
}
