//! Growth of the store: its contents stay, the new space can be used, and an end in between leaves one size or the
//! other.

use super::checking::DEEP;
use super::passes::{nothing_is_lost_and_nothing_left, read_one, write_new};
use super::*;
use crate::check::{Findings, check};
use crate::layout::{Layout, NoGrowth};
use crate::superblock::{Superblock, Unusable};

/// One more band, with 14 segments.
const LARGER: u64 = BYTES + (6 << 20);

impl Process {
    fn grow(&mut self, bytes: u64) -> io::Result<()> {
        let length = self.live.layout().blocks * BLOCK_BYTES as u64;
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.grow(port, bytes, Some(length)).await })?
    }

    /// Writes new content to `v0` from this block on until there is no room. Gives the block behind the last.
    fn fill(&mut self, from: u64) -> u64 {
        let mut block = from;
        loop {
            match write_new(self, "v0", block, 8, 7000 + block) {
                Ok(()) => block += 8,
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::StorageFull, "{e}");
                    return block;
                }
            }
        }
    }

    fn has_filled(&mut self, blocks: Range<u64>) {
        for block in blocks {
            assert_eq!(read_one(self, "v0", block), 7000 + block);
        }
    }

    fn resize_v0(&mut self) {
        let volume = self.volume("v0");
        self.operate(Operation::Resize(volume, 1 << 20)).unwrap();
    }
}

/// The check of a store that is not in use, of everything.
fn is_in_order(machine: &Machine) {
    assert_eq!(findings(machine), Findings::default());
}

fn findings(machine: &Machine) -> Findings {
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let bytes = machine.path.metadata().unwrap().len();
    let checked = async { check(&port, bytes, DEEP, &|_, _| true).await };
    reactor.block_on(checked).unwrap().unwrap().findings
}

fn next(machine: &Machine, process: Process) -> Process {
    drop(process);
    machine.world.kill_process().unwrap();
    Process::of(machine).unwrap()
}

#[test]
fn a_full_store_that_grows_has_room_again_and_all_that_it_had() {
    let (machine, mut process) = with_a_volume();
    process.resize_v0();
    let mut end = process.fill(0);
    // The second time begins another band, and all depths get deeper.
    for bytes in [LARGER, LARGER + (300 << 20)] {
        let before = process.live.info();
        process.grow(bytes).unwrap();
        let after = process.live.info();
        assert_eq!(after.store_bytes, bytes);
        assert!(after.free_bytes > before.free_bytes + (3 << 20), "{after:?}");
        assert_eq!(machine.path.metadata().unwrap().len(), bytes);
        let first = process.live.layout().first_place(process.live.layout().first_segments);
        assert!(first > BYTES / 4096);
        let more = if bytes == LARGER { process.fill(end) } else { end + 4000 };
        for block in (end..more).step_by(8).filter(|_| bytes > LARGER) {
            write_new(&mut process, "v0", block, 8, 7000 + block).unwrap();
        }
        assert!(more > end + 600, "{end}..{more}");
        end = more;
        // Some by a journal that is replayed.
        process = next(&machine, process);
        process.has_filled(0..end);
        is_in_order(&machine);
    }
    // Passes and compaction look at all of it.
    process.live.begin_compaction();
    let Process { live, port, reactor } = &mut process;
    let steps = async { while live.compact(port, &Pace::unbounded()).await.unwrap().is_some() {} };
    reactor.block_on(steps).unwrap();
    nothing_is_lost_and_nothing_left(&mut process);
    process.has_filled(0..end);
    let stats = async { process.live.stats(&process.port).await };
    let stats = process.reactor.block_on(stats).unwrap().unwrap();
    assert_eq!(stats.distinct_bytes, end << 12);
    process = next(&machine, process);
    process.has_filled(0..end);
    is_in_order(&machine);
}

#[test]
fn sizes_that_cannot_be_are_refused_and_nothing_changes() {
    let (machine, mut process) = with_a_volume();
    for bytes in [0, BYTES - 1, BYTES, BYTES + 4096, 1 << 60] {
        let e = process.grow(bytes).unwrap_err();
        assert!(e.get_ref().is_some_and(|e| e.is::<NoGrowth>()), "{e}");
    }
    assert_eq!(process.live.info().store_bytes, BYTES);
    assert_eq!(machine.path.metadata().unwrap().len(), BYTES);
}

