//! Scrubbing: all content is read, and what does not fit its checksum is named by all who have it (store.md 15).
//!
//! A round goes from the lowest number to the highest, a page of P2M a step. If something was bad, it then looks
//! for it in all volumes. What writers find bad by its number they do not take: who writes that content again
//! gets a good copy. So that this holds in the next process, too, bad contents lose their hashes, by which they
//! would be found.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use ferrite_disk_base::Port;
use serde::{Deserialize, Serialize};

use super::leaves::{Leaf, is_lost};
use super::room::Whose;
use super::{BLOCK_BYTES, Core, Live, damaged};
use crate::check::{Findings, StoreFinding};
use crate::content::checksum;
use crate::journal::VolumeId;
use crate::medium::MAX_BLOCKS;
use crate::pace::Pace;
use crate::page::{P2M_ENTRIES, V2P_ENTRIES, Whereabouts, decode_number};
use crate::tree::Next;

/// Bad contents that are remembered: with more than these the medium is lost.
const MAX_BAD: usize = 1 << 16;
/// Leaves of volumes that are looked at in one step.
const LEAVES: usize = 16;
/// What a number has that has no name.
pub(super) const NO_HASH: [u64; 4] = [0; 4];

/// Where a round is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// It reads the contents of this page of P2M next.
    Contents(u64),
    /// It looks at this leaf of a volume next.
    Volume(VolumeId, u64),
}

/// See the module text.
#[derive(Clone, Debug, Default)]
pub(super) struct Scrubbing {
    at: Option<At>,
    pages: u64,
    /// Of this round, or of the last one.
    found: Findings,
    /// Numbers, of this round.
    bad: BTreeSet<u64>,
    /// And of the last one, and those that readers have met since: nobody gets these.
    refused: BTreeSet<u64>,
    /// Those of them that readers have met during this round, which may have been there before.
    met: BTreeSet<u64>,
    rounds: u64,
    read_bytes: u64,
}

/// What scrubbing has found. Sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// A round is under way.
    pub running: bool,
    /// Of it, or of the last one: pages of P2M that were looked at, and all.
    pub done: u64,
    /// See `done`.
    pub all: u64,
    /// Rounds that have ended.
    pub rounds: u64,
    /// Content that was read, in all rounds.
    pub read_bytes: u64,
    /// Contents that do not fit their checksums.
    pub bad_contents: u64,
}

impl Scrubbing {
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

    /// Nobody gets this content, as it cannot be read.
    pub(super) fn refuses(&self, number: u64) -> bool {
        self.bad.contains(&number) || self.refused.contains(&number)
    }

    fn is_bad(&mut self, number: u64) {
        if self.bad.len() < MAX_BAD {
            self.bad.insert(number);
        }
    }
}

impl Live {
    /// Begins a round, unless one is under way.
    pub fn begin_scrub(&self) {
        let pages = self.core().numbers_end.div_ceil(P2M_ENTRIES as u64);
        let scrub = &mut self.scheduler().scrub;
        if scrub.at.is_none() {
            let bad = std::mem::take(&mut scrub.bad);
            scrub.refused.extend(bad);
            scrub.found = Findings::default();
            (scrub.at, scrub.pages) = (Some(At::Contents(0)), pages);
        }
    }

    /// How far the round is that is under way, or what the last one has found.
    pub fn scrub_info(&self) -> ScrubInfo {
        self.scheduler().scrub.info()
    }

    /// What the last round has found, or this one up to now.
    pub fn scrub_findings(&self) -> Findings {
        self.scheduler().scrub.found.clone()
    }

    /// One step of a round that others may go through, too. Gives the bytes that were read; none: no round is under
    /// way.
    ///
    /// # Errors
    /// `Interrupted`: `pace` has ended the wait.
    pub async fn scrub_in_turn(&self, port: &Port, pace: &Pace) -> io::Result<Option<u64>> {
        let _alone = self.take_pass(port, pace).await?;
        Ok(self.scrub(port).await)
    }

