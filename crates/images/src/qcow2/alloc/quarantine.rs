//! Clusters that became free while the image is open, and may not be given out yet. [`reuse`](super::reuse) tells why.

use std::collections::HashSet;

/// The number of clusters that are recorded one by one. Slices of refcounts with further ones are closed until the next
/// opening. So a reader that never ends costs bounded memory.
const MAX_HELD: usize = 1 << 16;

/// A cluster that lost a reference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) cluster: u64,
    /// It had uncompressed data.
    pub(super) data: bool,
    /// An epoch in which no mapping refers to it any more.
    pub(super) removed: u64,
}

/// See the module text.
#[derive(Default)]
pub(super) struct Quarantine {
    /// All recorded clusters. Those that are in no list below stay until the next opening.
    held: HashSet<u64>,
    /// Slices of refcounts with further ones.
    shut: HashSet<u64>,
    /// Clusters whose counts of 0 are in memory only.
    lowered: Vec<Left>,
    /// Clusters whose counts are on disk; an operation may still use their places.
    waiting: Vec<Left>,
}

impl Quarantine {
    /// Keeps a free cluster from being given out before the next opening. `false`: it was recorded before.
    pub(super) fn hold(&mut self, cluster: u64, slice: u64) -> bool {
        if self.held.len() == MAX_HELD && !self.held.contains(&cluster) {
            self.shut.insert(slice);
            return false;
        }
        self.held.insert(cluster)
    }

    /// Begins the quarantine of a cluster that has lost its last reference, on disk, too, and whose count is 0 in
    /// memory.
    pub(super) fn begin(&mut self, left: Left, slice: u64) {
        if self.hold(left.cluster, slice) {
            self.lowered.push(left);
        }
    }

    /// Takes the clusters whose counts a commit writes.
    pub(super) fn take_lowered(&mut self) -> Vec<Left> {
        std::mem::take(&mut self.lowered)
    }

    /// Ends that commit: their counts are written, or it has failed.
    pub(super) fn committed(&mut self, lowered: &mut Vec<Left>, done: bool) {
        let next = if done { &mut self.waiting } else { &mut self.lowered };
        next.append(lowered);
    }

    /// Releases clusters that lost their last mapping in this epoch or before.
    pub(super) fn end(&mut self, ended: u64) -> Vec<Left> {
        let free: Vec<Left> = self.waiting.extract_if(.., |left| left.removed <= ended).collect();
        free.iter().for_each(|left| {
            self.held.remove(&left.cluster);
        });
        free
    }

    /// Whether some wait only for operations that may use them.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether a cluster may not be given out.
    pub(super) fn has(&self, cluster: u64) -> bool {
        self.held.contains(&cluster)
    }

    /// Whether no cluster of a slice may be given out.
    pub(super) fn is_shut(&self, slice: u64) -> bool {
        self.shut.contains(&slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(cluster: u64, removed: u64) -> Left {
        Left { cluster, data: true, removed }
    }

    #[test]
    fn a_cluster_leaves_when_its_count_is_durable_and_its_epoch_has_ended_in_either_order() {
        let mut quarantine = Quarantine::default();
        quarantine.begin(left(7, 5), 0);
        assert!(quarantine.has(7) && quarantine.end(9).is_empty());
        let mut lowered = quarantine.take_lowered();
        quarantine.committed(&mut lowered, false);
        assert!(lowered.is_empty() && quarantine.end(9).is_empty(), "the commit has failed");
        let mut lowered = quarantine.take_lowered();
        quarantine.committed(&mut lowered, true);
        assert!(quarantine.end(4).is_empty() && quarantine.has(7));
        assert_eq!(quarantine.end(5).len(), 1);
        assert!(!quarantine.has(7) && !quarantine.is_waiting());
    }

    #[test]
    fn a_cluster_that_is_held_for_good_does_not_leave_with_its_count() {
        let mut quarantine = Quarantine::default();
        assert!(quarantine.hold(7, 0));
        quarantine.begin(left(7, 5), 0);
        assert!(quarantine.take_lowered().is_empty() && quarantine.has(7));
    }

    #[test]
    fn what_is_too_much_to_remember_shuts_its_slice() {
        let mut quarantine = Quarantine::default();
        (0..MAX_HELD as u64).for_each(|cluster| quarantine.begin(left(cluster, 5), 1));
        assert!(!quarantine.is_shut(1));
        quarantine.begin(left(MAX_HELD as u64, 5), 2);
        assert!(quarantine.is_shut(2) && !quarantine.is_shut(1));
        assert_eq!(quarantine.take_lowered().len(), MAX_HELD);
    }
}
