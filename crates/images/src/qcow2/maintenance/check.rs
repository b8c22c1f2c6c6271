//! Checks an image without changing it: every reference to a cluster is counted, and compared with the refcounts.
//!
//! The counts of a window of clusters are in memory at a time, so the memory does not depend on the size of the image;
//! an image with clusters all over a large file is read several times.

use std::io;

use ferrite_disk_base::{Class, Counts, DiskError, ErrorKind, ProblemKind, Raw, Stretches};

use crate::qcow2::format::entry::{self, COPIED, Cluster};
use crate::qcow2::format::header::{
    CORRUPT, DIRTY, EXT_BITMAPS, HEAD_BYTES, Header, HeaderError, be32, be64,
};
use crate::qcow2::format::refcount;
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

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// There is no valid header, and so no image.
    Header,
    /// It is marked as one whose refcounts may be wrong, or as corrupt.
    Marked,
    /// An entry of a table that cannot be decoded.
    Entry,
    /// A reference to something outside of the file.
    Outside,
    /// A cluster with more references than its refcount: it would be given out again.
    CountTooLow,
    /// A cluster with fewer references than its refcount.
    Leak,
    /// An entry with a wrong flag for whether its cluster has other references.
    Flag,
    /// The list of snapshots or of bitmaps cannot be read.
    List,
    /// An unsupported version or feature: nothing else was checked.
    Unsupported,
}

impl ProblemKind for Problem {
    fn class(self) -> Class {
        match self {
            Problem::Leak => Class::Leak,
            Problem::Unsupported => Class::Unsupported,
            Problem::Header
            | Problem::Marked
            | Problem::Entry
            | Problem::Outside
            | Problem::CountTooLow
            | Problem::Flag
            | Problem::List => Class::Damage,
        }
    }

    fn is_mendable(self) -> bool {
        match self {
            Problem::Marked | Problem::CountTooLow | Problem::Leak | Problem::Flag => true,
            Problem::Header
            | Problem::Entry
            | Problem::Outside
            | Problem::List
            | Problem::Unsupported => false,
        }
    }
}

/// One inconsistency of a qcow2 image.
pub type Finding = ferrite_disk_base::Finding<Problem>;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The worst first, at most 1,000.
    pub findings: Vec<Finding>,
    /// All findings, listed or not.
    pub counts: Counts,
    /// The stretches of tables that are one finding each.
    stretches: Stretches<Problem>,
    /// Clusters of the disk.
    pub clusters: u64,
    /// Clusters that have a place, compressed or not.
    pub allocated_clusters: u64,
    /// Compressed ones among them.
    pub compressed_clusters: u64,
    /// Unused bytes of the file: those after the last cluster in use, and at least the space that other free clusters
    /// take on the file system. A killed program leaves them.
    pub unused_bytes: u64,
}

impl Report {
    fn add(&mut self, problem: Problem, offset: u64, why: impl Into<String>) {
        let finding = Finding { problem, offset, why: why.into() };
        self.stretches.add(finding, &mut self.findings, &mut self.counts);
    }

    /// Findings that are in the line of another one.
    pub fn joined(&self) -> u64 {
        self.stretches.joined
    }

    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.counts.total() == 0
    }

    /// Whether all findings can be repaired.
    pub(in crate::qcow2) fn is_mendable(&self) -> bool {
        self.counts.mendable == self.counts.total()
    }
}

/// A change that makes refcounts and references agree.
#[derive(Clone, Copy, Debug)]
pub(in crate::qcow2) enum Fix {
    /// The count of a cluster, as there are references.
    Count { cluster: u64, found: u64 },
    /// An entry of a table in use, at its place in the file.
    Flag { offset: u64, entry: u64 },
    /// Clusters of the file that nothing refers to, and whose counts are 0. They come in order.
    Free { first: u64, end: u64 },
}

/// Checks the image in `raw`, which no process has open for writing. Reads all tables.
///
/// # Errors
/// It cannot be read; damage is in the report.
pub fn check(raw: &Raw) -> Result<Report, DiskError> {
    let (_, report) = survey(raw, |_| {}).map_err(|e| failed(raw, "check", e))?;
    Ok(report)
}

