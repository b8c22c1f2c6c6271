//! Makes answered writes durable. The order of writes:
//!
//! 1. The bitmaps of *new* blocks, which nothing on disk refers to yet.
//! 2. `fdatasync`: these, all data written before, and the file's length.
//! 3. Table sectors, which make new blocks reachable, and bitmaps of old blocks, which make sectors present. They are
//!    changed in whole sectors of 512 bytes, each old or new after a power cut. All combinations are consistent, since
//!    everything they refer to is durable.
//! 4. `fdatasync`.
//!
//! After a failed commit, some of its table sectors may be on disk. Then some blocks are not new any more, and it is
//! unknown which. So the next commit has a sync before step 1, for the data written since.
//!
//! The commit writes the state at its start: bits that are set later stand for data that the first sync may not cover.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::{Port, Rare};

use super::entry::{Entry, State as Where};
use super::{Blocks, Record, SECTOR};
use crate::vhd::format::layout::UNUSED;
use crate::vhd::pieces::write_pieces;

/// Blocks that are committed at once: 4 MiB of bitmaps of the usual size.
const BATCH: usize = 8192;
/// Entries in a sector of the table.
const ENTRIES: u32 = 128;
/// Table sectors written in one operation at most.
const RUN_SECTORS: u32 = 32;
/// The largest gap of unchanged table sectors between changed ones that is written with them.
const GAP_SECTORS: u32 = 4;

/// A block as it was when the commit began.
struct Item {
    block: u32,
    sector: u32,
    new: bool,
    /// `None`: all bits are set.
    bits: Option<Box<[u8]>>,
    records: Vec<(u32, Record)>,
}

/// Blocks that a commit has taken. If it fails or its task is dropped, they are dirty as before.
struct Batch<'a> {
    blocks: &'a Blocks,
    items: Vec<Item>,
    done: bool,
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.blocks.finish(std::mem::take(&mut self.items), self.done);
    }
}

impl Blocks {
    /// A flush.
    pub(in crate::vhd) async fn commit(&self, port: &Port) -> io::Result<()> {
        self.commits.join(&port.io, self.commit_alone(port)).await
    }

    async fn commit_alone(&self, port: &Port) -> io::Result<()> {
        let (mut left, outdated) = {
            let state = self.lock();
            (state.dirty.len(), state.outdated.len())
        };
        let done = match left {
            0 => self.sync(port).await,
            _ => self.commit_dirty(port, &mut left).await,
        };
        let mut state = self.lock();
        let state = &mut *state;
        if done.is_ok() {
            state.outdated.drain(..outdated).for_each(|record| state.journal.release(record));
            state.retry = false;
        }
        self.dirty.store(!state.dirty.is_empty(), Ordering::Relaxed);
        self.set_tight(state);
        done
    }

    pub(in crate::vhd) async fn sync(&self, port: &Port) -> io::Result<()> {
        self.commits.sync(port).await
    }

    /// Commits the first `left` blocks of the dirty list.
    async fn commit_dirty(&self, port: &Port, left: &mut usize) -> io::Result<()> {
        while *left > 0 {
            self.complete_bitmaps(port, BATCH.min(*left)).await?;
            let items = self.take_batch(BATCH.min(*left));
            *left -= items.len().clamp(1, *left);
            let mut batch = Batch { blocks: self, items, done: false };
            self.write_batch(port, &batch.items).await?;
            batch.done = true;
        }
        Ok(())
    }

    /// Loads bitmaps that are on disk only, or of which only the new bits are in memory: these cannot be written. They
    /// stay loaded: dirty blocks are not evicted.
    async fn complete_bitmaps(&self, port: &Port, n: usize) -> io::Result<()> {
        let blocks: Vec<u32> = self.lock().dirty.iter().take(n).copied().collect();
        for block in blocks {
            self.load_block(port, port.files[0], block).await?;
        }
        Ok(())
    }

    /// Takes the first `n` blocks of the dirty list, and their state.
    fn take_batch(&self, n: usize) -> Vec<Item> {
        let mut state = self.lock();
        let n = n.min(state.dirty.len());
        let blocks: Vec<u32> = state.dirty.drain(..n).collect();
        let item = |block: u32| {
            let entry = self.entry(block);
            let bits = match entry.state() {
                Where::Bits(slot) | Where::Overlay(slot) => {
                    let bits = self.slab.slot(slot);
                    Some(self.bitmap(block, |i| bits.word(i)))
                }
                Where::Full if self.is_cut(block) => Some(self.bitmap(block, |_| u64::MAX)),
                Where::Full => None,
                Where::Empty | Where::OnDisk | Where::Damaged(_) => {
                    unreachable!("block {block} is dirty and its bitmap is not in memory")
                }
            };
            self.set_entry(block, entry.without(Entry::DIRTY).with(Entry::BUSY));
            let records = state.records.remove(&block).unwrap_or_default();
            Item { block, sector: entry.sector(), new: entry.has(Entry::NEW), bits, records }
        };
        blocks.into_iter().map(item).collect()
    }

