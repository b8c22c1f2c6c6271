//! The test programs of the workspace: compiled once, run as often as checks need them.
//!
//! They are always built for the whole workspace. With `--package` the dependencies would have other features, and
//! everything would be compiled again for each such choice.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{times, unsteady};
use ferrite_xenhost::steps::{self, cargo, fresh_log, run_logged};

/// A program that cargo has built.
pub(crate) struct Program {
    /// The folder of its package below crates/.
    package: String,
    /// The name of its test file, library or binary.
    name: String,
    is_test: bool,
    file: PathBuf,
    folder: PathBuf,
}

/// The test programs of the workspace, and the programs that they use.
pub(crate) struct Programs(Vec<Program>);

/// The fields of cargo's messages that are used here.
#[derive(Deserialize)]
struct Message {
    manifest_path: Option<PathBuf>,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// The packages and names of the programs that run longest: each more than ten seconds.
const LONGEST: [(&str, &str); 14] = [
    ("daemon", "by_process"),
    ("ferrite", "changes"),
    ("ferrite", "migrate"),
    ("disk", "behaviour"),
    ("serve", "blkif"),
    ("ferrite", "clients"),
    ("ferrite", "image"),
    ("store", "ferrite_store"),
    ("ferrite", "store"),
    ("image-tools", "behaviour"),
    ("ferrite", "storage_manager"),
    ("serve", "data"),
    ("serve", "limits"),
    ("lab", "lab"),
];

impl Programs {
    /// Builds the test programs that `targets` (`--lib`, `--test name`) select, or all if that is empty.
    pub(crate) fn build(targets: &[&str]) -> Result<Programs> {
        let mut build = cargo();
        build.args(["test", "--locked", "--workspace", "--no-run", "--message-format=json"]);
        Programs::built_by(build.args(targets))
    }

    /// Builds only `ferrite` and its helper for Ceph, as tests run them, for the Xen host.
    pub(crate) fn build_ferrite() -> Result<PathBuf> {
        let mut build = cargo();
        build.args(["build", "--locked", "--package", "ferrite", "--package", "ferrite-rbd"]);
        build.arg("--message-format=json");
        Programs::built_by(&mut build)?.binary("ferrite", "ferrite")
    }

    /// The programs that this command of cargo builds. It prints its messages as JSON.
    pub(crate) fn built_by(build: &mut Command) -> Result<Programs> {
        parse(&steps::output(build)?)
    }

    /// The path of the test program of a package's test file, or of its library under the library's name.
    pub(crate) fn test_file(&self, package: &str, name: &str) -> Result<PathBuf> {
        Ok(self.find(package, name, true)?.file.clone())
    }

    /// The path of one of the workspace's own programs, as tests run it.
    pub(crate) fn binary(&self, package: &str, name: &str) -> Result<PathBuf> {
        Ok(self.find(package, name, false)?.file.clone())
    }

    fn find(&self, package: &str, name: &str, is_test: bool) -> Result<&Program> {
        let fits = |program: &&Program| {
            program.package == package && program.name == name && program.is_test == is_test
        };
        self.0.iter().find(fits).with_context(|| format!("cargo built no {name} in {package}"))
    }

    /// All test programs of the workspace, for one run each: the longest first, so that no long one is last.
    pub(crate) fn every<'a>(&'a self, check: &'a str, told: Told<'a>) -> Vec<Run<'a>> {
        let mut tests: Vec<_> = self.0.iter().filter(|program| program.is_test).collect();
        tests.sort_by_key(|program| {
            let of_this = |(package, name): &(&str, &str)| {
                *package == program.package && *name == program.name
            };
            LONGEST.iter().position(of_this).unwrap_or(LONGEST.len())
        });
        tests.into_iter().map(|program| Run { check, program, told }).collect()
    }

    /// All test programs of these packages, for one run each.
    pub(crate) fn of_packages<'a>(
        &'a self,
        check: &'a str,
        packages: &[&str],
        told: Told<'a>,
    ) -> Vec<Run<'a>> {
        let mut runs = self.every(check, told);
        runs.retain(|run| packages.contains(&run.program.package.as_str()));
        runs
    }

    /// Some test files of one package, for one run each.
    pub(crate) fn some<'a>(
        &'a self,
        check: &'a str,
        package: &str,
        names: &[&str],
        told: Told<'a>,
    ) -> Result<Vec<Run<'a>>> {
        let run = |name: &&str| {
            let program = self.find(package, name, true)?;
            Ok(Run { check, program, told })
        };
        names.iter().map(run).collect()
    }
}

