//! How often a queue calls the kernel, with slow storage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use ferrite_loopback::front::FrontOptions;
use ferrite_serve::polling::PollWindow;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, late};
use ferrite_xen::abi::Message;

const ROUNDS: u64 = 1000;

/// No operation has this number.
const UNKNOWN: u8 = 200;

/// System calls for each round of so many concurrent requests.
fn calls_a_round(requests: usize) -> f64 {
    let calls = Arc::new(AtomicU64::new(0));
    let tuning = Tuning { poll: PollWindow::Fixed(0), merge: true };
    let rig = Rig::new(Plan { engine: late::factory(&calls), tuning, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(requests).unwrap();
    let queue = &mut front.queues[0];
    let mut before = 0;
    for round in 0..ROUNDS {
        // Calls that a queue makes once, and until it has measured its storage, do not count.
        if round == ROUNDS / 5 {
            before = calls.load(Ordering::Relaxed);
        }
        for i in 0..requests {
            queue.read(8 * i as u64, &buffer, i * 4096, 4096).unwrap();
        }
        queue.push().unwrap();
        assert_eq!(queue.drain(PATIENCE).unwrap().len(), requests);
    }
    let all = calls.load(Ordering::Relaxed) - before;
    front.close(PATIENCE).unwrap();
    all as f64 / (ROUNDS - ROUNDS / 5) as f64
}

/// A single request takes two turns of the loop: one until storage has it, one until the guest has another.
#[test]
fn each_turn_of_a_queue_is_one_call_where_storage_takes_its_time() {
    let calls = calls_a_round(1);
    // One sweep in 65 is submitted separately. If the guest is as fast as storage, one turn has both.
    assert!((1.9..2.05).contains(&calls), "{calls} calls a request");
}

/// Adjacent requests are one operation, and so are done at once.
#[test]
fn a_sweep_of_many_requests_takes_no_more_calls_than_one_of_one() {
    let calls = calls_a_round(16);
    assert!((1.9..2.05).contains(&calls), "{calls} calls a sweep of 16");
}

/// A sweep ends after 16 requests, and the second is submitted while the first is in flight.
#[test]
fn a_full_ring_takes_two_calls_a_sweep() {
    let calls = calls_a_round(32);
    assert!(calls < 4.1, "{calls} calls for two sweeps of 16");
}

/// The previous event is read by then at the latest, and this one must not be read with it. No unknown operation is in
/// flight whose end would have the ring read.
#[test]
fn an_event_behind_the_final_check_of_the_ring_is_seen() {
    let (about_to_wait, waits) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let gone = Mutex::new(gone);
    let before_wait = move || {
        if about_to_wait.send(()).is_ok() {
            // Or the test has ended.
            let _ = gone.lock().unwrap().recv();
        }
    };
    let engine = late::factory_with(&Arc::default(), Arc::new(before_wait));
    let tuning = Tuning { poll: PollWindow::Fixed(0), merge: true };
    let rig = Rig::new(Plan { engine, tuning, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let queue = &mut front.queues[0];
    for _ in 0..100 {
        // Each is sent just after the backend has seen that there is none.
        waits.recv_timeout(PATIENCE).expect("the backend sleeps, and there is a request");
        queue.message(UNKNOWN, Message::Unknown).unwrap();
        queue.push().unwrap();
        go.send(()).unwrap();
        while queue.take().unwrap().is_some() {}
    }
    drop((go, waits));
    queue.drain(PATIENCE).unwrap();
    front.close(PATIENCE).unwrap();
}
