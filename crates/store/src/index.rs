//! The index: which numbers may have a content. It is a hint in memory, without locks (store.md 9).
//!
//! The index may forget numbers, and a number may have other content by now, or none. So a write compares the whole
//! hash. Words are loaded and stored whole, so each was stored by some write. Of two writes that store the same word at
//! once, one remains.

use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_io::large;

use super::content::ContentHash;

/// Words of a bucket: a cache line of them.
const WORDS: usize = 8;
const NUMBER_BITS: u32 = 40;

/// A word of a bucket. It is a trait so that a scheduler that tries interleavings can stand in for the processor.
pub trait Word {
    /// Nothing.
    fn empty() -> Self;
    /// Its value.
    fn load(&self) -> u64;
    /// Puts something into it.
    fn store(&self, value: u64);
}

impl Word for AtomicU64 {
    fn empty() -> AtomicU64 {
        AtomicU64::new(0)
    }

    fn load(&self) -> u64 {
        // Nothing else is read because of it that its giver has written: V2P and P2M have their own order.
        self.load(Ordering::Relaxed)
    }

    fn store(&self, value: u64) {
        self.store(value, Ordering::Relaxed);
    }
}

#[repr(align(64))]
struct Bucket<W>([W; WORDS]);

/// See the module text.
pub struct Index<W = AtomicU64>(Box<[Bucket<W>]>);

impl Index {
    /// A word for each place: no store has more numbers than these.
    pub fn useful_bytes(places: u64) -> usize {
        usize::try_from(places.saturating_mul(8)).unwrap_or(usize::MAX)
    }
}

/// Where a hash may be.
struct Spot<'a, W> {
    /// One bucket, or two.
    buckets: [Option<&'a Bucket<W>>; 2],
    /// The part of a word for it besides the number.
    tag: u64,
    /// Which word of the first bucket it may take.
    victim: usize,
}

impl<'a, W: Word> Spot<'a, W> {
    fn words(&self) -> impl Iterator<Item = &'a W> + use<'a, W> {
        self.buckets.into_iter().flatten().flat_map(|bucket| &bucket.0)
    }

    /// A free word of the bucket that has more of them.
    fn free(&self) -> Option<&'a W> {
        let free = |bucket: &'a Bucket<W>| {
            let free = bucket.0.iter().filter(|word| word.load() == 0);
            free.clone().next().map(|first| (free.count(), first))
        };
        let both = self.buckets.into_iter().flatten().filter_map(free);
        // Of two that have as many the first: most hashes are found there.
        let more = both.reduce(|a, b| if b.0 > a.0 { b } else { a });
        more.map(|(_, word)| word)
    }
}

impl<W: Word> Index<W> {
    /// In so many bytes, and at least in one bucket.
    pub fn new(bytes: usize) -> Index<W> {
        let buckets = (bytes / (WORDS * 8)).max(1);
        Index(large::table((0..buckets).map(|_| Bucket(std::array::from_fn(|_| W::empty())))))
    }

