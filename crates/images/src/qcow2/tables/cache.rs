//! L2 entries in memory: slices of tables in a cache of fixed size.
//!
//! Readers take no lock. A slot's tag names its slice, and changes with each use of the slot. It is read before and
//! after the entries (a seqlock): a slice that was evicted meanwhile is a miss. All changes are made under the lock of
//! the image's state, which the caller holds.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Slots that a slice may be in.
const WAYS: usize = 8;

/// Bits of a tag that count the uses of its slot. A reader would have to sleep through 2^24
/// evictions of one slot, and find its own slice in it again, to take old entries for new.
const USE_BITS: u32 = 24;

struct Slot {
    entries: OnceLock<Box<[AtomicU64]>>,
    /// It was read since the last eviction passed it.
    used: AtomicBool,
    /// The number of reasons to keep the slice. Changed under the lock of the state only.
    pins: AtomicU32,
}

/// See the module text.
pub(in crate::qcow2) struct Cache {
    /// By slot: (slice + 1) and the number of uses; 0: empty.
    tags: Box<[AtomicU64]>,
    slots: Box<[Slot]>,
    slice_entries: usize,
    /// Words of a slice: its entries, and then the bitmap of each extended one. A bitmap changes with its slice only.
    slice_words: usize,
}

impl Cache {
    /// A cache of at most `bytes` of entries, `slice_entries` to a slice, but at least one set of slots. An entry has one
    /// word, or two with its bitmap.
    ///
    /// The number of sets is a power of two, so that slices that share a set share it in any smaller cache, too: pinned
    /// slices of a larger cache have room here.
    pub(in crate::qcow2) fn new(bytes: usize, slice_entries: usize, entry_words: usize) -> Cache {
        let slice_words = slice_entries * entry_words;
        let sets = 1 << (bytes / (slice_words * 8 * WAYS)).max(1).ilog2();
        let slot = || Slot {
            entries: OnceLock::new(),
            used: AtomicBool::new(false),
            pins: AtomicU32::new(0),
        };
        let count = sets * WAYS;
        Cache {
            tags: (0..count).map(|_| AtomicU64::new(0)).collect(),
            slots: (0..count).map(|_| slot()).collect(),
            slice_entries,
            slice_words,
        }
    }

    /// An empty cache of another size.
    pub(in crate::qcow2) fn resized(&self, bytes: usize) -> Cache {
        Cache::new(bytes, self.slice_entries, self.slice_words / self.slice_entries)
    }

    /// Entries of a slice.
    pub(in crate::qcow2) fn slice_entries(&self) -> usize {
        self.slice_entries
    }

    /// The slots that a slice may be in.
    fn set(&self, slice: u64) -> std::ops::Range<usize> {
        let sets = (self.slots.len() / WAYS) as u64;
        let first = (slice % sets) as usize * WAYS;
        first..first + WAYS
    }

    fn find(&self, slice: u64) -> Option<(usize, u64)> {
        self.set(slice).find_map(|i| {
            let tag = self.tags[i].load(Ordering::Acquire);
            (tag >> USE_BITS == slice + 1).then_some((i, tag))
        })
    }

    /// The result of `look` for the entries of a slice, if it is here. `look` may see entries that are being replaced;
    /// its result is discarded then.
    #[inline]
    pub(in crate::qcow2) fn read<T>(
        &self,
        slice: u64,
        look: impl FnOnce(&[AtomicU64]) -> T,
    ) -> Option<T> {
        self.read_with_bitmaps(slice, |entries, _| look(entries))
    }

    /// [`read`](Self::read), with the bitmaps of extended entries; others have none.
    #[inline]
    pub(in crate::qcow2) fn read_with_bitmaps<T>(
        &self,
        slice: u64,
        look: impl FnOnce(&[AtomicU64], &[AtomicU64]) -> T,
    ) -> Option<T> {
        let (i, tag) = self.find(slice)?;
        let slot = &self.slots[i];
        let (entries, bitmaps) = slot.entries.get()?.split_at(self.slice_entries);
        let answer = look(entries, bitmaps);
        fence(Ordering::Acquire);
        if self.tags[i].load(Ordering::Relaxed) != tag {
            return None;
        }
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(answer)
    }

    /// Whether the slice is here.
    pub(in crate::qcow2) fn holds(&self, slice: u64) -> bool {
        self.find(slice).is_some()
    }

    /// Changes an entry; returns the old one. Under the lock of the state.
    ///
    /// # Panics
    /// If the slice is not here: the caller pins it first.
    pub(in crate::qcow2) fn set_entry(&self, slice: u64, i: usize, entry: u64) -> u64 {
        let Some(entries) = self.find(slice).and_then(|(i, _)| self.slots[i].entries.get()) else {
            unreachable!("slice {slice} is changed, but not in memory")
        };
        // Release: a thread that sees the entry also sees what was stored before it.
        entries[i].swap(entry, Ordering::AcqRel)
    }

    /// Whether a slice may get a reason to stay. The last slot of a set keeps none, so that a slice for reading can
    /// always be put in. Under the lock of the state.
    pub(in crate::qcow2) fn can_pin(&self, slice: u64) -> bool {
        let pinned = |i: usize| self.slots[i].pins.load(Ordering::Relaxed) > 0;
        self.find(slice).is_some_and(|(i, _)| pinned(i))
            || self.set(slice).filter(|i| !pinned(*i)).count() > 1
    }

