//! The proof that must fail with a mutant: a test, or stories of the simulator.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process_group, setrlimit};

use super::copy::Copy;
use super::stop::Stop;
use ferrite_xenhost::steps::run_logged;

/// The time limit of a test: some mutants make it hang.
const LIMIT: Duration = Duration::from_secs(300);

/// The memory limit of a test, far above its need.
const MEMORY_BYTES: u64 = 4 << 30;

/// The characters of a failed test's message that are shown.
const SHOWN_CHARS: usize = 160;

/// The number of stories within which the simulator must find the fault.
const MAX_STORIES: u64 = 1000;

/// See the module text.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Proof {
    /// One test.
    Test { package: String, target: Vec<String>, name: String },
    /// The simulator's arguments.
    Stories(Vec<String>),
}

/// The result.
pub(super) enum End {
    /// No failure; whether anything was run.
    Passed {
        ran: bool,
    },
    Failed {
        how: String,
    },
}

impl Proof {
    pub(super) fn test(text: &str) -> Result<Proof> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let [package, target @ .., name] = &words[..] else {
            bail!("a test is PACKAGE TARGET NAME")
        };
        ensure!(!target.is_empty(), "a test is PACKAGE TARGET NAME: {text}");
        Ok(Proof::Test { package: package.clone(), target: target.into(), name: name.clone() })
    }

    pub(super) fn stories(arguments: &str) -> Proof {
        Proof::Stories(arguments.split_whitespace().map(str::to_owned).collect())
    }

    /// Builds it, which must succeed, and runs it.
    pub(super) fn run(&self, copy: &Copy, stop: &Stop) -> Result<End> {
        let (build, run) = (copy.fresh_log("build")?, copy.fresh_log("run")?);
        match self {
            Proof::Test { package, target, name } => {
                let cargo = || {
                    let mut test = copy.cargo();
                    test.args(["test", "--locked"]).args(packages(package, target)).args(target);
                    test
                };
                run_logged(cargo().arg("--no-run"), &build).context("it does not compile")?;
                let mut test = cargo();
                // With all rounds, also tests of the night: a commit's fewer rounds need not notice each mutant.
                test.args(["--", "--include-ignored", "--exact", name])
                    .env("FERRITE_TEST_SCALE", "5");
                let end = limited(&mut test, &run, stop)?;
                let text = fs::read_to_string(&run)?;
                Ok(match end {
                    Some(status) if status.success() => {
                        End::Passed { ran: text.contains("test result: ok. 1 passed") }
                    }
                    Some(_) => End::Failed { how: complaint(&text) },
                    None => End::Failed { how: "the test hangs".into() },
                })
            }
            Proof::Stories(arguments) => {
                let mut sim = copy.cargo();
                sim.args(["build", "--locked", "--workspace", "--bin", "ferrite-sim"]);
                run_logged(&mut sim, &build).context("it does not compile")?;
                let end = limited(Command::new(copy.simulator()).args(arguments), &run, stop)?;
                told(end, &fs::read_to_string(&run)?)
            }
        }
    }
}

/// The packages whose features count. Those of the whole workspace are the same for each mutant, so dependencies are
/// compiled once. A package's own are for its unit tests, as cargo would build the unit tests of all others as well.
fn packages<'a>(package: &'a str, target: &[String]) -> Vec<&'a str> {
    match target.first().map(String::as_str) {
        Some("--test") => vec!["--workspace"],
        _ => vec!["--package", package],
    }
}

/// The simulator's finding, from its output.
fn told(end: Option<ExitStatus>, text: &str) -> Result<End> {
    let line = |mark: &str| text.lines().find(|line| line.contains(mark)).map(str::to_owned);
    let stories = line(" stories in ").unwrap_or_default();
    let stories = stories.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    if let Some(stories) = stories {
        ensure!(stories <= MAX_STORIES, "{stories} stories are more than {MAX_STORIES}");
    }
    match end.map(|status| status.code()) {
        None => Ok(End::Failed { how: "a story hangs".into() }),
        Some(Some(0)) => Ok(End::Passed { ran: stories.is_some_and(|n| n > 0) }),
        Some(Some(2)) => bail!("ferrite-sim does not know these arguments:\n{text}"),
        Some(_) => {
            let what = line("VIOLATION").or_else(|| line("panicked at")).unwrap_or_default();
            let after = stories.map_or(String::new(), |n| format!(" after {n} stories"));
            Ok(End::Failed { how: format!("{what}{after}") })
        }
    }
}

/// The message of a failed test: the line after its panic's place.
fn complaint(text: &str) -> String {
    let mut lines = text.lines().skip_while(|line| !line.contains("panicked at"));
    match (lines.next(), lines.next()) {
        (Some(_), Some(line)) => line.chars().take(SHOWN_CHARS).collect(),
        _ => "the test fails".into(),
    }
}

/// Runs a command with its output in `log`. `None`: it took too long, and was killed with all processes that it had
/// started.
fn limited(command: &mut Command, log: &Path, stop: &Stop) -> Result<Option<ExitStatus>> {
    let out = File::create(log)?;
    command.env("FERRITE_TEST_REQUIRE_PEERS", "1").process_group(0).stdin(Stdio::null());
    command.stderr(out.try_clone()?).stdout(out);
    let mut child = with_little_memory(|| command.spawn())?.context("cannot start")?;
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if began.elapsed() > LIMIT || stop.is_asked() {
            if let Some(group) = Pid::from_raw(child.id() as i32) {
                kill_process_group(group, Signal::KILL)?;
            }
            child.wait()?;
            ensure!(!stop.is_asked(), "interrupted");
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Limits the memory of programs that are started meanwhile: a mutant might take all of the host's.
fn with_little_memory<T>(start: impl FnOnce() -> T) -> Result<T> {
    let ours = getrlimit(Resource::Data);
    let least = ours.current.map_or(MEMORY_BYTES, |current| current.min(MEMORY_BYTES));
    setrlimit(Resource::Data, Rlimit { current: Some(least), ..ours })?;
    let started = start();
    setrlimit(Resource::Data, ours)?;
    Ok(started)
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Proof::Test { package, target, name } => {
                write!(f, "cargo test -p {package} {} {name}", target.join(" "))
            }
            Proof::Stories(arguments) => write!(f, "ferrite-sim {}", arguments.join(" ")),
        }
    }
}
