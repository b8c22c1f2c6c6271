//! A store that is in use: one process owns it, and all its volumes are served from here (store.md 3 to 6).
//!
//! The locks, in the order in which they are taken: [blocks](Stripes), the pass, the checkpoint, [lanes](Stripes). Who has
//! a lane waits for nothing but its own operations, and for pages that others have on the medium. The mutexes are held
//! across no waiting.

mod batch;
mod checking;
mod compacting;
mod contents;
mod counting;
mod groups;
mod index_loading;
mod leaves;
mod listing;
mod mapping;
mod passes;
mod reading;
mod replaying;
mod room;
mod scheduler;
mod scrubbing;
mod sweeping;
mod sync_records;
mod turns;
mod volumes;
mod writing;

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ferrite_io::shared_lock::SharedLock;

pub use checking::MadeWay;
pub use compacting::CompactionInfo;
pub use listing::{Look, StoreInfo, VolumeInfo};
pub use passes::Passed;
pub use scheduler::{BackgroundTask, WorkInfo};
pub use scrubbing::ScrubInfo;
pub use volumes::{Found, Operation, VolumeError};

use ferrite_disk_base::{Epochs, Port, SyncWitness};

use self::checking::Waiting;
use self::groups::Groups;
use self::passes::Marks;
use self::scheduler::Scheduler;
use self::turns::{MAX_LEAVES, Turns};
use super::checkpoint::{self, Core, lock};
use super::free_numbers::FreeNumbers;
use super::index::Index;
use super::layout::Layout;
use super::lookups::{Looked, Lookups};
use super::medium::{Medium, damaged};
use super::numbers::Numbers;
use super::pages::Pages;
use super::slots::{SLOT_BYTES, Slots};
use super::space::{SpacePage, UNREADABLE};
use super::stripes::Stripes;
use super::{BLOCK_BYTES, opening};

/// Locks of blocks.
const BLOCK_LOCKS: usize = 2048;
/// Journal blocks under way at most.
const LANES: usize = 32;

/// Memory for leaves, in bytes, with which any change is made. The part of it that the smallest store takes
/// (section 7, Room) is more.
pub const LEAST_METADATA: usize = Pages::least(MAX_LEAVES) * SLOT_BYTES;

/// A store would wait for room in its memory for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a store needs {} KiB of metadata memory at least, and was given {} (--metadata-memory)",
    LEAST_METADATA.div_ceil(1024),
    .given / 1024
)]
struct TooLittleMemory {
    given: usize,
}

/// How much memory a store has.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// For leaves of V2P, P2M and the hashes.
    pub metadata: usize,
    /// For the index.
    pub index: usize,
}

/// See the module text.
pub struct Live {
    medium: Medium,
    layout: Layout,
    /// What readers see of the core without its lock.
    slots: Arc<Slots>,
    lookups: Lookups,
    core: Mutex<Core>,
    numbers: Mutex<Numbers>,
    index: Index,
    epochs: Arc<Epochs>,
    blocks: Stripes,
    lanes: Stripes,
    turns: Turns,
    checkpointing: SharedLock,
    /// Held by what is done with whole volumes.
    operating: SharedLock,
    /// Held by the pass.
    passing: SharedLock,
    waiting: Waiting,
    marks: Mutex<Marks>,
    scheduler: Mutex<Scheduler>,
    groups: Mutex<Groups>,
    finds_bad: AtomicBool,
}

impl Live {
    /// Opens what has so many bytes, for writing, and carries out what the journal has.
    ///
    /// # Errors
    /// It is no store, is damaged, or cannot be read or written. `InvalidInput`: it has too little memory.
    pub async fn open(port: &Port, bytes: u64, memory: Memory) -> io::Result<Live> {
        let medium = Medium::default();
        if memory.metadata < LEAST_METADATA {
            let e = TooLittleMemory { given: memory.metadata };
            return Err(io::Error::new(io::ErrorKind::InvalidInput, e));
        }
        let core = opening::open(&medium, port, bytes, memory.metadata, true).await?;
        let index = memory.index.min(Index::useful_bytes(core.layout.places()));
        let live = Live::of(medium, core, Index::new(index));
        live.replay(port).await?;
        let end = live.core().numbers_end;
        live.core().free_numbers = FreeNumbers::opened(end);
        *live.scheduler() = Scheduler::new(end);
        Ok(live)
    }

