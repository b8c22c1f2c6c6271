//! A VHD's metadata as they are on the medium, without a lock: another process may have the image open and write it.
//! For the stand-in of `vhd-util`, whose caller does the locking.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_disk_base::{DiskError, ErrorKind, Raw};
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::names;

use super::by_name;
use super::format::batmap::{Batmap, Encrypted};
use super::format::footer::{Footer, Kind};
use super::format::header::{self, Header};
use super::format::layout::{Layout, UNUSED};
use super::format::{Malformed, SECTOR, Uuid, locator, tag};
use super::meta::{self, CopyOnDevice, Footers, MetaError, read_array};

/// The folder where the kernel names device mapper's devices.
const SYS_BLOCK: &str = "/sys/block";

/// How often metadata that are damaged are read again, and the pause before that.
const TORN_RETRIES: u32 = 2;
const TORN_PAUSE: Duration = Duration::from_millis(2);

/// The metadata of one VHD.
pub struct Seen {
    raw: Raw,
    footer: Footer,
    /// The footer of a file is where the file ends, so it has been closed, and nothing is reserved behind it.
    is_closed: bool,
    sparse: Option<Sparse>,
}

struct Sparse {
    header: Header,
    batmap: Option<Batmap>,
    layout: Layout,
}

/// The blocks that have a place in an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// Their number.
    pub blocks: u32,
    /// A bit for each block of the disk, the highest of a byte first.
    pub bitmap: Vec<u8>,
    /// The end of the last used part of the medium, without the footer.
    pub end: u64,
}

/// A parent locator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenLocator {
    /// Its place among the eight of the header.
    pub index: usize,
    /// Its platform.
    pub code: String,
    /// The room for its text, in the unit of the image.
    pub space: u32,
    /// Bytes of its text.
    pub len: u32,
    /// Byte offset of its text.
    pub offset: u64,
    /// The path; `None`: it is not understood.
    pub path: Option<PathBuf>,
}

/// The place of tables, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenTables {
    /// Byte offset of the block table.
    pub table_offset: u64,
    /// Entries that it has room for.
    pub entries: u32,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Byte offset and bytes of the batmap.
    pub batmap: Option<(u64, u64)>,
    /// The parent's file name by the header.
    pub parent_name: String,
    /// The parent's identity; nil: it is raw, or there is none.
    pub parent_uuid: Uuid,
}

impl Seen {
    /// Reads the metadata of the VHD at `path`. The caller has said that it is one, so of a device without a footer at
    /// its end the copy counts: nothing but names and sizes is told of it. With `from_copy` the copy counts anyway, as
    /// the end of an image that is written may be anything.
    ///
    /// # Errors
    /// Those of the kernel; the image is damaged, or of an unsupported kind.
    pub fn read(path: &Path, from_copy: bool) -> Result<Seen, DiskError> {
        let raw = glance(path)?;
        Seen::of(raw, from_copy).map_err(|(e, path)| e.for_image(&path))
    }

    fn of(raw: Raw, from_copy: bool) -> Result<Seen, (MetaError, PathBuf)> {
        match read(&raw, from_copy) {
            Ok((footer, is_closed, sparse)) => Ok(Seen { raw, footer, is_closed, sparse }),
            Err(e) => Err((e, raw.path().to_owned())),
        }
    }

    /// Its footer.
    pub fn footer(&self) -> &Footer {
        &self.footer
    }

    /// Its file or device.
    pub fn medium(&self) -> &Raw {
        &self.raw
    }

    /// Its tables; `None`: it is fixed.
    pub fn tables(&self) -> Option<SeenTables> {
        let Sparse { header, batmap, .. } = self.sparse.as_ref()?;
        Some(SeenTables {
            table_offset: header.table_offset,
            entries: header.max_entries,
            block_bytes: header.block_bytes,
            batmap: batmap.as_ref().map(|map| (map.offset, map.len)),
            parent_name: header.parent_name(),
            parent_uuid: header.parent_uuid,
        })
    }

