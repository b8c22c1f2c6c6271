//! Leaves in memory: slots in a number that never changes, read without a lock (store.md 6).
//!
//! A slot has a page as atomic words, and the views by which it can be found: a view is a leaf of one
//! volume, or of P2M or the hashes. Volumes that share a leaf are views of one slot. A version is odd while
//! words or views change. A reader loads the version, compares the view, loads the words, and compares the version. So
//! the words that it gets were in that leaf, whole, at one time.
//!
//! A hint says which slot a view has, and may be lost. Then the reader misses, and looks the leaf up through the only
//! [writer](Writer) of the slots. A hint has half of the view's hash, so a reader touches a slot of another view only
//! once in 2^32 reads.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::BLOCK_BYTES;
use super::index::Word;
use super::journal::VolumeId;

/// Words of a page.
const WORDS: usize = BLOCK_BYTES / 8;
/// Volumes that find one leaf without a lock. Others miss.
const VIEWS: usize = 4;
/// Hints of a bucket: a cache line of them.
const HINTS: usize = 8;
/// Of a slot with its part of the hints.
pub const SLOT_BYTES: usize = BLOCK_BYTES + 64 + HINTS / 4 * 8;
/// How often a reader tries again when a leaf is just being changed.
const TRIES: usize = 8;

/// The highest bits of a view say its kind: a volume, P2M, hashes.
const KIND: [NonZeroU64; 3] = [
    NonZeroU64::new(1 << 63).unwrap(),
    NonZeroU64::new(1 << 62).unwrap(),
    NonZeroU64::new(1 << 61).unwrap(),
];

/// A leaf as one reader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View(NonZeroU64);

impl View {
    /// A leaf of a volume, by its index.
    pub fn of_volume(volume: VolumeId, leaf: u64) -> View {
        // Blocks have 40 bits.
        debug_assert!(leaf < 1 << 31);
        View(KIND[0] | u64::from(volume) << 31 | leaf)
    }

    fn is_of_volume(view: u64, volume: VolumeId) -> bool {
        view >> 31 == View::of_volume(volume, 0).0.get() >> 31
    }

    /// A leaf of P2M.
    pub fn of_p2m(leaf: u64) -> View {
        debug_assert!(leaf < 1 << 33);
        View(KIND[1] | leaf)
    }

    /// A page of hashes.
    pub fn of_hashes(leaf: u64) -> View {
        debug_assert!(leaf < 1 << 33);
        View(KIND[2] | leaf)
    }
}

/// [`Word`]s with an order, which a scheduler that tries interleavings does not need.
pub trait Ordered: Word {
    /// Loads after this one are not older.
    fn load_first(&self) -> u64;
    /// A thread that has loaded this value sees all earlier stores of the thread that stored it.
    fn store_last(&self, value: u64);
    /// Loads before it are not newer than those behind it.
    fn fence_loads();
    /// A thread that sees a store behind the fence sees the stores before it.
    fn fence_stores();
}

impl Ordered for AtomicU64 {
    fn load_first(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn store_last(&self, value: u64) {
        self.store(value, Ordering::Release);
    }

    fn fence_loads() {
        fence(Ordering::Acquire);
    }

    fn fence_stores() {
        fence(Ordering::Release);
    }
}

/// The fields that a reader looks at before the words are in one cache line.
#[repr(align(64))]
struct Slot<W> {
    /// Odd: it is being changed.
    version: W,
    /// 0: none.
    views: [W; VIEWS],
    /// Read since the last look for one to use again.
    used: W,
    words: Box<[W; WORDS]>,
}

/// The result of a look at one slot.
enum Look<T> {
    Found(T),
    Other,
    Changing,
}

impl<W: Ordered> Slot<W> {
    fn new() -> Slot<W> {
        let words: Box<[W]> = (0..WORDS).map(|_| W::empty()).collect();
        let Ok(words) = words.try_into() else { unreachable!("as many as that") };
        Slot {
            version: W::empty(),
            views: std::array::from_fn(|_| W::empty()),
            used: W::empty(),
            words,
        }
    }

    fn look<T>(&self, view: View, take: impl FnOnce(&[W]) -> T) -> Look<T> {
        let version = self.version.load_first();
        if version % 2 == 1 {
            return Look::Changing;
        }
        let is_here = self.views.iter().any(|known| known.load() == view.0.get());
        let taken = is_here.then(|| take(&*self.words));
        W::fence_loads();
        if self.version.load() != version {
            return Look::Changing;
        }
        taken.map_or(Look::Other, Look::Found)
    }

