//! `ferrite-bench`: one run of the real backend on the loopback. See `ferrite-bench --help`.

use std::process::ExitCode;

use clap::{Parser as _, Subcommand as _};

pub(crate) mod bare;
pub(crate) mod bound;
pub(crate) mod cli;
mod guest;
pub(crate) mod host;
pub(crate) mod idle;
mod kept;
mod load;
pub(crate) mod many;
mod measure;
mod progress;
pub(crate) mod tally;
pub(crate) mod task;

use cli::{Cli, Part, PartCli};
use ferrite::exit::{Code, Failure};
use ferrite::{generate, log};
use kept::Sharing;

/// The program: its command line, one run, the report.
pub(crate) fn main() -> ExitCode {
    let first = std::env::args_os().nth(1);
    let done = match first.is_some_and(|word| Part::has_subcommand(&word.to_string_lossy())) {
        true => PartCli::try_parse().map(|cli| {
            log::set_up(0, "warn", None);
            part(&cli.part)
        }),
        false => Cli::try_parse().map(|cli| {
            log::set_up(cli.verbose, "warn", None);
            measure::run(&cli.bench)
        }),
    };
    match done {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => failure.report(),
        Err(e) => {
            // With standard error closed, the code is all that can be given.
            let _ = e.print();
            if e.exit_code() == 0 { ExitCode::SUCCESS } else { Code::USAGE.into() }
        }
    }
}

fn part(part: &Part) -> Result<(), Failure> {
    match part {
        Part::Guest(args) => guest::run(args),
        Part::Keeper => kept::keeper(),
        Part::Worker(args) => kept::worker(args, Sharing::Shared),
        Part::Host(args) => many::run(args),
        Part::HostDaemon(args) => many::daemon(&args.folder),
        Part::HostKeeper => many::keeper(),
        Part::HostWorker(args) => kept::worker(args, Sharing::Own),
        Part::Bare(args) => bare::run(args),
        Part::Bound(args) => bound::run(args),
        Part::BoundFront(args) => bound::front(args),
        Part::Generate(args) => generate::run::<Cli>(&args.directory),
    }
}
