//! `ferrite disk snapshot`, `resize` and `switch`: changes of a running disk that take a moment.

use std::ffi::{OsStr, OsString};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use ferrite_daemon::control::protocol::{
    Attached, Details, ResizeParams, ShowParams, SnapshotParams, SwitchParams,
};
use ferrite_daemon::params::Format;
use serde::Serialize;

use super::pause::named;
use super::{call, id, of_disk, tell};
use crate::cli::{DiskArg, RunDirArgs};
use crate::exit::{Code, Failure};
use crate::guests::Names;
use crate::image::args::bytes;
use crate::plain::one_line;
use crate::vdev::Vbd;

/// Time for the daemon's answer: requests under way, the change, and the opening of the image.
pub(crate) const ANSWER: Duration = Duration::from_secs(600);

/// The help of `disk snapshot` after its options.
pub(crate) const SNAPSHOT_HELP: &str = "\
The snapshot is what the disk would be after a power cut. The guest's file systems are whole in it if they rest:
--quiesce runs a program with the word before, and with the word after, that can freeze and thaw them
(fsfreeze in the guest, say). Nothing is snapshot if it fails before. To merge snapshots again: ferrite disk coalesce.
Of a volume of a store, NEW is the name of a snapshot in that store. A raw disk gets a qcow2 image: --leaf qcow2.
The guest has that, also when it is started again by an unchanged configuration.";

/// The help of `disk resize` after its options.
pub(crate) const RESIZE_HELP: &str = "\
The guest is told, and sees the new size at once (lsblk); its partitions and file systems are its own. A client of
NBD sees it when it connects again. A block device grows by its own tools (lvextend), and the disk follows.";

/// The help of `disk switch` after its options.
pub(crate) const SWITCH_HELP: &str = "\
You say that IMAGE has the same contents; --compare reads both, while the guest waits. From then on the disk has
this image, also when its guest is started again by an unchanged configuration.";

/// `ferrite disk snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// The file that the disk as it is now becomes, read-only: a new name beside the image. Of a volume of a store: the
    /// name of a snapshot in its store.
    #[arg(value_name = "NEW")]
    pub(crate) new: OsString,

    /// The format of the image that a raw disk's guest goes on in. It has the disk's name, with this extension.
    #[arg(long, value_name = "FORMAT", value_parser = ["qcow2"])]
    pub(crate) leaf: Option<String>,

    /// Begin a dirty map of this name at the same moment. The maps that there are go on, and the snapshot keeps them as
    /// they are now: for an incremental backup.
    #[arg(long, value_name = "NAME")]
    pub(crate) begin_map: Option<String>,

    /// A command for a shell that is run before the snapshot with the word before, and then with after.
    #[arg(long, value_name = "CMD")]
    pub(crate) quiesce: Option<String>,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk resize`.
#[derive(Debug, Args)]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// The new size; with + before it, how much larger the disk becomes.
    #[arg(value_name = "SIZE")]
    pub(crate) size: String,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk switch`.
#[derive(Debug, Args)]
pub(crate) struct SwitchArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// The image to go on with (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it).
    #[arg(value_name = "IMAGE")]
    pub(crate) image: OsString,

    /// Compare the contents first. The guest waits meanwhile.
    #[arg(long)]
    pub(crate) compare: bool,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

fn change(
    places: &RunDirArgs,
    disk: Vbd,
    (method, what): (&str, &str),
    asked: &impl Serialize,
) -> Result<Attached, Failure> {
    call(&places.run_dir, method, asked, ANSWER)
        .map_err(|e| of_disk(&format!("cannot {what} disk"), disk, &e))
}

