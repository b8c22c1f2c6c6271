//! Writes that find content again during a pass. A scheduler chooses the order of all steps. Claims and epochs are those
//! of a store.

use ferrite_disk_base::ShuttledEpochs;
use ferrite_testkit::rounds;
use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

use super::*;

/// Contents: one that a volume has, one that no volume has, and two that are not there yet.
const NUMBERS: usize = 5;
const HAD: u64 = 1;
const NOBODYS: u64 = 2;

struct World {
    epochs: ShuttledEpochs,
    marks: Mutex<Marks>,
    /// V2P: the numbers of a volume's blocks. It is under a mutex, as in a store.
    blocks: Mutex<[u64; 4]>,
    /// P2M: 1 where there is content.
    entries: [AtomicU64; NUMBERS],
}

impl World {
    fn new() -> Arc<World> {
        let entries = [0, 1, 1, 0, 0].map(AtomicU64::new);
        let (marks, blocks) = (Mutex::new(Marks::new(64)), Mutex::new([HAD, 0, 0, 0]));
        Arc::new(World { epochs: ShuttledEpochs::default(), marks, blocks, entries })
    }

    /// A write of content that `number` may have; otherwise it gets another one.
    fn write(&self, block: usize, number: u64, other: u64) {
        self.epochs.during(|| {
            let phase = self.marks.lock().unwrap().phase;
            let is_there = self.entries[number as usize].load(SeqCst) == 1;
            let is_claimed =
                || phase == Phase::None || self.marks.lock().unwrap().claim(phase, number);
            let number = match is_there && is_claimed() {
                true => number,
                false => {
                    self.marks.lock().unwrap().is_given(other);
                    self.entries[other as usize].store(1, SeqCst);
                    other
                }
            };
            self.blocks.lock().unwrap()[block] = number;
        });
    }

    fn two_epochs(&self) {
        let now = self.epochs.removed();
        while self.epochs.ended() < now {
            thread::yield_now();
        }
    }

    /// Steps 1 to 6 of a pass.
    fn pass(&self) {
        self.marks.lock().unwrap().begin(64, 0);
        self.two_epochs();
        let root = *self.blocks.lock().unwrap();
        for number in root {
            self.marks.lock().unwrap().are_live([number].into_iter());
        }
        self.marks.lock().unwrap().phase = Phase::Closing;
        self.two_epochs();
        for number in (1..NUMBERS as u64).rev() {
            // A number without content is not looked at: a write may be about to store it.
            let is_there = self.entries[number as usize].load(SeqCst) == 1;
            if is_there && !self.marks.lock().unwrap().judge(number, None) {
                self.entries[number as usize].store(0, SeqCst);
            }
        }
        self.marks.lock().unwrap().phase = Phase::None;
        self.two_epochs();
        self.marks.lock().unwrap().live = None;
    }
}

/// Two find what a pass is about to sweep; a third finds what loses its last block meanwhile.
fn story() {
    let world = World::new();
    let of = |work: fn(&World)| {
        let world = world.clone();
        thread::spawn(move || work(&world))
    };
    let threads = [
        of(World::pass),
        of(|world| world.write(1, NOBODYS, 3)),
        of(|world| {
            world.write(2, HAD, 4);
            world.blocks.lock().unwrap()[0] = 0;
        }),
    ];
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let blocks = *world.blocks.lock().unwrap();
    for number in blocks.into_iter().filter(|number| *number > 0) {
        assert_eq!(world.entries[number as usize].load(SeqCst), 1, "{number} was swept");
    }
}

#[test]
fn what_is_found_again_beside_a_pass_is_never_swept() {
    shuttle::check_random(story, rounds(10_000) as usize);
    shuttle::check_pct(story, rounds(10_000) as usize, 4);
}
