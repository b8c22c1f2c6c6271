//! How often the rare paths of the formats are taken: they say so in the log.

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

/// Steps of the machine that belong to a path, before its end and after that: what it has made
/// durable, and what is written next.
const STEPS_BEFORE: u64 = 48;
const STEPS_AFTER: u64 = 12;

/// Numbers of times, by the path's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    times: BTreeMap<String, u64>,
    /// The machine's steps at which each of them ended for the first time.
    steps: Vec<u64>,
}

impl Paths {
    /// Adds how often those of another story were taken.
    pub fn add(&mut self, other: &Paths) {
        for (name, times) in &other.times {
            *self.times.entry(name.clone()).or_default() += times;
        }
    }

    /// How often one was taken.
    pub fn times(&self, path: Rare) -> u64 {
        self.times.get(path.name()).copied().unwrap_or(0)
    }

    /// Whether a step of the story belongs to one of them.
    pub fn have(&self, step: u64) -> bool {
        let near =
            |end: &u64| (end.saturating_sub(STEPS_BEFORE)..=end + STEPS_AFTER).contains(&step);
        self.steps.iter().any(near)
    }
}

/// `NAME TIMES, ...`, those that were never taken, too.
impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Rare::ALL.map(|path| format!("{} {}", path.name(), self.times(path)));
        f.write_str(&all.join(", "))
    }
}

/// Has all threads of this program count from now on. Whoever has set up another log keeps that, and
/// nothing is counted.
pub fn count() {
    let _ = tracing::subscriber::set_global_default(Counter);
}

/// All that this thread counts from now on happens on this machine.
pub(crate) fn of(world: &SimWorld) {
    WORLD.set(Some(world.clone()));
    taken();
}

/// The paths that this thread has counted since it was last asked.
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
            // One whose sync has failed says so with each flush from then on.
            if *times == 1 {
                taken.steps.extend(WORLD.with_borrow(|world| world.as_ref().map(SimWorld::step)));
            }
        });
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
