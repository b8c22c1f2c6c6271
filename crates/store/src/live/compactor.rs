//! The compactor: it moves content into the order in which it is read, and compresses it if the store says so (store.md 7).
//!
//! A round goes over all volumes, one leaf a step. Memory has the new place of a moved content at once, and the medium
//! has it with the next checkpoint. That checkpoint syncs the moved data before it refers to them. Then nothing refers
//! to the old place, and the next pass frees it. So after a power cut, each content is whole in one of the two places.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::changes::{ChangeKind, Changes};
use super::collector::Collector;
use super::committer::Committer;
use super::groups::Groups;
use super::leaf::{Leaf, is_lost, words};
use super::leaves::Leaves;
use super::shared::Shared;
use super::{BLOCK_BYTES, damaged};
use crate::content::checksum;
use crate::journal::VolumeId;
use crate::pace::Pace;
use crate::packing::pack;
use crate::page::{GROUP_BLOCKS, Whereabouts, decode_number};
use crate::space::Bits;

/// A round begins when this part of the content in use is new, and at least 64 MiB.
const NEW_PART: u64 = 4;
const LEAST_NEW: u64 = 16_384;
/// A pass follows a round that has moved this part of all places.
const MOVED_PART: u64 = 64;

/// A round under way.
#[derive(Debug)]
struct Round {
    volume: VolumeId,
    leaf: u64,
    /// By number: the round has decided about it, in the first volume that has it.
    seen: Bits,
    /// Blocks that earlier rounds had moved.
    moved_then: u64,
}

/// The compactor's decision for contents that are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    /// It leaves them in their places.
    Here,
    /// It moves them if compression saves a place.
    Packed,
    /// It moves them.
    Together,
}

/// The round under way, and what rounds have done.
#[derive(Debug, Default)]
struct State {
    round: Option<Round>,
    rounds: u64,
    /// Blocks that all rounds have moved.
    moved: u64,
    /// Those of them that were compressed.
    packed: u64,
    /// Places that the compressed groups take.
    packed_places: u64,
    /// Places that the store had given when the last round began.
    given_then: u64,
}

/// The statistics of compaction since the store was opened. Sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactionInfo {
    /// Whether a round is under way.
    pub running: bool,
    /// Rounds that have ended.
    pub rounds: u64,
    /// The size of the content that was moved.
    pub moved_bytes: u64,
    /// The size, before compression, of the moved content that was compressed.
    pub packed_bytes: u64,
    /// The size of that content after compression.
    pub packed_to_bytes: u64,
}

/// A content and its entry in P2M.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    number: u64,
    entry: Whereabouts,
}

impl State {
    fn info(&self) -> CompactionInfo {
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        CompactionInfo {
            running: self.round.is_some(),
            rounds: self.rounds,
            moved_bytes: bytes(self.moved),
            packed_bytes: bytes(self.packed),
            packed_to_bytes: bytes(self.packed_places),
        }
    }

    /// Ends the round. Gives the blocks that it has moved.
    fn end(&mut self) -> u64 {
        let Some(round) = self.round.take() else { return 0 };
        self.rounds += 1;
        self.moved - round.moved_then
    }
}

/// Moves content, one round after the other.
pub(super) struct Compactor {
    shared: Arc<Shared>,
    committer: Arc<Committer>,
    leaves: Arc<Leaves>,
    changes: Arc<Changes>,
    groups: Arc<Groups>,
    collector: Arc<Collector>,
    state: Mutex<State>,
}

