//! The places of a store's parts (store.md 2).

use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_disk_base::size::Human;

use super::{BLOCK_BYTES, Damaged};

/// The blocks of a superblock's home: one for even checkpoints, one for odd ones.
const HOME_BLOCKS: u64 = 2;

const JOURNAL_BLOCKS: (u64, u64) = (16, 65_536);
const SEGMENT_BLOCKS: (u64, u64) = (64, 16_384);
const MIN_SEGMENTS: u64 = 64;
/// Data never get two pairs of them (store.md 7, Room): that is less than a hundredth of so many.
const WANTED_SEGMENTS: u64 = 512;
/// 1 MiB. The space pages of smaller ones would be more than a hundredth.
const SMALLEST_WANTED_BLOCKS: u64 = 256;

/// Places have 40 bits.
const MAX_BLOCKS: u64 = 1 << 40;

/// Segments of a band, which is what a store grows by: space pages of so many segments, and then the segments. The last
/// band may have fewer.
const BAND_SEGMENTS: u64 = 256;
const BAND_PAGES: u64 = 2 * BAND_SEGMENTS;
/// The most segments of a store that has grown, if they are smaller than the largest: an opening reads the space pages
/// of all.
const MOST_SMALL_SEGMENTS: u64 = 1 << 18;

/// The parts of a store, in blocks. Made by [`of`](Layout::of) or [`grown`](Layout::grown), or [checked](Layout::checked).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Of the whole store.
    pub blocks: u64,
    /// Of the journal.
    pub journal_blocks: u64,
    /// Of a segment.
    pub segment_blocks: u64,
    /// Segments, an even number: they are used in pairs.
    pub segments: u64,
    /// The value of `blocks` when the store was made. Bands begin behind them.
    pub first_blocks: u64,
    /// The value of `segments` when the store was made.
    pub first_segments: u64,
}

/// A store needs more room than this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a store has between {} MiB and 4 PiB", (MIN_BLOCKS * BLOCK_BYTES as u64) >> 20)]
pub struct BadSize;

/// Why a store cannot get a size. All are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGrowth {
    /// It would be no larger.
    #[error("it has {} now, and a store is never made smaller: {} is no more", Human(*.now), Human(*.wanted))]
    Smaller {
        /// Its size.
        now: u64,
        /// The size that was asked for.
        wanted: u64,
    },
    /// There would be no room for two more segments.
    #[error("that is too little for a part of its own: it needs {} at least ({least} bytes)", Human(*.least))]
    TooLittle {
        /// The least size.
        least: u64,
    },
    /// Its segments would be too many.
    #[error("its segments of {} let it have {} at most", Human(*.segment), Human(*.most))]
    TooLarge {
        /// Of a segment.
        segment: u64,
        /// The largest size.
        most: u64,
    },
}

/// The blocks of the smallest store.
const MIN_BLOCKS: u64 = 4608;

impl Layout {
    /// Of a new store with so many bytes.
    ///
    /// # Errors
    /// They are too few, or too many for places.
    pub fn of(bytes: u64) -> Result<Layout, BadSize> {
        let blocks = bytes / BLOCK_BYTES as u64;
        if !(MIN_BLOCKS..=MAX_BLOCKS).contains(&blocks) {
            return Err(BadSize);
        }
        let journal_blocks = (blocks / 64).clamp(JOURNAL_BLOCKS.0, JOURNAL_BLOCKS.1);
        let room = blocks - 2 * HOME_BLOCKS - journal_blocks;
        // Each has its two space pages besides.
        let segments_of = |segment_blocks: u64| room / (segment_blocks + 2);
        let mut segment_blocks = SEGMENT_BLOCKS.1;
        while segment_blocks > SEGMENT_BLOCKS.0
            && (segments_of(segment_blocks) < MIN_SEGMENTS
                || segment_blocks > SMALLEST_WANTED_BLOCKS
                    && segments_of(segment_blocks) < WANTED_SEGMENTS)
        {
            segment_blocks /= 2;
        }
        let segments = segments_of(segment_blocks) & !1;
        Ok(Layout::new(blocks, journal_blocks, segment_blocks, segments))
    }

    /// Of a store that has not grown.
    pub fn new(blocks: u64, journal_blocks: u64, segment_blocks: u64, segments: u64) -> Layout {
        let (first_blocks, first_segments) = (blocks, segments);
        Layout { blocks, journal_blocks, segment_blocks, segments, first_blocks, first_segments }
    }

