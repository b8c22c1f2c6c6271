//! The blocks of an open dynamic or differencing image.
//!
//! One word for each block ([`entry`]) and the bitmaps in use ([`slab`]) are read by all queues without a lock. Changes
//! are made under the mutex of [`State`], which is held to change some words of memory and journal, and never while
//! waiting.
//!
//! The journal has answered changes that are not durable: a record for each new block with its place, and one for each
//! eight words of a bitmap that got bits. Cleared bits (discard) are not in it: after the death of the process a
//! discard may be undone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::Commits;
use ferrite_disk_base::journal::{Journal, Slot as Record};
use ferrite_io::shared_lock::SharedLock;

use super::damage::Damage;
use super::format::SECTOR;
use super::format::footer;
use super::format::layout::{Layout, UNUSED};
use crate::image::mapping::Mapping;

mod aside;
mod cache;
mod commit;
mod discard;
mod ends;
mod entry;
mod grow;
mod recovery;
mod slab;

use entry::{Entry, State as Where};
use slab::{Slab, masks};

/// Words of a journal record: of a bitmap, or the place of a block.
pub(super) const RECORD_WORDS: usize = 8;
/// Records that a journal may have: 4.5 MiB.
pub(super) const RECORDS: u32 = 1 << 16;
/// If fewer are left, writes wait for a commit. Writes that were placed before need records when they are done; queues
/// and buffers bound their number far below this.
const RESERVED_RECORDS: usize = 1 << 14;
/// The reserve when the tmpfs is full, and the journal cannot grow.
const RESERVED_WHEN_STUCK: usize = 1 << 9;
/// The number of counters of evictions, which blocks share.
const GENERATIONS: usize = 256;

/// The part of a range that lies in one block. Sectors are 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    block: u32,
    /// The first sector, counted from the block's start.
    first: u32,
    sectors: u32,
}

impl Part {
    fn bytes(&self) -> u64 {
        u64::from(self.sectors) * SECTOR
    }
}

/// The state of a part's beginning.
enum Look {
    /// The first so many sectors are present.
    Present(u32),
    /// The first so many sectors are not present.
    Absent(u32),
    /// The bitmap is on disk only.
    Unknown,
}

/// State that changes rarely.
struct State {
    /// The place of the next new block, in bytes of the file.
    next: u64,
    /// The end of the space that may be used.
    run_end: u64,
    /// The bytes after `next` at opening (a footer, or space that a dead process had set aside, with any content) have
    /// been cut off.
    cut: bool,
    /// A task was sent to set space aside.
    refilling: bool,
    /// A commit has failed, and none has written its changes since.
    retry: bool,
    /// The image was changed since it was opened.
    changed: bool,
    /// The blocks with [`Entry::DIRTY`].
    dirty: Vec<u32>,
    journal: Journal,
    /// The records of each block.
    records: HashMap<u32, Vec<(u32, Record)>>,
    /// Records of failed commits: newer records have their content, or it is dirty.
    outdated: Vec<Record>,
    /// The block of each slot of the slab.
    owners: Vec<u32>,
    free_slots: Vec<u32>,
    /// The slot at which the next search begins.
    hand: usize,
    /// Slots that all searches have examined.
    #[cfg(test)]
    steps: u64,
}

/// See the module text.
pub(super) struct Blocks {
    layout: Layout,
    table_offset: u64,
    disk_bytes: u64,
    block_shift: u32,
    sectors_per_block: u32,
    /// The end of the blocks that had places when the image was opened.
    first_new: u64,
    /// The image has a parent.
    differencing: bool,
    /// The file can grow, and its unwritten space reads as zeros.
    is_file: bool,
    /// The footer on disk.
    footer: Mutex<[u8; footer::BYTES]>,
    /// The copy of the footer at the beginning is intact and up to date.
    copy_whole: AtomicBool,
    /// Byte offset of the last sector that a device had when the footer was written there.
    last_sector: AtomicU64,
    table: Box<[AtomicU64]>,
    /// Blocks that cannot be read.
    damage: Damage,
    slab: Slab,
    /// Slots for bitmaps; more only if all of them are dirty.
    budget_slots: usize,
    /// Writes have to wait for a commit: the journal or the budget is almost used up.
    tight: AtomicBool,
    /// There are dirty blocks.
    dirty: AtomicBool,
    /// Counters of evictions of blocks, by block number modulo their number. A reader of a bitmap on disk checks
    /// whether one came between.
    generations: Box<[AtomicU32]>,
    state: Mutex<State>,
    commits: Arc<Commits>,
    /// Held while the file is made longer.
    growing: SharedLock,
}

