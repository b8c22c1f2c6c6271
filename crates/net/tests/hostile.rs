//! Frontends that break the rules (threats.md T37 to T43). Each case ends with two other guests that still reach each
//! other.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{ALL, LONG, Rig, answer, connected, frame, mac, packet};
use ferrite_loopback::front::RingWord;
use ferrite_loopback::netfront::{NetOptions, SendOptions};
use ferrite_xen::hypervisor::GrantRef;
use ferrite_xen::netif::{
    ExtraInfo, GSO_TCPV4, RSP_ERROR, RSP_OKAY, RxRequest, TX_EXTRA_INFO, TX_MORE_DATA, TxRequest,
};

/// A hostile guest, 0, and two others.
fn three() -> Rig {
    connected(3, &NetOptions::default())
}

fn others_go_on(rig: &mut Rig) {
    for number in 0..3 {
        let bytes = frame(mac(2), mac(1), number, 9000);
        assert_eq!(rig.send(1, &bytes, &SendOptions::default()).status, RSP_OKAY);
        assert_eq!(packet(rig.queue(2)).frame, bytes);
    }
}

/// Waits until the interface of guest 0 is stopped; then it connects again, and works.
fn is_stopped_until_it_connects_again(rig: &mut Rig, why: &str) {
    let end = Instant::now() + LONG;
    loop {
        let error = rig.fronts[0].backend_key("error").unwrap().unwrap_or_default();
        if error.contains(why) {
            break;
        }
        assert!(Instant::now() < end, "{error:?} does not say {why:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    others_go_on(rig);
    let table = rig.fronts[0].space().memory().grants();
    assert_eq!(table.users(), 0, "its rings are not mapped any more");
    rig.fronts[0].connect(&NetOptions::default(), LONG).unwrap();
    let bytes = frame(mac(1), mac(0), 1, 3000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
}

/// Slots of guest 0 by hand: its page 0 has a good header.
fn slots(rig: &mut Rig, requests: &[(u16, u16, u16)]) -> Vec<(u16, i16)> {
    let queue = rig.queue(0);
    queue.tx_pages().grant(0, true);
    for (id, (offset, size, flags)) in requests.iter().enumerate() {
        let gref = queue.tx_pages().gref(0);
        queue.put(TxRequest { gref, offset: *offset, flags: *flags, id: id as u16, size: *size });
    }
    queue.push().unwrap();
    let mut answers = Vec::new();
    while answers.len() < requests.len() {
        assert!(queue.wait(LONG).unwrap(), "no answer came");
        answers.extend(queue.raw_answers().unwrap());
        queue.tx_ring().store(RingWord::RspEvent, answers.len() as u32 + 1);
    }
    answers.iter().map(|answer| (answer.id, answer.status)).collect()
}

#[test]
fn t37_pages_that_are_revoked_cost_their_packet_only() {
    let mut rig = three();
    let bytes = frame(mac(1), mac(0), 1, 20_000);
    for page in [0, 2, 4] {
        let queue = rig.queue(0);
        queue.send(&bytes, &SendOptions::default()).unwrap();
        let id = queue.last_ids()[page];
        queue.tx_pages().revoke(usize::from(id)).unwrap();
        queue.push().unwrap();
        assert_eq!(answer(queue).status, RSP_ERROR, "page {page}");
    }
    assert_eq!(rig.counts(0).failed, 3);
    // The receiver's own pages: the guest's fault, and no packet waits for it.
    let queue = rig.queue(1);
    let bad = (0..8).map(|page| queue.rx_pages().revoke(page).is_ok()).filter(|ok| *ok).count();
    assert!(bad > 0);
    others_go_on(&mut rig);
}

#[test]
fn t37_references_that_were_never_granted_are_refused() {
    let mut rig = three();
    for gref in [0, 1, 9999, u32::MAX] {
        let queue = rig.queue(0);
        queue.put(TxRequest { gref: GrantRef(gref), offset: 0, flags: 0, id: 7, size: 60 });
        queue.push().unwrap();
        let mut answers = Vec::new();
        while answers.is_empty() {
            assert!(queue.wait(LONG).unwrap(), "no answer came");
            answers = queue.raw_answers().unwrap();
        }
        queue.tx_ring().store(RingWord::RspEvent, queue.tx_ring().load(RingWord::RspProd) + 1);
        assert_eq!(answers.iter().map(|a| (a.id, a.status)).collect::<Vec<_>>(), [(7, RSP_ERROR)]);
    }
    // Received pages that are none.
    let queue = rig.queue(0);
    queue.put_rx(RxRequest { id: 0xFFFF, gref: GrantRef(u32::MAX) });
    others_go_on(&mut rig);
}

#[test]
fn t38_a_packet_without_an_end_stops_its_interface_and_no_other() {
    let mut rig = three();
    let queue = rig.queue(0);
    let gref = queue.tx_pages().gref(0);
    queue.put(TxRequest { gref, offset: 0, flags: TX_MORE_DATA, id: 0, size: 600 });
    queue.push().unwrap();
    is_stopped_until_it_connects_again(&mut rig, "without its last slots");
}

#[test]
fn t38_a_packet_without_an_end_that_a_predecessor_was_answering_stops_its_interface() {
    let mut rig = three();
    drop(rig.network.take());
    let queue = rig.queue(0);
    let gref = queue.tx_pages().gref(0);
    queue.put(TxRequest { gref, offset: 0, flags: TX_MORE_DATA, id: 0, size: 600 });
    queue.push().unwrap();
    // One answer is announced, and none published.
    queue.tx_ring().poke(60, &1_u32.to_le_bytes());
    rig.start();
    is_stopped_until_it_connects_again(&mut rig, "without its last slots");
}

#[test]
fn t38_too_many_slots_or_extra_infos_stop_the_interface() {
    let mut rig = three();
    let queue = rig.queue(0);
    let gref = queue.tx_pages().gref(0);
    for id in 0..40 {
        queue.put(TxRequest { gref, offset: 0, flags: TX_MORE_DATA, id, size: 600 });
    }
    queue.push().unwrap();
    is_stopped_until_it_connects_again(&mut rig, "more than 20 slots");
    let queue = rig.queue(0);
    let gref = queue.tx_pages().gref(0);
    queue.put(TxRequest { gref, offset: 0, flags: TX_EXTRA_INFO, id: 0, size: 600 });
    for _ in 0..40 {
        queue.put_extra(ExtraInfo { flags: 1, ..ExtraInfo::gso(1448, GSO_TCPV4) });
    }
    queue.push().unwrap();
    is_stopped_until_it_connects_again(&mut rig, "extra infos");
}

#[test]
fn t38_an_impossible_producer_stops_the_interface_also_while_it_is_detached() {
    let mut rig = three();
    let ring = rig.queue(0).tx_ring().clone();
    ring.store(RingWord::ReqProd, 100_000);
    rig.queue(0).notify().unwrap();
    is_stopped_until_it_connects_again(&mut rig, "is impossible");
    let ring = rig.queue(0).rx_ring().clone();
    ring.store(RingWord::ReqProd, 100_000);
    // Another guest has to send it a packet: the worker does not look at a receive ring without one.
    let bytes = frame(mac(0), mac(1), 1, 60);
    rig.send(1, &bytes, &SendOptions::default());
    let paths = rig.paths[0].clone();
    rig.machine.unplug(&paths).unwrap();
    rig.fronts[0].set_state(6).unwrap();
    rig.machine.wait_for_backend(&paths, &[6], LONG).unwrap();
    others_go_on(&mut rig);
}

/// The worker stops one interface at the end of a long turn. Meanwhile another one is to be closed: it does both.
#[test]
fn t38_a_stop_does_not_swallow_another_order() {
    let mut rig = connected(7, &NetOptions::default());
    let (bytes, how) = (frame(ALL, mac(2), 1, 60_000), SendOptions::default());
    let mut close_time = Duration::ZERO;
    for round in 0..100 {
        let mut sent = 0;
        while rig.queue(2).send(&bytes, &how).is_some() {
            sent += 1;
        }
        rig.queue(0).tx_ring().store(RingWord::ReqProd, 100_000);
        let began = Instant::now();
        rig.fronts[1].set_state(5).unwrap();
        // The times at which the two may meet, one after the other.
        while began.elapsed() < close_time * (round % 50) / 50 {
            std::hint::spin_loop();
        }
        rig.queue(2).push().unwrap();
        rig.fronts[1].wait_for_backend(&[5], LONG).unwrap();
        close_time = began.elapsed();
        let mut answers = 0;
        while answers < sent {
            rig.queue(2).wait(LONG).unwrap();
            answers += rig.queue(2).answers().unwrap().len();
        }
        for guest in 3..7 {
            while rig.queue(guest).receive().unwrap().is_some() {}
        }
        for front in &mut rig.fronts[..2] {
            front.connect(&NetOptions::default(), LONG).unwrap();
        }
    }
}

#[test]
fn t39_a_receiver_that_takes_nothing_keeps_a_bounded_number_of_packets() {
    let mut rig = three();
    rig.queue(0).set_rx_slots(0);
    let bytes = frame(mac(0), mac(1), 1, 60_000);
    for _ in 0..300 {
        // 256 pages, then 64 packets a turn at most wait, 30 ms.
        let sent = rig.send(1, &bytes, &SendOptions::default());
        assert!(sent.status != RSP_ERROR);
    }
    assert!(rig.counts(0).starved > 200);
    others_go_on(&mut rig);
}

#[test]
fn t40_headers_in_many_slots_are_judged_as_a_whole() {
    let mut rig = three();
    // The source address is cut by the borders of the slots.
    for chunk in [9, 12, 100] {
        let how = SendOptions { chunk, ..SendOptions::default() };
        let len = usize::from(chunk) * 17 + 3;
        let bytes = frame(mac(1), mac(0), 1, len);
        assert_eq!(rig.send(0, &bytes, &how).status, RSP_OKAY);
        assert_eq!(packet(rig.queue(1)).frame, bytes);
        let spoofed = frame(mac(1), mac(2), 1, len);
        assert!(rig.send(0, &spoofed, &how).status != RSP_OKAY);
    }
    assert_eq!((rig.counts(0).spoofed, rig.counts(1).received_packets), (3, 3));
    others_go_on(&mut rig);
}

#[test]
fn t40_a_header_that_changes_is_delivered_as_it_was_judged() {
    let mut rig = three();
    let bytes = frame(mac(1), mac(0), 1, 1000);
    let ends = Arc::new(AtomicBool::new(false));
    let (mut received, mut spoofed) = (0, 0);
    std::thread::scope(|scope| {
        let (queue_pages, flag) = (rig.fronts[0].queues[0].tx_pages(), ends.clone());
        let space = rig.fronts[0].space().clone();
        let first = queue_pages.frame(0);
        // Page 0 through a second mapping, so that the queue stays with this thread.
        let page = space.alias(first);
        scope.spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                for last in [1_u8, 3] {
                    page.write(11, &[last]);
                }
            }
        });
        for _ in 0..2000 {
            rig.send(0, &bytes, &SendOptions::default());
            while let Some(packet) = rig.queue(1).receive().unwrap() {
                spoofed += u64::from(packet.frame[6..12] != mac(0));
                received += 1;
            }
        }
        ends.store(true, Ordering::Relaxed);
    });
    assert_eq!(spoofed, 0, "spoofed frames were delivered");
    let counts = rig.counts(0);
    assert_eq!(counts.spoofed + counts.sent_packets, 2000);
    assert!(received > 0);
    // The sender is answered before the receiver.
    while received < counts.sent_packets {
        assert_eq!(packet(rig.queue(1)).frame[6..12], mac(0));
        received += 1;
    }
    others_go_on(&mut rig);
}

