//! A queue's work for a store ends with the queue, at any step. The operations that it has given to the kernel end
//! first. Other queues go on with the work that it has left.

use ferrite_disk_base::Extent;
use ferrite_io::reactor::Wait;

use super::mapping::Mapped;
use super::passes::{nothing_is_lost_and_nothing_left, read_one, write_new};
use super::*;

/// Blocks of `v0` that have something.
const USED: usize = 40;

#[derive(Clone, Copy, Debug)]
enum Work {
    Checkpoint,
    Pass,
}

/// A queue begins this, and ends after so many steps. `false`: the work had ended before.
fn begin_and_drop(machine: &Machine, process: &Process, work: Work, steps: u64) -> bool {
    let (port, mut reactor) = testing::port(&machine.world, &machine.path);
    let (live, end) = (process.live.clone(), machine.world.step() + steps);
    reactor.spawn(async move {
        match work {
            Work::Checkpoint => live.checkpoint(&port).await.unwrap(),
            Work::Pass => drop(live.gc(&port).await.unwrap()),
        }
    });
    while machine.world.step() < end && reactor.tasks() > 0 {
        reactor.turn(Wait::No, &mut Vec::new()).unwrap();
    }
    reactor.tasks() > 0
}

/// A store with something of everything to do: content that is new, shared, and dead.
fn with_work() -> (Machine, Process) {
    let (machine, mut process) = with_a_volume();
    let name = |name| Name::new(name).unwrap();
    write_new(&mut process, "v0", 0, USED, 1000).unwrap();
    let volume = process.volume("v0");
    process.operate(Operation::Snapshot(name("s"), volume)).unwrap();
    write_new(&mut process, "v0", 0, USED / 2, 2000).unwrap();
    process.gc().unwrap();
    write_new(&mut process, "v0", 0, USED / 2, 3000).unwrap();
    write_new(&mut process, "v1", 600, USED, 5000).unwrap();
    process.flush().unwrap();
    (machine, process)
}

/// All volumes have what was written last, however it is read.
fn examine(process: &mut Process, first: u64, about: &str) {
    for block in 0..USED as u64 {
        let expected = if block < USED as u64 / 2 { first } else { 1000 } + block;
        assert_eq!(read_one(process, "v0", block), expected, "{about}, block {block}");
        assert_eq!(read_one(process, "s", block), 1000 + block, "{about}, snapshot");
        assert_eq!(read_one(process, "v1", 600 + block), 5000 + block, "{about}, v1");
        if let Mapped::Data(found, is_sure) = process.read_mapped("v0", block..block + 1).unwrap() {
            assert!(is_sure && found[..8] == expected.to_le_bytes(), "{about}, mapped {block}");
        }
    }
}

/// The queue ends at this step of its work; then the power is cut, or other tasks go on beside a reader.
fn drop_at(work: Work, steps: u64, is_cut: bool) -> bool {
    let about = format!("{work:?}, step {steps}");
    let (machine, mut process) = with_work();
    let is_dropped = begin_and_drop(&machine, &process, work, steps);
    if is_cut {
        drop(process);
        machine.world.cut_power().unwrap();
        examine(&mut Process::of(&machine).unwrap(), 3000, &about);
        return is_dropped;
    }
    if steps % 4 < 2 {
        // A pass is the first to go on.
        process.gc().unwrap();
    }
    let volume = process.volume("v0");
    let reader = process.live.reader();
    let operation = reader.enter();
    let Extent::Data { offset, .. } = process.live.map(volume, 0, BLOCK_BYTES as u64) else {
        panic!("{about}: it was written just now")
    };
    for round in 1..6 {
        write_new(&mut process, "v0", 0, USED / 2, 3000 + 1000 * round).unwrap();
        let Process { live, port, reactor } = &mut process;
        reactor.block_on(async { live.checkpoint(port).await }).unwrap().unwrap();
    }
    let mut word = [0; 8];
    std::fs::File::open(&machine.path).unwrap().read_exact_at(&mut word, offset).unwrap();
    assert_eq!(u64::from_le_bytes(word), 3000, "{about}: what the read brings");
    reader.leave(operation);
    examine(&mut process, 8000, &about);
    nothing_is_lost_and_nothing_left(&mut process);
    examine(&mut process, 8000, &about);
    process.flush().unwrap();
    drop((reader, process));
    machine.world.cut_power().unwrap();
    examine(&mut Process::of(&machine).unwrap(), 8000, &about);
    is_dropped
}

#[test]
fn a_checkpoint_that_ends_with_its_queue_at_any_step_is_made_by_others() {
    let mut steps = 0;
    while drop_at(Work::Checkpoint, steps, steps % 2 == 0) {
        drop_at(Work::Checkpoint, steps, steps % 2 == 1);
        steps += 1;
    }
    assert!(steps > 20, "{steps}");
}

#[test]
fn a_pass_that_ends_with_its_queue_at_any_step_has_lost_nothing() {
    let mut steps = 0;
    while drop_at(Work::Pass, steps, steps % 3 == 0) {
        drop_at(Work::Pass, steps, steps % 3 == 1);
        steps += if is_night() { 1 } else { 10 };
    }
    assert!(steps > 60, "{steps}");
}
