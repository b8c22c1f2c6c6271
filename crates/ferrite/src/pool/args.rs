//! The command line of `ferrite pool`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use ferrite_pool_map::{Id, is_name};

use super::{own, serve};
use crate::image::args::bytes;

/// The arguments of `ferrite pool`.
#[derive(Debug, Args)]
#[command(
    after_help = "A disk is POOL/DISK. Names have 1 to 40 of a-z, 0-9, \"-\" and \"_\". Sizes are bytes, or numbers with K, M, G, \
                  T (powers of 1024). A disk is opened by its name pool:POOL/DISK. Pools are being built: they ask for \
                  --experimental, or experimental = true below [pool.POOL] in ferrite.toml, and may change."
)]
pub(crate) struct PoolArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: PoolCommand,

    /// Use what is being built, and may change.
    #[arg(long, global = true)]
    pub(crate) experimental: bool,

    /// Addresses of the servers of etcd: https://HOST:PORT, or http:// with --etcd-plain. Without them those of `[pool.POOL]`
    /// in ferrite.toml.
    #[arg(long, global = true, value_name = "URL,...", value_delimiter = ',')]
    pub(crate) etcd: Vec<String>,

    /// A folder with ca-cert.pem, and with client-cert.pem and client-key.pem if etcd asks for a certificate.
    #[arg(long, global = true, value_name = "DIR", conflicts_with = "etcd_plain")]
    pub(crate) etcd_tls: Option<PathBuf>,

    /// Speak to etcd without TLS: any host on that network can then take every disk.
    #[arg(long, global = true)]
    pub(crate) etcd_plain: bool,

    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Make an empty pool. Its servers are started with its identifier, which is printed.
    Init(PoolArg),
    /// Make a disk: its copies are on different hosts, on the emptiest servers.
    Create(CreateArgs),
    /// List the disks of a pool, one per line.
    List(PoolArg),
    /// Show the servers of a pool, and the copies of its disks, or of one disk.
    Status(StatusArgs),
    /// Make a disk larger.
    Resize(ResizeArgs),
    /// Remove a disk.
    Delete(DeleteArgs),
    /// Have another server get the copies of a disk that a server has.
    Replace(ReplaceArgs),
    /// Fill copies that are new or have missed something, and wait until all are in sync.
    Repair(DiskArg),
    /// Give a server no new copies, and have others get those that it has.
    Drain(DrainArgs),
    /// Serve the copies in a folder to the hosts of a pool, in the foreground, until a signal comes.
    #[command(after_help = serve::HELP)]
    Serve(serve::ServeArgs),
    /// Be the owner process of a disk, for the keeper or command that has started it.
    #[command(hide = true)]
    Own(own::OwnArgs),
    /// Take a LUN into the pool that the hosts' own initiators have. All that is on it is lost.
    AddLun(AddLunArgs),
    /// Take a LUN out of the pool that has no copies any more.
    RemoveLun(RemoveLunArgs),
    /// Take a disk from its owner. Only if that is known to be dead: until the next owner opens the disk, it may still write.
    Steal(DiskArg),
}

impl PoolCommand {
    /// The pool that it is about. `None`: a process that serves it.
    pub(crate) fn pool(&self) -> Option<&str> {
        Some(match self {
            PoolCommand::Init(of) | PoolCommand::List(of) => &of.pool,
            PoolCommand::Create(of) => &of.disk.pool,
            PoolCommand::Status(of) => &of.of.0,
            PoolCommand::Resize(of) => &of.disk.pool,
            PoolCommand::Delete(of) => &of.disk.pool,
            PoolCommand::Replace(of) => &of.disk.pool,
            PoolCommand::Repair(of) => &of.disk.pool,
            PoolCommand::Drain(of) => &of.pool,
            PoolCommand::AddLun(of) => &of.pool,
            PoolCommand::RemoveLun(of) => &of.pool,
            PoolCommand::Steal(of) => &of.disk.pool,
            PoolCommand::Serve(_) | PoolCommand::Own(_) => return None,
        })
    }
}

/// A disk by its name.
#[derive(Clone, Debug)]
pub(crate) struct DiskName {
    pub(crate) pool: String,
    pub(crate) disk: String,
}

impl FromStr for DiskName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<DiskName, &'static str> {
        let text = text.strip_prefix("pool:").unwrap_or(text);
        match text.split_once('/') {
            Some((pool, disk)) if is_name(pool) && is_name(disk) => {
                Ok(DiskName { pool: pool.to_owned(), disk: disk.to_owned() })
            }
            _ => Err("a disk is POOL/DISK; names have 1 to 40 of a-z, 0-9, '-' and '_'"),
        }
    }
}

