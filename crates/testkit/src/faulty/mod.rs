//! A storage engine that fails as a test says: a list of [`Rule`]s around any other engine, counters of its operations,
//! and a list of them if a test needs it.

mod engine;
mod null;
mod rules;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ferrite_io::arena::Arena;
use ferrite_io::engine::{Engine, Op};
use ferrite_io::engines::test_engine;

use crate::PATIENCE;
use engine::Faulty;
use rules::Asked;

pub use null::Null;
pub use rules::{Fault, Kind, Ops, Rule};

/// Builds an engine on an arena for so many operations in flight.
pub type EngineFactory = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

type Hook = Box<dyn FnMut(&Op) + Send>;

/// The operations in flight in all engines together.
#[derive(Default)]
pub struct Traffic {
    /// Operations on storage in flight.
    under_way: AtomicUsize,
    /// The most of them at a time.
    most: AtomicUsize,
    /// An operation that must be alone is in flight.
    alone: AtomicBool,
    /// The number of begun operations that must be alone.
    begun_alone: AtomicUsize,
    /// The number of operations concurrent with one that must be alone.
    beside: AtomicUsize,
}

impl Traffic {
    /// The most concurrent operations on storage, without those that must be alone.
    pub fn most(&self) -> usize {
        self.most.load(SeqCst)
    }

    /// The number of begun operations that must be alone.
    pub fn begun_alone(&self) -> usize {
        self.begun_alone.load(SeqCst)
    }

    /// The number of operations concurrent with one that must be alone.
    pub fn beside(&self) -> usize {
        self.beside.load(SeqCst)
    }

    fn begin(&self, alone: bool) {
        if alone {
            self.alone.store(true, SeqCst);
            self.begun_alone.fetch_add(1, SeqCst);
            self.beside.fetch_add(self.under_way.load(SeqCst), SeqCst);
        } else {
            let before = self.under_way.fetch_add(1, SeqCst);
            self.most.fetch_max(before + 1, SeqCst);
            self.beside.fetch_add(usize::from(self.alone.load(SeqCst)), SeqCst);
        }
    }

    fn end(&self, alone: bool) {
        if alone {
            self.alone.store(false, SeqCst);
        } else {
            self.under_way.fetch_sub(1, SeqCst);
        }
    }
}

/// The rules of a disk's engines, and their records.
#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    seen: [u64; Kind::COUNT],
    /// All operations on storage, once a test has asked for the list.
    list: Option<Vec<Op>>,
    /// The operations that must be alone.
    alone: Vec<Ops>,
    /// The engine of the thread with this name fails as a whole.
    broken: Option<String>,
}

/// Decides which operations fail, for all engines of a disk. Shared with the test.
#[derive(Clone, Default)]
pub struct Faults {
    state: Arc<Mutex<State>>,
    hook: Arc<Mutex<Option<Hook>>>,
    traffic: Arc<Traffic>,
    /// Blocks operations with [`Fault::Held`].
    gate: Arc<Mutex<()>>,
}

impl Faults {
    /// Nothing fails.
    pub fn none() -> Faults {
        Faults::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Replaces all rules.
    pub fn set(&self, rules: impl IntoIterator<Item = Rule>) {
        self.state().rules = rules.into_iter().collect();
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.set([]);
    }

    /// The next of these operations gets this fault; all others succeed.
    pub fn once(&self, ops: impl Into<Ops>, fault: Fault) {
        self.set([ops.into().meet(fault).once()]);
    }

    /// The next operations on storage get these faults, one after the other; then all succeed.
    pub fn in_order(&self, faults: &[Fault]) {
        self.set(faults.iter().map(|fault| Ops::storage().meet(*fault).once()));
    }

    /// Calls this before each operation on storage begins.
    pub fn before_each(&self, look: impl FnMut(&Op) + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(look));
    }

    /// Blocks operations with [`Fault::Held`], until the result is dropped.
    pub fn hold(&self) -> impl Drop {
        self.gate.lock().unwrap()
    }

