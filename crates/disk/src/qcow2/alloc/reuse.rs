//! Free clusters between others, which snapshots that were deleted, other programs' discards and
//! compressed data that were replaced leave: they are used before the file grows.
//!
//! Each slice of refcounts is looked at once, from the start of the file on, some whenever fresh
//! clusters are needed; so opening costs nothing, and a full image of any size little at a time.
//! What was free when the image was opened is given out at once: its release was durable then, and
//! whoever held the image before has nothing in flight any more.
//!
//! # What comes free while the image is open
//! A cluster is given out again when these have happened, in this order:
//! 1. A commit has removed the last reference from the disk, and synced that. Until then a cut of
//!    the power could bring the reference back, and with it another's data.
//! 2. Whoever was reading there is done. Its count stays up until then (`Clusters::unpacking`).
//! 3. The next commit has brought its count of 0 to the disk. A process that dies then leaves a
//!    journal whose references to it are believed by that count.
//!
//! Its slice of refcounts is passed by meanwhile (`Clusters::is_quarantined`), and looked at again
//! afterwards.
//!
//! Reads of data that are not compressed are done by queues, which do not say when they are done
//! with a place. So a cluster of data that comes free is found after the next opening. There are
//! few of them: the image's own clusters keep their places for good, and shared ones keep the
//! snapshot's reference.

use std::io;

use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::clusters::{Clusters, Run};
use crate::{Port, Rare};

/// Slices of refcounts that are looked at in one go: half a GiB each, with the usual clusters.
const SLICES_AT_ONCE: u32 = 8;
/// Runs that are set aside in one go; each takes calls to the kernel of its own.
const MAX_RUNS: usize = 64;

impl Allocator {
    /// Sets free clusters aside that are between others, `wanted` at most; none: there are no
    /// more, or none were found this time.
    pub(in crate::qcow2) async fn reuse(&self, port: &Port, wanted: u64) -> io::Result<Vec<Run>> {
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
                // What got no space is looked at again, if there is some by then.
                self.base.state().clusters.search_claimed_again();
                break;
            }
        }
        Ok(runs)
    }

    /// The cluster from which on to look; where there is no block of refcounts there is nothing.
    fn next_to_search(&self) -> Option<u64> {
        let clusters = &mut self.base.state().clusters;
        if let Some(slice) = clusters.next_again() {
            return Some(slice * clusters.refs.slice_entries());
        }
        let mut range = clusters.search.clone()?;
        let (slice_entries, block_entries) =
            (clusters.refs.slice_entries(), clusters.refs.block_entries());
        while !range.is_empty() {
            let slice = clusters.refs.slice_of(range.start);
            if clusters.refs.offset(slice).is_none() {
                range.start = (range.start / block_entries + 1) * block_entries;
            } else if clusters.is_quarantined(slice) {
                range.start = (slice + 1) * slice_entries;
            } else {
                break;
            }
        }
        let found = (!range.is_empty()).then_some(range.start);
        clusters.search = Some(range);
        found
    }

    /// Claims the free clusters of the slice of `from`, from there on, or all of one that is looked
    /// at again; how many.
    fn claim_in_slice(&self, clusters: &mut Clusters, from: u64, wanted: u64) -> u64 {
        let Some(range) = clusters.search.clone() else { return 0 };
        let (slice, entries) = (clusters.refs.slice_of(from), clusters.refs.slice_entries());
        let end = ((slice + 1) * entries).min(range.end);
        if clusters.is_quarantined(slice) {
            return 0;
        }
        let again = clusters.is_again(slice);
        let (mut at, mut got) = (if again { slice * entries } else { from }, 0);
        while at < end && got < wanted && clusters.claimed.len() < MAX_RUNS {
            // Refcounts that deny a table are wrong, or made to harm (T17).
            let free = |cluster: &u64| {
                clusters.refs.get(*cluster) == Some(0)
                    && !self.is_table(*cluster)
                    && !clusters.is_set_aside(*cluster)
            };
            let Some(first) = (at..end).find(free) else {
                at = end;
                break;
            };
            let count = (first..end).take((wanted - got) as usize).take_while(free).count() as u64;
            clusters.claimed.push(Run { next: first, end: first + count, zeroed: false });
            (at, got) = (first + count, got + count);
        }
        if again && got > 0 {
            Rare::ClusterReused.taken();
        }
        match again {
            true if at < end => {}
            true => clusters.searched_again(slice),
            false => clusters.search = Some(at..range.end),
        }
        got
    }
}
