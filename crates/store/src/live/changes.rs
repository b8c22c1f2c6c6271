//! Changes of leaves: room for them in memory and on the medium, and the change itself (store.md 6 and 7, Room).
//!
//! A change may take pages and no data: content that is found, a copy of what a snapshot has, a discard. So it is
//! not enough that data leave room when they begin a new pair of segments.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::committer::Committer;
use super::leaf::{Leaf, numbers_of, words};
use super::leaves::Leaves;
use super::shared::Shared;
use crate::checkpoint::Core;
use crate::journal::{NewContent, VolumeId};
use crate::page::{P2M_ENTRIES, Whereabouts};
use crate::pages::{PageId, Pins, Promise};
use crate::side_by_side::all;
use crate::tree::Found;

/// How long a task waits that finds no room in memory, if a checkpoint would make none.
const AGAIN: Duration = Duration::from_millis(1);

/// A change of volumes: the numbers that blocks get, and the new contents.
#[derive(Clone, Debug, Default)]
pub(super) struct Change {
    /// Volume, block, and the number that the block gets.
    pub(super) blocks: Vec<(VolumeId, u64, u64)>,
    pub(super) new: Vec<NewContent>,
}

impl Change {
    /// The leaves that it changes.
    pub(super) fn leaves(&self) -> BTreeSet<Leaf> {
        let of_new =
            |new: &NewContent| [Leaf::of_hash(new.number).0, Leaf::of_number(new.number).0];
        let blocks = self.blocks.iter().map(|(volume, at, _)| Leaf::of_block(*volume, *at).0);
        self.new.iter().flat_map(of_new).chain(blocks).collect()
    }

    /// Whether the change can be made.
    ///
    /// # Errors
    /// `NotFound`: there is no such volume. `InvalidInput`: the volume is smaller.
    pub(super) fn check(&self, core: &Core) -> io::Result<()> {
        self.blocks.iter().try_for_each(|(volume, block, _)| check(core, *volume, *block))
    }

    /// Makes the change. The caller has a [claim](Changes::claim) on all leaves.
    ///
    /// # Errors
    /// As [`check`](Change::check). Nothing has changed then.
    pub(super) fn make(&self, core: &mut Core) -> io::Result<()> {
        self.check(core)?;
        // In this order (section 6, Order).
        let hashes = self.new.iter().map(|new| (Leaf::of_hash(new.number), words(&new.hash.0)));
        store_all::<4>(core, hashes)?;
        let places = self.new.iter().map(|new| {
            let entry = Whereabouts::Plain { place: new.place, checksum: new.checksum };
            (Leaf::of_number(new.number), words(&entry.encode()))
        });
        store_all::<2>(core, places)?;
        let blocks = self.blocks.iter();
        store_all(
            core,
            blocks.map(|(volume, at, number)| (Leaf::of_block(*volume, *at), [*number])),
        )
    }
}

/// Whether a volume has this block.
///
/// # Errors
/// `NotFound`: there is no such volume. `InvalidInput`: the volume is smaller.
pub(super) fn check(core: &Core, volume: VolumeId, block: u64) -> io::Result<()> {
    let size = core.volumes.entries().get(&volume).map(|volume| volume.blocks);
    match block < size.ok_or(io::ErrorKind::NotFound)? {
        true => Ok(()),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Stores words in leaves. Words of one leaf that follow each other need one lookup of the leaf.
fn store_all<const N: usize>(
    core: &mut Core,
    all: impl Iterator<Item = ((Leaf, usize), [u64; N])>,
) -> io::Result<()> {
    let mut last: Option<(Leaf, PageId)> = None;
    for ((leaf, at), words) in all {
        let page = match last {
            Some((known, page)) if known == leaf => page,
            _ => leaf.change(core)?,
        };
        core.pages.store(&page, at, &words);
        last = Some((leaf, page));
    }
    Ok(())
}

/// The kind of a change, which decides how much room it must leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChangeKind {
    /// A guest's data, a new volume, or background work. It leaves room for all other changes.
    Data,
    /// A guest's zeros, which free room. They are written when data cannot be.
    Zeros,
}

impl Core {
    /// The pages that a checkpoint of all dirty and promised pages would write.
    pub(super) fn owed_pages(&self) -> u64 {
        let tables = self.volumes.owed_pages() + self.domains.owed_pages();
        (self.pages.owed_pages() + tables) as u64
    }

    /// Makes the numbers of a page of P2M whose entries are empty ready to be given, if the page is in memory.
    ///
    /// # Errors
    /// A page above it is damaged.
    pub(super) fn open_numbers(&mut self, page: u64) -> io::Result<()> {
        let numbers = numbers_of(page, self.numbers_end);
        let Some(is_nothing) = Leaf::P2m(page).nothing(self)? else { return Ok(()) };
        let free = numbers.filter(|number| is_nothing[(number % P2M_ENTRIES as u64) as usize]);
        self.free_numbers.open(page, free.collect::<Vec<_>>().into_iter());
        Ok(())
    }
}

/// Room for the change of some leaves, which stay in memory. Dropping it gives the room back.
pub(super) struct Claim<'a> {
    shared: &'a Shared,
    promise: Option<Promise>,
    pins: Pins,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut core = self.shared.core();
        core.pages.unpin(std::mem::take(&mut self.pins));
        if let Some(promise) = self.promise.take() {
            core.pages.keep_promise(promise);
        }
    }
}

