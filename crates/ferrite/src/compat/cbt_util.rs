//! `cbt-util`, by which XAPI's storage manager makes, reads and changes the logs of changed blocks.
//!
//! The storage manager does the locking. Each change is on the medium when a verb ends.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use ferrite_disk::change_log::log::{Log, LogError};
use rustix::io::Errno;

use super::vhd_util::{DEBUG, Given, print};
use super::{Refusal, Tool, finish};

const USAGE: &str = "cbt-util create -n LOG -s BYTES | \
                     cbt-util set -n LOG [-p UUID] [-c UUID] [-f 0|1] [-s BYTES] | \
                     cbt-util get -n LOG -p | -c | -f | -s | -b | cbt-util coalesce -p PARENT -c CHILD";

/// The function of a verb.
type Run = fn(&Given) -> Result<(), Refusal>;

impl From<LogError> for Refusal {
    fn from(e: LogError) -> Refusal {
        Refusal { errno: e.errno, why: e.to_string() }
    }
}

/// The whole program, with the name that it was called by.
pub(super) fn main(args: Vec<OsString>) -> ExitCode {
    finish(Tool::CbtUtil, run(args))
}

fn run(args: Vec<OsString>) -> Result<(), Refusal> {
    let mut args = args.into_iter().skip(1).filter(|arg| arg != DEBUG);
    let verb = args.next().ok_or_else(|| usage("a verb is needed"))?;
    let parse = |letters: &str| {
        let given = Given::parse(&format!("{letters}h"), args).map_err(|why| usage(&why))?;
        match given.words.first() {
            _ if given.has('h') => Ok(None),
            Some(word) => Err(usage(&format!("{} is no option", word.display()))),
            None => Ok(Some(given)),
        }
    };
    let (given, run): (_, Run) = match verb.to_str() {
        Some("create") => (parse("n:s:")?, create),
        Some("set") => (parse("n:p:c:f:s:")?, set),
        Some("get") => (parse("n:pcfsb")?, get),
        Some("coalesce") => (parse("p:c:")?, coalesce),
        _ => return Err(usage(&format!("{} is none of the verbs", verb.display()))),
    };
    match given {
        None => print(format!("usage: {USAGE}\n").as_bytes()),
        Some(given) => run(&given),
    }
}

fn usage(why: &str) -> Refusal {
    Refusal { errno: Errno::INVAL, why: format!("{why}; usage: {USAGE}") }
}

fn needed(given: &Given, letter: char) -> Result<&Path, Refusal> {
    let value = given.value(letter).map(Path::new);
    value.ok_or_else(|| usage(&format!("-{letter} is missing")))
}

fn number(given: &Given, letter: char) -> Result<Option<u64>, Refusal> {
    let parse = |value: &OsStr| value.to_str().and_then(|value| value.trim().parse().ok());
    let parsed = given.value(letter).map(|value| {
        parse(value).ok_or_else(|| usage(&format!("-{letter}: {} is no number", value.display())))
    });
    parsed.transpose()
}

/// `create -n LOG -s BYTES`
fn create(given: &Given) -> Result<(), Refusal> {
    let bytes = number(given, 's')?.ok_or_else(|| usage("-s is missing"))?;
    Log::create(needed(given, 'n')?, bytes)?;
    Ok(())
}

/// `set -n LOG [-p UUID] [-c UUID] [-f 0|1] [-s BYTES]`
fn set(given: &Given) -> Result<(), Refusal> {
    let path = needed(given, 'n')?;
    let identifier = |letter: char| {
        given.value(letter).map(|text| {
            let parsed = text.to_str().and_then(parse_uuid);
            parsed.ok_or_else(|| usage(&format!("-{letter}: {} is no UUID", text.display())))
        })
    };
    let (parent, child) = (identifier('p').transpose()?, identifier('c').transpose()?);
    let flag = match number(given, 'f')? {
        None => None,
        Some(flag @ 0..=1) => Some(flag as u32),
        Some(_) => return Err(usage("-f is 0 or 1")),
    };
    let bytes = number(given, 's')?;
    if parent.is_none() && child.is_none() && flag.is_none() && bytes.is_none() {
        return Err(usage("-p, -c, -f or -s is needed"));
    }
    let mut log = Log::open(path, true)?;
    if let Some(bytes) = bytes {
        log.grow(bytes)?;
    }
    log.set(|head| {
        head.parent = parent.unwrap_or(head.parent);
        head.child = child.unwrap_or(head.child);
        head.consistent = flag.unwrap_or(head.consistent);
    })?;
    Ok(())
}

/// `get -n LOG -p | -c | -f | -s | -b`
fn get(given: &Given) -> Result<(), Refusal> {
    let path = needed(given, 'n')?;
    let asked: Vec<char> = "pcfsb".chars().filter(|letter| given.has(*letter)).collect();
    let [asked] = asked.as_slice() else {
        return Err(usage("one of -p, -c, -f, -s and -b is needed"));
    };
    let log = Log::open(path, false)?;
    let line = match asked {
        'p' => uuid(&log.head.parent),
        'c' => uuid(&log.head.child),
        'f' => log.head.consistent.to_string(),
        's' => log.head.bytes.to_string(),
        _ => {
            let mut bits = Vec::new();
            log.bits(|part| {
                bits.extend_from_slice(part);
                Ok(())
            })?;
            return print(&bits);
        }
    };
    print(format!("{line}\n").as_bytes())
}

/// `coalesce -p PARENT -c CHILD`
fn coalesce(given: &Given) -> Result<(), Refusal> {
    let (parent, child) = (needed(given, 'p')?, needed(given, 'c')?);
    let parent = Log::open(parent, false)?;
    Log::open(child, true)?.add_log(&parent)?;
    Ok(())
}

/// An identifier as text, in groups of 8, 4, 4, 4 and 12 digits.
fn uuid(bytes: &[u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(*bytes));
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let is_place = |(at, c): (usize, char)| match at {
        8 | 13 | 18 | 23 => c == '-',
        _ => c.is_ascii_hexdigit(),
    };
    if text.len() != 36 || !text.chars().enumerate().all(is_place) {
        return None;
    }
    u128::from_str_radix(&text.replace('-', ""), 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_text_in_groups() {
        let text = "8d4b5c62-9c1e-4f0e-a2c5-00000000000f";
        assert_eq!(parse_uuid(text).as_ref().map(uuid).as_deref(), Some(text));
        for other in ["", "8d4b5c62", "8d4b5c629c1e-4f0e-a2c5-00000000000f-", &text[1..]] {
            assert_eq!(parse_uuid(other), None, "{other}");
        }
    }
}
