//! Fresh clusters: runs of free ones with space behind them, and the refcount blocks for them.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::Port;
use crate::qcow2::Qcow2;
use crate::qcow2::alloc::state::{Left, Run};
use crate::qcow2::format::entry::MAX_HOST_BYTES;
use crate::qcow2::format::header::{self, MAX_REFTABLE_BYTES};
use crate::qcow2::format::refcount;
use crate::qcow2::maintenance::fingerprint::Writer;
use crate::qcow2::tables::meta;

/// The first run, and how far runs grow: from the second on each is twice as long as the one
/// before, so a disk with few writes stays small and one with many waits seldom.
const FIRST_RUN_BYTES: u64 = 1 << 20;
const LONGEST_RUN_BYTES: u64 = 64 << 20;

/// Refcount blocks that are made at once cover about so much, so that small clusters do not need
/// two syncs for every few hundred KiB.
const BLOCKS_COVER_BYTES: u64 = 1 << 30;
const MAX_BLOCKS_AT_ONCE: u64 = 64;

/// Entries in a sector of the refcount table.
const SECTOR_ENTRIES: u64 = 64;

/// Refcount blocks looked at to find the last cluster in use; behind so many empty ones the rest
/// is taken for used.
const MAX_EMPTY_BLOCKS: usize = 64;

/// Slices of refcounts without a free cluster, behind what should be the last one in use, until
/// they are taken for damage.
const MAX_USED_SLICES: u32 = 4096;

/// The header is being made to name another refcount table. Called off or failed, it may name
/// either, and what is added to one is missing in the other: nothing that needs counts of new
/// blocks may get to the disk any more.
struct Renaming<'a> {
    image: &'a Qcow2,
    done: bool,
}

impl Drop for Renaming<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.image.commits.fail();
        }
    }
}

/// New blocks of refcounts that the table does not have yet.
struct Made {
    slices: Range<u64>,
    /// Slices with counts that are not 0.
    counts: Vec<(u64, Vec<u8>)>,
}

impl Made {
    /// The table is about to get them.
    fn appear(&self, image: &Qcow2) {
        let mut state = image.state();
        state.counts_change(Writer::Growth, self.slices.clone());
        self.counts.iter().for_each(|(slice, bytes)| state.counts_become(*slice, bytes));
    }

    /// It has them.
    fn appeared(&self, image: &Qcow2) {
        image.state().counts_changed(Writer::Growth, &self.slices);
    }
}

/// Called off or done, the next caller may look for a run.
struct Refilling<'a>(&'a Qcow2);

impl Drop for Refilling<'_> {
    fn drop(&mut self) {
        self.0.refilling.store(false, Ordering::Release);
    }
}

