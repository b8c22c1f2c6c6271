//! Slow storage, with any number of requests in flight.

use std::collections::HashMap;
use std::time::Duration;

use ferrite_io::pool::{HostMemory, SLAB_BYTES, STEP_BYTES};
use ferrite_loopback::GuestOptions;
use ferrite_loopback::front::FrontOptions;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::rig::{Plan, Rig};

/// The requests of one ring page.
const REQUESTS: usize = 32;
/// The minimum memory of a disk.
const OWN: usize = 8 << 20;
/// Several times the replies that growing takes.
const MOST_REPLIES: usize = 300;

/// Keeps the guest's ring full of the largest reads until the storage has had `enough` of them at once, or none has
/// come for long. Returns that number, and the memory that the host had given.
fn keep_full(host_bytes: u64, enough: usize) -> (usize, usize) {
    let faults = Faults::none();
    // Long enough to exceed the delays of a busy machine.
    let late = Fault::Late(Duration::from_millis(100));
    faults.set([Ops::among(&[Kind::Read]).meet(late)]);
    let memory = tempfile::tempdir().unwrap();
    let host = HostMemory::open(&memory.path().join("memory"), host_bytes).unwrap();
    let rig = Rig::new(Plan {
        bytes: 2 * (REQUESTS * SLAB_BYTES) as u64,
        guest: GuestOptions { frames: 9000, grants: 9000, ports: 4 },
        pool_bytes: OWN,
        host_memory: Some(host.clone()),
        engine: faults.factory(),
        tuning: Tuning { merge: false, ..Tuning::default() },
        ..Plan::default()
    });
    let mut front = rig.connect(&FrontOptions { max_indirect: 256, ..FrontOptions::default() });
    let buffer = front.space().buffer(REQUESTS * 256).unwrap();
    let queue = &mut front.queues[0];
    let mut place_of = HashMap::new();
    let mut idle: Vec<usize> = (0..REQUESTS).collect();
    let mut given = 0;
    for _ in 0..MOST_REPLIES {
        for place in idle.drain(..) {
            let sector = (2 * place * SLAB_BYTES / 512) as u64;
            let tag = queue.read(sector, &buffer, place * SLAB_BYTES, SLAB_BYTES).unwrap();
            place_of.insert(tag, place);
        }
        let reply = queue.next_reply(PATIENCE).unwrap();
        assert!(reply.is_ok());
        idle.extend(place_of.remove(&reply.tag));
        given = given.max(host.claimed_bytes());
        if faults.traffic().most() >= enough {
            break;
        }
    }
    queue.drain(PATIENCE).unwrap();
    drop(front);
    (faults.traffic().most(), given)
}

#[test]
fn memory_grows_until_slow_storage_has_the_whole_ring_at_once() {
    let (most, given) = keep_full(1 << 30, REQUESTS);
    assert_eq!(most, REQUESTS);
    assert!(given <= REQUESTS * SLAB_BYTES, "{given}: more than the ring can hold");
}

#[test]
fn memory_grows_no_further_than_the_host_has_it() {
    let (most, given) = keep_full(STEP_BYTES as u64, REQUESTS);
    assert!(most > OWN / SLAB_BYTES, "{most}");
    assert!(most <= (OWN + STEP_BYTES) / SLAB_BYTES, "{most}");
    assert_eq!(given, STEP_BYTES);
}