impl Compactor {
    pub(super) fn new(
        shared: Arc<Shared>,
        committer: Arc<Committer>,
        leaves: Arc<Leaves>,
        changes: Arc<Changes>,
        groups: Arc<Groups>,
        collector: Arc<Collector>,
    ) -> Compactor {
        let state = Mutex::default();
        Compactor { shared, committer, leaves, changes, groups, collector, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The statistics of compaction since the opening.
    pub(super) fn info(&self) -> CompactionInfo {
        self.state().info()
    }

    /// Begins a round, unless one is under way.
    pub(super) fn begin(&self) {
        let (places, given) = {
            let core = self.shared.core();
            (core.layout.places(), core.space.given())
        };
        let compacting = &mut *self.state();
        let moved_then = compacting.moved;
        if compacting.round.is_none() {
            compacting.given_then = given;
            let seen = Bits::all(false, places);
            compacting.round = Some(Round { volume: 0, leaf: 0, seen, moved_then });
        }
    }

    /// Whether a round is to begin by itself: a quarter of the content in use was written since the last one began.
    pub(super) fn wants_round(&self) -> bool {
        let (given, used) = {
            let core = self.shared.core();
            (core.space.given(), core.layout.places() - core.space.free())
        };
        let compacting = &*self.state();
        let new = given - compacting.given_then;
        compacting.round.is_none() && new >= (used / NEW_PART).max(LEAST_NEW)
    }

    /// Compacts one leaf of a volume. The caller holds the pass, so no other task changes entries that are there, or
    /// frees places. Gives the bytes that were moved. `None`: no round is under way, or this was its end. Then the
    /// collector is told to make a pass if the round has moved much.
    ///
    /// # Errors
    /// The kernel's. Damaged content stays where it is. `Interrupted`: `pace` has ended the step.
    pub(super) async fn step(&self, port: &Port, pace: &Pace) -> io::Result<Option<u64>> {
        let at = self.state().round.as_ref().map(|round| (round.volume, round.leaf));
        let Some((volume, leaf)) = at else { return Ok(None) };
        let Some((volume, leaf)) = self.leaf_from(port, volume, leaf).await? else {
            return Ok(self.end_round());
        };
        let before = {
            let compacting = &mut *self.state();
            // If the step fails, the next one goes on behind this leaf.
            if let Some(round) = &mut compacting.round {
                (round.volume, round.leaf) = (volume, leaf + 1);
            }
            compacting.moved
        };
        match self.compact_leaf(port, pace, volume, leaf).await {
            Err(e) if e.kind() == io::ErrorKind::StorageFull => return Ok(self.end_round()),
            // The volume was deleted, or the leaf is damaged: there is nothing to move.
            Err(e) if e.kind() == io::ErrorKind::NotFound || is_lost(&e) => {}
            done => done?,
        }
        Ok(Some((self.state().moved - before) * BLOCK_BYTES as u64))
    }

    fn end_round(&self) -> Option<u64> {
        let places = self.shared.core().layout.places();
        let moved = self.state().end();
        if moved >= places / MOVED_PART {
            self.collector.want();
        }
        None
    }

    /// The next leaf from this one on, of this volume or a later one.
    async fn leaf_from(
        &self,
        port: &Port,
        volume: VolumeId,
        leaf: u64,
    ) -> io::Result<Option<(VolumeId, u64)>> {
        let (mut from, mut leaf) = (volume, leaf);
        loop {
            let next = self.shared.core().volumes.entries().range(from..).next().map(|(n, _)| *n);
            let Some(number) = next else { return Ok(None) };
            if number != from {
                leaf = 0;
            }
            match self.leaves.next_leaf(port, number, leaf).await {
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
        let Some(words) = self.leaves.peek(port, Leaf::V2p(volume, leaf)).await? else {
            return Ok(());
        };
        // As it is behind the read: the store may have grown.
        let layout = self.shared.layout();
        self.collector.page_done(port, pace).await?;
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

    /// A number's content, if this round has not decided about it before.
    async fn first_seen(&self, port: &Port, number: u64) -> io::Result<Option<Content>> {
        if number == 0 {
            return Ok(None);
        }
        let (number, entry) = self.leaves.meant_by(port, number).await?;
        let is_new = match &mut self.state().round {
            Some(round) => {
                // The store may have grown since the round began.
                round.seen.reach(self.shared.layout().places());
                round.seen.set(number)
            }
            None => false,
        };
        Ok(is_new.then_some(Content { number, entry }))
    }

    /// Decides for these contents. They are moved if they do not follow each other, if many places beside them
    /// are free, or if they can be compressed.
    fn better(&self, contents: &[Content]) -> Better {
        let core = self.shared.core();
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
        // Guests still write to these segments: a later round moves such content.
        let is_hot = contents.iter().filter_map(place).any(|place| core.space.is_open(place));
        // A single block in the middle that was rewritten is not worth moving all of them.
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

    /// Copies contents to consecutive places, and changes their entries in P2M.
    async fn move_together(
        &self,
        port: &Port,
        pace: &Pace,
        contents: &[Content],
        better: Better,
    ) -> io::Result<()> {
        let (mut good, mut blocks) = (Vec::new(), Vec::new());
        for content in contents {
            // Bad content stays in its place, where the scrubber finds it.
            if let Ok(block) = self.groups.read(port, content.entry).await {
                good.push(*content);
                blocks.extend(block);
            }
            self.collector.page_done(port, pace).await?;
        }
        if good.is_empty() {
            return Ok(());
        }
        let Some((entries, bytes)) = self.placed(port, &good, blocks, better).await? else {
            return Ok(());
        };
        self.collector.page_done(port, pace).await?;
        let moved = self.change_places(port, &good, &entries).await?;
        let compacting = &mut *self.state();
        compacting.moved += moved;
        if matches!(entries.first(), Some(Whereabouts::Packed { .. })) {
            compacting.packed += moved;
            compacting.packed_places += bytes / BLOCK_BYTES as u64;
        }
        Ok(())
    }

    /// Writes blocks to new places, compressed if that saves any. Gives their entries, and the bytes written. `None`:
    /// they stay in their places.
    async fn placed(
        &self,
        port: &Port,
        contents: &[Content],
        blocks: Vec<u8>,
        better: Better,
    ) -> io::Result<Option<(Vec<Whereabouts>, u64)>> {
        let packing = self.shared.core().packing.filter(|_| contents.len() > 1);
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
        let place =
            self.shared.core().space.give_sealed(count).ok_or(io::ErrorKind::StorageFull)?;
        self.shared.medium.write_blocks(port, place, bytes.chunks(BLOCK_BYTES)).await?;
        let entries = sums.into_iter().zip(0u8..).map(|(checksum, index)| match group {
            None => Whereabouts::Plain { place: place + u64::from(index), checksum },
            Some(packing) => {
                Whereabouts::Packed { place, checksum, packing, places: count as u8, index }
            }
        });
        Ok(Some((entries.collect(), bytes.len() as u64)))
    }

    /// Changes the entries in P2M to the new places, when the kernel has the data. Gives how many were changed.
    async fn change_places(
        &self,
        port: &Port,
        contents: &[Content],
        entries: &[Whereabouts],
    ) -> io::Result<u64> {
        self.committer.checkpoint_if_wanted(port).await;
        let of = |content: &Content| Leaf::of_number(content.number).0;
        let leaves: BTreeSet<Leaf> = contents.iter().map(of).collect();
        let mut claim = self.changes.claim(port, &leaves).await?;
        self.changes.check_room(ChangeKind::Data)?;
        self.changes
            .with_all(port, &mut claim, &leaves, |core| {
                let mut moved = 0;
                for (content, entry) in contents.iter().zip(entries) {
                    let (leaf, at) = Leaf::of_number(content.number);
                    // Only if the entry is as it was read. Otherwise the number has other content by now.
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
