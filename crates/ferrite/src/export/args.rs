//! The arguments of `ferrite export`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ferrite_io::engines::EngineChoice;
use ferrite_serve::memory::parse_bytes;
use ferrite_serve::path::full::OnFull;

use super::network::NetworkArgs;
use crate::options::{StoreMemoryArgs, engines, on_full_policies};
use crate::parents::ParentsArgs;

/// `ferrite export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    #[command(subcommand)]
    pub(crate) command: ExportCommand,
}

/// The protocols.
#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Serve NBD on a Unix socket or by TLS: for QEMU, nbd-client, nbdcopy and other programs that use libnbd.
    Nbd(NbdArgs),
}

/// `ferrite export nbd`.
#[derive(Debug, Args)]
pub(crate) struct NbdArgs {
    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; store:PATH#NAME for a volume of a store; null: or null:SIZE for a disk that keeps nothing.
    /// NAME=IMAGE gives it the name by which clients choose it. Several images without NAME are called as
    /// their files without extension, or as their volumes; a single one has any name.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<OsString>,

    /// Listen here. The socket is accessible to this user only, and removed at the end. The socket that a killed server
    /// has left is replaced. Not needed if systemd passes a socket, or with --listen.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) network: NetworkArgs,

    /// Open the image read-only and refuse writes.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Keep the space that the image has: refuse discards, and write zeros so that they have space.
    #[arg(long)]
    pub(crate) keep_allocated: bool,

    /// Serve up to N clients at once, each with a thread of its own; further clients are disconnected.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) clients: u32,

    /// If the storage has no space for a write: fail it (error), or answer it when there is space (wait).
    #[arg(long, value_name = "POLICY", default_value_t = OnFull::Error, value_parser = on_full_policies())]
    pub(crate) on_full: OnFull,

    /// Most memory for data in flight of each client; at least 2 MiB. It is taken as it is used.
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = parse_bytes)]
    pub(crate) memory: usize,

    /// Engine for disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, value_name = "ENGINE", default_value_t = EngineChoice::Auto, value_parser = engines())]
    pub(crate) engine: EngineChoice,

    /// Send each request to the storage by itself, even where adjacent ones could share an operation.
    #[arg(long)]
    pub(crate) no_merge: bool,

    #[command(flatten)]
    pub(crate) store: StoreMemoryArgs,

    #[command(flatten)]
    pub(crate) parents: ParentsArgs,
}
