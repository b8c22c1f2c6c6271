//! The fuzz targets (`fuzz/`), each for a share of the nightly run.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result};

use crate::needs;
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, cargo, fresh_log, run_logged, say, step};

/// The builder of the targets. Built once into target/tools.
const CARGO_FUZZ: &str = "0.13.2";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The limits of an input (issue: a clear error within a second and 64 MiB; the sanitizer takes some of the rest).
const LIMITS: [&str; 4] =
    ["-timeout=2", "-rss_limit_mb=256", "-malloc_limit_mb=64", "-max_len=131072"];

/// Runs all targets, so many seconds in total on every processor. New inputs are kept in `target/fuzz/TARGET/corpus`,
/// failing ones in `.../found`.
pub(crate) fn nightly(seconds: u64) -> Result<bool> {
    packages::ensure(&[needs::FUZZ])?;
    let build = build()?;
    let mut targets = targets()?;
    let share = seconds * steps::cpus() as u64 / targets.len() as u64;
    targets.reverse();
    let queue = Mutex::new(targets);
    let next = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
    let found = std::thread::scope(|scope| {
        let worker = || -> Result<bool> {
            let mut found = false;
            while let Some(target) = next() {
                found |= !run(&build, &target, share)?;
            }
            Ok(found)
        };
        let workers: Vec<_> = (0..steps::cpus()).map(|_| scope.spawn(worker)).collect();
        let joined =
            workers.into_iter().map(|w| w.join().map_err(|_| anyhow::anyhow!("a panic"))?);
        joined.collect::<Result<Vec<bool>>>()
    })?;
    Ok(!found.contains(&true))
}

fn folder() -> PathBuf {
    steps::repository().join("fuzz")
}

/// The targets' names, which are those of their programs.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder().join("fuzz_targets"))? {
        let path = entry?.path();
        names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}

/// Builds all targets; returns their folder. Coverage and the sanitizer are part of the stable toolchain, but need
/// unstable flags of the compiler.
fn build() -> Result<PathBuf> {
    let tools = steps::target_dir().join("tools");
    let program = tools.join("bin/cargo-fuzz");
    let is_there = || {
        let version = Command::new(&program).args(["fuzz", "--version"]).output();
        version.is_ok_and(|v| String::from_utf8_lossy(&v.stdout).contains(CARGO_FUZZ))
    };
    if !is_there() {
        step("build cargo-fuzz", || {
            let mut install = cargo();
            install.args(["install", "--locked", "cargo-fuzz", "--version", CARGO_FUZZ, "--root"]);
            run_logged(install.arg(&tools), &fresh_log("cargo-fuzz")?)
        })?;
    }
    let out = steps::target_dir().join("fuzz-build");
    step("build the fuzz targets", || {
        let mut command = Command::new(&program);
        command
            .current_dir(folder())
            .args(["fuzz", "build", "--release", "--target-dir"])
            .arg(&out);
        run_logged(command.env("RUSTC_BOOTSTRAP", "1"), &fresh_log("fuzz-build")?)
    })?;
    Ok(out.join(TRIPLE).join("release"))
}

/// Runs one target; `false` after a failure.
fn run(build: &std::path::Path, target: &str, seconds: u64) -> Result<bool> {
    let kept = steps::target_dir().join("fuzz").join(target);
    for dir in ["corpus", "found"] {
        std::fs::create_dir_all(kept.join(dir))?;
    }
    let log = fresh_log(&format!("fuzz-{target}"))?;
    let mut command = Command::new(build.join(target));
    command.arg(kept.join("corpus")).arg(folder().join("corpus").join(target)).args(LIMITS);
    command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
    command.arg(format!("-artifact_prefix={}/", kept.join("found").display()));
    // Memory that is kept for inspection would count.
    command.env("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=1");
    say(format!("fuzz {target} for {seconds} s ..."));
    let result = run_logged(&mut command, &log);
    let text = std::fs::read_to_string(&log).context("the log of a fuzz target")?;
    let last = |mark: &str| {
        text.lines().rfind(|line| line.contains(mark)).unwrap_or_default().trim().to_owned()
    };
    say(format!("fuzz {target}: {}; {}", last(" cov: "), last("stat::number_of_executed_units")));
    if let Err(error) = &result {
        say(format!("fuzz {target} found something: {}", steps::chain(error)));
        say(format!("the input is in {}", kept.join("found").display()));
    }
    Ok(result.is_ok())
}
