//! Compaction: content is put into the order in which it is read, and compressed if the store is to be (store.md 7).
//!
//! A round goes over all volumes, a leaf a step. What has been moved has its new place in memory only, and gets
//! it on the medium by the next checkpoint, whose sync comes before it. The old place is nobody's then, and the next
//! pass gives it free. So whenever the power is cut, each content is in one of the two places, whole.

use std::collections::BTreeSet;
use std::io;

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::leaves::{Leaf, is_lost, words};
use super::room::Whose;
use super::{BLOCK_BYTES, Live, damaged};
use crate::content::checksum;
use crate::journal::VolumeId;
use crate::pace::Pace;
use crate::packing::pack;
use crate::page::{GROUP_BLOCKS, Packing, Whereabouts, decode_number};
use crate::space::Bits;

/// A round begins when one part of this is new of what is in use, and at least 64 MiB.
const NEW_PART: u64 = 4;
const LEAST_NEW: u64 = 16_384;
/// A pass follows a round that has moved one part of this of all places.
const MOVED_PART: u64 = 64;

/// A round that is under way.
#[derive(Debug)]
struct Round {
    volume: VolumeId,
    leaf: u64,
    /// By number: the volume that has come first has decided about it.
    seen: Bits,
    /// What had been moved before.
    moved_then: u64,
}

/// What becomes of contents that are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    /// They stay.
    Here,
    /// They are put somewhere else if that saves a place.
    Packed,
    /// They are put somewhere else.
    Together,
}

/// What compaction does, and has done.
#[derive(Debug, Default)]
pub(super) struct Compacting {
    round: Option<Round>,
    rounds: u64,
    moved: u64,
    packed: u64,
    /// Places that compressed groups take.
    packed_places: u64,
    /// Places that contents had been given when the last round began.
    given_then: u64,
}

/// What compaction has done since the store was opened. Sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactionInfo {
    /// A round is under way.
    pub running: bool,
    /// Rounds that have ended.
    pub rounds: u64,
    /// Content that has another place now.
    pub moved_bytes: u64,
    /// Of that, content that was compressed.
    pub packed_bytes: u64,
    /// What that takes.
    pub packed_to_bytes: u64,
}

/// A content, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    number: u64,
    entry: Whereabouts,
}

impl Compacting {
    pub(super) fn info(&self) -> CompactionInfo {
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        CompactionInfo {
            running: self.round.is_some(),
            rounds: self.rounds,
            moved_bytes: bytes(self.moved),
            packed_bytes: bytes(self.packed),
            packed_to_bytes: bytes(self.packed_places),
        }
    }

    /// How much the round has moved.
    fn end(&mut self) -> u64 {
        let Some(round) = self.round.take() else { return 0 };
        self.rounds += 1;
        self.moved - round.moved_then
    }
}

impl Live {
    /// How new groups are compressed, from the next round on.
    pub fn packing(&self) -> Option<Packing> {
        self.core().packing
    }

    /// Changes that. It is durable when this returns.
    ///
    /// # Errors
    /// Those of a checkpoint.
    pub async fn set_packing(&self, port: &Port, packing: Option<Packing>) -> io::Result<()> {
        let is_older = {
            let core = &mut *self.core();
            core.packing = packing;
            core.under_way.is_some()
        };
        self.checkpoint(port).await?;
        // What has failed is tried again as it was.
        if is_older { self.checkpoint(port).await } else { Ok(()) }
    }

    /// Begins a round, unless one is under way.
    pub fn begin_compaction(&self) {
        let (places, given) = {
            let core = self.core();
            (core.layout.places(), core.space.given())
        };
        let compacting = &mut self.scheduler().compacting;
        let moved_then = compacting.moved;
        if compacting.round.is_none() {
            compacting.given_then = given;
            let seen = Bits::all(false, places);
            compacting.round = Some(Round { volume: 0, leaf: 0, seen, moved_then });
        }
    }

    /// Whether a round is to begin by itself: a quarter of what is in use was written since the last one.
    pub(super) fn wants_compaction(&self) -> bool {
        let (given, used) = {
            let core = self.core();
            (core.space.given(), core.layout.places() - core.space.free())
        };
        let compacting = &self.scheduler().compacting;
        let new = given - compacting.given_then;
        compacting.round.is_none() && new >= (used / NEW_PART).max(LEAST_NEW)
    }

    /// One leaf of a volume. Gives the bytes that were moved; none: no round is under way, or this was its end.
    /// Then a pass is wanted if much was moved.
    ///
    /// # Errors
    /// The kernel's. What is damaged stays where it is.
    pub async fn compact(&self, port: &Port, pace: &Pace) -> io::Result<Option<u64>> {
        let _alone = self.take_pass(port, pace).await?;
        self.compact_alone(port, pace).await
    }

