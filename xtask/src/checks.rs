//! `cargo xtask test`: the checks of each commit, and a summary of them.

use crate::dist::{self, Squeeze};
use crate::outcome::{self, Outcome, summary};
use crate::programs::Programs;
use crate::xentests::{self, Tests, pooled};
use crate::{fast_checks, needs};
use anyhow::{Context, Result};
use ferrite_xenhost::Program;
use ferrite_xenhost::disk::Backend;
use ferrite_xenhost::packages;
use ferrite_xenhost::release;
use ferrite_xenhost::root::{self, Suite};
use ferrite_xenhost::steps::{self, fresh_log, run_logged, say, step};
use std::path::Path;
use std::process::Command;
use std::process::ExitCode;
use std::time::Instant;

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct TestArguments {
    /// Run everything but the tests on a real Xen host.
    #[arg(long, conflicts_with = "xen")]
    fast: bool,
    /// Run only the tests on a real Xen host: all of them, including the nightly ones; with a value, those whose name
    /// contains it or one of its parts between commas.
    #[arg(long, value_name = "FILTER", num_args = 0..=1)]
    xen: Option<Option<String>>,
    /// List the names of the Xen tests.
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
    /// Whether every `ferrite serve` of the Xen tests has own grants. The tests of own grants cannot be run without.
    #[arg(long, value_name = "true|false", action = clap::ArgAction::Set)]
    own_grants: Option<bool>,
    /// The Debian release of the Xen host: trixie or bookworm.
    #[arg(long, default_value = "trixie")]
    suite: String,
    /// Put the release program on the Xen host, as it is shipped, not the one of the other tests.
    #[arg(long)]
    release: bool,
    /// Fail after so many minutes, and print the times of the checks until then.
    #[arg(long, value_name = "MINUTES")]
    limit: Option<u64>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum BackendArgument {
    /// This project.
    Ferrite,
    /// The kernel's backend, to validate the tests themselves.
    Blkback,
}

/// The tests that the programs of the Xen host are built for: one on the host itself, and one of each package whose program
/// is packed. Hundreds of others need not be built for them.
const OF_THE_HOST: [&str; 6] = ["--test", "on_xen", "--test", "processes", "--test", "program"];

/// The package for hosts with the program of the workspace's tests or the release one, and the tests of the hypervisor's
/// and the store's interfaces, which need a dom0 but no guest.
pub(crate) fn programs_of_the_host(as_shipped: bool) -> Result<Vec<Program>> {
    let programs = step("build the programs of the Xen host", || Programs::build(&OF_THE_HOST))?;
    let ferrite = match as_shipped {
        true => release::build_ferrite()?.file,
        false => programs.binary("ferrite", "ferrite")?,
    };
    let package = pack(&ferrite)?;
    let on_xen = Program { name: "on_xen", file: programs.test_file("xen", "on_xen")? };
    Ok([package, on_xen].into_iter().chain(pooled::etcd()).collect())
}

/// Builds the package for hosts, with the program as tests run it.
pub(crate) fn build_package() -> Result<Program> {
    pack(&step("build ferrite", Programs::build_ferrite)?)
}

/// Builds the package for hosts with this program.
fn pack(program: &Path) -> Result<Program> {
    step("pack", || {
        // Each boot copies it twice: without debug information it has a third of the size.
        let stripped = steps::target_dir().join("ferrite-stripped");
        let mut strip = Command::new("strip");
        run_logged(strip.arg("-o").arg(&stripped).arg(program), &fresh_log("strip")?)?;
        let made = dist::pack(&stripped, &steps::target_dir().join("dist-lab"), Squeeze::Little)?;
        Ok(Program { name: "ferrite.deb", file: made.deb })
    })
}

/// Runs the selected checks and prints the summary.
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
    if let Some(minutes) = arguments.limit {
        outcome::limit(minutes);
    }
    packages::ensure(&needed)?;
    let suite = Suite::by_name(&arguments.suite)?;
    let mut outcomes = Vec::new();
    std::thread::scope(|scope| {
        // Downloading and unpacking run concurrently with the compiler.
        let root = with_xen.then(|| scope.spawn(move || root::ensure(suite)));
        if with_rest {
            outcomes.extend(fast_checks::run());
        }
        if let Some(root) = root {
            let root = root.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a panic")));
            outcomes.extend(xen(arguments, root));
        }
    });
    Ok(summary(&outcomes))
}

/// All tests on a real Xen host of one Debian release, with the program as it is shipped.
pub(crate) fn xen_of(release: &str) -> Result<Vec<Outcome>> {
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
        release: true,
        limit: None,
    };
    packages::ensure(&[packages::XEN_HOST, needs::DIST])?;
    let outcomes = xen(&arguments, root::ensure(Suite::by_name(release)?));
    let named =
        |outcome: Outcome| Outcome { name: format!("{release} {}", outcome.name), ..outcome };
    Ok(outcomes.into_iter().map(named).collect())
}

/// The tests on a real Xen host.
fn xen(arguments: &TestArguments, root: Result<root::Root>) -> Vec<Outcome> {
    let began = Instant::now();
    match run_xen(arguments, root) {
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

fn run_xen(arguments: &TestArguments, root: Result<root::Root>) -> Result<Vec<Outcome>> {
    let root = root.context("the Xen tests cannot run")?;
    let (backend, programs) = match arguments.backend {
        BackendArgument::Ferrite => (Backend::Ferrite, programs_of_the_host(arguments.release)?),
        BackendArgument::Blkback => (Backend::Blkback, Vec::new()),
    };
    let selection = xentests::Selection {
        tests: if arguments.xen.is_some() { Tests::All } else { Tests::OfCommits },
        filter: arguments.xen.clone().flatten(),
        backend,
        hosts: arguments.hosts.unwrap_or_else(|| steps::cpus().min(2)),
        serve_arguments: serve_arguments(arguments),
        programs,
    };
    let reports = xentests::run(&root, &selection)?;
    Ok(reports.into_iter().map(Outcome::from).collect())
}

/// The arguments of every `ferrite serve` of the Xen tests.
fn serve_arguments(arguments: &TestArguments) -> String {
    let engine = arguments.engine.as_ref().map(|engine| format!("--engine {engine}"));
    let mover = arguments.mover.as_ref().map(|mover| format!("--mover {mover}"));
    let own_grants = arguments.own_grants.map(|own| format!("--own-grants={own}"));
    [engine, mover, own_grants].into_iter().flatten().collect::<Vec<_>>().join(" ")
}
