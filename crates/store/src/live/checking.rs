//! A check of a store in use: of one checkpoint, which stays as it is while guests write (store.md 13).
//!
//! Pages are never overwritten. Places that later checkpoints drop become free two epochs later, so not while the check
//! is in its epoch. Content leaves its place only by a pass or a compaction, and the check holds the pass. So no room
//! comes free during a check, and the check ends when room is short.
//!
//! The next checkpoint overwrites superblocks and bits of space, so the check reads them before that checkpoint begins.
//! The check does not read the journal, since this process writes it.

use std::cell::Cell;
use std::io;

use ferrite_disk_base::Port;

use super::{BLOCK_BYTES, Live, Work};
use crate::check::{Asker, Begun, Check, How, Outcome};
use crate::pace::Pace;

/// A check has ended early, since writes need a pass.
#[derive(Debug, thiserror::Error)]
#[error("guests need the room that a check of a store in use keeps from coming free")]
pub struct MadeWay;

impl Live {
    /// Checks what a checkpoint made now has. The journal is not looked at. `progress` gets the bytes done and all
    /// bytes, and ends the check by `false`. The check is in an epoch: the caller ends it by `pace`, and must not drop it.
    ///
    /// # Errors
    /// The kernel's, or there is no room for a checkpoint. `Interrupted`: the caller has ended it. `ResourceBusy` with
    /// [`MadeWay`]: a pass is needed. Damage is no error: it is in the outcome.
    pub fn check_store<'a>(
        &'a self,
        port: &'a Port,
        how: How,
        pace: &'a Pace,
        progress: &'a dyn Fn(u64, u64) -> bool,
    ) -> Work<'a, Outcome> {
        Box::pin(self.check_beside_guests(port, how, pace, progress))
    }

    async fn check_beside_guests(
        &self,
        port: &Port,
        how: How,
        pace: &Pace,
        progress: &dyn Fn(u64, u64) -> bool,
    ) -> io::Result<Outcome> {
        let collector = &self.collector;
        let _no_pass = collector.hold(port, pace).await?;
        // If room was short before, damage may keep passes from making some.
        let (was_short, makes_way) = (collector.is_short_of_room(), Cell::new(false));
        let goes_on = |done, all| {
            let is_short = || !was_short && collector.is_short_of_room();
            makes_way.set(collector.has_waiting_writes() || is_short());
            !makes_way.get() && progress(done, all)
        };
        let asker = Asker { pace, progress: &goes_on };
        match self.shared.epochs.during(self.check_checkpoint(port, how, asker)).await {
            Err(e) if e.kind() == io::ErrorKind::Interrupted && makes_way.get() => {
                Err(io::Error::new(io::ErrorKind::ResourceBusy, MadeWay))
            }
            done => done,
        }
    }

    async fn check_checkpoint(
        &self,
        port: &Port,
        how: How,
        asker: Asker<'_>,
    ) -> io::Result<Outcome> {
        let begun = {
            let _alone = self.committer.checkpoint_and_hold(port).await?;
            let bytes = self.shared.layout().blocks * BLOCK_BYTES as u64;
            Check::begin(port, &self.shared.medium, bytes, how, asker).await?
        };
        match begun {
            Begun::Open(mut check) => {
                check.trees().await?;
                check.end().await
            }
            Begun::Damaged(outcome) => Ok(outcome),
        }
    }
}
