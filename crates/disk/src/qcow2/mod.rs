//! qcow2, versions 2 and 3.
//!
//! A guest's cluster is found through L1 (whole in memory) and a slice of an L2 table (cached);
//! reads and writes of what has its place take no lock and change nothing. A cluster without one
//! gets a place from a run of fresh clusters, whose space reads as zeros, so a write of a part of
//! it needs no copying unless a backing file has data below. Copying, tables, refcounts and
//! commits are slow paths.
//!
//! * `format`: the structures, as pure code over bytes.
//! * `tables`: slices of tables in memory, what of them is dirty, and how metadata is read and written.
//! * `alloc`: the allocator, and the states of a cluster of the file.
//! * `write`: what takes more than a place that is there: new tables, copies, zeros.
//! * `ready`: what the header says of the one who writes.
//! * `commit` and `recovery`: what is dirty becomes durable, and what a dead process had answered.
//! * `maintenance`: what is done to an image besides serving it.
//!
//! # What survives what
//! The order of writes is with `Qcow2::commit`. On disk, a refcount is never smaller
//! than the number of references: after a cut of the power clusters may be leaked, nothing else.
//! Clusters that are free, or come free, are used before the file grows (`reuse`).
//! What a guest discards keeps its place and loses its space (a hole in the file), so that nothing
//! is ever on its way to a cluster of the image's own that has become another's.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ferrite_io::shared_lock::SharedLock;

use crate::epochs::Epochs;
use crate::image::backing::Backing;
use crate::image::mapping::Mapping;
use crate::size::Human;
use crate::{Extent, Raw};

mod alloc;
mod commit;
mod format;
mod layer;
mod maintenance;
mod open;
mod ready;
mod recovery;
mod tables;
mod write;

pub use maintenance::check::{Finding, Problem, Report, check};
pub use maintenance::create::NewImage;
pub(crate) use maintenance::lineage::{backing_path, is_on_raw, is_qcow2};
pub use maintenance::repair::repair;
pub(crate) use maintenance::snapshots::Told;
pub use maintenance::upgrade::upgrade;

use alloc::Allocator;
use alloc::base::Base;
use alloc::state::State;
use format::entry::{self, COPIED, Cluster, own};
use format::header::Header;
use tables::cache::Cache;

/// Entries of a slice: 4 KiB, or a whole table where that is smaller.
const SLICE_BYTES: u64 = 4096;

const TABLE_LOCKS: usize = 16;
const CLUSTER_LOCKS: usize = 64;

/// Entries that may differ from the disk's until a commit has to be made.
pub(super) const MAX_CHANGES: u32 = 1 << 16;

/// An open image; see the module text.
pub(crate) struct Qcow2 {
    base: Arc<Base>,
    header: Header,
    l1: Box<[AtomicU64]>,
    cache: Cache,
    alloc: Allocator,
    /// By cluster, sorted: entries that a dead process has answered for, where this one only
    /// reads.
    answered: Vec<(u64, u64)>,
    /// The first write may begin: the header says what it has to.
    ready: AtomicBool,
    /// The autoclear features while this process writes: the mark of its journal, 0 without one.
    mark: u64,
    /// Those that the header has.
    autoclear: AtomicU64,
    /// The cluster that was unpacked last: its entry and its bytes.
    unpacked: Mutex<(u64, Vec<u8>)>,
    epochs: Arc<Epochs>,
    /// Who makes the image ready for the first write.
    readying: SharedLock,
    /// Who holds scratch memory and may need more.
    nested: SharedLock,
    /// By L1 index: who loads a slice or makes a table.
    tables: [SharedLock; TABLE_LOCKS],
    /// By guest cluster: who replaces a cluster.
    clusters: [SharedLock; CLUSTER_LOCKS],
}

