//! Failures of commands: text for people, an exit code for programs.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use ferrite_disk::{DiskError, ErrorKind};
use rustix::io::Errno;

use crate::plain::one_line;

/// An exit code other than 0. Part of the interface: scripts depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(u8);

impl Code {
    /// The operation failed.
    pub const FAILED: Code = Code(1);
    /// The command line is invalid.
    pub const USAGE: Code = Code(2);
    /// The named object does not exist.
    pub const NOT_FOUND: Code = Code(3);
    /// The named object is in use by another process.
    pub const BUSY: Code = Code(4);
    /// The image contradicts itself.
    pub const DAMAGED: Code = Code(5);
    /// Exit code of `image convert --salvage`: the copy is complete, and has zeros where the disk could not be read.
    pub const SALVAGED: Code = Code(6);
    /// A signal ended the command: the code that a shell gives for Ctrl-C.
    pub const INTERRUPTED: Code = Code(130);

    /// Exit code of `image compare`, as of qemu-img: the images differ.
    pub const DIFFER: Code = Code(1);
    /// Exit code of `image compare`, as of qemu-img: they could not be compared.
    pub const NOT_COMPARED: Code = Code(2);

    /// Exit code of `image check`, as of qemu-img: the check could not be done.
    pub const NOT_CHECKED: Code = Code(1);
    /// Exit code of `image check`, as of qemu-img: the image is damaged.
    pub const CORRUPT: Code = Code(2);
    /// Exit code of `image check`, as of qemu-img: the image is intact, but has space that nothing refers to.
    pub const LEAKS: Code = Code(3);

    /// The exit code that another process sent for a command.
    pub(crate) fn of_another(number: u8) -> Code {
        match number {
            0 => Code::FAILED,
            number => Code(number),
        }
    }

    /// The code as a number.
    pub const fn number(self) -> u8 {
        self.0
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> ExitCode {
        ExitCode::from(code.0)
    }
}

/// A failure: the step, the reason, the next step for the user, and the code for it.
#[derive(Debug)]
pub struct Failure {
    /// The program's exit code.
    pub code: Code,
    /// The step that failed.
    pub what: String,
    /// Why.
    pub why: String,
    /// The next step for the user.
    pub help: String,
    /// The kernel's number of the error, if it had one.
    pub errno: Option<Errno>,
}

impl Failure {
    /// A failure with [`Code::FAILED`].
    pub fn new(
        what: impl Into<String>,
        why: impl fmt::Display,
        help: impl Into<String>,
    ) -> Failure {
        let (what, why, help) = (what.into(), why.to_string(), help.into());
        Failure { code: Code::FAILED, what, why, help, errno: None }
    }

    /// The same failure with another code. An interruption keeps its own code.
    pub fn with_code(self, code: Code) -> Failure {
        match self.code {
            Code::INTERRUPTED => self,
            _ => Failure { code, ..self },
        }
    }

    /// Adds a next step to this failure.
    #[must_use]
    pub fn with_more_help(self, more: &str) -> Failure {
        let help =
            if self.help.is_empty() { more.to_owned() } else { format!("{}; {more}", self.help) };
        Failure { help, ..self }
    }

    /// Writes the failure to standard error and gives the code to end with.
    pub fn report(&self) -> ExitCode {
        self.report_as(false)
    }

    /// Writes the failure to standard error, as text or as one JSON object, and gives the code to end with.
    pub fn report_as(&self, json: bool) -> ExitCode {
        let text = if json { self.json() + "\n" } else { self.to_string() };
        // With standard error closed, the code is all that can be given.
        let _ = write!(std::io::stderr().lock(), "{text}");
        self.code.into()
    }

    fn json(&self) -> String {
        let Failure { code, what, why, help, .. } = self;
        serde_json::json!({ "what": what, "why": why, "help": help, "code": code.0 }).to_string()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "ferrite: {}: {}", one_line(&self.what), one_line(&self.why))?;
        writeln!(f, "help: {}", one_line(&self.help))
    }
}

impl From<DiskError> for Failure {
    fn from(e: DiskError) -> Failure {
        let code = match e.kind() {
            ErrorKind::Usage => Code::USAGE,
            ErrorKind::NotFound => Code::NOT_FOUND,
            ErrorKind::InUse => Code::BUSY,
            ErrorKind::Damaged => Code::DAMAGED,
            ErrorKind::Interrupted => Code::INTERRUPTED,
            ErrorKind::Unsuitable
            | ErrorKind::Permission
            | ErrorKind::Refused
            | ErrorKind::Parent
            | ErrorKind::Io => Code::FAILED,
        };
        let (what, why, help) = (e.what().into(), e.why().into(), e.help().into());
        Failure { code, what, why, help, errno: e.errno() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_what_why_and_what_next() {
        let failure = Failure::new("cannot frob", "no frobs left", "buy frobs");
        assert_eq!(failure.to_string(), "ferrite: cannot frob: no frobs left\nhelp: buy frobs\n");
        let json: serde_json::Value = serde_json::from_str(&failure.json()).unwrap();
        let (what, why) = ("cannot frob", "no frobs left");
        let same = serde_json::json!({ "what": what, "why": why, "help": "buy frobs", "code": 1 });
        assert_eq!(json, same);
    }
}
