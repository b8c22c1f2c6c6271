//! What writes and flushes leave to do behind them, and wait for themselves only if they cannot go on without:
//! checkpoints, syncs that nobody asked for, and the word of syncs that have succeeded (store.md 4 and 5).

use std::io;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::Live;
use super::writing::Lanes;
use crate::journal::Filling;

/// How long a sync waits for a journal block that says so. A guest that flushes often sends the next write within it.
const AT_ONCE: Duration = Duration::from_millis(5);

impl Live {
    /// Whether there is any such thing. After a sync that has failed nothing becomes durable any more.
    pub fn is_behind(&self) -> bool {
        let numbers = self.numbers();
        let is_behind = numbers.is_untold() || numbers.want_sync() || numbers.want_checkpoint();
        drop(numbers);
        (is_behind || self.core().pages.wants_checkpoint()) && !self.is_faulty()
    }

    /// Does it, until there is nothing left. What fails is tried again by who cannot go on without it,
    /// and told to that one.
    ///
    /// # Errors
    /// See there.
    pub async fn catch_up(&self, port: &Port) -> io::Result<()> {
        while self.is_behind() {
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
                self.vouch(port).await?;
            }
        }
        Ok(())
    }

    /// Section 4: if no journal block has said yet what the last sync made durable, an empty one does.
    async fn vouch(&self, port: &Port) -> io::Result<()> {
        if !self.numbers().is_untold() {
            return Ok(());
        }
        let nothing = async |_: &Live| Ok(());
        self.tell(port, Lanes::Empty, Filling::default(), |_| Ok(()), nothing).await
    }
}
