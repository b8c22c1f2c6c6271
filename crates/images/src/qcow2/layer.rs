//! The answers of a qcow2 layer: from memory here, and from other files of this folder where it waits.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ferrite_disk_base::journal::Identity;
use ferrite_disk_base::{DiskError, Epochs, Format, OnDamage, Port, Raw, SyncWitness};
use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;

use super::Qcow2;
use super::open::identity;
use crate::image::backing::Backing;
use crate::image::format::{ImageFormat, ParentNames};
use crate::image::mapping::Mapping;
use crate::qcow2::alloc::state::State;
use crate::qcow2::format::entry::{self, COPIED, Cluster, own};
use crate::qcow2::format::extended::{self, Part};

impl ImageFormat for Qcow2 {
    fn format(&self) -> Format {
        Format::Qcow2
    }

    fn bytes(&self) -> u64 {
        self.header.disk_bytes
    }

    fn medium(&self) -> &Raw {
        &self.base.medium
    }

    fn table_bytes(&self) -> u64 {
        size_of_val(&*self.l1) as u64
    }

    fn flaws(&self) -> Vec<String> {
        self.flaws.clone()
    }

    /// Sets the memory for entries that can be read again. Entries recovered from a dead process, which have to be
    /// written, are kept.
    fn set_metadata_bytes(&mut self, bytes: usize) {
        if self.state().changes.changed.is_empty() {
            self.cache = self.cache.resized(bytes);
        }
    }

    fn parents(&self) -> Result<Option<ParentNames>, DiskError> {
        Ok(self.parent()?.map(|parent| ParentNames {
            name: parent.path.display().to_string(),
            candidates: vec![parent],
        }))
    }

    /// Finds the beginning of a range for a read: from memory, without a lock.
    fn find(&self, offset: u64, len: u64) -> Mapping {
        // Past the end of a parent that is shorter than its child the disk is zeros.
        let len = match self.bytes().checked_sub(offset) {
            None | Some(0) => return Mapping::Zeros { len },
            Some(left) => len.min(left),
        };
        let (cluster, within) = self.split(offset);
        let (slice, i) = self.slice(cluster);
        let found = self.cache.read_with_bitmaps(slice, |entries, bitmaps| {
            self.scan(&entries[i..], bitmaps.get(i), within, len)
        });
        if let Some(found) = found {
            return found;
        }
        match entry::l2_table(self.l1_entry(cluster), self.header.cluster_bits) {
            Ok(None) => Mapping::Backing { len: len.min(self.table_left(offset)) },
            _ => Mapping::Miss { len: len.min(self.slice_left(offset)) },
        }
    }

    /// Finds the place for a write of the beginning of a range. [`written`](Self::written) makes the data visible.
    fn reserve(&self, below: impl Backing, offset: u64, len: u64) -> Mapping {
        let (cluster, within) = self.split(offset);
        let slow = Mapping::Miss { len: len.min(self.cluster_bytes() - within) };
        // An entry's flag counts only in a table that this image does not share.
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

    /// Called when the data of a placed write were given to the kernel: from now on they are read, and they survive
    /// this process. Changes memory only.
    fn written(&self, offset: u64, len: u64) {
        let first = offset >> self.header.cluster_bits;
        let last = (offset + len - 1) >> self.header.cluster_bits;
        for cluster in first..=last {
            // `None`: evicted, and so not pinned by a place given.
            if self.entry(cluster).is_some_and(|e| self.in_place(e).is_none()) {
                let mut state = self.state();
                if let Some(host) = state.pending.remove(&cluster) {
                    self.publish(&mut state, cluster, own(host));
                    self.cache.pin(self.slice(cluster).0, -1);
                }
            }
        }
    }

    async fn load(&self, port: &Port, file: FileId, offset: u64, len: u64) -> io::Result<()> {
        self.tell(Qcow2::load(self, port, file, offset, len).await)
    }

    async fn prepare(&self, port: &Port, offset: u64, _: u64) -> io::Result<()> {
        Qcow2::prepare(self, port, offset).await
    }

    async fn write_copying(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        Qcow2::write_copying(self, port, below, offset, buf).await
    }

    async fn unpack(&self, port: &Port, file: FileId, offset: u64, buf: Span) -> io::Result<()> {
        self.tell(Qcow2::unpack(self, port, file, offset, buf).await)
    }

    async fn commit(&self, port: &Port) -> io::Result<()> {
        Qcow2::commit(self, port).await
    }

    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        self.base.commits.witness(witness);
    }

