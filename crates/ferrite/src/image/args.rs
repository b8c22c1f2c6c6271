//! The command line of `ferrite image`.

use std::ffi::{OsStr, OsString};

use clap::{Args, Subcommand, ValueEnum};
use ferrite_disk::{Format, ImageName, size};
use ferrite_io::engines::EngineChoice;

use crate::exit::Failure;
use crate::options::engines;
use crate::parents::ParentsArgs;

pub(crate) mod dirty;
pub(crate) mod looking;
pub(crate) mod making;
pub(crate) mod merging;
pub(crate) mod words;

pub(crate) use dirty::{ChangeArgs, DirtyCommand, ShowArgs};
pub(crate) use looking::{CheckArgs, CompareArgs, InfoArgs, MapArgs, Scope};
pub(crate) use making::{
    CloneArgs, ConvertArgs, CreateArgs, MeasureArgs, RebaseArgs, ResizeArgs, SnapshotArgs,
};
pub(crate) use merging::{CoalesceArgs, MergeStep, MirrorCheckArgs, MirrorMapArgs, MirrorMapVerb};

/// The arguments of `ferrite image`.
#[derive(Debug, Args)]
#[command(
    after_help = "An image is named vhd:PATH, qcow2:PATH or raw:PATH, or by a path that ends \
                        in .vhd or .qcow2; any other path is raw, and refused if it looks like \
                        an image. Sizes are bytes, or numbers with K, M, G, T, P (powers of 1024)."
)]
pub(crate) struct ImageArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: ImageCommand,

    #[command(flatten)]
    pub(crate) parents: ParentsArgs,

    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print results that were asked for and errors only: no confirmations, notes or progress.
    #[arg(short = 'q', long, global = true)]
    pub(crate) quiet: bool,

    /// As qemu-img's option: json is --json.
    #[arg(long, global = true, value_enum, value_name = "FORM", default_value = "human")]
    pub(crate) output: OutputForm,

    /// As qemu-img's option. On a terminal progress is shown without it, too.
    #[arg(short = 'p', long, global = true)]
    pub(crate) progress: bool,

    /// Engine for disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, global = true, value_name = "ENGINE", default_value_t = EngineChoice::Auto, value_parser = engines())]
    pub(crate) engine: EngineChoice,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Make an empty image, thin unless --fixed says otherwise, or one on a parent.
    Create(CreateArgs),
    /// Show the properties of an image and its parents.
    Info(InfoArgs),
    /// Keep the present state of a disk: its file becomes PARENT, read-only, and a new child takes its name. Takes no
    /// time, copies nothing. With -l, -c, -a, -d: list, make, apply, delete
    /// snapshots inside of a qcow2 image.
    Snapshot(SnapshotArgs),
    /// Make a new disk that begins as a copy of PARENT, which becomes read-only. Copies nothing.
    Clone(CloneArgs),
    /// Copy a disk into a new image of any format, its parents included.
    Convert(ConvertArgs),
    /// Look for inconsistencies in an image; ends with 2 if it is damaged, with 3 if it only has space that nothing
    /// refers to, and with 1 if it could not be checked.
    Check(CheckArgs),
    /// Repair what can be repaired without guessing; without --force, only show the repairs.
    Repair(RepairArgs),
    /// Merge a child into its parent, which takes the child's name.
    Coalesce(CoalesceArgs),
    /// A step of a merge in a chain that may be in use: the daemon runs it.
    #[command(subcommand, hide = true)]
    MergeStep(MergeStep),
    /// Look whether a disk in use can be mirrored to a target: the daemon runs it.
    #[command(hide = true)]
    MirrorCheck(MirrorCheckArgs),
    /// A change of the map that says after a power cut what a mirror's target lacks: the daemon runs it.
    #[command(hide = true)]
    MirrorMap(MirrorMapArgs),
    /// Give an image another parent, and keep its contents.
    Rebase(RebaseArgs),
    /// Make a disk larger, or smaller where nothing is allocated.
    Resize(ResizeArgs),
    /// Convert a qcow2 image of version 2 to version 3 in place (-o compat=1.1).
    Amend(AmendArgs),
    /// Show which image has which parts of a disk.
    Map(MapArgs),
    /// Show how long the file of an image would be, before it is made.
    Measure(MeasureArgs),
    /// Compare the contents of two disks; ends with 1 if they differ.
    Compare(CompareArgs),
    /// Show the space that a disk takes in its images and on the file systems.
    Du(OneArgs),
    /// Record which parts of a disk change, for incremental backups.
    #[command(subcommand)]
    Dirty(DirtyCommand),
    /// List or drop journals of killed backends: answered writes that are not in their images yet.
    #[command(subcommand)]
    Journal(JournalCommand),
}

