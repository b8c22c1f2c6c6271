//! `ferrite-lab`: the experiments by name, and the page that joins their results.

mod cli;

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use cli::{Cli, Command, Measuring, ReportArgs, RunArgs};
use ferrite::exit::{Code, Failure};
use ferrite::{generate, signals};

use crate::compare::machine;
use crate::compare::table::figure;
use crate::experiments::findings::{Outcome, Row};
use crate::experiments::lab::{Interrupted, Lab, Settings};
use crate::experiments::{self, Experiment, How};
use crate::page::{self, claims};
use crate::whole;

/// Seconds of a quick run.
const QUICK_SECONDS: f64 = 0.1;

/// The program.
pub(crate) fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // With standard error closed, the code is all that can be given.
            let _ = e.print();
            return if e.exit_code() == 0 { ExitCode::SUCCESS } else { Code::USAGE.into() };
        }
    };
    let done = match &cli.command {
        Command::List => list(),
        Command::Run(args) => run(args),
        Command::Peers(args) => peers(args),
        Command::Report(args) => report(args),
        Command::Generate(args) => generate::run::<Cli>(&args.directory),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn list() -> Result<(), Failure> {
    let line = |experiment: &Experiment| {
        let Experiment { name, shows, source, how, .. } = experiment;
        let how = match how {
            How::Here(_) => String::new(),
            How::OnXen { part } => format!("  On Xen: cargo xtask bench {part}\n"),
        };
        format!("{name}\n  {shows}\n  From: {source}\n{how}")
    };
    print(&experiments::all().map(line).collect::<String>())
}

/// Runs the experiments in turn. After a failure the others still run.
fn run(args: &RunArgs) -> Result<(), Failure> {
    let chosen = chosen(args)?;
    let lab = lab(&args.measuring)?;
    let mut failures: Vec<Failure> = Vec::new();
    for (i, experiment) in chosen.iter().enumerate() {
        let began = Instant::now();
        let name = experiment.name;
        match measure(&lab, experiment, &args.measuring) {
            Ok((path, _)) => {
                let (done, all, seconds) = (i + 1, chosen.len(), began.elapsed().as_secs());
                print(&format!("{name}: {seconds} s, {} ({done} of {all})\n", path.display()))?;
            }
            Err(e) => {
                let failure = failed(&format!("cannot run {name}"), &e);
                if e.is::<Interrupted>() || chosen.len() == 1 {
                    return Err(failure);
                }
                failure.report();
                failures.push(failure);
            }
        }
    }
    match failures.as_slice() {
        [] => Ok(()),
        some => Err(Failure::new(
            format!("{} of {} experiments failed", some.len(), chosen.len()),
            some.iter().map(|failure| failure.what.as_str()).collect::<Vec<_>>().join(", "),
            "the reasons are above; run these again by name",
        )),
    }
}

fn peers(args: &Measuring) -> Result<(), Failure> {
    let lab = lab(args)?;
    let what = |e| failed("cannot compare with peers", &e);
    let experiment =
        experiments::find("peers").context("there is no such experiment").map_err(what)?;
    let (path, outcome) = measure(&lab, experiment, args).map_err(what)?;
    print(&format!("{}\n{}\n", table(&outcome), path.display()))
}

/// The figures of an experiment, a line each.
fn table(outcome: &Outcome) -> String {
    let width = outcome.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let line = |row: &Row| {
        let (mean, ci95) = (figure(row.mean), figure(row.ci95));
        format!("{:width$}  {mean:>8} {:5} ± {ci95}\n", row.name, row.unit)
    };
    let missing = outcome.missing.iter().map(|text| format!("not measured: {text}\n"));
    outcome.rows.iter().map(line).chain(missing).collect()
}

/// The selected experiments.
///
/// # Errors
/// None has that name, or it needs Xen.
fn chosen(args: &RunArgs) -> Result<Vec<&'static Experiment>, Failure> {
    if args.all {
        return Ok(experiments::HERE.iter().collect());
    }
    let refuse = |name: &String, why: &str, help: String| {
        let what = format!("cannot run {name:?}");
        Err(Failure::new(what, why, help).with_code(Code::USAGE))
    };
    let find = |name: &String| match experiments::find(name) {
        Some(Experiment { how: How::OnXen { part }, .. }) => refuse(
            name,
            "it needs a Xen host",
            format!("from the source: cargo xtask bench {part}"),
        ),
        Some(experiment) => Ok(experiment),
        None => {
            let help = "ferrite-lab list names them all".to_owned();
            refuse(name, "there is no experiment of that name", help)
        }
    };
    args.names.iter().map(find).collect()
}