    /// A bitmap as it is written. Sectors past the disk's end are not present, in case the disk grows: they were never
    /// written.
    fn bitmap(&self, block: u32, word: impl Fn(usize) -> u64) -> Box<[u8]> {
        let hidden = |i| if self.is_cut(block) { self.padding_of(block, i) } else { 0 };
        let words = (0..self.slab.words()).map(|i| word(i) & !hidden(i));
        words.flat_map(u64::to_be_bytes).take(self.bitmap_bytes_used()).collect()
    }

    async fn write_batch(&self, port: &Port, batch: &[Item]) -> io::Result<()> {
        let file = port.files[0];
        let bitmap = |item: &Item, to: &mut Vec<u8>| {
            let start = to.len();
            match &item.bits {
                Some(bits) => to.extend_from_slice(bits),
                None => to.resize(start + self.bitmap_bytes_used(), 0xff),
            }
            to.resize(start + self.layout.bitmap_bytes as usize, 0);
            u64::from(item.sector) * SECTOR
        };
        if self.lock().retry {
            Rare::CommitAgain.taken();
            self.sync(port).await?;
        }
        let new = batch.iter().filter(|item| item.new);
        write_pieces(port, file, new, bitmap).await?;
        self.sync(port).await?;
        let old = batch.iter().filter(|item| !item.new);
        write_pieces(port, file, old, bitmap).await?;
        let runs = table_runs(batch.iter().filter(|item| item.new).map(|item| item.block));
        write_pieces(port, file, runs.iter(), |run, to| {
            for entry in run.first * ENTRIES..(run.first + run.sectors) * ENTRIES {
                to.extend_from_slice(&self.entry_on_disk(entry).to_be_bytes());
            }
            self.table_offset + u64::from(run.first) * SECTOR
        })
        .await?;
        self.sync(port).await
    }

    /// A block's entry in the table on disk, after this commit.
    fn entry_on_disk(&self, block: u32) -> u32 {
        if block as usize >= self.table.len() {
            return UNUSED;
        }
        let entry = self.entry(block);
        let later = entry.has(Entry::NEW) && !entry.has(Entry::BUSY);
        if entry.state() == Where::Empty || later { UNUSED } else { entry.sector() }
    }

    /// Ends the commit. After a failed one everything is dirty as before.
    fn finish(&self, batch: Vec<Item>, done: bool) {
        let mut state = self.lock();
        state.retry |= !done;
        for item in batch {
            let entry = self.entry(item.block).without(Entry::BUSY);
            let records = item.records.into_iter().map(|(_, record)| record);
            if done {
                records.for_each(|record| state.journal.release(record));
                self.set_entry(item.block, entry.without(Entry::NEW));
            } else {
                state.outdated.extend(records);
                if !entry.has(Entry::DIRTY) {
                    state.dirty.push(item.block);
                }
                self.set_entry(item.block, entry.with(Entry::DIRTY));
            }
        }
    }
}

/// Adjacent sectors of the table that are written in one operation.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    first: u32,
    sectors: u32,
}

/// The table sectors of these blocks, close ones merged. The sectors between are written unchanged.
fn table_runs(blocks: impl Iterator<Item = u32>) -> Vec<Run> {
    let mut sectors: Vec<u32> = blocks.map(|block| block / ENTRIES).collect();
    sectors.sort_unstable();
    sectors.dedup();
    let mut runs: Vec<Run> = Vec::new();
    for sector in sectors {
        match runs.last_mut() {
            Some(run)
                if sector - (run.first + run.sectors) < GAP_SECTORS
                    && sector - run.first < RUN_SECTORS =>
            {
                run.sectors = sector - run.first + 1;
            }
            _ => runs.push(Run { first: sector, sectors: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_table_sectors_are_written_together() {
        let run = |first, sectors| Run { first, sectors };
        assert_eq!(table_runs([0, 127, 128, 700].into_iter()), [run(0, 6)]);
        assert_eq!(table_runs([128 * 5 + 3, 128 * 40].into_iter()), [run(5, 1), run(40, 1)]);
        let many = table_runs((0..100).map(|i| i * 128));
        assert_eq!(many.iter().map(|r| r.sectors).sum::<u32>(), 100);
        assert!(many.iter().all(|r| r.sectors <= RUN_SECTORS));
        assert!(table_runs(std::iter::empty()).is_empty());
    }
}
