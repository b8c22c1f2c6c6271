//! The places of all parts of a dynamic image. None is outside of the medium or overlaps another.

use super::batmap::Batmap;
use super::footer::{self, Footer};
use super::header::{self, Header};
use super::{Malformed, SECTOR, whole_sectors};

/// A table's entry for a block that has no place.
pub(crate) const UNUSED: u32 = u32::MAX;

/// A part of the file that is metadata and does not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) what: &'static str,
}

/// A block that has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) sector: u32,
    pub(crate) block: u32,
}

impl Placed {
    /// Byte offset of its bitmap.
    pub(crate) fn start(&self) -> u64 {
        u64::from(self.sector) * SECTOR
    }
}

/// The places of a dynamic or differencing image's parts.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Ordered by place, and disjoint.
    regions: Vec<Region>,
    /// Texts of locators that are not used any more. Nothing else is placed there, and no place of them is a reason to
    /// refuse the image.
    old_texts: Vec<(u64, u64)>,
    /// Blocks of the disk.
    pub(crate) blocks: u32,
    /// Bytes of a block's data.
    pub(crate) block_bytes: u64,
    /// Bytes of a block's bitmap, which precedes the data: whole sectors.
    pub(crate) bitmap_bytes: u64,
    /// Bytes of the file or device.
    pub(crate) medium_bytes: u64,
    /// The end of the block table.
    table_end: u64,
    has_batmap: bool,
}

impl Layout {
    /// Computes the layout.
    ///
    /// # Errors
    /// Metadata outside of the medium, or over other metadata.
    pub(crate) fn new(
        footer: &Footer,
        header: &Header,
        batmap: Option<&Batmap>,
        medium_bytes: u64,
    ) -> Result<Layout, Malformed> {
        let mut regions = Vec::with_capacity(16);
        let mut add = |start: u64, len: u64, what| match start.checked_add(len) {
            Some(end) if end <= medium_bytes => {
                regions.push(Region { start, end, what });
                Ok(())
            }
            _ => {
                let why = format!("{what} of {len} bytes, outside of the image's {medium_bytes}");
                Err(Malformed::new(start, why))
            }
        };
        add(0, footer::BYTES as u64, "the footer's copy")?;
        add(footer.data_offset, header::BYTES as u64, "the dynamic header")?;
        let table_bytes = whole_sectors(u64::from(header.max_entries) * 4);
        add(header.table_offset, table_bytes, "the block table")?;
        if let (Some(batmap), Some(at)) = (batmap, Batmap::header_offset(footer, header)) {
            add(at, SECTOR, "the batmap's header")?;
            add(batmap.offset, batmap.len, "the batmap")?;
        }
        let mut old_texts = Vec::new();
        for locator in header.locators.iter().filter(|l| l.is_used() && l.room_bytes() > 0) {
            if locator.reads() {
                add(locator.offset, locator.room_bytes(), "a parent locator")?;
            } else {
                let (start, end) =
                    (locator.offset, locator.offset.checked_add(locator.room_bytes()));
                old_texts.extend(end.filter(|end| *end <= medium_bytes).map(|end| (start, end)));
            }
        }
        regions.sort_by_key(|r| r.start);
        if let Some(pair) = regions.windows(2).find(|pair| pair[0].end > pair[1].start) {
            let why = format!("{} lies over {}", pair[1].what, pair[0].what);
            return Err(Malformed::new(pair[1].start, why));
        }
        let block_bytes = u64::from(header.block_bytes);
        // Header::parse has checked that this is at most MAX_BLOCKS.
        let blocks = footer.current_size.div_ceil(block_bytes) as u32;
        let bitmap_bytes = whole_sectors(block_bytes.div_ceil(SECTOR * 8));
        Ok(Layout {
            regions,
            old_texts,
            blocks,
            block_bytes,
            bitmap_bytes,
            medium_bytes,
            table_end: header.table_offset + table_bytes,
            has_batmap: batmap.is_some(),
        })
    }

    /// Whether QEMU would place the next new block over the batmap, which it does not know: after the table it sees the
    /// end of the last of `blocks`, given by their sectors, or nothing. It assumes zeros there, so in this case all
    /// bits of the batmap are clear, and the footer has the place that [`footer_at`](Self::footer_at) gives.
    pub(crate) fn qemu_overwrites_batmap(&self, blocks: impl Iterator<Item = u32>) -> bool {
        self.has_batmap && !{ blocks }.any(|sector| u64::from(sector) * SECTOR >= self.table_end)
    }

