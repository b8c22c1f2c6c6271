//! The store's own work: what it has for users, and that it is in nobody's way.

use super::passes::{nothing_is_lost_and_nothing_left, read_one, write_new};
use super::*;
use crate::store::live::Tended;
use crate::store::pace::Pace;

impl Process {
    /// All that there is to do, and how many steps that takes.
    pub(super) fn tend(&mut self) -> io::Result<usize> {
        let Process { live, port, reactor } = self;
        let pace = Pace::unbounded();
        let all = async {
            let mut steps = 0;
            while live.tend(port, &pace).await? == Tended::Something {
                steps += 1;
            }
            Ok(steps)
        };
        reactor.block_on(all)?
    }

    fn numbers_end(&self) -> u64 {
        self.live.core().numbers_end
    }
}

#[test]
fn what_was_written_before_a_death_is_found_again_once_the_index_is_loaded() {
    let (machine, mut process) = with_a_volume();
    for block in (0..640).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    // Of these nobody has anything any more: the index has no room for all.
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
            assert_eq!(process.tend().unwrap() as u64, end.div_ceil(256));
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
            let begun = process.live.marks().passes.count();
            write_new(&mut process, "v0", block, 16, value).unwrap();
            waited += process.live.marks().passes.count() - begun;
            value += 16;
            process.tend().unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
    }
    let passes = process.live.marks().passes.count();
    assert!(waited == 0 && passes > 3, "{passes} passes, and {waited} that a write had to make");
    assert!(passes < 40, "{passes} passes for what is written three times");
    nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn a_store_with_room_or_without_garbage_is_left_alone() {
    let (_machine, mut process) = with_a_volume();
    process.tend().unwrap();
    write_new(&mut process, "v0", 0, 16, 1).unwrap();
    assert_eq!(process.tend().unwrap(), 0);
    for block in (0..BLOCKS).step_by(16) {
        write_new(&mut process, "v0", block, 16, 1 + block).unwrap();
    }
    process.tend().unwrap();
    let passes = process.live.marks().passes.count();
    assert_eq!((process.tend().unwrap(), process.live.marks().passes.count()), (0, passes));
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
    let free = process.live.core().space.free();
    process.tend().unwrap();
    assert_eq!(process.gc().unwrap().joined, 96);
    process.gc().unwrap();
    assert!(process.live.core().space.free() >= free + 96, "their places are free");
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
    process.tend().unwrap();
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
        let hash = async { live.hash_of(port, number).await };
        let hash = reactor.block_on(hash).unwrap().unwrap();
        live.index.remember(&hash, number - 16);
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
        process.tend().unwrap();
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
    let sectors = 1504 * PER_BLOCK..1505 * PER_BLOCK;
    assert_eq!(process.read("v0", sectors).unwrap_err().kind(), io::ErrorKind::InvalidData);
}
