//! Content that storage cannot read (store.md 4 and 15).

use super::passes::{read_one, write_new};
use super::*;
use crate::check;
use crate::journal::{Filling, Record};
use crate::numbers::AHEAD;
use crate::pace::Pace;
use crate::page::Whereabouts;

const EIO: i32 = 5;

/// Fills one block of `v0`.
fn put(process: &mut Process, block: u64, value: u8) {
    let sectors = block * PER_BLOCK..(block + 1) * PER_BLOCK;
    let done = process.only_write(&[write("v0", sectors, value)], Beside::Nothing).unwrap();
    assert!(done.iter().all(Result::is_ok), "{done:?}");
}

fn get(process: &mut Process, block: u64) -> io::Result<u8> {
    let sectors = process.read("v0", block * PER_BLOCK..(block + 1) * PER_BLOCK)?;
    assert!(sectors.iter().all(|value| *value == sectors[0]));
    Ok(sectors[0])
}

fn is_unreadable(process: &mut Process, block: u64) -> bool {
    get(process, block).is_err_and(|e| e.raw_os_error() == Some(EIO))
}

fn place_of(process: &mut Process, block: u64) -> u64 {
    let number = process.numbers(block..block + 1)[0];
    match process.whereabouts(number) {
        Whereabouts::Plain { place, .. } => place,
        other => panic!("{other:?}"),
    }
}

fn lose(machine: &Machine, place: u64) {
    lose_for(machine, place, u64::MAX);
}

/// It cannot be read so many times.
fn lose_for(machine: &Machine, place: u64, times: u64) {
    let at = place * BLOCK_BYTES as u64;
    let range = at..at + BLOCK_BYTES as u64;
    let fault = Fault { on: On::Read, range, per_mille: 1000, errno: EIO, times };
    machine.world.set_faults(vec![fault]);
}

/// A store whose process died: block 0 has 7, flushed, and 8 since; block 1 has 9. Gives the place of the 8.
fn left_by_a_death() -> (Machine, u64) {
    let (machine, mut process) = with_a_volume();
    put(&mut process, 0, 7);
    process.flush().unwrap();
    put(&mut process, 0, 8);
    put(&mut process, 1, 9);
    let place = place_of(&mut process, 0);
    drop(process);
    machine.world.kill_process().unwrap();
    (machine, place)
}

/// The findings of a check of the whole store, with all content read.
fn findings(process: &mut Process) -> u64 {
    let Process { live, port, reactor } = process;
    let check =
        async { live.check_store(port, checking::DEEP, &Pace::unbounded(), &|_, _| true).await };
    reactor.block_on(check).unwrap().unwrap().findings.counts.damage
}

/// A cut in a write may leave a place that cannot be read, and nothing tells it from one that was answered.
#[test]
fn new_content_that_cannot_be_read_is_an_error_of_its_block_and_keeps_no_store_closed() {
    let (machine, lost) = left_by_a_death();
    lose(&machine, lost);
    let mut process = Process::of(&machine).unwrap();
    assert!(
        is_unreadable(&mut process, 0),
        "the older content would be a loss that no error reports"
    );
    assert_eq!(get(&mut process, 1).unwrap(), 9);
    assert_eq!(findings(&mut process), 1);
    // No write gets it: not of this process, nor of a later one, which has read the index.
    put(&mut process, 2, 8);
    assert_eq!(get(&mut process, 2).unwrap(), 8);
    drop(process);
    machine.world.kill_process().unwrap();
    let mut process = Process::of(&machine).unwrap();
    process.run_background_task().unwrap();
    put(&mut process, 0, 8);
    assert_eq!(get(&mut process, 0).unwrap(), 8);
    assert_eq!(place_of(&mut process, 0), place_of(&mut process, 2), "that one is found");
    passes::nothing_is_lost_and_nothing_left(&mut process);
}

#[test]
fn new_content_that_can_be_read_again_later_is_there() {
    let (machine, lost) = left_by_a_death();
    lose(&machine, lost);
    drop(Process::of(&machine).unwrap());
    machine.world.kill_process().unwrap();
    machine.world.set_faults(Vec::new());
    let mut process = Process::of(&machine).unwrap();
    assert_eq!(get(&mut process, 0).unwrap(), 8);
}

/// As a mirror in a guest does, which mends what it could not read.
#[test]
fn who_writes_again_what_could_not_be_read_gets_a_good_copy() {
    let (machine, mut process) = with_a_volume();
    put(&mut process, 0, 7);
    put(&mut process, 1, 8);
    put(&mut process, 2, 8);
    let lost = place_of(&mut process, 1);
    lose(&machine, lost);
    let volume = process.volume("v0");
    let Process { live, port, reactor } = &mut process;
    let span = port.memory().span(SCRATCH_BYTES, 2 * BLOCK_BYTES);
    let read = async { live.read(port, volume, 0, span).await };
    assert!(reactor.block_on(read).unwrap().is_err());
    put(&mut process, 1, 8);
    assert_eq!(get(&mut process, 1).unwrap(), 8);
    assert!(is_unreadable(&mut process, 2), "who has not written again");
    put(&mut process, 3, 7);
    assert_eq!(place_of(&mut process, 3), place_of(&mut process, 0), "its neighbour is good");
    assert_eq!(read_one(&mut process, "v0", 3), u64::from_le_bytes([7; 8]));
    // The index knows the bad one, too, and a volume has it.
    process.gc().unwrap();
    assert!(is_unreadable(&mut process, 2));
    assert_eq!(get(&mut process, 1).unwrap(), 8);
}

