//! The journal: blocks of records, and which of them count after an end without a close (store.md 2 to 4).

use std::ops::Range;

use super::content::{ContentHash, DomainKey, checksum, checksum_on};
use super::fields::{Reader, Writer};
use super::layout::Layout;
use super::numbers::AHEAD;
use super::{BLOCK_BYTES, Damaged, StoreId};

pub use ferrite_disk_base::VolumeName as Name;

const MAGIC: &[u8; 8] = b"FERSTJRN";
/// Magic, identifier, number, `synced`, count, zeros, checksum.
const HEADER_BYTES: usize = 64;
const CHECKSUM_AT: usize = HEADER_BYTES - 4;
/// Blocks of a record of content that the store had: it is 17 bytes, and its replay is a step for each.
pub const MAX_SAME: u64 = 512;

/// A volume's number.
pub type VolumeId = u32;

/// Content that the store had not, and the block that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewContent {
    /// The volume of the block.
    pub volume: VolumeId,
    /// Which block of it.
    pub block: u64,
    /// The content's number.
    pub number: u64,
    /// Where it is.
    pub place: u64,
    /// Of the content.
    pub checksum: u32,
    /// By the key of which domain it is named.
    pub domain: u16,
    /// Its name.
    pub hash: ContentHash,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// New content.
    New(NewContent),
    /// So many blocks in a row have contents that the store had, with numbers in a row.
    Same {
        /// The volume of the blocks.
        volume: VolumeId,
        /// The first block.
        block: u64,
        /// The first number.
        number: u64,
        /// How many: 1 to [`MAX_SAME`].
        count: u16,
    },
    /// So many blocks read as zeros.
    Zeros {
        /// The volume of the blocks.
        volume: VolumeId,
        /// The first.
        block: u64,
        /// How many; not 0.
        count: u32,
    },
    /// A volume that reads as zeros.
    Create {
        /// Its number.
        volume: VolumeId,
        /// Its size.
        blocks: u64,
        /// Its dedup domain.
        domain: u16,
        /// Its name.
        name: Name,
    },
    /// A volume that has what another one has now.
    Share {
        /// Its number.
        volume: VolumeId,
        /// The other one's.
        of: VolumeId,
        /// Whether it is read-only.
        snapshot: bool,
        /// Its name.
        name: Name,
    },
    /// A volume gets what a snapshot has.
    Rollback {
        /// The volume.
        volume: VolumeId,
        /// The snapshot.
        to: VolumeId,
    },
    /// There is no such volume any more.
    Delete {
        /// Which.
        volume: VolumeId,
    },
    /// When a volume was made that a record before this one of the same block has made. Only in a store whose superblock
    /// says that there are such records.
    Made {
        /// Its number.
        volume: VolumeId,
        /// Seconds of Unix time.
        unix_s: u64,
    },
    /// A domain.
    Domain {
        /// Its number.
        domain: u16,
        /// Its key.
        key: DomainKey,
        /// Its name.
        name: Name,
    },
}