    /// Of this store with so many bytes, more than it has.
    ///
    /// # Errors
    /// It cannot have them.
    pub fn grown(self, bytes: u64) -> Result<Layout, NoGrowth> {
        let in_bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        let blocks = bytes / BLOCK_BYTES as u64;
        if blocks <= self.blocks {
            return Err(NoGrowth::Smaller { now: in_bytes(self.blocks), wanted: bytes });
        }
        let most =
            if self.segment_blocks == SEGMENT_BLOCKS.1 { u64::MAX } else { MOST_SMALL_SEGMENTS };
        let most = most.min(MAX_BLOCKS / self.segment_blocks);
        let largest = MAX_BLOCKS.min(self.end_with(most));
        if blocks > largest {
            let segment = in_bytes(self.segment_blocks);
            return Err(NoGrowth::TooLarge { segment, most: in_bytes(largest) });
        }
        // The last block leads to the second home.
        let room = blocks - 1 - self.first_blocks;
        let (bands, rest) = (room / self.band_blocks(), room % self.band_blocks());
        let rest = rest.saturating_sub(BAND_PAGES) / self.segment_blocks;
        let segments = (self.first_segments + bands * BAND_SEGMENTS + rest) & !1;
        if segments <= self.segments {
            return Err(NoGrowth::TooLittle { least: in_bytes(self.end_with(self.segments + 2)) });
        }
        Ok(Layout { blocks, segments, ..self })
    }

    /// The fewest blocks with so many segments, more than at first.
    fn end_with(&self, segments: u64) -> u64 {
        let more = segments.saturating_sub(self.first_segments);
        let (bands, rest) = (more / BAND_SEGMENTS, more % BAND_SEGMENTS);
        let rest = if rest == 0 { 0 } else { BAND_PAGES + rest * self.segment_blocks };
        self.first_blocks + bands * self.band_blocks() + rest + 1
    }

    fn band_blocks(&self) -> u64 {
        BAND_PAGES + BAND_SEGMENTS * self.segment_blocks
    }

    /// Whether the store has grown since it was made.
    pub fn has_grown(&self) -> bool {
        self.blocks != self.first_blocks
    }

    /// Whether this is of the store of another layout, as large or larger.
    pub fn is_of(&self, before: &Layout) -> bool {
        let Layout { blocks, segments, .. } = *before;
        Layout { blocks, segments, ..*self } == *before
            && blocks <= self.blocks
            && segments <= self.segments
    }

    /// These numbers, from a medium: nothing may follow from them before they have been checked.
    ///
    /// # Errors
    /// They are not those of any store.
    pub fn checked(self) -> Result<Layout, Damaged> {
        let Layout { blocks, journal_blocks, segment_blocks, segments, .. } = self;
        let Layout { first_blocks, first_segments, .. } = self;
        let within = |(least, most): (u64, u64), n| (least..=most).contains(&n);
        let sane = within((MIN_BLOCKS, MAX_BLOCKS), blocks)
            && within((MIN_BLOCKS, blocks), first_blocks)
            && within(JOURNAL_BLOCKS, journal_blocks)
            && within(SEGMENT_BLOCKS, segment_blocks)
            && segment_blocks.is_power_of_two()
            && within((MIN_SEGMENTS, MAX_BLOCKS / segment_blocks), segments)
            && within((MIN_SEGMENTS, segments), first_segments)
            && segments % 2 == 0
            && first_segments % 2 == 0
            // None of these is above 2^42.
            && self.segments_at() + first_segments * segment_blocks <= first_blocks - HOME_BLOCKS
            && match self.has_grown() {
                true => segments > first_segments && self.end_with(segments) <= blocks,
                false => segments == first_segments,
            };
        if sane { Ok(self) } else { Err(Damaged("the sizes in the superblock are no store's")) }
    }

    /// The block of a superblock: of a home, 0 or 1, for a checkpoint. A store that grows keeps its homes.
    pub fn superblock(&self, home: usize, checkpoint: u64) -> u64 {
        let first = if home == 0 { 0 } else { self.first_blocks - HOME_BLOCKS };
        first + checkpoint % HOME_BLOCKS
    }

    /// The block of a store that has grown which leads to its second home: its last one.
    pub fn signpost(&self) -> Option<u64> {
        self.has_grown().then(|| self.blocks - 1)
    }

    /// The block that a journal block with this number is in.
    pub fn journal(&self, number: u64) -> u64 {
        HOME_BLOCKS + number % self.journal_blocks
    }

