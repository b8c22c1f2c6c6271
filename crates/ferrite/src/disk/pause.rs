//! `ferrite disk pause` and `resume`.

use std::ffi::OsStr;
use std::path::Path;

use ferrite_daemon::control::protocol::{Attached, Disk, PauseParams, ResumeParams};
use ferrite_daemon::pause::{LONG, Pause};

use super::{ANSWER, age, attach, call, id, of_disk, seconds, tell};
use crate::exit::{Code, Failure};
use crate::guests::Names;
use crate::vdev::Vbd;

pub(super) fn pause(
    run: &Path,
    disk: Vbd,
    by: Option<&str>,
    timeout_s: u32,
    json: bool,
) -> Result<(), Failure> {
    let by = by.map_or_else(user, str::to_owned);
    let asked = PauseParams { disk: id(disk), by, timeout_s };
    let done: Attached = call(run, "disk.pause", &asked, ANSWER + seconds(timeout_s))
        .map_err(|e| of_disk("cannot pause disk", disk, &e))?;
    tell(json, &done, || {
        let name = Names::read().disk(disk);
        println!("disk {name} is paused; to go on: ferrite disk resume {name}");
    })
}

pub(super) fn resume(
    run: &Path,
    disk: Vbd,
    image: Option<&OsStr>,
    timeout_s: u32,
    json: bool,
) -> Result<(), Failure> {
    let image = image.map(|image| named("cannot resume with", image)).transpose()?;
    let asked = ResumeParams { disk: id(disk), image, timeout_s };
    let done: Attached = call(run, "disk.resume", &asked, ANSWER + seconds(timeout_s))
        .map_err(|e| of_disk("cannot resume disk", disk, &e))?;
    tell(json, &done, || println!("disk {} goes on", Names::read().disk(disk)))
}

/// The image's name for the daemon: with its format, and an absolute path.
pub(super) fn named(what: &str, text: &OsStr) -> Result<String, Failure> {
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
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let lasts = now.map_or(0, |now| now.as_secs()).saturating_sub(pause.since);
    match lasts > LONG.as_secs() {
        true => format!("{by}: its guest waits; to go on: ferrite disk resume {}", disk.disk),
        false => by,
    }
}
