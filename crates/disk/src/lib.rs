//! Virtual disks: where a guest's blocks really are.
//!
//! A disk is a *translation*. [`Disk::map`] answers from memory, without waiting, where a range
//! of the disk lies; the caller merges neighbours and does the I/O on its own queue. Whatever has
//! to wait (flush, discard, writing zeros) is an `async fn` on the caller's [`Port`].
//!
//! * [`Raw`]: a regular file or a block device, byte for byte.
//! * [`Image`]: a chain of images with metadata: allocation, snapshots, clones.
//! * [`Null`]: reads zeros, forgets writes; for measuring everything above it.

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_io::arena::Span;

mod children;
mod content;
mod error;
mod finding;
mod identity;
mod image;
mod journal;
mod name;
mod null;
mod parents;
mod place;
mod plain;
mod port;
pub mod qcow2;
mod rare;
mod raw;
mod session;
pub mod size;
pub mod tools;
pub mod vhd;

use image::Layer;

pub use error::{DiskError, ErrorKind};
pub use finding::{Class, Counts, Finding, Kind as ProblemKind};
pub use identity::{DiskIdentity, medium_at};
pub use image::{Image, MAX_LAYERS};
pub use name::{Format, ImageName};
pub use null::Null;
pub use parents::{CONFIGURED as CONFIGURED_PARENTS, Parents};
pub use port::Port;
pub use rare::Rare;
pub use raw::{GrowthWatch, Raw};
pub use session::Session;

/// Bytes of a sector, the unit of sizes on the wire (blkif.md 3.3), whatever the medium has.
pub const SECTOR_BYTES: u64 = 512;

/// Bytes of metadata that a disk keeps in memory by default, besides what it cannot do without.
pub const METADATA_BYTES: usize = 16 << 20;

/// Scratch memory in bytes that each thread of a disk with metadata needs.
const SCRATCH_BYTES: usize = 256 << 10;

/// How to open a disk. The default is read-write, and not to wait for its lock.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Open the medium itself read-only (XSA-142: a flag above a writable file is not enough).
    pub read_only: bool,
    /// How long to wait for a holder of the lock to let go; none: fail at once. A process that
    /// takes over from a killed one waits until the dead one's last operation has ended.
    pub wait_for_lock: Option<Duration>,
    /// Where answered changes of metadata are kept until they are durable, so that they survive
    /// the death of this process; on tmpfs. None: they do not.
    pub state_dir: Option<PathBuf>,
    /// There is such a directory, and it cannot be read: the log says so of images of which a
    /// process that died may have left something there.
    pub unseen_state: bool,
    /// Memory in bytes for tables and bitmaps that can be read again.
    pub metadata_bytes: usize,
    /// Use files as block devices are used: they keep their size and their space, and what was
    /// never written in them may be anything.
    pub fixed_size: bool,
    /// Take no locks and mind nobody's: others may be writing to it. Read-only, and what is read
    /// may be stale, or of several moments.
    pub unlocked: bool,
    /// The longest chain that is opened.
    pub max_layers: usize,
    /// Open for writing also what is write-protected by its mode, and what other images stand on:
    /// whoever asks for that sees to it that all of them read what they did before, or knows
    /// better. The kernel has a say in it, too.
    pub even_parent: bool,
    /// Where the image's parents may be.
    pub parents: Parents,
    /// A killed process had it open for writing, and its guest is connected still. Of the images that
    /// may stand on it, those are asked that it knows of itself: the guest waits.
    pub taken_over: bool,
    /// The open file of the image itself, if the caller has that already: whoever has it locked can
    /// open it in no other way, and nobody gets between.
    pub opened: Option<Arc<OwnedFd>>,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            read_only: false,
            wait_for_lock: None,
            state_dir: None,
            unseen_state: false,
            metadata_bytes: METADATA_BYTES,
            fixed_size: false,
            unlocked: false,
            max_layers: MAX_LAYERS,
            even_parent: false,
            parents: Parents::default(),
            taken_over: false,
            opened: None,
        }
    }
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
    /// It takes steps to get there: [`Disk::read`] or [`Disk::write`].
    Slow {
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
    /// A chain of images.
    Image(Image),
    /// No medium at all.
    Null(Null),
}

impl Disk {
    /// Opens and locks `image`: `null:`, `null:SIZE`, or an [`ImageName`]. No image is ever
    /// created, truncated or written by opening.
    ///
    /// # Errors
    /// See [`ErrorKind`]; the text names the image, the reason and the next step.
    pub fn open(
        image: &(impl AsRef<OsStr> + ?Sized),
        options: &OpenOptions,
    ) -> Result<Disk, DiskError> {
        let image = image.as_ref();
        match image.as_bytes().strip_prefix(b"null:") {
            Some(size) => Null::open(&String::from_utf8_lossy(size), options).map(Disk::Null),
            None => Disk::open_image(&ImageName::of_existing(image, None)?, options),
        }
    }

