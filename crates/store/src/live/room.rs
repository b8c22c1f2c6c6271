//! Room for pages: who may change leaves, so that a checkpoint always finds places for them (store.md 7, Room).
//!
//! A change may take pages and no data: content that is found, a copy of what a snapshot has, a discard. So it is
//! not enough that data leave room when they begin a new pair.

use std::io;

use ferrite_disk_base::Port;

use super::Live;
use crate::checkpoint::Core;

/// Whose change of leaves it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// A guest's data, new volumes, or work that may be left undone. They leave room for all others.
    Data,
    /// A guest's zeros, by which room comes free. They go on when data do not.
    Zeros,
}

impl Core {
    /// Pages that a checkpoint of all that is in memory, and was promised, would write.
    fn owed_pages(&self) -> u64 {
        let tables = self.volumes.owed_pages() + self.domains.owed_pages();
        (self.pages.owed_pages() + tables) as u64
    }
}

impl Live {
    /// Asked before a change has a number, and behind its [claim](Live::claim), which counts as promised.
    ///
    /// # Errors
    /// `StorageFull`: behind this change there might be no room for a checkpoint, or for a pass, which makes some.
    pub(super) fn check_room(&self, whose: Whose) -> io::Result<()> {
        let core = self.core();
        // A checkpoint with all memory dirty, of what a pass, a delete or a replay changes.
        let others = match whose {
            Whose::Data => core.space.reserve(),
            Whose::Zeros => core.space.reserve() / 2,
        };
        match core.space.has_room_for_pages(core.owed_pages() + others) {
            true => Ok(()),
            false => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    /// Whether new data may take space of the file system below.
    pub(super) async fn leaves_space(&self, port: &Port) -> bool {
        let ballast = self.medium.ballast();
        if !ballast.is_short() {
            return true;
        }
        let Ok(_alone) = self.checkpointing.lock(&port.io).await else { return false };
        ballast.take_back(port).await
    }

    /// Does something again behind a checkpoint and behind passes, while there is no room for it and they may make
    /// some. It is in no epoch, for which a pass would wait (section 7, ENOSPC).
    pub(super) async fn with_room(
        &self,
        port: &Port,
        mut act: impl AsyncFnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut first, mut is_checkpointed) = (None, false);
        loop {
            match act().await {
                Err(e) if e.kind() == io::ErrorKind::StorageFull => {}
                done => return done,
            }
            // Of pages: those that are owed are written, and those that they replace come free.
            is_checkpointed = !is_checkpointed && self.check_room(Whose::Data).is_err();
            if is_checkpointed {
                let checkpoint = self.core().checkpoint;
                self.checkpoint_unless(port, || self.core().checkpoint != checkpoint).await?;
                continue;
            }
            if self.is_full() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let now = self.no_room();
            let first = *first.get_or_insert(now);
            if self.may_fail(first) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.wait_for_room(port, first, now).await?;
        }
    }
}
