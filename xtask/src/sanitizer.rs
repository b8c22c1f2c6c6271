//! Tests under AddressSanitizer.
//!
//! The sanitizer is part of the stable toolchain, but needs an unstable flag of the compiler.

use std::process::Command;

use anyhow::Result;

use crate::programs::{Programs, run_each};
use ferrite_xenhost::steps::{self, cargo};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The crates with `unsafe` code.
const UNSAFE: [&str; 4] = ["ferrite-host", "ferrite-io", "ferrite-xen", "ferrite-loopback"];

/// Builds all tests of the crates with `unsafe` code, by this command of cargo.
pub(crate) fn build(cargo: Command) -> Result<Programs> {
    sanitized(cargo, &UNSAFE)
}

/// Runs tests that were built here, `cpus` programs at a time, with `scale` times the rounds of a commit.
pub(crate) fn run(programs: &Programs, scale: u32) -> Result<()> {
    let told = |test: &mut Command| {
        test.env("FERRITE_TEST_SCALE", scale.to_string());
        // Shuttle's coroutines leak a few bytes.
        test.args(["--skip", "shuttle"]);
        // Frontends of the tests abandon their memory on purpose, and memory that is kept for inspection would look like
        // growth.
        test.env("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=1");
    };
    run_each(programs.every("address-sanitizer", &told), steps::cpus())
}

/// These tests, and all tests of the backend, whose data they move.
pub(crate) fn of_data_path() -> Result<()> {
    run(&sanitized(cargo(), &[&UNSAFE[..], &["ferrite-serve"]].concat())?, 2)
}

fn sanitized(mut cargo: Command, packages: &[&str]) -> Result<Programs> {
    cargo.args(["test", "--locked", "--no-run", "--message-format=json", "--tests"]);
    cargo.args(["--target", TARGET]);
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    // Its reports name lines.
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    cargo.env("CARGO_TARGET_DIR", steps::target_dir().join("asan"));
    Programs::built_by(&mut cargo)
}
