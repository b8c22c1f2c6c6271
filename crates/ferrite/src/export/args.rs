//! The arguments of `ferrite export`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ferrite_io::engines::EngineChoice;
use ferrite_serve::memory::parse_bytes;
use ferrite_serve::path::full::OnFull;

use super::network::NetworkArgs;
use crate::controlled::ControlArgs;
use crate::options::{FencingArgs, StoreMemoryArgs, engines, on_full_policies};
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
    /// Serve one disk to a guest of QEMU or another virtual-machine monitor, by vhost-user on a Unix socket.
    VhostUser(VhostArgs),
}

/// `ferrite export vhost-user`.
#[derive(Debug, Args)]
pub(crate) struct VhostArgs {
    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; store:PATH#NAME for a volume of a store; null: or null:SIZE for a disk that keeps nothing.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: OsString,

    /// Listen here. The socket is accessible to this user only, and removed at the end. The socket that a killed server
    /// has left is replaced. Not needed if systemd passes a socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Offer up to N queues, each with a thread of its own while the guest uses it.
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(ferrite_serve::vhost::MAX_QUEUES)))]
    pub(crate) queues: u16,

    /// The name that the guest sees (in Linux, /dev/disk/by-id/virtio-NAME); at most 20 bytes. Without it, the file's name.
    #[arg(long, value_name = "NAME", value_parser = parse_serial)]
    pub(crate) serial: Option<String>,

    /// Memory for data in flight; at least 1 MiB for each queue. It is taken as it is used.
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = parse_bytes)]
    pub(crate) memory: usize,

    #[command(flatten)]
    pub(crate) open: OpenArgs,
}

fn parse_serial(text: &str) -> Result<String, String> {
    match text.len() <= ferrite_serve::vhost::ID_BYTES
        && text.bytes().all(|byte| byte.is_ascii_graphic())
    {
        true => Ok(text.to_owned()),
        false => Err("it must be at most 20 letters, digits and signs".to_owned()),
    }
}

/// How images are opened, for either protocol.
#[derive(Debug, Args)]
pub(crate) struct OpenArgs {
    /// Open the image read-only and refuse writes.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Keep the space that the image has: refuse discards, and write zeros so that they have space.
    #[arg(long)]
    pub(crate) keep_allocated: bool,

    #[command(flatten)]
    pub(crate) fence: FencingArgs,

    /// If the storage has no space for a write: fail it (error), or answer it when there is space (wait).
    #[arg(long, value_name = "POLICY", default_value_t = OnFull::Error, value_parser = on_full_policies())]
    pub(crate) on_full: OnFull,

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

/// `ferrite export nbd`.
#[derive(Debug, Args)]
pub(crate) struct NbdArgs {
    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; store:PATH#NAME for a volume of a store; null: or null:SIZE for a disk that keeps nothing.
    /// NAME=IMAGE gives it the name by which clients choose it. Without NAME it is called as its file
    /// without extension, or as its volume; a single one has the empty name, too.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<OsString>,

    /// Listen here. The socket is accessible to this user only, and removed at the end. The socket that a killed server
    /// has left is replaced. Not needed if systemd passes a socket, or with --listen.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) network: NetworkArgs,

    /// Do not tell clients the names of the images: a client that asks for the list gets an error, and has to know the
    /// name.
    #[arg(long)]
    pub(crate) no_list: bool,

    /// Serve up to N clients at once, each with a thread of its own; further clients are disconnected.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) clients: u32,

    /// Most memory for data in flight of each client; at least 2 MiB. It is taken as it is used.
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = parse_bytes)]
    pub(crate) memory: usize,

    #[command(flatten)]
    pub(crate) control: ControlArgs,

    #[command(flatten)]
    pub(crate) open: OpenArgs,
}
