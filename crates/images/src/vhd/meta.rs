//! Reads and checks an image's metadata from the open file. The calls block.

use std::fmt;
use std::path::{Path, PathBuf};

use ferrite_disk_base::{DiskError, ErrorKind, OpenOptions, Raw};

use super::damage::Damage;
use super::format::batmap::{self, Batmap, Encrypted};
use super::format::footer::{Footer, Kind};
use super::format::header::{self, Header};
use super::format::layout::{Layout, UNUSED};
use super::format::{Malformed, SECTOR, locator};

/// Bytes of the table that are read at once.
const TABLE_PIECE: usize = 1 << 20;

/// How often the footers of an image that grows are read. It grows by 16 MiB or more at a time.
const READINGS: usize = 16;

/// tapdisk writes this over the footer at the end of a dynamic or differencing image that it opens.
const TAKEN: [u8; SECTOR as usize] = [0xc7; SECTOR as usize];

/// The place at which a footer was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FooterAt {
    /// At the end, where it should be.
    End(u64),
    /// The copy at the beginning; the end has no intact one.
    Start,
    /// The copy at the beginning of a device; the footer that belongs at this offset is missing: tapdisk has removed
    /// it, or the device has grown.
    Taken(u64),
}

/// When the copy of the footer on a device counts, although there is none at the device's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyOnDevice {
    Never,
    IfTaken,
    Counts,
}

impl CopyOnDevice {
    pub(super) fn of(options: &OpenOptions) -> CopyOnDevice {
        match (options.as_libvhd, options.format_said) {
            (true, _) => CopyOnDevice::Counts,
            (false, true) => CopyOnDevice::IfTaken,
            (false, false) => CopyOnDevice::Never,
        }
    }

    fn counts(self, is_taken: bool) -> bool {
        match self {
            CopyOnDevice::Never => false,
            CopyOnDevice::IfTaken => is_taken,
            CopyOnDevice::Counts => true,
        }
    }
}

/// Why metadata could not be read.
#[derive(Debug)]
pub(super) enum MetaError {
    /// An error of the kernel.
    Io(u64, std::io::Error),
    /// Invalid metadata.
    Bad(Malformed),
}

impl From<Malformed> for MetaError {
    fn from(bad: Malformed) -> MetaError {
        MetaError::Bad(bad)
    }
}

impl fmt::Display for MetaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetaError::Io(offset, e) => write!(f, "byte {offset} could not be read: {e}"),
            MetaError::Bad(bad) => bad.fmt(f),
        }
    }
}

impl MetaError {
    /// The error for the image at `path`.
    pub(super) fn for_image(self, path: &Path) -> DiskError {
        let (what, why) = (format!("cannot open image {}", path.display()), self.to_string());
        match self {
            MetaError::Io(_, e) => {
                let help = "check the medium below it and the kernel's log (dmesg)";
                DiskError::new(ErrorKind::Io, what, why, help).with_source(e)
            }
            MetaError::Bad(bad) if bad.unsupported => {
                let help = "use the program that made it, or convert it with that";
                DiskError::new(ErrorKind::Unsuitable, what, format!("not supported: {bad}"), help)
            }
            MetaError::Bad(bad) => {
                let help = "check that it is a VHD and complete; ferrite image check says more, \
                            and repair mends what can be mended; if its headers are intact, it \
                            is read in spite of that by ferrite image convert --salvage, and by \
                            export and serve with --read-only";
                DiskError::new(ErrorKind::Damaged, what, bad.to_string(), help)
            }
        }
    }
}

/// Reads exactly `len` bytes.
pub(super) fn read(raw: &Raw, offset: u64, len: usize) -> Result<Vec<u8>, MetaError> {
    let bytes = raw.read_now(offset, len).map_err(|e| MetaError::Io(offset, e))?;
    if bytes.len() < len {
        let why = format!("the image ends after {} of {len} bytes of metadata", bytes.len());
        return Err(Malformed::new(offset, why).into());
    }
    Ok(bytes)
}

