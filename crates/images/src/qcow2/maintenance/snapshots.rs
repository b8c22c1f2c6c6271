//! The table of internal snapshots. It is read entry by entry, in bounded memory (threats.md T17). `inner`
//! changes it.

use std::io;

use ferrite_disk_base::Raw;

use crate::qcow2::format::header::{Header, MAX_L1_BYTES, be32, be64};

/// The bytes of the table read at a time.
const PIECE_BYTES: usize = 64 << 10;
/// The largest table.
pub(in crate::qcow2) const MAX_TABLE_BYTES: u64 = 64 << 20;
/// The fields that every entry has, and the extra fields that are used.
pub(in crate::qcow2) const ENTRY_BYTES: u64 = 40;
pub(in crate::qcow2) const EXTRA_BYTES: u64 = 16;
/// The bytes of a name that are shown.
pub(in crate::qcow2) const MAX_NAME_BYTES: u64 = 255;
/// The snapshots that are shown.
const MAX_TOLD: usize = 1000;

/// The properties of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// QEMU's identifier of it.
    pub id: String,
    /// The name that it was given.
    pub name: String,
    /// When it was made, in seconds since 1970.
    pub created_unix_s: u64,
    /// Bytes of its disk. `None`: as many as the image's.
    pub disk_bytes: Option<u64>,
    /// Bytes of saved memory and device state of the machine.
    pub vm_state_bytes: u64,
}

/// An entry of the table. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::qcow2) struct Entry {
    pub(in crate::qcow2) index: u32,
    /// The range of the entry in the file.
    pub(in crate::qcow2) at: u64,
    pub(in crate::qcow2) end: u64,
    pub(in crate::qcow2) l1_offset: u64,
    pub(in crate::qcow2) l1_entries: u32,
    id_len: u64,
    name_len: u64,
    extra_len: u64,
}

impl Entry {
    /// Whether it has the sizes that are optional in version 2.
    pub(in crate::qcow2) fn has_sizes(&self) -> bool {
        self.extra_len >= EXTRA_BYTES
    }
}

/// An invalid entry, so that none after it can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the entry of internal snapshot {index} at {at:#x} makes no sense")]
pub(in crate::qcow2) struct BadEntry {
    pub(in crate::qcow2) index: u32,
    pub(in crate::qcow2) at: u64,
}

/// Reads the table from its first entry on.
pub(in crate::qcow2) struct Entries<'a> {
    raw: &'a Raw,
    header: &'a Header,
    file_bytes: u64,
    index: u32,
    at: u64,
    /// The offset of the piece that was read last.
    piece_at: u64,
    piece: Vec<u8>,
}

