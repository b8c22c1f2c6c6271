//! The arguments of `ferrite job`, and of the commands that start jobs.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};

use crate::cli::{DiskArg, RunDirArgs};
use crate::image::args::bytes;

/// `ferrite job`.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    #[command(subcommand)]
    pub(crate) command: JobCommand,
}

/// The arguments of each command about one job.
#[derive(Debug, Args)]
pub(crate) struct OneJob {
    /// The job's number.
    #[arg(value_name = "ID", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) id: u64,

    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The arguments of each command that asks the daemon about jobs.
#[derive(Debug, Args)]
pub(crate) struct OutputArgs {
    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// The commands of `ferrite job`.
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// List the jobs that run, and those that ended within a day.
    List(OutputArgs),
    /// Show one job: its step, its progress and its result.
    Show(OneJob),
    /// Wait for the end of a job, with a progress bar on a terminal; Ctrl-C ends the command, and the job goes on.
    Wait {
        /// How long to wait; without it, until the end.
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u32>,
        #[command(flatten)]
        job: OneJob,
    },
    /// Cancel a job: its disk stays as it is. A job whose result shows already goes on to its end.
    Cancel(OneJob),
    /// Let a job rest; its disk is served as ever.
    Pause(OneJob),
    /// Let a paused job go on.
    Resume(OneJob),
    /// Change the limit of a job.
    Limit {
        #[command(flatten)]
        job: OneJob,
        /// Most bytes a second, such as 50M; none for no limit.
        #[arg(value_name = "BYTES_PER_S")]
        speed: Speed,
    },
}

/// A limit in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Speed(pub(crate) Option<u64>);

impl FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Speed, String> {
        match text {
            "none" | "0" => Ok(Speed(None)),
            text => bytes(text).map(|bytes| Speed(Some(bytes))),
        }
    }
}

/// `ferrite disk coalesce`.
#[derive(Debug, Args)]
pub(crate) struct CoalesceArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// The highest image that is merged, also the disk's own; default: the parent of that.
    #[arg(long, value_name = "IMAGE")]
    pub(crate) from: Option<PathBuf>,

    /// The image that it is merged into, with all images between them; default: the parent of --from.
    #[arg(long, value_name = "IMAGE")]
    pub(crate) to: Option<PathBuf>,

    /// Merge even if images elsewhere change by that, or may.
    #[arg(long)]
    pub(crate) force: bool,

    /// Copy at most so many bytes a second, such as 50M.
    #[arg(long, value_name = "BYTES_PER_S")]
    pub(crate) speed: Option<Speed>,

    /// Start the job, and do not wait for its end.
    #[arg(long)]
    pub(crate) background: bool,

    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
