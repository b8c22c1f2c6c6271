//! Properties of an image besides its header.

use std::io;
use std::sync::atomic::Ordering;

use crate::image::format::ImageFormat;
use crate::qcow2::Qcow2;
use crate::qcow2::format::entry;
use crate::qcow2::maintenance::snapshots::{self, Told};

/// The bytes of tables that are read to find the allocated size: those of a full disk of 2 TiB, with clusters of 64
/// KiB.
const MAX_TABLE_BYTES: u64 = 256 << 20;

impl Qcow2 {
    /// Bytes of the disk that have space in this image, compressed or not; `None`: it has too many tables to read.
    ///
    /// # Errors
    /// Those of reading.
    pub fn allocated_bytes(&self) -> io::Result<Option<u64>> {
        let tables = self.l1.iter().filter(|entry| entry.load(Ordering::Relaxed) != 0);
        if tables.count() as u64 > MAX_TABLE_BYTES >> self.header.cluster_bits {
            return Ok(None);
        }
        let mut clusters = 0;
        for index in 0..self.l1.len() {
            clusters += self.allocated_in(index)?;
        }
        Ok(Some((clusters << self.header.cluster_bits).min(self.bytes())))
    }

    /// The clusters with a place in one table.
    fn allocated_in(&self, index: usize) -> io::Result<u64> {
        let l1 = self.l1[index].load(Ordering::Relaxed);
        let Ok(Some((table, _))) = entry::l2_table(l1, self.header.cluster_bits) else {
            return Ok(0);
        };
        let per_slice = self.cache.slice_entries();
        let first = index as u64 * self.header.l2_entries();
        let bytes = self.medium().read_now(table, self.cluster_bytes() as usize)?;
        let mut found = 0;
        let slice_bytes = per_slice * self.header.form().entry_bytes();
        for (i, on_disk) in bytes.chunks_exact(slice_bytes).enumerate() {
            let slice = first / per_slice as u64 + i as u64;
            let left = self.header.guest_clusters().saturating_sub(first + (i * per_slice) as u64);
            let has_place = |entry: u64| match self.decode(entry) {
                Some(entry::Cluster::Packed(_)) => true,
                other => other.is_some_and(|cluster| cluster.host().is_some()),
            };
            // A dead process's answered writes are in memory only.
            let in_memory = self
                .cache
                .read(slice, |entries| entries.iter().map(|e| e.load(Ordering::Relaxed)).collect());
            let entries: Vec<u64> = in_memory.unwrap_or_else(|| self.words_of(slice, on_disk));
            let count = per_slice.min(left as usize);
            found += entries.into_iter().take(count).filter(|e| has_place(*e)).count();
        }
        Ok(found as u64)
    }

    /// The number of dirty bitmaps that were up to date when it was opened.
    pub fn valid_bitmaps(&self) -> u32 {
        self.header.valid_bitmaps()
    }

    /// The internal snapshots.
    ///
    /// # Errors
    /// Those of reading; the table is invalid.
    pub fn snapshots(&self) -> io::Result<Vec<Told>> {
        snapshots::list(self.medium(), &self.header)
    }
}
