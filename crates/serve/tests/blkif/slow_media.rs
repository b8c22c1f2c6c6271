//! Slow storage, and data behind a connection, with any number of requests in flight.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{DiscardLimits, Disk, RemoteDisk, RemoteFacts};

use ferrite_io::pool::{HostMemory, SLAB_BYTES, STEP_BYTES};
use ferrite_loopback::GuestOptions;
use ferrite_loopback::front::FrontOptions;
use ferrite_loopback::front::{Buffer, FrontQueue};
use ferrite_serve::path::parking::{NotParked, Unfit};
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::remote::{Sessions, Store};
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, wait_until};

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

/// Bytes of a remote disk.
const REMOTE_BYTES: usize = 16 << 20;

fn remote_disk(store: &Arc<Store>, one_queue: bool) -> Disk {
    let facts = RemoteFacts {
        name: "test:store".into(),
        sectors: REMOTE_BYTES as u64 / 512,
        read_only: false,
        is_write_protected: false,
        block_bytes: 512,
        physical_block_bytes: 4096,
        one_queue,
        discard: Some(DiscardLimits { granularity_bytes: 512, alignment_bytes: 0 }),
    };
    Disk::Remote(RemoteDisk::new(Arc::new(Sessions(store.clone())), facts))
}

/// A backend whose disk is a remote of this store.
fn on_a_remote(store: &Arc<Store>, one_queue: bool) -> Rig {
    let store = store.clone();
    let disk = move || remote_disk(&store, one_queue);
    Rig::new(Plan { disk: Some(Box::new(disk)), ..Plan::default() })
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed) >> 13) as u8).collect()
}

/// Writes of 12 KiB: several segments each, some of them neighbours of others.
const WRITE_BYTES: usize = 12 << 10;
const WRITES: usize = 16;

/// The first sector of a write: two after one another, then a gap.
fn sector_of(i: usize) -> u64 {
    (i / 2 * 100 + i % 2 * (WRITE_BYTES / 512)) as u64
}

/// Fills the buffer by the seed, and asks for all writes.
fn ask_for_writes(queue: &mut FrontQueue, buffer: &Buffer, seed: u32) {
    for i in 0..WRITES {
        buffer.write(i * WRITE_BYTES, &pattern(WRITE_BYTES, seed + i as u32));
        queue.write(sector_of(i), buffer, i * WRITE_BYTES, WRITE_BYTES).unwrap();
    }
    queue.push().unwrap();
}

fn are_written(store: &Store, seed: u32) {
    for i in 0..WRITES {
        let at = sector_of(i) as usize * 512;
        assert_eq!(store.bytes(at, WRITE_BYTES), pattern(WRITE_BYTES, seed + i as u32), "{i}");
    }
}

fn all_succeed(queue: &mut FrontQueue) {
    let replies = queue.drain(PATIENCE).unwrap();
    assert!(!replies.is_empty() && replies.iter().all(|reply| reply.is_ok()));
}

#[test]
fn a_guest_writes_reads_flushes_and_discards_on_a_remote() {
    let store = Store::new(REMOTE_BYTES);
    let rig = on_a_remote(&store, false);
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(WRITES * WRITE_BYTES / 4096).unwrap();
    for (number, queue) in front.queues.iter_mut().enumerate() {
        let seed = 1000 * (number as u32 + 1);
        ask_for_writes(queue, &buffer, seed);
        all_succeed(queue);
        are_written(&store, seed);
        buffer.fill(0, WRITES * WRITE_BYTES, 0);
        for i in 0..WRITES {
            queue.read(sector_of(i), &buffer, i * WRITE_BYTES, WRITE_BYTES).unwrap();
        }
        all_succeed(queue);
        for i in 0..WRITES {
            let mut got = vec![0; WRITE_BYTES];
            buffer.read(i * WRITE_BYTES, &mut got);
            assert_eq!(got, pattern(WRITE_BYTES, seed + i as u32), "{i}");
        }
        let syncs = store.syncs();
        queue.flush().unwrap();
        all_succeed(queue);
        assert!(store.syncs() > syncs);
        queue.discard(0, 24, false).unwrap();
        all_succeed(queue);
        assert_eq!(store.bytes(0, 24 * 512), [0; 24 * 512]);
    }
    // Neighbours shared operations.
    assert!(rig.counters.counts().merged > 0);
    front.close(PATIENCE).unwrap();
    store.wait_for_the_end();
}

#[test]
fn a_remote_disk_parks_when_the_requests_in_flight_at_it_have_ended() {
    let store = Store::new(REMOTE_BYTES);
    let rig = on_a_remote(&store, false);
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(WRITES * WRITE_BYTES / 4096).unwrap();
    for round in 0..3 {
        let (seed, received) = (100 * (round + 1), store.received());
        store.hold();
        ask_for_writes(&mut front.queues[round as usize % 2], &buffer, seed);
        store.wait_for_received(received + 1);
        let soon = rig.device().park(Duration::from_millis(20));
        assert!(matches!(soon, Err(NotParked::NotInTime(_))));
        let device = rig.device();
        let parking = std::thread::spawn(move || device.park(PATIENCE).unwrap());
        store.release();
        let (disk, away) = parking.join().unwrap();
        drop(disk);
        // The taken requests are written, and no connection is left.
        store.wait_for_the_end();
        away.go_on_with(remote_disk(&store, false)).map_err(|refused| refused.unfit).unwrap();
        all_succeed(&mut front.queues[round as usize % 2]);
        are_written(&store, seed);
    }
    let (disk, away) = rig.device().park(PATIENCE).unwrap();
    let refused = away.go_on_with(remote_disk(&store, true)).unwrap_err();
    assert_eq!(refused.unfit, Unfit::OneQueue);
    refused.away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_remote_disk_of_one_connection_has_one_queue() {
    let store = Store::new(REMOTE_BYTES);
    let rig = on_a_remote(&store, true);
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    assert_eq!(front.backend_key("multi-queue-max-queues").unwrap().as_deref(), Some("1"));
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    let buffer = front.space().buffer(WRITES * WRITE_BYTES / 4096).unwrap();
    ask_for_writes(&mut front.queues[0], &buffer, 1);
    all_succeed(&mut front.queues[0]);
    are_written(&store, 1);
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_remote_whose_connection_is_cut_fails_its_requests_and_the_backend_serves_on() {
    let store = Store::new(REMOTE_BYTES);
    let rig = on_a_remote(&store, false);
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(WRITES * WRITE_BYTES / 4096).unwrap();
    store.hold();
    ask_for_writes(&mut front.queues[0], &buffer, 1);
    store.wait_for_received(1);
    store.cut();
    let replies = front.queues[0].drain(PATIENCE).unwrap();
    assert!(replies.len() == WRITES && replies.iter().all(|reply| !reply.is_ok()));
    store.release();
    wait_until("the end of the connections", || store.connections() == 0);
    let (disk, away) = rig.device().park(PATIENCE).unwrap();
    drop(disk);
    away.go_on_with(remote_disk(&store, false)).map_err(|refused| refused.unfit).unwrap();
    ask_for_writes(&mut front.queues[1], &buffer, 7);
    all_succeed(&mut front.queues[1]);
    are_written(&store, 7);
    front.close(PATIENCE).unwrap();
}
