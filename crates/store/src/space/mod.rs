//! Space: which places are in use, and when they become free (store.md 2, 5 and 7).
//!
//! A bit in memory says that a place must not be given. A place that the trees have dropped keeps its bit until the
//! checkpoint without it is on the medium in both homes, and no operation uses the place any more. The space page of
//! that checkpoint has the bit clear already. So a place that is given is in use neither now nor at any checkpoint that
//! an opening can find.
//!
//! Memory has the bits of metadata, of the pair that is being filled, and of segments that have changed. Other bits are
//! [loaded](Space::load).

mod bits;
mod page;
mod passes;
mod sweep;

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

pub use bits::Bits;
pub use page::{Found, Homes, Kind, SpacePage, UNREADABLE, choose, mends};
pub use passes::{NoRoom, PassInput, Passes};
pub use sweep::Places;

use super::layout::Layout;
use super::{Damaged, StoreId};

/// Pairs that data never get (store.md 7, Room).
const RESERVED_PAIRS: u64 = 2;
/// Pairs that compaction never gets, in addition to [`RESERVED_PAIRS`].
const LEFT_FOR_WRITES: u64 = 2;
/// Data get free pairs while pages have room for this many checkpoints without them. After that, data first fill the
/// rest of pairs of data, since pages can only get free pairs.
const PLENTY: u64 = 4;

/// The leaves of one turn of writes, twice: as many pages as it is promised (store.md 6, Budget).
const PAGES_OF_A_TURN: u64 = 2 * 33;
/// How many contents one more page of metadata is enough for: a page of V2P has 512, one of P2M 256, one of hashes 128.
const CONTENTS_A_PAGE: u64 = 72;

/// A segment's places.
#[derive(Debug)]
struct Segment {
    /// `None`: only the medium has the bits, or the pair is free and no bit is set.
    bits: Option<Bits>,
    /// Places whose bits are clear.
    free: u32,
    /// Places that were dropped, and cannot be given yet.
    dropped: u32,
    /// The home of its next page.
    next_home: u8,
    /// The medium lacks the present state of its page.
    changed: bool,
}

/// Places that a checkpoint has dropped.
#[derive(Debug)]
struct Dropped {
    /// In their order.
    places: Vec<u64>,
    /// Places that a pass has found without a mark, by segment.
    swept: Vec<(u64, Bits)>,
    /// The places are not given before they have become holes.
    is_held: bool,
    /// The epoch in which the last of them was dropped and its checkpoint was whole.
    done: Option<u64>,
}

/// The answer to a request for places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Given {
    /// These places, at least one.
    Places(Range<u64>),
    /// None: this segment's bits must be [loaded](Space::load) first.
    Load(u64),
    /// There is no room.
    Full,
}

/// See the module text.
#[derive(Debug)]
pub struct Space {
    layout: Layout,
    /// The pages of one checkpoint, for which data leave room.
    reserve: u64,
    segments: Vec<Segment>,
    pairs: Vec<Kind>,
    /// How many pairs are free.
    free_pairs: u64,
    /// The pair that data fill, and the place behind the last data in it.
    open: Option<(u64, u64)>,
    /// The pair that compaction fills, and the place behind the last content in it.
    sealed: Option<(u64, u64)>,
    /// The place behind the last one that a page got.
    next_page: u64,
    /// Places that were dropped since the last checkpoint began.
    dropped: Vec<u64>,
    /// Dropped places, by the checkpoints that have begun. The last has those that no checkpoint on the medium has.
    waiting: VecDeque<Dropped>,
    /// Segments whose pages the checkpoint under way has written.
    written: Vec<u64>,
    /// Pairs whose bits stay in memory.
    kept: Range<u64>,
    /// Places that contents were given since the opening.
    given: u64,
    /// The marks of a pass for places in use.
    marks: Option<sweep::Marks>,
}

