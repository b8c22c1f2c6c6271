//! The dirty maps of a medium's disk.

use std::path::PathBuf;
use std::sync::OnceLock;

use super::Raw;
use crate::DiskError;
use crate::changes::ChangeMap;
use crate::dirty::{AtRest, Tracker, View};

/// The maps of a disk, as long as it is open.
#[derive(Debug, Default)]
pub(super) struct Maps {
    /// The maps of the disk's changes, if its image has any and is written.
    tracker: OnceLock<Box<Tracker>>,
    /// Of an image that is not written: where its changed blocks may be.
    state_dir: OnceLock<PathBuf>,
    /// Its maps, once a caller has asked for them. `None`: it has none.
    at_rest: OnceLock<Option<AtRest>>,
    /// The changed blocks of a tap, if they are recorded.
    changes: OnceLock<Box<ChangeMap>>,
}

impl Raw {
    /// The maps of the disk's changes. `None`: changes are not recorded.
    #[inline]
    pub fn tracker(&self) -> Option<&Tracker> {
        self.maps.tracker.get().map(|tracker| &**tracker)
    }

    /// Has the changes of the disk recorded. The first call counts: before the disk is used.
    pub fn track(&self, tracker: Tracker) {
        // A second one is dropped.
        let _ = self.maps.tracker.set(Box::new(tracker));
    }

    /// Says where the changed blocks of an image are that is not written. The first call counts.
    pub fn find_blocks_in(&self, state_dir: PathBuf) {
        let _ = self.maps.state_dir.set(state_dir);
    }

    /// The maps of the disk, which has so many bytes, for those who ask while it is open. `None`: it has none, or they are
    /// void, which the log says. A file of maps that came to a written image after it was opened is not looked at: it lacks
    /// changes.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn maps(&self, bytes: u64) -> Result<Option<View<'_>>, DiskError> {
        if let Some(tracker) = self.tracker() {
            return Ok(Some(View::Live(tracker)));
        }
        if !self.read_only() || !self.is_file() {
            return Ok(None);
        }
        if self.maps.at_rest.get().is_none() {
            let state_dir = self.maps.state_dir.get().map(PathBuf::as_path);
            // Of two that ask at once, one keeps its own.
            let _ = self.maps.at_rest.set(AtRest::load(self, bytes, state_dir)?);
        }
        Ok(self.maps.at_rest.get().and_then(Option::as_ref).map(View::AtRest))
    }

    /// The changed blocks of the disk. `None`: they are not recorded.
    #[inline]
    pub fn changes(&self) -> Option<&ChangeMap> {
        self.maps.changes.get().map(|map| &**map)
    }

    /// Has the changed blocks of the disk recorded. The first call counts: before the disk is used.
    pub fn record(&self, map: ChangeMap) {
        // A second one is dropped.
        let _ = self.maps.changes.set(Box::new(map));
    }
}