/// The blocks of an image as found at opening.
pub(super) struct Opened {
    pub(super) layout: Layout,
    /// Byte offset of the table.
    pub(super) table_offset: u64,
    pub(super) disk_bytes: u64,
    pub(super) differencing: bool,
    pub(super) is_file: bool,
    /// The footer, and whether the copy at the beginning is the same.
    pub(super) footer: [u8; footer::BYTES],
    pub(super) copy_whole: bool,
    /// Byte offset of the medium's last sector.
    pub(super) last_sector: u64,
    /// By block: its entry of the table ([`UNUSED`] for none).
    pub(super) places: Vec<u32>,
    /// A bit for each block that is full by the batmap; blocks past its end are not.
    pub(super) full: Vec<u8>,
    /// Blocks that cannot be read.
    pub(super) damage: Damage,
    /// Memory for bitmaps.
    pub(super) metadata_bytes: usize,
    /// An empty journal, or one whose records are for [`Blocks::replay`].
    pub(super) journal: Journal,
    /// The image's commits.
    pub(super) commits: Arc<Commits>,
}

impl Blocks {
    pub(super) fn new(opened: Opened) -> Blocks {
        let Opened { layout, places, .. } = opened;
        let sectors_per_block = (layout.block_bytes / SECTOR) as u32;
        let words = sectors_per_block.div_ceil(64) as usize;
        let mut end = layout.metadata_end();
        let is_full =
            |block: usize| opened.full.get(block / 8).is_some_and(|b| b << (block % 8) & 0x80 != 0);
        let table: Box<[AtomicU64]> = places
            .iter()
            .enumerate()
            .map(|(block, sector)| {
                if let Some(why) = opened.damage.of(block) {
                    return AtomicU64::new(Entry::new(*sector, Where::Damaged(why as u32)).0);
                }
                if *sector == UNUSED {
                    return AtomicU64::new(Entry::EMPTY.0);
                }
                end = end.max(u64::from(*sector) * SECTOR + layout.stride());
                let known = if is_full(block) { Where::Full } else { Where::OnDisk };
                AtomicU64::new(Entry::new(*sector, known).0)
            })
            .collect();
        opened.commits.end_with(opened.journal.void());
        let mut blocks = Blocks {
            damage: opened.damage,
            slab: Slab::new(table.len(), words),
            table_offset: opened.table_offset,
            disk_bytes: opened.disk_bytes,
            block_shift: layout.block_bytes.trailing_zeros(),
            sectors_per_block,
            first_new: end,
            differencing: opened.differencing,
            is_file: opened.is_file,
            footer: Mutex::new(opened.footer),
            copy_whole: AtomicBool::new(opened.copy_whole),
            last_sector: AtomicU64::new(opened.last_sector),
            table,
            budget_slots: 0,
            tight: AtomicBool::new(false),
            dirty: AtomicBool::new(false),
            generations: (0..GENERATIONS).map(|_| AtomicU32::new(0)).collect(),
            state: Mutex::new(State {
                next: end,
                run_end: end,
                cut: false,
                refilling: false,
                retry: false,
                changed: false,
                dirty: Vec::new(),
                journal: opened.journal,
                records: HashMap::new(),
                outdated: Vec::new(),
                owners: Vec::new(),
                free_slots: Vec::new(),
                hand: 0,
                #[cfg(test)]
                steps: 0,
            }),
            commits: opened.commits,
            growing: SharedLock::new(),
            layout,
        };
        blocks.set_metadata_bytes(opened.metadata_bytes);
        blocks
    }

    /// Bytes of a block's bitmap, which precedes its data.
    pub(super) fn bitmap_bytes(&self) -> u64 {
        self.layout.bitmap_bytes
    }

