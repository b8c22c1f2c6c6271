//! The map of a mirror that survives a power cut: when its bits are set and cleared, and what is copied by it.

use std::sync::Arc;

use ferrite_disk::{Disk, ErrorKind, MirrorFile, MirrorState, OpenOptions, Session};
use ferrite_image_tools::MapChange;
use ferrite_io::engine::Op;
use ferrite_testkit::faulty::{Fault, Kind, Ops};
use ferrite_testkit::wait_until;

use crate::mirror::{BYTES, EIO, MIB, Pair};
use crate::model::{name, tools};

const NAME: &str = "mirror-0123456789abcdef";
/// The regions of the map: each of 4 MiB, and the last a short one.
const REGIONS: u64 = 4;
const NONE: [u64; 0] = [];

impl Pair {
    /// Two new disks, and maps that say that the target lacks everything.
    fn kept(source: &str, target: &str) -> Pair {
        let pair = Pair::new(source, target);
        let change = MapChange::Mirror(NAME.to_owned());
        tools(|tools| tools.change_maps(&name(&pair.source), &change)).unwrap();
        pair.name_map();
        pair
    }

    fn name_map(&self) {
        MirrorFile::open(&self.map()).unwrap().set_name(Some(NAME)).unwrap();
    }

    /// The map in memory is lost. Another mirror begins with the map that is left.
    fn power_cut(&self) {
        std::fs::remove_file(self.map()).unwrap();
        MirrorFile::create(&self.map(), BYTES).unwrap();
        self.name_map();
    }

    /// The regions that the durable map names.
    fn named(&self) -> Vec<u64> {
        let options = OpenOptions { read_only: true, unlocked: true, ..OpenOptions::default() };
        let disk = Disk::open_image(&name(&self.source), &options).unwrap();
        let seen = disk.maps(None).unwrap().unwrap();
        assert_eq!(seen.void, None);
        let map = seen.maps.iter().find(|map| map.name == NAME).unwrap();
        let is_named = |region: &u64| {
            map.changed
                .iter()
                .any(|part| part.start < (region + 1) * 4 * MIB && part.end > region * 4 * MIB)
        };
        (0..REGIONS).filter(is_named).collect()
    }

    /// A mirror that has all, and was closed and opened again.
    fn kept_in_step(source: &str, target: &str) -> (Pair, Arc<Disk>) {
        let pair = Pair::kept(source, target);
        let disk = pair.open();
        assert!(pair.status().kept);
        assert_eq!(pair.status().left, 13);
        pair.copies(&disk);
        pair.wait_for(MirrorState::InStep);
        pair.session(&disk).close().unwrap();
        drop(disk);
        assert!(pair.is_complete());
        assert_eq!(pair.named(), NONE);
        let disk = pair.open();
        (pair, disk)
    }
}

/// Does what the thread of the copy does, until it has no more to do.
fn work(session: &mut Session, disk: &Disk) {
    let (port, zeros) = (session.port().clone(), session.zero_page());
    let Disk::Mirror(mirror) = disk else { panic!("a mirror") };
    // Nothing is copied: the target has all.
    let all = async {
        for _ in 0..4 {
            mirror.work_once(&port, zeros, &[], true).await;
        }
    };
    session.run(all).unwrap();
}

#[test]
fn after_a_power_cut_only_regions_that_were_written_since_their_flush_are_copied() {
    for (source, target) in [("img", "img"), ("qcow2", "vhd")] {
        let (pair, disk) = Pair::kept_in_step(source, target);
        let mut session = pair.session(&disk);
        session.write(5 * MIB, &[1; 4096]).unwrap();
        session.flush().unwrap();
        session.write_zeroes(12 * MIB, 4096).unwrap();
        drop(session);
        drop(disk);
        pair.power_cut();
        assert_eq!(pair.named(), [1, 3]);
        if target == "img" {
            pair.spoil_target(6 * MIB);
        }
        let disk = pair.open();
        assert_eq!(pair.status().left, 5);
        pair.ends_equal(disk);
        assert_eq!(pair.named(), NONE);
    }
}

