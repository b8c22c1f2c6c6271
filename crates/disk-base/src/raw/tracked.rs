//! The dirty maps of a medium's disk.

use super::Raw;
use crate::changes::ChangeMap;
use crate::dirty::Tracker;

impl Raw {
    /// The maps of the disk's changes. `None`: changes are not recorded.
    #[inline]
    pub fn tracker(&self) -> Option<&Tracker> {
        self.tracker.get().map(|tracker| &**tracker)
    }

    /// Has the changes of the disk recorded. The first call counts: before the disk is used.
    pub fn track(&self, tracker: Tracker) {
        // A second one is dropped.
        let _ = self.tracker.set(Box::new(tracker));
    }

    /// The changed blocks of the disk. `None`: they are not recorded.
    #[inline]
    pub fn changes(&self) -> Option<&ChangeMap> {
        self.changes.get().map(|map| &**map)
    }

    /// Has the changed blocks of the disk recorded. The first call counts: before the disk is used.
    pub fn record(&self, map: ChangeMap) {
        // A second one is dropped.
        let _ = self.changes.set(Box::new(map));
    }
}
