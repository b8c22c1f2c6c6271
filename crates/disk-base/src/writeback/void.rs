//! The end of a journal whose image has lost writes.

use std::sync::Arc;

use ferrite_host::shm::Shm;

use crate::Rare;

/// Makes a journal void: what its records refer to may be lost, so nobody takes them over. It does so also
/// after the journal was made longer.
pub struct Void {
    shm: Arc<Shm>,
    at: usize,
}

impl Void {
    /// By a word at this place in the journal's file.
    pub(super) fn new(shm: Arc<Shm>, at: usize) -> Void {
        Void { shm, at }
    }

    pub(super) fn set(&self) {
        self.shm.store_u64(self.at, 1);
        Rare::JournalVoided.taken();
    }
}
