//! Operations on images that are not in use: making, copying, merging, inspecting. `ferrite image` is the command line
//! for this, and the simulator cuts its power.
//!
//! Each operation is a function of [`ImageTools`], for all formats. Operations that make or replace files keep to one
//! order. So a crash at any point leaves every name with an intact image, the old or the new one:
//! 1. The new image is written under a temporary name beside its own, and synced.
//! 2. It gets its name by one operation on the directory, which is then synced.

#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, MAX_LAYERS, OpenOptions, Parents};
use ferrite_host::directory::Directory;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;

mod allocation;
mod backup;
mod check;
mod coalesce;
mod compare;
mod convert;
mod convert_over;
mod copy;
mod create;
mod date;
mod dirty;
mod extents;
mod files;
mod formats;
mod info;
mod inner;
mod io_context;
mod journals;
mod measure;
mod merge;
mod rebase;
mod rebase_away;
mod report;
mod resize;
mod resume;
mod room;
mod salvage;
mod spec;
mod speed;
pub mod stores;
mod undo;
mod upgrade;
mod vhd_util;
mod volumes;

/// The longest chain that is read and merged here, so that a chain that is too long to be served can be shortened. Each
/// image takes a descriptor.
const MAX_LAYERS_OFFLINE: usize = 4 * MAX_LAYERS;

pub use backup::{
    AtRest, BackUp, BackupDone, BackupInfo, BackupKind, BackupRecord, LiveDisk, Prune, Pruned,
    Restore, RestoreStream, Verified,
};
pub use convert::Convert;
pub use date::parts as date_parts;
pub use dirty::{MIRROR_MAP, MapChange};
pub use inner::Inner;
pub use measure::Measured;
pub use merge::{LeafMerge, MergeCopy, MergePlan, Stretch};
pub use rebase::Rebase;
pub use report::*;
pub use resize::{NewSize, Resize};
pub use spec::NewImage;
pub use vhd_util::{NewVhd, VhdChange, VhdParent, VhdSeen, libvhd_path, rounded};

/// A VHD's metadata, read without a lock: see [`Seen`](vhd::Seen).
pub mod vhd {
    pub use ferrite_images::vhd::{
        Allocated, Footer, Geometry, Kind, Seen, SeenLocator, SeenTables, SeenVolume, Uuid, Verify,
        verify,
    };
}

/// The environment of operations.
pub struct ImageTools<'a> {
    /// Entries of directories are changed through this.
    pub directory: &'a dyn Directory,
    /// Opens the engine for I/O.
    pub engine: &'a dyn Fn(Arc<Arena>) -> io::Result<Box<dyn Engine>>,
    /// See [`OpenOptions::state_dir`]. One that this user may not read is not used, see
    /// [`OpenOptions::unseen_state`].
    pub state_dir: Option<PathBuf>,
    /// See [`OpenOptions::fixed_size`].
    pub fixed_size: bool,
    /// Read images that are in use: see [`OpenOptions::unlocked`]. Images that are written are locked nevertheless.
    pub unlocked: bool,
    /// See [`OpenOptions::parents`].
    pub parents: Parents,
    /// Called at times with the progress. `false`: stop in good order, as soon as possible.
    pub progress: &'a dyn Fn(Progress) -> bool,
}

/// The progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the disk that are done.
    pub done_bytes: u64,
    /// Bytes of the disk.
    pub total_bytes: u64,
}

impl ImageTools<'_> {
    fn options(&self, read_only: bool) -> OpenOptions {
        // The journal of a running process would change while it is read.
        let used = self.state_dir.as_deref().filter(|_| !self.unlocked);
        let state_dir = used.filter(|dir| is_readable(dir)).map(Path::to_owned);
        let unseen_state = used.is_some() && state_dir.is_none();
        OpenOptions { state_dir, unseen_state, ..self.medium_options(read_only) }
    }

    /// The state directory, if it can be read.
    fn readable_state(&self) -> Option<&Path> {
        self.state_dir.as_deref().filter(|dir| is_readable(dir))
    }

    /// Options for a medium that is not opened as a disk which may have been in use: without a journal.
    fn medium_options(&self, read_only: bool) -> OpenOptions {
        OpenOptions {
            read_only,
            fixed_size: self.fixed_size,
            thin: true,
            unlocked: self.unlocked && read_only,
            max_layers: MAX_LAYERS_OFFLINE,
            parents: self.parents.clone(),
            ..OpenOptions::default()
        }
    }

    /// Options for writing to an image that has children: they read the same afterwards, or may be lost.
    fn even_parents(options: OpenOptions) -> OpenOptions {
        OpenOptions { even_parent: true, ..options }
    }

    fn open(&self, name: &ImageName, read_only: bool) -> Result<Disk, DiskError> {
        match read_only || name.format.is_remote() {
            true => Disk::open_image(name, &self.options(read_only)),
            false => ImageTools::open_to_write(name, &self.options(false)),
        }
    }

    /// Opens a disk for writing, after it was opened for reading. Opening for writing begins a journal, which would
    /// stay if a parent then proved to be missing.
    fn open_to_write(name: &ImageName, options: &OpenOptions) -> Result<Disk, DiskError> {
        drop(Disk::open_image(name, &OpenOptions { read_only: true, ..options.clone() })?);
        Disk::open_image(name, options)
    }
}

/// Whether this user may read a directory, if it exists.
pub fn is_readable(dir: &Path) -> bool {
    !dir.read_dir().is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
}

/// The error of an operation that would lose data without `force`.
fn refused(what: String, why: impl Into<String>, help: &str) -> DiskError {
    DiskError::new(ErrorKind::Refused, what, why, help)
}

/// The error for an image that the operation cannot work on.
fn unsuitable(what: String, why: impl Into<String>, help: &str) -> DiskError {
    DiskError::new(ErrorKind::Unsuitable, what, why, help)
}

const DAMAGED: &str =
    "it is damaged: ferrite image check, or of a volume ferrite store check, says where";

/// The error of the kernel, or of an image's metadata.
fn broken(what: impl Into<String>, e: io::Error) -> DiskError {
    let (kind, help) = match e.kind() {
        io::ErrorKind::InvalidData => (ErrorKind::Damaged, DAMAGED),
        io::ErrorKind::NotFound => (ErrorKind::NotFound, "check the path"),
        io::ErrorKind::PermissionDenied => (
            ErrorKind::Permission,
            "run as a user who may, or check the modes of file and directory",
        ),
        io::ErrorKind::InvalidFilename => (
            ErrorKind::Usage,
            "choose a name of at most 238 bytes: until an image is complete, more is behind it",
        ),
        io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::Permission, "the file system is read-only: use another one")
        }
        io::ErrorKind::StorageFull => (ErrorKind::Io, "make room, or use another file system"),
        io::ErrorKind::FileTooLarge => (
            ErrorKind::Io,
            "the file system, or this user's limit (ulimit -f), has no files of that size; ext4's have \
             at most 16 TiB: choose a smaller disk, a thin one (.qcow2), or another file system",
        ),
        io::ErrorKind::Interrupted => (ErrorKind::Interrupted, "run the same command again"),
        // It was read through another process: see `Elsewhere`.
        io::ErrorKind::ConnectionReset => (ErrorKind::Io, "run the same command again"),
        _ => (ErrorKind::Io, "check the medium below it and the kernel's log (dmesg)"),
    };
    DiskError::new(kind, what, e.to_string(), help).with_source(e)
}

/// The directory that a file is in.
fn parent_dir(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}
