//! HVM guests: firmware and boot loader read the disk by the device model, until the guest's driver takes over.

use super::guests::{rebooted, verifying, wait_for_requests};
use super::toolstack::xl_knows_us;
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result};
use ferrite_xenhost::bootdisk;
use ferrite_xenhost::disk::Disk;
use ferrite_xenhost::guest::GuestOptions;

pub(super) const CASES: &[Case] = &[
    ferrite("hvm/raw-boots-by-qemu-and-is-ours-when-the-driver-comes", raw).on_amd(),
    ferrite("hvm/qcow2-boots-by-our-socket-and-goes-on-by-its-rings", qcow2).on_amd(),
    ferrite("hvm/vhd-boots-by-our-socket-and-goes-on-by-its-rings", vhd).on_amd(),
];

/// A disk's configuration for xl.
struct Spec {
    image: &'static str,
    words: &'static str,
    by: By,
}

/// The device model's access to the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// It opens the image itself.
    Image,
    /// It is a client of the disk's socket.
    Socket,
}

fn raw(bench: &mut Bench<'_>) -> Result<()> {
    let (image, words) = (RAW, "format=raw,target=/lab/hvm.raw");
    boots(bench, &Spec { image, words, by: By::Image })
}

fn qcow2(bench: &mut Bench<'_>) -> Result<()> {
    let image = "/lab/hvm.qcow2";
    let words = "format=raw,script=block-ferrite,target=qcow2:/lab/hvm.qcow2";
    boots(bench, &Spec { image, words, by: By::Socket })
}

/// By xl's own script, which finds the socket by `tap-ctl`.
fn vhd(bench: &mut Bench<'_>) -> Result<()> {
    let (image, words) = ("/lab/hvm.vhd", "format=vhd,target=/lab/hvm.vhd");
    boots(bench, &Spec { image, words, by: By::Socket })
}

/// The source of all images.
const RAW: &str = "/lab/hvm.raw";

fn boots(bench: &mut Bench<'_>, spec: &Spec) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let (options, image) = (GuestOptions::hvm(), spec.image);
    bench.xenhost.sh("rm -f /lab/hvm.*")?;
    bootdisk::write(bench.xenhost, &options, RAW, 256)?;
    if image != RAW {
        bench.xenhost.sh(&format!("ferrite image convert {RAW} {image}"))?;
    }
    let firmware = |bench: &mut Bench<'_>, disk: &Disk| {
        bench.xenhost.sh(&device_model_has(disk, spec.by)).context("the firmware's disk")?;
        if spec.by == By::Socket {
            wait_for_loader(bench, disk)?;
        }
        disk.kill_worker(bench.xenhost)?;
        let state = bench.xenhost.sh(&format!("xenstore-read {}/state", disk.frontend()))?;
        expect_eq("the frontend's state while the boot loader reads", &state.as_str(), &"1")
    };
    let (mut guest, mut disk) = bench.guest_of_words(&options, image, spec.words, firmware)?;
    has_let_go(bench, &disk, spec.by)?;

    let under_way = guest.begin(bench.xenhost, &verifying("/dev/xvda", "--loops=3"), 600)?;
    wait_for_requests(bench, &mut guest, 64)?;
    disk.kill_worker(bench.xenhost)?;
    guest.finish_ok(bench.xenhost, &under_way).context("fio, with the worker killed")?;
    rebooted(bench, &mut guest, &mut disk)?;
    has_let_go(bench, &disk, spec.by)?;

    guest.check_blkfront(bench.xenhost)?;
    guest.destroy(bench.xenhost)?;
    let gone = "[ -z \"$(ls /run/ferrite/disks)\" ]";
    bench.xenhost.wait_until("the end of the disk", gone, 60)?;
    bench.xenhost.sh(&format!("ferrite image check {image} && rm /lab/hvm.*")).map(drop)
}

/// Waits until the boot loader is reading the kernel and its RAM disk, which have 18 MB.
fn wait_for_loader(bench: &mut Bench<'_>, disk: &Disk) -> Result<()> {
    let worker = disk.worker();
    // The check takes the emulated processor from the guest: not often.
    let read = format!(
        "sleep 2; [ $(awk '/^read_bytes/ {{print $2}}' /proc/$({worker})/io) -ge 4000000 ]"
    );
    bench.xenhost.wait_until("4 MB read from the image", &read, 300)
}

/// A shell condition: the device model has the disk open.
fn device_model_has(disk: &Disk, by: By) -> String {
    let (domid, image) = (disk.domid(), disk.image());
    match by {
        By::Image => {
            format!("ls -l /proc/$(pgrep -f -- '-xen-domid {domid} ')/fd | grep -F {image}")
        }
        // The server's end of an accepted connection. Its socket was bound by this name, and renamed.
        By::Socket => {
            format!("grep -E ' 03 +[0-9]+ .*/blktap-control/[.]vbd-{domid}-51712$' /proc/net/unix")
        }
    }
}

/// Waits until the guest's driver has unplugged the emulated disk.
fn has_let_go(bench: &mut Bench<'_>, disk: &Disk, by: By) -> Result<()> {
    let gone = format!("! {}", device_model_has(disk, by));
    bench.xenhost.wait_until("the device model without the disk", &gone, 30)
}
