//! A disk without a medium.

use std::fmt;

use ferrite_disk_base::size::{self, Human};
use ferrite_disk_base::{DiscardLimits, DiskError, ErrorKind, OpenOptions, SECTOR_BYTES};

const DEFAULT_BYTES: u64 = 1 << 40;
pub(crate) const PHYSICAL_BLOCK_BYTES: u32 = 4096;

/// Reads give zeros, writes are discarded, flush and discard succeed.
#[derive(Debug)]
pub struct Null {
    sectors: u64,
    read_only: bool,
}

impl Null {
    /// A disk of one sector, as a placeholder.
    pub(crate) fn nothing() -> Null {
        Null { sectors: 1, read_only: true }
    }

    /// `size` as in [`size::parse`], empty for 1 TiB.
    pub(crate) fn open(size: &str, options: &OpenOptions) -> Result<Null, DiskError> {
        let refuse = |why: String| {
            let what = format!("cannot open null:{size}");
            let help = "write null: for 1 TiB, or a size in sectors of 512 bytes as in null:16G";
            DiskError::new(ErrorKind::Usage, what, why, help)
        };
        let bytes = match size {
            "" => DEFAULT_BYTES,
            text => size::parse(text).map_err(|e| refuse(e.to_string()))?,
        };
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(refuse(format!("{bytes} bytes is not a positive multiple of 512")));
        }
        Ok(Null { sectors: bytes / SECTOR_BYTES, read_only: options.read_only })
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.sectors
    }

    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    pub(crate) fn discard_limits(&self) -> Option<DiscardLimits> {
        let granularity_bytes = SECTOR_BYTES as u32;
        (!self.read_only).then_some(DiscardLimits { granularity_bytes, alignment_bytes: 0 })
    }
}

impl fmt::Display for Null {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.read_only { "read-only" } else { "read-write" };
        write!(f, "null disk, {}, {mode}, keeps nothing", Human(self.sectors * SECTOR_BYTES))
    }
}
