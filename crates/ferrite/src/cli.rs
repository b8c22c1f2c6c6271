//! The command line.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgAction, Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use ferrite_disk::size;
use ferrite_io::engines::EngineChoice;
use ferrite_io::shares::Shares;
use ferrite_serve::polling::{Budget, PollWindow, host_units};
use ferrite_serve::tuning::Tuning;
use ferrite_xen::loopback::CopyWith;
use ferrite_xen::mover::{DISK_MAPPINGS, HOST_MAPPINGS, Mover};
use serde::{Deserialize, Serialize};

use crate::exit::Code;
use crate::image::args::ImageArgs;
use crate::parents::ParentsArgs;
use crate::vdev::Vbd;

/// A virtual-disk backend for Xen guests.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 in use, 5 damaged, \
                  130 interrupted. RUST_LOG selects log messages more finely than -v."
)]
pub(crate) struct Cli {
    /// Log more: -v for what happens, -vv for everything.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Prints why the command line is not understood, or the help that it asks for.
pub(crate) fn refuse(e: &clap::Error) -> ExitCode {
    // With standard error closed, the code is all that can be given.
    let _ = e.print();
    match e.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if is_check() => Code::NOT_CHECKED.into(),
        _ => Code::USAGE.into(),
    }
}

/// Whether the command is `image check`, whatever else there is: 2 would say that it has found
/// damage.
fn is_check() -> bool {
    let understood = Cli::command().ignore_errors(true).try_get_matches();
    let image = understood.as_ref().ok().and_then(|cli| cli.subcommand_matches("image"));
    image.is_some_and(|image| image.subcommand_name() == Some("check"))
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve one disk to one guest, in the foreground, until the guest's device is removed.
    Serve(ServeArgs),
    /// Show what this kernel and Xen offer, what would be used, and why.
    Doctor(DoctorArgs),
    /// Measure the backend without Xen: guests are processes of this machine.
    Bench(BenchArgs),
    /// Make, look at, copy, merge and mend disk images that nobody is using.
    Image(ImageArgs),
    /// Write manual pages and completions for shells, for packages.
    #[command(hide = true)]
    Generate(GenerateArgs),
    /// One guest of `bench`, which starts it.
    #[command(hide = true)]
    BenchGuest(BenchGuestArgs),
    /// The copies of `bench` alone: the measure of everything around them.
    #[command(hide = true)]
    BenchBare(BenchBareArgs),
}

/// `ferrite serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; null: or null:SIZE for a disk that keeps nothing.
    pub(crate) image: OsString,

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

    /// What does the disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, value_name = "ENGINE", default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,

    /// Ask the device for completions instead of waiting for its interrupts, where IMAGE is a block
    /// device with poll queues: a processor is busy whenever requests are in flight.
    #[arg(long)]
    pub(crate) poll_storage: bool,

    /// Use no more processor time than this, in percent of one processor: 200 is two; without it,
    /// there is no bound.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=6400))]
    pub(crate) cpu: Option<u32>,

    /// Memory for data in flight; at least 1 MiB a queue is taken.
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = memory)]
    pub(crate) memory: usize,

    /// How data gets from and to the guest: copy, map, or persistent.
    #[arg(long, value_name = "HOW", default_value_t = Mover::Copy)]
    pub(crate) mover: Mover,

    /// Keep up to N pages of the guest mapped; what does not fit is copied.
    #[arg(long, value_name = "N", default_value_t = DISK_MAPPINGS)]
    pub(crate) map_budget: u32,

    /// Stop mapping when all ferrite processes of this host together have N pages mapped.
    #[arg(long, value_name = "N", default_value_t = HOST_MAPPINGS)]
    pub(crate) map_budget_host: u32,

    #[command(flatten)]
    pub(crate) parents: ParentsArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