/// The arguments of `journal`.
#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// List all journals of this host.
    List,
    /// Drop journals: their writes are lost.
    Drop(DropArgs),
}

/// The arguments of `journal drop`.
#[derive(Debug, Args)]
pub(crate) struct DropArgs {
    /// The journals, as `list` names them.
    #[arg(required_unless_present = "stale")]
    pub(crate) names: Vec<String>,

    /// Drop all journals whose images are gone.
    #[arg(long)]
    pub(crate) stale: bool,

    /// Drop it even if the image exists and lacks the journal's writes.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The forms of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputForm {
    /// Text.
    Human,
    /// JSON.
    Json,
}

impl ImageArgs {
    /// Whether results are JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json || self.output == OutputForm::Json
    }
}

/// The arguments that name an existing image.
#[derive(Debug, Args)]
pub(crate) struct NamedArgs {
    /// The image.
    pub(crate) image: OsString,

    /// The format of IMAGE, whatever its extension says.
    #[arg(short = 'f', long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<FormatName>,
}

impl NamedArgs {
    /// The image's name.
    pub(crate) fn name(&self) -> Result<ImageName, Failure> {
        existing(&self.image, self.format)
    }

    /// The name of an image or of a volume of a store.
    pub(crate) fn disk(&self) -> Result<ImageName, Failure> {
        existing_disk(&self.image, self.format)
    }
}

/// The arguments of commands that only read an image.
#[derive(Debug, Args)]
pub(crate) struct OneArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// Read it even if it is in use: the output may be outdated or inconsistent.
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
}

/// The name of a new image. The format is the one given, or that of its name.
pub(crate) fn name(text: &OsStr, format: Option<FormatName>) -> Result<ImageName, Failure> {
    let name = new_disk(text, format)?;
    name.must_be_image()?;
    Ok(name)
}

/// The name of a new image or of a new volume of a store.
pub(crate) fn new_disk(text: &OsStr, format: Option<FormatName>) -> Result<ImageName, Failure> {
    Ok(ImageName::of_new(text, format.map(Format::from))?)
}

/// The name of an existing image.
pub(crate) fn existing(text: &OsStr, format: Option<FormatName>) -> Result<ImageName, Failure> {
    let name = existing_disk(text, format)?;
    name.must_be_image()?;
    Ok(name)
}

/// The name of an existing image or volume of a store.
pub(crate) fn existing_disk(
    text: &OsStr,
    format: Option<FormatName>,
) -> Result<ImageName, Failure> {
    Ok(ImageName::of_existing(text, format.map(Format::from))?)
}

/// The arguments of `repair`.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// Write the repairs.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `amend`.
#[derive(Debug, Args)]
pub(crate) struct AmendArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// The change, in qemu-img's words: compat=1.1 (or compat=v3).
    #[arg(short = 'o', value_name = "OPTION", value_parser = amendment)]
    pub(crate) amendment: Amendment,
}

/// The changes of format that are made in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amendment {
    /// qcow2's version 2 becomes version 3.
    Version3,
}

fn amendment(text: &str) -> Result<Amendment, String> {
    match text {
        "compat=1.1" | "compat=v3" => Ok(Amendment::Version3),
        _ => Err("only compat=1.1 can be changed; convert makes a copy with anything else".into()),
    }
}

/// The formats by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatName {
    /// Byte for byte.
    Raw,
    /// Virtual Hard Disk; qemu-img's name for it is vpc.
    #[value(alias = "vpc")]
    Vhd,
    /// QEMU's format.
    Qcow2,
}

impl From<FormatName> for Format {
    fn from(name: FormatName) -> Format {
        match name {
            FormatName::Raw => Format::Raw,
            FormatName::Vhd => Format::Vhd,
            FormatName::Qcow2 => Format::Qcow2,
        }
    }
}

pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    match text.strip_prefix('-') {
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_digit()) => {
            Err("a size is not negative".into())
        }
        // Where a size is expected, options that do not exist come here, too.
        Some(_) => Err("this command has no such option, and it is no size".into()),
        None => size::parse(text).map_err(|e| e.to_string()),
    }
}
