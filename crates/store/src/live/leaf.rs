//! A leaf of a store's trees, by its name; and the words of its entries.

use std::io;
use std::ops::Range;

use super::{Core, damaged};
use crate::journal::VolumeId;
use crate::medium::is_of_a_block;
use crate::page::{HASHES, P2M_ENTRIES, V2P_ENTRIES};
use crate::pages::{Kind, PageId, Pins};
use crate::slots::View;
use crate::tree::{FOR_EVER, Found, Way};

/// A leaf of one of the trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Leaf {
    /// Of a volume's tree: the volume, and the index of the leaf.
    V2p(VolumeId, u64),
    /// Of P2M, by its index.
    P2m(u64),
    /// Of the hashes, by its index.
    Hashes(u64),
}

impl Leaf {
    /// The leaf of a volume that has this block, and the word in it.
    pub(super) fn of_block(volume: VolumeId, block: u64) -> (Leaf, usize) {
        let entries = V2P_ENTRIES as u64;
        (Leaf::V2p(volume, block / entries), (block % entries) as usize)
    }

    /// The leaf of P2M that has this number, and the word in it.
    pub(super) fn of_number(number: u64) -> (Leaf, usize) {
        let entries = P2M_ENTRIES as u64;
        (Leaf::P2m(number / entries), (number % entries) as usize * 2)
    }

    /// The leaf that has the hash of this number, and the word in it.
    pub(super) fn of_hash(number: u64) -> (Leaf, usize) {
        (Leaf::Hashes(number / HASHES as u64), (number % HASHES as u64) as usize * 4)
    }

    /// The key by which readers find the leaf without a lock.
    pub(super) fn view(self) -> View {
        match self {
            Leaf::V2p(volume, leaf) => View::of_volume(volume, leaf),
            Leaf::P2m(leaf) => View::of_p2m(leaf),
            Leaf::Hashes(leaf) => View::of_hashes(leaf),
        }
    }

    pub(super) fn kind(self) -> Kind {
        match self {
            Leaf::V2p(..) => Kind::V2p,
            Leaf::P2m(_) => Kind::P2m,
            Leaf::Hashes(_) => Kind::Hashes,
        }
    }

    /// Looks the leaf up in memory.
    ///
    /// # Errors
    /// `NotFound`: there is no such volume. `InvalidData`: a page above the leaf is damaged.
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

    /// Looks the leaf up as [`find`](Leaf::find) does, and keeps it in memory if it is there.
    ///
    /// # Errors
    /// As [`find`](Leaf::find).
    pub(super) fn pin(self, core: &mut Core, pins: &mut Pins) -> io::Result<Found> {
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

    /// The places of the leaf and of the pages above it. Not for leaves of volumes.
    ///
    /// # Errors
    /// `InvalidData`: a page above the leaf is damaged. `Unsupported`: it is a volume's leaf.
    pub(super) fn way(self, core: &Core) -> io::Result<Way> {
        let way = match self {
            Leaf::V2p(..) => return Err(io::ErrorKind::Unsupported.into()),
            Leaf::P2m(leaf) => core.p2m.way(&core.pages, leaf),
            Leaf::Hashes(leaf) => core.hashes.way(&core.pages, leaf),
        };
        way.map_err(damaged)
    }

    /// Which entries of a leaf of P2M are empty. `None`: the leaf is not in memory.
    ///
    /// # Errors
    /// As [`find`](Leaf::find).
    pub(super) fn nothing(self, core: &Core) -> io::Result<Option<[bool; P2M_ENTRIES]>> {
        let id = match self.find(core)? {
            Found::Leaf(id) => id,
            Found::Nothing => return Ok(Some([true; P2M_ENTRIES])),
            Found::Load(..) => return Ok(None),
        };
        let entry = |at: usize| core.pages.words::<2>(&id, 2 * at);
        Ok(Some(std::array::from_fn(|at| entry(at) == Some([0; 2]))))
    }

    /// Whether the leaf is in memory and has these words from `at` on.
    ///
    /// # Errors
    /// As [`find`](Leaf::find).
    pub(super) fn holds<const N: usize>(
        self,
        core: &Core,
        at: usize,
        words: &[u64; N],
    ) -> io::Result<bool> {
        let Found::Leaf(id) = self.find(core)? else { return Ok(false) };
        Ok(core.pages.words::<N>(&id, at).as_ref() == Some(words))
    }

    /// Makes the leaf writable for [`Pages::store`](crate::pages::Pages::store). The caller has a claim on it.
    ///
    /// # Errors
    /// As [`find`](Leaf::find).
    pub(super) fn change(self, core: &mut Core) -> io::Result<PageId> {
        let pages = &mut core.pages;
        let changed = match self {
            Leaf::V2p(volume, leaf) => {
                let volume = core.volumes.get_mut(volume).ok_or(io::ErrorKind::NotFound)?;
                volume.tree.change(pages, volume.generation, leaf)
            }
            Leaf::P2m(leaf) => core.p2m.change(pages, FOR_EVER, leaf),
            Leaf::Hashes(leaf) => core.hashes.change(pages, FOR_EVER, leaf),
        };
        // Readers must not find the page that was the leaf before: it may still be another volume's leaf.
        changed.before.inspect(|before| pages.hide(before, self.view()));
        pages.show(&changed.leaf, self.view());
        Ok(changed.leaf)
    }

    /// Changes words of the leaf from `at` on. The caller has a claim on it.
    ///
    /// # Errors
    /// As [`find`](Leaf::find).
    pub(super) fn store(self, core: &mut Core, at: usize, words: &[u64]) -> io::Result<()> {
        let page = self.change(core)?;
        core.pages.store(&page, at, words);
        Ok(())
    }
}

/// The numbers that a page of P2M has, of all numbers from 1 to `end`.
pub(super) fn numbers_of(page: u64, end: u64) -> Range<u64> {
    let first = page * P2M_ENTRIES as u64;
    first.max(1)..end.min(first + P2M_ENTRIES as u64)
}

/// Whether an error says that a block of the medium is damaged or unreadable.
pub(super) fn is_lost(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::InvalidData || is_of_a_block(e)
}

/// The words of an entry, from its bytes.
pub(super) fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    std::array::from_fn(|i| u64::from_le_bytes(bytes.as_chunks().0[i]))
}

/// The bytes of an entry, from its words.
pub(super) fn bytes<const N: usize, const WORDS: usize>(words: [u64; WORDS]) -> [u8; N] {
    let mut bytes = [0; N];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}
