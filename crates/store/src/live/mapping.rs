//! Where the blocks of a volume are, from memory and without a lock (store.md 6).
//!
//! A lookup reads V2P, then P2M. The caller is in an epoch. So a number that V2P has named gets no other content before
//! the lookup has ended. A place that P2M has named gets no other content before the caller leaves the epoch.

use std::ops::Range;

use super::leaf::{Leaf, bytes};
use super::shared::Shared;
use crate::journal::VolumeId;
use crate::page::{P2M_ENTRIES, V2P_ENTRIES, Whereabouts, decode_number};

/// The most numbers on the way from a number to its content that a lookup follows.
const MAX_WAY: usize = 4;

/// The most blocks of one leaf that are looked up together.
const TOGETHER: usize = 16;

/// Where a block's content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spot {
    /// The block is zeros, and has no place.
    Zeros,
    Place {
        place: u64,
        checksum: u32,
    },
}

/// The tables in memory.
struct Lookup<'a>(&'a Shared);

impl Lookup<'_> {
    /// Looks up as many blocks of one leaf of V2P as `spots` has. The caller has set all of `spots` to `None`.
    fn find_spots(&self, volume: VolumeId, block: u64, spots: &mut [Option<Spot>]) {
        let (leaf, at) = Leaf::of_block(volume, block);
        let mut numbers = [0; TOGETHER];
        let numbers = &mut numbers[..spots.len()];
        if !self.0.slots.read_run(leaf.view(), at, numbers) {
            return;
        }
        let mut done = 0;
        while done < numbers.len() {
            let first = numbers[done];
            let count = match decode_number(first.to_le_bytes(), &self.0.layout()) {
                Err(_) => return,
                Ok(0) => {
                    spots[done] = Some(Spot::Zeros);
                    1
                }
                Ok(_) => {
                    let count = in_a_row(&numbers[done..]);
                    self.find_places(first, &mut spots[done..done + count]);
                    count
                }
            };
            done += count;
        }
    }

    /// Looks up numbers that are [`in_a_row`].
    fn find_places(&self, first: u64, spots: &mut [Option<Spot>]) {
        let (leaf, at) = Leaf::of_number(first);
        let mut entries = [0; 2 * TOGETHER];
        let entries = &mut entries[..2 * spots.len()];
        if self.0.slots.read_run(leaf.view(), at, entries) {
            let entries = entries.as_chunks().0.iter();
            for ((number, entry), spot) in (first..).zip(entries).zip(spots) {
                *spot = self.plain(number, *entry);
            }
        }
    }

    /// Where the content of a number with this entry is. `None`: memory does not have it, or it must be read step by
    /// step.
    fn plain(&self, mut number: u64, mut entry: [u64; 2]) -> Option<Spot> {
        for _ in 0..MAX_WAY {
            match Whereabouts::decode(&bytes(entry), number, &self.0.layout()).ok()? {
                Whereabouts::Plain { place, checksum } => {
                    return Some(Spot::Place { place, checksum });
                }
                Whereabouts::SameAs { number: lower } => {
                    let (leaf, at) = Leaf::of_number(lower);
                    (number, entry) = (lower, self.0.slots.read(leaf.view(), at)?);
                }
                Whereabouts::Nowhere | Whereabouts::Packed { .. } => return None,
            }
        }
        None
    }
}

/// Where consecutive blocks of a volume are. An item is `None` if memory does not have the block's spot, or if it must
/// be looked up step by step. The caller is in an epoch.
pub(super) struct Spots<'a> {
    lookup: Lookup<'a>,
    volume: VolumeId,
    /// The blocks that have not been looked up.
    blocks: Range<u64>,
    /// The spots of the last blocks that were looked up.
    found: [Option<Spot>; TOGETHER],
    /// The part of `found` that comes next.
    next: Range<usize>,
}

impl Spots<'_> {
    pub(super) fn new(shared: &Shared, volume: VolumeId, blocks: Range<u64>) -> Spots<'_> {
        Spots { lookup: Lookup(shared), volume, blocks, found: [None; TOGETHER], next: 0..0 }
    }
}

impl Iterator for Spots<'_> {
    type Item = Option<Spot>;

    fn next(&mut self) -> Option<Option<Spot>> {
        if self.next.is_empty() {
            let Range { start, end } = self.blocks;
            let leaf_end = (start + 1).next_multiple_of(V2P_ENTRIES as u64);
            let count = (end.min(leaf_end) - start).min(TOGETHER as u64);
            let found = &mut self.found[..count as usize];
            found.fill(None);
            self.lookup.find_spots(self.volume, start, found);
            self.blocks.start += count;
            self.next = 0..count as usize;
        }
        self.next.next().map(|at| self.found[at])
    }
}

/// How many of these numbers follow each other, from the first one on, in one leaf of P2M.
fn in_a_row(numbers: &[u64]) -> usize {
    let leaf = |number: u64| number / P2M_ENTRIES as u64;
    let follows = |(expected, number): &(u64, &u64)| {
        **number == *expected && leaf(**number) == leaf(numbers[0])
    };
    (numbers[0]..).zip(numbers).take_while(follows).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_in_a_row_as_far_as_their_leaf_goes() {
        let end = P2M_ENTRIES as u64;
        assert_eq!(in_a_row(&[7]), 1);
        assert_eq!(in_a_row(&[7, 8, 9, 11, 12]), 3);
        assert_eq!(in_a_row(&[end - 2, end - 1, end, end + 1]), 2);
        assert_eq!(in_a_row(&[7, 7]), 1);
    }
}
