//! Limits of the requests to xenstore that a guest can cause for its disk, counted at the store, with a stopped clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_loopback::CopyWith;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_testkit::rig::{Hands, Plan, Rig};
use ferrite_testkit::{PATIENCE, few_or_all};

/// The initial budget of requests to xenstore for a disk, and the additional ones of a connection.
const SAVED: u64 = 10_000;
const CONNECTION: u64 = 100;
/// A bound above one reading of all keys.
const READING: u64 = 400;

/// After this time, an action waits for the clock.
const SOON: Duration = Duration::from_secs(3);

struct Host {
    rig: Rig,
    clock: Arc<Hands>,
    /// Requests to xenstore for the disk.
    requests: Arc<AtomicU64>,
}

impl Host {
    fn new() -> Host {
        let clock = Arc::new(Hands::default());
        let plan = Plan { bytes: 1 << 20, clock: clock.clone(), ..Plan::default() };
        let mut rig = Rig::without_backend(plan);
        let (store, requests) = rig.machine.counted_store().unwrap();
        let hypervisor = rig.machine.loopback(CopyWith::Memcpy).unwrap();
        rig.start_with(store, Box::new(hypervisor));
        Host { rig, clock, requests }
    }

    fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// A connected guest writes its state until so many requests were made, and then hundreds of times more. Its
    /// requests are served all the time.
    fn rewrite_until(&self, front: &mut Frontend, requests: u64) {
        while self.requests() < requests {
            front.set_state(4).unwrap();
        }
        for _ in 0..few_or_all(300, 2000) {
            front.set_state(4).unwrap();
            works(front);
        }
    }

    /// The backend ends, though the clock stands still.
    fn end(&mut self) -> Outcome {
        let end = Instant::now() + PATIENCE;
        while self.rig.is_running() {
            assert!(Instant::now() < end, "the disk does not go");
            std::thread::yield_now();
        }
        self.rig.join().unwrap()
    }

    /// A host whose guest has used up the budget.
    fn in_debt() -> (Host, Frontend) {
        let host = Host::new();
        let mut front = host.rig.connect(&FrontOptions::default());
        host.rewrite_until(&mut front, SAVED - READING);
        (host, front)
    }
}

fn works(front: &mut Frontend) {
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

#[test]
fn a_guest_that_rewrites_its_state_makes_as_many_requests_as_its_disk_has_and_is_served_on() {
    let (mut host, mut front) = Host::in_debt();
    let made = host.requests();
    assert!(made <= SAVED + READING, "{made} requests to xenstore");

    // Its writes are now handled later, and only the last one counts.
    front.set_state(3).unwrap();
    front.set_state(4).unwrap();
    front.set_state(5).unwrap();
    works(&mut front);
    assert_eq!(front.backend_state().unwrap(), 4);
    host.clock.turn(Duration::from_secs(2));
    front.wait_for_backend(&[5], PATIENCE).unwrap();
    front.set_state(6).unwrap();
    front.wait_for_backend(&[6], PATIENCE).unwrap();

    // In two seconds two thousand more were earned; unused ones accumulate.
    let made = host.requests();
    assert!(made <= SAVED + 2000 + READING, "{made} requests to xenstore");
    host.clock.turn(Duration::from_secs(10));
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    host.rewrite_until(&mut front, made + SAVED - 2 * READING);
    let again = host.requests() - made;
    assert!(again <= SAVED + READING, "{again} requests to xenstore");
    host.clock.turn(Duration::from_secs(2));
    front.close(PATIENCE).unwrap();
    assert_eq!(host.rig.stop().unwrap(), Outcome::Stopped);
}

#[test]
fn a_connection_takes_more_than_its_requests() {
    let host = Host::new();
    let mut front = host.rig.frontend();
    let mut times = 0;
    // The clock stands still: one of them is never handled.
    while front.connect(&FrontOptions::default(), SOON).is_ok() {
        times += 1;
        let taken = host.requests() + times * CONNECTION;
        assert!(taken <= SAVED + READING, "{times} connections, {} requests", host.requests());
        works(&mut front);
        if front.close(SOON).is_err() {
            break;
        }
    }
    assert!(times > 1 && host.rig.is_running());
    host.clock.turn(Duration::from_secs(20));
    if front.close(PATIENCE).is_err() {
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn a_disk_whose_guest_has_used_up_all_is_stopped_at_once() {
    let (mut host, mut front) = Host::in_debt();
    assert_eq!(host.rig.stop().unwrap(), Outcome::Stopped);
    // It was in use all the time, and a successor continues.
    host.rig.start();
    works(&mut front);
    front.close(PATIENCE).unwrap();
}

#[test]
fn new_rings_are_found_after_a_look_at_the_toolstack_that_came_first() {
    let (host, mut front) = Host::in_debt();
    front.offer(&FrontOptions { queues: 2, ..FrontOptions::default() }).unwrap();
    front.set_state(4).unwrap();
    let made = host.requests();
    let note = format!("{}/note", host.rig.disk.backend);
    host.rig.machine.store().unwrap().write(&note, b"1").unwrap();
    while host.requests() == made {
        std::thread::yield_now();
    }
    host.clock.turn(Duration::from_secs(2));
    works(&mut front);
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_disk_whose_guest_has_used_up_all_goes_at_once_when_the_toolstack_removes_it() {
    let (mut host, mut front) = Host::in_debt();
    front.set_state(3).unwrap();
    let disk = host.rig.disk.clone();
    host.rig.machine.remove_disk(&disk).unwrap();
    assert_eq!(host.end(), Outcome::Unplugged);
}

#[test]
fn a_disk_whose_guest_has_used_up_all_goes_at_once_when_it_is_unplugged_and_let_go() {
    let (mut host, front) = Host::in_debt();
    let disk = host.rig.disk.clone();
    // As `xl destroy`: it removes the frontend's directory first, and then waits for our 6.
    host.rig.machine.store().unwrap().remove(&disk.frontend).unwrap();
    host.rig.machine.unplug(&disk).unwrap();
    assert_eq!(host.end(), Outcome::Unplugged);
    assert_eq!(host.rig.machine.backend_state(&disk).unwrap(), 6);
    drop(front);
}
