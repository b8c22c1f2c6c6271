//! One queue of a netfront: a transmit and a receive ring, and the pages that are on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ferrite_xen::hypervisor::{GrantRef, PAGE_SIZE};
use ferrite_xen::netif::{
    EXTRA_GSO, EXTRA_MORE, ExtraInfo, RSP_NULL, RX_EXTRA_INFO, RX_MORE_DATA, RX_SLOT_BYTES,
    RxRequest, RxResponse, TX_EXTRA_INFO, TX_MORE_DATA, TX_SLOT_BYTES, TxRequest, TxResponse,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::LoopbackError;
use crate::front::{Buffer, GuestSpace, RawRing, RingWord};

/// Slots of either ring of one page.
const SLOTS: u32 = 256;

/// The backend has broken the protocol. A hardened netfront disables the interface then.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// More responses than requests.
    #[error("the backend answered up to {rsp_prod}, and {req_prod} requests were made")]
    Producer {
        /// Its producer.
        rsp_prod: u32,
        /// Ours.
        req_prod: u32,
    },
    /// An answer to what was not asked.
    #[error("answer {index} names request {id}, which does not wait for one")]
    Id {
        /// The answer's place.
        index: u32,
        /// Its id.
        id: u16,
    },
    /// A page is answered, and the backend still uses it.
    #[error("the backend still uses grant {} of an answered request", .0.0)]
    InUse(GrantRef),
    /// A received packet is no chain of pages.
    #[error("received slot {index} has offset {offset} and status {status}")]
    Received {
        /// Its place.
        index: u32,
        /// Its offset.
        offset: u16,
        /// Its status.
        status: i16,
    },
    /// The event channel is broken.
    #[error("cannot wait for or send an event: {0}")]
    Event(#[from] std::io::Error),
}

/// How a frame is sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendOptions {
    /// `TX_CSUM_BLANK`, `TX_DATA_VALIDATED`.
    pub flags: u16,
    /// Its segmentation.
    pub gso: Option<(u16, u8)>,
    /// First byte in each page.
    pub offset: u16,
    /// The most bytes in a page; 0 is what fits.
    pub chunk: u16,
    /// Bytes in the first page, as Linux has headers by themselves; 0 is what fits.
    pub first: u16,
}

/// The answer to a packet of [`NetQueue::send`]: the id of its first slot, and its worst status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The id.
    pub id: u16,
    /// The status.
    pub status: i16,
}

/// A packet that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The frame.
    pub frame: Vec<u8>,
    /// The first slot's flags, of checksums.
    pub flags: u16,
    /// Its segmentation: bytes and type.
    pub gso: Option<(u16, u8)>,
    /// The backend could not deliver all of it.
    pub is_bad: bool,
    /// Bytes in each page.
    pub pages: Vec<usize>,
}

/// One connected queue. Used by one thread.
pub struct NetQueue {
    space: Arc<GuestSpace>,
    tx: Arc<RawRing>,
    rx: Arc<RawRing>,
    rings: Buffer,
    tx_pages: Buffer,
    rx_pages: Buffer,
    port: u32,
    tx_prod: u32,
    tx_published: u32,
    tx_cons: u32,
    free: Vec<u16>,
    /// By id: it waits for an answer.
    waiting: Vec<bool>,
    /// The ids of a packet's slots, in the order of the packets.
    packets: VecDeque<Vec<u16>>,
    rx_prod: u32,
    rx_cons: u32,
    rx_slots: u32,
}

impl NetQueue {
    /// Allocates and grants rings and pages, and opens a channel.
    ///
    /// # Errors
    /// The guest's resources are exhausted.
    pub(super) fn new(space: &Arc<GuestSpace>, rx_slots: u32) -> Result<Self, LoopbackError> {
        let rings = space.buffer(2)?;
        let map = |page: usize, bytes: usize| {
            let mapping = space.memory().map_frames(&[rings.frame(page)], true);
            let mapping = mapping.map_err(LoopbackError::system("map a ring of the frontend's"))?;
            Ok::<_, LoopbackError>(Arc::new(RawRing::new(mapping, bytes)))
        };
        let (tx, rx) = (map(0, TX_SLOT_BYTES)?, map(1, RX_SLOT_BYTES)?);
        let mut queue = NetQueue {
            space: space.clone(),
            tx,
            rx,
            tx_pages: space.buffer(SLOTS as usize)?,
            rx_pages: space.buffer(SLOTS as usize)?,
            rings,
            port: space.memory().open_port()?,
            tx_prod: 0,
            tx_published: 0,
            tx_cons: 0,
            free: (0..SLOTS as u16).rev().collect(),
            waiting: vec![false; SLOTS as usize],
            packets: VecDeque::new(),
            rx_prod: 0,
            rx_cons: 0,
            rx_slots: rx_slots.min(SLOTS),
        };
        queue.post();
        Ok(queue)
    }

