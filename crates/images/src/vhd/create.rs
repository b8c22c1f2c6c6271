//! Makes images. The order of writes: everything but the footers, `fdatasync`, the footers, `fdatasync`. Without a
//! footer a file is no VHD, and each of the two is one sector. So at any moment there is either no image or a complete
//! one.

use std::io;
use std::path::{Component, Path, PathBuf};

use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw};

use super::format::batmap::{self, Batmap};
use super::format::footer::{self, Creator, Footer, Kind};
use super::format::header::{self, DEFAULT_BLOCK_BYTES, Header};
use super::format::layout::{Layout, UNUSED};
use super::format::locator::{self, Locator, MAX_TEXT_BYTES};
use super::format::{MAX_BLOCKS, MAX_DISK_BYTES, SECTOR, Stamp, Uuid, whole_sectors};
use super::pieces::{write_bytes, write_filled};

/// The image that a new differencing image is made on.
#[derive(Clone, Debug)]
pub struct NewParent {
    /// Its identity; [`Uuid::NIL`] for a raw image.
    pub uuid: Uuid,
    /// The size of its disk in bytes.
    pub bytes: u64,
    /// When it was last changed, in seconds since 1970.
    pub modified_unix_s: u64,
    /// Its absolute path.
    pub path: PathBuf,
}

/// The properties of a new image.
#[derive(Clone, Debug)]
pub struct NewImage {
    /// The size of its disk in bytes: whole sectors, up to [`MAX_DISK_BYTES`]. libvhd (and so
    /// XAPI's storage manager) handles whole blocks of 2 MiB only.
    pub bytes: u64,
    /// Allocate the whole disk at once; otherwise blocks are allocated when they are written.
    pub fixed: bool,
    /// Makes it a differencing image.
    pub parent: Option<NewParent>,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// The table gets entries for a disk of so many bytes, so that a smaller one can grow to that without moving data.
    pub room_bytes: u64,
    /// Its identity.
    pub stamp: Stamp,
}

impl NewImage {
    /// A dynamic image with blocks of the usual size.
    pub fn dynamic(bytes: u64) -> NewImage {
        NewImage {
            bytes,
            fixed: false,
            parent: None,
            block_bytes: DEFAULT_BLOCK_BYTES,
            room_bytes: 0,
            stamp: Stamp::from_system(),
        }
    }

    /// A differencing image of which only `bytes` is given, on a parent.
    pub fn differencing(bytes: u64, parent: NewParent) -> NewImage {
        NewImage { parent: Some(parent), ..NewImage::dynamic(bytes) }
    }

    /// The reasons why libvhd, and XAPI with it, cannot use the image at `path` that this will be.
    pub fn not_for_libvhd(&self, path: &Path) -> Vec<String> {
        let mut out = Vec::new();
        if !self.fixed && self.block_bytes != DEFAULT_BLOCK_BYTES {
            out.push("XAPI and XCP-ng cannot read it: libvhd knows blocks of 2 MiB only".into());
        } else if !self.fixed && !self.bytes.is_multiple_of(u64::from(DEFAULT_BLOCK_BYTES)) {
            let text = "XAPI and XCP-ng see its last part only if its size is a multiple of 2 MiB";
            out.push(text.into());
        }
        let way = self.parent.as_ref().and_then(|parent| way_to(path, &parent.path).ok());
        if let Some(way) = way {
            let why = match way.to_str() {
                Some(way) => locator::unreadable_by_libvhd(way),
                None => Some("is not ASCII, which is all that libvhd reads"),
            };
            let said = |why| {
                format!("XAPI and XCP-ng cannot read it: its parent's path {} {why}", way.display())
            };
            out.extend(why.map(said));
        }
        out
    }

    /// The reason why QEMU cannot use it: QEMU's bitmap of a small block has no bytes, so QEMU reads the bitmap as
    /// data.
    pub fn not_for_qemu(&self) -> Option<String> {
        const LEAST_BYTES: u32 = 4096;
        (!self.fixed && self.block_bytes < LEAST_BYTES)
            .then(|| "QEMU reads something else in it: its blocks have less than 4 KiB".into())
    }