    /// The engine of the queue whose thread has this name fails as a whole; of none, if it is empty.
    pub fn break_engine(&self, thread: &str) {
        self.state().broken = Some(thread.to_owned());
    }

    /// Checks whether these operations are alone on the disk.
    pub fn watch_alone(&self, alone: impl IntoIterator<Item = Ops>) {
        self.state().alone = alone.into_iter().collect();
    }

    /// The results of that check.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// The number of operations of these kinds.
    pub fn seen(&self, kinds: &[Kind]) -> u64 {
        let state = self.state();
        kinds.iter().map(|kind| state.seen[*kind as usize]).sum()
    }

    /// Resets the counters.
    pub fn forget(&self) {
        self.state().seen = Default::default();
    }

    /// Waits until there were so many of a kind.
    #[track_caller]
    pub fn wait_for(&self, kind: Kind, count: u64) {
        let end = Instant::now() + PATIENCE;
        while self.seen(&[kind]) < count {
            assert!(Instant::now() < end, "there is no {kind:?} number {count}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Lists all operations on storage from now on. Of a vectored one the list has the first piece.
    pub fn list(&self) {
        self.state().list = Some(Vec::new());
    }

    /// The list since it was last taken.
    ///
    /// # Panics
    /// If none is kept.
    pub fn take_list(&self) -> Vec<Op> {
        std::mem::take(self.state().list.as_mut().expect("a list is kept"))
    }

    /// Wraps an engine.
    pub fn around(&self, inner: Box<dyn Engine>) -> Box<dyn Engine> {
        Box::new(Faulty::new(inner, self.clone()))
    }

    /// Wraps the engine of the tests.
    ///
    /// # Errors
    /// That engine's, and those of rules for [`Kind::Make`].
    pub fn open(&self, arena: Arc<Arena>, entries: u32) -> io::Result<Box<dyn Engine>> {
        self.check(Kind::Make)?;
        Ok(self.around(test_engine().open(arena, entries)?))
    }

    /// A factory that makes one engine for each queue of a backend.
    pub fn factory(&self) -> EngineFactory {
        let faults = self.clone();
        Arc::new(move |arena, entries| faults.open(arena, entries))
    }

    /// The fault of a call to the engine itself.
    fn check(&self, kind: Kind) -> io::Result<()> {
        match self.decide(&Asked::call(kind), None) {
            Fault::None => Ok(()),
            Fault::Errno(errno) => Err(io::Error::from_raw_os_error(errno)),
            fault => panic!("{kind:?} cannot meet {fault:?}"),
        }
    }

    fn decide(&self, asked: &Asked, op: Option<&Op>) -> Fault {
        if let (true, Some(op)) = (asked.kind.is_storage(), op)
            && let Some(look) = self.hook.lock().unwrap().as_mut()
        {
            look(op);
        }
        let fault = {
            let mut state = self.state();
            state.seen[asked.kind as usize] += 1;
            if let (true, Some(op), Some(list)) = (asked.kind.is_storage(), op, &mut state.list) {
                list.push(*op);
            }
            state.rules.iter_mut().find_map(|rule| rule.decide(asked)).unwrap_or(Fault::None)
        };
        let Fault::Held(errno) = fault else { return fault };
        drop(self.gate.lock().unwrap());
        errno.map_or(Fault::None, Fault::Errno)
    }

    /// Begins an operation; whether it must be alone.
    fn begin(&self, asked: &Asked) -> bool {
        let alone = self.state().alone.iter().any(|ops| ops.have(asked));
        self.traffic.begin(alone);
        alone
    }

    fn end(&self, alone: bool) {
        self.traffic.end(alone);
    }

    fn is_broken(&self) -> bool {
        let state = self.state();
        state.broken.is_some() && std::thread::current().name() == state.broken.as_deref()
    }
}

#[cfg(test)]
mod tests;
