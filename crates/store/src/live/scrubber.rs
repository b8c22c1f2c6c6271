//! The scrubber: it reads all content, and names the volumes that have bad content (store.md 15). Content is bad if it
//! does not fit its checksum.
//!
//! A round goes from the lowest number to the highest, one page of P2M a step. If it has found bad content, it then
//! looks for it in all volumes. Writes refuse bad content that they find by its hash, and store a good copy. So that
//! they do so in the next process, too, bad contents lose their hashes.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::changes::{ChangeKind, Changes};
use super::groups::Groups;
use super::leaf::Leaf;
use super::leaves::Leaves;
use super::shared::Shared;
use super::{BLOCK_BYTES, Core, damaged};
use crate::check::{Findings, StoreFinding};
use crate::content::checksum;
use crate::journal::VolumeId;
use crate::medium::MAX_BLOCKS;
use crate::page::{P2M_ENTRIES, V2P_ENTRIES, Whereabouts, decode_number};

/// The most bad contents that are remembered. A medium with more of them is lost.
const MAX_BAD: usize = 1 << 16;
/// Leaves of volumes that are looked at in one step.
const LEAVES: usize = 16;
/// The words of a hash that is not known.
pub(super) const NO_HASH: [u64; 4] = [0; 4];

/// Where a round is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// The round reads the contents of this page of P2M next.
    Contents(u64),
    /// The round looks at this leaf of a volume next.
    Volume(VolumeId, u64),
}

/// The round under way, and what rounds have found.
#[derive(Clone, Debug, Default)]
struct Round {
    /// `None`: no round is under way.
    at: Option<At>,
    /// The pages of P2M that the round reads.
    pages: u64,
    /// The findings of this round, or of the last one.
    found: Findings,
    /// Numbers of bad contents, of this round or the last one.
    bad: BTreeSet<u64>,
    /// Numbers that the round before has found bad, or readers have since. Writes refuse them.
    refused: BTreeSet<u64>,
    /// Numbers that readers have found bad during this round. The round may have read them before.
    met: BTreeSet<u64>,
    rounds: u64,
    read_bytes: u64,
}

/// The findings of scrubbing. Sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// Whether a round is under way.
    pub running: bool,
    /// Pages of P2M that this round, or the last one, has read.
    pub done: u64,
    /// Pages of P2M that this round, or the last one, has to read.
    pub all: u64,
    /// Rounds that have ended.
    pub rounds: u64,
    /// The bytes of content that all rounds have read.
    pub read_bytes: u64,
    /// Contents that do not fit their checksums.
    pub bad_contents: u64,
}

impl Round {
    fn info(&self) -> ScrubInfo {
        let done = match self.at {
            Some(At::Contents(page)) => page,
            _ if self.rounds == 0 && self.at.is_none() => 0,
            _ => self.pages,
        };
        ScrubInfo {
            running: self.at.is_some(),
            done,
            all: self.pages,
            rounds: self.rounds,
            read_bytes: self.read_bytes,
            bad_contents: self.bad.len() as u64,
        }
    }

    /// Whether writes refuse this content.
    fn refuses(&self, number: u64) -> bool {
        self.bad.contains(&number) || self.refused.contains(&number)
    }

    fn is_bad(&mut self, number: u64) {
        if self.bad.len() < MAX_BAD {
            self.bad.insert(number);
        }
    }
}

/// Reads all content, and remembers which is bad.
pub(super) struct Scrubber {
    shared: Arc<Shared>,
    leaves: Arc<Leaves>,
    changes: Arc<Changes>,
    groups: Arc<Groups>,
    round: Mutex<Round>,
    /// Bad content was found since the opening. Without this flag, writes need not lock `round`.
    finds_bad: AtomicBool,
}

impl Scrubber {
    pub(super) fn new(
        shared: Arc<Shared>,
        leaves: Arc<Leaves>,
        changes: Arc<Changes>,
        groups: Arc<Groups>,
    ) -> Scrubber {
        let (round, finds_bad) = (Mutex::default(), AtomicBool::new(false));
        Scrubber { shared, leaves, changes, groups, round, finds_bad }
    }

