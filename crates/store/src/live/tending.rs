//! The store's own work, behind service (store.md 15): one bounded step after the other, by whoever drives it.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::compacting::{Compacting, CompactionInfo};
use super::index_loading::Loading;
use super::passes::{Look, Passed};
use super::scrubbing::{ScrubInfo, Scrubbing};
use super::{BLOCK_BYTES, Live};
use crate::pace::Pace;

/// What is read for the index counts so many times: guests have just begun.
const LOADING_PRICE: u64 = 4;
/// What scrubbing reads counts so many times: nobody waits for it.
const SCRUB_PRICE: u64 = 16;
/// And what compaction moves, beside what reading and writing it has cost.
const COMPACTION_PRICE: u64 = 2;

/// What the store does by itself, and how far that is.
#[derive(Debug, Default)]
pub(super) struct Duties {
    pub(super) loading: Loading,
    pub(super) scrub: Scrubbing,
    pub(super) compacting: Compacting,
    /// What the last pass has found.
    pub(super) passed: Option<Passed>,
}

impl Duties {
    /// Of a store with so many numbers.
    pub(super) fn new(numbers_end: u64) -> Duties {
        Duties { loading: Loading::new(numbers_end), ..Duties::default() }
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

/// What a store in use has done by itself, since it was opened. Sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkInfo {
    /// Passes that have begun.
    pub passes: u64,
    /// One is under way.
    pub passing: bool,
    /// Of the last one: content that volumes had.
    pub live_bytes: u64,
    /// Content that none had any more.
    pub dead_bytes: u64,
    /// Content that turned out to be there twice.
    pub joined_bytes: u64,
    /// Space that came free, with that of pages.
    pub freed_bytes: u64,
    /// Of P2M, pages whose numbers the index has been told of since the store was opened, and all of them.
    pub index_done: u64,
    /// See `index_done`.
    pub index_all: u64,
    /// Numbers that the index knows by that.
    pub index_loaded: u64,
    /// The scrubbing.
    pub scrub: ScrubInfo,
    /// The compaction.
    pub compaction: CompactionInfo,
}

impl Live {
    /// What the store has done by itself.
    pub fn work(&self) -> WorkInfo {
        let passes = self.marks().passes;
        let scrub = self.scrub_info();
        let duties = self.duties();
        let passed = duties.passed.unwrap_or_default();
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        WorkInfo {
            passes: passes.count(),
            passing: passes.is_running(),
            live_bytes: bytes(passed.contents),
            dead_bytes: bytes(passed.dead),
            joined_bytes: bytes(passed.joined),
            freed_bytes: bytes(passed.freed),
            index_done: duties.loading.done(),
            index_all: duties.loading.all,
            index_loaded: duties.loading.loaded,
            scrub,
            compaction: duties.compacting.info(),
        }
    }

    /// Does the next piece of the store's own work: what makes room comes first. The caller is in no epoch.
    /// Ended by `pace` it has lost nothing. Dropped, it may keep places that come free out of use.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended it. Others are those of what it did: it can be tried again.
    pub async fn tend(&self, port: &Port, pace: &Pace) -> io::Result<Tended> {
        pace.check()?;
        if self.is_behind() {
            self.catch_up(port).await?;
            return Ok(Tended::Something);
        }
        // Who has the pass may have it for long. What needs it comes later, and all else goes on.
        if self.wants_pass()
            && let Some(_alone) = self.passing.try_lock()
        {
            self.pass(port, pace, Look::ForDead).await?;
            return Ok(Tended::Something);
        }
        if let Some(bytes) = self.load_index(port).await? {
            pace.used(&port.io, LOADING_PRICE * bytes).await?;
            return Ok(Tended::Something);
        }
        if self.wants_compaction() {
            self.begin_compaction();
        }
        let Some(alone) = self.passing.try_lock() else { return Ok(Tended::Nothing) };
        let moved = self.compact_alone(port, pace).await?;
        drop(alone);
        if let Some(bytes) = moved {
            pace.used(&port.io, COMPACTION_PRICE * bytes).await?;
            return Ok(Tended::Something);
        }
        if self.wants_pass() {
            return Ok(Tended::Something);
        }
        let Some(alone) = self.passing.try_lock() else { return Ok(Tended::Nothing) };
        let read = self.scrub(port).await;
        drop(alone);
        if let Some(bytes) = read {
            pace.used(&port.io, SCRUB_PRICE * bytes).await?;
            return Ok(Tended::Something);
        }
        Ok(Tended::Nothing)
    }

    /// Whether scrubbing has ever found anything bad.
    pub(super) fn finds_bad(&self) -> bool {
        self.finds_bad.load(Ordering::Relaxed)
    }

    /// A page was read or written behind service: others go first. There is no rest while a write waits for
    /// the room that is being made.
    pub(super) async fn page_done(&self, port: &Port, pace: &Pace) -> io::Result<()> {
        pace.check()?;
        port.io.yield_to_others().await;
        let is_awaited = self.marks().passes.is_awaited();
        match is_awaited {
            true => Ok(()),
            false => pace.used(&port.io, BLOCK_BYTES as u64).await,
        }
    }
}
