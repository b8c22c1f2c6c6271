//! Counts how often rare paths of the formats are taken, by their log messages.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use ferrite_disk::Rare;
use ferrite_simio::SimWorld;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    static TAKEN: RefCell<Paths> = RefCell::default();
    /// The machine of this thread's story.
    static WORLD: RefCell<Option<SimWorld>> = const { RefCell::new(None) };
}

/// The machine's steps around the end of a path that belong to it: the writes that it made durable, and the next ones.
const STEPS_BEFORE: u64 = 48;
const STEPS_AFTER: u64 = 12;

/// The number of times for each path, by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    times: BTreeMap<String, u64>,
    /// The machine's step at which each path ended for the first time.
    steps: Vec<u64>,
}

impl Paths {
    /// Adds the counts of another story.
    pub fn add(&mut self, other: &Paths) {
        for (name, times) in &other.times {
            *self.times.entry(name.clone()).or_default() += times;
        }
    }

    /// How often a path was taken.
    pub fn times(&self, path: Rare) -> u64 {
        self.times.get(path.name()).copied().unwrap_or(0)
    }

    /// Whether a step of the story belongs to a path.
    pub fn have(&self, step: u64) -> bool {
        let near =
            |end: &u64| (end.saturating_sub(STEPS_BEFORE)..=end + STEPS_AFTER).contains(&step);
        self.steps.iter().any(near)
    }
}

/// `NAME TIMES, ...`, including paths that were never taken.
impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Rare::ALL.map(|path| format!("{} {}", path.name(), self.times(path)));
        f.write_str(&all.join(", "))
    }
}

/// Counts in all threads of this program from now on. If another log was set up before, that stays, and nothing is
/// counted.
pub fn count() {
    let _ = tracing::subscriber::set_global_default(Counter);
}

/// Later counts of this thread belong to this machine.
pub(crate) fn of(world: &SimWorld) {
    WORLD.set(Some(world.clone()));
    taken();
}

/// The counts of this thread since the last call.
pub(crate) fn taken() -> Paths {
    TAKEN.take()
}

struct Counter;

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == Rare::TARGET
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Name);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Name;

impl Visit for Name {
    fn record_str(&mut self, _: &Field, path: &str) {
        TAKEN.with_borrow_mut(|taken| {
            let times = taken.times.entry(path.to_owned()).or_default();
            *times += 1;
            // After a failed sync each flush logs it again.
            if *times == 1 {
                taken.steps.extend(WORLD.with_borrow(|world| world.as_ref().map(SimWorld::step)));
            }
        });
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
