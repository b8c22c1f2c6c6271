//! Entries of L1 and L2 tables, decoded strictly ("Cluster mapping" of qemu's docs/interop/qcow2).

use std::fmt;

use super::extended::{self, MIXED};
use super::header::be64;

/// Bit 63: the refcount is exactly one, so it may be written in place.
pub(crate) const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry.
pub(in crate::qcow2::format) const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of an L2 entry, version 3: reads as zeros whatever else it says.
pub(crate) const ZERO: u64 = 1;
/// Bits 9 to 55.
pub(crate) const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;
/// Host clusters end here: the largest offset that an entry can hold.
pub(crate) const MAX_HOST_BYTES: u64 = 1 << 56;

/// The entry of a cluster at a place that only it refers to.
pub(crate) fn own(host: u64) -> u64 {
    host | COPIED
}

/// An entry that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadEntry {
    pub(in crate::qcow2::format) entry: u64,
    pub(in crate::qcow2::format) why: &'static str,
}

impl fmt::Display for BadEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "entry {:#018x} {}", self.entry, self.why)
    }
}

/// The place of compressed data: from a byte on, in whole 512-byte sectors. The first and the last may belong to other
/// clusters, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes to the end of the last sector.
    pub(crate) len: u64,
}

impl Packed {
    /// The host clusters that it touches, as numbers.
    pub(crate) fn clusters(&self, cluster_bits: u32) -> std::ops::RangeInclusive<u64> {
        let last = self.offset + self.len - 1;
        self.offset >> cluster_bits..=last >> cluster_bits
    }
}

/// A decoded L2 entry. Offsets are bytes in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cluster {
    /// The data are in the backing file.
    Unallocated,
    /// Reads as zeros; it may have a place, whose bytes do not count.
    Zero {
        /// The place, if there is one.
        host: Option<u64>,
        /// Whether the place may be written.
        copied: bool,
    },
    /// Ordinary data.
    Data {
        /// The place.
        host: u64,
        /// Whether the place may be written.
        copied: bool,
    },
    /// Compressed data; never written in place.
    Packed(Packed),
    /// Its subclusters differ, as the bitmap beside the entry says.
    Mixed {
        /// The place, if there is one.
        host: Option<u64>,
        /// Whether the place may be written.
        copied: bool,
    },
}

impl Cluster {
    /// The place of the cluster, if it has one.
    pub(crate) fn host(&self) -> Option<u64> {
        match *self {
            Cluster::Data { host, .. } => Some(host),
            Cluster::Zero { host, .. } | Cluster::Mixed { host, .. } => host,
            Cluster::Unallocated | Cluster::Packed(_) => None,
        }
    }
}

/// Decodes an L2 entry of ordinary data, as almost all are; `None`: it may be anything else.
#[inline]
pub(crate) fn data(entry: u64, cluster_bits: u32) -> Option<Cluster> {
    let host = entry & !COPIED;
    let place = OFFSET & (u64::MAX << cluster_bits);
    let copied = entry & COPIED != 0;
    (host != 0 && host & !place == 0).then_some(Cluster::Data { host, copied })
}

/// The properties that the form of an image's L2 entries depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// The version of the format.
    pub(crate) version: u32,
    /// A cluster has `1 << cluster_bits` bytes.
    pub(crate) cluster_bits: u32,
    /// Entries have a second half, with a bitmap of subclusters.
    pub(crate) extended: bool,
}

impl Form {
    /// Bytes of an entry in a table.
    pub(crate) fn entry_bytes(self) -> usize {
        if self.extended { 16 } else { 8 }
    }

    /// The entries of a table's bytes as they are in memory, and then, of extended ones, their bitmaps.
    pub(crate) fn words(self, bytes: &[u8]) -> Vec<u64> {
        match self.extended {
            true => extended::words(bytes),
            false => bytes.chunks_exact(8).map(|entry| be64(entry, 0)).collect(),
        }
    }