impl Space {
    /// Space without segments, which are [added](Self::add_pair). Data leave room for `reserve` pages.
    pub fn new(layout: Layout, reserve: u64) -> Space {
        Space {
            layout,
            reserve,
            segments: Vec::with_capacity(layout.segments as usize),
            pairs: Vec::with_capacity(layout.segments as usize / 2),
            free_pairs: 0,
            open: None,
            sealed: None,
            given: 0,
            next_page: 0,
            dropped: Vec::new(),
            waiting: VecDeque::new(),
            written: Vec::new(),
            kept: 0..0,
            marks: None,
        }
    }

    /// The next two segments, as their pages say; unknown pages were [mended](mends) before.
    pub fn add_pair(&mut self, found: [Found; 2]) {
        let size = self.layout.segment_blocks;
        let kind_of = |found: &Found| found.page.as_ref().map_or(Kind::Data, |page| page.kind);
        let kinds = found.each_ref().map(kind_of);
        // Both are written when a pair gets another kind. So if they differ nothing is known.
        let differ = kinds[0] != kinds[1];
        let mut is_empty = true;
        for Found { page, next_home, rewrite } in found {
            let used = || Bits::all(true, size);
            let bits = page.filter(|_| !differ).map_or_else(used, |page| page.bits);
            let (free, next_home) = (bits.clear_bits(), next_home as u8);
            is_empty &= u64::from(free) == size;
            let (bits, changed) = (Some(bits), rewrite || differ);
            self.segments.push(Segment { bits, free, dropped: 0, next_home, changed });
        }
        let kind = match kinds[0] {
            _ if is_empty => Kind::Free,
            Kind::Metadata if !differ => Kind::Metadata,
            _ => Kind::Data,
        };
        let pair = self.pairs.len() as u64;
        self.free_pairs += u64::from(kind == Kind::Free);
        self.pairs.push(kind);
        self.unload(pair);
    }

    /// The store has grown: it has more segments, which are free. The medium has a page in both homes of each, of which the
    /// second counts.
    pub fn grow(&mut self, layout: Layout) {
        for _ in self.layout.segments..layout.segments {
            let free = layout.segment_blocks as u32;
            let (bits, dropped, next_home, changed) = (None, 0, 0, false);
            self.segments.push(Segment { bits, free, dropped, next_home, changed });
        }
        let pairs = layout.segments as usize / 2;
        self.free_pairs += (pairs - self.pairs.len()) as u64;
        self.pairs.resize(pairs, Kind::Free);
        self.layout = layout;
    }

    /// Takes bits out of memory that the medium has, too, or that are all clear.
    fn unload(&mut self, pair: u64) {
        let is_open = self.is_filled(pair);
        // A page that was written is not the one that counts yet.
        let is_under_way = !self.written.is_empty();
        let stays = self.pairs[pair as usize] == Kind::Metadata || self.kept.contains(&pair);
        if stays || is_open || is_under_way {
            return;
        }
        for segment in &mut self.segments[2 * pair as usize..][..2] {
            if !segment.changed && segment.dropped == 0 {
                segment.bits = None;
            }
        }
    }

    /// Places of a segment that are not in use, and not to be given either.
    fn waiting_in(&self, segment: u64) -> Vec<u64> {
        let first = self.layout.first_place(segment);
        let end = first + self.layout.segment_blocks;
        let of = |dropped: &Dropped| {
            let from = dropped.places.partition_point(|place| *place < first);
            let to = dropped.places.partition_point(|place| *place < end);
            let swept = dropped.swept.iter().filter(|(number, _)| *number == segment);
            let swept = swept.flat_map(|(_, bits)| bits.set_bits().map(|at| first + at));
            dropped.places[from..to].iter().copied().chain(swept).collect::<Vec<_>>()
        };
        self.waiting.iter().flat_map(of).collect()
    }

    /// Where the page of a segment is that [`load`](Self::load) asks for: its home.
    pub fn home(&self, segment: u64) -> usize {
        usize::from(1 - self.segments[segment as usize].next_home)
    }

    /// The page of a segment whose bits are not in memory. If it is damaged nothing of the segment is given.
    pub fn load(&mut self, segment: u64, page: Result<SpacePage, Damaged>) {
        let places = self.layout.segment_blocks;
        let segment = &mut self.segments[segment as usize];
        if segment.bits.is_none() {
            let bits = page.map_or_else(|_| Bits::all(true, places), |page| page.bits);
            segment.free = bits.clear_bits();
            segment.bits = Some(bits);
        }
    }

