//! The store's own work, behind service (store.md 16): one bounded step after the other, by whoever drives it.

use std::io;

use super::index_loading::Loading;
use super::{BLOCK_BYTES, Live};
use crate::Port;
use crate::store::pace::Pace;

/// What the store does by itself, and how far that is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Duties {
    pub(super) loading: Loading,
}

impl Duties {
    /// Of a store with so many numbers.
    pub(super) fn new(numbers_end: u64) -> Duties {
        Duties { loading: Loading::new(numbers_end) }
    }
}

/// What a step has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tended {
    /// Something, and there may be more.
    Something,
    /// There is nothing to do for now.
    Nothing,
}

impl Live {
    /// Does the next piece of the store's own work: what makes room comes first. The caller is in no epoch.
    /// Dropped, or ended by `pace`, it has lost or broken nothing.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended it. Others are those of what it did: it can be tried again.
    pub async fn tend(&self, port: &Port, pace: &Pace) -> io::Result<Tended> {
        pace.check()?;
        if self.wants_pass() {
            self.gc_at(port, pace).await?;
            return Ok(Tended::Something);
        }
        if let Some(bytes) = self.load_index(port).await? {
            pace.used(&port.io, bytes).await?;
            return Ok(Tended::Something);
        }
        Ok(Tended::Nothing)
    }

    /// A page was read or written behind service: others go first. There is no rest while a write waits for
    /// the room that is being made.
    pub(super) async fn page_done(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        pace.check()?;
        port.io.yield_to_others().await;
        match self.marks().passes.is_awaited() {
            true => Ok(()),
            false => pace.used(&port.io, BLOCK_BYTES as u64).await,
        }
    }
}
