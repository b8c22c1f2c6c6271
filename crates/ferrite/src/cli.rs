//! The command line.

use clap::{ArgAction, Args, Parser, Subcommand};
use ferrite_disk::size;

use crate::vdev::Vbd;

/// A virtual-disk backend for Xen guests.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 in use. \
                  RUST_LOG selects log messages more finely than -v."
)]
pub(crate) struct Cli {
    /// Log more: -v for what happens, -vv for everything.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve one disk to one guest, in the foreground, until the guest's device is removed.
    Serve(ServeArgs),
    /// Show what this kernel and Xen offer, what would be used, and why.
    Doctor(DoctorArgs),
}

/// `ferrite serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A raw disk image or block device; null: or null:SIZE for a disk that keeps nothing.
    pub(crate) image: String,

    /// The guest's device: its domain number, and the device as a number or as xvda, hda, sda.
    #[arg(long, value_name = "DOMID/DEVID")]
    pub(crate) xen: Vbd,

    /// Open the image read-only and refuse writes.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Offer up to this many queues, each with a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) queues: u32,

    /// Offer rings of up to 2^N pages.
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(0..=4))]
    pub(crate) ring_order: u32,

    /// Offer requests of up to N segments of 4 KiB; 0: only what fits into a ring slot (11).
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(0..=256))]
    pub(crate) indirect: u32,

    /// Memory for data in flight; at least 1 MiB a queue is taken.
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = memory)]
    pub(crate) memory: usize,
}

/// `ferrite doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Buffers are addressed with 32 bits, rounded up to 2 MiB.
const MAX_MEMORY_BYTES: u64 = 2 << 30;

fn memory(text: &str) -> Result<usize, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    if bytes == 0 || bytes > MAX_MEMORY_BYTES {
        return Err("it must be more than 0 and at most 2G".into());
    }
    usize::try_from(bytes).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_has_the_documented_defaults() {
        let cli = Cli::try_parse_from(["ferrite", "serve", "a.img", "--xen", "3/xvda"]).unwrap();
        let Command::Serve(args) = cli.command else { panic!("not serve") };
        assert_eq!((args.image.as_str(), args.read_only), ("a.img", false));
        assert_eq!((args.xen.domain.0, args.xen.device), (3, 51712));
        assert_eq!((args.queues, args.ring_order, args.indirect), (4, 4, 256));
        assert_eq!(args.memory, 8 << 20);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for bad in [
            ["--queues", "0"],
            ["--queues", "1000000000"],
            ["--ring-order", "5"],
            ["--ring-order", "-1"],
            ["--indirect", "257"],
            ["--memory", "0"],
            ["--memory", "3G"],
            ["--memory", "lots"],
        ] {
            let args = ["ferrite", "serve", "a.img", "--xen", "3/51712"].iter().chain(&bad);
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?}");
        }
    }
}
