//! The file of a disk's counters, read while it is served.

use std::time::{Duration, Instant};

use ferrite_loopback::front::{Buffer, FrontOptions, Frontend};
use ferrite_serve::counters::snapshot::{Snapshot, read};
use ferrite_serve::counters::stats_file;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::proc::mappings;
use ferrite_testkit::rig::{Plan, Rig};

fn seen(rig: &Rig) -> Snapshot {
    read(&stats_file(rig.run_dir())).unwrap()
}

/// The counters, once the condition holds. The queue writes them a moment after its guest has the answer.
fn when(rig: &Rig, what: &str, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = seen(rig);
        if is_so(&now) {
            return now;
        }
        assert!(Instant::now() < end, "{what}: {now:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn each_kind_of_request_is_counted_with_its_data_and_its_time() {
    let mut rig = Rig::new(Plan { bytes: 1 << 20, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = front.space().buffer(2).unwrap();
    let queue = &mut front.queues[0];
    for n in 0..10 {
        queue.write(8 * n, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    }
    for _ in 0..3 {
        queue.read(0, &buffer, 0, 8192).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    }
    // Past the end of the disk.
    queue.read(1 << 20, &buffer, 0, 4096).unwrap();
    assert!(!queue.next_reply(PATIENCE).unwrap().is_ok());
    let now = when(&rig, "fourteen requests", |now| now.counts.refused == 1);
    assert_eq!((now.writes.completed, now.writes.sectors, now.writes.errors), (10, 80, 0));
    assert_eq!((now.reads.completed, now.reads.sectors, now.reads.in_flight()), (3, 48, 0));
    assert_eq!((now.flushes.submitted, now.discards.submitted), (0, 0));
    assert!(now.writes.max_ns > 0 && now.writes.sum_ns >= now.writes.max_ns);
    assert!(now.writes.sum_ns <= 10 * now.writes.max_ns);
    assert_eq!((now.image.as_str(), now.pid), (rig.image.to_str().unwrap(), std::process::id()));
    // A page with the disk's name, and one per queue.
    let name = stats_file(rig.run_dir()).display().to_string();
    let bytes: usize = mappings()
        .iter()
        .filter(|line| line.ends_with(&name))
        .map(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            number(end) - number(start)
        })
        .sum();
    assert_eq!(bytes, (1 + front.queues.len()) * 4096);
    front.close(PATIENCE).unwrap();

    // The next process, and a later connection, continue the counts.
    rig.stop().unwrap();
    rig.start();
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = buffer_of(&front);
    front.queues[0].write(0, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    let now = when(&rig, "one more", |now| now.writes.completed == 11);
    assert_eq!((now.counts.requests, now.counts.refused), (15, 1));
    front.close(PATIENCE).unwrap();
    rig.stop().unwrap();
}

fn buffer_of(front: &Frontend) -> Buffer {
    front.space().buffer(1).unwrap()
}

#[test]
fn what_is_in_flight_shows_while_its_queue_waits() {
    let faults = Faults::none();
    faults.set([Ops::from(Kind::Write).meet(Fault::Late(Duration::from_millis(300)))]);
    let rig = Rig::new(Plan { bytes: 1 << 20, engine: faults.factory(), ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = buffer_of(&front);
    let (end, mut writes) = (Instant::now() + PATIENCE, 0);
    // Reading one too late is no failure: the next one is in flight as long.
    let mut shown = false;
    while !shown {
        assert!(Instant::now() < end, "none of {writes} writes was seen in flight");
        front.queues[0].write(0, &buffer, 0, 4096).unwrap();
        front.queues[0].push().unwrap();
        writes += 1;
        while !shown && Instant::now() < end && seen(&rig).writes.completed < writes {
            shown = seen(&rig).writes.in_flight() == 1;
        }
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    }
    when(&rig, "none in flight", |now| {
        (now.writes.in_flight(), now.writes.completed) == (0, writes)
    });
}

#[test]
fn errors_of_the_storage_are_counted() {
    let faults = Faults::none();
    faults.once(Kind::Read, Fault::Errno(EIO));
    let rig = Rig::new(Plan { bytes: 1 << 20, engine: faults.factory(), ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    let buffer = buffer_of(&front);
    front.queues[0].read(0, &buffer, 0, 4096).unwrap();
    assert!(!front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    let now = when(&rig, "an error", |now| now.reads.errors == 1);
    assert_eq!((now.reads.completed, now.reads.sectors, now.counts.refused), (1, 0, 0));
}
