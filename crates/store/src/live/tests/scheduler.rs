//! The store's background work: what it does for users, and that it does not delay them.

use super::passes::{nothing_is_lost_and_nothing_left, read_one, write_new};
use super::*;
use crate::live::BackgroundTask;
use crate::pace::Pace;
use crate::page::{Packing, Whereabouts};

impl Process {
    /// All that there is to do, and how many steps that takes.
    pub(super) fn run_background_task(&mut self) -> io::Result<usize> {
        let Process { live, port, reactor } = self;
        let pace = Pace::unbounded();
        let all = async {
            let mut steps = 0;
            while live.run_background_task(port, &pace).await? == BackgroundTask::Ran {
                steps += 1;
            }
            Ok(steps)
        };
        reactor.block_on(all)?
    }

    fn numbers_end(&self) -> u64 {
        self.live.shared.core().numbers_end
    }
}

#[test]
fn what_was_written_before_a_death_is_found_again_once_the_index_is_loaded() {
    let (machine, mut process) = with_a_volume();
    for block in (0..640).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    // No volume has these contents any more: the index has no room for all.
    process
        .write(&[write("v0", 64 * PER_BLOCK..576 * PER_BLOCK, 0)], false)
        .unwrap()
        .remove(0)
        .unwrap();
    process.gc().unwrap();
    process.flush().unwrap();
    let kept = [0, 16, 32, 48, 576, 592, 608, 624];
    let again = |is_loaded: bool, to: u64| {
        machine.world.kill_process().unwrap();
        let mut process = Process::of(&machine).unwrap();
        let end = process.numbers_end();
        if is_loaded {
            assert_eq!(
                process.run_background_task().unwrap() as u64,
                end.div_ceil(8 * 256),
                "steps"
            );
            let work = process.live.work();
            assert_eq!((work.index_done, work.index_all, work.index_loaded), (3, 3, 128));
        }
        for block in kept {
            write_new(&mut process, "v0", to + block, 16, 1 + block).unwrap();
        }
        let found = 128 - (process.numbers_end() - end);
        (process, found)
    };
    drop(process);
    let (process, found) = again(true, 640);
    assert_eq!(found, 128);
    drop(process);
    let (mut process, found) = again(false, 1280);
    assert!(found < 16, "{found} were found by an index that has nothing but what is new");
    nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn a_pass_begins_by_itself_before_a_write_has_to_wait_for_room() {
    let (_machine, mut process) = with_a_volume();
    let (mut value, mut waited) = (1, 0);
    for round in 0..4 {
        for block in (0..BLOCKS).step_by(16) {
            let begun = process.live.collector.passes().count();
            write_new(&mut process, "v0", block, 16, value).unwrap();
            waited += process.live.collector.passes().count() - begun;
            value += 16;
            process.run_background_task().unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
    }
    let passes = process.live.collector.passes().count();
    assert!(waited == 0 && passes > 3, "{passes} passes, and {waited} that a write had to make");
    assert!(passes < 40, "{passes} passes for what is written three times");
    nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn a_store_with_room_or_without_garbage_is_left_alone() {
    let (_machine, mut process) = with_a_volume();
    process.run_background_task().unwrap();
    write_new(&mut process, "v0", 0, 16, 1).unwrap();
    assert_eq!(process.run_background_task().unwrap(), 0);
    for block in (0..BLOCKS).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    process.run_background_task().unwrap();
    let passes = process.live.collector.passes().count();
    assert_eq!(
        (process.run_background_task().unwrap(), process.live.collector.passes().count()),
        (0, passes)
    );
}

#[test]
fn content_that_is_there_twice_is_joined_by_a_pass_and_stays_while_either_is_in_use() {
    let (machine, mut process) = with_a_volume();
    for block in (0..96).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    process.flush().unwrap();
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.checkpoint(port).await }).unwrap().unwrap();
    // The next process knows nothing of them.
    drop(process);
    machine.world.kill_process().unwrap();
    let mut process = Process::of(&machine).unwrap();
    for block in (0..96).step_by(16) {
        write_new(&mut process, "v0", 1000 + block, 16, 1 + block).unwrap();
    }
    let free = process.live.shared.core().space.free();
    process.run_background_task().unwrap();
    let joined = process.gc().unwrap().joined;
    assert!((90..=96).contains(&joined), "{joined}: the index has no room for a few");
    process.gc().unwrap();
    assert!(process.live.shared.core().space.free() >= free + joined, "their places are free");
    // The lower ones are in use by the others only.
    process.write(&[write("v0", 0..48 * PER_BLOCK, 0)], false).unwrap().remove(0).unwrap();
    for end in [After::Nothing, After::Death, After::Cut] {
        nothing_is_lost_and_nothing_left(&mut process);
        for block in [0, 47, 48, 95] {
            assert_eq!(read_one(&mut process, "v0", 1000 + block), 1 + block);
        }
        assert_eq!(read_one(&mut process, "v0", 47), 0);
        assert_eq!(read_one(&mut process, "v0", 48), 49);
        process.flush().unwrap();
        drop(process);
        match end {
            After::Cut => machine.world.cut_power().unwrap(),
            _ => machine.world.kill_process().unwrap(),
        }
        process = Process::of(&machine).unwrap();
    }
    // Found again by the lower one.
    process.run_background_task().unwrap();
    let end = process.numbers_end();
    write_new(&mut process, "v0", 500, 16, 1).unwrap();
    assert_eq!(process.numbers_end(), end);
    process.write(&[write("v0", 0..BLOCKS * PER_BLOCK, 0)], false).unwrap().remove(0).unwrap();
    nothing_is_lost_and_nothing_left(&mut process);
    assert_eq!(process.gc().unwrap().contents, 0);
}

#[test]
fn what_the_index_takes_for_equal_is_compared_before_it_is_joined() {
    let (_machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 16, 1).unwrap();
    write_new(&mut process, "v0", 16, 16, 17).unwrap();
    let Process { live, port, reactor } = &mut process;
    // Hints that are wrong: each of the higher numbers is said to be what a lower one is.
    for number in 17..33 {
        let hash = async { live.leaves.hash_of(port, number).await };
        let hash = reactor.block_on(hash).unwrap().unwrap();
        live.shared.index.remember(&hash, number - 16);
    }
    assert_eq!(process.gc().unwrap().joined, 0);
    for block in 0..32 {
        assert_eq!(read_one(&mut process, "v0", block), 1 + block);
    }
}

#[test]
fn scrubbing_names_bad_blocks_by_all_who_have_them_and_writers_do_not_get_them() {
    let (machine, mut process) = with_a_volume();
    for block in (0..64).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    let v0 = process.volume("v0");
    process.operate(Operation::Snapshot(Name::new("s").unwrap(), v0)).unwrap();
    write_new(&mut process, "v0", 1500, 16, 1).unwrap();
    write_new(&mut process, "v0", 3, 1, 1 << 40).unwrap();
    process.flush().unwrap();
    let scrub = |process: &mut Process| {
        process.live.begin_scrub();
        process.run_background_task().unwrap();
        (process.live.scrub_info(), process.live.scrub_findings())
    };
    let (info, found) = scrub(&mut process);
    assert_eq!((info.bad_contents, info.rounds, info.running), (0, 1, false));
    assert!(info.read_bytes == 65 * BLOCK_BYTES as u64 && found.listed.is_empty());
    let file = std::fs::File::options().read(true).write(true).open(&machine.path).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    for value in [4u64, 5, 30] {
        let content = value.to_le_bytes().repeat(BLOCK_BYTES / 8);
        let at = bytes.chunks(BLOCK_BYTES).position(|block| block == content).unwrap();
        file.write_all_at(&[1], (at * BLOCK_BYTES + 77) as u64).unwrap();
    }
    machine.world.changed_outside(&file).unwrap();
    let (info, found) = scrub(&mut process);
    assert_eq!((info.bad_contents, info.rounds, found.counts.damage), (3, 2, 5));
    let mut named: Vec<(String, u64, u64)> = found
        .listed
        .iter()
        .map(|f| {
            let blocks = |bytes: Option<u64>| bytes.unwrap() / BLOCK_BYTES as u64;
            (f.volume.clone().unwrap(), blocks(f.offset_bytes), blocks(f.length_bytes))
        })
        .collect();
    named.sort();
    let is = |name: &str, at, count| (name.to_owned(), at, count);
    let expected =
        [is("s", 3, 2), is("s", 29, 1), is("v0", 4, 1), is("v0", 29, 1), is("v0", 1503, 2)];
    assert_eq!(named, expected);
    // A guest that writes it once more has a good copy.
    write_new(&mut process, "v0", 4, 1, 5).unwrap();
    assert_eq!(read_one(&mut process, "v0", 4), 5);
    let is_bad = |process: &mut Process, block: u64| {
        let read = process.read("v0", block * PER_BLOCK..(block + 1) * PER_BLOCK);
        read.is_err_and(|e| e.kind() == io::ErrorKind::InvalidData)
    };
    assert!(is_bad(&mut process, 1504));
    // And so has one that writes it after the next opening.
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.close(port).await }).unwrap().unwrap();
    drop(process);
    let mut process = Process::of(&machine).unwrap();
    process.run_background_task().unwrap();
    write_new(&mut process, "v0", 29, 1, 30).unwrap();
    write_new(&mut process, "v0", 100, 1, 17).unwrap();
    assert!(read_one(&mut process, "v0", 29) == 30 && is_bad(&mut process, 1504));
    assert_eq!(process.numbers(100..101), process.numbers(16..17), "others are found");
}

