//! Discards: such a request costs a guest nothing and may cover its whole disk (threats.md T21). Its cost is bounded by
//! the space to free, all other requests go first, and it does not delay the backend's end.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferrite_io::engine::Op;
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, Reply};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images, is_night};
use ferrite_xen::abi::OP_DISCARD;
use rustix::fs::{FallocateFlags, fallocate};
use tempfile::TempDir;

const TIB: u64 = 1 << 40;
/// So large that a discard of all of it, a GiB at a time, has a million parts.
const PIB: u64 = 1 << 50;
const PARTS: u64 = 1 << 20;
/// The number of slots of a ring of four pages.
const DISCARDS: u64 = 128;
/// Requests that a queue takes from its ring at once.
const SWEEP: u64 = 16;

/// A disk of one queue on this image.
fn connected(image: PathBuf) -> (Rig, Frontend, Buffer) {
    let rig = Rig::new(Plan { image: Some(image), ..Plan::default() });
    let front = rig.connect(&FrontOptions { order: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(16).unwrap();
    (rig, front, buffer)
}

fn sparse(dir: &TempDir, bytes: u64) -> PathBuf {
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn discard_all(queue: &mut FrontQueue, bytes: u64, times: u64) {
    for _ in 0..times {
        queue.discard(0, bytes / 512, false).unwrap();
    }
}

fn all_ok(replies: &[Reply]) -> bool {
    replies.iter().all(|reply| reply.is_ok())
}

/// Discards the whole disk so often at once; returns the number of parts.
fn parts(rig: &Rig, front: &mut Frontend, bytes: u64, times: u64) -> u64 {
    let before = rig.counters.counts();
    discard_all(&mut front.queues[0], bytes, times);
    let replies = front.queues[0].drain(PATIENCE).unwrap();
    assert!(replies.len() == times as usize && all_ok(&replies));
    rig.counters.counts().since(&before).discard_parts
}

/// 64 TiB are 2^30 clusters, in 2^17 entries of L1; in VHD, which is smaller, a million blocks. A part covers thousands
/// of these.
#[test]
fn discards_of_whole_thin_images_take_few_parts_and_what_is_allocated_some_more() {
    // By night in all slots.
    let times = if is_night() { DISCARDS } else { 16 };
    for (format, bytes, most) in [("qcow2", 64 * TIB, 4), ("vhd", 2040 << 30, 80)] {
        let dir = dir_in_memory();
        let (rig, mut front, buffer) = connected(images::make(dir.path(), format, bytes));
        let empty = parts(&rig, &mut front, bytes, times);
        assert!((times..=times * most).contains(&empty), "{format}: {empty} parts");
        // Each of these allocates a cluster and a table, or a block.
        const WRITES: u64 = 16;
        for i in 0..WRITES {
            front.queues[0].write(i * (bytes / 512 / WRITES), &buffer, 0, 4096).unwrap();
            assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        }
        let some = parts(&rig, &mut front, bytes, times);
        // A table is read in 16 slices, each of which may need I/O.
        let most = times * (most + 20 * WRITES);
        assert!((empty..=most).contains(&some), "{format}: {some} parts");
        front.close(PATIENCE).unwrap();
    }
}

/// A file that is one hole is one part, and one with data has a part for each GiB.
#[test]
fn discards_of_a_whole_sparse_file_take_what_there_is_to_free() {
    let dir = dir_in_memory();
    let image = sparse(&dir, 16 * TIB);
    let file = OpenOptions::new().write(true).open(&image).unwrap();
    let (rig, mut front, _buffer) = connected(image);
    fallocate(&file, FallocateFlags::KEEP_SIZE, 15 * TIB, 65 << 20).unwrap();
    let freed = parts(&rig, &mut front, 16 * TIB, DISCARDS);
    // The first few find the data, and the last GiB of the disk frees it; four run at once.
    assert!((15 << 10..5 * (16 << 10) + DISCARDS).contains(&freed), "{freed} parts");
    assert_eq!(parts(&rig, &mut front, 16 * TIB, DISCARDS), DISCARDS);
    front.close(PATIENCE).unwrap();
}

/// Reads are sent after discards of the whole disk, in one batch. They are answered before most of the discards have
/// ended, since each lets others go first after each part.
#[test]
fn reads_behind_discards_of_the_whole_disk_overtake_them() {
    // Seven sweeps take all of them. Each turn does two parts, and the first part of each new discard; a discard has
    // three parts, or sixty-four.
    for (format, bytes, most) in [("qcow2", 64 * TIB, 28), ("vhd", 2040 << 30, 0)] {
        let dir = dir_in_memory();
        let (_rig, mut front, buffer) = connected(images::make(dir.path(), format, bytes));
        let queue = &mut front.queues[0];
        const READS: u64 = 16;
        discard_all(queue, bytes, DISCARDS - READS);
        let reads: Vec<_> = (0..READS)
            .map(|i| queue.read(i * 8, &buffer, i as usize * 4096, 4096).unwrap())
            .collect();
        let replies = queue.drain(PATIENCE).unwrap();
        assert!(replies.len() == DISCARDS as usize && all_ok(&replies));
        let last = replies.iter().rposition(|reply| reads.contains(&reply.tag)).unwrap();
        let before = last + 1 - READS as usize;
        assert!(before <= most, "{format}: {before} discards were done before the last read");
        front.close(PATIENCE).unwrap();
    }
}

/// The reason of a backend's end.
#[derive(Clone, Copy, Debug)]
enum End {
    Stop,
    Unplug,
    Close,
}

/// A disk whose discards have a million parts each.
fn with_long_discards(dir: &TempDir) -> (Rig, Frontend) {
    let image = sparse(dir, PIB);
    let file = OpenOptions::new().write(true).open(&image).unwrap();
    // Outside of the discards, so that there is always space to free.
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 65 << 20).unwrap();
    let (rig, front, _buffer) = connected(image);
    (rig, front)
}

/// Sends discards in all slots, until all are taken. The next backend answers those that are on the ring at the end.
fn discards_under_way(rig: &Rig, front: &mut Frontend) {
    let before = rig.counters.counts();
    for _ in 0..DISCARDS {
        front.queues[0].discard(1 << 20, PIB / 512 - (1 << 20), false).unwrap();
    }
    front.queues[0].push().unwrap();
    let patience = Instant::now() + PATIENCE;
    loop {
        let counts = rig.counters.counts().since(&before);
        if counts.sweeps == DISCARDS / SWEEP && counts.discard_parts > 0 {
            return;
        }
        assert!(Instant::now() < patience, "not all are taken: {counts}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// They end, and are answered, when the queue stops, including those in flight.
#[test]
fn discards_end_early_and_well_when_the_backend_is_to_end() {
    for end in [End::Stop, End::Unplug, End::Close] {
        let dir = dir_in_memory();
        let (mut rig, mut front) = with_long_discards(&dir);
        discards_under_way(&rig, &mut front);
        match end {
            End::Stop => assert_eq!(rig.stop().unwrap(), Outcome::Stopped),
            End::Unplug => {
                let disk = rig.disk.clone();
                rig.machine.unplug(&disk).unwrap();
                front.wait_for_backend(&[5], PATIENCE).unwrap();
            }
            End::Close => {}
        }
        if !matches!(end, End::Stop) {
            front.close(PATIENCE).unwrap();
        }
        let parts = rig.counters.counts().discard_parts;
        assert!(parts < PARTS / 2, "{end:?}: {parts} parts were done");
        if matches!(end, End::Stop) {
            let replies = front.queues[0].drain(PATIENCE).unwrap();
            assert!(replies.len() == DISCARDS as usize && all_ok(&replies), "{end:?}");
        }
    }
}

/// Parking the disk ends discards early, too, however often the guest sends more.
#[test]
fn discards_end_early_and_well_when_the_disk_is_parked() {
    let dir = dir_in_memory();
    let (rig, mut front) = with_long_discards(&dir);
    for round in 0..3 {
        discards_under_way(&rig, &mut front);
        let (disk, away) = rig.device().park(PATIENCE).expect("discards keep the disk from it");
        let parts = rig.counters.counts().discard_parts;
        assert!(parts < PARTS / 2, "round {round}: {parts} parts were done");
        away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
        let replies = front.queues[0].drain(PATIENCE).unwrap();
        assert!(replies.len() == DISCARDS as usize && all_ok(&replies), "round {round}");
    }
    front.close(PATIENCE).unwrap();
}

/// A device gets each GiB, whether there is space to free or not: reads sent after discards of all of it are answered
/// before the first of these, which end early when the queue stops.
#[test]
fn discards_of_a_whole_device_let_reads_go_first_and_hold_up_no_end() {
    let dir = dir_in_memory();
    let Some(device) = Loop::attach(&sparse(&dir, PIB), 4096) else { return };
    let (mut rig, mut front, buffer) = connected(device.0.clone());
    const READS: u64 = 16;
    let queue = &mut front.queues[0];
    discard_all(queue, PIB, DISCARDS - READS);
    let reads: Vec<_> =
        (0..READS).map(|i| queue.read(i * 8, &buffer, i as usize * 4096, 4096).unwrap()).collect();
    for _ in &reads {
        let reply = queue.next_reply(PATIENCE).unwrap();
        assert!(reply.is_ok() && reads.contains(&reply.tag), "a discard was done before a read");
    }
    let patience = Instant::now() + PATIENCE;
    while rig.counters.counts().discard_parts <= DISCARDS {
        assert!(Instant::now() < patience, "a discard is one part");
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    let parts = rig.counters.counts().discard_parts;
    assert!(parts < PARTS / 2, "{parts} parts were done");
    let replies = front.queues[0].drain(PATIENCE).unwrap();
    assert!(replies.len() as u64 == DISCARDS - READS && all_ok(&replies));
}

/// Small discards of adjacent blocks, or of every other block.
fn small_discards(queue: &mut FrontQueue, count: u64, step: u64) {
    for i in 0..count {
        queue.discard(i * step * 8, 8, false).unwrap();
    }
}

/// A disk whose operations the test records.
fn watched(dir: &TempDir, queues: u32) -> (Rig, Frontend, Faults) {
    let faults = Faults::none();
    let image = sparse(dir, TIB);
    let (image, engine) = (Some(image), faults.factory());
    let rig = Rig::new(Plan { image, engine, ..Plan::default() });
    let front = rig.connect(&FrontOptions { order: 2, queues, ..FrontOptions::default() });
    (rig, front, faults)
}

/// Waiting discards are merged, if they are adjacent.
#[test]
fn discards_that_follow_each_other_are_done_together() {
    for (step, few) in [(1, true), (2, false)] {
        let dir = dir_in_memory();
        let (rig, mut front, faults) = watched(&dir, 1);
        let held = faults.hold();
        faults.once(Ops::among(&[Kind::PunchHole]), Fault::Held(None));
        small_discards(&mut front.queues[0], DISCARDS, step);
        front.queues[0].push().unwrap();
        faults.wait_for(Kind::PunchHole, 1);
        drop(held);
        let replies = front.queues[0].drain(PATIENCE).unwrap();
        assert!(replies.len() == DISCARDS as usize && all_ok(&replies));
        let punched = faults.seen(&[Kind::PunchHole]);
        // At most the first four of each sweep, and those that were merged meanwhile.
        assert_eq!(punched <= 64, few, "{punched} of {DISCARDS}");
        assert_eq!(rig.counters.counts().discard_parts, punched);
        front.close(PATIENCE).unwrap();
    }
}

/// Discards that were merged with a failing one fail, too.
#[test]
fn each_of_the_discards_that_are_done_together_is_answered_as_all_of_them() {
    let dir = dir_in_memory();
    let (_rig, mut front, faults) = watched(&dir, 1);
    faults.set([Ops::among(&[Kind::PunchHole]).meet(Fault::Errno(5))]);
    small_discards(&mut front.queues[0], DISCARDS, 1);
    let replies = front.queues[0].drain(PATIENCE).unwrap();
    assert!(replies.len() == DISCARDS as usize && replies.iter().all(|reply| !reply.is_ok()));
    front.close(PATIENCE).unwrap();
}

/// Other requests for a file wait while a part of it is punched, as all of these are serialised.
#[test]
fn discards_of_all_queues_are_done_one_at_a_time() {
    let dir = dir_in_memory();
    let (_rig, mut front, faults) = watched(&dir, 4);
    faults.set([Ops::among(&[Kind::PunchHole]).meet(Fault::Late(Duration::from_millis(1)))]);
    for queue in &mut front.queues {
        small_discards(queue, DISCARDS, 2);
        queue.push().unwrap();
    }
    for queue in &mut front.queues {
        assert!(all_ok(&queue.drain(PATIENCE).unwrap()));
    }
    assert_eq!(faults.traffic().most(), 1);
    front.close(PATIENCE).unwrap();
}

/// The file system allows no other access to a file while it punches. Reads get as much time as discards, and do far
/// more in it than between two discards.
#[test]
fn reads_beside_discards_have_half_of_the_time() {
    let dir = dir_in_memory();
    let (_rig, mut front, faults) = watched(&dir, 1);
    let (punches, reads) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let seen = (punches.clone(), reads.clone());
    faults.before_each(move |op| match op {
        Op::PunchHole { .. } => {
            seen.0.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(20));
        }
        _ => drop(seen.1.fetch_add(1, Ordering::Relaxed)),
    });
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    let mut left = DISCARDS - 1;
    small_discards(queue, left, 2);
    queue.write(1 << 20, &buffer, 0, 4096).unwrap();
    // One at a time.
    while left > DISCARDS / 2 {
        let reply = queue.next_reply(PATIENCE).unwrap();
        assert!(reply.is_ok());
        match reply.operation {
            OP_DISCARD => left -= 1,
            _ => drop(queue.read(1 << 20, &buffer, 0, 4096).unwrap()),
        }
    }
    let (punches, reads) = (punches.load(Ordering::Relaxed), reads.load(Ordering::Relaxed));
    assert!(reads > 40 * punches, "{reads} reads beside {punches} discards");
    queue.drain(PATIENCE).unwrap();
    front.close(PATIENCE).unwrap();
}