#[test]
fn t41_a_flood_that_is_dropped_blocks_nobody() {
    let mut rig = three();
    rig.queue(0).set_rx_slots(0);
    let to_full = frame(mac(0), mac(1), 1, 4000);
    for round in 0..20 {
        for _ in 0..100 {
            let _ = rig.queue(1).send(&to_full, &SendOptions::default());
            let _ = rig.queue(2).send(&frame(mac(0), mac(2), 1, 4000), &SendOptions::default());
        }
        rig.queue(1).push().unwrap();
        rig.queue(2).push().unwrap();
        // Behind it in the same ring.
        let bytes = frame(mac(2), mac(1), round, 500);
        while rig.queue(1).send(&bytes, &SendOptions::default()).is_none() {
            rig.queue(1).answers().unwrap();
            rig.queue(2).answers().unwrap();
        }
        rig.queue(1).push().unwrap();
        assert_eq!(packet(rig.queue(2)).frame, bytes);
    }
}

#[test]
fn t42_many_small_slots_are_one_packet() {
    let mut rig = three();
    for (chunk, len) in [(1, 18), (3, 54), (8, 144), (16, 288)] {
        let how = SendOptions { chunk, offset: 4080, ..SendOptions::default() };
        let bytes = frame(mac(1), mac(0), 1, len);
        assert_eq!(rig.send(0, &bytes, &how).status, RSP_OKAY);
        assert_eq!(packet(rig.queue(1)).frame, bytes);
        // Two more than a backend has to take.
        let how = SendOptions { chunk, ..SendOptions::default() };
        let bytes = frame(mac(1), mac(0), 1, usize::from(chunk) * 20);
        assert_eq!(rig.send(0, &bytes, &how).status, RSP_ERROR);
    }
    assert_eq!(rig.counts(0).malformed, 4);
    others_go_on(&mut rig);
}

