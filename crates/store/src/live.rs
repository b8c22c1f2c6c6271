//! A store that is in use (store.md 3 to 6). One process owns it, and all its volumes are served from here.
//!
//! [`Live`] composes the parts and is the interface of the store. No part calls [`Live`]. Each part has private state,
//! and uses the parts in its fields, which stand above it here:
//!
//! * `Shared`: medium, core, index and epochs, which most parts use.
//! * `Journal`: numbers and locks of journal blocks under way, and syncs.
//! * `Committer`: when checkpoints are made.
//! * `Leaves` reads leaves of the trees, `Changes` changes them, `Groups` reads compressed content.
//! * `JournalWriter`: writes journal blocks, and makes the checkpoints and syncs that become due.
//! * `Loader` fills the index after an opening.
//! * `Collector`: passes, which free what no volume refers to.
//! * `Scrubber` reads all content, `Compactor` moves content into order.
//! * `Reader`, `Writer` and `Volumes` carry out requests and operations on volumes.
//!
//! # Locks
//! A task takes locks that it holds across a wait in this order: blocks (`Writer`, `Reader`), the pass
//! (`Collector`), the checkpoint (`Committer`), journal locks (`Journal`). A volume operation takes its lock
//! (`Volumes`) before all of these. A task that holds a journal lock waits only for its own operations, and for pages
//! that other tasks read or write. Mutexes are never held across a wait. The mutex of the core is taken before those
//! of the collector's marks and of the epochs, and the mutex of all turns before that of one turn. A task holds no other
//! two mutexes at once.

mod altering;
mod batch;
mod changes;
mod checking;
mod collector;
mod committer;
mod compactor;
mod counting;
mod groups;
mod growing;
mod journal;
mod journal_writer;
mod leaf;
mod leaves;
mod listing;
mod loader;
mod mapping;
mod reader;
mod recovery;
mod scheduler;
mod scrubber;
mod shared;
mod turns;
mod volumes;
mod writer;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use ferrite_disk_base::{Extent, Port, SyncWitness};
use ferrite_io::arena::{Arena, Span};

pub use checking::MadeWay;
pub use collector::Passed;
pub use compactor::CompactionInfo;
pub use listing::{Look, StoreInfo, VolumeInfo};
pub use scheduler::{BackgroundTask, WorkInfo};
pub use scrubber::ScrubInfo;
pub use volumes::{Found, Operation, VolumeError};

use self::batch::Batches;
use self::changes::Changes;
use self::collector::{Collector, Look as LookFor};
use self::committer::Committer;
use self::compactor::Compactor;
use self::counting::Counter;
use self::groups::Groups;
use self::journal::Journal;
use self::journal_writer::JournalWriter;
use self::leaves::Leaves;
use self::loader::Loader;
use self::reader::Reader;
use self::recovery::Recovery;
use self::scrubber::Scrubber;
use self::shared::Shared;
use self::turns::MAX_LEAVES;
use self::volumes::Volumes;
use self::writer::Writer;
use super::check::{Findings, Stats};
use super::checkpoint::Core;
use super::free_numbers::FreeNumbers;
use super::index::Index;
use super::journal::VolumeId;
use super::layout::Layout;
use super::lookups::Looked;
use super::medium::{Medium, damaged};
use super::pace::Pace;
use super::page::Packing;
use super::pages::Pages;
use super::slots::SLOT_BYTES;
use super::stripes::Stripes;
use super::{BLOCK_BYTES, opening};

/// The number of locks for blocks.
const BLOCK_LOCKS: usize = 2048;

/// The least memory for leaves, in bytes, with which any change can be made. It is that part of the memory which the
/// smallest store takes (section 7, Room).
pub const LEAST_METADATA: usize = Pages::least(MAX_LEAVES) * SLOT_BYTES;

/// The future of a long operation. It is boxed, so this crate compiles the operation once for all its users.
pub type Work<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + 'a>>;

/// With this little memory a store would wait for room in it for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a store needs {} KiB of metadata memory at least, and was given {} (--metadata-memory)",
    LEAST_METADATA.div_ceil(1024),
    .given / 1024
)]
struct TooLittleMemory {
    given: usize,
}

