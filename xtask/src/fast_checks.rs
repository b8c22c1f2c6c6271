//! Every check that needs no Xen host: format, lints, docs, licences, tests, memory checkers.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::checks::{Outcome, check};
use crate::programs::Programs;
use crate::{dist, mutants, powercuts, unsteady};
use ferrite_xenhost::steps::{self, cargo, fresh_log, run_logged};

/// The licence gate. Built once into target/tools, without optimisation: it runs for a second.
const CARGO_DENY: &str = "0.20.2";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The crates of this workspace that are linked into the program that serves.
const PRODUCT: [&str; 12] = [
    "ferrite",
    "ferrite-daemon",
    "ferrite-disk",
    "ferrite-disk-base",
    "ferrite-image-tools",
    "ferrite-images",
    "ferrite-io",
    "ferrite-keeper",
    "ferrite-seeing",
    "ferrite-serve",
    "ferrite-store",
    "ferrite-xen",
];
/// Those that tasks link: they compile while the product does not.
const TOOLS: [&str; 1] = ["ferrite-xenhost"];

/// The backend's tests in which data moves.
const DATA: &[&str] =
    &["served", "exactness", "shapes", "model", "hostile", "limits", "lifecycle", "takeover"];

/// Further ones that reach code with `unsafe` in it, or count its memory.
const MEMORY: &[&str] = &["confidentiality", "discards", "merging", "resources", "storm", "unplug"];

/// Runs them all, the quickest to fail first.
pub(crate) fn rest() -> Vec<Outcome> {
    let mut outcomes = vec![
        check("format", || run("format", cargo().args(["fmt", "--all", "--check"]))),
        check("clippy", || {
            let mut clippy = cargo();
            clippy.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-Dwarnings"]);
            run("clippy", &mut clippy)
        }),
        check("mutants apply", mutants::check),
        check("fuzz targets compile", fuzz_targets),
        check("tests", tests),
    ];
    std::thread::scope(|scope| {
        // On AIO the tests mostly wait: what needs processors and no test fits beside them.
        let beside = scope.spawn(without_tests);
        outcomes.push(check("tests on Linux AIO", tests_on_aio));
        outcomes.extend(beside.join().expect("checks that do not panic"));
    });
    outcomes.extend([
        check("instructions a request", instructions),
        check("tests with the mover map", || with_mover("map")),
        check("tests with the mover persistent", || with_mover("persistent")),
        check("tests under valgrind", valgrind),
        check("tests under AddressSanitizer", address_sanitizer),
        check("power cuts", powercuts::test),
    ]);
    outcomes
}

fn without_tests() -> [Outcome; 4] {
    [
        check("the product links no tests", product_links_no_tests),
        check("licences, bans, sources", licences),
        check("packages", dist::check),
        check("documentation", || {
            let mut doc = cargo();
            doc.args(["doc", "--locked", "--workspace", "--no-deps"]);
            run("doc", doc.env("RUSTDOCFLAGS", "-Dwarnings"))
        }),
    ]
}

fn run(name: &str, command: &mut Command) -> Result<()> {
    run_logged(command, &fresh_log(name)?)
}

