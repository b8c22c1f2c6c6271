//! `td-util`, by which XAPI's storage manager makes VHDs in files and asks for their properties.
//!
//! Its verbs are those of `vhd-util`, with other command lines. Its usage is an error, and goes to standard error.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use rustix::io::Errno;

use super::vhd_util::{self, Given, Stop, create, query};
use super::{Refusal, Tool, finish};

/// The only type of image.
const VHD: &str = "vhd";

const USAGE: &str = "td-util create vhd MIB FILE | td-util snapshot vhd FILE PARENT | \
                     td-util query vhd [-v] [-p] [-f] [-d] [-b] FILE";

/// The whole program, with the name that it was called by.
pub(super) fn main(args: Vec<OsString>) -> ExitCode {
    finish(Tool::TdUtil, run(args))
}

fn run(args: Vec<OsString>) -> Result<(), Refusal> {
    let mut args = args.into_iter().skip(1).filter(|arg| arg != vhd_util::DEBUG);
    let (verb, kind) = (args.next(), args.next());
    let (Some(verb), Some(kind)) = (verb, kind) else {
        return Err(usage("a verb and a type are needed"));
    };
    if kind != VHD {
        return Err(usage(&format!("{} is no type of image", kind.display())));
    }
    match verb.to_str() {
        Some("create") => create(args),
        Some("snapshot") => snapshot(args),
        Some("query") => query(args),
        _ => Err(usage(&format!("{} is none of the verbs", verb.display()))),
    }
}

fn usage(why: &str) -> Refusal {
    Refusal { errno: Errno::INVAL, why: format!("{why}; usage: {USAGE}") }
}

fn parse(letters: &str, args: impl Iterator<Item = OsString>) -> Result<Given, Refusal> {
    Given::parse(letters, args).map_err(|why| usage(&why))
}

/// `create vhd MIB FILE`
fn create(args: impl Iterator<Item = OsString>) -> Result<(), Refusal> {
    let given = parse("rb", args)?;
    let [size, file] = given.words.as_slice() else {
        return Err(usage("a size and a file are needed"));
    };
    let mut words = vec!["-n".into(), file.clone(), "-s".into(), size.clone()];
    if given.has('r') {
        words.push("-r".into());
    }
    vhd_util::call(&create::CREATE, words)
}

/// `snapshot vhd FILE PARENT`
fn snapshot(args: impl Iterator<Item = OsString>) -> Result<(), Refusal> {
    let given = parse("bml:", args)?;
    let [file, parent] = given.words.as_slice() else {
        return Err(usage("a file and a parent are needed"));
    };
    let mut words = vec!["-n".into(), file.clone(), "-p".into(), parent.clone()];
    if given.has('m') {
        words.push("-m".into());
    }
    if let Some(limit) = given.value('l') {
        words.extend(["-l".into(), limit.to_owned()]);
    }
    vhd_util::call(&create::SNAPSHOT, words)
}

/// `query vhd [-v] [-p] [-f] [-d] [-b] FILE`
fn query(args: impl Iterator<Item = OsString>) -> Result<(), Refusal> {
    let given = parse("vpfdb", args)?;
    let [file] = given.words.as_slice() else { return Err(usage("a file is needed")) };
    let mut out = Vec::new();
    let done = query::answer(Path::new(file), &given, &query::TD_TEXTS, &mut out);
    vhd_util::print(&out)?;
    done.map_err(|stop| match stop {
        Stop::Refused(refusal) => refusal,
        Stop::Usage(why) => usage(&why),
    })
}
