//! A network in a process of its own, which is killed while packets move.

mod common;

use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{KIND, LONG, Rig, connected, frame, guests, mac, number_of, packet};
use ferrite_loopback::netfront::{NetOptions, SendOptions};
use ferrite_loopback::{BackendHandle, CopyWith, Loopback};
use ferrite_net::{Network, Options};
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
