//! The command line of `ferrite store`.

use std::ffi::OsString;

use clap::{Args, Subcommand, ValueEnum};
use ferrite_image_tools::stores::DOMAIN;
use ferrite_io::engines::EngineChoice;

use crate::image::args::bytes;

/// `ferrite store`.
#[derive(Debug, Args)]
#[command(
    after_help = "A store is a file or block device, PATH. A volume or snapshot in it is PATH#NAME: the last # \
                  separates. A NAME has 1 to 63 letters, digits, and - _ . but at the beginning. Sizes \
                  are bytes, or numbers with K, M, G, T, P (powers of 1024)."
)]
pub(crate) struct StoreArgs {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: StoreCommand,

    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// What does the disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, global = true, value_name = "ENGINE", default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Make a store (PATH --size SIZE), or an empty volume in one (PATH#NAME SIZE).
    Create(CreateArgs),
    /// Show the volumes and snapshots of a store, a line each.
    List(StoreArg),
    /// Show what a store, or one volume of it, says of itself.
    Info(EitherArg),
    /// Keep the present state of a volume as a snapshot, which takes no writes. Takes no time, copies nothing.
    Snapshot(SnapshotArgs),
    /// Make a volume that begins as another volume or snapshot is. Takes no time, copies nothing.
    Clone(CloneArgs),
    /// Have a volume be what a snapshot is: what was written since is lost.
    Rollback(RollbackArgs),
    /// Delete a volume or snapshot, at once. What was made from it stays as it is.
    Delete(VolumeArg),
    /// Look for what is not in order, and name it; ends with 2 if there is damage, and with 1 if it
    /// could not be checked.
    Check(CheckArgs),
    /// Read all content and compare it with its checksums; ends as check does.
    Scrub(ScrubArgs),
    /// Find out what nothing in the store has any more, and free its space.
    Gc(StoreArg),
    /// Put content into the order in which it is read, compressed if the store is, and free what that leaves.
    Compact(CompactArgs),
    /// Show what the space of a store is for.
    Stats(StoreArg),
    /// Write again what is there twice and damaged once; without --force, only show what that would be.
    Repair(RepairArgs),
}

/// A store.
#[derive(Debug, Args)]
pub(crate) struct StoreArg {
    /// The store.
    #[arg(value_name = "PATH")]
    pub(crate) store: OsString,
}

/// A volume or snapshot.
#[derive(Debug, Args)]
pub(crate) struct VolumeArg {
    /// The volume or snapshot.
    #[arg(value_name = "PATH#NAME")]
    pub(crate) volume: OsString,
}

/// One of both.
#[derive(Debug, Args)]
pub(crate) struct EitherArg {
    /// The store, volume or snapshot.
    #[arg(value_name = "PATH[#NAME]")]
    pub(crate) name: OsString,
}

/// `create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The new store, or the new volume.
    #[arg(value_name = "PATH[#NAME]")]
    pub(crate) name: OsString,

    /// Of the volume; a multiple of 4 KiB.
    #[arg(value_parser = bytes, conflicts_with = "store_size")]
    pub(crate) size: Option<u64>,

    /// Of the store's file, which takes no more space than what is in it. A device needs none.
    #[arg(long = "size", value_name = "SIZE", value_parser = bytes)]
    pub(crate) store_size: Option<u64>,

    /// Have the volume share content with those of this domain only; it is made if it is not there.
    #[arg(long, value_name = "NAME", default_value = DOMAIN, conflicts_with_all = ["store_size", "force"])]
    pub(crate) domain: OsString,

    /// Have the new store compress content, behind the writes of guests.
    #[arg(long, value_name = "HOW", conflicts_with = "size")]
    pub(crate) compress: Option<Compress>,

    /// Overwrite what has the store's name, or is on the device.
    #[arg(long)]
    pub(crate) force: bool,
}

/// How content is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compress {
    /// Not at all.
    None,
    /// LZ4: fast to unpack.
    Lz4,
    /// Zstandard: smaller.
    Zstd,
}

/// `compact`.
#[derive(Debug, Args)]
pub(crate) struct CompactArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Compress content so from now on; what is compressed stays so until it is written again.
    #[arg(long, value_name = "HOW")]
    pub(crate) compress: Option<Compress>,
}

/// `snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    #[command(flatten)]
    pub(crate) of: VolumeArg,

    /// The name of the new snapshot, in the same store.
    pub(crate) snap: OsString,
}

/// `clone`.
#[derive(Debug, Args)]
pub(crate) struct CloneArgs {
    #[command(flatten)]
    pub(crate) of: VolumeArg,

    /// The name of the new volume, in the same store.
    pub(crate) new: OsString,
}

/// `rollback`.
#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    pub(crate) volume: VolumeArg,

    /// A snapshot in the same store and domain.
    pub(crate) snap: OsString,
}

/// `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Compare content with its full hash, too.
    #[arg(long)]
    pub(crate) deep: bool,

    /// Read at most so much content a second.
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    pub(crate) rate: Option<u64>,
}

/// `scrub`.
#[derive(Debug, Args)]
pub(crate) struct ScrubArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Read at most so much content a second.
    #[arg(long, value_name = "SIZE", value_parser = rate, default_value = "64M")]
    pub(crate) rate: u64,
}

/// `repair`.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Do it.
    #[arg(long)]
    pub(crate) force: bool,
}

fn rate(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("at that rate it would never end".into()),
        rate => Ok(rate),
    }
}
