//! The end of the file: where it is, and the space after the last cluster in use.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;

use crate::qcow2::alloc::Allocator;

/// The refcount blocks that are examined to find the last cluster in use; after so many empty ones the rest is taken
/// for used.
const MAX_EMPTY_BLOCKS: usize = 64;

impl Allocator {
    /// The end of the clusters in use by the refcounts. It is not after the end of the file, nor before the last table:
    /// refcounts that deny a table are wrong, or hostile (T17).
    pub(super) async fn find_end(&self, port: &Port) -> io::Result<u64> {
        let file_end = self.base.medium.bytes_now()?.div_ceil(self.cluster_bytes());
        let (mut slices, entries) = {
            let clusters = &self.base.state().clusters;
            let per_block = clusters.refs.block_entries() / clusters.refs.slice_entries();
            let last = clusters.refs.table().iter().rposition(|block| *block != 0);
            let end = last.map_or(0, |block| (block as u64 + 1) * per_block);
            let first = end.saturating_sub(MAX_EMPTY_BLOCKS as u64 * per_block);
            (first..end, clusters.refs.slice_entries())
        };
        let fallback = slices.start * entries;
        let last = loop {
            let Some(slice) = slices.next_back() else { break fallback };
            self.load_refs(port, slice * entries).await?;
            let clusters = &self.base.state().clusters;
            let used = |cluster: &u64| clusters.refs.get(*cluster).is_some_and(|n| n > 0);
            if let Some(last) = (slice * entries..(slice + 1) * entries).rev().find(used) {
                break last + 1;
            }
        };
        let tables_end = self.metadata.last().map_or(1, |cluster| cluster + 1);
        let end = last.min(file_end).max(tables_end);
        let clusters = &mut self.base.state().clusters;
        clusters.used_end = clusters.used_end.max(end);
        clusters.end = Some(end);
        clusters.search = Some(0..end);
        Ok(end)
    }

    /// Ensures that the file has whole clusters. The caller has [paused](Self::pause) the other tasks.
    pub(in crate::qcow2) async fn lengthen(&self, port: &Port) -> io::Result<()> {
        let medium = &self.base.medium;
        let bytes = medium.bytes_now()?;
        let whole = bytes.next_multiple_of(self.cluster_bytes());
        if medium.is_file() && whole > bytes {
            port.io.set_len(port.files[0], whole).await?;
        }
        if medium.is_file() {
            self.limit.fetch_max(whole, Ordering::AcqRel);
        }
        Ok(())
    }

    /// From now on clusters are set aside only after the end: between used clusters there may be only single ones.
    pub(super) async fn only_behind_the_end(&self, port: &Port) -> io::Result<()> {
        if self.base.state().clusters.end.is_none() {
            self.find_end(port).await?;
        }
        let clusters = &mut self.base.state().clusters;
        clusters.forget_runs();
        (clusters.search, clusters.only_behind) = (Some(0..0), true);
        Ok(())
    }

    /// Drops the clusters that are set aside, gives unwritten parts of new ones back, and cuts the file off after the last cluster in use. `was_written`: a
    /// killed backend may have set space aside ahead of its use.
    pub(in crate::qcow2) async fn cut_off(&self, port: &Port, was_written: bool) -> io::Result<()> {
        if was_written && self.base.state().clusters.end.is_none() {
            // If this fails, the file keeps its length.
            let _ = self.find_end(port).await;
        }
        let medium = &self.base.medium;
        let (used_end, cut) = {
            let clusters = &mut self.base.state().clusters;
            clusters.forget_runs();
            let cut = clusters.end.take().is_some() && medium.is_file();
            (clusters.used_end << self.cluster_bits, cut)
        };
        // The last commit has synced all that was written.
        let first_new = self.first_new.load(Ordering::Acquire);
        medium.give_back(&port.io, &port.files, first_new, used_end).await;
        if cut && medium.bytes_now()? > used_end && !self.has_data_behind(used_end)? {
            port.io.set_len(port.files[0], used_end).await?;
            self.limit.store(used_end, Ordering::Release);
            self.base.sync(port).await?;
        }
        Ok(())
    }

    /// Whether a file has data from a cluster on. Unused space that was set aside has none, except blocks that the file
    /// system has filled with zeros. If there are data, their counts may be wrong: only a repair reads the references.
    fn has_data_behind(&self, from: u64) -> io::Result<bool> {
        const MAX_ZEROS_BYTES: u64 = 1 << 20;
        let (mut at, mut left) = (from, MAX_ZEROS_BYTES);
        while let Some(data) = self.base.medium.data_from(at) {
            let bytes = data.end - data.start;
            if bytes > left || has_some(&self.base.medium.read_now(data.start, bytes as usize)?) {
                return Ok(true);
            }
            left -= bytes;
            at = data.end;
        }
        Ok(false)
    }
}

fn has_some(bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| *byte != 0)
}