    /// The block of a segment's space page, of its home 0 or 1.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn space_page(&self, segment: u64, home: u64) -> u64 {
        assert!(segment < self.segments && home < 2, "segment {segment} of {}", self.segments);
        match self.band_of(segment) {
            None => HOME_BLOCKS + self.journal_blocks + 2 * segment + home,
            Some((band, at)) => band + 2 * at + home,
        }
    }

    /// How many segments from this one on have their space pages in a row, at most `most`. Both are even, and so is this.
    pub fn pages_in_a_row(&self, segment: u64, most: u64) -> u64 {
        let row = match segment.checked_sub(self.first_segments) {
            None => self.first_segments - segment,
            Some(more) => BAND_SEGMENTS - more % BAND_SEGMENTS,
        };
        row.min(self.segments - segment).min(most)
    }

    /// The first block of a band, and the number in it of a segment. None: it is as old as the store.
    fn band_of(&self, segment: u64) -> Option<(u64, u64)> {
        let more = segment.checked_sub(self.first_segments)?;
        let (band, at) = (more / BAND_SEGMENTS, more % BAND_SEGMENTS);
        Some((self.first_blocks + band * self.band_blocks(), at))
    }

    fn segments_at(&self) -> u64 {
        HOME_BLOCKS + self.journal_blocks + 2 * self.first_segments
    }

    /// The first place of a segment.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn first_place(&self, segment: u64) -> u64 {
        assert!(segment < self.segments, "segment {segment} of {}", self.segments);
        match self.band_of(segment) {
            None => self.segments_at() + segment * self.segment_blocks,
            Some((band, at)) => band + BAND_PAGES + at * self.segment_blocks,
        }
    }

    /// The segment of a place, and the place's number in it. None: it is in no segment.
    pub fn segment_of(&self, place: u64) -> Option<(u64, u64)> {
        if place >= self.first_blocks {
            let from = place - self.first_blocks;
            let (band, at) = (from / self.band_blocks(), from % self.band_blocks());
            let at = at.checked_sub(BAND_PAGES)?;
            let segment = self.first_segments + band * BAND_SEGMENTS + at / self.segment_blocks;
            return (segment < self.segments).then_some((segment, at % self.segment_blocks));
        }
        let from = place.checked_sub(self.segments_at())?;
        let segment = from / self.segment_blocks;
        (segment < self.first_segments).then_some((segment, from % self.segment_blocks))
    }

    /// A place's number among all places of segments.
    pub fn index_of(&self, place: u64) -> Option<u64> {
        let (segment, at) = self.segment_of(place)?;
        Some(segment * self.segment_blocks + at)
    }

    /// Where the copy is of a page of metadata: in the other segment of the pair. None: no page can be
    /// there, as it is in no segment, or in a copy's.
    pub fn copy_of(&self, place: u64) -> Option<u64> {
        let (segment, _) = self.segment_of(place)?;
        (segment % 2 == 0).then_some(place + self.segment_blocks)
    }

    /// All places of segments. Numbers of contents are lower than this.
    pub fn places(&self) -> u64 {
        self.segments * self.segment_blocks
    }

    /// Blocks that no place is in, up to the last segment.
    pub fn beside_places(&self) -> u64 {
        let last = self.first_place(self.segments - 1) + self.segment_blocks;
        last - self.places()
    }
}

/// The layout of a store in use, which grows: readers have it without a lock.
#[derive(Debug)]
pub struct LayoutInUse {
    first: Layout,
    /// A reader may find one of these new and the other old. Only the blocks are for texts.
    blocks: AtomicU64,
    segments: AtomicU64,
}

impl LayoutInUse {
    /// This one, up to now.
    pub fn new(layout: &Layout) -> LayoutInUse {
        let [blocks, segments] = [layout.blocks, layout.segments].map(AtomicU64::new);
        LayoutInUse { first: *layout, blocks, segments }
    }

    /// As it is now. All places that a task finds in memory are in a store of this layout.
    #[inline]
    pub fn now(&self) -> Layout {
        let segments = self.segments.load(Ordering::Acquire);
        Layout { blocks: self.blocks.load(Ordering::Relaxed), segments, ..self.first }
    }

