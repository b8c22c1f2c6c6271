//! A disk with checksums: data that fail the check never reach a guest.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ferrite_disk::TestCheck;
use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue};
use ferrite_testkit::PATIENCE;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::abi::{STATUS_ERROR, STATUS_OKAY};

const BYTES: u64 = 4 << 20;
const LONGEST: usize = 1 << 20;

/// A check that rejects a range of sectors, so many times.
#[derive(Clone, Default)]
struct Faulty {
    sectors: Arc<Mutex<(u64, u64)>>,
    times: Arc<AtomicUsize>,
    asked: Arc<AtomicUsize>,
}

impl Faulty {
    fn set(&self, sectors: (u64, u64), times: usize) {
        *self.sectors.lock().unwrap() = sectors;
        self.times.store(times, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.swap(0, Ordering::SeqCst)
    }

    fn check(&self) -> TestCheck {
        let faulty = self.clone();
        Arc::new(move |offset, bytes| {
            faulty.asked.fetch_add(1, Ordering::SeqCst);
            let (first, end) = *faulty.sectors.lock().unwrap();
            let meets = offset < end * 512 && first * 512 < offset + bytes.len() as u64;
            let left = |times: usize| times.checked_sub(1);
            !(meets && faulty.times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok())
        })
    }
}

fn rig(faulty: &Faulty) -> Rig {
    Rig::new(Plan { bytes: BYTES, check: Some(faulty.check()), ..Plan::default() })
}

fn write(queue: &mut FrontQueue, buffer: &Buffer, sector: u64, bytes: usize) -> i16 {
    queue.write(sector, buffer, 0, bytes).unwrap();
    queue.next_reply(PATIENCE).unwrap().status
}

fn read(queue: &mut FrontQueue, buffer: &Buffer, sector: u64, bytes: usize) -> i16 {
    buffer.fill(0, buffer.len(), 0xEE);
    queue.read(sector, buffer, 0, bytes).unwrap();
    queue.next_reply(PATIENCE).unwrap().status
}

fn holds(buffer: &Buffer, bytes: usize, value: u8) -> bool {
    buffer.to_vec(0, bytes).iter().all(|b| *b == value)
}

/// Writes the whole disk.
fn written(rig: &Rig) -> (ferrite_loopback::front::Frontend, Buffer) {
    let options = FrontOptions { max_indirect: 256, ..FrontOptions::default() };
    let mut front = rig.connect(&options);
    let buffer = front.space().buffer(256).unwrap();
    for at in (0..BYTES).step_by(LONGEST) {
        buffer.fill(0, LONGEST, 0x77);
        assert_eq!(write(&mut front.queues[0], &buffer, at / 512, LONGEST), STATUS_OKAY);
    }
    (front, buffer)
}

#[test]
fn data_that_do_not_fit_are_an_error_for_their_request_and_never_get_to_the_guest() {
    let faulty = Faulty::default();
    let rig = rig(&faulty);
    let (mut front, buffer) = written(&rig);
    let queue = &mut front.queues[0];
    faulty.set((1000, 1001), usize::MAX);
    for (sector, bytes) in [(1000, 512), (996, 4096), (0, LONGEST)] {
        assert_eq!(read(queue, &buffer, sector, bytes), STATUS_ERROR);
        assert!(holds(&buffer, buffer.len(), 0xEE), "bytes that do not fit reached the guest");
        assert_eq!(read(queue, &buffer, sector + 2048, bytes), STATUS_OKAY);
        assert!(holds(&buffer, bytes, 0x77));
    }
    // The disk works as before.
    assert_eq!(write(queue, &buffer, 1000, 4096), STATUS_OKAY);
    faulty.set((0, 0), 0);
    assert_eq!(read(queue, &buffer, 1000, 4096), STATUS_OKAY);
    assert!(holds(&buffer, 4096, 0x77));
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_doubt_that_does_not_last_costs_a_second_read_and_no_error() {
    let faulty = Faulty::default();
    let rig = rig(&faulty);
    let (mut front, buffer) = written(&rig);
    let queue = &mut front.queues[0];
    for (sector, bytes) in [(8, 512), (8, 4096), (2048, LONGEST)] {
        faulty.set((0, BYTES / 512), 1);
        faulty.asked();
        assert_eq!(read(queue, &buffer, sector, bytes), STATUS_OKAY);
        assert!(holds(&buffer, bytes, 0x77));
        assert_eq!(faulty.asked(), 2, "when its pieces were done, and by the second read");
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_read_that_fails_is_tried_step_by_step_since_the_disk_wants_to_know_what_is_lost() {
    let (faulty, faults) = (Faulty::default(), Faults::none());
    let (check, engine) = (Some(faulty.check()), faults.factory());
    let rig = Rig::new(Plan { bytes: BYTES, check, engine, ..Plan::default() });
    let (mut front, buffer) = written(&rig);
    let queue = &mut front.queues[0];
    faults.once(Kind::Read, Fault::Errno(5));
    assert_eq!(read(queue, &buffer, 8, 4096), STATUS_OKAY);
    assert!(holds(&buffer, 4096, 0x77));
    faults.once(Kind::Write, Fault::Errno(5));
    assert_eq!(write(queue, &buffer, 8, 4096), STATUS_ERROR);
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_read_is_checked_once_and_a_write_never() {
    let faulty = Faulty::default();
    let rig = rig(&faulty);
    let (mut front, buffer) = written(&rig);
    let queue = &mut front.queues[0];
    assert_eq!(faulty.asked(), 0);
    for (sector, bytes) in [(1, 512), (8, 4096), (0, LONGEST)] {
        assert_eq!(read(queue, &buffer, sector, bytes), STATUS_OKAY);
        assert_eq!(faulty.asked(), 1);
    }
    queue.flush().unwrap();
    assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_OKAY);
    assert_eq!(faulty.asked(), 0);
    front.close(PATIENCE).unwrap();
}
