//! The way out of a switch: bursts, frames from outside beside traffic, and a device that breaks.

mod common;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{LONG, Rig, frame, guests, mac, number_of, options, packet};
use ferrite_loopback::netfront::{NetOptions, SendOptions};
use ferrite_net::packet::{Offload, Uplink};
use ferrite_net::{Network, Options};
use ferrite_xen::netif::RSP_OKAY;
use rustix::event::{EventfdFlags, eventfd};

/// The network outside.
#[derive(Default)]
struct State {
    /// Frames that the switch has sent.
    sent: Vec<Vec<u8>>,
    /// Frames that it is to receive.
    coming: VecDeque<Vec<u8>>,
    is_broken: bool,
}

/// A device whose descriptor is readable while there is a frame, or an error.
#[derive(Clone)]
struct Outside {
    state: Arc<Mutex<State>>,
    readable: Arc<OwnedFd>,
}

impl Outside {
    fn new() -> Outside {
        let readable = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        Outside { state: Arc::default(), readable: Arc::new(readable) }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        rustix::io::write(&self.readable, &1_u64.to_ne_bytes()).unwrap();
    }

    fn sent(&self) -> Vec<Vec<u8>> {
        self.state.lock().unwrap().sent.clone()
    }
}

impl Uplink for Outside {
    fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    fn send(&mut self, frame: &[u8], _offload: Offload) -> io::Result<bool> {
        self.state.lock().unwrap().sent.push(frame.to_vec());
        Ok(true)
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<Option<(usize, Offload)>> {
        let mut state = self.state.lock().unwrap();
        if state.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let Some(frame) = state.coming.pop_front() else {
            let _ = rustix::io::read(&self.readable, &mut [0; 8]);
            return Ok(None);
        };
        into[..frame.len()].copy_from_slice(&frame);
        Ok(Some((frame.len(), Offload::default())))
    }
}

/// So many guests, and the device that their switch leads to.
fn with_uplink(count: usize) -> (Rig, Outside) {
    let (mut rig, outside) = (guests(count), Outside::new());
    let uplink: Option<Box<dyn Uplink>> = Some(Box::new(outside.clone()));
    let options = Options { uplink, ..options(&rig.machine) };
    rig.network = Some(Network::start(options).unwrap());
    rig.fronts.iter_mut().for_each(|front| front.connect(&NetOptions::default(), LONG).unwrap());
    (rig, outside)
}

/// A ping of 65,507 bytes is 45 frames at once.
#[test]
fn frames_that_come_at_once_all_go_out_and_in_order() {
    const FRAMES: u64 = 100;
    let (mut rig, outside) = with_uplink(1);
    let queue = rig.queue(0);
    let all: Vec<_> = (0..FRAMES).map(|n| frame(mac(9), mac(0), n, 60 + n as usize * 14)).collect();
    for bytes in &all {
        queue.send(bytes, &SendOptions::default()).unwrap();
    }
    queue.push().unwrap();
    let (mut answers, end) = (Vec::new(), Instant::now() + LONG);
    while answers.len() < all.len() {
        assert!(Instant::now() < end, "{} answers", answers.len());
        answers.extend(queue.answers().unwrap());
        queue.wait(Duration::from_millis(10)).unwrap();
    }
    assert!(answers.iter().all(|sent| sent.status == RSP_OKAY));
    assert!(outside.sent() == all, "{} of {FRAMES} frames", outside.sent().len());
    assert_eq!((rig.counts(0).sent_packets, rig.counts(0).dropped), (FRAMES, 0));
}

/// One that comes while nothing else does wakes the switch; others come between the packets of guests.
#[test]
fn frames_from_outside_arrive_at_rest_and_beside_traffic() {
    let (mut rig, outside) = with_uplink(3);
    let incoming = |n: u64| frame(mac(2), mac(9), n, 300);
    for n in 0..3 {
        outside.change(|state| state.coming.push_back(incoming(n)));
        assert_eq!(packet(rig.queue(2)).frame, incoming(n));
        std::thread::sleep(Duration::from_millis(5));
    }
    outside.change(|state| state.coming.extend((3..40).map(incoming)));
    let (mut received, mut passed, end) = (3, 0, Instant::now() + LONG);
    while received < 40 || passed < 200 {
        assert!(Instant::now() < end, "{received} received, {passed} passed");
        let bytes = frame(mac(1), mac(0), passed, 500);
        rig.queue(0).send(&bytes, &SendOptions::default());
        rig.queue(0).push().unwrap();
        rig.queue(0).answers().unwrap();
        while let Some(packet) = rig.queue(1).receive().unwrap() {
            assert!(number_of(&packet.frame).is_some());
            passed += 1;
        }
        while let Some(packet) = rig.queue(2).receive().unwrap() {
            assert_eq!(packet.frame, incoming(received));
            received += 1;
        }
    }
}

#[test]
fn guests_go_on_without_a_device_that_breaks() {
    let (mut rig, outside) = with_uplink(2);
    outside.change(|state| state.is_broken = true);
    let end = Instant::now() + LONG;
    // The outside has no receiver any more.
    let bytes = frame(mac(9), mac(0), 1, 500);
    while rig.send(0, &bytes, &SendOptions::default()).status == RSP_OKAY {
        assert!(Instant::now() < end, "the switch still sends");
    }
    let bytes = frame(mac(1), mac(0), 2, 5000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
}