    fn change(&self, change: impl FnOnce(&Slot<W>)) {
        let version = self.version.load();
        self.version.store(version | 1);
        W::fence_stores();
        change(self);
        self.version.store_last(version.wrapping_add(2));
    }
}

#[repr(align(64))]
struct Bucket<W>([W; HINTS]);

/// The readers' side of the slots; see the module text.
pub struct Slots<W = AtomicU64> {
    slots: Box<[Slot<W>]>,
    /// Where views are: see [`hint`].
    hints: Box<[Bucket<W>]>,
}

/// Where a view is: the number of its slot and 1, and above that a part of the view's hash.
fn hint(hash: u64, number: u32) -> u64 {
    hash << 32 | (u64::from(number) + 1)
}

/// The number of a hint's slot, if it may be one of a view with this hash.
fn number_of(hint: u64, hash: u64) -> Option<usize> {
    let is_its = hint >> 32 == u64::from(hash as u32);
    (hint as u32).checked_sub(1).filter(|_| is_its).map(|number| number as usize)
}

impl View {
    fn hash(self) -> u64 {
        let mixed = self.0.get().wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

impl<W: Ordered> Slots<W> {
    fn bucket(&self, hash: u64) -> &[W; HINTS] {
        let bucket = (u128::from(hash) * self.hints.len() as u128) >> 64;
        &self.hints[bucket as usize].0
    }

    /// Words of a leaf from `at` on, all of one time. None: a miss.
    ///
    /// # Panics
    /// If the page ends before.
    pub fn read<const N: usize>(&self, view: View, at: usize) -> Option<[u64; N]> {
        self.find(view, |words| std::array::from_fn(|i| words[at + i].load()))
    }

    /// Fills `to` with the words of a leaf from `at` on, all of one time. `false`: a miss, and the content of `to` is of
    /// no use.
    ///
    /// # Panics
    /// If the page ends before.
    #[must_use]
    pub fn read_run(&self, view: View, at: usize, to: &mut [u64]) -> bool {
        let found = self.find(view, |words| {
            let words = &words[at..at + to.len()];
            to.iter_mut().zip(words).for_each(|(to, word)| *to = word.load());
        });
        found.is_some()
    }

    fn find<T>(&self, view: View, mut take: impl FnMut(&[W]) -> T) -> Option<T> {
        let hash = view.hash();
        for hint in self.bucket(hash) {
            let Some(number) = number_of(hint.load(), hash) else { continue };
            let slot = &self.slots[number];
            for _ in 0..TRIES {
                match slot.look(view, &mut take) {
                    Look::Found(words) => {
                        if slot.used.load() == 0 {
                            slot.used.store(1);
                        }
                        return Some(words);
                    }
                    Look::Other => break,
                    Look::Changing => std::hint::spin_loop(),
                }
            }
        }
        None
    }
}

/// A slot that has an owner: its content stays until the owner has it [freed](Writer::free).
#[derive(Debug, PartialEq, Eq)]
pub struct SlotNumber(u32);

/// Changes slots. It is under a lock, so there is one change at a time.
pub struct Writer<W = AtomicU64> {
    slots: Arc<Slots<W>>,
    free: Vec<SlotNumber>,
}

impl<W: Ordered> Writer<W> {
    /// Slots in so many bytes, and at least one.
    pub fn new(bytes: usize) -> Writer<W> {
        let count = (bytes / SLOT_BYTES).clamp(1, u32::MAX as usize);
        let slots = (0..count).map(|_| Slot::new()).collect();
        let buckets = count.div_ceil(4);
        let hints = (0..buckets).map(|_| Bucket(std::array::from_fn(|_| W::empty()))).collect();
        let free = (0..count as u32).rev().map(SlotNumber).collect();
        Writer { slots: Arc::new(Slots { slots, hints }), free }
    }

    /// For readers.
    pub fn slots(&self) -> &Arc<Slots<W>> {
        &self.slots
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.slots.slots.len()
    }

    fn slot(&self, number: &SlotNumber) -> &Slot<W> {
        &self.slots.slots[number.0 as usize]
    }

    /// Gives a free slot.
    pub fn take(&mut self) -> Option<SlotNumber> {
        self.free.pop()
    }

    /// Frees a slot. Readers do not find it any more.
    pub fn free(&mut self, number: SlotNumber) {
        self.slot(&number).change(|slot| slot.views.iter().for_each(|view| view.store(0)));
        self.free.push(number);
    }

    /// Whether the slot was read since the last call.
    pub fn was_used(&mut self, number: &SlotNumber) -> bool {
        let used = &self.slot(number).used;
        let was_used = used.load() != 0;
        used.store(0);
        was_used
    }

    /// Puts a page into a slot.
    ///
    /// # Panics
    /// If it is not a page.
    pub fn fill(&mut self, number: &SlotNumber, page: &[u8]) {
        assert_eq!(page.len(), BLOCK_BYTES, "a page");
        self.slot(number).change(|slot| {
            for (to, from) in slot.words.iter().zip(page.as_chunks().0) {
                to.store(u64::from_le_bytes(*from));
            }
        });
    }

    /// Puts a slot's page into another one, too.
    pub fn copy(&mut self, from: &SlotNumber, to: &SlotNumber) {
        let from = self.slot(from);
        self.slot(to).change(|slot| {
            slot.words.iter().zip(&*from.words).for_each(|(to, from)| to.store(from.load()));
        });
    }

    /// The page.
    pub fn page(&self, number: &SlotNumber) -> Vec<u8> {
        let words = self.slot(number).words.iter();
        words.flat_map(|word| word.load().to_le_bytes()).collect()
    }

    /// Words of the page.
    ///
    /// # Panics
    /// If the page ends before.
    pub fn words<const N: usize>(&self, number: &SlotNumber, at: usize) -> [u64; N] {
        let slot = self.slot(number);
        std::array::from_fn(|i| slot.words[at + i].load())
    }

    /// Changes words of the page, all at one time.
    ///
    /// # Panics
    /// If the page ends before.
    pub fn store(&mut self, number: &SlotNumber, at: usize, words: &[u64]) {
        self.slot(number).change(|slot| {
            slot.words[at..at + words.len()]
                .iter()
                .zip(words)
                .for_each(|(to, from)| to.store(*from));
        });
    }

    /// A view is found here, and no more where it was before: its owner sees to that.
    pub fn show(&mut self, number: &SlotNumber, view: View) {
        let slot = self.slot(number);
        let value = view.0.get();
        if !slot.views.iter().any(|known| known.load() == value) {
            // The one that it replaces misses from now on.
            let free = slot.views.iter().position(|known| known.load() == 0);
            slot.change(|slot| slot.views[free.unwrap_or(value as usize % VIEWS)].store(value));
        }
        let hash = view.hash();
        let hint = hint(hash, number.0);
        let bucket = self.slots.bucket(hash);
        if !bucket.iter().any(|known| known.load() == hint) {
            let stale = bucket.iter().position(|known| !self.is_found_by(known.load()));
            bucket[stale.unwrap_or(number.0 as usize % HINTS)].store(hint);
        }
    }

    /// Whether a hint leads to a view that is there.
    fn is_found_by(&self, hint: u64) -> bool {
        let Some(number) = (hint as u32).checked_sub(1) else { return false };
        let views = self.slots.slots[number as usize].views.iter();
        let views = views.filter_map(|view| NonZeroU64::new(view.load()).map(View));
        views.map(View::hash).any(|hash| number_of(hint, hash).is_some())
    }

    /// None of a volume's leaves is found by its views any more.
    pub fn hide_volume(&mut self, volume: VolumeId) {
        for slot in &self.slots.slots {
            for at in 0..VIEWS {
                if View::is_of_volume(slot.views[at].load(), volume) {
                    slot.change(|slot| slot.views[at].store(0));
                }
            }
        }
    }

    /// A view is not found here any more.
    pub fn hide(&mut self, number: &SlotNumber, view: View) {
        let slot = self.slot(number);
        if let Some(at) = slot.views.iter().position(|known| known.load() == view.0.get()) {
            slot.change(|slot| slot.views[at].store(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use shuttle::thread;

    use super::*;

    fn page(value: u8) -> Vec<u8> {
        vec![value; BLOCK_BYTES]
    }

    fn word(value: u8) -> u64 {
        u64::from_le_bytes([value; 8])
    }

    fn writer(slots: usize) -> Writer {
        Writer::new(slots * SLOT_BYTES)
    }

    #[test]
    fn a_leaf_is_found_by_its_views_and_by_no_other() {
        let mut writer = writer(4);
        let readers = writer.slots().clone();
        let slot = writer.take().unwrap();
        writer.fill(&slot, &page(7));
        let views = [View::of_volume(1, 5), View::of_p2m(5), View::of_hashes(5)];
        assert!(views.iter().all(|view| readers.read::<1>(*view, 0).is_none()));
        views.iter().for_each(|view| writer.show(&slot, *view));
        assert!(views.iter().all(|view| readers.read(*view, 510) == Some([word(7); 2])));
        for other in [View::of_volume(1, 4), View::of_volume(2, 5), View::of_p2m(1 << 31 | 5)] {
            assert_eq!(readers.read::<1>(other, 0), None);
        }
        writer.hide(&slot, views[0]);
        assert_eq!(readers.read::<1>(views[0], 0), None);
        assert_eq!(readers.read(views[1], 3), Some([word(7)]));
        writer.store(&slot, 3, &[1, 2]);
        assert_eq!(readers.read(views[1], 2), Some([word(7), 1, 2, word(7)]));
        writer.free(slot);
        assert_eq!(readers.read::<1>(views[1], 0), None);
    }

    #[test]
    fn more_views_than_a_slot_has_room_for_miss_and_are_never_wrong() {
        let mut writer = writer(2);
        let readers = writer.slots().clone();
        let (slot, other) = (writer.take().unwrap(), writer.take().unwrap());
        writer.fill(&slot, &page(1));
        writer.fill(&other, &page(2));
        let views: Vec<View> = (0..9).map(|volume| View::of_volume(volume, 0)).collect();
        for view in &views {
            writer.show(&slot, *view);
            assert_eq!(readers.read(*view, 0), Some([word(1)]), "the last is always found");
        }
        assert_eq!(views.iter().filter_map(|view| readers.read::<1>(*view, 0)).count(), VIEWS);
        writer.hide(&slot, views[8]);
        writer.show(&other, views[8]);
        assert_eq!(readers.read(views[8], 0), Some([word(2)]));
    }

    #[test]
    fn the_bytes_that_were_given_are_not_passed_and_a_slot_is_given_once() {
        let mut writer: Writer = Writer::new(1 << 20);
        let bytes: usize = SLOT_BYTES * writer.count();
        assert!(bytes <= 1 << 20 && bytes + SLOT_BYTES > 1 << 20);
        assert_eq!(
            SLOT_BYTES,
            size_of::<Slot<AtomicU64>>() + BLOCK_BYTES + size_of::<[u64; HINTS]>() / 4
        );
        let all: Vec<SlotNumber> = std::iter::from_fn(|| writer.take()).collect();
        assert_eq!(all.len(), writer.count());
        assert!(all.iter().enumerate().all(|(i, slot)| !all[..i].contains(slot)));
        all.into_iter().for_each(|slot| writer.free(slot));
        assert!(writer.take().is_some());
    }

    #[test]
    fn views_of_all_slots_are_found_as_long_as_each_has_one() {
        let mut writer = writer(4096);
        let readers = writer.slots().clone();
        let mut shown = Vec::new();
        while let Some(slot) = writer.take() {
            let view = View::of_volume(shown.len() as u32 % 7, shown.len() as u64 * 3);
            writer.show(&slot, view);
            shown.push((view, slot));
        }
        let missed = shown.iter().filter(|(view, _)| readers.read::<1>(*view, 0).is_none()).count();
        assert!(missed < 4096 / 20, "{missed} miss for want of a hint");
    }

    impl Ordered for shuttle::sync::atomic::AtomicU64 {
        fn load_first(&self) -> u64 {
            Word::load(self)
        }

        fn store_last(&self, value: u64) {
            Word::store(self, value);
        }

        fn fence_loads() {}

        fn fence_stores() {}
    }

    /// A slot is changed, given to another leaf and back, while a thread reads. The words that it reads are of its
    /// leaf, and of one time.
    #[test]
    fn whoever_reads_while_a_slot_changes_gets_words_of_that_leaf_and_of_one_time() {
        let story = || {
            let mut writer: Writer<shuttle::sync::atomic::AtomicU64> = Writer::new(0);
            let readers = writer.slots().clone();
            let slot = writer.take().unwrap();
            let (mine, other) = (View::of_p2m(1), View::of_p2m(2));
            writer.store(&slot, 0, &[10, 11]);
            writer.show(&slot, mine);
            let reader = thread::spawn(move || {
                let mut last = 10;
                for _ in 0..2 {
                    if let Some([a, b]) = readers.read(mine, 0) {
                        assert!(b == a + 1 && [10, 20, 40].contains(&a), "{a} and {b}");
                        assert!(a >= last, "it was {last}, and is {a} again");
                        last = a;
                    }
                    if let Some(words) = readers.read(other, 0) {
                        assert_eq!(words, [30, 31]);
                    }
                }
            });
            writer.store(&slot, 0, &[20, 21]);
            writer.free(slot);
            let slot = writer.take().unwrap();
            writer.store(&slot, 0, &[30, 31]);
            writer.show(&slot, other);
            writer.hide(&slot, other);
            writer.store(&slot, 0, &[40, 41]);
            writer.show(&slot, mine);
            reader.join().unwrap();
        };
        shuttle::check_random(story, 3000);
        shuttle::check_pct(story, 1000, 3);
    }
}
