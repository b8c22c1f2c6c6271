//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgAction, Args, CommandFactory as _, Parser, Subcommand};
use ferrite_io::engines::EngineChoice;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::path::limit::Limits;
use ferrite_xen::mover::{DISK_MAPPINGS, HOST_MAPPINGS, Mover};

use crate::backup::args::BackupArgs;
use crate::controlled::ControlArgs;
use crate::disk::{attach, change, device, dirty, export, limit, pause, wait};
use crate::exit::{Code, Failure};
use crate::export::args::ExportArgs;
use crate::fence::FenceArgs;
use crate::guests::GuestDisk;
use crate::image::args::ImageArgs;
use crate::job::args::{CoalesceArgs, JobArgs, MirrorArgs};
use crate::migrate::MigrateArgs;
use crate::net::NetArgs;
use crate::options::{
    FencingArgs, MemoryArgs, StoreMemoryArgs, TuningArgs, engines, movers, on_full_policies,
};
use crate::parents::ParentsArgs;
use crate::pool::args::PoolArgs;
use crate::seeing::args::{StatArgs, TopArgs};
use crate::seeing::trace::TraceArgs;
use crate::store::args::StoreArgs;
use crate::tunnel::TunnelArgs;
use crate::vdev::Vbd;

/// A virtual-disk backend for Xen guests.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 in use, 5 damaged, \
                  6 salvaged in part, 130 interrupted. RUST_LOG selects log messages more finely than -v."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,

    #[command(subcommand)]
    pub(crate) command: Command,
}

// The options of all commands. A doc comment would be the program's description.
#[derive(Debug, Default, Args)]
pub(crate) struct GlobalArgs {
    /// Log more: -v for what happens, -vv for everything.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Print results, where the command has any, and errors as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print results that were asked for and errors only.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
}

impl Cli {
    /// The command of a hotplug script, parsed without the definition of all commands.
    pub(crate) fn of_script(words: &[OsString]) -> Option<Cli> {
        let wait = crate::disk::wait::of_script(words)?;
        let command = Command::Disk(DiskArgs { command: DiskCommand::Wait(wait) });
        Some(Cli { global: GlobalArgs::default(), command })
    }

    /// Whether results and errors are JSON.
    pub(crate) fn is_json(&self) -> bool {
        let is_output = matches!(&self.command, Command::Image(args) if args.is_json());
        self.global.json || is_output
    }
}

/// The command line.
pub(crate) fn definition() -> clap::Command {
    Cli::command()
}

/// Prints why the command line is invalid, or the help that it asks for.
pub(crate) fn refuse(e: &clap::Error) -> ExitCode {
    let code = match e.exit_code() {
        0 => {
            // With standard output closed, the code is all that can be given.
            let _ = e.print();
            return ExitCode::SUCCESS;
        }
        _ if is_check() => Code::NOT_CHECKED,
        _ => Code::USAGE,
    };
    if asks_for_json() {
        return misunderstood(e).with_code(code).report_as(true);
    }
    let _ = e.print();
    code.into()
}

/// Whether a command line that is not understood asks for JSON.
fn asks_for_json() -> bool {
    let words: Vec<OsString> = std::env::args_os().take_while(|word| word != "--").collect();
    let output = words.windows(2).any(|pair| pair[0] == "--output" && pair[1] == "json");
    output || words.iter().any(|word| word == "--json" || word == "--output=json")
}

/// The parts of clap's text: the reason before the empty line, then tips and the usage.
fn misunderstood(e: &clap::Error) -> Failure {
    let text = e.render().to_string();
    let (why, help) = text.split_once("\n\n").unwrap_or((&text, ""));
    let joined = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let why = joined(why);
    Failure::new(
        "cannot understand the command line",
        why.strip_prefix("error: ").unwrap_or(&why),
        joined(help),
    )
}