impl Record {
    fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        let volume = |v: &VolumeId| u64::from(*v);
        match self {
            Record::New(new) => to
                .number(1, 1)
                .number(volume(&new.volume), 4)
                .number(new.block, 5)
                .number(new.number, 5)
                .number(new.place, 5)
                .number(new.checksum.into(), 4)
                .number(new.domain.into(), 2)
                .bytes(&new.hash.0),
            Record::Same { volume: v, block, number, count } => to
                .number(2, 1)
                .number(volume(v), 4)
                .number(*block, 5)
                .number(*number, 5)
                .number((*count).into(), 2),
            Record::Zeros { volume: v, block, count } => {
                to.number(3, 1).number(volume(v), 4).number(*block, 5).number((*count).into(), 4)
            }
            Record::Create { volume: v, blocks, domain, name } => {
                to.number(4, 1).number(volume(v), 4).number(*blocks, 5);
                to.number((*domain).into(), 2).name(name)
            }
            Record::Share { volume: v, of, snapshot, name } => {
                let kind = if *snapshot { 5 } else { 6 };
                to.number(kind, 1).number(volume(v), 4).number(volume(of), 4).name(name)
            }
            Record::Rollback { volume: v, to: snapshot } => {
                to.number(7, 1).number(volume(v), 4).number(volume(snapshot), 4)
            }
            Record::Delete { volume: v } => to.number(8, 1).number(volume(v), 4),
            Record::Made { volume: v, unix_s } => {
                to.number(10, 1).number(volume(v), 4).number(*unix_s, 8)
            }
            Record::Domain { domain, key, name } => {
                to.number(9, 1).number((*domain).into(), 2).bytes(&key.0).name(name)
            }
        };
        to.0
    }

    fn decode(from: &mut Reader, layout: &Layout) -> Result<Record, Damaged> {
        let record = match from.u8()? {
            1 => Record::New(NewContent {
                volume: from.u32()?,
                block: from.number(5)?,
                number: from.number(5)?,
                place: from.number(5)?,
                checksum: from.u32()?,
                domain: from.u16()?,
                hash: ContentHash(from.array()?),
            }),
            2 => Record::Same {
                volume: from.u32()?,
                block: from.number(5)?,
                number: from.number(5)?,
                count: from.u16()?,
            },
            3 => Record::Zeros { volume: from.u32()?, block: from.number(5)?, count: from.u32()? },
            4 => Record::Create {
                volume: from.u32()?,
                blocks: from.number(5)?,
                domain: from.u16()?,
                name: from.name()?,
            },
            kind @ (5 | 6) => Record::Share {
                volume: from.u32()?,
                of: from.u32()?,
                snapshot: kind == 5,
                name: from.name()?,
            },
            7 => Record::Rollback { volume: from.u32()?, to: from.u32()? },
            8 => Record::Delete { volume: from.u32()? },
            9 => Record::Domain {
                domain: from.u16()?,
                key: DomainKey(from.array()?),
                name: from.name()?,
            },
            10 => Record::Made { volume: from.u32()?, unix_s: from.u64()? },
            _ => return Err(Damaged("a record of the journal is of no kind")),
        };
        match record.is_sane(layout) {
            true => Ok(record),
            false => Err(Damaged("a record of the journal leads out of the store")),
        }
    }

    /// Whether it can be carried out in a store of this size, as far as the record says. Whether there are
    /// such volumes is not looked at.
    fn is_sane(&self, layout: &Layout) -> bool {
        let are_numbers = |first: u64, count: u64| first > 0 && first + count <= layout.places();
        let are_blocks = |first: u64, count: u64| first + count <= 1 << 40;
        match *self {
            Record::New(NewContent { number, place, .. }) => {
                are_numbers(number, 1) && layout.segment_of(place).is_some()
            }
            Record::Same { block, number, count, .. } => {
                let count = count.into();
                (1..=MAX_SAME).contains(&count)
                    && are_numbers(number, count)
                    && are_blocks(block, count)
            }
            Record::Zeros { block, count, .. } => {
                let count = count.into();
                (1..=MAX_SAME).contains(&count) && are_blocks(block, count)
            }
            _ => true,
        }
    }
}

impl Writer {
    pub(super) fn name(&mut self, name: &Name) -> &mut Writer {
        self.number(name.as_str().len() as u64, 1).bytes(name.as_str().as_bytes())
    }
}

impl Reader<'_> {
    pub(super) fn name(&mut self) -> Result<Name, Damaged> {
        let len = usize::from(self.u8()?);
        let name = str::from_utf8(self.bytes(len)?).ok().and_then(Name::new);
        name.ok_or(Damaged("the name of a volume is none"))
    }
}

/// A block that is being filled.
pub struct Filling {
    bytes: Writer,
    count: u16,
}

impl Default for Filling {
    fn default() -> Filling {
        let mut bytes = Writer::default();
        bytes.0.resize(HEADER_BYTES, 0);
        Filling { bytes, count: 0 }
    }
}

impl Filling {
    /// Adds a record. `false`: it is for the next block.
    pub fn add(&mut self, record: &Record) -> bool {
        let record = record.encode();
        let fits = self.bytes.0.len() + record.len() <= BLOCK_BYTES;
        if fits {
            self.bytes.bytes(&record);
            self.count += 1;
        }
        fits
    }

    /// The block, with its number and the number below which all is durable.
    pub fn finish(self, id: &StoreId, number: u64, synced: u64) -> Vec<u8> {
        let mut header = Writer::default();
        header.bytes(MAGIC).bytes(id).number(number, 8).number(synced, 8);
        header.number(self.count.into(), 2);
        let mut block = self.bytes.0;
        block.resize(BLOCK_BYTES, 0);
        block[..header.0.len()].copy_from_slice(&header.0);
        let sum = sum(&block);
        block[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum);
        block
    }
}

/// Of a block, but for where it is written.
fn sum(block: &[u8]) -> [u8; 4] {
    checksum_on(checksum(&block[..CHECKSUM_AT]), &block[HEADER_BYTES..]).to_le_bytes()
}

/// A block that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its number.
    pub number: u64,
    /// All blocks below this one, and their data, were durable when it was written.
    pub synced: u64,
    /// Its records, in their order.
    pub records: Vec<Record>,
}

