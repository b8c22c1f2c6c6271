//! Remains of detached disks (threats.md T22): none, in whatever way their guests and backends ended. State that a
//! successor needs stays.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ferrite_loopback::front::{FrontOptions, Frontend, RingWord};
use ferrite_serve::blkif::lifecycle::{Outcome, STOPPED, TABLE, report_failure, sweep};
use ferrite_serve::counters::{Counters, FOLDER, stats_file};
use ferrite_testkit::proc::descriptors;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, scale};
use rustix::fs::{FlockOperation, flock};

const KIND: &str = "backend/vbd3";

fn plan() -> Plan {
    Plan { bytes: 1 << 20, pool_bytes: 4 << 20, ..Plan::default() }
}

fn works(front: &mut Frontend) {
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

/// Serialises the tests: they count the open files of this process.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// The names of all remains: files in memory, counters, and errors in the store.
fn leftovers(rig: &Rig) -> BTreeSet<String> {
    let mut store = rig.machine.store().unwrap();
    let errors = store.list(&format!("error/{KIND}")).unwrap_or_default();
    let files = names(rig.dir.path()).into_iter().filter(|name| name != FOLDER);
    let counters = names(&rig.dir.path().join(FOLDER)).into_iter();
    let counters = counters.map(|name| format!("counters of {name}"));
    files.chain(counters).chain(errors.into_iter().map(|name| format!("error {name}"))).collect()
}

fn has_error(rig: &Rig) -> bool {
    let path = format!("error/{KIND}/{}", rig.domid);
    rig.machine.store().unwrap().read(&path).unwrap().is_some()
}

/// The identity of the disk's file of counters.
fn counters_of(rig: &Rig) -> u64 {
    std::fs::metadata(stats_file(rig.run_dir())).unwrap().ino()
}

fn sweep_all(rig: &Rig) {
    sweep(&mut rig.machine.store().unwrap(), rig.dir.path(), KIND).unwrap();
}

/// This holds also for a disk that was just attached.
#[test]
fn there_is_a_table_while_a_guest_is_connected() {
    let _alone = alone();
    let mut rig = Rig::new(plan());
    let table = rig.run_dir().join(TABLE);
    let mut front = rig.connect(&FrontOptions::default());
    assert!(table.exists());
    works(&mut front);
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    // The program writes this when the image is complete.
    let stopped = rig.run_dir().join(STOPPED);
    std::fs::write(&stopped, "").unwrap();
    rig.start();
    works(&mut front);
    assert!(table.exists() && !stopped.exists());
    rig.machine.unplug(&rig.disk.clone()).unwrap();
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert!(leftovers(&rig).iter().all(|name| !name.starts_with("vbd-")));
}

#[test]
fn a_guest_that_is_started_again_and_again_leaves_nothing_whatever_it_does() {
    let _alone = alone();
    let mut rig = Rig::without_backend(plan());
    let mut after_first = 0;
    for round in 0..60 * scale() {
        rig.start();
        let mut front = rig.frontend();
        match round % 4 {
            0 => front.connect(&FrontOptions::default(), PATIENCE).unwrap(),
            1 => {
                front.wait_for_backend(&[2], PATIENCE).unwrap();
                front.read_features().unwrap();
                front
                    .offer_edited(&FrontOptions::default(), |keys| keys.set("event-channel", "no"))
                    .unwrap();
                front.wait_for_backend(&[5], PATIENCE).unwrap();
                assert!(has_error(&rig));
            }
            2 => {
                front.connect(&FrontOptions::default(), PATIENCE).unwrap();
                works(&mut front);
                let ring = front.queues[0].ring();
                ring.store(RingWord::ReqProd, front.queues[0].req_prod().wrapping_add(1 << 20));
                front.queues[0].notify().unwrap();
                while !has_error(&rig) {
                    std::thread::yield_now();
                }
            }
            _ => front.wait_for_backend(&[2], PATIENCE).map(drop).unwrap(),
        }
        drop(front);
        rig.reboot();
        assert_eq!(leftovers(&rig), BTreeSet::from(["disk.img".to_owned()]), "round {round}");
        if round < 4 {
            // The first run of each kind may load code that stays loaded.
            after_first = descriptors();
        }
        // The store's end of a connection is closed a moment later.
        let end = Instant::now() + PATIENCE;
        while descriptors() > after_first {
            assert!(Instant::now() < end, "round {round}: {} descriptors", descriptors());
            std::thread::yield_now();
        }
    }
    rig.start();
}

#[test]
fn what_a_killed_backend_has_left_stays_for_its_successor_and_goes_with_its_guest_or_disk() {
    let _alone = alone();
    for destroyed in [true, false] {
        let mut rig = Rig::new(plan());
        let mut front = rig.connect(&FrontOptions::default());
        works(&mut front);
        // A stop leaves as much as a kill.
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        report_failure(&mut rig.machine.store().unwrap(), &rig.disk.backend, "why not").unwrap();
        sweep_all(&rig);
        let counters = stats_file(rig.run_dir());
        assert!(rig.run_dir().join("inflight").exists() && has_error(&rig) && counters.exists());
        rig.start();
        works(&mut front);
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);

        report_failure(&mut rig.machine.store().unwrap(), &rig.disk.backend, "why not").unwrap();
        let disk = rig.disk.clone();
        match destroyed {
            true => rig.machine.destroy(rig.domid).unwrap(),
            false => rig.machine.remove_disk(&disk).unwrap(),
        }
        // A process that is ending still uses the folder.
        let holder = File::open(rig.run_dir()).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        sweep_all(&rig);
        assert!(rig.run_dir().join("inflight").exists() && !has_error(&rig));
        assert!(counters.exists());
        drop(holder);
        sweep_all(&rig);
        assert!(!rig.run_dir().exists() && !counters.exists());
        // Counters without a run directory are removed, too. Files that belong to no disk stay.
        let other = counters.with_file_name("theirs");
        [&counters, &other].into_iter().for_each(|path| std::fs::write(path, "").unwrap());
        sweep_all(&rig);
        assert!(!counters.exists() && other.exists());
    }
}

