//! Virtual disks: where a guest's blocks really are.
//!
//! A disk is a *translation*. [`Disk::map`] answers from memory, without waiting, where a range
//! of the disk lies; the caller merges neighbours and does the I/O on its own queue. Whatever has
//! to wait (flush, discard, writing zeros) is an `async fn` on the caller's [`Io`].
//!
//! * [`Raw`]: a regular file or a block device, byte for byte.
//! * [`Null`]: reads zeros, forgets writes; for measuring everything above it.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;
use ferrite_io::reactor::Io;

mod error;
mod null;
mod raw;
pub mod size;

pub use error::{DiskError, ErrorKind};
pub use null::Null;
pub use raw::{GrowthWatch, Raw};

/// Bytes of a sector, the unit of sizes on the wire (blkif.md 3.3), whatever the medium has.
pub const SECTOR_BYTES: u64 = 512;

/// How to open a disk. The default is read-write, and not to wait for its lock.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Open the medium itself read-only (XSA-142: a flag above a writable file is not enough).
    pub read_only: bool,
    /// How long to wait for a holder of the lock to let go; none: fail at once. A process that
    /// takes over from a killed one waits until the dead one's last operation has ended.
    pub wait_for_lock: Option<Duration>,
}

/// What the caller of [`Disk::map`] is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Read the range.
    Read,
    /// Write the range.
    Write,
}

/// The beginning of a range, translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The bytes are in a file.
    Data {
        /// Index into [`Disk::files`].
        file: usize,
        /// Byte offset in that file.
        offset: u64,
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
    /// Reads give zeros; writes vanish.
    Zeros {
        /// Bytes, from the start of the range asked for.
        len: u64,
    },
}

/// What a guest is told about discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardLimits {
    /// Smaller pieces than this free nothing.
    pub granularity_bytes: u32,
    /// Offset of the first whole piece.
    pub alignment_bytes: u32,
}

/// One open disk, shared by the threads of its queues.
#[derive(Debug)]
pub enum Disk {
    /// A file or block device, byte for byte.
    Raw(Raw),
    /// No medium at all.
    Null(Null),
}

impl Disk {
    /// Opens and locks `image`: `null:`, `null:SIZE`, or the path of a raw file or block device.
    /// Nothing is ever created, truncated or written by opening.
    ///
    /// # Errors
    /// See [`ErrorKind`]; the text names the image, the reason and the next step.
    pub fn open(image: &str, options: &OpenOptions) -> Result<Disk, DiskError> {
        match image.strip_prefix("null:") {
            Some(size) => Null::open(size, options).map(Disk::Null),
            None => Raw::open(image.as_ref(), options).map(Disk::Raw),
        }
    }

    /// The size in sectors of 512 bytes, always a multiple of [`block_bytes`](Disk::block_bytes).
    /// It only ever grows, in [`refresh_size`](Disk::refresh_size).
    pub fn sectors(&self) -> u64 {
        match self {
            Disk::Raw(d) => d.sectors(),
            Disk::Null(d) => d.sectors(),
        }
    }

