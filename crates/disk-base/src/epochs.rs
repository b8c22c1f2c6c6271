//! Tells when a freed place is no longer in use.
//!
//! A queue asks for the place of a range (`Disk::map`), and its operation goes there some time later. In between the
//! place may lose its last mapping. It may be reused only after all operations that were given the place have ended: a
//! read would show another disk range's data, and a write in place would overwrite them.
//!
//! So operations are counted, by the parity of the epoch in which they *enter*: before the first mapping is read. They
//! *leave* when the last operation on the mapped places has ended. The epoch advances from E to E + 1 only if no
//! operation of E + 1's parity is counted. That is the parity of E - 1, and no operation enters with it any more. **A
//! place that lost its last mapping in epoch F is unused from epoch F + 2 on.**
//!
//! # Why
//! 1. A thread that enters counts itself, fences, and reads mappings. A thread that removes a mapping does so, fences,
//!    and reads counts ([`Epochs::removed`]). So if the operation has seen the old mapping, each reading of the counts
//!    after the removal sees its count, until it leaves. Nothing else is required of the way in which mappings are
//!    read: qcow2's readers take no lock.
//! 2. `removed` and each step of the epoch are under one lock. So the two steps from F to F + 2 read the counts after
//!    the removal, at one parity each. The step that reads the operation's parity waits for its end. The operation may
//!    have seen a much earlier epoch; it has one of the two parities all the same.
//! 3. A queue that is added later is not among the counts that were read. It was added under the lock, so it sees the
//!    mapping removed.
//!
//! Nothing waits: an operation that hangs keeps the epoch, and with it freed places, as they are. An operation whose
//! end is never reported (a task that was dropped while the kernel may still write) keeps them for good, as does a
//! queue that ends with operations in flight. The next opening finds those places.
//!
//! Only disks whose places are freed have epochs: a writable qcow2 image. A VHD's blocks keep their places while it is
//! open, raw has no other places, and parents do not change.

use std::cell::Cell;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

/// The first epoch. There is one two before it, in which nothing was removed.
const FIRST: u64 = 2;

/// The parity of the epoch in which an operation has entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that does not leave keeps freed places out of use"]
pub struct Mark(bool);

/// The operations on counts. A scheduler that tries interleavings can replace the processor's.
trait Word {
    fn holding(value: u64) -> Self;
    /// Acquires: operations before the store of the value come before those behind this load.
    fn load(&self) -> u64;
    fn store(&self, value: u64);
    fn add(&self, value: u64);
    fn subtract(&self, value: u64);
    /// Full fence: of two threads that each store, fence, and load the other's word, one sees the other's store.
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

/// A mutex, replaceable for the same reason.
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

/// Operations by parity, in cache lines of their own.
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

    /// Adds one, on the one thread that changes these counts.
    fn add_own(&self, mark: Mark) {
        let count = self.of(mark);
        count.store(count.load() + 1);
    }

    /// Subtracts one, on the one thread that changes these counts.
    fn subtract_own(&self, mark: Mark) {
        let count = self.of(mark);
        count.store(count.load() - 1);
    }

    fn are_zero(&self) -> bool {
        self.0.iter().all(|count| count.load() == 0)
    }
}

/// Counts of each queue, also of queues that have ended with operations in flight.
type Queues<A> = Vec<Arc<Counts<A>>>;

/// The epoch and all counts.
#[derive(Debug)]
struct Core<A, L> {
    now: A,
    /// Operations of tasks, on any thread.
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

    /// Removes a queue. With operations in flight its counts stay, since their end is never reported.
    fn part(&self, counts: &Arc<Counts<A>>) {
        if counts.are_zero() {
            self.queues.with(|queues| queues.retain(|known| !Arc::ptr_eq(known, counts)));
        }
    }

    /// Enters, on the one thread that changes these counts.
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
            // Two steps are enough for everything that was removed before this call.
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

/// The epochs of a disk, and the operations that they count.
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

    /// Runs steps that map and use the mapped places. If they are dropped before their end, they count for good.
    pub async fn during<T>(&self, steps: impl Future<Output = T>) -> T {
        let mark = self.0.enter_task();
        let done = steps.await;
        self.0.leave_task(mark);
        done
    }

    /// The epoch in which mappings were removed, by this thread or by one that synchronised with it since.
    pub fn removed(&self) -> u64 {
        self.0.removed()
    }

    /// Advances as far as the counts allow. Places [removed](Self::removed) in the returned epoch, or before, are
    /// unused.
    pub fn ended(&self) -> u64 {
        self.0.ended()
    }
}

/// A queue's handle to the epochs of its disk, on its thread.
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

    /// Counts an operation on places that were mapped since [`enter`](Self::enter) gave this mark, which has not left
    /// yet. So the count is up, and needs no fence of its own.
    #[inline]
    pub fn keep(&self, mark: Mark) -> Mark {
        self.counts.add_own(mark);
        mark
    }

    /// The operation with this mark has ended.
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
