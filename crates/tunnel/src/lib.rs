//! The tunnel: the process that speaks TLS for NBD (docs/internals/processes.md 14, nbd-rules.md 7).
//!
//! * [`inward`]: clients come by TLS, and each gets a stream to a server of this host.
//! * [`outward`]: a client of this host goes by TLS to a server elsewhere.
//! * [`passed_server`], [`passed_client`]: connections of storage motion that XAPI has passed to a tap.
//! * [`check_server`], [`check_client`], [`expires_within`]: whether the files of a folder are fit for that.
//!
//! It does the handshake of NBD up to STARTTLS (`greeting.rs`) and that of TLS, and from then on moves bytes
//! (`pump.rs`). Each connection has a thread, bounded buffers, and 10 s to get that far.

#![forbid(unsafe_code)]

use std::fmt;

mod credentials;
mod faults;
mod greeting;
mod inward;
mod outward;
mod passed;
mod plain;
mod pump;
mod stream;
#[cfg(test)]
mod tests;

pub use credentials::{Side, check_client, check_server, expires_within};
pub use ferrite_nbd::restriction::Restriction;
pub use inward::{greet_client, inward};
pub use outward::outward;
pub use passed::{passed_client, passed_server};

/// Why there is no TLS with a peer, or none with these files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The part at fault, such as a file or the other side's certificate.
    pub what: String,
    /// Why.
    pub why: String,
    /// The next step for the user.
    pub help: String,
}

impl Fault {
    pub(crate) fn new(
        what: impl Into<String>,
        why: impl fmt::Display,
        help: impl Into<String>,
    ) -> Fault {
        Fault { what: what.into(), why: why.to_string(), help: help.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.why, self.help)
    }
}

/// How a connection ends before its time.
#[derive(Debug)]
pub(crate) enum End {
    /// The other side has left. That is no error by itself.
    Left,
    /// It cannot go on.
    Refused(Fault),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> End {
        End::Refused(fault)
    }
}
