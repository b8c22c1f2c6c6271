//! Guests that change their memory during reads (threats.md T1), use invalid grants (T5), and publish impossible
//! indices (T13).

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_loopback::CopyWith;
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, RingWord};
use ferrite_serve::polling::PollWindow;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::rig::{Plan, Rig, mover};
use ferrite_testkit::{PATIENCE, few_or_all, scale};
use ferrite_xen::abi::{
    IndirectOp, MAX_DIRECT_SEGMENTS, Message, OP_READ, PlainOp, Protocol, RawSegment, Request,
    STATUS_ERROR, STATUS_NOT_SUPPORTED, STATUS_OKAY,
};
use ferrite_xen::hypervisor::{DomId, GrantRef};
use ferrite_xen::mover::Mover;

/// The contents of the guest's pages, and of the medium.
const GUEST: u8 = 0x11;
const MEDIUM: u8 = 0x22;
/// Never granted.
const PRIVATE: u8 = 0x33;

/// Sends `message`, identified by the id's upper half only: the flipper changes the bytes of the lower half of the
/// response's id.
fn raw(queue: &mut FrontQueue, number: u64, message: Message) {
    let response_op = OP_READ;
    let request = Request { id: number << 32, response_op, message };
    queue.raw_request(&request.encode(Protocol::X86_64));
}

/// Takes all answers; each must be one of `pending`.
fn take_all(queue: &mut FrontQueue, pending: &mut HashSet<u64>) -> usize {
    let mut taken = 0;
    while let Some((response, _)) = queue.take_raw().unwrap() {
        let number = response.id >> 32;
        assert!(pending.remove(&number), "id {number} was answered twice or never asked");
        let status = response.status;
        assert!([STATUS_OKAY, STATUS_ERROR, STATUS_NOT_SUPPORTED].contains(&status), "{status}");
        taken += 1;
    }
    taken
}

/// Changes the fields that decide a backend's actions, as fast as a processor can: operation, counts, shapes of
/// segments in the slots and on the indirect pages. The ids stay.
fn flip(front_ring: &ferrite_loopback::front::RawRing, descriptors: &Buffer) -> u64 {
    let mut flips = 0;
    for index in 0..front_ring.entries() {
        let at = front_ring.slot_at(index);
        for (offset, values) in [
            (0, [6u8, 0, 1, 6]),
            (1, [255, 1, 11, 0]),
            (2, [255, 2, 64, 0]),
            (3, [0, 1, 0, 255]),
            (16, [0, 255, 8, 127]),
            (28, [0, 7, 255, 1]),
            (29, [7, 0, 3, 255]),
            (36, [7, 200, 0, 2]),
            (37, [0, 7, 8, 5]),
        ] {
            values.into_iter().for_each(|value| front_ring.poke(at + offset, &[value]));
            flips += 4;
        }
        let segment = index as usize % 64 * 8;
        for value in [0, 255, 3, 7] {
            descriptors.poke(segment + 4, value);
            descriptors.poke(segment + 5, value ^ 4);
            // Another page, or none.
            descriptors.poke(segment + 3, if value == 255 { 0x80 } else { 0 });
            flips += 3;
        }
    }
    flips
}

