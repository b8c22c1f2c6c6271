//! The index after opening: what was written before is found again (store.md 9).
//!
//! Numbers are read from the highest down, since what is new is written again sooner. What is found is a hint as
//! any other: who wants the content claims it by the rules of section 7.

use std::io;

use super::leaves::{Leaf, bytes};
use super::{BLOCK_BYTES, Live};
use crate::Port;
use crate::store::content::ContentHash;
use crate::store::page::{HASHES, P2M_ENTRIES, Whereabouts};

/// Pages of P2M in a row of which nothing found room: the index is full.
const FULL_PAGES: u32 = 64;
const HASH_WORDS: usize = 4;
/// A page of P2M, and those of its hashes.
const STEP_BYTES: u64 = ((1 + P2M_ENTRIES / HASHES) * BLOCK_BYTES) as u64;

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

    /// The next page.
    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        Some(self.left)
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
    /// One page of P2M, and its hashes. Gives the bytes that were read; none: nothing is left.
    ///
    /// # Errors
    /// The kernel's. What is damaged is left out: its content is stored once more.
    pub async fn load_index(&self, port: &Port) -> io::Result<Option<u64>> {
        let Some(page) = self.duties().loading.next() else { return Ok(None) };
        match self.load_index_page(port, page).await {
            Err(e) if e.kind() != io::ErrorKind::InvalidData => Err(e),
            _ => Ok(Some(STEP_BYTES)),
        }
    }

    /// All that is left of it, at once: for who has the store to itself.
    ///
    /// # Errors
    /// As [`load_index`](Live::load_index).
    pub async fn load_whole_index(&self, port: &Port) -> io::Result<()> {
        while self.load_index(port).await?.is_some() {}
        Ok(())
    }

    async fn load_index_page(&self, port: &Port, page: u64) -> io::Result<()> {
        let entries = self.entries(port, page).await?;
        let (mut contents, mut loaded) = (0, 0);
        for (part, entries) in entries.chunks(HASHES).enumerate().rev() {
            let leaf = page * (P2M_ENTRIES / HASHES) as u64 + part as u64;
            let hashes = match self.peek(port, Leaf::Hashes(leaf)).await {
                Ok(hashes) => hashes,
                Err(e) if e.kind() == io::ErrorKind::InvalidData => continue,
                Err(e) => return Err(e),
            };
            let Some(hashes) = hashes else { continue };
            let all = hashes.as_chunks::<HASH_WORDS>().0.iter().zip(entries).enumerate();
            for (at, (hash, entry)) in all.rev() {
                // Of two with the same content the lower one is found.
                let is_content =
                    !matches!(entry, Whereabouts::Nowhere | Whereabouts::SameAs { .. });
                if is_content && *hash != [0; HASH_WORDS] {
                    let number = leaf * HASHES as u64 + at as u64;
                    contents += 1;
                    loaded += u64::from(self.index.remind(&ContentHash(bytes(*hash)), number));
                }
            }
        }
        self.duties().loading.found(contents, loaded);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_goes_from_the_end_and_ends_early_when_nothing_finds_room() {
        let mut loading = Loading::new(1000 * P2M_ENTRIES as u64 - 1);
        assert_eq!((loading.next(), loading.next(), loading.done()), (Some(999), Some(998), 2));
        for _ in 1..FULL_PAGES {
            loading.found(5, 0);
        }
        loading.found(0, 0);
        loading.found(5, 1);
        assert_eq!(loading.next(), Some(997), "something has found room");
        for _ in 0..FULL_PAGES {
            loading.found(5, 0);
        }
        assert_eq!((loading.next(), loading.loaded), (None, 1));
        assert_eq!(Loading::new(1).next(), Some(0));
    }
}
