//! The command line.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use ferrite::options::{MemoryArgs, TuningArgs};
use ferrite::parents::ParentsArgs;
use ferrite_disk::size;
use ferrite_io::engines::EngineChoice;
use ferrite_loopback::CopyWith;
use ferrite_serve::memory::parse_bytes;
use ferrite_serve::path::limit::Limits;
use ferrite_xen::mover::Mover;
use serde::{Deserialize, Serialize};

/// Measures Ferrite's backend without Xen: guests are processes of this machine.
#[derive(Debug, Parser)]
#[command(
    name = "ferrite-bench",
    version,
    after_help = "This is the loopback, not Xen: the backend is the real one, each guest is \
                        a process that speaks blkif over shared memory, and copies stand in for \
                        grant copies. docs/bench.md says how to compare it with fio."
)]
pub(crate) struct Cli {
    /// Log more: -v for what happens, -vv for everything.
    #[arg(short, long, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(flatten)]
    pub(crate) bench: BenchArgs,
}

/// A part of the bench that is selected by name, instead of a measurement.
#[derive(Debug, Parser)]
#[command(name = "ferrite-bench")]
pub(crate) struct PartCli {
    #[command(subcommand)]
    pub(crate) part: Part,
}

/// The commands besides a measurement, and the one for packages.
#[derive(Debug, Subcommand)]
pub(crate) enum Part {
    /// One guest of a measurement. The measurement starts it.
    Guest(GuestArgs),
    /// The keeper of one guest's worker. The measurement starts it.
    Keeper,
    /// A worker. Its keeper starts it.
    Worker(KeptArgs),
    /// A host of many disks: the daemon, keepers and workers as processes, and a guest for each disk.
    Host(HostArgs),
    /// The daemon of such a host. The measurement starts it.
    HostDaemon(HostDaemonArgs),
    /// The keeper of a disk of such a host. The daemon starts it.
    HostKeeper,
    /// A worker of such a host. Its keeper starts it.
    HostWorker(KeptArgs),
    /// The copies of a measurement alone, as the baseline of everything around them.
    Bare(BareArgs),
    /// The least pipeline of two processes for a load: the limit of any backend.
    Bound(BoundArgs),
    /// The front of that pipeline. The measurement starts it.
    BoundFront(GuestArgs),
    /// Write the manual page and completions for shells, for packages.
    Generate(GenerateArgs),
}

/// The arguments of `ferrite-bench host`.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// Disks, each of a guest of its own.
    #[arg(long, value_name = "N", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=4000))]
    pub(crate) disks: u32,
}

/// The arguments of `ferrite-bench host-daemon`.
#[derive(Debug, Args)]
pub(crate) struct HostDaemonArgs {
    /// The folder with all of the host's files.
    pub(crate) folder: PathBuf,
}

/// The arguments of `ferrite-bench generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The directory in which man/ and the completions are written.
    pub(crate) directory: PathBuf,
}

/// The arguments of a measurement.
#[derive(Debug, Args)]
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

    /// Send so many requests at once, and the next batch when all were answered, instead of one for each answer.
    #[arg(long)]
    pub(crate) batch: bool,

    /// Measure no time: send a batch of as many requests as the depth N times, each when the backend sleeps and all
    /// answers are there, and print the number of requests. So counts of the backend's instructions do not depend on
    /// timing.
    #[arg(long, value_name = "N", conflicts_with_all = ["batch", "json", "idle", "rest", "kept"],
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) steps: Option<u32>,

    /// Bytes of each request, a multiple of 512.
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = block)]
    pub(crate) block: u32,

    /// The guests' load.
    #[arg(long, value_enum, default_value_t = Mode::Randread)]
    pub(crate) mode: Mode,

    /// Write no block of 4 KiB twice. Otherwise each request in flight rewrites its earlier data, which a store has
    /// already.
    #[arg(long)]
    pub(crate) distinct: bool,

    /// Overwrite the content of IMAGE: the modes that write destroy it.
    #[arg(long)]
    pub(crate) force_overwrite: bool,

    /// Have all writes go to this image, too; what it holds is lost.
    #[arg(long, value_name = "IMAGE", requires = "mirror_map")]
    pub(crate) mirror: Option<String>,

    /// The map of the mirror, which says what it lacks.
    #[arg(long, value_name = "FILE", requires = "mirror")]
    pub(crate) mirror_map: Option<PathBuf>,

    /// Limit requests and bytes in a second, as those of ferrite serve are: iops=500,bytes_write=10485760.
    #[arg(long, value_name = "LIMITS", default_value_t = Limits::default())]
    pub(crate) limit: Limits,

    /// How data moves between a guest and buffers: copy, map, or persistent.
    #[arg(long, value_name = "HOW", default_value_t = Mover::Copy)]
    pub(crate) mover: Mover,

    /// The copy method: memcpy, or process-vm (the kernel, between address spaces).
    #[arg(long, value_name = "HOW", default_value_t = CopyWith::Memcpy)]
    pub(crate) copy_with: CopyWith,

    /// Seconds to measure, after a ramp that does not count.
    #[arg(long, value_name = "N", default_value = "10", value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Before that, leave everything connected and idle for N seconds, and count the wake-ups of the backend.
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub(crate) idle: Option<f64>,

    /// Serve each guest as the daemon does: by a keeper and a worker without rights, processes of their own. Needs
    /// root.
    #[arg(long)]
    pub(crate) kept: bool,

    /// After the load, leave everything connected for N seconds, and report the backends' memory.
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub(crate) rest: Option<f64>,

    /// Requests of up to N segments of 4 KiB; 0: only what fits into a ring slot (11).
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(0..=256))]
    pub(crate) indirect: u32,

    /// Rings of 2^N pages; by default the smallest that hold the depth.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4))]
    pub(crate) ring_order: Option<u32>,

    /// Engine for disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, value_name = "ENGINE", default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,

    /// Poll the device for completions instead of waiting for its interrupts, if IMAGE is a block device with poll
    /// queues: a processor is busy while requests are in flight.
    #[arg(long)]
    pub(crate) poll_storage: bool,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    /// Memory for tables of the image that can be read again; each image has some in any case.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) metadata_cache: Option<usize>,

    /// Whether guests offer to keep pages granted: by default with the mover that uses it.
    #[arg(long, value_name = "BOOL")]
    pub(crate) front_persistent: Option<bool>,

    /// Microseconds that a guest polls for responses, with the event already requested, before it sleeps, as Linux
    /// guests do that poll before they halt. By default 50 if every queue can have two processors, otherwise 0.
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