/// The memory of a store, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// For leaves of V2P, P2M and the hashes: at least [`LEAST_METADATA`].
    pub metadata: usize,
    /// For the index.
    pub index: usize,
}

/// See the module text.
pub struct Live {
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    committer: Arc<Committer>,
    leaves: Arc<Leaves>,
    changes: Arc<Changes>,
    journal_writer: Arc<JournalWriter>,
    loader: Arc<Loader>,
    collector: Arc<Collector>,
    scrubber: Arc<Scrubber>,
    compactor: Compactor,
    reader: Arc<Reader>,
    writer: Writer,
    volumes: Volumes,
}

impl Live {
    /// Opens the store on a medium of `bytes` bytes for writing, and replays its journal.
    ///
    /// # Errors
    /// It is no store, is damaged (`InvalidData`), or cannot be read or written. `InvalidInput`: `memory` is too little.
    pub fn open(port: &Port, bytes: u64, memory: Memory) -> Work<'_, Live> {
        Box::pin(async move {
            if memory.metadata < LEAST_METADATA {
                let e = TooLittleMemory { given: memory.metadata };
                return Err(io::Error::new(io::ErrorKind::InvalidInput, e));
            }
            let medium = Medium::default();
            let core = opening::open(&medium, port, bytes, memory.metadata, true).await?;
            let index = memory.index.min(Index::useful_bytes(core.layout.places()));
            let live = Live::of(Shared::new(medium, core, Index::new(index)));
            live.recover(port).await?;
            Ok(live)
        })
    }

    /// Composes the parts, for the state of a checkpoint.
    fn of(shared: Shared) -> Live {
        let shared = Arc::new(shared);
        let (next, length) = {
            let core = shared.core();
            (core.replay_from, core.layout.journal_blocks)
        };
        let journal = Arc::new(Journal::new(shared.clone(), next, length));
        let committer = Arc::new(Committer::new(shared.clone(), journal.clone()));
        let leaves = Arc::new(Leaves::new(shared.clone()));
        let changes = Changes::new(shared.clone(), leaves.clone(), committer.clone());
        let changes = Arc::new(changes);
        let groups = Arc::new(Groups::new(shared.clone()));
        let journal_writer = JournalWriter::new(shared.clone(), journal.clone(), committer.clone());
        let journal_writer = Arc::new(journal_writer);
        let loader = Arc::new(Loader::new(shared.clone(), leaves.clone()));
        let collector = Arc::new(Collector::new(collector::Uses {
            shared: shared.clone(),
            journal: journal.clone(),
            committer: committer.clone(),
            leaves: leaves.clone(),
            changes: changes.clone(),
            groups: groups.clone(),
            loader: loader.clone(),
        }));
        let scrubber =
            Scrubber::new(shared.clone(), leaves.clone(), changes.clone(), groups.clone());
        let scrubber = Arc::new(scrubber);
        let compactor = Compactor::new(
            shared.clone(),
            committer.clone(),
            leaves.clone(),
            changes.clone(),
            groups.clone(),
            collector.clone(),
        );
        let blocks = Arc::new(Stripes::new(BLOCK_LOCKS));
        let reader = Arc::new(Reader::new(
            shared.clone(),
            leaves.clone(),
            groups.clone(),
            scrubber.clone(),
            blocks.clone(),
        ));
        let batches = Batches::new(batch::Uses {
            shared: shared.clone(),
            journal: journal.clone(),
            journal_writer: journal_writer.clone(),
            committer: committer.clone(),
            leaves: leaves.clone(),
            changes: changes.clone(),
            collector: collector.clone(),
        });
        let uses = writer::Uses {
            shared: shared.clone(),
            journal: journal.clone(),
            journal_writer: journal_writer.clone(),
            leaves: leaves.clone(),
            changes: changes.clone(),
            collector: collector.clone(),
            scrubber: scrubber.clone(),
            reader: reader.clone(),
            blocks,
        };
        let writer = Writer::new(uses, batches);
        let volumes = Volumes::new(
            shared.clone(),
            journal.clone(),
            journal_writer.clone(),
            committer.clone(),
            changes.clone(),
        );
        Live {
            shared,
            journal,
            committer,
            leaves,
            changes,
            journal_writer,
            loader,
            collector,
            scrubber,
            compactor,
            reader,
            writer,
            volumes,
        }
    }

    async fn recover(&self, port: &Port) -> io::Result<()> {
        let recovery = Recovery {
            shared: &self.shared,
            journal: &self.journal,
            committer: &self.committer,
            leaves: &self.leaves,
            changes: &self.changes,
        };
        recovery.replay(port).await?;
        let end = self.shared.core().numbers_end;
        self.shared.core().free_numbers = FreeNumbers::opened(end);
        self.loader.begin(end);
        Ok(())
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// The kernel's. After the first one no flush succeeds any more.
    pub async fn flush(&self, port: &Port) -> io::Result<()> {
        self.journal.flush(port).await
    }

    /// Closes the store: a checkpoint has everything. No other operation may be under way, and none may follow.
    ///
    /// # Errors
    /// The kernel's. `StorageFull`: there is no room for a checkpoint.
    pub fn close<'a>(&'a self, port: &'a Port) -> Work<'a, ()> {
        Box::pin(async move {
            let next = self.journal.next();
            let is_in = {
                let core = self.shared.core();
                core.is_clean() && next == core.replay_from
            };
            if is_in { self.flush(port).await } else { self.committer.checkpoint(port).await }
        })
    }

    /// Tells `witness` of a failed sync before any flush returns its error. The sync is that of all volumes.
    pub fn witness(&self, witness: Weak<dyn SyncWitness>) {
        self.shared.medium.witness(witness);
    }

    /// How often leaves were in memory when they were looked up, since the opening.
    pub fn looked(&self) -> Looked {
        self.leaves.looked()
    }

    /// Whether a sync has failed. Then nothing becomes durable any more.
    pub fn is_faulty(&self) -> bool {
        self.shared.medium.is_faulty()
    }

    /// Has the store grow to so many bytes, durably. `file_bytes`: the length that its file has, which becomes longer if that
    /// is too short. `None`: it is on a device, which is long enough. Existing contents stay in their places.
    ///
    /// # Errors
    /// A [`NoGrowth`](crate::layout::NoGrowth) (of kind `InvalidInput`), or the kernel's before anything has changed: the
    /// file has its length of before, too. A kernel's error behind that, when a checkpoint has the new size: it may have
    /// grown, or the next checkpoint tries it again.
    pub fn grow<'a>(&'a self, port: &'a Port, bytes: u64, file_bytes: Option<u64>) -> Work<'a, ()> {
        Box::pin(async move {
            let _alone = self.volumes.hold(port).await?;
            let _no_pass = self.collector.hold(port, &Pace::unbounded()).await?;
            self.volumes.grow_store(port, bytes, file_bytes).await
        })
    }

    /// The store's layout now.
    pub fn layout(&self) -> Layout {
        self.shared.layout()
    }

    /// Makes a checkpoint. It begins when the one under way has ended.
    ///
    /// # Errors
    /// The kernel's. `StorageFull`: there is no room for its pages.
    pub fn checkpoint<'a>(&'a self, port: &'a Port) -> Work<'a, ()> {
        Box::pin(self.committer.checkpoint(port))
    }

    /// Does the work that is due behind a write or flush: a checkpoint, or a sync. The queue of the write does it.
    pub async fn keep_up(&self, port: &Port) {
        self.journal_writer.keep_up(port).await;
    }

    /// Whether a checkpoint, a sync or its record is due. After a failed sync none is.
    pub fn has_background_work(&self) -> bool {
        self.journal_writer.has_work()
    }

    /// Makes the checkpoints, syncs and records that are due, until none is.
    ///
    /// # Errors
    /// The first that failed. The write or flush that needs it tries it again and gets its error.
    pub fn run_durability_work<'a>(&'a self, port: &'a Port) -> Work<'a, ()> {
        Box::pin(self.journal_writer.run_work(port))
    }
}

