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

/// How often a byte counts that is read for the index: guests have just begun.
const LOADING_PRICE: u64 = 4;
/// How often a byte counts that scrubbing reads: no request waits for it.
const SCRUB_PRICE: u64 = 16;
/// How often a byte counts that compaction moves, beside the I/O for it.
const COMPACTION_PRICE: u64 = 2;

/// The background work of a store, and its progress.
#[derive(Debug, Default)]
pub(super) struct Scheduler {
    pub(super) loading: Loading,
    pub(super) scrub: Scrubbing,
    pub(super) compacting: Compacting,
    /// The findings of the last pass.
    pub(super) passed: Option<Passed>,
}

impl Scheduler {
    /// The background work of a store with `numbers_end` numbers.
    pub(super) fn new(numbers_end: u64) -> Scheduler {
        Scheduler { loading: Loading::new(numbers_end), ..Scheduler::default() }
    }
}

/// The result of one step of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundTask {
    /// A task ran, and more may be due.
    Ran,
    /// No task is due now.
    Idle,
}

/// The background work that a store in use has done since it was opened. Sizes are bytes.
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
        let scheduler = self.scheduler();
        let passed = scheduler.passed.unwrap_or_default();
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        WorkInfo {
            passes: passes.count(),
            passing: passes.is_running(),
            live_bytes: bytes(passed.contents),
            dead_bytes: bytes(passed.dead),
            joined_bytes: bytes(passed.joined),
            freed_bytes: bytes(passed.freed),
            index_done: scheduler.loading.done(),
            index_all: scheduler.loading.all,
            index_loaded: scheduler.loading.loaded,
            scrub,
            compaction: scheduler.compacting.info(),
        }
    }

    /// Runs the next task of the store's background work. Tasks that make room come first. The caller is in no epoch.
    /// A task that `pace` ends loses nothing. A task that is dropped may keep freed places out of use.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the task. Other errors are the task's: it can be tried again.
    pub async fn run_background_task(
        &self,
        port: &Port,
        pace: &Pace,
    ) -> io::Result<BackgroundTask> {
        pace.check()?;
        if self.has_background_work() {
            self.run_durability_work(port).await?;
            return Ok(BackgroundTask::Ran);
        }
        // Another task may hold the pass for long. Tasks that need it come later, all others go on.
        if self.wants_pass()
            && let Some(_alone) = self.passing.try_lock()
        {
            self.pass(port, pace, Look::ForDead).await?;
            return Ok(BackgroundTask::Ran);
        }
        if let Some(bytes) = self.load_index(port).await? {
            pace.used(&port.io, LOADING_PRICE * bytes).await?;
            return Ok(BackgroundTask::Ran);
        }
        if self.wants_compaction() {
            self.begin_compaction();
        }
        let Some(alone) = self.passing.try_lock() else { return Ok(BackgroundTask::Idle) };
        let moved = self.compact_alone(port, pace).await?;
        drop(alone);
        if let Some(bytes) = moved {
            pace.used(&port.io, COMPACTION_PRICE * bytes).await?;
            return Ok(BackgroundTask::Ran);
        }
        if self.wants_pass() {
            return Ok(BackgroundTask::Ran);
        }
        let Some(alone) = self.passing.try_lock() else { return Ok(BackgroundTask::Idle) };
        let read = self.scrub(port).await;
        drop(alone);
        if let Some(bytes) = read {
            pace.used(&port.io, SCRUB_PRICE * bytes).await?;
            return Ok(BackgroundTask::Ran);
        }
        Ok(BackgroundTask::Idle)
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
