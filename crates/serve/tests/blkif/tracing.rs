//! A disk's trace: its records of requests, of the thread that serves them, and of the guest.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::nbd::Options;
use ferrite_serve::polling::PollWindow;
use ferrite_serve::trace::clients::ClientTraces;
use ferrite_serve::trace::read::{News, Reader};
use ferrite_serve::trace::{Doing, Metadata, Noticed, client_file};
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::faulty::{Fault, Faults, Kind};
use ferrite_testkit::nbd::{self, Served, command};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images};

fn reader(rig: &Rig) -> Reader {
    Reader::open(&rig.run_dir().join("trace-0")).unwrap()
}

/// Reads until there are so many records. The queue writes one a moment after its guest has the answer.
fn until(reader: &mut Reader, records: usize) -> News {
    let end = Instant::now() + PATIENCE;
    let mut all = News::default();
    while all.records.len() < records {
        let news = reader.look().unwrap();
        assert_eq!((news.lost_records, news.lost_spans), (0, 0));
        all.records.extend(news.records);
        all.spans.extend(news.spans);
        assert!(Instant::now() < end, "{} records", all.records.len());
    }
    all
}

/// One after the other, each as soon as the one before it is answered.
fn in_turn(front: &mut Frontend, requests: u64) {
    let buffer = front.space().buffer(1).unwrap();
    for n in 0..requests {
        front.queues[0].write(8 * n, &buffer, 0, 4096).unwrap();
        assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
    }
}

fn polling(window_us: u32) -> Plan {
    let tuning = Tuning { poll: PollWindow::Fixed(window_us), ..Tuning::default() };
    Plan { bytes: 1 << 20, tuning, ..Plan::default() }
}

#[test]
fn a_queue_that_sleeps_notices_requests_by_events_and_says_so() {
    let rig = Rig::new(polling(0));
    let mut front = rig.connect(&FrontOptions::default());
    let mut reader = reader(&rig);
    in_turn(&mut front, 45);
    // A quick guest finds the queue awake after each request. These find it asleep.
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(5));
        in_turn(&mut front, 1);
    }
    let seen = until(&mut reader, 50);
    let events = seen.records.iter().filter(|record| record.noticed == Noticed::Event).count();
    assert!(events > 0, "{:?}", seen.records);
    assert!(
        seen.records.iter().all(|record| record.noticed != Noticed::Poll),
        "{:?}",
        seen.records
    );
    let woken = |doing| seen.spans.iter().filter(|span| span.doing == doing).count();
    assert!(woken(Doing::WokenByEvent) >= events, "{:?}", seen.spans);
    assert!(!seen.spans.iter().any(|span| matches!(span.doing, Doing::Polled(_))));
    assert!(seen.spans.iter().all(|span| span.from_ns <= span.to_ns));
    // The thread slept before it took the request that woke it.
    let first = seen.records.iter().find(|record| record.noticed == Noticed::Event).unwrap();
    let sleep = |span: &&ferrite_serve::trace::Span| span.doing == Doing::WokenByEvent;
    assert!(seen.spans.iter().find(sleep).unwrap().to_ns <= first.stages.taken_ns);
    // The guest requests an event for each answer, and has consumed the previous answer before.
    let numbers: Vec<_> = seen.records.iter().map(|record| record.answer).collect();
    assert_eq!(numbers, (1..=50).collect::<Vec<_>>());
    let consumed = seen.spans.iter().filter_map(|span| match span.doing {
        Doing::Consumed(answers) => Some(answers),
        _ => None,
    });
    let consumed: Vec<_> = consumed.collect();
    assert!(consumed.is_sorted() && consumed.last().is_some_and(|last| (1..=50).contains(last)));
}

#[test]
fn a_queue_that_polls_says_which_requests_it_found_so_and_for_how_long_it_looked() {
    let rig = Rig::new(polling(10_000));
    let mut front = rig.connect(&FrontOptions::default());
    let mut reader = reader(&rig);
    in_turn(&mut front, 50);
    let seen = until(&mut reader, 50);
    assert!(seen.records.iter().any(|record| record.noticed == Noticed::Poll));
    assert!(seen.spans.iter().any(|span| span.doing == Doing::Polled(true)));
    assert!(seen.records.iter().all(|record| record.metadata == Metadata::None));
}

