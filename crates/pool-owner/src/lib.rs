//! The process that has a disk of a pool: it answers NBD to one starter, and keeps the copies on the servers of the pool.
//!
//! [`ferrite_pool::Owner`], a state machine for each set of copies, decides. This is its shell, which carries the
//! decisions out:
//!
//! * `open`: from a name to an open disk: its owner, and the files of a new one; `lock`: its last owner on this host.
//! * `disk`: a request is split into parts, by the map's arithmetic; `parts`: what its parts have in common.
//! * `set`: the state machine of a set, and its orders.
//! * `member`: the thread of a copy, which connects to its server and takes its answers; `link`: one connection; `luns`: copies
//!   without a server.
//! * `records`: the thread that asks etcd, and changes records; `copies`: the thread that looks for copies that come or go.
//!
//! The rules and messages are in `docs/internals/pool.md`.

#![forbid(unsafe_code)]

mod copies;
mod disk;
mod link;
mod lock;
mod luns;
#[cfg(test)]
mod machines;
mod member;
mod open;
mod parts;
mod records;
mod set;

use std::path::PathBuf;

pub use disk::Disk;
pub use open::open;

/// Which disk, and how it is reached.
#[derive(Clone, Debug)]
pub struct Name {
    /// Addresses of etcd.
    pub etcd: Vec<String>,
    /// The pool.
    pub pool: String,
    /// The disk.
    pub disk: String,
    /// The folder of certificates for etcd and for the servers. `None`: without TLS.
    pub tls: Option<PathBuf>,
    /// The disk is taken from its owner.
    pub take_over: bool,
    /// Nothing is written by the user.
    pub read_only: bool,
    /// The folder of the records of this host's keys at LUNs.
    pub fences: PathBuf,
}

/// Nanoseconds of a clock that goes on while the machine sleeps.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
