//! A client of etcd by its HTTP gateway (`/v3`, etcd 3.4 and later).
//!
//! * `requests`: what is asked, as types. etcd ignores fields that it does not know, so a misspelt comparison would write.
//! * `answers`: what is said, checked and bounded.
//! * `cluster`: the endpoints, and one call after the other. A call has two seconds, then the next endpoint is asked.
//! * `change`: a change whose outcome may be unknown, until it is settled.
//!
//! A cluster that has lost its quorum answers nothing that can be relied on, so nothing here reads without it. Leases only
//! say who seems alive: after a loss of quorum they are gone although their owners live.

mod answers;
mod change;
mod cluster;
mod requests;

pub use change::{Change, Settled};
pub use cluster::{CALL_TIME, Cluster, Failure, MAX_ANSWER_BYTES, Said, Settings, TlsFiles};
pub use requests::{MAX_OPERATIONS, MAX_REQUEST_BYTES, Transaction, Unfit};

/// A revision of a key (its `mod_revision`) or of the whole cluster. A key that does not exist has revision 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

impl Revision {
    /// Of a key that does not exist.
    pub const ABSENT: Revision = Revision(0);
}

/// A lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease(pub i64);

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub key: String,
    /// Any bytes.
    pub value: Vec<u8>,
    /// When it was written last.
    pub revision: Revision,
}
