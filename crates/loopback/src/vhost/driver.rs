//! A guest's driver of one queue.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{GUEST_BASE, Guest, PATIENCE};

/// Kinds of requests.
pub mod kind {
    #![allow(missing_docs, reason = "virtio's names")]
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Another descriptor follows (`VIRTQ_DESC_F_NEXT`).
pub const NEXT: u16 = 1;
/// The descriptor may be written.
pub const WRITE: u16 = 2;
/// The descriptor is a table of descriptors.
pub const TABLE: u16 = 4;

/// Descriptors of a request that is not a table.
const DESCS: u16 = 3;
/// Bytes of a request's data, at most.
pub const SLOT_BYTES: usize = 2 << 20;
/// Bytes of a queue's ring, headers and tables.
const QUEUE_BYTES: usize = 256 << 10;
/// Where headers and statuses of slots begin, and their size.
const HEADERS: usize = 64 << 10;
const HEADER_BYTES: usize = 512;

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Its type.
    pub kind: u32,
    /// Where.
    pub sector: u64,
    /// The data that are sent.
    pub data: Vec<u8>,
    /// Bytes that are to be read.
    pub room: usize,
}

impl Ask {
    /// A write.
    pub fn write(sector: u64, data: &[u8]) -> Ask {
        Ask { kind: kind::OUT, sector, data: data.to_vec(), room: 0 }
    }

    /// A read.
    pub fn read(sector: u64, room: usize) -> Ask {
        Ask { kind: kind::IN, sector, data: Vec::new(), room }
    }

    /// A flush.
    pub fn flush() -> Ask {
        Ask { kind: kind::FLUSH, sector: 0, data: Vec::new(), room: 0 }
    }

    /// A request about ranges (first sector, number of sectors, flags).
    pub fn ranges(kind: u32, ranges: &[(u64, u32, u32)]) -> Ask {
        let bytes = |(sector, sectors, flags): &(u64, u32, u32)| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        Ask { kind, sector: 0, data: ranges.iter().flat_map(bytes).collect(), room: 0 }
    }
}

/// A queue, from the guest's side. Each of its slots has at most one request.
pub struct Driver {
    /// The memory.
    pub guest: Arc<Guest>,
    /// The number of the queue.
    pub number: u16,
    /// Entries of its ring.
    pub entries: u16,
    /// The back end is kicked here.
    pub kick: OwnedFd,
    /// The guest is interrupted here.
    pub call: OwnedFd,
    /// The back end says here that the ring is broken.
    pub err: OwnedFd,
    /// Whether event indexes were agreed on.
    pub event_index: bool,
    /// Whether requests are tables of descriptors.
    pub indirect: bool,
    /// The next entry of the available ring.
    pub avail: u16,
    /// The next entry of the used ring to look at.
    pub used: u16,
}

impl Driver {
    /// Bytes of memory for so many queues of so many entries.
    pub fn memory_bytes(queues: u16, entries: u16) -> u64 {
        let queue = QUEUE_BYTES + Driver::slots_of(entries) * SLOT_BYTES;
        (usize::from(queues) * queue).next_multiple_of(8192) as u64
    }

    fn slots_of(entries: u16) -> usize {
        usize::from(entries / DESCS)
    }

