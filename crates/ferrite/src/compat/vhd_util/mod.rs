//! `vhd-util`, by which XAPI's storage manager makes and changes VHDs.
//!
//! The storage manager does the locking: it reads and changes images that other processes have open. So the verbs take
//! no lock and refuse no image that is in use.
//!
//! A verb is a [`Verb`] in a file of its group: its letters as for getopt, its usage, and the function that does it.
//! The output of a verb is collected and written at its end, so that a refusal does not tear a line.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::process::ExitCode;

use ferrite_disk::{DiskError, ErrorKind};
use lexopt::{Arg, Parser, ValueExt as _};
use rustix::io::Errno;

use super::{Refusal, Tool, finish};
use crate::plain::one_line;

mod change;
pub(super) mod check;
pub(super) mod coalesce;
pub(super) mod create;
mod glob;
mod lvm;
pub(super) mod query;
pub(super) mod read;
pub(super) mod repair;
pub(super) mod resize;
pub(super) mod scan;
pub(super) mod set;

const VERBS: [&Verb; 13] = [
    &create::CREATE,
    &create::SNAPSHOT,
    &query::QUERY,
    &read::READ,
    &set::SET,
    &repair::REPAIR,
    &resize::RESIZE,
    &coalesce::COALESCE,
    &set::MODIFY,
    &scan::SCAN,
    &check::CHECK,
    &resize::REVERT,
    &set::KEY,
];

/// Accepted anywhere, and ignored.
pub(super) const DEBUG: &str = "--debug";

/// One verb of the program.
pub(super) struct Verb {
    pub(super) name: &'static str,
    /// The letters of its options; a colon follows one that has a value.
    pub(super) letters: &'static str,
    /// What follows the verb, for people.
    pub(super) usage: &'static str,
    pub(super) run: fn(&Given, &mut Vec<u8>) -> Result<(), Stop>,
}

/// Why a verb ends early.
pub(super) enum Stop {
    /// The command line is wrong: the verb's usage is printed.
    Usage(String),
    Refused(Refusal),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Stop {
        Stop::Refused(refusal)
    }
}

impl From<DiskError> for Refusal {
    fn from(e: DiskError) -> Refusal {
        Refusal { errno: errno_of(&e), why: format!("{e}; {}", e.help()) }
    }
}

impl From<DiskError> for Stop {
    fn from(e: DiskError) -> Stop {
        Stop::Refused(e.into())
    }
}

impl Stop {
    pub(super) fn new(errno: Errno, why: impl Into<String>) -> Stop {
        Stop::Refused(Refusal { errno, why: why.into() })
    }
}

/// The options of a command line.
pub(super) struct Given {
    options: Vec<(char, Option<OsString>)>,
    /// The words that are no options.
    pub(super) words: Vec<OsString>,
}

impl Given {
    /// Reads the words behind a verb as getopt does. `letters` are as in [`Verb::letters`].
    pub(super) fn parse(
        letters: &str,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<Given, String> {
        let mut parser = Parser::from_args(args.into_iter().filter(|arg| arg != DEBUG));
        let mut given = Given { options: Vec::new(), words: Vec::new() };
        while let Some(arg) = parser.next().map_err(|e| e.to_string())? {
            match arg {
                Arg::Short(letter) => {
                    let has_value = has_value(letters, letter)
                        .ok_or_else(|| Arg::Short(letter).unexpected().to_string())?;
                    let value = has_value.then(|| parser.value()).transpose();
                    given.options.push((letter, value.map_err(|e| e.to_string())?));
                }
                Arg::Value(word) => given.words.push(word),
                Arg::Long(_) => return Err(arg.unexpected().to_string()),
            }
        }
        Ok(given)
    }

    pub(super) fn has(&self, letter: char) -> bool {
        self.options.iter().any(|(given, _)| *given == letter)
    }

    /// The value of an option. If it was given twice, the last one counts.
    pub(super) fn value(&self, letter: char) -> Option<&OsStr> {
        let mut found = self.options.iter().rev().filter(|(given, _)| *given == letter);
        found.next().and_then(|(_, value)| value.as_deref())
    }

    /// The value of an option that has to be there.
    pub(super) fn needed(&self, letter: char) -> Result<&OsStr, Stop> {
        self.value(letter).ok_or_else(|| Stop::Usage(format!("-{letter} is missing")))
    }

    /// The image, `-n`. No verb with it has other words.
    pub(super) fn image(&self) -> Result<&Path, Stop> {
        match self.words.first() {
            Some(word) => Err(Stop::Usage(format!("{} is no option", word.display()))),
            None => self.needed('n').map(Path::new),
        }
    }

    /// The value of an option as a decimal number.
    pub(super) fn number(&self, letter: char) -> Result<Option<u64>, Stop> {
        let parsed = self.value(letter).map(|value| value.to_owned().parse());
        parsed.transpose().map_err(|e| Stop::Usage(format!("-{letter}: {e}")))
    }
}

/// Whether an option has a value; `None`: there is no such option.
fn has_value(letters: &str, letter: char) -> Option<bool> {
    let at = letters.find(letter).filter(|_| letter != ':')?;
    Some(letters[at + letter.len_utf8()..].starts_with(':'))
}

/// The whole program, with the name that it was called by.
pub(super) fn main(args: Vec<OsString>) -> ExitCode {
    let mut args = args.into_iter().skip(1).filter(|arg| arg != DEBUG);
    let named = args.next();
    let verb = named.as_deref().and_then(|name| VERBS.into_iter().find(|v| name == v.name));
    let Some(verb) = verb else {
        if let Some(name) = named {
            let _ = writeln!(
                io::stderr(),
                "{} is none of the verbs",
                one_line(&name.to_string_lossy())
            );
        }
        let names = VERBS.map(|verb| verb.name).join(" | ");
        let usage = format!("usage: vhd-util COMMAND [OPTIONS]\nCOMMAND := {{ {names} }}\n");
        return finish(Tool::VhdUtil, print(usage.as_bytes()));
    };
    finish(Tool::VhdUtil, call(verb, args))
}

/// Does a verb with the words behind it, and prints what it says.
pub(super) fn call(verb: &Verb, args: impl IntoIterator<Item = OsString>) -> Result<(), Refusal> {
    let mut out = Vec::new();
    let done = match Given::parse(&format!("{}h", verb.letters), args) {
        Err(why) => Err(Stop::Usage(why)),
        Ok(given) if given.has('h') => {
            let usage = format!("usage: vhd-util {} {}\n", verb.name, verb.usage);
            return print(usage.as_bytes());
        }
        Ok(given) => (verb.run)(&given, &mut out),
    };
    let done = done.map_err(|stop| match stop {
        Stop::Refused(refusal) => refusal,
        Stop::Usage(why) => {
            out = format!("usage: vhd-util {} {}\n", verb.name, verb.usage).into_bytes();
            Refusal { errno: Errno::INVAL, why }
        }
    });
    let printed = print(&out);
    done.and(printed)
}

/// Writes to standard output.
pub(super) fn print(bytes: &[u8]) -> Result<(), Refusal> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|e| Refusal {
        errno: Errno::from_io_error(&e).unwrap_or(Errno::PIPE),
        why: format!("cannot write to standard output: {e}"),
    })
}

