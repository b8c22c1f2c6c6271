//! Makes refcount blocks for clusters that no block counts yet, and a longer table of blocks.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;

use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::fingerprint::Writer;
use crate::qcow2::alloc::grow::{full, is_full};
use crate::qcow2::format::header::MAX_REFTABLE_BYTES;
use crate::qcow2::format::refcount;
use crate::qcow2::tables::meta;

/// Refcount blocks that are made together cover about so many bytes. Otherwise small clusters would need two syncs for
/// every few hundred KiB.
const BLOCKS_COVER_BYTES: u64 = 1 << 30;
const MAX_BLOCKS_AT_ONCE: u64 = 64;

/// Entries in a sector of the refcount table.
const SECTOR_ENTRIES: u64 = 64;

/// The header is being changed to another refcount table. If this is cancelled or fails, the header may name either
/// table, and an entry added to one is missing in the other. So nothing that needs counts of new blocks may reach the
/// disk any more.
struct Renaming<'a> {
    alloc: &'a Allocator,
    done: bool,
}

impl Drop for Renaming<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.alloc.base.commits.doubt();
        }
    }
}

/// New blocks of refcounts that the table does not have yet.
struct Made {
    slices: Range<u64>,
    /// Slices with counts that are not all 0.
    counts: Vec<(u64, Vec<u8>)>,
}

impl Made {
    /// Called before the table gets the blocks.
    fn appear(&self, alloc: &Allocator) {
        let mut state = alloc.base.state();
        state.counts_change(Writer::Growth, self.slices.clone());
        self.counts.iter().for_each(|(slice, bytes)| state.counts_become(*slice, bytes));
    }

    /// Called when the table has the blocks.
    fn appeared(&self, alloc: &Allocator) {
        alloc.base.state().counts_changed(Writer::Growth, &self.slices);
    }
}