/// Requests.
impl Live {
    /// A reader for a queue that [maps](Live::map), by which the store learns when its operations have ended.
    pub fn reader(&self) -> ferrite_disk_base::Reader {
        self.shared.epochs.reader()
    }

    /// Runs steps that map blocks and use what they have mapped. They must not write, nor call [`read`](Live::read): a
    /// pass waits for their end, and a write waits for a pass.
    pub async fn while_mapped<T>(&self, steps: impl Future<Output = T>) -> T {
        self.shared.epochs.during(steps).await
    }

    /// Where the beginning of a range of a volume is, if memory knows it: blocks in consecutive places, or zeros. The
    /// caller stays in its epoch until its operation on them has ended. `offset` and `len` are bytes.
    pub fn map(&self, volume: VolumeId, offset: u64, len: u64) -> Extent {
        self.reader.map(volume, offset, len)
    }

    /// Whether blocks have these data, as far as memory knows. `false` is no proof of damage: a write may have replaced
    /// the blocks meanwhile. The caller is still in the epoch in which it has mapped. `offset` is in bytes.
    pub fn check(&self, memory: &Arena, volume: VolumeId, offset: u64, data: Span) -> bool {
        self.reader.check(memory, volume, offset, data)
    }

    /// Reads a range of a volume. `offset` is in bytes.
    ///
    /// # Errors
    /// A block is damaged (`InvalidData`), or cannot be read. `InvalidInput`: not inside the volume. `NotFound`: there
    /// is no such volume.
    pub async fn read(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        to: Span,
    ) -> io::Result<()> {
        self.reader.read(port, volume, offset, to).await
    }

