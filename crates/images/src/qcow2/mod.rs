//! qcow2, versions 2 and 3.
//!
//! A guest's cluster is found through L1 (whole in memory) and a slice of an L2 table (cached). Reads and writes of
//! clusters with a place take no lock and change nothing. A cluster without one gets a place from a run of fresh
//! clusters, whose space reads as zeros. So a write of a part of it needs no copy unless a backing file has data below.
//! Copies, tables, refcounts and commits are slow paths.
//!
//! * `format`: the structures, as pure code over bytes.
//! * `tables`: slices of tables in memory, their dirty entries, and I/O of metadata.
//! * `alloc`: the allocator, and the states of a cluster of the file.
//! * `write`: writes that need more than an existing place: new tables, copies, zeros.
//! * `ready`: the changes of the header before the first write.
//! * `commit` and `recovery`: dirty state becomes durable, and a dead process's journal is replayed.
//! * `maintenance`: changes of images that are not served.
//!
//! # After a crash
//! `Qcow2::commit` has the order of writes. On disk, a refcount is never smaller than the number of references: after a
//! power cut clusters may be leaked, nothing else. Clusters that are free, or become free, are used before the file
//! grows (`reuse`). A discarded cluster in a file keeps its place and loses its space (a hole). On a device its place
//! is free, and is reused when no operation on it is in flight any more (`epochs`).

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{Epochs, Extent, OnDamage};
use ferrite_io::shared_lock::SharedLock;

use crate::image::backing::Backing;
use crate::image::format::ImageFormat;

mod alloc;
mod commit;
mod damage;
mod format;
mod layer;
mod maintenance;
mod open;
mod ready;
mod recovery;
mod tables;
mod write;

pub use maintenance::bitmaps::Bitmap;
pub use maintenance::check::{Finding, Problem, Report, check};
pub use maintenance::create::NewImage;
pub use maintenance::inner::{Change, Planned};
pub(crate) use maintenance::lineage::{backing_path, is_on_raw, is_qcow2};
pub use maintenance::repair::{is_repairable, repair};
pub use maintenance::snapshots::Told;
pub use maintenance::upgrade::upgrade;

use alloc::Allocator;
use alloc::base::Base;
use alloc::state::State;
use format::entry::{self, COPIED, Cluster};
use format::header::{CORRUPT, Header};
use format::unpack::Compression;
use tables::cache::Cache;

/// Entries of a slice: 4 KiB, or a whole table where that is smaller.
const SLICE_BYTES: u64 = 4096;

const TABLE_LOCKS: usize = 16;
const CLUSTER_LOCKS: usize = 64;

/// The most entries that may differ from the disk's until a commit is needed.
pub(super) const MAX_CHANGES: u32 = 1 << 16;

/// Properties of an image that only its format has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// A program has found damage, and has marked the image.
    pub is_corrupt: bool,
    /// Another program may leave refcounts behind, and makes them new after a crash.
    pub has_lazy_refcounts: bool,
    /// The method of compressed clusters: `zlib` or `zstd`.
    pub compression: &'static str,
    /// L2 entries have a bitmap of subclusters.
    pub has_extended_l2: bool,
}

/// The feature of the header (compatible) that refcounts may be left behind.
const LAZY_REFCOUNTS: u64 = 1;

/// An open qcow2 image, without its parents.
pub struct Qcow2 {
    base: Arc<Base>,
    header: Header,
    l1: Box<[AtomicU64]>,
    cache: Cache,
    alloc: Allocator,
    /// The reaction to damage, and the damage found at opening.
    on_damage: OnDamage,
    flaws: Vec<String>,
    /// Reads that have met damage, and were logged.
    told: AtomicUsize,
    /// By cluster, sorted: entries that a dead process has answered for, if this process only reads.
    answered: Vec<(u64, u64)>,
    /// The first write may begin: the header has been prepared.
    ready: AtomicBool,
    /// The autoclear features while this process writes: the mark of its journal, 0 without one.
    mark: u64,
    /// The autoclear features in the header.
    autoclear: AtomicU64,
    /// The cluster that was unpacked last: its entry and its bytes.
    unpacked: Mutex<(u64, Vec<u8>)>,
    epochs: Arc<Epochs>,
    /// Held by the task that prepares the image for the first write.
    readying: SharedLock,
    /// Held by a task that holds scratch memory and may need more.
    nested: SharedLock,
    /// By L1 index: held by a task that loads a slice or makes a table.
    tables: [SharedLock; TABLE_LOCKS],
    /// By guest cluster: held by a task that replaces a cluster.
    clusters: [SharedLock; CLUSTER_LOCKS],
}

impl Qcow2 {
    fn state(&self) -> MutexGuard<'_, State> {
        self.base.state()
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// The properties that its header has.
    pub fn properties(&self) -> Properties {
        Properties {
            refcount_bits: 1 << self.header.refcount_order,
            is_corrupt: self.header.incompatible & CORRUPT != 0,
            has_lazy_refcounts: self.header.compatible & LAZY_REFCOUNTS != 0,
            compression: match self.header.compression {
                Compression::Deflate => "zlib",
                Compression::Zstd => "zstd",
            },
            has_extended_l2: self.header.form().extended,
        }
    }

