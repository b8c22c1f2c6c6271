//! When a place that came free is nobody's any more.
//!
//! A queue asks where a range is (`Disk::map`), and its operation goes there some
//! time later. In between the place may lose its last mapping. It may be given to somebody else only
//! after all operations that were told of it have ended: a read would show another's data, and a write
//! in place would overwrite them.
//!
//! So operations are counted, by the parity of the epoch in which they *enter*: before the first
//! mapping is looked at. They *leave* when the last operation on what was mapped has ended. The epoch
//! goes from E to E + 1 only where no operation of E + 1's parity is counted. That is the parity of
//! E - 1, and nobody enters with it any more. **What lost its last mapping in epoch F is nobody's from
//! epoch F + 2 on.**
//!
//! # Why
//! 1. Who enters counts itself, fences, and looks at mappings. Who removes a mapping does so, fences,
//!    and looks at counts ([`Epochs::removed`]). So if the operation has seen the old mapping, each look
//!    at the counts after the removal sees its count, until it leaves. This is all that is asked of the
//!    way in which mappings are read: qcow2's readers take no lock.
//! 2. `removed` and each step of the epoch are under one lock. So the two steps from F to F + 2 look at
//!    the counts after the removal, at one parity each. Whichever the operation has, one step waits for
//!    its end. It may have seen an epoch of long ago; it has one of the two parities all the same.
//! 3. A queue that comes later is not among those that were looked at. It came under the lock, so it sees
//!    the mapping removed.
//!
//! Nobody waits: an operation that hangs keeps the epoch, and with it freed places, where they are. One
//! whose end nobody learns of (a task that was dropped while the kernel may still write) keeps them for
//! good, as does a queue that ends with some under way. The next opening finds those places.
//!
//! Only disks whose places come free have epochs: an image in qcow2 that is written to. A VHD's blocks
//! keep their places while it is open, raw has no others, and parents do not change.

use std::cell::Cell;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

/// The first epoch, so that there is one two before it, in which nothing was removed.
const FIRST: u64 = 2;

/// The parity of the epoch in which an operation has entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that does not leave keeps freed places out of use"]
pub struct Mark(bool);

/// What counts are made of, so that a scheduler that tries interleavings can stand in for the
/// processor.
trait Word {
    fn holding(value: u64) -> Self;
    /// What was done before the value was stored comes before what follows.
    fn load(&self) -> u64;
    fn store(&self, value: u64);
    fn add(&self, value: u64);
    fn subtract(&self, value: u64);
    /// Of two threads that each store, fence, and load what the other stores, one sees the other's.
    fn fence();
}

impl Word for AtomicU64 {
    fn holding(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }

    #[inline]
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    #[inline]
    fn store(&self, value: u64) {
        self.store(value, Ordering::Release);
    }

    #[inline]
    fn add(&self, value: u64) {
        self.fetch_add(value, Ordering::AcqRel);
    }

    #[inline]
    fn subtract(&self, value: u64) {
        self.fetch_sub(value, Ordering::AcqRel);
    }

