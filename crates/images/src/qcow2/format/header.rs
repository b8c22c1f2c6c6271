//! The header, its extensions and the backing file's name: everything in the first cluster.
//!
//! Strict: unknown or out-of-range values are refused before anything else of the image is read (threats.md T17).
//! Refusals name the field.

use ferrite_host::clock::Random;

use crate::qcow2::format::entry::{Form, MAX_HOST_BYTES};
use crate::qcow2::format::refcount;
use crate::qcow2::format::unpack::Compression;

/// Byte of the refcount table's place and size in the header.
pub(crate) const REFTABLE_AT: u64 = 48;

/// Byte of the autoclear features in the header.
pub(crate) const AUTOCLEAR_AT: usize = 88;

pub(in crate::qcow2) const MAGIC: u32 = 0x5146_49FB;
pub(in crate::qcow2) const HEADER_V2_BYTES: usize = 72;
const HEADER_V3_BYTES: usize = 104;

/// The bytes of the first cluster that are read: headers are far smaller, and a cluster may have 2 MiB.
pub(crate) const HEAD_BYTES: u64 = 64 << 10;

pub(in crate::qcow2) const EXT_END: u32 = 0;
pub(in crate::qcow2) const EXT_BACKING_FORMAT: u32 = 0xE279_2ACA;
const EXT_FEATURE_NAMES: u32 = 0x6803_F857;
pub(in crate::qcow2) const EXT_BITMAPS: u32 = 0x2385_2875;
/// A bound above the number of extensions that any program writes.
const MAX_EXTENSIONS: usize = 64;

/// Incompatible feature: refcounts may be wrong.
pub(crate) const DIRTY: u64 = 1;
/// Incompatible feature: anything may be wrong; the image must not be written.
pub(crate) const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
/// Incompatible feature: L2 entries have a bitmap of subclusters.
pub(in crate::qcow2) const EXTENDED_L2: u64 = 1 << 4;
const KNOWN_INCOMPATIBLE: u64 = DIRTY | CORRUPT | COMPRESSION_TYPE | EXTENDED_L2;

/// Subclusters have at least 512 bytes.
pub(in crate::qcow2) const MIN_EXTENDED_BITS: u32 = 14;

/// Autoclear feature: the dirty bitmaps inside are up to date.
pub(crate) const BITMAPS_VALID: u64 = 1;

/// Autoclear features of ours, which no other program knows: any other program that writes to the image must clear
/// them, so none has while they are there. This one tells that the image is open, and that a journal may have more than
/// its tables.
const OPEN: u64 = 1 << 63;
/// The other features of ours are the number of that opening, by which its journal is found. Each opening has a number
/// of its own, so a copy that was made during another one is recognised.
const OPENING: u64 = 0x7fff_ffff_ffff_0000;

/// Limits of ours; those of tables are QEMU's.
pub(crate) const MAX_DISK_BYTES: u64 = 64 << 40;
pub(crate) const MAX_L1_BYTES: u64 = 32 << 20;
pub(crate) const MAX_REFTABLE_BYTES: u64 = 8 << 20;
pub(crate) const MAX_SNAPSHOTS: u32 = 65536;
pub(in crate::qcow2) const MAX_BACKING_NAME_BYTES: u32 = 1023;

/// Why an image is not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HeaderError {
    /// The file is not a qcow2 image.
    #[error("it is no qcow2 image: {0}")]
    NotQcow2(String),
    /// Damaged, or hostile.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// Intact, but with an unsupported feature.
    #[error("it uses {0}, which is not supported")]
    Unsupported(String),
}

use HeaderError::{Damaged, NotQcow2, Unsupported};

/// The backing file as named in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    /// A path, or another name that QEMU accepts.
    pub(crate) name: String,
    /// `raw`, `qcow2`, ...; `None`: the image does not name a format.
    pub(crate) format: Option<String>,
}

/// A checked header. Offsets and sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) cluster_bits: u32,
    pub(crate) disk_bytes: u64,
    pub(crate) l1_entries: u32,
    pub(crate) l1_offset: u64,
    pub(crate) reftable_offset: u64,
    pub(crate) reftable_clusters: u32,
    pub(crate) snapshots: u32,
    pub(crate) snapshots_offset: u64,
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    /// The refcounts have `1 << refcount_order` bits.
    pub(crate) refcount_order: u32,
    pub(crate) compression: Compression,
    pub(crate) backing: Option<Backing>,
    /// Other extensions, which are kept: those without a field above.
    pub(crate) extensions: Vec<(u32, Vec<u8>)>,
}