    /// The same for who has the pass: nobody else changes entries that are there, or frees places.
    pub(super) async fn compact_alone(&self, port: &Port, pace: &Pace) -> io::Result<Option<u64>> {
        let at = self.scheduler().compacting.round.as_ref().map(|round| (round.volume, round.leaf));
        let Some((volume, leaf)) = at else { return Ok(None) };
        let Some((volume, leaf)) = self.leaf_from(port, volume, leaf).await? else {
            return Ok(self.end_round());
        };
        let before = {
            let compacting = &mut self.scheduler().compacting;
            // What fails is not in the way of what comes behind it.
            if let Some(round) = &mut compacting.round {
                (round.volume, round.leaf) = (volume, leaf + 1);
            }
            compacting.moved
        };
        match self.compact_leaf(port, pace, volume, leaf).await {
            Err(e) if e.kind() == io::ErrorKind::StorageFull => return Ok(self.end_round()),
            // It was deleted, or is damaged: there is nothing to move.
            Err(e) if e.kind() == io::ErrorKind::NotFound || is_lost(&e) => {}
            done => done?,
        }
        Ok(Some((self.scheduler().compacting.moved - before) * BLOCK_BYTES as u64))
    }

    fn end_round(&self) -> Option<u64> {
        let places = self.core().layout.places();
        let moved = self.scheduler().compacting.end();
        if moved >= places / MOVED_PART {
            self.marks().passes.want();
        }
        None
    }

    /// The next leaf, of this volume or another one.
    async fn leaf_from(
        &self,
        port: &Port,
        volume: VolumeId,
        leaf: u64,
    ) -> io::Result<Option<(VolumeId, u64)>> {
        let (mut from, mut leaf) = (volume, leaf);
        loop {
            let next = self.core().volumes.entries().range(from..).next().map(|(n, _)| *n);
            let Some(number) = next else { return Ok(None) };
            if number != from {
                leaf = 0;
            }
            match self.next_leaf(port, number, leaf).await {
                Ok(Some(leaf)) => return Ok(Some((number, leaf))),
                Err(e) if e.kind() != io::ErrorKind::NotFound && !is_lost(&e) => return Err(e),
                _ => (from, leaf) = (number + 1, 0),
            }
        }
    }

    async fn compact_leaf(
        &self,
        port: &Port,
        pace: &Pace,
        volume: VolumeId,
        leaf: u64,
    ) -> io::Result<()> {
        let layout = self.core().layout;
        let Some(words) = self.peek(port, Leaf::V2p(volume, leaf)).await? else { return Ok(()) };
        self.page_done(port, pace).await?;
        for part in words.chunks(usize::from(GROUP_BLOCKS)) {
            let mut contents = Vec::new();
            for word in part {
                let number = decode_number(word.to_le_bytes(), &layout).map_err(damaged)?;
                contents.extend(self.first_seen(port, number).await?);
            }
            match self.better(&contents) {
                Better::Here => {}
                better => self.move_together(port, pace, &contents, better).await?,
            }
        }
        Ok(())
    }

    /// A number's content, if nobody has decided about it in this round.
    async fn first_seen(&self, port: &Port, number: u64) -> io::Result<Option<Content>> {
        if number == 0 {
            return Ok(None);
        }
        let (number, entry) = self.meant_by(port, number).await?;
        let is_new = match &mut self.scheduler().compacting.round {
            Some(round) => round.seen.set(number),
            None => false,
        };
        Ok(is_new.then_some(Content { number, entry }))
    }

    /// Where these are better put: they do not follow each other, much of what is beside them is free, or they may
    /// be compressed.
    fn better(&self, contents: &[Content]) -> Better {
        let core = self.core();
        let place = |content: &Content| match content.entry {
            Whereabouts::Plain { place, .. } | Whereabouts::Packed { place, .. } => Some(place),
            Whereabouts::Nowhere | Whereabouts::SameAs { .. } => None,
        };
        let is_sparse = |place| core.space.is_sparse(place);
        let follows = |pair: &[Content]| match (pair[0].entry, pair[1].entry) {
            (Whereabouts::Plain { place: a, .. }, Whereabouts::Plain { place: b, .. }) => {
                b == a + 1
            }
            (
                Whereabouts::Packed { place: a, index: i, .. },
                Whereabouts::Packed { place: b, index: j, .. },
            ) => a == b && i < j,
            _ => false,
        };
        let is_plain = |content: &Content| matches!(content.entry, Whereabouts::Plain { .. });
        let packs = core.packing.is_some() && contents.len() > 1 && contents.iter().any(is_plain);
        // What guests write now is moved when it is old.
        let is_hot = contents.iter().filter_map(place).any(|place| core.space.is_open(place));
        // One block in the middle that was written again is not worth that all are.
        let gaps = contents.windows(2).filter(|pair| !follows(pair)).count();
        let is_scattered = gaps > 0 && 2 * gaps >= contents.len() - 1;
        let is_left = contents.iter().filter_map(place).any(is_sparse);
        match () {
            () if is_hot => Better::Here,
            () if is_scattered || is_left => Better::Together,
            () if packs => Better::Packed,
            () => Better::Here,
        }
    }

