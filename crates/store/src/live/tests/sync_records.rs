//! Durability work: records of syncs, and syncs that no flush asked for.

use super::*;
use crate::numbers::SYNC_AFTER;

/// Rot in all blocks that have nothing but this byte.
fn rot(machine: &Machine, value: u8) {
    let file = std::fs::File::options().read(true).write(true).open(&machine.path).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let blocks = bytes.chunks(BLOCK_BYTES).zip((0..).step_by(BLOCK_BYTES));
    for (_, at) in blocks.filter(|(block, _)| block.iter().all(|byte| *byte == value)) {
        file.write_all_at(&[value ^ 1], at + 77).unwrap();
    }
    machine.world.changed_outside(&file).unwrap();
}

#[test]
fn a_flush_is_told_by_the_next_journal_block_or_else_by_an_empty_one() {
    let (machine, mut process) = with_a_volume();
    let next = |process: &Process| process.live.journal.next();
    process.write(&[write("v0", 0..8, 7)], false).unwrap().remove(0).unwrap();
    let before = next(&process);
    process.flush().unwrap();
    assert_eq!(next(&process), before + 1, "an empty one");
    process.flush().unwrap();
    process.run_durability_work();
    assert_eq!(next(&process), before + 1, "there was nothing to tell");
    process.write(&[write("v0", 8..16, 8)], false).unwrap().remove(0).unwrap();
    let Process { live, port, reactor } = &mut process;
    reactor.block_on(async { live.flush(port).await }).unwrap().unwrap();
    process.write(&[write("v0", 16..24, 9)], false).unwrap().remove(0).unwrap();
    assert_eq!(next(&process), before + 3, "a write has told it");
    drop(process);
    machine.world.kill_process().unwrap();
    // A record is believed without its data once it was told that they are durable.
    rot(&machine, 7);
    rot(&machine, 9);
    let mut process = Process::of(&machine).unwrap();
    assert_eq!(process.read("v0", 0..8).unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(process.read("v0", 8..16).unwrap(), [8; 8]);
    assert_eq!(process.read("v0", 16..24).unwrap(), [0; 8]);
}

#[test]
fn much_new_data_becomes_durable_though_nobody_flushes() {
    let (machine, mut process) = with_a_volume();
    process.live.journal.new_data(SYNC_AFTER - 10);
    let writes: Vec<Write> = (0..20).map(|i| write("v0", 8 * i..8 * i + 8, i as u8 + 1)).collect();
    process.write(&writes, false).unwrap().into_iter().for_each(|done| done.unwrap());
    assert!(!process.live.journal.wants_sync());
    drop(process);
    machine.world.cut_power().unwrap();
    let found = Process::of(&machine).unwrap().read("v0", 0..160).unwrap();
    assert!(found.iter().enumerate().all(|(i, byte)| *byte as usize == i / 8 + 1), "{found:?}");
}