    pub(super) fn table_bytes(&self) -> u64 {
        size_of_val(&*self.table) as u64
    }

    /// Sets the memory for bitmaps. State recovered from a dead process does not count: a reader keeps it, and needs
    /// room for the rest.
    pub(super) fn set_metadata_bytes(&mut self, bytes: usize) {
        let dirty = self.lock().dirty.len();
        self.budget_slots = (bytes / Slab::slot_bytes(self.slab.words())).max(dirty + 64);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether new blocks are wholly present from the beginning, as with QEMU: their space reads as zeros, and so do
    /// unwritten sectors.
    pub(in crate::vhd) fn whole(&self) -> bool {
        self.is_file && !self.differencing
    }

    #[inline]
    fn entry(&self, block: u32) -> Entry {
        Entry(self.table[block as usize].load(Ordering::Acquire))
    }

    /// Sets an entry. Only under the lock.
    fn set_entry(&self, block: u32, entry: Entry) {
        self.table[block as usize].store(entry.0, Ordering::Release);
    }

    /// The part of a range that lies in its first block.
    #[inline]
    fn part(&self, offset: u64, len: u64) -> Part {
        let in_block = offset & (self.layout.block_bytes - 1);
        let bytes = len.min(self.layout.block_bytes - in_block);
        Part {
            block: (offset >> self.block_shift) as u32,
            first: (in_block / SECTOR) as u32,
            sectors: bytes.div_ceil(SECTOR) as u32,
        }
    }

    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = Part> + '_ {
        let (mut offset, end) = (offset, offset + len);
        std::iter::from_fn(move || {
            let part = (offset < end).then(|| self.part(offset, end - offset))?;
            offset += part.bytes();
            Some(part)
        })
    }

    /// Byte offset of a sector of a block.
    #[inline]
    fn data_offset(&self, entry: Entry, first: u32) -> u64 {
        (u64::from(entry.sector()) + u64::from(first)) * SECTOR + self.layout.bitmap_bytes
    }

    /// The number of sectors at the part's beginning that are present, or are not.
    #[inline]
    fn look(&self, part: Part) -> (Entry, Look) {
        loop {
            let entry = self.entry(part.block);
            let look = match entry.state() {
                Where::Empty => Look::Absent(part.sectors),
                Where::Full => Look::Present(part.sectors),
                Where::OnDisk | Where::Overlay(_) => Look::Unknown,
                Where::Damaged(_) => self.look_at_damaged(part),
                Where::Bits(slot) => {
                    let mine = || self.entry(part.block).state() == entry.state();
                    let run = self.slab.slot(slot).read(mine, |s| s.run(part.first, part.sectors));
                    match run {
                        Some((true, sectors)) => Look::Present(sectors),
                        Some((false, sectors)) => Look::Absent(sectors),
                        // It was evicted or became full meanwhile.
                        None => continue,
                    }
                }
            };
            return (entry, look);
        }
    }

    /// [`look`](Self::look) for a damaged block: the part that is there of one that is cut off. Loading the rest fails.
    #[cold]
    fn look_at_damaged(&self, part: Part) -> Look {
        let cut = self.damage.cut.as_ref().filter(|cut| cut.block == part.block);
        match cut.and_then(|cut| cut.run(part.first, part.sectors)) {
            Some((true, sectors)) => Look::Present(sectors),
            Some((false, sectors)) => Look::Absent(sectors),
            None => Look::Unknown,
        }
    }

    /// See [`ImageFormat::flaws`](crate::ImageFormat::flaws).
    pub(super) fn flaws(&self) -> Vec<String> {
        self.damage.flaws(self.layout.block_bytes)
    }

