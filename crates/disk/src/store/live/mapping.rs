//! Where blocks are, from memory and without a lock; and whether what was read there is what they have (store.md 6).
//!
//! Both ask V2P, then P2M. Who asks is in an epoch. So a number that V2P has named is nobody else's before the
//! question has ended, and the place that P2M has named is nobody else's before the operation has.

use ferrite_io::arena::{Arena, Span};

use super::leaves::{Leaf, bytes};
use super::{BLOCK_BYTES, Live};
use crate::Extent;
use crate::epochs::Reader;
use crate::store::content::{checksum, is_zeros};
use crate::store::journal::VolumeId;
use crate::store::page::{Whereabouts, decode_number};
use crate::store::pages::Kind;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Numbers that stand for others, one after the other, which are followed without a step.
const MAX_WAY: usize = 4;

/// Where a block's content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spot {
    /// Nowhere: it is zeros.
    Zeros,
    Place {
        place: u64,
        checksum: u32,
    },
}

impl Live {
    /// For a queue that [maps](Live::map).
    pub(crate) fn reader(&self) -> Reader {
        self.epochs.reader()
    }

    /// Runs what maps and uses what it has mapped. It must not write, nor read step by step: a pass
    /// waits for its end, and a write for a pass.
    pub(crate) async fn while_mapped<T>(&self, steps: impl Future<Output = T>) -> T {
        self.epochs.during(steps).await
    }

    /// Where the beginning of a range of a volume is, if memory has it: blocks whose places follow each
    /// other, or zeros. The caller is in an epoch until it has ended what it does there.
    pub(crate) fn map(&self, volume: VolumeId, offset: u64, len: u64) -> Extent {
        // There are checksums of whole blocks only.
        if !(offset | len).is_multiple_of(BLOCK) {
            return Extent::Slow { len };
        }
        let block = offset / BLOCK;
        let Some(first) = self.spot(volume, block) else { return Extent::Slow { len } };
        let follows = |count| match (first, self.spot(volume, block + count)) {
            (Spot::Zeros, Some(Spot::Zeros)) => true,
            (Spot::Place { place: first, .. }, Some(Spot::Place { place, .. })) => {
                place == first + count
            }
            _ => false,
        };
        let more = (1..len / BLOCK).take_while(|count| follows(*count)).count() as u64;
        let len = (1 + more) * BLOCK;
        self.lookups.hit(Kind::V2p, 1 + more);
        if let Spot::Place { .. } = first {
            self.lookups.hit(Kind::P2m, 1 + more);
        }
        match first {
            Spot::Zeros => Extent::Zeros { len },
            Spot::Place { place, .. } => Extent::Data { file: 0, offset: place * BLOCK, len },
        }
    }

    /// Whether blocks have these data, if memory knows it. `false` says nothing of damage: they may have been
    /// written meanwhile. The caller is in the epoch in which it has mapped.
    pub(crate) fn check(&self, memory: &Arena, volume: VolumeId, offset: u64, data: Span) -> bool {
        if !(offset | data.len() as u64).is_multiple_of(BLOCK) {
            return false;
        }
        let mut bytes = [0; BLOCK_BYTES];
        let mut fits = |(block, at)| {
            memory.copy_out(data.slice(at, BLOCK_BYTES), &mut bytes);
            match self.spot(volume, block) {
                Some(Spot::Zeros) => is_zeros(&bytes),
                Some(Spot::Place { checksum: known, .. }) => checksum(&bytes) == known,
                None => false,
            }
        };
        (offset / BLOCK..).zip((0..data.len()).step_by(BLOCK_BYTES)).all(&mut fits)
    }

    /// None: memory does not have it, or it takes steps.
    fn spot(&self, volume: VolumeId, block: u64) -> Option<Spot> {
        let (leaf, at) = Leaf::of_block(volume, block);
        let [word] = self.slots.read(leaf.view(), at)?;
        let number = decode_number(word.to_le_bytes(), &self.layout).ok()?;
        if number == 0 {
            return Some(Spot::Zeros);
        }
        self.plain(number)
    }

    fn plain(&self, mut number: u64) -> Option<Spot> {
        for _ in 0..MAX_WAY {
            let (leaf, at) = Leaf::of_number(number);
            let entry = self.slots.read::<2>(leaf.view(), at)?;
            match Whereabouts::decode(&bytes(entry), number, &self.layout).ok()? {
                Whereabouts::Plain { place, checksum } => {
                    return Some(Spot::Place { place, checksum });
                }
                Whereabouts::SameAs { number: lower } => number = lower,
                Whereabouts::Nowhere | Whereabouts::Packed { .. } => return None,
            }
        }
        None
    }
}
