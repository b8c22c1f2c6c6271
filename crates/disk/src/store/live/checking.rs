//! A check of a store in use: of one checkpoint, which stays as it is while guests go on (store.md 13).
//!
//! Pages are never overwritten. Places that later checkpoints drop come free two epochs behind them, so not while
//! the check is in its epoch. Content leaves its place by a pass or a compaction only, and the check has the pass.
//! Superblocks and bits of space are overwritten by the next checkpoint, so the check reads them before that begins.
//! The journal is this process's, and says nothing more of what the checkpoint has.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{BLOCK_BYTES, Live};
use crate::Port;
use crate::store::check::{Asker, Begun, Check, How, Outcome};
use crate::store::pace::Pace;

/// Writes that wait for a pass. They go before a check.
#[derive(Debug, Default)]
pub(super) struct Waiting(AtomicU32);

/// One of them, for as long as it lives: its task may be dropped.
pub(super) struct Waits<'a>(&'a Waiting);

impl Waiting {
    pub(super) fn one_more(&self) -> Waits<'_> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Waits(self)
    }

    fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A check has made way.
#[derive(Debug, thiserror::Error)]
#[error("a write waits for room, which a check keeps from coming free")]
pub struct MadeWay;

impl Live {
    /// Checks what a checkpoint of now has. Its journal is not looked at. `progress` is told of bytes done and of
    /// all; `false` ends it. It is in an epoch, so `pace` ends it, and nobody may drop it.
    ///
    /// # Errors
    /// The kernel's, or there is no room for a checkpoint. `Interrupted`: it was told to end. `ResourceBusy` with
    /// [`MadeWay`]: a write needs a pass. What is damaged is in the outcome.
    pub async fn check_store(
        &self,
        port: &Port,
        how: How,
        pace: &Pace,
        progress: &dyn Fn(u64, u64) -> bool,
    ) -> io::Result<Outcome> {
        let _no_pass = self.passing.lock(&port.io).await?;
        let goes_on = |done, all| !self.waiting.is_any() && progress(done, all);
        let asker = Asker { pace, progress: &goes_on };
        match self.epochs.during(self.check_checkpoint(port, how, asker)).await {
            Err(e) if e.kind() == io::ErrorKind::Interrupted && self.waiting.is_any() => {
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
        let bytes = self.layout.blocks * BLOCK_BYTES as u64;
        let begun = {
            let _alone = self.checkpointing.lock(&port.io).await?;
            self.make_checkpoint(port).await?;
            Check::begin(port, &self.medium, bytes, how, asker).await?
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