    /// Finds a range for a read: see [`Mapping`].
    pub(super) fn find(&self, offset: u64, len: u64) -> Mapping {
        let Some(left) = self.disk_bytes.checked_sub(offset).filter(|left| *left > 0) else {
            return Mapping::Zeros { len };
        };
        let len = len.min(left);
        let part = self.part(offset, len);
        let bytes = |sectors: u32| (u64::from(sectors) * SECTOR).min(len);
        match self.look(part) {
            (entry, Look::Present(n)) => {
                Mapping::Data { offset: self.data_offset(entry, part.first), len: bytes(n) }
            }
            (_, Look::Unknown) => Mapping::Miss { len: bytes(part.sectors) },
            (_, Look::Absent(n)) => {
                let mut absent = bytes(n);
                if n == part.sectors {
                    absent = self.absent_from(offset, absent, len);
                }
                match self.differencing {
                    true => Mapping::Backing { len: absent },
                    false => Mapping::Zeros { len: absent },
                }
            }
        }
    }

    /// Adds the following blocks without a place to the first `absent` bytes.
    fn absent_from(&self, offset: u64, absent: u64, len: u64) -> u64 {
        let mut absent = absent;
        while absent < len {
            let part = self.part(offset + absent, len - absent);
            if self.entry(part.block).state() != Where::Empty {
                break;
            }
            absent = (absent + part.bytes()).min(len);
        }
        absent
    }

    /// Finds a place for a write: see [`Mapping`]. A block without one gets a place here, in space that was set aside
    /// before.
    pub(super) fn reserve(&self, offset: u64, len: u64) -> Mapping {
        let part = self.part(offset, len);
        let len = part.bytes().min(len);
        let data =
            |entry: Entry| Mapping::Data { offset: self.data_offset(entry, part.first), len };
        match self.look(part) {
            (entry, Look::Present(n)) if n == part.sectors => data(entry),
            (_, Look::Unknown) => Mapping::Miss { len },
            (entry, _) if entry.state() != Where::Empty => {
                match self.tight.load(Ordering::Relaxed) {
                    true => Mapping::Miss { len },
                    false => data(entry),
                }
            }
            _ => match self.place_new(part.block) {
                Some(entry) => data(entry),
                None => Mapping::Miss { len },
            },
        }
    }

    /// Gives a block a place, in memory and in the journal. `None`: space has to be made first.
    fn place_new(&self, block: u32) -> Option<Entry> {
        let mut state = self.lock();
        let entry = self.entry(block);
        if entry.state() != Where::Empty {
            return Some(entry);
        }
        if self.tight.load(Ordering::Relaxed) {
            return None;
        }
        let sector = self.layout.aligned_place(state.next)?;
        let end = u64::from(sector) * SECTOR + self.layout.stride();
        if end > state.run_end {
            return None;
        }
        let record = state.journal.claim(record_key(block, 0), &place_words(sector))?;
        state.records.entry(block).or_default().push((0, record));
        state.next = end;
        let known = match self.whole() {
            true => Where::Full,
            false => {
                let slot = self.take_slot(&mut state, block);
                self.slab.slot(slot).fill(|i| self.padding_of(block, i));
                Where::Bits(slot)
            }
        };
        let entry = Entry::new(sector, known).with(Entry::NEW);
        self.mark_dirty(&mut state, block, entry);
        // One write makes more space before the rest is used up; the others go on.
        if self.is_file && !state.refilling && state.run_end - end < self.low_water(&state) {
            state.refilling = true;
            return None;
        }
        Some(self.entry(block))
    }

    /// Writes the entry, and adds the block to the next commit. Only under the lock.
    fn mark_dirty(&self, state: &mut State, block: u32, entry: Entry) {
        state.changed = true;
        self.dirty.store(true, Ordering::Relaxed);
        if !entry.has(Entry::DIRTY) {
            state.dirty.push(block);
        }
        self.set_entry(block, entry.with(Entry::DIRTY));
        self.set_tight(state);
    }

