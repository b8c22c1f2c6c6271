//! A failed sync is recorded for the next process, whichever request caused it (blkif.md 2, rule 3). It counts for all
//! disks of a store (processes.md 10, rule 11).

use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, OpenOptions, Session};
use ferrite_host::clock::SystemClock;
use ferrite_host::directory::HostDirectory;
use ferrite_host::shm::Shm;
use ferrite_image_tools::NewImage;
use ferrite_serve::path::device::Device;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::{images, stores};
use rustix::io::Errno;

fn device(store: &Path, volume: &str) -> Arc<Device> {
    let disk = Disk::open(&format!("store:{}#{volume}", store.display()), &stores::options());
    Arc::new(Device::new(disk.unwrap(), SystemClock::shared()))
}

fn image(path: &Path) -> Arc<Device> {
    let name = images::name(path);
    let new = NewImage { bytes: Some(1 << 20), ..NewImage::default() };
    images::anywhere(&HostDirectory, |tools| tools.create(&name, &new)).unwrap();
    let disk = Disk::open_image(&name, &OpenOptions::default()).unwrap();
    Arc::new(Device::new(disk, SystemClock::shared()))
}

#[test]
fn a_failed_sync_is_remembered_for_every_disk_of_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("s");
    stores::create(&store, stores::SMALLEST, &[("a", 16), ("b", 16), ("c", 16)]);
    let latch = |name: &str| dir.path().join(name);
    let is_set = |name: &str| Shm::open(latch(name)).unwrap().load_u32(0) == 1;
    let (asks, silent, early) = (device(&store, "a"), device(&store, "b"), device(&store, "c"));
    silent.record_failed_flushes_in(&latch("b")).unwrap();
    let faults = Faults::none();
    let disk = asks.disk().unwrap();
    let mut session = Session::new(disk, |arena| faults.open(arena, 32)).unwrap();
    session.write(0, &[7; 4096]).unwrap();
    session.flush().unwrap();
    assert!(!silent.flush_has_failed() && !is_set("b"));
    faults.once(Kind::Sync, Fault::Errno(Errno::IO.raw_os_error()));
    session.flush().unwrap_err();
    // None of them has sent a request since.
    assert!(asks.flush_has_failed() && silent.flush_has_failed() && early.flush_has_failed());
    assert!(is_set("b"));
    // A device without a file writes the record when it gets one.
    early.record_failed_flushes_in(&latch("c")).unwrap();
    assert!(is_set("c"));
    // The next process reads it, although its own sync succeeds.
    drop((session, asks, silent, early));
    let next = device(&store, "b");
    assert!(!next.flush_has_failed());
    next.record_failed_flushes_in(&latch("b")).unwrap();
    assert!(next.flush_has_failed());
}

#[test]
fn a_disk_that_joins_a_store_behind_a_failed_sync_knows_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("s");
    stores::create(&store, stores::SMALLEST, &[("a", 16), ("b", 16)]);
    let asks = device(&store, "a");
    let faults = Faults::none();
    let mut session = Session::new(asks.disk().unwrap(), |arena| faults.open(arena, 32)).unwrap();
    faults.once(Kind::Sync, Fault::Errno(Errno::IO.raw_os_error()));
    session.flush().unwrap_err();
    assert!(device(&store, "b").flush_has_failed());
}

#[test]
fn a_failed_sync_that_no_guest_has_asked_for_is_remembered_before_anybody_is_told() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.raw", "a.vhd", "a.qcow2"] {
        let latch = dir.path().join(format!("{name}.latch"));
        let device = image(&dir.path().join(name));
        device.record_failed_flushes_in(&latch).unwrap();
        let faults = Faults::none();
        let mut session =
            Session::new(device.disk().unwrap(), |arena| faults.open(arena, 32)).unwrap();
        session.write(0, &[7; 4096]).unwrap();
        session.flush().unwrap();
        assert!(!device.flush_has_failed(), "{name}");
        session.write(0, &[8; 4096]).unwrap();
        faults.once(Kind::Sync, Fault::Errno(Errno::IO.raw_os_error()));
        // Not through the device: no request of its own has failed.
        session.flush().unwrap_err();
        assert!(device.flush_has_failed(), "{name}");
        assert_eq!(Shm::open(&latch).unwrap().load_u32(0), 1, "{name}");
    }
}

/// The first flush syncs the parents, and the leaf is committed nevertheless.
#[test]
fn a_failed_sync_of_a_parent_is_remembered_before_anybody_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let leaf = images::make(dir.path(), "chain.qcow2", 1 << 20);
    let disk = Disk::open(&leaf, &OpenOptions::default()).unwrap();
    let device = Arc::new(Device::new(disk, SystemClock::shared()));
    let faults = Faults::none();
    let mut session = Session::new(device.disk().unwrap(), |arena| faults.open(arena, 32)).unwrap();
    faults.once(Kind::Sync, Fault::Errno(Errno::IO.raw_os_error()));
    session.flush().unwrap_err();
    assert!(device.flush_has_failed());
}
