//! Leaves of a store's trees: brought into memory, looked at, and changed together (store.md 6).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Mutex;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::{BLOCK_BYTES, Core, Live, checkpoint, damaged, lock};
use crate::journal::{NewContent, VolumeId};
use crate::medium::is_of_a_block;
use crate::page::{HASHES, P2M_ENTRIES, POINTER_BYTES, Pointer, V2P_ENTRIES, Whereabouts};
use crate::pages::{Kind, PageId, Pages, Pins, Promise};
use crate::side_by_side::all;
use crate::slots::View;
use crate::tree::{FOR_EVER, Found, Way};
use crate::{Damaged, content::ContentHash};

/// How long somebody waits who finds no room in memory, and makes none.
const AGAIN: Duration = Duration::from_millis(1);

/// A leaf, as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Leaf {
    /// Of a volume.
    V2p(VolumeId, u64),
    /// Of P2M.
    P2m(u64),
    /// Of the hashes.
    Hashes(u64),
}

impl Leaf {
    /// Where a volume has this block: leaf and word.
    pub(super) fn of_block(volume: VolumeId, block: u64) -> (Leaf, usize) {
        let entries = V2P_ENTRIES as u64;
        (Leaf::V2p(volume, block / entries), (block % entries) as usize)
    }

    /// Where P2M has this number.
    pub(super) fn of_number(number: u64) -> (Leaf, usize) {
        let entries = P2M_ENTRIES as u64;
        (Leaf::P2m(number / entries), (number % entries) as usize * 2)
    }

    /// Where the hash of this number is.
    pub(super) fn of_hash(number: u64) -> (Leaf, usize) {
        (Leaf::Hashes(number / HASHES as u64), (number % HASHES as u64) as usize * 4)
    }

    /// By which readers find it without a lock.
    pub(super) fn view(self) -> View {
        match self {
            Leaf::V2p(volume, leaf) => View::of_volume(volume, leaf),
            Leaf::P2m(leaf) => View::of_p2m(leaf),
            Leaf::Hashes(leaf) => View::of_hashes(leaf),
        }
    }

    fn kind(self) -> Kind {
        match self {
            Leaf::V2p(..) => Kind::V2p,
            Leaf::P2m(_) => Kind::P2m,
            Leaf::Hashes(_) => Kind::Hashes,
        }
    }

    pub(super) fn find(self, core: &Core) -> io::Result<Found> {
        let found = match self {
            Leaf::V2p(volume, leaf) => {
                let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
                volume.tree.find(&core.pages, leaf)
            }
            Leaf::P2m(leaf) => core.p2m.find(&core.pages, leaf),
            Leaf::Hashes(leaf) => core.hashes.find(&core.pages, leaf),
        };
        found.map_err(damaged)
    }

    fn pin(self, core: &mut Core, pins: &mut Pins) -> io::Result<Found> {
        let (tree, leaf) = match self {
            Leaf::V2p(volume, leaf) => {
                let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
                (volume.tree, leaf)
            }
            Leaf::P2m(leaf) => (core.p2m, leaf),
            Leaf::Hashes(leaf) => (core.hashes, leaf),
        };
        tree.pin(&mut core.pages, leaf, pins).map_err(damaged)
    }

    /// Places of it, and of the pages on the way to it; not of a volume's.
    pub(super) fn way(self, core: &Core) -> io::Result<Way> {
        let way = match self {
            Leaf::V2p(..) => return Err(io::ErrorKind::Unsupported.into()),
            Leaf::P2m(leaf) => core.p2m.way(&core.pages, leaf),
            Leaf::Hashes(leaf) => core.hashes.way(&core.pages, leaf),
        };
        way.map_err(damaged)
    }

    /// Which entries of a leaf of P2M are nothing. None: it is not in memory.
    pub(super) fn nothing(self, core: &Core) -> io::Result<Option<[bool; P2M_ENTRIES]>> {
        let id = match self.find(core)? {
            Found::Leaf(id) => id,
            Found::Nothing => return Ok(Some([true; P2M_ENTRIES])),
            Found::Load(..) => return Ok(None),
        };
        let entry = |at: usize| core.pages.words::<2>(&id, 2 * at);
        Ok(Some(std::array::from_fn(|at| entry(at) == Some([0; 2]))))
    }

    /// Whether a leaf that is in memory has these words.
    pub(super) fn holds<const N: usize>(
        self,
        core: &Core,
        at: usize,
        words: &[u64; N],
    ) -> io::Result<bool> {
        let Found::Leaf(id) = self.find(core)? else { return Ok(false) };
        Ok(core.pages.words::<N>(&id, at).as_ref() == Some(words))
    }

    /// Makes it one whose words may be [stored](Pages::store). It was claimed.
    fn change(self, core: &mut Core) -> io::Result<PageId> {
        let pages = &mut core.pages;
        let changed = match self {
            Leaf::V2p(volume, leaf) => {
                let volume = core.volumes.get_mut(volume).ok_or(io::ErrorKind::NotFound)?;
                volume.tree.change(pages, volume.generation, leaf)
            }
            Leaf::P2m(leaf) => core.p2m.change(pages, FOR_EVER, leaf),
            Leaf::Hashes(leaf) => core.hashes.change(pages, FOR_EVER, leaf),
        };
        // Nobody finds what is the leaf no more: it may be another volume's.
        changed.before.inspect(|before| pages.hide(before, self.view()));
        pages.show(&changed.leaf, self.view());
        Ok(changed.leaf)
    }