impl<'a> Entries<'a> {
    pub(in crate::qcow2) fn new(raw: &'a Raw, header: &'a Header, file_bytes: u64) -> Entries<'a> {
        let at = header.snapshots_offset;
        // The table may be in the last cluster, before whose end the file may end.
        let file_bytes = file_bytes.next_multiple_of(header.cluster_bytes());
        Entries { raw, header, file_bytes, index: 0, at, piece_at: 0, piece: Vec::new() }
    }

    /// The offset after the last entry that was read.
    pub(in crate::qcow2) fn end(&self) -> u64 {
        self.at
    }

    /// The next entry; `None` after the last one.
    pub(in crate::qcow2) fn next(&mut self) -> io::Result<Option<Result<Entry, BadEntry>>> {
        if self.index == self.header.snapshots {
            return Ok(None);
        }
        let (index, at) = (self.index, self.at);
        let fixed = self.bytes(at, ENTRY_BYTES)?;
        let lens = be32(&fixed, 12);
        let mut entry = Entry {
            index,
            at,
            end: at,
            l1_offset: be64(&fixed, 0),
            l1_entries: be32(&fixed, 8),
            id_len: u64::from(lens >> 16),
            name_len: u64::from(lens & 0xFFFF),
            extra_len: u64::from(be32(&fixed, 36)),
        };
        let len = ENTRY_BYTES + entry.extra_len + entry.id_len + entry.name_len;
        let end = at + len.next_multiple_of(8);
        entry.end = end;
        let l1_bytes = u64::from(entry.l1_entries) * 8;
        let l1_end = entry.l1_offset.checked_add(l1_bytes);
        let sane = end - self.header.snapshots_offset <= MAX_TABLE_BYTES
            && end <= self.file_bytes
            && entry.l1_offset.is_multiple_of(self.header.cluster_bytes())
            && l1_bytes <= MAX_L1_BYTES
            && l1_end.is_some_and(|end| end <= self.file_bytes);
        if !sane {
            return Ok(Some(Err(BadEntry { index, at })));
        }
        (self.index, self.at) = (index + 1, end);
        Ok(Some(Ok(entry)))
    }

    /// Bytes of the table; zeros past the end of the file.
    fn bytes(&mut self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let inside = |this: &Self| {
            at >= this.piece_at && at + len <= this.piece_at + this.piece.len() as u64
        };
        if !inside(self) {
            self.piece_at = at & !511;
            self.piece = self.raw.read_now(self.piece_at, PIECE_BYTES)?;
            self.piece.resize(PIECE_BYTES, 0);
        }
        let from = (at - self.piece_at) as usize;
        Ok(self.piece[from..from + len as usize].to_vec())
    }

    fn text(&mut self, at: u64, len: u64) -> io::Result<String> {
        let bytes = self.bytes(at, len.min(MAX_NAME_BYTES))?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.chars().map(|c| if c.is_control() { '?' } else { c }).collect())
    }

    /// Whether a snapshot has this identifier, byte by byte.
    pub(in crate::qcow2) fn has_id(&mut self, entry: &Entry, id: &[u8]) -> io::Result<bool> {
        self.reads(entry.at + ENTRY_BYTES + entry.extra_len, entry.id_len, id)
    }

    /// Whether a snapshot has this name, byte by byte.
    pub(in crate::qcow2) fn has_name(&mut self, entry: &Entry, name: &[u8]) -> io::Result<bool> {
        let at = entry.at + ENTRY_BYTES + entry.extra_len + entry.id_len;
        self.reads(at, entry.name_len, name)
    }

    fn reads(&mut self, at: u64, len: u64, wanted: &[u8]) -> io::Result<bool> {
        let same = len == wanted.len() as u64 && len < (PIECE_BYTES / 2) as u64;
        Ok(same && self.bytes(at, len)? == wanted)
    }

    pub(in crate::qcow2) fn told(&mut self, entry: &Entry) -> io::Result<Told> {
        let fixed = self.bytes(entry.at, ENTRY_BYTES)?;
        let extra = self.bytes(entry.at + ENTRY_BYTES, entry.extra_len.min(EXTRA_BYTES))?;
        let wide = |at: usize| (extra.len() >= at + 8).then(|| be64(&extra, at));
        let id_at = entry.at + ENTRY_BYTES + entry.extra_len;
        Ok(Told {
            id: self.text(id_at, entry.id_len)?,
            name: self.text(id_at + entry.id_len, entry.name_len)?,
            created_unix_s: u64::from(be32(&fixed, 16)),
            disk_bytes: wide(8),
            vm_state_bytes: wide(0).unwrap_or(u64::from(be32(&fixed, 32))),
        })
    }
}

/// The properties of the first thousand snapshots.
pub(in crate::qcow2) fn list(raw: &Raw, header: &Header) -> io::Result<Vec<Told>> {
    let mut entries = Entries::new(raw, header, raw.bytes_now()?);
    let mut all = Vec::new();
    while let Some(entry) = entries.next()? {
        let entry = entry.map_err(|bad| crate::qcow2::tables::meta::damaged(bad.to_string()))?;
        if all.len() == MAX_TOLD {
            break;
        }
        all.push(entries.told(&entry)?);
    }
    Ok(all)
}

/// The clusters of the table and of the snapshots' L1 tables, except for the table's first one.
pub(in crate::qcow2) fn clusters(
    raw: &Raw,
    header: &Header,
    file_bytes: u64,
) -> io::Result<Vec<u64>> {
    /// A bound above that of a disk of 16 TiB with 10,000 snapshots.
    const MAX_CLUSTERS: u64 = 1 << 18;
    let bits = header.cluster_bits;
    let mut entries = Entries::new(raw, header, file_bytes);
    let mut clusters = Vec::new();
    let mut add = |from: u64, end: u64| {
        let range = from >> bits..end.div_ceil(1 << bits);
        if clusters.len() as u64 + (range.end - range.start.min(range.end)) > MAX_CLUSTERS {
            return Err(crate::qcow2::tables::meta::damaged(
                "the tables of its internal snapshots are too many",
            ));
        }
        clusters.extend(range);
        Ok(())
    };
    while let Some(entry) = entries.next()? {
        let entry = entry.map_err(|bad| crate::qcow2::tables::meta::damaged(bad.to_string()))?;
        let l1_bytes = u64::from(entry.l1_entries) * 8;
        add(entry.l1_offset, entry.l1_offset + l1_bytes)?;
    }
    let start = header.snapshots_offset;
    if entries.end() > start + header.cluster_bytes() {
        add(start + header.cluster_bytes(), entries.end())?;
    }
    Ok(clusters)
}
