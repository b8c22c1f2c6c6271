//! Guests that send packets to each other through a network, as on a host.

mod common;

use std::time::{Duration, Instant};

use common::{ALL, LONG, answer, connected, frame, guests, mac, number_of, packet};
use ferrite_loopback::netfront::{NetOptions, NetQueue, SendOptions};
use ferrite_xen::netif::{
    GSO_TCPV4, GSO_TCPV6, RSP_DROPPED, RSP_OKAY, RX_CSUM_BLANK, RX_DATA_VALIDATED, TX_CSUM_BLANK,
};

/// Moves `count` frames from one queue to the other; both are driven by this thread. Every one arrives, in order.
fn stream(from: &mut NetQueue, to: &mut NetQueue, ends: (usize, usize), sizes: &[usize]) {
    let gso = [None, Some((1448, GSO_TCPV4)), Some((8948, GSO_TCPV6))];
    let (mut sent, mut received, mut answered) = (0, 0, 0);
    let end = Instant::now() + LONG;
    while received < sizes.len() || answered < sizes.len() {
        assert!(Instant::now() < end, "{sent} sent, {received} received, {answered} answered");
        let mut pushed = false;
        while sent < sizes.len() {
            let bytes = frame(mac(ends.1), mac(ends.0), sent as u64, sizes[sent]);
            // Longer ones need segmentation; pages line up or do not.
            let gso = if sizes[sent] > 9014 { gso[1 + sent % 2] } else { None };
            let flags = if gso.is_some() { TX_CSUM_BLANK } else { 0 };
            let offset = if sizes[sent] > 60_000 { 0 } else { (sent * 37 % 600) as u16 };
            let how = SendOptions { flags, gso, offset, ..SendOptions::default() };
            if from.send(&bytes, &how).is_none() {
                break;
            }
            (sent, pushed) = (sent + 1, true);
        }
        if pushed {
            from.push().unwrap();
        }
        while let Some(packet) = to.receive().unwrap() {
            let expected = frame(mac(ends.1), mac(ends.0), received as u64, sizes[received]);
            assert_eq!(packet.frame.len(), expected.len(), "packet {received}");
            assert!(packet.frame == expected && !packet.is_bad, "packet {received} differs");
            assert_eq!(packet.gso.is_some(), sizes[received] > 9014);
            if packet.gso.is_some() {
                assert_eq!(packet.flags, RX_CSUM_BLANK | RX_DATA_VALIDATED);
            }
            received += 1;
        }
        for one in from.answers().unwrap() {
            assert_eq!(one.status, RSP_OKAY, "packet {answered}");
            answered += 1;
        }
        to.wait(Duration::from_millis(1)).unwrap();
    }
}

fn both_ways(o: &NetOptions, sizes: &[usize]) {
    let mut rig = connected(2, o);
    let (first, second) = rig.fronts.split_at_mut(1);
    let (a, b) = (&mut first[0].queues, &mut second[0].queues);
    assert_eq!(a.len(), o.queues as usize);
    for queue in 0..a.len() {
        stream(&mut a[queue], &mut b[queue], (0, 1), sizes);
        stream(&mut b[queue], &mut a[queue], (1, 0), sizes);
    }
    assert_eq!(rig.counts(0), rig.counts(1));
    assert_eq!(rig.counts(0).sent_packets as usize, sizes.len() * o.queues as usize);
    assert_eq!(rig.counts(0).starved, 0);
}

#[test]
fn packets_of_all_sizes_arrive_whole_and_in_order() {
    let small = 14..200;
    let around = [4095, 4096, 4097, 8191, 8192, 8193, 9014, 12288, 65_521, 65_535];
    let mtu = [60, 1514, 1514, 1514, 9014].into_iter().cycle().take(600);
    let steps = (1000..65_507).step_by(997);
    let sizes: Vec<usize> = small.chain(around).chain(mtu).chain(steps).collect();
    both_ways(&NetOptions::default(), &sizes);
}

