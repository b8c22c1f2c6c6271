//! Numbers of journal blocks, and the locks of blocks under way (store.md 3 to 5).
//!
//! A task holds one journal lock from the number of its block to the end of that block. A task that holds all journal
//! locks knows that no block is under way.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::Held;

use super::shared::Shared;
use crate::checkpoint::Core;
use crate::journal::Filling;
use crate::numbers::Numbers;
use crate::stripes::Stripes;

/// The most journal blocks under way at once.
const LANES: usize = 32;

/// How a journal block locks the journal while it is written.
#[derive(Clone, Copy)]
pub(super) enum JournalLock {
    /// Other blocks are written at the same time.
    Shared,
    /// Other blocks are written at the same time, and this block has no records.
    SharedEmpty,
    /// No other block is under way.
    Exclusive,
}

/// Which journal blocks are under way, and below which number all blocks are durable.
pub(super) struct Journal {
    shared: Arc<Shared>,
    numbers: Mutex<Numbers>,
    lanes: Stripes,
}

/// A journal block under way. If it is dropped before [`end`](JournalBlock::end), it counts as failed.
pub(super) struct JournalBlock<'a> {
    // Dropped in this order: a checkpoint that waits for the locks finds the block ended.
    ending: Ending<'a>,
    _lanes: Vec<Held<'a>>,
    synced: u64,
}

/// Ends the block's number when it is dropped.
struct Ending<'a> {
    journal: &'a Journal,
    number: u64,
    is_done: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.journal.numbers().end(self.number, self.is_done);
    }
}

/// A checkpoint with a change of volumes that no record says. If it is dropped before [`end`](Settling::end), also with
/// its task, it counts as failed.
pub(super) struct Settling<'a> {
    journal: &'a Journal,
    next: u64,
    is_done: bool,
}

impl Settling<'_> {
    /// The checkpoint is on the medium.
    pub(super) fn end(mut self) {
        self.is_done = true;
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.journal.numbers().unsettled(self.next);
        }
    }
}

impl JournalBlock<'_> {
    /// The place of the block, and its bytes with these records.
    pub(super) fn encode(&self, filling: Filling) -> (u64, Vec<u8>) {
        let number = self.ending.number;
        let (id, place) = {
            let core = self.ending.journal.shared.core();
            (core.id, core.layout.journal(number))
        };
        (place, filling.finish(&id, number, self.synced))
    }

    /// Ends the block. `is_done`: the kernel has the block and its data, and memory has the change.
    pub(super) fn end(mut self, is_done: bool) {
        self.ending.is_done = is_done;
    }
}

impl Journal {
    /// The journal of a store whose checkpoint has all blocks below `next`. Its length is in blocks.
    pub(super) fn new(shared: Arc<Shared>, next: u64, length: u64) -> Journal {
        let numbers = Mutex::new(Numbers::new(next, length));
        Journal { shared, numbers, lanes: Stripes::new(LANES) }
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the next number to a block. `check` runs with a journal lock held, so no volume is added or removed
    /// between it and the end of the block. `None`: a checkpoint must be made first.
    ///
    /// # Errors
    /// That of `check`, or the reactor is gone.
    pub(super) async fn begin(
        &self,
        port: &Port,
        lock: JournalLock,
        check: &mut impl FnMut(&Core) -> io::Result<()>,
    ) -> io::Result<Option<JournalBlock<'_>>> {
        let held = match lock {
            JournalLock::Shared | JournalLock::SharedEmpty => {
                vec![self.lanes.lock_one(&port.io).await?]
            }
            JournalLock::Exclusive => self.lanes.lock_all(&port.io).await?,
        };
        check(&self.shared.core())?;
        let begun = {
            let mut numbers = self.numbers();
            match lock {
                JournalLock::Shared => numbers.begin(),
                JournalLock::SharedEmpty => numbers.begin_empty(),
                JournalLock::Exclusive => numbers.begin_operation(),
            }
        };
        Ok(begun.map(|(number, synced)| {
            let ending = Ending { journal: self, number, is_done: false };
            JournalBlock { ending, _lanes: held, synced }
        }))
    }

    /// A checkpoint from `next` on has a change of volumes that no record says. If it fails, no block gets a number before
    /// it is made.
    pub(super) fn settling(&self, next: u64) -> Settling<'_> {
        Settling { journal: self, next, is_done: false }
    }

    /// Waits until no block is under way. None begins before the guards are dropped.
    ///
    /// # Errors
    /// The reactor is gone.
    pub(super) async fn quiet(&self, port: &Port) -> io::Result<Vec<Held<'_>>> {
        self.lanes.lock_all(&port.io).await
    }

    /// Makes all earlier writes durable. Tasks that flush at the same time share one sync.
    ///
    /// # Errors
    /// The kernel's. After the first one no flush succeeds any more.
    pub(super) async fn flush(&self, port: &Port) -> io::Result<()> {
        self.shared.medium.flush(port, self.sync(port)).await
    }

    async fn sync(&self, port: &Port) -> io::Result<()> {
        let before = self.numbers().before_sync();
        self.shared.medium.sync(port).await?;
        self.numbers().synced(before);
        Ok(())
    }

    /// Begins again at `next`: a checkpoint has all blocks below it.
    pub(super) fn restart(&self, next: u64) {
        *self.numbers() = Numbers::new(next, self.shared.layout().journal_blocks);
    }

    /// A checkpoint on the medium has all blocks below `from`.
    pub(super) fn left_behind(&self, from: u64) {
        self.numbers().left_behind(from);
    }

    /// Counts blocks of new data that are written from now on.
    pub(super) fn new_data(&self, blocks: u64) {
        self.numbers().new_data(blocks);
    }

    /// The number of the next block.
    pub(super) fn next(&self) -> u64 {
        self.numbers().next()
    }

    /// How many blocks have ended since the store was opened.
    pub(super) fn ended(&self) -> u64 {
        self.numbers().ended()
    }

    /// Whether a block has failed that a replay may find.
    pub(super) fn has_failed(&self) -> bool {
        self.numbers().has_failed()
    }

    /// Whether no block on the medium records the last sync.
    pub(super) fn is_untold(&self) -> bool {
        self.numbers().is_untold()
    }

    /// Whether there is so much new data that a replay would read it for long.
    pub(super) fn wants_sync(&self) -> bool {
        self.numbers().want_sync()
    }

    /// Whether half of the journal is used, or a block has failed.
    pub(super) fn wants_checkpoint(&self) -> bool {
        self.numbers().want_checkpoint()
    }
}