    fn spot(&self, hash: &ContentHash) -> Spot<'_, W> {
        let [a, b, c, d, e, f, g, h, x, y, z, victim, i, j, k, l, m, n, o, p, ..] = hash.0;
        // As many hashes lead to each bucket, however many buckets there are.
        let bucket = |bytes| {
            let part = u128::from(u64::from_le_bytes(bytes)) * self.0.len() as u128;
            (part >> 64) as usize
        };
        let (first, second) = (bucket([a, b, c, d, e, f, g, h]), bucket([i, j, k, l, m, n, o, p]));
        Spot {
            buckets: [Some(&self.0[first]), (second != first).then(|| &self.0[second])],
            tag: u64::from(u32::from_le_bytes([x, y, z, 0])) << NUMBER_BITS,
            victim: usize::from(victim) % WORDS,
        }
    }

    /// The numbers that may have the content with this hash; rarely more than one.
    pub fn candidates(&self, hash: &ContentHash) -> impl Iterator<Item = u64> {
        let spot = self.spot(hash);
        let words = spot.words().map(Word::load).filter(|word| *word != 0);
        words.map(move |word| word ^ spot.tag).filter(|word| word >> NUMBER_BITS == 0)
    }

    /// Remembers the number of a content, whose write has ended. From now on writes can find it.
    pub fn remember(&self, hash: &ContentHash, number: u64) {
        debug_assert!(number > 0 && number >> NUMBER_BITS == 0);
        let spot = self.spot(hash);
        let new = spot.tag | number;
        if spot.words().any(|word| word.load() == new) {
            return;
        }
        let victim = || spot.words().nth(spot.victim);
        if let Some(word) = spot.free().or_else(victim) {
            word.store(new);
        }
    }

    /// Remembers the number of an old content, if that evicts nothing newer. Gives whether the index has it now.
    ///
    /// If many numbers have the same content, only the lowest one has a word. So buckets do not overflow, and a pass has
    /// all of them stand for that one.
    pub fn remind(&self, hash: &ContentHash, number: u64) -> bool {
        let spot = self.spot(hash);
        let new = spot.tag | number;
        let is_known = |known: u64| known != 0 && (known ^ new) >> NUMBER_BITS == 0;
        let mut words = spot.words().map(|word| (word, word.load()));
        if let Some((word, known)) = words.find(|(_, known)| is_known(*known)) {
            word.store(known.min(new));
            return true;
        }
        spot.free().inspect(|word| word.store(new)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shuttle::sync::Arc;
    use shuttle::thread;

    use super::*;

    /// Of the first bucket of a small index if `high` is 0, and of no other one.
    fn hash(high: u8, tag: u8, victim: u8) -> ContentHash {
        let mut bytes = [0; 32];
        (bytes[7], bytes[8], bytes[11], bytes[19]) = (high, tag, victim, high);
        ContentHash(bytes)
    }

    fn found<W: Word>(index: &Index<W>, hash: ContentHash) -> Vec<u64> {
        let mut found: Vec<u64> = index.candidates(&hash).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn what_is_remembered_is_found_and_nothing_else() {
        let index = Index::<AtomicU64>::new(2 * 64);
        index.remember(&hash(0, 1, 0), 10);
        index.remember(&hash(0, 1, 0), 10);
        index.remember(&hash(0, 1, 3), 11);
        index.remember(&hash(255, 1, 0), 12);
        // The caller compares the rest of the hash.
        assert_eq!(found(&index, hash(0, 1, 0)), [10, 11]);
        assert_eq!(found(&index, hash(255, 1, 0)), [12]);
        assert!(found(&index, hash(0, 2, 0)).is_empty());
        // With a number of 40 bits and a tag of zeros.
        index.remember(&hash(0, 0, 0), (1 << 40) - 1);
        assert_eq!(found(&index, hash(0, 0, 0)), [(1 << 40) - 1]);
    }

    #[test]
    fn what_is_old_takes_no_word_of_what_is_new() {
        let index = Index::<AtomicU64>::new(0);
        (1..8).for_each(|i| index.remember(&hash(0, i, 0), i.into()));
        assert!(index.remind(&hash(0, 8, 0), 8) && index.remind(&hash(0, 8, 0), 8));
        assert!(index.remind(&hash(0, 1, 0), 1), "it is there");
        assert!(!index.remind(&hash(0, 9, 3), 9));
        assert!((1..9).all(|i| found(&index, hash(0, i, 0)) == [u64::from(i)]));
    }

    #[test]
    fn of_a_content_that_is_there_often_the_lowest_number_is_reminded_of() {
        let index = Index::<AtomicU64>::new(0);
        for number in (20..60).rev().chain([70]) {
            assert!(index.remind(&hash(0, 1, 0), number));
        }
        assert_eq!(found(&index, hash(0, 1, 0)), [20]);
        assert!(index.remind(&hash(0, 2, 0), 10), "there is room for another one");
    }

    #[test]
    fn a_full_bucket_forgets_the_one_that_the_hash_chooses() {
        let index = Index::<AtomicU64>::new(0);
        (0..8).for_each(|i| index.remember(&hash(i * 30, i, 0), u64::from(i) + 1));
        index.remember(&hash(0, 100, 5), 99);
        let all = (0..8).flat_map(|i| found(&index, hash(i * 30, i, 0)));
        assert_eq!(all.collect::<Vec<_>>(), [1, 2, 3, 4, 5, 7, 8]);
        assert_eq!(found(&index, hash(0, 100, 0)), [99]);
    }

    #[test]
    fn a_byte_budget_is_kept_and_a_word_is_eight_bytes() {
        let index = Index::<AtomicU64>::new(1 << 20);
        assert_eq!(std::mem::size_of_val(&*index.0), 1 << 20);
    }

    /// With one bucket for each hash it would forget one of ten, and one of seven.
    #[test]
    fn a_store_that_is_full_of_different_contents_finds_nearly_all_of_them() {
        const PLACES: u64 = 1 << 16;
        for (numbers, forgotten) in [(PLACES * 9 / 10, PLACES / 100), (PLACES, PLACES / 16)] {
            let index = Index::<AtomicU64>::new(Index::useful_bytes(PLACES));
            let hash = |number: u64| ContentHash(*blake3::hash(&number.to_le_bytes()).as_bytes());
            (1..=numbers).for_each(|number| index.remember(&hash(number), number));
            let is_found = |number: &u64| index.candidates(&hash(*number)).any(|n| n == *number);
            let found = (1..=numbers).filter(is_found).count() as u64;
            assert!(found > numbers - forgotten, "{found} of {numbers}");
        }
    }

    proptest! {
        /// As long as there is room nothing is forgotten, whatever the hashes are.
        #[test]
        fn random_contents_are_found(hashes in prop::collection::vec(any::<[u8; 32]>(), 1..200)) {
            let index = Index::<AtomicU64>::new(64 << 10);
            for (i, hash) in hashes.iter().enumerate() {
                index.remember(&ContentHash(*hash), i as u64 + 1);
            }
            for (i, hash) in hashes.iter().enumerate() {
                let hash = ContentHash(*hash);
                prop_assert!(index.candidates(&hash).any(|n| n == i as u64 + 1));
            }
        }
    }

    impl Word for shuttle::sync::atomic::AtomicU64 {
        fn empty() -> Self {
            Self::new(0)
        }

        fn load(&self) -> u64 {
            self.load(Ordering::SeqCst)
        }

        fn store(&self, value: u64) {
            self.store(value, Ordering::SeqCst);
        }
    }

    /// Several threads remember in one bucket, full or not, while another looks up a hash. It gets only numbers that a
    /// thread has stored for that hash, and each word keeps the number of one thread.
    #[test]
    fn whoever_comes_between_finds_only_what_was_remembered() {
        let story = |full: bool| {
            let index: Arc<Index<shuttle::sync::atomic::AtomicU64>> = Arc::new(Index::new(64));
            if full {
                (0..8).for_each(|i| index.remember(&hash(0, 200 + i, 0), 1000 + u64::from(i)));
            }
            let givers = (1..3u8).map(|who| {
                let index = index.clone();
                thread::spawn(move || {
                    index.remember(&hash(0, who, 0), who.into());
                    index.remember(&hash(0, 9, 0), 10 + u64::from(who));
                })
            });
            let givers: Vec<_> = givers.collect();
            for _ in 0..2 {
                assert!(index.candidates(&hash(0, 1, 0)).all(|n| n == 1));
                assert!(index.candidates(&hash(0, 9, 0)).all(|n| n == 11 || n == 12));
                assert_eq!(index.candidates(&hash(0, 3, 0)).count(), 0);
            }
            givers.into_iter().for_each(|giver| giver.join().unwrap());
            assert!(index.0[0].0.iter().filter(|word| Word::load(*word) != 0).count() >= 2);
        };
        shuttle::check_random(move || story(false), 500);
        shuttle::check_random(move || story(true), 500);
    }
}
