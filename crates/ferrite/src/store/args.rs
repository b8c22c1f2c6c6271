//! The command line of `ferrite store`.

use std::ffi::OsString;

use clap::{Args, Subcommand, ValueEnum};
use ferrite_image_tools::NewSize;
use ferrite_image_tools::stores::DOMAIN;
use ferrite_io::engines::EngineChoice;

use crate::image::args::bytes;
use crate::image::args::making::new_size;
use crate::options::engines;

/// The arguments of `ferrite store`.
#[derive(Debug, Args)]
#[command(
    after_help = "A store is a file or block device, PATH. A volume or snapshot in it is PATH#NAME: the last # \
                  separates. A NAME has 1 to 63 letters, digits, \"-\", \"_\" or \".\"; it begins with a letter or digit. Sizes \
                  are bytes, or numbers with K, M, G, T, P (powers of 1024)."
)]
pub(crate) struct StoreArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: StoreCommand,

    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print results that were asked for and errors only: no confirmations, notes or progress.
    #[arg(short = 'q', long, global = true)]
    pub(crate) quiet: bool,

    /// Engine for disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, global = true, value_name = "ENGINE", default_value_t = EngineChoice::Auto, value_parser = engines())]
    pub(crate) engine: EngineChoice,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Make a store (PATH --size SIZE), or an empty volume in one (PATH#NAME SIZE).
    Create(CreateArgs),
    /// List the volumes and snapshots of a store, one per line.
    List(ListArgs),
    /// Show the properties of a store, or of one volume of it.
    Info(EitherArg),
    /// Keep the present state of a volume as a read-only snapshot. Takes no time, copies nothing.
    Snapshot(SnapshotArgs),
    /// Make a volume that begins as a copy of another volume or snapshot. Takes no time, copies nothing.
    Clone(CloneArgs),
    /// Set a volume back to a snapshot: later writes are lost.
    Rollback(RollbackArgs),
    /// Delete a volume or snapshot, at once. Its clones stay as they are.
    Delete(VolumeArg),
    /// Give a volume or snapshot another name. Its snapshots and clones stay as they are.
    Rename(RenameArgs),
    /// Make a volume larger or smaller. Takes no time, copies nothing; its snapshots keep their size.
    Resize(ResizeArgs),
    /// Make the store itself larger: its file grows, or it takes what its device has more. Works while the store is served.
    Grow(GrowArgs),
    /// Look for damage, and name it; ends with 2 if there is any, and with 1 if the store could not be checked.
    Check(CheckArgs),
    /// Read all content and compare it with its checksums; exit codes as for check.
    Scrub(ScrubArgs),
    /// Free blocks that no volume references.
    Gc(StoreArg),
    /// Rewrite content in the order in which it is read, compressed if the store is, and free the old space.
    Compact(CompactArgs),
    /// Show the use of a store's space.
    Stats(StoreArg),
    /// Restore damaged metadata from its second copy; without --force, only show the repairs.
    Repair(RepairArgs),
    /// Write a snapshot, or what it has beside an older one, to standard output, for receive. Works while the store is
    /// served.
    Send(SendArgs),
    /// Make a snapshot of what send has written, from standard input. Nothing has its name before all is there.
    Receive(ReceiveArgs),
}

/// A store.
#[derive(Debug, Args)]
pub(crate) struct StoreArg {
    /// The store.
    #[arg(value_name = "PATH")]
    pub(crate) store: OsString,
}

/// The arguments of `list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Show how much of each is not zeros, too. Reads the metadata of the whole store, as stats does.
    #[arg(long)]
    pub(crate) used: bool,
}

/// A volume or snapshot.
#[derive(Debug, Args)]
pub(crate) struct VolumeArg {
    /// The volume or snapshot.
    #[arg(value_name = "PATH#NAME")]
    pub(crate) volume: OsString,
}

/// The name of a store, volume or snapshot.
#[derive(Debug, Args)]
pub(crate) struct EitherArg {
    /// The store, volume or snapshot.
    #[arg(value_name = "PATH[#NAME]")]
    pub(crate) name: OsString,
}