    /// Whether the range lies inside the disk. Everything a guest asks for goes through this
    /// before it gets to [`map`](Disk::map).
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.sectors() * SECTOR_BYTES)
    }

    /// Whether writes are refused by the medium.
    pub fn read_only(&self) -> bool {
        match self {
            Disk::Raw(d) => d.read_only(),
            Disk::Null(d) => d.read_only(),
        }
    }

    /// Whether only an engine that sends NVMe commands can do its I/O.
    pub fn passthrough(&self) -> bool {
        match self {
            Disk::Raw(d) => d.passthrough(),
            Disk::Null(_) => false,
        }
    }

    /// Offset, length and memory address of every data operation must be multiples of this:
    /// 512 or 4096.
    pub fn block_bytes(&self) -> u32 {
        match self {
            Disk::Raw(d) => d.block_bytes(),
            Disk::Null(_) => SECTOR_BYTES as u32,
        }
    }

    /// Smaller writes than this may cost the medium a read first: a hint for the guest.
    pub fn physical_block_bytes(&self) -> u32 {
        match self {
            Disk::Raw(d) => d.physical_block_bytes(),
            Disk::Null(_) => null::PHYSICAL_BLOCK_BYTES,
        }
    }

    /// What to publish about discard; none: do not offer it.
    pub fn discard_limits(&self) -> Option<DiscardLimits> {
        match self {
            Disk::Raw(d) => d.discard_limits(),
            Disk::Null(d) => d.discard_limits(),
        }
    }

    /// The open files that [`Extent::Data`] names by index. Every queue registers all of them,
    /// in this order, with its own engine, and hands the [`FileId`]s to the `async` functions.
    pub fn files(&self) -> Vec<Arc<OwnedFd>> {
        match self {
            Disk::Raw(d) => d.files(),
            Disk::Null(_) => Vec::new(),
        }
    }

    /// Translates the beginning of a range; never blocks.
    ///
    /// # Panics
    /// If the range is empty or not inside the disk: callers check first, with
    /// [`contains`](Disk::contains).
    pub fn map(&self, offset: u64, len: u64, intent: Intent) -> Extent {
        assert!(len > 0 && self.contains(offset, len), "unchecked range {offset}+{len}");
        match self {
            Disk::Raw(d) => d.map(offset, len, intent),
            Disk::Null(_) => Extent::Zeros { len },
        }
    }

    /// Looks whether the medium has grown. Some: the new size in sectors, which
    /// [`sectors`](Disk::sectors) gives from now on. A medium that has shrunk keeps its size
    /// here (what is gone fails as it is used) and is reported once in the log.
    ///
    /// # Errors
    /// The medium's size could not be read.
    pub fn refresh_size(&self) -> Result<Option<u64>, DiskError> {
        match self {
            Disk::Raw(d) => d.refresh_size(),
            Disk::Null(_) => Ok(None),
        }
    }

    /// Tells when [`refresh_size`](Disk::refresh_size) may have something new.
    pub fn growth_watch(&self) -> GrowthWatch {
        match self {
            Disk::Raw(d) => d.growth_watch(),
            Disk::Null(_) => GrowthWatch::never(),
        }
    }

    /// Everything written before is on the medium when this returns `Ok`.
    ///
    /// # Errors
    /// As the kernel gives them. It reports a lost write once only, so the caller must not take
    /// a later success for good (design.md, traps).
    pub async fn flush(&self, io: &Io, files: &[FileId]) -> io::Result<()> {
        match self {
            Disk::Raw(d) => d.flush(io, files).await,
            Disk::Null(_) => Ok(()),
        }
    }

    /// Tells the medium that a range is not needed any more. It reads as zeros or as before;
    /// bytes outside of it are never touched, however it is aligned (security.md T20).
    ///
    /// # Errors
    /// `Unsupported`: this medium cannot, and will not later. `PermissionDenied`: read-only.
    /// `InvalidInput`: not inside the disk. Others as the kernel gives them.
    pub async fn discard(
        &self,
        io: &Io,
        files: &[FileId],
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.check_change(offset, len)?;
        match self {
            Disk::Raw(d) => d.discard(io, files, offset, len).await,
            Disk::Null(_) => Ok(()),
        }
    }

    /// Makes a range read as zeros, by the cheapest means the medium has; at the last, by
    /// writing `zeros`, memory full of zeros whose length is a multiple of
    /// [`block_bytes`](Disk::block_bytes), over and over.
    ///
    /// # Errors
    /// `PermissionDenied`: read-only. `InvalidInput`: not inside the disk, or not aligned to
    /// [`block_bytes`](Disk::block_bytes). Others as the kernel gives them.
    pub async fn write_zeroes(
        &self,
        io: &Io,
        files: &[FileId],
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        self.check_change(offset, len)?;
        match self {
            Disk::Raw(d) => d.write_zeroes(io, files, offset, len, zeros).await,
            Disk::Null(_) => Ok(()),
        }
    }

    /// The second line of defence for ranges and read-only disks (security.md T10).
    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.read_only() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if !self.contains(offset, len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(())
    }
}

/// One line for people: what was opened, its size, and how it is accessed.
impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disk::Raw(d) => d.fmt(f),
            Disk::Null(d) => d.fmt(f),
        }
    }
}
