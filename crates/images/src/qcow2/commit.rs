//! Commits: brings the disk up to date.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;

use super::Qcow2;
use crate::qcow2::alloc::clusters;
use crate::qcow2::alloc::state::State;
use crate::qcow2::tables::changes::{L1_KEYS, l1_key};
use crate::qcow2::tables::meta;

/// The most commits of a close until nothing is left to write.
const MAX_LAST_COMMITS: usize = 1 << 20;

/// The changes that a commit writes.
struct Dirty {
    /// Counts, and clusters that are becoming free.
    clusters: clusters::Dirty,
    /// Slices of tables.
    slices: Vec<u64>,
    /// Sectors of L1.
    l1: Vec<usize>,
}

/// A commit in progress. If its task was dropped it has failed.
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
    /// A flush: all answered writes become durable, the data and the metadata that refer to them.
    ///
    /// The order of writes:
    /// 1. Counts that may be lowered, since an earlier commit has removed the reference durably; counts of new
    ///    clusters; sync. The sync also makes all data durable that were written to new clusters, and the contents of
    ///    new tables.
    /// 2. Entries of tables and of L1, which make new clusters and tables reachable; sync. Entries in new tables are
    ///    written here, too: a failed commit may have written an entry that refers to such a table.
    ///
    /// A power cut in 1 leaves clusters with a count and no reference. In 2 it leaves any subset of the entries: each
    /// refers to data that 1 has made durable. Each entry is within a sector, so it is old or new. Changes after the
    /// beginning belong to the next commit: their entries are left out, because their counts may not have been written.
    pub(crate) async fn commit(&self, port: &Port) -> io::Result<()> {
        self.base.commits.join(&port.io, self.commit_alone(port)).await
    }

    async fn commit_alone(&self, port: &Port) -> io::Result<()> {
        self.alloc.lower_counts(port).await?;
        let Some(dirty) = self.begin_commit() else { return self.sync_and_leave(port).await };
        let mut commit = Commit { image: self, dirty, done: false };
        let done = self.write_dirty(port, &commit.dirty).await;
        commit.done = done.is_ok();
        done
    }

    /// A commit without a change. A cluster that a dead process had replaced on disk, as recovery found, loses its
    /// reference once that is durable.
    async fn sync_and_leave(&self, port: &Port) -> io::Result<()> {
        self.base.sync(port).await?;
        let mut state = self.state();
        if state.changes.changed.is_empty() {
            state.clusters.have_left();
        }
        Ok(())
    }

    fn begin_commit(&self) -> Option<Dirty> {
        let mut state = self.state();
        let State { changes, clusters, .. } = &mut *state;
        if changes.changed.is_empty() && !clusters.has_dirty_counts() {
            return None;
        }
        changes.committing = std::mem::take(&mut changes.changed);
        let committing = &changes.committing;
        let slices: BTreeSet<u64> =
            committing.range(..L1_KEYS).map(|(cluster, _)| self.slice(*cluster).0).collect();
        let l1: BTreeSet<usize> =
            committing.range(L1_KEYS..).map(|(key, _)| (key - L1_KEYS) as usize / 64).collect();
        Some(Dirty {
            slices: slices.into_iter().collect(),
            l1: l1.into_iter().collect(),
            clusters: clusters.begin_commit(),
        })
    }

    async fn write_dirty(&self, port: &Port, dirty: &Dirty) -> io::Result<()> {
        let file = port.files[0];
        self.alloc.write_counts(port, &dirty.clusters).await?;
        self.base.sync(port).await?;
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
        self.base.sync(port).await
    }

    async fn write_slices(&self, port: &Port, slices: &[u64]) -> io::Result<()> {
        let mut places = Vec::with_capacity(slices.len());
        for slice in slices {
            let place = self.slice_offset(*slice)?;
            places.push(place.ok_or_else(|| meta::damaged("a changed entry without a table"))?);
        }
        let bytes = self.cache.slice_entries() * self.header.form().entry_bytes();
        meta::write_blocks(port, port.files[0], bytes, &places, |i, block| {
            let state = self.state();
            let Some(bytes) = self.slice_at_commit(&state, slices[i]) else {
                unreachable!("slice {} is being committed and was evicted", slices[i])
            };
            block.copy_from_slice(&bytes);
        })
        .await
    }

    /// A sector of L1 as it was when the commit began. The table's last sector may have fewer
    /// entries; the rest of its cluster is not used.
    fn l1_sector(&self, sector: usize, block: &mut [u8]) {
        let state = self.state();
        for (i, to) in block.chunks_exact_mut(8).enumerate() {
            let index = sector * 64 + i;
            let entry = match state.changes.changed.get(&l1_key(index)) {
                Some(old) => *old,
                None => self.l1.get(index).map_or(0, |e| e.load(Ordering::Acquire)),
            };
            to.copy_from_slice(&entry.to_be_bytes());
        }
    }

    /// After a failed commit everything is as dirty as before it.
    fn end_commit(&self, dirty: &mut Dirty, done: bool) {
        let mut state = self.state();
        let State { changes, clusters, .. } = &mut *state;
        for (key, old) in std::mem::take(&mut changes.committing) {
            if done {
                changes.committed(key);
                if key < L1_KEYS {
                    self.cache.pin(self.slice(key).0, -1);
                }
            } else if changes.changed.insert(key, old).is_some() && key < L1_KEYS {
                // Both changes had pinned it.
                self.cache.pin(self.slice(key).0, -1);
            }
        }
        clusters.end_commit(&mut dirty.clusters, done);
    }

    /// The last commit. It makes the image as other programs expect one that is not in use: no count too high, no
    /// unused space after the end. Counts that are too low are left to a repair.
    pub(crate) async fn close(&self, port: &Port) -> io::Result<()> {
        let _alone = self.base.commits.pause(&port.io).await?;
        {
            // Places given to failed writes.
            let mut state = self.state();
            let state = &mut *state;
            for (cluster, host) in std::mem::take(&mut state.pending) {
                self.cache.pin(self.slice(cluster).0, -1);
                state.clusters.untake(host >> self.header.cluster_bits);
            }
            state.free_bait();
        }
        for _ in 0..MAX_LAST_COMMITS {
            self.commit_alone(port).await?;
            if !self.state().is_dirty() {
                break;
            }
        }
        self.alloc.cut_off(port, self.ready.load(Ordering::Acquire)).await?;
        self.unmark(port).await?;
        self.state().changes.journal.remove()
    }
}
