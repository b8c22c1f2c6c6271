//! `ferrite`: a Xen virtual-disk backend. See `ferrite --help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod bench;
mod cli;
mod doctor;
mod exit;
mod generate;
mod image;
mod log;
mod parents;
mod plain;
mod serve;
mod served_raw;
mod signals;
mod vdev;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return cli::refuse(&e),
    };
    log::set_up(&cli);
    let done = match &cli.command {
        cli::Command::Serve(args) => serve::run(args),
        cli::Command::Doctor(args) => doctor::run(args),
        cli::Command::Bench(args) => bench::run(args),
        cli::Command::Image(args) => image::run(args),
        cli::Command::Generate(args) => generate::run(args),
        cli::Command::BenchGuest(args) => bench::run_guest(args),
        cli::Command::BenchBare(args) => bench::run_bare(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
