//! Refcounts: reads them into memory, and writes them to the disk.

use std::io;

use ferrite_disk_base::Port;

use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::clusters::Dirty;
use crate::qcow2::alloc::fingerprint::Writer;
use crate::qcow2::tables::meta::{self, read_whole};

/// Counts that one commit lowers at most: each may need a slice of its own in memory.
const MAX_LOWERED: usize = 1024;

impl Allocator {
    /// Reads the refcounts around a cluster. Without a block they are all 0, and stay so.
    pub(in crate::qcow2) async fn load_refs(&self, port: &Port, cluster: u64) -> io::Result<()> {
        let (slice, offset, len) = {
            let clusters = &self.base.state().clusters;
            let slice = clusters.refs.slice_of(cluster);
            if clusters.refs.holds(slice) {
                return Ok(());
            }
            (slice, clusters.refs.offset(slice), clusters.refs.slice_bytes())
        };
        let bytes = match offset {
            Some(offset) => meta::read(port, port.files[0], offset, len).await?,
            None => return Ok(()),
        };
        let clusters = &mut self.base.state().clusters;
        let keep = clusters.kept_refs();
        clusters.refs.install(slice, bytes.into(), &keep);
        Ok(())
    }

    /// Lowers the counts of clusters that no entry on disk refers to any more.
    pub(in crate::qcow2) async fn lower_counts(&self, port: &Port) -> io::Result<()> {
        for _ in 0..MAX_LOWERED {
            let Some(left) = self.base.state().clusters.next_due() else { break };
            if let Err(e) = self.load_refs(port, left.cluster).await {
                self.base.state().clusters.still_due(left);
                return Err(e);
            }
            self.base.state().clusters.lower(left);
        }
        Ok(())
    }

    /// Writes the counts that a commit has taken, without a sync.
    pub(in crate::qcow2) async fn write_counts(
        &self,
        port: &Port,
        dirty: &Dirty,
    ) -> io::Result<()> {
        let places: Vec<u64> = dirty.refs.iter().map(|(_, offset)| *offset).collect();
        let slice_bytes = self.base.state().clusters.refs.slice_bytes();
        let slices = dirty.refs.iter().map(|(slice, _)| *slice);
        let slices = slices.clone().min().unwrap_or(0)..slices.max().map_or(0, |last| last + 1);
        self.base.state().counts_change(Writer::Commit, slices.clone());
        meta::write_blocks(port, port.files[0], slice_bytes, &places, |i, block| {
            let mut state = self.base.state();
            block.copy_from_slice(state.clusters.refs.bytes(dirty.refs[i].0));
            state.counts_become(dirty.refs[i].0, block);
        })
        .await?;
        self.base.state().counts_changed(Writer::Commit, &slices);
        Ok(())
    }

    /// Takes a cluster that a dead process's record refers to. A commit of that process may have written its count
    /// already, since a cluster is taken before its data are written. `true`: it has a count.
    ///
    /// # Errors
    /// `InvalidData`: the cluster is not that process's any more. Those of reading.
    pub(in crate::qcow2) fn take_recovered(&self, cluster: u64) -> io::Result<bool> {
        let others = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        if (cluster << self.cluster_bits) + self.cluster_bytes() > self.limit() {
            return Err(others("a cluster is outside of the file"));
        }
        let medium = &self.base.medium;
        let refs = &mut self.base.state().clusters.refs;
        let slice = refs.slice_of(cluster);
        if !refs.holds(slice) {
            let offset = refs.offset(slice).ok_or_else(|| others("a refcount block is gone"))?;
            let bytes = read_whole(medium, offset, refs.slice_bytes())?;
            refs.install(slice, bytes.into(), &[]);
        }
        match refs.get(cluster) {
            Some(0) => {
                if !medium.read_only() {
                    refs.set(cluster, 1);
                }
                Ok(false)
            }
            Some(1) => Ok(true),
            _ => Err(others("a cluster has got another use")),
        }
    }
}