/// How the backend goes about its work; of `serve` and `bench`.
#[derive(Debug, Args)]
pub(crate) struct TuningArgs {
    /// Look for work for so many microseconds before sleeping; auto: as long as it pays, and not
    /// where no processor is idle; 0: never.
    #[arg(long, value_name = "US|auto", default_value_t = PollWindow::Auto)]
    pub(crate) poll_us: PollWindow,

    /// Processor time that polling may take, in percent of one processor.
    #[arg(long, value_name = "PERCENT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(0..=6400))]
    pub(crate) poll_cpu: u32,

    /// Processors that all disks of this host together may poll with; by default half of
    /// them, and at least one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub(crate) poll_host: Option<u32>,

    /// Give each request to the storage by itself, even where neighbours could share an
    /// operation.
    #[arg(long)]
    pub(crate) no_merge: bool,
}

impl TuningArgs {
    /// For the queues.
    pub(crate) fn tuning(&self) -> Tuning {
        Tuning { poll: self.poll_us, merge: !self.no_merge }
    }

    /// What a disk may poll with, as far as the others that share the file leave it.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn polling(&self, shared: &Path) -> io::Result<Budget> {
        let units = self.poll_host.unwrap_or_else(host_units);
        Ok(Budget::shared(self.poll_cpu, Shares::open(shared, units)?))
    }
}

/// `ferrite generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Where to: man/ and the completions are made there.
    pub(crate) directory: PathBuf,
}

/// `ferrite doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `ferrite bench`.
#[derive(Debug, Args)]
#[command(
    after_help = "This is the loopback, not Xen: the backend is the real one, each guest is \
                        a process that speaks blkif over shared memory, and copies stand in for \
                        grant copies. docs/bench.md says how to compare it with fio."
)]
pub(crate) struct BenchArgs {
    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; null: or null:SIZE for a disk that keeps nothing. All guests share it; each queue of each guest has a part of it to itself.
    pub(crate) image: String,

    /// Guests, each a process.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) guests: u32,

    /// Queues of each guest, each with a thread there and one here.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) queues: u32,

    /// Queues of each guest that have work; the others are connected and idle. By default all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) load_queues: Option<u32>,

    /// Requests that each queue keeps in flight.
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) depth: u32,

    /// Send that many at once, and the next when all of them were answered, instead of one for
    /// each answer.
    #[arg(long)]
    pub(crate) batch: bool,

    /// Bytes of each request, a multiple of 512.
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = block)]
    pub(crate) block: u32,

    /// What the guests do.
    #[arg(long, value_enum, default_value_t = Mode::Randread)]
    pub(crate) mode: Mode,

    /// Overwrite what IMAGE holds: the modes that write destroy it.
    #[arg(long)]
    pub(crate) force_overwrite: bool,

    /// How data gets from and to a guest: copy, map, or persistent.
    #[arg(long, value_name = "HOW", default_value_t = Mover::Copy)]
    pub(crate) mover: Mover,

    /// What copies: memcpy, or process-vm (the kernel, between address spaces).
    #[arg(long, value_name = "HOW", default_value_t = CopyWith::Memcpy)]
    pub(crate) copy_with: CopyWith,

    /// Seconds to measure, after a ramp that does not count.
    #[arg(long, value_name = "N", default_value = "10", value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Before that, leave everything connected and idle for N seconds, and count how often
    /// something of the backend is woken.
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub(crate) idle: Option<f64>,

    /// Requests of up to N segments of 4 KiB; 0: only what fits into a ring slot (11).
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(0..=256))]
    pub(crate) indirect: u32,

    /// Rings of 2^N pages; by default the smallest that hold the depth.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4))]
    pub(crate) ring_order: Option<u32>,

    /// What does the disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, value_name = "ENGINE", default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,

    /// Ask the device for completions instead of waiting for its interrupts, where IMAGE is a block
    /// device with poll queues: a processor is busy whenever requests are in flight.
    #[arg(long)]
    pub(crate) poll_storage: bool,

    /// Memory for each guest's data in flight; at least 1 MiB a queue is taken.
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = memory)]
    pub(crate) memory: usize,

    /// Microseconds that a guest polls for responses, the event already asked for, before it
    /// sleeps, as Linux guests do that poll before they halt. By default 50 where every queue can
    /// have two processors, otherwise 0.
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) guest_poll: Option<u32>,

    #[command(flatten)]
    pub(crate) parents: ParentsArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a guest of the bench does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// Read one block after the other.
    Read,
    /// Write one block after the other.
    Write,
    /// Read blocks anywhere.
    Randread,
    /// Write blocks anywhere.
    Randwrite,
    /// Read and write blocks anywhere, half of each.
    Randrw,
    /// Read stretches of 112 KiB one after the other, of each the even blocks and then the odd
    /// ones: what is contiguous on the disk comes out of order.
    Interleaved,
}