#[test]
fn words_that_change_while_they_are_read_do_no_harm() {
    let rig = Rig::new(Plan { bytes: 4 << 20, ..Plan::default() });
    std::fs::write(&rig.image, vec![MEDIUM; 4 << 20]).unwrap();
    let mut front = rig.connect(&FrontOptions { max_indirect: 64, ..FrontOptions::default() });
    let space = front.space().clone();
    let (data, private) = (space.buffer(64).unwrap(), space.buffer(64).unwrap());
    data.fill(0, data.len(), GUEST);
    private.fill(0, private.len(), PRIVATE);
    (0..private.pages()).for_each(|page| private.revoke(page).unwrap());
    let descriptors = Arc::new(space.buffer(1).unwrap());
    for i in 0..64 {
        descriptors.write(i * 8, &data.segment(i, 0, 7).encode());
    }

    let stop = Arc::new(AtomicBool::new(false));
    let flips = Arc::new(AtomicU64::new(0));
    let flipper = std::thread::spawn({
        let (ring, descriptors) = (front.queues[0].ring(), descriptors.clone());
        let (stop, flips) = (stop.clone(), flips.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                flips.fetch_add(flip(&ring, &descriptors), Ordering::Relaxed);
            }
        }
    });
    let queue = &mut front.queues[0];
    let mut pending = HashSet::new();
    let end = Instant::now() + Duration::from_millis(few_or_all(800, 12_500).into());
    let mut number = 0u64;
    let mut last = Instant::now();
    while Instant::now() < end || number <= 1000 || !pending.is_empty() {
        let goes_on = Instant::now() < end || number <= 1000;
        while pending.len() < queue.entries() as usize && goes_on {
            number += 1;
            pending.insert(number);
            let sector = number % 4096;
            let message = if number.is_multiple_of(2) {
                let op = if number.is_multiple_of(4) { PlainOp::Read } else { PlainOp::Write };
                let segments = std::array::from_fn(|i| data.segment(i, 0, 7));
                Message::Plain { op, nr_segments: 11, sector, segments }
            } else {
                let op = if number % 4 == 1 { IndirectOp::Read } else { IndirectOp::Write };
                let mut pages = [GrantRef(0); 8];
                pages[0] = descriptors.gref(0);
                Message::Indirect { op, nr_segments: 64, sector, pages }
            };
            raw(queue, number, message);
        }
        queue.push().unwrap();
        queue.notify().unwrap();
        if take_all(queue, &mut pending) > 0 {
            last = Instant::now();
        }
        assert!(last.elapsed() < PATIENCE, "{} requests have no answer", pending.len());
    }
    stop.store(true, Ordering::Relaxed);
    flipper.join().unwrap();
    println!("{} flips, {number} requests", flips.load(Ordering::Relaxed));

    let known = |bytes: &[u8]| {
        let is_whole = |part: &[u8]| are_all(part, GUEST) || are_all(part, MEDIUM);
        let is_known = |part: &[u8]| part.iter().all(|b| [GUEST, MEDIUM].contains(b));
        bytes.chunks(512).all(|part| is_whole(part) || is_known(part))
    };
    assert!(known(&data.to_vec(0, data.len())), "foreign bytes reached the guest");
    assert!(known(&rig.medium()), "foreign bytes reached the medium");
    assert_eq!(private.to_vec(0, private.len()), vec![PRIVATE; private.len()]);
    // The queue works as before; numbers of the front start at 0, like all tags.
    let queue = &mut front.queues[0];
    queue.write(0, &data, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    front.close(PATIENCE).unwrap();
    assert_eq!(space.memory().grants().users(), 0);
}

/// A queue under test, and a check that it goes on.
struct Victim {
    front: Frontend,
    good: Buffer,
    round: u8,
}

impl Victim {
    fn new(rig: &Rig) -> Victim {
        let options =
            FrontOptions { max_indirect: 64, check_release: false, ..FrontOptions::default() };
        let front = rig.connect(&options);
        let good = front.space().buffer(16).unwrap();
        Victim { front, good, round: 0 }
    }

    fn queue(&mut self) -> &mut FrontQueue {
        &mut self.front.queues[0]
    }

    fn status(&mut self) -> i16 {
        self.queue().next_reply(PATIENCE).unwrap().status
    }

    fn goes_on(&mut self, rig: &Rig) {
        self.round = self.round.wrapping_add(1) | 1;
        self.good.fill(0, 8192, self.round);
        let (queue, good) = (&mut self.front.queues[0], &self.good);
        queue.write(2000, good, 0, 8192).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(rig.sectors(2000, 8192), vec![self.round; 8192]);
    }
}

/// A segment list of `n` good pages with one bad reference in the middle.
fn with_bad(good: &Buffer, n: usize, bad: u32) -> Vec<RawSegment> {
    let segment = |i| match i == n / 2 {
        true => RawSegment { gref: bad, first_sect: 0, last_sect: 7 },
        false => good.segment(i % good.pages(), 0, 7),
    };
    (0..n).map(segment).collect()
}

