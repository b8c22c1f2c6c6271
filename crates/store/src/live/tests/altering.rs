//! Another size or another name for a volume: the data that stay, the range that reads as zeros, and the state after an
//! end in between.

use super::super::leaf::Leaf;
use super::checking::DEEP;
use super::passes::{nothing_is_lost_and_nothing_left, read_one, write_new};
use super::*;
use crate::check::Findings;

/// The least sizes of volumes whose trees have one level more, and the largest size.
const SIZES: [u64; 5] = [9, 513, (512 << 8) + 1, (512 << 16) + 1, (1 << 40) - 1];

impl Process {
    fn resize(&mut self, name: &str, blocks: u64) -> io::Result<u32> {
        let volume = self.volume(name);
        self.operate(Operation::Resize(volume, blocks))
    }

    fn rename(&mut self, name: &str, new: &str) -> io::Result<u32> {
        let volume = self.volume(name);
        self.operate(Operation::Rename(volume, Name::new(new).unwrap()))
    }

    fn blocks(&self, name: &str) -> Option<u64> {
        self.live.volume_called(name).map(|found| found.blocks)
    }

    fn is_in_order(&mut self) {
        let Process { live, port, reactor } = self;
        let check = async { live.check_store(port, DEEP, &Pace::unbounded(), &|_, _| true).await };
        let outcome = reactor.block_on(check).unwrap().unwrap();
        assert_eq!(outcome.findings, Findings::default());
    }
}

/// The next process, behind the death of this one.
fn next(machine: &Machine, process: Process) -> Process {
    drop(process);
    machine.world.kill_process().unwrap();
    Process::of(machine).unwrap()
}

/// The last block of a volume of each size has a content of its own.
fn have_what_is_below(process: &mut Process, name: &str, end: u64) {
    for size in SIZES {
        let found =
            (size <= process.blocks(name).unwrap()).then(|| read_one(process, name, size - 1));
        assert!(
            found.is_none_or(|word| word == if size <= end { size } else { 0 }),
            "{name}, {size}"
        );
    }
}

#[test]
fn a_volume_grows_and_shrinks_over_all_depths_of_its_tree_and_its_snapshots_do_not() {
    let (machine, mut process) = with_a_volume();
    let name = |name: &str| Name::new(name).unwrap();
    let big = process.operate(Operation::Create(name("big"), 1, 0)).unwrap();
    for size in SIZES {
        assert_eq!(process.resize("big", size).unwrap(), big);
        assert_eq!(read_one(&mut process, "big", size - 1), 0);
        write_new(&mut process, "big", size - 1, 1, size).unwrap();
        have_what_is_below(&mut process, "big", size);
        process.operate(Operation::Snapshot(name(&format!("s{size}")), big)).unwrap();
    }
    process = next(&machine, process);
    process.is_in_order();
    for size in SIZES.into_iter().rev() {
        process.resize("big", size).unwrap();
        assert_eq!(process.blocks("big"), Some(size));
        have_what_is_below(&mut process, "big", size);
        let largest = SIZES[SIZES.len() - 1];
        process.resize("big", largest).unwrap();
        have_what_is_below(&mut process, "big", size);
        process.is_in_order();
        process = next(&machine, process);
        have_what_is_below(&mut process, "big", size);
    }
    for size in SIZES {
        let snapshot = format!("s{size}");
        assert_eq!(process.blocks(&snapshot), Some(size));
        have_what_is_below(&mut process, &snapshot, size);
        let snapshot = process.volume(&snapshot);
        process.operate(Operation::Delete(snapshot)).unwrap();
    }
    process.resize("big", 9).unwrap();
    nothing_is_lost_and_nothing_left(&mut process);
    assert_eq!(read_one(&mut process, "big", 8), 9);
}

