//! Counters of a disk's queues, in a file that outlives the process.
//!
//! Each queue has a page of its own with one writer, so that counting costs a store; readers take
//! what is there, and may see one counter a moment before another.
//!
//! * `book`: the file, which goes on from process to process.
//! * `account`: what a queue's thread writes for its requests.
//! * [`snapshot`]: what anybody reads, whatever the file holds.
//! * [`histogram`]: latencies, by size.

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