    /// One step, by who has the pass: no number becomes another content's meanwhile. Gives the bytes that were read;
    /// none: no round is under way. What cannot be read is a finding.
    pub(super) async fn scrub(&self, port: &Port) -> Option<u64> {
        let at = self.scheduler().scrub.at?;
        match at {
            At::Contents(page) => {
                // So no place becomes another's before it was read.
                let bytes = self.epochs.during(self.scrub_contents(port, page)).await;
                let numbers = page * P2M_ENTRIES as u64..(page + 1) * P2M_ENTRIES as u64;
                let bad: Vec<u64> = {
                    let scrub = &mut self.scheduler().scrub;
                    scrub.read_bytes += bytes;
                    scrub.bad.range(numbers).copied().collect()
                };
                self.finds_bad.fetch_or(!bad.is_empty(), Ordering::Relaxed);
                if let Err(e) = self.forget_names(port, &bad).await {
                    // This process does not give them to writers, and the next round tries again.
                    tracing::debug!("bad contents keep their names: {e}");
                }
                let scrub = &mut self.scheduler().scrub;
                scrub.at = Some(At::Contents(page + 1));
                if page + 1 >= scrub.pages {
                    scrub.at = Some(At::Volume(0, 0)).filter(|_| !scrub.bad.is_empty());
                    self.end_if_done(scrub);
                }
                Some(bytes.max(BLOCK_BYTES as u64))
            }
            At::Volume(volume, leaf) => {
                let next = self.scrub_volume(port, volume, leaf).await;
                let scrub = &mut self.scheduler().scrub;
                scrub.at = next.map(|(volume, leaf)| At::Volume(volume, leaf));
                self.end_if_done(scrub);
                Some((LEAVES * BLOCK_BYTES) as u64)
            }
        }
    }

    /// No write finds these contents any more, also when the store is opened the next time.
    async fn forget_names(&self, port: &Port, bad: &[u64]) -> io::Result<()> {
        if bad.is_empty() {
            return Ok(());
        }
        let names: Vec<(Leaf, usize)> = bad.iter().map(|number| Leaf::of_hash(*number)).collect();
        let leaves = names.iter().map(|(leaf, _)| *leaf).collect();
        let mut claim = self.claim(port, &leaves).await?;
        self.check_room(Whose::Data)?;
        let forget = |core: &mut Core| {
            for (leaf, at) in &names {
                // A page that says so already is not made dirty.
                if !leaf.holds(core, *at, &NO_HASH)? {
                    leaf.store(core, *at, &NO_HASH)?;
                }
            }
            Ok(())
        };
        self.with_all(port, &mut claim, &leaves, forget).await
    }

    /// A read has found one of these blocks bad: no write gets their contents before a round has looked at them. The
    /// caller is in an epoch.
    pub(super) async fn refuse_bad(&self, port: &Port, volume: VolumeId, blocks: Range<u64>) {
        for block in blocks {
            let read = self.read_blocks(port, volume, block..block + 1).await;
            if read.is_err_and(|e| is_lost(&e))
                && let Ok([number]) = self.words(port, Leaf::of_block(volume, block)).await
            {
                self.refuse(port, number).await;
            }
        }
    }

    /// No write gets the content of this number.
    async fn refuse(&self, port: &Port, mut number: u64) {
        // It is found by the lowest number that it has.
        while let Ok(Whereabouts::SameAs { number: lower }) = self.whereabouts(port, number).await {
            number = lower;
        }
        let scrub = &mut self.scheduler().scrub;
        if scrub.refused.len() < MAX_BAD {
            scrub.refused.insert(number);
            if scrub.at.is_some() {
                scrub.met.insert(number);
            }
        }
        self.finds_bad.store(true, Ordering::Relaxed);
    }

    fn end_if_done(&self, scrub: &mut Scrubbing) {
        if scrub.at.is_some() {
            return;
        }
        scrub.rounds += 1;
        scrub.refused = std::mem::take(&mut scrub.met);
        if !scrub.bad.is_empty() || scrub.found.counts.damage > 0 {
            // One line a round, however many there are.
            tracing::warn!(
                "scrubbing has found {} blocks of content that do not fit their checksums, and {} places in \
                 volumes that have them: ferrite store stats names these",
                scrub.bad.len(),
                scrub.found.counts.damage
            );
        }
    }