/// The name of a table, its offset, and its bytes.
pub(crate) type Place = (&'static str, u64, u64);

/// The errors of the tables that are not needed to read the disk.
#[derive(Debug, Default)]
pub(crate) struct Flaws {
    /// The refcount table.
    pub(crate) refcounts: Option<HeaderError>,
    /// The table of internal snapshots.
    pub(crate) snapshots: Option<HeaderError>,
}

/// A big-endian field of bytes that are known to be long enough.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(field)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(field)
}

impl Header {
    pub(crate) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table.
    pub(crate) fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.form().entry_bytes() as u64
    }

    /// The form of its L2 entries.
    pub(crate) fn form(&self) -> Form {
        let extended = self.incompatible & EXTENDED_L2 != 0;
        Form { version: self.version, cluster_bits: self.cluster_bits, extended }
    }

    /// Guest clusters; the last one may be cut off.
    pub(crate) fn guest_clusters(&self) -> u64 {
        self.disk_bytes.div_ceil(self.cluster_bytes())
    }

    /// The mark of a process that has the image open, or had it open and died.
    pub(crate) fn mark(&self) -> Option<u64> {
        (self.autoclear & OPEN != 0).then_some(self.autoclear & (OPEN | OPENING))
    }

    /// A mark for the next process; `None` in version 2, which has no such features.
    pub(crate) fn new_mark(&self, random: &mut dyn Random) -> Option<u64> {
        (self.version >= 3).then(|| OPEN | random.next_u64() & OPENING)
    }

    /// The number of dirty bitmaps inside that are up to date. A program that does not maintain them clears that flag.
    pub(crate) fn valid_bitmaps(&self) -> u32 {
        let found = self.extensions.iter().find(|(kind, _)| *kind == EXT_BITMAPS);
        match found {
            Some((_, data)) if self.autoclear & BITMAPS_VALID != 0 && data.len() >= 4 => {
                be32(data, 0)
            }
            _ => 0,
        }
    }

    /// The header's extension of dirty bitmaps, if it is complete.
    pub(crate) fn bitmaps(&self) -> Option<&[u8]> {
        let found = self.extensions.iter().find(|(kind, _)| *kind == EXT_BITMAPS);
        found.map(|(_, data)| data.as_slice()).filter(|data| data.len() >= 24)
    }

    /// The header without a refcount table.
    pub(crate) fn without_refcounts(&self) -> Header {
        Header { reftable_offset: 0, reftable_clusters: 0, ..self.clone() }
    }

    /// Clusters whose refcounts are in one block.
    pub(crate) fn block_entries(&self) -> u64 {
        refcount::entries(self.cluster_bits, self.refcount_order)
    }

    /// Parses the first bytes of an image file of `file_bytes`: the whole file, the first cluster or [`HEAD_BYTES`],
    /// whichever is least; more bytes do no harm.
    pub(crate) fn parse(bytes: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
        let (header, flaws) = Header::parse_in_spite(bytes, file_bytes)?;
        flaws.refcounts.or(flaws.snapshots).map_or(Ok(header), Err)
    }

    /// [`parse`](Self::parse) in spite of tables that are not needed to read the disk, and whose place or size makes no
    /// sense: in the header that is returned these have no bytes.
    pub(crate) fn parse_in_spite(
        bytes: &[u8],
        file_bytes: u64,
    ) -> Result<(Header, Flaws), HeaderError> {
        let mut header = fixed_fields(bytes)?;
        let head = bytes.len().min(header.cluster_bytes() as usize);
        let bytes = &bytes[..head];
        let header_bytes = header.version_3_fields(bytes)?;
        let backing_offset = be64(bytes, 8);
        let extensions_end = match backing_offset {
            0 => head,
            at => usize::try_from(at).unwrap_or(usize::MAX).min(head),
        };
        let extensions = extensions(bytes, header_bytes, extensions_end)?;
        header.features(&extensions)?;
        header.compression(bytes, header_bytes)?;
        header.backing = backing(bytes, header_bytes, backing_offset, &extensions)?;
        header.extensions =
            extensions.into_iter().filter(|(kind, _)| *kind != EXT_BACKING_FORMAT).collect();
        header.check_sizes()?;
        let flaws = header.check_places(file_bytes)?;
        Ok((header, flaws))
    }

    /// Parses the fields that only version 3 has; returns the length of the header.
    fn version_3_fields(&mut self, bytes: &[u8]) -> Result<usize, HeaderError> {
        if self.version == 2 {
            return Ok(HEADER_V2_BYTES);
        }
        if bytes.len() < HEADER_V3_BYTES {
            return Err(Damaged("the header is cut off".into()));
        }
        self.incompatible = be64(bytes, 72);
        self.compatible = be64(bytes, 80);
        self.autoclear = be64(bytes, 88);
        self.refcount_order = be32(bytes, 96);
        let header_bytes = be32(bytes, 100) as usize;
        if header_bytes < HEADER_V3_BYTES
            || header_bytes > bytes.len()
            || !header_bytes.is_multiple_of(8)
        {
            return Err(Damaged(format!("a header length of {header_bytes}")));
        }
        if self.refcount_order > 6 {
            return Err(Damaged(format!("a refcount order of {}", self.refcount_order)));
        }
        Ok(header_bytes)
    }

    fn features(&self, extensions: &[(u32, Vec<u8>)]) -> Result<(), HeaderError> {
        if self.incompatible & EXTERNAL_DATA != 0 {
            return Err(Unsupported("an external data file".into()));
        }
        if self.incompatible & EXTENDED_L2 != 0 && self.cluster_bits < MIN_EXTENDED_BITS {
            let why = "extended L2 entries with clusters of less than 16 KiB";
            return Err(Damaged(why.into()));
        }
        let unknown = self.incompatible & !KNOWN_INCOMPATIBLE;
        if unknown != 0 {
            let bit = unknown.trailing_zeros();
            let name = feature_name(extensions, bit);
            return Err(Unsupported(format!("the incompatible feature {bit} ({name})")));
        }
        Ok(())
    }

    fn compression(&mut self, bytes: &[u8], header_bytes: usize) -> Result<(), HeaderError> {
        let kind = if header_bytes > HEADER_V3_BYTES { bytes[HEADER_V3_BYTES] } else { 0 };
        self.compression = match (self.incompatible & COMPRESSION_TYPE != 0, kind) {
            (false, 0) => Compression::Deflate,
            (true, 1) => Compression::Zstd,
            (true, 2..) => return Err(Unsupported(format!("compression type {kind}"))),
            (flag, _) => {
                let text = format!("compression type {kind} with its feature bit {flag}");
                return Err(Damaged(text));
            }
        };
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), HeaderError> {
        let (bytes, l1) = (self.disk_bytes, self.l1_entries);
        if bytes == 0 || !bytes.is_multiple_of(512) {
            return Err(Damaged(format!("a disk of {bytes} bytes is no positive multiple of 512")));
        }
        if bytes > MAX_DISK_BYTES {
            return Err(Unsupported(format!("a disk of {bytes} bytes, more than 64 TiB")));
        }
        if u64::from(l1) * 8 > MAX_L1_BYTES {
            return Err(Unsupported(format!("an L1 table of {l1} entries, more than 32 MiB")));
        }
        let needed = self.guest_clusters().div_ceil(self.l2_entries());
        if u64::from(l1) < needed {
            return Err(Damaged(format!("an L1 table of {l1} entries where {needed} are needed")));
        }
        Ok(())
    }

    fn check_refcounts_size(&self) -> Result<(), HeaderError> {
        let reftable = self.reftable_bytes();
        if reftable == 0 || reftable > MAX_REFTABLE_BYTES.max(self.cluster_bytes()) {
            let clusters = self.reftable_clusters;
            return Err(Damaged(format!("a refcount table of {clusters} clusters")));
        }
        Ok(())
    }

    fn check_snapshots_size(&self) -> Result<(), HeaderError> {
        match self.snapshots > MAX_SNAPSHOTS {
            true => Err(Unsupported(format!("{} snapshots, more than 65,536", self.snapshots))),
            false => Ok(()),
        }
    }

    /// Bytes of the refcount table, which is whole clusters.
    pub(crate) fn reftable_bytes(&self) -> u64 {
        u64::from(self.reftable_clusters) << self.cluster_bits
    }

    /// The ranges of the tables that the header names, with their names. Missing tables have no bytes. The snapshot
    /// table's length is not in the header: its first byte counts.
    pub(crate) fn places(&self) -> [Place; 4] {
        let snapshots = u64::from(self.snapshots.min(1));
        [
            ("the header", 0, self.cluster_bytes()),
            ("the L1 table", self.l1_offset, u64::from(self.l1_entries) * 8),
            ("the refcount table", self.reftable_offset, self.reftable_bytes()),
            ("the snapshot table", self.snapshots_offset, snapshots),
        ]
    }

    /// Checks the places of the tables that are needed to read the disk. Returns what is wrong with the others, and takes
    /// those out.
    fn check_places(&mut self, file_bytes: u64) -> Result<Flaws, HeaderError> {
        let [header, l1, refcounts, snapshots] = self.places();
        self.check_place(&header, &[], file_bytes)?;
        self.check_place(&l1, &[header], file_bytes)?;
        let sound = self.check_refcounts_size();
        let sound = sound.and_then(|()| self.check_place(&refcounts, &[header, l1], file_bytes));
        let mut others = vec![header, l1];
        match &sound {
            Ok(()) => others.push(refcounts),
            Err(_) => (self.reftable_offset, self.reftable_clusters) = (0, 0),
        }
        let listed = self.check_snapshots_size();
        let listed = listed.and_then(|()| self.check_place(&snapshots, &others, file_bytes));
        if listed.is_err() {
            (self.snapshots, self.snapshots_offset) = (0, 0);
        }
        Ok(Flaws { refcounts: sound.err(), snapshots: listed.err() })
    }

    /// Checks that a table is inside of a file, and apart from others.
    fn check_place(
        &self,
        (name, offset, len): &Place,
        others: &[Place],
        file_bytes: u64,
    ) -> Result<(), HeaderError> {
        // The last table may end before its cluster does, and the file with it.
        let file_bytes = file_bytes.next_multiple_of(self.cluster_bytes());
        let end = offset.checked_add(*len).filter(|end| *end <= MAX_HOST_BYTES);
        if !offset.is_multiple_of(self.cluster_bytes()) {
            return Err(Damaged(format!("{name} is in the middle of a cluster: {offset:#x}")));
        }
        // Only the header's own cluster may be cut off by the end of the file.
        if *offset > 0 && end.is_none_or(|end| end > file_bytes) {
            return Err(Damaged(format!("{name} at {offset:#x} is outside of the file")));
        }
        match others.iter().find(|(_, at, bytes)| *offset < at + bytes && *at < offset + len) {
            None => Ok(()),
            Some((other, at, _)) => {
                let text = format!("{name} at {offset:#x} overlaps {other} at {at:#x}");
                Err(Damaged(text))
            }
        }
    }

    /// The bytes of the header, its extensions and the backing name, without the rest of the cluster; `None` if they do
    /// not fit into [`HEAD_BYTES`] or a cluster.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(512);
        let backing_len = self.backing.as_ref().map_or(0, |b| b.name.len());
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&0u64.to_be_bytes());
        out.extend_from_slice(&(backing_len as u32).to_be_bytes());
        out.extend_from_slice(&self.cluster_bits.to_be_bytes());
        out.extend_from_slice(&self.disk_bytes.to_be_bytes());
        out.extend_from_slice(&0u32.to_be_bytes());
        out.extend_from_slice(&self.l1_entries.to_be_bytes());
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.reftable_offset.to_be_bytes());
        out.extend_from_slice(&self.reftable_clusters.to_be_bytes());
        out.extend_from_slice(&self.snapshots.to_be_bytes());
        out.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            out.extend_from_slice(&self.incompatible.to_be_bytes());
            out.extend_from_slice(&self.compatible.to_be_bytes());
            out.extend_from_slice(&self.autoclear.to_be_bytes());
            out.extend_from_slice(&self.refcount_order.to_be_bytes());
            out.extend_from_slice(&112u32.to_be_bytes());
            let kind = u8::from(self.compression == Compression::Zstd);
            out.extend_from_slice(&[kind, 0, 0, 0, 0, 0, 0, 0]);
        }
        if let Some(format) = self.backing.as_ref().and_then(|b| b.format.as_ref()) {
            extend(&mut out, EXT_BACKING_FORMAT, format.as_bytes());
        }
        for (kind, data) in &self.extensions {
            extend(&mut out, *kind, data);
        }
        extend(&mut out, EXT_END, &[]);
        if let Some(backing) = &self.backing {
            let at = out.len() as u64;
            out[8..16].copy_from_slice(&at.to_be_bytes());
            out.extend_from_slice(backing.name.as_bytes());
        }
        (out.len() as u64 <= self.cluster_bytes().min(HEAD_BYTES)).then_some(out)
    }
}

