//! The blkif backend: guests' requests, from the ring to the disk and back.
//!
//! * [`blkif`]: the frontend that guests of Xen have: rings, negotiation, xenbus states.
//! * [`nbd`]: the frontend for clients of NBD.
//! * [`path`]: checked requests to the disk and back, whoever the frontend is: the hot path.
//! * [`polling`]: polling before going to sleep.
//! * [`processors`]: what a disk may use of them.
//! * [`tuning`]: how queues go about their work.
//! * [`counters`]: what they have done.
//! * [`trace`]: a record a request, always on.

#![forbid(unsafe_code)]

// The tests' rig names this crate as a user of it does.
#[cfg(test)]
extern crate self as ferrite_serve;

pub mod blkif;
pub mod counters;
pub mod log_limit;
pub mod memory;
pub mod nbd;
pub mod path;
pub mod polling;
pub mod processors;
pub mod trace;
pub mod tuning;
pub mod waker;