    #[inline]
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// A mutex, for the same reason.
trait Lock<T> {
    fn around(value: T) -> Self;
    fn with<R>(&self, use_it: impl FnOnce(&mut T) -> R) -> R;
}

impl<T> Lock<T> for Mutex<T> {
    fn around(value: T) -> Mutex<T> {
        Mutex::new(value)
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut T) -> R) -> R {
        use_it(&mut self.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The mark of an epoch.
fn mark(epoch: u64) -> Mark {
    Mark(epoch & 1 != 0)
}

/// Operations by parity, in cache lines that nothing else is in.
#[repr(align(128))]
#[derive(Debug)]
struct Counts<A>([A; 2]);

impl<A: Word> Counts<A> {
    fn new() -> Counts<A> {
        Counts([A::holding(0), A::holding(0)])
    }

    fn of(&self, mark: Mark) -> &A {
        &self.0[usize::from(mark.0)]
    }

    /// One more, by the one thread whose counts these are.
    fn add_own(&self, mark: Mark) {
        let count = self.of(mark);
        count.store(count.load() + 1);
    }

    /// One less, by the one thread whose counts these are.
    fn subtract_own(&self, mark: Mark) {
        let count = self.of(mark);
        count.store(count.load() - 1);
    }

    fn are_zero(&self) -> bool {
        self.0.iter().all(|count| count.load() == 0)
    }
}

/// Counts by whom they are of. Also those of queues that have ended with some under way.
type Queues<A> = Vec<Arc<Counts<A>>>;

/// The epoch and all counts.
#[derive(Debug)]
struct Core<A, L> {
    now: A,
    /// Operations of tasks, on whichever thread.
    tasks: Counts<A>,
    queues: L,
}

impl<A: Word, L: Lock<Queues<A>>> Core<A, L> {
    fn new() -> Core<A, L> {
        Core { now: A::holding(FIRST), tasks: Counts::new(), queues: L::around(Vec::new()) }
    }

    fn join(&self) -> Arc<Counts<A>> {
        let counts = Arc::new(Counts::new());
        self.queues.with(|queues| queues.push(counts.clone()));
        counts
    }

    /// A queue ends. With operations under way it stays among those that are looked at: nobody knows
    /// when they end.
    fn part(&self, counts: &Arc<Counts<A>>) {
        if counts.are_zero() {
            self.queues.with(|queues| queues.retain(|known| !Arc::ptr_eq(known, counts)));
        }
    }

    /// By the one thread whose counts these are.
    fn enter(&self, counts: &Counts<A>) -> Mark {
        let mark = mark(self.now.load());
        counts.add_own(mark);
        A::fence();
        mark
    }

    fn enter_task(&self) -> Mark {
        let mark = mark(self.now.load());
        self.tasks.of(mark).add(1);
        A::fence();
        mark
    }

    fn leave_task(&self, mark: Mark) {
        self.tasks.of(mark).subtract(1);
    }

    fn removed(&self) -> u64 {
        A::fence();
        self.queues.with(|_| self.now.load())
    }

    fn ended(&self) -> u64 {
        self.queues.with(|queues| {
            // Two steps are enough for all that was removed before this.
            for _ in 0..2 {
                let next = self.now.load() + 1;
                let is_zero = |counts: &Counts<A>| counts.of(mark(next)).load() == 0;
                if !is_zero(&self.tasks) || !queues.iter().all(|counts| is_zero(counts)) {
                    break;
                }
                self.now.store(next);
            }
            self.now.load() - FIRST
        })
    }
}

/// The epochs of a disk, and the operations that are counted in them.
#[derive(Debug)]
pub struct Epochs(Core<AtomicU64, Mutex<Queues<AtomicU64>>>);

impl Epochs {
    /// Epochs of a disk without readers.
    pub fn new() -> Arc<Epochs> {
        Arc::new(Epochs(Core::new()))
    }

    /// Adds a queue of the disk, whose operations are counted from now on.
    pub fn reader(self: &Arc<Epochs>) -> Reader {
        Reader { counts: self.0.join(), epochs: self.clone(), of_one_thread: PhantomData }
    }

    /// Runs what maps and uses what it has mapped. Dropped before its end, it counts for good.
    pub async fn during<T>(&self, steps: impl Future<Output = T>) -> T {
        let mark = self.0.enter_task();
        let done = steps.await;
        self.0.leave_task(mark);
        done
    }

    /// The epoch in which mappings were removed, by this thread or by one that it has heard of since.
    pub fn removed(&self) -> u64 {
        self.0.removed()
    }

    /// Goes on as far as what is counted allows. What was [removed](Self::removed) in the epoch that
    /// this gives, or before, is nobody's.
    pub fn ended(&self) -> u64 {
        self.0.ended()
    }
}

/// A queue's part in the epochs of its disk, on its thread.
///
/// ```text
/// let mark = reader.enter();              // once for all that is mapped now
/// for operation in operations {
///     disk.map(...);
///     operation.mark = reader.keep(mark); // if it goes to the engine
/// }
/// reader.leave(mark);
/// ...
/// reader.leave(operation.mark);           // it has ended
/// ```
#[derive(Debug)]
pub struct Reader {
    epochs: Arc<Epochs>,
    counts: Arc<Counts<AtomicU64>>,
    of_one_thread: PhantomData<Cell<()>>,
}

impl Reader {
    /// Begins to map.
    #[inline]
    pub fn enter(&self) -> Mark {
        self.epochs.0.enter(&self.counts)
    }

    /// An operation goes to what was mapped since [`enter`](Self::enter) gave this mark, which has not
    /// left yet. So the count is up, and needs no fence of its own.
    #[inline]
    pub fn keep(&self, mark: Mark) -> Mark {
        self.counts.add_own(mark);
        mark
    }

    /// What has the mark has ended.
    #[inline]
    pub fn leave(&self, mark: Mark) {
        self.counts.subtract_own(mark);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.epochs.0.part(&self.counts);
    }
}

#[cfg(any(test, feature = "testing"))]
mod shuttled;
#[cfg(any(test, feature = "testing"))]
pub use shuttled::ShuttledEpochs;

#[cfg(test)]
mod tests;
