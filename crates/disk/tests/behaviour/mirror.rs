//! A disk whose writes go to a second one, too: the content of the second one, and the map.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{
    Disk, MirrorFile, MirrorOptions, MirrorState, MirrorStatus, OpenOptions, ServiceEngine, Session,
};
use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_image_tools::NewImage;
use ferrite_testkit::bytes::first_difference;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::wait_until;
use tempfile::TempDir;

use crate::common::dir_on_disk;
use crate::model::{name, tools};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BYTES: u64 = 12 * MIB + 4096;
pub(crate) const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The two disks of a mirror, and its map.
pub(crate) struct Pair {
    pub(crate) dir: TempDir,
    pub(crate) source: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) faults: Faults,
}

impl Pair {
    pub(crate) fn new(source: &str, target: &str) -> Pair {
        let dir = dir_on_disk();
        let path = |name: &str, extension| dir.path().join(name).with_extension(extension);
        let (source, target) = (path("source", source), path("target", target));
        let new = NewImage { bytes: Some(BYTES), ..NewImage::default() };
        for path in [&source, &target] {
            tools(|tools| tools.create(&name(path), &new)).unwrap();
        }
        let pair = Pair { dir, source, target, faults: Faults::none() };
        MirrorFile::create(&pair.map(), BYTES).unwrap();
        pair
    }

    pub(crate) fn map(&self) -> PathBuf {
        self.dir.path().join("map")
    }

    pub(crate) fn open(&self) -> Arc<Disk> {
        let options = OpenOptions::default();
        let disk = Disk::open_image(&name(&self.source), &options).unwrap();
        let mirror = MirrorOptions { target: name(&self.target), map: self.map() };
        Arc::new(disk.mirrored(&mirror, &options).unwrap())
    }

    pub(crate) fn session(&self, disk: &Arc<Disk>) -> Session {
        Session::new(disk.clone(), |arena| self.faults.open(arena, 64)).unwrap()
    }

    /// Begins the copy.
    pub(crate) fn copies(&self, disk: &Disk) {
        let faults = self.faults.clone();
        let engine: ServiceEngine = Arc::new(move |arena, entries| faults.open(arena, entries));
        disk.begin_service(&engine).unwrap();
    }

    pub(crate) fn status(&self) -> MirrorStatus {
        MirrorFile::open(&self.map()).unwrap().status().unwrap()
    }

    pub(crate) fn wait_for(&self, state: MirrorState) {
        wait_until("a state of the mirror", || self.status().state == state);
    }

    pub(crate) fn is_complete(&self) -> bool {
        MirrorFile::open(&self.map()).unwrap().is_complete().unwrap()
    }

    /// A mirror that was complete and is opened again, without a copy.
    pub(crate) fn in_step(source: &str, target: &str) -> (Pair, Arc<Disk>) {
        let pair = Pair::new(source, target);
        let disk = pair.open();
        pair.copies(&disk);
        pair.wait_for(MirrorState::InStep);
        pair.session(&disk).close().unwrap();
        drop(disk);
        assert!(pair.is_complete());
        let disk = pair.open();
        assert!(!pair.is_complete(), "it is open");
        assert_eq!((pair.status().state, pair.status().left), (MirrorState::InStep, 0));
        (pair, disk)
    }

    /// Copies what the target lacks, and closes both.
    #[track_caller]
    pub(crate) fn ends_equal(&self, disk: Arc<Disk>) {
        self.copies(&disk);
        self.wait_for(MirrorState::InStep);
        self.session(&disk).close().unwrap();
        drop(disk);
        assert!(self.is_complete(), "{:?}", self.status());
        self.are_equal();
    }

    #[track_caller]
    pub(crate) fn are_equal(&self) {
        let [a, b] = [&self.source, &self.target].map(|path| {
            let disk = Disk::open_image(&name(path), &OpenOptions::default()).unwrap();
            let mut session = self.session(&Arc::new(disk));
            let mut all = vec![0; BYTES as usize];
            for (i, part) in all.chunks_mut(MIB as usize).enumerate() {
                session.read(i as u64 * MIB, part).unwrap();
            }
            all
        });
        assert_eq!(first_difference(&a, &b), None, "the first byte that differs");
    }

