//! The state of each cluster in memory: the states of [`super`]'s picture, and the steps between them. All are under
//! the lock of the image's state, so that a step and its entry change together.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use ferrite_disk_base::Epochs;

use crate::qcow2::alloc::quarantine::{Left, Quarantine};
use crate::qcow2::alloc::refs::Refs;

/// A run of free clusters with space, given to writes in order.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::qcow2) struct Run {
    pub(in crate::qcow2) next: u64,
    pub(super) end: u64,
    /// The space reads as zeros.
    pub(super) zeroed: bool,
}

impl Run {
    pub(super) fn left(&self) -> u64 {
        self.end - self.next
    }
}

/// The allocator's changes that a commit takes.
pub(in crate::qcow2) struct Dirty {
    /// Slices of refcounts, with their places.
    pub(super) refs: Vec<(u64, u64)>,
    /// Clusters that lose a reference with it, and whether they have uncompressed data.
    leaving: Vec<(u64, bool)>,
    /// Clusters that became free, and whose counts this commit writes.
    lowered: Vec<Left>,
}

/// See the module text.
pub(in crate::qcow2) struct Clusters {
    pub(super) refs: Refs,
    /// The run that clusters are taken from.
    pub(super) run: Run,
    /// The runs after it.
    pub(super) spares: VecDeque<Run>,
    /// Runs that are being set aside: their counts stay in memory, too.
    pub(super) claimed: Vec<Run>,
    /// Where free clusters between used ones are searched; `None`: the end of the used clusters is not known yet.
    pub(super) search: Option<Range<u64>>,
    /// Free clusters that may not be given out, or not yet.
    pub(super) quarantine: Quarantine,
    /// Tells whether an operation may still use a cluster's place.
    epochs: Arc<Epochs>,
    /// Slices of refcounts to be searched again: clusters in them became free and may be used. The value: whether they
    /// had uncompressed data.
    to_search: BTreeMap<u64, bool>,
    /// Free clusters between used ones are not searched any more.
    pub(super) only_behind: bool,
    /// The cluster at which the next run is searched; `None`: not known yet.
    pub(super) end: Option<u64>,
    /// Clusters of the next run.
    pub(super) step: u64,
    /// The cluster after the last one in use.
    pub(super) used_end: u64,
    /// Clusters that lose a reference with changes that no commit has taken yet.
    leaving: Vec<(u64, bool)>,
    /// Clusters that no entry on disk refers to any more: their counts may be lowered.
    due: Vec<Left>,
}

impl Clusters {
    pub(in crate::qcow2) fn new(refs: Refs, epochs: Arc<Epochs>) -> Clusters {
        Clusters {
            refs,
            run: Run::default(),
            spares: VecDeque::new(),
            claimed: Vec::new(),
            search: None,
            quarantine: Quarantine::default(),
            epochs,
            to_search: BTreeMap::new(),
            only_behind: false,
            end: None,
            step: 0,
            used_end: 0,
            leaving: Vec::new(),
            due: Vec::new(),
        }
    }

    /// Adds free clusters that have been set aside.
    pub(super) fn set_aside(&mut self, runs: Vec<Run>) {
        self.claimed.clear();
        self.spares.extend(runs);
        if self.run.left() == 0 {
            self.run = self.spares.pop_front().unwrap_or_default();
        }
    }

    /// Whether it is time to set the next run aside.
    pub(in crate::qcow2) fn is_low(&self) -> bool {
        self.spares.is_empty() && self.run.left() <= self.step / 2
    }

    /// The cluster that is taken next, and whether it reads as zeros.
    pub(in crate::qcow2) fn next(&self) -> Option<(u64, bool)> {
        let run = if self.run.left() > 0 { &self.run } else { self.spares.front()? };
        Some((run.next, run.zeroed))
    }

    /// A fresh cluster, which counts as used from now on, and whether it reads as zeros.
    pub(in crate::qcow2) fn take(&mut self) -> Option<(u64, bool)> {
        if self.run.left() == 0 {
            self.run = self.spares.pop_front()?;
        }
        let cluster = self.run.next;
        self.run.next += 1;
        self.refs.set(cluster, 1);
        self.used_end = self.used_end.max(cluster + 1);
        Some((cluster, self.run.zeroed))
    }

    /// Slices of refcounts that have to stay in memory, so that taking a cluster does not wait.
    pub(super) fn kept_refs(&self) -> Vec<u64> {
        let runs = self.spares.iter().chain(&self.claimed).chain([&self.run]);
        runs.map(|run| self.refs.slice_of(run.next)).collect()
    }

    /// Takes back a fresh cluster that nothing refers to. Data may be in flight to it, or it cannot be written, so it
    /// is not given out again before the image is opened next.
    pub(in crate::qcow2) fn untake(&mut self, cluster: u64) {
        self.quarantine.hold(cluster, self.refs.slice_of(cluster));
        if self.refs.get(cluster).is_some() {
            self.refs.set(cluster, 0);
        } else {
            self.due([cluster].into_iter());
        }
    }

    /// Takes back a fresh cluster that nothing refers to. Nothing is in flight to it, and no write to it has failed: it
    /// is given out after the next one.
    pub(in crate::qcow2) fn give_back(&mut self, cluster: u64) {
        if self.refs.get(cluster).is_none() {
            return self.untake(cluster);
        }
        self.refs.set(cluster, 0);
        self.spares.push_back(Run { next: cluster, end: cluster + 1, zeroed: false });
    }