    /// As a checkpoint has it.
    fn of(medium: Medium, core: Core, index: Index) -> Live {
        let numbers = Numbers::new(core.replay_from, core.layout.journal_blocks);
        let marks = Marks::new(core.space.free());
        let turns = Turns::new(core.pages.most_leaves());
        Live {
            medium,
            layout: core.layout,
            slots: core.pages.slots().clone(),
            lookups: Lookups::default(),
            core: Mutex::new(core),
            numbers: Mutex::new(numbers),
            index,
            epochs: Epochs::new(),
            blocks: Stripes::new(BLOCK_LOCKS),
            lanes: Stripes::new(LANES),
            turns,
            checkpointing: SharedLock::new(),
            operating: SharedLock::new(),
            passing: SharedLock::new(),
            waiting: Waiting::default(),
            marks: Mutex::new(marks),
            scheduler: Mutex::default(),
            groups: Mutex::default(),
            finds_bad: AtomicBool::new(false),
        }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn scheduler(&self) -> MutexGuard<'_, Scheduler> {
        self.scheduler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that was written before is durable.
    ///
    /// # Errors
    /// The kernel's. After the first one no flush succeeds any more.
    pub async fn flush(&self, port: &Port) -> io::Result<()> {
        self.medium.flush(port, self.sync(port)).await
    }

    /// One sync, for all who wait for it.
    async fn sync(&self, port: &Port) -> io::Result<()> {
        let before = self.numbers().before_sync();
        self.medium.sync(port).await?;
        self.numbers().synced(before);
        Ok(())
    }

    /// The last thing that is done with a store: all is in a checkpoint. Nothing may be under way.
    ///
    /// # Errors
    /// The kernel's, or there is no room for it.
    pub async fn close(&self, port: &Port) -> io::Result<()> {
        let is_in = self.core().is_clean() && self.numbers().next() == self.core().replay_from;
        if is_in { self.flush(port).await } else { self.checkpoint(port).await }
    }

    /// A failed sync is that of every disk of the store: this one is told before anybody else hears of it.
    pub fn witness(&self, witness: Weak<dyn SyncWitness>) {
        self.medium.witness(witness);
    }

    /// How often leaves were in memory when they were looked up, since this process has the store.
    pub fn looked(&self) -> Looked {
        self.lookups.all()
    }

    /// Whether a sync has failed: nothing becomes durable any more.
    pub fn is_faulty(&self) -> bool {
        self.medium.is_faulty()
    }

    /// Makes a checkpoint, behind the one that is under way.
    ///
    /// # Errors
    /// The kernel's, or there is no room for it.
    pub async fn checkpoint(&self, port: &Port) -> io::Result<()> {
        self.checkpoint_unless(port, || false).await
    }

    /// The same, unless the one that was under way was enough.
    async fn checkpoint_unless(
        &self,
        port: &Port,
        mut is_enough: impl FnMut() -> bool,
    ) -> io::Result<()> {
        let _alone = self.checkpointing.lock(&port.io).await?;
        if is_enough() {
            return Ok(());
        }
        self.make_checkpoint(port).await
    }

    /// The caller has the lock of checkpoints.
    async fn make_checkpoint(&self, port: &Port) -> io::Result<()> {
        {
            // Section 5, step 1.
            let _quiet = self.lanes.lock_all(&port.io).await?;
            let next = self.numbers().next();
            self.core().freeze(next);
        }
        self.write_checkpoint(port).await
    }

    /// Steps 2 to 7 of the one that is frozen.
    async fn write_checkpoint(&self, port: &Port) -> io::Result<()> {
        // Of what others have dropped it may need the room.
        self.release();
        let removed = || self.epochs.removed();
        checkpoint::write(&self.core, &self.medium, port, removed).await?;
        let from = self.core().replay_from;
        self.numbers().left_behind(from);
        // What is left of it, before somebody else takes that.
        self.medium.ballast().take_back(port).await;
        Ok(())
    }

    /// Places that are nobody's any more can be given.
    fn release(&self) {
        let ended = self.epochs.ended();
        self.core().space.release(ended);
    }

    /// What is due behind a write or flush. It is done by who made it due: a task of its own would end with its
    /// queue, in the middle of a checkpoint.
    pub async fn keep_up(&self, port: &Port) {
        self.checkpoint_if_wanted(port).await;
        if self.numbers().want_sync() {
            // Who flushes next is told.
            let _ = self.flush(port).await;
        }
    }

    /// Makes one if it is wanted, and nobody else does.
    async fn checkpoint_if_wanted(&self, port: &Port) {
        let is_wanted = self.numbers().want_checkpoint() || self.core().pages.wants_checkpoint();
        let is_made = self.checkpointing.try_lock().is_none();
        if is_wanted && !is_made {
            // Who cannot go on without it tries again, and is told.
            let _ = self.checkpoint(port).await;
        }
    }

    /// Brings the bits of a segment into memory.
    async fn load_bits(&self, port: &Port, segment: u64) -> io::Result<()> {
        let (checkpoint, home, id, layout) = {
            let core = self.core();
            (core.checkpoint, core.space.home(segment), core.id, core.layout)
        };
        let place = layout.space_page(segment, home as u64);
        let page = self.medium.read_each(port, place, 1).await?.remove(0);
        let page = page.map_err(|_| UNREADABLE);
        let page = page.and_then(|page| SpacePage::decode(&page, &id, &layout, segment, home));
        let mut core = self.core();
        // Otherwise they may have been here, and gone to the medium again. Who wants them asks again.
        if core.checkpoint == checkpoint {
            core.space.load(segment, page);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
