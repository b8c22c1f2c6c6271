//! The plug-ins of XAPI's storage interface (SMAPIv3): a datapath for `ferrite://` URIs, and volumes in a folder.
//!
//! `xapi-storage-script` runs a program for each call, by the call's name. It writes the parameters as one JSON object to
//! its standard input and reads the bare result from its standard output. The exit status of a failure is 1, and the
//! result is a description of the error. The programs are Python files (`dist/xapi`), since XAPI runs them by
//! `python3 -m observer` while it traces; they run `ferrite compat smapi-datapath NAME` or `smapi-volume NAME`.

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use ferrite_disk::{DiskError, ErrorKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Tool;
use crate::exit::Failure;
use crate::plain::one_line;

mod collect;
mod data;
mod datapath;
mod disks;
mod files;
#[cfg(test)]
mod model;
mod taps;
mod uri;
mod volume;
mod volume_folder;
mod volume_images;

/// The longest input that is read. The largest are descriptions that people wrote.
const MAX_INPUT: u64 = 16 << 20;
/// The code of all errors of plug-ins; the parameters begin with the kind.
const CODE: &str = "SR_BACKEND_FAILURE";

/// The kinds of errors, in the words of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The call, or what it asks for, is not offered.
    Unimplemented,
    /// The call's parameters are wrong.
    Invalid,
    VolumeDoesNotExist,
    SrDoesNotExist,
    Failed,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Unimplemented => "Unimplemented",
            Kind::Invalid => "Invalid_parameters",
            Kind::VolumeDoesNotExist => "Volume_does_not_exist",
            Kind::SrDoesNotExist => "SR_does_not_exist",
            Kind::Failed => "Ferrite_error",
        }
    }
}

/// Why a call has failed.
#[derive(Debug)]
struct Fault {
    kind: Kind,
    text: String,
}

impl Fault {
    fn new(kind: Kind, text: impl Into<String>) -> Fault {
        Fault { kind, text: text.into() }
    }

    /// A step on a file that failed.
    fn of_io(what: impl std::fmt::Display, e: io::Error) -> Fault {
        let help = match e.kind() {
            io::ErrorKind::PermissionDenied => "run it as root, as XAPI does",
            io::ErrorKind::StorageFull => "make room on that file system",
            _ => "check that file system and the kernel's log (dmesg)",
        };
        Fault::new(Kind::Failed, format!("{what}: {e}; {help}"))
    }
}

impl From<DiskError> for Fault {
    fn from(e: DiskError) -> Fault {
        let kind = match e.kind() {
            ErrorKind::NotFound => Kind::VolumeDoesNotExist,
            _ => Kind::Failed,
        };
        Fault::new(kind, format!("{}: {}; {}", e.what(), e.why(), e.help()))
    }
}

impl From<Failure> for Fault {
    fn from(e: Failure) -> Fault {
        Fault::new(Kind::Failed, format!("{}: {}; {}", e.what, e.why, e.help))
    }
}

/// The JSON of an error, as `xapi-storage-script` reads it.
#[derive(Serialize)]
struct Error<'a> {
    code: &'a str,
    params: [&'a str; 2],
    backtrace: Backtrace<'a>,
}

#[derive(Serialize)]
struct Backtrace<'a> {
    error: &'a str,
    files: [&'a str; 0],
    lines: [u32; 0],
}

/// What every plug-in says about itself.
#[derive(Serialize)]
struct Query {
    plugin: &'static str,
    name: &'static str,
    description: &'static str,
    vendor: &'static str,
    copyright: &'static str,
    version: &'static str,
    required_api_version: &'static str,
    features: &'static [&'static str],
    configuration: std::collections::BTreeMap<&'static str, &'static str>,
    required_cluster_stack: [&'static str; 0],
}

impl Query {
    fn new(name: &'static str, description: &'static str) -> Query {
        Query {
            plugin: "ferrite",
            name,
            description,
            vendor: "the Ferrite authors",
            copyright: "Apache-2.0",
            version: env!("CARGO_PKG_VERSION"),
            required_api_version: "5.0",
            features: &[],
            configuration: std::collections::BTreeMap::new(),
            required_cluster_stack: [],
        }
    }
}

