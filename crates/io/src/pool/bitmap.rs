//! The two bitmaps of a pool: which slabs no queue holds, and which pages of a slab are used.

use std::sync::atomic::{AtomicU64, Ordering};

/// Pages in a slab.
pub(super) const PAGES: u32 = 256;
const WORDS: usize = (PAGES / u64::BITS) as usize;

/// The atomic operations that a [`SlabSet`] is made of, so that a scheduler that tries
/// interleavings can stand in for the processor's.
pub(super) trait Word {
    fn zero() -> Self;
    fn load(&self) -> u64;
    /// With acquire ordering: what the giver of a bit did to its slab is over.
    fn fetch_and(&self, mask: u64) -> u64;
    /// With release ordering; see `fetch_and`.
    fn fetch_or(&self, mask: u64) -> u64;
}

impl Word for AtomicU64 {
    fn zero() -> Self {
        AtomicU64::new(0)
    }
    fn load(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
    fn fetch_and(&self, mask: u64) -> u64 {
        self.fetch_and(mask, Ordering::Acquire)
    }
    fn fetch_or(&self, mask: u64) -> u64 {
        self.fetch_or(mask, Ordering::Release)
    }
}

/// A set of slab numbers that threads take from and give to.
pub(super) struct SlabSet<W> {
    words: Box<[W]>,
}

impl<W: Word> SlabSet<W> {
    /// Empty, for numbers below `slabs`.
    pub(super) fn new(slabs: u32) -> Self {
        SlabSet { words: (0..slabs.div_ceil(u64::BITS)).map(|_| W::zero()).collect() }
    }

    /// Takes the lowest number that is there, so that few slabs are touched while little is used.
    pub(super) fn take(&self) -> Option<u32> {
        for (i, word) in self.words.iter().enumerate() {
            let mut seen = word.load();
            while seen != 0 {
                let bit = seen & seen.wrapping_neg();
                let before = word.fetch_and(!bit);
                if before & bit != 0 {
                    return Some(i as u32 * u64::BITS + bit.trailing_zeros());
                }
                // Another thread was first; `before` is what was left then.
                seen = before;
            }
        }
        None
    }

    /// Takes a number that is there.
    ///
    /// # Panics
    /// If it is not.
    pub(super) fn remove(&self, slab: u32) {
        let bit = 1 << (slab % u64::BITS);
        let before = self.words[(slab / u64::BITS) as usize].fetch_and(!bit);
        assert!(before & bit != 0, "slab {slab} is in use");
    }

    /// Puts a number into the set.
    ///
    /// # Panics
    /// If it is in there already.
    pub(super) fn give(&self, slab: u32) {
        let bit = 1 << (slab % u64::BITS);
        let before = self.words[(slab / u64::BITS) as usize].fetch_or(bit);
        assert!(before & bit == 0, "slab {slab} was given back twice");
    }
}

/// The pages of one slab; a bit that is set is a page in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageMap {
    words: [u64; WORDS],
    used: u32,
}

impl PageMap {
    /// All pages free.
    pub(super) fn empty() -> Self {
        PageMap { words: [0; WORDS], used: 0 }
    }

    /// Pages in use.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// The first page of the first run of `pages` free ones.
    pub(super) fn find(&self, pages: u32) -> Option<u32> {
        if PAGES - self.used < pages {
            return None;
        }
        if pages == 1 {
            let (i, word) = self.words.iter().enumerate().find(|(_, w)| **w != u64::MAX)?;
            return Some(i as u32 * u64::BITS + word.trailing_ones());
        }
        let mut start = self.next(0, true);
        while start + pages <= PAGES {
            let end = self.next(start, false);
            if end - start >= pages {
                return Some(start);
            }
            start = self.next(end, true);
        }
        None
    }

    /// The first free (or used) page from `from` on; `PAGES` if there is none.
    fn next(&self, from: u32, free: bool) -> u32 {
        let mut at = from;
        while at < PAGES {
            let word = self.words[(at / u64::BITS) as usize];
            let wanted = if free { !word } else { word } >> (at % u64::BITS);
            if wanted != 0 {
                return at + wanted.trailing_zeros();
            }
            at = (at / u64::BITS + 1) * u64::BITS;
        }
        PAGES
    }

