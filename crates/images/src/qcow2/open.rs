//! Opening: reads and checks the header, L1 and the refcount table, writes nothing, and recovers the journal of a dead
//! process.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

use ferrite_disk_base::journal::{self, Identity, Journal, Left, Record};
use ferrite_disk_base::{
    DiskError, Epochs, ErrorKind, Format, ImageName, OnDamage, OpenOptions, READ_ONLY, Raw,
    is_something_else,
};
use ferrite_host::clock::SplitMix64;
use ferrite_io::shared_lock::SharedLock;

use super::{MAX_CHANGES, Qcow2, SLICE_BYTES, damage};
use crate::qcow2::alloc::Allocator;
use crate::qcow2::alloc::base::Base;
use crate::qcow2::alloc::fingerprint::Fingerprint;
use crate::qcow2::alloc::refs::Refs;
use crate::qcow2::alloc::state::State;
use crate::qcow2::format::backing::Named;
use crate::qcow2::format::entry;
use crate::qcow2::format::header::{CORRUPT, DIRTY, Flaws, HEAD_BYTES, Header, HeaderError, be64};
use crate::qcow2::maintenance::{inner, snapshots};
use crate::qcow2::tables::cache::Cache;
use crate::qcow2::tables::changes::WORDS;
use crate::qcow2::tables::meta::{TABLE_PIECE, read_whole};

const HELP_DAMAGED: &str = "check it (ferrite image check); if its header is intact, it is read in spite of that by ferrite \
     image convert --salvage, and by export and serve with --read-only";

/// An image's tables as they are on disk, checked.
struct Tables {
    header: Header,
    l1: Vec<u64>,
    reftable: Vec<u64>,
    /// Clusters of metadata, sorted.
    metadata: Vec<u64>,
    limit: u64,
    flaws: Vec<String>,
}

impl Qcow2 {
    /// Opens the image in `medium`.
    pub(crate) fn of(medium: Raw, options: &OpenOptions) -> Result<Qcow2, DiskError> {
        let cannot = Cannot(format!("cannot open image {}", medium.path().display()));
        if let Some(other) = is_something_else(&medium, Format::Qcow2) {
            return Err(other);
        }
        let read_only = medium.read_only();
        // The tables of a snapshot do not change, so nothing in a journal is about them.
        let dir = options.state_dir.as_deref().filter(|_| options.inner_snapshot.is_none());
        let bytes = medium.bytes_now().map_err(|e| cannot.io(e))?;
        let head = medium.read_now(0, HEAD_BYTES as usize).map_err(|e| cannot.io(e))?;
        let on_damage = options.on_damage();
        let parsed = Header::parse_in_spite(&head, bytes);
        let (header, flaws) = parsed.map_err(|e| cannot.header(&e))?;
        if let (OnDamage::Refuse, Some(e)) =
            (on_damage, flaws.refcounts.as_ref().or(flaws.snapshots.as_ref()))
        {
            return Err(cannot.header(e));
        }
        if !read_only {
            check_writable(&header, &cannot)?;
        }
        let header = match &options.inner_snapshot {
            Some(text) => cannot.at_snapshot(&medium, header, text)?,
            None => header,
        };
        let left = cannot.find(dir, &medium, &header)?;
        // Images with a mark tell whether there is a journal.
        let may_have_one = header.version < 3 || header.mark().is_some();
        if options.unseen_state && left.is_none() && may_have_one {
            journal::warn_unseen(&medium);
        }
        let all = left.is_some() || !read_only;
        let tables = match on_damage {
            OnDamage::Refuse => Tables::read(&medium, header, bytes, all, &cannot)?,
            _ => Tables::read_in_spite(&medium, header, &flaws, bytes, all, &cannot)?,
        };
        let fingerprint = match tables.header.version {
            2 if all => cannot.fingerprint(dir, &medium, &tables, left.as_ref())?,
            _ => None,
        };
        let (mark, mut journal, records) = match dir {
            Some(dir) => cannot.journal(dir, &medium, &tables.header, left.is_some())?,
            None => (0, Journal::without(WORDS, MAX_CHANGES), Vec::new()),
        };
        fingerprint.iter().for_each(|fingerprint| fingerprint.tell(&mut journal));
        let entry_bytes = tables.header.form().entry_bytes();
        let entries = tables.header.cluster_bytes().min(SLICE_BYTES) as usize / entry_bytes;
        let refs = Refs::new(&tables.header, tables.reftable);
        let epochs = Epochs::new();
        let state = State::new(journal, refs, fingerprint, epochs.clone());
        let base = Arc::new(Base::new(medium, state));
        let metadata = tables.metadata.into();
        let alloc = Allocator::new(base.clone(), &tables.header, metadata, tables.limit);
        let mut image = Qcow2 {
            base,
            l1: tables.l1.into_iter().map(AtomicU64::new).collect(),
            cache: Cache::new(options.metadata_bytes, entries, entry_bytes / 8),
            alloc,
            on_damage,
            flaws: tables.flaws,
            told: AtomicUsize::new(0),
            answered: Vec::new(),
            ready: AtomicBool::new(false),
            mark,
            autoclear: AtomicU64::new(tables.header.autoclear),
            unpacked: Mutex::new((0, Vec::new())),
            epochs,
            readying: SharedLock::new(),
            nested: SharedLock::new(),
            tables: std::array::from_fn(|_| SharedLock::new()),
            clusters: std::array::from_fn(|_| SharedLock::new()),
            header: tables.header,
        };
        match (image.recover(records), left) {
            (Ok(()), _) => Ok(image),
            (Err(e), Some(left)) if e.kind() == io::ErrorKind::InvalidData => {
                Err(cannot.lost(&left, &image.header).with_source(e))
            }
            (Err(e), _) => Err(cannot.io(e)),
        }
    }

