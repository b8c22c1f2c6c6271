//! Work that writes and flushes leave behind: checkpoints, syncs that no flush asked for, and journal blocks that
//! record which syncs have succeeded (store.md 4 and 5). A write waits for it only if it cannot go on without.

use std::io;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::Live;
use super::writing::JournalLock;
use crate::journal::Filling;

/// How long a sync waits for a journal block that records it. A guest that flushes often sends its next write within it.
const AT_ONCE: Duration = Duration::from_millis(5);

impl Live {
    /// Whether a checkpoint, a sync or its record is due. After a sync that has failed none is.
    pub fn has_background_work(&self) -> bool {
        let numbers = self.numbers();
        let has_background_work =
            numbers.is_untold() || numbers.want_sync() || numbers.want_checkpoint();
        drop(numbers);
        (has_background_work || self.core().pages.wants_checkpoint()) && !self.is_faulty()
    }

    /// Makes the checkpoints, syncs and records that are due, until none is.
    ///
    /// # Errors
    /// The first that failed. The write or flush that needs it tries it again and gets its error.
    pub async fn run_durability_work(&self, port: &Port) -> io::Result<()> {
        while self.has_background_work() {
            let (wants_sync, wants_checkpoint) = {
                let numbers = self.numbers();
                (numbers.want_sync(), numbers.want_checkpoint())
            };
            if wants_checkpoint || self.core().pages.wants_checkpoint() {
                self.checkpoint(port).await?;
            } else if wants_sync {
                self.flush(port).await?;
            } else {
                port.io.sleep(AT_ONCE).await?;
                self.record_sync(port).await?;
            }
        }
        Ok(())
    }

    /// Writes an empty journal block if no block has recorded the last sync yet (store.md 4).
    async fn record_sync(&self, port: &Port) -> io::Result<()> {
        if !self.numbers().is_untold() {
            return Ok(());
        }
        let nothing = async |_: &Live| Ok(());
        self.tell(port, JournalLock::SharedEmpty, Filling::default(), |_| Ok(()), nothing).await
    }
}
