//! How often the rare paths of the formats are taken: they say so in the log.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use ferrite_disk::Rare;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    static TAKEN: RefCell<Paths> = RefCell::default();
}

/// Numbers of times, by the path's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths(BTreeMap<String, u64>);

impl Paths {
    /// Adds those of another story.
    pub fn add(&mut self, other: &Paths) {
        for (name, times) in &other.0 {
            *self.0.entry(name.clone()).or_default() += times;
        }
    }

    /// How often one was taken.
    pub fn times(&self, path: Rare) -> u64 {
        self.0.get(path.name()).copied().unwrap_or(0)
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

/// What this thread has counted since it was last asked.
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
        TAKEN.with_borrow_mut(|taken| *taken.0.entry(path.to_owned()).or_default() += 1);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
