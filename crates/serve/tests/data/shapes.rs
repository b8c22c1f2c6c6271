//! Valid requests of extreme shapes, compared with a model of the disk (threats.md T15).

use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_loopback::GuestOptions;
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::rig::{Plan, Rig, offer};
use ferrite_testkit::{PATIENCE, few_or_all, scale};
use ferrite_xen::abi::{
    IndirectOp, Message, OP_READ, OP_WRITE, PlainOp, RawSegment, STATUS_ERROR, STATUS_OKAY,
};
use ferrite_xen::hypervisor::GrantRef;

const BYTES: u64 = 8 << 20;

fn plan() -> Plan {
    Plan { bytes: BYTES, ..Plan::default() }
}

/// A unique sector for each number.
fn sector_of(number: u32) -> Vec<u8> {
    (0..128u32).flat_map(|i| (number.wrapping_mul(0x9E37_79B9) ^ i).to_le_bytes()).collect()
}

/// The expected contents of the disk.
struct Model(Vec<u8>);

impl Model {
    fn new() -> Model {
        Model(vec![0; BYTES as usize])
    }

    /// Fills the segments' pages with new data, notes it at `sector`, and sends the write.
    fn write(
        &mut self,
        queue: &mut FrontQueue,
        buffer: &Buffer,
        sector: u64,
        shapes: &[(usize, u8, u8)],
        seed: u32,
    ) {
        let mut at = sector as usize * 512;
        for (i, &(page, first, last)) in shapes.iter().enumerate() {
            for s in first..=last {
                let data =
                    sector_of(seed.wrapping_mul(10_007).wrapping_add(i as u32 * 8 + u32::from(s)));
                buffer.write(page * 4096 + usize::from(s) * 512, &data);
                self.0[at..at + 512].copy_from_slice(&data);
                at += 512;
            }
        }
        send(queue, buffer, true, sector, shapes);
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_OKAY, "{shapes:?}");
    }

    /// Reads into the shapes and compares. The bytes between the shapes must not change.
    fn read(
        &self,
        queue: &mut FrontQueue,
        buffer: &Buffer,
        sector: u64,
        shapes: &[(usize, u8, u8)],
    ) {
        buffer.fill(0, buffer.len(), 0xEE);
        send(queue, buffer, false, sector, shapes);
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_OKAY, "{shapes:?}");
        let mut expected = vec![0xEE; buffer.len()];
        let mut at = sector as usize * 512;
        for &(page, first, last) in shapes {
            let (from, n) = (page * 4096 + usize::from(first) * 512, usize::from(last - first) + 1);
            expected[from..from + n * 512].copy_from_slice(&self.0[at..at + n * 512]);
            at += n * 512;
        }
        assert!(buffer.to_vec(0, buffer.len()) == expected, "sector {sector}: {shapes:?}");
    }
}

fn send(
    queue: &mut FrontQueue,
    buffer: &Buffer,
    write: bool,
    sector: u64,
    shapes: &[(usize, u8, u8)],
) {
    let segments: Vec<RawSegment> =
        shapes.iter().map(|&(page, first, last)| buffer.segment(page, first, last)).collect();
    if segments.len() <= 11 {
        let op = if write { PlainOp::Write } else { PlainOp::Read };
        queue.plain(op, sector, &segments).unwrap();
    } else {
        let op = if write { IndirectOp::Write } else { IndirectOp::Read };
        queue.indirect(op, sector, &segments).unwrap();
    }
}