/// Adds a line to what a verb prints.
pub(super) fn say(out: &mut Vec<u8>, line: impl std::fmt::Display) {
    out.extend_from_slice(line.to_string().as_bytes());
    out.push(b'\n');
}

/// A path as it is printed. Callers open what they read, so bytes that are no UTF-8 stay. A control character is shown
/// as an escape: a line break would forge a line.
pub(super) fn shown(path: &Path) -> Vec<u8> {
    let bytes = path.as_os_str().as_bytes();
    match bytes.iter().any(u8::is_ascii_control) {
        true => OsString::from(one_line(&path.to_string_lossy()).into_owned()).into_vec(),
        false => bytes.to_vec(),
    }
}

/// The `errno` of an error. Callers repeat EIO and EAGAIN for a long time, so damage and refusals are EINVAL.
pub(super) fn errno_of(e: &DiskError) -> Errno {
    let kernel = std::error::Error::source(e)
        .and_then(|source| source.downcast_ref::<io::Error>())
        .map(|source| match source.kind() {
            io::ErrorKind::StorageFull => Errno::NOSPC,
            // An error that is not the kernel's will be the same a second later.
            _ => Errno::from_io_error(source).unwrap_or(Errno::INVAL),
        });
    match (e.kind(), kernel) {
        (ErrorKind::NotFound | ErrorKind::Parent, _) => Errno::NOENT,
        (ErrorKind::Usage | ErrorKind::Unsuitable | ErrorKind::Damaged, _) => Errno::INVAL,
        (ErrorKind::InUse | ErrorKind::Refused, _) => Errno::BUSY,
        (ErrorKind::Permission, kernel) => kernel.unwrap_or(Errno::ACCESS),
        (ErrorKind::Interrupted, _) => Errno::INTR,
        (ErrorKind::Io, kernel) => kernel.unwrap_or(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(letters: &str, args: &[&str]) -> Result<Given, String> {
        Given::parse(letters, args.iter().map(OsString::from))
    }

    #[test]
    fn options_are_read_as_getopt_reads_them() {
        let read = given("n:vsh", &["-vs", "--debug", "-n", "a b:c", "x"]).ok();
        let read = read.expect("these are valid");
        assert!(read.has('v') && read.has('s') && !read.has('h'));
        assert_eq!(read.value('n'), Some(OsStr::new("a b:c")));
        assert_eq!(read.words, ["x"]);
        assert!(given("n:v", &["-n"]).is_err());
        for other in [&["-x"][..], &["--verbose"], &["-:"], &["-vx"]] {
            assert!(given("n:v", other).is_err(), "{other:?}");
        }
        let twice = given("n:", &["-na", "-n", "b"]).ok();
        assert_eq!(twice.as_ref().and_then(|given| given.value('n')), Some(OsStr::new("b")));
    }
}
