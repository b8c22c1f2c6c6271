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
    let begun = Instant::now();
    while !done() {
        let waited = begun.elapsed();
        assert!(waited < PATIENCE, "{what} does not happen");
        std::thread::sleep(before_next_look(waited));
    }
}

/// The pause before the next look at what has not happened for so long: a sixteenth of that. Looks at a process or a file
/// take processor time, which what is waited for needs as well.
fn before_next_look(waited: Duration) -> Duration {
    (waited / 16).clamp(Duration::from_millis(1), Duration::from_millis(10))
}

/// The pace of a guest or client that works in a loop beside what is tested. It rests after each few requests: without
/// rests it takes a processor for as long as the test waits for anything else. By night it has no rests.
#[derive(Debug, Default)]
pub struct Pace(u32);

impl Pace {
    /// Requests without a rest.
    const BURST: u32 = 8;
    const REST: Duration = Duration::from_millis(3);

    /// After a request: rests if it is time for it.
    pub fn after_request(&mut self) {
        self.0 += 1;
        if self.0.is_multiple_of(Pace::BURST) && !is_night() {
            std::thread::sleep(Pace::REST);
        }
    }
}
