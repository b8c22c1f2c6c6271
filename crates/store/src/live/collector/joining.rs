//! Duplicates: numbers whose content is equal to that of a lower number (store.md 2 and 7).

use std::io;

use ferrite_disk_base::Port;

use super::Collector;
use crate::content::{ContentHash, checksum};
use crate::live::leaf::{Leaf, bytes, is_lost, words};
use crate::pace::Pace;
use crate::page::{HASHES, P2M_ENTRIES, Whereabouts};

const HASH_WORDS: usize = 4;
const ENTRY_WORDS: usize = 2;

/// A content in a block of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plain {
    number: u64,
    place: u64,
    checksum: u32,
}

impl Collector {
    /// Section 7, step 5: a live number of this page of P2M whose content a lower live number has, too, gets an entry of
    /// kind 2. Gives how many.
    ///
    /// The caller holds the pass. So no other task changes an entry that is there, or gives its place.
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
            let hashes = match self.leaves.peek(port, Leaf::Hashes(leaf)).await {
                Ok(Some(hashes)) => hashes,
                Ok(None) => continue,
                // Without its hash, a content stays as it is.
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

    /// A lower live number with the same content: equal hashes, and then equal data.
    async fn equal_below(
        &self,
        port: &Port,
        hash: &ContentHash,
        mine: Plain,
    ) -> io::Result<Option<u64>> {
        let candidates: Vec<u64> =
            self.shared.index.candidates(hash).filter(|number| *number < mine.number).collect();
        for number in candidates {
            // The entry of a number that is not live may be cleared before a volume refers to it.
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
        let entry = self.leaves.whereabouts(port, number).await?;
        let Whereabouts::Plain { place, checksum: sum } = entry else { return Ok(false) };
        if sum != mine.checksum || self.leaves.hash_of(port, number).await? != *hash {
            return Ok(false);
        }
        // The copy that stays must be good.
        let (one, other) = (
            self.shared.medium.read(port, place, 1).await?,
            self.shared.medium.read(port, mine.place, 1).await?,
        );
        Ok(one == other && checksum(&one) == sum)
    }

    /// The number that `lower` stands for, if it stands for one.
    async fn shorter(&self, port: &Port, lower: u64) -> io::Result<Option<u64>> {
        match self.leaves.whereabouts(port, lower).await {
            Ok(Whereabouts::SameAs { number }) => Ok(Some(number)),
            Err(e) if !is_lost(&e) => Err(e),
            _ => Ok(None),
        }
    }

    /// Has numbers of one page stand for lower numbers.
    async fn join(&self, port: &Port, page: u64, joined: &[(u64, u64)]) -> io::Result<()> {
        if joined.is_empty() {
            return Ok(());
        }
        // A number that a live number stands for is live. The pass comes to these later.
        self.marks().are_live(joined.iter().map(|(_, lower)| *lower));
        self.committer.checkpoint_if_wanted(port).await;
        let leaves = [Leaf::P2m(page)].into();
        let mut claim = self.changes.claim(port, &leaves).await?;
        self.changes
            .with_all(port, &mut claim, &leaves, |core| {
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
