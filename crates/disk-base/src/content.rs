//! Detects the format of a file whose name tells none, or another one.
//!
//! The result never chooses a format: a guest can write anything into a raw disk. But an image that is taken for a raw
//! disk by mistake is overwritten by its guest, header first. So a file that looks like an image is opened as raw only
//! if the user has named that format.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::Path;

use ferrite_host::names;
use rustix::fs::{Mode, OFlags};

use crate::{DiskError, ErrorKind, Format, Raw};

/// Image formats that are not supported here, by the extensions of their names.
pub(crate) const FOREIGN_EXTENSIONS: [&str; 6] = ["vhdx", "avhdx", "vmdk", "vdi", "qed", "qcow"];

/// A kind of file that is known by its magic bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    /// Its name in texts, with an article.
    name: &'static str,
    reader: Reader,
}

/// The program that reads a kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    /// This one, as an image of that format or as a store.
    Here(Format),
    /// qemu-img, which can convert it.
    Qemu,
    /// This one, which unpacks it. An image may be in it.
    Unpacker(&'static str),
}

const fn content(name: &'static str, reader: Reader) -> Content {
    Content { name, reader }
}

const VHD: Content = content("a VHD", Reader::Here(Format::Vhd));
const STORE: Content = content("a store of volumes", Reader::Here(Format::Store));
const VMDK: Content = content("a VMDK image", Reader::Qemu);
const PARALLELS: Content = content("a Parallels image", Reader::Qemu);

/// Magic bytes by their places in a file: the one table for all images that are opened.
const MAGICS: [(usize, &[u8], Content); 19] = [
    (0, b"QFI\xfb\0\0\0\x01", content("a qcow image of version 1", Reader::Qemu)),
    (0, QCOW2, content("a qcow2 image", Reader::Here(Format::Qcow2))),
    (0, FOOTER, VHD),
    (0, STORE_MAGIC, STORE),
    (0, b"vhdxfile", content("a VHDX image", Reader::Qemu)),
    (0, b"KDMV", VMDK),
    (0, b"COWD", VMDK),
    (0, b"# Disk DescriptorFile", VMDK),
    (0, b"QED\0", content("a QED image", Reader::Qemu)),
    (0, b"WithoutFreeSpace", PARALLELS),
    (0, b"WithouFreSpacExt", PARALLELS),
    (64, b"\x7f\x10\xda\xbe", content("a VDI image", Reader::Qemu)),
    (0, b"\x1f\x8b\x08", content("a file packed by gzip", Reader::Unpacker("gunzip"))),
    (0, b"\xfd7zXZ\0", content("a file packed by xz", Reader::Unpacker("unxz"))),
    (0, b"\x28\xb5\x2f\xfd", content("a file packed by zstd", Reader::Unpacker("unzstd"))),
    (0, b"BZh91AY&SY", content("a file packed by bzip2", Reader::Unpacker("bunzip2"))),
    (0, b"\x04\x22\x4d\x18", content("a file packed by lz4", Reader::Unpacker("unlz4"))),
    (0, b"PK\x03\x04", content("a ZIP archive", Reader::Unpacker("unzip"))),
    (0, b"7z\xbc\xaf\x27\x1c", content("a 7z archive", Reader::Unpacker("7z x"))),
];

/// All versions of qcow begin with this.
const QCOW2: &[u8] = b"QFI\xfb";
/// A VHD ends with this, and most begin with it.
const FOOTER: &[u8] = b"conectix";
/// vhd-util writes this in its place, so that the image is not opened.
const DISABLED_FOOTER: &[u8] = b"v_poison";
/// The first bytes of a store.
pub const STORE_MAGIC: &[u8; 8] = b"FERSTORE";
/// Bytes of a store's block, the unit of content and of everything on the medium. A superblock has one.
pub const STORE_BLOCK_BYTES: usize = 4096;
/// Bytes of a superblock of a store.
const PAGE_BYTES: u64 = STORE_BLOCK_BYTES as u64;
/// Bytes from a footer to the end; old programs have written one less.
const FOOTERS_BYTES: [u64; 2] = [512, 511];

/// Refuses a file that looks like an image of some format. A file that cannot be read passes: opening it reports the
/// reason.
pub(crate) fn refuse_images(path: &Path) -> Result<(), DiskError> {
    let Ok(Some(Content { name, reader })) = look_at(path) else { return Ok(()) };
    let shown = path.display();
    Err(DiskError::new(
        ErrorKind::Unsuitable,
        format!("cannot open {shown} as a raw disk"),
        format!("its name says no format, and it looks like {name}, which would be overwritten"),
        format!(
            "{}, if that is what it is; say raw:{shown}, if its guest has written that into a raw \
             disk",
            reader.advice(path)
        ),
    ))
}

