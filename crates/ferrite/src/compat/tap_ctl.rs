//! `tap-ctl`, as scripts of toolstacks call tapdisk's. xl's `block-tap` asks for the process and the number of a disk
//! when it is attached, and has it ended when it is detached.
//!
//! The daemon serves attached disks, so this program makes nothing, and ends nothing that the toolstack has not
//! detached. As with tapdisk's program the exit code is an `errno`; callers compare it.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{CommandFactory as _, Parser};
use ferrite_daemon::control::client::{self, ClientError};
use ferrite_daemon::control::protocol::{
    Attached, Details, Disk, Disks, Nothing, PhaseName, ShowParams, WaitParams,
};
use ferrite_daemon::{Paths, directory};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Refusal, Tool, finish, status};
use crate::cli::{RunDirArgs, without_hidden};
use crate::plain::one_line;

/// The name by which scripts call this program.
const NAME: &str = "tap-ctl";

/// The environment variable of a toolstack's script with the directory of its disk.
const DISK: &str = "XENBUS_PATH";

/// How long the daemon may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// How long to wait for a disk that is being opened. xl gives its script forty seconds.
const SERVED_S: u32 = 10;
/// How long to wait for a disk that is being closed.
const CLOSED: Duration = Duration::from_secs(30);
/// The pause between those questions.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// A stand-in for tapdisk's tap-ctl, by which xl's block-tap finds disks that the daemon serves.
#[derive(Debug, Parser)]
#[command(name = NAME, after_help = "The exit code is 0, or the errno of what went wrong.")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// A line for each disk that is served: pid=PID minor=MINOR state=0 args=TYPE:PATH.
    List {
        /// Only disks of this process.
        #[arg(short, value_name = "PID")]
        pid: Option<u32>,
        /// Only the disk of this number.
        #[arg(short, value_name = "MINOR")]
        minor: Option<u32>,
        /// Only disks of this type: aio, vhd or qcow2.
        #[arg(short = 't', value_name = "TYPE")]
        kind: Option<String>,
        /// Only disks of this image; one that is being opened is waited for.
        #[arg(short, value_name = "PATH")]
        file: Option<String>,
        #[command(flatten)]
        places: RunDirArgs,
    },
    /// Wait until a disk that the toolstack has detached is closed.
    Destroy {
        /// Its process.
        #[arg(short, value_name = "PID")]
        pid: u32,
        /// Its number.
        #[arg(short, value_name = "MINOR")]
        minor: u32,
        #[command(flatten)]
        places: RunDirArgs,
    },
    /// Called by block-tap for a disk that is not served: fails with the reason.
    #[command(hide = true)]
    Allocate {
        #[command(flatten)]
        places: RunDirArgs,
    },
    /// Refused: the daemon serves what the toolstack attaches, and nothing else.
    #[command(hide = true)]
    Spawn,
    /// Does nothing: no number was allocated.
    #[command(hide = true)]
    Free {
        /// The number from allocate.
        #[arg(short)]
        minor: String,
    },
}

/// Its command line.
pub(crate) fn definition() -> clap::Command {
    Cli::command()
}

/// The whole program, with the name that it was called by.
pub(crate) fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(e) => {
            let e = without_hidden(e, &Cli::command());
            // With standard error closed, the code is all that can be given.
            let _ = e.print();
            return if e.exit_code() == 0 { ExitCode::SUCCESS } else { status(Errno::INVAL) };
        }
    };
    let done = match &cli.verb {
        Verb::List { pid, minor, kind, file, places } => {
            let wanted =
                Wanted { pid: *pid, minor: *minor, kind: kind.as_deref(), file: file.as_deref() };
            list(&Daemon(&places.run_dir), &wanted)
        }
        Verb::Destroy { pid, minor, places } => destroy(&Daemon(&places.run_dir), *pid, *minor),
        Verb::Allocate { places } => allocate(&Daemon(&places.run_dir)),
        Verb::Spawn => Err(not_served()),
        Verb::Free { minor: _ } => Ok(()),
    };
    finish(Tool::TapCtl, done)
}

fn not_served() -> Refusal {
    Refusal {
        errno: Errno::OPNOTSUPP,
        why: "the image is not served; ferrite disk list has the reason".to_owned(),
    }
}