    /// Opens and locks an image whose format is known; see [`open`](Disk::open).
    ///
    /// # Errors
    /// As [`open`](Disk::open).
    pub fn open_image(name: &ImageName, options: &OpenOptions) -> Result<Disk, DiskError> {
        match name.format {
            Format::Raw => Raw::open(&name.path, options).map(Disk::Raw),
            Format::Vhd | Format::Qcow2 => Image::open(name, options).map(Disk::Image),
        }
    }

    /// Whether I/O bypasses the page cache.
    pub fn direct(&self) -> bool {
        self.medium().is_some_and(Raw::direct)
    }

    /// What lies in files; none of a disk without.
    fn medium(&self) -> Option<&Raw> {
        match self {
            Disk::Raw(d) => Some(d),
            Disk::Image(d) => Some(d.medium()),
            Disk::Null(_) => None,
        }
    }

    /// All that it lies in, the leaf first.
    fn media(&self) -> Vec<&Raw> {
        match self {
            Disk::Raw(d) => vec![d],
            Disk::Image(d) => d.layers().iter().map(Layer::medium).collect(),
            Disk::Null(_) => Vec::new(),
        }
    }

    /// The size in sectors of 512 bytes, always a multiple of [`block_bytes`](Disk::block_bytes).
    /// It only ever grows, in [`refresh_size`](Disk::refresh_size).
    pub fn sectors(&self) -> u64 {
        match self {
            Disk::Raw(d) => d.sectors(),
            Disk::Image(d) => d.sectors(),
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
            Disk::Image(d) => d.medium().read_only(),
            Disk::Null(d) => d.read_only(),
        }
    }

    /// Whether only an engine that sends NVMe commands can do its I/O.
    pub fn passthrough(&self) -> bool {
        self.medium().is_some_and(Raw::passthrough)
    }

    /// Offset, length and memory address of every data operation must be multiples of this:
    /// 512 or 4096.
    pub fn block_bytes(&self) -> u32 {
        self.medium().map_or(SECTOR_BYTES as u32, Raw::block_bytes)
    }

    /// Smaller writes than this may cost the medium a read first: a hint for the guest.
    pub fn physical_block_bytes(&self) -> u32 {
        self.medium().map_or(null::PHYSICAL_BLOCK_BYTES, Raw::physical_block_bytes)
    }

    /// What to publish about discard; none: do not offer it.
    pub fn discard_limits(&self) -> Option<DiscardLimits> {
        match self {
            Disk::Raw(d) => d.discard_limits(),
            Disk::Image(d) => d.medium().discard_limits(),
            Disk::Null(d) => d.discard_limits(),
        }
    }

    /// The open files that [`Extent::Data`] names by index. Every queue registers all of them,
    /// in this order, with its own engine, and hands them to the `async` functions in a [`Port`].
    pub fn files(&self) -> Vec<Arc<OwnedFd>> {
        match self {
            Disk::Raw(d) => d.files(),
            Disk::Image(d) => d.files(),
            Disk::Null(_) => Vec::new(),
        }
    }

    /// Translates the beginning of a range; never blocks. What was written where this said is
    /// reported with [`wrote`](Disk::wrote).
    ///
    /// # Panics
    /// If the range is empty or not inside the disk: callers check first, with
    /// [`contains`](Disk::contains).
    pub fn map(&self, offset: u64, len: u64, intent: Intent) -> Extent {
        assert!(len > 0 && self.contains(offset, len), "unchecked range {offset}+{len}");
        match self {
            Disk::Raw(d) => d.map(offset, len, intent),
            Disk::Image(d) => d.map(offset, len, intent),
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
            Disk::Image(_) | Disk::Null(_) => Ok(None),
        }
    }

    /// Tells when [`refresh_size`](Disk::refresh_size) may have something new.
    pub fn growth_watch(&self) -> GrowthWatch {
        match self {
            Disk::Raw(d) => d.growth_watch(),
            Disk::Image(_) | Disk::Null(_) => GrowthWatch::never(),
        }
    }

    /// Scratch memory in bytes that a [`Port`] to this disk needs; 0: none.
    pub fn scratch_bytes(&self) -> usize {
        match self {
            Disk::Image(_) => SCRATCH_BYTES,
            Disk::Raw(_) | Disk::Null(_) => 0,
        }
    }

    /// Whether the disk has metadata, so that translating can hit or miss what is in memory.
    pub fn has_metadata(&self) -> bool {
        matches!(self, Disk::Image(_))
    }

    /// The kernel has been given the data of a range that was written where
    /// [`map`](Disk::map) said: readers see it from now on, and it survives the death of this
    /// process. To be called before the write is answered. Memory only, never blocks.
    pub fn wrote(&self, offset: u64, len: u64) {
        if let Disk::Image(d) = self {
            d.wrote(offset, len);
        }
    }

    /// Whether there are answered changes that only this host's memory has, because no flush came
    /// since: a [`flush`](Disk::flush) writes them down. A look at memory.
    pub fn is_unsaved(&self) -> bool {
        matches!(self, Disk::Image(d) if d.is_unsaved())
    }