    /// The references of both rings, and the channel.
    pub fn references(&self) -> (u32, u32, u32) {
        (self.rings.gref(0).0, self.rings.gref(1).0, self.port)
    }

    /// The transmit ring's memory, for hostile tests.
    pub fn tx_ring(&self) -> &Arc<RawRing> {
        &self.tx
    }

    /// The receive ring's memory, for hostile tests.
    pub fn rx_ring(&self) -> &Arc<RawRing> {
        &self.rx
    }

    /// The pages that frames are sent from, by id.
    pub fn tx_pages(&self) -> &Buffer {
        &self.tx_pages
    }

    /// The pages that frames are received in, by the place of their request.
    pub fn rx_pages(&self) -> &Buffer {
        &self.rx_pages
    }

    /// Sets how many pages are kept on the receive ring; those that are there stay.
    pub fn set_rx_slots(&mut self, slots: u32) {
        self.rx_slots = slots.min(SLOTS);
    }

    /// Requests of the transmit ring that are not answered.
    pub fn unanswered(&self) -> u32 {
        self.tx_prod.wrapping_sub(self.tx_cons)
    }

    /// Puts a frame on the ring. `None`: there is no room. The backend is told by [`push`](Self::push).
    ///
    /// # Panics
    /// If it is too long for a packet: a bug of the test.
    pub fn send(&mut self, frame: &[u8], how: &SendOptions) -> Option<u16> {
        let room = PAGE_SIZE - usize::from(how.offset);
        let chunk = if how.chunk == 0 { room } else { usize::from(how.chunk).min(room) };
        let first = if how.first == 0 { chunk } else { usize::from(how.first).min(chunk) };
        let (first, rest) = frame.split_at(first.min(frame.len()));
        let pieces: Vec<&[u8]> = std::iter::once(first).chain(rest.chunks(chunk)).collect();
        let slots = pieces.len() + usize::from(how.gso.is_some());
        if self.free.len() < slots || self.unanswered() as usize + slots > SLOTS as usize {
            return None;
        }
        let mut ids = Vec::with_capacity(pieces.len());
        let last = pieces.len() - 1;
        for (i, piece) in pieces.iter().enumerate() {
            let id = self.free.pop()?;
            self.tx_pages.grant(usize::from(id), true);
            self.tx_pages.write(usize::from(id) * PAGE_SIZE + usize::from(how.offset), piece);
            let mut flags = if i < last { TX_MORE_DATA } else { 0 };
            if i == 0 {
                flags |= how.flags | if how.gso.is_some() { TX_EXTRA_INFO } else { 0 };
            }
            let size = if i == 0 { frame.len() } else { piece.len() };
            let size = u16::try_from(size).expect("a frame of at most 65,535 bytes");
            let gref = self.tx_pages.gref(usize::from(id));
            self.waiting[usize::from(id)] = true;
            self.put(TxRequest { gref, offset: how.offset, flags, id, size });
            if let (0, Some((size, kind))) = (i, how.gso) {
                self.put_extra(ExtraInfo::gso(size, kind));
            }
            ids.push(id);
        }
        let first = ids[0];
        self.packets.push_back(ids);
        Some(first)
    }

    /// The ids of the slots of the packet that was put last: the pages that it is in.
    pub fn last_ids(&self) -> &[u16] {
        self.packets.back().map_or(&[], Vec::as_slice)
    }

    /// Puts any request on the ring. Nothing is recorded.
    pub fn put(&mut self, request: TxRequest) {
        self.put_words(&request.encode());
    }

    /// Puts any extra info on the ring.
    pub fn put_extra(&mut self, extra: ExtraInfo) {
        self.put_words(&extra.encode());
    }

    /// Puts any words in the next slot of the transmit ring.
    pub fn put_words(&mut self, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.tx.put_slot(self.tx_prod, &bytes);
        self.tx_prod = self.tx_prod.wrapping_add(1);
    }

