//! `ferrite disk pause` and `resume`.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::Args;
use ferrite_daemon::Paths;
use ferrite_daemon::control::protocol::{Attached, Disk, PauseParams, ResumeParams};
use ferrite_daemon::pause::{LONG, Pause};
use ferrite_daemon::state::{DiskId, DiskState, States};
use serde::Serialize;

use super::{ANSWER, age, attach, call, id, of_disk, seconds, tell, vbd};
use crate::cli::{DiskArg, RunDirArgs};
use crate::exit::{Code, Failure};
use crate::guests::Names;

/// The help of `disk pause` after its options.
pub(crate) const HELP: &str = "\
The guest's requests wait without limit, also if ferrite's processes or the daemon end. Go on with
ferrite disk resume.";

/// The help of `disk resume` after its options.
pub(crate) const RESUME_HELP: &str = "\
If the image cannot be opened, or is smaller than the disk that its guest knows, the disk stays paused with the
image that it had. A disk that goes on with another image keeps that, also when its guest is started again by
an unchanged configuration.";

/// `ferrite disk pause`.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// The user or program that pauses it, for others who look; by default the name of this user.
    #[arg(long, value_name = "TEXT")]
    pub(crate) by: Option<String>,

    /// How long requests that are under way may take. After that the disk goes on as before.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(0..=300))]
    pub(crate) timeout: u32,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// The image to go on with (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it);
    /// store:PATH#NAME for a volume of a store.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: Option<OsString>,

    /// How long to wait until the image is open.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(0..=300))]
    pub(crate) timeout: u32,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

pub(super) fn pause(args: &PauseArgs) -> Result<(), Failure> {
    let (disk, timeout_s) = (args.disk.disk.find()?, args.timeout);
    let by = args.by.clone().unwrap_or_else(user);
    let asked = PauseParams { disk: id(disk), by, timeout_s };
    let wait = ANSWER + seconds(timeout_s);
    let done: Attached = call(&args.places.run_dir, "disk.pause", &asked, wait)
        .map_err(|e| of_disk("cannot pause disk", disk, &e))?;
    tell(args.json, &done, || {
        let name = Names::read().disk(disk);
        println!("disk {name} is paused; to go on: ferrite disk resume {name}");
    })
}

pub(super) fn resume(args: &ResumeArgs) -> Result<(), Failure> {
    let (disk, timeout_s) = (args.disk.disk.find()?, args.timeout);
    let image =
        args.image.as_deref().map(|image| named("cannot resume with", image)).transpose()?;
    let asked = ResumeParams { disk: id(disk), image, timeout_s };
    let wait = ANSWER + seconds(timeout_s);
    let done: Attached = call(&args.places.run_dir, "disk.resume", &asked, wait)
        .map_err(|e| of_disk("cannot resume disk", disk, &e))?;
    tell(args.json, &done, || println!("disk {} goes on", Names::read().disk(disk)))
}

/// The image's name for the daemon: with its format, and an absolute path.
pub(crate) fn named(what: &str, text: &OsStr) -> Result<String, Failure> {
    let image = attach::image(what, text)?;
    image.name().into_string().map_err(|name| {
        let what = format!("{what} {}", name.display());
        let failure = Failure::new(what, "its name is not UTF-8", "rename the image");
        failure.with_code(Code::USAGE)
    })
}

/// The user who runs this command, for people who find the disk paused.
fn user() -> String {
    let name = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok());
    name.unwrap_or_else(|| "an unknown user".to_owned())
}

/// Since when the disk is paused, by whom, and how to end it if that is long.
pub(super) fn note(disk: &Disk, pause: &Pause) -> String {
    let by = format!("paused by {} for {}", pause.by, age(pause.since));
    match is_long(pause) {
        true => format!("{by}: its guest waits; to go on: ferrite disk resume {}", disk.disk),
        false => by,
    }
}

fn is_long(pause: &Pause) -> bool {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs()).saturating_sub(pause.since) > LONG.as_secs()
}

/// A paused disk, by the daemon's state files: also if no daemon runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PausedDisk {
    /// The disk, as its files are named.
    #[serde(skip)]
    pub(crate) disk: DiskId,
    /// Its guest's name, or number, and its device.
    pub(crate) name: String,
    /// Since when, in seconds since 1970.
    pub(crate) since: u64,
    /// The person or the operation.
    pub(crate) by: String,
    /// Whether it ends by itself, and has not lasted long.
    #[serde(skip)]
    pub(crate) is_short: bool,
}

impl PausedDisk {
    /// For how long, and by whom.
    pub(crate) fn text(&self) -> String {
        format!("{} is paused by {} for {}", self.name, self.by, age(self.since))
    }

    /// How it goes on.
    pub(crate) fn help(&self) -> String {
        match self.is_short {
            true => "that is a step of the operation, which ends it".to_owned(),
            false => format!("its guest waits; to go on: ferrite disk resume {}", self.name),
        }
    }
}

/// The paused disks of the daemon with this folder.
pub(crate) fn paused_disks(run: &Path, names: &Names) -> Vec<PausedDisk> {
    let states = States::peek_all(&Paths { run: run.to_owned() }.states());
    let of_state = |state: DiskState| {
        let (disk, pause) = (state.id, state.pause?);
        let is_short = pause.is_step && !is_long(&pause);
        let name = names.disk(vbd(disk));
        Some(PausedDisk { disk, name, since: pause.since, by: pause.by, is_short })
    };
    states.into_iter().filter_map(of_state).collect()
}