    /// Changes words of it. It was claimed.
    pub(super) fn store(self, core: &mut Core, at: usize, words: &[u64]) -> io::Result<()> {
        let page = self.change(core)?;
        core.pages.store(&page, at, words);
        Ok(())
    }
}

/// What blocks of volumes get, and contents that the store had not.
#[derive(Clone, Debug, Default)]
pub(super) struct Change {
    /// Volumes, blocks of theirs, and the numbers that they get.
    pub(super) blocks: Vec<(VolumeId, u64, u64)>,
    pub(super) new: Vec<NewContent>,
}

impl Change {
    /// All that it changes.
    pub(super) fn leaves(&self) -> BTreeSet<Leaf> {
        let of_new =
            |new: &NewContent| [Leaf::of_hash(new.number).0, Leaf::of_number(new.number).0];
        let blocks = self.blocks.iter().map(|(volume, at, _)| Leaf::of_block(*volume, *at).0);
        self.new.iter().flat_map(of_new).chain(blocks).collect()
    }

    /// Whether it can be made.
    ///
    /// # Errors
    /// There is no such volume, or it is smaller.
    pub(super) fn check(&self, core: &Core) -> io::Result<()> {
        self.blocks.iter().try_for_each(|(volume, block, _)| check(core, *volume, *block))
    }

    /// Makes it. All leaves are [claimed](Live::claim).
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

/// Whether an error says that a block is not what it was.
pub(super) fn is_lost(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::InvalidData || is_of_a_block(e)
}

/// Numbers that were never given have no content: so who reads an entry of a leaf in memory need not ask.
fn check_numbers(id: &PageId, page: &[u8], end: u64) -> Result<(), Damaged> {
    let is_leaf_of_p2m = id.kind == Kind::P2m && id.level == 0;
    let given = end.saturating_sub(id.index * P2M_ENTRIES as u64);
    let never = page.as_chunks::<POINTER_BYTES>().0.iter().skip(given as usize);
    match is_leaf_of_p2m && never.into_iter().any(|entry| *entry != [0; POINTER_BYTES]) {
        true => Err(Damaged("a number that was never given has a content")),
        false => Ok(()),
    }
}

/// Whether there is such a block.
pub(super) fn check(core: &Core, volume: VolumeId, block: u64) -> io::Result<()> {
    let size = core.volumes.entries().get(&volume).map(|volume| volume.blocks);
    match block < size.ok_or(io::ErrorKind::NotFound)? {
        true => Ok(()),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Words of leaves. Those of one leaf in a row need one look for it.
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

/// Bytes of an entry as a leaf has them.
pub(super) fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    std::array::from_fn(|i| u64::from_le_bytes(bytes.as_chunks().0[i]))
}

/// The opposite.
pub(super) fn bytes<const N: usize, const WORDS: usize>(words: [u64; WORDS]) -> [u8; N] {
    let mut bytes = [0; N];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

/// Room for the change of some leaves, which stay in memory. It is given back when this is dropped.
pub(super) struct Claim<'a> {
    core: &'a Mutex<Core>,
    promise: Option<Promise>,
    pins: Pins,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut core = lock(self.core);
        core.pages.unpin(std::mem::take(&mut self.pins));
        if let Some(promise) = self.promise.take() {
            core.pages.keep_promise(promise);
        }
    }
}

impl Live {
    /// What a leaf says; none: there is no such leaf, all of it is zeros.
    pub(super) async fn look<T>(
        &self,
        port: &Port,
        leaf: Leaf,
        look: impl Fn(&Pages, &PageId) -> T,
    ) -> io::Result<Option<T>> {
        let mut hits = 1;
        loop {
            let (id, pointer) = {
                let core = &mut *self.core();
                match leaf.find(core)? {
                    Found::Leaf(id) => {
                        core.pages.show(&id, leaf.view());
                        self.lookups.hit(leaf.kind(), hits);
                        return Ok(Some(look(&core.pages, &id)));
                    }
                    Found::Nothing => return Ok(None),
                    Found::Load(id, pointer) => (id, pointer),
                }
            };
            self.load(port, leaf, id, pointer).await?;
            hits = 0;
        }
    }

    /// All words of a leaf. It does not come into memory for that: what looks at all leaves once would drive
    /// out those that are wanted again. None: there is no such leaf.
    pub(super) async fn peek(
        &self,
        port: &Port,
        leaf: Leaf,
    ) -> io::Result<Option<[u64; BLOCK_BYTES / 8]>> {
        loop {
            let (id, pointer) = {
                let core = self.core();
                match leaf.find(&core)? {
                    Found::Leaf(id) => return Ok(core.pages.words(&id, 0)),
                    Found::Nothing => return Ok(None),
                    Found::Load(id, pointer) => (id, pointer),
                }
            };
            if id.level > 0 {
                self.load(port, leaf, id, pointer).await?;
                continue;
            }
            let page = self.page(port, &id, &pointer).await;
            // Its place may have become another's meanwhile.
            if leaf.find(&self.core())? == Found::Load(id, pointer) {
                return Ok(Some(words(&page?)));
            }
        }
    }