/// A pool.
#[derive(Debug, Args)]
pub(crate) struct PoolArg {
    /// The pool.
    #[arg(value_parser = name)]
    pub(crate) pool: String,
}

/// A disk.
#[derive(Debug, Args)]
pub(crate) struct DiskArg {
    /// The disk.
    #[arg(value_name = "POOL/DISK")]
    pub(crate) disk: DiskName,
}

/// `ferrite pool create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The disk.
    #[arg(value_name = "POOL/DISK")]
    pub(crate) disk: DiskName,
    /// Its size. It becomes a whole number of stripes.
    #[arg(value_parser = bytes)]
    pub(crate) size: u64,
    /// Copies of the data, 1 to 3.
    #[arg(long, value_name = "NUMBER", default_value_t = 2)]
    pub(crate) replicas: usize,
    /// Parts that take turns, 1 to 16, each with its copies.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) stripes: usize,
    /// Consecutive bytes of one part.
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = bytes)]
    pub(crate) stripe_size: u64,
    /// The servers and LUNs that get the copies. Without it the emptiest servers, and no LUN.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = name)]
    pub(crate) on: Vec<String>,
    /// Name this request with 32 digits 0-9, a-f: if it is repeated, no second disk is made and the first is found.
    #[arg(long, value_name = "ID")]
    pub(crate) request: Option<Id>,
}

/// `ferrite pool status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The pool, or a disk of it.
    #[arg(value_name = "POOL[/DISK]", value_parser = pool_or_disk)]
    pub(crate) of: (String, Option<String>),
}

/// `ferrite pool resize`.
#[derive(Debug, Args)]
pub(crate) struct ResizeArgs {
    /// The disk.
    #[arg(value_name = "POOL/DISK")]
    pub(crate) disk: DiskName,
    /// Its size from now on.
    #[arg(value_parser = bytes)]
    pub(crate) size: u64,
}

/// `ferrite pool delete`.
#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// The disk.
    #[arg(value_name = "POOL/DISK")]
    pub(crate) disk: DiskName,
    /// Also if the disk has an owner.
    #[arg(long)]
    pub(crate) force: bool,
}

/// `ferrite pool replace`.
#[derive(Debug, Args)]
pub(crate) struct ReplaceArgs {
    /// The disk.
    #[arg(value_name = "POOL/DISK")]
    pub(crate) disk: DiskName,
    /// The server that is to have no copy of it any more.
    #[arg(value_parser = name)]
    pub(crate) server: String,
    /// The server or LUN that gets them. Without it, the emptiest server.
    #[arg(long, value_name = "SERVER", value_parser = name)]
    pub(crate) by: Option<String>,
}

/// `ferrite pool drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// The pool.
    #[arg(value_parser = name)]
    pub(crate) pool: String,
    /// The server.
    #[arg(value_parser = name)]
    pub(crate) server: String,
    /// Give it new copies again.
    #[arg(long)]
    pub(crate) undo: bool,
}

/// `ferrite pool add-lun`.
#[derive(Debug, Args)]
pub(crate) struct AddLunArgs {
    /// The pool.
    #[arg(value_parser = name)]
    pub(crate) pool: String,
    /// Its name in the pool, which no server has.
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// Its block device, or multipath's device of it.
    pub(crate) device: PathBuf,
    /// The array that it fails with. Copies of a part are on different arrays.
    #[arg(long, value_name = "NAME", value_parser = name, default_value = "luns")]
    pub(crate) array: String,
    /// Take it also if there is something on it.
    #[arg(long)]
    pub(crate) erase: bool,
    /// Take it also if its target forgets reservations when it starts again: two hosts may write then.
    #[arg(long)]
    pub(crate) weak: bool,
}

/// `ferrite pool remove-lun`.
#[derive(Debug, Args)]
pub(crate) struct RemoveLunArgs {
    /// The pool.
    #[arg(value_parser = name)]
    pub(crate) pool: String,
    /// The LUN.
    #[arg(value_parser = name)]
    pub(crate) name: String,
}

fn name(text: &str) -> Result<String, &'static str> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("a name has 1 to 40 of a-z, 0-9, '-' and '_'"),
    }
}

fn pool_or_disk(text: &str) -> Result<(String, Option<String>), &'static str> {
    match text.contains('/') {
        true => text.parse::<DiskName>().map(|it| (it.pool, Some(it.disk))),
        false => name(text.strip_prefix("pool:").unwrap_or(text)).map(|pool| (pool, None)),
    }
}