    /// Writes a range of a volume. When it returns `Ok`, reads see the data, and they survive the death of this
    /// process. A [flush](Live::flush) makes them durable. `offset` is in bytes.
    ///
    /// # Errors
    /// `StorageFull`. `InvalidInput`: not inside the volume. `NotFound`: there is no such volume. `PermissionDenied`: it
    /// is a snapshot. Others are the kernel's.
    pub async fn write(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        from: Span,
    ) -> io::Result<()> {
        self.writer.write(port, volume, offset, from).await
    }

    /// Makes a range of a volume read as zeros. `offset` and `len` are bytes.
    ///
    /// # Errors
    /// As [`write`](Live::write).
    pub async fn write_zeros(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.writer.write_zeros(port, volume, offset, len).await
    }

    /// How many bytes from `offset` on are known to need no [zeros](Live::write_zeros), as nothing was written there:
    /// whole blocks. `offset` and `len` are bytes.
    ///
    /// # Errors
    /// As [`write`](Live::write).
    pub async fn nothing_from(
        &self,
        port: &Port,
        volume: VolumeId,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        self.writer.nothing_from(port, volume, offset, len).await
    }

    /// Whether a block of a volume is zeros without space, and how many blocks from it on are the same, at least.
    ///
    /// # Errors
    /// As [`read`](Live::read).
    pub async fn zeros_from(
        &self,
        port: &Port,
        volume: VolumeId,
        block: u64,
    ) -> io::Result<(bool, u64)> {
        self.reader.zeros_from(port, volume, block).await
    }
}

/// Operations on volumes, and work on the whole store.
impl Live {
    /// The volume with this name.
    pub fn volume_called(&self, name: &str) -> Option<Found> {
        self.shared.core().volume_called(name)
    }

    /// The number of the volume with this name.
    pub fn volume(&self, name: &str) -> Option<VolumeId> {
        self.volume_called(name).map(|found| found.number)
    }

    /// Carries out an operation. It is durable when this returns `Ok`. Gives the number of the new volume or domain.
    ///
    /// # Errors
    /// A [`VolumeError`] (of kind `InvalidInput`): nothing has changed. `StorageFull`. Others are the kernel's.
    pub fn operate<'a>(&'a self, port: &'a Port, operation: Operation) -> Work<'a, u32> {
        Box::pin(self.volumes.operate(port, operation))
    }