/// The arguments of `create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The new store, or the new volume.
    #[arg(value_name = "PATH[#NAME]")]
    pub(crate) name: OsString,

    /// Size of the volume; a multiple of 4 KiB.
    #[arg(value_parser = bytes, conflicts_with = "store_size")]
    pub(crate) size: Option<u64>,

    /// Size of the store's file, which takes no more space than its content. A device needs none.
    #[arg(long = "size", value_name = "SIZE", value_parser = bytes)]
    pub(crate) store_size: Option<u64>,

    /// Let the volume share content only within this domain, which is made if it does not exist.
    #[arg(long, value_name = "NAME", default_value = DOMAIN, conflicts_with_all = ["store_size", "force"])]
    pub(crate) domain: OsString,

    /// Make a store that its file system cannot hold without a note about that.
    #[arg(long, conflicts_with = "size")]
    pub(crate) overcommit: bool,

    /// Let the new store compress content, after the writes of guests are answered.
    #[arg(long, value_name = "HOW", conflicts_with = "size")]
    pub(crate) compress: Option<Compress>,

    /// Overwrite an existing file of the store's name, or the content of the device.
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

/// The arguments of `compact`.
#[derive(Debug, Args)]
pub(crate) struct CompactArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Use this compression from now on; content that is already compressed keeps its own until it is rewritten.
    #[arg(long, value_name = "HOW")]
    pub(crate) compress: Option<Compress>,
}

/// The arguments of `snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    #[command(flatten)]
    pub(crate) of: VolumeArg,

    /// The name of the new snapshot, in the same store.
    pub(crate) snap: OsString,
}

/// The arguments of `clone`.
#[derive(Debug, Args)]
pub(crate) struct CloneArgs {
    #[command(flatten)]
    pub(crate) of: VolumeArg,

    /// The name of the new volume, in the same store.
    pub(crate) new: OsString,
}

/// The arguments of `rollback`.
#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    pub(crate) volume: VolumeArg,

    /// A snapshot of the volume, or the one that it was cloned from.
    pub(crate) snap: OsString,

    /// Take any snapshot of the same domain.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `rename`.
#[derive(Debug, Args)]
pub(crate) struct RenameArgs {
    #[command(flatten)]
    pub(crate) of: VolumeArg,

    /// The new name, in the same store.
    pub(crate) new: OsString,
}

/// The arguments of `resize`.
#[derive(Debug, Args)]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    pub(crate) volume: VolumeArg,

    /// Its new size, a multiple of 4 KiB; with + or - before it, how much larger or smaller it becomes.
    #[arg(value_parser = new_size, allow_hyphen_values = true)]
    pub(crate) size: NewSize,

    /// Make it smaller: what is behind its new end is lost.
    #[arg(long)]
    pub(crate) shrink: bool,
}

/// The arguments of `grow`.
#[derive(Debug, Args)]
pub(crate) struct GrowArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Its new size; with + before it, how much larger it becomes. Without one it gets all of its file or device.
    #[arg(value_parser = new_size, allow_hyphen_values = true)]
    pub(crate) size: Option<NewSize>,

    /// Leave out the note that its file system cannot hold so much.
    #[arg(long)]
    pub(crate) overcommit: bool,
}

/// The arguments of `check`.
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

/// The arguments of `scrub`.
#[derive(Debug, Args)]
pub(crate) struct ScrubArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Read at most so much content a second.
    #[arg(long, value_name = "SIZE", value_parser = rate, default_value = "64M")]
    pub(crate) rate: u64,
}

/// The arguments of `repair`.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    pub(crate) store: StoreArg,

    /// Write the repairs.
    #[arg(long)]
    pub(crate) force: bool,
}

/// The arguments of `send`.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    #[command(flatten)]
    pub(crate) snapshot: VolumeArg,

    /// Send only what differs from this snapshot of the same store. The receiver has to have it.
    #[arg(long, value_name = "SNAP")]
    pub(crate) from: Option<OsString>,

    /// Go on at this place of the disk, which receive has named when a stream was cut off.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "0", hide_default_value = true)]
    pub(crate) resume: u64,
}

/// The arguments of `receive`.
#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    /// The new snapshot.
    #[command(flatten)]
    pub(crate) snapshot: VolumeArg,

    /// The snapshot here that the stream is a difference from, if it has another name than there.
    #[arg(long, value_name = "SNAP")]
    pub(crate) base: Option<OsString>,

    /// Go on with what a stream that was cut off has left.
    #[arg(long, conflicts_with = "force")]
    pub(crate) resume: bool,

    /// Delete what a stream that was cut off has left.
    #[arg(long)]
    pub(crate) force: bool,
}

fn rate(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("at that rate it would never end".into()),
        rate => Ok(rate),
    }
}