/// Writes beside the growth, of blocks from 100 on, and the growth.
fn grow_beside_writes(process: &mut Process) -> (io::Result<()>, Vec<u64>) {
    let volume = process.volume("v0");
    let Process { live, port, reactor } = process;
    let (live, port) = (&*live, &*port);
    let mut tasks: Vec<Task> = vec![Box::pin(live.grow(port, LARGER, Some(BYTES)))];
    for i in 0..12 {
        tasks.push(Box::pin(async move {
            let span = port.memory().span(SCRATCH_BYTES + i * BLOCK_BYTES, BLOCK_BYTES);
            for round in 0..4u64 {
                let block = 100 + i as u64 * 4 + round;
                let content = (7000 + block).to_le_bytes().repeat(BLOCK_BYTES / 8);
                port.memory().copy_in(span, &content);
                live.write(port, volume, block << 12, span).await?;
            }
            Ok(())
        }));
    }
    let Ok(mut done) = reactor.block_on(all(tasks)) else {
        return (Err(io::ErrorKind::Other.into()), Vec::new());
    };
    let writes = done.split_off(1).into_iter().zip(0..);
    let whole = writes.filter(|(done, _)| done.is_ok());
    let blocks = whole.flat_map(|(_, i)| 100 + i * 4..104 + i * 4).collect();
    (done.remove(0), blocks)
}

#[test]
fn after_an_end_at_any_write_the_store_has_its_old_size_or_the_new_one() {
    for power in [true, false] {
        let (mut old, mut new) = (0, 0);
        // Death loses nothing that was written, so fewer moments are enough.
        for stop in (1..).step_by(if is_night() { 1 } else { 13 - 6 * usize::from(power) }) {
            let machine = Story::new(stop, None).machine;
            let mut process = Process::of(&machine).unwrap();
            process.resize_v0();
            write_new(&mut process, "v0", 0, 40, 7000).unwrap();
            // So what is written beside takes new places as soon as there are some.
            let end = process.fill(200);
            process.flush().unwrap();
            machine.world.stop_at(Some(machine.world.step() + stop));
            let (done, written) = grow_beside_writes(&mut process);
            let is_stopped = machine.world.stopped();
            assert!(done.is_ok() || is_stopped, "{done:?}");
            drop(process);
            machine.world.stop_at(None);
            match power {
                true => machine.world.cut_power().unwrap(),
                false => machine.world.kill_process().unwrap(),
            }
            // Space pages of a checkpoint that was cut may be torn.
            let findings = findings(&machine);
            assert_eq!(findings.counts.damage, 0, "{findings:?}");
            let mut process = Process::of(&machine).unwrap();
            let bytes = process.live.info().store_bytes;
            assert!(bytes == LARGER || bytes == BYTES && done.is_err(), "{bytes}, {done:?}");
            *(if bytes == LARGER { &mut new } else { &mut old }) += 1;
            process.has_filled(0..40);
            process.has_filled(200..end);
            for block in written {
                let found = read_one(&mut process, "v0", block);
                assert!(found == 7000 + block || power && found == 0, "{block}: {found}");
            }
            if bytes == BYTES {
                let length = machine.path.metadata().unwrap().len();
                let Process { live, port, reactor } = &mut process;
                let grow = async { live.grow(port, LARGER, Some(length)).await };
                reactor.block_on(grow).unwrap().unwrap();
            }
            write_new(&mut process, "v0", end, 200, 7000 + end).unwrap();
            process = next(&machine, process);
            process.has_filled(200..end + 200);
            drop(process);
            machine.world.kill_process().unwrap();
            is_in_order(&machine);
            if !is_stopped {
                break;
            }
        }
        assert!(old > 1 && new > 0, "{old} old, {new} new");
    }
}

#[test]
fn a_growth_whose_checkpoint_has_failed_is_made_by_the_next_one() {
    // Of the first home of the superblock.
    let fault = Fault { on: On::Write, range: 0..8192, per_mille: 1000, errno: 5, times: 1 };
    for cut in [true, false] {
        let (machine, mut process) = with_a_volume();
        machine.world.set_faults(vec![fault.clone()]);
        process.grow(LARGER).unwrap_err();
        assert_eq!(process.live.info().store_bytes, BYTES);
        write_new(&mut process, "v0", 0, 8, 7000).unwrap();
        if cut {
            process.flush().unwrap();
            drop(process);
            machine.world.cut_power().unwrap();
            process = Process::of(&machine).unwrap();
        } else {
            // A pass begins with it.
            process.gc().unwrap();
            assert_eq!(process.live.info().store_bytes, LARGER);
            process.resize_v0();
            process.fill(8);
        }
        process.has_filled(0..8);
        drop(process);
        machine.world.kill_process().unwrap();
        is_in_order(&machine);
    }
}

#[test]
fn what_cannot_be_written_of_the_new_part_leaves_the_store_and_its_file_as_they_were() {
    let (machine, mut process) = with_a_volume();
    // Of the band's space pages.
    let range = BYTES..BYTES + (1 << 20);
    let fault = Fault { on: On::Write, range, per_mille: 1000, errno: 28, times: 1 };
    machine.world.set_faults(vec![fault]);
    let e = process.grow(LARGER).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::StorageFull);
    assert_eq!(machine.path.metadata().unwrap().len(), BYTES);
    assert_eq!(process.live.info().store_bytes, BYTES);
    process.grow(LARGER).unwrap();
    process = next(&machine, process);
    assert_eq!(process.live.info().store_bytes, LARGER);
}

