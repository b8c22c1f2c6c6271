//! Contents by number: where they are, and those that are the same as another one's (store.md 2 and 7).

use std::io;

use ferrite_disk_base::Port;

use super::leaves::{Leaf, bytes, is_lost, words};
use super::{Live, damaged};
use crate::Damaged;
use crate::content::{ContentHash, checksum};
use crate::pace::Pace;
use crate::page::{HASHES, P2M_ENTRIES, Whereabouts};

/// Numbers from one to the next that stand for each other. A pass makes ways short again.
const MAX_WAY: u32 = 64;
const HASH_WORDS: usize = 4;
const ENTRY_WORDS: usize = 2;

/// A content in a block of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plain {
    number: u64,
    place: u64,
    checksum: u32,
}

impl Live {
    /// Where a number's content is, which may be that of a lower one. Never kind 2.
    ///
    /// # Errors
    /// An entry is damaged, or cannot be read.
    pub(super) async fn content_of(&self, port: &Port, number: u64) -> io::Result<Whereabouts> {
        Ok(self.meant_by(port, number).await?.1)
    }

    /// The number whose content a number stands for, or itself, and where that is.
    ///
    /// # Errors
    /// As [`content_of`](Live::content_of).
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

    /// Section 7, step 5: contents of a page of P2M that are live, and that a lower live number has, too, become
    /// kind 2. Gives how many.
    ///
    /// The caller has the pass. So nobody else changes an entry that is there, or gives its place.
    pub(super) async fn join_equal(
        &self,
        port: &Port,
        pace: &Pace,
        page: u64,
        entries: &[Whereabouts],
    ) -> io::Result<u64> {
        let mut joined = Vec::new();
        for (part, entries) in entries.chunks(HASHES).enumerate() {
            let leaf = page * (P2M_ENTRIES / HASHES) as u64 + part as u64;
            if entries.iter().all(|entry| *entry == Whereabouts::Nowhere) {
                continue;
            }
            let hashes = match self.peek(port, Leaf::Hashes(leaf)).await {
                Ok(Some(hashes)) => hashes,
                Ok(None) => continue,
                // Whose hash is lost stays as it is.
                Err(e) if is_lost(&e) => continue,
                Err(e) => return Err(e),
            };
            self.page_done(port, pace).await?;
            let all = hashes.as_chunks::<HASH_WORDS>().0.iter().zip(entries);
            for ((hash, entry), number) in all.zip(leaf * HASHES as u64..) {
                if !self.marks().is_live(number) {
                    continue;
                }
                let lower = match *entry {
                    Whereabouts::Plain { place, checksum } => {
                        let mine = Plain { number, place, checksum };
                        self.equal_below(port, &ContentHash(bytes(*hash)), mine).await?
                    }
                    Whereabouts::SameAs { number: lower } => self.shorter(port, lower).await?,
                    Whereabouts::Nowhere | Whereabouts::Packed { .. } => None,
                };
                joined.extend(lower.map(|lower| (number, lower)));
            }
        }
        self.join(port, page, &joined).await?;
        Ok(joined.len() as u64)
    }

    /// A lower live number with the same content. Its hash says so, and then the data do.
    async fn equal_below(
        &self,
        port: &Port,
        hash: &ContentHash,
        mine: Plain,
    ) -> io::Result<Option<u64>> {
        let candidates: Vec<u64> =
            self.index.candidates(hash).filter(|number| *number < mine.number).collect();
        for number in candidates {
            // Of what is not live the entry may be gone before a volume has this one.
            if !self.marks().is_live(number) {
                continue;
            }
            match self.is_equal(port, hash, mine, number).await {
                Ok(true) => return Ok(Some(number)),
                Err(e) if !is_lost(&e) => return Err(e),
                _ => {}
            }
        }
        Ok(None)
    }

    async fn is_equal(
        &self,
        port: &Port,
        hash: &ContentHash,
        mine: Plain,
        number: u64,
    ) -> io::Result<bool> {
        // In this order (section 6, Order).
        let entry = self.whereabouts(port, number).await?;
        let Whereabouts::Plain { place, checksum: sum } = entry else { return Ok(false) };
        if sum != mine.checksum || self.hash_of(port, number).await? != *hash {
            return Ok(false);
        }
        // The one that is left has to be good.
        let (one, other) =
            (self.medium.read(port, place, 1).await?, self.medium.read(port, mine.place, 1).await?);
        Ok(one == other && checksum(&one) == sum)
    }

    /// Whom a number stands for that another one stands for.
    async fn shorter(&self, port: &Port, lower: u64) -> io::Result<Option<u64>> {
        match self.whereabouts(port, lower).await {
            Ok(Whereabouts::SameAs { number }) => Ok(Some(number)),
            Err(e) if !is_lost(&e) => Err(e),
            _ => Ok(None),
        }
    }

    /// Numbers of one page get the content of lower ones.
    async fn join(&self, port: &Port, page: u64, joined: &[(u64, u64)]) -> io::Result<()> {
        if joined.is_empty() {
            return Ok(());
        }
        // The pass comes to them later: what a live number stands for is live.
        self.marks().are_live(joined.iter().map(|(_, lower)| *lower));
        self.checkpoint_if_wanted(port).await;
        let leaves = [Leaf::P2m(page)].into();
        let mut claim = self.claim(port, &leaves).await?;
        self.with_all(port, &mut claim, &leaves, |core| {
            for (number, lower) in joined {
                let entry = Whereabouts::SameAs { number: *lower };
                let (leaf, at) = Leaf::of_number(*number);
                leaf.store(core, at, &words::<ENTRY_WORDS>(&entry.encode()))?;
            }
            Ok(())
        })
        .await
    }
}
