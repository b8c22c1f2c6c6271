//! The store's own work: what it has for users, and that it is in nobody's way.

use super::passes::{nothing_is_lost_and_nothing_left, write_new};
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
    // Of these nobody has anything any more.
    process.write(&[write("v0", 0..64 * PER_BLOCK, 0)], false).unwrap().remove(0).unwrap();
    process.gc().unwrap();
    process.flush().unwrap();
    let mut again = |is_loaded: bool, to: u64| {
        machine.world.kill_process().unwrap();
        let mut process = Process::of(&machine).unwrap();
        let end = process.numbers_end();
        if is_loaded {
            assert_eq!(process.tend().unwrap() as u64, end.div_ceil(256));
            assert_eq!(process.live.duties().loading.loaded, 576);
        }
        for block in (64..640).step_by(16) {
            write_new(&mut process, "v0", to + block, 16, 1 + block).unwrap();
        }
        let found = 576 - (process.numbers_end() - end);
        (process, found)
    };
    drop(process);
    let (process, found) = again(true, 640);
    assert_eq!(found, 576);
    drop(process);
    let (mut process, found) = again(false, 1280);
    assert!(found < 60, "{found} were found by an index that has nothing but what is new");
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
