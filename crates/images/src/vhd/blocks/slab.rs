//! Bitmaps in memory: fixed slots that readers on all threads read without a lock.
//!
//! A slot is filled and given to another block only under the lock of the disk's state. Each has a sequence number that
//! changes with its block. A reader takes the number, checks that the block still has the slot, reads, and uses the
//! result if the number is the same (a seqlock). Bits are set and cleared in place, and a reader may see either.
//!
//! Sector `i` of a block is bit `63 - i % 64` of word `i / 64`: the bytes of the disk, read as
//! big-endian numbers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Slots that are made at once.
const CHUNK: usize = 128;

/// Words of a slot before its bitmap: the sequence number, and whether it was used lately.
const HEAD: usize = 2;

/// All slots; unused ones have no memory.
pub(super) struct Slab {
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
    /// Words of a bitmap.
    words: usize,
}

/// One slot.
#[derive(Clone, Copy)]
pub(super) struct Slot<'a> {
    seq: &'a AtomicU64,
    used: &'a AtomicU64,
    words: &'a [AtomicU64],
}

impl Slab {
    /// A slab of at most `slots` bitmaps of so many words.
    pub(super) fn new(slots: usize, words: usize) -> Slab {
        let chunks = (0..slots.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        Slab { chunks, words }
    }

    /// The slot with this index.
    ///
    /// # Panics
    /// If the slab has no such slot.
    #[inline]
    pub(super) fn slot(&self, index: u32) -> Slot<'_> {
        let (chunk, at) = (index as usize / CHUNK, index as usize % CHUNK);
        let stride = HEAD + self.words;
        let chunk = self.chunks[chunk]
            .get_or_init(|| (0..CHUNK * stride).map(|_| AtomicU64::new(0)).collect());
        let slot = &chunk[at * stride..(at + 1) * stride];
        Slot { seq: &slot[0], used: &slot[1], words: &slot[HEAD..] }
    }

    /// Words of a bitmap.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Bytes of memory that a slot takes.
    pub(super) fn slot_bytes(words: usize) -> usize {
        (HEAD + words) * 8
    }
}

impl Slot<'_> {
    /// Gives the slot to another block, with this bitmap. Only under the lock, and while no block has the slot: a
    /// reader of the old block sees the number change.
    pub(super) fn fill(&self, bits: impl Fn(usize) -> u64) {
        self.seq.fetch_add(1, Ordering::AcqRel);
        for (i, word) in self.words.iter().enumerate() {
            // Ordered after the number, also for a reader without a fence in between.
            word.store(bits(i), Ordering::Release);
        }
        self.used.store(1, Ordering::Relaxed);
    }

    /// The result of `read`, if the slot belonged to its block all the time, as `still_mine` tells.
    #[inline]
    pub(super) fn read<T>(
        &self,
        still_mine: impl Fn() -> bool,
        read: impl Fn(&Self) -> T,
    ) -> Option<T> {
        let seq = self.seq.load(Ordering::Acquire);
        if !still_mine() {
            return None;
        }
        let value = read(self);
        fence(Ordering::Acquire);
        if self.used.load(Ordering::Relaxed) == 0 {
            self.used.store(1, Ordering::Relaxed);
        }
        (self.seq.load(Ordering::Relaxed) == seq).then_some(value)
    }

    /// The number of sectors from `first` on with the same bit, at most `max`, and whether they are present.
    #[inline]
    pub(super) fn run(&self, first: u32, max: u32) -> (bool, u32) {
        let word = |i: u32| self.words[i as usize].load(Ordering::Acquire);
        let mut bits = word(first / 64) << (first % 64);
        let present = bits >> 63 == 1;
        let mut run = 0;
        let mut left_in_word = 64 - first % 64;
        loop {
            let alike = if present { bits.leading_ones() } else { bits.leading_zeros() };
            run += alike.min(left_in_word);
            if alike < left_in_word || run >= max {
                return (present, run.min(max));
            }
            bits = word((first + run) / 64);
            left_in_word = 64;
        }
    }

    /// One word.
    pub(super) fn word(&self, i: usize) -> u64 {
        self.words[i].load(Ordering::Acquire)
    }

    /// Sets one word; only under the lock.
    pub(super) fn set_word(&self, i: usize, value: u64) {
        self.words[i].store(value, Ordering::Release);
    }

    /// Whether it was used since the last call.
    pub(super) fn take_used(&self) -> bool {
        self.used.swap(0, Ordering::Relaxed) == 1
    }
}

/// For each word that has some of the `n` sectors from `first` on: its index, and their bits.
pub(super) fn masks(first: u32, n: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = first + n;
    (first / 64..end.div_ceil(64)).map(move |i| {
        let from = first.saturating_sub(i * 64);
        let to = (end - i * 64).min(64);
        let mask = (u64::MAX >> from) & (u64::MAX.checked_shl(64 - to).unwrap_or(u64::MAX));
        (i as usize, mask)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(words: &[u64]) -> Vec<bool> {
        words.iter().flat_map(|w| (0..64).map(move |i| w >> (63 - i) & 1 == 1)).collect()
    }

    proptest! {
        #[test]
        fn runs_are_those_of_a_model(
            words in proptest::collection::vec(
                prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), (0u32..64).prop_map(|s| u64::MAX << s)],
                4,
            ),
            first in 0u32..256,
            max in 1u32..256,
        ) {
            let slab = Slab::new(1, 4);
            let slot = slab.slot(0);
            slot.fill(|i| words[i]);
            let max = max.min(256 - first);
            let bits = model(&words);
            let bits = &bits[first as usize..(first + max) as usize];
            let run = bits.iter().take_while(|b| **b == bits[0]).count() as u32;
            prop_assert_eq!(slot.run(first, max), (bits[0], run));
        }

        #[test]
        fn masks_are_those_of_a_model(first in 0u32..256, n in 1u32..256) {
            let n = n.min(256 - first);
            let mut words = [0u64; 4];
            masks(first, n).for_each(|(i, mask)| words[i] |= mask);
            let bits = model(&words);
            for (i, bit) in bits.iter().enumerate() {
                prop_assert_eq!(*bit, (first as usize..(first + n) as usize).contains(&i));
            }
        }
    }

    #[test]
    fn a_read_is_not_believed_if_the_slot_changed_its_owner_meanwhile() {
        let slab = Slab::new(200, 1);
        let slot = slab.slot(150);
        slot.fill(|_| 7);
        assert_eq!(slot.read(|| true, |s| s.word(0)), Some(7));
        assert_eq!(slot.read(|| false, |s| s.word(0)), None);
        let during = slot.read(
            || true,
            |s| {
                s.fill(|_| 9);
                s.word(0)
            },
        );
        assert_eq!(during, None);
    }
}
