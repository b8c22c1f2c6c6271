//! The arguments of commands that merge images.

use std::ffi::OsString;

use clap::{Args, Subcommand};

use super::bytes;

/// The arguments of `coalesce`.
#[derive(Debug, Args)]
pub(crate) struct CoalesceArgs {
    /// The child; with --from or --to: the leaf of the chain.
    pub(crate) child: OsString,

    /// Merge only into this parent: an error if the child has another one, and another error (3) if it does not exist,
    /// as after an earlier merge.
    #[arg(long, value_name = "PARENT", conflicts_with_all = ["from", "to"])]
    pub(crate) into: Option<OsString>,

    /// Merge a stretch of the chain, from this image down: with --to alone, from the leaf's parent. The leaf itself is
    /// merged only if it is named here.
    #[arg(long, value_name = "UPPER")]
    pub(crate) from: Option<OsString>,

    /// Merge the stretch into this image, which keeps its name; with --from alone, into the parent of UPPER.
    #[arg(long, value_name = "LOWER")]
    pub(crate) to: Option<OsString>,

    /// Merge even if that destroys other children of the parent, or may.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `mirror-check`.
#[derive(Debug, Args)]
pub(crate) struct MirrorCheckArgs {
    /// The image of the disk, which is in use.
    pub(crate) source: OsString,

    /// The target.
    pub(crate) target: String,
}

/// The arguments of `mirror-map`.
#[derive(Debug, Args)]
pub(crate) struct MirrorMapArgs {
    /// What is done.
    #[arg(value_enum)]
    pub(crate) verb: MirrorMapVerb,

    /// The image of the disk, which nothing has open but for a look.
    pub(crate) source: OsString,

    /// The name of the map.
    pub(crate) map: String,
}

/// The changes of a mirror's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum MirrorMapVerb {
    /// The target lacks everything.
    Begin,
    /// The target lacks what the map names.
    Keep,
    /// Which maps there are, while the disk may be in use.
    Look,
    /// There is no mirror any more.
    End,
}

/// The steps of a merge, for the daemon. With --json there is a line of JSON a second with the progress, and one with
/// the result.
#[derive(Debug, Subcommand)]
pub(crate) enum MergeStep {
    /// Show what would be merged.
    Plan(StretchArgs),
    /// Make LOWER as large as UPPER, while nothing has it open.
    Grow(StretchArgs),
    /// Copy the data down into LOWER; the chain may be open, and the leaf be written to.
    Copy(CopyStepArgs),
    /// Give the image above UPPER the parent LOWER, while nothing has that image open.
    Relink(StretchArgs),
    /// Remove what was merged.
    Clean(StretchArgs),
    /// Give LEAF's file the name UPPER, and its name to a new leaf on that, while nothing has it open.
    Split(SplitArgs),
    /// Merge a small LEAF into LOWER, which takes its name, while nothing has the chain open.
    Leaf(LeafStepArgs),
    /// Take a split back, while nothing has the chain open.
    Undo(UndoArgs),
}

/// A new name for the file of a leaf.
#[derive(Debug, Args)]
pub(crate) struct SplitArgs {
    /// The leaf of the chain.
    pub(crate) leaf: OsString,

    /// The name.
    #[arg(long, value_name = "UPPER")]
    pub(crate) from: OsString,
}

/// The arguments of `merge-step leaf`.
#[derive(Debug, Args)]
pub(crate) struct LeafStepArgs {
    /// The leaf of the chain.
    pub(crate) leaf: OsString,

    /// The image that it stands on.
    #[arg(long, value_name = "LOWER")]
    pub(crate) to: OsString,

    /// A leaf with more data than that stays.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(crate) most: u64,

    /// Go on even if other images change, or may.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `merge-step undo`.
#[derive(Debug, Args)]
pub(crate) struct UndoArgs {
    #[command(flatten)]
    pub(crate) split: SplitArgs,

    /// The image that was to get the data.
    #[arg(long, value_name = "LOWER")]
    pub(crate) to: OsString,

    /// A leaf with more data than that stays.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(crate) most: u64,
}

/// A stretch of a chain.
#[derive(Debug, Args)]
pub(crate) struct StretchArgs {
    /// The leaf of the chain.
    pub(crate) leaf: OsString,

    /// The upper end.
    #[arg(long, value_name = "UPPER")]
    pub(crate) from: Option<OsString>,

    /// The lower end.
    #[arg(long, value_name = "LOWER")]
    pub(crate) to: Option<OsString>,

    /// Go on even if other images change, or may.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `merge-step copy`.
#[derive(Debug, Args)]
pub(crate) struct CopyStepArgs {
    #[command(flatten)]
    pub(crate) stretch: StretchArgs,

    /// Bytes a second, at most; 0: no limit.
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = bytes)]
    pub(crate) speed: u64,

    /// Read other speeds from standard input, a number of bytes a line, and end when that is closed.
    #[arg(long)]
    pub(crate) speeds: bool,
}
