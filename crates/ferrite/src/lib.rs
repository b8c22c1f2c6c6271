//! The program, and what programs beside it share with it: exit codes, signals, logs, options.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod cli;
mod daemon;
mod disk;
mod doctor;
pub mod engine;
pub mod exit;
pub mod generate;
mod image;
pub mod log;
pub mod options;
pub mod parents;
mod plain;
mod serve;
mod served_raw;
pub mod signals;
mod vdev;

/// A server tells what happens to it; other commands speak of trouble only.
const SERVER_LOG: &str = "warn,ferrite=info,ferrite_serve=info,ferrite_daemon=info";

/// All of `ferrite`.
pub fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return cli::refuse(&e),
    };
    let is_server = matches!(cli.command, cli::Command::Serve(_) | cli::Command::Daemon(_));
    if is_server {
        ferrite_serve::counters::remember_process();
    }
    log::set_up(cli.verbose, if is_server { SERVER_LOG } else { "warn" });
    let done = match &cli.command {
        cli::Command::Serve(args) => serve::run(args),
        cli::Command::Daemon(args) => daemon::run(args),
        cli::Command::Disk(args) => disk::run(args),
        cli::Command::Doctor(args) => doctor::run(args),
        cli::Command::Image(args) => image::run(args),
        cli::Command::Generate(args) => generate::run::<cli::Cli>(&args.directory),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
