//! Tests under AddressSanitizer.
//!
//! The sanitizer is part of the stable toolchain, but needs an unstable flag of the compiler.

use anyhow::Result;

use crate::fast_checks::logged;
use crate::unsteady;
use ferrite_xenhost::steps::{self, cargo};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The crates with `unsafe` code.
const UNSAFE: [&str; 4] = ["ferrite-host", "ferrite-io", "ferrite-xen", "ferrite-loopback"];

/// All tests of the crates with `unsafe` code.
pub(crate) fn of_unsafe_crates() -> Result<()> {
    sanitized(&UNSAFE)
}

/// These tests, and all tests of the backend, whose data they move.
pub(crate) fn of_data_path() -> Result<()> {
    sanitized(&[&UNSAFE[..], &["ferrite-serve"]].concat())
}

fn sanitized(packages: &[&str]) -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--no-fail-fast", "--tests", "--target", TARGET]);
    test.args(packages.iter().flat_map(|package| ["--package", package]));
    // Shuttle's coroutines leak a few bytes.
    test.args(["--", "--skip", "shuttle"]);
    test.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    // Frontends of the tests abandon their memory on purpose, and memory that is kept for inspection would look like
    // growth.
    test.env("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=1");
    test.env("CARGO_TARGET_DIR", steps::target_dir().join("asan"));
    logged("address-sanitizer", &mut test).or_else(|error| {
        let again = || logged("address-sanitizer-again", &mut test);
        unsteady::try_again("address-sanitizer", &error, again)
    })
}
