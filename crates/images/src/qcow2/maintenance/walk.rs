//! The passes over all references of an image that its check consists of.
//!
//! The counts of a window of clusters are in memory at a time, so the memory does not depend on the size of the image;
//! an image with clusters all over a large file is read several times.

use std::io;
use std::ops::Range;

use ferrite_disk_base::{Raw, is_damage};

use crate::qcow2::format::entry::{self, COPIED, Cluster};
use crate::qcow2::format::header::{EXT_BITMAPS, Header, be32, be64};
use crate::qcow2::format::refcount;
use crate::qcow2::maintenance::check::{Fix, Owned, Problem, Report};
use crate::qcow2::maintenance::snapshots::Entries;

/// Clusters whose counts are in memory: two of four bytes each.
const WINDOW: u64 = 1 << 22;

/// The most windows that are examined. A file can have holes of any size, so clusters can be anywhere.
const MAX_WINDOWS: u32 = 1024;

/// The metadata read at a time.
const PIECE_BYTES: u64 = 64 << 10;

/// A file system needs a few blocks for itself.
const LEAST_UNUSED_BYTES: u64 = 64 << 10;

/// The largest directory of bitmaps.
const MAX_LIST_BYTES: u64 = 64 << 20;

/// The use of the counts of references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qcow2) enum Counting {
    /// They are compared with the refcounts.
    Compared,
    /// They count alone: all of them are passed on.
    Alone,
    /// They count alone, and after them the entries of the tables in use whose clusters have exactly one are passed on.
    Owned,
}

/// The extent of a walk.
#[derive(Clone, Debug)]
pub(in crate::qcow2) struct Course {
    pub(in crate::qcow2) counting: Counting,
    /// The clusters whose references count.
    pub(in crate::qcow2) clusters: Range<u64>,
    /// The snapshot that is left out, by its index in their table.
    pub(in crate::qcow2) without: Option<u32>,
    /// A table of tables (its place and entries) whose references count once more, as those of a snapshot would.
    pub(in crate::qcow2) more: Option<(u64, u32)>,
}

impl Course {
    /// Through all of the image.
    pub(in crate::qcow2) fn all(counting: Counting) -> Course {
        Course { counting, clusters: 0..u64::MAX, without: None, more: None }
    }
}

/// Walks through all references. The first report gets all findings, but for those about the places of the refcounts,
/// which the second one gets.
pub(in crate::qcow2) fn walk(
    raw: &Raw,
    header: &Header,
    course: Course,
    (report, structure): (&mut Report, &mut Report),
    fix: &mut dyn FnMut(Fix),
) -> io::Result<()> {
    let reftable = match read(raw, header.reftable_offset, header.reftable_bytes()) {
        Err(e) if is_damage(&e) => {
            let at = header.reftable_offset;
            structure.add(Problem::Refcounts, at, format!("the refcount table: {e}"));
            return Ok(());
        }
        table => table?,
    };
    let reftable: Vec<u64> = reftable.chunks_exact(8).map(|e| be64(e, 0)).collect();
    let mut walk = Walk {
        raw,
        header,
        first: course.clusters.start,
        course,
        owning: false,
        reftable: &reftable,
        file_clusters: raw.bytes_now()?.div_ceil(header.cluster_bytes()),
        stored: Vec::new(),
        found: Vec::new(),
        next: None,
        free: 0,
        tail: 0,
        report,
        structure,
        fix,
    };
    let mut windows = 0;
    loop {
        walk.window()?;
        windows += 1;
        match walk.next.filter(|next| *next < walk.course.clusters.end) {
            Some(next) if windows < MAX_WINDOWS => {
                // No cluster between the two has a reference or a count.
                walk.free(walk.window_end(), next);
                walk.first = next;
            }
            Some(next) => {
                let at = next << header.cluster_bits;
                walk.report.add(Problem::List, at, "the clusters from here on were not looked at");
                break;
            }
            None => {
                walk.free(walk.window_end(), walk.course.clusters.end);
                if walk.course.counting == Counting::Compared {
                    walk.report.unused_bytes = walk.unused_bytes()?;
                }
                break;
            }
        }
    }
    Ok(())
}