impl Qcow2 {
    fn state(&self) -> MutexGuard<'_, State> {
        self.base.state()
    }

    pub(crate) fn medium(&self) -> &Raw {
        &self.base.medium
    }

    /// Memory for L1.
    pub(crate) fn table_bytes(&self) -> u64 {
        size_of_val(&*self.l1) as u64
    }

    /// Bytes of the disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.header.disk_bytes
    }

    /// Memory for entries that can be read again. What was recovered from a process that died,
    /// to be written, stays where it is.
    pub(crate) fn set_metadata_bytes(&mut self, bytes: usize) {
        if self.state().changes.changed.is_empty() {
            self.cache = Cache::new(bytes, self.cache.slice_entries());
        }
    }

    /// Of the format.
    pub(crate) fn version(&self) -> u32 {
        self.header.version
    }

    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    /// Guest cluster and byte in it.
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
        entry::cluster(entry, self.header.version, self.header.cluster_bits).ok()
    }

    /// The entry of a cluster, if it is in memory.
    fn entry(&self, cluster: u64) -> Option<u64> {
        let (slice, i) = self.slice(cluster);
        self.cache.read(slice, |entries| entries[i].load(Ordering::Acquire))
    }

    /// Bytes from `offset` to the end of what one slice maps.
    fn slice_left(&self, offset: u64) -> u64 {
        let mapped = self.cache.slice_entries() as u64 * self.cluster_bytes();
        mapped - offset % mapped
    }

    /// Bytes from `offset` to the end of what one L2 table maps.
    fn table_left(&self, offset: u64) -> u64 {
        let mapped = self.header.l2_entries() * self.cluster_bytes();
        mapped - offset % mapped
    }

    /// Where the beginning of a range is read: from memory, without a lock.
    pub(crate) fn find(&self, offset: u64, len: u64) -> Mapping {
        // Behind the end of a parent that is shorter than its child there are zeros.
        let len = match self.bytes().checked_sub(offset) {
            None | Some(0) => return Mapping::Zeros { len },
            Some(left) => len.min(left),
        };
        let (cluster, within) = self.split(offset);
        let (slice, i) = self.slice(cluster);
        let found = self.cache.read(slice, |entries| self.scan(&entries[i..], within, len));
        if let Some(found) = found {
            return found;
        }
        match entry::l2_table(self.l1_entry(cluster), self.header.cluster_bits) {
            Ok(None) => Mapping::Backing { len: len.min(self.table_left(offset)) },
            _ => Mapping::Miss { len: len.min(self.slice_left(offset)) },
        }
    }

    /// What clusters of the same kind, and in one piece, there are from the first entry on.
    fn scan(&self, entries: &[AtomicU64], within: u64, len: u64) -> Mapping {
        let size = self.cluster_bytes();
        let clusters = (within + len).div_ceil(size).min(entries.len() as u64) as usize;
        let load = |e: &AtomicU64| e.load(Ordering::Acquire);
        // Bytes of the range in the first `n` clusters.
        let upto = |n: usize| (n as u64 * size - within).min(len);
        let count = |same: &dyn Fn(usize, u64) -> bool| {
            let more = entries[1..clusters].iter().enumerate();
            1 + more.take_while(|(i, e)| same(i + 1, load(e))).count()
        };
        match self.decode(load(&entries[0])) {
            None => Mapping::Miss { len: upto(1) },
            Some(Cluster::Packed(_)) => Mapping::Compressed { len: upto(1) },
            Some(Cluster::Unallocated) => Mapping::Backing { len: upto(count(&|_, e| e == 0)) },
            Some(Cluster::Zero { .. }) => {
                let zero = |_, e| matches!(self.decode(e), Some(Cluster::Zero { .. }));
                Mapping::Zeros { len: upto(count(&zero)) }
            }
            Some(Cluster::Data { host, .. }) => {
                let next = |i, e: u64| e & !COPIED == host + i as u64 * size;
                let len = upto(count(&next));
                self.clip(host + within, len)
            }
        }
    }

    /// Data behind the end of the file: an image may end within its last cluster, and what is not
    /// there reads as zeros. Whole clusters outside are damage.
    fn clip(&self, offset: u64, len: u64) -> Mapping {
        let limit = self.alloc.limit();
        if offset < limit {
            return Mapping::Data { offset, len: len.min(limit - offset) };
        }
        match offset < limit.next_multiple_of(self.cluster_bytes()) {
            true => Mapping::Zeros {
                len: len.min(self.cluster_bytes() - offset % self.cluster_bytes()),
            },
            false => Mapping::Miss { len },
        }
    }

    /// Whether an entry's cluster may be written where it is.
    fn in_place(&self, entry: u64) -> Option<u64> {
        match self.decode(entry)? {
            Cluster::Data { host, copied: true } => {
                let end = host + self.cluster_bytes();
                (end <= self.alloc.limit()).then_some(host)
            }
            _ => None,
        }
    }

    /// Where the beginning of a range is written. Data for a place are made visible by
    /// [`written`](Self::written).
    pub(crate) fn reserve(&self, below: impl Backing, offset: u64, len: u64) -> Mapping {
        let (cluster, within) = self.split(offset);
        let slow = Mapping::Miss { len: len.min(self.cluster_bytes() - within) };
        // An entry's flag counts only in a table that is the image's own.
        if !self.writable(self.l1_entry(cluster)) {
            return slow;
        }
        let (slice, i) = self.slice(cluster);
        let size = self.cluster_bytes();
        let seen = self.cache.read(slice, |entries| {
            let first = entries[i].load(Ordering::Acquire);
            let host = self.in_place(first)?;
            let clusters = (within + len).div_ceil(size).min((entries.len() - i) as u64) as usize;
            let next = |(n, e): &(usize, &AtomicU64)| {
                self.in_place(e.load(Ordering::Acquire)) == Some(host + (n + 1) as u64 * size)
            };
            let more = entries[i + 1..i + clusters].iter().enumerate().take_while(next).count();
            Some((host, (1 + more) as u64 * size - within))
        });
        match seen {
            None => slow,
            Some(Some((host, left))) => Mapping::Data { offset: host + within, len: len.min(left) },
            Some(None) => self.place_fresh(below, offset, len),
        }
    }

    /// A place for clusters that have none that they may be written to.
    fn place_fresh(&self, below: impl Backing, offset: u64, len: u64) -> Mapping {
        let (cluster, within) = self.split(offset);
        let size = self.cluster_bytes();
        let one = len.min(size - within);
        let slow = Mapping::Miss { len: one };
        let copy = Mapping::Cow { len: one };
        if !self.zeros_below(below, cluster) {
            return copy;
        }
        if self.alloc.wants_run() {
            return slow;
        }
        let mut state = self.state();
        let mut first = None;
        let mut n = 0;
        while n * size < within + len {
            let from = first.map(|host| host + n * size);
            match self.place_cluster(&mut state, cluster + n, from) {
                Ok(host) => first = first.or(Some(host)),
                Err(Why::Slow) if n == 0 => return slow,
                Err(Why::Copy) if n == 0 => return copy,
                Err(_) => break,
            }
            n += 1;
            if n * size < within + len && !self.zeros_below(below, cluster + n) {
                break;
            }
        }
        match first {
            Some(host) => Mapping::Data { offset: host + within, len: len.min(n * size - within) },
            None => slow,
        }
    }

    /// Whether a cluster that this layer does not have reads as zeros, as far as memory tells.
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

    /// The place of one cluster that has none, the same for all that write to it at once. With
    /// `expected`, only if it is that one.
    fn place_cluster(
        &self,
        state: &mut State,
        cluster: u64,
        expected: Option<u64>,
    ) -> Result<u64, Why> {
        let same = |host| expected.is_none_or(|e| e == host);
        // A range may go on in another table, and in memory it may be one that is shared.
        if !self.writable(self.l1_entry(cluster)) {
            return Err(Why::Slow);
        }
        // Again, under the lock: the entry may have changed.
        let entry = self.entry(cluster).ok_or(Why::Slow)?;
        if let Some(host) = self.in_place(entry) {
            return if same(host) { Ok(host) } else { Err(Why::Slow) };
        }
        if entry != 0 {
            return Err(Why::Copy);
        }
        if state.copying.contains(&cluster) {
            return Err(Why::Copy);
        }
        if let Some(host) = state.pending.get(&cluster) {
            return if same(*host) { Ok(*host) } else { Err(Why::Slow) };
        }
        let room = state.room() > 0 && self.can_pin(state, cluster);
        if !room || cluster >= self.header.guest_clusters() {
            return Err(Why::Slow);
        }
        let (next, zeroed) = state.clusters.next().ok_or(Why::Slow)?;
        if !same(next * self.cluster_bytes()) {
            return Err(Why::Slow);
        }
        if !zeroed {
            return Err(Why::Copy);
        }
        let Some((host, _)) = state.clusters.take() else { return Err(Why::Slow) };
        let host = host * self.cluster_bytes();
        state.pending.insert(cluster, host);
        // Until it is visible: `written` cannot wait for the slice.
        self.cache.pin(self.slice(cluster).0, 1);
        Ok(host)
    }

    /// The data of a placed write were given to the kernel: from now on they are what is read, and
    /// they survive this process. Memory only.
    pub(crate) fn written(&self, offset: u64, len: u64) {
        let first = offset >> self.header.cluster_bits;
        let last = (offset + len - 1) >> self.header.cluster_bits;
        for cluster in first..=last {
            // None: evicted, and so not pinned by a place given.
            if self.entry(cluster).is_some_and(|e| self.in_place(e).is_none()) {
                let mut state = self.state();
                if let Some(host) = state.pending.remove(&cluster) {
                    self.publish(&mut state, cluster, own(host));
                    self.cache.pin(self.slice(cluster).0, -1);
                }
            }
        }
    }

    /// Replaces an entry, for all threads and for the next process. The slice is in memory, its
    /// table is the image's own, and the journal has room.
    fn publish(&self, state: &mut State, cluster: u64, new: u64) {
        debug_assert!(self.l1_entry(cluster) & COPIED != 0, "a shared table is changed");
        let (slice, i) = self.slice(cluster);
        let old = self.entry(cluster).unwrap_or(0);
        // The record first: what can be read was noted.
        if state.changes.note(cluster, old, new) {
            self.cache.pin(slice, 1);
        }
        self.cache.set_entry(slice, i, new);
        self.leave(state, old, new);
    }

    /// Notes which clusters an entry does not refer to any more.
    fn leave(&self, state: &mut State, old: u64, new: u64) {
        let kept = self.decode(new).and_then(|c| c.host());
        match self.decode(old) {
            Some(Cluster::Packed(packed)) => {
                state.clusters.leave(packed.clusters(self.header.cluster_bits), true);
            }
            Some(cluster) => {
                let gone = cluster.host().filter(|host| Some(*host) != kept);
                let gone = gone.map(|host| host >> self.header.cluster_bits);
                state.clusters.leave(gone.into_iter(), false);
            }
            None => {}
        }
    }
}

/// Why a cluster got no place.
enum Why {
    Slow,
    Copy,
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
