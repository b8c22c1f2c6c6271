//! Bringing the disk up to date.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering;

use super::Qcow2;
use crate::Port;
use crate::qcow2::alloc::state::{L1_KEYS, Left, l1_key};
use crate::qcow2::maintenance::fingerprint::Writer;
use crate::qcow2::tables::meta;

/// Counts that one commit lowers at most: each may need a slice of its own in memory.
const MAX_LOWERED: usize = 1024;

/// Commits that it may take at a close until nothing is left to write.
const MAX_LAST_COMMITS: usize = 1 << 20;

/// What a commit takes with it.
struct Dirty {
    /// Slices of refcounts, with their places.
    refs: Vec<(u64, u64)>,
    /// Slices of tables.
    slices: Vec<u64>,
    /// Sectors of L1.
    l1: Vec<usize>,
    /// Clusters that lose a reference with it.
    leaving: Vec<Left>,
    /// Clusters that came free, and whose counts it brings to the disk.
    lowered: Vec<u64>,
}

fn has_some(bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| *byte != 0)
}

/// A commit under way. One whose task was dropped has failed.
struct Commit<'a> {
    image: &'a Qcow2,
    dirty: Dirty,
    done: bool,
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        self.image.end_commit(&mut self.dirty, self.done);
    }
}

impl Qcow2 {
    /// A flush: all that was answered is durable, the data and what makes them visible.
    ///
    /// The order of writes:
    /// 1. counts that may go down, since a commit before has removed the reference durably;
    ///    counts of new clusters; sync. The sync also makes all data durable that were written to
    ///    new clusters, and what new tables were filled with.
    /// 2. entries of tables and of L1, which make new clusters and tables reachable; sync. Those
    ///    of new tables, too: a commit that failed may have written what refers to the table.
    ///
    /// A cut of the power in 1 leaves clusters with a count and no reference; in 2, any subset of
    /// the entries: each refers to what 1 has made durable. Each entry is within a sector, so it is
    /// old or new. What changes after the beginning belongs to the next commit: its entries are
    /// left out, because their counts may not have been written.
    pub(crate) async fn commit(&self, port: &Port) -> io::Result<()> {
        self.commits.join(&port.io, self.commit_alone(port)).await
    }