/// One call of a plug-in.
struct Call {
    /// Its name, as `Datapath.attach`.
    name: String,
    input: String,
    /// The daemon's folder.
    run_dir: PathBuf,
}

impl Call {
    fn read(args: Vec<OsString>) -> Result<Call, Fault> {
        let (name, run_dir) = arguments(args).map_err(|e| {
            let help = "it is called as NAME --json, with the parameters on standard input";
            Fault::new(Kind::Invalid, format!("cannot tell which call is meant: {e}; {help}"))
        })?;
        let mut input = String::new();
        let read = io::stdin().lock().take(MAX_INPUT).read_to_string(&mut input);
        read.map_err(|e| {
            let text = format!("cannot read the parameters of {name}: {e}; write them in UTF-8");
            Fault::new(Kind::Invalid, text)
        })?;
        Ok(Call { name, input, run_dir })
    }

    fn params<T: DeserializeOwned>(&self) -> Result<T, Fault> {
        serde_json::from_str(&self.input).map_err(|e| {
            let help = "XAPI's interface of version 5.0 has the parameters of each call";
            let text = format!("cannot use the parameters of {}: {e}; {help}", self.name);
            Fault::new(Kind::Invalid, text)
        })
    }

    fn unimplemented(&self) -> Fault {
        let help = "docs/xapi.md has the calls that are offered";
        Fault::new(Kind::Unimplemented, format!("there is no call {}; {help}", self.name))
    }
}

/// The name of the call, and the daemon's folder.
fn arguments(args: Vec<OsString>) -> Result<(String, PathBuf), lexopt::Error> {
    use lexopt::prelude::*;
    let (mut name, mut run_dir) = (None, PathBuf::from(crate::serve::RUN_DIR));
    let mut parser = lexopt::Parser::from_iter(args);
    while let Some(arg) = parser.next()? {
        match arg {
            Value(value) if name.is_none() => name = Some(value.string()?),
            Long("json") => {}
            Long("run-dir") => run_dir = parser.value()?.into(),
            arg => return Err(arg.unexpected()),
        }
    }
    Ok((name.ok_or("no name was given")?, run_dir))
}

/// The whole program. `args` begin with the program's name.
pub(super) fn main(tool: Tool, args: Vec<OsString>) -> ExitCode {
    if tool == Tool::SmapiVolume && args.get(1).is_some_and(|name| name == collect::CALL) {
        return collect(args);
    }
    let done = Call::read(args).and_then(|call| match tool {
        Tool::SmapiVolume => volume::answer(&call),
        _ => datapath::answer(&call),
    });
    let (text, code) = match done {
        Ok(result) => (result.to_string(), ExitCode::SUCCESS),
        Err(fault) => (error(&fault), ExitCode::FAILURE),
    };
    match writeln!(io::stdout(), "{text}") {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The process that merges images: `SR.coalesce --run-dir DIR FOLDER`.
fn collect(args: Vec<OsString>) -> ExitCode {
    let [_, _, _, run_dir, folder] = args.as_slice() else { return ExitCode::FAILURE };
    match collect::run(folder.as_ref(), run_dir.as_ref()) {
        Ok(_) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("{}", one_line(&fault.text));
            if let Ok(folder) = volume_folder::Folder::at(folder.as_ref()) {
                folder.note(&fault.text);
            }
            ExitCode::FAILURE
        }
    }
}

fn error(fault: &Fault) -> String {
    let text = &*one_line(&fault.text);
    let backtrace = Backtrace { error: text, files: [], lines: [] };
    let error = Error { code: CODE, params: [fault.kind.name(), text], backtrace };
    serde_json::to_string(&error).unwrap_or_default()
}

/// A result as JSON.
fn json(result: impl Serialize) -> Result<Value, Fault> {
    serde_json::to_value(result).map_err(|e| {
        Fault::new(Kind::Failed, format!("cannot write the result as JSON: {e}; report this"))
    })
}