/// Reports why the disk is not served. xl prints block-tap's output, which is only "Could not allocate minor" if this
/// step fails. If the next step fails, it is "Could not spawn tapdisk for" and the number of this step. So the number
/// is the reason.
fn allocate(daemon: &Daemon<'_>) -> Result<(), Refusal> {
    let asked_for = std::env::var(DISK).ok();
    let id = asked_for.and_then(|path| directory::id_of(&path)).ok_or_else(not_served)?;
    let disks = daemon.disks()?;
    let disk = disks.into_iter().find(|disk| disk.disk == id).ok_or_else(not_served)?;
    let (why, help) = disk.why.zip(disk.help).ok_or_else(not_served)?;
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "disk {id}: {}; {}", one_line(&why), one_line(&help));
    Ok(())
}

impl From<ClientError> for Refusal {
    fn from(e: ClientError) -> Refusal {
        let errno = match &e {
            ClientError::Unreachable(e) => Errno::from_io_error(e).unwrap_or(Errno::IO),
            ClientError::Broken(_) => Errno::PROTO,
            ClientError::Refused(_) => Errno::IO,
        };
        Refusal { errno, why: format!("{e}; {}", e.help()) }
    }
}

/// The daemon with this folder.
struct Daemon<'a>(&'a Path);

impl Daemon<'_> {
    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        params: &impl Serialize,
        wait_s: u32,
    ) -> Result<T, ClientError> {
        let socket = Paths { run: self.0.to_owned() }.control();
        client::call(&socket, method, params, ANSWER + Duration::from_secs(wait_s.into()))
    }

    fn disks(&self) -> Result<Vec<Disk>, ClientError> {
        self.call::<Disks>("disk.list", &Nothing {}, 0).map(|disks| disks.disks)
    }
}

/// The filters of `list`.
struct Wanted<'a> {
    pid: Option<u32>,
    minor: Option<u32>,
    kind: Option<&'a str>,
    file: Option<&'a str>,
}

impl Wanted<'_> {
    fn is(&self, disk: &Disk) -> bool {
        let format = disk.format.map(|format| format.tapdisk_word());
        self.pid.is_none_or(|pid| disk.pid == Some(pid))
            && self.minor.is_none_or(|minor| disk.minor == minor)
            && self.kind.is_none_or(|kind| format == Some(kind))
            && self.file.is_none_or(|file| disk.image.as_deref() == Some(file))
    }
}

fn list(daemon: &Daemon<'_>, wanted: &Wanted<'_>) -> Result<(), Refusal> {
    let mut disks = daemon.disks()?;
    let unserved = |disk: &&Disk| wanted.is(disk) && is_to_be_served(disk);
    if wanted.file.is_some() && disks.iter().any(|disk| unserved(&disk)) {
        for disk in disks.iter().filter(unserved) {
            let asked = WaitParams { backend: directory::path(disk.disk), timeout_s: SERVED_S };
            if let Err(e) = daemon.call::<Attached>("attach.wait", &asked, SERVED_S) {
                // A missing disk is no failure, so the script's log has the reason.
                let _ = writeln!(io::stderr(), "disk {}: {}", disk.disk, one_line(&e.to_string()));
            }
        }
        disks = daemon.disks()?;
    }
    let mut out = io::stdout().lock();
    for line in found(disks, wanted).iter().filter_map(line) {
        let _ = writeln!(out, "{line}");
    }
    Ok(())
}

/// The disks that match. block-tap takes the last line, so that is the disk that it was started for. If that one is not
/// served, no other disk of the same image may replace it.
fn found(mut disks: Vec<Disk>, wanted: &Wanted<'_>) -> Vec<Disk> {
    disks.retain(|disk| wanted.is(disk) && (is_served(disk) || is_to_be_served(disk)));
    disks.sort_by_key(|disk| (disk.since, !is_served(disk)));
    if wanted.file.is_some() && disks.last().is_some_and(is_to_be_served) {
        return Vec::new();
    }
    disks.retain(is_served);
    disks
}

fn is_served(disk: &Disk) -> bool {
    disk.phase == PhaseName::Served
}

/// Whether the disk will be served. A disk that rests is left out: its line comes with a later attachment.
fn is_to_be_served(disk: &Disk) -> bool {
    matches!(disk.phase, PhaseName::Starting | PhaseName::Failed)
}

