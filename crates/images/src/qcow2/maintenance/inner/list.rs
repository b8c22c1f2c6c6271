//! The table of snapshots: finds a snapshot in it, and makes the table's next state.

use std::io;

use ferrite_disk_base::{ErrorKind, Raw};

use super::Change;
use crate::qcow2::format::header::{
    BITMAPS_VALID, Header, MAX_DISK_BYTES, MAX_L1_BYTES, MAX_SNAPSHOTS,
};
use crate::qcow2::maintenance::snapshots::{
    ENTRY_BYTES, EXTRA_BYTES, Entries, Entry, MAX_NAME_BYTES, MAX_TABLE_BYTES, Told,
};
use crate::qcow2::maintenance::walk::{Counting, Course};
use crate::qcow2::tables::meta;

/// Kind, reason and next step.
pub(in crate::qcow2) type Refusal = (ErrorKind, String, &'static str);

/// The table's next state, and the disk's.
pub(super) struct Listed {
    what: What,
    /// The bytes of the new table; none: it stays, or there is none any more.
    pub(super) table: Vec<u8>,
    /// The place of the new entry in the table.
    entry_at: usize,
    snapshots: u32,
}

enum What {
    /// The new snapshot has so many entries of L1.
    Created {
        l1_entries: u32,
    },
    /// The disk gets this size, and the tables of this snapshot.
    Applied {
        from: Entry,
        disk_bytes: u64,
    },
    Deleted {
        index: u32,
    },
}

/// Plans the change of the table.
pub(super) fn change(
    raw: &Raw,
    header: &Header,
    change: Change<'_>,
) -> io::Result<Result<(Listed, Told), Refusal>> {
    match change {
        Change::Create { name, now } => create(raw, header, name, now),
        Change::Apply(text) => {
            let (entry, told) = match find(raw, header, text)? {
                Ok(found) => found,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let disk_bytes = match disk_of(header, &told) {
                Ok(bytes) => bytes,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let what = What::Applied { from: entry, disk_bytes };
            let snapshots = header.snapshots;
            Ok(Ok((Listed { what, table: Vec::new(), entry_at: 0, snapshots }, told)))
        }
        Change::Delete(text) => {
            let (entry, told) = match find(raw, header, text)? {
                Ok(found) => found,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let mut table = bytes(raw, header)?;
            let start = header.snapshots_offset;
            table.drain((entry.at - start) as usize..(entry.end - start) as usize);
            let what = What::Deleted { index: entry.index };
            let snapshots = header.snapshots - 1;
            Ok(Ok((Listed { what, table, entry_at: 0, snapshots }, told)))
        }
    }
}

/// The bytes of a snapshot's disk.
fn disk_of(header: &Header, told: &Told) -> Result<u64, Refusal> {
    let bytes = told.disk_bytes.unwrap_or(header.disk_bytes);
    let help = "delete it, or restore a backup";
    if bytes == 0 || !bytes.is_multiple_of(512) || bytes > MAX_DISK_BYTES {
        let why = format!("it is of a disk of {bytes} bytes, which is no size of a disk");
        return Err((ErrorKind::Damaged, why, help));
    }
    if tables_of(header, bytes) * 8 > MAX_L1_BYTES {
        let why = format!("clusters are too small for its disk of {bytes} bytes");
        return Err((ErrorKind::Damaged, why, help));
    }
    Ok(bytes)
}

/// A header by which the disk reads as it was at a snapshot.
pub(in crate::qcow2) fn at_snapshot(
    raw: &Raw,
    header: &Header,
    text: &[u8],
) -> io::Result<Result<Header, Refusal>> {
    let (entry, told) = match find(raw, header, text)? {
        Ok(found) => found,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let disk_bytes = match disk_of(header, &told) {
        Ok(bytes) => bytes,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let needed = tables_of(header, disk_bytes) as u32;
    if entry.l1_entries < needed {
        let why = format!("it has {} tables, and its disk needs {needed}", entry.l1_entries);
        return Ok(Err((ErrorKind::Damaged, why, "delete it, or restore a backup")));
    }
    // Entries after the disk's are those of a saved machine.
    let l1_offset = entry.l1_offset;
    Ok(Ok(Header { disk_bytes, l1_offset, l1_entries: needed, ..header.clone() }))
}

/// The L2 tables of a disk of so many bytes.
fn tables_of(header: &Header, disk_bytes: u64) -> u64 {
    disk_bytes.div_ceil(header.l2_entries() << header.cluster_bits)
}

/// The bytes of the present table.
fn bytes(raw: &Raw, header: &Header) -> io::Result<Vec<u8>> {
    let mut entries = Entries::new(raw, header, raw.bytes_now()?);
    while let Some(entry) = entries.next()? {
        entry.map_err(|bad| meta::damaged(bad.to_string()))?;
    }
    if header.snapshots == 0 {
        return Ok(Vec::new());
    }
    let len = (entries.end() - header.snapshots_offset) as usize;
    meta::read_whole(raw, header.snapshots_offset, len)
}

/// Finds a snapshot by its identifier, or by its name.
fn find(raw: &Raw, header: &Header, text: &[u8]) -> io::Result<Result<(Entry, Told), Refusal>> {
    let mut entries = Entries::new(raw, header, raw.bytes_now()?);
    let mut found: Option<Entry> = None;
    while let Some(entry) = entries.next()? {
        let entry = entry.map_err(|bad| meta::damaged(bad.to_string()))?;
        if !entries.has_id(&entry, text)? && !entries.has_name(&entry, text)? {
            continue;
        }
        if found.is_some() {
            let text = String::from_utf8_lossy(text);
            let why = format!("several snapshots have the name or identifier {text}");
            let help =
                "say what only one has: ferrite image snapshot -l lists names and identifiers";
            return Ok(Err((ErrorKind::Usage, why, help)));
        }
        found = Some(entry);
    }
    let Some(entry) = found else {
        let why = format!("it has no snapshot {}", String::from_utf8_lossy(text));
        return Ok(Err((ErrorKind::NotFound, why, "ferrite image snapshot -l lists them")));
    };
    let told = entries.told(&entry)?;
    Ok(Ok((entry, told)))
}

/// Why a snapshot cannot have this name.
fn bad_name(name: &str) -> Option<String> {
    let len = name.len() as u64;
    match len {
        0 => Some("a name is empty".into()),
        _ if len > MAX_NAME_BYTES => {
            Some(format!("a name of {len} bytes is too long, {MAX_NAME_BYTES} is the most"))
        }
        _ => name.contains(char::is_control).then(|| "a name has control characters".into()),
    }
}

fn create(
    raw: &Raw,
    header: &Header,
    name: &str,
    now: (u64, u32),
) -> io::Result<Result<(Listed, Told), Refusal>> {
    if let Some(why) = bad_name(name) {
        return Ok(Err((ErrorKind::Usage, why, "choose another name")));
    }
    if header.snapshots >= MAX_SNAPSHOTS {
        let why = format!("it has {} snapshots, and {MAX_SNAPSHOTS} is the most", header.snapshots);
        return Ok(Err((ErrorKind::Unsuitable, why, "delete some of them first (-d)")));
    }
    let mut entries = Entries::new(raw, header, raw.bytes_now()?);
    let mut last_id = 0;
    while let Some(entry) = entries.next()? {
        let entry = entry.map_err(|bad| meta::damaged(bad.to_string()))?;
        if entries.has_name(&entry, name.as_bytes())? {
            let why = format!("it has a snapshot {name} already");
            return Ok(Err((
                ErrorKind::Usage,
                why,
                "choose another name, or delete that one (-d)",
            )));
        }
        let id = entries.told(&entry)?.id.parse::<u64>();
        last_id = last_id.max(id.unwrap_or(0));
    }
    let id = last_id.saturating_add(1).to_string();
    let mut table = bytes(raw, header)?;
    let l1_entries = tables_of(header, header.disk_bytes) as u32;
    let entry_at = table.len();
    table.extend(encode(l1_entries, header.disk_bytes, (&id, name), now));
    if table.len() as u64 > MAX_TABLE_BYTES {
        let why = "the table of its snapshots would have more than 64 MiB".into();
        return Ok(Err((ErrorKind::Unsuitable, why, "delete some of them first (-d)")));
    }
    let told = Told {
        id,
        name: name.to_owned(),
        created_unix_s: now.0,
        disk_bytes: Some(header.disk_bytes),
        vm_state_bytes: 0,
    };
    let what = What::Created { l1_entries };
    Ok(Ok((Listed { what, table, entry_at, snapshots: header.snapshots + 1 }, told)))
}

/// An entry of the table, with an L1 table at 0.
fn encode(
    l1_entries: u32,
    disk_bytes: u64,
    (id, name): (&str, &str),
    (s, ns): (u64, u32),
) -> Vec<u8> {
    let mut out = Vec::with_capacity((ENTRY_BYTES + EXTRA_BYTES) as usize + id.len() + name.len());
    out.extend(0u64.to_be_bytes());
    out.extend(l1_entries.to_be_bytes());
    out.extend((id.len() as u16).to_be_bytes());
    out.extend((name.len() as u16).to_be_bytes());
    out.extend(u32::try_from(s).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(ns.to_be_bytes());
    // The machine has run for no time, and has no state.
    out.extend(0u64.to_be_bytes());
    out.extend(0u32.to_be_bytes());
    out.extend((EXTRA_BYTES as u32).to_be_bytes());
    out.extend(0u64.to_be_bytes());
    out.extend(disk_bytes.to_be_bytes());
    out.extend(id.as_bytes());
    out.extend(name.as_bytes());
    out.resize(out.len().next_multiple_of(8), 0);
    out
}

impl Listed {
    /// The header of the new state, with the tables at their old places.
    pub(super) fn header(&self, old: &Header) -> Header {
        let mut new = Header { snapshots: self.snapshots, ..old.clone() };
        // Other programs' features are not maintained here. Bitmaps stay right where the disk does.
        new.autoclear &= BITMAPS_VALID;
        match self.what {
            What::Applied { disk_bytes, .. } => {
                new.disk_bytes = disk_bytes;
                new.l1_entries = tables_of(old, disk_bytes) as u32;
                new.autoclear = 0;
            }
            What::Created { .. } => {}
            What::Deleted { .. } if self.snapshots == 0 => new.snapshots_offset = 0,
            What::Deleted { .. } => {}
        }
        new
    }

    /// A header whose references, on this [`course`](Self::course), are those of the new state, as far as entries of L1
    /// and L2 have them.
    pub(super) fn model(&self, old: &Header, new: &Header) -> Header {
        match &self.what {
            // Entries after the disk's are those of a saved machine, which stay the snapshot's.
            What::Applied { from, .. } => Header {
                l1_offset: from.l1_offset,
                l1_entries: from.l1_entries.min(new.l1_entries),
                ..old.clone()
            },
            What::Created { .. } | What::Deleted { .. } => old.clone(),
        }
    }

    pub(super) fn course(&self, counting: Counting, old: &Header) -> Course {
        let mut course = Course::all(counting);
        match self.what {
            What::Deleted { index } => course.without = Some(index),
            What::Created { l1_entries } => course.more = Some((old.l1_offset, l1_entries)),
            What::Applied { .. } => {}
        }
        course
    }

    /// The entries of the new snapshot's L1.
    pub(super) fn new_l1_entries(&self) -> u64 {
        match self.what {
            What::Created { l1_entries } => l1_entries.into(),
            What::Applied { .. } | What::Deleted { .. } => 0,
        }
    }

    /// Whether the table of snapshots stays where it is.
    pub(super) fn stays(&self) -> bool {
        matches!(self.what, What::Applied { .. })
    }

    /// The new table, whose new entry has its L1 at `l1_offset`.
    pub(super) fn table_with(&self, l1_offset: u64) -> Vec<u8> {
        let mut table = self.table.clone();
        if let What::Created { .. } = self.what {
            table[self.entry_at..self.entry_at + 8].copy_from_slice(&l1_offset.to_be_bytes());
        }
        table
    }
}