pub(super) fn snapshot(args: &SnapshotArgs) -> Result<(), Failure> {
    let what = "cannot snapshot the disk";
    let disk = args.disk.disk.find()?;
    let new = match is_volume(&args.places, disk)? {
        true => Some(args.new.clone()),
        false => std::path::absolute(&args.new).ok().map(std::path::PathBuf::into_os_string),
    };
    let new = new.and_then(|name| name.into_string().ok()).ok_or_else(|| {
        let why = format!("{} is no name of a file in UTF-8", args.new.display());
        Failure::new(what, why, "choose another name").with_code(Code::USAGE)
    })?;
    let leaf = args.leaf.as_ref().map(|_| Format::Qcow2);
    let begin_map = args.begin_map.clone();
    let asked = SnapshotParams { disk: id(disk), name: new.clone(), leaf, begin_map };
    let quiesce = |word: &str| args.quiesce.as_deref().map_or(Ok(()), |cmd| hook(cmd, word));
    quiesce("before").map_err(|why| {
        let help = match quiesce("after") {
            Ok(()) => "nothing was changed: run it by hand with the word before".to_owned(),
            Err(_) => format!("nothing was changed; {FROZEN}"),
        };
        Failure::new("the command of --quiesce has failed (before)", why, help)
    })?;
    let done = change(&args.places, disk, ("disk.snapshot", "snapshot"), &asked);
    // The guest is to work on whatever became of the snapshot.
    let thawed = quiesce("after");
    let done = done.map_err(|e| match &thawed {
        Ok(()) => e,
        Err(why) => {
            let (why, help) = (
                format!("{}; and the command of --quiesce has failed (after): {why}", e.why),
                format!("{}; {FROZEN}", e.help),
            );
            Failure { why, help, ..e }
        }
    })?;
    tell(args.json, &done, || {
        let name = Names::read().disk(disk);
        println!("disk {name} as it was is {}", one_line(&new));
    })?;
    thawed.map_err(|why| {
        let what =
            "the snapshot is made and stays, and the command of --quiesce has failed (after)";
        Failure::new(what, why, FROZEN)
    })
}

/// Whether the disk is a volume of a store.
fn is_volume(places: &RunDirArgs, disk: Vbd) -> Result<bool, Failure> {
    let details: Details =
        call(&places.run_dir, "disk.show", &ShowParams { disk: id(disk) }, ANSWER)
            .map_err(|e| of_disk("cannot snapshot disk", disk, &e))?;
    Ok(details.disk.format == Some(Format::Store))
}

/// The help if a guest may not have been thawed.
pub(crate) const FROZEN: &str =
    "the guest's file systems may be frozen: run the command by hand with the word after";

/// Runs the command with this word, and waits for its end. The error says how it has failed.
pub(crate) fn hook(command: &str, word: &str) -> Result<(), String> {
    let run = OsStr::new("\"$@\"");
    let text: OsString = [OsStr::new(command), OsStr::new(" "), run].into_iter().collect();
    let status = Command::new("sh").arg("-c").arg(text).args(["sh", word]).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(e) => Err(e.to_string()),
    }
}

pub(super) fn resize(args: &ResizeArgs) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let (is_more, size) = match args.size.strip_prefix('+') {
        Some(size) => (true, size),
        None => (false, args.size.as_str()),
    };
    let bytes = bytes(size).map_err(|why| {
        let help = "give it as 64G, or as +10G";
        Failure::new(format!("{} is no size", args.size), why, help).with_code(Code::USAGE)
    })?;
    let asked = ResizeParams { disk: id(disk), bytes, is_more };
    let done = change(&args.places, disk, ("disk.resize", "resize"), &asked)?;
    tell(args.json, &done, || println!("disk {} is resized", Names::read().disk(disk)))
}

pub(super) fn switch(args: &SwitchArgs) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let image = named("cannot switch to", &args.image)?;
    let asked = SwitchParams { disk: id(disk), image: image.clone(), compare: args.compare };
    let done = change(&args.places, disk, ("disk.switch", "switch"), &asked)?;
    tell(args.json, &done, || {
        println!("disk {} has the image {}", Names::read().disk(disk), one_line(&image));
    })
}
