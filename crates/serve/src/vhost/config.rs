//! The offer: features, and the configuration space of a virtio block device (virtio 1.2, 5.2.4).

use ferrite_disk::{Disk, SECTOR_BYTES};

use super::message::MAX_CONFIG_BYTES;

/// Features of virtio and of its block device, as masks.
pub(super) mod feature {
    const SEG_MAX: u64 = 1 << 2;
    pub(in crate::vhost) const READ_ONLY: u64 = 1 << 5;
    const BLOCK_SIZE: u64 = 1 << 6;
    pub(in crate::vhost) const FLUSH: u64 = 1 << 9;
    const TOPOLOGY: u64 = 1 << 10;
    const MULTI_QUEUE: u64 = 1 << 12;
    pub(in crate::vhost) const DISCARD: u64 = 1 << 13;
    pub(in crate::vhost) const WRITE_ZEROES: u64 = 1 << 14;
    pub(in crate::vhost) const INDIRECT: u64 = 1 << 28;
    pub(in crate::vhost) const EVENT_INDEX: u64 = 1 << 29;
    /// Of vhost-user, and not the guest's.
    pub(in crate::vhost) const PROTOCOL: u64 = 1 << 30;
    const VERSION_1: u64 = 1 << 32;

    /// The features of every disk. A packed ring and a log of dirty pages are not offered.
    pub(super) const ALWAYS: u64 = SEG_MAX
        | BLOCK_SIZE
        | FLUSH
        | TOPOLOGY
        | MULTI_QUEUE
        | INDIRECT
        | EVENT_INDEX
        | PROTOCOL
        | VERSION_1;
}

/// Features of the protocol, as masks.
pub(super) mod protocol {
    const MULTI_QUEUE: u64 = 1 << 0;
    pub(in crate::vhost) const REPLY_ACK: u64 = 1 << 3;
    pub(in crate::vhost) const BACKEND_REQ: u64 = 1 << 5;
    pub(in crate::vhost) const CONFIG: u64 = 1 << 9;
    const INFLIGHT: u64 = 1 << 12;

    pub(in crate::vhost) const ALL: u64 = MULTI_QUEUE | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT;
}

/// Most data descriptors of a request, as QEMU tells guests for a queue of 128.
const MAX_SEGMENTS: u32 = 126;
/// Most ranges of a request to discard. One writes zeros to one range.
pub(super) const MAX_RANGES: usize = 16;
/// The longest range of a discard, in sectors: 4 GiB.
const MAX_DISCARD_SECTORS: u32 = 8 << 20;
/// The longest range of zeros, in sectors: 1 GiB.
const MAX_ZERO_SECTORS: u32 = 2 << 20;

/// A disk, as guests are told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    /// The smallest piece that a discard frees, in sectors. `None`: discards are not offered.
    pub(super) discard_sectors: Option<u32>,
    pub(super) physical_block_bytes: u32,
    pub(super) queues: u16,
}

impl Told {
    pub(super) fn of(disk: &Disk, read_only: bool, queues: u16) -> Told {
        let discard = disk.discard_limits().filter(|_| !disk.keeps_allocated());
        Told {
            sectors: disk.sectors(),
            read_only: read_only || disk.read_only(),
            discard_sectors: discard
                .map(|limits| (limits.granularity_bytes / SECTOR_BYTES as u32).max(1)),
            physical_block_bytes: disk.physical_block_bytes(),
            queues,
        }
    }

    pub(super) fn features(&self) -> u64 {
        let mut features = feature::ALWAYS;
        if self.read_only {
            return features | feature::READ_ONLY;
        }
        features |= feature::WRITE_ZEROES;
        match self.discard_sectors {
            Some(_) => features | feature::DISCARD,
            None => features,
        }
    }

    /// The configuration space.
    pub(super) fn space(&self) -> [u8; MAX_CONFIG_BYTES] {
        let mut space = [0; MAX_CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let blocks = (self.physical_block_bytes / SECTOR_BYTES as u32).max(1);
        put(0, &self.sectors.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &(SECTOR_BYTES as u32).to_le_bytes());
        // The physical block, as a power of two of sectors, and the smallest good transfer.
        put(24, &[blocks.ilog2() as u8]);
        put(26, &u16::try_from(blocks).unwrap_or(u16::MAX).to_le_bytes());
        // A cache that is written back. It cannot be changed.
        put(32, &[1]);
        put(34, &self.queues.to_le_bytes());
        if let Some(sectors) = self.discard_sectors {
            put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(40, &(MAX_RANGES as u32).to_le_bytes());
            put(44, &sectors.to_le_bytes());
        }
        put(48, &MAX_ZERO_SECTORS.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        // Writing zeros may free space.
        put(56, &[1]);
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let told = Told {
            sectors: 9,
            read_only: true,
            discard_sectors: Some(8),
            physical_block_bytes: 4096,
            queues: 4,
        };
        let writes = feature::DISCARD | feature::WRITE_ZEROES;
        assert_eq!(told.features() & (writes | feature::READ_ONLY), feature::READ_ONLY);
        let writable = Told { read_only: false, ..told };
        assert_eq!(writable.features() & (writes | feature::READ_ONLY), writes);
        let space = told.space();
        assert_eq!((space[0], space[24], space[26], space[34]), (9, 3, 8, 4));
    }
}
