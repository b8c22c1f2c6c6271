//! Storage with every kind of failure (threats.md T6, T18; blkif.md 2, rule 3): the request gets an error or is done,
//! the guest gets only its own bytes, and the disk goes on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::Op;
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::errno::{EAGAIN, EINTR, EIO, ENOMEM, ENOSPC, EOPNOTSUPP};
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::images;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::abi::{OP_DISCARD, PlainOp, STATUS_ERROR, STATUS_NOT_SUPPORTED, STATUS_OKAY};

const BYTES: u64 = 4 << 20;

fn rig() -> (Rig, Faults) {
    let faults = Faults::none();
    let plan = Plan { bytes: BYTES, engine: faults.factory(), ..Plan::default() };
    (Rig::new(plan), faults)
}

fn pattern(sector: u64, bytes: usize) -> Vec<u8> {
    (sector..sector + bytes as u64 / 512)
        .flat_map(|s| (s ^ 0x5A5A).to_le_bytes().repeat(64))
        .collect()
}

fn connected(rig: &Rig) -> (Frontend, Buffer) {
    let front = rig.connect(&FrontOptions { max_indirect: 256, ..FrontOptions::default() });
    let buffer = front.space().buffer(256).unwrap();
    (front, buffer)
}

fn write(queue: &mut FrontQueue, buffer: &Buffer, sector: u64, bytes: usize) -> i16 {
    queue.write(sector, buffer, 0, bytes).unwrap();
    queue.next_reply(PATIENCE).unwrap().status
}

fn read(queue: &mut FrontQueue, buffer: &Buffer, sector: u64, bytes: usize) -> i16 {
    queue.read(sector, buffer, 0, bytes).unwrap();
    queue.next_reply(PATIENCE).unwrap().status
}

fn flush(queue: &mut FrontQueue) -> i16 {
    queue.flush().unwrap();
    queue.next_reply(PATIENCE).unwrap().status
}

