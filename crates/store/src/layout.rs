//! What is where in a store (store.md 2).

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

/// The parts of a store, in blocks. Made by [`of`](Layout::of), or [checked](Layout::checked).
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
}

/// A store needs more room than this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a store has between {} MiB and 4 PiB", (MIN_BLOCKS * BLOCK_BYTES as u64) >> 20)]
pub struct BadSize;

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
        Ok(Layout { blocks, journal_blocks, segment_blocks, segments })
    }

    /// These numbers, from a medium: nothing may follow from them before they have been checked.
    ///
    /// # Errors
    /// They are not those of any store.
    pub fn checked(self) -> Result<Layout, Damaged> {
        let Layout { blocks, journal_blocks, segment_blocks, segments } = self;
        let within = |(least, most): (u64, u64), n| (least..=most).contains(&n);
        let sane = within((MIN_BLOCKS, MAX_BLOCKS), blocks)
            && within(JOURNAL_BLOCKS, journal_blocks)
            && within(SEGMENT_BLOCKS, segment_blocks)
            && segment_blocks.is_power_of_two()
            && within((MIN_SEGMENTS, MAX_BLOCKS / segment_blocks), segments)
            && segments % 2 == 0
            // None of these is above 2^41.
            && self.segments_at() + segments * segment_blocks <= blocks - HOME_BLOCKS;
        if sane { Ok(self) } else { Err(Damaged("the sizes in the superblock are no store's")) }
    }

    /// The block of a superblock: of a home, 0 or 1, for a checkpoint.
    pub fn superblock(&self, home: usize, checkpoint: u64) -> u64 {
        let first = if home == 0 { 0 } else { self.blocks - HOME_BLOCKS };
        first + checkpoint % HOME_BLOCKS
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
        HOME_BLOCKS + self.journal_blocks + 2 * segment + home
    }

    fn segments_at(&self) -> u64 {
        HOME_BLOCKS + self.journal_blocks + 2 * self.segments
    }

    /// The first place of a segment.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn first_place(&self, segment: u64) -> u64 {
        assert!(segment < self.segments, "segment {segment} of {}", self.segments);
        self.segments_at() + segment * self.segment_blocks
    }

    /// The segment of a place, and the place's number in it. None: it is in no segment.
    pub fn segment_of(&self, place: u64) -> Option<(u64, u64)> {
        let from = place.checked_sub(self.segments_at())?;
        let segment = from / self.segment_blocks;
        (segment < self.segments).then_some((segment, from % self.segment_blocks))
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
            let layout =
                Layout { blocks, journal_blocks, segment_blocks: 1 << bits, segments };
            if layout.checked().is_ok() {
                is_sound(&layout);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_each_other_or_the_medium_are_refused() {
        for bytes in [64 << 20, 1 << 30, 1 << 40] {
            let good = Layout::of(bytes).unwrap();
            let Layout { blocks, journal_blocks, segment_blocks, segments } = good;
            let bad = [
                Layout { blocks: blocks / 2, ..good },
                Layout { segments: segments + 2, ..good },
                Layout { segments: segments - 1, ..good },
                Layout { segments: 0, ..good },
                Layout { segments: u64::MAX - 1, ..good },
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
}
