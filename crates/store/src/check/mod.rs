//! The check of a store, and the use of its space (store.md 2, 5 and 13).
//!
//! The medium is read, as its last checkpoint has it, and little of what serves volumes is asked: both copies of a
//! page, all that a pointer leads to, each place once. Content comes before volumes, so that findings of
//! bad content name the volumes that have it. A page that volumes share is looked at once, and again only if something
//! below it is bad.

mod contents;
mod findings;
mod journal;
mod medium;
mod volumes;

use std::collections::HashMap;
use std::io;

use serde::{Deserialize, Serialize};

pub use findings::{Findings, StoreFinding};

use ferrite_disk_base::{METADATA_BYTES, Port, SpaceBelow};

use super::checkpoint::Core;
use super::layout::Layout;
use super::medium::Medium;
use super::pace::Pace;
use super::space::{Bits, Kind, Space};
use super::superblock::{Roots, Unusable};
use super::{BLOCK_BYTES, Damaged, opening};

/// Memory for pages: they are read once.
const PAGES_BYTES: usize = 1 << 20;

/// How a store is checked.
#[derive(Clone, Copy, Debug, Default)]
pub struct How {
    /// All content that is in a place is compared with its checksum.
    pub contents: bool,
    /// And with its full hash.
    pub deep: bool,
    /// Bytes of content a second, at most.
    pub rate: Option<u64>,
    /// Blocks with one good and one damaged copy are written again in their place.
    pub mend: bool,
}

/// The use of a store's space. Sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The sizes of all volumes and snapshots together.
    pub logical_bytes: u64,
    /// The part of those that is not zeros.
    pub mapped_bytes: u64,
    /// The part of that without duplicates.
    pub distinct_bytes: u64,
    /// The space that this content takes.
    pub stored_bytes: u64,
    /// How many times what is stored would be needed without the store.
    pub ratio: f64,
    /// Pages of trees and tables, with their copies.
    pub metadata_bytes: u64,
    /// The content that no volume has: `gc` frees it.
    pub garbage_bytes: u64,
    /// The free space for content.
    pub free_bytes: u64,
    /// The part of that which guests can still fill with new content now. The file system below may have less.
    #[serde(default)]
    pub available_bytes: u64,
    /// The part of the free space that is kept for the store's own work.
    #[serde(default)]
    pub reserved_bytes: u64,
    /// The bytes that have to have space on the file system below before guests' new content: those in use, those for
    /// metadata, and the ballast.
    #[serde(skip)]
    pub needed_bytes: u64,
    /// A line a volume, in the order of their names.
    pub volumes: Vec<VolumeStats>,
}

impl Stats {
    /// Sets the bytes that guests can fill, if so many pages are owed and are reserved for a checkpoint, and the
    /// ballast has so many bytes.
    pub(super) fn set_room(
        &mut self,
        layout: &Layout,
        space: &Space,
        (owed, reserve): (u64, u64),
        ballast: u64,
    ) {
        let available = in_bytes(space.room_for_data(owed, reserve));
        self.available_bytes = available.min(self.free_bytes);
        self.reserved_bytes = self.free_bytes - self.available_bytes;
        self.needed_bytes = in_bytes(layout.beside_places() + space.needed()) + ballast;
    }

    /// Guests can fill no more than the file system has room for.
    pub fn bound_by(&mut self, below: SpaceBelow) {
        // Unused space that the file has taken is room, too.
        let room = (below.free_bytes + below.taken_bytes).saturating_sub(self.needed_bytes);
        self.available_bytes = self.available_bytes.min(room);
    }
}

/// The sizes of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStats {
    /// Its name.
    pub name: String,
    /// Whether it is a snapshot, which is read-only.
    pub snapshot: bool,
    /// Its size.
    pub virtual_bytes: u64,
    /// The part of that which is not zeros.
    pub mapped_bytes: u64,
}

/// The results of a check.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The errors of the store.
    pub findings: Findings,
    /// The use of the space; none: the store cannot be opened.
    pub stats: Option<Stats>,
    /// Content that was read.
    pub read_bytes: u64,
    /// Blocks that were written again.
    pub mended: u64,
}

/// A page of a volume's tree that was looked at.
#[derive(Clone, Copy)]
struct Known {
    checksum: u32,
    level: u8,
    mapped: u64,
    /// Something below it cannot be read.
    is_bad: bool,
}

