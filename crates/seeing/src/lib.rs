//! Statistics of the disks that are served on this host.
//!
//! * [`folder`]: the counters of all disks of this host.
//! * [`rates`]: the rates between two samples.
//! * [`trace`]: the requests of a disk, one by one.
//! * [`metrics`]: all of it for monitoring programs.

#![forbid(unsafe_code)]

pub mod folder;
pub mod interfaces;
pub mod metrics;
pub mod rates;
pub mod trace;
