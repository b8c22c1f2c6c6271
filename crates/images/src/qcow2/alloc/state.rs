//! The mutable state under one short lock: the allocator's part and that of the tables. A step of a cluster and its
//! entry change together.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use ferrite_disk_base::Epochs;
use ferrite_disk_base::journal::Journal;

use crate::qcow2::alloc::clusters::Clusters;
use crate::qcow2::alloc::fingerprint::{Fingerprint, Writer};
use crate::qcow2::alloc::refs::Refs;
use crate::qcow2::tables::changes::Changes;

/// See the module text.
pub(in crate::qcow2) struct State {
    /// Entries that are not on disk yet.
    pub(in crate::qcow2) changes: Changes,
    /// Places given to writes of unallocated clusters, until the data are written.
    pub(in crate::qcow2) pending: HashMap<u64, u64>,
    /// Clusters that are being copied to a new place.
    pub(in crate::qcow2) copying: HashSet<u64>,
    /// The states of clusters.
    pub(in crate::qcow2) clusters: Clusters,
    /// In version 2, if there is a journal.
    fingerprint: Option<Fingerprint>,
}

impl State {
    pub(in crate::qcow2) fn new(
        journal: Journal,
        refs: Refs,
        fingerprint: Option<Fingerprint>,
        epochs: Arc<Epochs>,
    ) -> State {
        State {
            changes: Changes::new(journal),
            pending: HashMap::new(),
            copying: HashSet::new(),
            clusters: Clusters::new(refs, epochs),
            fingerprint,
        }
    }

    /// Journal records that are not claimed: each place given needs one later.
    pub(in crate::qcow2) fn room(&self) -> usize {
        self.changes.journal.room().saturating_sub(self.pending.len())
    }

    /// Whether the disk lacks any change in memory.
    pub(in crate::qcow2) fn is_dirty(&self) -> bool {
        !self.changes.changed.is_empty() || self.clusters.is_dirty()
    }

    /// Called before slices of refcounts are written.
    pub(super) fn counts_change(&mut self, who: Writer, slices: Range<u64>) {
        if let Some(fingerprint) = &mut self.fingerprint {
            fingerprint.change(&mut self.changes.journal, who, slices);
        }
    }

    /// The new bytes of one of them.
    pub(super) fn counts_become(&mut self, slice: u64, bytes: &[u8]) {
        if let Some(fingerprint) = &mut self.fingerprint {
            fingerprint.write(slice, bytes);
        }
    }

    /// Called when all of them are written.
    pub(super) fn counts_changed(&mut self, who: Writer, slices: &Range<u64>) {
        if let Some(fingerprint) = &mut self.fingerprint {
            fingerprint.changed(&mut self.changes.journal, who, slices);
        }
    }

    /// Whether a bait is needed, and there is none.
    pub(in crate::qcow2) fn needs_bait(&self) -> bool {
        self.fingerprint.as_ref().is_some_and(|fingerprint| fingerprint.bait() == 0)
    }

    /// There is another bait, or none, on disk.
    pub(in crate::qcow2) fn set_bait(&mut self, bait: u64) {
        if let Some(fingerprint) = &mut self.fingerprint {
            fingerprint.set_bait(&mut self.changes.journal, bait);
        }
    }

    /// Drops the bait: the journal has nothing, and will have nothing, that the disk lacks.
    pub(in crate::qcow2) fn free_bait(&mut self) {
        let bait = self.fingerprint.as_ref().map_or(0, Fingerprint::bait);
        if bait != 0 {
            self.set_bait(0);
            self.clusters.due([bait].into_iter());
        }
    }
}
