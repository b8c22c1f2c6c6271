//! The store's background work (store.md 15). Its caller runs one bounded task after the other, behind requests.

use std::io;

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::collector::Look;
use super::compactor::CompactionInfo;
use super::scrubber::ScrubInfo;
use super::{BLOCK_BYTES, Live, Work};
use crate::pace::Pace;

/// How often a byte counts that is read for the index: guests have just begun.
const LOADING_PRICE: u64 = 4;
/// How often a byte counts that scrubbing reads: no request waits for it.
const SCRUB_PRICE: u64 = 16;
/// How often a byte counts that compaction moves, beside the I/O for it.
const COMPACTION_PRICE: u64 = 2;

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
    /// Whether a pass is under way.
    pub passing: bool,
    /// Content that volumes had when the last pass ended.
    pub live_bytes: u64,
    /// Content that the last pass has removed, since no volume had it any more.
    pub dead_bytes: u64,
    /// Duplicate content that the last pass has found.
    pub joined_bytes: u64,
    /// Space that the last pass has freed, with that of pages.
    pub freed_bytes: u64,
    /// Pages of P2M that the index was loaded from since the opening.
    pub index_done: u64,
    /// Pages of P2M that the index is loaded from.
    pub index_all: u64,
    /// Numbers that this has brought into the index.
    pub index_loaded: u64,
    /// The findings of scrubbing.
    pub scrub: ScrubInfo,
    /// The statistics of compaction.
    pub compaction: CompactionInfo,
}

impl Live {
    /// The background work that was done since the opening.
    pub fn work(&self) -> WorkInfo {
        let passes = self.collector.passes();
        let passed = self.collector.last().unwrap_or_default();
        let index = self.loader.progress();
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        WorkInfo {
            passes: passes.count(),
            passing: passes.is_running(),
            live_bytes: bytes(passed.contents),
            dead_bytes: bytes(passed.dead),
            joined_bytes: bytes(passed.joined),
            freed_bytes: bytes(passed.freed),
            index_done: index.done,
            index_all: index.all,
            index_loaded: index.loaded,
            scrub: self.scrubber.info(),
            compaction: self.compactor.info(),
        }
    }

    /// Runs the next task of the store's background work. Tasks that make room come first. The caller is in no epoch.
    /// A task that `pace` ends loses nothing. A task that is dropped may keep freed places out of use.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the task. Other errors are the task's: it can be tried again.
    pub fn run_background_task<'a>(
        &'a self,
        port: &'a Port,
        pace: &'a Pace,
    ) -> Work<'a, BackgroundTask> {
        Box::pin(self.run_next(port, pace))
    }

    async fn run_next(&self, port: &Port, pace: &Pace) -> io::Result<BackgroundTask> {
        pace.check()?;
        if self.journal_writer.has_work() {
            self.journal_writer.run_work(port).await?;
            return Ok(BackgroundTask::Ran);
        }
        // Another task may hold the pass for long. Tasks that need it come later, all others go on.
        if self.collector.wants_pass()
            && let Some(_alone) = self.collector.try_hold()
        {
            self.collector.pass(port, pace, Look::ForDead).await?;
            return Ok(BackgroundTask::Ran);
        }
        if let Some(bytes) = self.loader.step(port).await? {
            pace.used(&port.io, LOADING_PRICE * bytes).await?;
            return Ok(BackgroundTask::Ran);
        }
        if self.compactor.wants_round() {
            self.compactor.begin();
        }
        let Some(alone) = self.collector.try_hold() else { return Ok(BackgroundTask::Idle) };
        let moved = self.compactor.step(port, pace).await?;
        drop(alone);
        if let Some(bytes) = moved {
            pace.used(&port.io, COMPACTION_PRICE * bytes).await?;
            return Ok(BackgroundTask::Ran);
        }
        if self.collector.wants_pass() {
            return Ok(BackgroundTask::Ran);
        }
        let Some(alone) = self.collector.try_hold() else { return Ok(BackgroundTask::Idle) };
        let read = self.scrubber.step(port).await;
        drop(alone);
        if let Some(bytes) = read {
            pace.used(&port.io, SCRUB_PRICE * bytes).await?;
            return Ok(BackgroundTask::Ran);
        }
        Ok(BackgroundTask::Idle)
    }
}