/// Sets the environment of a test program.
pub(crate) type Told<'a> = &'a (dyn Fn(&mut Command) + Sync);

/// One run of a test program.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    check: &'a str,
    program: &'a Program,
    told: Told<'a>,
}

impl Run<'_> {
    fn name(&self) -> String {
        format!("{}-{}-{}", self.check, self.program.package, self.program.name)
    }

    /// Runs the program with its output in the log of this name.
    fn run(&self, log: &str) -> Result<()> {
        let mut command = self.program.command();
        (self.told)(&mut command);
        run_logged(&mut command, &fresh_log(log)?)
    }
}

impl Program {
    /// The program in its package's folder, where cargo runs tests.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.folder);
        command
    }
}

/// Runs test programs in this order, `at_once` at a time. A program that fails is run once more, alone.
///
/// # Errors
/// All programs that failed twice.
pub(crate) fn run_each(runs: Vec<Run<'_>>, at_once: usize) -> Result<()> {
    let queue = Mutex::new(VecDeque::from(runs));
    let failed = Mutex::new(Vec::new());
    let work = || {
        while let Some(run) = queue.lock().ok().and_then(|mut queue| queue.pop_front()) {
            let began = Instant::now();
            let result = run.run(&run.name());
            times::add(&run.name(), began.elapsed());
            if let Err(error) = result
                && let Ok(mut failed) = failed.lock()
            {
                failed.push((run, error));
            }
        }
    };
    std::thread::scope(|scope| {
        (0..at_once.max(1)).for_each(|_| {
            scope.spawn(work);
        });
    });
    let again = |(run, error): &(Run<'_>, anyhow::Error)| {
        let name = run.name();
        let again = unsteady::try_again(&name, error, || run.run(&format!("{name}-again")));
        again.err().map(|e| steps::chain(&e))
    };
    let failures = failed.into_inner().unwrap_or_default();
    let failures: Vec<String> = failures.iter().filter_map(again).collect();
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

fn parse(messages: &str) -> Result<Programs> {
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.contains("\"executable\":\"")) {
        let message: Message = serde_json::from_str(line).context("an odd message of cargo")?;
        let (Some(file), Some(manifest), Some(target), Some(profile)) =
            (message.executable, message.manifest_path, message.target, message.profile)
        else {
            continue;
        };
        let folder = manifest.parent().context("a manifest has a folder")?.to_path_buf();
        let package = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (name, is_test) = (target.name, profile.test);
        programs.push(Program { package, name, is_test, file, folder });
    }
    Ok(Programs(programs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_program_is_told_from_the_program_that_it_tests() {
        let message = |test: bool, file: &str| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"/r/crates/disk/Cargo.toml\",\
                 \"target\":{{\"name\":\"a\"}},\"profile\":{{\"test\":{test}}},\
                 \"executable\":\"{file}\"}}\n"
            )
        };
        let text =
            message(false, "/t/a") + &message(true, "/t/deps/a-1") + "{\"executable\":null}\n";
        let programs = parse(&text).unwrap();
        assert_eq!(programs.binary("disk", "a").unwrap(), PathBuf::from("/t/a"));
        assert_eq!(programs.test_file("disk", "a").unwrap(), PathBuf::from("/t/deps/a-1"));
        assert!(programs.test_file("serve", "a").is_err());
    }

    #[test]
    fn a_program_that_fails_is_run_once_more_and_no_oftener() {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path().join("runs");
        let fails = |times: usize| {
            let script = format!("echo >> {0}; [ $(wc -l < {0}) -gt {times} ]", runs.display());
            let _ = std::fs::remove_file(&runs);
            let (package, name) = ("programs".to_owned(), format!("fails-{times}-times"));
            let (file, folder) = (PathBuf::from("/bin/sh"), dir.path().to_path_buf());
            let program = Program { package, name, is_test: true, file, folder };
            let told = |command: &mut Command| {
                command.args(["-c", &script]);
            };
            let result = run_each(vec![Run { check: "xtask", program: &program, told: &told }], 2);
            (result, std::fs::read(&runs).unwrap().len())
        };
        assert!(matches!(fails(0), (Ok(()), 1)));
        assert!(matches!(fails(1), (Ok(()), 2)));
        let (twice, runs) = fails(2);
        assert_eq!(runs, 2);
        assert!(twice.unwrap_err().to_string().contains("twice"));
    }
}