fn extend(out: &mut Vec<u8>, kind: u32, data: &[u8]) {
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(8), 0);
}

fn fixed_fields(bytes: &[u8]) -> Result<Header, HeaderError> {
    if bytes.len() < HEADER_V2_BYTES {
        return Err(NotQcow2(format!("it has only {} bytes", bytes.len())));
    }
    if be32(bytes, 0) != MAGIC {
        return Err(NotQcow2("it does not begin with QFI\\xfb".into()));
    }
    let (version, cluster_bits) = (be32(bytes, 4), be32(bytes, 20));
    if !(2..=3).contains(&version) {
        return Err(Unsupported(format!("version {version} of the format")));
    }
    if !(9..=21).contains(&cluster_bits) {
        return Err(Damaged(format!("clusters of 2^{cluster_bits} bytes (2^9 to 2^21 exist)")));
    }
    match be32(bytes, 32) {
        0 => {}
        1 => return Err(Unsupported("encryption (AES)".into())),
        2 => return Err(Unsupported("encryption (LUKS)".into())),
        n => return Err(Unsupported(format!("encryption method {n}"))),
    }
    Ok(Header {
        version,
        cluster_bits,
        disk_bytes: be64(bytes, 24),
        l1_entries: be32(bytes, 36),
        l1_offset: be64(bytes, 40),
        reftable_offset: be64(bytes, 48),
        reftable_clusters: be32(bytes, 56),
        snapshots: be32(bytes, 60),
        snapshots_offset: be64(bytes, 64),
        incompatible: 0,
        compatible: 0,
        autoclear: 0,
        refcount_order: 4,
        compression: Compression::Deflate,
        backing: None,
        extensions: Vec::new(),
    })
}