    /// Whether a place of this segment can be dropped or taken: its bits are in memory.
    pub fn is_loaded(&self, segment: u64) -> bool {
        let is_free = self.pairs[segment as usize / 2] == Kind::Free;
        is_free || self.segments[segment as usize].bits.is_some()
    }

    /// Places in a row for contents, at most `most` of them.
    pub fn give_data(&mut self, most: u64) -> Given {
        loop {
            let Some((pair, from)) = self.open else {
                let Some(pair) = self.pair_for_data() else { return Given::Full };
                self.open = Some((pair, 0));
                self.set_kind(pair, Kind::Data);
                continue;
            };
            let size = self.layout.segment_blocks;
            for half in from / size..2 {
                let number = 2 * pair + half;
                if self.segments[number as usize].free == 0 {
                    continue;
                }
                let segment = &mut self.segments[number as usize];
                let Some(bits) = &mut segment.bits else { return Given::Load(number) };
                let begin = if half == from / size { from % size } else { 0 };
                if let Some(run) = bits.clear_run(begin, most) {
                    run.clone().for_each(|at| {
                        bits.set(at);
                    });
                    segment.free -= (run.end - run.start) as u32;
                    segment.changed = true;
                    self.given += run.end - run.start;
                    self.open = Some((pair, half * size + run.end));
                    let first = self.layout.first_place(number);
                    let places = first + run.start..first + run.end;
                    places.clone().for_each(|place| self.mark(place));
                    return Given::Places(places);
                }
            }
            self.open = None;
            self.unload(pair);
        }
    }

    /// A free pair while there are plenty, or else the pair of data with the most room, or one of the last.
    fn pair_for_data(&self) -> Option<u64> {
        let most_room = || {
            let data = self.pairs.iter().zip(0..).filter(|(kind, _)| **kind == Kind::Data);
            let rooms = data.map(|(_, pair)| (self.free_of(pair), pair));
            rooms.filter(|(room, _)| *room > 0).max().map(|(_, pair)| pair)
        };
        let plenty = self.free_pair(RESERVED_PAIRS, PLENTY * self.reserve);
        plenty.or_else(most_room).or_else(|| self.free_pair(RESERVED_PAIRS, self.reserve))
    }

    /// A free pair, if so many are left, and room for so many pages.
    fn free_pair(&self, reserved: u64, pages: u64) -> Option<u64> {
        // If data took one of the free pairs.
        let left = self.free_pairs.checked_sub(1 + reserved)? * self.layout.segment_blocks;
        if left < pages && self.begun_for_pages() + left < pages {
            return None;
        }
        self.pairs.iter().zip(0..).find(|(kind, _)| **kind == Kind::Free).map(|(_, pair)| pair)
    }

    /// So many places in a row, for content that is put in order: where no current write comes between. The first of
    /// them. None: writes need the remaining places.
    pub fn give_sealed(&mut self, count: u64) -> Option<u64> {
        let size = self.layout.segment_blocks;
        loop {
            let Some((pair, from)) = self.sealed else {
                let pair =
                    self.free_pair(RESERVED_PAIRS + LEFT_FOR_WRITES, PLENTY * self.reserve)?;
                self.sealed = Some((pair, 0));
                self.set_kind(pair, Kind::Data);
                continue;
            };
            let (half, at) = (from / size, from % size);
            if half == 2 {
                self.sealed = None;
                self.unload(pair);
                continue;
            }
            let number = 2 * pair + half;
            let segment = &mut self.segments[number as usize];
            // Writes may have taken some, if they have found no other room.
            let run = segment.bits.as_ref().and_then(|bits| bits.clear_run(at, count));
            let Some(run) = run.filter(|run| run.end - run.start == count) else {
                let next = segment.bits.as_ref().and_then(|bits| bits.clear_run(at, 1));
                let next = next.map_or(size, |run| (run.start + 1).max(at + 1));
                self.sealed = Some((pair, half * size + next));
                continue;
            };
            if let Some(bits) = &mut segment.bits {
                run.clone().for_each(|at| {
                    bits.set(at);
                });
            }
            segment.free -= count as u32;
            segment.changed = true;
            self.sealed = Some((pair, half * size + run.end));
            let first = self.layout.first_place(number) + run.start;
            (first..first + count).for_each(|place| self.mark(place));
            return Some(first);
        }
    }

