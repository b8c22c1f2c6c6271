//! The formats of images.

use std::path::Path;

/// The arrangement of a disk's sectors in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// In the order of the disk.
    Raw,
    /// Microsoft's Virtual Hard Disk.
    Vhd,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
    /// A volume of a store, which has many (docs/store.md). No image is one.
    Store,
    /// An export of an NBD server (docs/access.md). No image is one.
    Nbd,
    /// An image of a Ceph cluster (docs/internals/processes.md 16). No image in a file is one.
    Rbd,
    /// A disk of a pool of servers (docs/internals/pool.md). No image in a file is one.
    Pool,
}

impl Format {
    /// The formats of images.
    pub const ALL: [Format; 3] = [Format::Raw, Format::Vhd, Format::Qcow2];

    /// The name that commands and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Vhd => "vhd",
            Format::Qcow2 => "qcow2",
            Format::Store => "store",
            Format::Nbd => "nbd",
            Format::Rbd => "rbd",
            Format::Pool => "pool",
        }
    }

    /// The format of this name; `None` for others.
    pub fn by_name(name: &str) -> Option<Format> {
        Format::ALL
            .into_iter()
            .chain([Format::Store, Format::Nbd, Format::Rbd, Format::Pool])
            .find(|f| f.name() == name)
    }

    /// The format by the extension of a file's name; raw for other extensions.
    pub fn of_path(path: &Path) -> Format {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let format = Format::by_name(&extension.to_ascii_lowercase());
        // Only a name with a prefix names a volume or an export.
        format.filter(|format| Format::ALL.contains(format)).unwrap_or(Format::Raw)
    }

    /// Whether the data are behind a connection, and the name is no path.
    pub fn is_remote(self) -> bool {
        matches!(self, Format::Nbd | Format::Rbd | Format::Pool)
    }

    /// Whether such an image has metadata, and perhaps a parent: it is opened as a chain of layers.
    pub fn is_layered(self) -> bool {
        self != Format::Raw
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
