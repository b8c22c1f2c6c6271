//! The back end of a shared ring: the one place that touches its memory.
//!
//! The producers and the slots may change under us at any moment, so every access is a raw
//! volatile or atomic one, each word of a slot is read once into a private copy (XSA-155), and
//! all decisions rest on private indices. Indices run freely and wrap; differences are unsigned
//! (blkif.md 1.4).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::abi::{Protocol, RING_HEADER_BYTES, Response, Slot};
use crate::hypervisor::{Link, PAGE_SIZE};

const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// The frontend broke the ring's rules. The ring is stopped for good; other rings go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the frontend's request producer {req_prod} is impossible: {req_cons} requests were taken, \
     {rsp_prod} answered, and the ring has {entries} slots"
)]
pub struct RingViolation {
    /// The number of requests that the frontend published.
    pub req_prod: u32,
    /// The number of requests that we have consumed.
    pub req_cons: u32,
    /// The number of requests that we have answered.
    pub rsp_prod: u32,
    /// Slots.
    pub entries: u32,
}

/// Our side of one ring, with the [`Link`] that keeps its memory mapped.
pub struct BackRing {
    link: Box<dyn Link>,
    base: NonNull<u8>,
    protocol: Protocol,
    entries: u32,
    req_cons: u32,
    /// Responses written, published or not. Private: the shared word may be scribbled on.
    rsp_prod: u32,
    /// The last value stored to the shared `rsp_prod`.
    rsp_published: u32,
}

// SAFETY: `base` points into memory that `link` (itself `Send`) keeps mapped, and is used only
// through `&mut self` or by atomic accesses.
unsafe impl Send for BackRing {}

impl BackRing {
    /// Attaches where the shared response producer stands: right for a ring with nothing in
    /// flight, which every freshly connected one is.
    ///
    /// # Errors
    /// The indices on the page are impossible.
    pub fn attach(link: Box<dyn Link>, protocol: Protocol) -> Result<BackRing, RingViolation> {
        let mut ring = Self::over(link, protocol);
        let rsp_prod = ring.word(RSP_PROD).load(Ordering::Acquire);
        ring.set_indices(rsp_prod, rsp_prod);
        ring.unconsumed()?;
        Ok(ring)
    }

    /// Attaches to a ring that a predecessor served, at the indices that its in-flight table
    /// gives (blkif.md 3.9).
    ///
    /// # Errors
    /// The indices on the page do not agree with them.
    pub fn resume(
        link: Box<dyn Link>,
        protocol: Protocol,
        req_cons: u32,
        rsp_prod: u32,
    ) -> Result<BackRing, RingViolation> {
        let mut ring = Self::over(link, protocol);
        ring.set_indices(req_cons, rsp_prod);
        if req_cons.wrapping_sub(rsp_prod) > ring.entries {
            return Err(ring.violation(ring.word(REQ_PROD).load(Ordering::Acquire)));
        }
        ring.unconsumed()?;
        Ok(ring)
    }

    fn over(link: Box<dyn Link>, protocol: Protocol) -> BackRing {
        let memory = link.ring();
        let pages = memory.len() / PAGE_SIZE;
        assert!(pages.is_power_of_two() && memory.base().as_ptr().addr().is_multiple_of(PAGE_SIZE));
        BackRing {
            base: memory.base(),
            entries: protocol.entries(pages.ilog2()),
            link,
            protocol,
            req_cons: 0,
            rsp_prod: 0,
            rsp_published: 0,
        }
    }

    fn set_indices(&mut self, req_cons: u32, rsp_prod: u32) {
        self.req_cons = req_cons;
        self.rsp_prod = rsp_prod;
        self.rsp_published = rsp_prod;
    }

    /// Slots, a power of two; also the bound on requests in flight.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Index of the next request to consume.
    #[inline]
    pub fn req_cons(&self) -> u32 {
        self.req_cons
    }

    /// Index of the next response to write.
    #[inline]
    pub fn rsp_prod(&self) -> u32 {
        self.rsp_prod
    }

    /// The connection below.
    pub fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    /// The shared response producer as it stands on the page. A guest can have scribbled on it:
    /// for comparing with a table after a restart only.
    pub fn shared_rsp_prod(link: &dyn Link) -> u32 {
        let base = link.ring().base();
        // SAFETY: the header lies in the first page, which the link keeps mapped; an aligned u32.
        unsafe { AtomicU32::from_ptr(base.add(RSP_PROD).as_ptr().cast()) }.load(Ordering::Acquire)
    }

