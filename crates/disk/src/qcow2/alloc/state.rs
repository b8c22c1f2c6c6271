//! What changes, under one short lock: places given to writes, entries not yet on disk, refcounts.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use std::ops::{Range, RangeInclusive};

use crate::writeback::journal::{Journal, Slot};

use crate::qcow2::alloc::refs::Refs;
use crate::qcow2::format::entry::COPIED;
use crate::qcow2::maintenance::fingerprint::Fingerprint;

/// Words of a journal record: the entry now, the one on disk, and the one that may have got there
/// with a commit that was not finished. The key is the guest's cluster, or [`l1_key`].
pub(in crate::qcow2) const WORDS: usize = 3;

/// The key of an L1 entry: above all guest's clusters.
pub(in crate::qcow2) fn l1_key(index: usize) -> u64 {
    L1_KEYS | index as u64
}

/// The first of them.
pub(in crate::qcow2) const L1_KEYS: u64 = 1 << 62;

/// Free clusters with space behind them, to be given to writes in order.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::qcow2) struct Run {
    pub(in crate::qcow2) next: u64,
    pub(in crate::qcow2) end: u64,
    /// The space reads as zeros.
    pub(in crate::qcow2) zeroed: bool,
}

impl Run {
    pub(in crate::qcow2) fn left(&self) -> u64 {
        self.end - self.next
    }
}

/// A cluster that loses a reference.
#[derive(Clone, Copy, Debug)]
pub(in crate::qcow2) struct Left {
    pub(in crate::qcow2) cluster: u64,
    /// Whoever still reads there is known: only compressed clusters and tables are read by code of
    /// this image. Data are also read by queues, which ask where they are and do not say when
    /// they are done.
    pub(in crate::qcow2) readers_known: bool,
}

/// See the module text.
pub(in crate::qcow2) struct State {
    pub(in crate::qcow2) journal: Journal,
    /// Records of entries that differ from the disk's, by key.
    slots: HashMap<u64, Slot>,
    /// Entries changed since the last commit began, with what they were then, by key.
    pub(in crate::qcow2) changed: BTreeMap<u64, u64>,
    /// What the commit that is under way makes durable.
    pub(in crate::qcow2) committing: BTreeMap<u64, u64>,
    /// Places given to writes of clusters that have none, until the data are there.
    pub(in crate::qcow2) pending: HashMap<u64, u64>,
    /// Clusters that are being copied to a new place.
    pub(in crate::qcow2) copying: HashSet<u64>,
    pub(in crate::qcow2) refs: Refs,
    /// In version 2, if there is a journal.
    pub(in crate::qcow2) fingerprint: Option<Fingerprint>,
    pub(in crate::qcow2) run: Run,
    /// What follows it.
    pub(in crate::qcow2) spares: VecDeque<Run>,
    /// Runs that are being set aside: their counts stay in memory, too.
    pub(in crate::qcow2) claimed: Vec<Run>,
    /// Where free clusters between others are looked for; none: it is not yet known where the
    /// clusters in use end.
    pub(in crate::qcow2) search: Option<Range<u64>>,
    /// How many clusters of a slice of refcounts came free and may not be given out, or not yet:
    /// the slice is not searched.
    quarantined: HashMap<u64, u32>,
    /// Clusters among them whose counts were lowered and are not on disk yet.
    pub(in crate::qcow2) lowered: Vec<u64>,
    /// Slices of refcounts to be looked at again: clusters in them came free, and may be used.
    again: BTreeSet<u64>,
    /// Clusters with compressed data that are being read, by how many.
    unpacking: HashMap<u64, u32>,
    /// Where the next run is looked for, as a cluster; none: not yet known.
    pub(in crate::qcow2) end: Option<u64>,
    /// Clusters of the next run.
    pub(in crate::qcow2) step: u64,
    /// Behind the last cluster that is in use.
    pub(in crate::qcow2) used_end: u64,
    /// Clusters that `changed` refers to no more.
    pub(in crate::qcow2) leaving: Vec<Left>,
    /// Clusters to which no entry on disk refers any more: their counts may go down.
    pub(in crate::qcow2) due: Vec<Left>,
}

