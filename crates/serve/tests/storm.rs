//! Events without requests, as fast as a guest can send them (threats.md T8): they cost the backend almost nothing, and
//! neither the guest's own requests nor other guests wait.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_loopback::front::{Buffer, FrontOptions, FrontQueue, Frontend, RingWord};
use ferrite_serve::polling::PollWindow;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::proc::threads_named;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::storm::Storm;
use ferrite_testkit::{PATIENCE, scale};

/// The longest time for which events are masked.
const HOLD: Duration = Duration::from_millis(20);
/// Events until the time is that long.
const WARM_UP: u64 = 16;

/// Serialises the tests: they compare the progress of threads of this process.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connected(options: &FrontOptions) -> (Rig, Frontend, Buffer) {
    // Polling costs time of its own, which other tests measure.
    let tuning = Tuning { poll: PollWindow::Fixed(0), ..Tuning::default() };
    let rig = Rig::new(Plan { bytes: 4 << 20, tuning, ..Plan::default() });
    let front = rig.connect(options);
    let buffer = front.space().buffer(32).unwrap();
    (rig, front, buffer)
}

/// How long a thread of this process has run.
fn cpu_time(id: &str) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{id}/schedstat")).unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

/// Reads as much as it can for so long; returns the number of requests.
fn pace(queue: &mut FrontQueue, buffer: &Buffer, for_so_long: Duration) -> u64 {
    let end = Instant::now() + for_so_long;
    let mut answered = 0;
    while Instant::now() < end {
        for i in 0..8 {
            queue.read(i * 8, buffer, i as usize * 4096, 4096).unwrap();
        }
        let replies = queue.drain(PATIENCE).unwrap();
        assert!(replies.iter().all(|reply| reply.is_ok()));
        answered += replies.len() as u64;
    }
    answered
}

