//! A check of a store in use: of one checkpoint, which stays as it is while guests go on (store.md 13).
//!
//! Pages are never overwritten. Places that later checkpoints drop come free two epochs behind them, so not while
//! the check is in its epoch. Content leaves its place by a pass or a compaction only, and the check has the pass.
//! So no room comes free beside it, and it ends when room is short.
//!
//! Superblocks and bits of space are overwritten by the next checkpoint, so the check reads them before that begins.
//! The journal is this process's, and says nothing more of what the checkpoint has.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use ferrite_disk_base::Port;

use super::room::Whose;
use super::{BLOCK_BYTES, Live};
use crate::check::{Asker, Begun, Check, How, Outcome};
use crate::pace::Pace;

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

/// Replaced pages whose places a check may keep: 64 MiB of memory has their numbers.
const MOST_KEPT: usize = 1 << 23;

/// A check has made way.
#[derive(Debug, thiserror::Error)]
#[error("guests need the room that a check of a store in use keeps from coming free")]
pub struct MadeWay;

impl Live {
    /// Checks what a checkpoint of now has. Its journal is not looked at. `progress` is told of bytes done and of
    /// all; `false` ends it. It is in an epoch, so `pace` ends it, and nobody may drop it.
    ///
    /// # Errors
    /// The kernel's, or there is no room for a checkpoint. `Interrupted`: it was told to end. `ResourceBusy` with
    /// [`MadeWay`]: a pass is needed. What is damaged is in the outcome.
    pub async fn check_store(
        &self,
        port: &Port,
        how: How,
        pace: &Pace,
        progress: &dyn Fn(u64, u64) -> bool,
    ) -> io::Result<Outcome> {
        let _no_pass = self.take_pass(port, pace).await?;
        // Where room was short before it may be damage that keeps passes from making some.
        let (was_short, makes_way) = (self.is_short_of_room(), Cell::new(false));
        let goes_on = |done, all| {
            makes_way.set(self.waiting.is_any() || !was_short && self.is_short_of_room());
            !makes_way.get() && progress(done, all)
        };
        let asker = Asker { pace, progress: &goes_on };
        match self.epochs.during(self.check_checkpoint(port, how, asker)).await {
            Err(e) if e.kind() == io::ErrorKind::Interrupted && makes_way.get() => {
                Err(io::Error::new(io::ErrorKind::ResourceBusy, MadeWay))
            }
            done => done,
        }
    }

    /// Whether a pass would begin by itself, or a write might soon wait for one.
    pub(super) fn is_short_of_room(&self) -> bool {
        let (free, places, kept) = {
            let core = self.core();
            (core.space.free(), core.layout.places(), core.space.waiting())
        };
        let is_low = self.marks().passes.is_low(free, places);
        is_low || kept > MOST_KEPT || self.check_room(Whose::Data).is_err()
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