fn extensions(bytes: &[u8], from: usize, end: usize) -> Result<Vec<(u32, Vec<u8>)>, HeaderError> {
    let mut found: Vec<(u32, Vec<u8>)> = Vec::new();
    let mut at = from;
    while at + 8 <= end {
        let (kind, len) = (be32(bytes, at), be32(bytes, at + 4) as usize);
        if kind == EXT_END {
            break;
        }
        at += 8;
        if len > end - at {
            return Err(Damaged(format!("header extension {kind:#x} of {len} bytes is cut off")));
        }
        if found.len() == MAX_EXTENSIONS || found.iter().any(|(k, _)| *k == kind) {
            return Err(Damaged(format!("header extension {kind:#x} is one too many")));
        }
        found.push((kind, bytes[at..at + len].to_vec()));
        at = (at + len).next_multiple_of(8);
    }
    Ok(found)
}

/// The image's own name of an incompatible feature.
fn feature_name(extensions: &[(u32, Vec<u8>)], bit: u32) -> String {
    let names = extensions.iter().find(|(kind, _)| *kind == EXT_FEATURE_NAMES);
    let entries = names.iter().flat_map(|(_, data)| data.chunks_exact(48));
    let entry = entries.filter(|e| e[0] == 0).find(|e| u32::from(e[1]) == bit);
    let Some(entry) = entry else { return "without a name".into() };
    let name = entry[2..].split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn backing(
    bytes: &[u8],
    header_bytes: usize,
    offset: u64,
    extensions: &[(u32, Vec<u8>)],
) -> Result<Option<Backing>, HeaderError> {
    if offset == 0 {
        return Ok(None);
    }
    let len = be32(bytes, 16);
    if !(1..=MAX_BACKING_NAME_BYTES).contains(&len) {
        return Err(Damaged(format!("a backing file name of {len} bytes")));
    }
    let end = offset.checked_add(u64::from(len));
    if offset < header_bytes as u64 || end.is_none_or(|end| end > bytes.len() as u64) {
        return Err(Damaged(format!("the backing file name at {offset:#x} is not in the header")));
    }
    let text = |bytes: &[u8], what: &str| match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
        _ => Err(Unsupported(format!("a backing file {what} that is no UTF-8 text"))),
    };
    let at = offset as usize;
    let name = text(&bytes[at..at + len as usize], "name")?;
    let format = extensions.iter().find(|(kind, _)| *kind == EXT_BACKING_FORMAT);
    let format = format.map(|(_, data)| text(data, "format")).transpose()?;
    Ok(Some(Backing { name, format }))
}

#[cfg(test)]
mod tests;