    /// Adds reasons to keep a slice, if it [may](Self::can_pin) get any, or takes some away. Under
    /// the lock of the state.
    ///
    /// # Panics
    /// If the slice is not here, or has fewer reasons than are taken away.
    pub(in crate::qcow2) fn pin(&self, slice: u64, change: i32) {
        let Some((i, _)) = self.find(slice) else {
            unreachable!("slice {slice} is pinned, but not in memory")
        };
        let pins = self.slots[i].pins.load(Ordering::Relaxed);
        let Some(pins) = pins.checked_add_signed(change) else {
            unreachable!("slice {slice} has {pins} pins, and {change} are added")
        };
        self.slots[i].pins.store(pins, Ordering::Relaxed);
    }

    /// Puts a slice in, in place of one that is not pinned: the words of its entries, and then of bitmaps. Under the lock
    /// of the state. A slice that is here already stays as it is.
    ///
    /// # Panics
    /// If all are pinned.
    pub(in crate::qcow2) fn install(&self, slice: u64, entries: &[u64]) {
        if self.holds(slice) {
            return;
        }
        let Some(i) = self.victim(slice) else {
            unreachable!("all slots that slice {slice} may be in are pinned")
        };
        let uses = self.tags[i].load(Ordering::Relaxed).wrapping_add(1) & ((1 << USE_BITS) - 1);
        // Readers of the old slice see this no later than anything stored below.
        self.tags[i].store(uses, Ordering::Relaxed);
        fence(Ordering::Release);
        let fresh = || (0..self.slice_words).map(|_| AtomicU64::new(0)).collect();
        for (to, from) in self.slots[i].entries.get_or_init(fresh).iter().zip(entries) {
            to.store(*from, Ordering::Relaxed);
        }
        self.slots[i].used.store(true, Ordering::Relaxed);
        self.tags[i].store((slice + 1) << USE_BITS | uses, Ordering::Release);
    }

    /// An empty slot, or the first that was not used lately; the slots passed lose that mark.
    fn victim(&self, slice: u64) -> Option<usize> {
        let set = self.set(slice);
        let empty = |i: &usize| self.tags[*i].load(Ordering::Relaxed) >> USE_BITS == 0;
        if let Some(i) = set.clone().find(empty) {
            return Some(i);
        }
        let free = |i: &usize| self.slots[*i].pins.load(Ordering::Relaxed) == 0;
        let unused = |i: &usize| !self.slots[*i].used.load(Ordering::Relaxed);
        if let Some(i) = set.clone().find(|i| free(i) && unused(i)) {
            return Some(i);
        }
        set.clone().for_each(|i| self.slots[i].used.store(false, Ordering::Relaxed));
        // Starts at different slots: the uses of the set's first slot serve as a clock hand.
        let turn = (self.tags[set.start].load(Ordering::Relaxed) as usize) % WAYS;
        (0..WAYS).map(|n| set.start + (turn + n) % WAYS).find(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread;

    fn first(cache: &Cache, slice: u64) -> Option<u64> {
        cache.read(slice, |entries| entries[0].load(Ordering::Relaxed))
    }

    #[test]
    fn a_slice_is_found_until_it_is_evicted() {
        let cache = Cache::new(0, 4, 1);
        for slice in 0..8 {
            cache.install(slice, &[slice; 4]);
        }
        assert!((0..8).all(|s| first(&cache, s) == Some(s)));
        cache.install(8, &[8; 4]);
        assert_eq!(first(&cache, 8), Some(8));
        assert_eq!((0..8).filter(|s| cache.holds(*s)).count(), 7);
    }

    #[test]
    fn what_is_pinned_stays_and_others_come_and_go() {
        let cache = Cache::new(0, 4, 1);
        for slice in 0..7 {
            cache.install(slice, &[slice; 4]);
            assert!(cache.can_pin(slice));
            cache.pin(slice, 1);
        }
        for slice in 7..20 {
            cache.install(slice, &[slice; 4]);
            assert!(!cache.can_pin(slice) && cache.can_pin(3));
            assert!((0..7).chain([slice]).all(|s| cache.holds(s)));
        }
        cache.pin(3, -1);
        assert!(cache.can_pin(19));
        cache.install(20, &[20; 4]);
        cache.install(21, &[21; 4]);
        assert!(!cache.holds(3) && [0, 1, 2, 4, 5, 6, 21].iter().all(|s| cache.holds(*s)));
    }

    #[test]
    fn what_was_looked_at_outlives_what_was_not() {
        let cache = Cache::new(0, 4, 1);
        (0..9).for_each(|s| cache.install(s, &[s; 4]));
        let kept: Vec<u64> = (0..8).filter(|s| cache.holds(*s)).take(3).collect();
        for slice in 9..12 {
            kept.iter().for_each(|s| assert_eq!(first(&cache, *s), Some(*s)));
            cache.install(slice, &[slice; 4]);
        }
        assert!(kept.iter().all(|s| cache.holds(*s)));
    }

    #[test]
    fn readers_never_see_a_slice_that_is_half_replaced() {
        let cache = Cache::new(0, 16, 1);
        let lock = Mutex::new(());
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for n in 0..200_000u64 {
                        let slice = n % 19;
                        let seen = cache.read(slice, |entries| {
                            let all: Vec<u64> =
                                entries.iter().map(|e| e.load(Ordering::Relaxed)).collect();
                            all
                        });
                        if let Some(all) = seen {
                            assert!(all.iter().all(|e| *e == slice), "{slice}: {all:?}");
                        }
                    }
                });
            }
            scope.spawn(|| {
                for n in 0..100_000u64 {
                    let slice = n * 7 % 19;
                    let _held = lock.lock().unwrap();
                    cache.install(slice, &[slice; 16]);
                }
            });
        });
    }
}