    /// Copies contents to places in a row, and has P2M say so.
    async fn move_together(
        &self,
        port: &Port,
        pace: &Pace,
        contents: &[Content],
        better: Better,
    ) -> io::Result<()> {
        let (mut good, mut blocks) = (Vec::new(), Vec::new());
        for content in contents {
            // What is bad stays where it is, for who looks for it.
            if let Ok(block) = self.read_content(port, content.entry).await {
                good.push(*content);
                blocks.extend(block);
            }
            self.page_done(port, pace).await?;
        }
        if good.is_empty() {
            return Ok(());
        }
        let Some((entries, bytes)) = self.placed(port, &good, blocks, better).await? else {
            return Ok(());
        };
        self.page_done(port, pace).await?;
        let moved = self.change_places(port, &good, &entries).await?;
        let compacting = &mut self.scheduler().compacting;
        compacting.moved += moved;
        if matches!(entries.first(), Some(Whereabouts::Packed { .. })) {
            compacting.packed += moved;
            compacting.packed_places += bytes / BLOCK_BYTES as u64;
        }
        Ok(())
    }

    async fn read_content(&self, port: &Port, entry: Whereabouts) -> io::Result<Vec<u8>> {
        match entry {
            Whereabouts::Plain { place, checksum: sum } => {
                let block = self.medium.read(port, place, 1).await?;
                match checksum(&block) == sum {
                    true => Ok(block),
                    false => Err(io::ErrorKind::InvalidData.into()),
                }
            }
            packed => self.unpacked(port, packed).await,
        }
    }

    /// Writes blocks to new places, compressed if that saves any. Gives their entries, and the bytes written. None:
    /// they stay.
    async fn placed(
        &self,
        port: &Port,
        contents: &[Content],
        blocks: Vec<u8>,
        better: Better,
    ) -> io::Result<Option<(Vec<Whereabouts>, u64)>> {
        let packing = self.core().packing.filter(|_| contents.len() > 1);
        let sums: Vec<u32> = blocks.chunks(BLOCK_BYTES).map(checksum).collect();
        let (bytes, group) = match packing {
            None => (blocks, None),
            Some(packing) => {
                let work = move || (pack(packing, &blocks), blocks);
                match port.io.compute(work).await? {
                    (Some(group), _) => (group, Some(packing)),
                    (None, blocks) => (blocks, None),
                }
            }
        };
        if group.is_none() && better == Better::Packed {
            return Ok(None);
        }
        let count = (bytes.len() / BLOCK_BYTES) as u64;
        let place = self.core().space.give_sealed(count).ok_or(io::ErrorKind::StorageFull)?;
        self.medium.write_blocks(port, place, bytes.chunks(BLOCK_BYTES)).await?;
        let entries = sums.into_iter().zip(0u8..).map(|(checksum, index)| match group {
            None => Whereabouts::Plain { place: place + u64::from(index), checksum },
            Some(packing) => {
                Whereabouts::Packed { place, checksum, packing, places: count as u8, index }
            }
        });
        Ok(Some((entries.collect(), bytes.len() as u64)))
    }

    /// The data are with the kernel: P2M has the new places. Gives how many of them.
    async fn change_places(
        &self,
        port: &Port,
        contents: &[Content],
        entries: &[Whereabouts],
    ) -> io::Result<u64> {
        self.checkpoint_if_wanted(port).await;
        let of = |content: &Content| Leaf::of_number(content.number).0;
        let leaves: BTreeSet<Leaf> = contents.iter().map(of).collect();
        let mut claim = self.claim(port, &leaves).await?;
        self.check_room(Whose::Data)?;
        self.with_all(port, &mut claim, &leaves, |core| {
            let mut moved = 0;
            for (content, entry) in contents.iter().zip(entries) {
                let (leaf, at) = Leaf::of_number(content.number);
                // As it was read: a place that was taken from another content would be that one's data.
                if leaf.holds(core, at, &words::<2>(&content.entry.encode()))? {
                    leaf.store(core, at, &words::<2>(&entry.encode()))?;
                    moved += 1;
                }
            }
            Ok(moved)
        })
        .await
    }
}