    /// The store has grown, before any of its new places is given.
    pub fn grow(&self, layout: &Layout) {
        self.blocks.store(layout.blocks, Ordering::Relaxed);
        self.segments.store(layout.segments, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Everything in its place and nothing in two.
    fn is_sound(layout: &Layout) {
        assert_eq!(layout.checked(), Ok(*layout));
        let pages = layout.space_page(layout.segments - 1, 1);
        assert_eq!(layout.journal(layout.journal_blocks - 1) + 1, layout.space_page(0, 0));
        assert_eq!(pages + 1, layout.first_place(0));
        let end = layout.first_place(layout.segments - 1) + layout.segment_blocks;
        assert!(end <= layout.superblock(1, 0));
        assert_eq!(layout.superblock(1, 7), layout.blocks - 1);
        assert_eq!(layout.segment_of(end), None);
        assert_eq!(layout.segment_of(pages), None);
    }

    proptest! {
        #[test]
        fn what_is_made_of_any_size_is_sound_and_wastes_little(blocks in MIN_BLOCKS..MAX_BLOCKS) {
            let layout = Layout::of(blocks * BLOCK_BYTES as u64 + 4095).unwrap();
            is_sound(&layout);
            prop_assert_eq!(layout.blocks, blocks);
            // At most two segments of at least 64, and the space pages.
            prop_assert!(layout.places() >= (blocks - layout.journal_blocks) / 33 * 31 - 4);
            let place = layout.first_place(3) + 5;
            prop_assert_eq!(layout.segment_of(place), Some((3, 5)));
            prop_assert_eq!(layout.copy_of(place), None);
            let first = place - layout.segment_blocks;
            prop_assert_eq!(layout.copy_of(first), Some(place));
        }

        #[test]
        fn whatever_passes_the_check_is_sound(
            blocks in prop_oneof![any::<u64>(), 0..1u64 << 20],
            journal_blocks in prop_oneof![any::<u64>(), 0..1u64 << 12],
            bits in 0..64u32,
            segments in prop_oneof![any::<u64>(), 0..1u64 << 10],
        ) {
            let layout = Layout::new(blocks, journal_blocks, 1 << bits, segments);
            if layout.checked().is_ok() {
                is_sound(&layout);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_each_other_or_the_medium_are_refused() {
        for bytes in [64 << 20, 1 << 30, 1 << 40] {
            let good = Layout::of(bytes).unwrap();
            let Layout { blocks, journal_blocks, segment_blocks, segments, .. } = good;
            let bad = [
                Layout { blocks: blocks / 2, ..good },
                Layout { segments: segments + 2, ..good },
                Layout::new(blocks, journal_blocks, segment_blocks, segments + 2),
                Layout::new(blocks, journal_blocks, segment_blocks, segments - 1),
                Layout::new(blocks, journal_blocks, segment_blocks, 0),
                Layout::new(blocks, journal_blocks, segment_blocks, u64::MAX - 1),
                Layout { blocks: blocks + 1, ..good },
                Layout { first_blocks: blocks - 1, ..good },
                Layout { first_segments: segments - 2, ..good },
                Layout { segment_blocks: segment_blocks * 2, ..good },
                Layout { segment_blocks: segment_blocks - 1, ..good },
                Layout { segment_blocks: 0, ..good },
                Layout { journal_blocks: 0, ..good },
                Layout { journal_blocks: journal_blocks + 2 * segment_blocks + 4, ..good },
            ];
            for layout in bad {
                assert!(layout.checked().is_err(), "{layout:?}");
            }
        }
    }

    #[test]
    fn the_smallest_store_is_one_and_a_smaller_one_is_not() {
        let smallest = MIN_BLOCKS * BLOCK_BYTES as u64;
        is_sound(&Layout::of(smallest).unwrap());
        assert_eq!(Layout::of(smallest - 1), Err(BadSize));
        assert_eq!(Layout::of(u64::MAX), Err(BadSize));
        assert_eq!(BadSize.to_string(), "a store has between 18 MiB and 4 PiB");
    }

    #[test]
    fn what_data_never_get_and_space_pages_are_a_hundredth_each_from_a_gibibyte_on() {
        for mib in [1 << 10, 2437, 8 << 10, 40 << 10, 1 << 20] {
            let layout = Layout::of(mib << 20).unwrap();
            assert!(400 * layout.segment_blocks <= layout.blocks, "{mib} MiB: {layout:?}");
            assert!(200 * layout.segments <= layout.blocks, "{mib} MiB: {layout:?}");
        }
    }

    #[test]
    fn a_tebibyte_has_segments_of_64_mib_and_the_longest_journal() {
        let layout = Layout::of(1 << 40).unwrap();
        assert_eq!((layout.segment_blocks, layout.journal_blocks), (16_384, 65_536));
    }

    #[test]
    fn a_store_that_has_grown_has_everything_in_its_place_and_its_first_part_where_it_was() {
        for first in [18 << 20, 64 << 20, 3 << 30, 40 << 30] {
            let made = Layout::of(first).unwrap();
            let mut layout = made;
            for bytes in [first + (first >> 1) + 5000, 3 * first, 20 * first] {
                let before = layout;
                layout = layout.grown(bytes).unwrap();
                assert_eq!(layout.checked(), Ok(layout));
                assert!(layout.is_of(&before) && layout.is_of(&made) && !before.is_of(&layout));
                assert_eq!(layout.superblock(1, 3), made.blocks - 1);
                let mut behind = made.blocks;
                for segment in 0..layout.segments {
                    let place = layout.first_place(segment);
                    let pages = layout.space_page(segment, 0);
                    assert_eq!(layout.space_page(segment, 1), pages + 1);
                    assert_eq!(layout.segment_of(place), Some((segment, 0)));
                    let last = place + layout.segment_blocks - 1;
                    assert_eq!(layout.segment_of(last), Some((segment, layout.segment_blocks - 1)));
                    assert_eq!(layout.segment_of(pages), None);
                    assert_eq!(
                        layout.index_of(last),
                        Some((segment + 1) * layout.segment_blocks - 1)
                    );
                    if segment < before.segments {
                        assert_eq!(
                            (place, pages),
                            (before.first_place(segment), before.space_page(segment, 0))
                        );
                    }
                    if segment >= made.segments {
                        assert!(pages >= made.blocks && place >= behind && place > pages);
                        behind = last + 1;
                    }
                    if segment % 2 == 0 {
                        assert_eq!(layout.copy_of(place), Some(layout.first_place(segment + 1)));
                    }
                }
                assert!(behind <= layout.signpost().unwrap());
                assert_eq!(layout.segment_of(layout.signpost().unwrap()), None);
                // A band's space pages, and less than two segments.
                let left = layout.signpost().unwrap() - behind;
                assert!(left < BAND_PAGES + 2 * layout.segment_blocks, "{left}");
            }
        }
    }

    #[test]
    fn space_pages_of_grown_stores_are_read_in_rows() {
        let made = Layout::of(64 << 20).unwrap();
        let layout = made.grown(1 << 30).unwrap();
        let mut segment = 0;
        while segment < layout.segments {
            let count = layout.pages_in_a_row(segment, 8);
            assert!(count > 0 && count.is_multiple_of(2));
            let last = layout.space_page(segment + count - 1, 1);
            assert_eq!(last, layout.space_page(segment, 0) + 2 * count - 1);
            segment += count;
        }
        assert_eq!(segment, layout.segments);
    }

    #[test]
    fn sizes_that_a_store_cannot_grow_to_are_refused() {
        let made = Layout::of(64 << 20).unwrap();
        assert!(matches!(made.grown(64 << 20), Err(NoGrowth::Smaller { .. })));
        assert!(matches!(made.grown(1 << 20), Err(NoGrowth::Smaller { .. })));
        let Err(NoGrowth::TooLittle { least }) = made.grown((64 << 20) + 4096) else { panic!() };
        assert_eq!(made.grown(least).map(|layout| layout.segments), Ok(made.segments + 2));
        assert!(made.grown(least - 1).is_err());
        let Err(NoGrowth::TooLarge { most, .. }) = made.grown(1 << 52) else { panic!() };
        assert_eq!(made.grown(most).map(|layout| layout.segments), Ok(MOST_SMALL_SEGMENTS));
        let large = Layout::of(1 << 40).unwrap();
        assert!(large.grown(1 << 50).is_ok());
        assert!(matches!(large.grown(1 << 53), Err(NoGrowth::TooLarge { .. })));
        let grown = made.grown(1 << 30).unwrap();
        for bad in [
            Layout { blocks: grown.blocks / 2, ..grown },
            Layout { segments: grown.segments + BAND_SEGMENTS, ..grown },
            Layout { segments: grown.first_segments, ..grown },
            Layout { first_blocks: grown.blocks, ..grown },
            Layout { first_blocks: 1 << 60, ..grown },
            Layout { first_segments: 0, ..grown },
            Layout { first_segments: grown.first_segments + 1, ..grown },
        ] {
            assert!(bad.checked().is_err(), "{bad:?}");
        }
    }
}