#[test]
fn what_was_cut_off_reads_as_zeros_and_what_was_not_stays() {
    let (machine, mut process) = with_a_volume();
    // The end is within a leaf, at the end of one, and in the first one.
    for blocks in [700, 512, 40, 1] {
        for at in [0, 30, 500, 600, 695, 1990] {
            write_new(&mut process, "v0", at, 10, 1000 + at).unwrap();
        }
        // Readers find the leaves without the lock.
        assert_eq!(read_one(&mut process, "v0", 1995), 2995);
        process.resize("v0", blocks).unwrap();
        assert_eq!(process.blocks("v0"), Some(blocks));
        // A reader that knew the volume when it was larger finds nothing behind its end.
        let volume = process.volume("v0");
        let leaf = Leaf::of_block(volume, 3 * 512 + 30);
        let Process { live, port, reactor } = &mut process;
        let words = async { live.leaves.words::<1>(port, leaf).await };
        assert_eq!(reactor.block_on(words).unwrap().unwrap(), [0]);
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        let write = async { live.write(port, volume, blocks << 12, span).await };
        assert_eq!(
            reactor.block_on(write).unwrap().unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        process.resize("v0", BLOCKS).unwrap();
        for at in [0, 30, 500, 600, 695, 1990] {
            for block in at..at + 10 {
                let expected = if block < blocks { 1000 + block } else { 0 };
                assert_eq!(read_one(&mut process, "v0", block), expected, "{blocks}: {block}");
            }
        }
        process.is_in_order();
        process = next(&machine, process);
        assert_eq!(read_one(&mut process, "v0", 1995), 0);
    }
    nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn a_volume_that_is_renamed_is_the_same_one_and_what_was_made_of_it_says_so() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 3, 1, 77).unwrap();
    let number = process.volume("v0");
    let snapshot = Operation::Snapshot(Name::new("s").unwrap(), number);
    process.operate(snapshot).unwrap();
    assert_eq!(process.rename("v0", "new").unwrap(), number);
    process.rename("s", "s2").unwrap();
    // The old name is free again.
    process.operate(Operation::Create(Name::new("v0").unwrap(), 5, 0)).unwrap();
    for _ in 0..2 {
        let listed = process.live.list();
        let names: Vec<_> = listed.iter().map(|v| (v.name.as_str(), v.origin.as_deref())).collect();
        assert_eq!(names, [("new", None), ("s2", Some("new")), ("v0", None), ("v1", None)]);
        assert_eq!(process.volume("new"), number);
        assert_eq!((read_one(&mut process, "new", 3), read_one(&mut process, "s2", 3)), (77, 77));
        process = next(&machine, process);
    }
}

#[test]
fn a_size_or_name_that_cannot_be_is_refused_and_nothing_changes() {
    let (_machine, mut process) = with_a_volume();
    let volume = process.volume("v0");
    let name = |name: &str| Name::new(name).unwrap();
    let snapshot = process.operate(Operation::Snapshot(name("s"), volume)).unwrap();
    let before = (process.live.list(), process.live.info());
    for (operation, why) in [
        (Operation::Resize(snapshot, 10), VolumeError::IsSnapshot),
        (Operation::Resize(volume, 0), VolumeError::BadSize),
        (Operation::Resize(volume, 1 << 40), VolumeError::BadSize),
        (Operation::Resize(99, 10), VolumeError::Missing),
        (Operation::Rename(99, name("x")), VolumeError::Missing),
        (Operation::Rename(volume, name("v1")), VolumeError::Exists),
        (Operation::Rename(volume, name("v0")), VolumeError::Exists),
    ] {
        let e = process.operate(operation.clone()).unwrap_err();
        let found = e.get_ref().and_then(|e| e.downcast_ref::<VolumeError>());
        assert_eq!(found, Some(&why), "{operation:?}");
    }
    assert!((process.live.list(), process.live.info()) == before);
}

/// The changes of `v0`: another name, or another size.
const DEEDS: [(&str, u64); 3] = [("v0", 700), ("v0", (512 << 8) + 1), ("new", BLOCKS)];
/// Blocks of `v0` that have content: that of their number and 1000.
const WRITTEN: [u64; 7] = [0, 39, 40, 511, 699, 700, 1999];

fn alter(process: &mut Process, (name, blocks): (&str, u64)) -> io::Result<u32> {
    if name == "v0" { process.resize(name, blocks) } else { process.rename("v0", name) }
}