    fn round(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether writes must not use this content, since it is bad.
    pub(super) fn refuses(&self, number: u64) -> bool {
        self.finds_bad.load(Ordering::Relaxed) && self.round().refuses(number)
    }

    /// Begins a round, unless one is under way.
    pub(super) fn begin(&self) {
        let pages = self.shared.core().numbers_end.div_ceil(P2M_ENTRIES as u64);
        let scrub = &mut *self.round();
        if scrub.at.is_none() {
            let bad = std::mem::take(&mut scrub.bad);
            scrub.refused.extend(bad);
            scrub.found = Findings::default();
            (scrub.at, scrub.pages) = (Some(At::Contents(0)), pages);
        }
    }

    /// How far the round under way is, or what the last one has found.
    pub(super) fn info(&self) -> ScrubInfo {
        self.round().info()
    }

    /// The findings of the round under way up to now, or of the last one.
    pub(super) fn findings(&self) -> Findings {
        self.round().found.clone()
    }

    /// Makes one step. The caller holds the pass, so no number gets another content meanwhile. Gives the bytes that it
    /// has read. `None`: no round is under way. Content that cannot be read is a finding.
    pub(super) async fn step(&self, port: &Port) -> Option<u64> {
        let at = self.round().at?;
        match at {
            At::Contents(page) => {
                // In an epoch no place gets other content before it is read.
                let bytes = self.shared.epochs.during(self.scrub_contents(port, page)).await;
                let numbers = page * P2M_ENTRIES as u64..(page + 1) * P2M_ENTRIES as u64;
                let bad: Vec<u64> = {
                    let scrub = &mut *self.round();
                    scrub.read_bytes += bytes;
                    scrub.bad.range(numbers).copied().collect()
                };
                self.finds_bad.fetch_or(!bad.is_empty(), Ordering::Relaxed);
                if let Err(e) = self.forget_hashes(port, &bad).await {
                    // Writes of this process refuse these contents anyway, and the next round tries again.
                    tracing::debug!("bad contents keep their hashes: {e}");
                }
                let scrub = &mut *self.round();
                scrub.at = Some(At::Contents(page + 1));
                if page + 1 >= scrub.pages {
                    scrub.at = Some(At::Volume(0, 0)).filter(|_| !scrub.bad.is_empty());
                    Self::end_if_done(scrub);
                }
                Some(bytes.max(BLOCK_BYTES as u64))
            }
            At::Volume(volume, leaf) => {
                let next = self.scrub_volume(port, volume, leaf).await;
                let scrub = &mut *self.round();
                scrub.at = next.map(|(volume, leaf)| At::Volume(volume, leaf));
                Self::end_if_done(scrub);
                Some((LEAVES * BLOCK_BYTES) as u64)
            }
        }
    }

    /// Clears the hashes of these numbers, so no write finds their contents, also after the next opening.
    async fn forget_hashes(&self, port: &Port, bad: &[u64]) -> io::Result<()> {
        if bad.is_empty() {
            return Ok(());
        }
        let hashes: Vec<(Leaf, usize)> = bad.iter().map(|number| Leaf::of_hash(*number)).collect();
        let leaves = hashes.iter().map(|(leaf, _)| *leaf).collect();
        let mut claim = self.changes.claim(port, &leaves).await?;
        self.changes.check_room(ChangeKind::Data)?;
        let forget = |core: &mut Core| {
            for (leaf, at) in &hashes {
                // A hash that is cleared already does not make its page dirty.
                if !leaf.holds(core, *at, &NO_HASH)? {
                    leaf.store(core, *at, &NO_HASH)?;
                }
            }
            Ok(())
        };
        self.changes.with_all(port, &mut claim, &leaves, forget).await
    }

    /// Has writes refuse the content of this number, which a read has found bad. The caller is in an epoch.
    pub(super) async fn refuse(&self, port: &Port, mut number: u64) {
        // Writes find a content by its lowest number.
        while let Ok(Whereabouts::SameAs { number: lower }) =
            self.leaves.whereabouts(port, number).await
        {
            number = lower;
        }
        let scrub = &mut *self.round();
        if scrub.refused.len() < MAX_BAD {
            scrub.refused.insert(number);
            if scrub.at.is_some() {
                scrub.met.insert(number);
            }
        }
        self.finds_bad.store(true, Ordering::Relaxed);
    }

    fn end_if_done(scrub: &mut Round) {
        if scrub.at.is_some() {
            return;
        }
        scrub.rounds += 1;
        scrub.refused = std::mem::take(&mut scrub.met);
        if !scrub.bad.is_empty() || scrub.found.counts.damage > 0 {
            // One line a round, however many findings there are.
            tracing::warn!(
                "scrubbing has found {} blocks of content that do not fit their checksums, and {} places in \
                 volumes that have them: ferrite store stats names these",
                scrub.bad.len(),
                scrub.found.counts.damage
            );
        }
    }

    /// Reads the contents of one page of P2M. Gives the bytes.
    async fn scrub_contents(&self, port: &Port, page: u64) -> u64 {
        let entries = match self.leaves.entries(port, page).await {
            Ok(entries) => entries,
            Err(e) => {
                let why = format!("page {page} of P2M cannot be read: {e}");
                self.round().found.add(StoreFinding::damage("page", why));
                return 0;
            }
        };
        let (mut contents, mut packed) = (Vec::new(), Vec::new());
        for (entry, number) in entries.iter().zip(page * P2M_ENTRIES as u64..) {
            match *entry {
                Whereabouts::Plain { place, checksum } => contents.push((place, checksum, number)),
                // The round has read the lower number before.
                Whereabouts::SameAs { number: lower } => {
                    let scrub = &mut *self.round();
                    if scrub.bad.contains(&lower) {
                        scrub.is_bad(number);
                    }
                }
                Whereabouts::Packed { .. } => packed.push((*entry, number)),
                Whereabouts::Nowhere => {}
            }
        }
        let bytes = (contents.len() + packed.len()) * BLOCK_BYTES;
        self.scrub_packed(port, packed).await;
        contents.sort_unstable();
        let mut rest = contents.as_slice();
        while let Some((first, ..)) = rest.first() {
            let follows = |((place, ..), at): &(&(u64, u32, u64), u64)| *place == *at;
            let run = rest.iter().zip(*first..).take(MAX_BLOCKS).take_while(follows).count();
            // Two contents in one place are read one after the other.
            let (run, others) = rest.split_at(run.max(1));
            self.scrub_run(port, run).await;
            rest = others;
        }
        bytes as u64
    }

    /// Reads contents of compressed groups. Each group is read once from the medium.
    async fn scrub_packed(&self, port: &Port, mut contents: Vec<(Whereabouts, u64)>) {
        let place = |entry: &Whereabouts| match entry {
            Whereabouts::Packed { place, .. } => *place,
            _ => 0,
        };
        contents.sort_unstable_by_key(|(entry, _)| place(entry));
        let mut last = 0;
        for (entry, number) in contents {
            if place(&entry) != last {
                last = place(&entry);
                self.groups.forget();
            }
            if self.groups.read(port, entry).await.is_err() {
                self.round().is_bad(number);
            }
        }
    }

    /// Reads contents in consecutive places.
    async fn scrub_run(&self, port: &Port, run: &[(u64, u32, u64)]) {
        if let Ok(bytes) = self.shared.medium.read(port, run[0].0, run.len()).await {
            for (block, (_, sum, number)) in bytes.chunks(BLOCK_BYTES).zip(run) {
                if checksum(block) != *sum {
                    self.round().is_bad(*number);
                }
            }
            return;
        }
        // At least one of the places cannot be read.
        for (place, sum, number) in run {
            let block = self.shared.medium.read(port, *place, 1).await;
            if !block.is_ok_and(|block| checksum(&block) == *sum) {
                self.round().is_bad(*number);
            }
        }
    }

    /// Looks for bad blocks in some leaves of a volume, or of the next one. Gives where the next step begins.
    async fn scrub_volume(
        &self,
        port: &Port,
        volume: VolumeId,
        leaf: u64,
    ) -> Option<(VolumeId, u64)> {
        let found = {
            let core = self.shared.core();
            let next = core.volumes.entries().range(volume..).next();
            next.map(|(number, volume)| (*number, volume.name.as_str().to_owned()))
        };
        let (number, name) = found?;
        let mut leaf = if number == volume { leaf } else { 0 };
        for _ in 0..LEAVES {
            let at = match self.leaves.next_leaf(port, number, leaf).await {
                Ok(at) => at,
                // The volume was deleted meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Err(_) => {
                    self.name_bad(&name, leaf * V2P_ENTRIES as u64, 1, "its tree cannot be read");
                    None
                }
            };
            let Some(at) = at else { return Some((number + 1, 0)) };
            match self.scrub_leaf(port, number, &name, at).await {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Some((number + 1, 0)),
                Err(_) => {
                    let blocks = V2P_ENTRIES as u64;
                    self.name_bad(&name, at * blocks, blocks, "a page of its tree is damaged");
                }
                Ok(()) => {}
            }
            leaf = at + 1;
        }
        Some((number, leaf))
    }