/// Whether the command is `image check` or `store check`, whatever its other words. Their exit code 2 means damage, so
/// a usage error of them needs another one.
fn is_check() -> bool {
    let understood = Cli::command().ignore_errors(true).try_get_matches();
    let Ok(understood) = understood else { return false };
    let of = ["image", "store"].iter().find_map(|of| understood.subcommand_matches(of));
    of.is_some_and(|of| matches!(of.subcommand_name(), Some("check" | "scrub")))
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve disks to guests, in the foreground, until all of their devices are removed.
    #[command(override_usage = "ferrite serve [OPTIONS] IMAGE --xen DOMID/DEVID [OPTIONS]\n       \
              ferrite serve [OPTIONS] IMAGE --xen DOMID/DEVID [OPTIONS] IMAGE --xen DOMID/DEVID ...",
              after_help = SEVERAL)]
    Serve(ServeArgs),
    /// Serve all disks that the toolstack attaches, in the foreground, until it is stopped.
    Daemon(DaemonArgs),
    /// Attach disks to guests, see those that the daemon serves, and detach them.
    Disk(DiskArgs),
    /// See the daemon's jobs, wait for them, pause, limit and cancel them.
    Job(JobArgs),
    /// Have all writes of a running disk go to a second disk, too, and copy what that lacks; then move the disk there.
    #[command(after_help = crate::job::args::MIRROR_HELP)]
    Mirror(MirrorArgs),
    /// Move a running disk to the daemon of another host.
    #[command(after_help = crate::migrate::HELP)]
    Migrate(MigrateArgs),
    /// Move running disks to a new version of ferrite; guests see a short pause.
    Upgrade(UpgradeArgs),
    /// Speak TLS for another command.
    #[command(hide = true)]
    Tunnel(TunnelArgs),
    /// Export disks to programs of this host and of others, in the foreground, until a signal comes.
    Export(ExportArgs),
    /// Show what this kernel and Xen offer, what would be used, and why.
    Doctor(DoctorArgs),
    /// Make, inspect, copy, merge and repair disk images that are not in use.
    Image(ImageArgs),
    /// Make, inspect and check stores, which hold equal blocks once, and their volumes.
    Store(StoreArgs),
    /// Disks whose copies are on several servers (experimental).
    Pool(PoolArgs),
    /// See which host has a LUN reserved, and take it from a host that is gone.
    Fence(FenceArgs),
    /// Back disks up into folders, incrementally, and restore them.
    Backup(BackupArgs),
    /// Show statistics of disks: requests, data and latencies, one line per disk.
    Stat(StatArgs),
    /// Show statistics of disks on the terminal, until q is pressed.
    Top(TopArgs),
    /// Benchmarks: run the published experiments on this machine (ferrite-lab).
    #[command(disable_help_flag = true)]
    Lab(LabArgs),
    /// Record the requests of a disk one by one; make tables, pictures and a model of them.
    Trace(TraceArgs),
    /// Experimental: serve network interfaces of guests, and a switch between them.
    Net(NetArgs),
    /// Run a stand-in for one of tapdisk's tools: tap-ctl, vhd-util or td-util.
    #[command(disable_help_flag = true)]
    Compat(crate::compat::CompatArgs),
    /// Write manual pages and completions for shells, for packages.
    #[command(hide = true)]
    Generate(GenerateArgs),
}

impl Command {
    /// The options of `serve`, if that is the command.
    pub(crate) fn into_serve(self) -> Option<ServeArgs> {
        match self {
            Command::Serve(args) => Some(args),
            _ => None,
        }
    }
}

/// The help of `serve` after its options.
const SEVERAL: &str = "\
With several images, options before the first one hold for each disk. Options behind an image hold for
that disk alone: --xen always stands there. --cpu, --poll-host and --map-budget-host stand before the
first one: --cpu bounds all disks together.";

