//! Free clusters between used ones. They come from deleted snapshots, discards of other programs, discards on a device,
//! and replaced compressed data. They are used before the file grows.
//!
//! Each slice of refcounts is searched once, from the start of the file on, a few whenever fresh clusters are needed.
//! So opening costs nothing, and a full image of any size a little at a time. Clusters that were free at opening are
//! given out at once: their release was durable then, and the previous process has nothing in flight any more.
//!
//! # Clusters that become free while the image is open
//! One rule holds for data, compressed data and tables. A cluster is given out again when all of these have happened:
//! 1. A commit has removed the last reference from the disk, and synced that. Until then a power cut could bring the
//!    reference back, and with it another cluster's data.
//! 2. The epoch is two further than it was then ([`epochs`](crate::epochs)): no read of the place is in flight, and no
//!    write in place.
//! 3. A later commit has written its count of 0 to the disk. A process that dies then leaves a journal whose references
//!    to the cluster are checked against that count.
//!
//! The epoch advances when a commit has ended, and when clusters are wanted. Until all three have happened the cluster
//! is in [`quarantine`](super::quarantine). Then its slice of refcounts is searched again. A reader that never ends
//! blocks no writer: the freed clusters are found after the next opening.

use std::io;

use ferrite_disk_base::{Port, Rare};

use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::clusters::{Clusters, Run};

/// The slices of refcounts that are searched at once: half a GiB each, with the usual clusters.
const SLICES_AT_ONCE: u32 = 8;
/// The runs that are set aside at once; each takes system calls of its own.
const MAX_RUNS: usize = 64;

impl Allocator {
    /// Sets free clusters between used ones aside, at most `wanted`; `None`: there are no more, or none were found this
    /// time.
    pub(in crate::qcow2) async fn reuse(&self, port: &Port, wanted: u64) -> io::Result<Vec<Run>> {
        self.base.state().clusters.end_quarantine();
        let mut left = wanted;
        for _ in 0..SLICES_AT_ONCE {
            let Some(at) = self.next_to_search() else { break };
            self.load_refs(port, at).await?;
            let clusters = &mut self.base.state().clusters;
            left -= self.claim_in_slice(clusters, at, left);
            if left == 0 || clusters.claimed.len() == MAX_RUNS {
                break;
            }
        }
        let claimed = self.base.state().clusters.claimed.clone();
        let mut runs = Vec::with_capacity(claimed.len());
        for run in claimed {
            match self.provide_some(port, run.next, run.end).await {
                Ok((end, zeroed)) => runs.push(Run { end, zeroed, ..run }),
                Err(e) if runs.is_empty() => {
                    self.base.state().clusters.unclaim();
                    return Err(e);
                }
                Err(_) => {}
            }
            if runs.last().is_none_or(|last| last.end != run.end) {
                // Clusters for which there was no space are searched again later.
                self.base.state().clusters.search_claimed_again();
                break;
            }
        }
        Ok(runs)
    }

    /// The cluster at which to search on; ranges without a block of refcounts are skipped.
    fn next_to_search(&self) -> Option<u64> {
        let clusters = &mut self.base.state().clusters;
        if let Some(slice) = clusters.next_to_search() {
            return Some(slice * clusters.refs.slice_entries());
        }
        let mut range = clusters.search.clone()?;
        let (slice_entries, block_entries) =
            (clusters.refs.slice_entries(), clusters.refs.block_entries());
        while !range.is_empty() {
            let slice = clusters.refs.slice_of(range.start);
            if clusters.refs.offset(slice).is_none() {
                range.start = (range.start / block_entries + 1) * block_entries;
            } else if clusters.quarantine.is_shut(slice) {
                range.start = (slice + 1) * slice_entries;
            } else {
                break;
            }
        }
        let found = (!range.is_empty()).then_some(range.start);
        clusters.search = Some(range);
        found
    }

    /// Claims the free clusters of the slice of `from`, from there on, or of a whole slice that is searched again;
    /// their number.
    fn claim_in_slice(&self, clusters: &mut Clusters, from: u64, wanted: u64) -> u64 {
        let Some(range) = clusters.search.clone() else { return 0 };
        let (slice, entries) = (clusters.refs.slice_of(from), clusters.refs.slice_entries());
        if clusters.quarantine.is_shut(slice) {
            return 0;
        }
        let to_search = clusters.to_search(slice);
        // Freed clusters may be after the first search's end.
        let end = to_search.and(clusters.end).unwrap_or(range.end).min((slice + 1) * entries);
        let (mut at, mut got) = (if to_search.is_some() { slice * entries } else { from }, 0);
        while at < end && got < wanted && clusters.claimed.len() < MAX_RUNS {
            // Refcounts that deny a table are wrong, or hostile (T17).
            let free = |cluster: &u64| {
                clusters.refs.get(*cluster) == Some(0)
                    && !self.is_table(*cluster)
                    && !clusters.is_set_aside(*cluster)
                    && !clusters.quarantine.has(*cluster)
            };
            let Some(first) = (at..end).find(free) else {
                at = end;
                break;
            };
            let count = (first..end).take((wanted - got) as usize).take_while(free).count() as u64;
            clusters.claimed.push(Run { next: first, end: first + count, zeroed: false });
            (at, got) = (first + count, got + count);
        }
        match to_search {
            Some(true) if got > 0 => Rare::DataClusterReused.taken(),
            Some(false) if got > 0 => Rare::ClusterReused.taken(),
            _ => {}
        }
        match to_search {
            Some(_) if at < end => {}
            Some(_) => clusters.searched_again(slice),
            None => clusters.search = Some(at..range.end),
        }
        got
    }
}
