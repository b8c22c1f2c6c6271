//! The frontend's side of a ring's memory. All accesses are atomic or volatile, and through `&self`, so that a hostile
//! test can change it from another thread at any time.

use std::sync::atomic::{AtomicU32, Ordering};

use super::super::memory::FrameMapping;
use ferrite_xen::hypervisor::PAGE_SIZE;
use ferrite_xen::slots::{self, RING_HEADER_BYTES};

/// One of the four shared words of a ring's header (blkif.md 1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingWord {
    /// The frontend's: the producer of requests.
    ReqProd = 0,
    /// The backend's: the index at which it wants an event.
    ReqEvent = 4,
    /// The backend's: the producer of responses.
    RspProd = 8,
    /// The frontend's: the index at which it wants an event.
    RspEvent = 12,
}

/// A ring's pages, mapped contiguously.
pub struct RawRing {
    pages: FrameMapping,
    slot_bytes: usize,
    entries: u32,
}

// SAFETY: shared memory is accessed only by atomics and single volatile accesses, which any number
// of threads may do; torn or changing values are what this type is for.
unsafe impl Sync for RawRing {}

impl RawRing {
    /// Initialises the header as SHARED_RING_INIT does.
    pub(crate) fn new(pages: FrameMapping, slot_bytes: usize) -> RawRing {
        let entries = slots::entries(pages.len() / PAGE_SIZE, slot_bytes);
        let ring = RawRing { pages, slot_bytes, entries };
        ring.poke(0, &vec![0; ring.pages.len()]);
        ring.store(RingWord::ReqEvent, 1);
        ring.store(RingWord::RspEvent, 1);
        ring
    }

    /// Slots.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Reads a shared word.
    pub fn load(&self, word: RingWord) -> u32 {
        self.word(word).load(Ordering::Acquire)
    }

    /// Writes a shared word, also one of the backend.
    pub fn store(&self, word: RingWord, value: u32) {
        self.word(word).store(value, Ordering::Release);
    }

    fn word(&self, word: RingWord) -> &AtomicU32 {
        // SAFETY: aligned, in the first page, mapped as long as `self`.
        unsafe { AtomicU32::from_ptr(self.pages.base().add(word as usize).as_ptr().cast()) }
    }

    /// The offset of the slot of a free-running index, in bytes from the beginning of the ring.
    pub fn slot_at(&self, index: u32) -> usize {
        let slot = (index & (self.entries - 1)) as usize;
        RING_HEADER_BYTES + slot * self.slot_bytes
    }

    /// Writes a slot, or its first bytes: words of 4.
    ///
    /// # Panics
    /// If a slot has fewer: a bug of the test.
    pub fn put_slot(&self, index: u32, slot: &[u8]) {
        assert!(slot.len() <= self.slot_bytes);
        let at = self.slot_at(index);
        for (i, word) in slot.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            // SAFETY: the slot lies in the mapping (`slots::entries`), at a multiple of 4.
            unsafe {
                self.pages.base().add(at + 4 * i).as_ptr().cast::<u32>().write_volatile(word)
            };
        }
    }

    /// The first `N` words of a slot.
    ///
    /// # Panics
    /// As [`put_slot`](Self::put_slot).
    pub fn slot_words<const N: usize>(&self, index: u32) -> [u32; N] {
        assert!(N * 4 <= self.slot_bytes);
        let at = self.slot_at(index);
        // SAFETY: as in `put_slot`.
        std::array::from_fn(|i| unsafe {
            self.pages.base().add(at + 4 * i).as_ptr().cast::<u32>().read_volatile()
        })
    }

    /// The first 16 bytes of a slot: a response of a disk's with its padding.
    pub fn response_bytes(&self, index: u32) -> [u8; 16] {
        let mut out = [0; 16];
        for (bytes, word) in out.chunks_exact_mut(4).zip(self.slot_words::<4>(index)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Writes bytes anywhere in the ring's pages, one store each.
    ///
    /// # Panics
    /// If they are not inside the ring: a bug of the test.
    pub fn poke(&self, at: usize, bytes: &[u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.pages.len()));
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: checked above.
            unsafe { self.pages.base().add(at + i).write_volatile(*byte) };
        }
    }

    /// Reads bytes anywhere in the ring's pages.
    ///
    /// # Panics
    /// As [`poke`](Self::poke).
    pub fn peek(&self, at: usize, bytes: &mut [u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.pages.len()));
        for (i, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: checked above.
            *byte = unsafe { self.pages.base().add(at + i).read_volatile() };
        }
    }

    /// Bytes of the ring's pages.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.pages.len()
    }
}