    /// Changes the target as a death of its host would: unflushed writes are lost.
    pub(crate) fn spoil_target(&self, at: u64) {
        let file = File::options().write(true).open(&self.target).unwrap();
        file.write_all_at(&[0xee; 4096], at).unwrap();
    }
}

/// Writes, zeroes and discards at random.
fn load(session: &mut Session, seed: u64, count: u64) {
    let mut random = SplitMix64::new(seed);
    for i in 0..count {
        let len = (random.below(24) + 1) * 4096;
        let offset = random.below((BYTES - len) / 4096 + 1) * 4096;
        match random.below(8) {
            0 => session.discard(offset, len).unwrap(),
            1 => session.write_zeroes(offset, len).unwrap(),
            2 => session.flush().unwrap(),
            _ => session.write(offset, &vec![(seed * 97 + i) as u8; len as usize]).unwrap(),
        }
    }
}

#[test]
fn the_target_has_all_that_two_queues_write_while_it_is_copied() {
    for (source, target) in [("img", "qcow2"), ("qcow2", "img"), ("vhd", "vhd")] {
        let pair = Pair::new(source, target);
        let disk = pair.open();
        load(&mut pair.session(&disk), 1, 100);
        assert_eq!(pair.status().left, 13, "nothing is copied yet");
        pair.copies(&disk);
        std::thread::scope(|scope| {
            for seed in [2, 3] {
                let (pair, disk) = (&pair, &disk);
                scope.spawn(move || load(&mut pair.session(disk), seed, 400));
            }
        });
        pair.ends_equal(disk);
    }
}

#[test]
fn a_region_that_was_not_flushed_is_copied_again_after_a_death() {
    let (pair, disk) = Pair::in_step("img", "img");
    let mut session = pair.session(&disk);
    session.write(3 * MIB, &[1; 4096]).unwrap();
    session.flush().unwrap();
    session.write(5 * MIB, &[2; 4096]).unwrap();
    drop(session);
    drop(disk);
    assert!(!pair.is_complete());
    pair.spoil_target(5 * MIB);
    let disk = pair.open();
    // The flush has cleared the bit of the other one.
    assert_eq!(pair.status().left, 1);
    pair.ends_equal(disk);
}

#[test]
fn a_write_that_ends_during_a_flush_is_not_covered_by_it() {
    let (pair, disk) = Pair::in_step("img", "img");
    let mut session = pair.session(&disk);
    let target = session.port().files[1];
    session.write(MIB, &[1; 4096]).unwrap();
    // The flush of the target waits while another queue writes to the same region.
    pair.faults.once(Ops::among(&[Kind::Sync]).on(target), Fault::Held(None));
    let held = pair.faults.hold();
    pair.faults.forget();
    std::thread::scope(|scope| {
        scope.spawn(|| pair.session(&disk).flush().unwrap());
        pair.faults.wait_for(Kind::Sync, 2);
        session.write(MIB + 8192, &[2; 4096]).unwrap();
        drop(held);
    });
    drop(session);
    drop(disk);
    let disk = pair.open();
    assert_eq!(pair.status().left, 1);
    pair.ends_equal(disk);
}

/// Write and flush end in any order.
#[test]
fn a_write_that_was_under_way_when_a_flush_began_is_not_covered_by_it() {
    for _ in 0..20 {
        let (pair, disk) = Pair::in_step("img", "img");
        let target = pair.session(&disk).port().files[1];
        let waits = |kind| Ops::among(&[kind]).on(target).meet(Fault::Held(None)).once();
        pair.faults.set([waits(Kind::Write), waits(Kind::Sync)]);
        let held = pair.faults.hold();
        pair.faults.forget();
        std::thread::scope(|scope| {
            scope.spawn(|| pair.session(&disk).write(MIB, &[1; 4096]).unwrap());
            pair.faults.wait_for(Kind::Write, 1);
            scope.spawn(|| pair.session(&disk).flush().unwrap());
            pair.faults.wait_for(Kind::Sync, 1);
            drop(held);
        });
        drop(disk);
        let disk = pair.open();
        assert_eq!(pair.status().left, 1);
        pair.ends_equal(disk);
    }
}

