//! `ferrite disk wait`, which hotplug scripts of toolstacks call.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, Parser as _};
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Attached, WaitParams};
use ferrite_daemon::directory;
use ferrite_daemon::state::States;

use super::{ANSWER, call, id, not_answered, places, seconds, tell, why};
use crate::cli::{DiskArg, RunDirArgs};
use crate::exit::Failure;
use crate::vdev::Vbd;

/// The pause before connecting again to a daemon that is restarting.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// `ferrite disk wait`.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    disk: DiskArg,
    /// How long to wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u32).range(0..=300))]
    timeout: u32,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    places: RunDirArgs,
}

/// `ferrite disk wait DISK` by itself.
#[derive(Debug, clap::Parser)]
struct Alone {
    #[command(flatten)]
    args: WaitArgs,
}

/// The arguments, if the words are those of a hotplug script. `None`: the definition of all commands parses them.
///
/// That definition costs most of a short command's time and memory, and xl runs the script once for each disk.
pub(crate) fn of_script(words: &[OsString]) -> Option<WaitArgs> {
    match words {
        [program, disk, wait, of] if disk == "disk" && wait == "wait" => {
            Alone::try_parse_from([program, of]).ok().map(|alone| alone.args)
        }
        _ => None,
    }
}

/// Waits until the disk is served.
pub(super) fn wait(args: &WaitArgs) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let done = until_served(&args.places.run_dir, disk, args.timeout)?;
    tell(args.json, &done, || println!("disk {disk} is served"))
}

/// Waits also for a daemon that is restarting: otherwise xl's script fails a whole guest.
pub(super) fn until_served(run: &Path, disk: Vbd, timeout: u32) -> Result<Attached, Failure> {
    let end = Instant::now() + seconds(timeout);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout_s = u32::try_from(left.as_secs()).unwrap_or(timeout);
        let asked = WaitParams { backend: directory::path(id(disk)), timeout_s };
        match call(run, "attach.wait", &asked, ANSWER + left) {
            Err(e) if comes_again(&e, run, disk) && !left.is_zero() => {
                std::thread::sleep(ASK_AGAIN);
            }
            answered => {
                return answered.map_err(|e| {
                    let what = format!("disk {disk} is not served");
                    not_answered(&what, &e, why(disk, &e))
                });
            }
        }
    }
}

/// Whether the daemon that serves the disk is restarting.
fn comes_again(e: &ClientError, run: &Path, disk: Vbd) -> bool {
    match e {
        // The daemon has ended in good order while it served this disk.
        ClientError::Unreachable(e) if e.kind() == io::ErrorKind::NotFound => {
            States::file(&places(run).states(), id(disk)).exists()
        }
        // The daemon was killed, or ended before it could answer.
        ClientError::Unreachable(e) => e.kind() == io::ErrorKind::ConnectionRefused,
        ClientError::Broken(e) => matches!(
            e.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
        ),
        ClientError::Refused(_) => false,
    }
}