/// Reads metadata; past the end of the file there are zeros.
fn read(raw: &Raw, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = raw.read_now(offset, len as usize)?;
    bytes.resize(len as usize, 0);
    Ok(bytes)
}

/// One pass over all references, which counts those to a window of clusters.
struct Walk<'a> {
    raw: &'a Raw,
    header: &'a Header,
    course: Course,
    /// The references of the window have been counted, and the entries in use are looked at again.
    owning: bool,
    reftable: &'a [u64],
    file_clusters: u64,
    /// The first cluster of the window.
    first: u64,
    /// The refcounts on disk, and the references that were counted.
    stored: Vec<u64>,
    found: Vec<u32>,
    /// The first cluster after the window that has a reference or a count.
    next: Option<u64>,
    /// Free clusters so far, and the free ones at the end so far.
    free: u64,
    tail: u64,
    report: &'a mut Report,
    structure: &'a mut Report,
    fix: &'a mut dyn FnMut(Fix),
}

impl Walk<'_> {
    /// Whether to report findings that belong to no window. Each window takes a pass over everything; these are
    /// reported in the first.
    fn once(&self) -> bool {
        self.first == self.course.clusters.start && !self.owning
    }

    fn add(&mut self, problem: Problem, offset: u64, why: String) {
        if self.once() {
            self.report.add(problem, offset, why);
        }
    }

    fn window(&mut self) -> io::Result<()> {
        self.next = None;
        let end = self.file_clusters.min(self.course.clusters.end);
        let len = end.saturating_sub(self.first).clamp(1, WINDOW) as usize;
        self.stored = vec![0; len];
        self.found = vec![0; len];
        self.load_counts()?;
        let header = self.header;
        for (_, offset, len) in header.places() {
            self.range(offset, len);
        }
        for i in 0..self.reftable.len() {
            self.block(i);
        }
        self.l1(header.l1_offset, header.l1_entries, true)?;
        self.snapshots()?;
        if let Some((offset, entries)) = self.course.more {
            self.l1(offset, entries, false)?;
        }
        self.bitmaps()?;
        self.check_blocks_apart();
        self.compare();
        if self.course.counting == Counting::Owned {
            self.owning = true;
            self.l1(header.l1_offset, header.l1_entries, true)?;
            self.owning = false;
        }
        self.free_in_window();
        Ok(())
    }

    fn window_end(&self) -> u64 {
        self.first + self.stored.len() as u64
    }

    fn free_in_window(&mut self) {
        let is_free = |walk: &Walk<'_>, i: usize| walk.stored[i] == 0 && walk.found[i] == 0;
        let (mut at, len) = (0, self.stored.len());
        while let Some(first) = (at..len).find(|i| is_free(self, *i)) {
            at = (first..len).find(|i| !is_free(self, *i)).unwrap_or(len);
            self.free(self.first + first as u64, self.first + at as u64);
        }
    }

    /// Notes free clusters, up to the end of the file.
    fn free(&mut self, first: u64, end: u64) {
        let end = end.min(self.file_clusters);
        if first < end {
            self.free += end - first;
            self.tail = if end == self.file_clusters { end - first } else { 0 };
            (self.fix)(Fix::Free { first, end });
        }
    }

    /// See [`Report::unused_bytes`]. Free clusters may be holes, and clusters in use may have some.
    fn unused_bytes(&self) -> io::Result<u64> {
        if !self.raw.is_file() {
            return Ok(0);
        }
        let bits = self.header.cluster_bits;
        let not_free = (self.file_clusters - self.free + self.tail) << bits;
        let more =
            self.raw.disk_bytes()?.saturating_sub(not_free).min((self.free - self.tail) << bits);
        let unit = self.header.cluster_bytes().max(LEAST_UNUSED_BYTES);
        Ok((self.tail << bits) + more / unit * unit)
    }

    /// Reads the refcounts of the window.
    fn load_counts(&mut self) -> io::Result<()> {
        let (bits, order) = (self.header.cluster_bits, self.header.refcount_order);
        let entries = self.header.block_entries();
        let end = self.first + self.stored.len() as u64;
        for (i, offset) in self.reftable.iter().enumerate().filter(|(_, o)| **o != 0) {
            let first = i as u64 * entries;
            if first + entries <= self.first || !self.is_place(*offset) {
                continue;
            }
            let behind = first.max(end);
            if first + entries > end && behind < self.file_clusters {
                self.next = Some(self.next.map_or(behind, |next| next.min(behind)));
            }
            if first >= end {
                continue;
            }
            let block = match read(self.raw, *offset, 1 << bits) {
                Err(e) if is_damage(&e) => {
                    let at = self.header.reftable_offset + i as u64 * 8;
                    self.structure.add(Problem::Refcounts, at, format!("refcount block {i}: {e}"));
                    continue;
                }
                block => block?,
            };
            for cluster in first.max(self.first)..(first + entries).min(end) {
                let count = refcount::get(&block, order, (cluster - first) as usize);
                self.stored[(cluster - self.first) as usize] = count;
            }
        }
        Ok(())
    }

    fn is_place(&self, offset: u64) -> bool {
        offset.is_multiple_of(self.header.cluster_bytes())
            && offset >> self.header.cluster_bits < self.file_clusters
    }

    /// Counts a reference to a cluster; returns the cluster's refcount if it is in the window. While `owning`, nothing is
    /// counted, and the references that were found are returned.
    fn refer(&mut self, cluster: u64) -> Option<u64> {
        match cluster.checked_sub(self.first) {
            None => None,
            Some(i) if i < self.found.len() as u64 && self.owning => {
                Some(self.found[i as usize].into())
            }
            Some(i) if i < self.found.len() as u64 => {
                self.found[i as usize] = self.found[i as usize].saturating_add(1);
                Some(self.stored[i as usize])
            }
            Some(_) if self.owning => None,
            Some(_) => {
                self.next = Some(self.next.map_or(cluster, |next| next.min(cluster)));
                None
            }
        }
    }

    fn range(&mut self, offset: u64, len: u64) {
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..(offset + len).div_ceil(1 << bits) {
            self.refer(cluster);
        }
    }

    fn block(&mut self, i: usize) {
        let offset = self.reftable[i];
        if offset == 0 {
            return;
        }
        let at = self.header.reftable_offset + i as u64 * 8;
        if !self.is_place(offset) {
            if self.once() {
                let text = format!("the refcount block {i} is at {offset:#x}");
                self.structure.add(Problem::Refcounts, at, text);
            }
            return;
        }
        self.refer(offset >> self.header.cluster_bits);
    }

    /// Finds refcount blocks, and parts of their table, in clusters of the window that have another reference, too.
    fn check_blocks_apart(&mut self) {
        let bits = self.header.cluster_bits;
        let (first, end) = (self.first, self.window_end());
        let table = self.header.reftable_offset;
        let of_table = (0..self.header.reftable_bytes() >> bits).map(|i| (table + (i << bits), 48));
        let of_blocks = self.reftable.iter().enumerate().filter(|(_, offset)| **offset != 0);
        let of_blocks = of_blocks.map(|(i, offset)| (*offset, table + i as u64 * 8));
        for (offset, at) in of_table.chain(of_blocks) {
            let cluster = offset >> bits;
            if offset.is_multiple_of(1 << bits)
                && (first..end).contains(&cluster)
                && self.found[(cluster - first) as usize] > 1
            {
                let text = format!("refcounts at {offset:#x} are over something else");
                self.structure.add(Problem::Refcounts, at, text);
            }
        }
    }

    /// Walks through a table of tables, and everything that they refer to. Flags count only in tables in use.
    fn l1(&mut self, offset: u64, entries: u32, active: bool) -> io::Result<()> {
        let doubled = self.doubled(offset, entries)?;
        self.each_entry(offset, entries, |walk, index, entry| {
            walk.l1_entry(offset + index * 8, index, entry, active, &doubled)
        })
    }

    fn each_entry(
        &mut self,
        offset: u64,
        entries: u32,
        mut look: impl FnMut(&mut Self, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + u64::from(entries) * 8);
        while at < end {
            let bytes = read(self.raw, at, (end - at).min(PIECE_BYTES))?;
            for (i, entry) in bytes.chunks_exact(8).map(|e| be64(e, 0)).enumerate() {
                if entry != 0 {
                    look(self, (at - offset) / 8 + i as u64, entry)?;
                }
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Tables that more than one entry names, sorted. No program makes such an image, and opening it is refused. In a
    /// small image the same table could be checked a hundred thousand times.
    fn doubled(&mut self, offset: u64, entries: u32) -> io::Result<Vec<u64>> {
        let bits = self.header.cluster_bits;
        let mut tables = Vec::new();
        self.each_entry(offset, entries, |_, _, entry| {
            tables.extend(entry::l2_table(entry, bits).ok().flatten().map(|(table, _)| table));
            Ok(())
        })?;
        tables.sort_unstable();
        let mut doubled: Vec<u64> =
            tables.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
        doubled.dedup();
        Ok(doubled)
    }

    fn l1_entry(
        &mut self,
        at: u64,
        index: u64,
        entry: u64,
        active: bool,
        doubled: &[u64],
    ) -> io::Result<()> {
        let bits = self.header.cluster_bits;
        let table = match entry::l2_table(entry, bits) {
            Ok(Some((table, _))) => table,
            Ok(None) => return Ok(()),
            Err(e) => {
                self.add(Problem::Entry, at, format!("L1 {e}"));
                return Ok(());
            }
        };
        if !self.is_place(table) {
            self.add(Problem::Outside, at, format!("an L2 table at {table:#x} is outside"));
            return Ok(());
        }
        let count = self.refer(table >> bits);
        if doubled.binary_search(&table).is_ok() {
            self.add(Problem::Entry, at, format!("others name the L2 table at {table:#x}, too"));
            return Ok(());
        }
        self.flag(count, (at, entry), Owned::Table(index), active);
        let mut done = 0;
        while done < 1 << bits {
            let bytes = read(self.raw, table + done, (1u64 << bits).min(PIECE_BYTES))?;
            let form = self.header.form();
            let entry_bytes = form.entry_bytes() as u64;
            for (i, bytes) in bytes.chunks_exact(form.entry_bytes()).enumerate() {
                if bytes.iter().any(|byte| *byte != 0) {
                    let in_table = done / entry_bytes + i as u64;
                    let guest = index * self.header.l2_entries() + in_table;
                    self.l2_entry(table + in_table * entry_bytes, guest, bytes, active);
                }
            }
            done += bytes.len() as u64;
        }
        Ok(())
    }

    /// Checks an entry of so many bytes, at `at` in the file.
    fn l2_entry(&mut self, at: u64, guest: u64, bytes: &[u8], active: bool) {
        let bits = self.header.cluster_bits;
        let counted = self.once() && active && guest < self.header.guest_clusters();
        let entry = be64(bytes, 0);
        match self.header.form().cluster_of(bytes) {
            Err(e) => self.add(Problem::Entry, at, format!("L2 {e}")),
            Ok(Cluster::Packed(packed)) => {
                if packed.offset >> bits >= self.file_clusters {
                    let place = packed.offset;
                    let text = format!("compressed data at {place:#x} are outside of the file");
                    self.add(Problem::Outside, at, text);
                    return;
                }
                packed.clusters(bits).for_each(|cluster| {
                    self.refer(cluster);
                });
                if counted {
                    self.report.allocated_clusters += 1;
                    self.report.compressed_clusters += 1;
                }
            }
            Ok(cluster) => {
                let Some(host) = cluster.host() else { return };
                if host >> bits >= self.file_clusters {
                    let text = format!("the cluster at {host:#x} is outside of the file");
                    self.add(Problem::Outside, at, text);
                    return;
                }
                let count = self.refer(host >> bits);
                self.flag(count, (at, entry), Owned::Cluster(guest), active);
                if counted {
                    self.report.allocated_clusters += 1;
                }
            }
        }
    }

    /// Checks bit 63, which is set in tables in use if the count is exactly one.
    fn flag(&mut self, count: Option<u64>, (at, entry): (u64, u64), of: Owned, active: bool) {
        let is_known = active && (self.course.counting == Counting::Compared || self.owning);
        let Some(count) = count.filter(|_| is_known) else { return };
        if self.owning {
            if count == 1 {
                (self.fix)(Fix::Own(of));
            }
            return;
        }
        if (count == 1) != (entry & COPIED != 0) {
            let text = format!("entry {entry:#018x}, whose cluster has the refcount {count}");
            self.report.add(Problem::Flag, at, text);
            // The count itself may be wrong: a repair checks again when it is right.
            (self.fix)(Fix::Flag { offset: at, entry: entry ^ COPIED });
        }
    }

    fn snapshots(&mut self) -> io::Result<()> {
        let file_bytes = self.file_clusters << self.header.cluster_bits;
        let mut entries = Entries::new(self.raw, self.header, file_bytes);
        while let Some(entry) = entries.next()? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(bad) => {
                    self.add(Problem::List, bad.at, bad.to_string());
                    break;
                }
            };
            if self.course.without == Some(entry.index) {
                continue;
            }
            self.range(entry.l1_offset, u64::from(entry.l1_entries) * 8);
            self.l1(entry.l1_offset, entry.l1_entries, false)?;
        }
        let (start, at) = (self.header.snapshots_offset, entries.end());
        // The first cluster was counted with the places in the header.
        if at > start {
            let first = (start >> self.header.cluster_bits) + 1;
            let end = at.div_ceil(self.header.cluster_bytes());
            (first..end).for_each(|cluster| {
                self.refer(cluster);
            });
        }
        Ok(())
    }

    fn bitmaps(&mut self) -> io::Result<()> {
        let found = self.header.extensions.iter().find(|(kind, _)| *kind == EXT_BITMAPS);
        let Some((_, data)) = found.filter(|(_, data)| data.len() >= 24) else { return Ok(()) };
        let (count, len, start) = (be32(data, 0), be64(data, 8), be64(data, 16));
        let bits = self.header.cluster_bits;
        if len > MAX_LIST_BYTES || !self.is_place(start) {
            self.add(Problem::List, start, "the directory of bitmaps makes no sense".into());
            return Ok(());
        }
        self.range(start, len);
        let directory = read(self.raw, start, len)?;
        let mut at = 0;
        for i in 0..count {
            let entry = directory.get(at..).filter(|rest| rest.len() >= 24);
            let Some(entry) = entry else { break };
            let (table, entries) = (be64(entry, 0), u64::from(be32(entry, 8)));
            let name = u64::from(be32(entry, 16) & 0xFFFF);
            if !self.is_place(table) || entries * 8 > MAX_LIST_BYTES {
                let offset = start + at as u64;
                self.add(Problem::List, offset, format!("the entry of bitmap {i} makes no sense"));
                return Ok(());
            }
            self.range(table, entries * 8);
            for piece in read(self.raw, table, entries * 8)?.chunks_exact(8) {
                let place = be64(piece, 0) & entry::OFFSET;
                if place != 0 && self.is_place(place) {
                    self.refer(place >> bits);
                }
            }
            let extra = u64::from(be32(entry, 20));
            at += (24 + extra + name).next_multiple_of(8) as usize;
        }
        Ok(())
    }

    fn compare(&mut self) {
        for i in 0..self.found.len() {
            let (stored, found) = (self.stored[i], u64::from(self.found[i]));
            if stored == found {
                continue;
            }
            let cluster = self.first + i as u64;
            if self.course.counting != Counting::Compared {
                (self.fix)(Fix::Count { cluster, found });
                continue;
            }
            let offset = cluster << self.header.cluster_bits;
            let problem = if stored < found { Problem::CountTooLow } else { Problem::Leak };
            let text = format!("the cluster has {found} references and the refcount {stored}");
            self.report.add(problem, offset, text);
            (self.fix)(Fix::Count { cluster, found });
        }
    }
}