pub(in crate::qcow2) fn failed(raw: &Raw, verb: &str, e: io::Error) -> DiskError {
    let what = format!("cannot {verb} {}", raw.path().display());
    let help = "check the medium below it and the kernel's log (dmesg)";
    DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
}

/// Checks, and passes each possible repair to `fix`.
pub(in crate::qcow2) fn survey(
    raw: &Raw,
    mut fix: impl FnMut(Fix),
) -> io::Result<(Option<Header>, Report)> {
    let mut report = Report::default();
    let file_bytes = raw.bytes_now()?;
    let head = raw.read_now(0, HEAD_BYTES as usize)?;
    let header = match Header::parse(&head, file_bytes) {
        Ok(header) => header,
        Err(e) => {
            let problem = match e {
                HeaderError::Unsupported(_) => Problem::Unsupported,
                HeaderError::NotQcow2(_) | HeaderError::Damaged(_) => Problem::Header,
            };
            report.add(problem, 0, e.to_string());
            return Ok((None, report));
        }
    };
    if header.incompatible & (DIRTY | CORRUPT) != 0 {
        report.add(Problem::Marked, 72, "it is marked as one whose refcounts may be wrong");
    }
    report.clusters = header.guest_clusters();
    let reftable = read(raw, header.reftable_offset, header.reftable_bytes())?;
    let reftable: Vec<u64> = reftable.chunks_exact(8).map(|e| be64(e, 0)).collect();
    let mut walk = Walk {
        raw,
        header: &header,
        reftable: &reftable,
        file_clusters: file_bytes.div_ceil(header.cluster_bytes()),
        first: 0,
        stored: Vec::new(),
        found: Vec::new(),
        next: None,
        free: 0,
        tail: 0,
        report: &mut report,
        fix: &mut fix,
    };
    let mut windows = 0;
    loop {
        walk.window()?;
        windows += 1;
        match walk.next {
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
                walk.free(walk.window_end(), walk.file_clusters);
                walk.report.unused_bytes = walk.unused_bytes()?;
                break;
            }
        }
    }
    Ok((Some(header), report))
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
    fix: &'a mut dyn FnMut(Fix),
}

impl Walk<'_> {
    /// Whether to report findings that belong to no window. Each window takes a pass over everything; these are
    /// reported in the first.
    fn once(&self) -> bool {
        self.first == 0
    }

    fn add(&mut self, problem: Problem, offset: u64, why: String) {
        if self.once() {
            self.report.add(problem, offset, why);
        }
    }

    fn window(&mut self) -> io::Result<()> {
        self.next = None;
        let len = self.file_clusters.saturating_sub(self.first).clamp(1, WINDOW) as usize;
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
        self.bitmaps()?;
        self.compare();
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
            let block = read(self.raw, *offset, 1 << bits)?;
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

    /// Counts a reference to a cluster; returns the cluster's refcount if it is in the window.
    fn refer(&mut self, cluster: u64) -> Option<u64> {
        match cluster.checked_sub(self.first) {
            None => None,
            Some(i) if i < self.found.len() as u64 => {
                self.found[i as usize] = self.found[i as usize].saturating_add(1);
                Some(self.stored[i as usize])
            }
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
            let problem = match offset.is_multiple_of(self.header.cluster_bytes()) {
                true => Problem::Outside,
                false => Problem::Entry,
            };
            self.add(problem, at, format!("the refcount block {i} is at {offset:#x}"));
            return;
        }
        self.refer(offset >> self.header.cluster_bits);
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
        self.flag(count, at, entry, active);
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
                self.flag(count, at, entry, active);
                if counted {
                    self.report.allocated_clusters += 1;
                }
            }
        }
    }

    /// Checks bit 63, which is set in tables in use if the count is exactly one.
    fn flag(&mut self, count: Option<u64>, at: u64, entry: u64, active: bool) {
        let Some(count) = count.filter(|_| active) else { return };
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
            let offset = cluster << self.header.cluster_bits;
            let problem = if stored < found { Problem::CountTooLow } else { Problem::Leak };
            let text = format!("the cluster has {found} references and the refcount {stored}");
            self.report.add(problem, offset, text);
            (self.fix)(Fix::Count { cluster, found });
        }
    }
}