#[test]
fn the_second_home_is_found_by_the_last_block_if_the_first_is_lost() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 8, 7000).unwrap();
    process.grow(LARGER).unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    let file = std::fs::File::options().write(true).open(&machine.path).unwrap();
    file.write_all_at(&[7; 2 * BLOCK_BYTES], 0).unwrap();
    machine.world.changed_outside(&file).unwrap();
    let mut process = Process::of(&machine).unwrap();
    assert_eq!(process.live.info().store_bytes, LARGER);
    process.has_filled(0..8);
    drop(process);
    machine.world.kill_process().unwrap();
    is_in_order(&machine);
    // A file that was cut off says so.
    file.set_len(LARGER - 4096).unwrap();
    machine.world.changed_outside(&file).unwrap();
    let Err(e) = Process::of(&machine) else { panic!("it is opened") };
    let why = e.get_ref().and_then(|e| e.downcast_ref::<Unusable>()).unwrap();
    assert_eq!(*why, Unusable::CutOff { store_bytes: LARGER, bytes: LARGER - 4096 });
}

/// A program that knows no features opens only a store that has not grown.
#[test]
fn a_store_that_has_not_grown_is_as_before_and_one_that_has_says_so_by_a_feature() {
    let made = Layout::of(BYTES).unwrap();
    let (machine, mut process) = with_a_volume();
    let features = |at: u64| {
        let mut page = vec![0; BLOCK_BYTES];
        let file = std::fs::File::open(&machine.path).unwrap();
        file.read_exact_at(&mut page, at).unwrap();
        let superblock = Superblock::decode(&page, 0, at > 0).unwrap();
        (superblock.layout, u64::from_le_bytes(page[32..40].try_into().unwrap()) & 1)
    };
    assert_eq!([features(0), features(4096)], [(made, 0); 2]);
    process.grow(LARGER).unwrap();
    let grown = process.live.layout();
    let found = BTreeSet::from([features(0).1, features(4096).1]);
    assert_eq!(found, BTreeSet::from([0, 1]), "the other one is of before");
    let checkpoint = async { process.live.checkpoint(&process.port).await };
    process.reactor.block_on(checkpoint).unwrap().unwrap();
    assert_eq!([features(0), features(4096)], [(grown, 1); 2]);
}

#[test]
fn ballast_that_is_spent_behind_a_growth_cuts_nothing_off() {
    let (machine, mut process) = with_a_volume();
    process.grow(LARGER).unwrap();
    process.resize_v0();
    write_new(&mut process, "v0", 0, 40, 7000).unwrap();
    // The next superblock finds no space once.
    let fault = Fault { on: On::Write, range: 0..8192, per_mille: 1000, errno: 28, times: 1 };
    machine.world.set_faults(vec![fault]);
    let checkpoint = async { process.live.checkpoint(&process.port).await };
    process.reactor.block_on(checkpoint).unwrap().unwrap();
    assert_eq!(machine.path.metadata().unwrap().len(), LARGER);
    process = next(&machine, process);
    process.has_filled(0..40);
    drop(process);
    is_in_order(&machine);
}

#[test]
fn the_first_time_in_an_older_store_comes_behind_a_superblock_that_says_so() {
    let (machine, mut process) = with_a_volume();
    let has_times = || {
        [0, 4096].map(|at| {
            let mut page = vec![0; BLOCK_BYTES];
            std::fs::File::open(&machine.path).unwrap().read_exact_at(&mut page, at).unwrap();
            Superblock::decode(&page, 0, at > 0).unwrap().has_times
        })
    };
    // As an older program leaves it.
    for _ in 0..2 {
        {
            let core = &mut *process.live.shared.core();
            (core.has_times, core.wants_times) = (false, false);
        }
        let checkpoint = async { process.live.checkpoint(&process.port).await };
        process.reactor.block_on(checkpoint).unwrap().unwrap();
    }
    assert_eq!(has_times(), [false; 2]);
    process = next(&machine, process);
    let volume = process.volume("v0");
    for (name, made) in [("s1", true), ("s2", true)] {
        process.operate(Operation::Snapshot(Name::new(name).unwrap(), volume)).unwrap();
        assert!(has_times().contains(&true), "{name}");
        drop(process);
        machine.world.cut_power().unwrap();
        process = Process::of(&machine).unwrap();
        let found = process.live.list().into_iter().find(|volume| volume.name == name).unwrap();
        assert_eq!(found.created_unix_s.is_some(), made);
    }
}
