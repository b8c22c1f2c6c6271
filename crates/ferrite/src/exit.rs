//! How a command ends when it did not work: text for people, an exit code for programs.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use ferrite_disk::{DiskError, ErrorKind};

/// The exit codes, besides 0. Part of the interface: scripts depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// It was tried and did not work.
    Failed = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// What was named is not there.
    NotFound = 3,
    /// What was named is in use by somebody else.
    Busy = 4,
}

/// What failed, why, what to do next, and the code for it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) what: String,
    pub(crate) why: String,
    pub(crate) help: String,
}

impl Failure {
    /// A failure with [`Code::Failed`].
    pub(crate) fn new(
        what: impl Into<String>,
        why: impl fmt::Display,
        help: impl Into<String>,
    ) -> Failure {
        Failure { code: Code::Failed, what: what.into(), why: why.to_string(), help: help.into() }
    }

    /// Writes the failure to standard error and gives the code to end with.
    pub(crate) fn report(&self) -> ExitCode {
        // With standard error closed, the code is all that can be given.
        let _ = write!(std::io::stderr().lock(), "{self}");
        ExitCode::from(self.code as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "ferrite: {}: {}", self.what, self.why)?;
        writeln!(f, "help: {}", self.help)
    }
}

impl From<DiskError> for Failure {
    fn from(e: DiskError) -> Failure {
        let code = match e.kind() {
            ErrorKind::Usage => Code::Usage,
            ErrorKind::NotFound => Code::NotFound,
            ErrorKind::InUse => Code::Busy,
            ErrorKind::Unsuitable
            | ErrorKind::Permission
            | ErrorKind::Refused
            | ErrorKind::Interrupted
            | ErrorKind::Io => Code::Failed,
        };
        let (what, why, help) = (e.what().into(), e.why().into(), e.help().into());
        Failure { code, what, why, help }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_what_why_and_what_next() {
        let failure = Failure::new("cannot frob", "no frobs left", "buy frobs");
        assert_eq!(failure.to_string(), "ferrite: cannot frob: no frobs left\nhelp: buy frobs\n");
    }
}