#[test]
fn a_bad_grant_fails_its_request_and_nothing_else() {
    for copy_with in [CopyWith::Memcpy, CopyWith::ProcessVm] {
        let rig = Rig::new(Plan { bytes: 4 << 20, copy_with, ..Plan::default() });
        let mut v = Victim::new(&rig);
        let space = v.front.space().clone();
        let table = space.memory().grants();
        let odd = space.buffer(4).unwrap();
        odd.revoke(0).unwrap();
        odd.grant(1, true);
        table.grant(odd.gref(2), DomId(7), odd.frame(2), false);
        let beyond = odd.gref(3);
        let word = table.raw(beyond).unwrap() & ((1 << 40) - 1);
        table.set_raw(beyond, word | 0xFF_FFF0 << 40);
        let ungranted = odd.gref(0).0;
        let bad = [0, u32::MAX, table.len(), ungranted, odd.gref(2).0, beyond.0];
        for bad in bad {
            for n in [1, 11] {
                let segments = with_bad(&v.good, n, bad);
                for op in [PlainOp::Read, PlainOp::Write, PlainOp::Barrier, PlainOp::Flush] {
                    v.queue().plain(op, 0, &segments).unwrap();
                    assert_eq!(v.status(), STATUS_ERROR, "{op:?} {n} {bad:#x} {copy_with}");
                    v.goes_on(&rig);
                }
            }
            let segments = with_bad(&v.good, 40, bad);
            for op in [IndirectOp::Read, IndirectOp::Write] {
                v.queue().indirect(op, 0, &segments).unwrap();
                assert_eq!(v.status(), STATUS_ERROR, "indirect {op:?} {bad:#x}");
                // The page of descriptors itself.
                let pages = [GrantRef(bad); 8];
                let message = Message::Indirect { op, nr_segments: 20, sector: 0, pages };
                v.queue().message(op.byte(), message).unwrap();
                assert_eq!(v.status(), STATUS_ERROR, "indirect page {op:?} {bad:#x}");
                v.goes_on(&rig);
            }
        }
        assert_eq!(rig.sectors(0, 4096 * 40), vec![0; 4096 * 40], "nothing was written");
        // A page for reading only is valid for writes, not for reads.
        let segments = with_bad(&v.good, 11, odd.gref(1).0);
        v.queue().plain(PlainOp::Read, 0, &segments).unwrap();
        assert_eq!(v.status(), STATUS_ERROR);
        v.queue().plain(PlainOp::Write, 0, &segments).unwrap();
        assert_eq!(v.status(), STATUS_OKAY);
        v.goes_on(&rig);
        assert_eq!(v.front.queues[0].in_flight(), 0);
        v.front.close(PATIENCE).unwrap();
        assert_eq!(space.memory().grants().users(), 0);
    }
}

