//! Detects writes of another program to an image of version 2 whose backend was killed. Version 2 has no mark that
//! other programs clear. But a program that allocates, frees or repairs clusters changes refcounts.
//!
//! The bait is a cluster with a count and no reference. A repair frees it, even if it has nothing else to do. It is
//! made before the first write, and freed at a clean close; a power cut leaks it.
//!
//! The journal has a checksum of the header and of all refcounts on disk. The sum of a slice of refcounts is computed
//! when it is written, those of all slices when the image is opened. A process that takes the journal over reads them
//! again.
//!
//! Order: slices that are about to be written are [left out](Fingerprint::change) of the journal's sum; the writes;
//! their end; they are [added](Fingerprint::changed) again. A process may die between any two of these. No sync is
//! needed: data given to the kernel outlive the process, and the journal does not outlive the host. The bait is on disk
//! before the journal has it, and is removed from the journal before it is removed from the disk.

use std::io;
use std::ops::Range;

use ferrite_disk_base::Raw;
use ferrite_disk_base::journal::{Journal, TOLD_WORDS, Told};

use crate::qcow2::format::header::{HEAD_BYTES, Header};
use crate::qcow2::format::refcount;
use crate::qcow2::tables::meta::read_whole;

/// The slices of refcounts in the sum, from the first on: half a TiB of the file, with the usual clusters. They are
/// read at each opening for writing.
const MAX_SLICES: u64 = 4096;

/// The fields of the refcount table in the header, which change while the image is open.
const REFTABLE_FIELDS: Range<usize> = 48..60;

/// The writers of refcounts: each writes at most one range at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    /// A commit.
    Commit,
    /// A task that makes new blocks.
    Growth,
}

/// See the module text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::qcow2) struct Fingerprint {
    header: u64,
    /// The sum of each slice; 0: all of its counts are 0.
    sums: Vec<u64>,
    /// The slices that are left out, by their writer.
    left_out: [Range<u64>; 2],
    /// The cluster of the bait; 0: there is none.
    bait: u64,
}

impl Fingerprint {
    /// Reads all slices and the header.
    pub(in crate::qcow2) fn read(
        medium: &Raw,
        header: &Header,
        table: &[u64],
    ) -> io::Result<Fingerprint> {
        let cluster = header.cluster_bytes();
        let mut head = read_whole(medium, 0, cluster.min(HEAD_BYTES) as usize)?;
        head[REFTABLE_FIELDS].fill(0);
        let mut found = Fingerprint { header: sum(0, &head), ..Fingerprint::default() };
        let slice_bytes = cluster.min(4096);
        let per_block = cluster / slice_bytes;
        let blocks = table.iter().take(MAX_SLICES.div_ceil(per_block) as usize);
        for (i, offset) in blocks.enumerate().filter(|(_, offset)| **offset != 0) {
            let block = read_whole(medium, *offset, cluster as usize)?;
            for (j, slice) in block.chunks_exact(slice_bytes as usize).enumerate() {
                found.set(i as u64 * per_block + j as u64, sum_of_counts(slice));
            }
        }
        Ok(found)
    }

    /// Whether the image is as its last process recorded it. Then that process's bait becomes this one's.
    pub(in crate::qcow2) fn accept(
        &mut self,
        medium: &Raw,
        header: &Header,
        table: &[u64],
        told: &Told,
    ) -> io::Result<bool> {
        let bait = told[TOLD_WORDS - 1];
        let count = match bait {
            0 => 1,
            _ => count_of(medium, header, table, bait)?,
        };
        let accepted = count == 1 && self.is_as_told(told);
        if accepted {
            self.bait = bait;
        }
        Ok(accepted)
    }

    fn set(&mut self, slice: u64, sum: u64) {
        if slice < MAX_SLICES {
            let at = slice as usize;
            self.sums.resize(self.sums.len().max(at + 1), 0);
            self.sums[at] = sum;
        }
    }

    /// The sum of all slices but those in some ranges.
    fn sum_without(&self, ranges: &[Range<u64>]) -> u64 {
        let counted = |slice: u64| !ranges.iter().any(|range| range.contains(&slice));
        let sums = self.sums.iter().zip(0..).filter(|(sum, slice)| **sum != 0 && counted(*slice));
        // The slice's number is part of the sum: two slices may have the same counts.
        sums.fold(0, |all: u64, (sum, slice)| all.wrapping_add(mix(mix(1, slice), *sum)))
    }

