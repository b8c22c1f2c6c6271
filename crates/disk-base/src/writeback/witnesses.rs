//! Witnesses, which are told of a failed sync before any request is answered with it.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

/// Told when a failed sync loses its data, also if another disk asked for the sync (docs/internals/blkif.md 2, rule 3,
/// and processes.md 10, rule 11).
pub trait SyncWitness: Send + Sync {
    /// A sync has failed with `e`. Called before any request is answered with that, from the thread that found it,
    /// possibly more than once.
    fn sync_has_failed(&self, e: &io::Error);
}

/// All witnesses of a medium.
#[derive(Default)]
pub struct Witnesses(Mutex<Vec<Weak<dyn SyncWitness>>>);

impl Witnesses {
    /// Adds a witness, unless it is there: a parked device attaches the same disk repeatedly. It is told at once if
    /// `is_faulty`. That is set after [`tell`](Self::tell), so a witness that missed the call sees it here.
    pub fn add(&self, witness: Weak<dyn SyncWitness>, is_faulty: impl Fn() -> bool) {
        let mut all = self.all();
        all.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&witness));
        if let (true, Some(alive)) = (is_faulty(), witness.upgrade()) {
            alive.sync_has_failed(&io::Error::other("a sync has failed before"));
        }
        all.push(witness);
    }

    /// Tells all of them, and then runs `and_then`, before another can be added.
    pub fn tell<T>(&self, e: &io::Error, and_then: impl FnOnce() -> T) -> T {
        let all = self.all();
        all.iter().filter_map(Weak::upgrade).for_each(|witness| witness.sync_has_failed(e));
        and_then()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Weak<dyn SyncWitness>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl SyncWitness for Count {
        fn sync_has_failed(&self, _: &io::Error) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn weak(of: &Arc<Count>) -> Weak<dyn SyncWitness> {
        Arc::downgrade(of) as Weak<Count>
    }

    #[test]
    fn a_witness_is_there_once_and_until_it_is_dropped() {
        let (all, here) = (Witnesses::default(), Arc::<Count>::default());
        for _ in 0..3 {
            all.add(weak(&here), || false);
            all.add(weak(&Arc::default()), || false);
        }
        assert_eq!(all.all().len(), 2, "and the last one that is gone");
        all.tell(&io::Error::other("it failed"), || ());
        assert_eq!(here.0.load(Ordering::Relaxed), 1);
        let late = Arc::<Count>::default();
        all.add(weak(&late), || true);
        assert_eq!(late.0.load(Ordering::Relaxed), 1, "one that comes later hears of it");
    }
}