impl State {
    pub(in crate::qcow2) fn new(
        journal: Journal,
        refs: Refs,
        fingerprint: Option<Fingerprint>,
    ) -> State {
        State {
            journal,
            slots: HashMap::new(),
            changed: BTreeMap::new(),
            committing: BTreeMap::new(),
            pending: HashMap::new(),
            copying: HashSet::new(),
            refs,
            fingerprint,
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

    /// Records that nobody has a claim on: each place given needs one later.
    pub(in crate::qcow2) fn room(&self) -> usize {
        self.journal.room().saturating_sub(self.pending.len())
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

    /// The run that the next cluster is taken from.
    pub(in crate::qcow2) fn next_run(&self) -> Option<Run> {
        if self.run.left() > 0 { Some(self.run) } else { self.spares.front().copied() }
    }

    /// Whether it is time to look for the next run.
    pub(in crate::qcow2) fn is_low(&self) -> bool {
        self.spares.is_empty() && self.run.left() <= self.step / 2
    }

    /// Free clusters have been set aside.
    pub(in crate::qcow2) fn add_runs(&mut self, runs: Vec<Run>) {
        self.claimed.clear();
        self.spares.extend(runs);
        if self.run.left() == 0 {
            self.run = self.spares.pop_front().unwrap_or_default();
        }
    }

    /// Slices of refcounts that have to stay in memory: a cluster is taken without waiting.
    pub(in crate::qcow2) fn kept_refs(&self) -> Vec<u64> {
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
            self.due.push(Left { cluster, readers_known: false });
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

    /// A cluster has lost its last reference, on disk, too, and its count is 0 from now on. It is
    /// given out again when that count is on disk: a journal that says who has it is believed by
    /// the count (`Qcow2::recover`). Where somebody may still be reading, that is after the next
    /// opening.
    pub(in crate::qcow2) fn came_free(&mut self, left: Left) {
        self.quarantine(left.cluster);
        if left.readers_known {
            self.lowered.push(left.cluster);
        }
    }

    fn quarantine(&mut self, cluster: u64) {
        *self.quarantined.entry(self.refs.slice_of(cluster)).or_insert(0) += 1;
    }

    /// The count of a cluster that came free is on disk.
    pub(in crate::qcow2) fn end_quarantine(&mut self, cluster: u64) {
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
    pub(in crate::qcow2) fn search_again(&mut self, cluster: u64) {
        if self.search.as_ref().is_some_and(|range| cluster < range.end) {
            self.again.insert(self.refs.slice_of(cluster));
        }
    }

    /// The first slice to be looked at again.
    pub(in crate::qcow2) fn next_again(&self) -> Option<u64> {
        self.again.iter().copied().find(|slice| !self.is_quarantined(*slice))
    }

    /// Whether a slice is to be looked at again.
    pub(in crate::qcow2) fn is_again(&self, slice: u64) -> bool {
        self.again.contains(&slice)
    }

    /// It was, to its end.
    pub(in crate::qcow2) fn searched_again(&mut self, slice: u64) {
        self.again.remove(&slice);
    }

    /// Forgets the runs that were being set aside by a task that was dropped.
    pub(in crate::qcow2) fn unclaim(&mut self) {
        self.search_claimed_again();
        self.claimed.clear();
    }

    /// Looks once more at where the runs are that are being set aside.
    pub(in crate::qcow2) fn search_claimed_again(&mut self) {
        for run in self.claimed.clone() {
            self.search_again(run.next);
        }
    }

    /// Whether a cluster is one of those set aside.
    pub(in crate::qcow2) fn is_set_aside(&self, cluster: u64) -> bool {
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

    /// Notes that an entry was `old` and is `new`; the record comes before anybody
    /// is answered. True: nothing was noted since the last commit began.
    pub(in crate::qcow2) fn note(&mut self, key: u64, old: u64, new: u64) -> bool {
        match self.slots.get(&key) {
            Some(slot) => {
                // A commit under way, or one that failed, may have brought `old` to the disk. There
                // is nothing else that it may have: an entry gets a place of its own, for good, at
                // once or after it was made zeros.
                self.journal.store(*slot, 2, old);
                self.journal.store(*slot, 0, new);
            }
            None => {
                let Some(slot) = self.journal.claim(key, &[new, old, old]) else {
                    unreachable!("the journal's room was looked at before")
                };
                self.slots.insert(key, slot);
            }
        }
        let first = !self.changed.contains_key(&key);
        self.changed.entry(key).or_insert(old);
        first
    }

    /// Takes in a record of a process that died.
    pub(in crate::qcow2) fn recover(&mut self, key: u64, slot: Slot) {
        self.slots.insert(key, slot);
    }

    /// What the record of an entry says is on disk.
    pub(in crate::qcow2) fn committed(&mut self, key: u64) {
        let Some(slot) = self.slots.get(&key).copied() else { return };
        match self.changed.get(&key) {
            Some(on_disk) => {
                self.journal.store(slot, 1, *on_disk);
                self.journal.store(slot, 2, *on_disk);
            }
            None => {
                self.slots.remove(&key);
                self.journal.release(slot);
            }
        }
    }

    /// Whether the disk lacks anything that is known here.
    pub(in crate::qcow2) fn dirty(&self) -> bool {
        !self.changed.is_empty()
            || self.refs.dirty() > 0
            || !self.due.is_empty()
            || !self.leaving.is_empty()
    }
}

/// The entry of a cluster of its own at a place.
pub(in crate::qcow2) fn own(host: u64) -> u64 {
    host | COPIED
}
