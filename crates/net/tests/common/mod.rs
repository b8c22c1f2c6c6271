//! Guests with simulated netfronts, and a network between them.
#![allow(dead_code, reason = "each test program uses a part")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_loopback::machine::{DiskPaths, Vif};
use ferrite_loopback::netfront::{NetFront, NetOptions, NetQueue, Packet, SendOptions, Sent};
use ferrite_loopback::{CopyWith, GuestOptions, Machine};
use ferrite_net::{Counts, Network, Options};

pub(crate) const KIND: &str = "vif-ferrite";
pub(crate) const LONG: Duration = Duration::from_secs(10);

/// The address of guest `i`, from 0.
pub(crate) fn mac(i: usize) -> [u8; 6] {
    [0, 0x16, 0x3e, 0, 0, i as u8 + 1]
}

pub(crate) const ALL: [u8; 6] = [0xFF; 6];

pub(crate) struct Rig {
    pub(crate) machine: Machine,
    pub(crate) network: Option<Network>,
    pub(crate) fronts: Vec<NetFront>,
    pub(crate) paths: Vec<DiskPaths>,
}

pub(crate) fn options(machine: &Machine) -> Options {
    let hypervisor = Arc::new(machine.loopback(CopyWith::Memcpy).unwrap());
    Options { hold_ms: 30, poll_us: 0, ..Options::new(KIND, hypervisor, machine.store().unwrap()) }
}

/// A machine with so many guests, each with an interface that no backend serves yet.
pub(crate) fn guests(count: usize) -> Rig {
    let mut machine = Machine::new().unwrap();
    let mut paths = Vec::new();
    let fronts = (0..count)
        .map(|i| {
            let domid = machine.add_guest(GuestOptions::default()).unwrap();
            let mac = mac(i).map(|byte| format!("{byte:02x}")).join(":");
            let vif = Vif { handle: 0, mac, kind: KIND.into(), backend_keys: Vec::new() };
            paths.push(machine.attach_vif(domid, &vif).unwrap());
            NetFront::new(machine.guest(domid).unwrap(), 0).unwrap()
        })
        .collect();
    Rig { machine, network: None, fronts, paths }
}

/// So many guests, connected.
pub(crate) fn connected(count: usize, o: &NetOptions) -> Rig {
    let mut rig = guests(count);
    rig.start();
    rig.fronts.iter_mut().for_each(|front| front.connect(o, LONG).unwrap());
    rig
}

impl Drop for Rig {
    /// A failed test does not wait for the threads of the network, which may be its failure.
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.network.take());
        }
    }
}

impl Rig {
    pub(crate) fn start(&mut self) {
        self.network = Some(Network::start(options(&self.machine)).unwrap());
    }

    pub(crate) fn queue(&mut self, guest: usize) -> &mut NetQueue {
        &mut self.fronts[guest].queues[0]
    }

    pub(crate) fn counts(&self, guest: usize) -> Counts {
        let all = self.network.as_ref().unwrap().counters();
        let domid = self.fronts[guest].domid().0;
        all.iter().find(|(id, _)| id.domid == domid).map(|(_, counts)| *counts).unwrap_or_default()
    }

    /// Sends one frame from a guest, and waits for the answer.
    pub(crate) fn send(&mut self, guest: usize, frame: &[u8], how: &SendOptions) -> Sent {
        let queue = self.queue(guest);
        queue.send(frame, how).unwrap();
        queue.push().unwrap();
        answer(queue)
    }
}

/// The next answer.
pub(crate) fn answer(queue: &mut NetQueue) -> Sent {
    let end = Instant::now() + LONG;
    loop {
        if let Some(sent) = queue.answers().unwrap().first() {
            return *sent;
        }
        assert!(Instant::now() < end, "no answer came");
        queue.wait(Duration::from_millis(100)).unwrap();
    }
}

/// The next packet.
pub(crate) fn packet(queue: &mut NetQueue) -> Packet {
    let end = Instant::now() + LONG;
    loop {
        if let Some(packet) = queue.receive().unwrap() {
            return packet;
        }
        assert!(Instant::now() < end, "no packet came");
        queue.wait(Duration::from_millis(100)).unwrap();
    }
}

/// A frame of `len` bytes whose contents follow from its number and end with a checksum of them.
pub(crate) fn frame(to: [u8; 6], from: [u8; 6], number: u64, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len.max(14)];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&[0x88, 0xB5]);
    let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for byte in &mut frame[14..] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state as u8;
    }
    if len >= 30 {
        frame[14..22].copy_from_slice(&number.to_le_bytes());
        let sum = sum(&frame[..len - 8]);
        frame[len - 8..].copy_from_slice(&sum.to_le_bytes());
    }
    frame
}

/// The number of a frame of at least 30 bytes, if its checksum is right.
pub(crate) fn number_of(frame: &[u8]) -> Option<u64> {
    let (rest, end) = frame.split_last_chunk::<8>()?;
    (sum(rest) == u64::from_le_bytes(*end)).then_some(())?;
    Some(u64::from_le_bytes(frame.get(14..22)?.try_into().ok()?))
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}