    /// Refuses an image with a mark that it must be repaired first.
    pub(crate) fn check_marks(&self) -> Result<(), DiskError> {
        let what = format!("cannot open image {}", self.base.medium.path().display());
        check_writable(&self.header, &Cannot(what))
    }

    /// The backing file: a plain file, by a path or another name of QEMU's (`Named`), and a format that the image names.
    /// The format is never guessed from the content, and names that mean something else (`nbd:...`) are refused.
    pub(crate) fn parent(&self) -> Result<Option<ImageName>, DiskError> {
        let Some(backing) = &self.header.backing else { return Ok(None) };
        let path = self.base.medium.path();
        let refuse = |why: String| {
            let what = format!("cannot open image {}", path.display());
            let help = "name the backing file and its format in the image \
                        (qemu-img rebase -u -b FILE -F FORMAT IMAGE), a name with a colon as ./NAME";
            Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
        };
        let named = match Named::of(&backing.name) {
            Ok(named) => named,
            Err(why) => return refuse(why),
        };
        let formats = (backing.format.as_deref(), named.driver.as_deref());
        let format = match formats {
            (Some(format), Some(driver)) if format != driver => {
                let why = format!(
                    "its backing file has the format {format:?}, and {driver:?} by its name"
                );
                return refuse(why);
            }
            (format, driver) => format.or(driver),
        };
        let format = match format {
            Some("raw") => Format::Raw,
            Some("qcow2") => Format::Qcow2,
            Some("vpc") => Format::Vhd,
            Some(other) => return refuse(format!("its backing file has the format {other:?}")),
            None => return refuse("it does not say which format its backing file has".into()),
        };
        let path = named.path(path.parent().unwrap_or(Path::new("")));
        Ok(Some(ImageName { format, path }))
    }
}

