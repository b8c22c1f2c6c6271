//! The dirty maps of a medium's disk.

use super::Raw;
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
}
