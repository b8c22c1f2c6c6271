//! A network in a process of its own, which is killed while packets move.

mod common;

use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{KIND, LONG, Rig, connected, frame, guests, mac, number_of, packet};
use ferrite_loopback::front::{RawRing, RingWord};
use ferrite_loopback::netfront::{NetOptions, SendOptions};
use ferrite_loopback::{BackendHandle, CopyWith, Loopback};
use ferrite_net::{Network, Options};
use ferrite_xen::netif::{GSO_TCPV4, RSP_DROPPED, RSP_OKAY};
use ferrite_xen::store::Store;

const ROLE: &str = "FERRITE_NET_TEST_BACKEND";

ferrite_loopback::before_main!(backend);

/// The process that is killed.
fn backend() {
    let Ok(handle) = std::env::var(ROLE) else { return };
    let handle = BackendHandle::from_arg(&handle).unwrap();
    let loopback = Loopback::new(CopyWith::Memcpy);
    handle.guests.iter().for_each(|guest| loopback.add(guest).unwrap());
    let store = Store::from_fd(handle.store);
    let network = Network::start(Options::new(KIND, Arc::new(loopback), store)).unwrap();
    network.wait().unwrap();
}

fn start(rig: &Rig) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let handle = rig.machine.backend().unwrap().pass_to(&mut command);
    command.env(ROLE, handle).spawn().unwrap()
}

#[test]
fn a_network_that_is_killed_leaves_no_ring_stuck() {
    let mut rig = guests(2);
    let mut process = start(&rig);
    for front in &mut rig.fronts {
        front.connect(&NetOptions { queues: 2, ..NetOptions::default() }, LONG).unwrap();
    }
    let (mut sent, mut answered, mut received, mut kills) = (0_u64, 0_u64, 0_u64, 0);
    let end = Instant::now() + 2 * LONG;
    while kills < 5 || answered < sent {
        assert!(
            Instant::now() < end,
            "{sent} sent, {answered} answered, {received} received, {kills}"
        );
        let (from, to) = ((sent % 2) as usize, 1 - (sent % 2) as usize);
        let queue = &mut rig.fronts[from].queues[(sent / 2 % 2) as usize];
        let bytes = frame(mac(to), mac(from), sent, 60 + (sent * 997 % 9000) as usize);
        if kills < 5 && queue.send(&bytes, &SendOptions::default()).is_some() {
            queue.push().unwrap();
            sent += 1;
        }
        for front in &mut rig.fronts {
            for queue in &mut front.queues {
                answered += queue.answers().unwrap().len() as u64;
                while let Some(packet) = queue.receive().unwrap() {
                    // One whose copy was under way may be bad, and is marked.
                    assert!(
                        packet.is_bad || number_of(&packet.frame).is_some(),
                        "a damaged packet"
                    );
                    received += 1;
                }
            }
        }
        if kills < 5 && received >= (kills + 1) * 300 {
            process.kill().unwrap();
            process.wait().unwrap();
            process = start(&rig);
            kills += 1;
        }
        if kills == 5 {
            rig.fronts[0].queues[0].wait(Duration::from_millis(1)).unwrap();
        }
    }
    assert!(received > 0 && answered == sent);
    process.kill().unwrap();
    process.wait().unwrap();
}

/// A predecessor may have published answers and died before it notified the guest.
#[test]
fn a_guest_hears_of_a_successor() {
    let mut rig = connected(2, &NetOptions::default());
    let bytes = frame(mac(1), mac(0), 1, 60);
    rig.send(0, &bytes, &SendOptions::default());
    assert_eq!(packet(rig.queue(1)).frame, bytes);
    drop(rig.network.take());
    while rig.queue(0).wait(Duration::from_millis(100)).unwrap() {}
    rig.start();
    assert!(rig.queue(0).wait(LONG).unwrap(), "no event came");
}

type Page = [u8; 4096];

fn page(ring: &RawRing) -> Page {
    let mut bytes = [0; 4096];
    ring.peek(0, &mut bytes);
    bytes
}

/// The words that a process has written to a new ring to answer it, in its order: how many answers, the answers, the
/// producer.
fn answer_words(before: &Page, after: &Page) -> Vec<(usize, [u8; 4])> {
    let word = |page: &Page, at: usize| page[at..at + 4].try_into().unwrap();
    let order = |at: usize| match at {
        60 => 0,
        8 => usize::MAX,
        slot => slot,
    };
    let mut words: Vec<_> = (64..4096).step_by(4).chain([60, 8]).collect();
    words.retain(|at| word(before, *at) != word(after, *at));
    words.sort_by_key(|at| order(*at));
    words.into_iter().map(|at| (at, word(after, at))).collect()
}

/// The rings of a sender and of a receiver are left as by a switch that dies after each word that it writes to them, in
/// the order of [`answer_words`]. Both frontends, which break off at the first answer without a request, and at a grant
/// in use, go on at its successor.
#[test]
fn a_network_that_dies_at_any_word_of_its_answers_is_succeeded() {
    let frames = [frame(mac(1), mac(0), 1, 9000), frame(mac(1), mac(0), 2, 60)];
    let (mut at, mut outcomes) = (0, Vec::new());
    loop {
        let mut rig = connected(2, &NetOptions::default());
        drop(rig.network.take());
        let gso = Some((1448, GSO_TCPV4));
        for (bytes, gso) in frames.iter().zip([gso, None]) {
            rig.queue(0).send(bytes, &SendOptions { gso, ..SendOptions::default() }).unwrap();
        }
        rig.queue(0).push().unwrap();
        let rings = [rig.queue(0).tx_ring().clone(), rig.queue(1).rx_ring().clone()];
        let before = rings.each_ref().map(|ring| page(ring));
        rig.start();
        let end = Instant::now() + LONG;
        while rings.iter().any(|ring| ring.load(RingWord::RspProd) != 5) {
            assert!(Instant::now() < end, "no answers");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(rig.network.take());
        let mut words = Vec::new();
        for (ring, before) in rings.iter().zip(&before) {
            let written = answer_words(before, &page(ring));
            words.extend(written.into_iter().map(|word| (ring, word)));
            ring.poke(0, before);
        }
        let Some(written) = words.get(..at) else { break };
        written.iter().for_each(|(ring, (at, bytes))| ring.poke(*at, bytes));
        rig.start();
        let mut statuses = Vec::new();
        while statuses.len() < 2 {
            assert!(Instant::now() < end, "{at}: answered {statuses:?}");
            statuses.extend(rig.queue(0).answers().unwrap().iter().map(|sent| sent.status));
            rig.queue(0).wait(Duration::from_millis(1)).unwrap();
        }
        drop(rig.network.take());
        let mut received = Vec::new();
        while let Some(packet) = rig.queue(1).receive().unwrap() {
            received.push(frames.iter().position(|bytes| *bytes == packet.frame));
        }
        outcomes.push((statuses, received));
        at += 1;
    }
    // Before the first word all is done again. Then both packets are lost to the receiver, until they are published.
    let (okay, dropped) = (vec![RSP_OKAY; 2], vec![RSP_DROPPED; 2]);
    let all = vec![Some(0), Some(1)];
    let mut expected = vec![(okay.clone(), all.clone())];
    expected.extend(vec![(dropped, vec![]); 1 + 5]);
    expected.push((okay.clone(), vec![]));
    expected.extend(vec![(okay.clone(), vec![None; 5]); 1 + 6]);
    expected.push((okay, all));
    assert_eq!(outcomes, expected);
}