impl Tables {
    /// Reads the tables. `all`: also those that only a writer needs, and the check whether other programs have written
    /// since a process died. Most parents are read without.
    fn read(
        medium: &Raw,
        header: Header,
        bytes: u64,
        all: bool,
        cannot: &Cannot,
    ) -> Result<Tables, DiskError> {
        let io = |e| cannot.io(e);
        let l1 = read_table(medium, header.l1_offset, u64::from(header.l1_entries) * 8);
        let l1 = l1.map_err(io)?;
        let (mut reftable, mut snapshots) = (Vec::new(), Vec::new());
        if all {
            reftable =
                read_table(medium, header.reftable_offset, header.reftable_bytes()).map_err(io)?;
            snapshots = snapshots::clusters(medium, &header, bytes).map_err(io)?;
        }
        let limit = bytes & !511;
        let metadata = metadata(&header, &l1, &reftable, snapshots, bytes);
        let metadata = metadata.map_err(|e| cannot.header(&e))?;
        Ok(Tables { header, l1, reftable, metadata, limit, flaws: Vec::new() })
    }

    /// [`read`](Self::read) in spite of damage.
    fn read_in_spite(
        medium: &Raw,
        header: Header,
        found: &Flaws,
        bytes: u64,
        all: bool,
        cannot: &Cannot,
    ) -> Result<Tables, DiskError> {
        let io = |e| cannot.io(e);
        let l1 = read_table(medium, header.l1_offset, u64::from(header.l1_entries) * 8);
        let mut l1 = l1.map_err(io)?;
        let metadata = damage::tables(&header, &mut l1, bytes);
        let mut reftable = Vec::new();
        if all {
            reftable =
                read_table(medium, header.reftable_offset, header.reftable_bytes()).map_err(io)?;
            let is_place = |at: u64| at.is_multiple_of(header.cluster_bytes()) && at < bytes;
            reftable.iter_mut().filter(|at| !is_place(**at)).for_each(|at| *at = 0);
        }
        let flaws = damage::flaws(&header, found, &l1);
        Ok(Tables { header, l1, reftable, metadata, limit: bytes & !511, flaws })
    }
}

/// The entries of a table; zeros past the end of the file.
fn read_table(medium: &Raw, offset: u64, bytes: u64) -> io::Result<Vec<u64>> {
    let mut entries = Vec::with_capacity((bytes / 8) as usize);
    for at in (0..bytes).step_by(TABLE_PIECE as usize) {
        let len = (bytes - at).min(TABLE_PIECE) as usize;
        let piece = read_whole(medium, offset + at, len)?;
        entries.extend(piece.chunks_exact(8).map(|e| be64(e, 0)));
    }
    Ok(entries)
}

/// The clusters of all tables, each once, within the file.
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
        |why: &str, help: String| Err(DiskError::new(ErrorKind::Unsuitable, &cannot.0, why, help));
    if header.incompatible & CORRUPT != 0 {
        return refuse(
            "it is marked as corrupt, and may not be written to",
            format!("{READ_ONLY} to save what is in it, or repair it"),
        );
    }
    if header.incompatible & DIRTY != 0 {
        return refuse(
            "its refcounts may be wrong: it was not closed by a program that keeps them lazily",
            format!("rebuild them first (ferrite image repair), or {READ_ONLY}"),
        );
    }
    Ok(())
}

/// The identity of an image. qcow2 has no identifier, so its mark is one while it is open. In version 2, which has no
/// marks, fields that do not change while the image is open replace it.
pub(super) fn identity(medium: &Raw, header: &Header) -> io::Result<Identity> {
    let mut id = [0; 16];
    if header.version < 3 {
        id[..8].copy_from_slice(&header.disk_bytes.to_le_bytes());
        id[8..].copy_from_slice(&header.l1_offset.to_le_bytes());
        // The offset is a multiple of 512.
        id[8] = header.cluster_bits as u8;
    } else if let Some(mark) = header.mark() {
        id = id_of_mark(mark);
    }
    Identity::of(medium, Format::Qcow2, id)
}

fn id_of_mark(mark: u64) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&mark.to_be_bytes());
    id
}

/// The first half of all errors of opening.
struct Cannot(String);

impl Cannot {
    fn io(&self, e: io::Error) -> DiskError {
        let help = "check the medium below it and the kernel's log (dmesg)";
        DiskError::new(ErrorKind::Io, &self.0, e.to_string(), help).with_source(e)
    }

