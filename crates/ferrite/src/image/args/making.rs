//! The command lines of commands that make or change disks.

use std::ffi::OsString;

use clap::Args;
use ferrite_image_tools::NewSize;

use super::words::{IgnoredArgs, OptionArgs};
use super::{FormatName, NamedArgs, bytes};

/// The arguments of `create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The new image.
    pub(crate) image: OsString,

    /// The format of IMAGE, whatever its extension says.
    #[arg(short = 'f', long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<FormatName>,

    /// Size of the disk; may be left out with a parent.
    #[arg(value_parser = bytes, allow_hyphen_values = true, required_unless_present_any = ["parent", "options"])]
    pub(crate) size: Option<u64>,

    /// Make it a child of this image, which becomes read-only.
    #[arg(short = 'b', long, value_name = "IMAGE")]
    pub(crate) parent: Option<OsString>,

    /// The format of the parent, whatever its name says.
    #[arg(short = 'F', value_enum, value_name = "FORMAT", requires = "parent")]
    pub(crate) parent_format: Option<FormatName>,

    /// Allocate all space at once.
    #[arg(long, conflicts_with = "parent")]
    pub(crate) fixed: bool,

    #[command(flatten)]
    pub(crate) unit: UnitArgs,

    #[command(flatten)]
    pub(crate) options: OptionArgs,

    #[command(flatten)]
    pub(crate) marking: MarkArgs,

    /// Overwrite an existing file of that name.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Whether a parent in another folder must record its child.
#[derive(Debug, Args)]
pub(crate) struct MarkArgs {
    /// Go on even if PARENT is in another folder and no note of its child can be written there: a later merge into it
    /// gives no warning.
    #[arg(long)]
    pub(crate) unmarked: bool,
}

/// The argument for the unit of allocation.
#[derive(Debug, Args)]
pub(crate) struct UnitArgs {
    /// Allocate in units of so many bytes: a VHD's blocks (2M), a qcow2's clusters (64K).
    #[arg(long, value_name = "SIZE", value_parser = unit, visible_alias = "cluster")]
    pub(crate) block: Option<u32>,
}

/// The arguments of `snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The disk. It must not be in use.
    pub(crate) leaf: OsString,

    /// The name that its file gets, in the same directory.
    #[arg(required_unless_present_any = ["list", "create", "apply", "delete"])]
    pub(crate) parent: Option<OsString>,

    #[command(flatten)]
    pub(crate) inner: InnerArgs,

    /// Begin a dirty map of this name: it records what changes from now on.
    #[arg(long, value_name = "NAME", requires = "parent")]
    pub(crate) begin_map: Option<String>,

    /// The format of the disk, whatever its name says.
    #[arg(short = 'f', long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<FormatName>,

    /// Read it even if it is in use, with -l.
    #[arg(short = 'U', long, requires = "list")]
    pub(crate) force_share: bool,
}

/// The words of `qemu-img snapshot` for the snapshots inside of a qcow2 image.
#[derive(Debug, Args)]
#[group(id = "inner", multiple = false, conflicts_with = "parent")]
pub(crate) struct InnerArgs {
    /// Only list the snapshots inside of a qcow2 image.
    #[arg(short = 'l')]
    pub(crate) list: bool,

    /// Make a snapshot of this name inside of a qcow2 image instead.
    #[arg(short = 'c', value_name = "NAME")]
    pub(crate) create: Option<OsString>,

    /// Make the disk what it was at the snapshot inside of it with this name or identifier. Its present state is lost.
    #[arg(short = 'a', value_name = "NAME")]
    pub(crate) apply: Option<OsString>,

    /// Delete the snapshot inside of it with this name or identifier.
    #[arg(short = 'd', value_name = "NAME")]
    pub(crate) delete: Option<OsString>,
}

/// The arguments of `clone`.
#[derive(Debug, Args)]
pub(crate) struct CloneArgs {
    /// The image that the new disk begins as a copy of.
    pub(crate) parent: OsString,

    /// The new disk, a VHD or qcow2.
    pub(crate) new: OsString,

    #[command(flatten)]
    pub(crate) marking: MarkArgs,

    /// Overwrite an existing file of that name.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The image to copy.
    pub(crate) source: OsString,

    /// The new image.
    pub(crate) destination: OsString,

    /// The format of SOURCE, whatever its name says.
    #[arg(short = 'f', long, value_enum)]
    pub(crate) from: Option<FormatName>,

    /// The format of DESTINATION, whatever its name says.
    #[arg(short = 'O', long, value_enum)]
    pub(crate) to: Option<FormatName>,

    /// Make the copy a child of this image: it gets only what reads differently there. The image keeps its mode.
    #[arg(short = 'B', value_name = "IMAGE", conflicts_with_all = ["resume", "fixed", "zeros"])]
    pub(crate) parent: Option<OsString>,

    /// The format of the image of -B, whatever its name says.
    #[arg(short = 'F', value_enum, value_name = "FORMAT", requires = "parent")]
    pub(crate) parent_format: Option<FormatName>,

