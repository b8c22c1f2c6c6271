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
mod installed;
mod libc_free;
mod mutants;
mod needs;
mod night_checks;
mod nightly;
mod outcome;
mod peers;
mod powercuts;
mod programs;
mod rpm;
mod sanitizer;
mod times;
mod truth;
mod unpacked;
mod unsteady;
mod upgrade;
mod vhost;
mod xentests;

use anyhow::Result;
use clap::{Parser, Subcommand};
use ferrite_xenhost::{self as xenhost, packages, steps};
use std::ffi::OsString;
use std::path::PathBuf;
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
    /// Show a real Xen host that serves a disk to a Linux guest, also after the death of the serving process.
    Demo(demo::DemoArguments),
    /// Run the tests.
    Test(checks::TestArguments),
    /// Remove lines of the code, one at a time: a test must fail for each.
    Mutants(mutants::MutantsArguments),
    /// Run the checks that take hours: all tests on two releases of Xen, mutants, power cuts, fuzz targets and more.
    Nightly(nightly::NightlyArguments),
    /// Compare Ferrite with other backends and with the bare machine.
    #[command(disable_help_flag = true)]
    Bench {
        /// `cargo xtask bench --help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// The part `krbd` of `nightly`, in its network namespace.
    #[command(hide = true)]
    Krbd {
        /// The program that starts a cluster.
        cluster: PathBuf,
        /// The package for domain 0.
        package: PathBuf,
    },
    /// Make the packages for hosts: a tar and a Debian package.
    Dist(dist::DistArguments),
    /// Manage the Xen host: a real Xen host in an emulator.
    #[command(subcommand)]
    Xenhost(XenHostTask),
}

#[derive(Subcommand)]
enum XenHostTask {
    /// Build the Xen host's root image, if it does not exist yet.
    Build {
        /// Debian release: trixie or bookworm.
        #[arg(long, default_value = "trixie")]
        suite: String,
    },
    /// Boot a host, run commands in its dom0, and power off.
    Run {
        /// Debian release: trixie or bookworm.
        #[arg(long, default_value = "trixie")]
        suite: String,
        /// Start a guest first.
        #[arg(long)]
        guest: bool,
        /// Build ferrite and put it into dom0's PATH.
        #[arg(long)]
        ferrite: bool,
        /// Shell commands, each run separately; `guest: COMMAND` runs in the guest.
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
        Task::Krbd { cluster, package } => {
            xentests::krbd::test_here(&cluster, package).map(|()| ExitCode::SUCCESS)
        }
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
    // File names in arguments are relative to the user's folder.
    run.current_dir(std::env::current_dir()?);
    run.args(["run", "--quiet", "--locked", "--package", "ferrite-lab"]);
    let status = run.args(["--bin", "ferrite-compare", "--"]).args(arguments).status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs each command in dom0 or the guest and shows its output.
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
