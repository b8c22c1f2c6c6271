//! Where blocks are, from memory and without a lock; and whether what was read there is what they have (store.md 6).
//!
//! Both ask V2P, then P2M. Who asks is in an epoch. So a number that V2P has named is nobody else's before the
//! question has ended, and the place that P2M has named is nobody else's before the operation has.

use std::ops::Range;

use ferrite_disk_base::{Extent, Reader};
use ferrite_io::arena::{Arena, Span};

use super::leaves::{Leaf, bytes};
use super::reading::blocks_of;
use super::{BLOCK_BYTES, Live};
use crate::content::{checksum, is_zeros};
use crate::journal::VolumeId;
use crate::page::{P2M_ENTRIES, V2P_ENTRIES, Whereabouts, decode_number};
use crate::pages::Kind;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Numbers that stand for others, one after the other, which are followed without a step.
const MAX_WAY: usize = 4;

/// Blocks in one leaf that are looked up by one look at it.
const TOGETHER: usize = 16;

/// Where a block's content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spot {
    /// Nowhere: it is zeros.
    Zeros,
    Place {
        place: u64,
        checksum: u32,
    },
}

impl Live {
    /// For a queue that [maps](Live::map): the store hears by it when its operations have ended.
    pub fn reader(&self) -> Reader {
        self.epochs.reader()
    }

    /// Runs what maps and uses what it has mapped. It must not write, nor read step by step: a pass
    /// waits for its end, and a write for a pass.
    pub async fn while_mapped<T>(&self, steps: impl Future<Output = T>) -> T {
        self.epochs.during(steps).await
    }

    /// Where the beginning of a range of a volume is, if memory has it: blocks whose places follow each
    /// other, or zeros. The caller is in an epoch until it has ended what it does there.
    pub fn map(&self, volume: VolumeId, offset: u64, len: u64) -> Extent {
        // There are checksums of whole blocks only.
        if !(offset | len).is_multiple_of(BLOCK) {
            return Extent::Slow { len };
        }
        let mut spots = self.spots(volume, blocks_of(offset, len as usize));
        let Some(first) = spots.next().flatten() else { return Extent::Slow { len } };
        let follows = |(count, spot): &(u64, Option<Spot>)| match (first, spot) {
            (Spot::Zeros, Some(Spot::Zeros)) => true,
            (Spot::Place { place: first, .. }, Some(Spot::Place { place, .. })) => {
                *place == first + count
            }
            _ => false,
        };
        let count = 1 + (1..).zip(spots).take_while(follows).count();
        let len = count as u64 * BLOCK;
        self.count_hits(count, if first == Spot::Zeros { 0 } else { count });
        match first {
            Spot::Zeros => Extent::Zeros { len },
            Spot::Place { place, .. } => Extent::Data { file: 0, offset: place * BLOCK, len },
        }
    }

    /// Whether blocks have these data, if memory knows it. `false` says nothing of damage: they may have been
    /// written meanwhile. The caller is in the epoch in which it has mapped.
    pub fn check(&self, memory: &Arena, volume: VolumeId, offset: u64, data: Span) -> bool {
        if !(offset | data.len() as u64).is_multiple_of(BLOCK) {
            return false;
        }
        let mut bytes = [0; BLOCK_BYTES];
        let mut fits = |(spot, at)| {
            memory.copy_out(data.slice(at, BLOCK_BYTES), &mut bytes);
            match spot {
                Some(Spot::Zeros) => is_zeros(&bytes),
                Some(Spot::Place { checksum: known, .. }) => checksum(&bytes) == known,
                None => false,
            }
        };
        let spots = self.spots(volume, blocks_of(offset, data.len()));
        spots.zip((0..data.len()).step_by(BLOCK_BYTES)).all(&mut fits)
    }

    /// So many entries were found in memory, of blocks and of numbers.
    pub(super) fn count_hits(&self, blocks: usize, numbers: usize) {
        self.lookups.hit(Kind::V2p, blocks as u64);
        if numbers > 0 {
            self.lookups.hit(Kind::P2m, numbers as u64);
        }
    }

    /// Of blocks in a row, from memory. The caller is in an epoch.
    pub(super) fn spots(&self, volume: VolumeId, blocks: Range<u64>) -> Spots<'_> {
        Spots { live: self, volume, blocks, found: [None; TOGETHER], next: 0..0 }
    }

    /// Of blocks in one leaf of V2P: as many as `spots`, which are none before.
    fn find_spots(&self, volume: VolumeId, block: u64, spots: &mut [Option<Spot>]) {
        let (leaf, at) = Leaf::of_block(volume, block);
        let mut numbers = [0; TOGETHER];
        let numbers = &mut numbers[..spots.len()];
        if !self.slots.read_run(leaf.view(), at, numbers) {
            return;
        }
        let mut done = 0;
        while done < numbers.len() {
            let first = numbers[done];
            let count = match decode_number(first.to_le_bytes(), &self.layout) {
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

    /// Of numbers that are [`in_a_row`].
    fn find_places(&self, first: u64, spots: &mut [Option<Spot>]) {
        let (leaf, at) = Leaf::of_number(first);
        let mut entries = [0; 2 * TOGETHER];
        let entries = &mut entries[..2 * spots.len()];
        if self.slots.read_run(leaf.view(), at, entries) {
            let entries = entries.as_chunks().0.iter();
            for ((number, entry), spot) in (first..).zip(entries).zip(spots) {
                *spot = self.plain(number, *entry);
            }
        }
    }

    /// Where the content of a number with this entry is. None: memory does not have it, or it takes steps.
    fn plain(&self, mut number: u64, mut entry: [u64; 2]) -> Option<Spot> {
        for _ in 0..MAX_WAY {
            match Whereabouts::decode(&bytes(entry), number, &self.layout).ok()? {
                Whereabouts::Plain { place, checksum } => {
                    return Some(Spot::Place { place, checksum });
                }
                Whereabouts::SameAs { number: lower } => {
                    let (leaf, at) = Leaf::of_number(lower);
                    (number, entry) = (lower, self.slots.read(leaf.view(), at)?);
                }
                Whereabouts::Nowhere | Whereabouts::Packed { .. } => return None,
            }
        }
        None
    }
}

/// Where blocks in a row are, one after the other. None: memory does not have it, or it takes steps.
pub(super) struct Spots<'a> {
    live: &'a Live,
    volume: VolumeId,
    /// Those that have not been looked up.
    blocks: Range<u64>,
    /// Of those before them.
    found: [Option<Spot>; TOGETHER],
    /// Which of these come next.
    next: Range<usize>,
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
            self.live.find_spots(self.volume, start, found);
            self.blocks.start += count;
            self.next = 0..count as usize;
        }
        self.next.next().map(|at| self.found[at])
    }
}

/// How many of these are the first one and those behind it, in one leaf of P2M.
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
