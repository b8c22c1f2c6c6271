//! The blkif backend: guests' requests, from the ring to the disk and back.
//!
//! * [`blkif`]: the frontend that guests of Xen have: rings, negotiation, xenbus states.
//! * [`nbd`]: the frontend for clients of NBD.
//! * [`vhost`]: the frontend for guests of QEMU and others, by vhost-user.
//! * [`ublk`]: the frontend for block devices of this host, by the kernel's ublk driver.
//! * [`others`]: how a worker gets clients of these two.
//! * [`path`]: checked requests to the disk and back, the same for every frontend: the hot path.
//! * [`polling`]: polling before going to sleep.
//! * [`processors`]: the processor time that a disk may use.
//! * [`tuning`]: settings of the queues.
//! * [`counters`]: statistics of the queues.
//! * [`trace`]: one record per request, always on.

#![forbid(unsafe_code)]

// The tests' rig names this crate as other crates do.
#[cfg(test)]
extern crate self as ferrite_serve;

pub mod blkif;
pub mod counters;
pub mod log_limit;
pub mod memory;
pub mod nbd;
pub mod others;
pub mod path;
pub mod polling;
pub mod processors;
pub mod trace;
pub mod tuning;
pub mod ublk;
pub mod vhost;
pub mod waker;
