//! Allocates file-system space for tables that are holes.
//!
//! A new image has tables that were never written, and a copy of an image has a hole wherever a table is zero. Data may
//! take all free space. So each table gets space before the first write is accepted: otherwise writes would be answered
//! whose references no commit has space for.

use std::io;
use std::ops::Range;

use ferrite_disk_base::{Port, Run};

use crate::qcow2::alloc::Allocator;

impl Allocator {
    /// Has the file system allocate all tables that existed when the image was opened. The caller has
    /// [lengthened](Self::lengthen) the file to whole clusters.
    ///
    /// # Errors
    /// `StorageFull`: not all of them have space; the image is unchanged.
    pub(in crate::qcow2) async fn fill_holes_of_tables(&self, port: &Port) -> io::Result<()> {
        if !self.base.medium.is_file() {
            return Ok(());
        }
        for run in runs(&self.metadata, self.cluster_bits) {
            if matches!(self.base.medium.run_at(run.start), Some(Run::Data(end)) if end >= run.end)
            {
                continue;
            }
            match port.io.allocate(port.files[0], run.start, run.end - run.start).await {
                // A file system without allocation gives no guarantee.
                Err(e) if e.kind() == io::ErrorKind::Unsupported => return Ok(()),
                done => done?,
            }
        }
        Ok(())
    }
}

/// The byte ranges of sorted clusters, adjacent ones merged.
fn runs(clusters: &[u64], cluster_bits: u32) -> impl Iterator<Item = Range<u64>> + '_ {
    clusters
        .chunk_by(|cluster, next| cluster + 1 == *next)
        .map(move |run| run[0] << cluster_bits..(run[run.len() - 1] + 1) << cluster_bits)
}