/// `ferrite lab`.
#[derive(Debug, Args)]
pub(crate) struct LabArgs {
    /// list, run, report, and their options.
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

/// `ferrite serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; store:PATH#NAME for a volume of a store; null: or null:SIZE for a disk that keeps nothing.
    pub(crate) image: OsString,

    /// The guest's device: its domain number, and the device as a number or as xvda, hda, sda.
    #[arg(long, value_name = "DOMID/DEVID")]
    pub(crate) xen: Vbd,

    /// Open the image read-only and refuse writes.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Keep the space that the image has: refuse discards, and write zeros so that they have space.
    #[arg(long)]
    pub(crate) keep_allocated: bool,

    #[command(flatten)]
    pub(crate) fence: FencingArgs,

    /// QEMU has the raw image open until the guest's own driver connects (an HVM guest's).
    #[arg(long, hide = true)]
    pub(crate) qemu_first: bool,

    /// The toolstack keeps others from the image and its parents (XAPI's storage manager): refuse none.
    #[arg(long, hide = true)]
    pub(crate) toolstack_locks: bool,

    /// The target of the disk's mirror.
    #[arg(long, hide = true, requires = "mirror_map")]
    pub(crate) mirror: Option<String>,

    /// The map of the disk's mirror.
    #[arg(long, hide = true, requires = "mirror")]
    pub(crate) mirror_map: Option<PathBuf>,

    /// The file in which changed blocks are noted.
    #[arg(long, hide = true)]
    pub(crate) changes: Option<PathBuf>,

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

    /// Engine for disk I/O: uring, aio, or auto: io_uring where it works, else Linux AIO.
    #[arg(long, value_name = "ENGINE", default_value_t = EngineChoice::Auto, value_parser = engines())]
    pub(crate) engine: EngineChoice,

    /// Poll the device for completions instead of waiting for its interrupts, if IMAGE is a block device with poll
    /// queues: a processor is busy while requests are in flight.
    #[arg(long)]
    pub(crate) poll_storage: bool,

    /// Limit the processor time, in percent of one processor: 200 is two. Without it there is no limit.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=6400))]
    pub(crate) cpu: Option<u32>,

    /// Limit requests and bytes in a second, as in iops=500,bytes_write=10485760; a burst stands behind a colon. There
    /// are iops, iops_read, iops_write, bytes, bytes_read and bytes_write.
    #[arg(long, value_name = "LIMITS", default_value_t = Limits::default())]
    pub(crate) limit: Limits,

    /// If the storage has no space for a write: fail it (error), or answer it when there is space (wait).
    #[arg(long, value_name = "POLICY", default_value_t = OnFull::Error, value_parser = on_full_policies())]
    pub(crate) on_full: OnFull,

    /// How data moves between the guest and buffers: copy, map, or persistent.
    #[arg(long, value_name = "HOW", default_value_t = Mover::Copy, value_parser = movers())]
    pub(crate) mover: Mover,

    /// Copy data through pages that this domain grants to itself, if it has any: these copies are faster.
    #[arg(long, value_name = "true|false", default_value_t = true, action = ArgAction::Set)]
    pub(crate) own_grants: bool,

    /// Keep up to N pages of the guest mapped; data in other pages is copied.
    #[arg(long, value_name = "N", default_value_t = DISK_MAPPINGS)]
    pub(crate) map_budget: u32,

    /// Stop mapping when all ferrite processes of this host together have N pages mapped.
    #[arg(long, value_name = "N", default_value_t = HOST_MAPPINGS)]
    pub(crate) map_budget_host: u32,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    #[command(flatten)]
    pub(crate) store: StoreMemoryArgs,

    #[command(flatten)]
    pub(crate) parents: ParentsArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    #[command(flatten)]
    pub(crate) control: ControlArgs,

    /// The disks after the first one (`pairs.rs`).
    #[arg(skip)]
    pub(crate) others: Vec<ServeArgs>,
}