/// Each part of a packet is one piece of a copy if its receiver has the same parts: whole pages, behind the headers.
#[test]
fn a_large_frame_keeps_the_parts_of_its_sender_where_they_are_few() {
    let mut rig = connected(2, &NetOptions::default());
    let mut sent = |len: usize, how: &SendOptions| {
        let bytes = frame(mac(1), mac(0), 1, len);
        assert_eq!(rig.send(0, &bytes, how).status, RSP_OKAY);
        let packet = packet(rig.queue(1));
        assert_eq!((packet.frame == bytes, packet.is_bad), (true, false), "{len} bytes");
        packet.pages
    };
    // As Linux sends 64 KiB: the headers, then whole pages.
    let gso = Some((1448, GSO_TCPV4));
    let headers = SendOptions { first: 66, gso, ..SendOptions::default() };
    let parts: Vec<usize> = [66].into_iter().chain([4096; 15]).chain([3720]).collect();
    assert_eq!(sent(65_226, &headers), parts);
    // The Ethernet header does not end with the first part.
    assert_eq!(sent(12_000, &SendOptions { first: 5, ..headers }), [5, 4096, 4096, 3803]);
    // Many small parts would take many pages of the receiver.
    let small = SendOptions { chunk: 1000, ..SendOptions::default() };
    assert_eq!(sent(16_000, &small), [4096, 4096, 4096, 3712]);
    // Short ones take as few pages as they can.
    assert_eq!(sent(1514, &SendOptions { first: 66, ..SendOptions::default() }), [1514]);
}

#[test]
fn packets_without_segmentation_arrive_by_each_queue() {
    let sizes: Vec<usize> = (0..500).map(|i| 60 + i * 131 % 8950).collect();
    both_ways(&NetOptions { queues: 4, gso: false, ..NetOptions::default() }, &sizes);
}

#[test]
fn a_broadcast_reaches_all_others_and_a_stranger_nobody() {
    let mut rig = connected(3, &NetOptions::default());
    let bytes = frame(ALL, mac(0), 5, 5000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    for guest in 1..3 {
        assert_eq!(packet(rig.queue(guest)).frame, bytes);
    }
    assert_eq!(rig.queue(0).receive().unwrap(), None);
    let bytes = frame(mac(9), mac(0), 6, 500);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_DROPPED);
    assert_eq!((rig.counts(0).dropped, rig.counts(0).sent_packets), (1, 1));
    assert!((0..3).all(|guest| rig.queue(guest).receive().unwrap().is_none()));
}

#[test]
fn what_a_guest_does_not_take_is_dropped_and_counted() {
    let mut rig = guests(2);
    rig.start();
    rig.fronts[0].connect(&NetOptions::default(), LONG).unwrap();
    let plain = NetOptions { sg: false, gso: false, ..NetOptions::default() };
    rig.fronts[1].connect(&plain, LONG).unwrap();
    let bytes = frame(mac(1), mac(0), 1, 1500);
    let gso = SendOptions { gso: Some((1448, GSO_TCPV4)), ..SendOptions::default() };
    assert_eq!(rig.send(0, &bytes, &gso).status, RSP_DROPPED);
    let long = frame(mac(1), mac(0), 1, 5000);
    assert_eq!(rig.send(0, &long, &SendOptions::default()).status, RSP_DROPPED);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
    assert_eq!(rig.counts(1).unsupported, 2);
}

#[test]
fn a_frontend_closes_and_connects_again() {
    let mut rig = connected(2, &NetOptions::default());
    for round in 0..3 {
        let bytes = frame(mac(1), mac(0), round, 9000);
        assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
        assert_eq!(packet(rig.queue(1)).frame, bytes);
        if round == 0 {
            rig.fronts[1].close(LONG).unwrap();
            assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_DROPPED);
        }
        // The second time without a close, as a guest that crashes and boots.
        rig.fronts[1].connect(&NetOptions::default(), LONG).unwrap();
    }
    assert_eq!(rig.fronts[1].space().memory().bound_ports(), 1);
    assert_eq!(rig.fronts[1].space().memory().grants().users(), 2, "two rings are mapped");
}

#[test]
fn an_interface_is_detached_and_nothing_of_it_is_left() {
    let mut rig = connected(2, &NetOptions { queues: 2, ..NetOptions::default() });
    let paths = rig.paths[1].clone();
    rig.machine.unplug(&paths).unwrap();
    rig.machine.wait_for_backend(&paths, &[5], LONG).unwrap();
    rig.fronts[1].set_state(6).unwrap();
    rig.machine.wait_for_backend(&paths, &[6], LONG).unwrap();
    assert_eq!(rig.fronts[1].space().memory().grants().users(), 0);
    assert_eq!(rig.fronts[1].space().memory().bound_ports(), 0);
    rig.machine.remove_disk(&paths).unwrap();
    let bytes = frame(mac(1), mac(0), 1, 100);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_DROPPED);
}

