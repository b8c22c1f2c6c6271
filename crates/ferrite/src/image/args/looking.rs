//! The command lines of commands that read disks.

use std::ffi::OsString;

use clap::{Args, ValueEnum};

use super::{FormatName, OneArgs, bytes};

/// The arguments of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) one: OneArgs,

    /// Check its parents, too.
    #[arg(long)]
    pub(crate) chain: bool,

    /// Check the rules of other programs, too: of vhd-util, which XAPI runs before it coalesces.
    #[arg(long)]
    pub(crate) strict: bool,

    /// Repair it first, as repair --force does: all, or leaks if there is nothing else.
    #[arg(short = 'r', value_enum, value_name = "SCOPE", conflicts_with_all = ["chain", "strict", "force_share"])]
    pub(crate) repair: Option<Scope>,
}

/// What `check -r` repairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scope {
    /// Space that nothing refers to.
    Leaks,
    /// All that can be repaired without guessing.
    All,
}

/// The arguments of `compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// One image.
    pub(crate) a: OsString,
    /// The other.
    pub(crate) b: OsString,

    /// The format of the first image, whatever its name says.
    #[arg(short = 'f', value_enum, value_name = "FORMAT")]
    pub(crate) format_a: Option<FormatName>,

    /// The format of the second image, whatever its name says.
    #[arg(short = 'F', value_enum, value_name = "FORMAT")]
    pub(crate) format_b: Option<FormatName>,

    /// Disks differ that have different sizes, or different parts allocated, even if they read the same.
    #[arg(short = 's', long)]
    pub(crate) strict: bool,

    /// Read them even if they are in use: the result may be outdated or wrong.
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
}

/// The arguments of `info`.
#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    pub(crate) one: OneArgs,

    /// With --json, print qemu-img's list of the images of the chain. Text has the whole chain without it, too.
    #[arg(long)]
    pub(crate) backing_chain: bool,
}

/// The arguments of `map`.
#[derive(Debug, Args)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    pub(crate) one: OneArgs,

    /// Begin here.
    #[arg(short = 's', long, value_name = "OFFSET", value_parser = bytes, default_value = "0")]
    pub(crate) start_offset: u64,

    /// Show so many bytes at most.
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) max_length: Option<u64>,
}
