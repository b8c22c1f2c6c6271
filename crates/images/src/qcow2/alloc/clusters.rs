//! Who has which cluster, in memory: the states of [`super`]'s picture, and the steps between them.
//! Under the lock of the image's state, so that a step and what entries say of it are one.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use ferrite_disk_base::Epochs;

use crate::qcow2::alloc::quarantine::{Left, Quarantine};
use crate::qcow2::alloc::refs::Refs;

/// Free clusters with space behind them, to be given to writes in order.
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

/// What a commit takes with it of the allocator.
pub(in crate::qcow2) struct Dirty {
    /// Slices of refcounts, with their places.
    pub(super) refs: Vec<(u64, u64)>,
    /// Clusters that lose a reference with it, and whether they have data that are not compressed.
    leaving: Vec<(u64, bool)>,
    /// Clusters that came free, and whose counts it brings to the disk.
    lowered: Vec<Left>,
}

/// See the module text.
pub(in crate::qcow2) struct Clusters {
    pub(super) refs: Refs,
    /// Set aside: clusters are taken from here.
    pub(super) run: Run,
    /// What follows it.
    pub(super) spares: VecDeque<Run>,
    /// Runs that are being set aside: their counts stay in memory, too.
    pub(super) claimed: Vec<Run>,
    /// Where free clusters between others are looked for; none: it is not yet known where the
    /// clusters in use end.
    pub(super) search: Option<Range<u64>>,
    /// Clusters that are free and may not be given out, or not yet.
    pub(super) quarantine: Quarantine,
    /// By which it is known who may have been told of a cluster.
    epochs: Arc<Epochs>,
    /// Slices of refcounts to be searched once more: clusters in them came free, and may be used. Whether
    /// they had data that were not compressed.
    to_search: BTreeMap<u64, bool>,
    /// Nothing is looked for between others any more.
    pub(super) only_behind: bool,
    /// Where the next run is looked for, as a cluster; none: not yet known.
    pub(super) end: Option<u64>,
    /// Clusters of the next run.
    pub(super) step: u64,
    /// Behind the last cluster that is in use.
    pub(super) used_end: u64,
    /// Clusters that lose a reference with the changes that no commit has taken yet.
    leaving: Vec<(u64, bool)>,
    /// Clusters to which no entry on disk refers any more: their counts may go down.
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

    /// Free clusters have been set aside.
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

    /// Slices of refcounts that have to stay in memory: a cluster is taken without waiting.
    pub(super) fn kept_refs(&self) -> Vec<u64> {
        let runs = self.spares.iter().chain(&self.claimed).chain([&self.run]);
        runs.map(|run| self.refs.slice_of(run.next)).collect()
    }

    /// Nothing refers to a fresh cluster after all. Data may be on the way to it, or it cannot be
    /// written, so it is not given out again before the image is opened next.
    pub(in crate::qcow2) fn untake(&mut self, cluster: u64) {
        self.quarantine.hold(cluster, self.refs.slice_of(cluster));
        if self.refs.get(cluster).is_some() {
            self.refs.set(cluster, 0);
        } else {
            self.due([cluster].into_iter());
        }
    }

    /// Nothing refers to a fresh cluster after all, nothing is on the way to it, and there is no
    /// reason to think that it cannot be written: it is the next but one to be given out.
    pub(in crate::qcow2) fn give_back(&mut self, cluster: u64) {
        if self.refs.get(cluster).is_none() {
            return self.untake(cluster);
        }
        self.refs.set(cluster, 0);
        self.spares.push_back(Run { next: cluster, end: cluster + 1, zeroed: false });
    }

    /// Entries in memory do not refer to clusters any more; those on the medium still do. `data`: they
    /// have data that are not compressed.
    pub(in crate::qcow2) fn leave(&mut self, clusters: impl Iterator<Item = u64>, data: bool) {
        self.leaving.extend(clusters.map(|cluster| (cluster, data)));
    }

    /// No entry on the medium refers to clusters any more, or counts are too high by one.
    pub(in crate::qcow2) fn due(&mut self, clusters: impl Iterator<Item = u64>) {
        self.all_due(clusters.map(|cluster| (cluster, false)));
    }

    fn all_due(&mut self, clusters: impl Iterator<Item = (u64, bool)>) {
        let removed = self.epochs.removed();
        self.due.extend(clusters.map(|(cluster, data)| Left { cluster, data, removed }));
    }

    /// What leaves has left: the entries that do not refer to it any more are durable.
    pub(in crate::qcow2) fn have_left(&mut self) {
        let leaving = std::mem::take(&mut self.leaving);
        self.all_due(leaving.into_iter());
    }

    /// One whose count may go down.
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

    /// One whose count could not be lowered.
    pub(super) fn still_due(&mut self, left: Left) {
        self.due.push(left);
    }

    /// Ends the quarantine of clusters that nobody can have been told of.
    pub(super) fn end_quarantine(&mut self) {
        if !self.quarantine.is_waiting() {
            return;
        }
        for left in self.quarantine.end(self.epochs.ended()) {
            self.search_again(left.cluster, left.data);
        }
    }

    /// Free clusters around this one are looked for once more; before the first search all are
    /// still ahead.
    pub(super) fn search_again(&mut self, cluster: u64, data: bool) {
        if self.search.is_some() && !self.only_behind {
            *self.to_search.entry(self.refs.slice_of(cluster)).or_insert(data) |= data;
        }
    }

    /// The first slice to be searched once more.
    pub(super) fn next_to_search(&self) -> Option<u64> {
        self.to_search.keys().copied().find(|slice| !self.quarantine.is_shut(*slice))
    }

    /// Whether a slice is to be searched once more, and if so, whether for places of data that were not
    /// compressed.
    pub(super) fn to_search(&self, slice: u64) -> Option<bool> {
        self.to_search.get(&slice).copied()
    }

    /// It was, to its end.
    pub(super) fn searched_again(&mut self, slice: u64) {
        self.to_search.remove(&slice);
    }

    /// Forgets the runs that were being set aside by a task that was dropped.
    pub(in crate::qcow2) fn unclaim(&mut self) {
        self.search_claimed_again();
        self.claimed.clear();
    }

    /// Looks once more at where the runs are that are being set aside.
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

    /// Takes what is dirty for a commit.
    pub(in crate::qcow2) fn begin_commit(&mut self) -> Dirty {
        Dirty {
            refs: self.refs.begin_writing(),
            leaving: std::mem::take(&mut self.leaving),
            lowered: self.quarantine.take_lowered(),
        }
    }

    /// The end of a commit. After one that failed everything is as dirty as before it.
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

    /// Whether there are counts that a commit has to write.
    pub(in crate::qcow2) fn has_dirty_counts(&self) -> bool {
        self.refs.dirty() > 0
    }

    /// Whether the disk lacks anything that is known here.
    pub(in crate::qcow2) fn is_dirty(&self) -> bool {
        self.has_dirty_counts() || !self.due.is_empty() || !self.leaving.is_empty()
    }

    /// Gives up what is set aside.
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
