//! The arguments of `ferrite image dirty`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{NamedArgs, OneArgs};

/// The arguments of `dirty`.
#[derive(Debug, Subcommand)]
pub(crate) enum DirtyCommand {
    /// Begin a map: from now on it records which parts of the disk change.
    Add(ChangeArgs),
    /// End a map.
    Remove(ChangeArgs),
    /// Begin a map anew, in one step: nothing has changed then.
    Clear(ChangeArgs),
    /// Give the maps of an image to another one with the same contents; what that has recorded stays.
    Copy(CopyArgs),
    /// Write the maps of an image into a file, for another host.
    #[command(hide = true)]
    Pack(PackArgs),
    /// Give an image the maps of a file that `pack` has written, beside another name.
    #[command(hide = true)]
    Adopt(AdoptArgs),
    /// List the maps of an image, and how much has changed.
    List(OneArgs),
    /// Show which ranges of the disk may have changed since a map was begun.
    Show(ShowArgs),
}

/// The arguments of commands that change a map.
#[derive(Debug, Args)]
pub(crate) struct ChangeArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// The name of the map: letters, digits, "-", "_" and ".".
    #[arg(value_name = "NAME")]
    pub(crate) map: String,
}

/// The arguments of `dirty copy`.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// The image whose maps are copied.
    #[arg(value_name = "IMAGE")]
    pub(crate) from: OsString,

    /// The image that gets them, and reads the same.
    #[arg(value_name = "OTHER")]
    pub(crate) to: OsString,

    /// Begin another map of this name.
    #[arg(long, value_name = "NAME")]
    pub(crate) begin_map: Option<String>,
}

/// The arguments of `dirty pack`.
#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// The file.
    pub(crate) file: PathBuf,
}

/// The arguments of `dirty adopt`.
#[derive(Debug, Args)]
pub(crate) struct AdoptArgs {
    /// The file of `pack`.
    pub(crate) file: PathBuf,

    /// The image.
    pub(crate) image: OsString,

    /// The name that the image is about to get.
    pub(crate) path: PathBuf,
}

/// The arguments of `dirty show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) one: OneArgs,

    /// The name of the map.
    #[arg(value_name = "NAME")]
    pub(crate) map: String,
}