fn write(queue: &mut FrontQueue, buffer: &Buffer, sector: u64) {
    queue.write(sector, buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
}

#[test]
fn events_without_requests_cost_little_and_disturb_no_other_guest() {
    let _alone = alone();
    let (_quiet_rig, mut quiet, quiet_buffer) = connected(&FrontOptions::default());
    // A thread sets its name when it runs for the first time, which may be after the connection: it has run when it has
    // answered.
    pace(&mut quiet.queues[0], &quiet_buffer, Duration::from_millis(1));
    let before = threads_named("queue-");
    let (rig, mut front, _buffer) = connected(&FrontOptions::default());
    let end = Instant::now() + PATIENCE;
    let thread = loop {
        if let Some(thread) = threads_named("queue-").difference(&before).next() {
            break thread.clone();
        }
        assert!(Instant::now() < end, "the queue's thread does not show itself");
    };

    let storm = Storm::new(front.space(), 1);
    let (counts, cpu) = (rig.counters.counts(), cpu_time(&thread));
    let (mut beside_calm, mut beside_storm) = (0, 0);
    let mut raged = Duration::ZERO;
    for _ in 0..6 * scale() {
        storm.calm();
        beside_calm += pace(&mut quiet.queues[0], &quiet_buffer, Duration::from_millis(100));
        let start = Instant::now();
        storm.rage(&front.queues);
        beside_storm += pace(&mut quiet.queues[0], &quiet_buffer, Duration::from_millis(100));
        storm.calm();
        raged += start.elapsed();
    }
    let (seen, cpu) = (rig.counters.counts().since(&counts), cpu_time(&thread) - cpu);
    // It works without a pause, and shares a busy machine with all others.
    let storms = threads_named("storm").iter().map(|thread| cpu_time(thread)).max().unwrap();
    let sent = storm.end();
    println!("{sent} events sent in {storms:?}, {} taken in {raged:?} with {cpu:?}", seen.events);
    println!("the other guest: {beside_calm} requests beside calm, {beside_storm} beside storm");
    assert!(sent > 100 * seen.events, "{sent} events sent: this was no storm");

    // One event and at most two sleeps per hold; the first holds are shorter.
    let holds = (raged.as_nanos() / HOLD.as_nanos()) as u64;
    let most = holds + WARM_UP + 6 * u64::from(scale());
    assert!(seen.events > 0 && seen.events <= most, "{} events, at most {most}", seen.events);
    assert!(seen.sleeps <= 2 * most, "{} sleeps in {holds} holds", seen.sleeps);
    assert!(seen.held_events + 5 >= seen.events, "{seen:?}");
    assert!(cpu * 10 < storms, "{cpu:?} beside {storms:?}");
    assert!(beside_storm * 3 > beside_calm, "{beside_storm} requests instead of {beside_calm}");

    quiet.close(PATIENCE).unwrap();
    front.close(PATIENCE).unwrap();
}

#[test]
fn requests_are_answered_in_the_middle_of_a_storm_and_as_ever_after_it() {
    let _alone = alone();
    let (rig, mut front, buffer) =
        connected(&FrontOptions { queues: 4, ..FrontOptions::default() });
    let storm = Storm::new(front.space(), 4);
    storm.rage(&front.queues);
    for round in 0..20 * u64::from(scale()) {
        buffer.fill(0, 4096, round as u8 | 1);
        for (q, queue) in front.queues.iter_mut().enumerate() {
            write(queue, &buffer, q as u64 * 8);
        }
        assert!(rig.sectors(0, 4 * 4096).iter().all(|byte| *byte == round as u8 | 1));
    }
    // Until all channels are held for the longest time.
    let end = Instant::now() + PATIENCE;
    let counts = rig.counters.counts();
    while rig.counters.counts().since(&counts).held_events < 4 * WARM_UP {
        assert!(Instant::now() < end, "the storm does not reach the backend");
        std::thread::sleep(HOLD);
    }
    storm.end();
    // A pending event may be held once more on each channel, and not again.
    front.queues.iter_mut().for_each(|queue| write(queue, &buffer, 0));
    let counts = rig.counters.counts();
    for _ in 0..100 {
        front.queues.iter_mut().for_each(|queue| write(queue, &buffer, 0));
    }
    let seen = rig.counters.counts().since(&counts);
    assert_eq!((seen.requests, seen.held_events), (400, 0), "{seen:?}");
    front.close(PATIENCE).unwrap();
}

/// A guest without event indices sends an event with each request, needed or not.
#[test]
fn one_event_a_request_is_never_held_back() {
    let _alone = alone();
    let (rig, mut front, buffer) = connected(&FrontOptions::default());
    let queue = &mut front.queues[0];
    for depth in [1, 2, 5, 32] {
        for _ in 0..100 * scale() {
            for i in 0..depth {
                queue.write(i * 8, &buffer, i as usize * 4096, 4096).unwrap();
                if !queue.push().unwrap() {
                    queue.notify().unwrap();
                }
            }
            assert!(queue.drain(PATIENCE).unwrap().iter().all(|reply| reply.is_ok()));
        }
        let counts = rig.counters.counts();
        assert_eq!(counts.held_events, 0, "depth {depth}: {counts:?}");
    }
    front.close(PATIENCE).unwrap();
}

/// A ring that its guest has broken is not served any more, and its events are ignored.
#[test]
fn a_storm_on_a_broken_ring_wakes_nobody() {
    let _alone = alone();
    let (mut rig, mut front, buffer) =
        connected(&FrontOptions { queues: 2, ..FrontOptions::default() });
    let queue = &mut front.queues[0];
    queue.ring().store(RingWord::ReqProd, queue.req_prod().wrapping_add(1 << 31));
    queue.notify().unwrap();
    assert!(rig.wait_for_error().contains("queue 0"));
    let counts = rig.counters.counts();
    let storm = Storm::new(front.space(), 1);
    storm.rage(&front.queues[..1]);
    for _ in 0..100 {
        write(&mut front.queues[1], &buffer, 0);
    }
    storm.end();
    let seen = rig.counters.counts().since(&counts);
    // Those of queue 1, and one that queue 0 was waiting for.
    assert!(seen.events <= 101 && seen.held_events == 0, "{seen:?}");
    front.close(PATIENCE).unwrap();
}
