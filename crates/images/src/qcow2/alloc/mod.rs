//! The allocator: the state of each cluster of the file.
//!
//! [`Allocator`] does the steps that wait for the medium: it sets clusters aside, after the last one ([`grow`]) and
//! between others ([`reuse`]). It takes one, writes counts, and gives the file's end back.
//! [`Clusters`](clusters::Clusters) is its knowledge, under the lock of [`State`](state::State): a step of a cluster
//! and its entry change together.
//!
//! # The states of a cluster
//! ```text
//!   free ------> set aside -----> taken -----------> referred to ------> on the medium
//!   count 0      a run            count 1, dirty     an entry in memory  count and entry
//!     ^            ^                |     |          and a record of     durable, in this
//!     |            |   give_back    |     | untake   the journal         order
//!     |            +----------------+     v                                    |
//!     |                             held until the                             | the entry is
//!     |                             next opening                               | replaced
//!     |                                                                        v
//!     +---- quarantined <------------------ due <------------------------- leaving
//!   the count of 0 is durable,       no entry on                      the entry on the
//!   and the place is not used        the medium refers                medium still refers
//!   any more (`epochs`)              to it                            to it
//! ```
//! Each step is a method of that name, most of them of `Clusters`:
//! * `set_aside`: nothing on the medium refers to it.
//! * `take`: from now on it counts as used. Until its data are written it is `State::pending`, or a copy is written to
//!   it. [`Fresh`](fresh::Fresh) is a cluster without a reference; when it is dropped, it goes by `give_back` or
//!   `untake`.
//! * `refer`: an entry of the tables has it.
//! * `leave`: an entry had it. Until the commit that removes the reference is durable it is leaving.
//! * `due`: the next commit lowers the count.
//! * [`Quarantine`](quarantine::Quarantine) has it from then on, if that was the last reference.
//!   `end_quarantine` lets it go. [`reuse`] says when, and why.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferrite_disk_base::Port;
use ferrite_io::shared_lock::{Held, SharedLock};

use crate::qcow2::format::header::Header;

pub(in crate::qcow2) mod base;
mod blocks;
pub(in crate::qcow2) mod clusters;
mod counts;
mod end;
pub(in crate::qcow2) mod fingerprint;
pub(in crate::qcow2) mod fresh;
pub(in crate::qcow2) mod grow;
mod holes;
mod quarantine;
pub(in crate::qcow2) mod refs;
mod reuse;
pub(in crate::qcow2) mod state;

use base::Base;

/// See the module text.
pub(in crate::qcow2) struct Allocator {
    base: Arc<Base>,
    cluster_bits: u32,
    refcount_order: u32,
    /// The clusters of tables when the image was opened, sorted.
    metadata: Box<[u64]>,
    /// Byte offset of the refcount table.
    reftable: AtomicU64,
    /// The end of the file, in bytes.
    limit: AtomicU64,
    /// The end of the clusters in use, in bytes, when the first run was set aside behind it; the maximum before.
    first_new: AtomicU64,
    /// A task is about to search for the next run.
    refilling: AtomicBool,
    /// Held by a task that changes the end of the file, the refcount table, or the header.
    growth: SharedLock,
}

impl Allocator {
    /// An allocator for an image whose file ends at `limit`, and with tables in these clusters.
    pub(in crate::qcow2) fn new(
        base: Arc<Base>,
        header: &Header,
        metadata: Box<[u64]>,
        limit: u64,
    ) -> Allocator {
        Allocator {
            base,
            cluster_bits: header.cluster_bits,
            refcount_order: header.refcount_order,
            metadata,
            reftable: AtomicU64::new(header.reftable_offset),
            limit: AtomicU64::new(limit),
            first_new: AtomicU64::new(u64::MAX),
            refilling: AtomicBool::new(false),
            growth: SharedLock::new(),
        }
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The end of the file, in bytes.
    #[inline]
    pub(in crate::qcow2) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    /// Whether a table was in a cluster when the image was opened.
    pub(in crate::qcow2) fn is_table(&self, cluster: u64) -> bool {
        self.metadata.binary_search(&cluster).is_ok()
    }

    /// While this is held, no clusters are set aside and the header is not changed.
    pub(in crate::qcow2) async fn pause(&self, port: &Port) -> io::Result<Held<'_>> {
        self.growth.lock(&port.io).await
    }

    /// Whether this caller has to set the next run aside: one does, while the others use the rest of the present one.
    pub(in crate::qcow2) fn wants_run(&self) -> bool {
        let low = self.base.state().clusters.is_low();
        low && !self.refilling.swap(true, Ordering::AcqRel)
    }
}
