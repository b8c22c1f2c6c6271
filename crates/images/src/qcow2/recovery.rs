//! Replays the journal of a dead process: its answered changes that no commit had made durable.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;

use ferrite_disk_base::journal::Record;

use super::Qcow2;
use crate::qcow2::format::entry::{self, COPIED, Cluster};
use crate::qcow2::tables::changes::L1_KEYS;
use crate::qcow2::tables::meta::{TABLE_PIECE, read_whole};

/// The bytes of tables that are read while the guest waits for its disk: those of 512 GiB of data, with the usual
/// clusters.
const LOOKED_THROUGH_BYTES: u64 = 64 << 20;

impl Qcow2 {
    /// Makes the answered changes of a dead process visible again. Its operations have ended: it held the image's lock
    /// until then. A writer takes them into its own changes. A reader, of which there may be several, lays them over
    /// the tables that it reads, and leaves the journal unchanged.
    ///
    /// A record is valid if the disk has the entry from before the change, or the one after it: any other entry means
    /// that another program has written to the image since.
    pub(super) fn recover(&mut self, records: Vec<Record>) -> io::Result<()> {
        let writable = !self.base.medium.read_only();
        // L1 first: it has the places of the other tables.
        let mut records = records;
        records.sort_unstable_by_key(|r| (r.key < L1_KEYS, r.key));
        if records.windows(2).any(|pair| pair[0].key == pair[1].key) {
            return Err(changed_by_others("there are two records of one entry"));
        }
        let (mut taken, mut counted) = (HashSet::new(), HashSet::new());
        let mut tables = Vec::new();
        for record in &records {
            let [new, old, middle] = record.words[..] else { unreachable!("a record has 3 words") };
            if record.key < L1_KEYS && self.overlaps_metadata(new) {
                return Err(changed_by_others("an entry refers to a table"));
            }
            let now = self.entry_on_disk(record.key)?;
            if ![new, old, middle].contains(&now) {
                return Err(changed_by_others("an entry differs from both states that it had"));
            }
            if writable && now == middle && now != old {
                self.leave_record(record.key, old, middle);
            }
            if now == new {
                if writable {
                    self.leave_record(record.key, old, new);
                    self.state().changes.journal.release(record.slot);
                } else if record.key < L1_KEYS {
                    // Only a record may refer to its table.
                    self.lay_over(record.key, new);
                }
                continue;
            }
            let host = new & entry::OFFSET;
            let cluster = host >> self.header.cluster_bits;
            let has_count = host != 0 && self.alloc.take_recovered(cluster)?;
            if host != 0 && host != now & entry::OFFSET {
                if !taken.insert(cluster) || self.alloc.is_table(cluster) {
                    return Err(changed_by_others("a cluster has got another use"));
                }
                counted.extend(has_count.then_some(cluster));
            }
            match writable {
                true => self.redo(record, now, new)?,
                false => self.lay_over(record.key, new),
            }
            if let (false, Some(index)) = (writable, record.key.checked_sub(L1_KEYS)) {
                tables.push((index, now));
            }
        }
        tables.into_iter().try_for_each(|(index, old)| self.lay_table_over(index, old))?;
        self.check_unused(&counted).map(|_| ())
    }

    /// Checks that clusters which only records refer to are not used otherwise. Such a cluster has a count if a commit
    /// got so far, or if another program has allocated it since. Such a program has removed the mark by which the
    /// journal was found. So an image with a mark and many tables is not read. Returns the bytes that were read.
    pub(super) fn check_unused(&self, clusters: &HashSet<u64>) -> io::Result<u64> {
        let tables = self.l1.iter().filter(|l1| l1.load(Ordering::Relaxed) & entry::OFFSET != 0);
        let bytes = tables.count() as u64 * self.cluster_bytes();
        let is_marked = self.header.mark().is_some();
        if clusters.is_empty() || is_marked && bytes > LOOKED_THROUGH_BYTES {
            return Ok(0);
        }
        let bits = self.header.cluster_bits;
        for l1 in &self.l1 {
            let Ok(Some((table, _))) = entry::l2_table(l1.load(Ordering::Relaxed), bits) else {
                continue;
            };
            for at in (0..self.cluster_bytes()).step_by(TABLE_PIECE as usize) {
                let len = (self.cluster_bytes() - at).min(TABLE_PIECE) as usize;
                let piece = read_whole(&self.base.medium, table + at, len)?;
                let used = |entry: u64| match self.decode(entry) {
                    Some(Cluster::Packed(packed)) => {
                        packed.clusters(bits).any(|cluster| clusters.contains(&cluster))
                    }
                    found => found
                        .and_then(|found| found.host())
                        .is_some_and(|host| clusters.contains(&(host >> bits))),
                };
                let words = self.header.form().words(&piece);
                let entries = piece.len() / self.header.form().entry_bytes();
                if words.into_iter().take(entries).any(|entry| entry != 0 && used(entry)) {
                    return Err(changed_by_others("a cluster has got another use"));
                }
            }
        }
        Ok(bytes)
    }