    /// A driver of a new ring. Its memory is zeros.
    pub fn new(guest: &Arc<Guest>, number: u16, entries: u16, features: u64) -> Driver {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Driver {
            guest: guest.clone(),
            number,
            entries,
            kick: event(),
            call: event(),
            err: event(),
            event_index: features & super::EVENT_INDEX != 0,
            indirect: false,
            avail: 0,
            used: 0,
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        Driver::slots_of(self.entries)
    }

    /// Where the queue begins in the memory.
    fn base(&self) -> usize {
        let queue = QUEUE_BYTES + self.slots() * SLOT_BYTES;
        usize::from(self.number) * queue
    }

    /// Where the descriptors are in the memory.
    pub fn desc_at(&self) -> usize {
        self.base()
    }

    /// Where the available ring is.
    pub fn avail_at(&self) -> usize {
        self.base() + 16 * usize::from(self.entries)
    }

    /// Where the used ring is.
    pub fn used_at(&self) -> usize {
        (self.avail_at() + 6 + 2 * usize::from(self.entries)).next_multiple_of(16)
    }

    /// Where a slot's header is. Its status is 32 bytes behind it, its table 64.
    pub fn header_at(&self, slot: usize) -> usize {
        self.base() + HEADERS + slot * HEADER_BYTES
    }

    /// Where a slot's data are.
    pub fn data_at(&self, slot: usize) -> usize {
        self.base() + QUEUE_BYTES + slot * SLOT_BYTES
    }

    /// The body of the message with the ring's addresses.
    pub fn addresses(&self) -> Vec<u8> {
        let user = |at: usize| self.guest.user(at as u64);
        let mut body = [u32::from(self.number), 0].map(u32::to_le_bytes).concat();
        let places = [self.desc_at(), self.used_at(), self.avail_at()].map(user);
        body.extend(places.map(u64::to_le_bytes).concat());
        body.extend([0; 8]);
        body
    }

    /// Writes bytes to the memory.
    pub fn put(&self, at: usize, bytes: &[u8]) {
        self.guest.memory.copy_in(at, bytes).unwrap();
    }

    /// Writes a descriptor at this place of the memory.
    pub fn put_desc(&self, at: usize, address: u64, len: usize, flags: u16, next: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend((len as u32).to_le_bytes());
        bytes.extend([flags, next].map(u16::to_le_bytes).concat());
        self.put(at, &bytes);
    }

    /// Writes a request's header, data and descriptors, and returns its first descriptor.
    pub fn prepare(&self, slot: usize, ask: &Ask) -> u16 {
        let (header, data) = (self.header_at(slot), self.data_at(slot));
        let mut bytes = [ask.kind, 0].map(u32::to_le_bytes).concat();
        bytes.extend(ask.sector.to_le_bytes());
        self.put(header, &bytes);
        self.put(header + 32, &[0xee]);
        self.put(data, &ask.data);
        let guest = |at: usize| GUEST_BASE + at as u64;
        let mut descs = vec![(guest(header), 16, 0)];
        if !ask.data.is_empty() {
            descs.push((guest(data), ask.data.len(), 0));
        }
        if ask.room > 0 {
            descs.push((guest(data), ask.room, WRITE));
        }
        descs.push((guest(header + 32), 1, WRITE));
        let first = slot as u16 * DESCS;
        let (table, from) = match self.indirect {
            true => (header + 64, 0),
            false => (self.desc_at() + 16 * usize::from(first), first),
        };
        let last = descs.len() - 1;
        for (index, (address, len, flags)) in descs.iter().enumerate() {
            let more = if index < last { NEXT } else { 0 };
            let next = from + index as u16 + 1;
            self.put_desc(table + 16 * index, *address, *len, flags | more, next);
        }
        if self.indirect {
            let at = self.desc_at() + 16 * usize::from(first);
            self.put_desc(at, guest(table), 16 * descs.len(), TABLE, 0);
        }
        first
    }

    /// Puts a request on the ring, and kicks if the back end wants it.
    pub fn offer(&mut self, head: u16) {
        self.offer_all(&[head]);
    }

    /// Puts requests on the ring, which the back end sees all at once, and kicks if it wants that.
    pub fn offer_all(&mut self, heads: &[u16]) {
        let memory = &self.guest.memory;
        let before = self.avail;
        for head in heads {
            let slot = usize::from(self.avail % self.entries);
            memory.store_u16(self.avail_at() + 4 + 2 * slot, *head).unwrap();
            self.avail = self.avail.wrapping_add(1);
        }
        memory.store_u16(self.avail_at() + 2, self.avail).unwrap();
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let wanted = match self.event_index {
            true => {
                let at = self.used_at() + 4 + 8 * usize::from(self.entries);
                let event = memory.load_u16(at).unwrap();
                self.avail.wrapping_sub(event).wrapping_sub(1) < self.avail.wrapping_sub(before)
            }
            false => memory.load_u16(self.used_at()).unwrap() & 1 == 0,
        };
        if wanted {
            self.kick();
        }
    }

    /// Kicks.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// The index of the used ring.
    pub fn used_index(&self) -> u16 {
        self.guest.memory.load_u16(self.used_at() + 2).unwrap()
    }

    /// The next answer, if it has come: the first descriptor, and the bytes that were written.
    pub fn next_used(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.used {
            return None;
        }
        let slot = usize::from(self.used % self.entries);
        let mut entry = [0; 8];
        self.guest.memory.copy_out(self.used_at() + 4 + 8 * slot, &mut entry).unwrap();
        self.used = self.used.wrapping_add(1);
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        Some((word(0) as u16, word(4)))
    }

    /// The next answer; waits for an interrupt, as a guest does.
    pub fn wait_used(&mut self) -> (u16, u32) {
        self.wait_used_for(PATIENCE).expect("each request is answered")
    }

    /// The same, for a while.
    pub fn wait_used_for(&mut self, limit: Duration) -> Option<(u16, u32)> {
        let end = Instant::now() + limit;
        loop {
            if let Some(used) = self.next_used() {
                return Some(used);
            }
            if self.event_index {
                let at = self.avail_at() + 4 + 2 * usize::from(self.entries);
                self.guest.memory.store_u16(at, self.used).unwrap();
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                if self.used_index() != self.used {
                    continue;
                }
            }
            if Instant::now() >= end {
                return None;
            }
            self.sleep_until(end);
        }
    }

    /// Waits for an interrupt.
    fn sleep_until(&self, end: Instant) {
        let left = end.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds = [PollFd::from_borrowed_fd(self.call.as_fd(), PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("cannot wait: {e}"),
        }
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }

    /// Sends requests all at once when the back end sleeps, and waits for their answers with one interrupt: the back end
    /// takes the same way each time, whatever the timing. Event indexes have to be agreed on.
    pub fn step(&mut self, heads: &[u16]) {
        assert!(self.event_index);
        let entries = usize::from(self.entries);
        let (kick_at, call_at) =
            (self.used_at() + 4 + 8 * entries, self.avail_at() + 4 + 2 * entries);
        let end = Instant::now() + PATIENCE;
        while self.guest.memory.load_u16(kick_at).unwrap() != self.avail {
            assert!(Instant::now() < end, "the back end does not sleep");
            std::thread::sleep(Duration::from_micros(20));
        }
        let last = self.used.wrapping_add(heads.len() as u16);
        self.guest.memory.store_u16(call_at, last.wrapping_sub(1)).unwrap();
        self.offer_all(heads);
        while self.used_index() != last {
            assert!(Instant::now() < end, "{} of {last} are answered", self.used_index());
            self.sleep_until(end);
        }
        while self.next_used().is_some() {}
    }

    /// The slot of a request that is answered.
    pub fn slot_of(&self, head: u16) -> usize {
        usize::from(head / DESCS)
    }

    /// The status of a slot's request.
    pub fn status(&self, slot: usize) -> u8 {
        let mut status = [0];
        self.guest.memory.copy_out(self.header_at(slot) + 32, &mut status).unwrap();
        status[0]
    }

    /// The bytes of a slot's data.
    pub fn data(&self, slot: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.guest.memory.copy_out(self.data_at(slot), &mut bytes).unwrap();
        bytes
    }

    /// Sends one request, and waits for its answer. Returns the status and what was read.
    pub fn call(&mut self, ask: &Ask) -> (u8, Vec<u8>) {
        let head = self.prepare(0, ask);
        self.offer(head);
        let (used, _) = self.wait_used();
        assert_eq!(used, head);
        (self.status(0), self.data(0, ask.room))
    }

    /// Whether the back end has said that the ring is broken.
    pub fn is_broken(&self) -> bool {
        rustix::io::read(&self.err, &mut [0; 8]).is_ok()
    }
}
