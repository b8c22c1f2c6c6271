//! The command lines of workers.
//!
//! The definition of all commands is large: building it takes more time and memory than all else that a worker does
//! before it serves. A host has a worker for each disk, so their commands have a definition of their own.

use std::ffi::OsString;

use clap::{ArgAction, Parser, Subcommand};

use crate::cli::{StoreWorkerArgs, WorkerArgs};

/// The command line of a worker.
#[derive(Debug, Parser)]
#[command(name = "ferrite")]
pub(crate) struct Words {
    /// Log more.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Log errors only.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,

    #[command(subcommand)]
    pub(crate) role: Role,
}

/// Which worker it is.
#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Serve one disk for its keeper: with the options of serve, for as long as the keeper lives.
    Worker(Box<WorkerArgs>),
    /// Serve disks of one store for their keeper, for as long as that lives.
    StoreWorker(StoreWorkerArgs),
}

impl Words {
    /// The command line of a worker. `None`: it is another command.
    ///
    /// # Errors
    /// Errors of clap: a word is unknown, or a value is malformed.
    pub(crate) fn parse_if_worker(words: &[OsString]) -> Option<Result<Words, clap::Error>> {
        let command = words.get(1)?;
        let is_worker = command == "worker" || command == "store-worker";
        is_worker.then(|| Words::try_parse_from(words))
    }
}
