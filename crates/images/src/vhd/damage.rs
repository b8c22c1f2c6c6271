//! The block table of an image that is read in spite of damage: blocks whose places cannot be right, and the block that
//! the end of a file cuts off. All other blocks are read as usual.

use std::fmt;
use std::io;

use ferrite_disk_base::Raw;

use super::format::SECTOR;
use super::format::batmap::Encrypted;
use super::format::header::Header;
use super::format::layout::{Layout, UNUSED};
use super::meta::{self, MetaError, Sparse};

/// Bytes of the table that are given up together if they cannot be read.
const UNREAD_BYTES: u64 = 4096;

/// The damaged blocks that are described one by one.
const MAX_TOLD: usize = 16;

/// Why a block cannot be read, or not to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Why {
    /// Its place is outside of the image.
    Outside = 1,
    /// Its place is over metadata.
    OverMetadata = 2,
    /// Its place is over another block's.
    Overlap = 3,
    /// Its entry of the table cannot be read.
    Unread = 4,
    /// The image ends within the block; the part before the end is read.
    Cut = 5,
}

impl Why {
    /// The reason with this number; of an unknown one, the entry is not to be used.
    pub(super) fn of(number: u32) -> Why {
        let all = [Why::Outside, Why::OverMetadata, Why::Overlap, Why::Cut];
        all.into_iter().find(|why| *why as u32 == number).unwrap_or(Why::Unread)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::Outside => "the block table has it outside of the image",
            Why::OverMetadata => "the block table has it over metadata",
            Why::Overlap => "the block table has it over another block",
            Why::Unread => "its entry of the block table cannot be read",
            Why::Cut => "the image ends before it",
        })
    }
}

/// The damage of a table.
#[derive(Default)]
pub(super) struct Damage {
    /// By block: 0, or the number of the reason. Empty: no block is damaged.
    why: Vec<u8>,
    /// The block that the end of the image cuts off.
    pub(super) cut: Option<Cut>,
}

/// A block whose beginning is in the image.
pub(super) struct Cut {
    pub(super) block: u32,
    /// Its bitmap.
    pub(super) bits: Vec<u8>,
    /// Sectors of its data that are in the image.
    pub(super) sectors: u32,
}

impl Cut {
    /// Whether a sector is present, and how many from there on are the same, of at most so many; `None`: the image ends
    /// before it.
    pub(super) fn run(&self, first: u32, sectors: u32) -> Option<(bool, u32)> {
        let there = self.sectors.checked_sub(first).filter(|n| *n > 0)?.min(sectors);
        let bit = |i: u32| self.bits.get(i as usize / 8).is_some_and(|b| b << (i % 8) & 0x80 != 0);
        let present = bit(first);
        let same = (first..first + there).take_while(|i| bit(*i) == present).count();
        Some((present, same as u32))
    }
}

impl Damage {
    /// The reason why a block is damaged.
    pub(super) fn of(&self, block: usize) -> Option<Why> {
        let number = self.why.get(block).copied().filter(|number| *number != 0)?;
        Some(Why::of(number.into()))
    }

    fn add(&mut self, block: u32, blocks: u32, why: Why) {
        if self.why.is_empty() {
            self.why = vec![0; blocks as usize];
        }
        if let Some(number) = self.why.get_mut(block as usize) {
            *number = why as u8;
        }
    }

    /// The damaged blocks in words: the first few, and how many more there are.
    pub(super) fn flaws(&self, block_bytes: u64) -> Vec<String> {
        let bad = |(block, _): (usize, &u8)| Some((block, self.of(block)?));
        let mut all = self.why.iter().enumerate().filter_map(bad);
        let line = |(block, why): (usize, Why)| {
            format!("the block at byte {} of the disk: {why}", block as u64 * block_bytes)
        };
        let mut lines: Vec<String> = all.by_ref().take(MAX_TOLD).map(line).collect();
        match all.count() {
            0 => {}
            more => lines.push(format!("and {more} more blocks")),
        }
        lines
    }
}

/// The error of a read of a damaged block.
pub(super) fn unreadable(block: u32, why: Why) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("VHD: block {block}: {why}"))
}