#[test]
fn requests_that_shared_an_operation_have_its_number_and_others_have_numbers_of_their_own() {
    const SWEEP: u64 = 16;
    let rig = Rig::new(polling(0));
    let mut front = rig.connect(&FrontOptions::default());
    let mut reader = reader(&rig);
    let buffer = front.space().buffer(1).unwrap();
    in_turn(&mut front, 2);
    // Every other page, and the first eight pages: put on the ring before the queue is notified.
    for page in (0..8).chain((8..SWEEP).map(|page| page * 2)) {
        front.queues[0].write(8 * page, &buffer, 0, 4096).unwrap();
    }
    front.queues[0].drain(PATIENCE).unwrap();
    let seen = until(&mut reader, 2 + SWEEP as usize).records;
    assert!(seen.iter().all(|record| record.transfer != 0 && record.sharing >= 1));
    for record in &seen {
        let shared = seen.iter().filter(|other| other.transfer == record.transfer).count();
        assert_eq!(shared, usize::from(record.sharing), "{record:?}");
    }
    let merged: Vec<_> = seen.iter().filter(|record| record.sharing > 1).collect();
    let operations: BTreeSet<_> = merged.iter().map(|record| record.transfer).collect();
    assert_eq!((merged.len() - operations.len()) as u64, rig.counters.counts().merged);
    assert!(!merged.is_empty() && seen[..2].iter().all(|record| record.sharing == 1));
}

#[test]
fn a_request_that_waits_for_metadata_says_so_and_the_next_one_there_does_not() {
    let place = dir_in_memory();
    let image = images::make(place.path(), "qcow2", 64 << 20);
    let mut rig = Rig::new(Plan { image: Some(image), ..polling(0) });
    let mut front = rig.connect(&FrontOptions::default());
    in_turn(&mut front, 4);
    front.close(PATIENCE).unwrap();
    rig.stop().unwrap();
    // Nothing is cached now.
    rig.start();
    let mut front = rig.connect(&FrontOptions::default());
    let mut reader = reader(&rig);
    in_turn(&mut front, 2);
    let found: Vec<_> =
        until(&mut reader, 2).records.iter().map(|record| record.metadata).collect();
    assert_eq!(found, [Metadata::Miss, Metadata::Hit]);
}

#[test]
fn what_a_predecessor_left_is_told_as_such() {
    let mut rig = Rig::new(polling(0));
    let mut front = rig.connect(&FrontOptions::default());
    in_turn(&mut front, 3);
    let mut old = reader(&rig);
    assert_eq!(until(&mut old, 3).records.len(), 3);
    rig.stop().unwrap();
    rig.start();
    in_turn(&mut front, 1);
    // The next process has a file of its own. A reader of the old file still has its records.
    let mut new = reader(&rig);
    assert_ne!(old.inode(), new.inode());
    let record = until(&mut new, 1).records[0];
    assert_eq!((record.answer, record.noticed == Noticed::Replayed), (4, false));
    assert_eq!(old.look().unwrap().records, []);
}

#[test]
fn requests_of_a_client_of_nbd_leave_records_and_say_when_its_thread_slept() {
    let dir = tempfile::tempdir().unwrap();
    let traces = Some(ClientTraces::new(dir.path()));
    let faults = Faults::none();
    let options = Options { traces, engine: faults.factory(), ..nbd::options() };
    let mut served = Served::new("raw", 8 << 20, options);
    let mut first = served.client();
    for block in 0..3 {
        first.write(block * 4096, &[7; 4096]);
    }
    first.read(1 << 20, 8192);
    faults.once(Kind::Sync, Fault::Errno(5));
    assert_ne!(first.call(command::FLUSH, 0, 0, 0, &[]).error, 0);
    assert_ne!(first.call(command::READ, 0, 1 << 40, 4096, &[]).error, 0);
    let mut second = served.client();
    second.read(0, 512);
    let mut reader = Reader::open(&dir.path().join(client_file(0))).unwrap();
    let seen = until(&mut reader, 5);
    let shapes: Vec<_> =
        seen.records.iter().map(|r| (r.operation, r.sector, r.bytes, r.status)).collect();
    let expected =
        [(1, 0, 4096, 0), (1, 8, 4096, 0), (1, 16, 4096, 0), (0, 2048, 8192, 0), (3, 0, 0, -1)];
    assert_eq!(shapes, expected, "what is refused before it has a place is not there");
    for record in &seen.records {
        let s = &record.stages;
        assert!(0 < s.taken_ns && s.taken_ns <= s.submitted_ns && s.submitted_ns <= s.completed_ns);
        assert!(s.completed_ns <= s.answered_ns && !record.notified && record.answer == 0);
    }
    assert!(seen.records.iter().any(|record| record.noticed == Noticed::Event));
    assert!(seen.spans.iter().any(|span| span.doing == Doing::WokenByEvent));
    let cookies: BTreeSet<u64> = seen.records.iter().map(|record| record.id).collect();
    assert_eq!(cookies.len(), 5, "each has its own");
    let other = Reader::open(&dir.path().join(client_file(1))).unwrap();
    assert_eq!(until(&mut { other }, 1).records[0].bytes, 512);
    drop((first, second));
    served.stop();
}
