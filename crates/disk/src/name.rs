//! The name of a disk says its format. Contents are never looked at for that: a guest that may
//! write a raw disk could turn it into an image that names any file of the host as its parent.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::{DiskError, ErrorKind};

/// How a disk's sectors lie in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// One after the other.
    Raw,
    /// Microsoft's Virtual Hard Disk.
    Vhd,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
}

impl Format {
    /// All there are.
    pub const ALL: [Format; 3] = [Format::Raw, Format::Vhd, Format::Qcow2];

    /// The name that commands and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Vhd => "vhd",
            Format::Qcow2 => "qcow2",
        }
    }

    /// By name; `None` for others.
    pub fn by_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|f| f.name() == name)
    }

    /// What the extension of a file's name says; raw, if it says nothing.
    pub fn of_path(path: &Path) -> Format {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        match extension.to_ascii_lowercase().as_str() {
            "vhd" => Format::Vhd,
            "qcow2" => Format::Qcow2,
            _ => Format::Raw,
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A file, and what is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// How to read the file.
    pub format: Format,
    /// Where it is.
    pub path: PathBuf,
}

impl ImageName {
    /// From `raw:PATH`, `vhd:PATH`, `qcow2:PATH`, or a path whose extension says it. A path with a
    /// colon in its first part is written with a prefix, or as `./a:b`.
    ///
    /// # Errors
    /// A prefix that is no format, or no path.
    pub fn parse(text: &(impl AsRef<OsStr> + ?Sized)) -> Result<ImageName, DiskError> {
        let text = text.as_ref();
        let refuse = |why: String| {
            let help = "write raw:PATH, vhd:PATH or qcow2:PATH, or a path that ends in .vhd or \
                        .qcow2 (anything else is raw; a colon in a file name needs ./ before it)";
            Err(DiskError::new(
                ErrorKind::Usage,
                format!("cannot open {}", text.display()),
                why,
                help,
            ))
        };
        // Names of files are bytes.
        let mut parts = text.as_bytes().splitn(2, |byte| *byte == b':');
        let prefixed = parts.next().zip(parts.next()).filter(|(prefix, _)| !prefix.contains(&b'/'));
        let Some((prefix, path)) = prefixed else {
            return Ok(ImageName { format: Format::of_path(text.as_ref()), path: text.into() });
        };
        let prefix = String::from_utf8_lossy(prefix);
        match Format::by_name(&prefix) {
            Some(_) if path.is_empty() => refuse("it names no file".into()),
            Some(format) => Ok(ImageName { format, path: OsStr::from_bytes(path).into() }),
            None => refuse(format!("there is no format called {prefix:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_or_else_the_extension_says_the_format() {
        for (text, format, path) in [
            ("vhd:/dev/vg/lv", Format::Vhd, "/dev/vg/lv"),
            ("raw:/a/b.vhd", Format::Raw, "/a/b.vhd"),
            ("qcow2:b", Format::Qcow2, "b"),
            ("/a/b.VHD", Format::Vhd, "/a/b.VHD"),
            ("b.qcow2", Format::Qcow2, "b.qcow2"),
            ("b.img", Format::Raw, "b.img"),
            ("./a:b", Format::Raw, "./a:b"),
            ("/dev/disk/by-path/pci-0000:00", Format::Raw, "/dev/disk/by-path/pci-0000:00"),
        ] {
            let name = ImageName::parse(text).unwrap();
            assert_eq!(name, ImageName { format, path: path.into() }, "{text}");
        }
    }

    #[test]
    fn a_name_that_is_no_utf8_is_a_name() {
        for (text, format, path) in [
            (&b"vhd:\xff.img"[..], Format::Vhd, &b"\xff.img"[..]),
            (b"\xff.vhd", Format::Vhd, b"\xff.vhd"),
            (b"./\xff:b", Format::Raw, b"./\xff:b"),
        ] {
            let path = OsStr::from_bytes(path).into();
            let name = ImageName::parse(OsStr::from_bytes(text)).unwrap();
            assert_eq!(name, ImageName { format, path });
        }
        assert!(ImageName::parse(OsStr::from_bytes(b"\xff:b")).is_err());
    }

    #[test]
    fn other_prefixes_and_empty_paths_are_refused() {
        for text in ["vmdk:a", "a:b", "vhd:", ":"] {
            assert_eq!(ImageName::parse(text).unwrap_err().kind(), ErrorKind::Usage, "{text}");
        }
    }
}