    /// Checks the options for the image at `path`, before anything is made.
    ///
    /// # Errors
    /// The options contradict each other.
    pub fn check(&self, path: &Path) -> Result<(), DiskError> {
        Plan::new(self, path).map(drop).map_err(|why| refused(path, &why))
    }

    /// Makes the image in `raw`, a new, empty file or a block device, which is file 0 of `port`. An image on a device
    /// is lost; a fixed image on it reads as the device's old data.
    ///
    /// # Errors
    /// The options contradict each other, or do not fit the medium: nothing was written then. Those of the kernel:
    /// there is no image.
    pub async fn create(&self, port: &Port, raw: &Raw) -> Result<Footer, DiskError> {
        let medium_bytes = raw.bytes_now().map_err(|e| failed(raw.path(), e))?;
        let device_bytes = (!raw.is_file()).then_some(medium_bytes / SECTOR * SECTOR);
        let plan = Plan::new(self, raw.path()).map_err(|why| refused(raw.path(), &why))?;
        if device_bytes.is_none() && medium_bytes > 0 {
            return Err(refused(raw.path(), "the file is not empty"));
        }
        let needed = plan.end + SECTOR;
        if device_bytes.is_some_and(|bytes| bytes < needed) {
            let why = format!("the device has {medium_bytes} bytes, and {needed} are needed");
            return Err(refused(raw.path(), &why));
        }
        plan.write(port, device_bytes).await.map_err(|e| failed(raw.path(), e))?;
        Ok(plan.footer)
    }
}

/// The places of everything that is written.
struct Plan {
    footer: Footer,
    sparse: Option<SparsePlan>,
    /// The end of metadata, or of the data of a fixed disk.
    end: u64,
    /// The place of a file's footer.
    footer_at: u64,
}

struct SparsePlan {
    header: Header,
    batmap: Option<Batmap>,
    /// Texts of locators, and their places.
    texts: Vec<(u64, Vec<u8>)>,
}

impl Plan {
    fn new(new: &NewImage, path: &Path) -> Result<Plan, String> {
        if new.bytes == 0 || new.bytes > MAX_DISK_BYTES || !new.bytes.is_multiple_of(SECTOR) {
            return Err(format!(
                "a disk of {} bytes; a VHD has whole sectors of 512, up to 2040 GiB",
                new.bytes
            ));
        }
        if new.fixed {
            if new.parent.is_some() {
                return Err("a fixed image cannot have a parent".into());
            }
            let footer = Footer::new(Kind::Fixed, new.bytes, Creator::LIBVHD, &new.stamp);
            return Ok(Plan { footer, sparse: None, end: new.bytes, footer_at: new.bytes });
        }
        Plan::sparse(new, path)
    }

    fn sparse(new: &NewImage, path: &Path) -> Result<Plan, String> {
        header::check_block_bytes(new.block_bytes)?;
        let block = u64::from(new.block_bytes);
        if new.room_bytes > MAX_DISK_BYTES {
            return Err("room for more than a VHD can have, 2040 GiB".into());
        }
        let entries = new.bytes.max(new.room_bytes).div_ceil(block);
        if entries > MAX_BLOCKS.into() {
            return Err(format!("blocks of {block} bytes for such a disk"));
        }
        let creator = match new.block_bytes {
            DEFAULT_BLOCK_BYTES => Creator::LIBVHD,
            _ => Creator::HYPER_V,
        };
        let kind = if new.parent.is_some() { Kind::Differencing } else { Kind::Dynamic };
        let footer = Footer::new(kind, new.bytes, creator, &new.stamp);
        let table_at = (footer::BYTES + header::BYTES) as u64;
        // MAX_BLOCKS fits.
        let mut header = Header::new(table_at, entries as u32, new.block_bytes);
        let mut end = table_at + whole_sectors(entries * 4);
        let batmap =
            Batmap::header_offset(&footer, &header).map(|at| Batmap::new(at, header.max_entries));
        if let Some(batmap) = &batmap {
            end = batmap.offset + batmap.len;
        }
        let mut texts = Vec::new();
        if let Some(parent) = &new.parent {
            if parent.bytes > new.bytes {
                return Err(format!(
                    "its disk would be smaller ({} bytes) than its parent's ({})",
                    new.bytes, parent.bytes
                ));
            }
            texts = set_parent(&mut header, parent, path, end)?;
            end += header.locators.iter().map(Locator::room_bytes).sum::<u64>();
        }
        let mut footer_at = end;
        if kind == Kind::Dynamic {
            let layout = Layout::new(&footer, &header, batmap.as_ref(), u64::MAX);
            let layout = layout.map_err(|bad| bad.to_string())?;
            let qemu = layout.qemu_overwrites_batmap(std::iter::empty());
            footer_at = layout.footer_at(end, qemu);
        }
        let sparse = Some(SparsePlan { header, batmap, texts });
        Ok(Plan { footer, sparse, end, footer_at })
    }

