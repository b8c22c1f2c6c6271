//! A raw image that QEMU, as the device model of an HVM guest, opens beside the daemon.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_disk::{Disk, ErrorKind, OpenOptions};
use ferrite_loopback::front::FrontOptions;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::is_closed;
use ferrite_testkit::{PATIENCE, wait_until};

use crate::host::{Host, works};
use crate::roles::{MIB, keeper, kill, kill_keeper, kill_pid, worker};

/// The script that xl writes if the configuration names none.
const DEFAULT: &str = "/etc/xen/scripts/block-tap";

/// A QEMU that has the image open for writing, as a device model has.
struct Qemu(Child);

impl Qemu {
    fn start(image: &Path) -> Qemu {
        let mut child =
            qemu_io(image).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"write -P 3 0 512\n").unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("wrote 512/512"), "{line}");
        Qemu(child)
    }

    /// Unplugs the emulated disk, as the guest's driver does.
    fn unplug(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

fn qemu_io(image: &Path) -> Command {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw"]).arg(image);
    command
}

fn write_by_qemu(image: &Path) -> Output {
    qemu_io(image).args(["-c", "write -P 4 512 512"]).output().unwrap()
}

/// Writes the kind of a domain, as the toolstack does.
fn is_of_kind(host: &Host, domid: u16, kind: &str) {
    host.store().write(&format!("/libxl/{domid}/type"), kind.as_bytes()).unwrap();
}

/// Kills the worker, and waits until the next one serves the disk.
fn kill_worker(host: &Host, disk: &DiskPaths) {
    let keeper = keeper(host, disk);
    let old = worker(keeper).unwrap();
    kill_pid(old);
    wait_until("the next worker", || worker(keeper).is_some_and(|new| new != old));
}

fn attach(host: &Host, script: &str) -> DiskPaths {
    let image = host.image("1.img");
    let keys = [("script", script), ("hotplug-status", "connected")];
    host.attach_with(1, 0, &format!("aio:{}", image.display()), &keys)
}

#[test]
fn a_guest_boots_from_its_device_model_and_has_the_disk_alone_when_its_driver_comes() {
    let host = Host::new(1);
    let image = host.make_image("1.img", 4 * MIB);
    is_of_kind(&host, 1, "hvm");
    let daemon = host.spawn(None);
    wait_until("a control socket", || host.status().is_ok());
    let disk = attach(&host, DEFAULT);
    host.wait_for_phase(&disk, PhaseName::Served);
    host.wait_for_state(&disk, 2);
    let qemu = Qemu::start(&image);
    // A worker that dies while the firmware reads is replaced while QEMU has the image open.
    kill_worker(&host, &disk);
    assert_eq!(host.backend_state(&disk), 2);
    // No other disk and no NBD client gets the image.
    let first = OpenOptions { qemu_first: true, ..OpenOptions::default() };
    let second = Disk::open(&image, &first).map(drop).map_err(|e| e.kind());
    assert_eq!(second, Err(ErrorKind::InUse));
    let client = UnixStream::connect(host.show(&disk).unwrap().nbd.unwrap()).unwrap();
    assert!(is_closed(&client), "a client of NBD beside QEMU");
    // The guest's driver connects before QEMU has closed the image: it waits, with a reason.
    let mut front = host.frontend(&disk);
    front.offer(&FrontOptions::default()).unwrap();
    let error = format!("error/backend/vbd3/1/{}/error", disk.devid);
    wait_until("a reason", || host.store().read(&error).unwrap().is_some());
    let why = String::from_utf8(host.store().read(&error).unwrap().unwrap()).unwrap();
    assert!(why.contains("QEMU"), "{why}");
    assert_eq!(host.backend_state(&disk), 2);
    qemu.unplug();
    front.finish(PATIENCE).unwrap();
    host.wait_for_state(&disk, 4);
    works(&mut front, 5);
    // From now on only this daemon's processes can open the image, whichever of them is killed.
    let is_refused = || assert!(!write_by_qemu(&image).status.success());
    is_refused();
    kill_worker(&host, &disk);
    works(&mut front, 6);
    is_refused();
    kill_keeper(keeper(&host, &disk));
    works(&mut front, 7);
    is_refused();
    assert_eq!(std::fs::read(&image).unwrap()[..512], [3; 512]);
    host.machine().unplug(&disk).unwrap();
    front.close(PATIENCE).unwrap();
    host.wait_for_state(&disk, 6);
    host.machine().remove_disk(&disk).unwrap();
    host.wait_for_no_disks();
    assert!(write_by_qemu(&image).status.success());
    kill(daemon);
}

#[test]
fn nobody_but_the_device_model_of_an_hvm_guest_has_an_image_open_beside_us() {
    for (kind, script) in
        [("pv", DEFAULT), ("pvh", DEFAULT), ("hvm", "/etc/xen/scripts/block-ferrite")]
    {
        let mut host = Host::new(1);
        let image = host.make_image("1.img", 4 * MIB);
        is_of_kind(&host, 1, kind);
        host.start();
        let disk = attach(&host, script);
        host.wait_for_state(&disk, 2);
        let refused = write_by_qemu(&image);
        assert!(!refused.status.success(), "{kind} {script}: {refused:?}");
    }
}