impl Qcow2 {
    /// Sets the next run aside, unless that was done meanwhile.
    pub(in crate::qcow2) async fn refill(&self, port: &Port) -> io::Result<()> {
        let _done = Refilling(self);
        let _alone = self.growth.lock(&port.io).await?;
        let (known, step) = {
            let mut state = self.state();
            if !state.spares.is_empty() {
                return Ok(());
            }
            // Left by a task that was dropped.
            state.unclaim();
            let (shortest, longest) = (FIRST_RUN_BYTES, LONGEST_RUN_BYTES);
            let clusters = |bytes: u64| (bytes >> self.header.cluster_bits).max(4);
            state.step = (state.step * 2).clamp(clusters(shortest), clusters(longest));
            (state.end, state.step)
        };
        let end = match known {
            Some(end) => end,
            None => self.find_end(port).await?,
        };
        let found = match self.reuse(port, step).await {
            Ok(runs) if runs.is_empty() => self.extend(port, end, step).await.map(|run| vec![run]),
            found => found,
        };
        let mut state = self.state();
        match found {
            Ok(runs) => state.add_runs(runs),
            // This was ahead of its use: first, what is there is used up.
            Err(e) if is_full(&e) && state.run.left() > 0 => state.step = state.run.left(),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// [Provides](Self::provide) for as many clusters as there is space for, at least one, if
    /// there is not enough for all. The next run will not be that long either.
    pub(in crate::qcow2) async fn provide_some(
        &self,
        port: &Port,
        first: u64,
        end: u64,
    ) -> io::Result<(u64, bool)> {
        let mut count = end - first;
        loop {
            match self.provide(port, first, first + count).await {
                Err(e) if is_full(&e) && count > 1 => count /= 2,
                done => return done,
            }
            self.state().step = count;
        }
    }

    /// Sets clusters aside behind those in use.
    async fn extend(&self, port: &Port, end: u64, step: u64) -> io::Result<Run> {
        let mut at = end;
        let mut looked_at = 0;
        let mut run = loop {
            at = self.cover(port, at).await?;
            self.load_refs(port, at).await?;
            match self.free_run(at, step) {
                Ok(run) => break run,
                Err(_) if looked_at == MAX_USED_SLICES => {
                    return Err(meta::damaged("refcounts behind the end of the file"));
                }
                Err(next) => at = next,
            }
            looked_at += 1;
        };
        (run.end, run.zeroed) = self.provide_some(port, run.next, run.end).await?;
        self.state().end = Some(run.end);
        Ok(run)
    }

    /// Claims free clusters from `at` on within its slice of refcounts, or tells where to look
    /// next.
    fn free_run(&self, at: u64, step: u64) -> Result<Run, u64> {
        let mut state = self.state();
        let entries = state.refs.slice_entries();
        let slice_end = (at / entries + 1) * entries;
        let free = |cluster: &u64| state.refs.get(*cluster) == Some(0);
        let first = (at..slice_end).find(free).ok_or(slice_end)?;
        let count = (first..slice_end).take(step as usize).take_while(free).count();
        let run = Run { next: first, end: first + count as u64, zeroed: false };
        state.claimed.push(run);
        Ok(run)
    }

    /// Where the clusters in use end, by the refcounts, but not behind the end of the file, nor
    /// before the last table: refcounts that deny one are wrong, or made to harm (T17).
    pub(in crate::qcow2) async fn find_end(&self, port: &Port) -> io::Result<u64> {
        let file_end = self.medium.bytes_now()?.div_ceil(self.cluster_bytes());
        let (mut slices, entries) = {
            let state = self.state();
            let per_block = state.refs.block_entries() / state.refs.slice_entries();
            let last = state.refs.table().iter().rposition(|block| *block != 0);
            let end = last.map_or(0, |block| (block as u64 + 1) * per_block);
            let first = end.saturating_sub(MAX_EMPTY_BLOCKS as u64 * per_block);
            (first..end, state.refs.slice_entries())
        };
        let fallback = slices.start * entries;
        let last = loop {
            let Some(slice) = slices.next_back() else { break fallback };
            self.load_refs(port, slice * entries).await?;
            let state = self.state();
            let used = |cluster: &u64| state.refs.get(*cluster).is_some_and(|n| n > 0);
            if let Some(last) = (slice * entries..(slice + 1) * entries).rev().find(used) {
                break last + 1;
            }
        };
        let tables_end = self.metadata.last().map_or(1, |cluster| cluster + 1);
        let end = last.min(file_end).max(tables_end);
        let mut state = self.state();
        state.used_end = state.used_end.max(end);
        state.end = Some(end);
        state.search = Some(0..end);
        Ok(end)
    }

    /// Reads the refcounts around a cluster. Where there is no block they are all 0, and stay so.
    pub(in crate::qcow2) async fn load_refs(&self, port: &Port, cluster: u64) -> io::Result<()> {
        let (slice, offset, len) = {
            let state = self.state();
            let slice = state.refs.slice_of(cluster);
            if state.refs.holds(slice) {
                return Ok(());
            }
            (slice, state.refs.offset(slice), state.refs.slice_bytes())
        };
        let bytes = match offset {
            Some(offset) => meta::read(port, port.files[0], offset, len).await?,
            None => return Ok(()),
        };
        let mut state = self.state();
        let keep = state.kept_refs();
        state.refs.install(slice, bytes.into(), &keep);
        Ok(())
    }

    /// Makes space behind clusters, or as many of them as the medium has; the end, and whether
    /// the space reads as zeros.
    pub(in crate::qcow2) async fn provide(
        &self,
        port: &Port,
        first: u64,
        end: u64,
    ) -> io::Result<(u64, bool)> {
        let (file, bits) = (port.files[0], self.header.cluster_bits);
        let (from, mut to) = (first << bits, end << bits);
        if to > MAX_HOST_BYTES {
            return Err(full("the format ends at 64 PiB"));
        }
        let there = self.medium.bytes_now()?;
        if !self.medium.is_file() {
            to = to.min(there >> bits << bits);
            if to <= from {
                return Err(full("the device is full"));
            }
            // It may be larger than it was.
            self.limit.fetch_max(to, Ordering::AcqRel);
            return Ok((to >> bits, false));
        }
        let mut zeroed = true;
        if from < there {
            // Left from a run that was not used up, or freed: whatever is in it.
            let old = there.min(to) - from;
            zeroed = port.io.zero_range(file, from, old).await.is_ok()
                || port.io.punch_hole(file, from, old).await.is_ok();
        }
        match port.io.allocate(file, from, to - from).await {
            Ok(()) => {}
            // A file system without allocation: a longer file, at least.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                if to > there {
                    port.io.set_len(file, to).await?;
                }
            }
            Err(e) => return Err(e),
        }
        self.limit.fetch_max(to, Ordering::AcqRel);
        Ok((end, zeroed))
    }

