//! Opening: the header, L1 and the refcount table are read and checked, nothing is written, and
//! what a process that died has left in the journal is taken over.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferrite_io::shared_lock::SharedLock;

use super::cache::Cache;
use super::entry::{self, COPIED, Cluster};
use super::header::{CORRUPT, DIRTY, HEAD_BYTES, Header, HeaderError, be64};
use super::refs::Refs;
use super::state::{L1_KEYS, State, WORDS};
use super::{MAX_CHANGES, Qcow2, SLICE_BYTES, snapshots};
use crate::journal::{Identity, Journal, Record};
use crate::{DiskError, ErrorKind, Format, ImageName, OpenOptions, Raw};

/// Bytes of a table that are read at once.
const TABLE_PIECE: u64 = 1 << 20;

const HELP_DAMAGED: &str =
    "check it (ferrite image check), and take a backup of it before anything";

/// An image's tables as they are on disk, checked.
struct Tables {
    header: Header,
    l1: Vec<u64>,
    reftable: Vec<u64>,
    /// Clusters of metadata, sorted.
    metadata: Vec<u64>,
    limit: u64,
}

impl Qcow2 {
    /// Opens the image in `medium`, for writing if that is.
    pub(crate) fn open(medium: Raw, options: &OpenOptions) -> Result<Qcow2, DiskError> {
        let cannot = Cannot(format!("cannot open image {}", medium.path().display()));
        let read_only = medium.read_only();
        let tables = Tables::read(&medium, &cannot)?;
        if !read_only {
            check_writable(&tables.header, &cannot)?;
        }
        let identity = identity(&medium, &tables.header).map_err(|e| cannot.io(e))?;
        let dir = options.state_dir.as_deref();
        let (journal, records) = if read_only {
            let records = Journal::peek(dir, identity, WORDS, MAX_CHANGES)?;
            (Journal::open(None, identity, WORDS, MAX_CHANGES)?.0, records)
        } else {
            Journal::open(dir, identity, WORDS, MAX_CHANGES)?
        };
        let entries = (tables.header.cluster_bytes().min(SLICE_BYTES) / 8) as usize;
        let refs = Refs::new(&tables.header, tables.reftable);
        let image = Qcow2 {
            l1: tables.l1.into_iter().map(AtomicU64::new).collect(),
            cache: Cache::new(options.metadata_bytes, entries),
            state: Mutex::new(State::new(journal, refs)),
            metadata: tables.metadata.into(),
            reftable: AtomicU64::new(tables.header.reftable_offset),
            limit: AtomicU64::new(tables.limit),
            ready: AtomicBool::new(false),
            refilling: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            unpacked: Mutex::new((0, Vec::new())),
            commits: SharedLock::new(),
            growth: SharedLock::new(),
            nested: SharedLock::new(),
            tables: std::array::from_fn(|_| SharedLock::new()),
            clusters: std::array::from_fn(|_| SharedLock::new()),
            header: tables.header,
            medium,
        };
        image.take_over(records).map_err(|e| cannot.take_over(e))?;
        Ok(image)
    }

