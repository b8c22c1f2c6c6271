//! A bit for each place of a segment.

use std::ops::Range;

/// See the module text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits(Box<[u64]>);

impl Bits {
    /// With these words, the lowest bit first.
    pub fn of(words: Box<[u64]>) -> Bits {
        Bits(words)
    }

    /// All the same, for so many places, a multiple of 64.
    pub fn all(value: bool, places: u64) -> Bits {
        Bits(vec![if value { u64::MAX } else { 0 }; places as usize / 64].into())
    }

    /// The words.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// Makes it one of so many places at least, a multiple of 64. The new ones are clear.
    pub fn reach(&mut self, places: u64) {
        if self.0.len() < places as usize / 64 {
            let mut words = std::mem::take(&mut self.0).into_vec();
            words.resize(places as usize / 64, 0);
            self.0 = words.into();
        }
    }

    /// A bit.
    pub fn get(&self, at: u64) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    /// Sets a bit. `false`: it was set.
    pub fn set(&mut self, at: u64) -> bool {
        let is_new = !self.get(at);
        self.0[at as usize / 64] |= 1 << (at % 64);
        is_new
    }

    /// Clears a bit. `false`: it was clear.
    pub fn clear(&mut self, at: u64) -> bool {
        let was_set = self.get(at);
        self.0[at as usize / 64] &= !(1 << (at % 64));
        was_set
    }

    /// Sets those that others have, which begin at a multiple of 64.
    pub fn put(&mut self, first: u64, others: &Bits) {
        let words = self.0[first as usize / 64..].iter_mut();
        words.zip(&others.0).for_each(|(word, other)| *word |= other);
    }

    /// Those of these that are not among the others, which are as many.
    pub fn without(&self, others: &Bits) -> Bits {
        Bits(self.0.iter().zip(&others.0).map(|(word, other)| word & !other).collect())
    }

    /// Those that are set.
    pub fn set_bits(&self) -> impl Iterator<Item = u64> {
        (0..self.0.len() as u64 * 64).filter(|at| self.get(*at))
    }

    /// How many are clear.
    pub fn clear_bits(&self) -> u32 {
        self.0.iter().map(|word| word.count_zeros()).sum()
    }

    /// The first run of clear bits from `from` on, and at most `most` of it.
    pub fn clear_run(&self, from: u64, most: u64) -> Option<Range<u64>> {
        let len = self.0.len() as u64 * 64;
        let mut at = from;
        while at < len && self.get(at) {
            // To the next bit of its word that is clear, or the next word.
            let word = self.0[at as usize / 64] >> (at % 64);
            at += u64::from(word.trailing_ones()).min(64 - at % 64).max(1);
        }
        let mut end = at;
        while end < len.min(at.saturating_add(most)) && !self.get(end) {
            end += 1;
        }
        (end > at).then_some(at..end)
    }
}