#[test]
fn after_a_power_cut_at_any_write_a_volume_is_the_old_one_or_the_new_one() {
    for deed in DEEDS {
        let (mut old, mut new) = (0, 0);
        for stop in 1.. {
            let machine = Story::new(stop, None).machine;
            let mut process = Process::of(&machine).unwrap();
            for block in WRITTEN {
                write_new(&mut process, "v0", block, 1, 1000 + block).unwrap();
            }
            process.flush().unwrap();
            machine.world.stop_at(Some(machine.world.step() + stop));
            let done = alter(&mut process, deed);
            let is_stopped = machine.world.stopped();
            assert!(done.is_ok() || is_stopped, "{done:?}");
            drop(process);
            machine.world.stop_at(None);
            machine.world.cut_power().unwrap();
            let mut process = Process::of(&machine).unwrap();
            let is_new = process.blocks(deed.0) == Some(deed.1);
            assert!(is_new || process.blocks("v0") == Some(BLOCKS) && done.is_err());
            let (name, blocks) = if is_new { deed } else { ("v0", BLOCKS) };
            let others = ["v0", "new"].into_iter().filter(|other| *other != name);
            assert!(others.into_iter().all(|other| process.live.volume(other).is_none()));
            *(if is_new { &mut new } else { &mut old }) += 1;
            process.is_in_order();
            process.resize(name, BLOCKS.max(blocks)).unwrap();
            for block in WRITTEN {
                let expected = if block < blocks { 1000 + block } else { 0 };
                assert_eq!(read_one(&mut process, name, block), expected, "{deed:?}: {block}");
            }
            if !is_stopped {
                break;
            }
        }
        assert!(old > 5 && new > 1, "{deed:?}: {old} old, {new} new");
    }
}

#[test]
fn behind_a_change_whose_checkpoint_failed_no_record_is_written_before_it_is_made() {
    // Of the first home of the superblock.
    let fault = |times| Fault { on: On::Write, range: 0..8192, per_mille: 1000, errno: 5, times };
    for times in [1, u64::MAX] {
        for deed in [("v0", (512 << 8) + 1), ("new", BLOCKS)] {
            let (machine, mut process) = with_a_volume();
            machine.world.set_faults(vec![fault(times)]);
            alter(&mut process, deed).unwrap_err();
            // Both records would be nonsense for a process that finds the old volume.
            let written = match deed.0 {
                "v0" => write_new(&mut process, "v0", 512 << 8, 1, 77),
                _ => {
                    let create = Operation::Create(Name::new("v0").unwrap(), 5, 0);
                    process.operate(create).map(drop)
                }
            };
            assert_eq!(written.is_ok(), times == 1, "{written:?}");
            let other = write_new(&mut process, "v1", 3, 1, 78);
            assert_eq!(other.is_ok(), times == 1, "{other:?}");
            if times == 1 {
                process.flush().unwrap();
            }
            drop(process);
            machine.world.set_faults(Vec::new());
            machine.world.cut_power().unwrap();
            let mut process = Process::of(&machine).unwrap();
            // A write that has failed may be on the medium all the same.
            let is_new = process.blocks(deed.0) == Some(deed.1);
            let is_old = process.blocks("v0") == Some(BLOCKS);
            assert!(is_new || is_old && times > 1, "{deed:?}, {times}");
            if times == 1 && deed.0 == "v0" {
                assert_eq!(read_one(&mut process, "v0", 512 << 8), 77);
            }
            process.is_in_order();
        }
    }
}

#[test]
fn a_full_store_renames_volumes_and_shrinks_them_which_makes_room() {
    let (machine, mut process) = with_a_volume();
    let mut full = 0;
    while full < BLOCKS * 4 {
        let (name, block) = (if full < BLOCKS { "v0" } else { "v1" }, full % BLOCKS);
        match write_new(&mut process, name, block, 8, 1 << 20 | full << 4) {
            Ok(()) => full += 8,
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::StorageFull);
                break;
            }
        }
    }
    assert!(full < BLOCKS * 4);
    process.rename("v1", "new").unwrap();
    process.resize("v0", 100).unwrap();
    process = next(&machine, process);
    assert_eq!((process.blocks("new"), process.blocks("v0")), (Some(BLOCKS), Some(100)));
    process.gc().unwrap();
    process.gc().unwrap();
    // That has made room.
    process.resize("v0", BLOCKS).unwrap();
    write_new(&mut process, "v0", 1000, 8, 1 << 30).unwrap();
    process.is_in_order();
}