#[test]
fn t43_slots_without_bytes_and_sizes_that_lie_are_answered() {
    let mut rig = three();
    let bytes = frame(mac(1), mac(0), 1, 100);
    rig.queue(0).tx_pages().write(0, &bytes);
    let more = TX_MORE_DATA;
    let answers = slots(&mut rig, &[(0, 100, more), (4096, 0, more), (60, 40, 0)]);
    assert_eq!(answers, [(0, RSP_OKAY), (1, RSP_OKAY), (2, RSP_OKAY)]);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
    let mut rig = three();
    let lies = [(0, 0, 0), (0, 13, 0), (4095, 2000, 0), (u16::MAX, u16::MAX, 0)];
    assert!(slots(&mut rig, &lies).iter().all(|(_, status)| *status == RSP_ERROR));
    assert_eq!(rig.counts(0).malformed, 4);
    assert_eq!(rig.counts(1).received_packets, 0);
    others_go_on(&mut rig);
}

#[test]
fn keys_that_lie_close_their_interface_with_the_reason() {
    let mut rig = three();
    for (key, value) in [
        ("tx-ring-ref", "4000000000"),
        ("rx-ring-ref", "x"),
        ("event-channel", "63"),
        ("multi-queue-num-queues", "5"),
        ("request-rx-copy", "0"),
    ] {
        let front = &mut rig.fronts[0];
        front.set_state(1).unwrap();
        front.wait_for_backend(&[2], LONG).unwrap();
        front.offer(&NetOptions::default()).unwrap();
        front.write_key(key, value).unwrap();
        front.set_state(4).unwrap();
        front.wait_for_backend(&[5], LONG).unwrap();
        assert!(front.backend_key("error").unwrap().is_some());
        front.write_key("multi-queue-num-queues", "1").unwrap();
        others_go_on(&mut rig);
    }
    rig.fronts[0].connect(&NetOptions::default(), LONG).unwrap();
}
