//! `ferrite-lab`: the experiments by name, and the page that joins their results.

mod cli;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use cli::{Cli, Command, ReportArgs, RunArgs};
use ferrite::exit::{Code, Failure};
use ferrite::{generate, signals};

use crate::compare::machine;
use crate::experiments::findings::Outcome;
use crate::experiments::lab::{Interrupted, Lab, Settings};
use crate::experiments::{self, Experiment};
use crate::page;

/// Of a quick look.
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
        let Experiment { name, shows, source, .. } = experiment;
        format!("{name}\n  {shows}\n  From: {source}\n")
    };
    print(&experiments::ALL.iter().map(line).collect::<String>())
}

fn run(args: &RunArgs) -> Result<(), Failure> {
    let chosen = chosen(args)?;
    let stop = signals::flag()?;
    let lab = lab(args, stop).map_err(|e| failed("cannot measure", &e))?;
    for experiment in chosen {
        let began = Instant::now();
        let path = measure(&lab, experiment, args)
            .map_err(|e| failed(&format!("cannot run {}", experiment.name), &e))?;
        let (name, seconds) = (experiment.name, began.elapsed().as_secs());
        print(&format!("{name}: {seconds} s, {path}\n"))?;
    }
    Ok(())
}

/// # Errors
/// There is none of that name.
fn chosen(args: &RunArgs) -> Result<Vec<&'static Experiment>, Failure> {
    if args.all {
        return Ok(experiments::ALL.iter().collect());
    }
    let find = |name: &String| {
        experiments::find(name).ok_or_else(|| Failure {
            code: Code::USAGE,
            what: format!("cannot run {name:?}"),
            why: "there is no experiment of that name".into(),
            help: "ferrite-lab list names them all".into(),
        })
    };
    args.names.iter().map(find).collect()
}

fn lab(args: &RunArgs, stop: Arc<AtomicBool>) -> Result<Lab> {
    let results = &args.results;
    let cannot = |folder: &Path| format!("cannot make the folder {}", folder.display());
    fs::create_dir_all(results).with_context(|| cannot(results))?;
    let disk = args.disk.as_ref().unwrap_or(results);
    fs::create_dir_all(disk).with_context(|| cannot(disk))?;
    // Programs that are started elsewhere find the images, too.
    let disk = disk.canonicalize().with_context(|| cannot(disk))?;
    let (rounds, seconds) = match args.quick {
        true => (1, QUICK_SECONDS),
        false => (args.rounds, args.seconds),
    };
    Lab::new(Settings { rounds, seconds, quick: args.quick, disk }, stop)
}

fn measure(lab: &Lab, experiment: &Experiment, args: &RunArgs) -> Result<String> {
    lab.check()?;
    let machine = machine::describe();
    let findings = (experiment.run)(lab)?;
    let outcome = Outcome::new(experiment, findings, machine, args.quick);
    Ok(outcome.write(&args.results)?.display().to_string())
}

fn report(args: &ReportArgs) -> Result<(), Failure> {
    let outcomes = read(&args.results).map_err(|e| failed("cannot make the report", &e))?;
    if outcomes.is_empty() {
        return Err(Failure {
            code: Code::NOT_FOUND,
            what: "cannot make the report".into(),
            why: format!("there is no result in {}", args.results.display()),
            help: "run an experiment first: ferrite-lab run --all".into(),
        });
    }
    let path = args.output.clone().unwrap_or_else(|| args.results.join("report.html"));
    fs::write(&path, page::html(&outcomes)).map_err(|e| {
        let what = format!("cannot write {}", path.display());
        Failure::new(what, e, "say where else with -o")
    })?;
    print(&format!("{}\n", path.display()))
}

/// The results of experiments in a folder, in the order of the list.
fn read(folder: &Path) -> Result<Vec<Outcome>> {
    let mut found = BTreeMap::new();
    for (place, experiment) in experiments::ALL.iter().enumerate() {
        let path = folder.join(format!("{}.json", experiment.name));
        if path.exists() {
            found.insert(place, Outcome::read(&path)?);
        }
    }
    Ok(found.into_values().collect())
}

fn failed(what: &str, error: &anyhow::Error) -> Failure {
    if error.is::<Interrupted>() {
        return Failure {
            code: Code::INTERRUPTED,
            what: what.into(),
            why: "interrupted".into(),
            help: "what was finished before is in the folder of results".into(),
        };
    }
    let help = "docs/lab.md says what an experiment needs; ferrite-bench -v shows more of one run";
    Failure::new(what, format!("{error:#}"), help)
}

fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print", e, "check where standard output goes"))
        }
        _ => Ok(()),
    }
}
