//! The checks of each commit that need no Xen host: format, lints, tests, AddressSanitizer, docs, licences.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::outcome::{Outcome, check};
use crate::programs::{Programs, run_each};
use crate::{mutants, sanitizer, times};
use ferrite_xenhost::root;
use ferrite_xenhost::steps::{self, cargo, fresh_log, run_logged};

/// The licence gate. Built once into the cache, without optimisation: it runs for a second.
const CARGO_DENY: &str = "0.20.2";

/// The crates of this workspace that are linked into the serving program.
const PRODUCT: [&str; 23] = [
    "ferrite",
    "ferrite-daemon",
    "ferrite-disk",
    "ferrite-disk-base",
    "ferrite-etcd",
    "ferrite-helper",
    "ferrite-host",
    "ferrite-image-tools",
    "ferrite-images",
    "ferrite-io",
    "ferrite-keeper",
    "ferrite-member",
    "ferrite-nbd",
    "ferrite-net",
    "ferrite-pool",
    "ferrite-pool-map",
    "ferrite-pool-owner",
    "ferrite-remote",
    "ferrite-seeing",
    "ferrite-serve",
    "ferrite-store",
    "ferrite-tunnel",
    "ferrite-xen",
];
/// The crates that the helper for Ceph links.
const HELPER: [&str; 4] = ["ferrite-helper", "ferrite-host", "ferrite-nbd", "ferrite-rbd"];
/// The crates that tasks link: they compile while the product does not.
const TOOLS: [&str; 1] = ["ferrite-xenhost"];

/// The backend's tests that move data.
pub(crate) const DATA: &[&str] = &["data", "takeover"];

/// Runs all checks, the quickest ones first.
pub(crate) fn run() -> Vec<Outcome> {
    let mut outcomes = vec![
        check("format", || logged("format", cargo().args(["fmt", "--all", "--check"]))),
        check("mutants apply", mutants::check),
        check("clippy", clippy),
    ];
    let mut programs = None;
    outcomes.push(check("build the tests", || {
        programs = Some(Programs::build(&[])?);
        Ok(())
    }));
    let Some(programs) = programs else { return outcomes };
    let mut sanitized = None;
    std::thread::scope(|scope| {
        // Tests leave a part of the processors idle.
        let beside = scope.spawn(|| {
            [
                check("links of the product and of the tasks", product_links_no_tests),
                check("licences, bans, sources", licences),
                check("documentation", documentation),
                check("build the tests for AddressSanitizer", || {
                    sanitized = Some(sanitizer::build(spare_cargo())?);
                    Ok(())
                }),
            ]
        });
        outcomes.push(check("tests", || tests(&programs)));
        outcomes.extend(beside.join().expect("checks that do not panic"));
    });
    if let Some(sanitized) = sanitized {
        outcomes.push(check("tests under AddressSanitizer", || sanitizer::run(&sanitized, 1)));
    }
    outcomes
}

/// Runs a command with its output in a log of the build folder.
pub(crate) fn logged(name: &str, command: &mut Command) -> Result<()> {
    run_logged(command, &fresh_log(name)?)
}

fn clippy() -> Result<()> {
    let mut clippy = cargo();
    clippy.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-Dwarnings"]);
    logged("clippy", &mut clippy)
}

/// `cargo`, with the processors' time that nothing else asks for.
fn spare_cargo() -> Command {
    let cargo = cargo();
    let mut spare = Command::new("chrt");
    spare.args(["--idle", "0"]).arg(cargo.get_program()).current_dir(steps::repository());
    spare
}

fn documentation() -> Result<()> {
    let mut doc = spare_cargo();
    doc.args(["doc", "--locked", "--workspace", "--no-deps"]);
    logged("doc", doc.env("RUSTDOCFLAGS", "-Dwarnings"))
}

/// Every test on io_uring, and those that move data on Linux AIO and by persistent grants. The night has them by mapped
/// grants, too, and all successions on Linux AIO.
fn tests(programs: &Programs) -> Result<()> {
    // The peers were installed: a test that cannot find one fails.
    let uring = |test: &mut Command| {
        test.env("FERRITE_TEST_REQUIRE_PEERS", "1");
    };
    let persistent = |test: &mut Command| {
        test.env("FERRITE_TEST_MOVER", "persistent");
    };
    let mut runs = programs.every("tests", &uring);
    runs.extend(programs.some("mover-persistent", "serve", DATA, &persistent)?);
    runs.extend(programs.some("aio", "serve", &["data"], &on_aio)?);
    let result = run_each(runs, steps::cpus());
    times::show()?;
    result?;
    // Examples of the documentation.
    logged("examples", cargo().args(["test", "--locked", "--workspace", "--doc"]))
}

/// Sets the engine of kernels without io_uring. (The tests of `ferrite-io` run on both anyway.)
pub(crate) fn on_aio(test: &mut Command) {
    // Part of the time is the kernel's grace period at the end of each context, which needs no processor.
    let threads = (2 * steps::cpus()).to_string();
    test.env("RUST_TEST_THREADS", threads).env("FERRITE_TEST_ENGINE", "aio");
}

/// The serving program links none of the crates for tests and measurements, and tasks link nothing of the product.
fn product_links_no_tests() -> Result<()> {
    links_only("ferrite", &PRODUCT)?;
    links_only("ferrite-rbd", &HELPER)?;
    links_only("xtask", &TOOLS)
}

/// Checks that a package links exactly these libraries of this workspace.
fn links_only(package: &str, allowed: &[&str]) -> Result<()> {
    let mut tree = cargo();
    tree.args(["tree", "--locked", "--package", package, "--edges", "normal"]);
    let linked = steps::output(tree.args(["--prefix", "none", "--format", "{p}"]))?;
    let linked = linked.lines().filter_map(|line| line.split(' ').next());
    let own: BTreeSet<&str> = linked.filter(|name| name.starts_with("ferrite")).collect();
    if own != allowed.iter().copied().collect() {
        bail!("{package} links {own:?}, and should link {allowed:?} (ARCHITECTURE.md, Layers)");
    }
    Ok(())
}

fn licences() -> Result<()> {
    let tools = root::cache_dir().join(format!("cargo-deny-{CARGO_DENY}"));
    let deny = tools.join("bin/cargo-deny");
    if !is_version(&deny) {
        let mut install = cargo();
        install.args(["install", "--debug", "--locked", "cargo-deny", "--version", CARGO_DENY]);
        install.env("CARGO_PROFILE_DEV_DEBUG", "0");
        logged("cargo-deny", install.arg("--root").arg(&tools))?;
    }
    if !is_version(&deny) {
        bail!("{} is not version {CARGO_DENY}", deny.display());
    }
    let mut gate = Command::new(deny);
    gate.current_dir(steps::repository());
    logged("licences", gate.args(["--locked", "check", "licenses", "bans", "sources"]))
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