    /// The backing file: a path, from the image's own folder if it is not absolute, and a format
    /// that the image says. Contents are not looked at for that, and other ways of naming that
    /// qemu has (`nbd:...`, `json:...`) are refused.
    pub(crate) fn parent(&self) -> Result<Option<ImageName>, DiskError> {
        let Some(backing) = &self.header.backing else { return Ok(None) };
        let path = self.medium.path();
        let refuse = |why: String| {
            let what = format!("cannot open image {}", path.display());
            let help = "name the backing file and its format in the image \
                        (qemu-img rebase -u -b FILE -F FORMAT IMAGE)";
            Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
        };
        let format = match backing.format.as_deref() {
            Some("raw") => Format::Raw,
            Some("qcow2") => Format::Qcow2,
            Some("vpc") => Format::Vhd,
            Some(other) => return refuse(format!("its backing file has the format {other:?}")),
            None => return refuse("it does not say which format its backing file has".into()),
        };
        let name = backing.name.strip_prefix("file:").unwrap_or(&backing.name);
        let scheme = name.split('/').next().is_some_and(|first| first.contains(':'));
        if scheme {
            return refuse(format!("its backing file {name:?} is not named by a path"));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        Ok(Some(ImageName { format, path: folder.join(name) }))
    }

    /// Makes what a dead process has answered for visible again, as dirty as it was there. Its
    /// operations have ended: it held the image's lock until then.
    ///
    /// A record is believed if the disk has the entry from before the change, or the one after
    /// it: any other means that somebody else has written to the image since.
    fn take_over(&self, records: Vec<Record>) -> io::Result<()> {
        let writable = !self.medium.read_only();
        // L1 first: it says where the others' tables are.
        let mut records = records;
        records.sort_unstable_by_key(|r| (r.key < L1_KEYS, r.key));
        if records.windows(2).any(|pair| pair[0].key == pair[1].key) {
            return Err(changed_by_others("there are two records of one entry"));
        }
        let (mut taken, mut counted) = (HashSet::new(), HashSet::new());
        for record in &records {
            let [new, old, middle] = record.words[..] else { unreachable!("a record has 3 words") };
            if record.key < L1_KEYS && self.overlaps_metadata(new) {
                return Err(changed_by_others("an entry refers to a table"));
            }
            let now = self.entry_on_disk(record.key)?;
            if ![new, old, middle].contains(&now) {
                return Err(changed_by_others("an entry differs from both states that it had"));
            }
            if now == middle && now != old {
                self.leave_record(record.key, old, middle);
            }
            if now == new {
                self.leave_record(record.key, old, new);
                if writable {
                    self.state().journal.release(record.slot);
                }
                continue;
            }
            let has_count = self.count_taken_over(new)?;
            let host = new & entry::OFFSET;
            if host != 0 && host != now & entry::OFFSET {
                let cluster = host >> self.header.cluster_bits;
                if !taken.insert(cluster) || self.metadata.binary_search(&cluster).is_ok() {
                    return Err(changed_by_others("a cluster has got another use"));
                }
                counted.extend(has_count.then_some(cluster));
            }
            self.redo(record, now, new);
        }
        self.check_unused(&counted)
    }

    /// Clusters that only records refer to have a count if a commit has come so far; or because
    /// another program has given them to something else since.
    fn check_unused(&self, clusters: &HashSet<u64>) -> io::Result<()> {
        if clusters.is_empty() {
            return Ok(());
        }
        let bits = self.header.cluster_bits;
        for l1 in &self.l1 {
            let Ok(Some((table, _))) = entry::l2_table(l1.load(Ordering::Relaxed), bits) else {
                continue;
            };
            for at in (0..self.cluster_bytes()).step_by(TABLE_PIECE as usize) {
                let len = (self.cluster_bytes() - at).min(TABLE_PIECE) as usize;
                let piece = read_whole(&self.medium, table + at, len)?;
                let used = |entry: u64| match self.decode(entry) {
                    Some(Cluster::Packed(packed)) => {
                        packed.clusters(bits).any(|cluster| clusters.contains(&cluster))
                    }
                    found => found
                        .and_then(|found| found.host())
                        .is_some_and(|host| clusters.contains(&(host >> bits))),
                };
                if piece.chunks_exact(8).map(|e| be64(e, 0)).any(|e| e != 0 && used(e)) {
                    return Err(changed_by_others("a cluster has got another use"));
                }
            }
        }
        Ok(())
    }

    /// The entry of a record's key, which is in memory from then on.
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
            let bytes = read_whole(&self.medium, offset, self.cache.slice_entries() * 8)?;
            let entries: Vec<u64> = bytes.chunks_exact(8).map(|e| be64(e, 0)).collect();
            if self.cache.install(slice, &entries).is_err() {
                let text = "more changes than the memory for metadata holds; allow more";
                return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
            }
        }
        Ok(self.entry(key).unwrap_or(0))
    }

    /// The count of a cluster that a record refers to. A commit may have written it already: the
    /// cluster was taken before its data were there. `true`: it has one.
    fn count_taken_over(&self, new: u64) -> io::Result<bool> {
        let host = new & entry::OFFSET;
        if self.medium.read_only() || host == 0 {
            return Ok(false);
        }
        let cluster = host >> self.header.cluster_bits;
        if host + self.cluster_bytes() > self.limit.load(Ordering::Relaxed) {
            return Err(changed_by_others("a cluster is outside of the file"));
        }
        let mut state = self.state();
        let slice = state.refs.slice_of(cluster);
        if !state.refs.holds(slice) {
            let offset = state.refs.offset(slice);
            let offset = offset.ok_or_else(|| changed_by_others("a refcount block is gone"))?;
            let bytes = read_whole(&self.medium, offset, state.refs.slice_bytes())?;
            state.refs.install(slice, bytes.into(), &[]);
        }
        match state.refs.get(cluster) {
            Some(0) => {
                state.refs.set(cluster, 1);
                Ok(false)
            }
            Some(1) => Ok(true),
            _ => Err(changed_by_others("a cluster has got another use")),
        }
    }

    fn redo(&self, record: &Record, now: u64, new: u64) {
        let mut state = self.state();
        state.adopt(record.key, record.slot);
        if record.key >= L1_KEYS {
            state.note(record.key, now, new);
            self.leave(&mut state, now & !COPIED, new);
            self.l1[(record.key - L1_KEYS) as usize].store(new, Ordering::Relaxed);
        } else {
            self.publish(&mut state, record.key, new);
        }
    }

    /// The commit under way has replaced `old` on disk, but not lowered its count yet.
    fn leave_record(&self, key: u64, old: u64, new: u64) {
        let old = if key >= L1_KEYS { old & !COPIED } else { old };
        self.leave(&mut self.state(), old, new);
    }

    /// Whether an entry of a table refers to what is a table itself.
    pub(super) fn overlaps_metadata(&self, entry: u64) -> bool {
        let host = self.decode(entry).as_ref().and_then(Cluster::host);
        host.is_some_and(|h| self.metadata.binary_search(&(h >> self.header.cluster_bits)).is_ok())
    }
}