/// The daemon's folder.
#[derive(Debug, Args)]
pub(crate) struct RunDirArgs {
    /// The daemon's folder, on tmpfs: control socket, state of disks, journals.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite")]
    pub(crate) run_dir: PathBuf,
}

/// `ferrite daemon`.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// The configuration; /etc/ferrite/ferrite.toml if it is there.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Check the configuration, report, and end.
    #[arg(long)]
    pub(crate) check_config: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk`.
#[derive(Debug, Args)]
pub(crate) struct DiskArgs {
    #[command(subcommand)]
    pub(crate) command: DiskCommand,
}

/// The argument of each command about one disk.
#[derive(Debug, Args)]
pub(crate) struct DiskArg {
    /// The guest by name, UUID or number, and the device as xvda, hda, sda or as a number (web1/xvda); or the disk's
    /// directory in xenstore (backend/vbd3/DOMID/DEVID).
    #[arg(value_name = "GUEST/DEV")]
    pub(crate) disk: GuestDisk,
}

/// The commands of `ferrite disk`.
#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// List all attached disks and their state.
    List {
        /// Print JSON instead of a table.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        places: RunDirArgs,
    },
    /// Show one disk, and what it waits for.
    Show {
        #[command(flatten)]
        disk: DiskArg,
        /// Print JSON instead of text.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        places: RunDirArgs,
    },
    /// Attach an image to a running guest as a disk, by xl 4.19 or later.
    #[command(
        after_help = "The daemon has to run, and the image has to be in one of its image_folders. The disk \
                            is attached until the guest ends; xl's configuration of the guest is not changed."
    )]
    Attach(attach::AttachArgs),
    /// Merge images of a running disk's chain: below the image that the guest writes to, or that one, too.
    #[command(
        after_help = "The merge is a job of the daemon (ferrite job): it goes on if this command is interrupted. \
                            The guest waits for a moment when the data are copied. If --from names the disk's own image, \
                            that is merged, too, and the image that it is merged into gets its name."
    )]
    Coalesce(CoalesceArgs),
    /// Show a disk to this host as a block device, for reading and mounting; or remove such a device.
    #[command(after_help = device::HELP)]
    Device(device::DeviceArgs),
    /// List the block devices that show disks.
    Devices(device::DevicesArgs),
    /// Detach a disk from its guest, which should have unmounted it; xl block-detach does the same.
    Detach {
        #[command(flatten)]
        disk: DiskArg,
        /// Detach it even if the guest does not release it: data that the guest has not written yet are lost.
        #[arg(long)]
        force: bool,
        /// How long the guest may take to release it.
        #[arg(long, value_name = "SECONDS", default_value_t = 10,
              value_parser = clap::value_parser!(u32).range(0..=300))]
        timeout: u32,
        /// Print JSON instead of text.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        places: RunDirArgs,
    },
    /// Give a disk to clients of other hosts, by NBD and TLS.
    #[command(after_help = export::HELP)]
    Export(export::ExportArgs),
    /// End a disk's export, and its clients' connections.
    Unexport(export::UnexportArgs),
    /// List the disks that are exported to other hosts.
    Exports(export::ExportsArgs),
    /// Limit the requests and bytes of a running disk in a second.
    #[command(after_help = limit::HELP)]
    Limit(limit::LimitArgs),
    /// Change settings of a running disk: on_full, poll_us, cpu.
    #[command(after_help = limit::SET_HELP)]
    Set(limit::SetArgs),
    /// Close a disk's image while its guest waits: other programs may change the image then.
    #[command(after_help = pause::HELP)]
    Pause(pause::PauseArgs),
    /// Let a paused disk go on, with another image if one is named.
    #[command(after_help = pause::RESUME_HELP)]
    Resume(pause::ResumeArgs),
    /// Keep a running disk as it is now under the name NEW; the guest goes on in a new image.
    #[command(after_help = change::SNAPSHOT_HELP)]
    Snapshot(change::SnapshotArgs),
    /// Record which parts of a running disk change, for incremental backups.
    #[command(subcommand)]
    Dirty(dirty::DirtyCommand),
    /// Make a running disk larger.
    #[command(after_help = change::RESIZE_HELP)]
    Resize(change::ResizeArgs),
    /// Serve a running disk from another image with the same contents.
    #[command(after_help = change::SWITCH_HELP)]
    Switch(change::SwitchArgs),
    /// Wait until a disk is served, as hotplug scripts of toolstacks do.
    Wait(wait::WaitArgs),
}

/// `ferrite worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    pub(crate) serve: ServeArgs,

    /// The parent of all run directories.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite")]
    pub(crate) run_dir: PathBuf,
}