    /// Loads the entry of a record's key into memory; returns it.
    fn entry_on_disk(&self, key: u64) -> io::Result<u64> {
        if key >= L1_KEYS {
            let entry = self.l1.get((key - L1_KEYS) as usize);
            let entry = entry.ok_or_else(|| changed_by_others("an entry is outside of L1"))?;
            return Ok(entry.load(Ordering::Relaxed));
        }
        if key >= self.header.guest_clusters() {
            return Err(changed_by_others("an entry is outside of the disk"));
        }
        let (slice, _) = self.slice(key);
        if !self.cache.holds(slice) {
            let offset = self.slice_offset(slice)?;
            let offset = offset.ok_or_else(|| changed_by_others("an entry has lost its table"))?;
            let len = self.cache.slice_entries() * self.header.form().entry_bytes();
            let bytes = read_whole(&self.base.medium, offset, len)?;
            self.cache.install(slice, &self.words_of(slice, &bytes));
        }
        Ok(self.entry(key).unwrap_or(0))
    }

    fn redo(&self, record: &Record, now: u64, new: u64) -> io::Result<()> {
        let mut state = self.state();
        if record.key < L1_KEYS && !self.can_pin(&state, record.key) {
            let text = "more changes than the memory for metadata holds; allow more";
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        state.changes.recover(record.key, record.slot);
        if record.key >= L1_KEYS {
            state.changes.note(record.key, now, new);
            self.leave(&mut state, now & !COPIED, new);
            self.l1[(record.key - L1_KEYS) as usize].store(new, Ordering::Relaxed);
        } else {
            self.publish(&mut state, record.key, new);
        }
        Ok(())
    }

    /// Lays a record over an entry. Records come in the order of their keys, those of L1 first. The slice is in memory.
    fn lay_over(&mut self, key: u64, new: u64) {
        if key >= L1_KEYS {
            self.l1[(key - L1_KEYS) as usize].store(new, Ordering::Relaxed);
            return;
        }
        let (slice, i) = self.slice(key);
        self.cache.set_entry(slice, i, new);
        self.answered.push((key, new));
    }

    /// Lays the entries of a table over, if only a record of L1 refers to that table. They are as little on the disk as
    /// the record, though they may be in the table: a process between the dead one and this one has then taken its
    /// records for done. Entries that the table before it had, too, are not among them.
    fn lay_table_over(&mut self, index: u64, old: u64) -> io::Result<()> {
        let table = |entry: u64| -> io::Result<Vec<u64>> {
            let bytes = match entry & entry::OFFSET {
                0 => return Ok(vec![0; self.header.l2_entries() as usize]),
                offset => read_whole(&self.base.medium, offset, self.cluster_bytes() as usize)?,
            };
            let mut words = self.header.form().words(&bytes);
            words.truncate(self.header.l2_entries() as usize);
            Ok(words)
        };
        let new = table(self.l1[index as usize].load(Ordering::Relaxed))?;
        let old = table(old)?;
        let first = index * self.header.l2_entries();
        for (cluster, (new, old)) in (first..).zip(new.into_iter().zip(old)) {
            let at = self.answered.partition_point(|(known, _)| *known < cluster);
            let is_known = self.answered.get(at).is_some_and(|(known, _)| *known == cluster);
            if new & !COPIED != old & !COPIED && !is_known {
                self.answered.insert(at, (cluster, new));
            }
        }
        Ok(())
    }

    /// The words of a slice whose bytes were read, as [`Cache::install`](super::tables::cache::Cache::install) takes
    /// them: those of the file, overlaid by a dead process's records that this process cannot write.
    pub(super) fn words_of(&self, slice: u64, bytes: &[u8]) -> Vec<u64> {
        let mut words = self.header.form().words(bytes);
        let entries = self.cache.slice_entries().min(words.len());
        let first = slice * self.cache.slice_entries() as u64;
        let at = self.answered.partition_point(|(cluster, _)| *cluster < first);
        for (cluster, entry) in &self.answered[at..] {
            match words[..entries].get_mut((cluster - first) as usize) {
                Some(to) => *to = *entry,
                None => break,
            }
        }
        words
    }

    /// Notes the cluster of `old`: a dead process's commit has replaced it on disk, but may not have lowered its count.
    fn leave_record(&self, key: u64, old: u64, new: u64) {
        let old = if key >= L1_KEYS { old & !COPIED } else { old };
        self.leave(&mut self.state(), old, new);
    }

    /// Whether an entry of a table refers to a cluster of metadata.
    pub(super) fn overlaps_metadata(&self, entry: u64) -> bool {
        let host = self.decode(entry).as_ref().and_then(Cluster::host);
        host.is_some_and(|h| self.alloc.is_table(h >> self.header.cluster_bits))
    }
}

fn changed_by_others(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