    /// Sees to it that there is a refcount block for cluster `at`; the first free cluster from
    /// there on that the caller may look at.
    ///
    /// Order: a new block, with the counts of itself and of what was made with it; sync; the entry
    /// of the table that refers to it; sync. Only then does anything refer to a cluster that it
    /// counts. A cut of the power before the second sync leaves unused space.
    async fn cover(&self, port: &Port, at: u64) -> io::Result<u64> {
        let (block, entries, table) = {
            let state = self.state();
            let entries = state.refs.block_entries();
            (at / entries, entries, state.refs.table().len() as u64)
        };
        if block >= table {
            return self.grow_reftable(port, at).await;
        }
        if self.state().refs.table()[block as usize] != 0 {
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
        self.sync(port).await?;
        let bits = self.header.cluster_bits;
        let first = block / SECTOR_ENTRIES * SECTOR_ENTRIES;
        let sector = first as usize..(first + SECTOR_ENTRIES) as usize;
        let mut entries = self.state().refs.table()[sector.clone()].to_vec();
        for i in 0..count {
            entries[(block - first + i) as usize] = (at + i) << bits;
        }
        let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_be_bytes()).collect();
        self.keep_in_file(at + count);
        made.appear(self);
        meta::write(port, port.files[0], self.reftable_offset() + first * 8, &bytes).await?;
        made.appeared(self);
        self.sync(port).await?;
        self.state().refs.table_mut()[sector].copy_from_slice(&entries);
        Ok(at + count)
    }

    /// What is about to be written may refer to clusters up to `end`, even if that fails or is
    /// called off: nothing else gets them, and they are not cut off.
    fn keep_in_file(&self, end: u64) {
        let mut state = self.state();
        state.used_end = state.used_end.max(end);
        state.end = Some(end);
    }

    /// How many blocks that are missing are made together: neighbours, whose own counts are all in
    /// one slice, and whose entries are in one sector, which is never torn: the first of them
    /// counts the others.
    fn blocks_at_once(&self, at: u64, block: u64, entries: u64) -> u64 {
        let state = self.state();
        let wanted = (BLOCKS_COVER_BYTES >> self.header.cluster_bits) / entries;
        let slice_left = state.refs.slice_entries() - at % state.refs.slice_entries();
        let most = wanted.clamp(1, MAX_BLOCKS_AT_ONCE).min(slice_left.div_ceil(2));
        let most = most.min(SECTOR_ENTRIES - block % SECTOR_ENTRIES);
        let missing = state.refs.table()[block as usize..].iter().take(most as usize);
        missing.take_while(|offset| **offset == 0).count() as u64
    }

