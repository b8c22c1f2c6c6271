//! Discard and zeros. In a file, unshared clusters keep their place, and the file system gets their space back: the
//! next write there costs no allocation. On a device a kept place could not be used otherwise, so a discard frees it.
//! Shared clusters lose their place everywhere. Both need a format with zero entries (version 3). A discard leaves
//! ranges without a cluster in this image as they are, zeros or the parent's: its work is bounded by the clusters
//! allocated here.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_disk_base::Port;
use ferrite_io::arena::Span;

use crate::image::backing::Backing;
use crate::image::format::ImageFormat;
use crate::image::mapping::Mapping;
use crate::qcow2::format::entry::{self, Cluster};
use crate::qcow2::{CLUSTER_LOCKS, Qcow2};

/// The step for the beginning of a range.
enum Step {
    /// Zero it in place.
    InPlace { offset: u64, len: u64 },
    /// The place belongs to writes that are not done, or have failed: their data must not become visible with the next
    /// write there.
    Pending { offset: u64, len: u64 },
    /// It reads as zeros already.
    Nothing { len: u64 },
    /// Whole clusters whose entries can become zeros.
    Flag { cluster: u64, entry: u64 },
    /// Write zeros, with all that this takes.
    Write { len: u64 },
    /// Prepare metadata first.
    Prepare,
}

/// Steps of one part of a discard: slices of tables, runs of L1 entries, clusters. Together they take about ten
/// microseconds, if none waits.
const STEPS_A_PART: usize = 16;
/// L1 entries without a table that one step skips.
const L1_ENTRIES_A_STEP: usize = 4096;

impl Qcow2 {
    /// See `Disk::discard_part`.
    pub(crate) async fn discard_part(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let mut done = 0;
        for _ in 0..STEPS_A_PART {
            if done == len {
                break;
            }
            let (at, left) = (offset + done, len - done);
            if let Some(missing) = self.without_table(at, left) {
                done += missing;
                continue;
            }
            // A part of it may be zeros, or below, already: the entry has all of them.
            if let Some(entry) = self.mixed_whole(at, left) {
                done += self.flag(port, at >> self.header.cluster_bits, entry, at, left).await?;
                continue;
            }
            match self.find(at, left) {
                Mapping::Backing { len } | Mapping::Zeros { len } => {
                    done += len;
                    continue;
                }
                Mapping::Miss { .. } => {
                    self.load(port, port.files[0], at, 1).await?;
                    break;
                }
                Mapping::Data { .. } | Mapping::Compressed { .. } | Mapping::Cow { .. } => {}
            }
            match self.step(below, at, left) {
                Step::InPlace { offset, len } if self.frees_what_is_discarded() => {
                    done += self.discard_and_free(port, at, offset, len).await?;
                    break;
                }
                Step::InPlace { offset, len } => {
                    self.medium().discard(&port.io, &port.files, offset, len).await?;
                    done += len;
                    break;
                }
                // A discard is a hint: clusters that cannot be freed whole stay as they are.
                Step::Pending { len, .. } | Step::Write { len } | Step::Nothing { len } => {
                    done += len;
                }
                Step::Flag { cluster, entry } => {
                    done += self.flag(port, cluster, entry, at, left).await?;
                }
                Step::Prepare => {
                    self.prepare_entry(port, at).await?;
                    break;
                }
            }
        }
        Ok(done)
    }

    /// Whether discarded clusters of this image become free.
    fn frees_what_is_discarded(&self) -> bool {
        self.header.version >= 3 && !self.medium().is_file()
    }