impl Tables {
    fn read(medium: &Raw, cannot: &Cannot) -> Result<Tables, DiskError> {
        let io = |e| cannot.io(e);
        let bytes = medium.bytes_now().map_err(io)?;
        let head = medium.read_now(0, HEAD_BYTES as usize).map_err(io)?;
        let header = Header::parse(&head, bytes).map_err(|e| cannot.header(&e))?;
        let table = |offset, bytes: u64| -> Result<Vec<u64>, DiskError> {
            let mut entries = Vec::with_capacity((bytes / 8) as usize);
            for at in (0..bytes).step_by(TABLE_PIECE as usize) {
                let len = (bytes - at).min(TABLE_PIECE) as usize;
                let piece = read_whole(medium, offset + at, len).map_err(io)?;
                entries.extend(piece.chunks_exact(8).map(|e| be64(e, 0)));
            }
            Ok(entries)
        };
        let l1 = table(header.l1_offset, u64::from(header.l1_entries) * 8)?;
        // Parents are only read.
        let reftable = match medium.read_only() {
            true => Vec::new(),
            false => table(header.reftable_offset, header.reftable_bytes())?,
        };
        let limit = bytes & !511;
        let snapshots = match medium.read_only() {
            true => Vec::new(),
            false => snapshots::clusters(medium, &header, bytes).map_err(io)?,
        };
        let metadata = metadata(&header, &l1, &reftable, snapshots, bytes);
        let metadata = metadata.map_err(|e| cannot.header(&e))?;
        Ok(Tables { header, l1, reftable, metadata, limit })
    }
}

