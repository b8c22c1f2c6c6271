//! Answered, dirty metadata on its way to the medium: common to all formats.
//!
//! * [`journal`]: answered changes, for the next process, until a commit has made them durable.
//! * [`Commits`]: one commit at a time, for all flushes that wait for it; and the end of all commits once a sync has
//!   failed.
//!
//! # The steps of a format
//! A write is answered when its change is in memory and its record in the journal. A commit takes the dirty changes,
//! writes them in the format's own order, and releases the records of durable ones. Later changes belong to the next
//! commit. A commit that fails, or is dropped with its task, leaves everything as dirty as it was.
//!
//! # Recovery
//! After the death of a process its records have the answered changes:
//! 1. A record is used only if it fits the medium: the state before the change, or after it. Otherwise another program
//!    has written to the image, and opening fails.
//! 2. A process that opens the image for writing has all of them dirty in memory, and the records stay in its journal
//!    until a commit of its own.
//! 3. A reader lays them over the metadata that it reads. The records stay unchanged: they belong to the next writer,
//!    and there may be other readers.
//! 4. After a failed sync the journal is [void](journal::Journal::void) at once: nothing is recovered. Its
//!    [witnesses](SyncWitness) are told of the failure before that.

mod commits;
pub mod journal;
mod void;
mod witnesses;

pub use commits::{Commits, Failure};
pub use void::Void;
pub use witnesses::{SyncWitness, Witnesses};
