//! The superblock: the beginning of everything, in two homes (store.md 2 and 5).

use ferrite_disk_base::STORE_MAGIC as MAGIC;

use super::content::checksum;
use super::fields::{Reader, Writer};
use super::layout::Layout;
use super::page::{POINTER_BYTES, Packing, Pointer};
use super::{BLOCK_BYTES, Damaged, StoreId};

/// The version that this program reads and writes.
pub const VERSION: u32 = 1;
const CHECKSUM_AT: usize = BLOCK_BYTES - 4;
/// A feature: the store has grown, and says how large it was at first.
const GROWN: u64 = 1;
/// A feature: volumes may say when they were made, and so may records of the journal.
const TIMES: u64 = 2;
const MAX_GENERATION: u64 = 1 << 56;

/// The roots of the trees that a store has one of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roots {
    /// From numbers to places.
    pub p2m: Option<Pointer>,
    /// From numbers to hashes.
    pub hashes: Option<Pointer>,
    /// The volumes.
    pub volumes: Option<Pointer>,
    /// The domains.
    pub domains: Option<Pointer>,
}

/// See the module text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The store's.
    pub id: StoreId,
    /// The places of the store's parts.
    pub layout: Layout,
    /// The checkpoint that this is of.
    pub checkpoint: u64,
    /// The first journal block that the trees do not have.
    pub replay_from: u64,
    /// The next generation; each is given once.
    pub generation: u64,
    /// All numbers that were ever given are lower.
    pub numbers_end: u64,
    /// The roots that it leads to.
    pub roots: Roots,
    /// How new groups are compressed.
    pub packing: Option<Packing>,
    /// Whether volumes, and records of the journal, may say when volumes were made.
    pub has_times: bool,
}

/// Why a page is no superblock that this program can go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// It begins in another way.
    #[error("it is no store: it does not begin with a store's mark")]
    Foreign,
    /// A later program has made it.
    #[error("it is a store of version {found}, and this program knows version {VERSION}")]
    Version {
        /// The store's.
        found: u32,
    },
    /// A later program has used it.
    #[error("it has features that this program does not know (bits {bits:#x})")]
    Features {
        /// Those unknown.
        bits: u64,
    },
    /// The file or device was cut off.
    #[error(
        "the store is longer than what it is in: it has {store_bytes} bytes, and that has {bytes}. It was cut off, and may \
         be whole again when it is as long as before (truncate -s {store_bytes})"
    )]
    CutOff {
        /// Of the store.
        store_bytes: u64,
        /// Of its file or device.
        bytes: u64,
    },
    /// It was a superblock once.
    #[error(transparent)]
    Damaged(#[from] Damaged),
}

impl Superblock {
    /// As it is in one of its homes.
    pub fn encode(&self, home: usize) -> Vec<u8> {
        let (layout, roots) = (&self.layout, &self.roots);
        let mut to = Writer::default();
        to.bytes(MAGIC).number(VERSION.into(), 4).number(0, 4).bytes(&self.id);
        // Features to be known, to open it and to write it.
        let grown = if layout.has_grown() { GROWN } else { 0 };
        let times = if self.has_times { TIMES } else { 0 };
        to.number(grown | times, 8).number(0, 8);
        for size in [layout.blocks, layout.journal_blocks, layout.segment_blocks, layout.segments] {
            to.number(size, 8);
        }
        to.number(layout.superblock(home, self.checkpoint), 8);
        to.number(self.checkpoint, 8).number(self.replay_from, 8);
        to.number(self.generation, 8).number(self.numbers_end, 8);
        for root in [roots.p2m, roots.hashes, roots.volumes, roots.domains] {
            to.bytes(&Pointer::encode(root));
        }
        to.number(
            PACKINGS.iter().position(|packing| *packing == self.packing).unwrap_or(0) as u64,
            8,
        );
        if layout.has_grown() {
            to.number(layout.first_blocks, 8).number(layout.first_segments, 8);
        }
        to.0.resize(CHECKSUM_AT, 0);
        let sum = checksum(&to.0);
        to.number(sum.into(), 4);
        to.0
    }

    /// The opposite, of a home's page for odd or even checkpoints, which decides what is believed.
    ///
    /// # Errors
    /// See [`Unusable`].
    pub fn decode(page: &[u8], home: usize, odd: bool) -> Result<Superblock, Unusable> {
        let mut from = Reader::new(page);
        if from.bytes(MAGIC.len())? != MAGIC {
            return Err(Unusable::Foreign);
        }
        let sum = page.get(CHECKSUM_AT..BLOCK_BYTES).ok_or(Damaged("a superblock is cut off"))?;
        if checksum(&page[..CHECKSUM_AT]).to_le_bytes() != *sum {
            return Err(Damaged("a superblock does not fit its checksum").into());
        }
        // Of these two, whatever comes later, all versions say this here.
        let version = from.u32()?;
        if version != VERSION {
            return Err(Unusable::Version { found: version });
        }
        Superblock::decode_fields(from, home, odd)
    }

