//! Stand-ins for tapdisk's tools, as XAPI's storage manager and xl's scripts call them.
//!
//! Each is meant by the name that the program was started by, or by `ferrite compat NAME`. The exit status is 0, or an
//! `errno` whose text is on standard error: callers compare it. So the messages of `ferrite` itself do not apply.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use rustix::io::Errno;

use crate::exit::Failure;
use crate::plain::one_line;

mod cbt_util;
pub(crate) mod served;
mod smapi;
pub(crate) mod tap_ctl;
mod td_util;
mod vhd_util;

/// Options of `compat`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompatArgs {
    /// Which tool: tap-ctl, vhd-util, td-util or cbt-util.
    #[arg(value_name = "TOOL")]
    pub(crate) tool: OsString,
    /// The tool's own arguments.
    #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<OsString>,
}

/// The command of `ferrite` that names a tool.
const COMMAND: &str = "compat";

/// One of tapdisk's tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    TapCtl,
    VhdUtil,
    TdUtil,
    CbtUtil,
    SmapiDatapath,
    SmapiVolume,
}

impl Tool {
    const ALL: [Tool; 6] = [
        Tool::TapCtl,
        Tool::VhdUtil,
        Tool::TdUtil,
        Tool::CbtUtil,
        Tool::SmapiDatapath,
        Tool::SmapiVolume,
    ];

    /// The name of tapdisk's program.
    fn name(self) -> &'static str {
        match self {
            Tool::TapCtl => "tap-ctl",
            Tool::VhdUtil => "vhd-util",
            Tool::TdUtil => "td-util",
            Tool::CbtUtil => "cbt-util",
            Tool::SmapiDatapath => "smapi-datapath",
            Tool::SmapiVolume => "smapi-volume",
        }
    }

    fn named(name: &OsStr) -> Option<Tool> {
        Tool::ALL.into_iter().find(|tool| name == tool.name())
    }

    /// The whole program. `args` begin with the program's name.
    pub(crate) fn main(self, args: Vec<OsString>) -> ExitCode {
        match self {
            Tool::TapCtl => tap_ctl::main(args),
            Tool::VhdUtil => vhd_util::main(served::without_run_dir(args)),
            Tool::TdUtil => td_util::main(served::without_run_dir(args)),
            Tool::CbtUtil => cbt_util::main(args),
            Tool::SmapiDatapath | Tool::SmapiVolume => smapi::main(self, args),
        }
    }
}

/// The tool that this process is to be, and its arguments.
pub(crate) fn asked_for(args: impl Iterator<Item = OsString>) -> Option<(Tool, Vec<OsString>)> {
    let args: Vec<OsString> = args.collect();
    let called = args.first().and_then(|name| Path::new(name).file_name());
    if let Some(tool) = called.and_then(Tool::named) {
        return Some((tool, args));
    }
    let [_, command, name, ..] = args.as_slice() else { return None };
    let tool = Tool::named(name).filter(|_| command == COMMAND)?;
    Some((tool, args.into_iter().skip(2).collect()))
}

/// `ferrite compat` with a name that is none of a tool.
pub(crate) fn unknown(args: &CompatArgs) -> Result<(), Failure> {
    let (what, names) = (args.tool.display(), Tool::ALL.map(Tool::name).join(", "));
    Err(Failure::new(
        format!("{what} is none of tapdisk's tools"),
        "",
        format!("name one of {names}"),
    ))
}

/// Why a tool has failed.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) errno: Errno,
    pub(crate) why: String,
}

/// Ends a tool: its exit status is the `errno`, with the reason on standard error.
fn finish(tool: Tool, done: Result<(), Refusal>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Refusal { errno, why }) => {
            // With standard error closed, the status is all that can be given.
            let _ = writeln!(io::stderr(), "{}: {}", tool.name(), one_line(&why));
            status(errno)
        }
    }
}

fn status(errno: Errno) -> ExitCode {
    ExitCode::from(u8::try_from(errno.raw_os_error()).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(args: &[&str]) -> Option<(Tool, Vec<OsString>)> {
        asked_for(args.iter().map(OsString::from))
    }

    #[test]
    fn a_tool_is_meant_by_its_name_wherever_it_is_and_by_a_command() {
        let rest = |args: &[&str]| args.iter().map(OsString::from).collect::<Vec<_>>();
        for args in [&["tap-ctl", "list"][..], &["/usr/bin/tap-ctl", "list"]] {
            assert_eq!(meant(args), Some((Tool::TapCtl, rest(args))));
        }
        let by_command = meant(&["ferrite", "compat", "tap-ctl", "list"]);
        assert_eq!(by_command, Some((Tool::TapCtl, rest(&["tap-ctl", "list"]))));
        for other in [&["ferrite", "list"][..], &["ferrite", "disk", "tap-ctl"], &[]] {
            assert_eq!(meant(other), None);
        }
    }
}