    fn told(&self) -> Told {
        let [commit, growth] = &self.left_out;
        let sum = self.sum_without(&self.left_out);
        [self.header, sum, commit.start, commit.end, growth.start, growth.end, self.bait]
    }

    /// Whether the image that was read is as a dead process recorded it, except for the bait.
    fn is_as_told(&self, told: &Told) -> bool {
        let [header, sum, from, to, also_from, also_to, _] = *told;
        self.header == header && self.sum_without(&[from..to, also_from..also_to]) == sum
    }

    /// Starts to record the sum in the journal.
    pub(in crate::qcow2) fn tell(&self, journal: &mut Journal) {
        journal.tell(&self.told());
    }

    /// Leaves slices of refcounts out, which are about to be written.
    pub(super) fn change(&mut self, journal: &mut Journal, who: Writer, slices: Range<u64>) {
        if slices.is_empty() {
            return;
        }
        let left_out = &mut self.left_out[who as usize];
        *left_out = match left_out.is_empty() {
            true => slices,
            // An earlier write has failed.
            false => left_out.start.min(slices.start)..left_out.end.max(slices.end),
        };
        self.tell(journal);
    }

    /// Computes the sum of a slice that is left out and being written.
    pub(super) fn write(&mut self, slice: u64, bytes: &[u8]) {
        self.set(slice, sum_of_counts(bytes));
    }

    /// Adds the slices again: all of the range are written.
    pub(super) fn changed(&mut self, journal: &mut Journal, who: Writer, slices: &Range<u64>) {
        let left_out = &mut self.left_out[who as usize];
        // A failed write may have slices outside this range.
        if slices.start <= left_out.start && left_out.end <= slices.end {
            *left_out = 0..0;
        }
        self.tell(journal);
    }

    /// The cluster of the bait; 0: there is none.
    pub(super) fn bait(&self) -> u64 {
        self.bait
    }

    /// Records that there is another bait, or none, on disk.
    pub(super) fn set_bait(&mut self, journal: &mut Journal, bait: u64) {
        self.bait = bait;
        self.tell(journal);
    }
}

/// The refcount of a cluster on disk.
fn count_of(medium: &Raw, header: &Header, table: &[u64], cluster: u64) -> io::Result<u64> {
    let (entries, bits) = (header.block_entries(), header.cluster_bits);
    match usize::try_from(cluster / entries).ok().and_then(|block| table.get(block)) {
        None | Some(0) => Ok(0),
        Some(block) => {
            let block = read_whole(medium, *block, 1 << bits)?;
            Ok(refcount::get(&block, header.refcount_order, (cluster % entries) as usize))
        }
    }
}

/// The sum of a slice of refcounts.
fn sum_of_counts(slice: &[u8]) -> u64 {
    if slice.iter().all(|byte| *byte == 0) { 0 } else { sum(1, slice) | 1 }
}

fn sum(seed: u64, bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|word| {
        word.iter().enumerate().fold(0, |all, (i, byte)| all | u64::from(*byte) << (8 * i))
    });
    words.fold(seed, mix)
}

fn mix(sum: u64, word: u64) -> u64 {
    let sum = (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    sum ^ sum >> 29
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sums: &[u64]) -> Fingerprint {
        Fingerprint { header: 7, sums: sums.into(), ..Fingerprint::default() }
    }

    #[test]
    fn other_counts_are_noticed_wherever_they_are() {
        let told = of(&[1, 2, 3]).told();
        assert!(of(&[1, 2, 3]).is_as_told(&told));
        assert!(!of(&[2, 1, 3]).is_as_told(&told));
        assert!(!of(&[1, 2, 0]).is_as_told(&told));
        assert!(!of(&[1, 2, 3, 4]).is_as_told(&told));
        assert!(!Fingerprint { header: 8, ..of(&[1, 2, 3]) }.is_as_told(&told));
        assert_ne!(sum_of_counts(&[0, 1, 0, 2]), sum_of_counts(&[0, 2, 0, 1]));
        assert_eq!(sum_of_counts(&[0; 512]), 0);
    }

    #[test]
    fn only_what_is_being_written_may_be_anything() {
        let mut found = of(&[1, 2, 3]);
        found.left_out = [1..2, 0..0];
        assert!(of(&[1, 9, 3]).is_as_told(&found.told()));
        assert!(!of(&[1, 2, 9]).is_as_told(&found.told()));
        found.left_out[Writer::Growth as usize] = 2..5;
        assert!(of(&[1, 9, 9, 9]).is_as_told(&found.told()));
        assert!(!of(&[9, 2, 3]).is_as_told(&found.told()));
    }
}