    /// A page of the medium. One of hashes that is lost is as one of contents that have none: that costs
    /// space only (section 2).
    async fn page(&self, port: &Port, id: &PageId, pointer: &Pointer) -> io::Result<Vec<u8>> {
        let page = checkpoint::load(&self.layout, &self.medium, port, id, pointer).await;
        let is_of_hashes = id.kind == Kind::Hashes && id.level == 0;
        page.or_else(|e| match is_of_hashes && is_lost(&e) {
            true => Ok(vec![0; BLOCK_BYTES]),
            false => Err(e),
        })
    }

    /// Words of a leaf, without a lock if readers find it.
    pub(super) async fn words<const N: usize>(
        &self,
        port: &Port,
        (leaf, at): (Leaf, usize),
    ) -> io::Result<[u64; N]> {
        if let Some(words) = self.slots.read(leaf.view(), at) {
            self.lookups.hit(leaf.kind(), 1);
            return Ok(words);
        }
        let words = self.look(port, leaf, |pages, id| pages.words(id, at)).await?;
        Ok(words.flatten().unwrap_or([0; N]))
    }

    /// Where a number's content is.
    ///
    /// # Errors
    /// The entry is damaged, or cannot be read.
    pub(super) async fn whereabouts(&self, port: &Port, number: u64) -> io::Result<Whereabouts> {
        if number >= self.layout.places() {
            return Err(damaged(Damaged("a content has a number that no store of this size has")));
        }
        let entry = self.words::<2>(port, Leaf::of_number(number)).await?;
        Whereabouts::decode(&bytes(entry), number, &self.layout).map_err(damaged)
    }

    /// The name of a number's content.
    pub(super) async fn hash_of(&self, port: &Port, number: u64) -> io::Result<ContentHash> {
        let words = self.words::<4>(port, Leaf::of_hash(number)).await?;
        Ok(ContentHash(bytes(words)))
    }

    /// A page on the way to a leaf.
    pub(super) async fn load(
        &self,
        port: &Port,
        leaf: Leaf,
        id: PageId,
        pointer: Pointer,
    ) -> io::Result<()> {
        if id.level == 0 {
            self.lookups.miss(id.kind);
        }
        let page = self.page(port, &id, &pointer).await;
        let is_in = {
            let mut core = self.core();
            // It may have been loaded, changed, written and forgotten meanwhile.
            if leaf.find(&core)? != Found::Load(id, pointer) {
                return Ok(());
            }
            let page = page?;
            check_numbers(&id, &page, core.numbers_end).map_err(damaged)?;
            core.pages.install(id, &page)
        };
        match is_in {
            true => Ok(()),
            false => port.io.sleep(AGAIN).await,
        }
    }

    /// Room for a change, for which checkpoints are made. All leaves are in memory, and stay there.
    ///
    /// # Errors
    /// One cannot be read, or no checkpoint can be made.
    pub(super) async fn claim(
        &self,
        port: &Port,
        leaves: &BTreeSet<Leaf>,
    ) -> io::Result<Claim<'_>> {
        let promise = |core: &mut Core| core.pages.promise(leaves.len());
        let mut promised = promise(&mut self.core());
        while promised.is_none() {
            let is_needed = {
                let pages = &self.core().pages;
                pages.wants_checkpoint() || pages.promises_nothing()
            };
            match is_needed {
                true => {
                    let is_enough = || {
                        promised = promise(&mut self.core());
                        promised.is_some()
                    };
                    self.checkpoint_unless(port, is_enough).await?;
                }
                // Others have promises, and end without this one.
                false => port.io.sleep(AGAIN).await?,
            }
            if promised.is_none() {
                promised = promise(&mut self.core());
            }
        }
        let mut claim = Claim { core: &self.core, promise: promised, pins: Pins::default() };
        self.with_all(port, &mut claim, leaves, |_| Ok(())).await?;
        Ok(claim)
    }

    /// Does something when all leaves are in memory.
    pub(super) async fn with_all<T>(
        &self,
        port: &Port,
        claim: &mut Claim<'_>,
        leaves: &BTreeSet<Leaf>,
        mut act: impl FnMut(&mut Core) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let missing = {
                let mut core = self.core();
                let mut missing = BTreeMap::new();
                for leaf in leaves {
                    if let Found::Load(id, pointer) = leaf.pin(&mut core, &mut claim.pins)? {
                        // An inner page may lead to several.
                        missing.entry(id).or_insert((*leaf, pointer));
                    }
                }
                if missing.is_empty() {
                    return act(&mut core);
                }
                missing
            };
            let load = |(id, (leaf, pointer))| self.load(port, leaf, id, pointer);
            all(missing.into_iter().map(load)).await.into_iter().collect::<io::Result<()>>()?;
        }
    }
}
