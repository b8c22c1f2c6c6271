//! Which engine does the I/O, and why.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use crate::aio::{self, Aio};
use crate::arena::Arena;
use crate::engine::Engine;
use crate::uring::{self, NvmeUring, PolledUring, Uring};

/// An engine of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// [`Uring`].
    Uring,
    /// [`Aio`].
    Aio,
    /// [`PolledUring`]: only where it is asked for.
    UringPolled,
    /// [`NvmeUring`]: for disks that are the character device of an NVMe namespace.
    Nvme {
        /// Whether completions are asked for.
        polled: bool,
    },
}

impl EngineKind {
    /// Those that work on any medium, the best first.
    pub const ALL: [EngineKind; 2] = [EngineKind::Uring, EngineKind::Aio];

    /// Its [`Engine::name`].
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Uring => "io_uring",
            EngineKind::Aio => "aio",
            EngineKind::UringPolled => "io_uring polled",
            EngineKind::Nvme { polled: false } => "io_uring nvme",
            EngineKind::Nvme { polled: true } => "io_uring nvme polled",
        }
    }

    /// Whether [`Engine::hold`] keeps a file until the last operation of a process that was killed.
    pub fn holds(self) -> bool {
        self != EngineKind::Aio
    }

    /// Whether it works here: makes a small one and drops it.
    ///
    /// # Errors
    /// Why it does not, and what to do about it.
    pub fn probe(self) -> io::Result<()> {
        match self {
            EngineKind::Uring | EngineKind::UringPolled | EngineKind::Nvme { .. } => {
                uring::try_out()
            }
            EngineKind::Aio => aio::probe(),
        }
    }

    /// One for about `entries` operations at once on the memory of `arena`.
    ///
    /// # Errors
    /// Why there is none, and what to do about it.
    pub fn open(self, arena: Arc<Arena>, entries: u32) -> io::Result<Box<dyn Engine>> {
        Ok(match self {
            EngineKind::Uring => Box::new(Uring::new(arena, entries)?),
            EngineKind::Aio => Box::new(Aio::new(arena, entries)?),
            EngineKind::UringPolled => Box::new(PolledUring::new(arena, entries)?),
            EngineKind::Nvme { polled } => Box::new(NvmeUring::new(arena, entries, polled)?),
        })
    }
}

/// The user's choice: `auto`, `uring`, `aio`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// The best that works.
    #[default]
    Auto,
    /// This one or none.
    Only(EngineKind),
}

/// A choice that was made.
#[derive(Debug)]
pub struct Chosen {
    /// It works here.
    pub kind: EngineKind,
    /// Why it is not io_uring, if the choice was free.
    pub without_uring: Option<io::Error>,
}

impl EngineChoice {
    /// Chooses, by trying what the kernel gives.
    ///
    /// # Errors
    /// Nothing of what was allowed works.
    pub fn decide(self) -> io::Result<Chosen> {
        let without_uring = match self {
            EngineChoice::Only(kind) => {
                kind.probe()?;
                return Ok(Chosen { kind, without_uring: None });
            }
            EngineChoice::Auto => match EngineKind::Uring.probe() {
                Ok(()) => return Ok(Chosen { kind: EngineKind::Uring, without_uring: None }),
                Err(e) => e,
            },
        };
        match EngineKind::Aio.probe() {
            Ok(()) => Ok(Chosen { kind: EngineKind::Aio, without_uring: Some(without_uring) }),
            Err(e) => Err(io::Error::new(e.kind(), format!("{without_uring}; {e}"))),
        }
    }
}

impl EngineChoice {
    /// Opens the best engine that works, without a trial before; see [`EngineKind::open`]. It is for memory that is not
    /// pinned: whether that works is what a trial finds out.
    ///
    /// # Errors
    /// Nothing of what was allowed works.
    pub fn open(self, arena: Arc<Arena>, entries: u32) -> io::Result<Box<dyn Engine>> {
        match self {
            EngineChoice::Only(kind) => kind.open(arena, entries),
            EngineChoice::Auto => EngineKind::Uring.open(arena.clone(), entries).or_else(|uring| {
                let aio = EngineKind::Aio.open(arena, entries);
                aio.map_err(|e| io::Error::new(e.kind(), format!("{uring}; {e}")))
            }),
        }
    }
}

/// The engine that tests run on: what the variable `FERRITE_TEST_ENGINE` says, otherwise the best
/// that works here.
///
/// # Panics
/// If that does not work here.
pub fn test_engine() -> EngineKind {
    let choice = match std::env::var("FERRITE_TEST_ENGINE") {
        Ok(text) => text.parse().expect("FERRITE_TEST_ENGINE names an engine"),
        Err(_) => EngineChoice::Auto,
    };
    choice.decide().expect("the engine that tests run on works here").kind
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Only(EngineKind::Aio) => "aio",
            EngineChoice::Only(_) => "uring",
        })
    }
}

impl FromStr for EngineChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [EngineChoice::Auto].into_iter().chain(EngineKind::ALL.map(EngineChoice::Only));
        all.into_iter()
            .find(|choice| choice.to_string() == text)
            .ok_or_else(|| format!("{text:?} is no engine: say auto, uring or aio"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_written_as_they_are_read() {
        for text in ["auto", "uring", "aio"] {
            assert_eq!(text.parse::<EngineChoice>().unwrap().to_string(), text);
        }
        assert!("io_uring".parse::<EngineChoice>().unwrap_err().contains("auto, uring or aio"));
    }

    #[test]
    fn what_works_is_chosen_and_carries_the_name_that_it_was_chosen_by() {
        let arena = Arena::new(1).unwrap();
        for choice in [EngineChoice::Auto, EngineChoice::Only(EngineKind::Aio)] {
            let chosen = choice.decide().unwrap();
            let engine = chosen.kind.open(arena.clone(), 8).unwrap();
            assert_eq!(engine.name(), chosen.kind.name());
            assert_eq!(choice.open(arena.clone(), 8).unwrap().name(), engine.name());
            let free = choice == EngineChoice::Auto;
            let uring = EngineKind::Uring.probe().is_ok();
            assert_eq!(chosen.without_uring.is_some(), free && !uring);
        }
    }
}