    /// Reads its block table; `None`: it is fixed.
    ///
    /// # Errors
    /// Those of the kernel, or the table ends early.
    pub fn allocated(&self) -> Result<Option<Allocated>, DiskError> {
        let Some(Sparse { header, layout, .. }) = &self.sparse else { return Ok(None) };
        let bitmap = vec![0; layout.blocks.div_ceil(8) as usize];
        let mut found = Allocated { blocks: 0, bitmap, end: layout.metadata_end() };
        let each = |block: u32, sector: u32| {
            if sector != UNUSED {
                found.blocks += 1;
                found.bitmap[block as usize / 8] |= 0x80 >> (block % 8);
                found.end = found.end.max(u64::from(sector) * SECTOR + layout.stride());
            }
            Ok(())
        };
        let read = meta::for_each_entry(&self.raw, header, layout, each);
        read.map_err(|e| e.for_image(self.raw.path()))?;
        Ok(Some(found))
    }

    /// Bytes of the medium that the image uses: up to the end of the last used part, and a footer. Space that is
    /// reserved behind that does not count.
    ///
    /// # Errors
    /// Those of the kernel, or the table ends early.
    pub fn used_bytes(&self) -> Result<u64, DiskError> {
        let Some(Sparse { header, layout, .. }) = &self.sparse else {
            return self.raw.bytes_now().map_err(|e| failed(self.raw.path(), e));
        };
        let last = meta::last_entry(&self.raw, header, layout);
        let last = last.map_err(|e| e.for_image(self.raw.path()))?;
        let end = last.map_or(0, |sector| u64::from(sector) * SECTOR + layout.stride());
        Ok(end.max(layout.metadata_end()) + SECTOR)
    }

    /// [`used_bytes`](Self::used_bytes), without a look at the table if the file is closed: a scan reads many.
    ///
    /// # Errors
    /// Errors of [`used_bytes`](Self::used_bytes).
    pub fn used_bytes_at_once(&self) -> Result<u64, DiskError> {
        let Some(Sparse { layout, .. }) = self.sparse.as_ref().filter(|_| self.is_closed) else {
            return self.used_bytes();
        };
        let bytes = self.raw.bytes_now().map_err(|e| failed(self.raw.path(), e))?;
        // An image without blocks ends where QEMU would place the first one. No block of ours ends there.
        let end = layout.metadata_end();
        let kept_for_qemu =
            self.footer.kind == Kind::Dynamic && bytes == layout.footer_at(end, true) + SECTOR;
        Ok(if kept_for_qemu && self.has_batmap() { end + SECTOR } else { bytes })
    }

    fn has_batmap(&self) -> bool {
        self.sparse.as_ref().is_some_and(|sparse| sparse.batmap.is_some())
    }

    /// The identity of its parent; `None`: it has none. Nil: the parent is raw.
    pub fn parent_uuid(&self) -> Option<Uuid> {
        let header = self.sparse.as_ref().map(|sparse| &sparse.header);
        header.filter(|_| self.footer.kind == Kind::Differencing).map(|header| header.parent_uuid)
    }

    /// Its parent locators, in their order.
    pub fn locators(&self) -> Vec<SeenLocator> {
        let Some(Sparse { header, .. }) = &self.sparse else { return Vec::new() };
        let used = header.locators.iter().enumerate().filter(|(_, locator)| locator.is_used());
        used.map(|(index, locator)| SeenLocator {
            index,
            code: tag(locator.code),
            space: locator.space,
            len: locator.len,
            offset: locator.offset,
            path: locator_paths(&self.raw, locator).into_iter().next(),
        })
        .collect()
    }

    /// The path of its parent as it is named in the image.
    pub fn parent_name(&self) -> Option<PathBuf> {
        self.locators().into_iter().find_map(|locator| locator.path)
    }

