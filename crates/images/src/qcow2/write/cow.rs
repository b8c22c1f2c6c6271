//! Steps with I/O before a range can be read or written.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_disk_base::{OnDamage, Port};
use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;
use ferrite_io::scratch::MAX_PIECE_BYTES;

use crate::image::format::ImageFormat;
use crate::image::mapping::Mapping;
use crate::qcow2::alloc::fresh::{Fate, Fresh};
use crate::qcow2::alloc::state::State;
use crate::qcow2::format::entry::{self, COPIED, Cluster, NoTable, Packed, TO_A_TABLE, own};
use crate::qcow2::format::unpack;
use crate::qcow2::tables::changes::l1_key;
use crate::qcow2::tables::meta::{self, TRIES, out_of_memory};
use crate::qcow2::{Qcow2, TABLE_LOCKS};

impl Qcow2 {
    /// Reads the slice that [`find`](Self::find) lacked for `len` bytes of the disk, or reports an invalid entry. Of many
    /// bytes, as tools walk over a disk, it reads the next slices, too.
    pub(crate) async fn load(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let cluster = offset >> self.header.cluster_bits;
        let last = offset.saturating_add(len.max(1) - 1) >> self.header.cluster_bits;
        self.load_slice(port, file, cluster, last).await?;
        self.check_entry(cluster)?;
        self.check_end(offset)
    }

    /// The error of data that are missing at the end of the file, if that is damage.
    fn check_end(&self, offset: u64) -> io::Result<()> {
        let (cluster, within) = self.split(offset);
        let found = self.entry(cluster).and_then(|entry| self.decode(entry));
        match found {
            Some(Cluster::Data { host, .. })
                if self.on_damage == OnDamage::Salvage && host + within >= self.alloc.limit() =>
            {
                Err(meta::damaged(format!("the file ends before byte {offset:#x} of the disk")))
            }
            _ => Ok(()),
        }
    }

