//! Writes of one turn share operations, and nothing else.

use super::*;

/// A fault of so many writes to these places.
fn fails(places: Range<u64>, times: u64) -> Fault {
    let range = places.start * BLOCK_BYTES as u64..places.end * BLOCK_BYTES as u64;
    Fault { on: On::Write, range, per_mille: 1000, errno: 5, times }
}

/// Blocks, each with a value of its own.
fn blocks(range: Range<u64>) -> Vec<Write> {
    range.map(|i| write("v0", 8 * i..8 * i + 8, i as u8 + 1)).collect()
}

fn all_well(done: io::Result<Vec<io::Result<()>>>) {
    done.unwrap().into_iter().for_each(|done| done.unwrap());
}

#[test]
fn writes_of_one_turn_have_one_journal_block_and_one_operation_for_their_data() {
    let (machine, mut process) = with_a_volume();
    all_well(process.write(&blocks(0..10), false));
    let mut write_again = |count: usize| {
        let (number, steps) = (process.live.journal.next(), machine.world.step());
        let again = |i: usize| write("v0", 8 * i as u64..8 * i as u64 + 8, (100 + count + i) as u8);
        all_well(process.write(&(0..count).map(again).collect::<Vec<_>>(), false));
        assert_eq!(process.live.journal.next(), number + 1);
        machine.world.step() - steps
    };
    assert_eq!(write_again(1), write_again(10), "data and record");
    let number = process.live.journal.next();
    assert_eq!(process.read("v0", 0..80).unwrap()[72..], [119; 8]);
    // In the least memory there is room for the changes of 11 blocks.
    all_well(process.write(&blocks(0..100), false));
    assert_eq!(process.live.journal.next(), number + 100u64.div_ceil(11));
    assert_eq!(process.read("v0", 0..800).unwrap()[792..], [100; 8]);
}

#[test]
fn equal_blocks_of_one_turn_take_one_place() {
    let (_machine, mut process) = with_a_volume();
    let before = process.live.shared.core().space.free();
    all_well(process.write(&[write("v0", 0..8, 7), write("v0", 800..816, 7)], false));
    assert_eq!(before - process.live.shared.core().space.free(), 1);
    assert_eq!(process.read("v0", 808..816).unwrap(), [7; 8]);
}

#[test]
fn of_a_turn_only_those_fail_whose_data_did() {
    let (machine, process) = with_a_volume();
    drop(process);
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let memory = Memory { metadata: 1 << 20, ..MEMORY };
    let live = reactor.block_on(async { Live::open(&port, BYTES, memory).await }).unwrap().unwrap();
    let mut process = Process { live: Arc::new(live), port, reactor };
    all_well(process.write(&blocks(40..60), false));
    let (layout, checkpoint) = {
        let core = process.live.shared.core();
        (core.layout, core.checkpoint)
    };
    // One operation has 16 blocks, another the others. One of them fails.
    machine.world.set_faults(vec![fails(layout.first_place(0)..layout.places(), 1)]);
    let done = process.write(&blocks(0..20), false).unwrap();
    let failed: Vec<bool> = done.iter().map(Result::is_err).collect();
    assert!(
        (0..20).all(|i| failed[i] == failed[i / 16 * 16]) && failed[0] != failed[16],
        "{done:?}"
    );
    let found = process.read("v0", 0..160).unwrap();
    let expected = |i: usize| if failed[i / 8] { 0 } else { i as u8 / 8 + 1 };
    assert!((0..160).all(|i| found[i] == expected(i)), "{found:?}");
    // Otherwise a later sync would vouch for what has failed.
    assert_eq!(process.live.shared.core().checkpoint, checkpoint + 1);
}

#[test]
fn who_has_left_a_turn_writes_nothing() {
    let (_machine, mut process) = with_a_volume();
    all_well(process.write(&blocks(0..2), false));
    let volume = process.volume("v0");
    let Process { live, port, reactor } = &mut process;
    let (live, port) = (&*live, &*port);
    let span = |i: usize| port.memory().span(SCRATCH_BYTES + i * BLOCK_BYTES, BLOCK_BYTES);
    let write = |i: usize| {
        port.memory().fill(span(i), i as u8 + 11);
        live.write(port, volume, (i * BLOCK_BYTES) as u64, span(i))
    };
    let (mut leaves, mut polls) = (Some(Box::pin(write(1))), 0);
    let leaves = poll_fn(move |cx| {
        polls += 1;
        match &mut leaves {
            // The one that leads has begun by now.
            Some(_) if polls == 2 => leaves = None,
            Some(task) => return task.as_mut().poll(cx),
            None => {}
        }
        Poll::Ready(Ok(()))
    });
    let done = reactor.block_on(all(vec![Box::pin(write(0)), Box::pin(leaves)])).unwrap();
    done.into_iter().for_each(|done| done.unwrap());
    assert_eq!(process.read("v0", 0..16).unwrap(), [[11; 8], [2; 8]].concat());
}

/// The record of a write that has failed may be on the medium, and so may be some of its data, until a checkpoint leaves it
/// behind.
#[test]
fn zeros_where_nothing_was_are_kept_from_a_write_that_failed_before_them() {
    let of_seed = |(seed, cut): &(u64, bool)| {
        let machine = Story::new(*seed, None).machine;
        let mut process = Process::of(&machine).unwrap();
        let first = process.live.shared.core().layout.first_place(0) * BLOCK_BYTES as u64;
        let range = first..BYTES - 2 * BLOCK_BYTES as u64;
        let fault = Fault { on: On::Write, range, per_mille: 1000, errno: 5, times: 1 };
        machine.world.set_faults(vec![fault]);
        let writes: Vec<Write> =
            (0..8).map(|i| write("v0", 8 * i..8 * i + 8, i as u8 + 1)).collect();
        // No checkpoint is made behind them yet.
        let done = process.only_write(&writes, Beside::Nothing).unwrap();
        machine.world.set_faults(Vec::new());
        let volume = process.volume("v0");
        let Process { live, port, reactor } = &mut process;
        let zeros = async { live.write_zeros(port, volume, 0, 8 * BLOCK_BYTES as u64).await };
        reactor.block_on(zeros).unwrap().unwrap();
        if *cut {
            process.flush().unwrap();
            drop(process);
            machine.world.cut_power().unwrap();
        } else {
            drop(process);
            machine.world.kill_process().unwrap();
        }
        let mut process = Process::of(&machine).unwrap();
        assert_eq!(process.read("v0", 0..64).unwrap(), [0; 64], "seed {seed}, cut {cut}");
        done.iter().any(Result::is_err)
    };
    let failed = (0..60).flat_map(|seed| [(seed, false), (seed, true)]).filter(of_seed);
    assert!(failed.count() > 100);
}
