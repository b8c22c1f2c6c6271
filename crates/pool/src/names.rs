//! Names and numbers.

use std::collections::BTreeSet;

/// A server that may have a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u8);

/// Several servers.
pub type Members = BTreeSet<MemberId>;

/// Counts the owners of a disk. A later owner has a higher one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// A process that has the disk, or had it. Never used twice. The upper half of the number is that of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnerId(pub u64);

impl OwnerId {
    /// The number of its host.
    pub fn host(self) -> u64 {
        self.0 >> 32
    }
}

/// A start of a server's operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootId(pub u64);

/// A connection between an owner and a member. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// An operation that an owner asks a member for. Never used twice by one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// A part of the disk that has a bit in the dirty maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region(pub u64);

/// Consecutive blocks of the disk: `start` and those up to `end`, without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The first block.
    pub start: u64,
    /// The block behind the last one. Larger than `start`.
    pub end: u64,
}

impl Blocks {
    /// Whether they have a block in common.
    pub fn overlap(self, other: Blocks) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The regions that have some of these blocks.
    pub fn regions(self, region_blocks: u64) -> impl Iterator<Item = Region> {
        let last = self.end.saturating_sub(1) / region_blocks;
        (self.start / region_blocks..=last).map(Region)
    }
}

impl Region {
    /// Its blocks. The last region of a disk may have fewer: `disk_blocks` is the number of the disk's.
    pub fn blocks(self, region_blocks: u64, disk_blocks: u64) -> Blocks {
        let start = self.0 * region_blocks;
        Blocks { start, end: (start + region_blocks).min(disk_blocks) }
    }
}