    async fn scrub_leaf(
        &self,
        port: &Port,
        volume: VolumeId,
        name: &str,
        leaf: u64,
    ) -> io::Result<()> {
        let Some(words) = self.leaves.peek(port, Leaf::V2p(volume, leaf)).await? else {
            return Ok(());
        };
        // As it is behind the read: the store may have grown.
        let layout = self.shared.layout();
        let mut run = 0..0;
        for (word, block) in words.iter().zip(leaf * V2P_ENTRIES as u64..) {
            let number = decode_number(word.to_le_bytes(), &layout).map_err(damaged)?;
            if !self.round().bad.contains(&number) {
                continue;
            }
            if run.end != block {
                self.name_bad(name, run.start, run.end - run.start, BAD);
                run = block..block;
            }
            run.end = block + 1;
        }
        self.name_bad(name, run.start, run.end - run.start, BAD);
        Ok(())
    }

    /// Adds a finding for consecutive blocks of a volume.
    fn name_bad(&self, name: &str, block: u64, count: u64, why: &str) {
        if count > 0 {
            let bytes = |blocks: u64| Some(blocks * BLOCK_BYTES as u64);
            self.round().found.add(StoreFinding {
                volume: Some(name.to_owned()),
                offset_bytes: bytes(block),
                length_bytes: bytes(count),
                ..StoreFinding::damage("content", why)
            });
        }
    }
}

const BAD: &str = "its content does not fit its checksum";