/// The error for a medium that is opened as an image of `format`, and has the magic bytes of something else. `None`: it
/// has those of the format, or none that are known.
pub fn is_something_else(raw: &Raw, format: Format) -> Option<DiskError> {
    let read = |at| {
        let mut bytes = raw.read_now(at, 512)?;
        bytes.resize(512, 0);
        Ok(bytes.try_into().unwrap_or([0; 512]))
    };
    // If it cannot be read, opening it reports the reason.
    let end = raw.bytes_now().ok()?;
    if has_own_magic(read, end, format).ok()? {
        return None;
    }
    let Content { name, reader } = look(read, end).ok()??;
    let path = raw.path();
    Some(DiskError::new(
        ErrorKind::Unsuitable,
        format!("cannot open image {}", path.display()),
        format!("it is named {format}, and looks like {name}"),
        format!("{}, if that is what it is", reader.advice(path)),
    ))
}

impl Reader {
    /// The next step after an open under the name of another format.
    fn advice(self, path: &Path) -> String {
        let shown = path.display();
        match self {
            Reader::Here(Format::Store) => {
                format!("say store:{shown}#NAME, for the volume NAME of it")
            }
            Reader::Here(format) => format!("say {format}:{shown}"),
            Reader::Qemu => "convert it first (qemu-img convert -O qcow2)".into(),
            Reader::Unpacker(program) => format!("unpack it first ({program})"),
        }
    }
}

/// Whether a file has the magic bytes of an image of `format`. A VHD has them at one of its ends: of a fixed disk the
/// first sector is its guest's.
fn has_own_magic(read: impl Fn(u64) -> Sector, end: u64, format: Format) -> io::Result<bool> {
    let starts = |at, magics: &[&[u8]]| -> io::Result<bool> {
        let found = read(at)?;
        Ok(magics.iter().any(|magic| found.starts_with(magic)))
    };
    match format {
        Format::Qcow2 => starts(0, &[QCOW2]),
        Format::Vhd => {
            for at in footers(end).chain([0]) {
                if starts(at, &[FOOTER, DISABLED_FOOTER])? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Format::Raw | Format::Store | Format::Nbd | Format::Rbd | Format::Pool => Ok(true),
    }
}

/// The places of a file of this length where a footer of a VHD may be.
fn footers(end: u64) -> impl Iterator<Item = u64> {
    FOOTERS_BYTES.into_iter().filter_map(move |bytes| end.checked_sub(bytes))
}

/// The path before its last `#`, which may be that of a store.
pub(crate) fn before_sign(path: &Path) -> Option<&Path> {
    let bytes = path.as_os_str().as_bytes();
    let at = bytes.iter().rposition(|byte| *byte == b'#')?;
    Some(Path::new(OsStr::from_bytes(&bytes[..at])))
}

/// The store before the path's last `#`, if one is there: with `store:` the path would be that of its volume.
pub fn store_of_volume(path: &Path) -> Option<&Path> {
    let store = before_sign(path)?;
    let found = look_at(store).ok()??;
    matches!(found.reader, Reader::Here(Format::Store)).then_some(store)
}

fn look_at(path: &Path) -> io::Result<Option<Content>> {
    let kind = names::metadata(path)?.file_type();
    if !(kind.is_file() || kind.is_block_device()) {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut file = File::from(names::open(path, flags, Mode::empty())?);
    let end = file.seek(SeekFrom::End(0))?;
    look(|at| read(&file, at), end)
}

/// The kind of a file of this length; `None`: it has no magic bytes that are known.
fn look(read: impl Fn(u64) -> Sector, end: u64) -> io::Result<Option<Content>> {
    let head = read(0)?;
    let found = MAGICS.iter().find(|(at, magic, _)| head[*at..].starts_with(magic));
    if let Some((_, _, content)) = found {
        return Ok(Some(*content));
    }
    for at in footers(end) {
        if read(at)?.starts_with(FOOTER) {
            return Ok(Some(VHD));
        }
    }
    // A store without its first page is opened by another one of its four copies.
    let pages = [2 * PAGE_BYTES, PAGE_BYTES].iter().filter_map(|bytes| end.checked_sub(*bytes));
    for at in pages.chain([PAGE_BYTES]) {
        if read(at)?.starts_with(STORE_MAGIC) {
            return Ok(Some(STORE));
        }
    }
    Ok(None)
}

/// The bytes of a sector.
type Sector = io::Result<[u8; 512]>;

/// A sector's bytes, zeros past the end.
fn read(file: &File, at: u64) -> Sector {
    let mut bytes = [0; 512];
    let mut got = 0;
    while got < bytes.len() {
        match file.read_at(&mut bytes[got..], at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(bytes)
}