#[test]
fn a_bit_is_durable_before_data_reach_either_disk_and_is_set_once() {
    let (pair, disk) = Pair::kept_in_step("img", "img");
    let mut session = pair.session(&disk);
    let files: Vec<_> = session.port().files.to_vec();
    pair.faults.list();
    session.write(5 * MIB, &[1; 4096]).unwrap();
    let ops = pair.faults.take_list();
    let sync = |op: &Op| matches!(op, Op::Sync { file, .. } if *file == files[1]);
    let synced = ops.iter().position(sync).expect("a sync of the map");
    for file in [files[0], files[2]] {
        let wrote = |op: &Op| matches!(op, Op::Write { file: to, .. } if *to == file);
        assert!(ops.iter().position(wrote).unwrap() > synced, "{ops:?}");
    }
    // Later writes to the region wait for nothing.
    for i in 0..100 {
        session.write(4 * MIB + i * 8192, &[2; 4096]).unwrap();
    }
    let is_extra = |op: &&Op| !matches!(op, Op::Write { file, .. } if *file != files[1]);
    assert_eq!(pair.faults.take_list().iter().filter(is_extra).count(), 0);
}

#[test]
fn bits_are_cleared_while_the_disk_is_in_use_and_not_before_the_source_is_durable() {
    let (pair, disk) = Pair::kept_in_step("img", "img");
    let mut session = pair.session(&disk);
    session.write(MIB, &[1; 4096]).unwrap();
    let source = session.port().files[0];
    pair.faults.set([Ops::among(&[Kind::Sync]).on(source).fail(EIO)]);
    work(&mut session, &disk);
    // The target has it.
    assert_eq!((pair.status().state, pair.status().left), (MirrorState::InStep, 0));
    assert_eq!(pair.named(), [0]);
    drop(session);
    drop(disk);

    let (pair, disk) = Pair::kept_in_step("img", "img");
    let mut session = pair.session(&disk);
    session.write(5 * MIB, &[1; 4096]).unwrap();
    session.write(MIB, &[1; 4096]).unwrap();
    assert_eq!(pair.named(), [0, 1]);
    pair.copies(&disk);
    wait_until("bits that are cleared", || pair.named() == NONE);
    // It is set again by the next write.
    session.write(5 * MIB, &[2; 4096]).unwrap();
    assert_eq!(pair.named(), [1]);
    drop(session);
    pair.ends_equal(disk);
}

#[test]
fn a_write_that_the_target_refuses_is_in_the_durable_map_when_it_is_answered() {
    let (pair, disk) = Pair::kept_in_step("img", "img");
    let mut session = pair.session(&disk);
    let target = session.port().files[2];
    pair.faults.once(Ops::among(&[Kind::Write]).on(target), Fault::Errno(EIO));
    session.write(2 * MIB, &[1; 4096]).unwrap();
    session.write(9 * MIB, &[1; 4096]).unwrap();
    drop(session);
    drop(disk);
    pair.power_cut();
    assert_eq!(pair.named(), [0, 2]);
    pair.ends_equal(pair.open());
}

#[test]
fn writes_of_a_disk_without_its_mirror_are_in_the_map_of_the_next_one() {
    let (pair, disk) = Pair::kept_in_step("img", "img");
    pair.session(&disk).close().unwrap();
    drop(disk);
    let disk = Disk::open_image(&name(&pair.source), &OpenOptions::default()).unwrap();
    let mut session = pair.session(&Arc::new(disk));
    session.write(9 * MIB, &[3; 4096]).unwrap();
    session.close().unwrap();
    pair.power_cut();
    let disk = pair.open();
    assert_eq!(pair.status().left, 4);
    pair.ends_equal(disk);
}

#[test]
fn a_target_that_is_another_file_now_is_not_taken_for_the_old_one() {
    let (pair, disk) = Pair::kept_in_step("img", "img");
    pair.session(&disk).close().unwrap();
    drop(disk);
    let other = pair.dir.path().join("other");
    std::fs::copy(&pair.target, &other).unwrap();
    std::fs::rename(&other, &pair.target).unwrap();
    let disk = pair.open();
    assert_eq!(pair.status().state, MirrorState::NoTarget);
    assert!(pair.status().why.contains("another file"), "{}", pair.status().why);
    let mut session = pair.session(&disk);
    session.write(MIB, &[1; 4096]).unwrap();
    session.close().unwrap();
    assert!(!pair.is_complete());
}

#[test]
fn a_user_begins_and_clears_no_map_of_a_mirror_and_may_end_one() {
    let pair = Pair::kept("img", "img");
    let change = |change: MapChange| tools(|tools| tools.change_maps(&name(&pair.source), &change));
    for wrong in [MapChange::Clear(NAME.to_owned()), MapChange::Begin("mirror-1".to_owned())] {
        let e = change(wrong).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Usage);
        assert!(e.why().contains("mirror-"), "{e}");
    }
    assert_eq!(pair.named(), [0, 1, 2, 3]);
    change(MapChange::End(NAME.to_owned())).unwrap();
    // Without its map the mirror works, and says so.
    let disk = pair.open();
    assert!(!pair.status().kept);
    pair.ends_equal(disk);
}