    /// Reads one slice into the cache. Locked per table: a slice that was read before another task changed, wrote and
    /// evicted it must not be put in after that.
    /// The slices behind it up to that of cluster `last` are read with it, as far as its table and a piece of scratch
    /// memory go. Of these only those are put in that were not there before the read: no other task can have changed them.
    async fn load_slice(
        &self,
        port: &Port,
        file: FileId,
        cluster: u64,
        last: u64,
    ) -> io::Result<()> {
        let index = self.l1_index(cluster);
        let _alone = self.tables[index % TABLE_LOCKS].lock(&port.io).await?;
        let (slice, _) = self.slice(cluster);
        let Some(offset) = self.slice_offset(slice)? else { return Ok(()) };
        if self.cache.holds(slice) {
            return Ok(());
        }
        let len = self.cache.slice_entries() * self.header.form().entry_bytes();
        if self.on_damage != OnDamage::Refuse && offset + len as u64 > self.alloc.limit() {
            return Err(meta::damaged("the file ends within an L2 table"));
        }
        let slices = slice..slice + self.slices_at_once(slice, self.slice(last).0, offset);
        let slices: Vec<(u64, bool)> = slices.map(|next| (next, !self.cache.holds(next))).collect();
        let bytes = meta::read(port, file, offset, slices.len() * len).await?;
        // The first one last: in a small cache the others may take its place.
        for ((next, is_absent), bytes) in slices.iter().zip(bytes.chunks(len)).rev() {
            if !is_absent {
                continue;
            }
            let next = *next;
            match self.checked_words(next, bytes) {
                Ok(words) => {
                    let _state = self.state();
                    self.cache.install(next, &words);
                }
                Err(e) if next == slice => return Err(e),
                // It is reported when it is needed.
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// How many slices from `slice` to `last` are read at once: of one table, whose slice is at `offset` in the file.
    fn slices_at_once(&self, slice: u64, last: u64, offset: u64) -> u64 {
        let of_table = (self.header.l2_entries() / self.cache.slice_entries() as u64).max(1);
        let end = (slice / of_table + 1) * of_table;
        let len = self.cache.slice_entries() * self.header.form().entry_bytes();
        let most = (end.min(last + 1) - slice).min((MAX_PIECE_BYTES / len) as u64).max(1);
        let is_whole = offset + most * len as u64 <= self.alloc.limit();
        if is_whole { most } else { 1 }
    }

    /// The words of a slice that was read.
    fn checked_words(&self, slice: u64, bytes: &[u8]) -> io::Result<Vec<u64>> {
        let mut words = self.words_of(slice, bytes);
        let count = self.cache.slice_entries().min(words.len());
        if self.on_damage != OnDamage::Refuse {
            self.blank_out(&mut words[..count]);
        }
        match words[..count].iter().find(|entry| self.overlaps_metadata(**entry)) {
            Some(entry) => Err(meta::damaged(format!("L2 entry {entry:#x} refers to a table"))),
            None => Ok(words),
        }
    }

    /// The place of a slice in the file; `None`: there is no table.
    pub(in crate::qcow2) fn slice_offset(&self, slice: u64) -> io::Result<Option<u64>> {
        let entries = self.cache.slice_entries() as u64;
        let l1 = self.l1[self.l1_index(slice * entries)].load(Ordering::Acquire);
        if let Some(why) = NoTable::of(l1) {
            return Err(meta::damaged(why.to_string()));
        }
        let table = entry::l2_table(l1, self.header.cluster_bits)
            .map_err(|e| meta::damaged(format!("L1: {e}")))?;
        let entry_bytes = self.header.form().entry_bytes() as u64;
        let in_table = slice * entries % self.header.l2_entries() * entry_bytes;
        Ok(table.map(|(offset, _)| offset + in_table))
    }

    /// The error of an entry in memory that cannot be used.
    pub(in crate::qcow2) fn check_entry(&self, cluster: u64) -> io::Result<()> {
        let Some(entry) = self.entry(cluster) else { return Ok(()) };
        let at = cluster << self.header.cluster_bits;
        if entry == TO_A_TABLE && self.on_damage != OnDamage::Refuse {
            let text = format!("the L2 entry for byte {at:#x} of the disk refers to a table");
            return Err(meta::damaged(text));
        }
        let found = self
            .header
            .form()
            .cluster(entry)
            .map_err(|e| meta::damaged(format!("L2, for byte {at:#x} of the disk: {e}")))?;
        let limit = self.alloc.limit().next_multiple_of(self.cluster_bytes());
        match found {
            Cluster::Data { host, .. } | Cluster::Mixed { host: Some(host), .. }
                if host >= limit =>
            {
                Err(meta::damaged(format!(
                    "byte {at:#x} of the disk is at {host:#x}, outside of the file"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Enables [`reserve`](Self::reserve) to answer for the beginning of a range.
    pub(crate) async fn prepare(&self, port: &Port, offset: u64) -> io::Result<()> {
        self.prepare_entry(port, offset).await?;
        // On a full file system clusters with a place can still be written.
        if !self.has_place(offset >> self.header.cluster_bits) && self.state().clusters.is_low() {
            self.alloc.set_aside(port).await?;
        }
        Ok(())
    }

    /// Whether a write of a cluster needs no fresh one.
    fn has_place(&self, cluster: u64) -> bool {
        let own = match self.entry(cluster).and_then(|entry| self.decode(entry)) {
            Some(
                Cluster::Data { copied, .. }
                | Cluster::Zero { host: Some(_), copied }
                | Cluster::Mixed { host: Some(_), copied },
            ) => copied,
            _ => false,
        };
        own || self.state().pending.contains_key(&cluster)
    }

    /// Makes the entry at the beginning of a range changeable: it is in memory, in a table that is not shared, and
    /// there is room to note it.
    pub(in crate::qcow2) async fn prepare_entry(&self, port: &Port, offset: u64) -> io::Result<()> {
        if !self.ready.load(Ordering::Acquire) {
            self.make_ready(port).await?;
        }
        // At half of the journal: other tasks use the rest while this one commits.
        let (room, left, changes) = {
            let mut state = self.state();
            let pending = state.pending.len();
            state.changes.journal.reserve(pending + 4);
            let left = state.changes.journal.left().saturating_sub(pending);
            (state.room(), left, state.changes.changed.len())
        };
        if changes > left || room < 4 {
            self.commit(port).await?;
        }
        let cluster = offset >> self.header.cluster_bits;
        self.own_table(port, self.l1_index(cluster)).await?;
        self.load(port, port.files[0], offset, 1).await?;
        if self.entry(cluster).is_some_and(|entry| self.in_place(entry).is_some()) {
            return Ok(());
        }
        for _ in 0..TRIES {
            if self.can_pin(&self.state(), cluster) {
                return Ok(());
            }
            // Changes of other tasks pin the slice.
            self.commit(port).await?;
        }
        Err(out_of_memory())
    }

    /// Whether a cluster's slice may be kept in memory until its changes are on disk.
    pub(in crate::qcow2) fn can_pin(&self, _: &State, cluster: u64) -> bool {
        self.cache.can_pin(self.slice(cluster).0)
    }

    /// Ensures that the table of an L1 entry exists and is not shared. A table that a snapshot shares is copied; the
    /// old one loses a reference once the new one is on disk.
    ///
    /// The new table's content is given to the kernel before the entry can be noted, so recovery finds it.
    async fn own_table(&self, port: &Port, index: usize) -> io::Result<()> {
        if self.l1[index].load(Ordering::Acquire) & COPIED != 0 {
            return Ok(());
        }
        let _alone = self.tables[index % TABLE_LOCKS].lock(&port.io).await?;
        let old = self.l1[index].load(Ordering::Acquire);
        let bits = self.header.cluster_bits;
        let shared = match entry::l2_table(old, bits) {
            Ok(Some((_, true))) => return Ok(()),
            Ok(Some((offset, false))) => Some(offset),
            Ok(None) => None,
            Err(e) => return Err(meta::damaged(format!("L1: {e}"))),
        };
        let fresh = self.alloc.take(port).await?;
        let new = fresh.offset();
        match shared {
            Some(from) => self.copy_table(port, from, &fresh).await?,
            None if fresh.zeroed => {}
            None => meta::write_zeros(port, port.files[0], new, self.cluster_bytes()).await?,
        }
        let mut state = self.state();
        if state.room() == 0 {
            fresh.becomes(Fate::Good);
            return Ok(());
        }
        state.changes.note(l1_key(index), old, own(new));
        state.clusters.leave(shared.map(|offset| offset >> bits).into_iter(), false);
        self.l1[index].store(own(new), Ordering::Release);
        fresh.refer();
        Ok(())
    }

    async fn copy_table(&self, port: &Port, from: u64, to: &Fresh<'_>) -> io::Result<()> {
        let mut done = 0;
        while done < self.cluster_bytes() {
            let part = (self.cluster_bytes() - done).min(MAX_PIECE_BYTES as u64);
            let bytes = meta::read(port, port.files[0], from + done, part as usize).await;
            let bytes = to.is_good_without(bytes)?;
            meta::write(port, port.files[0], to.offset() + done, &bytes).await?;
            done += part;
        }
        Ok(())
    }

    /// Replaces an entry that no other task changes, if it is in memory, there is room to note it, and no write has got
    /// a place by it meanwhile.
    pub(in crate::qcow2) fn publish_if(&self, cluster: u64, old: u64, new: u64) -> bool {
        let mut state = self.state();
        let placed = state.pending.contains_key(&cluster);
        let room = state.room() > 0 && self.can_pin(&state, cluster);
        let ready = !placed && room && self.entry(cluster) == Some(old);
        if ready {
            self.publish(&mut state, cluster, new);
        }
        ready
    }

    /// Reads from a cluster that was compressed a moment ago: other tasks may write to it meanwhile, or need the memory
    /// of its entry.
    pub(crate) async fn unpack(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        let len = buf.len() as u64;
        for _ in 0..TRIES {
            match self.find(offset, len) {
                Mapping::Compressed { .. } => {
                    if self.read_packed(port, file, offset, buf).await? {
                        return Ok(());
                    }
                }
                Mapping::Data { offset, len: there } if there == len => {
                    return port.io.read_exact(file, offset, buf).await;
                }
                Mapping::Zeros { len: there } if there == len => {
                    port.memory().fill(buf, 0);
                    return Ok(());
                }
                Mapping::Miss { .. } => self.load(port, file, offset, 1).await?,
                _ => break,
            }
        }
        Err(out_of_memory())
    }

    /// Reads from a compressed cluster; `false`: its entry is evicted, or has changed.
    async fn read_packed(
        &self,
        port: &Port,
        file: FileId,
        offset: u64,
        buf: Span,
    ) -> io::Result<bool> {
        let (cluster, within) = self.split(offset);
        let entry = self.entry(cluster).and_then(|entry| self.decode(entry));
        let Some(Cluster::Packed(packed)) = entry else { return Ok(false) };
        let range = within as usize..within as usize + buf.len();
        {
            let last = self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
            if last.0 == packed.offset {
                port.memory().copy_in(buf, &last.1[range]);
                return Ok(true);
            }
        }
        let bytes = self.unpacked(port, file, packed).await?;
        port.memory().copy_in(buf, &bytes[range]);
        // An entry still refers to it, so its place was not reused.
        *self.unpacked.lock().unwrap_or_else(PoisonError::into_inner) = (packed.offset, bytes);
        Ok(true)
    }

    pub(in crate::qcow2) async fn unpacked(
        &self,
        port: &Port,
        file: FileId,
        packed: Packed,
    ) -> io::Result<Vec<u8>> {
        let first = packed.offset & !511;
        let len = (packed.offset + packed.len - first) as usize;
        let bytes = meta::read(port, file, first, len).await?;
        let mut cluster = vec![0; self.cluster_bytes() as usize];
        let from = (packed.offset - first) as usize;
        unpack::unpack(self.header.compression, &bytes[from..], &mut cluster)?;
        Ok(cluster)
    }

    /// The bytes of a slice as they were when the present commit began.
    pub(in crate::qcow2) fn slice_at_commit(&self, state: &State, slice: u64) -> Option<Vec<u8>> {
        let first = slice * self.cache.slice_entries() as u64;
        let load = |words: &[AtomicU64]| -> Vec<u64> {
            words.iter().map(|word| word.load(Ordering::Acquire)).collect()
        };
        let (mut entries, bitmaps) = self
            .cache
            .read_with_bitmaps(slice, |entries, bitmaps| (load(entries), load(bitmaps)))?;
        let end = first + entries.len() as u64;
        for (cluster, old) in state.changes.changed.range(first..end) {
            entries[(cluster - first) as usize] = *old;
        }
        Some(self.header.form().bytes(&entries, &bitmaps))
    }
}