    fn is_faulty(&self) -> bool {
        self.base.commits.is_faulty()
    }

    async fn discard_part(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        Qcow2::discard_part(self, port, below, offset, len).await
    }

    async fn write_zeroes(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        Qcow2::write_zeroes(self, port, below, offset, len, zeros).await
    }

    fn epochs(&self) -> Option<&Arc<Epochs>> {
        (!self.medium().read_only()).then_some(&self.epochs)
    }

    fn is_dirty(&self) -> bool {
        !self.medium().read_only() && self.state().is_dirty()
    }

    fn recovered(&self) -> Vec<(u64, u64)> {
        let part =
            |(cluster, _): &(u64, u64)| (cluster << self.header.cluster_bits, self.cluster_bytes());
        self.answered.iter().map(part).collect()
    }

    fn check_writable(&self) -> Result<(), DiskError> {
        self.check_marks()
    }

    fn journal_identity(&self) -> io::Result<Option<Identity>> {
        identity(self.medium(), &self.header).map(Some)
    }

    async fn close(&self, port: &Port) -> io::Result<()> {
        Qcow2::close(self, port).await
    }
}

/// The reason why a cluster got no place.
enum Why {
    Slow,
    Copy,
}

impl Qcow2 {
    /// The run of clusters of one kind, adjacent in the file, from the first entry on.
    fn scan(
        &self,
        entries: &[AtomicU64],
        bitmap: Option<&AtomicU64>,
        within: u64,
        len: u64,
    ) -> Mapping {
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
            Some(Cluster::Mixed { host, .. }) => {
                let bitmap = bitmap.map_or(0, load);
                let (part, left) = extended::part(bitmap, within, self.header.cluster_bits);
                let len = len.min(left);
                match (part, host) {
                    (Part::Data, Some(host)) => self.clip(host + within, len),
                    (Part::Data, None) => Mapping::Miss { len },
                    (Part::Zeros, _) => Mapping::Zeros { len },
                    (Part::Below, _) => Mapping::Backing { len },
                }
            }
        }
    }

    /// Cuts data off at the end of the file: an image may end within its last cluster, and missing bytes read as zeros.
    /// Whole clusters outside are damage.
    fn clip(&self, offset: u64, len: u64) -> Mapping {
        let limit = self.alloc.limit();
        if offset < limit {
            return Mapping::Data { offset, len: len.min(limit - offset) };
        }
        match self.on_damage != OnDamage::Salvage
            && offset < limit.next_multiple_of(self.cluster_bytes())
        {
            true => Mapping::Zeros {
                len: len.min(self.cluster_bytes() - offset % self.cluster_bytes()),
            },
            false => Mapping::Miss { len },
        }
    }

    /// Gives a place to clusters without one, for a write.
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

    /// The place of one cluster without one, the same for concurrent writes. With `expected`, only if it is that place.
    fn place_cluster(
        &self,
        state: &mut State,
        cluster: u64,
        expected: Option<u64>,
    ) -> Result<u64, Why> {
        let same = |host| expected.is_none_or(|e| e == host);
        // The range may continue in another table, which may be shared.
        if !self.writable(self.l1_entry(cluster)) {
            return Err(Why::Slow);
        }
        // Read again under the lock: the entry may have changed.
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
        // Pinned until the data are visible: `written` cannot wait for the slice.
        self.cache.pin(self.slice(cluster).0, 1);
        Ok(host)
    }
}