    /// Publishes what was put on the transmit ring, and tells the backend if it asked.
    ///
    /// # Errors
    /// The channel's.
    pub fn push(&mut self) -> Result<(), NetError> {
        let old = std::mem::replace(&mut self.tx_published, self.tx_prod);
        self.publish(&self.tx.clone(), old, self.tx_prod)
    }

    fn publish(&self, ring: &RawRing, old: u32, new: u32) -> Result<(), NetError> {
        ring.store(RingWord::ReqProd, new);
        fence(Ordering::SeqCst);
        let event = ring.load(RingWord::ReqEvent);
        if new.wrapping_sub(event) < new.wrapping_sub(old) {
            self.notify()?;
        }
        Ok(())
    }

    /// Sends the backend an event, asked for or not.
    ///
    /// # Errors
    /// The channel's.
    pub fn notify(&self) -> Result<(), NetError> {
        Ok(self.space.notify(self.port)?)
    }

    /// Takes raw answers of the transmit ring, of tests that made the requests by hand.
    ///
    /// # Errors
    /// The producer is impossible.
    pub fn raw_answers(&mut self) -> Result<Vec<TxResponse>, NetError> {
        let mut answers = Vec::new();
        while let Some(answer) = self.next_answer()? {
            answers.push(answer);
        }
        Ok(answers)
    }

    fn next_answer(&mut self) -> Result<Option<TxResponse>, NetError> {
        let (rsp_prod, req_prod) = (self.tx.load(RingWord::RspProd), self.tx_prod);
        if rsp_prod == self.tx_cons {
            return Ok(None);
        }
        if rsp_prod.wrapping_sub(self.tx_cons) > self.unanswered() {
            return Err(NetError::Producer { rsp_prod, req_prod });
        }
        let answer = TxResponse::decode(self.tx.slot_words(self.tx_cons));
        self.tx_cons = self.tx_cons.wrapping_add(1);
        Ok(Some(answer))
    }

    /// Takes the answers to packets that [`send`](Self::send) has put, and asks for an event with the next.
    ///
    /// # Errors
    /// The backend broke the protocol.
    pub fn answers(&mut self) -> Result<Vec<Sent>, NetError> {
        let mut status_of = Vec::new();
        loop {
            while let Some(TxResponse { id, status }) = self.next_answer()? {
                if status == RSP_NULL {
                    continue;
                }
                let index = self.tx_cons.wrapping_sub(1);
                match self.waiting.get_mut(usize::from(id)) {
                    Some(waiting) if *waiting => *waiting = false,
                    _ => return Err(NetError::Id { index, id }),
                }
                let gref = self.tx_pages.gref(usize::from(id));
                self.tx_pages.revoke(usize::from(id)).map_err(|_| NetError::InUse(gref))?;
                self.free.push(id);
                status_of.push((id, status));
            }
            self.tx.store(RingWord::RspEvent, self.tx_cons.wrapping_add(1));
            fence(Ordering::SeqCst);
            if self.tx.load(RingWord::RspProd) == self.tx_cons {
                break;
            }
        }
        let mut sent = Vec::new();
        let mut at = 0;
        // Answers come in the order of the requests; those of one packet come at once.
        while let Some(ids) = self.packets.front() {
            let Some(statuses) = status_of.get(at..at + ids.len()) else { break };
            let worst = statuses.iter().map(|(_, status)| *status).min().unwrap_or(0);
            sent.push(Sent { id: ids[0], status: worst });
            at += ids.len();
            self.packets.pop_front();
        }
        Ok(sent)
    }

    /// Puts pages on the receive ring up to the number that is to be there.
    fn post(&mut self) -> u32 {
        let old = self.rx_prod;
        while self.rx_prod.wrapping_sub(self.rx_cons) < self.rx_slots {
            let at = self.rx_prod % SLOTS;
            self.rx_pages.grant(at as usize, false);
            let request = RxRequest { id: at as u16, gref: self.rx_pages.gref(at as usize) };
            self.put_rx(request);
        }
        self.rx.store(RingWord::ReqProd, self.rx_prod);
        old
    }

    /// Puts any request on the receive ring; it is published with the next ones.
    pub fn put_rx(&mut self, request: RxRequest) {
        let bytes: Vec<u8> = request.encode().iter().flat_map(|word| word.to_le_bytes()).collect();
        self.rx.put_slot(self.rx_prod, &bytes);
        self.rx_prod = self.rx_prod.wrapping_add(1);
    }