/// Reads everything but bitmaps, as [`meta::read_sparse`] does, in spite of damaged entries of the table.
///
/// # Errors
/// The dynamic header, or the place of the table, makes no sense.
pub(super) fn read_sparse(
    raw: &Raw,
    footer: &super::Footer,
    medium_bytes: u64,
) -> Result<Sparse, MetaError> {
    let (header, batmap, layout) =
        meta::read_header(raw, footer, medium_bytes, Encrypted::Refused)?;
    let mut damage = Damage::default();
    let mut places = Vec::with_capacity(layout.blocks as usize);
    let mut placed = Vec::new();
    read_table(raw, &header, &layout, |entry| {
        let block = places.len() as u32;
        let judged = match entry {
            None => Err(Why::Unread),
            Some(UNUSED) => Ok(()),
            Some(sector) => judge(&layout, sector),
        };
        match (judged, entry) {
            (Ok(()) | Err(Why::Cut), Some(sector)) if sector != UNUSED => {
                placed.push((sector, block));
            }
            (Ok(()), _) => {}
            (Err(why), _) => damage.add(block, layout.blocks, why),
        }
        places.push(entry.unwrap_or(UNUSED));
    });
    for block in overlapping(&mut placed, layout.stride() / SECTOR) {
        damage.add(block, layout.blocks, Why::Overlap);
    }
    let last = placed.last().copied();
    drop(placed);
    if let Some((sector, block)) = last
        && damage.of(block as usize).is_none()
        && judge(&layout, sector) == Err(Why::Cut)
    {
        damage.add(block, layout.blocks, Why::Cut);
        damage.cut = cut(raw, &layout, sector, block);
    }
    let full = match &batmap {
        Some(map) => meta::read_full(raw, footer, map).unwrap_or_default(),
        None => Vec::new(),
    };
    Ok(Sparse { header, layout, batmap, places, full, damage })
}

/// Calls `each` with every entry of the table that the disk uses; `None`: it cannot be read.
fn read_table(raw: &Raw, header: &Header, layout: &Layout, mut each: impl FnMut(Option<u32>)) {
    let end = header.table_offset + u64::from(layout.blocks) * 4;
    let mut at = header.table_offset;
    while at < end {
        let len = (UNREAD_BYTES - at % UNREAD_BYTES).min(end - at);
        match meta::read(raw, at, len as usize) {
            Ok(bytes) => bytes
                .chunks_exact(4)
                .for_each(|e| each(Some(u32::from_be_bytes([e[0], e[1], e[2], e[3]])))),
            Err(_) => (0..len / 4).for_each(|_| each(None)),
        }
        at += len;
    }
}

/// Whether a block can be at `sector`, by itself.
fn judge(layout: &Layout, sector: u32) -> Result<(), Why> {
    let start = u64::from(sector) * SECTOR;
    let end = start + layout.stride();
    if start + layout.bitmap_bytes + SECTOR > layout.medium_bytes {
        return Err(Why::Outside);
    }
    if layout.region_over(start, end).is_some() {
        return Err(Why::OverMetadata);
    }
    if end > layout.medium_bytes { Err(Why::Cut) } else { Ok(()) }
}

/// The blocks that cannot be right, of these with their sectors, which are sorted by that. Of three in a row, where the
/// one in the middle lies over both others and these do not overlap, it is that one. Otherwise nothing tells which of
/// them is wrong, so it is all that overlap.
fn overlapping(placed: &mut [(u32, u32)], stride: u64) -> Vec<u32> {
    placed.sort_unstable();
    let far = |a: (u32, u32), b: (u32, u32)| u64::from(b.0) - u64::from(a.0) >= stride;
    let mut bad = Vec::new();
    for row in placed.chunk_by(|a, b| !far(*a, *b)) {
        match row {
            [_] => {}
            [a, b, c] if far(*a, *c) => bad.push(b.1),
            all => bad.extend(all.iter().map(|(_, block)| *block)),
        }
    }
    bad
}

/// The part that is there of the block that the end of the image cuts off. `None`: its bitmap cannot be read.
fn cut(raw: &Raw, layout: &Layout, sector: u32, block: u32) -> Option<Cut> {
    let start = u64::from(sector) * SECTOR;
    let data = layout.medium_bytes - start - layout.bitmap_bytes;
    let bits = meta::read(raw, start, layout.bitmap_bytes as usize).ok()?;
    Some(Cut { block, bits, sectors: (data / SECTOR) as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_blocks_over_each_other_the_one_that_explains_it_is_bad() {
        let bad = |sectors: &[u32]| {
            let mut placed: Vec<_> = sectors.iter().copied().zip(0..).collect();
            let mut bad = overlapping(&mut placed, 100);
            bad.sort_unstable();
            bad
        };
        assert!(bad(&[0, 100, 200, 300]).is_empty());
        assert_eq!(bad(&[0, 150, 100, 300]), [1, 2]);
        assert_eq!(bad(&[0, 100, 200, 150]), [3]);
        assert_eq!(bad(&[0, 99, 198, 400]), [1]);
        assert_eq!(bad(&[7, 400, 7]), [0, 2]);
        assert_eq!(bad(&[0, 40, 80, 300]), [0, 1, 2]);
        assert_eq!(bad(&[0, 90, 180, 270]), [0, 1, 2, 3]);
    }

    #[test]
    fn a_cut_block_is_there_to_its_last_whole_sector() {
        let cut = Cut { block: 0, bits: vec![0b1110_0111, 0xff], sectors: 10 };
        assert_eq!(cut.run(0, 16), Some((true, 3)));
        assert_eq!(cut.run(3, 16), Some((false, 2)));
        assert_eq!(cut.run(5, 16), Some((true, 5)));
        assert_eq!(cut.run(5, 2), Some((true, 2)));
        assert_eq!(cut.run(10, 6), None);
    }
}