#[test]
fn a_disk_that_another_process_serves_waits_until_that_has_ended() {
    let _alone = alone();
    let mut rig = Rig::without_backend(plan());
    std::fs::create_dir(rig.run_dir()).unwrap();
    let holder = File::open(rig.run_dir()).unwrap();
    flock(&holder, FlockOperation::LockExclusive).unwrap();
    rig.start();
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    front.offer(&FrontOptions::default()).unwrap();
    let error = rig.wait_for_error();
    assert!(error.contains("another process serves"), "{error}");
    drop(holder);
    front.finish(PATIENCE).unwrap();
    works(&mut front);

    // A takeover waits in the same way, and the requests in flight wait with it.
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    let holder = File::open(rig.run_dir()).unwrap();
    flock(&holder, FlockOperation::LockExclusive).unwrap();
    rig.start();
    assert!(rig.wait_for_error().contains("another process serves"));
    assert_eq!(front.backend_state().unwrap(), 4);
    drop(holder);
    works(&mut front);
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_disk_inherits_nothing_from_one_of_its_name_whose_backend_is_not_dead_yet() {
    let _alone = alone();
    let mut rig = Rig::without_backend(plan());
    std::fs::create_dir(rig.run_dir()).unwrap();
    // A flush of the predecessor had failed.
    let mut latch = [0; 64];
    latch[0] = 1;
    std::fs::write(rig.run_dir().join("flush-failed"), latch).unwrap();
    std::fs::write(rig.run_dir().join("trace-7"), "").unwrap();
    let counters = Counters::default();
    counters.keep_in(rig.run_dir(), "older");
    let older = counters_of(&rig);
    let holder = File::open(rig.run_dir()).unwrap();
    flock(&holder, FlockOperation::LockExclusive).unwrap();
    rig.start();
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    front.offer(&FrontOptions::default()).unwrap();
    assert!(rig.wait_for_error().contains("another process serves"));
    drop(holder);
    front.finish(PATIENCE).unwrap();
    works(&mut front);
    assert!(!rig.run_dir().join("trace-7").exists());
    assert_ne!(counters_of(&rig), older);
    // The state that it leaves belongs to its successor.
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    rig.start();
    works(&mut front);
    front.close(PATIENCE).unwrap();
}