/// A guest's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// Read one block after the other.
    Read,
    /// Write one block after the other.
    Write,
    /// Read blocks at random places.
    Randread,
    /// Write blocks at random places.
    Randwrite,
    /// Read and write blocks at random places, half of each.
    Randrw,
    /// Read stretches of 112 KiB one after the other, the even blocks of each and then the odd ones: contiguous blocks
    /// come out of order.
    Interleaved,
    /// Write blocks at random places, with a flush after each.
    Flush,
    /// Discard blocks at random places.
    Discard,
    /// Read blocks of the first half, while as many blocks of the second half are discarded: only reads
    /// are counted.
    Storm,
    /// Read blocks of the first half, while as many blocks of the second half are overwritten: only
    /// reads are counted.
    Churn,
}

impl Mode {
    /// Whether half of its requests are reads that count, and the others are disturbance.
    pub(crate) fn counts_reads_only(self) -> bool {
        matches!(self, Mode::Storm | Mode::Churn)
    }

    /// Whether it changes the image.
    pub(crate) fn writes(self) -> bool {
        !matches!(self, Mode::Read | Mode::Randread | Mode::Interleaved)
    }

    /// Whether all of its requests move data.
    pub(crate) fn moves_data_only(self) -> bool {
        !matches!(self, Mode::Flush | Mode::Discard | Mode::Storm)
    }
}

/// The arguments of `ferrite-bench worker`.
#[derive(Debug, Args)]
pub(crate) struct KeptArgs {
    /// The disk's run directory.
    #[arg(long)]
    pub(crate) run_dir: PathBuf,

    /// The program's name, for the argument parser.
    #[arg(skip = "ferrite-bench")]
    pub(crate) program: String,

    /// The arguments of the measurement.
    #[arg(last = true)]
    pub(crate) words: Vec<String>,
}

/// The arguments of `ferrite-bench guest`.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// The handle to the inherited guest, as text.
    pub(crate) guest: String,
    /// Its task, as JSON.
    pub(crate) task: String,
}

/// The arguments of `ferrite-bench bare`.
#[derive(Debug, Args)]
pub(crate) struct BareArgs {
    /// The copy method: memcpy or process-vm.
    pub(crate) copy_with: CopyWith,

    /// Pages that are copied to repeatedly.
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

    /// Act as the guest, with this handle: hold its memory until standard input ends.
    #[arg(long, value_name = "GUEST")]
    pub(crate) guest: Option<String>,
}

/// The arguments of `ferrite-bench bound`; the options are those of a measurement.
#[derive(Debug, Args)]
pub(crate) struct BoundArgs {
    /// A plain file or a block device.
    pub(crate) image: String,

    /// Requests in flight.
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) depth: u32,

    /// Bytes of each request, a multiple of 512.
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = block)]
    pub(crate) block: u32,

    /// The front's load.
    #[arg(long, value_enum, default_value_t = Mode::Randread)]
    pub(crate) mode: Mode,

    /// Overwrite the content of IMAGE.
    #[arg(long)]
    pub(crate) force_overwrite: bool,

    /// Microseconds that the back polls before it sleeps.
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub(crate) poll_us: u32,

    /// Microseconds that the front polls before it sleeps.
    #[arg(long, value_name = "US", default_value_t = 50,
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) guest_poll: u32,

    /// Seconds to measure.
    #[arg(long, value_name = "N", default_value = "2", value_parser = seconds)]
    pub(crate) seconds: f64,
}

/// The largest request of the protocol.
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
        PartCli::command().debug_assert();
    }

    #[test]
    fn without_an_image_there_is_nothing_to_measure() {
        assert!(Cli::try_parse_from(["ferrite-bench"]).is_err());
        assert!(Cli::try_parse_from(["ferrite-bench", "-v"]).is_err());
        assert!(Cli::try_parse_from(["ferrite-bench", "-v", "null:"]).is_ok());
    }
}