#[test]
fn short_transfers_are_continued_until_all_is_done() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    // Whole sectors, and pieces that end within one and have to be repeated.
    faults.set([Ops::among(&Kind::TRANSFERS).meet(Fault::Part)]);
    for (sector, bytes) in [(0, 4096), (9, 11 * 4096), (100, 1 << 20), (3, 512)] {
        let data = pattern(sector, bytes);
        buffer.write(0, &data);
        assert_eq!(write(queue, &buffer, sector, bytes), STATUS_OKAY);
        assert!(rig.sectors(sector, bytes) == data);
        buffer.fill(0, bytes, 0xEE);
        assert_eq!(read(queue, &buffer, sector, bytes), STATUS_OKAY);
        assert!(buffer.to_vec(0, bytes) == data);
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn errors_fail_their_request_and_leave_the_guests_pages_alone() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    // Data of earlier requests in the pool must not be visible.
    buffer.fill(0, buffer.len(), 0x66);
    assert_eq!(write(queue, &buffer, 0, 1 << 20), STATUS_OKAY);
    for fault in [EIO, ENOSPC, ENOMEM].map(Fault::Errno).into_iter().chain([Fault::Nothing]) {
        for bytes in [512, 4096, 1 << 20] {
            faults.once(Kind::Read, fault);
            buffer.fill(0, buffer.len(), 0xEE);
            assert_eq!(read(queue, &buffer, 2048, bytes), STATUS_ERROR, "{fault:?}");
            let untouched = buffer.to_vec(0, buffer.len()).iter().all(|b| *b == 0xEE);
            assert!(untouched, "{fault:?}: bytes of a failed read reached the guest");
            assert_eq!(read(queue, &buffer, 2048, bytes), STATUS_OKAY);
            assert!(buffer.to_vec(0, bytes).iter().all(|b| *b == 0), "the medium is empty there");

            faults.once(Kind::Write, fault);
            buffer.fill(0, buffer.len(), 0xDD);
            assert_eq!(write(queue, &buffer, 4096, bytes), STATUS_ERROR, "{fault:?}");
            assert!(rig.sectors(4096, bytes).iter().all(|b| *b == 0), "{fault:?}");
        }
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn an_error_behind_a_part_fails_the_whole_request() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    buffer.fill(0, buffer.len(), 0x66);
    assert_eq!(write(queue, &buffer, 0, 1 << 20), STATUS_OKAY);
    for end in [Fault::Errno(EIO), Fault::Nothing] {
        faults.in_order(&[Fault::Short(8192), Fault::Short(1000), end]);
        buffer.fill(0, buffer.len(), 0xEE);
        assert_eq!(read(queue, &buffer, 0, 1 << 20), STATUS_ERROR);
        assert!(buffer.to_vec(0, buffer.len()).iter().all(|b| *b == 0xEE));
        assert_eq!(read(queue, &buffer, 0, 1 << 20), STATUS_OKAY);
        assert!(buffer.to_vec(0, buffer.len()).iter().all(|b| *b == 0x66));
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn try_again_is_tried_again_and_not_for_ever() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    buffer.write(0, &pattern(0, 1 << 20));
    for errno in [EAGAIN, EINTR] {
        faults.set([Ops::storage().fail(errno).times(20)]);
        assert_eq!(write(queue, &buffer, 0, 1 << 20), STATUS_OKAY);
        assert_eq!(read(queue, &buffer, 0, 4096), STATUS_OKAY);
        faults.set([Ops::storage().fail(errno)]);
        assert_eq!(write(queue, &buffer, 0, 4096), STATUS_ERROR);
        assert_eq!(read(queue, &buffer, 0, 4096), STATUS_ERROR);
        faults.clear();
        assert_eq!(read(queue, &buffer, 0, 4096), STATUS_OKAY);
    }
    front.close(PATIENCE).unwrap();
}

/// An interrupted flush means nothing for the written data: the disk need not fail.
#[test]
fn an_interrupted_flush_is_done_again() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    for errno in [EINTR, EAGAIN] {
        faults.set([Ops::from(Kind::Sync).fail(errno).times(3)]);
        assert_eq!(flush(queue), STATUS_OKAY, "errno {errno}");
        assert_eq!(write(queue, &buffer, 0, 4096), STATUS_OKAY);
    }
    front.close(PATIENCE).unwrap();
}

/// Checks that writes of all kinds fail and reads do not.
fn assert_latched(front: &mut Frontend, buffer: &Buffer, when: &str) {
    for queue in &mut front.queues {
        assert_eq!(write(queue, buffer, 0, 4096), STATUS_ERROR, "{when}");
        assert_eq!(write(queue, buffer, 0, 1 << 17), STATUS_ERROR, "{when}");
        assert_eq!(flush(queue), STATUS_ERROR, "{when}");
        for op in [PlainOp::Barrier, PlainOp::Flush] {
            queue.plain(op, 0, &[buffer.segment(0, 0, 7)]).unwrap();
            assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR, "{when}");
        }
        queue.discard(0, 8, false).unwrap();
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR, "{when}");
        assert_eq!(read(queue, buffer, 0, 4096), STATUS_OKAY, "{when}");
    }
}

#[test]
fn after_a_failed_flush_all_writes_fail_until_the_disk_is_attached_again() {
    for (name, op, segments) in [
        ("empty flush", PlainOp::Flush, 0),
        ("flush with data", PlainOp::Flush, 1),
        ("empty barrier", PlainOp::Barrier, 0),
        ("barrier with data", PlainOp::Barrier, 1),
    ] {
        let (mut rig, faults) = rig();
        let two = FrontOptions { queues: 2, max_indirect: 256, ..FrontOptions::default() };
        let mut front = rig.connect(&two);
        let buffer = front.space().buffer(256).unwrap();
        assert_eq!(write(&mut front.queues[1], &buffer, 0, 4096), STATUS_OKAY);
        faults.once(Kind::Sync, Fault::Errno(EIO));
        let data = [buffer.segment(0, 0, 7)];
        front.queues[0].plain(op, 0, &data[..segments]).unwrap();
        assert_eq!(front.queues[0].next_reply(PATIENCE).unwrap().status, STATUS_ERROR, "{name}");
        assert_latched(&mut front, &buffer, name);

        // Another process takes over.
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        rig.start();
        assert_latched(&mut front, &buffer, "after a take-over");
        // The guest boots another kernel.
        front.close(PATIENCE).unwrap();
        front.connect(&two, PATIENCE).unwrap();
        assert_latched(&mut front, &buffer, "after a reconnection");
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        rig.start();
        assert_latched(&mut front, &buffer, "after a reconnection and a take-over");
        // Detached and attached.
        rig.machine.unplug(&rig.disk.clone()).unwrap();
        front.close(PATIENCE).unwrap();
        assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        drop(front);
        rig.machine.remove_disk(&rig.disk.clone()).unwrap();
        rig.attach();
        rig.start();
        let mut front = rig.connect(&two);
        assert_eq!(write(&mut front.queues[0], &buffer, 0, 4096), STATUS_OKAY, "attached again");
        assert_eq!(flush(&mut front.queues[0]), STATUS_OKAY);
        front.close(PATIENCE).unwrap();
    }
}

