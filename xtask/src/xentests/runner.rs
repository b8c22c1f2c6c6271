//! Runs the selected tests on one or more hosts and reports each on a line.

use super::{Applies, Bench, Case, Tests, all};
use crate::outcome::{self, Outcome};
use crate::unsteady;
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::Backend;
use ferrite_xenhost::qemu::Processor;
use ferrite_xenhost::root::Root;
use ferrite_xenhost::steps;
use ferrite_xenhost::{Program, XenHost};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;

/// The selection of tests, and their options.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    /// The set of tests.
    pub(crate) tests: Tests,
    /// Groups or parts of names, separated by commas; `None`: all.
    pub(crate) filter: Option<String>,
    /// The backend of the disks.
    pub(crate) backend: Backend,
    /// Hosts running at the same time; each keeps one processor busy.
    pub(crate) hosts: usize,
    /// Arguments of every `ferrite serve`.
    pub(crate) serve_arguments: String,
    /// Programs for the dom0's PATH.
    pub(crate) programs: Vec<Program>,
}

/// The result of one test.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// The test's name.
    pub(crate) name: &'static str,
    /// Its duration, without the boot.
    pub(crate) seconds: f64,
    /// Why it failed, without the evidence.
    pub(crate) failure: Option<String>,
}

impl From<Report> for Outcome {
    fn from(report: Report) -> Outcome {
        let name = format!("xen {}", report.name);
        Outcome { name, seconds: report.seconds, failure: report.failure }
    }
}

/// A test that is still to be run.
struct Due {
    case: Case,
    /// Its first failure, if this is its second and last run.
    failure: Option<String>,
}

impl Due {
    fn first(case: Case) -> Due {
        Due { case, failure: None }
    }
}

/// Runs the selected tests; the result is in the order in which they ended.
pub(crate) fn run(root: &Root, selection: &Selection) -> Result<Vec<Report>> {
    let cases: VecDeque<Due> = selected(selection)?.into_iter().map(Due::first).collect();
    let hosts = selection.hosts.clamp(1, cases.len().max(1));
    let queue = Mutex::new(cases);
    let reports = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        // Of several hosts, the last begins with the tests that need a rarer processor.
        for last in (1..=hosts).map(|host| host > 1 && host == hosts) {
            let (queue, reports) = (&queue, &reports);
            let first = if last { Processor::Amd } else { Processor::Plain };
            scope.spawn(move || work(root, selection, first, queue, reports));
        }
    });
    let unfinished = queue.into_inner().unwrap_or_default();
    let mut reports = reports.into_inner().unwrap_or_default();
    reports.extend(unfinished.into_iter().map(|due| Report {
        name: due.case.name,
        seconds: 0.0,
        failure: Some(due.failure.unwrap_or_else(|| "not run: no host came up".into())),
    }));
    Ok(reports)
}

fn selected(selection: &Selection) -> Result<Vec<Case>> {
    let fits = |case: &Case| {
        let applies = case.applies == Applies::Any || selection.backend == Backend::Ferrite;
        let named = |filter: &str| filter.split(',').any(|part| case.name.contains(part));
        let due = selection.tests == Tests::All || case.is_of_commits();
        applies && due && selection.filter.as_deref().is_none_or(named)
    };
    let cases: Vec<Case> = all().into_iter().filter(fits).collect();
    if cases.is_empty() {
        let filter = selection.filter.as_deref().unwrap_or_default();
        bail!("no Xen test is called {filter:?}; `cargo xtask test --list` shows their names");
    }
    Ok(cases)
}