/// Reads a sector.
pub(super) fn read_sector(raw: &Raw, offset: u64) -> Result<[u8; SECTOR as usize], MetaError> {
    read_array(raw, offset)
}

pub(super) fn read_array<const N: usize>(raw: &Raw, offset: u64) -> Result<[u8; N], MetaError> {
    let mut out = [0; N];
    out.copy_from_slice(&read(raw, offset, N)?);
    Ok(out)
}

/// The footers of an image that are intact.
pub(super) struct Footers {
    pub(super) start: Result<Footer, Malformed>,
    pub(super) end: Result<Footer, Malformed>,
    pub(super) end_at: u64,
    pub(super) medium_bytes: u64,
    /// The end is as tapdisk leaves it while it has an image open.
    pub(super) is_taken: bool,
    is_file: bool,
}

impl FooterAt {
    /// The end of the room for other parts of an image in a medium of so many bytes: none overlaps its footer.
    pub(super) fn room(self, medium_bytes: u64) -> u64 {
        match self {
            FooterAt::End(at) | FooterAt::Taken(at) => at,
            FooterAt::Start => medium_bytes,
        }
    }
}

impl Footers {
    /// Reads both. A parent whose toolstack does the locking may grow meanwhile: then the place of the old footer may
    /// have a guest's data, which is not to be taken for a footer.
    pub(super) fn read(raw: &Raw) -> Result<Footers, MetaError> {
        let mut found = Footers::read_once(raw)?;
        for _ in 0..READINGS {
            let bytes = raw.bytes_now().map_err(|e| MetaError::Io(0, e))?;
            if bytes == found.medium_bytes {
                return Ok(found);
            }
            found = Footers::read_once(raw)?;
        }
        let why = "the image grows while it is read".to_owned();
        Err(Malformed::new(found.end_at, why).into())
    }

    fn read_once(raw: &Raw) -> Result<Footers, MetaError> {
        let medium_bytes = raw.bytes_now().map_err(|e| MetaError::Io(0, e))?;
        if medium_bytes < SECTOR {
            let why = format!("{medium_bytes} bytes are no VHD, which has 512 at least");
            return Err(Malformed::new(0, why).into());
        }
        let start = Footer::parse(&read_array(raw, 0)?, 0);
        // Old versions of Virtual PC omit the last byte of the footer.
        let short = medium_bytes % SECTOR == SECTOR - 1;
        let end_at =
            if short { medium_bytes - 511 } else { medium_bytes / SECTOR * SECTOR - SECTOR };
        let mut bytes = raw.read_now(end_at, 512).map_err(|e| MetaError::Io(end_at, e))?;
        bytes.resize(512, 0);
        let mut array = [0; 512];
        array.copy_from_slice(&bytes);
        let end = Footer::parse(&array, end_at);
        let is_taken = array == TAKEN;
        Ok(Footers { start, end, end_at, medium_bytes, is_taken, is_file: raw.is_file() })
    }