/// The caller of a check.
pub(super) struct Asker<'a> {
    /// How fast content is read.
    pub(super) pace: &'a Pace,
    /// Told now and then of bytes done and of all; `false` ends it.
    pub(super) progress: &'a dyn Fn(u64, u64) -> bool,
}

/// See the module text.
pub(super) struct Check<'a> {
    port: &'a Port,
    how: How,
    asker: Asker<'a>,
    medium: &'a Medium,
    layout: Layout,
    core: Core,
    roots: Roots,
    /// Of pairs; none: it is not known.
    kinds: Vec<Option<Kind>>,
    /// Places that space pages have as used.
    used: Bits,
    /// Places that something was found in.
    taken: Bits,
    /// Numbers that have content, and those whose content cannot be read.
    contents: Bits,
    bad: Bits,
    /// Numbers that a volume has.
    live: Bits,
    /// Places where compressed groups begin, the places of these, and the contents in them.
    groups: Bits,
    group_places: u64,
    packed_contents: u64,
    /// The group that was read last.
    group: (u64, Vec<u8>),
    /// Numbers of kind 2, and the lower ones that they stand for.
    same: Vec<(u64, u64)>,
    known: HashMap<u64, Known>,
    metadata_blocks: u64,
    /// Pages of trees that were looked at.
    pages: u64,
    total_bytes: u64,
    done_bytes: u64,
    outcome: Outcome,
}

/// Checks a store that is not in use, on a medium of `bytes` bytes. `progress` gets the bytes done and all bytes now and
/// then, and ends the check by `false`.
///
/// # Errors
/// It is no store, or one of a later version (`InvalidData`); or the kernel's. The outcome lists damage.
pub async fn check(
    port: &Port,
    bytes: u64,
    how: How,
    progress: &dyn Fn(u64, u64) -> bool,
) -> io::Result<Outcome> {
    let (medium, pace) = (Medium::default(), Pace::bounded(how.rate, None));
    let asker = Asker { pace: &pace, progress };
    let mut check = match Check::begin(port, &medium, bytes, how, asker).await? {
        Begun::Open(check) => check,
        Begun::Damaged(outcome) => return Ok(outcome),
    };
    check.trees().await?;
    check.journal().await?;
    check.end().await
}

/// Whether a store can be looked at.
pub(super) enum Begun<'a> {
    Open(Box<Check<'a>>),
    /// It cannot be opened.
    Damaged(Outcome),
}

/// Why a store cannot be opened, if it is damaged.
pub fn damage_of(e: &io::Error) -> Option<String> {
    let inner = e.get_ref()?;
    match inner.downcast_ref::<Unusable>() {
        Some(why @ (Unusable::Damaged(_) | Unusable::CutOff { .. })) => Some(why.to_string()),
        Some(_) => None,
        None => inner.downcast_ref::<Damaged>().map(Damaged::to_string),
    }
}

/// Bits for so many things.
fn bits(count: u64) -> Bits {
    Bits::all(false, count.next_multiple_of(64))
}

fn set_bits(bits: &Bits) -> u64 {
    bits.words().iter().map(|word| u64::from(word.count_ones())).sum()
}

fn in_bytes(blocks: u64) -> u64 {
    blocks * BLOCK_BYTES as u64
}