/// Changes leaves in memory. The next checkpoint writes them.
pub(super) struct Changes {
    shared: Arc<Shared>,
    leaves: Arc<Leaves>,
    committer: Arc<Committer>,
}

impl Changes {
    pub(super) fn new(
        shared: Arc<Shared>,
        leaves: Arc<Leaves>,
        committer: Arc<Committer>,
    ) -> Changes {
        Changes { shared, leaves, committer }
    }

    /// Whether the store has room for a change. The caller has a [claim](Changes::claim) on the leaves, which counts
    /// as promised, and no journal block yet.
    ///
    /// # Errors
    /// `StorageFull`: after this change there might be no room for a checkpoint, or for a pass, which makes room.
    pub(super) fn check_room(&self, kind: ChangeKind) -> io::Result<()> {
        let core = self.shared.core();
        // The reserve is a checkpoint with all memory dirty by a pass, a delete or a replay.
        let others = match kind {
            ChangeKind::Data => core.space.reserve(),
            ChangeKind::Zeros => core.space.reserve() / 2,
        };
        match core.space.has_room_for_pages(core.owed_pages() + others) {
            true => Ok(()),
            false => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    /// Claims room in memory for a change of `leaves`, after checkpoints if necessary. The leaves are loaded, and stay
    /// in memory.
    ///
    /// # Errors
    /// A leaf cannot be read, or a checkpoint cannot be made.
    pub(super) async fn claim(
        &self,
        port: &Port,
        leaves: &BTreeSet<Leaf>,
    ) -> io::Result<Claim<'_>> {
        let promise = |core: &mut Core| core.pages.promise(leaves.len());
        let mut promised = promise(&mut self.shared.core());
        while promised.is_none() {
            let is_needed = {
                let pages = &self.shared.core().pages;
                pages.wants_checkpoint() || pages.promises_nothing()
            };
            match is_needed {
                true => {
                    let is_enough = || {
                        promised = promise(&mut self.shared.core());
                        promised.is_some()
                    };
                    self.committer.checkpoint_unless(port, is_enough).await?;
                }
                // Tasks that have promises end without this one.
                false => port.io.sleep(AGAIN).await?,
            }
            if promised.is_none() {
                promised = promise(&mut self.shared.core());
            }
        }
        let mut claim = Claim { shared: &self.shared, promise: promised, pins: Pins::default() };
        self.with_all(port, &mut claim, leaves, |_| Ok(())).await?;
        Ok(claim)
    }

    /// Runs `act` when all `leaves` are in memory.
    ///
    /// # Errors
    /// A leaf cannot be read, or that of `act`.
    pub(super) async fn with_all<T>(
        &self,
        port: &Port,
        claim: &mut Claim<'_>,
        leaves: &BTreeSet<Leaf>,
        mut act: impl FnMut(&mut Core) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let missing = {
                let mut core = self.shared.core();
                let mut missing = BTreeMap::new();
                for leaf in leaves {
                    if let Found::Load(id, pointer) = leaf.pin(&mut core, &mut claim.pins)? {
                        // Several leaves may need the same inner page.
                        missing.entry(id).or_insert((*leaf, pointer));
                    }
                }
                if missing.is_empty() {
                    return act(&mut core);
                }
                missing
            };
            let load = |(id, (leaf, pointer))| self.leaves.load(port, leaf, id, pointer);
            all(missing.into_iter().map(load)).await.into_iter().collect::<io::Result<()>>()?;
        }
    }
}