    /// The bytes in a table of entries in memory, with the bitmaps of extended ones.
    pub(crate) fn bytes(self, entries: &[u64], bitmaps: &[u64]) -> Vec<u8> {
        if !self.extended {
            return entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        }
        let halves = entries.iter().zip(bitmaps).map(|(e, b)| extended::unfold(*e, *b));
        halves.flat_map(|(entry, bitmap)| [entry, bitmap]).flat_map(u64::to_be_bytes).collect()
    }

    /// Decodes an L2 entry of a table.
    pub(crate) fn cluster_of(self, bytes: &[u8]) -> Result<Cluster, BadEntry> {
        match self.extended {
            true => self.cluster(extended::fold(be64(bytes, 0), be64(bytes, 8))?),
            false => self.cluster(be64(bytes, 0)),
        }
    }

    /// Decodes an L2 entry in memory.
    pub(crate) fn cluster(self, entry: u64) -> Result<Cluster, BadEntry> {
        let bad = |why| Err(BadEntry { entry, why });
        if entry == 0 {
            return Ok(Cluster::Unallocated);
        }
        let copied = entry & COPIED != 0;
        if entry & COMPRESSED != 0 {
            if copied {
                return bad("says both compressed and writable in place, or its bitmap is invalid");
            }
            return packed(entry, self.cluster_bits);
        }
        let mixed = if self.extended { MIXED } else { 0 };
        if entry & !(COPIED | OFFSET | ZERO | mixed) != 0 {
            return bad("has reserved bits set");
        }
        let host = entry & OFFSET;
        if host & ((1 << self.cluster_bits) - 1) != 0 {
            return bad("points into the middle of a cluster");
        }
        if copied && host == 0 {
            return bad("says writable in place, but has no place");
        }
        let place = (host != 0).then_some(host);
        match (entry & ZERO != 0, entry & mixed != 0) {
            (true, _) if self.version < 3 => {
                bad("has the zero flag, which version 2 does not have")
            }
            (_, true) => Ok(Cluster::Mixed { host: place, copied }),
            (true, _) => Ok(Cluster::Zero { host: place, copied }),
            (false, _) => Ok(Cluster::Data { host, copied }),
        }
    }
}

fn packed(entry: u64, cluster_bits: u32) -> Result<Cluster, BadEntry> {
    let x = 62 - (cluster_bits - 8);
    let offset = entry & ((1 << x) - 1);
    let more_sectors = (entry & (COMPRESSED - 1)) >> x;
    let end = (offset & !511) + (more_sectors + 1) * 512;
    if end > MAX_HOST_BYTES {
        return Err(BadEntry { entry, why: "points to compressed data behind 64 PiB" });
    }
    if offset < 1 << cluster_bits {
        return Err(BadEntry { entry, why: "points to compressed data inside of the header" });
    }
    Ok(Cluster::Packed(Packed { offset, len: end - offset }))
}

/// The place of the L2 table of an L1 entry, and whether it may be written; `None`: there is no table.
pub(crate) fn l2_table(entry: u64, cluster_bits: u32) -> Result<Option<(u64, bool)>, BadEntry> {
    let bad = |why| Err(BadEntry { entry, why });
    let (host, copied) = (entry & OFFSET, entry & COPIED != 0);
    if entry & !(COPIED | OFFSET) != 0 {
        return bad("has reserved bits set");
    }
    if host & ((1 << cluster_bits) - 1) != 0 {
        return bad("points into the middle of a cluster");
    }
    match host {
        0 if copied => bad("says writable in place, but has no place"),
        0 => Ok(None),
        _ => Ok(Some((host, copied))),
    }
}

/// Why the table of an L1 entry is not read, where damage is tolerated. It is in memory in place of the entry, as bits
/// that no valid entry has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum NoTable {
    /// The entry cannot be decoded.
    BadEntry = 1,
    /// It is outside of the file.
    Outside = 3,
    /// It is over the header, or a table that the header names.
    Over = 5,
    /// Another entry names it, too.
    Shared = 7,
}

