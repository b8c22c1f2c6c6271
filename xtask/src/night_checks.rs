//! The nightly checks without a Xen host and without a share of a fixed time.

use std::process::Command;

use anyhow::Result;

use crate::fast_checks::{DATA, logged, on_aio};
use crate::needs;
use crate::programs::{Programs, run_each};
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, cargo};

/// The tests of the disks, the backend and the programs, on the engine of kernels without io_uring, with twice the rounds
/// of a commit.
pub(crate) fn tests_on_aio() -> Result<()> {
    let programs = Programs::build(&[])?;
    let packages = ["disk-base", "images", "store", "disk", "image-tools", "serve", "ferrite"];
    let twice = |test: &mut Command| {
        on_aio(test);
        test.env("FERRITE_TEST_SCALE", "2");
    };
    let mut runs = programs.of_packages("aio", &packages, &twice);
    // Of the lab's tests the engine matters only to those of the bench.
    runs.extend(programs.some("aio", "lab", &["bench"], &on_aio)?);
    run_each(runs, steps::cpus())
}

/// Instructions per request of the backend's own code, compared with the recorded figures (docs/performance.md, "Part
/// instructions").
pub(crate) fn instructions() -> Result<()> {
    let compare = Programs::build(&[])?.binary("lab", "ferrite-compare")?;
    let mut count = Command::new(compare);
    count.current_dir(steps::repository());
    logged("instructions", count.args(["instructions", "--runs", "1", "--hold"]))
}

/// The code that accesses rings, under valgrind. Miri is not part of a stable toolchain.
pub(crate) fn valgrind() -> Result<()> {
    let programs = Programs::build(&[])?;
    for (package, library, tests) in [
        ("xen", "ferrite_xen", ["ring::", "abi::"]),
        ("loopback", "ferrite_loopback", ["front::", "link::"]),
    ] {
        let mut test = Command::new("valgrind");
        test.args(["--quiet", "--error-exitcode=9", "--leak-check=no"]);
        test.arg(programs.test_file(package, library)?).args(tests).arg("--test-threads=1");
        // Proptest's cases are a hundred times slower there.
        test.env("PROPTEST_CASES", "8");
        logged(&format!("valgrind-{package}"), &mut test)?;
    }
    Ok(())
}

/// The nightly fuzz targets, which are a workspace of their own. A check links nothing, so the fuzzer's library need
/// not be built, nor exist at this path.
pub(crate) fn fuzz_targets() -> Result<()> {
    let mut check = cargo();
    check.args(["check", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target-dir"]);
    check.arg(steps::target_dir().join("fuzz-check")).env("RUSTFLAGS", "-Dwarnings");
    logged("fuzz-targets", check.env("CUSTOM_LIBFUZZER_PATH", "/unused/libfuzzer.a"))
}

/// All tests with all their rounds, of which each commit has a fifth.
pub(crate) fn all_rounds() -> Result<()> {
    let programs = Programs::build(&[])?;
    let all = |test: &mut Command| {
        test.env("FERRITE_TEST_REQUIRE_PEERS", "1").env("FERRITE_TEST_SCALE", "5");
    };
    let mut runs = programs.every("rounds", &all);
    // Data, successions and what a guest can use up, by the movers that keep pages mapped. Each commit has that with
    // copies, and the first two by persistent grants.
    let [map, persistent] = ["map", "persistent"].map(|mover| {
        move |test: &mut Command| {
            test.env("FERRITE_TEST_MOVER", mover);
        }
    });
    let moved = [DATA, &["limits"]].concat();
    // Tests that wait for the server's own times.
    let waits = |test: &mut Command| {
        all(test);
        test.arg("--ignored");
    };
    runs.extend(programs.some("rounds-ignored", "serve", &["nbd"], &waits)?);
    runs.extend(programs.some("mover-map", "serve", &moved, &map)?);
    runs.extend(programs.some("mover-persistent", "serve", &moved, &persistent)?);
    run_each(runs, steps::cpus())
}

/// A disk that is parked a thousand times in each format: 25 times as often as with each commit. It
/// prints the pauses.
pub(crate) fn parking() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite-serve", "--test", "parking"]);
    test.args(["--", "--nocapture"]).env("FERRITE_TEST_SCALE", "25");
    steps::run(&mut test)
}

/// A running disk that is changed while its processes die: stories of 1,000 seeds, where each commit has three; and changes while the storage hangs.
pub(crate) fn changes() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "changes", "random::"]);
    steps::run(test.env("FERRITE_TEST_SCALE", "334"))?;
    let mut by_hand = cargo();
    by_hand.args(["test", "--locked", "--package", "ferrite", "--test", "controlled"]);
    steps::run(by_hand.args(["--", "--include-ignored"]))
}

