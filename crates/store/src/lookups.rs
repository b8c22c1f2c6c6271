//! How often what was looked up in a store's tables was in memory (store.md 6).
//!
//! Threads count in cache lines of their own, since every read counts. Each thread also has its own counts of all
//! stores, for the queue that it serves.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::pages::Kind;

/// Threads that share no cache line, if they began one after the other.
const STRIPES: usize = 16;

/// Look-ups of one kind of leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Entries whose leaf was in memory.
    pub hits: u64,
    /// Leaves that had to be read.
    pub misses: u64,
}

/// Look-ups by kind of leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// Look-ups of a volume's blocks.
    pub v2p: Counted,
    /// Look-ups of the places of numbers.
    pub p2m: Counted,
    /// Look-ups of the hashes of numbers.
    pub hashes: Counted,
}

impl Looked {
    fn of(counts: [u64; COUNTS]) -> Looked {
        let [a, b, c, d, e, f] = counts;
        let counted = |hits, misses| Counted { hits, misses };
        Looked { v2p: counted(a, b), p2m: counted(c, d), hashes: counted(e, f) }
    }
}

const COUNTS: usize = 6;

thread_local! {
    static HERE: Cell<[u64; COUNTS]> = const { Cell::new([0; COUNTS]) };
    static STRIPE: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % STRIPES
    };
}

/// The look-ups of this thread in all stores, since the last call.
pub fn of_this_thread() -> Looked {
    Looked::of(HERE.take())
}

/// The counts of a thread, in two cache lines: the processor loads them in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Stripe([AtomicU64; COUNTS]);

/// The look-ups of one store.
#[derive(Default)]
pub struct Lookups([Stripe; STRIPES]);

impl Lookups {
    /// Counts entries whose leaves were in memory.
    pub fn hit(&self, kind: Kind, entries: u64) {
        self.add(2 * kind as usize, entries);
    }

    /// Counts a leaf that had to be read.
    pub fn miss(&self, kind: Kind) {
        self.add(2 * kind as usize + 1, 1);
    }

    fn add(&self, at: usize, count: u64) {
        self.0[STRIPE.with(|stripe| *stripe)].0[at].fetch_add(count, Relaxed);
        let mut here = HERE.get();
        here[at] = here[at].wrapping_add(count);
        HERE.set(here);
    }

    /// The look-ups of all threads.
    pub fn all(&self) -> Looked {
        let sum = |at: usize| self.0.iter().map(|stripe| stripe.0[at].load(Relaxed)).sum();
        Looked::of(std::array::from_fn(sum))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn all_threads_are_counted_and_each_for_itself() {
        let lookups = Lookups::default();
        thread::scope(|scope| {
            for _ in 0..40 {
                let count = || {
                    lookups.hit(Kind::V2p, 3);
                    lookups.hit(Kind::P2m, 2);
                    lookups.miss(Kind::P2m);
                    let v2p = Counted { hits: 3, misses: 0 };
                    let p2m = Counted { hits: 2, misses: 1 };
                    assert_eq!(of_this_thread(), Looked { v2p, p2m, ..Looked::default() });
                    assert_eq!(of_this_thread(), Looked::default());
                };
                scope.spawn(count);
            }
        });
        let all = lookups.all();
        assert_eq!((all.v2p.hits, all.p2m.hits, all.p2m.misses), (120, 80, 40));
        assert_eq!(all.hashes, Counted::default());
    }
}
