//! Why an image is not served, in words, and the log.

use std::fmt;
use std::io::Write as _;

/// A reason, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) why: String,
    pub(crate) help: String,
    /// It may pass without a change by the user.
    pub(crate) passes: bool,
}

impl Fault {
    /// One that stays until somebody does something.
    pub(crate) fn lasting(why: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault { why: why.into(), help: help.into(), passes: false }
    }

    /// One that may pass.
    pub(crate) fn passing(why: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault { why: why.into(), help: help.into(), passes: true }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.help)
    }
}

/// Writes a line to standard error, for the journal with its priority (sd-daemon(3)). Its callers write few.
pub(crate) fn log(priority: u8, text: &str) {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let line = match std::env::var_os("JOURNAL_STREAM") {
        Some(_) => format!("<{priority}>ferrite-rbd: {text}\n"),
        None => format!("ferrite-rbd: {text}\n"),
    };
    // Without a log it serves nevertheless.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
