//! The command line of `ferrite backup`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ferrite_io::engines::EngineChoice;

use crate::cli::RunDirArgs;
use crate::image::args::{FormatName, NamedArgs};
use crate::job::args::Speed;
use crate::options::engines;
use crate::parents::ParentsArgs;

/// The arguments of `ferrite backup`.
#[derive(Debug, Args)]
#[command(
    after_help = "A folder has the backups of one disk or of several. The data of a backup are a qcow2 image on the \
                  data of the one before: FOLDER/NAME.qcow2. Any program that reads qcow2 reads them, and ferrite \
                  export nbd --read-only shows a backup, so that single files can be copied out of it."
)]
pub(crate) struct BackupArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: BackupCommand,

    #[command(flatten)]
    pub(crate) parents: ParentsArgs,

    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print results that were asked for and errors only: no confirmations, notes or progress.
    #[arg(short = 'q', long, global = true)]
    pub(crate) quiet: bool,

    /// On a terminal progress is shown without it, too.
    #[arg(short = 'p', long, global = true)]
    pub(crate) progress: bool,

    /// Engine for disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, global = true, value_name = "ENGINE", default_value_t = EngineChoice::Auto, value_parser = engines())]
    pub(crate) engine: EngineChoice,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Back up a disk: what has changed since the last backup, or everything.
    #[command(
        after_help = "IMAGE is an image that is not in use, or a disk that the daemon serves: GUEST/DEV, such as \
                            web1/xvda. That is copied from a snapshot, which is merged away again, while the guest \
                            writes. Two dirty maps of the image, MAP.1 and MAP.2, record what changes between backups. An interrupted \
                            backup is continued by the next one of the same disk into the same folder. To standard \
                            output (-) goes a full backup, without maps."
    )]
    Create(CreateArgs),
    /// Restore a disk into a new image, a device or a volume; all data are compared with their hashes.
    Restore(RestoreArgs),
    /// Compare backups with their hashes; ends with 5 if one is damaged.
    Verify(VerifyArgs),
    /// List the backups of a folder, the oldest first.
    List(FolderArgs),
    /// Remove backups.
    Prune(PruneArgs),
    /// Make an incremental backup a full one: those that it stands on can be removed then.
    Merge(MergeArgs),
}

/// The argument of each command about one folder.
#[derive(Debug, Args)]
pub(crate) struct FolderArgs {
    /// The folder with the backups.
    pub(crate) folder: PathBuf,
}

/// The arguments of `create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    pub(crate) named: NamedArgs,

    /// The folder for the backup, which is made if it is not there; - for standard output.
    pub(crate) folder: PathBuf,

    /// The name of the backup; default: the time.
    #[arg(long)]
    pub(crate) name: Option<String>,

    /// The maps that are used: each folder into which a disk is backed up needs its own.
    #[arg(long, default_value = "backup")]
    pub(crate) map: String,

    /// Use and begin no maps: a full backup, after which no incremental one can come.
    #[arg(long, conflicts_with_all = ["map", "incremental"])]
    pub(crate) no_map: bool,

    /// Copy everything.
    #[arg(long, conflicts_with = "incremental")]
    pub(crate) full: bool,

    /// Copy what has changed, and fail if that is not known.
    #[arg(long)]
    pub(crate) incremental: bool,

    /// Read at most so many bytes a second, such as 50M.
    #[arg(long, value_name = "BYTES_PER_S")]
    pub(crate) speed: Option<Speed>,

    /// The format of the image that the guest of a raw disk goes on in, from the first backup on. The raw image becomes its
    /// base.
    #[arg(long, value_name = "FORMAT", value_parser = ["qcow2"])]
    pub(crate) leaf: Option<String>,

    /// A command for a shell that is run before the snapshot with the word before, and then with after.
    #[arg(long, value_name = "CMD")]
    pub(crate) quiesce: Option<String>,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// The arguments of `restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The folder with the backup; - for a backup from standard input.
    pub(crate) folder: PathBuf,

    /// The new image, device or volume (PATH#NAME with store: before it).
    pub(crate) target: OsString,

    /// The format of TARGET, whatever its extension says.
    #[arg(short = 'O', long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<FormatName>,

    /// The backup; default: the newest.
    #[arg(long)]
    pub(crate) name: Option<String>,

    /// Overwrite TARGET if it is there.
    #[arg(long)]
    pub(crate) force: bool,

    /// TARGET is there, an image or an export of an NBD server: write over its content.
    #[arg(short = 'n', long, conflicts_with_all = ["force", "fixed"])]
    pub(crate) existing: bool,

    /// Allocate all space at once.
    #[arg(long)]
    pub(crate) fixed: bool,
}

/// The arguments of `verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) of: FolderArgs,

    /// Only this backup and those that it stands on.
    #[arg(long)]
    pub(crate) name: Option<String>,
}

/// The arguments of `prune`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["keep", "name", "unfinished"]))]
pub(crate) struct PruneArgs {
    #[command(flatten)]
    pub(crate) of: FolderArgs,

    /// Keep the newest N backups of each disk.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,

    /// Remove this backup; may be given several times.
    #[arg(long)]
    pub(crate) name: Vec<String>,

    /// Remove what is left of interrupted backups.
    #[arg(long)]
    pub(crate) unfinished: bool,

    /// A backup that is kept and stands on one that is removed becomes a full one first.
    #[arg(long)]
    pub(crate) merge: bool,
}

/// The arguments of `merge`.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    #[command(flatten)]
    pub(crate) of: FolderArgs,

    /// The backup that becomes a full one.
    pub(crate) name: String,
}
