//! Operations on images that nobody is using: made, copied, merged, looked at. `ferrite image`
//! is a command line for this, and the simulator cuts its power.
//!
//! Each operation is a function of a [`ImageTools`], whatever the formats are. Those that make or
//! replace files keep to one order, so that a crash at any point leaves every name with an image
//! that was whole before or is whole now:
//! 1. the new image is written under a temporary name beside its own, and synced,
//! 2. it gets its name by one operation on the directory, which is then synced.

#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, MAX_LAYERS, OpenOptions, Parents};
use ferrite_host::directory::Directory;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;

mod check;
mod coalesce;
mod compare;
mod convert;
mod copy;
mod create;
mod extents;
mod files;
mod formats;
mod info;
mod io_context;
mod journals;
mod rebase;
mod report;
mod resize;
mod resume;
mod spec;
pub mod stores;
mod undo;
mod upgrade;
mod volumes;

/// The longest chain that is read and merged here, so that one that is too long to be served can be
/// made shorter. Each image takes a descriptor.
const MAX_LAYERS_OFFLINE: usize = 4 * MAX_LAYERS;

pub use convert::Convert;
pub use rebase::Rebase;
pub use report::*;
pub use resize::NewSize;
pub use spec::NewImage;

/// Where operations get what they need of their world.
pub struct ImageTools<'a> {
    /// Entries of directories are changed through this.
    pub directory: &'a dyn Directory,
    /// Opens what does the I/O.
    pub engine: &'a dyn Fn(Arc<Arena>) -> io::Result<Box<dyn Engine>>,
    /// See [`OpenOptions::state_dir`]. One that this user may not read is not used, see
    /// [`OpenOptions::unseen_state`].
    pub state_dir: Option<PathBuf>,
    /// See [`OpenOptions::fixed_size`].
    pub fixed_size: bool,
    /// Look at images that others are using: see [`OpenOptions::unlocked`]. What is written is
    /// locked all the same.
    pub unlocked: bool,
    /// See [`OpenOptions::parents`].
    pub parents: Parents,
    /// Told now and then how far it is. `false`: stop in good order, as soon as possible.
    pub progress: &'a dyn Fn(Progress) -> bool,
}

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the disk that are behind.
    pub done_bytes: u64,
    /// Bytes of the disk.
    pub total_bytes: u64,
}

impl ImageTools<'_> {
    fn options(&self, read_only: bool) -> OpenOptions {
        // What a process at work has in its journal changes under whoever reads it.
        let used = self.state_dir.as_deref().filter(|_| !self.unlocked);
        let state_dir = used.filter(|dir| is_readable(dir)).map(Path::to_owned);
        let unseen_state = used.is_some() && state_dir.is_none();
        OpenOptions { state_dir, unseen_state, ..self.medium_options(read_only) }
    }

    /// The state directory, if it can be read.
    fn readable_state(&self) -> Option<&Path> {
        self.state_dir.as_deref().filter(|dir| is_readable(dir))
    }

    /// For what is not opened as a disk that may have been in use: no journal.
    fn medium_options(&self, read_only: bool) -> OpenOptions {
        OpenOptions {
            read_only,
            fixed_size: self.fixed_size,
            unlocked: self.unlocked && read_only,
            max_layers: MAX_LAYERS_OFFLINE,
            parents: self.parents.clone(),
            ..OpenOptions::default()
        }
    }

    /// For what is written to although other images stand on it: they read the same afterwards, or
    /// are to be lost.
    fn even_parents(options: OpenOptions) -> OpenOptions {
        OpenOptions { even_parent: true, ..options }
    }

    fn open(&self, name: &ImageName, read_only: bool) -> Result<Disk, DiskError> {
        match read_only {
            true => Disk::open_image(name, &self.options(true)),
            false => ImageTools::open_to_write(name, &self.options(false)),
        }
    }

    /// Opens a disk for writing that can be read. Who opens it for writing begins a journal, which
    /// would stay if it turned out later that a parent is missing.
    fn open_to_write(name: &ImageName, options: &OpenOptions) -> Result<Disk, DiskError> {
        drop(Disk::open_image(name, &OpenOptions { read_only: true, ..options.clone() })?);
        Disk::open_image(name, options)
    }
}

/// Whether this user may read a directory, if it is there.
pub fn is_readable(dir: &Path) -> bool {
    !dir.read_dir().is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
}

/// It would take something away, and was not told to.
fn refused(what: String, why: impl Into<String>, help: &str) -> DiskError {
    DiskError::new(ErrorKind::Refused, what, why, help)
}

/// It is not what this operation can work on.
fn unsuitable(what: String, why: impl Into<String>, help: &str) -> DiskError {
    DiskError::new(ErrorKind::Unsuitable, what, why, help)
}

const DAMAGED: &str =
    "it is damaged: ferrite image check, or of a volume ferrite store check, says where";

/// The kernel, or an image's metadata, stopped it.
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
        io::ErrorKind::Interrupted => (ErrorKind::Interrupted, "run the same command again"),
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
