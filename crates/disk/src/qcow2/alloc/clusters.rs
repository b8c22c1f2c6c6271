//! Who has which cluster, in memory: the states of [`super`]'s picture, and the steps between them.
//! Under the lock of the image's state, so that a step and what entries say of it are one.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::{Range, RangeInclusive};

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

/// A cluster that loses a reference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) cluster: u64,
    /// Whoever still reads there is known: only compressed clusters and tables are read by code of
    /// this image. Data are also read by queues, which ask where they are and do not say when
    /// they are done.
    pub(super) readers_known: bool,
}

/// What a commit takes with it of the allocator.
pub(in crate::qcow2) struct Dirty {
    /// Slices of refcounts, with their places.
    pub(super) refs: Vec<(u64, u64)>,
    /// Clusters that lose a reference with it.
    leaving: Vec<Left>,
    /// Clusters that came free, and whose counts it brings to the disk.
    lowered: Vec<u64>,
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
    /// How many clusters of a slice of refcounts came free and may not be given out, or not yet:
    /// the slice is not searched.
    quarantined: HashMap<u64, u32>,
    /// Clusters among them whose counts were lowered and are not on disk yet.
    lowered: Vec<u64>,
    /// Slices of refcounts to be looked at again: clusters in them came free, and may be used.
    again: BTreeSet<u64>,
    /// Clusters with compressed data that are being read, by how many.
    unpacking: HashMap<u64, u32>,
    /// Where the next run is looked for, as a cluster; none: not yet known.
    pub(super) end: Option<u64>,
    /// Clusters of the next run.
    pub(super) step: u64,
    /// Behind the last cluster that is in use.
    pub(super) used_end: u64,
    /// Clusters that lose a reference with the changes that no commit has taken yet.
    leaving: Vec<Left>,
    /// Clusters to which no entry on disk refers any more: their counts may go down.
    due: Vec<Left>,
}

