//! `upgrade`: the processes of an older commit are upgraded to this one while guests use their disks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::programs::{Programs, run_each};
use ferrite_xenhost::steps::{self, cargo, step};

/// The commit whose processes are upgraded: the last one whose messages named no version, but for the
/// line and commands on a store.
const OLD: &str = "348c3451a331b21048e1e7344aa79ca43e1fdf56";
/// The test file of the older commit whose program is daemon, keeper, worker and relay of loopback
/// guests. `ferrite` itself can reach guests of Xen only.
const OLD_DAEMON: &str = "upgrades";
/// The test files of this commit that start the old programs, and their packages.
const TESTS: [(&str, &str); 2] = [("daemon", "old_release"), ("ferrite", "old_release")];

/// Builds the old programs below `target/upgrade`, and runs the tests that start them.
///
/// # Errors
/// The repository lacks the old commit, it cannot be built, or a test fails.
pub(crate) fn test() -> Result<()> {
    let folder = steps::target_dir().join("upgrade").join(&OLD[..8]);
    let source = source(&folder)?;
    let old = step(&format!("the programs of {OLD}"), || build_old(&source, &folder))?;
    let new = Programs::build(&["--test", TESTS[0].1])?;
    let old_daemon = old[0].test_file("daemon", OLD_DAEMON)?;
    let (old_ferrite, ferrite) =
        (old[1].binary("ferrite", "ferrite")?, new.binary("ferrite", "ferrite")?);
    let told = |test: &mut Command| {
        test.arg("--ignored").env("FERRITE_TEST_OLD_DAEMON", &old_daemon);
        test.env("FERRITE_TEST_OLD_FERRITE", &old_ferrite).env("FERRITE_TEST_FERRITE", &ferrite);
    };
    let mut runs = Vec::new();
    for (package, name) in TESTS {
        has_tests(&new.test_file(package, name)?)?;
        runs.extend(new.some("upgrade", package, &[name], &told)?);
    }
    run_each(runs, 1)
}

/// The old commit's files. They are unpacked once.
fn source(folder: &Path) -> Result<PathBuf> {
    let source = folder.join("source");
    if source.is_dir() {
        return Ok(source);
    }
    let mut known = git();
    if steps::output(known.args(["cat-file", "-e", &format!("{OLD}^{{commit}}")])).is_err() {
        bail!(
            "this repository has no commit {OLD}, whose processes are to be upgraded: fetch its history \
             (git fetch --unshallow)"
        );
    }
    // Only what was unpacked to the end gets the name.
    let new = folder.join("source.new");
    let _ = fs::remove_dir_all(&new);
    fs::create_dir_all(&new)?;
    let mut archive = git();
    let archive = archive.args(["archive", "--format=tar", OLD]).stdin(Stdio::null());
    let mut archive = archive.stdout(Stdio::piped()).spawn().context("cannot start git")?;
    let tar = archive.stdout.take().context("git has no output")?;
    let unpacked = Command::new("tar").arg("-xC").arg(&new).stdin(tar).status()?;
    if !archive.wait()?.success() || !unpacked.success() {
        bail!("cannot unpack commit {OLD} in {}", new.display());
    }
    fs::rename(&new, &source)?;
    Ok(source)
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(steps::repository());
    git
}

/// The old test program, and the old `ferrite`.
fn build_old(source: &Path, folder: &Path) -> Result<[Programs; 2]> {
    let build = |arguments: &[&str]| {
        let mut build = cargo();
        build.current_dir(source).env("CARGO_TARGET_DIR", folder.join("target"));
        Programs::built_by(build.args(arguments).args(["--locked", "--message-format=json"]))
    };
    let daemon = ["test", "--no-run", "--package", "ferrite-daemon", "--test", OLD_DAEMON];
    Ok([build(&daemon)?, build(&["build", "--package", "ferrite", "--bin", "ferrite"])?])
}

/// A program without such tests would succeed.
fn has_tests(program: &Path) -> Result<()> {
    let listed = steps::output(Command::new(program).args(["--ignored", "--list"]))?;
    if !listed.contains(": test") {
        bail!("{} has no test of an upgrade", program.display());
    }
    Ok(())
}
