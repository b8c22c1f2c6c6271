//! `tap-ctl`, as XAPI's storage manager and xl's scripts call tapdisk's. Its verbs drive taps of the daemon: disks that
//! are open before their guest. For disks that xl has attached it tells scripts their process and number, and waits for
//! their end.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ferrite_daemon::Paths;
use ferrite_daemon::control::client::{self, ClientError};
use ferrite_daemon::control::protocol::{Disk, Disks, Nothing};
use lexopt::{Arg, Parser};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Refusal, Tool, finish};

mod taps;
mod xl;

/// The environment variable of xl's script with the directory of its disk.
const DISK: &str = "XENBUS_PATH";

/// How long the daemon may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// How long requests under way may take when a tap is closed or paused, in seconds.
const WITHIN_S: u32 = 120;

/// The verbs, as they are shown.
const VERBS: [&str; 14] = [
    "list", "allocate", "free", "create", "destroy", "spawn", "attach", "detach", "open", "close",
    "pause", "unpause", "stats", "help",
];

/// The command line of the manual page.
pub(crate) fn definition() -> clap::Command {
    let pid = || clap::Arg::new("pid").short('p').value_name("PID").help("Its process.");
    let minor = || clap::Arg::new("minor").short('m').value_name("MINOR").help("Its number.");
    let image = || {
        clap::Arg::new("image")
            .short('a')
            .value_name("TYPE:PATH")
            .help("Its image: aio, vhd or qcow2.")
    };
    let file =
        || clap::Arg::new("file").short('f').value_name("PATH").help("Only disks of this image.");
    let kind =
        || clap::Arg::new("type").short('t').value_name("TYPE").help("Only disks of this type.");
    let within =
        || clap::Arg::new("timeout").short('t').value_name("SECONDS").help("How long to wait.");
    let log = |short: char| {
        clap::Arg::new("log").short(short).value_name("LOG").help("Record changed blocks there.")
    };
    let mirror = || {
        let help = "Have writes go to a passed connection, too; or null.";
        clap::Arg::new("mirror").short('2').value_name("nbd:NAME").help(help)
    };
    let flag = |name: &'static str, short: char, help: &'static str| {
        clap::Arg::new(name).short(short).action(clap::ArgAction::SetTrue).help(help)
    };
    let verb = |name: &'static str, about: &'static str| clap::Command::new(name).about(about);
    clap::Command::new("tap-ctl")
        .about("A stand-in for tapdisk's tap-ctl, for XAPI's storage manager and xl's block-tap")
        .after_help("The exit code is 0, or the errno of what went wrong.")
        .disable_help_subcommand(true)
        .subcommands([
            verb("list", "A line for each tap: pid=PID minor=MINOR state=STATE args=TYPE:PATH")
                .args([pid(), minor(), kind(), file()]),
            verb("allocate", "Allocate the lowest free number"),
            verb("free", "Free a number").args([minor()]),
            verb("spawn", "Start a process that has no disk yet, and print its number"),
            verb("attach", "Give a number to a process").args([pid(), minor()]),
            verb("detach", "Take it away; the process ends").args([pid(), minor()]),
            verb("open", "Open an image").args([
                pid(),
                minor(),
                image(),
                flag("read-only", 'R', "For reading only."),
                flag("direct", 'D', "Accepted, and makes no difference."),
                log('C'),
                mirror(),
                within(),
            ]),
            verb("close", "Close the image").args([
                pid(),
                minor(),
                flag("force", 'f', "Without waiting for a guest."),
                within(),
            ]),
            verb("pause", "Close the image, and let its guest and clients wait")
                .args([pid(), minor()]),
            verb("unpause", "Go on, with another image if one is named").args([
                pid(),
                minor(),
                image(),
                log('c'),
                mirror(),
            ]),
            verb("stats", "Counters, as JSON").args([pid(), minor()]),
            verb("create", "Allocate, spawn, attach and open").args([image()]),
            verb("destroy", "Close, detach and free; wait until a detached disk of xl's is closed")
                .args([pid(), minor(), within()]),
        ])
}

/// The options of all verbs.
#[derive(Debug, Default)]
struct Options {
    pid: Option<u32>,
    minor: Option<u32>,
    image: Option<String>,
    file: Option<String>,
    kind: Option<String>,
    timeout_s: Option<u32>,
    read_only: bool,
    log: Option<PathBuf>,
    mirror: Option<String>,
    force: bool,
    run_dir: Option<PathBuf>,
    help: bool,
}

impl Options {
    /// Parses the arguments after the verb. `-t` is a type for `list`, and seconds elsewhere.
    fn parse(verb: &str, parser: &mut Parser) -> Result<Options, Refusal> {
        let mut options = Options::default();
        let invalid = |why: &dyn std::fmt::Display| Refusal {
            errno: Errno::INVAL,
            why: format!("{verb}: {why}"),
        };
        while let Some(arg) = parser.next().map_err(|e| invalid(&e))? {
            let text = |parser: &mut Parser| {
                parser.value().and_then(lexopt::ValueExt::string).map_err(|e| invalid(&e))
            };
            match arg {
                Arg::Short('p') => options.pid = Some(number(verb, &text(parser)?)?),
                Arg::Short('m') => options.minor = Some(number(verb, &text(parser)?)?),
                Arg::Short('a') => options.image = Some(text(parser)?),
                Arg::Short('f') if verb == "list" => options.file = Some(text(parser)?),
                Arg::Short('t') if verb == "list" => options.kind = Some(text(parser)?),
                Arg::Short('f') => options.force = true,
                Arg::Short('t') => options.timeout_s = Some(number(verb, &text(parser)?)?),
                Arg::Short('R') => options.read_only = true,
                Arg::Short('h') => options.help = true,
                Arg::Short('C') if verb != "unpause" => {
                    options.log = Some(path(parser.value().map_err(|e| invalid(&e))?));
                }
                Arg::Short('c') if verb == "unpause" => {
                    options.log = Some(path(parser.value().map_err(|e| invalid(&e))?));
                }
                Arg::Short('2') => options.mirror = Some(text(parser)?),
                Arg::Short('D') | Arg::Long("debug") => {}
                Arg::Long("run-dir") => {
                    options.run_dir = Some(parser.value().map_err(|e| invalid(&e))?.into());
                }
                // A cache, a standby, a key.
                Arg::Short('e' | 'r' | 's' | 'E') => {
                    let why = format!(
                        "{verb}: this option is not supported; docs/xapi.md has those that are"
                    );
                    return Err(Refusal { errno: Errno::OPNOTSUPP, why });
                }
                other => return Err(invalid(&other.unexpected())),
            }
        }
        Ok(options)
    }