    /// The valid footer: the one at the end, as for other programs. While an image in a file is open its end is not
    /// written, so after a crash the copy at its beginning serves.
    ///
    /// A guest can write the first sector of a fixed disk, and the last of an image that tapdisk had open when the host
    /// crashed. So two intact footers of different images are refused: one of them is a guest's.
    ///
    /// A device has its footer at its end while it is open, too. If it is missing there, the device has grown. Then the
    /// beginning may be a fixed disk's first sector. A footer that a guest has written there could name any file of the
    /// host as its parent, or show it data of other guests on the rest of the device. So on a device a copy alone is
    /// never trusted.
    ///
    /// But tapdisk removes the footer at the end while it has an image open, also on a device, and writes a pattern of
    /// its own there. It does not do that to fixed disks, and their guests cannot write the last sector of a device
    /// that has grown. So with that pattern the copy is trusted, if the user has named the format VHD.
    ///
    /// XAPI's storage manager makes a volume larger, and only then has the footer written to its new end. It keeps in
    /// its own records which volume is a VHD, and makes no fixed ones on volumes. So its tools trust a copy.
    pub(super) fn choose(&self, copy: CopyOnDevice) -> Result<(Footer, FooterAt), Malformed> {
        match (&self.start, &self.end) {
            (Ok(start), Ok(end)) if start.uuid != end.uuid || start.kind != end.kind => {
                let why = "the footers at the beginning and at the end are of different images; \
                           nothing says which of them a guest has written";
                Err(Malformed::new(self.end_at, why))
            }
            (_, Ok(end)) => Ok((end.clone(), FooterAt::End(self.end_at))),
            (Ok(start), Err(bad)) if start.kind != Kind::Fixed => match self.is_file {
                true => Ok((start.clone(), FooterAt::Start)),
                false if copy.counts(self.is_taken) => {
                    Ok((start.clone(), FooterAt::Taken(self.end_at)))
                }
                false => {
                    let why = format!(
                        "{}; the one at the device's beginning may be a fixed disk's guest's",
                        bad.why
                    );
                    Err(Malformed { why, ..bad.clone() })
                }
            },
            // A version or kind that is not known is no damage, even if the other footer is missing.
            (Err(start), Err(end)) if start.unsupported && !end.unsupported => Err(start.clone()),
            (_, Err(bad)) => Err(bad.clone()),
        }
    }
}

/// The metadata of a dynamic or differencing image.
pub(super) struct Sparse {
    pub(super) header: Header,
    pub(super) layout: Layout,
    pub(super) batmap: Option<Batmap>,
    /// The table entry of each block.
    pub(super) places: Vec<u32>,
    /// A bit for each block that is full by the batmap, the highest of a byte first; empty without a valid batmap.
    pub(super) full: Vec<u8>,
    /// Blocks that cannot be read, if that is tolerated.
    pub(super) damage: Damage,
}

/// Reads the dynamic header and the structures that it names, without the table.
pub(super) fn read_header(
    raw: &Raw,
    footer: &Footer,
    medium_bytes: u64,
    encrypted: Encrypted,
) -> Result<(Header, Option<Batmap>, Layout), MetaError> {
    let at = footer.data_offset;
    if !at.is_multiple_of(SECTOR) || at.saturating_add(header::BYTES as u64) > medium_bytes {
        let why = format!("footer: the dynamic header at byte {at}, outside of the image");
        return Err(Malformed::new(0, why).into());
    }
    let header = Header::parse(&read_array(raw, at)?, at, footer)?;
    let batmap = match Batmap::header_offset(footer, &header) {
        Some(at) if at.saturating_add(SECTOR) <= medium_bytes => {
            Batmap::parse(&read_array(raw, at)?, at, footer, &header, encrypted)?
        }
        _ => None,
    };
    // A batmap that does not fit is ignored; all other parts have to fit.
    let with = Layout::new(footer, &header, batmap.as_ref(), medium_bytes);
    match with {
        Ok(layout) => Ok((header, batmap, layout)),
        Err(_) => {
            let layout = Layout::new(footer, &header, None, medium_bytes)?;
            Ok((header, None, layout))
        }
    }
}

/// Calls `each` with every entry of the table that the disk uses, in order.
pub(super) fn for_each_entry(
    raw: &Raw,
    header: &Header,
    layout: &Layout,
    mut each: impl FnMut(u32, u32) -> Result<(), MetaError>,
) -> Result<(), MetaError> {
    let bytes = u64::from(layout.blocks) * 4;
    let mut at = 0;
    while at < bytes {
        let len = (bytes - at).min(TABLE_PIECE as u64) as usize;
        let piece = read(raw, header.table_offset + at, len)?;
        for (i, entry) in piece.chunks_exact(4).enumerate() {
            let entry = u32::from_be_bytes([entry[0], entry[1], entry[2], entry[3]]);
            each((at / 4) as u32 + i as u32, entry)?;
        }
        at += len as u64;
    }
    Ok(())
}

