//! A guest that writes and reads back in a loop.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several tests, not all of which use all"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use ferrite_host::clock::{Random as _, SplitMix64};
use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::{PATIENCE, Pace, wait_until};

use crate::host::Host;

/// The load of one guest.
pub struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    /// The longest time of a read and a write, in microseconds.
    longest_us: Arc<AtomicU64>,
    thread: JoinHandle<(Frontend, Model)>,
}

/// What the guest knows of its disk.
pub struct Model {
    first_block: u64,
    stamps: Vec<u8>,
}

impl Load {
    pub fn start(host: &Host, disk: &DiskPaths) -> Load {
        Load::from(host, disk, 0)
    }

    /// Starts a load on the blocks from `first_block` on, which must be unwritten.
    pub fn from(host: &Host, disk: &DiskPaths, first_block: u64) -> Load {
        Load::go_on(host.connect(disk), Model { first_block, stamps: vec![0; 256] })
    }

    /// Goes on with a guest that was suspended, by these rings.
    pub fn go_on(front: Frontend, model: Model) -> Load {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (end, counted) = (stop.clone(), done.clone());
        let longest_us = Arc::<AtomicU64>::default();
        let longest = longest_us.clone();
        let thread = std::thread::spawn(move || run(front, &end, (&counted, &longest), model));
        Load { stop, done, longest_us, thread }
    }

    /// The longest time of a read and a write since the last call, in microseconds: to be printed.
    pub fn take_longest_us(&self) -> u64 {
        self.longest_us.swap(0, Ordering::Relaxed)
    }

    /// Suspends the guest, with no request in flight.
    pub fn suspend(self) -> (Frontend, Model) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }

    /// Waits until the current worker has served something. One round may end with responses of a
    /// worker that is gone.
    pub fn wait_for_progress(&self) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until("progress", || self.done.load(Ordering::Relaxed) > before + 2);
    }

    /// Stops, and disconnects the guest. Returns what it has written, for [`go_on`](Load::go_on).
    pub fn leave(self) -> Model {
        let (mut front, model) = self.suspend();
        front.close(PATIENCE).unwrap();
        model
    }

    /// Stops, and disconnects the guest.
    pub fn end(self) {
        self.leave();
    }
}

fn run(
    mut front: Frontend,
    stop: &AtomicBool,
    (done, longest_us): (&AtomicU64, &AtomicU64),
    model: Model,
) -> (Frontend, Model) {
    let Model { first_block, mut stamps } = model;
    let mut random = SplitMix64::new(first_block + u64::from(stamps[0]));
    let buffer = front.space().buffer(1).unwrap();
    let mut pace = Pace::default();
    while !stop.load(Ordering::Relaxed) {
        let block = random.below(256) as usize;
        let begun = Instant::now();
        let queue = &mut front.queues[0];
        let sector = (first_block + block as u64) * 8;
        queue.read(sector, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        let mut data = vec![0; 4096];
        buffer.read(0, &mut data);
        assert!(are_all(&data, stamps[block]), "block {block}");
        stamps[block] = stamps[block].wrapping_add(1);
        buffer.write(0, &[stamps[block]; 4096]);
        queue.write(sector, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        done.fetch_add(1, Ordering::Relaxed);
        longest_us.fetch_max(begun.elapsed().as_micros() as u64, Ordering::Relaxed);
        pace.after_request();
    }
    (front, Model { first_block, stamps })
}
