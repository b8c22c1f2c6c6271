//! The back end of a disk's ring: requests and responses of blkif in the slots of a shared ring, whose memory `slots`
//! touches.

use crate::abi::{Protocol, Response, Slot};
use crate::hypervisor::{Link, PAGE_SIZE};
use crate::slots::SlotRing;

pub use crate::slots::RingViolation;

/// Our side of one ring, with the [`Link`] that keeps its memory mapped.
pub struct BackRing {
    slots: SlotRing,
    protocol: Protocol,
    link: Box<dyn Link>,
}

impl BackRing {
    /// Attaches where the shared response producer stands: right for a ring with nothing in
    /// flight, which every freshly connected one is.
    ///
    /// # Errors
    /// The indices on the page are impossible.
    pub fn attach(link: Box<dyn Link>, protocol: Protocol) -> Result<BackRing, RingViolation> {
        let mut ring = Self::over(link, protocol);
        ring.slots.attach()?;
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
        ring.slots.resume(req_cons, rsp_prod)?;
        Ok(ring)
    }

    fn over(link: Box<dyn Link>, protocol: Protocol) -> BackRing {
        let slots = slots(&*link, protocol);
        BackRing { slots, protocol, link }
    }

    /// Slots, a power of two; also the bound on requests in flight.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.slots.entries()
    }

    /// Index of the next request to consume.
    #[inline]
    pub fn req_cons(&self) -> u32 {
        self.slots.req_cons()
    }

    /// Index of the next response to write.
    #[inline]
    pub fn rsp_prod(&self) -> u32 {
        self.slots.rsp_prod()
    }

    /// The connection below.
    pub fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    /// The shared response producer as it stands on the page. A guest can have scribbled on it:
    /// for comparing with a table after a restart only.
    pub fn shared_rsp_prod(link: &dyn Link) -> u32 {
        slots(link, Protocol::X86_64).shared_rsp_prod()
    }

    /// Requests that are there and may be consumed now.
    ///
    /// # Errors
    /// The producer is impossible (XSA-38 class): never index on it.
    #[inline]
    pub fn unconsumed(&self) -> Result<u32, RingViolation> {
        self.slots.unconsumed()
    }

    /// A private copy of the next request's slot; each word is read once. To be called only
    /// after [`unconsumed`](Self::unconsumed) has seen it.
    #[inline]
    pub fn peek(&self) -> Slot {
        let mut slot = Slot::default();
        match self.protocol {
            Protocol::X86_64 => {
                let (words, _) = slot.0.as_chunks_mut();
                let words = words.first_chunk_mut::<{ 112 / 8 }>().expect("a slot's words");
                self.slots.peek_u64s(words);
            }
            Protocol::X86_32 => self.peek_halves(&mut slot),
        }
        slot
    }

    /// A call of its own: beside the words of 8 bytes the compiler would split those, and put them together again.
    #[inline(never)]
    fn peek_halves(&self, slot: &mut Slot) {
        let words = self.slots.peek_u32s::<{ 108 / 4 }>();
        for (to, word) in slot.0.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Takes the request that [`peek`](Self::peek) showed. Its slot may from now on be
    /// overwritten with a response.
    #[inline]
    pub fn consume(&mut self) {
        self.slots.consume();
    }

    /// Writes one response, field by field with zeros in the padding (XSA-216); the guest sees it
    /// with the next [`publish`](Self::publish).
    ///
    /// # Panics
    /// If nothing is unanswered: a bug of ours, and the guest would lose its disk over it.
    #[inline]
    pub fn respond(&mut self, response: Response) {
        let bytes = response.encode();
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|k| bytes[4 * i + k]));
        // A fourth one is the 64-bit structure's tail.
        let [id_low, id_high, rest] = std::array::from_fn(word);
        match self.protocol {
            Protocol::X86_64 => self.slots.respond([id_low, id_high, rest, 0]),
            Protocol::X86_32 => self.slots.respond([id_low, id_high, rest]),
        }
    }

    /// Makes all written responses visible at once; tells whether the guest asked to be told.
    pub fn publish(&mut self) -> bool {
        self.slots.publish()
    }

    /// How many answers the guest says that it has consumed, as a count that wraps: by its wish to hear of
    /// the next one. It may say anything.
    #[inline]
    pub fn said_consumed(&self) -> u32 {
        self.slots.said_consumed()
    }

    /// The check before sleeping: asks for an event with the next request, and tells whether one
    /// came meanwhile (then do not sleep).
    ///
    /// # Errors
    /// As [`unconsumed`](Self::unconsumed).
    pub fn final_check(&mut self) -> Result<bool, RingViolation> {
        self.slots.final_check(0)
    }
}

/// The ring in the link's memory, for as long as the link lives.
fn slots(link: &dyn Link, protocol: Protocol) -> SlotRing {
    let memory = link.ring();
    // SAFETY: whole pages that stay mapped as long as the link lives. `BackRing` keeps it as long as the ring, and
    // `shared_rsp_prod` drops the ring first.
    unsafe { SlotRing::new(memory.base(), memory.len() / PAGE_SIZE, protocol.slot_bytes()) }
}

#[cfg(test)]
mod tests;