    /// Whether [`commit`](Self::commit) has something to write.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.medium.read_only() && self.state().dirty()
    }

    /// After one that fails entries that refer to clusters which were copied must not reach the
    /// disk: in these there is data of long ago, too.
    pub(super) async fn sync(&self, port: &Port) -> io::Result<()> {
        self.commits.sync(port).await
    }

    /// A flush has failed. If that was because of a sync, the next process does not bring back what
    /// is perhaps lost.
    pub(crate) fn flush_failed(&self) {
        if self.commits.is_faulty() {
            self.state().journal.void();
        }
    }

    async fn commit_alone(&self, port: &Port) -> io::Result<()> {
        self.commits.check()?;
        self.lower_counts(port).await?;
        let Some(dirty) = self.begin_commit() else { return self.sync_and_leave(port).await };
        let mut commit = Commit { image: self, dirty, done: false };
        let done = self.write_dirty(port, &commit.dirty).await;
        commit.done = done.is_ok();
        done
    }

    /// A commit without a change. What a process had replaced on disk before it died, and was
    /// recovered from it, is without a reference once that is durable.
    async fn sync_and_leave(&self, port: &Port) -> io::Result<()> {
        self.sync(port).await?;
        let mut state = self.state();
        if state.changed.is_empty() {
            let mut left = std::mem::take(&mut state.leaving);
            state.due.append(&mut left);
        }
        Ok(())
    }

    /// Lowers the counts of clusters that nothing on disk refers to any more, and that nobody
    /// reads: who has begun to read compressed data before they were replaced gets to the end.
    pub(super) async fn lower_counts(&self, port: &Port) -> io::Result<()> {
        let mut waiting = Vec::new();
        let mut done = Ok(());
        for _ in 0..MAX_LOWERED {
            let Some(left) = self.state().due.pop() else { break };
            done = self.load_refs(port, left.cluster).await;
            let mut state = self.state();
            if done.is_err() || state.is_unpacking(left.cluster) {
                waiting.push(left);
            } else if let Some(count) = state.refs.get(left.cluster).filter(|n| *n > 0) {
                state.refs.set(left.cluster, count - 1);
                if count == 1 {
                    state.came_free(left);
                }
            }
            // Without a count there is nothing to lower: the image was damaged before.
            if done.is_err() {
                break;
            }
        }
        self.state().due.append(&mut waiting);
        done
    }

    fn begin_commit(&self) -> Option<Dirty> {
        let mut state = self.state();
        if state.changed.is_empty() && state.refs.dirty() == 0 {
            return None;
        }
        state.committing = std::mem::take(&mut state.changed);
        let committing = &state.committing;
        let slices: BTreeSet<u64> =
            committing.range(..L1_KEYS).map(|(cluster, _)| self.slice(*cluster).0).collect();
        let l1: BTreeSet<usize> =
            committing.range(L1_KEYS..).map(|(key, _)| (key - L1_KEYS) as usize / 64).collect();
        Some(Dirty {
            slices: slices.into_iter().collect(),
            l1: l1.into_iter().collect(),
            leaving: std::mem::take(&mut state.leaving),
            lowered: std::mem::take(&mut state.lowered),
            refs: state.refs.begin_writing(),
        })
    }

    async fn write_dirty(&self, port: &Port, dirty: &Dirty) -> io::Result<()> {
        let file = port.files[0];
        let places: Vec<u64> = dirty.refs.iter().map(|(_, offset)| *offset).collect();
        let slice_bytes = self.state().refs.slice_bytes();
        let slices = dirty.refs.iter().map(|(slice, _)| *slice);
        let slices = slices.clone().min().unwrap_or(0)..slices.max().map_or(0, |last| last + 1);
        self.state().counts_change(Writer::Commit, slices.clone());
        meta::write_blocks(port, file, slice_bytes, &places, |i, block| {
            let mut state = self.state();
            block.copy_from_slice(state.refs.bytes(dirty.refs[i].0));
            state.counts_become(dirty.refs[i].0, block);
        })
        .await?;
        self.state().counts_changed(Writer::Commit, &slices);
        self.sync(port).await?;
        if dirty.slices.is_empty() && dirty.l1.is_empty() {
            return Ok(());
        }
        self.write_slices(port, &dirty.slices).await?;
        let places: Vec<u64> =
            dirty.l1.iter().map(|sector| self.header.l1_offset + *sector as u64 * 512).collect();
        meta::write_blocks(port, file, 512, &places, |i, block| {
            self.l1_sector(dirty.l1[i], block);
        })
        .await?;
        self.sync(port).await
    }

    async fn write_slices(&self, port: &Port, slices: &[u64]) -> io::Result<()> {
        let mut places = Vec::with_capacity(slices.len());
        for slice in slices {
            let place = self.slice_offset(*slice)?;
            places.push(place.ok_or_else(|| meta::damaged("a changed entry without a table"))?);
        }
        let bytes = self.cache.slice_entries() * 8;
        meta::write_blocks(port, port.files[0], bytes, &places, |i, block| {
            let state = self.state();
            let Some(entries) = self.slice_at_commit(&state, slices[i]) else {
                unreachable!("slice {} is being committed and was evicted", slices[i])
            };
            for (to, entry) in block.chunks_exact_mut(8).zip(entries) {
                to.copy_from_slice(&entry.to_be_bytes());
            }
        })
        .await
    }

    /// A sector of L1 as it was when the commit began. The table's last sector may have fewer
    /// entries; what follows it in its cluster is not used.
    fn l1_sector(&self, sector: usize, block: &mut [u8]) {
        let state = self.state();
        for (i, to) in block.chunks_exact_mut(8).enumerate() {
            let index = sector * 64 + i;
            let entry = match state.changed.get(&l1_key(index)) {
                Some(old) => *old,
                None => self.l1.get(index).map_or(0, |e| e.load(Ordering::Acquire)),
            };
            to.copy_from_slice(&entry.to_be_bytes());
        }
    }

    /// After a failed commit everything is as dirty as before it.
    fn end_commit(&self, dirty: &mut Dirty, done: bool) {
        let mut state = self.state();
        let state = &mut *state;
        let committing = std::mem::take(&mut state.committing);
        state.refs.end_writing(&dirty.refs, done);
        for (key, old) in committing {
            if done {
                state.committed(key);
                if key < L1_KEYS {
                    self.cache.pin(self.slice(key).0, -1);
                }
            } else if state.changed.insert(key, old).is_some() && key < L1_KEYS {
                // It was pinned by both.
                self.cache.pin(self.slice(key).0, -1);
            }
        }
        if done {
            state.due.append(&mut dirty.leaving);
            dirty.lowered.drain(..).for_each(|cluster| state.end_quarantine(cluster));
        } else {
            state.leaving.append(&mut dirty.leaving);
            state.lowered.append(&mut dirty.lowered);
        }
    }

    /// The last commit, and what other programs expect of an image that nobody uses: no count too
    /// high, no unused space behind the end. Counts that are too low are a repair's.
    pub(crate) async fn close(&self, port: &Port) -> io::Result<()> {
        let _alone = self.commits.pause(&port.io).await?;
        {
            // Places that were given to writes that failed.
            let mut state = self.state();
            let state = &mut *state;
            for (cluster, host) in std::mem::take(&mut state.pending) {
                self.cache.pin(self.slice(cluster).0, -1);
                state.untake(host >> self.header.cluster_bits);
            }
            state.free_bait();
        }
        for _ in 0..MAX_LAST_COMMITS {
            self.commit_alone(port).await?;
            if !self.state().dirty() {
                break;
            }
        }
        // A backend that was killed may have set space aside ahead of its use.
        if self.ready.load(Ordering::Acquire) && self.state().end.is_none() {
            // Without that the file stays as long as it is.
            let _ = self.find_end(port).await;
        }
        let (used_end, cut) = {
            let mut state = self.state();
            let used = state.used_end << self.header.cluster_bits;
            let cut = state.end.take().is_some() && self.medium.is_file();
            state.run = Default::default();
            state.spares.clear();
            (used, cut)
        };
        if cut && self.medium.bytes_now()? > used_end && !self.has_data_behind(used_end)? {
            port.io.set_len(port.files[0], used_end).await?;
            self.limit.store(used_end, Ordering::Release);
            self.sync(port).await?;
        }
        self.unmark(port).await?;
        self.state().journal.remove()
    }

    /// Whether a file has data from a cluster on. What was set aside and not used has none, but for
    /// blocks that the file system has filled with zeros. If there is some, its counts may be wrong:
    /// only a repair reads what refers to it.
    fn has_data_behind(&self, from: u64) -> io::Result<bool> {
        const MAX_ZEROS_BYTES: u64 = 1 << 20;
        let (mut at, mut left) = (from, MAX_ZEROS_BYTES);
        while let Some(data) = self.medium.data_from(at) {
            let bytes = data.end - data.start;
            if bytes > left || has_some(&self.medium.read_now(data.start, bytes as usize)?) {
                return Ok(true);
            }
            left -= bytes;
            at = data.end;
        }
        Ok(false)
    }

    /// Nothing is in the journal any more, so it need not be looked for. Before that is removed: a
    /// process that dies in between leaves an empty one. A mark without a journal says nothing,
    /// either; whoever writes after this sets it again.
    async fn unmark(&self, port: &Port) -> io::Result<()> {
        let marked = self.mark != 0 && self.autoclear.load(Ordering::Acquire) == self.mark;
        if marked && self.state().journal.len() == 0 {
            self.ready.store(false, Ordering::Release);
            self.set_autoclear(port, 0).await?;
        }
        Ok(())
    }
}
