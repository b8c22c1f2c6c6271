//! A shared ring of slots of any size: the common part of the rings of disks and of network interfaces. The one place
//! that touches their memory.
//!
//! The producers and the slots may change under us at any moment, so every access is a raw
//! volatile or atomic one. Each word of a slot is read once into a private copy (XSA-155), and
//! all decisions rest on private indices. Indices run freely and wrap; differences are unsigned
//! (blkif.md 1.4).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};

use crate::hypervisor::PAGE_SIZE;

/// Bytes before the first slot of a ring.
pub const RING_HEADER_BYTES: usize = 64;

pub(crate) const REQ_PROD: usize = 0;
pub(crate) const REQ_EVENT: usize = 4;
pub(crate) const RSP_PROD: usize = 8;
pub(crate) const RSP_EVENT: usize = 12;
/// Where the backend says how many answers it has begun to write: the last word of the header's padding, which no
/// frontend uses, and which is 0 on a new page.
pub(crate) const ANNOUNCED: usize = 60;

/// Slots of a ring of so many pages: a power of two.
pub const fn entries(pages: usize, slot_bytes: usize) -> u32 {
    let fit = ((pages * PAGE_SIZE - RING_HEADER_BYTES) / slot_bytes) as u32;
    1 << fit.ilog2()
}

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

/// Our side of one ring's memory and our indices.
pub(crate) struct SlotRing {
    base: NonNull<u8>,
    slot_bytes: usize,
    entries: u32,
    req_cons: u32,
    /// Responses written, published or not. Private: the shared word may be scribbled on.
    rsp_prod: u32,
    /// The last value stored to the shared `rsp_prod`.
    rsp_published: u32,
}

// SAFETY: the memory at `base` is shared with another domain anyway, and is used only through `&mut self` or by atomic
// and volatile accesses.
unsafe impl Send for SlotRing {}

impl SlotRing {
    /// A ring of `pages` pages with all indices at 0.
    ///
    /// # Safety
    /// `base` is page aligned, and `pages` pages from it stay mapped readable and writable as long as the ring lives.
    pub(crate) unsafe fn new(base: NonNull<u8>, pages: usize, slot_bytes: usize) -> SlotRing {
        assert!(pages.is_power_of_two() && base.as_ptr().addr().is_multiple_of(PAGE_SIZE));
        assert!(slot_bytes.is_multiple_of(4));
        let entries = entries(pages, slot_bytes);
        SlotRing { base, slot_bytes, entries, req_cons: 0, rsp_prod: 0, rsp_published: 0 }
    }

    /// Begins where the shared response producer stands.
    ///
    /// # Errors
    /// The indices on the page are impossible.
    pub(crate) fn attach(&mut self) -> Result<(), RingViolation> {
        let rsp_prod = self.word(RSP_PROD).load(Ordering::Acquire);
        self.resume(rsp_prod, rsp_prod)
    }

    /// Begins at these indices.
    ///
    /// # Errors
    /// The indices on the page do not agree with them.
    pub(crate) fn resume(&mut self, req_cons: u32, rsp_prod: u32) -> Result<(), RingViolation> {
        self.req_cons = req_cons;
        self.rsp_prod = rsp_prod;
        self.rsp_published = rsp_prod;
        if req_cons.wrapping_sub(rsp_prod) > self.entries {
            return Err(self.violation(self.word(REQ_PROD).load(Ordering::Acquire)));
        }
        self.unconsumed().map(drop)
    }

    #[inline]
    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    #[inline]
    pub(crate) fn req_cons(&self) -> u32 {
        self.req_cons
    }

    #[inline]
    pub(crate) fn rsp_prod(&self) -> u32 {
        self.rsp_prod
    }

    /// The shared response producer as it stands on the page.
    pub(crate) fn shared_rsp_prod(&self) -> u32 {
        self.word(RSP_PROD).load(Ordering::Acquire)
    }