/// A request's buffer still has the descriptors of the previous request, which name valid pages. The page that should
/// replace them was not copied.
#[test]
fn a_page_of_descriptors_that_was_not_copied_is_not_read() {
    const SEGMENTS: usize = 16;
    let rig = Rig::new(Plan { bytes: 16 << 20, ..Plan::default() });
    let mut v = Victim::new(&rig);
    let space = v.front.space().clone();
    let descriptors = space.buffer(SEGMENTS).unwrap();
    for page in 0..SEGMENTS {
        for i in 0..SEGMENTS {
            let at = page * 4096 + i * 8;
            descriptors.write(at, &v.good.segment(i % v.good.pages(), 0, 7).encode());
        }
    }
    // Data of requests that fill every possible buffer.
    let data: Vec<_> = (0..SEGMENTS).map(|page| descriptors.segment(page, 0, 7)).collect();
    for _ in 0..4 {
        while v.queue().free_slots() > 1 {
            v.queue().indirect(IndirectOp::Write, 0, &data).unwrap();
        }
        assert!(v.queue().drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
        v.good.fill(0, v.good.len(), 0x99);
        for op in [IndirectOp::Write, IndirectOp::Read] {
            for bad in [0, u32::MAX] {
                let (nr_segments, pages) = (SEGMENTS as u16, [GrantRef(bad); 8]);
                let message = Message::Indirect { op, nr_segments, sector: 8000, pages };
                v.queue().message(op.byte(), message).unwrap();
                assert_eq!(v.status(), STATUS_ERROR, "{op:?} by what was there before");
            }
        }
        assert_eq!(rig.sectors(8000, SEGMENTS * 4096), vec![0; SEGMENTS * 4096]);
        assert!(are_all(&v.good.to_vec(0, v.good.len()), 0x99));
    }
    v.goes_on(&rig);
}

#[test]
fn pages_in_unusual_places_are_pages() {
    let rig = Rig::new(Plan { bytes: 4 << 20, ..Plan::default() });
    let mut v = Victim::new(&rig);
    // One page in all segments.
    let one = vec![v.good.segment(3, 0, 7); MAX_DIRECT_SEGMENTS];
    v.good.fill(3 * 4096, 4096, 0x77);
    v.queue().plain(PlainOp::Write, 0, &one).unwrap();
    assert_eq!(v.status(), STATUS_OKAY);
    assert_eq!(rig.sectors(0, 11 * 4096), vec![0x77; 11 * 4096]);
    v.queue().plain(PlainOp::Read, 0, &one).unwrap();
    assert_eq!(v.status(), STATUS_OKAY);
    // The ring's page as data: all of it is written to the disk, and its unused end read from the disk.
    let ring = v.queue().ring_grefs()[0];
    let whole = RawSegment { gref: ring.0, first_sect: 0, last_sect: 7 };
    v.queue().plain(PlainOp::Write, 800, &[whole]).unwrap();
    assert_eq!(v.status(), STATUS_OKAY);
    let end = RawSegment { gref: ring.0, first_sect: 7, last_sect: 7 };
    v.queue().plain(PlainOp::Read, 1600, &[end]).unwrap();
    assert_eq!(v.status(), STATUS_OKAY);
    v.goes_on(&rig);
    // The ring's page, and a data page, as page of descriptors, with any content.
    for gref in [ring, v.good.gref(0)] {
        for op in [IndirectOp::Read, IndirectOp::Write] {
            let pages = [gref; 8];
            let message = Message::Indirect { op, nr_segments: 64, sector: 0, pages };
            v.queue().message(op.byte(), message).unwrap();
            assert_eq!(v.status(), STATUS_ERROR);
            v.goes_on(&rig);
        }
    }
    // Descriptors that name their own page as data: a write writes the descriptors themselves.
    let page = v.front.space().buffer(1).unwrap();
    let own = page.segment(0, 0, 7);
    (0..16).for_each(|i| page.write(i * 8, &own.encode()));
    let pages = [page.gref(0); 8];
    for op in [IndirectOp::Write, IndirectOp::Read] {
        let message = Message::Indirect { op, nr_segments: 16, sector: 0, pages };
        v.queue().message(op.byte(), message).unwrap();
        assert_eq!(v.status(), STATUS_OKAY);
        assert_eq!(rig.sectors(0, 4096), page.to_vec(0, 4096));
    }
    v.goes_on(&rig);
}

/// Every 512 bytes of a page have the round and the place.
fn stamp(buffer: &Buffer, page: usize, round: u32) {
    for sector in 0..8 {
        let word = u64::from(round) << 32 | (page * 8 + sector) as u64;
        buffer.write(page * 4096 + sector * 512, &word.to_le_bytes().repeat(64));
    }
}

#[test]
fn a_grant_revoked_in_the_middle_of_a_copy_is_an_error_or_was_in_time() {
    for copy_with in [CopyWith::Memcpy, CopyWith::ProcessVm] {
        let rig = Rig::new(Plan { bytes: 4 << 20, copy_with, ..Plan::default() });
        let mut v = Victim::new(&rig);
        let space = v.front.space().clone();
        let pages = Arc::new(space.buffer(11).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let revoker = std::thread::spawn({
            let (pages, stop) = (pages.clone(), stop.clone());
            move || {
                let mut random = SplitMix64::new(1);
                let mut revoked = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let page = random.below(11) as usize;
                    if pages.revoke(page).is_ok() {
                        revoked += 1;
                        (0..random.below(2000)).for_each(|_| std::hint::spin_loop());
                        pages.grant(page, false);
                    }
                    (0..random.below(8000)).for_each(|_| std::hint::spin_loop());
                }
                revoked
            }
        });
        let segments: Vec<_> = (0..11).map(|page| pages.segment(page, 0, 7)).collect();
        let (mut good, mut bad) = (0, 0);
        // The grant of a page that stays mapped cannot be revoked.
        let lent = mover() == Mover::Persistent;
        let (mut round, end) = (0, Instant::now() + PATIENCE);
        // On a busy machine it may take long to revoke a grant while the backend copies.
        let rounds = few_or_all(300, 5000);
        while round < rounds || good == 0 || (bad == 0 && !lent) {
            assert!(Instant::now() < end || round < rounds, "{good} good, {bad} bad");
            round += 1;
            (0..11).for_each(|page| stamp(&pages, page, round));
            v.queue().plain(PlainOp::Write, 0, &segments).unwrap();
            let written = v.status() == STATUS_OKAY;
            let medium = rig.sectors(0, 11 * 4096);
            if written {
                assert_eq!(medium, pages.to_vec(0, 11 * 4096), "partial data was called OKAY");
            }
            pages.fill(0, 11 * 4096, 0xEE);
            v.queue().plain(PlainOp::Read, 0, &segments).unwrap();
            let read = v.status() == STATUS_OKAY;
            if read {
                assert_eq!(medium, pages.to_vec(0, 11 * 4096), "partial data was called OKAY");
            }
            for ok in [written, read] {
                if ok { good += 1 } else { bad += 1 }
            }
        }
        stop.store(true, Ordering::Relaxed);
        let revoked = revoker.join().unwrap();
        println!("{copy_with}: {good} good, {bad} bad, {revoked} revocations");
        v.goes_on(&rig);
        v.front.close(PATIENCE).unwrap();
        assert_eq!(space.memory().grants().users(), 0);
    }
}

#[test]
fn an_impossible_producer_stops_its_ring_and_no_other() {
    let mut rig = Rig::new(Plan { bytes: 4 << 20, ..Plan::default() });
    let mut front = rig.frontend();
    for jump in [1u32 << 31, 33, u32::MAX] {
        front.connect(&FrontOptions { queues: 2, ..FrontOptions::default() }, PATIENCE).unwrap();
        let buffer = front.space().buffer(2).unwrap();
        for _ in 0..3 {
            front.queues[0].write(0, &buffer, 0, 4096).unwrap();
            assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
        }
        let ring = front.queues[0].ring();
        let before = ring.load(RingWord::RspProd);
        ring.store(RingWord::ReqProd, front.queues[0].req_prod().wrapping_add(jump));
        front.queues[0].notify().unwrap();
        let said = rig.wait_for_error();
        assert!(said.contains("queue 0"), "{said}");
        // It stays stopped, also if the ring is corrected.
        ring.store(RingWord::ReqProd, front.queues[0].req_prod());
        front.queues[0].write(8, &buffer, 0, 4096).unwrap();
        front.queues[0].push().unwrap();
        front.queues[0].notify().unwrap();
        for _ in 0..20 {
            front.queues[1].write(0, &buffer, 4096, 4096).unwrap();
            assert!(front.queues[1].next_reply(PATIENCE).unwrap().is_ok());
        }
        assert_eq!(ring.load(RingWord::RspProd), before, "{jump:#x}");
        assert!(rig.is_running());
        front.close(PATIENCE).unwrap();
    }
    rig.machine.unplug(&rig.disk.clone()).unwrap();
    rig.join().unwrap();
}

/// The producer that the backend itself published decides whether it sends an event, not the one on the page: a
/// sleeping guest is woken.
#[test]
fn an_event_comes_though_the_producer_says_already_what_it_will_be() {
    let tuning = Tuning { poll: PollWindow::Fixed(0), ..Tuning::default() };
    let rig = Rig::new(Plan { bytes: 4 << 20, tuning, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    let ring = queue.ring();
    // A new connection may send an event of its own: it has been sent when a request is answered.
    queue.read(0, &buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    for answered in 1..40 {
        queue.read(0, &buffer, 0, 4096).unwrap();
        while queue.take_event().unwrap() {}
        ring.store(RingWord::RspEvent, answered + 1);
        ring.store(RingWord::RspProd, answered + 1);
        queue.push().unwrap();
        assert!(queue.wait_event(PATIENCE).unwrap(), "no event for answer {answered}");
        assert_eq!(ring.load(RingWord::RspProd), answered + 1);
        assert!(queue.take().unwrap().is_some_and(|reply| reply.is_ok()));
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn shared_words_that_are_the_backends_own_may_be_scribbled_on() {
    let rig = Rig::new(Plan { bytes: 4 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(32).unwrap();
    let ring = front.queues[0].ring();
    let stop = Arc::new(AtomicBool::new(false));
    let scribbler = std::thread::spawn({
        let (ring, stop) = (ring.clone(), stop.clone());
        move || {
            let mut random = SplitMix64::new(9);
            while !stop.load(Ordering::Relaxed) {
                ring.store(RingWord::ReqEvent, random.next_u64() as u32);
                ring.store(RingWord::RspEvent, random.next_u64() as u32);
            }
        }
    });
    let queue = &mut front.queues[0];
    let mut random = SplitMix64::new(10);
    for round in 0..200 * scale() {
        let n = 1 + random.below(32);
        // The backend does not read its own index from here.
        ring.store(RingWord::RspProd, random.next_u64() as u32);
        for i in 0..n {
            let at = i as usize * 4096;
            if i % 2 == 0 {
                queue.write(i * 8, &buffer, at, 4096).unwrap();
            } else {
                queue.read(i * 8, &buffer, at, 4096).unwrap();
            }
        }
        queue.push().unwrap();
        queue.notify().unwrap();
        let end = Instant::now() + PATIENCE;
        let mut answered = 0;
        while answered < n {
            match queue.take() {
                Ok(Some(reply)) => {
                    assert!(reply.is_ok());
                    answered += 1;
                }
                // The overwritten value, until the backend has answered.
                Ok(None) | Err(_) if answered == 0 => std::thread::yield_now(),
                Ok(None) => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
            assert!(Instant::now() < end, "{answered} of {n} in round {round}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    scribbler.join().unwrap();
    ring.store(RingWord::RspEvent, 1);
    front.queues[0].write(0, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    front.queues[0].notify().unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(front.queues[0].in_flight(), 0);
    front.close(PATIENCE).unwrap();
}