    /// Places that contents were given since this was opened.
    pub fn given(&self) -> u64 {
        self.given
    }

    /// Whether something is being put into a pair.
    fn is_filled(&self, pair: u64) -> bool {
        [self.open, self.sealed].iter().flatten().any(|(filled, _)| *filled == pair)
    }

    /// Whether a place is where guests' writes go now.
    pub fn is_open(&self, place: u64) -> bool {
        let pair = self.layout.segment_of(place).map(|(segment, _)| segment / 2);
        self.open.is_some_and(|(open, _)| Some(open) == pair)
    }

    /// Whether half of the pair that a content is in is free, and nothing is being put there.
    pub fn is_sparse(&self, place: u64) -> bool {
        let Some((segment, _)) = self.layout.segment_of(place) else { return false };
        let pair = segment / 2;
        let is_data = self.pairs[pair as usize] == Kind::Data && !self.is_filled(pair);
        is_data && self.free_of(pair) >= self.layout.segment_blocks
    }

    fn free_of(&self, pair: u64) -> u64 {
        let of = |segment: u64| u64::from(self.segments[segment as usize].free);
        of(2 * pair) + of(2 * pair + 1)
    }

    /// Room for pages in pairs that have some.
    fn begun_for_pages(&self) -> u64 {
        self.pairs.iter().zip(0..).map(|(kind, pair)| self.room_in(*kind, pair)).sum()
    }

    /// Whether so many pages find a place now.
    pub fn has_room_for_pages(&self, pages: u64) -> bool {
        let free = self.free_pairs * self.layout.segment_blocks;
        // Few stores are so full that all pairs are to be looked at.
        free >= pages || self.begun_for_pages() + free >= pages
    }

    /// So many places guests can fill now with new content, if `owed` pages are to be written, and `reserve` are those of
    /// a checkpoint with all memory dirty. New content takes pages, too.
    pub fn room_for_data(&self, owed: u64, reserve: u64) -> u64 {
        let (size, begun) = (self.layout.segment_blocks, self.begun_for_pages());
        let data = self.pairs.iter().zip(0..).filter(|(kind, _)| **kind == Kind::Data);
        let filled: u64 = data.map(|(_, pair)| self.free_of(pair)).sum();
        let left = reserve.saturating_sub(begun).div_ceil(size) + RESERVED_PAIRS;
        let room = |pairs: u64| {
            let pages = (self.free_pairs - pairs) * size + begun;
            let pages = pages.saturating_sub(owed + reserve + PAGES_OF_A_TURN);
            (filled + pairs * 2 * size).min(pages * CONTENTS_A_PAGE)
        };
        (0..=self.free_pairs.saturating_sub(left)).map(room).max().unwrap_or(0)
    }

    /// Places that only the store's own work can have: those of metadata, and what contents take.
    pub fn needed(&self) -> u64 {
        let metadata = self.pairs.iter().filter(|kind| **kind == Kind::Metadata).count() as u64;
        metadata * 2 * self.layout.segment_blocks + self.used(Kind::Data)
    }

    /// Pages of a checkpoint with all memory dirty.
    pub fn reserve(&self) -> u64 {
        self.reserve
    }

    fn room_in(&self, kind: Kind, pair: u64) -> u64 {
        match kind {
            Kind::Metadata => self.segments[2 * pair as usize].free.into(),
            _ => 0,
        }
    }