/// One host's work: takes tests until there are none. A host that a test has left unusable is replaced by a new one,
/// and so is one whose processor the test cannot use: tests for the same processor come first.
fn work(
    root: &Root,
    selection: &Selection,
    first: Processor,
    queue: &Mutex<VecDeque<Due>>,
    reports: &Mutex<Vec<Report>>,
) {
    let mut host: Option<XenHost> = None;
    let mut failed_boots = 0;
    loop {
        let here = host.as_ref().map_or(first, XenHost::processor);
        let Some(due) = next(queue, here) else { return };
        let processor = due.case.processor;
        let kept = host.take().filter(|host| host.processor() == processor);
        let boot = || XenHost::boot_on(processor, root, &selection.programs);
        let mut xenhost = match kept.map_or_else(boot, Ok) {
            Ok(xenhost) => xenhost,
            Err(error) => {
                put_back(queue, due);
                failed_boots += 1;
                steps::say(format!("no host: {}", steps::chain(&error)));
                if failed_boots == 2 {
                    return;
                }
                continue;
            }
        };
        xenhost.serve_arguments.clone_from(&selection.serve_arguments);
        let (report, usable) = run_case(xenhost, selection.backend, due.case);
        host = usable;
        let report = match (report.failure.clone(), due.failure) {
            (failure @ Some(_), None) => {
                // After all others of this host.
                put_last(queue, Due { case: due.case, failure });
                continue;
            }
            (Some(second), Some(first)) => {
                Report { failure: Some(format!("twice\n{first}\n{second}")), ..report }
            }
            (None, Some(first)) => {
                unsteady::add(&format!("xen {}", report.name), first);
                report
            }
            (None, None) => report,
        };
        outcome::record(&report.clone().into());
        if let Ok(mut reports) = reports.lock() {
            reports.push(report);
        }
    }
}

fn next(queue: &Mutex<VecDeque<Due>>, processor: Processor) -> Option<Due> {
    let mut queue = queue.lock().ok()?;
    let fitting = queue.iter().position(|due| due.case.processor == processor);
    queue.remove(fitting.unwrap_or(0))
}

fn put_back(queue: &Mutex<VecDeque<Due>>, due: Due) {
    if let Ok(mut queue) = queue.lock() {
        queue.push_front(due);
    }
}

fn put_last(queue: &Mutex<VecDeque<Due>>, due: Due) {
    if let Ok(mut queue) = queue.lock() {
        queue.push_back(due);
    }
}

/// Runs one test and cleans up; returns the host if it is still usable.
fn run_case(mut xenhost: XenHost, backend: Backend, case: Case) -> (Report, Option<XenHost>) {
    let began = Instant::now();
    steps::say(format!("xen {} ...", case.name));
    let mut bench = Bench::new(&mut xenhost, backend);
    let result = (case.run)(&mut bench).and_then(|()| bench.check_guests());
    let evidence = if result.is_err() { bench.evidence() } else { String::new() };
    let started_again = bench.started_again;
    let cleaned = bench.clean_up().context("after the test");
    let usable = cleaned.is_ok();
    let failure = result.and(cleaned).err().as_ref().map(steps::chain);
    let seconds = began.elapsed().as_secs_f64();
    let again = match started_again {
        0 => String::new(),
        n => format!(", {n} guests started again as the host had stood still"),
    };
    match &failure {
        None => steps::say(format!("xen {}: ok in {seconds:.1} s{again}", case.name)),
        Some(why) => {
            let all = format!("{evidence}{why}");
            steps::say(format!("xen {}: FAILED after {seconds:.1} s\n{all}", case.name));
            match keep(&xenhost, case, &all) {
                Ok(dir) => steps::say(format!("that and the host's console: {}", dir.display())),
                Err(error) => steps::say(format!("this could not be kept: {error}")),
            }
        }
    }
    (Report { name: case.name, seconds, failure }, usable.then_some(xenhost))
}

/// The files of a failed test in the build folder: its evidence and the host's console.
fn keep(xenhost: &XenHost, case: Case, evidence: &str) -> Result<PathBuf> {
    let dir = steps::target_dir().join("lab-failures");
    std::fs::create_dir_all(&dir)?;
    let name = case.name.replace('/', "-");
    std::fs::write(dir.join(format!("{name}.evidence.log")), evidence)?;
    xenhost.save_console(&dir.join(format!("{name}.console.log")))?;
    Ok(dir)
}
