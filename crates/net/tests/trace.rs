//! The records of packets: what a reader sees of the way of each.

mod common;

use std::time::{Duration, Instant};

use common::{ALL, LONG, Rig, answer, frame, guests, mac, options, packet};
use ferrite_loopback::front::RingWord;
use ferrite_loopback::netfront::{NetOptions, SendOptions};
use ferrite_net::Network;
use ferrite_net::trace::{End, Outcome, Reader, Record, Stage, TraceRing};

/// So many connected guests, whose packets leave records.
fn traced(count: usize, o: &NetOptions) -> (Rig, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = guests(count);
    let trace = Some(TraceRing::create(&dir.path().join("lan.trace")).unwrap());
    let options = ferrite_net::Options { trace, ..options(&rig.machine) };
    rig.network = Some(Network::start(options).unwrap());
    rig.fronts.iter_mut().for_each(|front| front.connect(o, LONG).unwrap());
    (rig, dir)
}

/// All records, when there are so many and `done` says so.
fn records(dir: &tempfile::TempDir, done: impl Fn(&[Record]) -> bool) -> Vec<Record> {
    let end = Instant::now() + LONG;
    loop {
        let mut reader = Reader::open(&dir.path().join("lan.trace")).unwrap();
        reader.look().unwrap();
        let (records, lost) = reader.finish();
        assert_eq!(lost, 0);
        if done(&records) {
            return records;
        }
        assert!(Instant::now() < end, "{records:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn end(rig: &Rig, guest: usize) -> End {
    End::Vif { domid: rig.fronts[guest].domid().0, handle: 0, queue: 0 }
}

/// The times of these stages are there, and in this order.
fn in_order(record: &Record, stages: &[Stage]) {
    let times: Vec<u64> = stages.iter().map(|s| record.at_ns(*s).unwrap_or(0)).collect();
    assert!(times[0] > 0 && times.is_sorted(), "{record:#?}");
}

const TO_THE_ANSWERS: [Stage; 6] = [
    Stage::Seen,
    Stage::Fetched,
    Stage::Chosen,
    Stage::Copied,
    Stage::RxAnswered,
    Stage::TxAnswered,
];

#[test]
fn a_packet_has_the_time_of_each_stage_in_their_order() {
    let (mut rig, dir) = traced(2, &NetOptions::default());
    let large = SendOptions { gso: Some((1448, 1)), first: 54, ..SendOptions::default() };
    rig.send(0, &frame(mac(1), mac(0), 1, 30_000), &large);
    packet(rig.queue(1));
    assert_eq!(rig.queue(1).receive().unwrap(), None);
    // The thread sees how far a guest has consumed when it looks: with the next packet.
    rig.send(1, &frame(mac(0), mac(1), 2, 60), &SendOptions::default());
    packet(rig.queue(0));
    let all = records(&dir, |all| {
        all.len() == 2 && all.iter().all(|record| record.at_ns(Stage::TxAnswered).is_some())
    });
    let [there, back] = all[..] else { unreachable!() };
    assert_eq!((there.from, there.to), (end(&rig, 0), end(&rig, 1)));
    assert_eq!((back.from, back.to), (end(&rig, 1), end(&rig, 0)));
    assert_eq!(
        (there.bytes, there.segment_bytes, there.outcome),
        (30_000, 1448, Outcome::Received)
    );
    // 54 bytes and 29,946 in 8 pages, and the extra info.
    assert_eq!((there.pages, there.pieces, there.together), (10, 9, 1));
    assert_eq!((back.bytes, back.segment_bytes, back.pages, back.pieces), (60, 0, 1, 1));
    for record in [&there, &back] {
        in_order(record, &TO_THE_ANSWERS);
        in_order(record, &[Stage::TxAnswered, Stage::RxNotified]);
        in_order(record, &[Stage::TxAnswered, Stage::TxNotified]);
    }
    in_order(&there, &[Stage::RxNotified, Stage::RxConsumed]);
    in_order(&there, &[Stage::TxNotified, Stage::TxConsumed]);
    assert!(there.at_ns(Stage::RxConsumed) <= back.at_ns(Stage::Fetched), "{there:#?} {back:#?}");
    assert_eq!(back.at_ns(Stage::RxConsumed), None, "the worker has not looked since");
}

#[test]
fn what_became_of_a_packet_is_in_its_records() {
    let (mut rig, dir) = traced(3, &NetOptions::default());
    rig.send(0, &frame(ALL, mac(0), 1, 60), &SendOptions::default());
    rig.send(0, &frame([2; 6], mac(0), 2, 61), &SendOptions::default());
    rig.send(0, &frame(mac(1), mac(2), 3, 62), &SendOptions::default());
    let all = records(&dir, |all| {
        all.len() == 4
            && all
                .iter()
                .all(|record| record.at_ns(Stage::TxAnswered).is_some() || record.bytes == 60)
    });
    let told: Vec<_> = all.iter().map(|r| (r.bytes, r.to, r.outcome)).collect();
    let expected = [
        (60, end(&rig, 1), Outcome::Received),
        (60, end(&rig, 2), Outcome::Received),
        (61, End::Nobody, Outcome::Dropped),
        (62, End::Nobody, Outcome::Refused),
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_packet_that_waits_keeps_the_time_when_it_was_seen() {
    let (mut rig, dir) = traced(2, &NetOptions::default());
    rig.queue(1).set_rx_slots(0);
    // The pages that are there are used up.
    while rig.counts(0).sent_packets < 256 {
        rig.send(0, &frame(mac(1), mac(0), 1, 60), &SendOptions::default());
    }
    while rig.queue(1).receive().unwrap().is_some() {}
    rig.queue(0).send(&frame(mac(1), mac(0), 2, 70), &SendOptions::default()).unwrap();
    rig.queue(0).push().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    rig.queue(1).set_rx_slots(256);
    while rig.queue(1).receive().unwrap().is_some() {}
    answer(rig.queue(0));
    let all = records(&dir, |all| {
        all.last().is_some_and(|r| r.bytes == 70 && r.at_ns(Stage::TxAnswered).is_some())
    });
    let record = all.last().unwrap();
    in_order(record, &[Stage::Seen, Stage::Fetched, Stage::TxAnswered]);
    let waited = record.at_ns(Stage::TxAnswered).unwrap() - record.at_ns(Stage::Seen).unwrap();
    assert!(waited > 1_000_000, "{record:#?}");
}

/// A guest may say that it has consumed anything.
#[test]
fn a_guest_that_lies_about_what_it_has_consumed_changes_its_own_records_only() {
    let (mut rig, dir) = traced(2, &NetOptions::default());
    for lie in [0, 1 << 31, u32::MAX, 5000] {
        for _ in 0..300 {
            rig.queue(1).rx_ring().store(RingWord::RspEvent, lie);
            rig.queue(0).tx_ring().store(RingWord::RspEvent, lie);
            rig.queue(0).send(&frame(mac(1), mac(0), 1, 60), &SendOptions::default()).unwrap();
            rig.queue(0).push().unwrap();
            let end = Instant::now() + LONG;
            while rig.queue(0).answers().unwrap().is_empty() {
                assert!(Instant::now() < end);
                std::thread::yield_now();
            }
            while rig.queue(1).receive().unwrap().is_some() {}
        }
    }
    let all = records(&dir, |all| all.len() == 1200);
    assert!(all.iter().all(|record| record.outcome == Outcome::Received));
}