    /// A place for a page; [`Layout::copy_of`] it is its copy's.
    pub fn give_page(&mut self) -> Option<u64> {
        let pairs = || self.pairs.iter().zip(0..);
        let metadata = pairs().find(|(kind, pair)| self.room_in(**kind, *pair) > 0);
        let free = || pairs().find(|(kind, _)| **kind == Kind::Free);
        let (_, pair) = metadata.or_else(free)?;
        self.set_kind(pair, Kind::Metadata);
        let segment = &mut self.segments[2 * pair as usize];
        // In memory always.
        let bits = segment.bits.as_mut()?;
        let first = self.layout.first_place(2 * pair);
        // Behind the last one, so that those of one checkpoint are in a row.
        let from = self.next_page.checked_sub(first).filter(|at| *at < self.layout.segment_blocks);
        let behind = from.and_then(|from| bits.clear_run(from, 1));
        let at = behind.or_else(|| bits.clear_run(0, 1))?.start;
        bits.set(at);
        segment.free -= 1;
        segment.changed = true;
        let place = first + at;
        self.next_page = place + 1;
        self.mark_page(place);
        Some(place)
    }

    fn set_kind(&mut self, pair: u64, kind: Kind) {
        if self.pairs[pair as usize] != kind {
            let before = std::mem::replace(&mut self.pairs[pair as usize], kind);
            self.free_pairs -= u64::from(before == Kind::Free);
            self.free_pairs += u64::from(kind == Kind::Free);
            self.mark_kind(pair, kind);
            let clear = || Bits::all(false, self.layout.segment_blocks);
            for segment in &mut self.segments[2 * pair as usize..][..2] {
                segment.changed = true;
                // Nothing of it has been in use.
                segment.bits.get_or_insert_with(clear);
            }
        }
    }

    /// A replay has found content in this place (store.md 4, rule 4).
    ///
    /// # Errors
    /// No content can be there.
    ///
    /// # Panics
    /// If its segment is not loaded.
    pub fn take(&mut self, place: u64) -> Result<(), Damaged> {
        let damaged = Damaged("a record of the journal has content where none can be");
        let (number, at) = self.layout.segment_of(place).ok_or(damaged)?;
        if self.pairs[number as usize / 2] == Kind::Metadata {
            return Err(damaged);
        }
        self.set_kind(number / 2, Kind::Data);
        let segment = &mut self.segments[number as usize];
        let bits = segment.bits.as_mut().expect("bits of what a replay takes are loaded");
        segment.free -= u32::from(bits.set(at));
        // Of a segment whose page could not be read all is in use by now. The page may be read again some day, and has
        // this place free.
        segment.changed = true;
        Ok(())
    }

    /// The trees have this place no more: it is not in the next checkpoint that begins.
    ///
    /// # Panics
    /// If its segment is not loaded, or there is none.
    pub fn drop_place(&mut self, place: u64) {
        let segment = self.layout.segment_of(place).map(|(segment, _)| segment as usize);
        let segment = segment.map(|segment| &mut self.segments[segment]);
        let segment = segment.filter(|segment| segment.bits.is_some());
        segment.expect("a place that was given, and its bits").dropped += 1;
        self.dropped.push(place);
    }

    /// [`drop_place`](Self::drop_place) of a page, wherever a medium says that it is.
    pub fn drop_page(&mut self, place: u64) {
        let segment = self
            .layout
            .segment_of(place)
            .filter(|(segment, _)| self.pairs[*segment as usize / 2] == Kind::Metadata);
        if segment.is_some() {
            self.drop_place(place);
        }
    }

    /// A checkpoint begins: its trees are frozen (store.md 5, step 1).
    pub fn begin(&mut self) {
        let mut places = std::mem::take(&mut self.dropped);
        places.sort_unstable();
        for (segment, _) in places.iter().filter_map(|place| self.layout.segment_of(*place)) {
            self.segments[segment as usize].changed = true;
        }
        self.waiting.push_back(Dropped { places, swept: Vec::new(), is_held: false, done: None });
    }

    /// The space pages that the checkpoint needs, when all its other pages have places: block and page. Each
    /// is asked for once.
    pub fn page_to_write(&mut self, id: &StoreId, checkpoint: u64) -> Option<(u64, Vec<u8>)> {
        let number = self.written.last().map_or(0, |last| last + 1);
        let number = (number..self.layout.segments).find(|n| self.segments[*n as usize].changed)?;
        let mut bits = self.segments[number as usize].bits.clone().expect("bits of a change");
        let first = self.layout.first_place(number);
        for place in self.waiting_in(number) {
            bits.clear(place - first);
        }
        let kind = self.pairs[number as usize / 2];
        let home = usize::from(self.segments[number as usize].next_home);
        let page = SpacePage { checkpoint, kind, bits }.encode(id, number, home);
        self.segments[number as usize].changed = false;
        self.written.push(number);
        Some((self.layout.space_page(number, home as u64), page))
    }

