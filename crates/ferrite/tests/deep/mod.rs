//! A guest with many requests at a time that verifies what it reads, and goes on after errors.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_loopback::front::Frontend;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::{PATIENCE, Pace, wait_until};

/// Requests at a time.
const DEPTH: usize = 16;
/// The blocks of 4 KiB that one of them works on, one after the other.
const BLOCKS: usize = 16;
const BLOCK: usize = 4096;
/// The guest's disk has at least so many bytes.
pub(crate) const BYTES: u64 = (DEPTH * BLOCKS * BLOCK) as u64;

/// The guest's load.
pub(crate) struct Deep {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    errors: Arc<AtomicU64>,
    thread: JoinHandle<Frontend>,
}

/// One of the requests at a time: its place in the buffer, and what its blocks may have.
struct Slot {
    /// Of each block the stamps that it may have: that of the last write that succeeded, and those that failed since.
    stamps: Vec<Vec<u8>>,
    block: usize,
    /// What is under way.
    step: Step,
}

#[derive(Clone, Copy)]
enum Step {
    Read,
    Write(u8),
    Flush,
}

impl Deep {
    /// Starts on a disk that is zeros.
    pub(crate) fn start(front: Frontend) -> Deep {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let errors = Arc::<AtomicU64>::default();
        let shared = (stop.clone(), done.clone(), errors.clone());
        let thread = std::thread::spawn(move || run(front, &shared.0, &shared.1, &shared.2));
        Deep { stop, done, errors, thread }
    }

    /// Waits until requests were begun and answered with success.
    #[track_caller]
    pub(crate) fn wait_for_progress(&self) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until("progress", || {
            assert!(!self.thread.is_finished(), "the guest has read what it has not written");
            self.done.load(Ordering::Relaxed) > before + 2 * DEPTH as u64
        });
    }

    /// Requests that have failed.
    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Stops, and disconnects the guest.
    #[track_caller]
    pub(crate) fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("what was read was written").close(PATIENCE).unwrap();
    }
}

fn run(mut front: Frontend, stop: &AtomicBool, done: &AtomicU64, errors: &AtomicU64) -> Frontend {
    let mut random = SplitMix64::new(7);
    let buffer = front.space().buffer(DEPTH).unwrap();
    let queue = &mut front.queues[0];
    let slot = |_| Slot { stamps: vec![vec![0]; BLOCKS], block: 0, step: Step::Flush };
    let mut slots: Vec<Slot> = (0..DEPTH).map(slot).collect();
    let mut idle: Vec<usize> = (0..DEPTH).collect();
    let mut under_way = HashMap::new();
    let mut pace = Pace::default();
    loop {
        for at in idle.drain(..) {
            let slot = &mut slots[at];
            let sector = ((at * BLOCKS + slot.block) * BLOCK / 512) as u64;
            let tag = match slot.step {
                Step::Read => queue.read(sector, &buffer, at * BLOCK, BLOCK),
                Step::Write(stamp) => {
                    buffer.write(at * BLOCK, &[stamp; BLOCK]);
                    queue.write(sector, &buffer, at * BLOCK, BLOCK)
                }
                Step::Flush => queue.flush(),
            };
            under_way.insert(tag.unwrap(), at);
        }
        if under_way.is_empty() {
            return front;
        }
        let reply = queue.next_reply(PATIENCE).unwrap();
        pace.after_request();
        let at = under_way.remove(&reply.tag).unwrap();
        let slot = &mut slots[at];
        match (slot.step, reply.is_ok()) {
            (Step::Read, true) => {
                let mut data = [0; BLOCK];
                buffer.read(at * BLOCK, &mut data);
                let stamps = &mut slot.stamps[slot.block];
                let is_whole = are_all(&data, data[0]);
                assert!(
                    is_whole && stamps.contains(&data[0]),
                    "slot {at}, block {}: {} is none of {stamps:?}",
                    slot.block,
                    data[0]
                );
            }
            (Step::Write(stamp), true) => slot.stamps[slot.block] = vec![stamp],
            (Step::Write(stamp), false) => slot.stamps[slot.block].push(stamp),
            _ => {}
        }
        let counter = if reply.is_ok() { done } else { errors };
        counter.fetch_add(1, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) {
            continue;
        }
        slot.step = match slot.step {
            Step::Read => Step::Write(random.below(255) as u8 + 1),
            Step::Write(_) if random.below(16) == 0 => Step::Flush,
            Step::Write(_) | Step::Flush => {
                slot.block = random.below(BLOCKS as u64) as usize;
                Step::Read
            }
        };
        idle.push(at);
    }
}