#[test]
fn who_has_read_a_bad_block_gets_a_good_one_by_writing_it_again() {
    let (machine, mut process) = with_a_volume();
    write_new(&mut process, "v0", 0, 16, 1).unwrap();
    process.flush().unwrap();
    let number = process.numbers(3..4)[0];
    let Whereabouts::Plain { place, .. } = process.whereabouts(number) else { panic!() };
    let file = std::fs::File::options().read(true).write(true).open(&machine.path).unwrap();
    file.write_all_at(&[1], place * BLOCK_BYTES as u64 + 77).unwrap();
    machine.world.changed_outside(&file).unwrap();
    write_new(&mut process, "v0", 500, 1, 4).unwrap();
    assert_eq!(process.numbers(500..501), process.numbers(3..4), "the damage is not known yet");
    for block in [3, 500] {
        let read = process.read("v0", block * PER_BLOCK..(block + 1) * PER_BLOCK);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
        write_new(&mut process, "v0", block, 1, 4).unwrap();
        assert_eq!(read_one(&mut process, "v0", block), 4);
    }
}

impl Process {
    fn compact(&mut self) -> crate::live::CompactionInfo {
        self.live.begin_compaction();
        self.run_background_task().unwrap();
        self.live.work().compaction
    }

    fn set_packing(&mut self, packing: Option<Packing>) {
        let Process { live, port, reactor } = self;
        reactor.block_on(async { live.set_packing(port, packing).await }).unwrap().unwrap();
    }

