//! Epochs whose steps are ordered by a scheduler, for tests.

use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst};

use super::{Core, Lock, Queues, Word};

impl Word for AtomicU64 {
    fn holding(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }

    fn load(&self) -> u64 {
        self.load(SeqCst)
    }

    fn store(&self, value: u64) {
        self.store(value, SeqCst);
    }

    fn add(&self, value: u64) {
        self.fetch_add(value, SeqCst);
    }

    fn subtract(&self, value: u64) {
        self.fetch_sub(value, SeqCst);
    }

    /// All accesses are in one order here.
    fn fence() {}
}

impl<T> Lock<T> for Mutex<T> {
    fn around(value: T) -> Mutex<T> {
        Mutex::new(value)
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut T) -> R) -> R {
        use_it(&mut self.lock().unwrap())
    }
}

/// The epochs of tasks, for tests of other crates that use the scheduler.
#[derive(Debug)]
pub struct ShuttledEpochs(Core<AtomicU64, Mutex<Queues<AtomicU64>>>);

impl Default for ShuttledEpochs {
    fn default() -> ShuttledEpochs {
        ShuttledEpochs(Core::new())
    }
}

impl ShuttledEpochs {
    /// Runs steps that map and use the mapped places, as [`Epochs::during`](super::Epochs::during) does.
    pub fn during<T>(&self, steps: impl FnOnce() -> T) -> T {
        let mark = self.0.enter_task();
        let done = steps();
        self.0.leave_task(mark);
        done
    }

    /// The epoch in which mappings were removed, as [`Epochs::removed`](super::Epochs::removed) says.
    pub fn removed(&self) -> u64 {
        self.0.removed()
    }

    /// The epoch that has ended, as [`Epochs::ended`](super::Epochs::ended) says.
    pub fn ended(&self) -> u64 {
        self.0.ended()
    }
}