    /// Marks free pages as used.
    ///
    /// # Panics
    /// If one is used, or outside the slab.
    pub(super) fn set(&mut self, first: u32, pages: u32) {
        self.each_word(first, pages, |word, mask| {
            assert!(*word & mask == 0, "a page was handed out twice");
            *word |= mask;
        });
        self.used += pages;
    }

    /// Marks used pages as free.
    ///
    /// # Panics
    /// If one is free, or outside the slab.
    pub(super) fn clear(&mut self, first: u32, pages: u32) {
        self.each_word(first, pages, |word, mask| {
            assert!(*word & mask == mask, "a page was freed twice");
            *word &= !mask;
        });
        self.used -= pages;
    }

    fn each_word(&mut self, first: u32, pages: u32, mut f: impl FnMut(&mut u64, u64)) {
        let end = first + pages;
        let mut at = first;
        while at < end {
            let bit = at % u64::BITS;
            let n = (u64::BITS - bit).min(end - at);
            f(&mut self.words[(at / u64::BITS) as usize], (u64::MAX >> (u64::BITS - n)) << bit);
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_slab_is_taken_first() {
        let set = SlabSet::<AtomicU64>::new(130);
        for slab in [129, 64, 63, 0] {
            set.give(slab);
        }
        let taken: Vec<u32> = std::iter::from_fn(|| set.take()).collect();
        assert_eq!(taken, [0, 63, 64, 129]);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_slab_given_back_twice_is_a_bug() {
        let set = SlabSet::<AtomicU64>::new(1);
        set.give(0);
        set.give(0);
    }

    #[test]
    fn a_run_is_found_across_words_and_only_where_it_fits() {
        let mut map = PageMap::empty();
        assert_eq!(map.find(PAGES), Some(0));
        map.set(0, 60);
        map.set(70, 100);
        assert_eq!(map.find(1), Some(60));
        assert_eq!(map.find(10), Some(60));
        assert_eq!(map.find(11), Some(170));
        assert_eq!(map.find(86), Some(170));
        assert_eq!(map.find(87), None);
        map.clear(70, 100);
        assert_eq!(map.find(196), Some(60));
        map.set(60, 196);
        assert_eq!((map.find(1), map.used()), (None, PAGES));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_page_freed_twice_is_a_bug() {
        let mut map = PageMap::empty();
        map.set(0, 4);
        map.clear(2, 3);
    }
}

/// All threads' steps in orders that a scheduler chooses. (Leak checkers find a little that the
/// scheduler itself keeps: leave this module out there.)
#[cfg(test)]
mod shuttle_tests {
    use super::*;
    use std::sync::Arc;

    /// Shuttle's atomics: each access is a point where another thread may run.
    impl Word for shuttle::sync::atomic::AtomicU64 {
        fn zero() -> Self {
            Self::new(0)
        }
        fn load(&self) -> u64 {
            self.load(Ordering::Relaxed)
        }
        fn fetch_and(&self, mask: u64) -> u64 {
            self.fetch_and(mask, Ordering::Acquire)
        }
        fn fetch_or(&self, mask: u64) -> u64 {
            self.fetch_or(mask, Ordering::Release)
        }
    }

    /// Three threads take and give back among three slabs, two of them in one word.
    fn take_and_give() {
        let slabs = [3, 9, 70];
        let set = SlabSet::<shuttle::sync::atomic::AtomicU64>::new(128);
        slabs.iter().for_each(|s| set.give(*s));
        let set = Arc::new(set);
        // The holders of each slab: only one at a time.
        let holders: Arc<Vec<shuttle::sync::atomic::AtomicU64>> =
            Arc::new((0..128).map(|_| Word::zero()).collect());
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (set, holders) = (set.clone(), holders.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..3 {
                        let held: Vec<u32> = (0..2).filter_map(|_| set.take()).collect();
                        for slab in &held {
                            let before = holders[*slab as usize].fetch_or(1, Ordering::SeqCst);
                            assert_eq!(before, 0, "slab {slab} was taken twice");
                        }
                        for slab in held {
                            holders[slab as usize].fetch_and(0, Ordering::SeqCst);
                            set.give(slab);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        let left: Vec<u32> = std::iter::from_fn(|| set.take()).collect();
        assert_eq!(left, slabs, "not all slabs came back");
    }

    #[test]
    fn no_two_threads_get_the_same_slab_and_all_slabs_come_back() {
        shuttle::check_random(take_and_give, 2000);
        shuttle::check_pct(take_and_give, 1000, 3);
    }
}