#[test]
fn a_write_that_the_target_refuses_is_answered_and_copied_later() {
    for errno in [EIO, ENOSPC] {
        let (pair, disk) = Pair::in_step("img", "img");
        let mut session = pair.session(&disk);
        let target = session.port().files[1];
        pair.faults.once(Ops::among(&[Kind::Write]).on(target), Fault::Errno(errno));
        session.write(2 * MIB, &[1; 4096]).unwrap();
        let status = pair.status();
        assert_eq!((status.state, status.left), (MirrorState::Behind, 1));
        assert!(status.why.starts_with("cannot write to the target: "), "{}", status.why);
        // It gets nothing more until it works again.
        session.write(7 * MIB, &[2; 4096]).unwrap();
        session.flush().unwrap();
        assert_eq!(pair.status().left, 2);
        drop(session);
        pair.ends_equal(disk);
    }
}

#[test]
fn what_a_failed_flush_of_the_target_may_have_lost_is_copied_again() {
    let (pair, disk) = Pair::in_step("img", "img");
    let mut session = pair.session(&disk);
    let target = session.port().files[1];
    for i in 0..3 {
        session.write(i * 2 * MIB, &[1; 4096]).unwrap();
    }
    pair.faults.once(Ops::among(&[Kind::Sync]).on(target), Fault::Errno(EIO));
    // The guest's disk is well.
    session.flush().unwrap();
    assert_eq!((pair.status().state, pair.status().left), (MirrorState::Behind, 3));
    session.close().unwrap();
    drop(disk);
    assert!(!pair.is_complete());
    pair.spoil_target(2 * MIB);
    let disk = pair.open();
    assert_eq!(pair.status().left, 3);
    pair.ends_equal(disk);
}

#[test]
fn a_failed_write_of_the_source_fails_and_its_region_is_copied_again() {
    let (pair, disk) = Pair::in_step("img", "img");
    let mut session = pair.session(&disk);
    let source = session.port().files[0];
    pair.faults.once(Ops::among(&[Kind::Write]).on(source), Fault::Errno(EIO));
    session.write(2 * MIB, &[1; 4096]).unwrap_err();
    assert_eq!(pair.status().left, 1);
    drop(session);
    pair.ends_equal(disk);
}

#[test]
fn writes_to_the_same_place_have_one_order_on_both_disks() {
    let (pair, disk) = Pair::in_step("img", "img");
    let mut session = pair.session(&disk);
    let source = session.port().files[0];
    let late = Fault::Late(Duration::from_millis(100));
    pair.faults.once(Ops::among(&[Kind::Write]).on(source), late);
    pair.faults.forget();
    std::thread::scope(|scope| {
        scope.spawn(|| pair.session(&disk).write(4096, &[1; 8192]).unwrap());
        // It goes to the target at once, and to the source later.
        pair.faults.wait_for(Kind::Write, 2);
        session.write(8192, &[2; 8192]).unwrap();
    });
    drop(session);
    pair.ends_equal(disk);
}

#[test]
fn a_target_that_cannot_be_opened_leaves_the_guest_its_disk() {
    let pair = Pair::new("img", "img");
    std::fs::remove_file(&pair.target).unwrap();
    let disk = pair.open();
    assert_eq!(pair.status().state, MirrorState::NoTarget);
    assert!(pair.status().why.contains("target.img"), "{}", pair.status().why);
    let mut session = pair.session(&disk);
    session.write(MIB, &[1; 4096]).unwrap();
    pair.copies(&disk);
    wait_until("a request", || pair.status().reopen);
    session.close().unwrap();
    drop(disk);
    assert!(!pair.is_complete());
    // A map of another disk is no map, and without one the disk is not opened.
    std::fs::write(pair.map(), vec![0; 8192]).unwrap();
    let options = OpenOptions::default();
    let disk = Disk::open_image(&name(&pair.source), &options).unwrap();
    let mirror = MirrorOptions { target: name(&pair.target), map: pair.map() };
    let e = disk.mirrored(&mirror, &options).unwrap_err();
    assert!(e.to_string().contains("no file of a mirror"), "{e}");
}
