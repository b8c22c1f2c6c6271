//! Free clusters between others: snapshots that were deleted, other programs' discards, discards on a
//! device, and compressed data that were replaced leave them. They are used before the file grows.
//!
//! Each slice of refcounts is looked at once, from the start of the file on, some whenever fresh
//! clusters are needed; so opening costs nothing, and a full image of any size little at a time.
//! What was free when the image was opened is given out at once: its release was durable then, and
//! whoever held the image before has nothing in flight any more.
//!
//! # What comes free while the image is open
//! There is one rule, whatever was in the cluster: data, compressed data, a table. It is given out again
//! when all of these have happened:
//! 1. A commit has removed the last reference from the disk, and synced that. Until then a cut of
//!    the power could bring the reference back, and with it another's data.
//! 2. The epoch is two further than it was then ([`epochs`](crate::epochs)): nobody reads there any more,
//!    and no write in place is on its way there.
//! 3. A later commit has brought its count of 0 to the disk. A process that dies then leaves a
//!    journal whose references to it are believed by that count.
//!
//! The epoch goes on when a commit has ended, and when clusters are wanted. Until all three have happened
//! the cluster is in [`quarantine`](super::quarantine). Then its slice of refcounts is searched once more.
//! A reader that never ends blocks nobody: what comes free is found after the next opening.

use std::io;

use ferrite_disk_base::{Port, Rare};

use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::clusters::{Clusters, Run};

/// Slices of refcounts that are looked at in one go: half a GiB each, with the usual clusters.
const SLICES_AT_ONCE: u32 = 8;
/// Runs that are set aside in one go; each takes calls to the kernel of its own.
const MAX_RUNS: usize = 64;

impl Allocator {
    /// Sets free clusters aside that are between others, `wanted` at most; none: there are no
    /// more, or none were found this time.
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
                // What got no space is searched once more, if there is some by then.
                self.base.state().clusters.search_claimed_again();
                break;
            }
        }
        Ok(runs)
    }

    /// The cluster from which on to look; where there is no block of refcounts there is nothing.
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

    /// Claims the free clusters of the slice of `from`, from there on, or all of one that is
    /// searched once more; how many.
    fn claim_in_slice(&self, clusters: &mut Clusters, from: u64, wanted: u64) -> u64 {
        let Some(range) = clusters.search.clone() else { return 0 };
        let (slice, entries) = (clusters.refs.slice_of(from), clusters.refs.slice_entries());
        if clusters.quarantine.is_shut(slice) {
            return 0;
        }
        let to_search = clusters.to_search(slice);
        // What came free may have been taken behind all that there was at first.
        let end = to_search.and(clusters.end).unwrap_or(range.end).min((slice + 1) * entries);
        let (mut at, mut got) = (if to_search.is_some() { slice * entries } else { from }, 0);
        while at < end && got < wanted && clusters.claimed.len() < MAX_RUNS {
            // Refcounts that deny a table are wrong, or made to harm (T17).
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