    fn daemon(&self) -> Daemon {
        Daemon(self.run_dir.clone().unwrap_or_else(|| Paths::default().run))
    }

    /// The process and the number, which most verbs need.
    fn tap(&self, verb: &str) -> Result<(u32, u32), Refusal> {
        self.pid.zip(self.minor).ok_or_else(|| missing(verb, "-p PID and -m MINOR are needed"))
    }
}

/// A path that the daemon can open: its folder is another one.
fn path(given: OsString) -> PathBuf {
    let given = PathBuf::from(given);
    std::path::absolute(&given).unwrap_or(given)
}

fn missing(verb: &str, what: &str) -> Refusal {
    Refusal { errno: Errno::INVAL, why: format!("{verb}: {what}") }
}

fn number(verb: &str, text: &str) -> Result<u32, Refusal> {
    text.trim().parse().map_err(|_| missing(verb, &format!("{text:?} is not a number")))
}

/// The whole program. The arguments begin with the program's name.
pub(crate) fn main(args: Vec<OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().filter(|word| word != "--debug").collect();
    let verb = args.get(1).and_then(|verb| verb.to_str()).unwrap_or("");
    let is_verb = VERBS.contains(&verb) && verb != "help";
    if !is_verb {
        // As tapdisk's program does, an unknown verb prints the usage, and succeeds.
        usage();
        return ExitCode::SUCCESS;
    }
    if verb == "free" && std::env::var(DISK).is_ok() {
        // xl's script frees what `allocate` has printed for its disk, which is a reason.
        return ExitCode::SUCCESS;
    }
    let mut parser = Parser::from_args(args.iter().skip(2).cloned());
    let done = Options::parse(verb, &mut parser).and_then(|options| match options.help {
        true => {
            usage();
            Ok(())
        }
        false => call(verb, &options),
    });
    finish(Tool::TapCtl, done)
}

fn usage() {
    let mut out = io::stdout().lock();
    let _ =
        writeln!(out, "usage: tap-ctl COMMAND [OPTIONS]\nCOMMAND := {{ {} }}", VERBS.join(" | "));
}

fn call(verb: &str, options: &Options) -> Result<(), Refusal> {
    let daemon = options.daemon();
    match verb {
        "list" => taps::list(&daemon, options),
        "allocate" => match std::env::var(DISK) {
            Ok(backend) => xl::allocate(&daemon, &backend),
            Err(_) => taps::allocate(&daemon),
        },
        // xl's script calls it for a disk that is not served, and shows this number.
        "spawn" if std::env::var(DISK).is_ok() => Err(xl::not_served()),
        "spawn" => taps::spawn(&daemon),
        "attach" | "detach" | "pause" => taps::change(&daemon, verb, options.tap(verb)?, options),
        "close" => taps::change(&daemon, verb, options.tap(verb)?, options),
        "unpause" => taps::change(&daemon, verb, options.tap(verb)?, options),
        "open" => {
            options.image.as_ref().ok_or_else(|| missing(verb, "-a TYPE:PATH is needed"))?;
            taps::change(&daemon, verb, options.tap(verb)?, options)
        }
        "free" => {
            taps::free(&daemon, options.minor.ok_or_else(|| missing(verb, "-m MINOR is needed"))?)
        }
        "stats" => taps::stats(&daemon, options.tap(verb)?),
        "create" => taps::create(&daemon, options),
        _ => taps::destroy(&daemon, options.tap(verb)?, options),
    }
}

/// The daemon with this run directory.
struct Daemon(PathBuf);

impl Daemon {
    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        params: &impl Serialize,
        wait_s: u32,
    ) -> Result<T, ClientError> {
        let socket = Paths { run: self.0.clone() }.control();
        client::call(&socket, method, params, ANSWER + Duration::from_secs(wait_s.into()))
    }

    /// The disks that a toolstack has attached.
    fn disks(&self) -> Result<Vec<Disk>, ClientError> {
        let disks = self.call::<Disks>("disk.list", &Nothing {}, 0)?.disks;
        Ok(disks.into_iter().filter(|disk| !disk.disk.is_tap()).collect())
    }
}

impl From<ClientError> for Refusal {
    fn from(e: ClientError) -> Refusal {
        let errno = match &e {
            // This user may not, whether a daemon runs or not.
            ClientError::Unreachable(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let why = "this user may not drive taps; run it as root".to_owned();
                return Refusal { errno: Errno::ACCESS, why };
            }
            // Callers try again after this one.
            ClientError::Unreachable(_) | ClientError::Broken(_) => Errno::PROTO,
            ClientError::Refused(error) => {
                let errno = error.data.as_ref().and_then(|data| data.errno);
                errno.map_or(Errno::INVAL, Errno::from_raw_os_error)
            }
        };
        Refusal { errno, why: format!("{e}; {}", e.help()) }
    }
}
