//! The loader: it fills the index after an opening, so writes find content of earlier processes (store.md 9).
//!
//! It reads numbers from the highest down, since guests write new content again sooner. An entry of the index is a
//! hint: a write that finds content claims it by the rules of section 7.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::{Failure, Port};

use super::BLOCK_BYTES;
use super::leaf::{Leaf, bytes, is_lost};
use super::leaves::Leaves;
use super::shared::Shared;
use crate::content::ContentHash;
use crate::page::{HASHES, P2M_ENTRIES, Whereabouts};
use crate::side_by_side::all;

/// The index is full when no number of this many pages of P2M in a row has found room.
const FULL_PAGES: u32 = 64;
const HASH_WORDS: usize = 4;
/// Pages of hashes for one page of P2M.
const HASH_PAGES: u64 = (P2M_ENTRIES / HASHES) as u64;
/// Pages of P2M that are read at once, and then their pages of hashes. Each read by itself would be a wake-up.
const PAGES_AT_ONCE: u64 = 8;

/// How far the loading is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Loading {
    /// Pages of P2M that are left, the last one first.
    left: u64,
    all: u64,
    /// Numbers that came into the index.
    loaded: u64,
    /// Pages in a row of which no number has found room.
    full: u32,
}

/// The loader's progress since the opening.
pub(super) struct Progress {
    /// Pages of P2M whose numbers were looked at.
    pub(super) done: u64,
    /// All pages of P2M that had numbers at the opening.
    pub(super) all: u64,
    /// Numbers that came into the index.
    pub(super) loaded: u64,
}

impl Loading {
    /// The loading of a store with `numbers_end` numbers.
    fn new(numbers_end: u64) -> Loading {
        let all = numbers_end.div_ceil(P2M_ENTRIES as u64);
        Loading { left: all, all, loaded: 0, full: 0 }
    }

    fn done(&self) -> u64 {
        self.all - self.left
    }

    /// The next pages. If there are none, the loading has ended.
    fn next(&mut self) -> Range<u64> {
        let pages = self.left.saturating_sub(PAGES_AT_ONCE)..self.left;
        self.left = pages.start;
        pages
    }

    /// Counts the numbers of a page that have content, and those of them that found room in the index.
    fn found(&mut self, contents: u64, loaded: u64) {
        self.loaded += loaded;
        match (contents, loaded) {
            (0, _) => {}
            (_, 0) => self.full += 1,
            _ => self.full = 0,
        }
        if self.full == FULL_PAGES {
            self.left = 0;
        }
    }
}

/// Fills the index from P2M and the hashes.
pub(super) struct Loader {
    shared: Arc<Shared>,
    leaves: Arc<Leaves>,
    loading: Mutex<Loading>,
}

impl Loader {
    /// A loader with nothing to load, until [`begin`](Loader::begin).
    pub(super) fn new(shared: Arc<Shared>, leaves: Arc<Leaves>) -> Loader {
        Loader { shared, leaves, loading: Mutex::default() }
    }

    fn loading(&self) -> MutexGuard<'_, Loading> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has all numbers below `numbers_end` loaded.
    pub(super) fn begin(&self, numbers_end: u64) {
        *self.loading() = Loading::new(numbers_end);
    }

    /// How far the loading is.
    pub(super) fn progress(&self) -> Progress {
        let loading = self.loading();
        Progress { done: loading.done(), all: loading.all, loaded: loading.loaded }
    }

    /// Loads a few pages of P2M and their hashes. Gives the bytes that it has read. `None`: nothing is left.
    ///
    /// # Errors
    /// The kernel's. Damaged pages are left out: their content is stored once more.
    pub(super) async fn step(&self, port: &Port) -> io::Result<Option<u64>> {
        let pages = self.loading().next();
        if pages.is_empty() {
            return Ok(None);
        }
        let numbers = all(pages.clone().map(|page| self.leaves.entries(port, page))).await;
        let leaves = pages.start * HASH_PAGES..pages.end * HASH_PAGES;
        let hashes = all(leaves.map(|leaf| self.leaves.peek(port, Leaf::Hashes(leaf)))).await;
        let hashes = hashes.chunks(HASH_PAGES as usize);
        for (page, (entries, hashes)) in numbers.iter().zip(hashes).enumerate().rev() {
            let page = pages.start + page as u64;
            let Some(entries) = readable(entries)? else { continue };
            let (mut contents, mut loaded) = (0, 0);
            for (part, hashes) in hashes.iter().enumerate().rev() {
                let Some(Some(hashes)) = readable(hashes)? else { continue };
                let entries = &entries[part * HASHES..][..HASHES];
                let names = hashes.as_chunks::<HASH_WORDS>().0.iter().zip(entries).enumerate();
                for (at, (hash, entry)) in names.rev() {
                    // Of two numbers with the same content, writes find the lower one.
                    let is_content =
                        !matches!(entry, Whereabouts::Nowhere | Whereabouts::SameAs { .. });
                    if is_content && *hash != [0; HASH_WORDS] {
                        let number = page * P2M_ENTRIES as u64 + (part * HASHES + at) as u64;
                        contents += 1;
                        loaded +=
                            u64::from(self.shared.index.remind(&ContentHash(bytes(*hash)), number));
                    }
                }
            }
            self.loading().found(contents, loaded);
        }
        Ok(Some((pages.end - pages.start) * (1 + HASH_PAGES) * BLOCK_BYTES as u64))
    }
}

/// The data that were read. `None`: it is damaged.
fn readable<T>(read: &io::Result<T>) -> io::Result<Option<&T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(e) if is_lost(e) => Ok(None),
        Err(e) => Err(Failure::of(e).error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_goes_from_the_end_and_ends_early_when_nothing_finds_room() {
        let mut loading = Loading::new(1000 * P2M_ENTRIES as u64 - 1);
        assert_eq!((loading.next(), loading.next(), loading.done()), (992..1000, 984..992, 16));
        for _ in 1..FULL_PAGES {
            loading.found(5, 0);
        }
        loading.found(0, 0);
        loading.found(5, 1);
        assert_eq!(loading.next(), 976..984, "something has found room");
        for _ in 0..FULL_PAGES {
            loading.found(5, 0);
        }
        assert!(loading.next().is_empty());
        assert_eq!(loading.loaded, 1);
        assert_eq!(Loading::new(1).next(), 0..1);
    }
}
