//! A server of a pool: the copies that it has, and the connections of their owners.
//!
//! [`ferrite_pool::Member`], a state machine for each copy, decides. This is its shell, which carries the decisions
//! out:
//!
//! * `folder`: the server's folder, its identity, and the files of copies.
//! * `lun`: a LUN in place of a folder, whose copies are ranges; `medium`: what a copy is on; `disk`: its files.
//! * `state`: the state of a copy as bytes.
//! * `copy`: a copy in use. Threads carry out what its state machine says.
//! * `connection`: an owner's connection, from its first byte.
//! * `link`: the socket of one, and what may be under way on it.
//! * [`Server`]: all of them.
//!
//! The rules, messages and files are in `docs/internals/pool.md`.

#![forbid(unsafe_code)]

use std::fmt;

use rustix::io::Errno;

mod connection;
mod copy;
mod disk;
mod folder;
mod link;
mod lun;
mod medium;
#[cfg(feature = "testing")]
pub mod power;
mod server;
mod state;

pub use lun::{LunName, NewLun, clear, prepare};
pub use server::{Server, Space};

/// Why something is not done.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The part that failed.
    pub what: String,
    /// Why.
    pub why: String,
    /// The next step for the user.
    pub help: String,
    /// The number that the other side of a connection gets.
    pub errno: Errno,
}

impl Fault {
    pub(crate) fn new(what: &str, why: impl fmt::Display, help: &str) -> Fault {
        let (what, why, help) = (what.to_owned(), why.to_string(), help.to_owned());
        Fault { what, why, help, errno: Errno::IO }
    }

    pub(crate) fn with(self, errno: Errno) -> Fault {
        Fault { errno, ..self }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.why, self.help)
    }
}