    /// Discards adjacent clusters of this image, from byte `at` of the disk and `host` of the medium on; the bytes that
    /// this was. Whole clusters become zeros by their entries, and free. As this is a hint, a cluster keeps its place
    /// if its change cannot be noted now.
    async fn discard_and_free(&self, port: &Port, at: u64, host: u64, len: u64) -> io::Result<u64> {
        let (size, within) = (self.cluster_bytes(), self.split(at).1);
        let len = len.min(STEPS_A_PART as u64 * size - within);
        match self.medium().discard(&port.io, &port.files, host, len).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
            done => done?,
        }
        let end = if at + len == self.bytes() { at + len } else { (at + len) / size * size };
        for start in (at.next_multiple_of(size)..end).step_by(size as usize) {
            let cluster = start / size;
            let lock = &self.clusters[(cluster % CLUSTER_LOCKS as u64) as usize];
            let _alone = lock.lock(&port.io).await?;
            if !self.free(cluster, host + (start - at)) {
                self.prepare_entry(port, start).await?;
                self.free(cluster, host + (start - at));
            }
        }
        Ok(len)
    }

    /// Makes a cluster with this place read as zeros, and frees the place. `false`: there is no room to note that now,
    /// or its entry is another one, or not durable. A record has the values that an entry may have on the medium, and
    /// these are at most three.
    fn free(&self, cluster: u64, host: u64) -> bool {
        let mut state = self.state();
        let room = state.room() > 0 && self.can_pin(&state, cluster);
        let entry = self.entry(cluster).filter(|_| room);
        let own = entry.and_then(|entry| self.in_place(entry)) == Some(host);
        if own && !state.changes.has_record(cluster) {
            self.publish(&mut state, cluster, entry::ZERO);
            return true;
        }
        false
    }

    /// The bytes from `offset` on for which L1 has no tables, if it has none there.
    fn without_table(&self, offset: u64, len: u64) -> Option<u64> {
        let first = self.l1_index(offset >> self.header.cluster_bits);
        let is_missing = |l1: &&AtomicU64| {
            let l1 = l1.load(Ordering::Acquire);
            matches!(entry::l2_table(l1, self.header.cluster_bits), Ok(None))
        };
        let entries = self.l1[first..].iter().take(L1_ENTRIES_A_STEP);
        let more = entries.take_while(is_missing).count().checked_sub(1)? as u64;
        let table_bytes = self.header.l2_entries() * self.cluster_bytes();
        Some((self.table_left(offset) + more * table_bytes).min(len))
    }

    /// See `Disk::write_zeroes`.
    pub(crate) async fn write_zeroes(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let (at, left) = (offset + done, len - done);
            if below.is_empty()
                && let Some(missing) = self.without_table(at, left)
            {
                done += missing;
                continue;
            }
            done += match self.step(below, at, left) {
                Step::InPlace { offset, len } => {
                    self.medium().empty(&port.io, &port.files, offset, len, zeros).await?;
                    len
                }
                Step::Pending { offset, len } => {
                    self.medium().empty(&port.io, &port.files, offset, len, zeros).await?;
                    self.written(at, len);
                    len
                }
                Step::Nothing { len } => len,
                Step::Flag { cluster, entry } => self.flag(port, cluster, entry, at, left).await?,
                Step::Write { len } => {
                    let part = zeros.slice(0, zeros.len().min(len as usize));
                    self.write_copying(port, below, at, part).await?;
                    part.len() as u64
                }
                Step::Prepare => {
                    self.prepare_entry(port, at).await?;
                    0
                }
            };
        }
        Ok(())
    }

    /// Whether a range has all of the cluster at its beginning. The last cluster of the disk may be cut off.
    fn is_whole(&self, offset: u64, len: u64) -> bool {
        let (size, within) = (self.cluster_bytes(), self.split(offset).1);
        within == 0 && (len >= size || offset + len == self.bytes())
    }

    /// The entry of the cluster at the beginning of a range, if its subclusters differ, the range has all of it, and the
    /// entry can be changed.
    fn mixed_whole(&self, offset: u64, len: u64) -> Option<u64> {
        let cluster = self.split(offset).0;
        let can_change = self.is_whole(offset, len) && self.writable(self.l1_entry(cluster));
        let entry = self.entry(cluster).filter(|_| can_change)?;
        matches!(self.decode(entry), Some(Cluster::Mixed { .. })).then_some(entry)
    }

    fn step(&self, below: impl Backing, offset: u64, len: u64) -> Step {
        let (cluster, within) = self.split(offset);
        let size = self.cluster_bytes();
        let one = len.min(size - within);
        let l1 = self.l1_entry(cluster);
        if let Some(host) = self.state().pending.get(&cluster) {
            return Step::Pending { offset: host + within, len: one };
        }
        let found = self.find(offset, len);
        if let Mapping::Backing { len } = found
            && self.zeros_below(below, cluster)
        {
            return Step::Nothing { len: one.min(len) };
        }
        let whole = self.is_whole(offset, len);
        match found {
            Mapping::Zeros { len } => Step::Nothing { len },
            Mapping::Miss { .. } => Step::Prepare,
            _ if !self.writable(l1) => Step::Prepare,
            _ => match self.entry(cluster) {
                None => Step::Prepare,
                Some(e) if self.in_place(e).is_some() => match self.reserve(below, offset, len) {
                    Mapping::Data { offset, len } => Step::InPlace { offset, len },
                    _ => Step::Prepare,
                },
                Some(entry) if whole && self.header.version >= 3 => Step::Flag { cluster, entry },
                Some(_) => Step::Write { len: one },
            },
        }
    }

    /// Makes a cluster read as zeros by its entry alone; the bytes of the range that this was.
    async fn flag(
        &self,
        port: &Port,
        cluster: u64,
        entry: u64,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let lock = &self.clusters[(cluster % CLUSTER_LOCKS as u64) as usize];
        let _alone = lock.lock(&port.io).await?;
        // The cluster keeps a place that is not shared.
        let zero = match self.decode(entry) {
            Some(Cluster::Zero { host: Some(host), copied: true }) => entry::own(host),
            _ => 0,
        } | entry::ZERO;
        if self.publish_if(cluster, entry, zero) {
            return Ok(len.min(self.cluster_bytes()));
        }
        // It changed meanwhile, or there is no room to note it: try again.
        self.prepare_entry(port, offset).await?;
        Ok(0)
    }
}