/// The sector of the block that lies last, by the part of the table that the disk uses. Large tables of many images are
/// read, so nothing is checked.
pub(super) fn last_entry(
    raw: &Raw,
    header: &Header,
    layout: &Layout,
) -> Result<Option<u32>, MetaError> {
    let (bytes, mut at, mut last) = (u64::from(layout.blocks) * 4, 0, 0);
    while at < bytes {
        let len = (bytes - at).min(TABLE_PIECE as u64) as usize;
        let piece = read(raw, header.table_offset + at, len)?;
        let entries = piece.as_chunks::<4>().0.iter().map(|entry| u32::from_be_bytes(*entry));
        // UNUSED is the largest number, so it becomes 0 and the others follow.
        last = entries.map(|entry| entry.wrapping_add(1)).fold(last, u32::max);
        at += len as u64;
    }
    Ok(last.checked_sub(1))
}

/// Reads everything but bitmaps, and checks it.
pub(super) fn read_sparse(
    raw: &Raw,
    footer: &Footer,
    medium_bytes: u64,
    encrypted: Encrypted,
) -> Result<Sparse, MetaError> {
    let (header, batmap, layout) = read_header(raw, footer, medium_bytes, encrypted)?;
    let mut places = Vec::with_capacity(layout.blocks as usize);
    let mut sectors = Vec::new();
    for_each_entry(raw, &header, &layout, |block, entry| {
        if entry != UNUSED {
            layout.check_place(entry, header.table_offset + u64::from(block) * 4)?;
            sectors.push(entry);
        }
        places.push(entry);
        Ok(())
    })?;
    if let Some((a, b)) = layout.find_overlap(&mut sectors) {
        let why = format!(
            "block table: a block at byte {} over one at byte {}",
            u64::from(b) * SECTOR,
            u64::from(a) * SECTOR
        );
        return Err(Malformed::new(header.table_offset, why).into());
    }
    drop(sectors);
    let full = match &batmap {
        Some(map) => read_full(raw, footer, map)?,
        None => Vec::new(),
    };
    Ok(Sparse { header, layout, batmap, places, full, damage: Damage::default() })
}

/// The bits of the batmap; none if its checksum does not fit.
pub(super) fn read_full(raw: &Raw, footer: &Footer, map: &Batmap) -> Result<Vec<u8>, MetaError> {
    let bytes = read(raw, map.offset, batmap::covered_bytes(footer.current_size) as usize)?;
    Ok(if map.is_valid(&bytes) { bytes } else { Vec::new() })
}

/// The paths in the locators. First come those that end with the parent's name in the header, as a `%` may or may not
/// begin an escape; then those relative to the image.
pub(super) fn read_parent_paths(raw: &Raw, header: &Header) -> Result<Vec<PathBuf>, MetaError> {
    let dir = raw.path().parent().unwrap_or(Path::new(""));
    let (mut relative, mut absolute): (Vec<PathBuf>, Vec<PathBuf>) = Default::default();
    for locator in header.locators.iter().filter(|l| l.reads()) {
        let text = read(raw, locator.offset, locator.len as usize)?;
        let paths = locator::decode(locator.code, &text)
            .map_err(|why| Malformed::new(locator.offset, format!("parent locator: {why}")));
        // A locator that is not understood is no harm while there is another.
        for path in paths.unwrap_or_default() {
            let list = if path.is_absolute() { &mut absolute } else { &mut relative };
            let path = dir.join(path);
            if !list.contains(&path) {
                list.push(path);
            }
        }
    }
    relative.append(&mut absolute);
    let name = header.parent_name();
    relative.sort_by_key(|path| path.file_name().is_none_or(|last| last.to_str() != Some(&name)));
    Ok(relative)
}
