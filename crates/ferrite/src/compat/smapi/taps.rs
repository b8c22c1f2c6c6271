//! Taps: disks before their guests, which `tap-ctl` makes and opens. This is all that the plug-ins know of them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::uri::Image;
use super::{Fault, Kind};

/// A tap is closed, or was never opened.
const CLOSED: u32 = 0x2;
/// A tap is paused, or is about to be.
const PAUSED: u32 = 0x10 | 0x20;
/// No daemon listens.
const EPROTO: i32 = Errno::PROTO.raw_os_error();
const ECONNREFUSED: i32 = Errno::CONNREFUSED.raw_os_error();
/// No such process, number or file.
const ENOENT: i32 = Errno::NOENT.raw_os_error();
/// A number cannot be freed while its process ends, which takes up to a second.
const FREE_TRIES: u32 = 40;
const FREE_PAUSE: Duration = Duration::from_millis(50);

/// The process and the number of a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tap {
    pub(super) pid: u32,
    pub(super) minor: u32,
}

/// A line of `tap-ctl list`: a process, a number, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) pid: Option<u32>,
    pub(super) minor: Option<u32>,
    pub(super) state: u32,
    /// TYPE:PATH, as it was given to open.
    pub(super) args: Option<String>,
}

impl Row {
    pub(super) fn tap(&self) -> Option<Tap> {
        Some(Tap { pid: self.pid?, minor: self.minor? })
    }

    /// The path of the image that the tap was opened with.
    pub(super) fn path(&self) -> Option<&str> {
        Some(self.args.as_deref()?.split_once(':')?.1)
    }

    /// Whether the tap has an image, also one that a pause has closed.
    pub(super) fn is_open(&self) -> bool {
        self.args.is_some() && self.state & CLOSED == 0 || self.is_paused()
    }

    pub(super) fn is_paused(&self) -> bool {
        self.state & PAUSED != 0
    }

    fn parse(line: &str) -> Row {
        let (mut row, mut rest) = (Row::default(), line);
        while !rest.is_empty() {
            if let Some(args) = rest.strip_prefix("args=") {
                // The last one, as paths have blanks.
                row.args = Some(args.to_owned());
                break;
            }
            let (word, others) = rest.split_once(' ').unwrap_or((rest, ""));
            match word.split_once('=') {
                Some(("pid", pid)) => row.pid = pid.parse().ok(),
                Some(("minor", minor)) => row.minor = minor.parse().ok(),
                Some(("state", state)) => {
                    let digits = state.strip_prefix("0x").unwrap_or(state);
                    row.state = u32::from_str_radix(digits, 16).unwrap_or_default();
                }
                _ => {}
            }
            rest = others;
        }
        row
    }
}

/// Why a step on a tap has failed.
#[derive(Debug)]
pub(super) struct TapError {
    /// The `errno`, as `tap-ctl` gives it.
    pub(super) errno: i32,
    pub(super) why: String,
}

impl TapError {
    /// No daemon has said which taps there are.
    pub(super) fn is_no_daemon(&self) -> bool {
        self.errno == EPROTO
    }

    pub(super) fn is_missing(&self) -> bool {
        self.errno == ENOENT
    }
}

impl From<TapError> for Fault {
    fn from(e: TapError) -> Fault {
        let help = match e.is_no_daemon() {
            true => "start the daemon: systemctl start ferrite",
            false => "tap-ctl list shows all taps; the log of the daemon has more",
        };
        Fault::new(Kind::Failed, format!("{}; {help}", e.why))
    }
}

type Done<T> = Result<T, TapError>;

/// The steps of a tap's life, in their order.
pub(super) trait Taps {
    /// A number for a new tap.
    fn allocate(&self) -> Done<u32>;
    /// A process for a new tap.
    fn spawn(&self) -> Done<u32>;
    /// Ends a process that has no number.
    fn end(&self, pid: u32) -> Done<()>;
    fn attach(&self, tap: Tap) -> Done<()>;
    fn open(&self, tap: Tap, image: &Image, read_only: bool) -> Done<()>;
    fn pause(&self, tap: Tap) -> Done<()>;
    fn unpause(&self, tap: Tap, image: &Image) -> Done<()>;
    fn close(&self, tap: Tap, close: Close) -> Done<()>;
    fn detach(&self, tap: Tap) -> Done<()>;
    fn free(&self, minor: u32) -> Done<()>;
    fn list(&self) -> Done<Vec<Row>>;
    /// The folder of the taps' sockets.
    fn sockets(&self) -> PathBuf;

    /// The path of a tap's NBD socket.
    fn socket(&self, tap: Tap) -> PathBuf {
        self.sockets().join(format!("nbd{}.{}", tap.pid, tap.minor))
    }
}

/// How a tap is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    Orderly,
    /// Without waiting for rings of dead guests.
    Forced,
}

/// Taps by `tap-ctl`, which is this program by another name.
pub(super) struct TapCtl<'a> {
    pub(super) run_dir: &'a Path,
}