    async fn write(&self, port: &Port, device_bytes: Option<u64>) -> io::Result<()> {
        let (io, file) = (&port.io, port.files[0]);
        let footer_at = device_bytes.map_or(self.footer_at, |bytes| bytes - SECTOR);
        if device_bytes.is_some() {
            // An image that was on the medium is invalid from here on.
            let none = [0; SECTOR as usize];
            write_bytes(port, file, &[(0, &none), (footer_at, &none)]).await?;
            io.sync(file).await?;
        }
        match &self.sparse {
            None if device_bytes.is_none() => match io.allocate(file, 0, self.end + SECTOR).await {
                Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                    io.set_len(file, self.end + SECTOR).await?;
                }
                done => done?,
            },
            None => {}
            Some(sparse) => sparse.write(port, &self.footer).await?,
        }
        io.sync(file).await?;
        let footer = self.footer.bytes();
        write_bytes(port, file, &[(footer_at, &footer)]).await?;
        if self.sparse.is_some() {
            write_bytes(port, file, &[(0, &footer)]).await?;
        }
        io.sync(file).await
    }
}

impl SparsePlan {
    async fn write(&self, port: &Port, footer: &Footer) -> io::Result<()> {
        let file = port.files[0];
        let header = &self.header;
        let table = whole_sectors(u64::from(header.max_entries) * 4);
        let unused = UNUSED.to_be_bytes()[0];
        write_filled(port, file, header.table_offset, table, unused).await?;
        let raw = header.bytes();
        let mut pieces: Vec<(u64, &[u8])> = vec![(footer.data_offset, &raw)];
        let map_header;
        if let (Some(map), Some(at)) = (&self.batmap, Batmap::header_offset(footer, header)) {
            write_filled(port, file, map.offset, map.len, 0).await?;
            let covered = batmap::covered_bytes(footer.current_size) as usize;
            map_header = map.header_for(&vec![0; covered]);
            pieces.push((at, &map_header));
        }
        pieces.extend(self.texts.iter().map(|(at, text)| (*at, &text[..])));
        write_bytes(port, file, &pieces).await
    }
}

/// Fills in the parent, with locators from byte `at` on; returns their texts, padded.
pub(super) fn set_parent(
    header: &mut Header,
    parent: &NewParent,
    child: &Path,
    at: u64,
) -> Result<Vec<(u64, Vec<u8>)>, String> {
    let name = parent.path.file_name().unwrap_or_default();
    header.set_parent_name(&name.to_string_lossy());
    header.parent_uuid = parent.uuid;
    header.parent_timestamp = footer::timestamp(parent.modified_unix_s);
    let relative = way_to(child, &parent.path)?;
    let mut at = at;
    let mut out = Vec::new();
    for (slot, (code, mut text)) in header.locators.iter_mut().zip(locator_texts(&relative)) {
        let (len, room) = (text.len() as u64, whole_sectors(text.len() as u64));
        if room > MAX_TEXT_BYTES {
            return Err("the parent's path is too long".into());
        }
        // In bytes, as all programs write it; the specification says sectors.
        *slot = Locator { code, space: room as u32, len: len as u32, offset: at };
        text.resize(room as usize, 0);
        out.push((at, text));
        at += room;
    }
    Ok(out)
}

