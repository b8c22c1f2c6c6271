//! Extended L2 entries: 128 bits, of which the second half has two bits for each of the cluster's 32 subclusters.
//!
//! In memory an entry has the 64 bits that it has in other images, so all but a few places need not know the difference.
//! A cluster that is data as a whole, or zeros as a whole, is as in version 3. Any other has [`MIXED`] set, and its
//! bitmap is kept beside the entry. Such entries come from other programs only: a write makes all of a cluster data.
//! So an entry in memory, and in a record of the journal, says all of it or has a bitmap that does not change.

use super::entry::{BadEntry, COMPRESSED, COPIED, OFFSET, ZERO};
use super::header::be64;

/// Subclusters of a cluster.
const SUBCLUSTERS: u64 = 32;

/// Bit 1 of an entry in memory: the bitmap says what each subcluster is.
pub(crate) const MIXED: u64 = 1 << 1;

/// An entry in memory for one that contradicts itself: compressed data are never written in place.
const CONTRADICTS: u64 = COPIED | COMPRESSED;

/// A bitmap that says of all subclusters that they have data.
const ALL_DATA: u64 = 0xffff_ffff;
/// A bitmap that says of all subclusters that they read as zeros.
const ALL_ZEROS: u64 = ALL_DATA << 32;

/// The kind of a part of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// In the cluster's place.
    Data,
    /// Reads as zeros.
    Zeros,
    /// In the backing file.
    Below,
}

/// The entry in memory for the two halves of one in a table.
///
/// # Errors
/// The halves contradict each other, or themselves.
pub(crate) fn fold(entry: u64, bitmap: u64) -> Result<u64, BadEntry> {
    let bad = |why| Err(BadEntry { entry, why });
    let (data, zeros) = (bitmap & ALL_DATA, bitmap >> 32);
    if entry & COMPRESSED != 0 {
        return match bitmap {
            0 => Ok(entry),
            _ => bad("is compressed, and has a bitmap of subclusters"),
        };
    }
    if entry & !(COPIED | OFFSET) != 0 {
        return bad("has reserved bits set");
    }
    if data & zeros != 0 {
        return bad("has a subcluster that is both data and zeros");
    }
    if data != 0 && entry & OFFSET == 0 {
        return bad("has subclusters with data, but no place");
    }
    Ok(match bitmap {
        ALL_DATA => entry,
        ALL_ZEROS => entry | ZERO,
        0 if entry & OFFSET == 0 => entry,
        _ => entry | MIXED,
    })
}

/// The two halves in a table of an entry in memory, with the bitmap that is kept beside it.
pub(crate) fn unfold(entry: u64, bitmap: u64) -> (u64, u64) {
    match entry {
        packed if packed & COMPRESSED != 0 => (packed, 0),
        mixed if mixed & MIXED != 0 => (mixed & !MIXED, bitmap),
        zero if zero & ZERO != 0 => (zero & !ZERO, ALL_ZEROS),
        data if data & OFFSET != 0 => (data, ALL_DATA),
        other => (other, 0),
    }
}

/// The entries of a table's bytes as they are in memory, and then their bitmaps. An entry that contradicts itself
/// becomes one that cannot be decoded.
pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    let mut words: Vec<u64> = bytes
        .chunks_exact(16)
        .map(|pair| fold(be64(pair, 0), be64(pair, 8)).unwrap_or(CONTRADICTS))
        .collect();
    words.extend(bytes.chunks_exact(16).map(|pair| be64(pair, 8)));
    words
}

/// The kind of a cluster's part at byte `within`, by its bitmap, and for how many bytes from there on.
pub(crate) fn part(bitmap: u64, within: u64, cluster_bits: u32) -> (Part, u64) {
    let size = (1 << cluster_bits) / SUBCLUSTERS;
    let first = within / size;
    let kind = |i: u64| match (bitmap >> i & 1, bitmap >> (i + SUBCLUSTERS) & 1) {
        (1, _) => Part::Data,
        (_, 1) => Part::Zeros,
        _ => Part::Below,
    };
    let same = (first..SUBCLUSTERS).take_while(|i| kind(*i) == kind(first)).count() as u64;
    (kind(first), (first + same) * size - within)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::format::entry::{self, Cluster};
    use proptest::prelude::*;

    const HOST: u64 = 0x5_0000;

    #[test]
    fn whole_clusters_are_as_in_other_images_and_others_are_mixed() {
        let own = COPIED | HOST;
        for (entry, bitmap, word) in [
            (0, 0, 0),
            (0, ALL_ZEROS, ZERO),
            (own, ALL_DATA, own),
            (own, ALL_ZEROS, own | ZERO),
            (own, 0, own | MIXED),
            (own, 1, own | MIXED),
            (HOST, 1 | 2 << 32, HOST | MIXED),
            (0, 2 << 32, MIXED),
            (COMPRESSED | HOST, 0, COMPRESSED | HOST),
        ] {
            assert_eq!(fold(entry, bitmap), Ok(word), "{entry:#x} {bitmap:#x}");
        }
    }

    #[test]
    fn halves_that_contradict_each_other_are_refused() {
        for (entry, bitmap) in [
            (HOST, 1 | 1 << 32),
            (0, 1),
            (0, ALL_DATA),
            (HOST | ZERO, ALL_DATA),
            (HOST | MIXED, ALL_DATA),
            (HOST | 1 << 56, ALL_DATA),
            (COMPRESSED | HOST, 1),
        ] {
            assert!(fold(entry, bitmap).is_err(), "{entry:#x} {bitmap:#x}");
            let bytes = [entry.to_be_bytes(), bitmap.to_be_bytes()].concat();
            let form = entry::Form { version: 3, cluster_bits: 16, extended: true };
            assert!(form.cluster(words(&bytes)[0]).is_err(), "{entry:#x} {bitmap:#x}");
        }
    }

    #[test]
    fn parts_are_runs_of_subclusters_of_one_kind() {
        // Subclusters of 2 KiB: two of data, one of zeros, the rest below.
        let bitmap = 0b011 | 0b100 << 32;
        assert_eq!(part(bitmap, 0, 16), (Part::Data, 4096));
        assert_eq!(part(bitmap, 2049, 16), (Part::Data, 2047));
        assert_eq!(part(bitmap, 4096, 16), (Part::Zeros, 2048));
        assert_eq!(part(bitmap, 6144, 16), (Part::Below, 65536 - 6144));
        assert_eq!(part(1 << 31, 65535, 16), (Part::Data, 1));
    }

    proptest! {
        #[test]
        fn what_is_folded_is_unfolded_to_the_same(entry: u64, bitmap: u64, all in 0usize..4) {
            let bitmap = [bitmap, 0, ALL_DATA, ALL_ZEROS][all];
            for entry in [entry, entry & (COPIED | OFFSET), 0, entry & OFFSET] {
                if let Ok(word) = fold(entry, bitmap) {
                    prop_assert_eq!(unfold(word, bitmap), (entry, bitmap));
                    let form = entry::Form { version: 3, cluster_bits: 16, extended: true };
                    if let Ok(Cluster::Data { .. }) = form.cluster(word) {
                        prop_assert_eq!(bitmap, ALL_DATA);
                    }
                }
            }
        }
    }
}
