//! Requests that must be alone on the disk, and queues that fail (threats.md T4, T24): they wait only for requests in
//! flight on other queues.

use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, RingWord};
use ferrite_serve::polling::PollWindow;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, wait_until};
use ferrite_xen::abi::PlainOp;

/// The kind of request that must be alone on the disk.
#[derive(Clone, Copy)]
enum Alone {
    Barrier,
    /// A write of a part of a block of the medium.
    SmallWrite,
}

impl Alone {
    /// Sends it, with a page of its own for each number.
    fn ask(self, queue: &mut FrontQueue, buffer: &Buffer, number: usize) {
        let (sector, page) = (number as u64 * 8, number % buffer.pages());
        match self {
            Alone::Barrier => {
                queue.plain(PlainOp::Barrier, sector, &[buffer.segment(page, 0, 7)]).unwrap()
            }
            Alone::SmallWrite => queue.write(sector + 1, buffer, page * 4096, 512).unwrap(),
        };
    }

    /// Its first operation on storage.
    fn begins_with(self) -> Kind {
        match self {
            Alone::Barrier => Kind::Sync,
            Alone::SmallWrite => Kind::Read,
        }
    }
}

/// Holds operations of this kind, and counts them from now on, until the returned guard is dropped.
fn hold(faults: &Faults, kind: Kind) -> impl Drop {
    let held = faults.hold();
    faults.forget();
    faults.set([Ops::from(kind).meet(Fault::Held(None))]);
    held
}

/// Queues that do not poll: a ring is read when its queue is woken.
fn three_queues(plan: Plan) -> (Rig, Frontend, Buffer, Faults) {
    let faults = Faults::none();
    let tuning = Tuning { poll: PollWindow::Fixed(0), ..Tuning::default() };
    let rig = Rig::new(Plan { engine: faults.factory(), tuning, ..plan });
    let front = rig.connect(&FrontOptions { queues: 3, ..FrontOptions::default() });
    let buffer = front.space().buffer(32).unwrap();
    (rig, front, buffer, faults)
}

/// The guest breaks a ring while another queue is alone on the disk, and sends no event. The broken queue finds that
/// when the gate wakes it, and is not woken again.
fn a_broken_ring_holds_up_nobody(plan: Plan, alone: Alone) {
    let (mut rig, mut front, buffer, faults) = three_queues(plan);
    let held = hold(&faults, alone.begins_with());
    alone.ask(&mut front.queues[0], &buffer, 0);
    front.queues[0].push().unwrap();
    faults.wait_for(alone.begins_with(), 1);
    let ring = front.queues[1].ring();
    ring.store(RingWord::ReqProd, front.queues[1].req_prod().wrapping_add(1 << 31));
    drop(held);
    assert!(rig.wait_for_error().contains("queue 1"));
    for number in 0..8 {
        for q in [0, 2] {
            let queue = &mut front.queues[q];
            alone.ask(queue, &buffer, number);
            let replies =
                queue.drain(PATIENCE).expect("the gate is held by a queue that is broken");
            assert!(!replies.is_empty() && replies.iter().all(|reply| reply.is_ok()));
        }
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_barrier_does_not_wait_for_a_ring_that_was_broken_without_an_event() {
    a_broken_ring_holds_up_nobody(Plan { bytes: 4 << 20, ..Plan::default() }, Alone::Barrier);
}

#[test]
fn a_write_below_the_block_does_not_wait_for_a_ring_that_was_broken_without_an_event() {
    let dir = dir_in_memory();
    let file = dir.path().join("disk.img");
    std::fs::File::create(&file).unwrap().set_len(4 << 20).unwrap();
    let Some(device) = Loop::attach(&file, 4096) else { return };
    let image = Some(device.0.clone());
    a_broken_ring_holds_up_nobody(Plan { image, ..Plan::default() }, Alone::SmallWrite);
}

/// A queue whose engine fails during work ends, and the backend with it. Another queue's request that waits to be alone
/// must not wait for it.
#[test]
fn a_queue_that_ends_with_work_under_way_is_not_waited_for() {
    let plan = Plan { bytes: 4 << 20, ..Plan::default() };
    let (mut rig, mut front, buffer, faults) = three_queues(plan);
    for round in 0..4 {
        let held = hold(&faults, Kind::Read);
        front.queues[1].read(0, &buffer, 0, 4096).unwrap();
        front.queues[1].push().unwrap();
        faults.wait_for(Kind::Read, 1);
        let sweeps = rig.counters.counts().sweeps;
        Alone::Barrier.ask(&mut front.queues[0], &buffer, 1);
        front.queues[0].push().unwrap();
        wait_until("the barrier's being taken", || rig.counters.counts().sweeps > sweeps);
        faults.break_engine("queue-1");
        drop(held);
        let what = format!("round {round}: the end of the backend");
        wait_until(&what, || !rig.is_running());
        rig.join().unwrap_err();
        faults.break_engine("");
        faults.clear();
        rig.start();
        for queue in &mut front.queues {
            assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
        }
    }
    front.close(PATIENCE).unwrap();
}
