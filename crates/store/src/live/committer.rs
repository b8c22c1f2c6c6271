//! When checkpoints are made, and by which task (store.md 5). [`checkpoint`] writes them.

use std::io;
use std::sync::Arc;

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::{Held, SharedLock};

use super::journal::Journal;
use super::shared::Shared;
use crate::checkpoint::{self, Core};
use crate::layout::Layout;

/// Makes checkpoints, one at a time.
pub(super) struct Committer {
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    /// Held by the task that makes a checkpoint.
    checkpointing: SharedLock,
}

impl Committer {
    pub(super) fn new(shared: Arc<Shared>, journal: Arc<Journal>) -> Committer {
        Committer { shared, journal, checkpointing: SharedLock::new() }
    }

    /// Makes a checkpoint. It begins when the one under way has ended.
    ///
    /// # Errors
    /// The kernel's. `StorageFull`: there is no room for its pages.
    pub(super) async fn checkpoint(&self, port: &Port) -> io::Result<()> {
        self.checkpoint_unless(port, || false).await
    }

    /// Makes a checkpoint, unless `is_enough` says that the one under way was enough.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint).
    pub(super) async fn checkpoint_unless(
        &self,
        port: &Port,
        mut is_enough: impl FnMut() -> bool,
    ) -> io::Result<()> {
        let _alone = self.checkpointing.lock(&port.io).await?;
        if is_enough() {
            return Ok(());
        }
        self.make(port).await
    }

    /// Makes a checkpoint. No other one begins before the guard is dropped.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint).
    pub(super) async fn checkpoint_and_hold(&self, port: &Port) -> io::Result<Held<'_>> {
        let alone = self.checkpointing.lock(&port.io).await?;
        self.make(port).await?;
        Ok(alone)
    }

    /// Ends the checkpoint under way. No other one begins before the guard is dropped.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint).
    pub(super) async fn hold(&self, port: &Port) -> io::Result<Held<'_>> {
        let alone = self.checkpointing.lock(&port.io).await?;
        if self.shared.core().under_way.is_some() {
            self.write_frozen(port).await?;
        }
        Ok(alone)
    }

    /// Makes a checkpoint, and runs `change` when the checkpoint's state is frozen.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint).
    pub(super) async fn checkpoint_with<T>(
        &self,
        port: &Port,
        change: impl FnOnce(&mut Core) -> T,
    ) -> io::Result<T> {
        let _alone = self.hold(port).await?;
        let changed = self.freeze(port, change).await?;
        self.write_frozen(port).await?;
        Ok(changed)
    }

    /// Makes a checkpoint of a change of volumes that no record of the journal says, so the medium has all of it or
    /// nothing (store.md 8). The order is:
    ///
    /// 1. The checkpoint under way ends: it lacks the change, and its frozen pages stay as they are.
    /// 2. No journal block is under way, and none gets a number. `change` changes memory, and memory is frozen. So all
    ///    records of before are in this checkpoint, and none of them is replayed on a changed volume.
    /// 3. Other blocks go on. None of their records may be of a volume that is changed: the caller sees to that.
    /// 4. The checkpoint is written (section 5, steps 2 to 7). The superblock makes the change count.
    ///
    /// If 4 fails, memory has the change, and the medium may have it or not. Records of the changed volume would be
    /// those of another volume where it has not. So no journal block gets a number from then on before this checkpoint
    /// is on the medium: the writer of the next journal block tries it again.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint), or that of `change`: nothing has changed then.
    pub(super) async fn checkpoint_of(
        &self,
        port: &Port,
        change: impl AsyncFnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _alone = self.hold(port).await?;
        let settling = {
            let _quiet = self.journal.quiet(port).await?;
            change().await?;
            let next = self.journal.next();
            let settling = self.journal.settling(next);
            self.shared.core().freeze(next);
            settling
        };
        self.write_frozen(port).await?;
        settling.end();
        Ok(())
    }

    /// Makes a checkpoint with which the store has this layout, larger than before. All that it writes of the new segments
    /// before is on its way to the medium. Records of other blocks name no new place until this has ended
    /// ([`Core::grow`]), so they are good beside either superblock. If it fails, the next checkpoint tries it again.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint).
    pub(super) async fn checkpoint_grown(&self, port: &Port, layout: Layout) -> io::Result<()> {
        let _alone = self.hold(port).await?;
        {
            let _quiet = self.journal.quiet(port).await?;
            let next = self.journal.next();
            let mut core = self.shared.core();
            core.grow(layout);
            core.freeze(next);
        }
        self.write_frozen(port).await
    }

    /// Makes a checkpoint of all journal blocks below `next`, for a replay: nothing else uses the store.
    ///
    /// # Errors
    /// As [`checkpoint`](Committer::checkpoint).
    pub(super) async fn checkpoint_before(&self, port: &Port, next: u64) -> io::Result<()> {
        self.shared.core().freeze(next);
        self.write_frozen(port).await
    }

    /// Whether a checkpoint is due: for the journal, or for memory.
    pub(super) fn wants_checkpoint(&self) -> bool {
        self.journal.wants_checkpoint() || self.shared.core().pages.wants_checkpoint()
    }

    /// Makes a checkpoint if one is due and no task is making one.
    pub(super) async fn checkpoint_if_wanted(&self, port: &Port) {
        if self.wants_checkpoint() && self.checkpointing.try_lock().is_some() {
            // An operation that needs the checkpoint tries it again, and gets the error.
            let _ = self.checkpoint(port).await;
        }
    }

    /// Whether new data may take space of the file system below: the ballast is whole, or is made whole.
    pub(super) async fn leaves_space(&self, port: &Port) -> bool {
        let ballast = self.shared.medium.ballast();
        if !ballast.is_short() {
            return true;
        }
        let Ok(_alone) = self.checkpointing.lock(&port.io).await else { return false };
        ballast.take_back(port).await
    }

    /// The caller holds the lock of checkpoints.
    async fn make(&self, port: &Port) -> io::Result<()> {
        self.freeze(port, |_| ()).await?;
        self.write_frozen(port).await
    }

    /// Section 5, step 1. The caller holds the lock of checkpoints.
    async fn freeze<T>(&self, port: &Port, change: impl FnOnce(&mut Core) -> T) -> io::Result<T> {
        let _quiet = self.journal.quiet(port).await?;
        let next = self.journal.next();
        let core = &mut *self.shared.core();
        core.freeze(next);
        Ok(change(core))
    }

    /// Section 5, steps 2 to 7, of the state that is frozen.
    async fn write_frozen(&self, port: &Port) -> io::Result<()> {
        // The checkpoint may need the room of pages that earlier ones dropped.
        self.shared.release();
        let removed = || self.shared.epochs.removed();
        checkpoint::write(self.shared.core_mutex(), &self.shared.medium, port, removed).await?;
        let from = self.shared.core().replay_from;
        self.journal.left_behind(from);
        // The checkpoint may have spent ballast. It is taken back before other writers use the space.
        self.shared.medium.ballast().take_back(port).await;
        Ok(())
    }
}
