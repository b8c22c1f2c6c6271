//! The number of requests that are begun before the first answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ferrite_loopback::front::{FrontOptions, RingWord};
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Faults, Ops};
use ferrite_testkit::rig::{Plan, Rig};

/// Grant copies that the hypervisor does in one call.
const SWEEP: u32 = 16;

#[test]
fn a_guest_is_answered_before_all_of_its_ring_is_done() {
    let faults = Faults::none();
    let tuning = Tuning { merge: false, ..Tuning::default() };
    let rig = Rig::new(Plan { engine: faults.factory(), tuning, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions { order: 2, ..FrontOptions::default() });
    let queue = &mut front.queues[0];
    let ring = queue.ring();
    let begun = AtomicU32::new(0);
    let most = Arc::new(AtomicU32::new(0));
    let seen = most.clone();
    // Each operation ends as soon as it is submitted, like one in memory.
    faults.set([Ops::storage().fail(EIO)]);
    faults.before_each(move |_| {
        let begun = begun.fetch_add(1, Ordering::Relaxed) + 1;
        let unanswered = begun - ring.load(RingWord::RspProd);
        seen.fetch_max(unanswered, Ordering::Relaxed);
    });
    let buffer = front.space().buffer(128).unwrap();
    let queue = &mut front.queues[0];
    for i in 0..128 {
        queue.read(i as u64 * 8, &buffer, i * 4096, 4096).unwrap();
    }
    assert_eq!(queue.drain(PATIENCE).unwrap().len(), 128);
    assert_eq!(most.load(Ordering::Relaxed), SWEEP);
    front.close(PATIENCE).unwrap();
}
