//! Entries that differ from the disk's, and their records in the journal. Under the lock of the
//! image's state.

use std::collections::{BTreeMap, HashMap};

use ferrite_disk_base::journal::{Journal, Slot};

/// Words of a journal record: the present entry, the one on disk, and one that a commit which did not finish may have
/// written. The key is the guest's cluster, or [`l1_key`].
pub(in crate::qcow2) const WORDS: usize = 3;

/// The key of an L1 entry: above all guest's clusters.
pub(in crate::qcow2) fn l1_key(index: usize) -> u64 {
    L1_KEYS | index as u64
}

/// The first of the keys of L1 entries.
pub(in crate::qcow2) const L1_KEYS: u64 = 1 << 62;

/// See the module text.
pub(in crate::qcow2) struct Changes {
    pub(in crate::qcow2) journal: Journal,
    /// Records of entries that differ from the disk's, by key.
    slots: HashMap<u64, Slot>,
    /// Entries changed since the last commit began, with their value at that time, by key.
    pub(in crate::qcow2) changed: BTreeMap<u64, u64>,
    /// The entries that the present commit makes durable.
    pub(in crate::qcow2) committing: BTreeMap<u64, u64>,
}

impl Changes {
    pub(in crate::qcow2) fn new(journal: Journal) -> Changes {
        Changes {
            journal,
            slots: HashMap::new(),
            changed: BTreeMap::new(),
            committing: BTreeMap::new(),
        }
    }

    /// Notes that an entry was `old` and is `new`; the record is made before any request is answered. `true`: nothing
    /// was noted since the last commit began.
    pub(in crate::qcow2) fn note(&mut self, key: u64, old: u64, new: u64) -> bool {
        match self.slots.get(&key) {
            Some(slot) => {
                // The present commit, or a failed one, may have written `old` to the disk. No other value is possible:
                // an entry gets a place of its own at once or after it was made zeros, and keeps that at least until it
                // is durable.
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

    /// Whether an entry differs from the disk's, or may do so.
    pub(in crate::qcow2) fn has_record(&self, key: u64) -> bool {
        self.slots.contains_key(&key)
    }

    /// Takes a record of a dead process.
    pub(in crate::qcow2) fn recover(&mut self, key: u64, slot: Slot) {
        self.slots.insert(key, slot);
    }

    /// Notes that an entry on disk is as its record.
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
}
