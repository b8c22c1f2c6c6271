//! Free clusters between others, which snapshots that were deleted and other programs' discards
//! leave: they are used before the file grows.
//!
//! Each slice of refcounts is looked at once, from the start of the file on, some whenever fresh
//! clusters are needed; so opening costs nothing, and a full image of any size little at a time.
//! Only what was free when the image was opened is given out. Its release was durable then, and
//! whoever held the image before has nothing in flight any more. A cluster that comes free while
//! the image is open may have operations on their way to it (a read that was mapped before the
//! entry changed), so the slice with its count is passed by, and it is found after the next
//! opening.

use std::io;

use super::Qcow2;
use super::state::{Run, State};
use crate::Port;

/// Slices of refcounts that are looked at in one go: half a GiB each, with the usual clusters.
const SLICES_AT_ONCE: u32 = 8;
/// Runs that are set aside in one go; each takes calls to the kernel of its own.
const MAX_RUNS: usize = 64;

impl Qcow2 {
    /// Sets free clusters aside that are between others, `wanted` at most; none: there are no
    /// more, or none were found this time.
    pub(super) async fn reuse(&self, port: &Port, wanted: u64) -> io::Result<Vec<Run>> {
        let mut left = wanted;
        for _ in 0..SLICES_AT_ONCE {
            let Some(at) = self.next_to_search() else { break };
            self.load_refs(port, at).await?;
            let mut state = self.state();
            left -= self.claim_in_slice(&mut state, at, left);
            if left == 0 || state.claimed.len() == MAX_RUNS {
                break;
            }
        }
        let mut runs = self.state().claimed.clone();
        for i in 0..runs.len() {
            match self.provide(port, runs[i].next, runs[i].end).await {
                Ok((end, zeroed)) => (runs[i].end, runs[i].zeroed) = (end, zeroed),
                Err(e) => {
                    // They are looked at again, if there is space by then.
                    let mut state = self.state();
                    if let Some(range) = &mut state.search {
                        range.start = runs[0].next;
                    }
                    return Err(e);
                }
            }
        }
        Ok(runs)
    }

    /// The cluster from which on to look; where there is no block of refcounts there is nothing.
    fn next_to_search(&self) -> Option<u64> {
        let mut state = self.state();
        let mut range = state.search.clone()?;
        let (slice_entries, block_entries) =
            (state.refs.slice_entries(), state.refs.block_entries());
        while !range.is_empty() {
            let slice = state.refs.slice_of(range.start);
            if state.refs.offset(slice).is_none() {
                range.start = (range.start / block_entries + 1) * block_entries;
            } else if state.has_freed(slice) {
                range.start = (slice + 1) * slice_entries;
            } else {
                break;
            }
        }
        let found = (!range.is_empty()).then_some(range.start);
        state.search = Some(range);
        found
    }

    /// Claims the free clusters of the slice of `from`, from there on; how many.
    fn claim_in_slice(&self, state: &mut State, from: u64, wanted: u64) -> u64 {
        let Some(range) = state.search.clone() else { return 0 };
        let entries = state.refs.slice_entries();
        let end = ((from / entries + 1) * entries).min(range.end);
        if state.has_freed(state.refs.slice_of(from)) {
            return 0;
        }
        let (mut at, mut got) = (from, 0);
        while at < end && got < wanted && state.claimed.len() < MAX_RUNS {
            // Refcounts that deny a table are wrong, or made to harm (T17).
            let free = |cluster: &u64| {
                state.refs.get(*cluster) == Some(0) && self.metadata.binary_search(cluster).is_err()
            };
            let Some(first) = (at..end).find(free) else {
                at = end;
                break;
            };
            let count = (first..end).take((wanted - got) as usize).take_while(free).count() as u64;
            state.claimed.push(Run { next: first, end: first + count, zeroed: false });
            (at, got) = (first + count, got + count);
        }
        state.search = Some(at..range.end);
        got
    }
}
