//! Counters of a disk's queues, in a file that outlives the process.
//!
//! Each queue has a page of its own with one writer, so counting costs a store. Readers may see one
//! counter a moment before another.
//!
//! * `book`: the file, which goes on from process to process.
//! * `account`: the counting of a queue's thread.
//! * [`snapshot`]: reads any file safely.
//! * [`histogram`]: latencies by size.

mod account;
mod book;
mod counts;
pub mod histogram;
mod layout;
mod page;
pub mod snapshot;

pub use book::{Counters, FOLDER, remember_process, stats_file};
pub use counts::Counts;

pub(crate) use account::{Account, Kind};
pub(crate) use counts::QueueCounters;
pub(crate) use page::Page;
