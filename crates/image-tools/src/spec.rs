//! The options for a new image, and its parent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk::Disk;
use ferrite_disk_base::{ImageName, SECTOR_BYTES};

use super::parent_dir;

/// The properties of a new image.
#[derive(Clone, Debug, Default)]
pub struct NewImage {
    /// Bytes of the disk; `None`: the parent's.
    pub bytes: Option<u64>,
    /// The parent that it is made on.
    pub parent: Option<ImageName>,
    /// Allocate all space at once.
    pub fixed: bool,
    /// The unit of allocation: a block of VHD, a cluster of qcow2; `None`: the default.
    pub unit_bytes: Option<u32>,
    /// A qcow2 image gets L2 entries with a bitmap of subclusters.
    pub extended_l2: bool,
    /// An existing file of its name may be lost.
    pub force: bool,
    /// Go on if its parent is in another folder and its list cannot be written.
    pub unmarked: bool,
}

/// A parent, open and locked against writers.
pub(super) struct Parent {
    pub(super) disk: Disk,
    pub(super) name: ImageName,
    /// Its path: its directory without links, and its name.
    pub(super) path: PathBuf,
}

impl Parent {
    pub(super) fn bytes(&self) -> u64 {
        self.disk.sectors() * SECTOR_BYTES
    }
}

/// The directory that a file is in, without links.
pub(super) fn absolute_dir(path: &Path) -> io::Result<PathBuf> {
    fs::canonicalize(parent_dir(path))
}
