//! What is seen of the disks that are served on this host.
//!
//! * [`folder`]: the counters of all disks of this host.
//! * [`rates`]: what they have done in a time.

#![forbid(unsafe_code)]

pub mod folder;
pub mod rates;