impl NoTable {
    /// The reason that is in place of an entry.
    pub(crate) fn of(entry: u64) -> Option<NoTable> {
        let all = [NoTable::BadEntry, NoTable::Outside, NoTable::Over, NoTable::Shared];
        all.into_iter().find(|why| *why as u64 == entry)
    }
}

impl fmt::Display for NoTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoTable::BadEntry => "its L1 entry makes no sense",
            NoTable::Outside => "its L2 table is outside of the file",
            NoTable::Over => "its L2 table is over another table",
            NoTable::Shared => "its L2 table is that of another part of the disk, too",
        })
    }
}

/// In memory in place of an L2 entry that refers to a table, where damage is tolerated: no valid entry has both bits.
pub(crate) const TO_A_TABLE: u64 = COPIED | COMPRESSED;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cluster(entry: u64, version: u32, cluster_bits: u32) -> Result<Cluster, BadEntry> {
        Form { version, cluster_bits, extended: false }.cluster(entry)
    }

    #[test]
    fn each_kind_of_cluster_is_told_from_the_others() {
        let host = 0x5_0000;
        for (entry, kind) in [
            (0, Cluster::Unallocated),
            (1, Cluster::Zero { host: None, copied: false }),
            (host | 1, Cluster::Zero { host: Some(host), copied: false }),
            (COPIED | host | 1, Cluster::Zero { host: Some(host), copied: true }),
            (host, Cluster::Data { host, copied: false }),
            (COPIED | host, Cluster::Data { host, copied: true }),
        ] {
            assert_eq!(cluster(entry, 3, 16), Ok(kind), "{entry:#x}");
        }
    }

    #[test]
    fn what_is_against_the_format_is_refused() {
        for entry in
            [2, 1 << 56, 1 << 61, 0x5_0200, COPIED, COPIED | 1, COPIED | COMPRESSED | 0x50000]
        {
            assert!(cluster(entry, 3, 16).is_err(), "{entry:#x}");
        }
        assert!(cluster(1, 2, 16).is_err());
        for entry in [1, 2, 1 << 56, 1 << 62, 0x200, COPIED] {
            assert!(l2_table(entry, 16).is_err(), "{entry:#x}");
        }
    }

    #[test]
    fn a_compressed_descriptor_counts_whole_sectors_from_its_first() {
        // 64 KiB clusters: the offset has 54 bits, the number of further sectors 8.
        let entry = COMPRESSED | 3 << 54 | 0x1_2345;
        let packed = Packed { offset: 0x1_2345, len: 0x1_2200 + 4 * 512 - 0x1_2345 };
        assert_eq!(cluster(entry, 3, 16), Ok(Cluster::Packed(packed)));
        assert_eq!(packed.clusters(16), 1..=1);
        assert_eq!(Packed { offset: 0x1_FFFF, len: 2 }.clusters(16), 1..=2);
        // Small clusters: offset bits beyond 55 must be 0.
        assert!(cluster(COMPRESSED | 1 << 57, 3, 9).is_err());
    }

    proptest! {
        #[test]
        fn any_entry_is_decoded_or_refused(entry: u64, bits in 9u32..=21, version in 2u32..=3) {
            let _ = l2_table(entry, bits);
            for entry in [entry, entry & (COPIED | OFFSET) & (u64::MAX << bits)] {
                let all = cluster(entry, version, bits).ok();
                let is_data = all.filter(|c| matches!(c, Cluster::Data { .. }));
                prop_assert_eq!(data(entry, bits), is_data);
            }
            if let Ok(found) = cluster(entry, version, bits) {
                if let Some(host) = found.host() {
                    prop_assert!(host % (1 << bits) == 0 && host < MAX_HOST_BYTES && host > 0);
                }
                if let Cluster::Packed(p) = found {
                    prop_assert!(p.len > 0 && p.len <= 2 << bits);
                    prop_assert!((p.offset + p.len) % 512 == 0);
                }
            }
        }
    }
}