    /// The place of a file's footer if its used parts end at `end`. If QEMU overwrites the batmap: after the block that
    /// it would place there, where it writes its own footer.
    pub(crate) fn footer_at(&self, end: u64, qemu_overwrites_batmap: bool) -> u64 {
        match qemu_overwrites_batmap {
            true => end.max(self.table_end + self.stride()),
            false => end,
        }
    }

    /// Bytes that a block takes in the file, bitmap and data.
    pub(crate) fn stride(&self) -> u64 {
        self.bitmap_bytes + self.block_bytes
    }

    /// First and last byte (exclusive) of metadata that does not move.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (u64, u64)> {
        self.regions.iter().map(|r| (r.start, r.end)).chain(self.old_texts.iter().copied())
    }

    /// The end of metadata that does not move.
    pub(crate) fn metadata_end(&self) -> u64 {
        self.regions().map(|(_, end)| end).max().unwrap_or(0)
    }

    /// The end of all used parts, with blocks at these places, and the unused parts before it.
    pub(crate) fn unused(&self, placed: &[Placed]) -> (u64, Vec<(u64, u64)>) {
        let blocks = placed.iter().map(|p| (p.start(), p.start() + self.stride()));
        let mut used: Vec<(u64, u64)> = self.regions().chain(blocks).collect();
        used.sort_unstable();
        let mut end = 0;
        let mut gaps = Vec::new();
        for (from, to) in used {
            if from > end {
                gaps.push((end, from));
            }
            end = end.max(to);
        }
        (end, gaps)
    }

    /// The first place after the footer's copy where `len` bytes overlap no metadata, whatever blocks are there.
    pub(crate) fn place_for_metadata(&self, len: u64) -> u64 {
        let mut regions: Vec<(u64, u64)> = self.regions().collect();
        regions.sort_unstable();
        let mut at = SECTOR;
        for (start, end) in regions {
            if start < at + len && at < end {
                at = whole_sectors(end);
            }
        }
        at
    }

    /// Whether a block can be at `sector`: inside the medium, and over no metadata. `entry_at` is the byte offset of
    /// its table entry.
    pub(crate) fn check_place(&self, sector: u32, entry_at: u64) -> Result<(), Malformed> {
        let start = u64::from(sector) * SECTOR;
        let end = start + self.stride();
        if end > self.medium_bytes {
            let why = format!(
                "block table: a block at byte {start}, which would end outside of the image's {} \
                 bytes",
                self.medium_bytes
            );
            return Err(Malformed::new(entry_at, why));
        }
        if start >= self.metadata_end() {
            return Ok(());
        }
        match self.region_over(start, end) {
            None => Ok(()),
            Some(what) => {
                let why = format!("block table: a block at byte {start}, over {what}");
                Err(Malformed::new(entry_at, why))
            }
        }
    }

    /// The name of metadata in a range of the medium.
    pub(crate) fn region_over(&self, start: u64, end: u64) -> Option<&'static str> {
        self.regions.iter().find(|r| r.start < end && start < r.end).map(|r| r.what)
    }

    /// The place of the first block, of all at `sectors`, that overlaps another. Sorts them.
    pub(crate) fn find_overlap(&self, sectors: &mut [u32]) -> Option<(u32, u32)> {
        sectors.sort_unstable();
        let stride = self.stride() / SECTOR;
        let pair = sectors.windows(2).find(|p| u64::from(p[1]) - u64::from(p[0]) < stride)?;
        Some((pair[0], pair[1]))
    }

    /// The place for a block at or after byte `from`. Its data begin at a multiple of 4 KiB, so that no guest's page is
    /// in two of the medium's blocks, and its bitmap is just before. `None`: the table cannot express the place.
    pub(crate) fn aligned_place(&self, from: u64) -> Option<u32> {
        let data = (from + self.bitmap_bytes).next_multiple_of(4096);
        let sector = (data - self.bitmap_bytes) / SECTOR;
        u32::try_from(sector).ok().filter(|sector| *sector != UNUSED)
    }
}

#[cfg(test)]
mod tests {
    use super::super::footer::{Creator, Kind};
    use super::super::locator::Locator;
    use super::super::{Stamp, Uuid};
    use super::*;

    fn image() -> (Footer, Header) {
        let stamp = Stamp { uuid: Uuid([1; 16]), unix_s: 0 };
        let footer = Footer::new(Kind::Differencing, 9 << 20, Creator::LIBVHD, &stamp);
        (footer, Header::new(1536, 5, 2 << 20))
    }

