//! The blkif frontend of a disk's request path: rings, grants and xenbus.
//!
//! * [`request`]: validation of guest input.
//! * [`queue`]: one ring, one thread.
//! * [`connection`]: the state that the queues of one frontend share.
//! * [`inflight`]: the table from which a successor takes over.
//! * [`negotiate`]: the offer to a frontend, and its answer.
//! * [`lifecycle`]: xenbus states from attach to unplug.

mod as_json;
pub mod connection;
pub mod inflight;
pub mod lifecycle;
pub mod negotiate;
pub mod queue;
pub mod request;
