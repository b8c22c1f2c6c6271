//! Code that the tests of several crates share. `README.md` tells which layer may be used where.

#![forbid(unsafe_code)]

// A unit test of the backend has `rig` as a module, for types of its own.
extern crate self as ferrite_testkit;

pub mod bytes;
pub mod ceph;
pub mod devices;
pub mod errno;
pub mod faulty;
#[cfg(feature = "disk")]
pub mod images;
pub mod late;
#[cfg(feature = "serve")]
pub mod nbd;
pub mod nbd_client;
pub mod openmetrics;
pub mod places;
pub mod proc;
#[cfg(feature = "serve")]
pub mod processes;
pub mod programs;
pub mod remote;
#[cfg(feature = "serve")]
pub mod restless;
#[cfg(feature = "serve")]
pub mod rig;
#[cfg(feature = "disk")]
pub mod stores;
#[cfg(feature = "serve")]
pub mod storm;
#[cfg(feature = "serve")]
pub mod vhost;

use std::time::{Duration, Instant};

/// A time limit for anything that ends at all, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How many times longer than usual the tests with loops run: `FERRITE_TEST_SCALE`, 1 if it is not set.
pub fn scale() -> u32 {
    let scale = std::env::var("FERRITE_TEST_SCALE").ok();
    scale.map_or(1, |s| s.parse().expect("FERRITE_TEST_SCALE is a number"))
}

/// The rounds of a test that has `full` of them by night, where [`scale`] is [`NIGHT`]: with each commit a fifth, and
/// one at least.
pub fn rounds(full: u32) -> u32 {
    (full * scale()).div_ceil(NIGHT)
}

/// `few` of something with each commit, and `all` of it by night, where [`scale`] is [`NIGHT`].
pub fn few_or_all(few: u32, all: u32) -> u32 {
    if is_night() { all * scale() / NIGHT } else { few * scale() }
}

/// Whether case `case` of a table of kinds is tried with entry `entry` of another table: all pairs by night, and with
/// each commit one of `share`, so that each case and each entry has its turn.
pub fn is_paired(case: usize, entry: usize, share: usize) -> bool {
    is_night() || (case + entry).is_multiple_of(share)
}

/// Whether a test has its full [`rounds`].
pub fn is_night() -> bool {
    scale() >= NIGHT
}

/// The [`scale`] of `cargo xtask nightly --only rounds`.
pub const NIGHT: u32 = 5;

/// Waits until a condition holds.
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}
