//! The last sector of a file that ends inside it.
//!
//! Storage cannot tell a read that the file is too short for from one that stopped short. So ranges
//! with that sector are read step by step, and nothing else pays for them.

use ferrite_io::arena::Span;

use super::Raw;
use super::medium::Use;
use crate::{Extent, Port, SECTOR_BYTES};

/// The sectors of a medium of this size. A disk has its last one whole: if the file has only a part of it, that was
/// [allowed](crate::OpenOptions::odd_size).
pub(super) fn sectors(bytes: u64, use_: Use) -> u64 {
    match use_ {
        Use::Disk => bytes.div_ceil(SECTOR_BYTES),
        Use::Medium | Use::Store => bytes / SECTOR_BYTES,
    }
}

/// Where the sector begins that a disk of this size has only a part of. `u64::MAX`: it has all of them.
pub(super) fn begins_at(bytes: u64, use_: Use) -> u64 {
    match (use_, bytes % SECTOR_BYTES) {
        (Use::Disk, 1..) => bytes - bytes % SECTOR_BYTES,
        _ => u64::MAX,
    }
}

impl Raw {
    /// The place of the beginning of a range with the last sector.
    #[cold]
    pub(super) fn map_at_tail(&self, offset: u64, len: u64) -> Extent {
        match self.tail.saturating_sub(offset) {
            0 => Extent::Slow { len },
            before => Extent::Data { file: 0, offset, len: before },
        }
    }

    /// How many bytes of a range are in the file. The others read as zeros.
    pub fn bytes_in_file(&self, offset: u64, len: u64) -> u64 {
        if offset + len <= self.tail {
            return len;
        }
        // The file has become longer if the last sector was written.
        self.bytes_now().map_or(len, |bytes| bytes.saturating_sub(offset).min(len))
    }

    /// Fills `buf` from a range with the last sector, with zeros behind the end of the file.
    pub(super) async fn read_with_tail(
        &self,
        port: &Port,
        offset: u64,
        buf: Span,
    ) -> std::io::Result<()> {
        let before = self.tail.saturating_sub(offset).min(buf.len() as u64) as usize;
        port.io.read_exact(port.files[0], offset, buf.slice(0, before)).await?;
        let in_file = self.bytes_in_file(offset, buf.len() as u64) as usize;
        let rest = in_file.saturating_sub(before);
        let memory = port.memory();
        memory.fill(buf.slice(before, buf.len() - before), 0);
        port.io.read_exact(port.files[0], offset + before as u64, buf.slice(before, rest)).await
    }
}
