//! Names that are used again: an attachment gets the image that the toolstack has named for it,
//! whatever happened to the one before.

use std::fs::File;
use std::path::Path;

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::wait_until;
use rustix::fs::{FlockOperation, flock};

use crate::host::{self, Host, works};

const MIB: u64 = 1 << 20;

fn aio(image: &Path) -> String {
    format!("aio:{}", image.display())
}

/// Checks that the guest writes to this image, and to none of the others.
fn is_served(host: &Host, disk: &DiskPaths, image: &Path, others: &[&Path]) {
    works(&mut host.connect(disk), 7);
    assert_eq!(host.show(disk).unwrap().disk.image.as_deref(), image.to_str());
    let stamp = |image: &Path| std::fs::read(image).unwrap().get(4096).copied();
    assert_eq!(stamp(image), Some(7));
    for other in others {
        assert_ne!(stamp(other), Some(7), "{}", other.display());
    }
}

fn wait_for_tries(host: &Host, disk: &DiskPaths, tries: u64) {
    wait_until("tries", || {
        host.disks().iter().any(|listed| listed.disk == host::id(disk) && listed.starts >= tries)
    });
}

#[test]
fn a_disk_whose_image_failed_is_attached_anew_with_another_one() {
    let mut host = Host::new(1);
    host.start();
    let (first, second) = (host.image("first.img"), host.make_image("second.img", MIB));
    let disk = host.attach(1, 0, &aio(&first));
    host.wait_for_phase(&disk, PhaseName::Failed);
    // The directory is replaced in one step, as a daemon that looks late sees it.
    let disk = host.attach(1, 0, &aio(&second));
    is_served(&host, &disk, &second, &[]);
    // The second disk had a guest, and failed in the next daemon.
    host.stop();
    std::fs::remove_file(&second).unwrap();
    host.start();
    host.wait_for_phase(&disk, PhaseName::Failed);
    let third = host.make_image("third.img", MIB);
    let disk = host.attach(1, 0, &aio(&third));
    is_served(&host, &disk, &third, &[]);
}

#[test]
fn a_disk_that_is_attached_anew_while_its_image_is_opened_gets_its_own() {
    let mut host = Host::new(1);
    let (first, second) = (host.make_image("a.img", MIB), host.make_image("b.img", MIB));
    let held = File::open(&first).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    host.start();
    let disk = host.attach(1, 0, &aio(&first));
    wait_for_tries(&host, &disk, 1);
    let state = host.paths().states().join("vbd-1-51712.json");
    wait_until("a look at the first", || state.exists());
    let disk = host.attach(1, 0, &aio(&second));
    drop(held);
    is_served(&host, &disk, &second, &[&first]);
}

#[test]
fn a_disk_that_is_gone_when_its_image_is_open_is_not_waited_for() {
    let mut host = Host::new(1);
    let image = host.make_image("a.img", MIB);
    let held = File::open(&image).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    host.start();
    let disk = host.attach(1, 0, &aio(&image));
    let state = host.paths().states().join("vbd-1-51712.json");
    wait_until("a look at it", || state.exists());
    host.machine().remove_disk(&disk).unwrap();
    drop(held);
    host.wait_for_no_disks();
}

#[test]
fn what_an_older_disk_has_left_is_gone_before_anything_is_said_of_the_next() {
    let mut host = Host::new(1);
    let (first, second) = (host.make_image("a.img", MIB), host.image("b.img"));
    for params in [aio(&second), "aio:".to_owned()] {
        host.start();
        let disk = host.attach(1, 0, &aio(&first));
        drop(host.connect(&disk));
        host.stop();
        let latch = host.paths().run.join("vbd-1-51712/flush-failed");
        std::fs::write(&latch, "").unwrap();
        // The end is missed, and the next attachment cannot be served at first.
        let disk = host.attach_with(1, 0, &params, &[("script", "block-ferrite")]);
        host.start();
        host.wait_for_state(&disk, 2);
        assert!(!latch.exists());
        host.stop();
        host.start();
        let phase = if params == "aio:" { PhaseName::Empty } else { PhaseName::Failed };
        host.wait_for_phase(&disk, phase);
        if phase == PhaseName::Failed {
            host.make_image("b.img", MIB);
            host.store().write(&format!("{}/hotplug-status", disk.backend), b"connected").unwrap();
            is_served(&host, &disk, &second, &[&first]);
        }
        host.stop();
        host.machine().remove_disk(&disk).unwrap();
        host.start();
        host.wait_for_no_disks();
        host.stop();
    }
}

#[test]
fn nothing_is_said_of_a_disk_while_an_older_ones_traces_cannot_be_removed() {
    let mut host = Host::new(1);
    let run_dir = host.paths().run.join("vbd-1-51712");
    std::fs::create_dir_all(&run_dir).unwrap();
    let held = File::open(&run_dir).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    host.start();
    let params = aio(&host.make_image("a.img", MIB));
    let disk = host.attach_with(1, 0, &params, &[("script", "block-ferrite")]);
    let failed = host.wait_for_phase(&disk, PhaseName::Failed);
    assert!(failed.why.unwrap().contains("older disk"));
    std::thread::sleep(host::A_WHILE);
    assert_eq!(host.backend_state(&disk), 1);
    drop(held);
    host.wait_for_state(&disk, 2);
    host.wait_for_phase(&disk, PhaseName::Served);
}