    /// Requests that are there and may be consumed now.
    ///
    /// # Errors
    /// The producer is impossible (XSA-38 class): never index on it.
    #[inline]
    pub(crate) fn unconsumed(&self) -> Result<u32, RingViolation> {
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

    /// Copies the first words of 8 bytes of the next request's slot; each is read once. There is no array of them in between,
    /// which the compiler would keep in memory.
    ///
    /// # Panics
    /// If the slot does not have them, or slots are not multiples of 8 bytes.
    #[inline]
    pub(crate) fn peek_u64s<const N: usize>(&self, to: &mut [[u8; 8]; N]) {
        assert!(N * 8 <= self.slot_bytes && self.slot_bytes.is_multiple_of(8));
        let slot = self.slot_ptr(self.req_cons).cast::<u64>();
        for (i, to) in to.iter_mut().enumerate() {
            // SAFETY: inside a slot, which is inside the mapping; 64 + a multiple of 8 is aligned.
            *to = unsafe { slot.add(i).read_volatile() }.to_le_bytes();
        }
    }

    /// The first `N` words of 4 bytes of the next request's slot, each read once.
    ///
    /// # Panics
    /// If the slot does not have them.
    #[inline]
    pub(crate) fn peek_u32s<const N: usize>(&self) -> [u32; N] {
        assert!(N * 4 <= self.slot_bytes);
        let slot = self.slot_ptr(self.req_cons).cast::<u32>();
        // SAFETY: inside a slot, which is inside the mapping; slots are multiples of 4 bytes.
        std::array::from_fn(|i| unsafe { slot.add(i).read_volatile() })
    }

    /// Takes the request that was peeked at. Its slot may from now on be overwritten with a response.
    #[inline]
    pub(crate) fn consume(&mut self) {
        self.req_cons = self.req_cons.wrapping_add(1);
    }

    /// Writes the words of one response; the guest sees it with the next [`publish`](Self::publish).
    ///
    /// # Panics
    /// If nothing is unanswered, a bug of ours, or the words do not fit.
    #[inline]
    pub(crate) fn respond<const N: usize>(&mut self, words: [u32; N]) {
        assert_ne!(self.rsp_prod, self.req_cons, "a response without a request");
        assert!(N * 4 <= self.slot_bytes);
        let to = self.slot_ptr(self.rsp_prod).cast::<u32>();
        for (i, word) in words.into_iter().enumerate() {
            // SAFETY: inside a slot, which is 4-aligned.
            unsafe { to.add(i).write_volatile(word) };
        }
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Says on the page that the next `count` responses are about to be written, for [`torn`](Self::torn) of a successor.
    pub(crate) fn announce(&mut self, count: u32) {
        self.word(ANNOUNCED).store(self.rsp_prod.wrapping_add(count), Ordering::Relaxed);
        // The slots come after it. A process dies between two of its instructions, so their order is enough.
        compiler_fence(Ordering::SeqCst);
    }

    /// How many slots, from the oldest request that is there, a predecessor may have written responses to without
    /// publishing them. The guest can write the word as well, so no more than there are requests.
    ///
    /// # Errors
    /// As [`unconsumed`](Self::unconsumed).
    pub(crate) fn torn(&self) -> Result<u32, RingViolation> {
        let announced = self.word(ANNOUNCED).load(Ordering::Acquire).wrapping_sub(self.rsp_prod);
        Ok(if announced > self.unconsumed()? { 0 } else { announced })
    }

    /// Makes all written responses visible at once; tells whether the guest asked to be told.
    pub(crate) fn publish(&mut self) -> bool {
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

    /// How many answers the guest says that it has consumed, by its wish to hear of the next one.
    #[inline]
    pub(crate) fn said_consumed(&self) -> u32 {
        self.word(RSP_EVENT).load(Ordering::Relaxed).wrapping_sub(1)
    }

    /// Asks for an event with the next request but `more`, and tells whether they came meanwhile.
    ///
    /// # Errors
    /// As [`unconsumed`](Self::unconsumed).
    pub(crate) fn final_check(&mut self, more: u32) -> Result<bool, RingViolation> {
        if self.unconsumed()? > more {
            return Ok(true);
        }
        let event = self.req_cons.wrapping_add(more).wrapping_add(1);
        self.word(REQ_EVENT).store(event, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(self.unconsumed()? > more)
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the header's words are aligned and inside the first page, which stays mapped
        // as long as `self` lives; the guest's own accesses are atomic at this size.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    #[inline]
    fn slot_ptr(&self, index: u32) -> *mut u8 {
        let slot = (index & (self.entries - 1)) as usize;
        // SAFETY: `entries` slots fit in the mapping (`entries`), and slot < entries.
        unsafe { self.base.add(RING_HEADER_BYTES + slot * self.slot_bytes) }.as_ptr()
    }
}
