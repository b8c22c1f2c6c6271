//! Adjacent requests of a sweep share an operation, and nothing else.

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::Op;
use ferrite_loopback::front::{Buffer, FrontOptions, Frontend};
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::abi::{STATUS_ERROR, STATUS_OKAY};

const PAGE: usize = 4096;
/// Requests that are put on the ring before the backend is notified: one sweep.
const SWEEP: usize = 16;

fn rig(merge: bool) -> (Rig, Faults) {
    let faults = Faults::none();
    let tuning = Tuning { merge, ..Tuning::default() };
    (Rig::new(Plan { engine: faults.factory(), tuning, ..Plan::default() }), faults)
}

fn connected(rig: &Rig) -> (Frontend, Buffer) {
    let front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(2 * SWEEP).unwrap();
    let mut random = SplitMix64::new(11);
    for at in (0..buffer.len()).step_by(8) {
        buffer.write(at, &random.next_u64().to_le_bytes());
    }
    (front, buffer)
}

/// The pages of a sweep, in an order that is neither that of the medium nor its opposite.
fn shuffled() -> impl Iterator<Item = usize> {
    (0..SWEEP).map(|i| i * 7 % SWEEP)
}

/// Writes all pages in one sweep; returns the statuses, in the order of the pages.
fn write_all(front: &mut Frontend, buffer: &Buffer) -> Vec<i16> {
    let queue = &mut front.queues[0];
    let tags: Vec<_> = shuffled()
        .map(|page| (queue.write(page as u64 * 8, buffer, page * PAGE, PAGE).unwrap(), page))
        .collect();
    let replies = queue.drain(PATIENCE).unwrap();
    let mut statuses = vec![i16::MIN; SWEEP];
    for reply in replies {
        let (_, page) = tags.iter().find(|(tag, _)| *tag == reply.tag).unwrap();
        statuses[*page] = reply.status;
    }
    statuses
}

/// Reads all pages in one sweep and checks the data.
fn read_all_back(front: &mut Frontend, buffer: &Buffer) {
    let queue = &mut front.queues[0];
    for page in shuffled() {
        queue.read(page as u64 * 8, buffer, (SWEEP + page) * PAGE, PAGE).unwrap();
    }
    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
    let back = buffer.to_vec(SWEEP * PAGE, SWEEP * PAGE);
    assert!(back == buffer.to_vec(0, SWEEP * PAGE));
}

#[test]
fn neighbours_share_an_operation_and_every_page_gets_to_its_place() {
    for merge in [true, false] {
        let (rig, _) = rig(merge);
        let (mut front, buffer) = connected(&rig);
        assert_eq!(write_all(&mut front, &buffer), [STATUS_OKAY; SWEEP]);
        assert!(rig.sectors(0, SWEEP * PAGE) == buffer.to_vec(0, SWEEP * PAGE));
        let counts = rig.counters.counts();
        assert_eq!(counts.merged > 0, merge);
        assert_eq!(counts.transfers + counts.merged, SWEEP as u64);

        read_all_back(&mut front, &buffer);
        front.close(PATIENCE).unwrap();
    }
}

/// So the next sweep's data use the same buffers.
#[test]
fn a_megabyte_is_a_sweep() {
    const LARGE: usize = 128 << 10;
    let (rig, _) = rig(true);
    let mut front = rig.connect(&FrontOptions::default());
    // Each has its own pages: a frontend checks that those of an answered request are released.
    let buffer = front.space().buffer(SWEEP * LARGE / PAGE).unwrap();
    let queue = &mut front.queues[0];
    for i in 0..SWEEP {
        queue.read(i as u64 * 1000, &buffer, i * LARGE, LARGE).unwrap();
    }
    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
    assert_eq!(rig.counters.counts().sweeps, 2);
    front.close(PATIENCE).unwrap();
}

/// Pages in stretches of 112 KiB, in each the even before the odd ones (sources.md 4).
fn even_before_odd(stretches: usize) -> impl Iterator<Item = usize> {
    let stretch = |start| (start..start + 28).step_by(2).chain((start + 1..start + 28).step_by(2));
    (0..stretches).flat_map(move |n| stretch(n * 28))
}

/// Its kind and bytes, if it is a transfer.
fn transfer(op: &Op) -> Option<(Kind, usize)> {
    match op {
        Op::Write { buf, .. } | Op::Read { buf, .. } => Some((Kind::of(op), buf.len())),
        _ => None,
    }
}

#[test]
fn a_batch_in_the_wrong_order_is_one_operation_on_one_piece_of_memory() {
    const STRETCHES: usize = 2;
    const BATCH: usize = 28 * STRETCHES;
    let (rig, faults) = rig(true);
    let front_options = FrontOptions { order: 1, ..FrontOptions::default() };
    let mut front = rig.connect(&front_options);
    let buffer = front.space().buffer(2 * BATCH).unwrap();
    (0..BATCH).for_each(|page| buffer.write(page * PAGE, &[page as u8 + 1; PAGE]));
    // The list has the first piece of a vectored operation.
    faults.list();
    let queue = &mut front.queues[0];
    for page in even_before_odd(STRETCHES) {
        queue.write(page as u64 * 8, &buffer, page * PAGE, PAGE).unwrap();
    }
    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
    for page in even_before_odd(STRETCHES) {
        queue.read(page as u64 * 8, &buffer, (BATCH + page) * PAGE, PAGE).unwrap();
    }
    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
    let bytes = BATCH * PAGE;
    let asked: Vec<_> = faults.take_list().iter().filter_map(transfer).collect();
    assert_eq!(asked, [(Kind::Write, bytes), (Kind::Read, bytes)]);
    assert!(rig.sectors(0, bytes) == buffer.to_vec(0, bytes));
    assert!(buffer.to_vec(bytes, bytes) == buffer.to_vec(0, bytes));
    front.close(PATIENCE).unwrap();
}