fn lab(args: &Measuring) -> Result<Lab, Failure> {
    let stop = signals::flag()?;
    let results = folder(&args.results, "--results")?;
    // Checked now, since a failure after an hour would lose the hour. Not every experiment needs the other folder.
    tempfile::tempfile_in(&results).map_err(|e| unusable(&results, "--results", &e))?;
    let disk = args.disk.as_ref().map(|disk| folder(disk, "--disk")).transpose()?;
    // An absolute path, so that programs started in other folders find the images.
    let disk = disk.unwrap_or(results);
    prepare(args, disk, stop).map_err(|e| failed("cannot measure", &e))
}

/// Makes a folder, if it does not exist.
fn folder(path: &Path, option: &str) -> Result<PathBuf, Failure> {
    let made = fs::create_dir_all(path).and_then(|()| path.canonicalize());
    made.map_err(|e| unusable(path, option, &e))
}

fn unusable(folder: &Path, option: &str, why: &std::io::Error) -> Failure {
    let what = format!("cannot measure: cannot write into the folder {}", folder.display());
    Failure::new(what, why, format!("name another one with {option}"))
}

fn prepare(args: &Measuring, disk: PathBuf, stop: Arc<AtomicBool>) -> Result<Lab> {
    let (rounds, seconds) = match args.quick {
        true => (1, QUICK_SECONDS),
        false => (args.rounds, args.seconds),
    };
    Lab::new(Settings { rounds, seconds, quick: args.quick, disk }, stop)
}

fn measure(lab: &Lab, experiment: &Experiment, args: &Measuring) -> Result<(PathBuf, Outcome)> {
    lab.check()?;
    let How::Here(run) = experiment.how else { bail!("{} needs a Xen host", experiment.name) };
    let machine = machine::describe();
    let findings = run(lab)?;
    let outcome = Outcome::new(experiment, findings, machine, args.quick);
    Ok((outcome.write(&args.results)?, outcome))
}

fn report(args: &ReportArgs) -> Result<(), Failure> {
    let outcomes = read(&args.results).map_err(|e| failed("cannot make the report", &e))?;
    if outcomes.is_empty() {
        return Err(Failure {
            code: Code::NOT_FOUND,
            what: "cannot make the report".into(),
            why: format!("there is no result in {}", args.results.display()),
            help: "run an experiment first: ferrite-lab run --all".into(),
            errno: None,
        });
    }
    let path = args.output.clone().unwrap_or_else(|| args.results.join("report.html"));
    write(&path, &page::html(&outcomes))?;
    if let Some(folder) = &args.pictures {
        for (name, picture) in page::pictures(&outcomes) {
            write(&folder.join(name), &picture)?;
        }
    }
    if let Some(document) = &args.table {
        let what = |e| failed(&format!("cannot put the figures into {}", document.display()), &e);
        let old = fs::read_to_string(document).map_err(|e| what(e.into()))?;
        write(document, &claims::replaced(&old, &outcomes).map_err(what)?)?;
    }
    Ok(())
}

/// Writes a file, and reports that.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    whole::write(path, text).map_err(|e| {
        let what = format!("cannot write {}", path.display());
        Failure::new(what, e, "name another place, or make its folder")
    })?;
    print(&format!("{}\n", path.display()))
}

/// All results in a folder: those of the list in its order, then those from Xen by name.
///
/// # Errors
/// A file cannot be read, or is invalid.
fn read(folder: &Path) -> Result<Vec<Outcome>> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_result = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "json");
    let outcomes = paths.iter().filter(is_result).map(|path| Outcome::read(path));
    let mut outcomes = outcomes.collect::<Result<Vec<_>>>()?;
    let place = |outcome: &Outcome| {
        let listed = experiments::all().position(|one| one.name == outcome.experiment);
        (listed.unwrap_or(usize::MAX), outcome.experiment.clone())
    };
    outcomes.sort_by_key(place);
    Ok(outcomes)
}

fn failed(what: &str, error: &anyhow::Error) -> Failure {
    if error.is::<Interrupted>() {
        return Failure {
            code: Code::INTERRUPTED,
            what: what.into(),
            why: "interrupted".into(),
            help: "what was finished before is in the folder of results".into(),
            errno: None,
        };
    }
    let help = "docs/lab.md says what an experiment needs; ferrite-bench -v shows more of one run";
    Failure::new(what, format!("{error:#}"), help)
}

fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print", e, "check where standard output goes"))
        }
        _ => Ok(()),
    }
}