impl Clusters {
    pub(in crate::qcow2) fn new(refs: Refs) -> Clusters {
        Clusters {
            refs,
            run: Run::default(),
            spares: VecDeque::new(),
            claimed: Vec::new(),
            search: None,
            quarantined: HashMap::new(),
            lowered: Vec::new(),
            again: BTreeSet::new(),
            unpacking: HashMap::new(),
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
        if self.refs.get(cluster).is_some() {
            self.refs.set(cluster, 0);
            self.quarantine(cluster);
        } else {
            self.due([cluster].into_iter(), false);
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

    /// Entries in memory do not refer to clusters any more; those on the medium still do. Whether
    /// all who read there are known, see [`Left`].
    pub(in crate::qcow2) fn leave(
        &mut self,
        clusters: impl Iterator<Item = u64>,
        readers_known: bool,
    ) {
        self.leaving.extend(clusters.map(|cluster| Left { cluster, readers_known }));
    }

    /// No entry on the medium refers to clusters any more, or counts are too high by one.
    pub(in crate::qcow2) fn due(
        &mut self,
        clusters: impl Iterator<Item = u64>,
        readers_known: bool,
    ) {
        self.due.extend(clusters.map(|cluster| Left { cluster, readers_known }));
    }

    /// What leaves has left: the entries that do not refer to it any more are durable.
    pub(in crate::qcow2) fn have_left(&mut self) {
        self.due.append(&mut self.leaving);
    }

    /// One whose count may go down.
    pub(super) fn next_due(&mut self) -> Option<Left> {
        self.due.pop()
    }

    /// Lowers a count that is in memory; false: somebody is reading there, so it is due later.
    pub(super) fn lower(&mut self, left: Left) -> bool {
        if self.is_unpacking(left.cluster) {
            return false;
        }
        // Without a count there is nothing to lower: the image was damaged before.
        if let Some(count) = self.refs.get(left.cluster).filter(|count| *count > 0) {
            self.refs.set(left.cluster, count - 1);
            if count == 1 {
                self.free(left);
            }
        }
        true
    }

    /// Those that could not be lowered.
    pub(super) fn still_due(&mut self, mut waiting: Vec<Left>) {
        self.due.append(&mut waiting);
    }

    /// A cluster has lost its last reference, on disk, too, and its count is 0 from now on. It is
    /// given out again when that count is on disk: a journal that says who has it is believed by
    /// the count (`Qcow2::recover`). Where somebody may still be reading, that is after the next
    /// opening.
    fn free(&mut self, left: Left) {
        self.quarantine(left.cluster);
        if left.readers_known {
            self.lowered.push(left.cluster);
        }
    }

    fn quarantine(&mut self, cluster: u64) {
        *self.quarantined.entry(self.refs.slice_of(cluster)).or_insert(0) += 1;
    }

    /// The count of a cluster that came free is on disk.
    fn end_quarantine(&mut self, cluster: u64) {
        let slice = self.refs.slice_of(cluster);
        let Some(count) = self.quarantined.get_mut(&slice) else { return };
        *count -= 1;
        if *count == 0 {
            self.quarantined.remove(&slice);
            self.search_again(cluster);
        }
    }

    /// Whether a slice of refcounts has a cluster that is free and may not be given out.
    pub(in crate::qcow2) fn is_quarantined(&self, slice: u64) -> bool {
        self.quarantined.contains_key(&slice)
    }

    /// Free clusters around this one are looked for once more; before the first search all are
    /// still ahead. Behind what was in use when the image was opened nothing is searched.
    pub(super) fn search_again(&mut self, cluster: u64) {
        if self.search.as_ref().is_some_and(|range| cluster < range.end) {
            self.again.insert(self.refs.slice_of(cluster));
        }
    }

    /// The first slice to be looked at again.
    pub(super) fn next_again(&self) -> Option<u64> {
        self.again.iter().copied().find(|slice| !self.is_quarantined(*slice))
    }

    /// Whether a slice is to be looked at again.
    pub(super) fn is_again(&self, slice: u64) -> bool {
        self.again.contains(&slice)
    }

    /// It was, to its end.
    pub(super) fn searched_again(&mut self, slice: u64) {
        self.again.remove(&slice);
    }

    /// Forgets the runs that were being set aside by a task that was dropped.
    pub(in crate::qcow2) fn unclaim(&mut self) {
        self.search_claimed_again();
        self.claimed.clear();
    }

    /// Looks once more at where the runs are that are being set aside.
    pub(super) fn search_claimed_again(&mut self) {
        for run in self.claimed.clone() {
            self.search_again(run.next);
        }
    }

    /// Whether a cluster is one of those set aside.
    pub(super) fn is_set_aside(&self, cluster: u64) -> bool {
        let mut runs = self.spares.iter().chain(&self.claimed).chain([&self.run]);
        runs.any(|run| (run.next..run.end).contains(&cluster))
    }

    /// Somebody begins to read compressed data, or ends; their clusters' counts stay meanwhile.
    pub(in crate::qcow2) fn unpacking(&mut self, clusters: RangeInclusive<u64>, begins: bool) {
        for cluster in clusters {
            let readers = self.unpacking.entry(cluster).or_insert(0);
            match begins {
                true => *readers += 1,
                false => *readers -= 1,
            }
            if *readers == 0 {
                self.unpacking.remove(&cluster);
            }
        }
    }

    /// Whether somebody reads compressed data in a cluster.
    pub(in crate::qcow2) fn is_unpacking(&self, cluster: u64) -> bool {
        self.unpacking.contains_key(&cluster)
    }

    /// Takes what is dirty for a commit.
    pub(in crate::qcow2) fn begin_commit(&mut self) -> Dirty {
        Dirty {
            refs: self.refs.begin_writing(),
            leaving: std::mem::take(&mut self.leaving),
            lowered: std::mem::take(&mut self.lowered),
        }
    }

    /// The end of a commit. After one that failed everything is as dirty as before it.
    pub(in crate::qcow2) fn end_commit(&mut self, dirty: &mut Dirty, done: bool) {
        self.refs.end_writing(&dirty.refs, done);
        if done {
            self.due.append(&mut dirty.leaving);
            dirty.lowered.drain(..).for_each(|cluster| self.end_quarantine(cluster));
        } else {
            self.leaving.append(&mut dirty.leaving);
            self.lowered.append(&mut dirty.lowered);
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
    pub(in crate::qcow2) fn refs(&mut self) -> &mut Refs {
        &mut self.refs
    }

    pub(in crate::qcow2) fn used_end(&self) -> u64 {
        self.used_end
    }
}