/// A running disk's mirror: the cases that a commit does not have.
pub(crate) fn mirrors() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "changes", "mirror::"]);
    steps::run(test.args(["--", "--include-ignored"]))
}

/// Migrations to another host: the cases that a commit does not have.
pub(crate) fn migrations() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "migrate"]);
    steps::run(test.args(["--", "--include-ignored"]).env("FERRITE_TEST_REQUIRE_PEERS", "1"))
}

/// Backups of running disks, also those that take longer, and a thousand stories in each format.
pub(crate) fn backups() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "changes", "backup::"]);
    steps::run(test.args(["--", "--include-ignored"]))?;
    let mut stories = cargo();
    stories.args(["test", "--locked", "--package", "ferrite-sim", "--test", "backup"]);
    stories.args(["--", "--include-ignored"]);
    steps::run(stories.env("FERRITE_TEST_SCALE", "125"))
}

/// Taps in a hundred times as many random orders as with each commit, and on volumes of LVM.
pub(crate) fn random_taps() -> Result<()> {
    packages::ensure(&[needs::LVM])?;
    let mut volumes = cargo();
    volumes.args([
        "test",
        "--locked",
        "--package",
        "ferrite",
        "--test",
        "lvm",
        "--",
        "--include-ignored",
    ]);
    steps::run(volumes.env("FERRITE_TEST_REQUIRE_PEERS", "1"))?;
    let mut test = cargo();
    test.args([
        "test",
        "--locked",
        "--package",
        "ferrite-daemon",
        "--test",
        "by_process",
        "orders",
    ]);
    steps::run(test.env("FERRITE_TEST_SCALE", "100"))
}

/// The process of a store with ten guests, killed forty times as often as with each commit.
pub(crate) fn killed_store() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "store_killed"]);
    steps::run(test.env("FERRITE_TEST_SCALE", "40"))
}

/// Disks on a cluster of Ceph, which the tests start: one after the other, as they share it.
pub(crate) fn rbd() -> Result<()> {
    packages::ensure(&[needs::CEPH])?;
    steps::run(cargo().args(["build", "--locked", "--package", "ferrite-rbd"]))?;
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "remote", "rbd::", "--"]);
    test.args(["--include-ignored", "--test-threads", "1", "--nocapture"]);
    steps::run(test.env("FERRITE_TEST_REQUIRE_PEERS", "1"))
}

/// Disks of pools: many times the histories of each commit, also of the real shells, and real servers that are cut off.
pub(crate) fn pool() -> Result<()> {
    let mut histories = cargo();
    histories.args(["test", "--locked", "--package", "ferrite-pool", "--test", "histories"]);
    steps::run(histories.args(["all_reads"]).env("FERRITE_POOL_HISTORIES", "20000"))?;
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite-pool-owner", "--"]);
    test.args(["--include-ignored", "--test-threads", "1", "--nocapture"]);
    test.env("FERRITE_POOL_MACHINES", "5000");
    steps::run(test.env("FERRITE_TEST_REQUIRE_PEERS", "1"))?;
    let mut recipe = cargo();
    recipe.args(["test", "--locked", "--package", "ferrite"]);
    recipe.args(["--test", "pool_recipe", "--test", "pool_lun", "--test", "pool_disk"]);
    steps::run(recipe.args(["--", "--include-ignored"]).env("FERRITE_TEST_REQUIRE_PEERS", "1"))
}

/// Guests of one host with disks on another one, also those that take minutes.
pub(crate) fn remotes() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "remote", "two_hosts::"]);
    steps::run(test.args(["--", "--include-ignored"]).env("FERRITE_TEST_REQUIRE_PEERS", "1"))
}

/// Hosts with many disks: the cases that a commit does not have.
pub(crate) fn host() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite-daemon", "--test", "many"]);
    test.args(["--", "--include-ignored", "--nocapture"]);
    steps::run(test.env("FERRITE_TEST_REQUIRE_PEERS", "1"))
}