    /// The path of its parent, found as libvhd finds it: an absolute path that exists, or one relative to the image's
    /// own folder. Then, as other programs find it, by the name in the header and the identity.
    ///
    /// # Errors
    /// It is not there; the image has none.
    pub fn parent_path(&self) -> io::Result<PathBuf> {
        let Some(Sparse { header, .. }) = &self.sparse else { return Err(none()) };
        if self.footer.kind != Kind::Differencing {
            return Err(none());
        }
        let own = canonical(self.raw.path())?;
        let folder = own.parent().unwrap_or(Path::new("/"));
        let paths = header.locators.iter().filter(|locator| locator.reads());
        for path in paths.flat_map(|locator| locator_paths(&self.raw, locator)) {
            if path.is_absolute() && names::exists(&path) {
                return Ok(path);
            }
            // An absolute path of another host is taken for one below the folder, too.
            let below = folder.join(path.strip_prefix("/").unwrap_or(&path));
            if names::exists(&below) {
                return canonical(&below);
            }
        }
        let alike = by_name::verified(&own, header.parent_uuid, &header.parent_name());
        alike.into_iter().next().ok_or_else(none)
    }
}

fn none() -> io::Error {
    io::ErrorKind::NotFound.into()
}

/// The paths of a locator: first the one that libvhd reads, which knows no escapes.
fn locator_paths(raw: &Raw, locator: &locator::Locator) -> Vec<PathBuf> {
    if !locator.reads() {
        return Vec::new();
    }
    let Ok(text) = meta::read(raw, locator.offset, locator.len as usize) else { return Vec::new() };
    let mut paths: Vec<PathBuf> =
        locator::as_libvhd_reads(locator.code, &text).into_iter().collect();
    for path in locator::decode(locator.code, &text).unwrap_or_default() {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    paths.retain(|path| !path.as_os_str().is_empty());
    paths
}

/// Opens a file or device to read metadata. A device is read past the page cache: another host may write it.
pub(super) fn glance(path: &Path) -> Result<Raw, DiskError> {
    let found = Raw::glance_fresh(path).map_err(|e| failed(path, e))?;
    found.ok_or_else(|| {
        let e = match names::is_dir(path) {
            true => rustix::io::Errno::ISDIR,
            false => rustix::io::Errno::INVAL,
        };
        failed(path, e.into())
    })
}

fn failed(path: &Path, e: io::Error) -> DiskError {
    let kind = match e.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::PermissionDenied => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    let what = format!("cannot open image {}", path.display());
    DiskError::new(kind, what, e.to_string(), "check the path, and what is below it").with_source(e)
}

fn read(raw: &Raw, from_copy: bool) -> Result<(Footer, bool, Option<Sparse>), MetaError> {
    let footers = Footers::read(raw)?;
    let footer = choose(&footers, from_copy)?;
    let is_closed = raw.is_file() && footers.end.as_ref() == Ok(&footer);
    if footer.kind == Kind::Fixed {
        return Ok((footer, is_closed, None));
    }
    let (header, batmap, layout) =
        steadily(|| meta::read_header(raw, &footer, footers.medium_bytes, Encrypted::Opened))?;
    Ok((footer, is_closed, Some(Sparse { header, batmap, layout })))
}

/// Reads metadata of several sectors. Another process may be writing them, and they are valid a moment later.
fn steadily<T>(mut read: impl FnMut() -> Result<T, MetaError>) -> Result<T, MetaError> {
    for _ in 0..TORN_RETRIES {
        match read() {
            Err(MetaError::Bad(bad)) if !bad.unsupported => SystemClock.sleep(TORN_PAUSE),
            done => return done,
        }
    }
    read()
}

fn choose(footers: &Footers, from_copy: bool) -> Result<Footer, Malformed> {
    match (&footers.start, &footers.end) {
        (Ok(start), _) if from_copy => Ok(start.clone()),
        _ => footers.choose(CopyOnDevice::Counts).map(|(footer, _)| footer),
    }
}

/// The path of a file or device, freed of links. A device of device mapper has the name that its administrator knows,
/// since the number of its node says nothing.
///
/// # Errors
/// Those of the kernel.
pub fn canonical(path: &Path) -> io::Result<PathBuf> {
    let real = names::canonicalize(path)?;
    Ok(mapped(&real, Path::new(SYS_BLOCK)).unwrap_or(real))
}

/// The name of a device of device mapper, by the kernel's folder of devices.
fn mapped(device: &Path, sys_block: &Path) -> Option<PathBuf> {
    let node = device.strip_prefix("/dev").ok()?.to_str()?;
    let is_mapped = node.strip_prefix("dm-")?.bytes().all(|byte| byte.is_ascii_digit());
    let name = names::read_to_string(sys_block.join(node).join("dm/name")).ok()?;
    is_mapped.then(|| Path::new("/dev/mapper").join(name.trim_end()))
}

/// The head of a VHD that lies within a device, at byte `base`: of a logical volume that is not active.
#[derive(Clone, Debug)]
pub struct SeenVolume {
    /// Bytes of its disk.
    pub bytes: u64,
    /// Its mark.
    pub hidden: u8,
    /// The parent's file name; `None`: it has no parent.
    pub parent: Option<String>,
    /// Its parent is raw.
    pub is_on_raw: bool,
}

impl SeenVolume {
    /// Reads it from `device`, past the page cache.
    ///
    /// # Errors
    /// Those of the kernel; there is no VHD.
    pub fn read(device: &Path, base: u64) -> Result<SeenVolume, DiskError> {
        let raw = glance(device)?;
        read_volume(&raw, base).map_err(|e| e.for_image(device))
    }
}

fn read_volume(raw: &Raw, base: u64) -> Result<SeenVolume, MetaError> {
    let footer = Footer::parse(&read_array(raw, base)?, base)?;
    let found = SeenVolume {
        bytes: footer.current_size,
        hidden: footer.hidden,
        parent: None,
        is_on_raw: false,
    };
    if footer.kind == Kind::Fixed {
        return Ok(found);
    }
    let at = base.checked_add(footer.data_offset).filter(|at| at.is_multiple_of(SECTOR));
    let at = at.ok_or_else(|| Malformed::new(base, "footer: the dynamic header is nowhere"))?;
    let header = Header::parse(&read_array::<{ header::BYTES }>(raw, at)?, at, &footer)?;
    if footer.kind != Kind::Differencing {
        return Ok(found);
    }
    let mut name = header.parent_name();
    if name.is_empty() {
        let moved = header.locators.iter().filter(|locator| locator.reads()).map(|locator| {
            locator::Locator { offset: locator.offset.saturating_add(base), ..*locator }
        });
        let path = { moved }.flat_map(|locator| locator_paths(raw, &locator)).next();
        name = path.map_or(name, |path| path.display().to_string());
    }
    let is_on_raw = header.parent_uuid == Uuid::NIL;
    Ok(SeenVolume { parent: Some(name), is_on_raw, ..found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_that_are_being_written_are_read_again() {
        let bad = || MetaError::Bad(Malformed::new(0, "torn"));
        let unsupported = || MetaError::Bad(Malformed::unsupported(0, "new"));
        let mut reads = 0;
        let third = steadily(|| {
            reads += 1;
            if reads == 3 { Ok(7) } else { Err(bad()) }
        });
        assert_eq!(third.ok(), Some(7));
        let mut reads = 0;
        let never = steadily(|| {
            reads += 1;
            Err::<(), _>(if reads > 3 { unsupported() } else { bad() })
        });
        assert!(never.is_err() && reads == 3);
        let mut reads = 0;
        let other = steadily(|| {
            reads += 1;
            Err::<(), _>(unsupported())
        });
        assert!(other.is_err() && reads == 1);
    }

    #[test]
    fn a_mapped_device_has_its_name_and_others_have_theirs() {
        let sys = tempfile::tempdir().unwrap();
        let dm = sys.path().join("dm-7/dm");
        std::fs::create_dir_all(&dm).unwrap();
        std::fs::write(dm.join("name"), "VG_XenStorage--1-VHD--2\n").unwrap();
        let name = |device: &str| mapped(Path::new(device), sys.path());
        assert_eq!(name("/dev/dm-7"), Some("/dev/mapper/VG_XenStorage--1-VHD--2".into()));
        for other in ["/dev/dm-8", "/dev/sda", "/srv/dm-7", "/dev/dm-7x"] {
            assert_eq!(name(other), None, "{other}");
        }
    }
}