    /// Requests that are there and may be consumed now.
    ///
    /// # Errors
    /// The producer is impossible (XSA-38 class): never index on it.
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, RingViolation> {
        // Acquire: the slots' contents were written before the producer was.
        let req_prod = self.word(REQ_PROD).load(Ordering::Acquire);
        let new = req_prod.wrapping_sub(self.req_cons);
        if req_prod.wrapping_sub(self.rsp_prod) > self.entries || new > self.entries {
            return Err(self.violation(req_prod));
        }
        Ok(new)
    }

    fn violation(&self, req_prod: u32) -> RingViolation {
        RingViolation {
            req_prod,
            req_cons: self.req_cons,
            rsp_prod: self.rsp_prod,
            entries: self.entries,
        }
    }

    /// A private copy of the next request's slot; each word is read once. To be called only
    /// after [`unconsumed`](Self::unconsumed) has seen it.
    #[inline]
    pub fn peek(&self) -> Slot {
        let mut slot = Slot::default();
        let from = self.slot_ptr(self.req_cons);
        match self.protocol {
            Protocol::X86_64 => {
                for (i, to) in slot.0.chunks_exact_mut(8).enumerate() {
                    // SAFETY: slot_ptr gives a whole slot inside the mapping; 64 + 112 n is a
                    // multiple of 8.
                    let word = unsafe { from.cast::<u64>().add(i).read_volatile() };
                    to.copy_from_slice(&word.to_le_bytes());
                }
            }
            Protocol::X86_32 => {
                for (i, to) in slot.0.chunks_exact_mut(4).take(108 / 4).enumerate() {
                    // SAFETY: as above; 64 + 108 n is a multiple of 4.
                    let word = unsafe { from.cast::<u32>().add(i).read_volatile() };
                    to.copy_from_slice(&word.to_le_bytes());
                }
            }
        }
        slot
    }

    /// Takes the request that [`peek`](Self::peek) showed. Its slot may from now on be
    /// overwritten with a response.
    #[inline]
    pub fn consume(&mut self) {
        self.req_cons = self.req_cons.wrapping_add(1);
    }

    /// Writes one response, field by field with zeros in the padding (XSA-216); the guest sees it
    /// with the next [`publish`](Self::publish).
    ///
    /// # Panics
    /// If nothing is unanswered: a bug of ours, and the guest would lose its disk over it.
    #[inline]
    pub fn respond(&mut self, response: Response) {
        assert_ne!(self.rsp_prod, self.req_cons, "a response without a request");
        let to = self.slot_ptr(self.rsp_prod);
        for (i, word) in response.encode().chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            // SAFETY: twelve bytes inside a slot of at least 108, which is 4-aligned.
            unsafe { to.cast::<u32>().add(i).write_volatile(word) };
        }
        if self.protocol == Protocol::X86_64 {
            // SAFETY: bytes 12 to 15 of the same slot, the 64-bit structure's tail.
            unsafe { to.cast::<u32>().add(3).write_volatile(0) };
        }
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Makes all written responses visible at once; tells whether the guest asked to be told.
    pub fn publish(&mut self) -> bool {
        let old = self.rsp_published;
        let new = self.rsp_prod;
        if old == new {
            return false;
        }
        self.word(RSP_PROD).store(new, Ordering::Release);
        self.rsp_published = new;
        // blkif.md 1.4: the store above must be visible before rsp_event is read.
        fence(Ordering::SeqCst);
        let rsp_event = self.word(RSP_EVENT).load(Ordering::Relaxed);
        new.wrapping_sub(rsp_event) < new.wrapping_sub(old)
    }

    /// How many answers the guest says that it has consumed, as a count that wraps: by its wish to hear of
    /// the next one. It may say anything.
    #[inline]
    pub fn said_consumed(&self) -> u32 {
        self.word(RSP_EVENT).load(Ordering::Relaxed).wrapping_sub(1)
    }

    /// The check before sleeping: asks for an event with the next request, and tells whether one
    /// came meanwhile (then do not sleep).
    ///
    /// # Errors
    /// As [`unconsumed`](Self::unconsumed).
    pub fn final_check(&mut self) -> Result<bool, RingViolation> {
        if self.unconsumed()? > 0 {
            return Ok(true);
        }
        self.word(REQ_EVENT).store(self.req_cons.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(self.unconsumed()? > 0)
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the header's words are aligned and inside the first page, which `link` keeps
        // mapped as long as `self` lives; the guest's own accesses are atomic at this size.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    #[inline]
    fn slot_ptr(&self, index: u32) -> *mut u8 {
        let slot = (index & (self.entries - 1)) as usize;
        // SAFETY: `entries` slots fit in the mapping (Protocol::entries), and slot < entries.
        unsafe { self.base.add(RING_HEADER_BYTES + slot * self.protocol.slot_bytes()) }.as_ptr()
    }
}

#[cfg(test)]
mod tests;