    /// Marks clusters that entries in memory do not refer to any more; entries on the medium still do. `data`: they
    /// have uncompressed data.
    pub(in crate::qcow2) fn leave(&mut self, clusters: impl Iterator<Item = u64>, data: bool) {
        self.leaving.extend(clusters.map(|cluster| (cluster, data)));
    }

    /// Marks clusters that no entry on the medium refers to any more, or whose counts are too high by one.
    pub(in crate::qcow2) fn due(&mut self, clusters: impl Iterator<Item = u64>) {
        self.all_due(clusters.map(|cluster| (cluster, false)));
    }

    fn all_due(&mut self, clusters: impl Iterator<Item = (u64, bool)>) {
        let removed = self.epochs.removed();
        self.due.extend(clusters.map(|(cluster, data)| Left { cluster, data, removed }));
    }

    /// Moves leaving clusters on: the entries without their references are durable.
    pub(in crate::qcow2) fn have_left(&mut self) {
        let leaving = std::mem::take(&mut self.leaving);
        self.all_due(leaving.into_iter());
    }

    /// Takes a cluster whose count may be lowered.
    pub(super) fn next_due(&mut self) -> Option<Left> {
        self.due.pop()
    }

    /// Lowers a count that is in memory. At 0 the cluster is free, and in quarantine.
    pub(super) fn lower(&mut self, left: Left) {
        // Without a count there is nothing to lower: the image was damaged before.
        if let Some(count) = self.refs.get(left.cluster).filter(|count| *count > 0) {
            self.refs.set(left.cluster, count - 1);
            if count == 1 {
                self.quarantine.begin(left, self.refs.slice_of(left.cluster));
            }
        }
    }

    /// Takes back a cluster whose count could not be lowered.
    pub(super) fn still_due(&mut self, left: Left) {
        self.due.push(left);
    }

    /// Ends the quarantine of clusters that no operation can use any more.
    pub(super) fn end_quarantine(&mut self) {
        if !self.quarantine.is_waiting() {
            return;
        }
        for left in self.quarantine.end(self.epochs.ended()) {
            self.search_again(left.cluster, left.data);
        }
    }

    /// Has free clusters around this one searched again. Before the first search there is nothing to do, as it will
    /// find them.
    pub(super) fn search_again(&mut self, cluster: u64, data: bool) {
        if self.search.is_some() && !self.only_behind {
            *self.to_search.entry(self.refs.slice_of(cluster)).or_insert(data) |= data;
        }
    }

    /// The first slice to be searched once more.
    pub(super) fn next_to_search(&self) -> Option<u64> {
        self.to_search.keys().copied().find(|slice| !self.quarantine.is_shut(*slice))
    }

    /// Whether a slice is to be searched again, and if so, whether for places of uncompressed data.
    pub(super) fn to_search(&self, slice: u64) -> Option<bool> {
        self.to_search.get(&slice).copied()
    }

    /// Marks a slice as searched to its end.
    pub(super) fn searched_again(&mut self, slice: u64) {
        self.to_search.remove(&slice);
    }

    /// Drops the runs that a task was setting aside when it was dropped.
    pub(in crate::qcow2) fn unclaim(&mut self) {
        self.search_claimed_again();
        self.claimed.clear();
    }

    /// Has the places of runs that are being set aside searched again.
    pub(super) fn search_claimed_again(&mut self) {
        for run in self.claimed.clone() {
            self.search_again(run.next, false);
        }
    }

    /// Whether a cluster is one of those set aside.
    pub(super) fn is_set_aside(&self, cluster: u64) -> bool {
        let mut runs = self.spares.iter().chain(&self.claimed).chain([&self.run]);
        runs.any(|run| (run.next..run.end).contains(&cluster))
    }

    /// Takes the dirty state for a commit.
    pub(in crate::qcow2) fn begin_commit(&mut self) -> Dirty {
        Dirty {
            refs: self.refs.begin_writing(),
            leaving: std::mem::take(&mut self.leaving),
            lowered: self.quarantine.take_lowered(),
        }
    }

    /// Ends a commit. After a failed one everything is as dirty as before.
    pub(in crate::qcow2) fn end_commit(&mut self, dirty: &mut Dirty, done: bool) {
        self.refs.end_writing(&dirty.refs, done);
        self.quarantine.committed(&mut dirty.lowered, done);
        if done {
            self.all_due(dirty.leaving.drain(..));
            self.end_quarantine();
        } else {
            self.leaving.append(&mut dirty.leaving);
        }
    }

    /// Whether a commit has counts to write.
    pub(in crate::qcow2) fn has_dirty_counts(&self) -> bool {
        self.refs.dirty() > 0
    }

    /// Whether the disk lacks any change in memory.
    pub(in crate::qcow2) fn is_dirty(&self) -> bool {
        self.has_dirty_counts() || !self.due.is_empty() || !self.leaving.is_empty()
    }

    /// Drops the clusters that are set aside.
    pub(in crate::qcow2) fn forget_runs(&mut self) {
        self.run = Run::default();
        self.spares.clear();
    }
}

#[cfg(test)]
impl Clusters {
    pub(in crate::qcow2) fn is_quarantined(&self, cluster: u64) -> bool {
        self.quarantine.has(cluster)
    }

    pub(in crate::qcow2) fn refs(&mut self) -> &mut Refs {
        &mut self.refs
    }

    pub(in crate::qcow2) fn used_end(&self) -> u64 {
        self.used_end
    }
}
