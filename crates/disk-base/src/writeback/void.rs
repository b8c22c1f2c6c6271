//! Makes the journal of an image with lost writes void.

use std::sync::Arc;

use ferrite_host::shm::Shm;

use crate::Rare;

/// Makes a journal void: its records may refer to lost data, so no process may recover them. It works also after the
/// journal was made longer.
pub struct Void {
    shm: Arc<Shm>,
    at: usize,
}

impl Void {
    /// Uses a word at this place in the journal's file.
    pub(super) fn new(shm: Arc<Shm>, at: usize) -> Void {
        Void { shm, at }
    }

    pub(super) fn set(&self) {
        self.shm.store_u64(self.at, 1);
        Rare::JournalVoided.taken();
    }
}