    /// Whether a parent has answered writes of a killed process that only this host's memory knows
    /// of: [`Session::adopt`] is due before the disk is used.
    pub fn is_unsettled(&self) -> bool {
        matches!(self, Disk::Image(d) if !self.read_only() && !d.unsettled().is_empty())
    }

    /// Reads a range, whatever steps that takes.
    ///
    /// # Errors
    /// `InvalidInput`: not inside the disk. `InvalidData`: metadata is damaged. Others as the
    /// kernel gives them.
    pub async fn read(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        if !self.contains(offset, buf.len() as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match self {
            Disk::Raw(_) => port.io.read_exact(port.files[0], offset, buf).await,
            Disk::Image(d) => d.read(port, offset, buf).await,
            Disk::Null(_) => {
                port.memory().fill(buf, 0);
                Ok(())
            }
        }
    }

    /// Writes a range, whatever steps that takes. It is visible, and survives the death of this
    /// process, when this returns `Ok`; [`flush`](Disk::flush) makes it durable.
    ///
    /// # Errors
    /// As [`read`](Disk::read); `PermissionDenied`: read-only; `StorageFull`.
    pub async fn write(&self, port: &Port, offset: u64, buf: Span) -> io::Result<()> {
        self.check_change(offset, buf.len() as u64)?;
        match self {
            Disk::Raw(_) => port.io.write_all(port.files[0], offset, buf).await,
            Disk::Image(d) => d.write(port, offset, buf).await,
            Disk::Null(_) => Ok(()),
        }
    }

    /// Everything written before is on the medium when this returns `Ok`.
    ///
    /// # Errors
    /// As the kernel gives them. It reports a lost write once only, so the caller must not take
    /// a later success for good (blkif.md 2, rule 3).
    pub async fn flush(&self, port: &Port) -> io::Result<()> {
        match self {
            Disk::Raw(d) => d.flush(&port.io, &port.files).await,
            Disk::Image(_) if self.read_only() => Ok(()),
            Disk::Image(d) => d.flush(port).await,
            Disk::Null(_) => Ok(()),
        }
    }

    /// The last thing to be done with a disk: a flush, and what makes its image complete for
    /// other programs. Nothing may be under way.
    ///
    /// # Errors
    /// As [`flush`](Disk::flush).
    pub async fn close(&self, port: &Port) -> io::Result<()> {
        match self {
            Disk::Image(d) if !self.read_only() => d.close(port).await,
            _ => self.flush(port).await,
        }
    }

    /// Lets others open what was [closed](Disk::close), while this process still has it open.
    /// Nothing may be written from now on. A block device stays claimed until it is dropped.
    pub fn unlock(&self) {
        match self {
            Disk::Raw(d) => d.unlock(),
            Disk::Image(d) => d.layers().iter().for_each(|layer| layer.medium().unlock()),
            Disk::Null(_) => {}
        }
    }

    /// Tells the medium that a range is not needed any more. It reads as zeros or as before, or,
    /// in an image with a parent, as the parent; bytes outside of it are never touched, however it
    /// is aligned (threats.md T20).
    ///
    /// # Errors
    /// `Unsupported`: this medium cannot, and will not later. `PermissionDenied`: read-only.
    /// `InvalidInput`: not inside the disk. Others as the kernel gives them.
    pub async fn discard(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        self.check_change(offset, len)?;
        let mut done = 0;
        while done < len {
            done += self.discard_part(port, offset + done, len - done).await?;
            port.io.yield_to_others().await;
        }
        Ok(())
    }

    /// The beginning of a [`discard`](Disk::discard): a bounded amount of work, however long the
    /// range is and whatever the image has in it. Gives the bytes that are done; 0: metadata was
    /// read, go on. Between two parts callers [let others go first][yield], and may end.
    ///
    /// [yield]: ferrite_io::reactor::Io::yield_to_others
    ///
    /// # Errors
    /// As [`discard`](Disk::discard).
    pub async fn discard_part(&self, port: &Port, offset: u64, len: u64) -> io::Result<u64> {
        self.check_change(offset, len)?;
        match self {
            Disk::Raw(d) => d.discard_part(&port.io, &port.files, offset, len).await,
            Disk::Image(d) => d.discard_part(port, offset, len).await,
            Disk::Null(_) => Ok(len),
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
        port: &Port,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        self.check_change(offset, len)?;
        match self {
            Disk::Raw(d) => d.write_zeroes(&port.io, &port.files, offset, len, zeros).await,
            Disk::Image(d) => d.write_zeroes(port, offset, len, zeros).await,
            Disk::Null(_) => Ok(()),
        }
    }

    /// The second line of defence for ranges and read-only disks (threats.md T10).
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
            Disk::Image(d) => d.fmt(f),
            Disk::Null(d) => d.fmt(f),
        }
    }
}
