//! The blkif frontend of a disk's request path: rings, grants and xenbus.
//!
//! * [`request`]: validation of what a guest wrote.
//! * [`queue`]: one ring, one thread.
//! * [`connection`]: what the queues of one frontend share.
//! * [`inflight`]: the table that a successor takes over from.
//! * [`negotiate`]: what is offered to a frontend, and what it asks for.
//! * [`lifecycle`]: xenbus states from attach to unplug.

mod as_json;
pub mod connection;
pub mod inflight;
pub mod lifecycle;
pub mod negotiate;
pub mod queue;
pub mod request;