    /// The numbers of blocks of `v0`, in their order.
    pub(super) fn numbers(&mut self, blocks: Range<u64>) -> Vec<u64> {
        let volume = self.volume("v0");
        let Process { live, port, reactor } = self;
        let mut numbers = Vec::new();
        for block in blocks {
            let words = async {
                live.leaves
                    .words::<1>(port, super::super::leaf::Leaf::of_block(volume, block))
                    .await
            };
            numbers.push(reactor.block_on(words).unwrap().unwrap()[0]);
        }
        numbers
    }

    /// How many of these blocks of `v0` do not follow the one before in the store.
    fn gaps(&mut self, blocks: Range<u64>) -> usize {
        let numbers = self.numbers(blocks);
        let place = |number: u64| match self.whereabouts(number) {
            Whereabouts::Plain { place, .. } => place,
            other => panic!("{number} is {other:?}"),
        };
        let places: Vec<u64> = numbers.into_iter().map(place).collect();
        places.windows(2).filter(|pair| pair[1] != pair[0] + 1).count()
    }
}

/// Blocks of `v0` that were written each for itself, far from those beside it.
fn write_scattered(process: &mut Process, count: u64) {
    for i in 0..count {
        let block = i * 7 % count;
        write_new(process, "v0", block, 1, 1 + block).unwrap();
    }
    // Something else is written now.
    for block in (1000..1160).step_by(16) {
        write_new(process, "v0", block, 16, 1 + block).unwrap();
    }
}