/// One line, which scripts parse.
fn line(disk: &Disk) -> Option<String> {
    let (pid, format, image) = (disk.pid?, disk.format?, disk.image.as_ref()?);
    // A line break in a name would be another disk's line.
    let image = one_line(image);
    Some(format!("pid={pid} minor={} state=0 args={}:{image}", disk.minor, format.tapdisk_word()))
}

/// Waits for the end of a disk. A disk that is gone already is a success. An attached disk belongs to the toolstack.
fn destroy(daemon: &Daemon<'_>, pid: u32, minor: u32) -> Result<(), Refusal> {
    let end = Instant::now() + CLOSED;
    loop {
        let disks = daemon.disks()?;
        let is_meant = |disk: &&Disk| disk.pid == Some(pid) && disk.minor == minor;
        let Some(disk) = disks.iter().find(is_meant) else { return Ok(()) };
        let shown: Result<Details, _> =
            daemon.call("disk.show", &ShowParams { disk: disk.disk }, 0);
        let details = match shown {
            Err(e) if e.is_no_disk() => return Ok(()),
            shown => shown?,
        };
        if details.online {
            let why = format!("disk {} is attached: detach it (xl block-detach)", disk.disk);
            return Err(Refusal { errno: Errno::BUSY, why });
        }
        if Instant::now() > end {
            let waits = details.waits_for.unwrap_or_default();
            let why = format!("disk {} is still there; it waits for {waits}", disk.disk);
            return Err(Refusal { errno: Errno::TIMEDOUT, why });
        }
        std::thread::sleep(ASK_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_daemon::params::Format;
    use ferrite_daemon::state::DiskId;

    fn disk(format: Format, image: &str) -> Disk {
        Disk {
            full: None,
            paused: None,
            disk: DiskId { domid: 1, devid: 51712 },
            phase: PhaseName::Served,
            since: 1,
            format: Some(format),
            image: Some(image.to_owned()),
            pid: Some(77),
            minor: 3,
            starts: 1,
            why: None,
            help: None,
        }
    }

    #[test]
    fn lines_are_those_that_scripts_of_tapdisk_read() {
        for (format, image, expected) in [
            (Format::Raw, "/srv/a b.img", "pid=77 minor=3 state=0 args=aio:/srv/a b.img"),
            (Format::Vhd, "/srv/a:b.vhd", "pid=77 minor=3 state=0 args=vhd:/srv/a:b.vhd"),
            (Format::Qcow2, "/srv/a", "pid=77 minor=3 state=0 args=qcow2:/srv/a"),
            (Format::Raw, "/a\npid=1", "pid=77 minor=3 state=0 args=aio:/a\\npid=1"),
        ] {
            assert_eq!(line(&disk(format, image)).as_deref(), Some(expected));
        }
        assert_eq!(line(&Disk { pid: None, ..disk(Format::Raw, "/a") }), None);
    }

    #[test]
    fn every_filter_counts() {
        let all = Wanted { pid: None, minor: None, kind: None, file: None };
        let disk = disk(Format::Raw, "/srv/a");
        assert!(all.is(&disk));
        let (kind, file) = (Some("aio"), Some("/srv/a"));
        assert!(Wanted { pid: Some(77), minor: Some(3), kind, file }.is(&disk));
        assert!(!Wanted { pid: Some(78), ..all }.is(&disk));
        assert!(!Wanted { minor: Some(0), ..all }.is(&disk));
        assert!(!Wanted { kind: Some("vhd"), ..all }.is(&disk));
        assert!(!Wanted { file: Some("/srv"), ..all }.is(&disk));
    }

    #[test]
    fn a_disk_that_is_not_served_is_not_found_by_another_one_of_its_image() {
        let served = disk(Format::Raw, "/srv/a");
        let mut failed = disk(Format::Raw, "/srv/a");
        (failed.disk.devid, failed.phase) = (51728, PhaseName::Failed);
        let named = Wanted { pid: None, minor: None, kind: Some("aio"), file: Some("/srv/a") };
        let found = |disks: &[Disk], wanted| found(disks.to_vec(), wanted).len();
        assert_eq!(found(&[failed.clone(), served.clone()], &named), 0);
        let later = Disk { since: 2, ..served.clone() };
        assert_eq!(found(&[later, failed.clone(), served.clone()], &named), 2);
        assert_eq!(found(&[failed, served], &Wanted { file: None, ..named }), 1);
    }
}