    /// Counts what the space is for.
    ///
    /// # Errors
    /// Metadata are damaged (`InvalidData`), or cannot be read.
    pub fn stats<'a>(&'a self, port: &'a Port) -> Work<'a, Stats> {
        let counter = Counter { shared: &self.shared, leaves: &self.leaves };
        Box::pin(async move { counter.stats(port).await })
    }

    /// Loads what is left of the index, for a command that has the store to itself.
    ///
    /// # Errors
    /// The kernel's. Damaged pages are left out: their content is stored once more.
    pub fn load_whole_index<'a>(&'a self, port: &'a Port) -> Work<'a, ()> {
        Box::pin(async move {
            while self.loader.step(port).await?.is_some() {}
            Ok(())
        })
    }

    /// Makes a pass: frees what no volume refers to, and looks for all duplicates. One pass is made at a time.
    ///
    /// # Errors
    /// The kernel's. `InvalidData`: metadata are damaged. `StorageFull`: there is no room for a checkpoint.
    /// `TimedOut`: an operation hangs. No data are lost then.
    pub fn gc<'a>(&'a self, port: &'a Port) -> Work<'a, Passed> {
        Box::pin(self.collector.collect_all(port))
    }

    /// Makes a pass behind requests, not faster than `pace` allows while no write waits for room. While one waits, the
    /// pass looks for no duplicates.
    ///
    /// # Errors
    /// As [`gc`](Live::gc). `Interrupted`: `pace` has ended it.
    pub fn gc_at<'a>(&'a self, port: &'a Port, pace: &'a Pace) -> Work<'a, Passed> {
        Box::pin(async move {
            let _alone = self.collector.hold(port, pace).await?;
            self.collector.pass(port, pace, LookFor::ForDead).await
        })
    }

    /// How new groups are compressed. `None`: new content is not compressed.
    pub fn packing(&self) -> Option<Packing> {
        self.shared.core().packing
    }

    /// Changes how new groups are compressed, from the next round of compaction on. It is durable when this returns.
    ///
    /// # Errors
    /// As [`checkpoint`](Live::checkpoint).
    pub fn set_packing<'a>(&'a self, port: &'a Port, packing: Option<Packing>) -> Work<'a, ()> {
        Box::pin(async move {
            let is_older = {
                let core = &mut *self.shared.core();
                core.packing = packing;
                core.under_way.is_some()
            };
            self.committer.checkpoint(port).await?;
            // A checkpoint that had begun before has the old value, also if it had failed and was tried again.
            if is_older { self.committer.checkpoint(port).await } else { Ok(()) }
        })
    }

    /// Begins a round of compaction, unless one is under way.
    pub fn begin_compaction(&self) {
        self.compactor.begin();
    }

    /// Compacts one leaf of a volume. Gives the bytes that were moved. `None`: no round is under way, or this was its
    /// end. Then a pass begins by itself if the round has moved much.
    ///
    /// # Errors
    /// The kernel's. Damaged content stays where it is. `Interrupted`: `pace` has ended the step.
    pub fn compact<'a>(&'a self, port: &'a Port, pace: &'a Pace) -> Work<'a, Option<u64>> {
        Box::pin(async move {
            let _alone = self.collector.hold(port, pace).await?;
            self.compactor.step(port, pace).await
        })
    }

    /// Begins a round of scrubbing, unless one is under way.
    pub fn begin_scrub(&self) {
        self.scrubber.begin();
    }

    /// How far the round of scrubbing under way is, or what the last one has found.
    pub fn scrub_info(&self) -> ScrubInfo {
        self.scrubber.info()
    }

    /// The findings of the round of scrubbing under way up to now, or of the last one.
    pub fn scrub_findings(&self) -> Findings {
        self.scrubber.findings()
    }

    /// Makes one step of a round of scrubbing, which may alternate with steps of other tasks. Gives the bytes that it has
    /// read. `None`: no round is under way.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the wait for a pass.
    pub fn scrub_in_turn<'a>(&'a self, port: &'a Port, pace: &'a Pace) -> Work<'a, Option<u64>> {
        Box::pin(async move {
            let _alone = self.collector.hold(port, pace).await?;
            Ok(self.scrubber.step(port).await)
        })
    }
}

#[cfg(test)]
mod tests;