    /// The contents of one page of P2M.
    async fn scrub_contents(&self, port: &Port, page: u64) -> u64 {
        let entries = match self.entries(port, page).await {
            Ok(entries) => entries,
            Err(e) => {
                let why = format!("page {page} of P2M cannot be read: {e}");
                self.scheduler().scrub.found.add(StoreFinding::damage("page", why));
                return 0;
            }
        };
        let (mut contents, mut packed) = (Vec::new(), Vec::new());
        for (entry, number) in entries.iter().zip(page * P2M_ENTRIES as u64..) {
            match *entry {
                Whereabouts::Plain { place, checksum } => contents.push((place, checksum, number)),
                // The lower one was read before.
                Whereabouts::SameAs { number: lower } => {
                    let scrub = &mut self.scheduler().scrub;
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
            // Two in one place are read one after the other.
            let (run, others) = rest.split_at(run.max(1));
            self.scrub_run(port, run).await;
            rest = others;
        }
        bytes as u64
    }

    /// Contents of compressed groups: each group is read once, as it is now.
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
                self.groups().forget();
            }
            if self.unpacked(port, entry).await.is_err() {
                self.scheduler().scrub.is_bad(number);
            }
        }
    }

    /// Contents in places in a row.
    async fn scrub_run(&self, port: &Port, run: &[(u64, u32, u64)]) {
        if let Ok(bytes) = self.medium.read(port, run[0].0, run.len()).await {
            for (block, (_, sum, number)) in bytes.chunks(BLOCK_BYTES).zip(run) {
                if checksum(block) != *sum {
                    self.scheduler().scrub.is_bad(*number);
                }
            }
            return;
        }
        // One of them cannot be read at all.
        for (place, sum, number) in run {
            let block = self.medium.read(port, *place, 1).await;
            if !block.is_ok_and(|block| checksum(&block) == *sum) {
                self.scheduler().scrub.is_bad(*number);
            }
        }
    }

    /// Some leaves of a volume, or of the next one: which of their blocks are bad. Gives where to go on.
    async fn scrub_volume(
        &self,
        port: &Port,
        volume: VolumeId,
        leaf: u64,
    ) -> Option<(VolumeId, u64)> {
        let found = {
            let core = self.core();
            let next = core.volumes.entries().range(volume..).next();
            next.map(|(number, volume)| (*number, volume.name.as_str().to_owned()))
        };
        let (number, name) = found?;
        let mut leaf = if number == volume { leaf } else { 0 };
        for _ in 0..LEAVES {
            let at = match self.next_leaf(port, number, leaf).await {
                Ok(at) => at,
                // It was deleted meanwhile.
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
        let layout = self.core().layout;
        let Some(words) = self.peek(port, Leaf::V2p(volume, leaf)).await? else { return Ok(()) };
        let mut run = 0..0;
        for (word, block) in words.iter().zip(leaf * V2P_ENTRIES as u64..) {
            let number = decode_number(word.to_le_bytes(), &layout).map_err(damaged)?;
            if !self.scheduler().scrub.bad.contains(&number) {
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

    /// Blocks of a volume in a row.
    fn name_bad(&self, name: &str, block: u64, count: u64, why: &str) {
        if count > 0 {
            let bytes = |blocks: u64| Some(blocks * BLOCK_BYTES as u64);
            self.scheduler().scrub.found.add(StoreFinding {
                volume: Some(name.to_owned()),
                offset_bytes: bytes(block),
                length_bytes: bytes(count),
                ..StoreFinding::damage("content", why)
            });
        }
    }

    /// The first leaf of a volume's tree from `leaf` on.
    pub(super) async fn next_leaf(
        &self,
        port: &Port,
        volume: VolumeId,
        leaf: u64,
    ) -> io::Result<Option<u64>> {
        let mut leaf = leaf;
        loop {
            let next = {
                let core = self.core();
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
}

const BAD: &str = "its content does not fit its checksum";
