//! The project's tasks: `cargo xtask demo`, `cargo xtask test`, `cargo xtask bench`, `cargo xtask xenhost`.
#![forbid(unsafe_code)]

mod checks;
#[cfg(test)]
mod citations;
mod demo;
mod dist;
mod docs;
mod fast_checks;
mod fuzz;
mod libc_free;
mod mutants;
mod needs;
mod night_checks;
mod nightly;
mod outcome;
mod powercuts;
mod programs;
mod sanitizer;
mod times;
mod truth;
mod unsteady;
mod upgrade;
mod xentests;

use anyhow::Result;
use clap::{Parser, Subcommand};
use ferrite_xenhost::{self as xenhost, packages, steps};
use std::ffi::OsString;
use std::process::ExitCode;

/// Builds, demonstrates and tests Ferrite.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Shows a real Xen host serving a disk to a Linux guest through the death of the process that serves it.
    Demo(demo::DemoArguments),
    /// Runs the tests.
    Test(checks::TestArguments),
    /// Takes lines out of the code, one at a time: a test must notice each.
    Mutants(mutants::MutantsArguments),
    /// The checks that take hours: all tests on two releases of Xen, mutants, power cuts, fuzz targets and more.
    Nightly(nightly::NightlyArguments),
    /// Compares Ferrite with other backends and with the bare machine.
    #[command(disable_help_flag = true)]
    Bench {
        /// `cargo xtask bench --help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Makes what is installed on a host: a tar and a Debian package.
    Dist(dist::DistArguments),
    /// The Xen host: a real Xen host in an emulator.
    #[command(subcommand)]
    Xenhost(XenHostTask),
}

#[derive(Subcommand)]
enum XenHostTask {
    /// Builds the Xen host's root image, if it is not there yet.
    Build {
        /// Debian release: trixie or bookworm.
        #[arg(long, default_value = "trixie")]
        suite: String,
    },
    /// Boots a host, runs commands in its dom0, and powers off.
    Run {
        /// Debian release: trixie or bookworm.
        #[arg(long, default_value = "trixie")]
        suite: String,
        /// Starts a guest first.
        #[arg(long)]
        guest: bool,
        /// Builds ferrite and puts it into the dom0's PATH.
        #[arg(long)]
        ferrite: bool,
        /// Shell commands, each run for itself; `guest: COMMAND` runs in the guest.
        #[arg(required = true)]
        commands: Vec<String>,
        /// Limit for each command, in seconds.
        #[arg(long, default_value_t = 120)]
        limit_s: u64,
    },
}

fn main() -> ExitCode {
    steps::start_clock();
    match run(Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", steps::chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Test(arguments) => checks::test(&arguments),
        Task::Mutants(arguments) => mutants::mutants(&arguments),
        Task::Nightly(arguments) => nightly::nightly(&arguments),
        Task::Bench { arguments } => compare(&arguments),
        Task::Dist(arguments) => dist::dist(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Xenhost(XenHostTask::Build { suite }) => {
            packages::ensure(&[packages::XEN_HOST])?;
            let suite = xenhost::root::Suite::by_name(&suite)?;
            xenhost::root::ensure(suite)?;
            Ok(ExitCode::SUCCESS)
        }
        Task::Xenhost(XenHostTask::Run { suite, guest, ferrite, commands, limit_s }) => {
            packages::ensure(&[packages::XEN_HOST])?;
            let root = xenhost::root::ensure(xenhost::root::Suite::by_name(&suite)?)?;
            let programs = if ferrite { vec![checks::build_package()?] } else { Vec::new() };
            let mut xenhost = xenhost::XenHost::boot(&root, &programs)?;
            run_commands(&mut xenhost, guest, &commands, limit_s)
        }
    }
}

/// Runs the comparison, a program of the lab, which links the product. Tasks link nothing of it.
fn compare(arguments: &[OsString]) -> Result<ExitCode> {
    let mut run = steps::cargo();
    // Files that arguments name are where the user is.
    run.current_dir(std::env::current_dir()?);
    run.args(["run", "--quiet", "--locked", "--package", "ferrite-lab"]);
    let status = run.args(["--bin", "ferrite-compare", "--"]).args(arguments).status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs each command in the dom0 or the guest and shows what it printed.
fn run_commands(
    xenhost: &mut xenhost::XenHost,
    guest: bool,
    commands: &[String],
    limit_s: u64,
) -> Result<ExitCode> {
    steps::say(format!("emulator's CPU time so far: {:.1} s", xenhost.cpu_s()));
    let mut guest = if guest {
        let options = xenhost::guest::GuestOptions::default();
        Some(steps::step("start a guest", || xenhost::guest::Guest::start(xenhost, &options))?)
    } else {
        None
    };
    let mut code = ExitCode::SUCCESS;
    for command in commands {
        let output = match (command.strip_prefix("guest:"), &mut guest) {
            (Some(command), Some(guest)) => guest.run(xenhost, command, limit_s)?,
            _ => xenhost.dom0(command, limit_s)?,
        };
        steps::say(format!(
            "{command}: status {} (emulator's CPU time so far: {:.1} s)",
            output.status,
            xenhost.cpu_s()
        ));
        println!("{}", output.stdout.trim_end());
        if output.status != 0 {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