impl Allocator {
    /// Ensures that there is a refcount block for cluster `at`; returns the first free cluster from there on that the
    /// caller may use.
    ///
    /// Order: a new block, with the counts of itself and of the blocks made with it; sync; the table entry that refers
    /// to it; sync. Only then does anything refer to a cluster that it counts. A power cut before the second sync
    /// leaves unused space.
    pub(super) async fn cover(&self, port: &Port, at: u64) -> io::Result<u64> {
        let (block, entries, table) = {
            let clusters = &self.base.state().clusters;
            let entries = clusters.refs.block_entries();
            (at / entries, entries, clusters.refs.table().len() as u64)
        };
        if block >= table {
            return self.grow_reftable(port, at).await;
        }
        if self.base.state().clusters.refs.table()[block as usize] != 0 {
            return Ok(at);
        }
        let mut count = self.blocks_at_once(at, block, entries);
        let made = match self.make_blocks(port, at, count, count).await {
            Err(e) if is_full(&e) && count > 1 => {
                count = 1;
                self.make_blocks(port, at, count, count).await?
            }
            made => made?,
        };
        self.base.sync(port).await?;
        let bits = self.cluster_bits;
        let first = block / SECTOR_ENTRIES * SECTOR_ENTRIES;
        let sector = first as usize..(first + SECTOR_ENTRIES) as usize;
        let mut entries = self.base.state().clusters.refs.table()[sector.clone()].to_vec();
        for i in 0..count {
            entries[(block - first + i) as usize] = (at + i) << bits;
        }
        let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_be_bytes()).collect();
        self.keep_in_file(at + count);
        made.appear(self);
        meta::write(port, port.files[0], self.reftable_offset() + first * 8, &bytes).await?;
        made.appeared(self);
        self.base.sync(port).await?;
        self.base.state().clusters.refs.table_mut()[sector].copy_from_slice(&entries);
        Ok(at + count)
    }

    /// Keeps clusters up to `end` in the file: entries that are about to be written may refer to them, even if the
    /// write fails or is cancelled. They are not given out, and not cut off.
    fn keep_in_file(&self, end: u64) {
        let clusters = &mut self.base.state().clusters;
        clusters.used_end = clusters.used_end.max(end);
        clusters.end = Some(end);
    }

    /// The number of missing blocks that are made together. They are neighbours: their own counts are all in one slice,
    /// and their table entries in one sector, which is never torn. The first of them counts the others.
    fn blocks_at_once(&self, at: u64, block: u64, entries: u64) -> u64 {
        let clusters = &self.base.state().clusters;
        let wanted = (BLOCKS_COVER_BYTES >> self.cluster_bits) / entries;
        let slice_left = clusters.refs.slice_entries() - at % clusters.refs.slice_entries();
        let most = wanted.clamp(1, MAX_BLOCKS_AT_ONCE).min(slice_left.div_ceil(2));
        let most = most.min(SECTOR_ENTRIES - block % SECTOR_ENTRIES);
        let missing = clusters.refs.table()[block as usize..].iter().take(most as usize);
        missing.take_while(|offset| **offset == 0).count() as u64
    }

    /// Writes `count` new refcount blocks at cluster `at`, which is the first that they count, with
    /// a count of one for `used` clusters from `at` on. Nothing is synced.
    async fn make_blocks(&self, port: &Port, at: u64, count: u64, used: u64) -> io::Result<Made> {
        let (bits, order) = (self.cluster_bits, self.refcount_order);
        let (end, zeroed) = self.provide(port, at, at + used).await?;
        if end < at + used {
            return Err(full("the device is full"));
        }
        if !zeroed {
            let (offset, len) = (at << bits, count << bits);
            meta::write_zeros(port, port.files[0], offset, len).await?;
        }
        let (entries, block_entries, slice_bytes) = {
            let clusters = &self.base.state().clusters;
            let refs = &clusters.refs;
            (refs.slice_entries(), refs.block_entries(), refs.slice_bytes())
        };
        let first_block = at / block_entries;
        let blocks = first_block..first_block + count;
        let slices = blocks.start * block_entries / entries..blocks.end * block_entries / entries;
        let mut made = Made { slices, counts: Vec::new() };
        let mut cluster = at;
        while cluster < at + used {
            let slice = cluster / entries;
            let end = ((slice + 1) * entries).min(at + used);
            let mut bytes = vec![0; slice_bytes];
            for c in cluster..end {
                refcount::set(&mut bytes, order, (c % entries) as usize, 1);
            }
            let in_block = slice * entries % block_entries / entries * slice_bytes as u64;
            let block = (at + (cluster / block_entries - first_block)) << bits;
            meta::write(port, port.files[0], block + in_block, &bytes).await?;
            made.counts.push((slice, bytes));
            cluster = end;
        }
        Ok(made)
    }

    fn reftable_offset(&self) -> u64 {
        self.reftable.load(Ordering::Acquire)
    }

    /// Replaces the refcount table by one of at least twice the size, which covers cluster `at`. New blocks, and after
    /// them the table, are placed there.
    ///
    /// Order: blocks and table; sync; the header's sector, which names the table; sync. Then the old table's clusters
    /// are free. A power cut before the second sync leaves unused space; after it, it leaks at most the old table.
    async fn grow_reftable(&self, port: &Port, at: u64) -> io::Result<u64> {
        let bits = self.cluster_bits;
        let (mut table, entries) = {
            let clusters = &self.base.state().clusters;
            (clusters.refs.table().to_vec(), clusters.refs.block_entries())
        };
        let (first, old_len) = (at / entries, table.len() as u64);
        let mut blocks = 1;
        let clusters = loop {
            // The blocks count themselves and the table, which has entries for all of them.
            let needed = (first + blocks).max(old_len * 2) * 8;
            let clusters = needed.div_ceil(self.cluster_bytes());
            if clusters << bits > MAX_REFTABLE_BYTES.max(self.cluster_bytes()) {
                return Err(full("the refcount table cannot grow beyond 8 MiB"));
            }
            if (first + blocks) * entries >= at + blocks + clusters {
                break clusters;
            }
            blocks += 1;
        };
        let used = blocks + clusters;
        let made = self.make_blocks(port, at, blocks, used).await?;
        table.resize((clusters << bits) as usize / 8, 0);
        for i in 0..blocks {
            table[(first + i) as usize] = (at + i) << bits;
        }
        let offset = (at + blocks) << bits;
        let bytes: Vec<u8> = table.iter().flat_map(|e| e.to_be_bytes()).collect();
        meta::write(port, port.files[0], offset, &bytes).await?;
        self.base.sync(port).await?;
        self.keep_in_file(at + used);
        let mut renaming = Renaming { alloc: self, done: false };
        made.appear(self);
        self.base
            .patch_header(port, |sector| {
                sector[48..56].copy_from_slice(&offset.to_be_bytes());
                sector[56..60].copy_from_slice(&(clusters as u32).to_be_bytes());
            })
            .await?;
        renaming.done = true;
        made.appeared(self);
        let old = self.reftable.swap(offset, Ordering::AcqRel) >> bits;
        let clusters = &mut self.base.state().clusters;
        *clusters.refs.table_mut() = table;
        clusters.due(old..old + (old_len * 8).div_ceil(self.cluster_bytes()));
        Ok(at + used)
    }
}
