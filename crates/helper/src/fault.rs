//! Why a disk is not served, in words.

use std::fmt;

/// A reason, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Why.
    pub why: String,
    /// The next step for the user.
    pub help: String,
    /// It may pass without a change by the user.
    pub passes: bool,
}

impl Fault {
    /// One that stays until the user does something.
    pub fn lasting(why: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault { why: why.into(), help: help.into(), passes: false }
    }

    /// One that may pass.
    pub fn passing(why: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault { why: why.into(), help: help.into(), passes: true }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.help)
    }
}