#[test]
fn a_guest_that_ends_takes_nobody_along() {
    let mut rig = connected(3, &NetOptions::default());
    let domid = rig.fronts[1].domid();
    rig.machine.destroy(domid).unwrap();
    let paths = rig.paths[1].clone();
    rig.machine.wait_for_backend(&paths, &[6], LONG).unwrap();
    let bytes = frame(mac(2), mac(0), 1, 20_000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(2)).frame, bytes);
}

#[test]
fn a_network_that_starts_again_goes_on_with_the_rings() {
    let mut rig = connected(2, &NetOptions::default());
    for round in 0..4 {
        // Some are on the ring when it ends.
        let first = round * 20;
        for i in 0..10 {
            let bytes = frame(mac(1), mac(0), first + i, 3000);
            rig.queue(0).send(&bytes, &SendOptions::default()).unwrap();
        }
        rig.queue(0).push().unwrap();
        drop(rig.network.take());
        for i in 10..20 {
            let bytes = frame(mac(1), mac(0), first + i, 3000);
            rig.queue(0).send(&bytes, &SendOptions::default()).unwrap();
        }
        rig.queue(0).push().unwrap();
        rig.start();
        let mut answered = 0;
        let end = Instant::now() + LONG;
        while answered < 20 {
            assert!(Instant::now() < end, "{answered} of 20 are answered");
            rig.queue(0).wait(Duration::from_millis(10)).unwrap();
            answered += rig.queue(0).answers().unwrap().len();
        }
        // The last ones were sent behind the end, and the successor connects all before it begins.
        // Packets may come twice, but not damaged.
        while number_of(&packet(rig.queue(1)).frame).expect("a whole packet") != first + 19 {}
    }
    assert_eq!(rig.queue(0).unanswered(), 0);
}

#[test]
fn a_receiver_without_pages_costs_a_bounded_time_and_its_packets() {
    let mut rig = guests(3);
    rig.start();
    let empty = NetOptions { rx_slots: 0, ..NetOptions::default() };
    rig.fronts[0].connect(&NetOptions::default(), LONG).unwrap();
    rig.fronts[1].connect(&empty, LONG).unwrap();
    rig.fronts[2].connect(&NetOptions::default(), LONG).unwrap();
    let bytes = frame(mac(1), mac(0), 1, 100);
    let good = frame(mac(2), mac(0), 2, 100);
    for _ in 0..100 {
        rig.queue(0).send(&bytes, &SendOptions::default()).unwrap();
    }
    rig.queue(0).send(&good, &SendOptions::default()).unwrap();
    rig.queue(0).push().unwrap();
    // It does not wait behind those: only its answer does.
    assert_eq!(packet(rig.queue(2)).frame, good);
    assert_eq!(rig.queue(0).unanswered(), 101);
    let mut dropped = 0;
    let end = Instant::now() + LONG;
    while dropped < 100 {
        assert!(Instant::now() < end, "{dropped} of 100 are answered");
        rig.queue(0).wait(Duration::from_millis(10)).unwrap();
        let sent = rig.queue(0).answers().unwrap();
        dropped += sent.iter().filter(|sent| sent.status == RSP_DROPPED).count();
    }
    assert_eq!(rig.counts(1).starved, 100);
    // From now on no packet waits for it, until it has taken one.
    let sent = rig.send(0, &bytes, &SendOptions::default());
    assert_eq!(sent.status, RSP_DROPPED);
    rig.queue(1).set_rx_slots(8);
    rig.queue(1).refill().unwrap();
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
}

#[test]
fn a_packet_that_waits_is_delivered_when_there_are_pages() {
    let mut rig = guests(2);
    let hold = ferrite_net::Options { hold_ms: 60_000, ..common::options(&rig.machine) };
    rig.network = Some(ferrite_net::Network::start(hold).unwrap());
    rig.fronts[0].connect(&NetOptions::default(), LONG).unwrap();
    let few = NetOptions { rx_slots: 3, ..NetOptions::default() };
    rig.fronts[1].connect(&few, LONG).unwrap();
    let bytes = frame(mac(1), mac(0), 1, 30_000);
    rig.queue(0).send(&bytes, &SendOptions::default()).unwrap();
    rig.queue(0).push().unwrap();
    rig.queue(1).wait(Duration::from_millis(20)).unwrap();
    assert_eq!(rig.queue(1).receive().unwrap(), None);
    rig.queue(1).set_rx_slots(64);
    rig.queue(1).refill().unwrap();
    assert_eq!(packet(rig.queue(1)).frame, bytes);
    assert_eq!(answer(rig.queue(0)).status, RSP_OKAY);
}
