//! Dirty bitmaps inside, which QEMU makes. This program writes none: a writer makes all of them count for nothing, and a
//! resize keeps those whose tables fit the new size.

use std::io;

use crate::image::format::ImageFormat;
use crate::qcow2::Qcow2;
use crate::qcow2::format::header::{be32, be64};

/// The largest directory that is read.
const MAX_DIRECTORY_BYTES: u64 = 16 << 20;
/// The fixed part of an entry of the directory.
const ENTRY_BYTES: usize = 24;
/// Flag: it was not closed, so nothing can be learned from it.
const IN_USE: u32 = 1;
/// Flag: writers track their writes in it.
const AUTO: u32 = 1 << 1;
/// More than any disk needs: a bit stands for that many bytes.
const MAX_GRANULARITY_BITS: u8 = 31;

/// A dirty bitmap, as the directory describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Its name, without control characters.
    pub name: String,
    /// How many bytes one bit stands for.
    pub granularity_bytes: u64,
    /// Whether it is up to date.
    pub is_valid: bool,
    /// Whether writers are to track their writes in it.
    pub is_enabled: bool,
    /// The entries of its table.
    table_entries: u64,
}

impl Bitmap {
    /// The entry at the beginning of `bytes`, and its length.
    fn decode(bytes: &[u8], are_valid: bool) -> Option<(Bitmap, usize)> {
        let head = bytes.get(..ENTRY_BYTES)?;
        let (flags, bits) = (be32(head, 12), head[17]);
        let (name_bytes, extra) = (be32(head, 16) as usize & 0xFFFF, be32(head, 20) as usize);
        let name_at = ENTRY_BYTES.checked_add(extra)?;
        let name = bytes.get(name_at..)?.get(..name_bytes)?;
        if bits > MAX_GRANULARITY_BITS {
            return None;
        }
        let name = String::from_utf8_lossy(name).replace(char::is_control, "\u{fffd}");
        let bitmap = Bitmap {
            name,
            granularity_bytes: 1 << bits,
            is_valid: are_valid && flags & IN_USE == 0,
            is_enabled: flags & AUTO != 0,
            table_entries: be32(head, 8).into(),
        };
        Some((bitmap, (name_at + name_bytes).next_multiple_of(8)))
    }

    /// Whether its table is one of a disk of this size. QEMU makes a bitmap of whole 8 bytes.
    fn fits(&self, disk_bytes: u64, cluster_bytes: u64) -> bool {
        let bits = disk_bytes.div_ceil(self.granularity_bytes);
        bits.div_ceil(64) * 8 <= self.table_entries * cluster_bytes
            && bits.div_ceil(64) * 8 > self.table_entries.saturating_sub(1) * cluster_bytes
    }
}

impl Qcow2 {
    /// The dirty bitmaps.
    ///
    /// # Errors
    /// Those of reading. `InvalidData`: their directory makes no sense.
    pub fn bitmaps(&self) -> io::Result<Vec<Bitmap>> {
        let invalid = || {
            let why = "the directory of dirty bitmaps makes no sense";
            io::Error::new(io::ErrorKind::InvalidData, why)
        };
        let Some(data) = self.header.bitmaps() else { return Ok(Vec::new()) };
        let (count, bytes, start) = (be32(data, 0), be64(data, 8), be64(data, 16));
        if bytes > MAX_DIRECTORY_BYTES {
            return Err(invalid());
        }
        let directory = self.medium().read_now(start, bytes as usize)?;
        let (mut all, mut at) = (Vec::new(), 0);
        for _ in 0..count {
            let rest = directory.get(at..).unwrap_or_default();
            let are_valid = self.header.valid_bitmaps() > 0;
            let (bitmap, bytes) = Bitmap::decode(rest, are_valid).ok_or_else(invalid)?;
            all.push(bitmap);
            at += bytes;
        }
        Ok(all)
    }

    /// Whether a resize has dirty bitmaps to keep, which are valid and have tables for the new size, too.
    ///
    /// # Errors
    /// Those of [`bitmaps`](Self::bitmaps). `InvalidInput`: a valid one needs another table.
    pub(super) fn keeps_bitmaps(&self, bytes: u64) -> io::Result<bool> {
        if self.header.valid_bitmaps() == 0 {
            return Ok(false);
        }
        let all = self.bitmaps()?;
        let needs_other =
            |bitmap: &&Bitmap| bitmap.is_valid && !bitmap.fits(bytes, self.cluster_bytes());
        let Some(bitmap) = all.iter().find(needs_other) else { return Ok(true) };
        let why = format!(
            "its dirty bitmap {} needs another table for that size: resize it by qemu-img resize, or \
             remove the bitmap first (qemu-img bitmap --remove)",
            bitmap.name
        );
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }
}