#[test]
fn neighbours_of_all_sizes_get_to_their_places_in_any_order() {
    let (rig, _) = rig(true);
    let front_options = FrontOptions { order: 2, ..FrontOptions::default() };
    let mut front = rig.connect(&front_options);
    let mut random = SplitMix64::new(5);
    let pages = 200;
    let buffer = front.space().buffer(2 * pages).unwrap();
    for round in 0..20 {
        for at in (0..pages * PAGE).step_by(512) {
            buffer.write(at, &random.next_u64().to_le_bytes());
        }
        let mut pieces = Vec::new();
        let mut at = 0;
        while pieces.len() < 64 {
            // Mostly whole pages, and some that leave a part of their buffer free.
            let sectors = [8, 8, 8, 16, 24, 7][random.below(6) as usize];
            pieces.push((at, sectors));
            at += sectors;
        }
        for i in (1..pieces.len()).rev() {
            pieces.swap(i, random.below(i as u64 + 1) as usize);
        }
        let queue = &mut front.queues[0];
        for (sector, sectors) in &pieces {
            queue.write(*sector as u64, &buffer, sector * 512, sectors * 512).unwrap();
        }
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
        for (sector, sectors) in &pieces {
            let to = pages * PAGE + sector * 512;
            queue.read(*sector as u64, &buffer, to, sectors * 512).unwrap();
        }
        assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
        let bytes = at * 512;
        assert!(rig.sectors(0, bytes) == buffer.to_vec(0, bytes), "round {round}");
        assert!(buffer.to_vec(pages * PAGE, bytes) == buffer.to_vec(0, bytes), "round {round}");
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn when_a_shared_operation_fails_only_the_request_at_fault_does() {
    let (rig, faults) = rig(true);
    let (mut front, buffer) = connected(&rig);
    let bad = 5 * PAGE as u64;
    faults.set([Ops::from(Kind::Write).touching(bad..bad + 1).fail(EIO)]);
    let queue = &mut front.queues[0];
    for page in 0..SWEEP {
        queue.write(page as u64 * 8, &buffer, page * PAGE, PAGE).unwrap();
    }
    let replies = queue.drain(PATIENCE).unwrap();
    let failed = replies.iter().filter(|r| r.status == STATUS_ERROR).count();
    assert_eq!((replies.len(), failed), (SWEEP, 1));
    let medium = rig.sectors(0, SWEEP * PAGE);
    let wanted = buffer.to_vec(0, SWEEP * PAGE);
    for page in 0..SWEEP {
        let range = page * PAGE..(page + 1) * PAGE;
        assert_eq!(medium[range.clone()] == wanted[range], page != 5, "page {page}");
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_short_shared_operation_is_continued_from_where_it_stopped() {
    for short in [0, 512, 4096, 5000, 15 * PAGE + 513] {
        let (rig, faults) = rig(true);
        let (mut front, buffer) = connected(&rig);
        let fault = if short == 0 { Fault::Nothing } else { Fault::Short(short) };
        faults.once(Kind::Write, fault);
        assert_eq!(write_all(&mut front, &buffer), [STATUS_OKAY; SWEEP], "short by {short}");
        assert!(rig.sectors(0, SWEEP * PAGE) == buffer.to_vec(0, SWEEP * PAGE));
        faults.once(Kind::Read, fault);
        read_all_back(&mut front, &buffer);
        front.close(PATIENCE).unwrap();
    }
}

/// A single request that makes no progress fails. This one shared the operation.
#[test]
fn a_shared_operation_that_stops_inside_a_block_fails_nobody() {
    for short in [100, PAGE + 100, 15 * PAGE + 511] {
        let (rig, faults) = rig(true);
        let (mut front, buffer) = connected(&rig);
        faults.once(Kind::Write, Fault::Short(short));
        assert_eq!(write_all(&mut front, &buffer), [STATUS_OKAY; SWEEP], "short by {short}");
        assert!(rig.sectors(0, SWEEP * PAGE) == buffer.to_vec(0, SWEEP * PAGE));
        faults.once(Kind::Read, Fault::Short(short));
        read_all_back(&mut front, &buffer);
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn nothing_is_moved_across_a_flush() {
    let (rig, faults) = rig(true);
    let (mut front, buffer) = connected(&rig);
    let queue = &mut front.queues[0];
    queue.write(0, &buffer, 0, PAGE).unwrap();
    queue.write(8, &buffer, PAGE, PAGE).unwrap();
    queue.flush().unwrap();
    queue.write(16, &buffer, 2 * PAGE, PAGE).unwrap();
    queue.write(24, &buffer, 3 * PAGE, PAGE).unwrap();
    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.status == STATUS_OKAY));
    // The two before the flush together, and those after it: never three or four of them.
    assert_eq!(faults.seen(&[Kind::Write]), 2);
    assert_eq!(rig.counters.counts().merged, 2);
    front.close(PATIENCE).unwrap();
}
