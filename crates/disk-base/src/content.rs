//! Detects the format of a file whose name tells none.
//!
//! The result never chooses a format: a guest can write anything into a raw disk. But an image that is taken for a raw
//! disk by mistake is overwritten by its guest, header first. So a file that looks like an image is opened as raw only
//! if the user has named that format.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::Path;

use ferrite_host::names;
use rustix::fs::{Mode, OFlags};

use crate::{DiskError, ErrorKind, Format};

/// Image formats that are not supported here, by the extensions of their names.
pub(crate) const FOREIGN_EXTENSIONS: [&str; 6] = ["vhdx", "avhdx", "vmdk", "vdi", "qed", "qcow"];

/// Magic bytes by their places in an image, the names of their formats, and the format if it is supported here.
const MAGICS: [(usize, &[u8], &str, Option<Format>); 12] = [
    (0, b"QFI\xfb\0\0\0\x01", "a qcow image of version 1", None),
    (0, b"QFI\xfb", "a qcow2 image", Some(Format::Qcow2)),
    (0, FOOTER, "a VHD", Some(Format::Vhd)),
    (0, STORE_MAGIC, "a store of volumes", Some(Format::Store)),
    (0, b"vhdxfile", "a VHDX image", None),
    (0, b"KDMV", "a VMDK image", None),
    (0, b"COWD", "a VMDK image", None),
    (0, b"# Disk DescriptorFile", "a VMDK image", None),
    (0, b"QED\0", "a QED image", None),
    (0, b"WithoutFreeSpace", "a Parallels image", None),
    (0, b"WithouFreSpacExt", "a Parallels image", None),
    (64, b"\x7f\x10\xda\xbe", "a VDI image", None),
];

/// A VHD ends with this, and most begin with it.
const FOOTER: &[u8] = b"conectix";
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
    let Ok(Some((name, format))) = look(path) else { return Ok(()) };
    let shown = path.display();
    let help = match format {
        Some(Format::Store) => {
            format!("say store:{shown}#NAME, for the volume NAME of it, if that is what it is")
        }
        Some(format) => format!("say {format}:{shown}, if that is what it is"),
        None => "convert it first (qemu-img convert -O qcow2), if that is what it is".into(),
    };
    Err(DiskError::new(
        ErrorKind::Unsuitable,
        format!("cannot open {shown} as a raw disk"),
        format!("its name says no format, and it looks like {name}, which would be overwritten"),
        format!("{help}; say raw:{shown}, if its guest has written that into a raw disk"),
    ))
}

fn look(path: &Path) -> io::Result<Option<(&'static str, Option<Format>)>> {
    let kind = names::metadata(path)?.file_type();
    if !(kind.is_file() || kind.is_block_device()) {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut file = File::from(names::open(path, flags, Mode::empty())?);
    let head = read(&file, 0)?;
    let found = MAGICS.iter().find(|(at, magic, ..)| head[*at..].starts_with(magic));
    if let Some((_, _, name, format)) = found {
        return Ok(Some((name, *format)));
    }
    let end = file.seek(SeekFrom::End(0))?;
    for at in FOOTERS_BYTES.iter().filter_map(|bytes| end.checked_sub(*bytes)) {
        if read(&file, at)?.starts_with(FOOTER) {
            return Ok(Some(("a VHD", Some(Format::Vhd))));
        }
    }
    // A store without its first page is opened by another one of its four copies.
    let pages = [2 * PAGE_BYTES, PAGE_BYTES].iter().filter_map(|bytes| end.checked_sub(*bytes));
    for at in pages.chain([PAGE_BYTES]) {
        if read(&file, at)?.starts_with(STORE_MAGIC) {
            return Ok(Some(("a store of volumes", Some(Format::Store))));
        }
    }
    Ok(None)
}

/// A sector's bytes, zeros past the end.
fn read(file: &File, at: u64) -> io::Result<[u8; 512]> {
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
