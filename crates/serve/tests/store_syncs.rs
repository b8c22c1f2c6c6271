//! Disks of one store: a sync that one of them asks for is that of all (processes.md 10, rule 11).

use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, Session};
use ferrite_io::clock::SystemClock;
use ferrite_io::shm::Shm;
use ferrite_serve::path::device::Device;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::stores;
use rustix::io::Errno;

fn device(store: &Path, volume: &str) -> Arc<Device> {
    let disk = Disk::open(&format!("store:{}#{volume}", store.display()), &stores::options());
    Arc::new(Device::new(disk.unwrap(), SystemClock::shared()))
}

#[test]
fn a_failed_sync_is_remembered_for_every_disk_of_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("s");
    stores::create(&store, stores::SMALLEST, &[("a", 16), ("b", 16), ("c", 16)]);
    let latch = |name: &str| dir.path().join(name);
    let is_set = |name: &str| Shm::open(latch(name)).unwrap().load_u32(0) == 1;
    let (asks, silent, early) = (device(&store, "a"), device(&store, "b"), device(&store, "c"));
    silent.remember_in(&latch("b")).unwrap();
    let faults = Faults::none();
    let disk = asks.disk().unwrap();
    let mut session = Session::new(disk, |arena| faults.open(arena, 32)).unwrap();
    session.write(0, &[7; 4096]).unwrap();
    session.flush().unwrap();
    assert!(!silent.flush_has_failed() && !is_set("b"));
    faults.once(Kind::Sync, Fault::Errno(Errno::IO.raw_os_error()));
    session.flush().unwrap_err();
    // None of them has asked for anything since.
    assert!(asks.flush_has_failed() && silent.flush_has_failed() && early.flush_has_failed());
    assert!(is_set("b"));
    // One that has no file yet writes it down when it gets one.
    early.remember_in(&latch("c")).unwrap();
    assert!(is_set("c"));
    // The next process knows it, although its sync succeeds.
    drop((session, asks, silent, early));
    let next = device(&store, "b");
    assert!(!next.flush_has_failed());
    next.remember_in(&latch("b")).unwrap();
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
