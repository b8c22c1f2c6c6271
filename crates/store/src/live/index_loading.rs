//! The index after opening: what was written before is found again (store.md 9).
//!
//! Numbers are read from the highest down, since what is new is written again sooner. What is found is a hint as
//! any other: who wants the content claims it by the rules of section 7.

use std::io;
use std::ops::Range;

use ferrite_disk_base::{Failure, Port};

use super::leaves::{Leaf, bytes, is_lost};
use super::{BLOCK_BYTES, Live};
use crate::content::ContentHash;
use crate::page::{HASHES, P2M_ENTRIES, Whereabouts};
use crate::side_by_side::all;

/// Pages of P2M in a row of which nothing found room: the index is full.
const FULL_PAGES: u32 = 64;
const HASH_WORDS: usize = 4;
/// Pages of hashes to one of P2M.
const HASH_PAGES: u64 = (P2M_ENTRIES / HASHES) as u64;
/// Pages of P2M that are read at once, and then those of their hashes: each by itself would be a wake-up of its own.
const PAGES_AT_ONCE: u64 = 8;

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Loading {
    /// Pages of P2M that are left, the last of them first.
    left: u64,
    pub(super) all: u64,
    /// Numbers that came into the index.
    pub(super) loaded: u64,
    full: u32,
}

impl Loading {
    /// Of a store with so many numbers.
    pub(super) fn new(numbers_end: u64) -> Loading {
        let all = numbers_end.div_ceil(P2M_ENTRIES as u64);
        Loading { left: all, all, loaded: 0, full: 0 }
    }

    pub(super) fn done(&self) -> u64 {
        self.all - self.left
    }

    /// The next pages; none are left if there are none.
    fn next(&mut self) -> Range<u64> {
        let pages = self.left.saturating_sub(PAGES_AT_ONCE)..self.left;
        self.left = pages.start;
        pages
    }

    /// So many of the numbers of a page that have content got a word.
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

impl Live {
    /// A few pages of P2M, and their hashes. Gives the bytes that were read; none: nothing is left.
    ///
    /// # Errors
    /// The kernel's. What is damaged is left out: its content is stored once more.
    pub async fn load_index(&self, port: &Port) -> io::Result<Option<u64>> {
        let pages = self.scheduler().loading.next();
        if pages.is_empty() {
            return Ok(None);
        }
        let numbers = all(pages.clone().map(|page| self.entries(port, page))).await;
        let leaves = pages.start * HASH_PAGES..pages.end * HASH_PAGES;
        let hashes = all(leaves.map(|leaf| self.peek(port, Leaf::Hashes(leaf)))).await;
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
                    // Of two with the same content the lower one is found.
                    let is_content =
                        !matches!(entry, Whereabouts::Nowhere | Whereabouts::SameAs { .. });
                    if is_content && *hash != [0; HASH_WORDS] {
                        let number = page * P2M_ENTRIES as u64 + (part * HASHES + at) as u64;
                        contents += 1;
                        loaded += u64::from(self.index.remind(&ContentHash(bytes(*hash)), number));
                    }
                }
            }
            self.scheduler().loading.found(contents, loaded);
        }
        Ok(Some((pages.end - pages.start) * (1 + HASH_PAGES) * BLOCK_BYTES as u64))
    }

    /// All that is left of it, at once: for who has the store to itself.
    ///
    /// # Errors
    /// As [`load_index`](Live::load_index).
    pub async fn load_whole_index(&self, port: &Port) -> io::Result<()> {
        while self.load_index(port).await?.is_some() {}
        Ok(())
    }
}

/// What was read, unless it is damaged.
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
