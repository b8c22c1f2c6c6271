//! Writes journal blocks, and does the durability work that writes and flushes leave behind (store.md 3 to 5).
//!
//! Durability work is a checkpoint, a sync that no flush asked for, or a journal block that records a sync. A write
//! waits for it only if it cannot go on without.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::committer::Committer;
use super::journal::{Journal, JournalBlock, JournalLock};
use super::shared::Shared;
use crate::checkpoint::Core;
use crate::journal::Filling;

/// How long a sync waits for a journal block that records it. A guest that flushes often sends its next write within it.
const AT_ONCE: Duration = Duration::from_millis(5);

/// See the module text.
pub(super) struct JournalWriter {
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    committer: Arc<Committer>,
}

impl JournalWriter {
    pub(super) fn new(
        shared: Arc<Shared>,
        journal: Arc<Journal>,
        committer: Arc<Committer>,
    ) -> JournalWriter {
        JournalWriter { shared, journal, committer }
    }

    /// Begins a journal block. If the journal has no room, it makes checkpoints first. `check` runs when no volume
    /// can be added or removed any more, since a replay must be able to carry out the block's records.
    ///
    /// # Errors
    /// That of `check`, or of a checkpoint. After a failed sync there is always one.
    pub(super) async fn begin(
        &self,
        port: &Port,
        lock: JournalLock,
        mut check: impl FnMut(&Core) -> io::Result<()>,
    ) -> io::Result<JournalBlock<'_>> {
        if self.shared.medium.is_faulty() {
            // After a power cut the medium may lack the operation whose sync has failed, and have this block. Then
            // the block would refer to a volume that is smaller.
            self.shared.medium.sync(port).await?;
        }
        loop {
            if let Some(begun) = self.journal.begin(port, lock, &mut check).await? {
                return Ok(begun);
            }
            self.committer.checkpoint(port).await?;
        }
    }

    /// Writes a journal block. If the write succeeds, `act` changes memory. No checkpoint begins in between, so it
    /// has both or neither. `check` is as that of [`begin`](JournalWriter::begin).
    ///
    /// # Errors
    /// Those of [`begin`](JournalWriter::begin), of the kernel, or of `act`.
    pub(super) async fn write(
        &self,
        port: &Port,
        lock: JournalLock,
        records: Filling,
        check: impl FnMut(&Core) -> io::Result<()>,
        act: impl AsyncFnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let begun = self.begin(port, lock, check).await?;
        let (place, bytes) = begun.encode(records);
        self.shared.medium.write(port, place, &bytes).await?;
        act().await?;
        begun.end(true);
        Ok(())
    }

    /// Does the work that is due behind a write or flush. The task that made it due does it: a task of its own would
    /// end with its queue, in the middle of a checkpoint.
    pub(super) async fn keep_up(&self, port: &Port) {
        self.committer.checkpoint_if_wanted(port).await;
        if self.journal.wants_sync() {
            // The next flush gets the error, too.
            let _ = self.journal.flush(port).await;
        }
    }

    /// Whether a checkpoint, a sync or its record is due. After a failed sync none is.
    pub(super) fn has_work(&self) -> bool {
        let is_due = self.journal.is_untold()
            || self.journal.wants_sync()
            || self.committer.wants_checkpoint();
        is_due && !self.shared.medium.is_faulty()
    }

    /// Makes the checkpoints, syncs and records that are due, until none is.
    ///
    /// # Errors
    /// The first that failed. The write or flush that needs it tries it again and gets its error.
    pub(super) async fn run_work(&self, port: &Port) -> io::Result<()> {
        while self.has_work() {
            let wants_sync = self.journal.wants_sync();
            if self.committer.wants_checkpoint() {
                self.committer.checkpoint(port).await?;
            } else if wants_sync {
                self.journal.flush(port).await?;
            } else {
                port.io.sleep(AT_ONCE).await?;
                self.record_sync(port).await?;
            }
        }
        Ok(())
    }

    /// Writes an empty journal block if no block has recorded the last sync yet (store.md 4).
    async fn record_sync(&self, port: &Port) -> io::Result<()> {
        if !self.journal.is_untold() {
            return Ok(());
        }
        let nothing = async || Ok(());
        self.write(port, JournalLock::SharedEmpty, Filling::default(), |_| Ok(()), nothing).await
    }
}
