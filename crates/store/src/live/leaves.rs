//! Leaves of a store's trees, read into memory from the medium (store.md 6), and the contents that they name.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk_base::Port;

use super::leaf::{Leaf, bytes, is_lost, words};
use super::shared::Shared;
use super::{BLOCK_BYTES, damaged};
use crate::Damaged;
use crate::checkpoint::load as load_page;
use crate::content::ContentHash;
use crate::journal::VolumeId;
use crate::lookups::{Looked, Lookups};
use crate::page::{P2M_ENTRIES, POINTER_BYTES, Pointer, Whereabouts};
use crate::pages::{Kind, PageId, Pages};
use crate::tree::{Found, Next};

/// How long a task waits that finds no room in memory for a page.
const AGAIN: Duration = Duration::from_millis(1);
/// The most numbers on the way from a number to its content, each of which stands for the next. A pass shortens it.
const MAX_WAY: u32 = 64;
/// Words of an entry of P2M.
const ENTRY_WORDS: usize = 2;

/// Checks that numbers that were never given have no content, when a page is loaded. So readers of a leaf in memory
/// need not check it.
///
/// # Errors
/// One has a content.
fn check_numbers(id: &PageId, page: &[u8], end: u64) -> Result<(), Damaged> {
    let is_leaf_of_p2m = id.kind == Kind::P2m && id.level == 0;
    let given = end.saturating_sub(id.index * P2M_ENTRIES as u64);
    let never = page.as_chunks::<POINTER_BYTES>().0.iter().skip(given as usize);
    match is_leaf_of_p2m && never.into_iter().any(|entry| *entry != [0; POINTER_BYTES]) {
        true => Err(Damaged("a number that was never given has a content")),
        false => Ok(()),
    }
}

/// Looks leaves up in memory, and reads those that are not there.
pub(super) struct Leaves {
    shared: Arc<Shared>,
    lookups: Lookups,
}

impl Leaves {
    pub(super) fn new(shared: Arc<Shared>) -> Leaves {
        Leaves { shared, lookups: Lookups::default() }
    }

    /// How often leaves were in memory when they were looked up.
    pub(super) fn looked(&self) -> Looked {
        self.lookups.all()
    }

    /// Counts entries that were found in memory without [`Leaves`]: those of blocks, and those of numbers.
    pub(super) fn count_hits(&self, blocks: usize, numbers: usize) {
        self.lookups.hit(Kind::V2p, blocks as u64);
        if numbers > 0 {
            self.lookups.hit(Kind::P2m, numbers as u64);
        }
    }