    /// Notes that the checkpoint is on the medium, its superblock in both homes. The places that it dropped wait for the
    /// operations that may have mapped them in `epoch`.
    pub fn done(&mut self, epoch: u64) {
        for number in std::mem::take(&mut self.written) {
            let segment = &mut self.segments[number as usize];
            segment.next_home = 1 - segment.next_home;
        }
        let mut waiting: VecDeque<Dropped> = VecDeque::new();
        for mut dropped in std::mem::take(&mut self.waiting) {
            let done = *dropped.done.get_or_insert(epoch);
            // Checkpoints that end in one epoch share a list, so a long operation does not let the lists grow.
            match waiting.back_mut() {
                Some(last) if last.done == Some(done) && !(last.is_held || dropped.is_held) => {
                    last.places.append(&mut dropped.places);
                    // Both are sorted, so this is a merge.
                    last.places.sort();
                    last.swept.append(&mut dropped.swept);
                }
                _ => waiting.push_back(dropped),
            }
        }
        self.waiting = waiting;
        (0..self.pairs.len() as u64).for_each(|pair| self.unload(pair));
    }

    /// The checkpoint has failed: the next one is the one that drops.
    pub fn failed(&mut self) {
        for number in std::mem::take(&mut self.written) {
            self.segments[number as usize].changed = true;
        }
    }

    /// Frees the places that were dropped in `epoch` or before: no operation uses them any more.
    pub fn release(&mut self, epoch: u64) {
        let mut pairs = BTreeSet::new();
        let is_free = |d: &Dropped| !d.is_held && d.done.is_some_and(|done| done <= epoch);
        let (free, waiting): (VecDeque<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(is_free);
        self.waiting = waiting;
        for Dropped { places, swept, .. } in free {
            let places = places.into_iter().filter_map(|place| self.layout.segment_of(place));
            let all = |(number, bits): (u64, Bits)| {
                bits.set_bits().map(move |at| (number, at)).collect::<Vec<_>>()
            };
            for (number, at) in places.chain(swept.into_iter().flat_map(all)) {
                let segment = &mut self.segments[number as usize];
                segment.dropped -= 1;
                if segment.bits.as_mut().is_some_and(|bits| bits.clear(at)) {
                    segment.free += 1;
                }
                pairs.insert(number / 2);
            }
        }
        for pair in pairs {
            if self.free_of(pair) == 2 * self.layout.segment_blocks {
                self.open.take_if(|(open, _)| *open == pair);
                self.sealed.take_if(|(sealed, _)| *sealed == pair);
                self.set_kind(pair, Kind::Free);
            }
            self.unload(pair);
        }
    }

    /// How many dropped places operations may still use.
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|dropped| dropped.places.len()).sum()
    }

    /// Whether a place must not be given. `None`: its bit is not in memory.
    pub fn is_taken(&self, place: u64) -> Option<bool> {
        let (segment, at) = self.layout.segment_of(place)?;
        Some(self.segments[segment as usize].bits.as_ref()?.get(at))
    }

    /// The free places, in pairs of data and free pairs.
    pub fn free(&self) -> u64 {
        let kinds = self.pairs.iter().zip(0..).filter(|(kind, _)| **kind != Kind::Metadata);
        kinds.map(|(_, pair)| self.free_of(pair)).sum()
    }

    /// The places in pairs of this kind that are in use or dropped.
    pub fn used(&self, kind: Kind) -> u64 {
        let pairs = self.pairs.iter().zip(0..).filter(|(of, _)| **of == kind);
        pairs.map(|(_, pair)| 2 * self.layout.segment_blocks - self.free_of(pair)).sum()
    }
}

#[cfg(test)]
mod tests;