impl<'a> Check<'a> {
    /// Reads what the next checkpoint overwrites: superblocks, and bits of space.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) async fn begin(
        port: &'a Port,
        medium: &'a Medium,
        bytes: u64,
        how: How,
        asker: Asker<'a>,
    ) -> io::Result<Begun<'a>> {
        let core = match opening::open(medium, port, bytes, PAGES_BYTES, false).await {
            Ok(core) => core,
            Err(e) => {
                let why = damage_of(&e).ok_or(e)?;
                let mut outcome = Outcome::default();
                outcome.findings.add(StoreFinding::damage("superblock", why));
                return Ok(Begun::Damaged(outcome));
            }
        };
        let mut check = Box::new(Check::new(port, medium, core, how, asker));
        check.superblocks().await?;
        check.space().await?;
        Ok(Begun::Open(check))
    }

    /// Reads all that the checkpoint leads to.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) async fn trees(&mut self) -> io::Result<()> {
        self.tables().await?;
        self.p2m().await?;
        self.hashes().await?;
        self.volumes().await?;
        self.nobodys();
        Ok(())
    }

    /// The outcome. Blocks that were written again are durable.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) async fn end(self: Box<Self>) -> io::Result<Outcome> {
        if self.outcome.mended > 0 {
            self.medium.sync(self.port).await?;
        }
        self.progress()?;
        Ok(self.outcome)
    }

    fn new(
        port: &'a Port,
        medium: &'a Medium,
        core: Core,
        how: How,
        asker: Asker<'a>,
    ) -> Check<'a> {
        let (layout, numbers) = (core.layout, core.numbers_end);
        Check {
            port,
            how,
            asker,
            medium,
            layout,
            roots: Roots::default(),
            kinds: vec![None; layout.segments as usize / 2],
            used: bits(layout.places()),
            taken: bits(layout.places()),
            contents: bits(numbers),
            bad: bits(numbers),
            live: bits(numbers),
            groups: bits(layout.places()),
            group_places: 0,
            packed_contents: 0,
            group: (0, Vec::new()),
            same: Vec::new(),
            known: HashMap::new(),
            metadata_blocks: 0,
            pages: 0,
            total_bytes: 0,
            done_bytes: 0,
            outcome: Outcome::default(),
            core,
        }
    }

    fn add(&mut self, finding: StoreFinding) {
        self.outcome.findings.add(finding);
    }

    fn progress(&self) -> io::Result<()> {
        self.asker.pace.check()?;
        let done = self.done_bytes.min(self.total_bytes);
        match (self.asker.progress)(done, self.total_bytes) {
            true => Ok(()),
            false => Err(io::ErrorKind::Interrupted.into()),
        }
    }

    /// So many bytes of content were read.
    async fn has_read(&mut self, bytes: u64) -> io::Result<()> {
        self.done_bytes += bytes;
        self.outcome.read_bytes += bytes;
        // It is asked ten times a second whether to go on.
        let at_once = self.how.rate.map_or(bytes, |rate| (rate / 10).max(1));
        let mut left = bytes;
        while left > 0 {
            self.progress()?;
            let part = left.min(at_once);
            self.asker.pace.used(&self.port.io, part).await?;
            left -= part;
        }
        Ok(())
    }

    /// Counts the contents that no volume has, and their space.
    fn nobodys(&mut self) {
        let same = std::mem::take(&mut self.same);
        let mut duplicates = 0;
        for (number, lower) in same.iter().rev() {
            if self.live.get(*number) {
                duplicates += 1;
                self.live.set(*lower);
            }
        }
        for number in 0..self.core.numbers_end {
            if self.bad.get(number) && !self.live.get(number) {
                let why = format!(
                    "the content with number {number} does not fit its checksum; no volume has it \
                     now, but the next write of that content would find it"
                );
                self.add(StoreFinding::damage("content", why));
            }
        }
        let distinct = set_bits(&self.live) - duplicates;
        let data = |place: u64| {
            let pair = (place / self.layout.segment_blocks / 2) as usize;
            self.kinds[pair] != Some(Kind::Metadata)
        };
        let segment = self.layout.segment_blocks;
        let (mut used_data, mut free) = (0, 0);
        for first in (0..self.layout.places()).step_by(segment as usize) {
            let words = &self.used.words()[first as usize / 64..(first + segment) as usize / 64];
            let used: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
            if data(first) {
                (used_data, free) = (used_data + used, free + segment - used);
            }
        }
        if let Some(stats) = &mut self.outcome.stats {
            stats.distinct_bytes = in_bytes(distinct);
            let stored = distinct.saturating_sub(self.packed_contents) + self.group_places;
            stats.stored_bytes = in_bytes(stored);
            let taken = stats.stored_bytes.max(BLOCK_BYTES as u64);
            stats.ratio = stats.mapped_bytes as f64 / taken as f64;
            stats.metadata_bytes = in_bytes(self.metadata_blocks);
            stats.garbage_bytes = in_bytes(used_data.saturating_sub(stored));
            stats.free_bytes = in_bytes(free);
            let (reserve, ballast) = opening::kept(&self.layout, METADATA_BYTES);
            stats.set_room(&self.layout, &self.core.space, (0, reserve), ballast);
        }
    }
}

#[cfg(test)]
mod tests;
