//! `ferrite disk dirty`: the maps of what has changed on a running disk.

use clap::{Args, Parser as _, Subcommand};
use ferrite_daemon::control::protocol::{Attached, Details, DirtyParams, MapVerb, ShowParams};

use super::change::ANSWER;
use super::{call, id, of_disk, tell};
use crate::cli::{Cli, Command, DiskArg, RunDirArgs};
use crate::exit::Failure;
use crate::guests::Names;
use crate::image;

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum DirtyCommand {
    /// Begin a map: from now on it records which parts of the disk change. The guest waits for a moment.
    Add(MapArgs),
    /// End a map.
    Remove(MapArgs),
    /// Begin a map anew, in one step: nothing has changed then.
    Clear(MapArgs),
    /// List the maps of a disk, and how much has changed.
    List(ListArgs),
    /// Show which ranges of the disk may have changed since a map was begun.
    Show(MapArgs),
}

/// The arguments of commands on one map.
#[derive(Debug, Args)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    disk: DiskArg,

    /// The name of the map: letters, digits, "-", "_" and ".".
    #[arg(value_name = "NAME")]
    map: String,

    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    places: RunDirArgs,
}

/// The arguments of `list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    disk: DiskArg,

    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    places: RunDirArgs,
}

pub(super) fn run(command: &DirtyCommand) -> Result<(), Failure> {
    match command {
        DirtyCommand::Add(args) => change(args, MapVerb::Add, "has a new map"),
        DirtyCommand::Remove(args) => change(args, MapVerb::Remove, "has no map"),
        DirtyCommand::Clear(args) => change(args, MapVerb::Clear, "has begun anew the map"),
        DirtyCommand::List(args) => look(&args.disk, &args.places, args.json, &["list"], None),
        DirtyCommand::Show(args) => {
            look(&args.disk, &args.places, args.json, &["show"], Some(&args.map))
        }
    }
}

fn change(args: &MapArgs, verb: MapVerb, done: &str) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let asked = DirtyParams { disk: id(disk), verb, map: args.map.clone() };
    let answer: Attached = call(&args.places.run_dir, "disk.dirty", &asked, ANSWER)
        .map_err(|e| of_disk("cannot change the dirty maps of disk", disk, &e))?;
    tell(args.json, &answer, || {
        println!("disk {} {done} {}", Names::read().disk(disk), args.map);
    })
}

/// Reads the maps of the disk's image as `ferrite image dirty` does, beside the process that writes them.
fn look(
    disk: &DiskArg,
    places: &RunDirArgs,
    json: bool,
    verb: &[&str],
    map: Option<&String>,
) -> Result<(), Failure> {
    let disk = disk.disk.find()?;
    let details: Details =
        call(&places.run_dir, "disk.show", &ShowParams { disk: id(disk) }, ANSWER)
            .map_err(|e| of_disk("cannot look at disk", disk, &e))?;
    let (Some(format), Some(image)) = (details.disk.format, details.disk.image) else {
        let what = format!("cannot show the dirty maps of disk {disk}");
        return Err(Failure::new(what, "it has no image", "it is an empty drive"));
    };
    let name = format!("{}:{image}", format.word());
    let mut words = vec!["ferrite", "image", "--quiet"];
    words.extend(json.then_some("--json"));
    words.push("dirty");
    words.extend(verb);
    words.extend(["-U", "--", &name]);
    words.extend(map.map(String::as_str));
    let parsed = Cli::try_parse_from(words);
    match parsed.map(|cli| cli.command) {
        Ok(Command::Image(args)) => image::run(&args),
        _ => Err(Failure::new(
            format!("cannot show the dirty maps of {name}"),
            "its name is none that a command line can have",
            "rename it",
        )),
    }
}
