//! `ferrite pool`: disks whose copies are on several servers.

mod announce;
mod serve;

use clap::{Args, Subcommand};

use crate::exit::Failure;

/// Disks whose copies are on several servers.
#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Serve the copies in a folder to the hosts of a pool, in the foreground, until a signal comes.
    #[command(after_help = serve::HELP)]
    Serve(serve::ServeArgs),
}

/// Does one of them.
pub(crate) fn run(args: &PoolArgs) -> Result<(), Failure> {
    match &args.command {
        PoolCommand::Serve(args) => serve::run(args),
    }
}
