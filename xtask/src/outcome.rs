//! The results of checks: a line for each with its time, and a time limit for all of them.

use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::unsteady;
use ferrite_xenhost::steps::{self, say, step};

/// The result of a check.
#[derive(Clone)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) seconds: f64,
    pub(crate) failure: Option<String>,
}

/// The checks of this run, running or ended, for the table of an interrupted run.
static CHECKS: Mutex<Vec<Check>> = Mutex::new(Vec::new());

struct Check {
    name: String,
    began: Instant,
    /// `None` while the check runs.
    outcome: Option<Outcome>,
}

fn checks() -> std::sync::MutexGuard<'static, Vec<Check>> {
    CHECKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one check between two progress lines, and records its time.
pub(crate) fn check(name: &str, work: impl FnOnce() -> Result<()>) -> Outcome {
    let began = Instant::now();
    let place = {
        let mut checks = checks();
        checks.push(Check { name: name.to_owned(), began, outcome: None });
        checks.len() - 1
    };
    let result = step(name, work);
    if let Err(error) = &result {
        say(steps::chain(error));
    }
    let outcome = Outcome {
        name: name.to_owned(),
        seconds: began.elapsed().as_secs_f64(),
        failure: result.err().as_ref().map(steps::chain),
    };
    checks()[place].outcome = Some(outcome.clone());
    outcome
}

/// Records a check that was timed elsewhere, such as a test on the Xen host.
pub(crate) fn record(outcome: &Outcome) {
    let (name, began) = (outcome.name.clone(), Instant::now());
    checks().push(Check { name, began, outcome: Some(outcome.clone()) });
}

/// Ends the process with exit code 1 and the table of times when `minutes` have passed since its start.
pub(crate) fn limit(minutes: u64) {
    let limit = Duration::from_secs(minutes * 60);
    let left = limit.saturating_sub(Duration::from_secs_f64(steps::elapsed_s()));
    // The thread ends with the process.
    std::thread::spawn(move || {
        std::thread::sleep(left);
        let table = checks();
        let ended: Vec<Outcome> = table.iter().filter_map(|check| check.outcome.clone()).collect();
        print_table(&ended);
        for check in table.iter().filter(|check| check.outcome.is_none()) {
            println!("runs   {:7.1} s  {}", check.began.elapsed().as_secs_f64(), check.name);
        }
        println!("\nFAILED: the checks took longer than {minutes} minutes");
        std::process::exit(1);
    });
}

/// One line for each check, then the reasons of failures, then the line with the number of both.
///
/// A log is read from its end, so the reasons are repeated there.
pub(crate) fn summary(outcomes: &[Outcome]) -> ExitCode {
    print_table(outcomes);
    for outcome in outcomes {
        if let Some(failure) = &outcome.failure {
            println!("\n---- {} ----\n{}", outcome.name, steps::shorten(failure));
        }
    }
    let unsteady = unsteady::found();
    for test in &unsteady {
        println!("\n---- unsteady: {} ----\n{}", test.name, steps::shorten(&test.failure));
    }
    let failed = outcomes.iter().filter(|outcome| outcome.failure.is_some()).count();
    println!("\ntotal {:.0} s", steps::elapsed_s());
    let (passed, unsteady) = (outcomes.len() - failed, unsteady.len());
    println!("{passed} passed, {failed} failed; {unsteady} tests were unsteady");
    if unsteady > unsteady::MAX {
        println!("more than {} unsteady tests are a failure", unsteady::MAX);
    }
    let good = failed == 0 && unsteady <= unsteady::MAX;
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_table(outcomes: &[Outcome]) {
    println!();
    for outcome in outcomes {
        let word = if outcome.failure.is_none() { "ok    " } else { "FAILED" };
        println!("{word} {:7.1} s  {}", outcome.seconds, outcome.name);
    }
}