/// The night's fuzz targets, which are a workspace of their own. Checking links nothing, so the
/// fuzzer's own library need not be built, nor be where this says.
fn fuzz_targets() -> Result<()> {
    let mut check = cargo();
    check.args(["check", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target-dir"]);
    check.arg(steps::target_dir().join("fuzz-check")).env("RUSTFLAGS", "-Dwarnings");
    run("fuzz-targets", check.env("CUSTOM_LIBFUZZER_PATH", "/unused/libfuzzer.a"))
}

/// Every test, and every example of the documentation.
fn tests() -> Result<()> {
    // A program by itself leaves half of the processors' time unused.
    Programs::build(&[])?.run_every("tests", steps::cpus(), &|test| {
        // The peers were installed: a test that cannot find one fails.
        test.env("FERRITE_TEST_REQUIRE_PEERS", "1");
    })?;
    let mut examples = cargo();
    run("examples", examples.args(["test", "--locked", "--workspace", "--doc"]))
}

/// The disks, the backend and the program once more, on the engine of kernels without io_uring.
/// (The tests of `ferrite-io` run on both anyway.)
fn tests_on_aio() -> Result<()> {
    // Most of their time is the kernel's grace period at the end of each context, when no processor
    // is needed.
    let threads = (4 * steps::cpus()).to_string();
    let on_aio = |test: &mut Command| {
        test.env("RUST_TEST_THREADS", &threads).env("FERRITE_TEST_ENGINE", "aio");
    };
    let programs = Programs::build(&[])?;
    let packages = ["disk-base", "images", "store", "disk", "image-tools", "serve", "ferrite"];
    let done = programs.run_all("aio", &packages, steps::cpus(), &on_aio);
    // Of the lab's tests the engine matters to those of the bench alone.
    done.and(programs.run_some("aio", "lab", &["bench"], &on_aio))
}

/// Tests of the backend in which data moves, once more with another mover.
fn with_mover(mover: &str) -> Result<()> {
    Programs::build(&[])?.run_some(&format!("mover-{mover}"), "serve", DATA, &|test| {
        test.env("FERRITE_TEST_MOVER", mover);
    })
}

/// What a request costs the backend's own code, beside the figures of the repository (docs/performance.md,
/// "Part instructions").
fn instructions() -> Result<()> {
    let compare = Programs::build(&[])?.binary("lab", "ferrite-compare")?;
    let mut count = Command::new(compare);
    count.current_dir(steps::repository());
    run("instructions", count.args(["instructions", "--runs", "1", "--hold"]))
}

/// The code that touches rings, under valgrind. Miri is no part of a stable toolchain.
fn valgrind() -> Result<()> {
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
        run(&format!("valgrind-{package}"), &mut test)?;
    }
    Ok(())
}

/// All of the data path with every access checked. The sanitizer is part of the stable toolchain
/// but behind a flag of the compiler's unstable ones.
fn address_sanitizer() -> Result<()> {
    let mut targets = vec!["--lib".to_owned()];
    let mut names = test_files("crates/io/tests")?;
    names.extend(test_files("crates/xen/tests")?);
    names.extend(test_files("crates/loopback/tests")?);
    names.extend(DATA.iter().chain(MEMORY).map(|name| (*name).to_owned()));
    targets.extend(names.into_iter().flat_map(|name| ["--test".to_owned(), name]));
    sanitized(&targets)
}

/// The same of every test of the crates with `unsafe` in them, and of the backend.
pub(crate) fn address_sanitizer_of_all() -> Result<()> {
    sanitized(&["--tests".to_owned()])
}

fn sanitized(targets: &[String]) -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--no-fail-fast", "--target", TARGET]).args(targets);
    for package in ["ferrite-io", "ferrite-xen", "ferrite-loopback", "ferrite-serve"] {
        test.args(["--package", package]);
    }
    // Shuttle's own coroutines lose a few bytes.
    test.args(["--", "--skip", "shuttle"]);
    test.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    // Frontends of the tests abandon their memory on purpose, and memory kept for inspection
    // would look like growth.
    test.env("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=1");
    test.env("CARGO_TARGET_DIR", steps::target_dir().join("asan"));
    run("address-sanitizer", &mut test).or_else(|error| {
        let again = || run("address-sanitizer-again", &mut test);
        unsteady::try_again("address-sanitizer", &error, again)
    })
}

/// A disk that is parked a thousand times in each format: five times as often as with each commit. It
/// prints the pauses.
pub(crate) fn parking() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite-serve", "--test", "parking"]);
    test.args(["--", "--nocapture"]).env("FERRITE_TEST_SCALE", "5");
    steps::run(&mut test)
}

/// The process of a store with ten guests, killed twenty times as often as with each commit.
pub(crate) fn killed_store() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "ferrite", "--test", "store_killed"]);
    steps::run(test.env("FERRITE_TEST_SCALE", "20"))
}

/// The names of the test programs that cargo makes of a folder of tests.
fn test_files(folder: &str) -> Result<Vec<String>> {
    let folder = steps::repository().join(folder);
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs")
            || path.join("main.rs").is_file()
        {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    Ok(names)
}

/// The program that serves links none of the worlds and tools that tests and measurements use, and
/// tasks link nothing of the product.
fn product_links_no_tests() -> Result<()> {
    links_only("ferrite", &PRODUCT)?;
    links_only("xtask", &TOOLS)
}

/// Of this workspace's libraries a package links these, no more and no less.
fn links_only(package: &str, allowed: &[&str]) -> Result<()> {
    let mut tree = cargo();
    tree.args(["tree", "--locked", "--package", package, "--edges", "normal"]);
    let linked = steps::output(tree.args(["--prefix", "none", "--format", "{p}"]))?;
    let linked = linked.lines().filter_map(|line| line.split(' ').next());
    let own: BTreeSet<&str> = linked.filter(|name| name.starts_with("ferrite")).collect();
    if own != allowed.iter().copied().collect() {
        bail!("{package} links {own:?}, and should link {allowed:?} (ARCHITECTURE.md, Floors)");
    }
    Ok(())
}

fn licences() -> Result<()> {
    let tools = steps::target_dir().join("tools");
    let deny = tools.join("bin/cargo-deny");
    if !is_version(&deny) {
        let mut install = cargo();
        install.args(["install", "--debug", "--locked", "cargo-deny", "--version", CARGO_DENY]);
        install.env("CARGO_PROFILE_DEV_DEBUG", "0");
        run("cargo-deny", install.arg("--root").arg(&tools))?;
    }
    if !is_version(&deny) {
        bail!("{} is not version {CARGO_DENY}", deny.display());
    }
    let mut gate = Command::new(deny);
    gate.current_dir(steps::repository());
    run("licences", gate.args(["--locked", "check", "licenses", "bans", "sources"]))
}

fn is_version(deny: &Path) -> bool {
    let version = Command::new(deny).arg("--version").output();
    version.is_ok_and(|v| String::from_utf8_lossy(&v.stdout).contains(CARGO_DENY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_that_serves_links_no_world_of_tests() {
        links_only("ferrite", &PRODUCT).unwrap();
    }

    #[test]
    fn tasks_link_nothing_of_the_product() {
        links_only("xtask", &TOOLS).unwrap();
    }
}
