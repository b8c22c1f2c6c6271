//! `ferrite fence`: the reservation of a LUN, by hand.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use ferrite_daemon::config::{CONFIGURED_BY, Config, PATH};
use ferrite_host::fence::{self, Refusal, Status, Terms};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::exit::{Code, Failure};
use crate::plain::one_line;

/// How often a LUN that is in use is asked for, and the time between: half a second in all.
const TRIES: u32 = 25;
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// The arguments of `ferrite fence`.
#[derive(Debug, Args)]
#[command(
    after_help = "A disk with fence = \"reservation\" in ferrite.toml has its LUN reserved while it is open: no other host can \
                  write to it. These commands are for LUNs whose host is gone."
)]
pub(crate) struct FenceArgs {
    #[command(subcommand)]
    command: FenceCommand,

    /// The folder of this host's keys. By default `fences` in the state_folder of ferrite.toml.
    #[arg(long, global = true, value_name = "DIR")]
    records: Option<PathBuf>,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum FenceCommand {
    /// Show which host has a LUN reserved, and whether its target keeps reservations.
    Status(DeviceArg),
    /// Take a LUN from the host that has it: that host can write nothing to it from then on.
    Steal(StealArgs),
    /// Give back a LUN that no disk of this host has.
    Release(DeviceArg),
}

/// A LUN.
#[derive(Debug, Args)]
struct DeviceArg {
    /// The LUN's block device, or multipath's device of it.
    device: PathBuf,
}

/// The arguments of `ferrite fence steal`.
#[derive(Debug, Args)]
struct StealArgs {
    /// The LUN's block device, or multipath's device of it.
    device: PathBuf,

    /// Take it also if its target forgets reservations when it starts again.
    #[arg(long)]
    weak: bool,
}

/// Runs `ferrite fence`.
pub(crate) fn run(args: &FenceArgs, json: bool) -> Result<(), Failure> {
    let records = match &args.records {
        Some(records) => records.clone(),
        None => configured()?,
    };
    match &args.command {
        FenceCommand::Status(DeviceArg { device }) => status(device, &records, json),
        FenceCommand::Steal(StealArgs { device, weak }) => {
            let terms = Terms { weak: *weak, records };
            let stolen = fence::steal(open_alone(device)?.as_fd(), &terms);
            match stolen.map_err(|e| refused("take", device, &e))? {
                Some(key) => {
                    println!("{}: the host with key {key:016x} is shut out", device.display())
                }
                None => println!("{}: no other host has it reserved", device.display()),
            }
            Ok(())
        }
        FenceCommand::Release(DeviceArg { device }) => {
            fence::release(open_alone(device)?.as_fd(), &records)
                .map_err(|e| refused("release", device, &e))
        }
    }
}

fn configured() -> Result<PathBuf, Failure> {
    let named = std::env::var_os(CONFIGURED_BY).map(PathBuf::from);
    let file = named.clone().unwrap_or_else(|| PATH.into());
    let config = Config::load(&file, named.is_some()).map_err(|e| {
        Failure::new(
            "cannot find this host's keys at LUNs",
            e.to_string(),
            "correct that file, or name --records DIR",
        )
    })?;
    Ok(config.fence_records())
}

/// Opens a LUN that no disk of this host has. A guest here goes on with what it has in memory: after the order its writes would
/// be executed on what another host has written.
fn open_alone(device: &Path) -> Result<OwnedFd, Failure> {
    opened_in_a_while(device).map_err(|e| match e {
        Errno::BUSY | Errno::AGAIN => {
            let why = "a process of this host has it open";
            let help = "detach its disk first (ferrite disk list); a LUN with several paths is named by multipath's device";
            Failure::new(format!("cannot open {}", device.display()), why, help).with_code(Code::BUSY)
        }
        e => cannot_open(device, e),
    })
}

/// Waits for a moment: the kernel closes the files of a process some time after it has been killed.
fn opened_in_a_while(device: &Path) -> Result<OwnedFd, Errno> {
    for _ in 0..TRIES {
        match fence::open_alone(device) {
            Err(Errno::BUSY | Errno::AGAIN) => std::thread::sleep(BETWEEN_TRIES),
            done => return done,
        }
    }
    fence::open_alone(device)
}

fn cannot_open(device: &Path, e: Errno) -> Failure {
    let code = if e == Errno::NOENT { Code::NOT_FOUND } else { Code::FAILED };
    let help = "name the LUN's block device, as root";
    Failure::new(format!("cannot open {}", device.display()), e, help).with_code(code)
}

fn refused(what: &str, device: &Path, e: &Refusal) -> Failure {
    let code = match e {
        Refusal::InUse(_) | Refusal::Foreign(_) => Code::BUSY,
        _ => Code::FAILED,
    };
    let shown = device.display().to_string();
    Failure::new(format!("cannot {what} {shown}"), e.to_string(), e.help(&shown)).with_code(code)
}

fn status(device: &Path, records: &Path, json: bool) -> Result<(), Failure> {
    // Opened for reading, questions need no more: programs that have the LUN open notice nothing.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(device, flags, Mode::empty()).map_err(|e| cannot_open(device, e))?;
    let found = fence::status(file.as_fd(), records).map_err(|e| refused("ask", device, &e))?;
    let Status { abilities, reservation, keys, own } = found;
    let holder = reservation.map(|reservation| reservation.key);
    let is_own = holder.is_some_and(|key| own.contains(&key));
    let hex = |key: &u64| format!("{key:016x}");
    if json {
        let value = json!({
            "device": device.display().to_string(),
            "holder": holder.as_ref().map(hex),
            "is_this_host": is_own,
            "is_of_ferrites_type": reservation.map(|reservation| reservation.is_ours_by_type),
            "registered": keys.iter().map(hex).collect::<Vec<_>>(),
            "own": own.iter().map(hex).collect::<Vec<_>>(),
            "keeps_reservations": abilities.can_persist,
        });
        println!("{value}");
        return Ok(());
    }
    println!("device      {}", one_line(&device.display().to_string()));
    let whose = match (holder, is_own) {
        (None, _) => "no host".to_owned(),
        (Some(key), true) => format!("this host, key {key:016x}"),
        (Some(key), false) => format!("another host, key {key:016x}"),
    };
    println!("reserved    {whose}");
    println!("registered  {}", keys.iter().map(hex).collect::<Vec<_>>().join(" "));
    let keeps = match (abilities.has_type, abilities.can_persist) {
        (false, _) => "no reservation Write Exclusive, Registrants Only: it cannot be fenced",
        (true, true) => "keeps reservations when it starts again",
        (true, false) => {
            "WEAK: forgets reservations when it starts again, two hosts may write then"
        }
    };
    println!("target      {keeps}");
    Ok(())
}