    /// Writes `count` new refcount blocks at cluster `at`, which is the first that they count, with
    /// a count of one for `used` clusters from `at` on. Nothing is synced.
    async fn make_blocks(&self, port: &Port, at: u64, count: u64, used: u64) -> io::Result<Made> {
        let (bits, order) = (self.header.cluster_bits, self.header.refcount_order);
        let (end, zeroed) = self.provide(port, at, at + used).await?;
        if end < at + used {
            return Err(full("the device is full"));
        }
        if !zeroed {
            let (offset, len) = (at << bits, count << bits);
            meta::write_zeros(port, port.files[0], offset, len).await?;
        }
        let (entries, block_entries, slice_bytes) = {
            let state = self.state();
            let refs = &state.refs;
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

    /// Replaces the refcount table by one of at least twice the size, so that it covers cluster
    /// `at`, where new blocks, and behind them the table, are put.
    ///
    /// Order: blocks and table; sync; the header's sector, which names the table; sync. Then the
    /// old table's clusters are free. A cut before the second sync leaves unused space, one after
    /// it leaks the old table at the most.
    async fn grow_reftable(&self, port: &Port, at: u64) -> io::Result<u64> {
        let bits = self.header.cluster_bits;
        let (mut table, entries) = {
            let state = self.state();
            (state.refs.table().to_vec(), state.refs.block_entries())
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
        self.sync(port).await?;
        self.keep_in_file(at + used);
        let mut renaming = Renaming { image: self, done: false };
        made.appear(self);
        self.patch_header(port, |sector| {
            sector[48..56].copy_from_slice(&offset.to_be_bytes());
            sector[56..60].copy_from_slice(&(clusters as u32).to_be_bytes());
        })
        .await?;
        renaming.done = true;
        made.appeared(self);
        let old = self.reftable.swap(offset, Ordering::AcqRel) >> bits;
        let mut state = self.state();
        *state.refs.table_mut() = table;
        let old = old..old + (old_len * 8).div_ceil(self.cluster_bytes());
        state.due.extend(old.map(|cluster| Left { cluster, readers_known: true }));
        Ok(at + used)
    }

    /// Changes the header's first sector, in which all of its fields are, and syncs it. A sector
    /// is never torn.
    pub(in crate::qcow2) async fn patch_header(
        &self,
        port: &Port,
        change: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let mut sector = meta::read(port, port.files[0], 0, 512).await?;
        change(&mut sector);
        meta::write(port, port.files[0], 0, &sector).await?;
        self.sync(port).await
    }

    /// What has to be done before the first write, and so before the first change that only the
    /// journal knows: the mark of that journal is in the header, durably, and a file that ends
    /// within a cluster is made longer. Autoclear features of others are cleared, since they are
    /// not kept up to date (one that stays would make other programs believe a bitmap that lacks
    /// what is written now).
    pub(in crate::qcow2) async fn make_ready(&self, port: &Port) -> io::Result<()> {
        let _alone = self.readying.lock(&port.io).await?;
        if self.ready.load(Ordering::Acquire) {
            return Ok(());
        }
        self.lengthen(port).await?;
        self.lay_bait(port).await?;
        self.ready.store(true, Ordering::Release);
        Ok(())
    }

    /// The mark, and a file with whole clusters.
    async fn lengthen(&self, port: &Port) -> io::Result<()> {
        let _alone = self.growth.lock(&port.io).await?;
        self.set_autoclear(port, self.mark).await?;
        let bytes = self.medium.bytes_now()?;
        let whole = bytes.next_multiple_of(self.cluster_bytes());
        if self.medium.is_file() && whole > bytes {
            port.io.set_len(port.files[0], whole).await?;
        }
        if self.medium.is_file() {
            self.limit.fetch_max(whole, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl Qcow2 {
    /// Makes the header have these autoclear features, durably; version 2 has none.
    pub(in crate::qcow2) async fn set_autoclear(
        &self,
        port: &Port,
        features: u64,
    ) -> io::Result<()> {
        if self.autoclear.load(Ordering::Acquire) == features {
            return Ok(());
        }
        let at = header::AUTOCLEAR_AT;
        let bytes = features.to_be_bytes();
        self.patch_header(port, |sector| sector[at..at + 8].copy_from_slice(&bytes)).await?;
        self.autoclear.store(features, Ordering::Release);
        Ok(())
    }
}

/// Whether there may be space for less.
pub(in crate::qcow2) fn is_full(e: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(e.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn full(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, format!("qcow2 image: no space is left: {why}"))
}