#[test]
fn requests_of_single_sectors_and_holes_do_what_they_say() {
    let rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions { max_indirect: 256, ..FrontOptions::default() });
    let buffer = front.space().buffer(256).unwrap();
    let queue = &mut front.queues[0];
    let mut model = Model::new();
    let mut shapes: Vec<Vec<(usize, u8, u8)>> = Vec::new();
    // Eleven segments of one sector, at each place in its page.
    shapes.extend((0..8).map(|s| (0..11).map(|page| (page, s, s)).collect()));
    // The most segments, of one sector each, at each place.
    shapes.extend([0, 3, 7].map(|s| (0..256).map(|page| (page, s, s)).collect()));
    // Every second sector of each page, from the even and the odd ones.
    let holes =
        |odd: u8| (0..256).map(move |i| (i / 4, i as u8 % 4 * 2 + odd, i as u8 % 4 * 2 + odd));
    shapes.extend([holes(0).collect(), holes(1).collect::<Vec<_>>()]);
    // Pages backwards; growing and shrinking pieces; whole pages.
    shapes.push((0..64).rev().map(|page| (page, 1, 6)).collect());
    shapes.push((0..200).map(|page| (page, page as u8 % 8, 7)).collect());
    shapes.push((0..200).map(|page| (page, 0, page as u8 % 8)).collect());
    shapes.push((0..256).map(|page| (page, 0, 7)).collect());
    for (i, shapes) in shapes.iter().enumerate() {
        for sector in [0, 1, 7, 4093, BYTES / 512 - 2048] {
            model.write(queue, &buffer, sector, shapes, i as u32 * 8 + sector as u32);
            model.read(queue, &buffer, sector, shapes);
            let other = &shapes[..shapes.len().min(11)];
            model.read(queue, &buffer, sector / 2, other);
        }
        assert!(rig.medium() == model.0, "the medium is not what was written: shape {i}");
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn requests_beyond_the_offer_are_answered_once_and_carry_nothing() {
    let rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions { max_indirect: 256, ..FrontOptions::default() });
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    buffer.fill(0, 4096, 0xDD);
    // 4096 segments, the most that a request can express.
    let segments = vec![buffer.segment(0, 0, 0); 4096];
    for n in [257, 512, 4096] {
        queue.indirect(IndirectOp::Write, 0, &segments[..n]).unwrap();
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR, "{n} segments");
    }
    // A read of nothing.
    let all = [buffer.segment(0, 0, 7); 11];
    for (op, echo) in [(PlainOp::Read, OP_READ), (PlainOp::Write, OP_WRITE)] {
        let message = Message::Plain { op, nr_segments: 0, sector: 0, segments: all };
        queue.message(echo, message).unwrap();
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
    }
    let pages = [GrantRef(buffer.gref(0).0); 8];
    let message = Message::Indirect { op: IndirectOp::Read, nr_segments: 0, sector: 0, pages };
    queue.message(OP_READ, message).unwrap();
    assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
    assert!(are_all(&rig.medium(), 0));
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_flush_with_data_flushes_and_writes_it() {
    let rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(11).unwrap();
    let queue = &mut front.queues[0];
    for (op, byte) in [(PlainOp::Flush, 1), (PlainOp::Barrier, 2)] {
        for n in 1..=11usize {
            buffer.fill(0, buffer.len(), byte * 16 + n as u8);
            let segments: Vec<_> = (0..n).map(|page| buffer.segment(page, 1, 7)).collect();
            queue.plain(op, 3, &segments).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
            assert!(rig.sectors(3, n * 7 * 512).iter().all(|b| *b == byte * 16 + n as u8));
        }
        queue.plain(op, u64::MAX, &[]).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "an empty one names no place");
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn writes_that_overlap_in_flight_leave_one_of_them_in_each_sector() {
    let rig = Rig::new(Plan { pool_bytes: 4 << 20, ..plan() });
    let options = FrontOptions { queues: 2, order: 1, ..FrontOptions::default() };
    let mut front = rig.connect(&options);
    let buffer = front.space().buffer(128 * 4).unwrap();
    let mut random = SplitMix64::new(5);
    for round in 0..60 * scale() {
        // For each sector, the writes of this round.
        let mut writers = vec![Vec::new(); 256];
        let mut number = 0u32;
        for queue in &mut front.queues {
            while queue.free_slots() > 0 {
                let pages = 1 + random.below(4) as usize;
                // In every third round all of them to one place.
                let sector = if round % 3 == 0 { 8 } else { random.below(200) };
                let at = number as usize * 4 * 4096;
                let data = sector_of(round << 8 | number);
                for s in 0..pages * 8 {
                    buffer.write(at + s * 512, &data);
                    writers[sector as usize + s].push(round << 8 | number);
                }
                queue.write(sector, &buffer, at, pages * 4096).unwrap();
                number += 1;
            }
            queue.push().unwrap();
        }
        for queue in &mut front.queues {
            assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
        }
        let medium = rig.sectors(0, 256 * 512);
        for (sector, writers) in writers.iter().enumerate().filter(|(_, w)| !w.is_empty()) {
            let now = &medium[sector * 512..][..512];
            let known = writers.iter().any(|w| now == sector_of(*w));
            assert!(known, "round {round}, sector {sector}: none of {} writes", writers.len());
        }
    }
    front.close(PATIENCE).unwrap();
}

/// Each of sixteen queues, in a thread of its own: writes, a barrier, writes again, to one place, all in flight
/// together. The barrier orders them.
#[test]
fn storms_of_barriers_on_sixteen_queues_end_and_keep_their_order() {
    let offer = Offer { max_queues: 16, ..offer() };
    let guest = GuestOptions { ports: 32, ..GuestOptions::default() };
    let rig = Rig::new(Plan { offer, guest, pool_bytes: 18 << 20, ..plan() });
    let mut front = rig.connect(&FrontOptions { queues: 16, ..FrontOptions::default() });
    assert_eq!(front.queues.len(), 16);
    let space = front.space().clone();
    let threads: Vec<_> = std::mem::take(&mut front.queues)
        .into_iter()
        .enumerate()
        .map(|(q, mut queue)| {
            let buffer = space.buffer(32).unwrap();
            std::thread::spawn(move || {
                let mut slowest = Duration::ZERO;
                let place = q as u64 * 64;
                for round in 0..12 * scale() {
                    let start = Instant::now();
                    let number = |i: u32| (q as u32) << 24 | round << 8 | i;
                    (0..30).for_each(|i| {
                        buffer.write(i * 4096, &sector_of(number(i as u32)).repeat(8));
                    });
                    for i in 0..30usize {
                        let segment = [buffer.segment(i, 0, 7)];
                        match i % 3 {
                            // The same place; the barrier's own write; the same place again.
                            1 => queue.plain(PlainOp::Barrier, place, &segment).unwrap(),
                            _ => queue.plain(PlainOp::Write, place, &segment).unwrap(),
                        };
                    }
                    // Writes after the last barrier: 29 only.
                    let read = [buffer.segment(30, 0, 7)];
                    assert!(queue.drain(PATIENCE).unwrap().iter().all(|r| r.is_ok()));
                    queue.plain(PlainOp::Read, place, &read).unwrap();
                    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                    assert!(
                        buffer.to_vec(30 * 4096, 4096) == sector_of(number(29)).repeat(8),
                        "queue {q}, round {round}: a write before the barrier came after it"
                    );
                    slowest = slowest.max(start.elapsed());
                }
                (queue, slowest)
            })
        })
        .collect();
    let ended: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    let slowest = ended.iter().map(|(_, slowest)| *slowest).max().unwrap();
    println!("slowest round of ten barriers: {slowest:?}");
    assert!(slowest < PATIENCE / 3, "{slowest:?}");
    front.queues = ended.into_iter().map(|(queue, _)| queue).collect();
    front.close(PATIENCE).unwrap();
}

/// With buffers for a fraction of the rings' requests, each request is served in the end.
#[test]
fn largest_requests_on_all_queues_at_once_share_a_small_pool() {
    let guest = GuestOptions { frames: 32 * 1024, grants: 64 * 1024, ports: 64 };
    let rig = Rig::new(Plan { guest, pool_bytes: 1, ..plan() });
    let options = FrontOptions {
        queues: 4,
        order: 0,
        max_indirect: 256,
        check_release: false,
        ..FrontOptions::default()
    };
    let mut front = rig.connect(&options);
    let buffer = front.space().buffer(256).unwrap();
    for round in 0..4u8 {
        buffer.fill(0, buffer.len(), round + 1);
        for (q, queue) in front.queues.iter_mut().enumerate() {
            while queue.free_slots() > 0 {
                let len = [1 << 20, 4096, 1 << 19][queue.free_slots() % 3];
                let at = (q as u64) << 11;
                queue.write(at, &buffer, 0, len).unwrap();
            }
            queue.push().unwrap();
        }
        for queue in &mut front.queues {
            let replies = queue.drain(PATIENCE).unwrap();
            assert_eq!(replies.len(), 32);
            assert!(replies.iter().all(|r| r.is_ok()));
        }
        assert!(are_all(&rig.sectors(0, 4 << 20), round + 1));
    }
    front.close(PATIENCE).unwrap();
}

/// One at a time, each after a short delay, from a guest that does not sleep: each of them reaches the backend at
/// another step before its sleep, and must not be missed.
#[test]
fn single_requests_wake_a_backend_that_is_about_to_sleep() {
    let rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    let mut random = SplitMix64::new(21);
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < Duration::from_millis(few_or_all(300, 3500).into()) {
        rounds += 1;
        queue.read(0, &buffer, 0, 512).unwrap();
        queue.push().unwrap();
        let asked = Instant::now();
        while queue.take().unwrap().is_none() {
            assert!(asked.elapsed() < PATIENCE, "request {rounds} was forgotten");
            std::hint::spin_loop();
        }
        (0..random.below(200)).for_each(|_| std::hint::spin_loop());
    }
    println!("{rounds} requests");
    front.close(PATIENCE).unwrap();
}