impl Mode {
    /// Whether it changes the image.
    pub(crate) fn writes(self) -> bool {
        matches!(self, Mode::Write | Mode::Randwrite | Mode::Randrw)
    }
}

/// `ferrite bench-guest`.
#[derive(Debug, Args)]
pub(crate) struct BenchGuestArgs {
    /// The guest, as text for what was inherited.
    pub(crate) guest: String,
    /// What it shall do, as JSON.
    pub(crate) task: String,
}

/// `ferrite bench-bare`.
#[derive(Debug, Args)]
pub(crate) struct BenchBareArgs {
    /// What copies: memcpy or process-vm.
    pub(crate) copy_with: CopyWith,

    /// Pages that are copied to, again and again.
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) pages: u32,

    /// Pages of each process_vm call.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) batch: u32,

    /// Seconds to measure.
    #[arg(long, value_name = "N", default_value = "2", value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Be the guest, which was inherited as this text says: hold its memory until standard input
    /// ends.
    #[arg(long, value_name = "GUEST")]
    pub(crate) guest: Option<String>,
}

/// The largest request that the protocol has.
const MAX_BLOCK_BYTES: u64 = 1 << 20;

fn block(text: &str) -> Result<u32, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    if bytes == 0 || bytes > MAX_BLOCK_BYTES || !bytes.is_multiple_of(512) {
        return Err("it must be a multiple of 512, and at most 1M".into());
    }
    u32::try_from(bytes).map_err(|e| e.to_string())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=86400.0).contains(&seconds) => Ok(seconds),
        _ => Err("it must be a number from 0.1 to 86400".into()),
    }
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
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_has_the_documented_defaults() {
        let cli = Cli::try_parse_from(["ferrite", "serve", "a.img", "--xen", "3/xvda"]).unwrap();
        let Command::Serve(args) = cli.command else { panic!("not serve") };
        assert_eq!((args.image.to_str(), args.read_only), (Some("a.img"), false));
        assert_eq!((args.xen.domain.0, args.xen.device), (3, 51712));
        assert_eq!((args.queues, args.ring_order, args.indirect), (4, 4, 256));
        assert_eq!((args.memory, args.engine), (8 << 20, EngineChoice::Auto));
        assert_eq!((args.mover, args.map_budget, args.map_budget_host), (Mover::Copy, 4224, 65536));
    }

    #[test]
    fn every_option_of_serve_is_in_the_documentation() {
        let cli = Cli::command();
        let serve = cli.find_subcommand("serve").unwrap();
        let text = include_str!("../../../docs/serve.md");
        let options: Vec<&str> = serve.get_arguments().filter_map(|a| a.get_long()).collect();
        assert!(options.len() > 10, "{options:?}");
        for option in options {
            let told = [' ', '`'].map(|end| text.contains(&format!("--{option}{end}")));
            assert!(told.contains(&true), "--{option} is not in docs/serve.md");
        }
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
            ["--engine", "io_uring"],
            ["--mover", "steal"],
            ["--map-budget", "-1"],
        ] {
            let args = ["ferrite", "serve", "a.img", "--xen", "3/51712"].iter().chain(&bad);
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?}");
        }
    }
}