#[test]
fn compaction_puts_content_into_the_order_of_reading_once() {
    let (machine, mut process) = with_a_volume();
    write_scattered(&mut process, 240);
    assert!(process.gaps(0..240) > 200);
    let v0 = process.volume("v0");
    process.operate(Operation::Snapshot(Name::new("s").unwrap(), v0)).unwrap();
    let info = process.compact();
    assert_eq!((info.rounds, info.moved_bytes, info.packed_bytes), (1, 240 << 12, 0));
    assert!(process.gaps(0..240) < 4, "but for ends of segments");
    assert!(process.live.work().passes > 0, "what they have left comes free");
    // The rest of a pair that is nearly empty now.
    let moved = process.compact().moved_bytes;
    assert!(moved <= 280 << 12, "{moved}");
    assert_eq!(process.compact().moved_bytes, moved, "it ends");
    nothing_is_lost_and_nothing_left(&mut process);
    // One block that is written again does not move the others.
    write_new(&mut process, "v0", 40, 1, 1 << 40).unwrap();
    for block in (1000..1160).step_by(16) {
        write_new(&mut process, "v0", block, 16, 5000 + block).unwrap();
    }
    let again = process.compact().moved_bytes - moved;
    assert!(again <= 40 << 12, "{again}");
    process.flush().unwrap();
    drop(process);
    machine.world.cut_power().unwrap();
    let mut process = Process::of(&machine).unwrap();
    for block in (0..240).filter(|block| *block != 40) {
        assert_eq!(read_one(&mut process, "v0", block), 1 + block);
    }
    assert_eq!((read_one(&mut process, "v0", 40), read_one(&mut process, "s", 40)), (1 << 40, 41));
}

#[test]
fn compressed_content_takes_fewer_places_and_is_found_read_and_given_back_as_any_other() {
    for packing in [Packing::Lz4, Packing::Zstandard] {
        let (machine, mut process) = with_a_volume();
        process.set_packing(Some(packing));
        write_scattered(&mut process, 240);
        let free = process.live.shared.core().space.free();
        let info = process.compact();
        // Contents that guests write now are not touched.
        assert!(info.packed_bytes >= 240 << 12, "{info:?}");
        assert!(info.packed_to_bytes <= info.packed_bytes / 4, "{info:?}");
        process.gc().unwrap();
        assert!(process.live.shared.core().space.free() >= free + 180);
        nothing_is_lost_and_nothing_left(&mut process);
        let moved = process.compact().moved_bytes;
        assert_eq!(process.compact().moved_bytes, moved, "it ends");
        let end = process.numbers_end();
        write_new(&mut process, "v0", 1600, 16, 33).unwrap();
        assert!(
            process.numbers_end() <= end + 2,
            "it is found, but for what the index has forgotten"
        );
        // A part of a block, of which the rest is in a group.
        process.write(&[write("v0", 801..802, 9)], false).unwrap().remove(0).unwrap();
        assert_eq!(process.read("v0", 801..802).unwrap(), [9]);
        process.flush().unwrap();
        drop(process);
        machine.world.cut_power().unwrap();
        let mut process = Process::of(&machine).unwrap();
        assert_eq!(process.live.packing(), Some(packing));
        for block in (0..240).filter(|block| *block != 100) {
            assert_eq!(read_one(&mut process, "v0", block), 1 + block);
        }
        assert_eq!(read_one(&mut process, "v0", 1615), 48);
        let check = crate::check::How { contents: true, deep: true, ..Default::default() };
        let Process { live, port, reactor } = &mut process;
        reactor.block_on(async { live.close(port).await }).unwrap().unwrap();
        let checked = async { crate::check::check(port, BYTES, check, &|_, _| true).await };
        let outcome = reactor.block_on(checked).unwrap().unwrap();
        assert_eq!(outcome.findings.counts.damage, 0, "{:?}", outcome.findings.listed);
        let stats = outcome.stats.unwrap();
        assert!(stats.stored_bytes < stats.distinct_bytes, "{stats:?}");
        // All that was in a group goes with its last block.
        process.set_packing(None);
        process.write(&[write("v0", 0..BLOCKS * PER_BLOCK, 0)], false).unwrap().remove(0).unwrap();
        nothing_is_lost_and_nothing_left(&mut process);
    }
}