/// The kernel reports a lost write to one caller: a later successful sync means nothing.
/// Another host has taken the LUN: a guest's memory here is no longer the same as the disk.
#[test]
fn after_a_reservation_conflict_all_requests_fail_also_after_a_take_over() {
    const EBADE: i32 = 52;
    let (mut rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    assert_eq!(read(&mut front.queues[0], &buffer, 0, 4096), STATUS_OKAY);
    faults.once(Kind::Write, Fault::Errno(EBADE));
    assert_eq!(write(&mut front.queues[0], &buffer, 0, 4096), STATUS_ERROR);
    for when in ["at once", "after a take-over"] {
        let queue = &mut front.queues[0];
        assert_eq!(read(queue, &buffer, 0, 4096), STATUS_ERROR, "a read {when}");
        assert_eq!(write(queue, &buffer, 0, 4096), STATUS_ERROR, "a write {when}");
        assert_eq!(flush(queue), STATUS_ERROR, "a flush {when}");
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        rig.start();
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_barrier_that_waited_while_a_flush_failed_fails_too() {
    for segments in [0, 1] {
        let (rig, faults) = rig();
        let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
        let buffer = front.space().buffer(1).unwrap();
        buffer.fill(0, 4096, 0x77);
        faults.once(Kind::Sync, Fault::Held(Some(EIO)));
        let held = faults.hold();
        front.queues[0].flush().unwrap();
        front.queues[0].push().unwrap();
        faults.wait_for(Kind::Sync, 1);
        // Taken in one sweep: the answer to the first shows that the second was taken, too.
        front.queues[1].read(BYTES / 512, &buffer, 0, 4096).unwrap();
        let data = [buffer.segment(0, 0, 7)];
        front.queues[1].plain(PlainOp::Barrier, 0, &data[..segments]).unwrap();
        assert_eq!(front.queues[1].next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
        drop(held);
        assert_eq!(front.queues[0].next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
        assert_eq!(front.queues[1].next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
        assert_eq!(rig.sectors(0, 4096), vec![0; 4096], "the barrier's data was written");
        front.close(PATIENCE).unwrap();
    }
}

/// Allocating space also syncs, and the kernel reports the failure only once. Writes into allocated space could still
/// be written, and would be answered.
#[test]
fn a_sync_that_fails_for_a_write_counts_as_a_failed_flush() {
    let faults = Faults::none();
    let dir = dir_in_memory();
    let image = Some(images::make_of_small_clusters(dir.path(), 64 << 20));
    let rig = Rig::new(Plan { image, engine: faults.factory(), ..Plan::default() });
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    for (sector, bytes) in [(0, 4096), (0, 1 << 17)] {
        assert_eq!(write(queue, &buffer, sector, bytes), STATUS_OKAY);
    }
    assert_eq!(flush(queue), STATUS_OKAY);
    faults.set([Ops::from(Kind::Sync).fail(EIO)]);
    let mut further = (4096..120 << 10).step_by(2048);
    let failed = further.any(|sector| write(queue, &buffer, sector, 1 << 20) == STATUS_ERROR);
    assert!(failed, "some write takes space, and syncs");
    faults.clear();
    assert_latched(&mut front, &buffer, "after a write whose sync has failed");
    front.close(PATIENCE).unwrap();
}

/// While a guest reconnects there is no connection, and the process may be replaced just then.
#[test]
fn a_failed_flush_is_remembered_while_nobody_is_connected() {
    let (mut rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    faults.once(Kind::Sync, Fault::Errno(EIO));
    assert_eq!(flush(&mut front.queues[0]), STATUS_ERROR);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    rig.start();
    front
        .connect(&FrontOptions { max_indirect: 256, ..FrontOptions::default() }, PATIENCE)
        .unwrap();
    assert_latched(&mut front, &buffer, "after a restart without a frontend");
    front.close(PATIENCE).unwrap();
}

/// The order of operations on storage, and with a barrier never two at once.
#[test]
fn flushes_and_barriers_are_steps_in_their_order() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    faults.list();
    let step = |op: &Op| match op {
        Op::Sync { .. } => 's',
        Op::Write { .. } => 'w',
        Op::Read { .. } => 'r',
        _ => '?',
    };
    let asked = || faults.take_list().iter().map(step).collect::<String>();
    let data = [buffer.segment(0, 0, 7)];
    for (op, segments, steps) in [
        (PlainOp::Flush, 0, "s"),
        (PlainOp::Flush, 1, "sw"),
        (PlainOp::Barrier, 0, "s"),
        (PlainOp::Barrier, 1, "sws"),
        (PlainOp::Write, 1, "w"),
    ] {
        queue.plain(op, 0, &data[..segments]).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(asked(), steps, "{op:?}");
    }
    // No request before or after a barrier is in flight with it.
    let ops = [PlainOp::Read, PlainOp::Read, PlainOp::Barrier, PlainOp::Read, PlainOp::Barrier];
    for (page, op) in ops.into_iter().enumerate() {
        // A page each: an answer releases the grants of its own request.
        queue.plain(op, 0, &[buffer.segment(page, 0, 7)]).unwrap();
    }
    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
    assert_eq!(asked(), "rrswsrsws");
    front.close(PATIENCE).unwrap();
}

/// A barrier is for the whole disk: no queue has a request in flight meanwhile (blkif.md 2, rule 9).
#[test]
fn nothing_is_under_way_on_any_queue_beside_a_barrier() {
    let (rig, faults) = rig();
    let mut front = rig.connect(&FrontOptions { queues: 4, ..FrontOptions::default() });
    const PLACE: u64 = BYTES / 512 - 8;
    // Only barriers flush here.
    faults.watch_alone([Ops::from(Kind::Write).at(PLACE * 512), Kind::Sync.into()]);
    // Operations stay in flight for long enough to meet others, even if all threads share a processor.
    faults.set([Ops::from(Kind::Write).meet(Fault::LateBelow(Duration::from_millis(1)))]);
    let space = front.space().clone();
    let threads: Vec<_> = std::mem::take(&mut front.queues)
        .into_iter()
        .enumerate()
        .map(|(q, mut queue)| {
            let buffer = space.buffer(32).unwrap();
            std::thread::spawn(move || {
                let data = [buffer.segment(31, 0, 7)];
                for _ in 0..100 * ferrite_testkit::scale() {
                    for i in 0..30 {
                        queue.write(i * 8, &buffer, i as usize * 4096, 4096).unwrap();
                    }
                    if q < 2 {
                        queue.plain(PlainOp::Barrier, PLACE, &data).unwrap();
                    }
                    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
                }
                queue
            })
        })
        .collect();
    front.queues = threads.into_iter().map(|t| t.join().unwrap()).collect();
    let traffic = faults.traffic();
    assert_eq!(traffic.begun_alone(), 600 * ferrite_testkit::scale() as usize);
    assert_eq!(traffic.beside(), 0, "operations beside a barrier");
    front.close(PATIENCE).unwrap();
}

#[test]
fn the_data_of_a_flush_that_fails_is_not_written() {
    let (rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    buffer.fill(0, 4096, 0x77);
    faults.once(Kind::Sync, Fault::Errno(EIO));
    front.queues[0].plain(PlainOp::Flush, 0, &[buffer.segment(0, 0, 7)]).unwrap();
    assert_eq!(front.queues[0].next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
    assert_eq!(rig.sectors(0, 4096), vec![0; 4096]);
}

#[test]
fn a_medium_without_discard_says_so_and_one_that_fails_does_not() {
    let (rig, faults) = rig();
    let (mut front, _) = connected(&rig);
    let queue = &mut front.queues[0];
    for (errno, status) in [(EIO, STATUS_ERROR), (EOPNOTSUPP, STATUS_NOT_SUPPORTED)] {
        faults.once(Kind::PunchHole, Fault::Errno(errno));
        queue.discard(0, 8, false).unwrap();
        let reply = queue.next_reply(PATIENCE).unwrap();
        assert_eq!((reply.operation, reply.status), (OP_DISCARD, status));
    }
    front.close(PATIENCE).unwrap();
}

/// A part of a block is written by reading the block first. If that fails, nothing is written, and the disk is
/// available to others again.
#[test]
fn errors_around_partial_blocks_change_nothing_and_hold_nothing_up() {
    let dir = dir_in_memory();
    let image = dir.path().join("disk.img");
    std::fs::write(&image, pattern(0, BYTES as usize)).unwrap();
    let Some(device) = Loop::attach(&image, 4096) else { return };
    let faults = Faults::none();
    let plan = Plan { image: Some(device.0.clone()), engine: faults.factory(), ..Plan::default() };
    let rig = Rig::new(plan);
    let mut front = rig.connect(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let buffer = front.space().buffer(16).unwrap();
    buffer.fill(0, buffer.len(), 0xDD);
    let mut expected = pattern(0, 1 << 16);
    for (sector, bytes) in [(1, 512), (3, 4096), (15, 8192), (8, 512), (9, 11 * 4096)] {
        for (of, fault) in [
            (Kind::Read, Fault::Errno(EIO)),
            (Kind::Read, Fault::Nothing),
            (Kind::Write, Fault::Errno(ENOSPC)),
            (Kind::Write, Fault::Nothing),
        ] {
            faults.once(of, fault);
            assert_eq!(write(&mut front.queues[0], &buffer, sector, bytes), STATUS_ERROR);
            assert!(rig.sectors(0, 1 << 16) == expected, "{fault:?} at {sector}");
            // Alone or not, on either queue.
            assert_eq!(write(&mut front.queues[1], &buffer, 4095, 512), STATUS_OKAY);
            assert_eq!(read(&mut front.queues[0], &buffer, 512, 4096), STATUS_OKAY);
            buffer.fill(0, buffer.len(), 0xDD);
        }
        // Short ones are continued.
        faults.set([Ops::among(&Kind::TRANSFERS).meet(Fault::Short(4096))]);
        assert_eq!(write(&mut front.queues[0], &buffer, sector, bytes), STATUS_OKAY);
        expected[sector as usize * 512..][..bytes].fill(0xDD);
        assert!(rig.sectors(0, 1 << 16) == expected, "{bytes} bytes at {sector}");
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn random_faults_under_load_lose_no_request_and_no_byte() {
    let (rig, faults) = rig();
    let two = FrontOptions { queues: 2, order: 1, ..FrontOptions::default() };
    let mut front = rig.connect(&two);
    let buffer = front.space().buffer(128 * 4).unwrap();
    let errors = [Fault::Errno(EIO), Fault::Errno(EAGAIN), Fault::Half, Fault::Half];
    let others = [Fault::Nothing, Fault::None, Fault::None, Fault::None];
    faults.set([Ops::storage().meet_any(11, &[errors, others].concat())]);
    let mut random = SplitMix64::new(12);
    let mut good = 0;
    for round in (0..40 * ferrite_testkit::scale()).map(|round| round as u8) {
        let mut asked = Vec::new();
        for (q, queue) in front.queues.iter_mut().enumerate() {
            while queue.free_slots() > 0 {
                let place = asked.len();
                let bytes = 4096 * (1 + random.below(4) as usize);
                let is_write = random.below(2) == 0;
                let at = place * 4 * 4096;
                buffer.fill(at, 4 * 4096, if is_write { round | 1 } else { 0xEE });
                let sector = place as u64 * 32;
                let tag = match is_write {
                    true => queue.write(sector, &buffer, at, bytes).unwrap(),
                    false => queue.read(sector, &buffer, at, bytes).unwrap(),
                };
                asked.push((q, tag, is_write, sector, bytes, at));
            }
            queue.push().unwrap();
        }
        for q in 0..2 {
            for reply in front.queues[q].drain(PATIENCE).unwrap() {
                let asked = asked.iter().find(|a| a.0 == q && a.1 == reply.tag).unwrap();
                let &(_, _, is_write, sector, bytes, at) = asked;
                let (ours, medium) = (buffer.to_vec(at, bytes), rig.sectors(sector, bytes));
                if reply.is_ok() {
                    good += 1;
                    assert!(ours == medium, "sector {sector}, write: {is_write}");
                } else if !is_write {
                    assert!(ours.iter().all(|b| *b == 0xEE), "a failed read left bytes");
                }
            }
        }
    }
    assert!(good > 500, "{good}");
    front.close(PATIENCE).unwrap();
}

/// The engine fails as a whole. The backend ends with the reason and leaves states and table unchanged; a successor
/// executes the unanswered requests.
#[test]
fn an_engine_that_breaks_ends_the_backend_and_not_the_disk() {
    let (mut rig, faults) = rig();
    let (mut front, buffer) = connected(&rig);
    assert_eq!(write(&mut front.queues[0], &buffer, 0, 4096), STATUS_OKAY);
    faults.break_engine("queue-0");
    buffer.fill(0, 8 * 8192, 0x42);
    for i in 0..8 {
        front.queues[0].write(i * 16, &buffer, i as usize * 8192, 8192).unwrap();
    }
    front.queues[0].push().unwrap();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::Host { .. }), "{error}");
    assert!(error.to_string().contains("queue 0"), "{error}");
    assert_eq!(front.backend_state().unwrap(), 4);
    faults.break_engine("");
    rig.start();
    assert!(front.queues[0].drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
    assert!(rig.sectors(0, 8 * 8192).iter().all(|b| *b == 0x42));
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_queue_that_breaks_does_not_hold_up_one_that_waits_to_be_alone() {
    let (mut rig, faults) = rig();
    let two = FrontOptions { queues: 2, ..FrontOptions::default() };
    let mut front = rig.connect(&two);
    let buffer = front.space().buffer(2).unwrap();
    for round in 0..10 {
        // Queue 0 has requests in flight when its engine fails; queue 1 waits to be alone on the disk.
        faults.break_engine("queue-0");
        front.queues[0].write(0, &buffer, 0, 4096).unwrap();
        front.queues[1].plain(PlainOp::Barrier, 64, &[buffer.segment(1, 0, 7)]).unwrap();
        if round % 2 == 0 {
            front.queues[0].push().unwrap();
        }
        front.queues[1].push().unwrap();
        front.queues[0].push().unwrap();
        let end = Instant::now() + PATIENCE;
        while rig.is_running() {
            assert!(Instant::now() < end, "round {round}: the backend does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        rig.join().unwrap_err();
        faults.break_engine("");
        rig.start();
        for queue in &mut front.queues {
            assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
        }
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn an_engine_that_cannot_be_made_is_an_error_that_leaves_the_guest_waiting() {
    let no_engine = Plan {
        bytes: BYTES,
        engine: Arc::new(|_, _| Err(std::io::Error::from_raw_os_error(ENOMEM))),
        ..Plan::default()
    };
    let mut rig = Rig::new(no_engine);
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    front.offer(&FrontOptions::default()).unwrap();
    let error = rig.join().unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    let state = front.backend_state().unwrap();
    assert!([2, 4].contains(&state), "{state}: the guest would give the disk up");
    assert_eq!(front.space().memory().bound_ports(), 0);
}
