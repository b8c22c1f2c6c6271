//! `cargo xtask test`: every check there is, and a summary of them.

use crate::dist::{self, Squeeze};
use crate::programs::Programs;
use crate::xentests::{self, Tests};
use crate::{fast_checks, needs, truth, unsteady};
use anyhow::{Context, Result};
use ferrite_xenhost::Program;
use ferrite_xenhost::disk::Backend;
use ferrite_xenhost::packages;
use ferrite_xenhost::release::build_ferrite;
use ferrite_xenhost::root::{self, Suite};
use ferrite_xenhost::steps::{self, say, step};
use std::process::ExitCode;
use std::time::Instant;

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct TestArguments {
    /// Everything but the tests on a real Xen host.
    #[arg(long, conflicts_with = "xen")]
    fast: bool,
    /// Only the tests on a real Xen host, and all of them, those of the night too; with a value,
    /// those whose name contains it or one of its parts between commas.
    #[arg(long, value_name = "FILTER", num_args = 0..=1)]
    xen: Option<Option<String>>,
    /// Shows the names of the Xen tests.
    #[arg(long)]
    list: bool,
    /// Xen hosts to run at the same time; each keeps one processor busy. Default: up to two.
    #[arg(long, value_name = "N")]
    hosts: Option<usize>,
    /// The backend of the disks of the Xen tests.
    #[arg(long, value_enum, default_value = "ferrite")]
    backend: BackendArgument,
    /// The engine of every `ferrite serve` of the Xen tests: auto, uring or aio.
    #[arg(long, value_name = "ENGINE")]
    engine: Option<String>,
    /// The mover of every `ferrite serve` of the Xen tests: copy, map or persistent.
    #[arg(long, value_name = "MOVER")]
    mover: Option<String>,
    /// Whether every `ferrite serve` of the Xen tests has own grants. The tests of these grants are not among those
    /// that can be run without.
    #[arg(long, value_name = "true|false", action = clap::ArgAction::Set)]
    own_grants: Option<bool>,
    /// Debian release that the Xen host is made of: trixie or bookworm.
    #[arg(long, default_value = "trixie")]
    suite: String,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum BackendArgument {
    /// This project.
    Ferrite,
    /// The kernel's, as the measure of the tests themselves.
    Blkback,
}

/// How a check ended.
pub(crate) struct Outcome {
    name: String,
    seconds: f64,
    failure: Option<String>,
}

/// The tests of the hypervisor's and the store's interfaces, which need a dom0 but no guest.
fn build_host_tests() -> Result<Program> {
    step("build the tests for the dom0", || {
        let file = Programs::build(&["--test", "on_xen"])?.test_file("xen", "on_xen")?;
        Ok(Program { name: "on_xen", file })
    })
}

/// The package that hosts install, with the release binary in it.
pub(crate) fn build_package() -> Result<Program> {
    let program = build_ferrite()?.file;
    step("pack", || {
        let made = dist::pack(&program, &steps::target_dir().join("dist-lab"), Squeeze::Little)?;
        Ok(Program { name: "ferrite.deb", file: made.deb })
    })
}

/// Runs the checks that were asked for and prints the summary.
pub(crate) fn test(arguments: &TestArguments) -> Result<ExitCode> {
    if arguments.list {
        for case in xentests::all() {
            println!("{}", case.name);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let with_xen = !arguments.fast;
    let with_rest = arguments.xen.is_none();
    let mut needed = Vec::new();
    if with_xen {
        needed.extend([packages::XEN_HOST, needs::DIST]);
    }
    if with_rest {
        needed.push(needs::CHECKS);
        if !packages::is_root() {
            needed.push(needs::MOUNTS);
        }
    }
    packages::ensure(&needed)?;
    let suite = Suite::by_name(&arguments.suite)?;
    let mut outcomes = Vec::new();
    std::thread::scope(|scope| {
        // Downloading, unpacking and one long link: they fit beside what waits for disks.
        let prepared = with_xen.then(|| scope.spawn(move || prepare(suite, arguments.backend)));
        if with_rest {
            outcomes.extend(fast_checks::rest());
        }
        if let Some(prepared) = prepared {
            let prepared = prepared.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a panic")));
            if with_rest {
                outcomes.push(check("a store beside a count", || truth::test(&[suite])));
            }
            outcomes.extend(xen(arguments, prepared));
        }
    });
    Ok(summary(&outcomes))
}

/// All tests on a real Xen host of one Debian release. False: one failed.
pub(crate) fn xen_of(release: &str) -> Result<bool> {
    let arguments = TestArguments {
        fast: false,
        xen: Some(None),
        list: false,
        hosts: None,
        backend: BackendArgument::Ferrite,
        engine: None,
        mover: None,
        own_grants: None,
        suite: release.to_owned(),
    };
    Ok(test(&arguments)? == ExitCode::SUCCESS)
}

/// Runs one check between two progress lines.
pub(crate) fn check(name: &str, work: impl FnOnce() -> Result<()>) -> Outcome {
    let began = Instant::now();
    let result = step(name, work);
    if let Err(error) = &result {
        say(steps::chain(error));
    }
    Outcome {
        name: name.to_owned(),
        seconds: began.elapsed().as_secs_f64(),
        failure: result.err().as_ref().map(steps::chain),
    }
}

/// The root and programs that the tests on a real Xen host take, beside the tests for the dom0.
struct Prepared {
    root: root::Root,
    programs: Vec<Program>,
}

fn prepare(suite: Suite, backend: BackendArgument) -> Result<Prepared> {
    let root = root::ensure(suite)?;
    let programs = match backend {
        BackendArgument::Ferrite => vec![build_package()?],
        BackendArgument::Blkback => Vec::new(),
    };
    Ok(Prepared { root, programs })
}

/// The tests on a real Xen host.
fn xen(arguments: &TestArguments, prepared: Result<Prepared>) -> Vec<Outcome> {
    let began = Instant::now();
    match run_xen(arguments, prepared) {
        Ok(outcomes) => outcomes,
        Err(error) => {
            say(steps::chain(&error));
            vec![Outcome {
                name: "xen".into(),
                seconds: began.elapsed().as_secs_f64(),
                failure: Some(steps::chain(&error)),
            }]
        }
    }
}

fn run_xen(arguments: &TestArguments, prepared: Result<Prepared>) -> Result<Vec<Outcome>> {
    let Prepared { root, mut programs } = prepared.context("the Xen tests cannot run")?;
    let backend = match arguments.backend {
        BackendArgument::Ferrite => Backend::Ferrite,
        BackendArgument::Blkback => Backend::Blkback,
    };
    if backend == Backend::Ferrite {
        programs.push(build_host_tests()?);
    }
    let selection = xentests::Selection {
        tests: if arguments.xen.is_some() { Tests::All } else { Tests::OfCommits },
        filter: arguments.xen.clone().flatten(),
        backend,
        hosts: arguments.hosts.unwrap_or_else(|| steps::cpus().min(2)),
        serve_arguments: serve_arguments(arguments),
        programs,
    };
    let reports = xentests::run(&root, &selection)?;
    let outcome = |report: xentests::Report| Outcome {
        name: format!("xen {}", report.name),
        seconds: report.seconds,
        failure: report.failure,
    };
    Ok(reports.into_iter().map(outcome).collect())
}

/// The arguments of every `ferrite serve` of the Xen tests.
fn serve_arguments(arguments: &TestArguments) -> String {
    let engine = arguments.engine.as_ref().map(|engine| format!("--engine {engine}"));
    let mover = arguments.mover.as_ref().map(|mover| format!("--mover {mover}"));
    let own_grants = arguments.own_grants.map(|own| format!("--own-grants={own}"));
    [engine, mover, own_grants].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// One line a check, then the failures' reasons, then the line that counts. Whoever reads a log by its
/// end finds them there: all that was seen of a failure was printed when it happened.
fn summary(outcomes: &[Outcome]) -> ExitCode {
    println!();
    for outcome in outcomes {
        let word = if outcome.failure.is_none() { "ok    " } else { "FAILED" };
        println!("{word} {:7.1} s  {}", outcome.seconds, outcome.name);
    }
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