    fn header(&self, e: &HeaderError) -> DiskError {
        let (kind, help) = match e {
            HeaderError::NotQcow2(_) => (
                ErrorKind::Damaged,
                "say which format it has, if it is another (raw:PATH, vhd:PATH)",
            ),
            HeaderError::Damaged(_) => (ErrorKind::Damaged, HELP_DAMAGED),
            HeaderError::Unsupported(_) => {
                (ErrorKind::Unsuitable, "convert it with the program that made it")
            }
        };
        DiskError::new(kind, &self.0, e.to_string(), help)
    }

    /// The header of the disk as it was at a snapshot.
    fn at_snapshot(&self, medium: &Raw, header: Header, text: &[u8]) -> Result<Header, DiskError> {
        if !medium.read_only() {
            let why = "a snapshot inside of it is only read";
            return Err(DiskError::new(ErrorKind::Unsuitable, &self.0, why, READ_ONLY));
        }
        let found = inner::at_snapshot(medium, &header, text).map_err(|e| self.io(e))?;
        found.map_err(|(kind, why, help)| DiskError::new(kind, &self.0, why, help))
    }

    /// The mark that this process sets, the journal, and its records. `left`: there are any. A reader sets no mark, and
    /// leaves the journal unchanged.
    fn journal(
        &self,
        dir: &Path,
        medium: &Raw,
        header: &Header,
        left: bool,
    ) -> Result<(u64, Journal, Vec<Record>), DiskError> {
        let mut identity = identity(medium, header).map_err(|e| self.io(e))?;
        if medium.read_only() {
            let records = match left {
                true => Journal::peek(Some(dir), &identity, WORDS, MAX_CHANGES)?,
                false => Vec::new(),
            };
            return Ok((0, Journal::without(WORDS, MAX_CHANGES), records));
        }
        let new = || header.new_mark(&mut SplitMix64::from_system());
        let mark = header.mark().filter(|_| left).or_else(new);
        identity.id = mark.map_or(identity.id, id_of_mark);
        let (journal, records) = Journal::open(Some(dir), &identity, WORDS, MAX_CHANGES)?;
        Ok((mark.unwrap_or(0), journal, records))
    }

    /// The image's own journal, if it has records. Refused: the image has lost its journal, since another program has
    /// written to it, or it was replaced by an older copy.
    fn find(
        &self,
        dir: Option<&Path>,
        medium: &Raw,
        header: &Header,
    ) -> Result<Option<Left>, DiskError> {
        if dir.is_none() {
            return Ok(None);
        }
        let identity = identity(medium, header).map_err(|e| self.io(e))?;
        let mut found = journal::survey(dir, &identity)?;
        if let Some(here) = found.here.take_if(|left| left.format == Some(Format::Qcow2)) {
            return Err(self.lost(&here, header));
        }
        if header.mark().is_none() {
            // Another image of version 2 may have the same size.
            (found.moved, found.original) = (None, None);
        }
        found.check(medium.path())?;
        Ok(found.own)
    }

    /// The fingerprint of an image of version 2 that has a journal. Refused: another program has written to the image
    /// since `left`.
    fn fingerprint(
        &self,
        dir: Option<&Path>,
        medium: &Raw,
        tables: &Tables,
        left: Option<&Left>,
    ) -> Result<Option<Fingerprint>, DiskError> {
        let Some(dir) = dir else { return Ok(None) };
        let (header, table) = (&tables.header, &tables.reftable);
        let identity = identity(medium, header).map_err(|e| self.io(e))?;
        let found = Fingerprint::read(medium, header, table);
        let mut found = found.map_err(|e| self.io(e))?;
        let Some(told) = journal::told_of(dir, &identity)? else { return Ok(Some(found)) };
        let accepted = found.accept(medium, header, table, &told).map_err(|e| self.io(e))?;
        match left.filter(|_| !accepted) {
            Some(left) => Err(self.lost(left, header)),
            None => Ok(Some(found)),
        }
    }

    fn lost(&self, left: &Left, header: &Header) -> DiskError {
        let parts = journal::parts(left.keys.clone(), header.cluster_bytes(), header.disk_bytes);
        journal::lost(&self.0, &left.name, &parts)
    }
}