    const FILE: u64 = 64 << 20;

    #[test]
    fn blocks_may_be_anywhere_but_outside_and_over_metadata() {
        let (footer, mut header) = image();
        header.table_offset = 8 << 20;
        let layout = Layout::new(&footer, &header, None, FILE).unwrap();
        assert_eq!((layout.blocks, layout.bitmap_bytes), (5, 512));
        let sector = |byte: u64| (byte / 512) as u32;
        assert!(layout.check_place(3, 0).is_ok());
        assert!(layout.check_place(sector(8 << 20) + 1, 0).is_ok());
        assert!(layout.check_place(sector(FILE - 512 - (2 << 20)), 0).is_ok());
        for (at, why) in [
            (0, "over the footer's copy"),
            (2, "over the dynamic header"),
            (sector(7 << 20), "over the block table"),
            (sector(FILE - (2 << 20)), "outside of the image"),
            (UNUSED - 1, "outside of the image"),
        ] {
            let error = layout.check_place(at, 77).unwrap_err();
            assert!(error.offset == 77 && error.why.contains(why), "{error}");
        }
    }

    #[test]
    fn blocks_over_each_other_are_found() {
        let (footer, header) = image();
        let layout = Layout::new(&footer, &header, None, FILE).unwrap();
        assert_eq!(layout.find_overlap(&mut [9000, 10, 4107]), None);
        assert_eq!(layout.find_overlap(&mut [9000, 10, 4106]), Some((10, 4106)));
        assert_eq!(layout.find_overlap(&mut [7, 9000, 7]), Some((7, 7)));
    }

    #[test]
    fn metadata_outside_or_over_other_metadata_is_refused() {
        let (footer, header) = image();
        let refused = |footer: &Footer, header: &Header| {
            Layout::new(footer, header, None, FILE).unwrap_err().why
        };
        let mut far = footer.clone();
        far.data_offset = u64::MAX - 511;
        assert!(refused(&far, &header).contains("outside"));
        let mut over = header.clone();
        over.table_offset = 1024;
        assert!(refused(&footer, &over).contains("the block table lies over the dynamic header"));
        let mut huge = header.clone();
        huge.max_entries = u32::MAX;
        assert!(refused(&footer, &huge).contains("outside"));
        let mut locator = header.clone();
        locator.locators[3] = Locator { code: *b"W2ru", space: 1, len: 4, offset: 1536 };
        assert!(refused(&footer, &locator).contains("a parent locator"));
    }

    #[test]
    fn the_text_of_a_locator_that_is_not_used_any_more_is_kept_and_refuses_nothing() {
        let (footer, mut header) = image();
        let text = |offset| Locator { code: *b"Wi2k", space: 512, len: 9, offset };
        header.locators[0] = text(1 << 20);
        header.locators[1] = text(1536);
        header.locators[2] = text(u64::MAX - 3);
        let layout = Layout::new(&footer, &header, None, FILE).unwrap();
        assert!(layout.regions().any(|region| region == (1 << 20, (1 << 20) + 512)));
        assert_eq!(layout.metadata_end(), (1 << 20) + 512);
        assert!(layout.check_place(2048, 0).is_ok());
    }

    #[test]
    fn metadata_is_put_into_the_first_gap_that_is_large_enough() {
        let (footer, mut header) = image();
        header.table_offset = 8192;
        let layout = Layout::new(&footer, &header, None, FILE).unwrap();
        assert_eq!(layout.place_for_metadata(512), 1536);
        assert_eq!(layout.place_for_metadata(8192 - 1536), 1536);
        assert_eq!(layout.place_for_metadata(8192 - 1536 + 512), 8192 + 512);
        let block = Placed { sector: 64, block: 0 };
        let (end, gaps) = layout.unused(&[block]);
        assert_eq!(end, 64 * 512 + layout.stride());
        assert_eq!(gaps, [(1536, 8192), (8704, 64 * 512)]);
    }

    #[test]
    fn data_of_new_blocks_begins_at_4_kib() {
        let (footer, header) = image();
        let layout = Layout::new(&footer, &header, None, FILE).unwrap();
        assert_eq!(layout.aligned_place(4096), Some(15));
        assert_eq!(layout.aligned_place(4096 - 512), Some(7));
        assert_eq!(layout.aligned_place(u64::from(u32::MAX) * 512), None);
    }
}