/// The clusters of all tables, each once, inside of the file.
fn metadata(
    header: &Header,
    l1: &[u64],
    reftable: &[u64],
    snapshots: Vec<u64>,
    file_bytes: u64,
) -> Result<Vec<u64>, HeaderError> {
    let bits = header.cluster_bits;
    let damaged = |why: String| Err(HeaderError::Damaged(why));
    let mut clusters = snapshots;
    for (i, entry) in l1.iter().enumerate().filter(|(_, e)| **e != 0) {
        match entry::l2_table(*entry, bits) {
            Ok(Some((offset, _))) if offset < file_bytes => clusters.push(offset >> bits),
            Ok(None) => {}
            Ok(Some((offset, _))) => {
                return damaged(format!("L1 entry {i} refers to {offset:#x}, outside of the file"));
            }
            Err(e) => return damaged(format!("L1 entry {i}: {e}")),
        }
    }
    for (i, offset) in reftable.iter().enumerate().filter(|(_, e)| **e != 0) {
        if !offset.is_multiple_of(header.cluster_bytes()) {
            return damaged(format!("refcount table entry {i} is {offset:#x}, within a cluster"));
        }
        if *offset >= file_bytes {
            let text = format!("refcount table entry {i} is {offset:#x}, outside of the file");
            return damaged(text);
        }
        clusters.push(offset >> bits);
    }
    for (_, offset, len) in header.places() {
        clusters.extend(offset >> bits..(offset + len).div_ceil(header.cluster_bytes()));
    }
    clusters.sort_unstable();
    if let Some(twice) = clusters.windows(2).find(|pair| pair[0] == pair[1]) {
        return damaged(format!("two tables are in the cluster at {:#x}", twice[0] << bits));
    }
    Ok(clusters)
}

fn check_writable(header: &Header, cannot: &Cannot) -> Result<(), DiskError> {
    let refuse =
        |why: &str, help: &str| Err(DiskError::new(ErrorKind::Unsuitable, &cannot.0, why, help));
    if header.incompatible & CORRUPT != 0 {
        return refuse(
            "it is marked as corrupt, and may not be written to",
            "open it read-only (--read-only) to save what is in it, or repair it",
        );
    }
    if header.incompatible & DIRTY != 0 {
        return refuse(
            "its refcounts may be wrong: it was not closed by a program that keeps them lazily",
            "rebuild them first (ferrite image repair), or open it read-only (--read-only)",
        );
    }
    Ok(())
}

/// qcow2 has no identifier; what stays the same as long as the image is open does for one.
fn identity(medium: &Raw, header: &Header) -> io::Result<Identity> {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&header.disk_bytes.to_le_bytes());
    uuid[8..].copy_from_slice(&header.l1_offset.to_le_bytes());
    // The offset is a multiple of 512.
    uuid[8] = header.cluster_bits as u8;
    Identity::of(medium, uuid)
}

/// Reads metadata; what is behind the end of the file is zeros.
fn read_whole(medium: &Raw, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = medium.read_now(offset, len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

fn changed_by_others(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The first half of all errors of opening.
struct Cannot(String);

impl Cannot {
    fn io(&self, e: io::Error) -> DiskError {
        let help = "check the medium below it and the kernel's log (dmesg)";
        DiskError::new(ErrorKind::Io, &self.0, e.to_string(), help).with_source(e)
    }

    fn header(&self, e: &HeaderError) -> DiskError {
        let help = match e {
            HeaderError::NotQcow2(_) => "say which format it has (raw:PATH, vhd:PATH)",
            HeaderError::Damaged(_) => HELP_DAMAGED,
            HeaderError::Unsupported(_) => "convert it with the program that made it",
        };
        DiskError::new(ErrorKind::Unsuitable, &self.0, e.to_string(), help)
    }

    fn take_over(&self, e: io::Error) -> DiskError {
        let why = format!("what a process that died had answered cannot be taken over: {e}");
        let help = "another program has written to the image since, or the state directory is of \
                    another image; remove its journal to give up those writes";
        DiskError::new(ErrorKind::Unsuitable, &self.0, why, help).with_source(e)
    }
}