impl TapCtl<'_> {
    /// Runs a verb, and returns its output: a line, or the lines of `list`.
    fn run(&self, verb: &str, args: &[&str]) -> Done<String> {
        let failed = |errno, why: &str| TapError { errno, why: format!("tap-ctl {verb}: {why}") };
        let mut command = Command::new("/proc/self/exe");
        command.args(["compat", "tap-ctl", verb]).args(args).stdin(Stdio::null());
        if self.run_dir != Path::new(crate::serve::RUN_DIR) {
            command.arg("--run-dir").arg(self.run_dir);
        }
        let output = command.output().map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(ENOENT);
            failed(errno, &format!("cannot be run: {e}"))
        })?;
        match output.status.code() {
            Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            code => {
                let said = String::from_utf8_lossy(&output.stderr);
                let said = said.trim().trim_start_matches("tap-ctl: ");
                Err(failed(code.unwrap_or(EPROTO), said))
            }
        }
    }

    fn on(&self, verb: &str, tap: Tap, more: &[&str]) -> Done<()> {
        let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
        let args = [&["-p", &pid, "-m", &minor], more].concat();
        self.run(verb, &args).map(drop)
    }
}

/// The number at the end of what a verb has printed.
fn number(verb: &str, printed: &str) -> Done<u32> {
    let digits = printed.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| TapError {
        errno: EPROTO,
        why: format!("tap-ctl {verb} has printed no number, but {printed:?}"),
    })
}

impl Taps for TapCtl<'_> {
    fn allocate(&self) -> Done<u32> {
        number("allocate", &self.run("allocate", &[])?)
    }

    fn spawn(&self) -> Done<u32> {
        number("spawn", &self.run("spawn", &[])?)
    }

    fn end(&self, pid: u32) -> Done<()> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        match pid.map(|pid| kill_process(pid, Signal::TERM)) {
            Some(Err(e)) if e != Errno::SRCH => {
                let why = format!("cannot end the process of a tap: {e}");
                Err(TapError { errno: e.raw_os_error(), why })
            }
            _ => Ok(()),
        }
    }

    fn attach(&self, tap: Tap) -> Done<()> {
        self.on("attach", tap, &[])
    }

    fn open(&self, tap: Tap, image: &Image, read_only: bool) -> Done<()> {
        let args = format!("{}:{}", image.kind(), image.path);
        let read_only: &[&str] = if read_only { &["-R"] } else { &[] };
        self.on("open", tap, &[&["-a", &args], read_only].concat())
    }

    fn pause(&self, tap: Tap) -> Done<()> {
        self.on("pause", tap, &[])
    }

    fn unpause(&self, tap: Tap, image: &Image) -> Done<()> {
        self.on("unpause", tap, &["-a", &format!("{}:{}", image.kind(), image.path)])
    }

    fn close(&self, tap: Tap, close: Close) -> Done<()> {
        let more: &[&str] = if close == Close::Forced { &["-f"] } else { &[] };
        self.on("close", tap, more)
    }

    fn detach(&self, tap: Tap) -> Done<()> {
        self.on("detach", tap, &[])
    }

    fn free(&self, minor: u32) -> Done<()> {
        let mut tries = 0..FREE_TRIES;
        loop {
            match self.run("free", &["-m", &minor.to_string()]) {
                Err(e) if e.errno == Errno::AGAIN.raw_os_error() && tries.next().is_some() => {
                    std::thread::sleep(FREE_PAUSE);
                }
                freed => return freed.map(drop),
            }
        }
    }

    fn list(&self) -> Done<Vec<Row>> {
        let listed = self.run("list", &[]).map_err(|e| match e.errno {
            // No process listens on the daemon's socket, or there is none.
            ENOENT | ECONNREFUSED => TapError { errno: EPROTO, ..e },
            _ => e,
        })?;
        Ok(listed.lines().map(Row::parse).collect())
    }

    fn sockets(&self) -> PathBuf {
        ferrite_daemon::Paths { run: self.run_dir.to_owned() }.blktap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_list_are_read_in_every_state() {
        let row = |pid, minor, state, args: Option<&str>| Row {
            pid,
            minor,
            state,
            args: args.map(str::to_owned),
        };
        for (line, expected, path, open) in [
            ("minor=0", row(None, Some(0), 0, None), None, false),
            ("pid=71", row(Some(71), None, 0, None), None, false),
            ("pid=71 minor=0 state=0", row(Some(71), Some(0), 0, None), None, false),
            (
                "pid=71 minor=0 state=0 args=vhd:/a b:c = d",
                row(Some(71), Some(0), 0, Some("vhd:/a b:c = d")),
                Some("/a b:c = d"),
                true,
            ),
            ("pid=71 minor=0 state=0x2", row(Some(71), Some(0), 2, None), None, false),
            (
                "pid=71 minor=0 state=0x2a args=aio:/a",
                row(Some(71), Some(0), 0x2a, Some("aio:/a")),
                Some("/a"),
                true,
            ),
        ] {
            let parsed = Row::parse(line);
            assert_eq!(parsed, expected);
            assert_eq!((parsed.path(), parsed.is_open()), (path, open), "{line}");
        }
        assert!(Row::parse("pid=1 minor=0 state=0x22a args=vhd:/a").is_paused());
    }

    #[test]
    fn the_number_is_the_last_word() {
        let path = "/run/blktap-control/tapdisk/tapdisk-12\n";
        assert_eq!(number("allocate", path).unwrap(), 12);
        assert_eq!(number("allocate", "minor=12\n").unwrap(), 12);
        assert_eq!(number("spawn", "4711\n").unwrap(), 4711);
        assert!(number("spawn", "").is_err());
    }
}
