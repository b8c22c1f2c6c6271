//! What is seen of the disks that are served on this host.
//!
//! * [`folder`]: the counters of all disks of this host.
//! * [`rates`]: what they have done in a time.
//! * [`trace`]: the requests of a disk, one by one.
//! * [`metrics`]: all of it for programs that collect such things.

#![forbid(unsafe_code)]

pub mod folder;
pub mod metrics;
pub mod rates;
pub mod trace;