    fn decode_fields(mut from: Reader, home: usize, odd: bool) -> Result<Superblock, Unusable> {
        if from.u32()? != 0 {
            return Err(Damaged("bytes that mean nothing are not zeros").into());
        }
        let id = from.array()?;
        let (features, to_write) = (from.u64()?, from.u64()?);
        let bits = (features & !(GROWN | TIMES)) | to_write;
        if bits != 0 {
            return Err(Unusable::Features { bits });
        }
        let (blocks, journal_blocks) = (from.u64()?, from.u64()?);
        let (segment_blocks, segments) = (from.u64()?, from.u64()?);
        let mut layout = Layout::new(blocks, journal_blocks, segment_blocks, segments);
        let has_grown = features & GROWN != 0;
        if has_grown {
            // They are behind all that other stores have.
            let mut behind = from.clone();
            behind.bytes(UP_TO_SIZES)?;
            (layout.first_blocks, layout.first_segments) = (behind.u64()?, behind.u64()?);
        }
        let layout = layout.checked()?;
        if layout.has_grown() != has_grown {
            return Err(Damaged("the store has grown by nothing").into());
        }
        let (place, checkpoint) = (from.u64()?, from.u64()?);
        let (replay_from, generation, numbers_end) = (from.u64()?, from.u64()?, from.u64()?);
        let is_here = place == layout.superblock(home, checkpoint) && odd == (checkpoint % 2 == 1);
        let within = generation < MAX_GENERATION && numbers_end <= layout.places();
        // Counters that only grow end somewhere, too: not in the life of any medium.
        if !is_here || !within || checkpoint.max(replay_from) >= u64::MAX / 2 {
            return Err(Damaged("the numbers in the superblock are no store's").into());
        }
        let mut root = || Pointer::decode(&from.array::<POINTER_BYTES>()?, &layout);
        let roots = Roots { p2m: root()?, hashes: root()?, volumes: root()?, domains: root()? };
        let packing = PACKINGS.get(from.u64()? as usize);
        let packing = *packing.ok_or(Damaged("the store is compressed in an unknown way"))?;
        let more = if has_grown { GROWN_BYTES } else { 0 };
        from.bytes(more)?;
        let zeros = BLOCK_BYTES - FIELDS_BYTES - more - 4;
        Reader::new(from.bytes(zeros)?).zeros()?;
        Ok(Superblock {
            id,
            layout,
            checkpoint,
            replay_from,
            generation,
            numbers_end,
            roots,
            packing,
            has_times: features & TIMES != 0,
        })
    }
}

/// Of everything but the zeros and the checksum at the end.
const FIELDS_BYTES: usize = 8 + 4 + 4 + 16 + 2 * 8 + 4 * 8 + 5 * 8 + 4 * POINTER_BYTES + 8;

/// Of the fields of a store that has grown.
const GROWN_BYTES: usize = 2 * 8;
/// Between the sizes and these fields.
const UP_TO_SIZES: usize = 5 * 8 + 4 * POINTER_BYTES + 8;

/// As their numbers are on the medium.
const PACKINGS: [Option<Packing>; 3] = [None, Some(Packing::Lz4), Some(Packing::Zstandard)];

/// The four pages of a store, by home, and for even and odd checkpoints.
pub type Pages = [[Result<Superblock, Unusable>; 2]; 2];

/// The highest checkpoint that a page has whole; unless both pages for even or for odd ones are damaged. No
/// crash does that, so one of them may have been a later one, whose successors are on the medium.
///
/// # Errors
/// What is wrong with the pages.
pub fn choose(pages: &Pages) -> Result<Superblock, Unusable> {
    // An unknown version or feature comes first, and then a medium without a store, whatever else is wrong.
    let all = || pages.iter().flatten();
    if let Some(later) = all().find_map(|page| match page {
        Err(e @ (Unusable::Version { .. } | Unusable::Features { .. })) => Some(*e),
        _ => None,
    }) {
        return Err(later);
    }
    if all().all(|page| *page == Err(Unusable::Foreign)) {
        return Err(Unusable::Foreign);
    }
    if (0..2).any(|odd| pages.iter().all(|home| home[odd].is_err())) {
        return Err(Damaged("both pages of the superblock of a checkpoint are damaged").into());
    }
    let whole = || all().filter_map(|page| page.as_ref().ok());
    let Some(newest) = whole().max_by_key(|page| page.checkpoint) else {
        return Err(Unusable::Foreign);
    };
    // A store may have grown with the newest one.
    if whole().any(|page| page.id != newest.id || !newest.layout.is_of(&page.layout)) {
        return Err(Damaged("the pages of the superblock are of several stores").into());
    }
    if whole().any(|page| page.checkpoint == newest.checkpoint && page != newest) {
        return Err(Damaged("a checkpoint has two superblocks").into());
    }
    Ok(*newest)
}

#[cfg(test)]
mod tests;