    /// Whether a commit has something to write.
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Relaxed)
    }

    fn set_tight(&self, state: &State) {
        let tight = state.journal.left() < RESERVED_RECORDS
            || state.journal.room() < RESERVED_WHEN_STUCK
            || (!self.whole() && state.dirty.len() * 4 > self.budget_slots * 3);
        self.tight.store(tight, Ordering::Relaxed);
    }

    /// Called when the data of a placed write were given to the kernel: its sectors are present, for readers and in the
    /// journal. The journal comes first: a reader may answer by a bit that it sees.
    pub(super) fn written(&self, offset: u64, len: u64) {
        for part in self.parts(offset, len) {
            if let (_, Look::Present(n)) = self.look(part)
                && n == part.sectors
            {
                continue;
            }
            self.set_present(part);
        }
    }

    fn set_present(&self, part: Part) {
        let mut state = self.lock();
        let entry = self.entry(part.block);
        let (slot, known) = match entry.state() {
            // A write that was never placed, so nothing is known about it.
            Where::Empty => {
                debug_assert!(false, "block {} was written and has no place", part.block);
                return;
            }
            // Only readers have damaged blocks.
            Where::Full | Where::Damaged(_) => return,
            Where::Bits(slot) | Where::Overlay(slot) => (slot, entry.state()),
            // Evicted since the placing. The other bits stay on disk.
            Where::OnDisk => {
                let slot = self.take_slot(&mut state, part.block);
                self.slab.slot(slot).fill(|_| 0);
                (slot, Where::Overlay(slot))
            }
        };
        let bits = self.slab.slot(slot);
        for (i, mask) in masks(part.first, part.sectors) {
            let old = bits.word(i);
            if old | mask != old {
                self.record(&mut state, part.block, &bits, i, old | mask);
                bits.set_word(i, old | mask);
            }
        }
        let full = matches!(known, Where::Bits(_)) && self.is_full(&bits);
        if full {
            self.free_slot(&mut state, slot);
        }
        let known = if full { Where::Full } else { known };
        self.mark_dirty(&mut state, part.block, entry.with_state(known));
    }

    fn is_full(&self, bits: &slab::Slot<'_>) -> bool {
        (0..self.slab.words()).all(|i| bits.word(i) == u64::MAX)
    }

    /// Records word `i` of a bitmap, which gets `value`, in the journal.
    fn record(&self, state: &mut State, block: u32, bits: &slab::Slot<'_>, i: usize, value: u64) {
        let (group, at) = (i / RECORD_WORDS, i % RECORD_WORDS);
        let about = 1 + group as u32;
        let known = state.records.get(&block).and_then(|r| r.iter().find(|r| r.0 == about));
        if let Some((_, record)) = known {
            state.journal.store(*record, at, value);
            return;
        }
        let words: [u64; RECORD_WORDS] = std::array::from_fn(|w| {
            let word = group * RECORD_WORDS + w;
            if w == at {
                value
            } else if word < self.slab.words() {
                bits.word(word)
            } else {
                0
            }
        });
        match state.journal.claim(record_key(block, about), &words) {
            Some(record) => state.records.entry(block).or_default().push((about, record)),
            // RESERVED_RECORDS exceeds the requests in flight of all queues together.
            None => tracing::error!(
                "the journal is full: writes since the last flush may be lost if this process dies"
            ),
        }
    }

    /// Bits of word `i` that stand for no sector: past the disk's end, or the block's.
    fn padding(&self, i: usize) -> u64 {
        let in_word = u64::from(self.sectors_per_block).saturating_sub(i as u64 * 64).min(64);
        u64::MAX.checked_shr(in_word as u32).unwrap_or(0)
    }

    /// The padding of a certain block, whose last sectors may be past the disk's end.
    fn padding_of(&self, block: u32, i: usize) -> u64 {
        let start = u64::from(block) << self.block_shift;
        let sectors = (self.disk_bytes - start).div_ceil(SECTOR);
        let in_word = sectors.saturating_sub(i as u64 * 64).min(64);
        self.padding(i) | u64::MAX.checked_shr(in_word as u32).unwrap_or(0)
    }

    /// Whether a block extends past the disk's end, into space that may have any content.
    fn is_cut(&self, block: u32) -> bool {
        !self.whole() && u64::from(block) + 1 > self.disk_bytes >> self.block_shift
    }
}

/// The key of a journal's record: a block, and 0 for its place or 1 + the number of eight words of its bitmap.
fn record_key(block: u32, about: u32) -> u64 {
    u64::from(block) << 32 | u64::from(about)
}

fn place_words(sector: u32) -> [u64; RECORD_WORDS] {
    let mut words = [0; RECORD_WORDS];
    words[0] = u64::from(sector);
    words
}

#[cfg(test)]
mod tests;
