//! From attach to unplug, in every order (blkif.md 3.6 to 3.8).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, scale, wait_until};
use ferrite_xen::abi::{OP_DISCARD, STATUS_ERROR, STATUS_NOT_SUPPORTED};

const BYTES: u64 = 1 << 20;

fn plan() -> Plan {
    Plan { bytes: BYTES, pool_bytes: 4 << 20, ..Plan::default() }
}

/// Writes and reads one page, on each queue.
fn works(front: &mut Frontend) {
    let buffer = front.space().buffer(1).unwrap();
    for (i, queue) in front.queues.iter_mut().enumerate() {
        buffer.fill(0, 4096, 0x50 + i as u8);
        queue.write(8, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        buffer.fill(0, 4096, 0);
        queue.read(8, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
        assert_eq!(buffer.to_vec(0, 4096), vec![0x50 + i as u8; 4096]);
    }
}

fn connected(rig: &Rig) -> (Frontend, Buffer) {
    let front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(32).unwrap();
    (front, buffer)
}

#[test]
fn an_image_that_grows_is_a_larger_disk_at_once() {
    let mut rig = Rig::new(plan());
    let (mut front, buffer) = connected(&rig);
    assert_eq!(front.features().sectors, BYTES / 512);
    front.queues[0].write(BYTES / 512, &buffer, 0, 4096).unwrap();
    assert_eq!(front.queues[0].next_reply(PATIENCE).unwrap().status, STATUS_ERROR);

    // A guest detects it because the backend's state is written once more.
    let mut store = rig.machine.guest_store(rig.domid).unwrap();
    store.watch(&format!("{}/state", rig.disk.backend), "state").unwrap();
    // Each watch has an initial event.
    wait_until("the first event", || store.poll_event().unwrap().is_some());
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    image.set_len(2 * BYTES).unwrap();
    wait_until("the event", || store.poll_event().unwrap().is_some());
    assert_eq!(front.read_features().unwrap().sectors, 2 * BYTES / 512);
    assert_eq!(front.backend_state().unwrap(), 4);
    buffer.fill(0, 4096, 9);
    front.queues[0].write(2 * BYTES / 512 - 8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    assert_eq!(rig.sectors(2 * BYTES / 512 - 8, 4096), vec![9; 4096]);

    // A successor has the new size, and so has the next connection.
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    rig.start();
    works(&mut front);
    front.close(PATIENCE).unwrap();
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    assert_eq!(front.features().sectors, 2 * BYTES / 512);
    front.close(PATIENCE).unwrap();
}

/// The toolstack's 5 stays until the guest has released the disk: it is the toolstack's request (blkif.md 3.6).
#[test]
fn an_image_that_grows_while_its_disk_is_to_be_unplugged_does_not_take_that_back() {
    let mut rig = Rig::new(plan());
    let (mut front, _) = connected(&rig);
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    let grown = |front: &mut Frontend, times: u64| {
        image.set_len(times * BYTES).unwrap();
        let sectors = times * BYTES / 512;
        wait_until("the new size", || front.read_features().unwrap().sectors == sectors);
    };
    grown(&mut front, 2);
    assert_eq!(front.backend_state().unwrap(), 5);
    works(&mut front);
    // Meanwhile the guest reconnects with other rings (3.8).
    front.offer(&FrontOptions::default()).unwrap();
    works(&mut front);
    grown(&mut front, 3);
    assert_eq!(front.backend_state().unwrap(), 5);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

#[test]
fn an_image_that_grows_before_anybody_connects_has_its_new_size() {
    let rig = Rig::new(plan());
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    image.set_len(3 * BYTES).unwrap();
    wait_until("the new size", || front.read_features().unwrap().sectors == 3 * BYTES / 512);
    assert_eq!(front.backend_state().unwrap(), 2, "the state of an unconnected disk stays");
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    front.close(PATIENCE).unwrap();
}

#[test]
fn an_image_that_shrinks_fails_where_it_is_gone_and_works_where_it_is_not() {
    let rig = Rig::new(plan());
    let (mut front, buffer) = connected(&rig);
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    image.set_len(BYTES / 2).unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(front.read_features().unwrap().sectors, BYTES / 512, "there is no shrinking");
    buffer.fill(0, buffer.len(), 0xEE);
    let queue = &mut front.queues[0];
    for (sector, len) in [(BYTES / 512 - 8, 4096), (BYTES / 1024 - 1, 4096)] {
        queue.read(sector, &buffer, 0, len).unwrap();
        assert_eq!(queue.next_reply(PATIENCE).unwrap().status, STATUS_ERROR);
        assert!(buffer.to_vec(0, buffer.len()).iter().all(|b| *b == 0xEE));
    }
    works(&mut front);
    front.close(PATIENCE).unwrap();
}

#[test]
fn the_toolstack_may_forbid_discard() {
    for (value, offered) in [("0", false), ("1", true)] {
        let rig = Rig::new(Plan { backend_keys: vec![("discard-enable", value.into())], ..plan() });
        let (mut front, _) = connected(&rig);
        assert_eq!(front.features().discard, offered);
        let granularity = front.backend_key("discard-granularity").unwrap().unwrap();
        assert_eq!(granularity != "0", offered);
        front.queues[0].discard(0, 8, false).unwrap();
        let reply = front.queues[0].next_reply(PATIENCE).unwrap();
        assert_eq!(reply.operation, OP_DISCARD);
        assert_eq!(reply.status, if offered { 0 } else { STATUS_NOT_SUPPORTED });
        front.close(PATIENCE).unwrap();
    }
}

#[test]
fn a_disk_that_is_unplugged_before_anybody_connects_is_let_go_of() {
    let mut rig = Rig::new(plan());
    let disk = rig.disk.clone();
    rig.machine.wait_for_backend(&disk, &[2], PATIENCE).unwrap();
    rig.machine.unplug(&disk).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    assert_eq!(rig.machine.backend_state(&disk).unwrap(), 6);
}

#[test]
fn a_backend_that_starts_late_finds_its_frontend_wherever_it_is() {
    // Before the toolstack has made the disk.
    let mut rig = Rig::without_backend(plan());
    rig.machine.remove_disk(&rig.disk.clone()).unwrap();
    rig.start();
    std::thread::sleep(Duration::from_millis(20));
    assert!(rig.is_running());
    rig.attach();
    let (mut front, _) = connected(&rig);
    works(&mut front);
    front.close(PATIENCE).unwrap();

    // A frontend that did not wait for the backend's 2, in state 3 and in state 4.
    for state in [3, 4] {
        let mut rig = Rig::without_backend(plan());
        let mut front = rig.frontend();
        front.offer(&FrontOptions::default()).unwrap();
        front.set_state(state).unwrap();
        rig.start();
        front.finish(PATIENCE).unwrap();
        works(&mut front);
        front.close(PATIENCE).unwrap();
    }

    // Unplugged before the backend came.
    let mut rig = Rig::without_backend(plan());
    let disk = rig.disk.clone();
    rig.machine.unplug(&disk).unwrap();
    rig.start();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}

#[test]
fn a_backend_is_stopped_while_it_waits_for_anything() {
    let mut rig = Rig::without_backend(plan());
    rig.machine.remove_disk(&rig.disk.clone()).unwrap();
    rig.start();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    rig.attach();
    rig.start();
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    assert_eq!(front.backend_state().unwrap(), 2);
    rig.start();
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
}

#[test]
fn a_directory_of_another_domain_is_not_served() {
    let mut rig = Rig::without_backend(plan());
    let mut store = rig.machine.store().unwrap();
    store.write(&format!("{}/frontend-id", rig.disk.backend), b"77").unwrap();
    rig.start();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::Attachment(_)), "{error}");
    assert_eq!(rig.machine.backend_state(&rig.disk.clone()).unwrap(), 1, "nothing is written");
}

#[test]
fn a_guest_that_closes_may_come_back_any_number_of_times() {
    let rig = Rig::new(plan());
    let mut front = rig.frontend();
    for round in 0..10 {
        let options = FrontOptions { queues: 1 + round % 4, ..FrontOptions::default() };
        front.connect(&options, PATIENCE).unwrap();
        works(&mut front);
        if round % 2 == 0 {
            front.close(PATIENCE).unwrap();
        } else {
            // Without closing.
            front.set_state(6).unwrap();
            front.wait_for_backend(&[6], PATIENCE).unwrap();
            front.queues.drain(..).for_each(|queue| queue.release().unwrap());
        }
    }
}

#[test]
fn another_kernel_in_the_same_guest_starts_afresh() {
    let rig = Rig::new(plan());
    let (mut front, buffer) = connected(&rig);
    for round in 0..5u32 {
        // During requests.
        for i in 0..32 {
            front.queues[0].write(i * 8, &buffer, i as usize * 4096, 4096).unwrap();
        }
        front.queues[0].push().unwrap();
        front.queues.drain(..).for_each(FrontQueue::abandon);
        let options =
            FrontOptions { queues: 1 + round % 2, order: round % 3, ..FrontOptions::default() };
        front.connect(&options, PATIENCE).unwrap();
        works(&mut front);
    }
    front.close(PATIENCE).unwrap();
    assert_eq!(front.space().memory().bound_ports(), 0);
}

/// A guest that was resumed elsewhere and is back (3.8): in state 3 with other rings, without closing in between.
#[test]
fn a_frontend_that_is_back_at_3_with_other_rings_is_connected_to_those() {
    let rig = Rig::new(plan());
    let mut front = rig.connect(&FrontOptions::default());
    works(&mut front);
    for round in 0..4 {
        let options = FrontOptions { queues: 1 + round % 2, ..FrontOptions::default() };
        front.offer(&options).unwrap();
        wait_until("the new connection", || {
            front.space().memory().bound_ports() == front.queues.len()
                && front
                    .queues
                    .iter()
                    .all(|q| front.space().memory().grants().in_use(q.ring_grefs()[0]))
        });
        front.finish(PATIENCE).unwrap();
        works(&mut front);
        // The same state once more has no effect.
        front.set_state(3).unwrap();
        works(&mut front);
        front.set_state(4).unwrap();
        works(&mut front);
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_guest_that_is_destroyed_with_requests_in_flight_leaves_nothing() {
    for unplug_first in [false, true] {
        let mut rig = Rig::new(plan());
        let (mut front, buffer) = connected(&rig);
        let space = front.space().clone();
        for i in 0..32 {
            front.queues[0].write(i * 8, &buffer, i as usize * 4096, 4096).unwrap();
        }
        front.queues[0].push().unwrap();
        let disk = rig.disk.clone();
        if unplug_first {
            rig.machine.unplug(&disk).unwrap();
            rig.machine.destroy(rig.domid).unwrap();
        } else {
            rig.machine.destroy(rig.domid).unwrap();
            rig.machine.unplug(&disk).unwrap();
        }
        assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
        assert_eq!((space.memory().grants().users(), space.memory().bound_ports()), (0, 0));
        assert!(!rig.run_dir().join("inflight").exists());
        // The guest read no answers; the frontend's own process may continue for a while.
        let end = front.close(Duration::from_millis(50));
        assert!(end.is_err());
    }
}

#[test]
fn a_directory_that_is_removed_under_a_connected_disk_ends_it() {
    let mut rig = Rig::new(plan());
    let (mut front, buffer) = connected(&rig);
    front.queues[0].write(0, &buffer, 0, 4096).unwrap();
    front.queues[0].push().unwrap();
    let disk = rig.disk.clone();
    rig.machine.remove_disk(&disk).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    let memory = front.space().memory();
    assert_eq!((memory.grants().users(), memory.bound_ports()), (0, 0));
    assert_eq!(rig.machine.backend_state(&disk).unwrap(), 0, "nothing is written any more");
    assert!(!rig.run_dir().join("inflight").exists());
}

#[test]
fn a_frontend_that_removes_its_own_directory_is_gone() {
    let mut rig = Rig::new(plan());
    let (mut front, _) = connected(&rig);
    front.remove_key("state").unwrap();
    let disk = rig.disk.clone();
    rig.machine.wait_for_backend(&disk, &[6], PATIENCE).unwrap();
    assert_eq!(front.space().memory().bound_ports(), 0);
    front.queues.drain(..).for_each(|queue| queue.release().unwrap());
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    front.close(PATIENCE).unwrap();
}

#[test]
fn what_is_in_flight_is_answered_before_a_disk_closes() {
    let rig = Rig::new(plan());
    let (mut front, buffer) = connected(&rig);
    for _ in 0..20 {
        for i in 0..32 {
            front.queues[0].write(i * 8, &buffer, i as usize * 4096, 4096).unwrap();
        }
        front.queues[0].push().unwrap();
        front.set_state(5).unwrap();
        front.wait_for_backend(&[5], PATIENCE).unwrap();
        let replies = front.queues[0].drain(PATIENCE).unwrap();
        assert!(replies.len() == 32 && replies.iter().all(|r| r.is_ok()));
        front.close(PATIENCE).unwrap();
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    }
}

/// threats.md T3: a guest that writes its state as fast as it can makes the backend read it, and delays neither its
/// other work nor its end.
#[test]
fn a_storm_of_states_holds_nothing_up() {
    let mut rig = Rig::new(plan());
    let (mut front, _buffer) = connected(&rig);
    let stop = Arc::new(AtomicBool::new(false));
    let storms: Vec<_> = (0..2)
        .map(|_| {
            let mut store = rig.machine.guest_store(rig.domid).unwrap();
            let (path, stop) = (format!("{}/state", rig.disk.frontend), stop.clone());
            std::thread::spawn(move || {
                let mut writes = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    store.write(&path, b"4").unwrap();
                    writes += 1;
                }
                writes
            })
        })
        .collect();
    let end = Instant::now() + Duration::from_millis(300) * scale();
    while Instant::now() < end {
        works(&mut front);
    }
    // Growth is detected as usual.
    let image = std::fs::OpenOptions::new().write(true).open(&rig.image).unwrap();
    image.set_len(2 * BYTES).unwrap();
    wait_until("the new size", || front.read_features().unwrap().sectors == 2 * BYTES / 512);
    for _ in 0..5 {
        let start = Instant::now();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        assert!(start.elapsed() < PATIENCE, "{:?} to stop", start.elapsed());
        rig.start();
        works(&mut front);
    }
    stop.store(true, Ordering::Relaxed);
    let writes: u64 = storms.into_iter().map(|t| t.join().unwrap()).sum();
    println!("{writes} states");
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_take_over_waits_for_nothing_that_the_guest_has_to_do() {
    let mut rig = Rig::new(plan());
    let (mut front, _buffer) = connected(&rig);
    for _ in 0..5 {
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        // The guest is closing meanwhile: the successor continues with that.
        front.set_state(5).unwrap();
        rig.start();
        front.wait_for_backend(&[5], PATIENCE).unwrap();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        front.set_state(6).unwrap();
        rig.start();
        front.wait_for_backend(&[6], PATIENCE).unwrap();
        front.queues.drain(..).for_each(|queue| queue.release().unwrap());
        front.connect(&FrontOptions::default(), PATIENCE).unwrap();
        works(&mut front);
    }
    let disk = rig.disk.clone();
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    rig.machine.unplug(&disk).unwrap();
    rig.start();
    works(&mut front);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
}