impl Block {
    /// The block in these bytes. None: the store has written no whole block there.
    ///
    /// # Errors
    /// It was written whole, and its records mean nothing.
    pub fn decode(bytes: &[u8], id: &StoreId, layout: &Layout) -> Result<Option<Block>, Damaged> {
        if bytes.len() != BLOCK_BYTES || sum(bytes) != bytes[CHECKSUM_AT..HEADER_BYTES] {
            return Ok(None);
        }
        let mut header = Reader::new(&bytes[..CHECKSUM_AT]);
        if header.bytes(MAGIC.len())? != MAGIC || header.bytes(id.len())? != id {
            return Ok(None);
        }
        let (number, synced) = (header.u64()?, header.u64()?);
        let count = header.u16()?;
        header.zeros()?;
        if synced > number {
            return Err(Damaged("a block of the journal vouches for what comes after it"));
        }
        let mut from = Reader::new(&bytes[HEADER_BYTES..]);
        let records = (0..count).map(|_| Record::decode(&mut from, layout));
        let records = records.collect::<Result<_, _>>()?;
        from.zeros()?;
        Ok(Some(Block { number, synced, records }))
    }
}

/// The findings of a scan of the whole journal, block by block.
#[derive(Debug)]
pub struct Scan {
    /// The numbers that a block of it can have.
    numbers: Range<u64>,
    /// Whether there is a block, by its number from the first one on.
    found: Vec<bool>,
    /// Numbers whose places storage cannot read.
    unreadable: Vec<u64>,
    synced: u64,
    next: u64,
}

impl Scan {
    /// From the block on that the superblock says.
    pub fn new(layout: &Layout, replay_from: u64) -> Scan {
        let numbers = replay_from..replay_from + layout.journal_blocks;
        let found = vec![false; layout.journal_blocks as usize];
        let unreadable = Vec::new();
        Scan { numbers, found, unreadable, synced: replay_from, next: replay_from }
    }

    /// The block that is in this place of the journal. `false`: it is of before the checkpoint.
    ///
    /// # Errors
    /// The store has not written it there.
    pub fn add(&mut self, layout: &Layout, at: u64, block: &Block) -> Result<bool, Damaged> {
        if block.number < self.numbers.start {
            return Ok(false);
        }
        // The next checkpoint is durable before the journal goes round.
        if !self.numbers.contains(&block.number) || layout.journal(block.number) != at {
            return Err(Damaged("a block of the journal is not where it belongs"));
        }
        self.found[(block.number - self.numbers.start) as usize] = true;
        self.synced = self.synced.max(block.synced);
        self.next = self.next.max(block.number + 1);
        Ok(true)
    }

    /// Storage cannot read this place of the journal.
    pub fn add_unreadable(&mut self, layout: &Layout, at: u64) {
        let (first, length) = (self.numbers.start, layout.journal_blocks);
        let behind_first = (at + length - layout.journal(first)) % length;
        self.unreadable.push(first + behind_first);
    }

    /// Of the numbers whose places storage cannot read those that a block may have, when all places were looked at:
    /// none has a number far above the highest one that is there.
    pub fn in_doubt(&self) -> impl Iterator<Item = u64> {
        self.unreadable.iter().copied().filter(|number| *number < self.next + AHEAD)
    }

    /// Which blocks are to be carried out: all of them are there.
    ///
    /// # Errors
    /// One is not there that a later one vouches for.
    pub fn end(self) -> Result<Replay, Damaged> {
        let durable = (self.synced - self.numbers.start) as usize;
        // `synced` of a block is not above its number, and that is within.
        if self.found[..durable].contains(&false) {
            return Err(Damaged("a block of the journal is missing that was durable"));
        }
        let Scan { numbers, found, unreadable, synced, next } = self;
        let next = if unreadable.is_empty() { next } else { numbers.end };
        let found = found.iter().enumerate().filter(|(_, found)| **found);
        let blocks = found.map(|(i, _)| numbers.start + i as u64).collect();
        Ok(Replay { blocks, synced, next })
    }
}

/// The blocks of a journal that a checkpoint lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Their numbers, in their order.
    pub blocks: Vec<u64>,
    synced: u64,
    /// The number of the next block that is written. It is above all that a place may have which could not be read: that
    /// may be read again some day, and would count.
    pub next: u64,
}

impl Replay {
    /// Whether all of a block, and its data, were durable before the end.
    pub fn is_durable(&self, block: u64) -> bool {
        block < self.synced
    }

    /// Whether a record counts that is in the block with this number (store.md 4, 2 and 3). Those before it
    /// were carried out. `fits` looks whether a place has the data, or cannot be read, `has` whether a number has
    /// content now.
    pub fn counts(
        &self,
        block: u64,
        record: &Record,
        fits: impl FnOnce(&NewContent) -> bool,
        has: impl Fn(u64) -> bool,
    ) -> bool {
        match *record {
            Record::New(ref new) => block < self.synced || fits(new),
            Record::Same { number, count, .. } => (number..number + u64::from(count)).all(has),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests;