/// The platforms and texts of the locators for a parent's path from its child's directory, in the order in which libvhd
/// writes and reads them.
pub(super) fn locator_texts(relative: &Path) -> impl Iterator<Item = ([u8; 4], Vec<u8>)> {
    let texts = [
        Some((*b"MacX", locator::encode_url(relative))),
        locator::encode_windows(relative).map(|text| (*b"W2ku", text)),
        locator::encode_windows(relative).map(|text| (*b"W2ru", text)),
    ];
    texts.into_iter().flatten()
}

/// The path from a child's directory to its parent: `./NAME`, `../OTHER/NAME`.
///
/// # Errors
/// The directory cannot be found.
pub fn way_to(child: &Path, parent: &Path) -> Result<PathBuf, String> {
    let dir = child.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new(".")).canonicalize();
    let dir = dir.map_err(|e| format!("its directory cannot be found: {e}"))?;
    Ok(relative_path(&dir, parent))
}

/// The path from a directory to a file, both absolute: `./NAME`, `../OTHER/NAME`.
fn relative_path(dir: &Path, file: &Path) -> PathBuf {
    let (from, to): (Vec<Component<'_>>, Vec<Component<'_>>) =
        (dir.components().collect(), file.components().collect());
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from.len() - common;
    let mut path = PathBuf::from(if up == 0 { "." } else { ".." });
    (1..up).for_each(|_| path.push(".."));
    path.extend(&to[common..]);
    path
}

fn refused(path: &Path, why: &str) -> DiskError {
    let what = format!("cannot make a VHD in {}", path.display());
    DiskError::new(ErrorKind::Usage, what, why, "choose another size, kind or place")
}

fn failed(path: &Path, e: io::Error) -> DiskError {
    let what = format!("cannot make a VHD in {}", path.display());
    let help = "free some space and try again; if there is enough, see the kernel's log (dmesg)";
    DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_a_parent_are_relative_to_the_childs_directory() {
        for (dir, file, way) in [
            ("/srv", "/srv/a.vhd", "./a.vhd"),
            ("/srv", "/srv/sub/a.vhd", "./sub/a.vhd"),
            ("/srv/x/y", "/srv/a.vhd", "../../a.vhd"),
            ("/srv/x", "/dev/vg/lv", "../../dev/vg/lv"),
            ("/", "/a", "./a"),
        ] {
            assert_eq!(relative_path(dir.as_ref(), file.as_ref()), Path::new(way), "{dir} {file}");
        }
    }

    #[test]
    fn options_that_cannot_be_are_refused() {
        let refused = |change: &dyn Fn(&mut NewImage)| {
            let mut new = NewImage::dynamic(1 << 20);
            change(&mut new);
            assert!(Plan::new(&new, Path::new("/tmp/x.vhd")).is_err());
        };
        refused(&|new| new.bytes = 0);
        refused(&|new| new.bytes = 513);
        refused(&|new| new.bytes = MAX_DISK_BYTES + 512);
        refused(&|new| new.block_bytes = 3 << 20);
        refused(&|new| new.block_bytes = 0);
        refused(&|new| new.block_bytes = 512 << 20);
        refused(&|new| (new.block_bytes, new.bytes) = (4096, MAX_DISK_BYTES));
        let parent = NewParent {
            uuid: Uuid::NIL,
            bytes: 2 << 20,
            modified_unix_s: 0,
            path: "/tmp/p".into(),
        };
        refused(&|new| new.parent = Some(parent.clone()));
        refused(&|new| {
            (new.parent, new.fixed, new.bytes) = (Some(parent.clone()), true, 4 << 20);
        });
    }
}