/// `ferrite store-worker`.
#[derive(Debug, Args)]
pub(crate) struct StoreWorkerArgs {
    /// The store.
    pub(crate) store: PathBuf,

    /// The parent of all run directories.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite")]
    pub(crate) run_dir: PathBuf,

    /// The engine for disk I/O of commands.
    #[arg(long, value_name = "ENGINE", default_value_t = EngineChoice::Auto, value_parser = engines())]
    pub(crate) engine: EngineChoice,

    /// Processor time of all its disks together, in percent of one processor.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) cpu: Option<u32>,
}

/// `ferrite upgrade`.
#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// Only this disk: the guest by name, UUID or number, and the device as xvda or as a number (web1/xvda).
    #[arg(value_name = "GUEST/DEV")]
    pub(crate) disk: Option<GuestDisk>,

    /// The program to serve the disks; default: this program.
    #[arg(long, value_name = "FILE")]
    pub(crate) binary: Option<PathBuf>,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The directory in which man/ and the completions are written.
    pub(crate) directory: PathBuf,
}

/// `ferrite doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

#[cfg(test)]
mod tests {
    use ferrite_serve::memory::DataMemory;

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
        assert_eq!((args.memory.memory, args.engine), (DataMemory::Auto, EngineChoice::Auto));
        assert_eq!((args.memory.memory.bytes(), args.memory.memory_host), (8 << 20, None));
        assert_eq!((args.mover, args.map_budget, args.map_budget_host), (Mover::Copy, 4224, 65536));
    }

    #[test]
    fn every_option_of_serve_is_in_the_documentation() {
        let cli = Cli::command();
        let serve = cli.find_subcommand("serve").unwrap();
        let text = include_str!("../../../docs/serve.md");
        // Hidden ones are for the daemon, which starts workers with them.
        let shown = serve.get_arguments().filter(|a| !a.is_hide_set());
        let options: Vec<&str> = shown.filter_map(|a| a.get_long()).collect();
        assert!(options.len() > 10, "{options:?}");
        for option in options {
            let told = [' ', '`'].map(|end| text.contains(&format!("--{option}{end}")));
            assert!(told.contains(&true), "--{option} is not in docs/serve.md");
        }
    }

    #[test]
    fn every_option_of_an_export_is_in_the_documentation() {
        let cli = Cli::command();
        let export = cli.find_subcommand("export").unwrap().find_subcommand("nbd").unwrap();
        let options: Vec<&str> = export.get_arguments().filter_map(|a| a.get_long()).collect();
        assert!(options.len() > 5, "{options:?}");
        for option in options {
            let told = include_str!("../../../docs/nbd.md").contains(&format!("| `--{option}"));
            assert!(told, "--{option} is not in docs/nbd.md");
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
            ["--memory-host", "auto"],
            ["--engine", "io_uring"],
            ["--mover", "steal"],
            ["--map-budget", "-1"],
        ] {
            let args = ["ferrite", "serve", "a.img", "--xen", "3/51712"].iter().chain(&bad);
            assert!(Cli::try_parse_from(args).is_err(), "{bad:?}");
        }
    }
}