    /// Gives what `look` finds in a leaf. `None`: there is no such leaf, and all its words are zeros.
    ///
    /// # Errors
    /// The leaf is damaged (`InvalidData`), or cannot be read. `NotFound`: there is no such volume.
    pub(super) async fn look<T>(
        &self,
        port: &Port,
        leaf: Leaf,
        look: impl Fn(&Pages, &PageId) -> T,
    ) -> io::Result<Option<T>> {
        let mut hits = 1;
        loop {
            let (id, pointer) = {
                let core = &mut *self.shared.core();
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

    /// All words of a leaf, which is not kept in memory: a task that reads all leaves once would evict those that
    /// requests need again. `None`: there is no such leaf.
    ///
    /// # Errors
    /// As [`look`](Leaves::look).
    pub(super) async fn peek(
        &self,
        port: &Port,
        leaf: Leaf,
    ) -> io::Result<Option<[u64; BLOCK_BYTES / 8]>> {
        loop {
            let (id, pointer) = {
                let core = self.shared.core();
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
            // The leaf may have moved meanwhile, and its place have another page.
            if leaf.find(&self.shared.core())? == Found::Load(id, pointer) {
                return Ok(Some(words(&page?)));
            }
        }
    }

    /// Reads a page. A lost page of hashes reads as zeros, so its contents have no hashes: that costs only space
    /// (section 2).
    async fn page(&self, port: &Port, id: &PageId, pointer: &Pointer) -> io::Result<Vec<u8>> {
        let page = load_page(&self.shared.layout(), &self.shared.medium, port, id, pointer).await;
        let is_of_hashes = id.kind == Kind::Hashes && id.level == 0;
        page.or_else(|e| match is_of_hashes && is_lost(&e) {
            true => Ok(vec![0; BLOCK_BYTES]),
            false => Err(e),
        })
    }

    /// Words of a leaf from `at` on, without the core's lock if they are in memory.
    ///
    /// # Errors
    /// As [`look`](Leaves::look).
    pub(super) async fn words<const N: usize>(
        &self,
        port: &Port,
        (leaf, at): (Leaf, usize),
    ) -> io::Result<[u64; N]> {
        if let Some(words) = self.shared.slots.read(leaf.view(), at) {
            self.lookups.hit(leaf.kind(), 1);
            return Ok(words);
        }
        let words = self.look(port, leaf, |pages, id| pages.words(id, at)).await?;
        Ok(words.flatten().unwrap_or([0; N]))
    }

    /// The entry of a number in P2M.
    ///
    /// # Errors
    /// The entry is damaged (`InvalidData`), or cannot be read.
    pub(super) async fn whereabouts(&self, port: &Port, number: u64) -> io::Result<Whereabouts> {
        if number >= self.shared.layout().places() {
            return Err(damaged(Damaged("a content has a number that no store of this size has")));
        }
        let entry = self.words::<2>(port, Leaf::of_number(number)).await?;
        Whereabouts::decode(&bytes(entry), number, &self.shared.layout()).map_err(damaged)
    }

    /// The hash of a number's content.
    ///
    /// # Errors
    /// As [`look`](Leaves::look).
    pub(super) async fn hash_of(&self, port: &Port, number: u64) -> io::Result<ContentHash> {
        let words = self.words::<4>(port, Leaf::of_hash(number)).await?;
        Ok(ContentHash(bytes(words)))
    }

    /// Reads a leaf, or a page above it, into memory. If memory has no room, it waits a moment, and the caller tries
    /// again.
    ///
    /// # Errors
    /// As [`look`](Leaves::look).
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
            let mut core = self.shared.core();
            // Other tasks may have loaded, changed, written and evicted it meanwhile.
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

    /// The first leaf of a volume's tree from `leaf` on.
    ///
    /// # Errors
    /// As [`look`](Leaves::look).
    pub(super) async fn next_leaf(
        &self,
        port: &Port,
        volume: VolumeId,
        leaf: u64,
    ) -> io::Result<Option<u64>> {
        let mut leaf = leaf;
        loop {
            let next = {
                let core = self.shared.core();
                let volume = core.volumes.entries().get(&volume).ok_or(io::ErrorKind::NotFound)?;
                volume.tree.next(&core.pages, leaf).map_err(damaged)?
            };
            match next {
                Next::Leaf => return Ok(Some(leaf)),
                Next::NotBefore(next) => leaf = next,
                Next::End => return Ok(None),
                Next::Load(id, pointer) => {
                    self.load(port, Leaf::V2p(volume, leaf), id, pointer).await?;
                }
            }
        }
    }

    /// Where a number's content is, which may be that of a lower number. The entry is never of kind 2.
    ///
    /// # Errors
    /// An entry is damaged (`InvalidData`), or cannot be read.
    pub(super) async fn content_of(&self, port: &Port, number: u64) -> io::Result<Whereabouts> {
        Ok(self.meant_by(port, number).await?.1)
    }

    /// The number whose content a number stands for, which may be itself, and where that content is.
    ///
    /// # Errors
    /// As [`content_of`](Leaves::content_of).
    pub(super) async fn meant_by(
        &self,
        port: &Port,
        number: u64,
    ) -> io::Result<(u64, Whereabouts)> {
        let mut number = number;
        for _ in 0..MAX_WAY {
            match self.whereabouts(port, number).await? {
                Whereabouts::SameAs { number: lower } => number = lower,
                found => return Ok((number, found)),
            }
        }
        Err(damaged(Damaged("a content is that of another one, and so on without an end")))
    }

    /// All entries of a page of P2M, which is not kept in memory.
    ///
    /// # Errors
    /// As [`content_of`](Leaves::content_of).
    pub(super) async fn entries(&self, port: &Port, page: u64) -> io::Result<Vec<Whereabouts>> {
        let Some(words) = self.peek(port, Leaf::P2m(page)).await? else {
            return Ok(vec![Whereabouts::Nowhere; P2M_ENTRIES]);
        };
        // As it is behind the read: the store may have grown.
        let layout = self.shared.layout();
        let numbers = page * P2M_ENTRIES as u64..;
        let entries = words.as_chunks::<ENTRY_WORDS>().0.iter().zip(numbers);
        let entries =
            entries.map(|(words, number)| Whereabouts::decode(&bytes(*words), number, &layout));
        entries.collect::<Result<_, _>>().map_err(damaged)
    }
}
