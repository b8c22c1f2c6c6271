//! A guest that writes, reads and flushes on all of its queues, and knows what each answer has to be.

use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_loopback::vhost::{Ask, Driver, Guest};

/// Bytes of a slot's part of the disk.
const CHUNK: usize = 256 << 10;

/// The request that a slot waits for; of a write, the byte.
#[derive(Clone, Copy, PartialEq)]
enum Busy {
    No,
    Writes(u8),
    Reads,
    Flushes,
}

struct Slot {
    busy: Busy,
    holds: u8,
}

/// The guest's queues. Each slot has a part of the disk for itself.
pub struct Load {
    /// The queues' drivers.
    pub drivers: Vec<Driver>,
    slots: Vec<Vec<Slot>>,
    random: SplitMix64,
}

impl Load {
    /// Bytes of memory that a guest needs.
    pub fn memory_bytes(queues: u16, entries: u16) -> u64 {
        Driver::memory_bytes(queues, entries)
    }

    /// A load on a disk of zeros, by a driver with these features.
    pub fn new(guest: &Arc<Guest>, queues: u16, entries: u16, features: u64, seed: u64) -> Load {
        let driver = |number| Driver::new(guest, number, entries, features);
        let drivers: Vec<Driver> = (0..queues).map(driver).collect();
        let slot = |_| Slot { busy: Busy::No, holds: 0 };
        let slots = |driver: &Driver| (0..driver.slots()).map(slot).collect();
        let slots = drivers.iter().map(slots).collect();
        Load { drivers, slots, random: SplitMix64::new(seed) }
    }

    /// A random number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.random.next_u64() % end
    }

    fn sector(&self, queue: usize, slot: usize) -> u64 {
        ((queue * self.slots[queue].len() + slot) * CHUNK / 512) as u64
    }

    /// Sends a request by each slot that has none, and takes an answer of each queue.
    pub fn turn(&mut self) {
        self.send_all();
        (0..self.drivers.len()).for_each(|queue| self.check(queue));
    }

    /// Sends a request by each slot that has none, and takes the answers that come within `limit`: the server may be dead.
    pub fn turn_for(&mut self, limit: Duration) {
        self.send_all();
        for queue in 0..self.drivers.len() {
            if let Some((head, _)) = self.drivers[queue].wait_used_for(limit) {
                self.compare_answer(queue, head);
            }
        }
    }

    fn send_all(&mut self) {
        for queue in 0..self.drivers.len() {
            self.drivers[queue].indirect = self.below(2) == 0;
            for index in 0..self.slots[queue].len() {
                if self.slots[queue][index].busy == Busy::No {
                    self.send(queue, index);
                }
            }
        }
    }

    fn send(&mut self, queue: usize, index: usize) {
        let (at, choice) = (self.sector(queue, index), self.below(8));
        let slot = &mut self.slots[queue][index];
        let ask = match choice {
            0..4 => {
                let fill = slot.holds.wrapping_add(1);
                slot.busy = Busy::Writes(fill);
                Ask::write(at, &vec![fill; CHUNK])
            }
            7 => {
                slot.busy = Busy::Flushes;
                Ask::flush()
            }
            _ => {
                slot.busy = Busy::Reads;
                Ask::read(at, CHUNK)
            }
        };
        let driver = &mut self.drivers[queue];
        let head = driver.prepare(index, &ask);
        driver.offer(head);
    }

    /// Takes an answer off the queue.
    fn check(&mut self, queue: usize) {
        let (head, _) = self.drivers[queue].wait_used();
        self.compare_answer(queue, head);
    }

    /// Compares an answer, which is of a request that waits for one.
    fn compare_answer(&mut self, queue: usize, head: u16) {
        let driver = &self.drivers[queue];
        let index = driver.slot_of(head);
        let slot = &mut self.slots[queue][index];
        assert_eq!(driver.status(index), 0);
        match std::mem::replace(&mut slot.busy, Busy::No) {
            Busy::No => panic!("slot {index} is answered twice"),
            Busy::Writes(fill) => slot.holds = fill,
            Busy::Reads => {
                let read = driver.data(index, CHUNK);
                assert!(read.iter().all(|byte| *byte == slot.holds), "slot {index}");
            }
            Busy::Flushes => {}
        }
    }

    /// Waits until all that is left is answered, and nothing else, and reads all of it again.
    pub fn finish(&mut self) {
        for queue in 0..self.drivers.len() {
            while self.slots[queue].iter().any(|slot| slot.busy != Busy::No) {
                self.check(queue);
            }
            assert_eq!(self.drivers[queue].next_used(), None);
            for index in 0..self.slots[queue].len() {
                let at = self.sector(queue, index);
                let (status, read) = self.drivers[queue].call(&Ask::read(at, CHUNK));
                let holds = self.slots[queue][index].holds;
                assert!(status == 0 && read.iter().all(|byte| *byte == holds), "slot {index}");
            }
        }
    }

    /// Compares the content of the image with what was written and answered.
    pub fn compare(&self, image: &[u8]) {
        for queue in 0..self.drivers.len() {
            for (index, slot) in self.slots[queue].iter().enumerate() {
                let from = self.sector(queue, index) as usize * 512;
                let is_it = image[from..][..CHUNK].iter().all(|byte| *byte == slot.holds);
                assert!(is_it, "queue {queue}, slot {index}");
            }
        }
    }
}
