//! Refcounts in memory: slices of refcount blocks, under the lock of the image's state.

use std::collections::HashMap;

use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount;

/// Clean slices that are kept.
const KEPT_SLICES: usize = 64;

struct Slice {
    bytes: Box<[u8]>,
    /// It differs from the disk.
    dirty: bool,
    /// A commit is writing it: the content on disk is not known.
    writing: bool,
}

/// See the module text. Clusters and slices are numbers from the start of the file.
pub(in crate::qcow2) struct Refs {
    order: u32,
    block_entries: u64,
    slice_bytes: usize,
    /// The refcount table: byte offsets of blocks, 0: none yet.
    table: Vec<u64>,
    slices: HashMap<u64, Slice>,
    dirty: usize,
}

impl Refs {
    pub(in crate::qcow2) fn new(header: &Header, table: Vec<u64>) -> Refs {
        Refs {
            order: header.refcount_order,
            block_entries: header.block_entries(),
            slice_bytes: header.cluster_bytes().min(4096) as usize,
            table,
            slices: HashMap::new(),
            dirty: 0,
        }
    }

    pub(in crate::qcow2) fn table(&self) -> &[u64] {
        &self.table
    }

    pub(in crate::qcow2) fn table_mut(&mut self) -> &mut Vec<u64> {
        &mut self.table
    }

    pub(in crate::qcow2) fn slice_bytes(&self) -> usize {
        self.slice_bytes
    }

    pub(in crate::qcow2) fn slice_entries(&self) -> u64 {
        (self.slice_bytes as u64 * 8) >> self.order
    }

    pub(in crate::qcow2) fn block_entries(&self) -> u64 {
        self.block_entries
    }

    pub(in crate::qcow2) fn slice_of(&self, cluster: u64) -> u64 {
        cluster / self.slice_entries()
    }

    /// Byte offset of a slice in the file; `None`: there is no block, and all its counts are 0.
    pub(in crate::qcow2) fn offset(&self, slice: u64) -> Option<u64> {
        let per_block = self.block_entries / self.slice_entries();
        let block = usize::try_from(slice / per_block).ok()?;
        let offset = *self.table.get(block).filter(|offset| **offset != 0)?;
        Some(offset + slice % per_block * self.slice_bytes as u64)
    }

    pub(in crate::qcow2) fn holds(&self, slice: u64) -> bool {
        self.slices.contains_key(&slice)
    }

    /// The count of a cluster; none: its slice is not in memory.
    pub(in crate::qcow2) fn get(&self, cluster: u64) -> Option<u64> {
        let slice = self.slices.get(&self.slice_of(cluster))?;
        let i = (cluster % self.slice_entries()) as usize;
        Some(refcount::get(&slice.bytes, self.order, i))
    }

    /// Sets a count.
    ///
    /// # Panics
    /// If its slice is not in memory.
    pub(in crate::qcow2) fn set(&mut self, cluster: u64, count: u64) {
        let i = (cluster % self.slice_entries()) as usize;
        let number = self.slice_of(cluster);
        let Some(slice) = self.slices.get_mut(&number) else {
            unreachable!("the refcount of cluster {cluster} is not in memory")
        };
        refcount::set(&mut slice.bytes, self.order, i, count);
        self.dirty += usize::from(!std::mem::replace(&mut slice.dirty, true));
    }

    /// Puts a slice from the disk in; one that is here already stays as it is. Clean slices make room, but for those in
    /// `keep`.
    pub(in crate::qcow2) fn install(&mut self, slice: u64, bytes: Box<[u8]>, keep: &[u64]) {
        if self.slices.len() >= KEPT_SLICES {
            self.slices.retain(|n, s| s.dirty || s.writing || keep.contains(n));
        }
        self.slices.entry(slice).or_insert(Slice { bytes, dirty: false, writing: false });
    }

    /// The number of slices that differ from the disk.
    pub(in crate::qcow2) fn dirty(&self) -> usize {
        self.dirty
    }

    /// Takes the dirty slices for writing: number and offset of each. [`end_writing`](Self::end_writing) gets the
    /// result.
    pub(in crate::qcow2) fn begin_writing(&mut self) -> Vec<(u64, u64)> {
        let dirty: Vec<u64> =
            self.slices.iter().filter(|(_, s)| s.dirty).map(|(n, _)| *n).collect();
        let mut out = Vec::with_capacity(dirty.len());
        for n in dirty {
            let Some(offset) = self.offset(n) else { continue };
            if let Some(slice) = self.slices.get_mut(&n) {
                (slice.dirty, slice.writing) = (false, true);
                self.dirty -= 1;
                out.push((n, offset));
            }
        }
        out.sort_unstable_by_key(|(_, offset)| *offset);
        out
    }

    /// The present bytes of a slice.
    pub(in crate::qcow2) fn bytes(&self, slice: u64) -> &[u8] {
        self.slices.get(&slice).map_or(&[], |s| &s.bytes)
    }

    /// Ends the writing that [`begin_writing`](Self::begin_writing) began.
    pub(in crate::qcow2) fn end_writing(&mut self, slices: &[(u64, u64)], durable: bool) {
        for (n, _) in slices {
            if let Some(slice) = self.slices.get_mut(n) {
                slice.writing = false;
                if !durable {
                    self.dirty += usize::from(!std::mem::replace(&mut slice.dirty, true));
                }
            }
        }
    }
}
