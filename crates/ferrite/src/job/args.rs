//! The arguments of `ferrite job`, and of the commands that start jobs.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};

use crate::cli::{DiskArg, RunDirArgs};
use crate::guests::GuestDisk;
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

/// The help of `ferrite mirror`.
pub(crate) const MIRROR_HELP: &str = "A mirror is a job of the daemon (ferrite job): it goes on if this command is \
    interrupted. The target has to be there, and as large as the disk. Without --switch the mirror lasts until it is \
    cancelled (ferrite job cancel), or completed (ferrite mirror complete). A target that fails does not stop the guest: \
    it gets what it lacks when it works again.";

/// `ferrite mirror`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct MirrorArgs {
    #[command(subcommand)]
    pub(crate) command: Option<MirrorCommand>,

    /// The guest by name, UUID or number, and the device as xvda, hda, sda or as a number (web1/xvda).
    #[arg(value_name = "GUEST/DEV", required = true)]
    pub(crate) disk: Option<GuestDisk>,

    /// The second disk: an image (FORMAT:PATH, or a path whose extension says the format), a block device, or an export of
    /// an NBD server (nbd+unix:///EXPORT?socket=PATH, nbds://HOST/EXPORT).
    #[arg(value_name = "TARGET", required = true)]
    pub(crate) target: Option<String>,

    /// Have the disk go on with the target, as soon as that has all.
    #[arg(long)]
    pub(crate) switch: bool,

    /// Go on with the target of a mirror that a power cut or a shutdown of the guest has ended: copy only what it
    /// lacks. No other program may have written to the target since.
    #[arg(long)]
    pub(crate) resume: bool,

    /// Read what the target has, and write only what differs: a target that stands on the same base stays as thin as the disk.
    #[arg(long, conflicts_with = "resume")]
    pub(crate) compare: bool,

    /// Copy at most so many bytes a second, such as 50M; writes of the guest are not limited.
    #[arg(long, value_name = "BYTES_PER_S")]
    pub(crate) speed: Option<Speed>,

    /// Start the mirror, and do not wait: otherwise the command ends when the target has all.
    #[arg(long)]
    pub(crate) background: bool,

    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The commands on a mirror that runs.
#[derive(Debug, Subcommand)]
pub(crate) enum MirrorCommand {
    /// Have the disk go on with the target, once that has all; the guest waits for a moment.
    Complete {
        #[command(flatten)]
        disk: DiskArg,
        #[command(flatten)]
        output: OutputArgs,
    },
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