/// Storage was away for a moment. A record that counts without its data is an error for good.
#[test]
fn what_an_opening_cannot_read_is_read_again_before_it_counts() {
    let (machine, torn) = left_by_a_death();
    let file = std::fs::File::options().write(true).open(&machine.path).unwrap();
    file.write_all_at(&[0; BLOCK_BYTES], torn * BLOCK_BYTES as u64).unwrap();
    machine.world.changed_outside(&file).unwrap();
    lose_for(&machine, torn, 3);
    let mut process = Process::of(&machine).unwrap();
    assert_eq!(get(&mut process, 0).unwrap(), 7, "the newer content was never whole");
}

/// The round has read that content before.
#[test]
fn what_readers_find_bad_while_a_round_is_under_way_is_refused_behind_its_end() {
    let (machine, mut process) = with_a_volume();
    (0..640).for_each(|i| write_new(&mut process, "v0", i, 1, 1 + i).unwrap());
    process.live.begin_scrub();
    let scrub = |process: &mut Process| {
        let Process { live, port, reactor } = process;
        reactor.block_on(async { live.scrub_in_turn(port, &Pace::unbounded()).await })
    };
    assert!(scrub(&mut process).unwrap().unwrap().is_some());
    let lost = place_of(&mut process, 5);
    lose(&machine, lost);
    assert!(is_unreadable(&mut process, 5));
    while scrub(&mut process).unwrap().unwrap().is_some() {}
    assert_eq!(process.live.scrub_info().rounds, 1);
    write_new(&mut process, "v0", 700, 1, 6).unwrap();
    assert_eq!(read_one(&mut process, "v0", 700), 6);
}

/// Where the journal has the last block before a death, and a place of it that no block can be in.
fn journal_left_by_a_death() -> (Machine, u64, u64) {
    let (machine, mut process) = with_a_volume();
    put(&mut process, 0, 7);
    put(&mut process, 1, 8);
    let (layout, last) = (process.live.shared.core().layout, process.live.journal.next() - 1);
    let from = process.live.shared.core().replay_from;
    assert!(last > from && last + AHEAD + 1 < from + layout.journal_blocks);
    drop(process);
    machine.world.kill_process().unwrap();
    (machine, layout.journal(last), layout.journal(from + layout.journal_blocks - 1))
}

/// It was answered, and is there once.
#[test]
fn a_block_of_the_journal_that_cannot_be_read_keeps_a_store_closed_and_is_found_by_a_check() {
    let (machine, last, _) = journal_left_by_a_death();
    lose(&machine, last);
    let e = Process::of(&machine).map(drop).unwrap_err().to_string();
    assert!(e.contains(&format!("the 4096 bytes at {}", last * BLOCK_BYTES as u64)), "{e}");
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let check = async { check::check(&port, BYTES, checking::DEEP, &|_, _| true).await };
    let outcome = reactor.block_on(check).unwrap().unwrap();
    assert_eq!(outcome.findings.counts.damage, 1, "{outcome:?}");
    assert_eq!(outcome.findings.listed[0].kind, "journal");
    assert_eq!(outcome.findings.listed[0].place_bytes, Some(last * BLOCK_BYTES as u64));
    // Its one block is lost if the place is given up.
    machine.world.set_faults(Vec::new());
    let file = std::fs::File::options().write(true).open(&machine.path).unwrap();
    file.write_all_at(&[0; BLOCK_BYTES], last * BLOCK_BYTES as u64).unwrap();
    machine.world.changed_outside(&file).unwrap();
    let mut process = Process::of(&machine).unwrap();
    assert_eq!((get(&mut process, 0).unwrap(), get(&mut process, 1).unwrap()), (7, 0));
}

#[test]
fn a_place_of_the_journal_that_cannot_be_read_and_has_no_block_is_nobodys_loss() {
    let (machine, _, unused) = journal_left_by_a_death();
    lose(&machine, unused);
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let check = async { check::check(&port, BYTES, checking::DEEP, &|_, _| true).await };
    let outcome = reactor.block_on(check).unwrap().unwrap();
    assert_eq!(outcome.findings.counts.damage, 0, "{outcome:?}");
    let mut process = Process::of(&machine).unwrap();
    assert_eq!((get(&mut process, 0).unwrap(), get(&mut process, 1).unwrap()), (7, 8));
}

/// A power cut has lost all earlier blocks, so no flush covers this one. Later writes follow it.
#[test]
fn a_block_of_the_journal_that_could_not_be_read_never_counts_later() {
    let (machine, _, unused) = journal_left_by_a_death();
    let file = std::fs::File::options().read(true).write(true).open(&machine.path).unwrap();
    let process = Process::of(&machine).unwrap();
    let (layout, id) = {
        let core = process.live.shared.core();
        (core.layout, core.id)
    };
    let from = process.live.journal.next();
    let stale = (from..).find(|number| layout.journal(*number) == unused).unwrap();
    assert!(stale >= from + AHEAD);
    let mut filling = Filling::default();
    let volume = process.volume("v0");
    assert!(filling.add(&Record::Zeros { volume, block: 0, count: 1 }));
    let stale = filling.finish(&id, stale, from);
    drop(process);
    machine.world.kill_process().unwrap();
    file.write_all_at(&stale, unused * BLOCK_BYTES as u64).unwrap();
    machine.world.changed_outside(&file).unwrap();
    lose(&machine, unused);
    let mut process = Process::of(&machine).unwrap();
    put(&mut process, 0, 9);
    process.flush().unwrap();
    drop(process);
    machine.world.kill_process().unwrap();
    machine.world.set_faults(Vec::new());
    assert_eq!(get(&mut Process::of(&machine).unwrap(), 0).unwrap(), 9);
}