#[test]
fn a_damaged_group_is_an_error_of_its_blocks_and_never_data() {
    let (machine, mut process) = with_a_volume();
    process.set_packing(Some(Packing::Lz4));
    write_scattered(&mut process, 32);
    process.compact();
    process.flush().unwrap();
    let number = process.numbers(3..4)[0];
    let Whereabouts::Packed { place, .. } = process.whereabouts(number) else { panic!() };
    let file = std::fs::File::options().read(true).write(true).open(&machine.path).unwrap();
    let mut group = [0; BLOCK_BYTES];
    file.read_exact_at(&mut group, place * BLOCK_BYTES as u64).unwrap();
    // A part of its block 3 that is there uncompressed.
    let at = group.iter().position(|byte| *byte == 4).unwrap();
    let at = (at..BLOCK_BYTES).find(|at| group[*at] == 4 && group[at + 1] == 0).unwrap();
    file.write_all_at(&[99], place * BLOCK_BYTES as u64 + at as u64).unwrap();
    machine.world.changed_outside(&file).unwrap();
    let mut bad = 0;
    for block in 0..32 {
        let sectors = block * PER_BLOCK..(block + 1) * PER_BLOCK;
        let volume = process.volume("v0");
        let Process { live, port, reactor } = &mut process;
        let span = port.memory().span(SCRATCH_BYTES, BLOCK_BYTES);
        let read = async { live.read(port, volume, sectors.start * SECTOR as u64, span).await };
        match reactor.block_on(read).unwrap() {
            Ok(()) => assert_eq!(read_one(&mut process, "v0", block), 1 + block),
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::InvalidData);
                bad += 1;
            }
        }
    }
    assert!((1..=16).contains(&bad), "{bad}");
    process.live.begin_scrub();
    process.run_background_task().unwrap();
    assert_eq!(process.live.scrub_info().bad_contents, bad);
}

#[test]
fn each_step_of_a_compaction_can_be_the_last() {
    for packing in [None, Some(Packing::Lz4)] {
        let mut stop = 1;
        loop {
            let mut story = Story::new(7, None);
            let mut process = Process::of(&story.machine).unwrap();
            process.set_packing(packing);
            story.use_it(&mut process, 40).unwrap();
            process.flush().unwrap();
            story.all_durable();
            story.machine.world.stop_at(Some(story.machine.world.step() + stop));
            process.live.begin_compaction();
            let done = process.run_background_task().and_then(|_| {
                let Process { live, port, reactor } = &mut process;
                reactor.block_on(async { live.checkpoint(port).await })??;
                process.gc()
            });
            let was_stopped = story.machine.world.stopped();
            assert!(done.is_ok() || was_stopped, "{done:?}");
            drop(process);
            story.machine.world.cut_power().unwrap();
            let mut process = story.reopen(After::Cut);
            nothing_is_lost_and_nothing_left(&mut process);
            if !was_stopped {
                break;
            }
            stop += 11;
        }
        assert!(stop > 60, "{stop}");
    }
}

#[test]
fn what_cannot_be_read_at_all_is_named_and_in_the_way_of_nothing() {
    let (machine, mut process) = with_a_volume();
    write_scattered(&mut process, 96);
    let number = process.numbers(5..6)[0];
    let Whereabouts::Plain { place, .. } = process.whereabouts(number) else { panic!() };
    let at = place * BLOCK_BYTES as u64;
    let range = at..at + BLOCK_BYTES as u64;
    let fault = Fault { on: On::Read, range, per_mille: 1000, errno: 5, times: 1000 };
    machine.world.set_faults(vec![fault]);
    process.live.begin_scrub();
    let moved = process.compact().moved_bytes;
    assert!(moved >= 90 << 12, "{moved}");
    let found = process.live.scrub_findings();
    assert_eq!((process.live.scrub_info().bad_contents, found.counts.damage), (1, 1));
    let bad = &found.listed[0];
    assert_eq!((bad.volume.as_deref(), bad.offset_bytes), (Some("v0"), Some(5 << 12)));
    machine.world.set_faults(Vec::new());
    for block in 0..96 {
        assert_eq!(read_one(&mut process, "v0", block), 1 + block);
    }
    nothing_is_lost_and_nothing_left(&mut process);
}