    /// Bytes of a cluster, the unit of allocation.
    #[inline]
    pub fn cluster_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    /// The guest cluster of an offset, and the byte in it.
    fn split(&self, offset: u64) -> (u64, u64) {
        (offset >> self.header.cluster_bits, offset & (self.cluster_bytes() - 1))
    }

    /// The slice with a cluster's entry, and the entry's index in it.
    fn slice(&self, cluster: u64) -> (u64, usize) {
        let entries = self.cache.slice_entries();
        (cluster >> entries.trailing_zeros(), cluster as usize & (entries - 1))
    }

    /// The index in L1 of the table with a cluster's entry.
    fn l1_index(&self, cluster: u64) -> usize {
        (cluster >> self.header.l2_entries().trailing_zeros()) as usize
    }

    fn l1_entry(&self, cluster: u64) -> u64 {
        self.l1[self.l1_index(cluster)].load(Ordering::Acquire)
    }

    /// Whether entries of the table of an L1 entry may be changed.
    fn writable(&self, l1: u64) -> bool {
        l1 & COPIED != 0 && self.ready.load(Ordering::Acquire)
    }

    #[inline]
    fn decode(&self, entry: u64) -> Option<Cluster> {
        if let Some(data) = entry::data(entry, self.header.cluster_bits) {
            return Some(data);
        }
        self.header.form().cluster(entry).ok()
    }

    /// The entry of a cluster, if it is in memory.
    fn entry(&self, cluster: u64) -> Option<u64> {
        self.entry_with_bitmap(cluster).map(|(entry, _)| entry)
    }

    /// The entry of a cluster, if it is in memory, and its bitmap, which counts if the entry is of a mixed cluster.
    fn entry_with_bitmap(&self, cluster: u64) -> Option<(u64, u64)> {
        let (slice, i) = self.slice(cluster);
        self.cache.read_with_bitmaps(slice, |entries, bitmaps| {
            let bitmap = bitmaps.get(i).map_or(0, |bitmap| bitmap.load(Ordering::Relaxed));
            (entries[i].load(Ordering::Acquire), bitmap)
        })
    }

    /// Bytes from `offset` to the end of the range of its slice.
    fn slice_left(&self, offset: u64) -> u64 {
        let mapped = self.cache.slice_entries() as u64 * self.cluster_bytes();
        mapped - offset % mapped
    }

    /// Bytes from `offset` to the end of the range of its L2 table.
    fn table_left(&self, offset: u64) -> u64 {
        let mapped = self.header.l2_entries() * self.cluster_bytes();
        mapped - offset % mapped
    }

    /// The place of an entry's cluster, if it may be written there.
    fn in_place(&self, entry: u64) -> Option<u64> {
        match self.decode(entry)? {
            Cluster::Data { host, copied: true } => {
                let end = host + self.cluster_bytes();
                (end <= self.alloc.limit()).then_some(host)
            }
            _ => None,
        }
    }

    /// Whether a cluster that this layer lacks reads as zeros, as far as memory tells.
    fn zeros_below(&self, below: impl Backing, cluster: u64) -> bool {
        let size = self.cluster_bytes();
        let (mut at, end) = (cluster * size, ((cluster + 1) * size).min(self.bytes()));
        while at < end && !below.is_empty() {
            match below.map(at, end - at) {
                Extent::Zeros { len } => at += len.max(1),
                Extent::Data { .. } | Extent::Slow { .. } => return false,
            }
        }
        true
    }

    /// Replaces an entry, for all threads and for the next process. The slice is in memory, its table is not shared,
    /// and the journal has room.
    fn publish(&self, state: &mut State, cluster: u64, new: u64) {
        debug_assert!(self.l1_entry(cluster) & COPIED != 0, "a shared table is changed");
        let (slice, i) = self.slice(cluster);
        let old = self.entry(cluster).unwrap_or(0);
        // The record comes first: every entry that can be read is in the journal.
        if state.changes.note(cluster, old, new) {
            self.cache.pin(slice, 1);
        }
        self.cache.set_entry(slice, i, new);
        self.leave(state, old, new);
    }

    /// Notes the clusters that the new entry does not refer to any more.
    fn leave(&self, state: &mut State, old: u64, new: u64) {
        let kept = self.decode(new).and_then(|c| c.host());
        match self.decode(old) {
            Some(Cluster::Packed(packed)) => {
                state.clusters.leave(packed.clusters(self.header.cluster_bits), false);
            }
            Some(cluster) => {
                let gone = cluster.host().filter(|host| Some(*host) != kept);
                let gone = gone.map(|host| host >> self.header.cluster_bits);
                state.clusters.leave(gone.into_iter(), true);
            }
            None => {}
        }
    }
}

impl fmt::Debug for Qcow2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qcow2").field("header", &self.header).finish_non_exhaustive()
    }
}

impl fmt::Display for Qcow2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.medium().read_only() { "read-only" } else { "read-write" };
        let (size, cluster) = (Human(self.bytes()), Human(self.cluster_bytes()));
        let path = self.medium().path().display();
        write!(f, "qcow2 image {path}, {size}, {mode}, clusters of {cluster}")
    }
}

#[cfg(test)]
mod tests;
