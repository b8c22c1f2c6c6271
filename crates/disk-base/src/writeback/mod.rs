//! Metadata that is answered and dirty, on its way to the medium: the same for all formats.
//!
//! * [`journal`]: what was answered, for the next process, until a commit has made it durable.
//! * [`Commits`]: one commit at a time, for all flushes that wait for it; and the end of all commits
//!   once a sync has failed.
//!
//! # What a format does
//! A write is answered when its change is in memory and its record in the journal. A commit takes
//! what is dirty then, writes it in the format's own order, and releases the records of what is
//! durable. What changes meanwhile belongs to the next commit. A commit that fails, or is given up
//! with its task, leaves everything as dirty as it was.
//!
//! # Recovery
//! After the death of a process its records say what it had answered:
//! 1. A record is believed only if it fits what is on the medium: the state before the change, or
//!    after it. Otherwise another program has written to the image, and opening fails.
//! 2. Who opens the image for writing has all of it dirty in memory, and the records stay in his
//!    journal until a commit of his own.
//! 3. Who only reads lays it over what he reads. The records stay as they are: they are the next
//!    writer's, and there may be other readers.
//! 4. After a sync that failed the journal is [void](journal::Journal::void) at once: nothing is recovered.
//!    Its [witnesses](SyncWitness) know of the failure before that.

mod commits;
pub mod journal;
mod void;
mod witnesses;

pub use commits::{Commits, Failure};
pub use void::Void;
pub use witnesses::{SyncWitness, Witnesses};