    /// Puts pages on the receive ring and tells the backend if it asked.
    ///
    /// # Errors
    /// The channel's.
    pub fn refill(&mut self) -> Result<(), NetError> {
        let old = self.post();
        self.publish(&self.rx.clone(), old, self.rx_prod)
    }

    /// Takes the next packet. None: there is none; the backend will send an event with it.
    ///
    /// # Errors
    /// The backend broke the protocol.
    pub fn receive(&mut self) -> Result<Option<Packet>, NetError> {
        if self.rx.load(RingWord::RspProd) == self.rx_cons {
            self.rx.store(RingWord::RspEvent, self.rx_cons.wrapping_add(1));
            fence(Ordering::SeqCst);
            if self.rx.load(RingWord::RspProd) == self.rx_cons {
                return Ok(None);
            }
        }
        let (frame, pages) = (Vec::new(), Vec::new());
        let mut packet = Packet { frame, flags: 0, gso: None, is_bad: false, pages };
        let first = self.next_rx()?;
        let mut slot = RxResponse::decode(first);
        packet.flags = slot.flags & !(RX_MORE_DATA | RX_EXTRA_INFO);
        self.add(&mut packet, &slot)?;
        let mut more_extra = slot.flags & RX_EXTRA_INFO != 0;
        while more_extra {
            let extra = ExtraInfo::decode(self.next_rx()?);
            self.release()?;
            if extra.kind == EXTRA_GSO {
                packet.gso = Some((extra.gso.size, extra.gso.kind));
            }
            more_extra = extra.flags & EXTRA_MORE != 0;
        }
        while slot.flags & RX_MORE_DATA != 0 {
            slot = RxResponse::decode(self.next_rx()?);
            self.add(&mut packet, &slot)?;
        }
        self.refill()?;
        Ok(Some(packet))
    }

    fn next_rx(&mut self) -> Result<[u32; 2], NetError> {
        let (rsp_prod, req_prod) = (self.rx.load(RingWord::RspProd), self.rx_prod);
        let there = rsp_prod.wrapping_sub(self.rx_cons);
        if there == 0 || there > req_prod.wrapping_sub(self.rx_cons) {
            return Err(NetError::Producer { rsp_prod, req_prod });
        }
        let words = self.rx.slot_words(self.rx_cons);
        self.rx_cons = self.rx_cons.wrapping_add(1);
        Ok(words)
    }

    /// Takes the page of the slot before back.
    fn release(&self) -> Result<usize, NetError> {
        let at = (self.rx_cons.wrapping_sub(1) % SLOTS) as usize;
        self.rx_pages.revoke(at).map_err(|_| NetError::InUse(self.rx_pages.gref(at)))?;
        Ok(at)
    }

    fn add(&mut self, packet: &mut Packet, slot: &RxResponse) -> Result<(), NetError> {
        let at = self.release()?;
        let index = self.rx_cons.wrapping_sub(1);
        // The page is found by the answer's place. The name of one that failed may be lost with its process.
        let Ok(len) = usize::try_from(slot.status) else {
            packet.is_bad = true;
            return Ok(());
        };
        if usize::from(slot.id) != at {
            return Err(NetError::Id { index, id: slot.id });
        }
        if usize::from(slot.offset) + len > PAGE_SIZE {
            let (offset, status) = (slot.offset, slot.status);
            return Err(NetError::Received { index, offset, status });
        }
        packet.pages.push(len);
        let from = at * PAGE_SIZE + usize::from(slot.offset);
        packet.frame.extend(self.rx_pages.to_vec(from, len));
        Ok(())
    }

    /// Waits for an event of the backend, and takes it. `false`: none came in time.
    ///
    /// # Errors
    /// The channel's.
    pub fn wait(&mut self, time: Duration) -> Result<bool, NetError> {
        let fd = self.space.event_fd(self.port);
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&time)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(e) => return Err(std::io::Error::from(e).into()),
        }
        let mut count = [0; 8];
        match rustix::io::read(fd, &mut count) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(true),
            Err(e) => Err(std::io::Error::from(e).into()),
        }
    }
}

impl Drop for NetQueue {
    fn drop(&mut self) {
        self.space.memory().close_port(self.port);
    }
}
