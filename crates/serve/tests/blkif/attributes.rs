//! The toolstack's keys of a disk in its directory, their effect on the guest, and when they take
//! effect (threats.md T26).

use std::sync::Arc;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_loopback::CopyWith;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::blkif::lifecycle::{Attachment, Outcome, ServeError, serve};
use ferrite_serve::path::device::Device;
use ferrite_serve::waker::Waker;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::rig::{Plan, Rig, config};
use ferrite_xen::abi::STATUS_ERROR;

const BYTES: u64 = 1 << 20;

fn plan(backend_keys: Vec<(&'static str, String)>) -> Plan {
    Plan { bytes: BYTES, pool_bytes: 4 << 20, backend_keys, ..Plan::default() }
}

fn info(front: &mut Frontend) -> u32 {
    front.backend_key("info").unwrap().unwrap().parse().unwrap()
}

fn set(rig: &Rig, key: &str, value: &str) {
    let path = format!("{}/{key}", rig.disk.backend);
    rig.machine.store().unwrap().write(&path, value.as_bytes()).unwrap();
}

/// Returns whether a write of one page succeeds. If not, checks that the medium is unchanged.
fn writes(rig: &Rig, front: &mut Frontend) -> bool {
    let before = rig.medium();
    let buffer = front.space().buffer(1).unwrap();
    buffer.fill(0, 4096, 0x5A);
    let queue = &mut front.queues[0];
    queue.write(8, &buffer, 0, 4096).unwrap();
    let status = queue.next_reply(PATIENCE).unwrap().status;
    assert!(status == 0 || status == STATUS_ERROR && rig.medium() == before);
    status == 0
}

#[test]
fn a_guest_is_told_what_its_disk_is_and_cannot_write_one_of_mode_r() {
    for (mode, kind, removable, bits) in [
        ("w", "disk", "0", 0),
        ("r", "disk", "0", 4),
        ("r", "cdrom", "1", 7),
        ("w", "cdrom", "0", 1),
        ("w", "disk", "1", 2),
        ("rw", "disk", "0", 0),
        ("", "disk", "0", 4),
    ] {
        let keys = [("mode", mode), ("device-type", kind), ("removable", removable)];
        let rig = Rig::new(plan(keys.map(|(key, value)| (key, value.to_owned())).to_vec()));
        let mut front = rig.connect(&FrontOptions::default());
        assert_eq!(info(&mut front), bits, "{keys:?}");
        let read_only = bits & 4 != 0;
        assert_eq!(writes(&rig, &mut front), !read_only, "{keys:?}");
        assert_eq!(front.features().discard, !read_only, "{keys:?}");
        front.close(PATIENCE).unwrap();
    }
}

/// As with the kernel's backend, the new mode applies when the disk is attached again.
#[test]
fn a_mode_that_changes_under_a_guest_changes_nothing_for_it_or_for_a_successor() {
    for (before, after) in [("w", "r"), ("r", "w")] {
        let mut rig = Rig::new(plan(vec![("mode", before.into())]));
        let mut front = rig.connect(&FrontOptions::default());
        set(&rig, "mode", after);
        assert_eq!(writes(&rig, &mut front), before == "w");
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        rig.start();
        assert_eq!(writes(&rig, &mut front), before == "w", "{before}, then {after}");
        front.close(PATIENCE).unwrap();

        // A guest that has closed keeps no earlier mode.
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        rig.start();
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        assert_eq!((info(&mut front) == 4, writes(&rig, &mut front)), (after == "r", after == "w"));
        front.close(PATIENCE).unwrap();
    }
}

/// A disk that must not be written needs a medium that is opened read-only (XSA-142).
#[test]
fn a_disk_of_mode_r_is_not_served_from_an_image_that_is_open_for_writing() {
    let rig = Rig::without_backend(plan(vec![("mode", "r".into())]));
    let mut store = rig.machine.store().unwrap();
    let image = rig.image.to_str().unwrap();
    let disk = Disk::open(image, &OpenOptions::default()).unwrap();
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let config = config(&rig.disk, rig.run_dir().to_owned());
    let hypervisor = rig.machine.loopback(CopyWith::Memcpy).unwrap();
    let stop = Waker::new().unwrap();
    // The server is stopped already: if it served the disk anyway, the test would not hang.
    stop.wake();
    let end = serve(&mut store, &hypervisor, &device, &config, &stop);
    assert!(matches!(end, Err(ServeError::Attachment(_))), "{end:?}");
    assert_eq!(rig.frontend().backend_state().unwrap(), 1, "nothing is offered");
}

#[test]
fn a_directory_without_a_mode_is_not_whole_yet() {
    let mut rig = Rig::without_backend(plan(Vec::new()));
    let mut store = rig.machine.store().unwrap();
    store.remove(&format!("{}/mode", rig.disk.backend)).unwrap();
    assert_eq!(Attachment::read(&mut store, &rig.disk.backend, rig.domid).unwrap(), None);
    rig.start();
    set(&rig, "mode", "w");
    let mut front = rig.connect(&FrontOptions::default());
    assert!(writes(&rig, &mut front));
    front.close(PATIENCE).unwrap();
}

/// xl waits for the backend's 2, and only then runs the script that connects the disk.
#[test]
fn a_disk_with_a_hotplug_script_is_offered_at_once_and_connected_when_the_script_says_so() {
    let rig = Rig::new(plan(vec![("script", "/etc/xen/scripts/block-ferrite".into())]));
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.offer(&FrontOptions::default()).unwrap();
    // Each of these makes the backend read the state, and only the last lets it go on. Another growth of the image is
    // seen after that.
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    for (n, status) in ["", "error", "connected"].into_iter().enumerate() {
        image.set_len(BYTES * (n as u64 + 2)).unwrap();
        let sectors = BYTES * (n as u64 + 2) / 512;
        let end = std::time::Instant::now() + PATIENCE;
        while front.read_features().unwrap().sectors != sectors {
            assert!(std::time::Instant::now() < end, "the backend does not look");
            std::thread::yield_now();
        }
        assert_eq!(front.backend_state().unwrap(), 2, "before {status:?}");
        set(&rig, "hotplug-status", status);
    }
    front.finish(PATIENCE).unwrap();
    assert!(writes(&rig, &mut front));

    // xenopsd's scripts remove it while the guest still uses the disk.
    let status = format!("{}/hotplug-status", rig.disk.backend);
    rig.machine.store().unwrap().remove(&status).unwrap();
    assert!(writes(&rig, &mut front));
    front.close(PATIENCE).unwrap();
}
