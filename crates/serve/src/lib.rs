//! The blkif backend: guests' requests, from the ring to the disk and back.
//!
//! * [`request`]: validation of what a guest wrote.
//! * [`queue`]: one ring, one thread: the hot path.
//! * [`connection`]: what the queues of one connected disk share.
//! * [`gate`]: one request alone on the whole disk (barriers, writes below the block size).
//! * [`inflight`]: the table that a successor takes over from.
//! * [`polling`]: polling before going to sleep.
//! * [`processors`]: what a disk may use of them.
//! * [`tuning`]: how queues go about their work.
//! * [`counters`]: what they have done.
//! * [`trace`]: a record a request, always on.
//! * [`negotiate`]: what is offered to a frontend, and what it asks for.
//! * [`lifecycle`]: xenbus states from attach to unplug.

#![forbid(unsafe_code)]

// The tests' rig names this crate as a user of it does.
#[cfg(test)]
extern crate self as ferrite_serve;

pub mod connection;
pub mod counters;
pub mod gate;
pub mod inflight;
pub mod lifecycle;
pub mod log_limit;
pub mod negotiate;
pub mod polling;
pub mod processors;
pub mod queue;
pub mod request;
pub mod trace;
pub mod tuning;