    /// Copy over an image that is there and large enough, instead of making one.
    #[arg(short = 'n', conflicts_with_all = ["resume", "fixed", "block", "options", "parent", "zeros", "force"])]
    pub(crate) existing: bool,

    /// Leave out runs of so many zero bytes in data that is read; 64K without it.
    #[arg(short = 'S', value_name = "SIZE", value_parser = zeros)]
    pub(crate) zeros: Option<u32>,

    /// Read SOURCE even if it is in use: the copy may be outdated or inconsistent.
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    /// Copy what can be read of a damaged image: the rest is zeros, and listed. Ends with 6 if there is any.
    #[arg(long, conflicts_with_all = ["resume", "existing", "parent"])]
    pub(crate) salvage: bool,

    /// Copy the disk as it was at the snapshot inside of SOURCE, a qcow2 image, with this name or identifier.
    #[arg(short = 'l', long, value_name = "NAME", conflicts_with_all = ["resume", "salvage", "existing", "parent"])]
    pub(crate) snapshot: Option<OsString>,

    /// Continue an interrupted run.
    #[arg(long)]
    pub(crate) resume: bool,

    /// Allocate all space at once.
    #[arg(long)]
    pub(crate) fixed: bool,

    #[command(flatten)]
    pub(crate) unit: UnitArgs,

    #[command(flatten)]
    pub(crate) options: OptionArgs,

    #[command(flatten)]
    pub(crate) ignored: IgnoredArgs,

    /// Overwrite an existing file of that name, and start again after an interrupted run.
    #[arg(long, conflicts_with = "resume")]
    pub(crate) force: bool,
}

/// The arguments of `rebase`.
#[derive(Debug, Args)]
pub(crate) struct RebaseArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// The new parent, which becomes read-only; an empty name: none.
    #[arg(short = 'b', long, value_name = "IMAGE")]
    pub(crate) parent: OsString,

    /// The format of the new parent, whatever its name says.
    #[arg(short = 'F', value_enum, value_name = "FORMAT")]
    pub(crate) parent_format: Option<FormatName>,

    /// The new parent is the old one under a new name: only the image's own data are kept, and the old parent need not
    /// exist. If the two differ, the disk changes.
    #[arg(short = 'u', long = "unsafe")]
    pub(crate) is_unsafe: bool,

    /// Rebase even an image that has children: they change with it if the new parent differs.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `resize`.
#[derive(Debug, Args)]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// Its new size; with + or - before it, how much larger or smaller it becomes.
    #[arg(value_parser = new_size, allow_hyphen_values = true)]
    pub(crate) size: NewSize,

    /// Make it smaller, where nothing is allocated.
    #[arg(long)]
    pub(crate) shrink: bool,

    /// As --shrink, and resize a read-only image, too.
    #[arg(long)]
    pub(crate) force: bool,

    /// Only make it larger: the daemon says this of a disk in use.
    #[arg(long, hide = true, conflicts_with_all = ["shrink", "force"])]
    pub(crate) grow: bool,
}

/// The arguments of `measure`.
#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// The disk that would be copied; or none, with --size.
    #[arg(required_unless_present = "size")]
    pub(crate) image: Option<OsString>,

    /// The format of IMAGE, whatever its name says.
    #[arg(short = 'f', long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<FormatName>,

    /// The format of the image that would be made.
    #[arg(short = 'O', value_enum, value_name = "FORMAT", default_value = "raw")]
    pub(crate) to: FormatName,

    /// Of a disk of this size, without data.
    #[arg(long, value_name = "SIZE", value_parser = bytes, conflicts_with = "image")]
    pub(crate) size: Option<u64>,

    /// Read it even if it is in use: the result may be outdated.
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    /// Allocate all space at once.
    #[arg(long)]
    pub(crate) fixed: bool,

    #[command(flatten)]
    pub(crate) unit: UnitArgs,

    #[command(flatten)]
    pub(crate) options: OptionArgs,
}

pub(crate) fn new_size(text: &str) -> Result<NewSize, String> {
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => bytes(more).map(NewSize::By),
        (_, Some(less)) if less.starts_with(|c: char| c.is_ascii_digit()) => {
            bytes(less).map(NewSize::Less)
        }
        _ => bytes(text).map(NewSize::To),
    }
}

fn unit(text: &str) -> Result<u32, String> {
    let bytes = bytes(text)?;
    match u32::try_from(bytes) {
        Ok(bytes) if bytes.is_power_of_two() && bytes >= 512 => Ok(bytes),
        _ => Err("it must be a power of two, at least 512".into()),
    }
}

/// The runs of zeros that `convert -S` leaves out.
fn zeros(text: &str) -> Result<u32, String> {
    match bytes(text)? {
        0 => Err("a copy without holes is made by --fixed, raw or VHD".into()),
        n if n.is_multiple_of(512) && n <= 1 << 20 => Ok(n as u32),
        _ => Err("it must be a multiple of 512, at most 1M".into()),
    }
}
