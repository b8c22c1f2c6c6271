//! `ferrite`: a Xen virtual-disk backend. See `ferrite --help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod cli;
mod doctor;
mod exit;
mod log;
mod serve;
mod vdev;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    log::set_up(cli.verbose);
    let done = match &cli.command {
        cli::Command::Serve(args) => serve::run(args),
        cli::Command::Doctor(args) => doctor::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
