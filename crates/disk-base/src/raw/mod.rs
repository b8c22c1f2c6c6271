//! A regular file or a block device, byte for byte.

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ferrite_host::nvme::Namespace;
use ferrite_io::arena::Span;
use rustix::fs::{SeekFrom, fstat, fstatvfs, seek};
use rustix::io::{Errno, pread};

use crate::error::READ_ONLY;
use crate::size::Human;
use crate::writeback::{Commits, SyncWitness};
use crate::{DiscardLimits, DiskError, ErrorKind, Extent, OpenOptions, Port, SECTOR_BYTES};

#[cfg(feature = "testing")]
mod checked;
mod discard;
mod fence;
mod geometry;
mod growth;
mod hold;
mod holder;
mod lock;
mod loops;
mod medium;
mod merging;
mod proc_locks;
mod qemu;
mod runs;
mod tail;
mod toolstack;
mod tracked;
mod zero;

#[cfg(feature = "testing")]
pub use checked::{Checked, TestCheck};
use fence::Fence;
use geometry::Geometry;
pub use growth::GrowthWatch;
use hold::Hold;
use lock::Opened;
pub use lock::Unopened;
use medium::{Medium, Use, cannot_open, io_error};
pub(crate) use proc_locks::flock_holder;
pub use runs::Run;
#[cfg(feature = "testing")]
pub use runs::testing::questions;
use runs::{Runs, lseek};

/// The bytes of an image that are read at once when it is only examined: mostly all that is needed.
const GLANCE_BYTES: usize = 4096;

/// How often in a row a flush may be interrupted, or lack the kernel's resources.
const FLUSH_RETRIES: u32 = 16;

/// The space of the file system that a file is on, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceBelow {
    /// The free bytes of the file system.
    pub free_bytes: u64,
    /// The bytes that this file takes of it.
    pub taken_bytes: u64,
}

/// An open and locked raw image.
#[derive(Debug)]
pub struct Raw {
    /// The reservation of a LUN: the first to be dropped.
    fence: Option<Fence>,
    file: Arc<OwnedFd>,
    path: PathBuf,
    medium: Medium,
    inode: (u64, u64),
    /// The file is used as a device: see [`OpenOptions::fixed_size`].
    fixed_size: bool,
    read_only: bool,
    /// QEMU's locks are held, or not wanted.
    has_qemus_locks: Mutex<bool>,
    geometry: Geometry,
    sectors: AtomicU64,
    /// Where the sector begins that the file had only a part of: see [`OpenOptions::odd_size`].
    tail: u64,
    shrink_reported: AtomicBool,
    discard: Option<discard::Discard>,
    /// The keeper's holds.
    holds: Vec<Hold>,
    /// The first bytes of a medium that is only examined.
    head: Vec<u8>,
    /// The means of [`zero`] that the medium lacks.
    zero_lacks: AtomicU8,
    /// The means of zeroing that the medium is known to have, before one was tried.
    zero_has: u8,
    /// Zeros and discards leave the space where it is: see [`OpenOptions::keep_allocated`].
    keeps_space: AtomicBool,
    /// See [`OpenOptions::thin`].
    thin: bool,
    /// The known runs of data and holes of the file.
    runs: Box<Runs>,
    /// The commits of a raw disk.
    commits: Box<Commits>,
    /// The maps of the disk's changes, if its image has any.
    maps: Box<tracked::Maps>,
    /// A test's check of its data.
    #[cfg(feature = "testing")]
    pub checked: checked::Checked,
}

impl Raw {
    /// Opens and locks a raw disk on this file or device, as the options say. Errors are found before anything else is
    /// done, and nothing is written. Crate `images` checks for children, not this.
    ///
    /// # Errors
    /// See [`Unopened`].
    pub fn lock_disk(path: &Path, options: &OpenOptions) -> Result<Raw, Unopened> {
        Raw::lock(path, options, Use::Disk)
    }

    /// Opens and locks the medium of an image with metadata, which may be yet to be made: of any size, and accessed in
    /// sectors. Children are not checked.
    ///
    /// # Errors
    /// See [`Unopened`].
    pub fn lock_medium(path: &Path, options: &OpenOptions) -> Result<Raw, Unopened> {
        Raw::lock(path, options, Use::Medium)
    }

    /// Opens and locks the medium of a store: of any size, and accessed in blocks of 4096 bytes. Children are not
    /// checked.
    ///
    /// # Errors
    /// See [`Unopened`].
    pub fn lock_store(path: &Path, options: &OpenOptions) -> Result<Raw, Unopened> {
        Raw::lock(path, options, Use::Store)
    }

    fn lock(path: &Path, options: &OpenOptions, use_: Use) -> Result<Raw, Unopened> {
        let opened = lock::open(path, options)?;
        if use_ != Use::Disk && opened.medium == Medium::Nvme {
            let why = "images and stores cannot be used by NVMe commands";
            let help = "name its block device (/dev/nvmeXnY) instead";
            return Err(DiskError::new(ErrorKind::Unsuitable, cannot_open(path), why, help).into());
        }
        let namespace = match opened.medium {
            Medium::Nvme => Some(namespace(path, &opened, options.read_only)?),
            _ => None,
        };
        let bytes = size_bytes(&opened.file, opened.medium)
            .map_err(|e| io_error(path, "its size could not be read", e))?;
        if use_ == Use::Disk {
            let is_odd = options.odd_size && opened.medium == Medium::File;
            check_size(path, bytes, is_odd)?;
        }
        let geometry = match &namespace {
            Some(namespace) => Geometry::of_namespace(namespace),
            None => Geometry::choose(&opened, bytes, use_)
                .map_err(|e| io_error(path, "its access mode could not be set", e))?,
        };
        if let Some(reason) = &geometry.buffered_because {
            tracing::info!(image = %path.display(), reason, "the page cache is used for this image");
        }
        let discard = match &namespace {
            _ if options.read_only || options.keep_allocated => None,
            Some(namespace) => discard::Discard::of_namespace(namespace),
            None => discard::Discard::of(&opened, options.fixed_size),
        };
        let fence = Fence::take(path, &opened.file, options)?;
        let zero_has = if options.read_only { 0 } else { zero::known(&opened) };
        let inode = inode(&opened.file, opened.medium)
            .map_err(|e| io_error(path, "it could not be told from others", e))?;
        Ok(Raw {
            fence,
            file: opened.file,
            inode,
            path: path.to_owned(),
            medium: opened.medium,
            fixed_size: options.fixed_size,
            read_only: options.read_only,
            has_qemus_locks: Mutex::new(!options.qemu_first),
            geometry,
            sectors: AtomicU64::new(tail::sectors(bytes, use_)),
            tail: tail::begins_at(bytes, use_),
            shrink_reported: AtomicBool::new(false),
            discard,
            holds: opened.holds,
            head: Vec::new(),
            zero_has,
            zero_lacks: AtomicU8::new(0),
            keeps_space: AtomicBool::new(options.keep_allocated),
            thin: options.thin,
            runs: Box::new(Runs::new(options.is_read_unchanged())),
            commits: Box::default(),
            maps: Box::default(),
            #[cfg(feature = "testing")]
            checked: checked::Checked::default(),
        })
    }

    /// Opens a file or device to read metadata, without a lock: other users are not blocked, and the data may change
    /// meanwhile. `None`: it is neither a file nor a block device.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn glance(path: &Path) -> std::io::Result<Option<Raw>> {
        Raw::glance_as(path, false)
    }

    /// [`glance`](Self::glance), and a device is read past this host's page cache: another host may have written it, or
    /// a process by another device that is mapped to it.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn glance_fresh(path: &Path) -> std::io::Result<Option<Raw>> {
        Raw::glance_as(path, true)
    }

    fn glance_as(path: &Path, fresh: bool) -> std::io::Result<Option<Raw>> {
        let Some(opened) = lock::glance(path, fresh)? else { return Ok(None) };
        let bytes = size_bytes(&opened.file, opened.medium)?;
        let inode = inode(&opened.file, opened.medium)?;
        let mut raw = Raw {
            fence: None,
            file: opened.file,
            inode,
            path: path.to_owned(),
            medium: opened.medium,
            fixed_size: false,
            read_only: true,
            has_qemus_locks: Mutex::new(true),
            geometry: Geometry::of_glance(),
            sectors: AtomicU64::new(bytes / SECTOR_BYTES),
            tail: u64::MAX,
            shrink_reported: AtomicBool::new(false),
            discard: None,
            holds: opened.holds,
            head: Vec::new(),
            zero_has: 0,
            zero_lacks: AtomicU8::new(0),
            keeps_space: AtomicBool::new(false),
            thin: false,
            runs: Box::new(Runs::new(false)),
            commits: Box::default(),
            maps: Box::default(),
            #[cfg(feature = "testing")]
            checked: checked::Checked::default(),
        };
        raw.head = raw.read_now(0, GLANCE_BYTES)?;
        Ok(Some(raw))
    }

    /// Its path, as it was named.
    #[inline]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it can grow, be punched and be cut off.
    #[inline]
    pub fn is_file(&self) -> bool {
        self.medium == Medium::File && !self.fixed_size
    }

    /// Whether it can be synced while opened read-only: an NVMe flush is a command.
    pub fn can_sync_read_only(&self) -> bool {
        self.medium != Medium::Nvme
    }

    /// Device and inode of a file; the number of a block device, and 0.
    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// The open file, to be examined.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Asks for the size in bytes.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn bytes_now(&self) -> std::io::Result<u64> {
        Ok(size_bytes(&self.file, self.medium)?)
    }

    /// Asks for the bytes that a file takes on its file system; of a device, for its size.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn disk_bytes(&self) -> std::io::Result<u64> {
        if !self.is_file() {
            return self.bytes_now();
        }
        let stat = fstat(&self.file)?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }

    /// The space of the file system that a file is on. `None`: it is no file, or that is not known.
    pub fn space_below(&self) -> Option<SpaceBelow> {
        let below = self.is_file().then(|| fstatvfs(&self.file).ok())??;
        let free_bytes = below.f_bavail.saturating_mul(below.f_frsize);
        Some(SpaceBelow { free_bytes, taken_bytes: self.disk_bytes().ok()? })
    }

    /// Reads `len` bytes, or as many as there are, while the caller waits: for opening images, when there is no
    /// reactor yet.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn read_now(&self, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
        let end = usize::try_from(offset).ok().and_then(|at| Some((at, at.checked_add(len)?)));
        if let Some(known) = end.and_then(|(at, end)| self.head.get(at..end)) {
            return Ok(known.to_owned());
        }
        const ALIGN: usize = 4096;
        let before = offset as usize % ALIGN;
        let (from, span) = (offset - before as u64, (before + len).next_multiple_of(ALIGN));
        let mut memory = vec![0u8; span + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        let (mut got, mut retries) = (0, 0);
        while got < span {
            match pread(&self.file, &mut memory[start + got..start + span], from + got as u64) {
                Ok(0) => break,
                // A partial block is followed by the end of the file.
                Ok(n) if !n.is_multiple_of(SECTOR_BYTES as usize) => {
                    got += n;
                    break;
                }
                Ok(n) => got += n,
                Err(Errno::INTR | Errno::AGAIN) if retries < FLUSH_RETRIES => retries += 1,
                Err(e) => return Err(e.into()),
            }
        }
        memory.truncate(start + got.min(before + len));
        Ok(memory.split_off((start + before).min(memory.len())))
    }

    /// The size in sectors of 512 bytes, as last read.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Acquire)
    }

    /// Whether it was opened for reading only.
    #[inline]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Offset, length and memory address of every operation are multiples of this: 512 or 4096 bytes.
    #[inline]
    pub fn block_bytes(&self) -> u32 {
        self.geometry.block_bytes
    }

    /// Physical block size in bytes. Smaller writes may cost the medium a read first.
    #[inline]
    pub fn physical_block_bytes(&self) -> u32 {
        self.geometry.physical_block_bytes
    }

    /// Whether I/O bypasses the page cache.
    #[inline]
    pub fn direct(&self) -> bool {
        self.geometry.buffered_because.is_none()
    }

    /// Whether only an engine that sends NVMe commands can do its I/O.
    #[inline]
    pub fn passthrough(&self) -> bool {
        self.medium == Medium::Nvme
    }

    /// The discard values for a guest. `None`: the medium has no discard.
    pub fn discard_limits(&self) -> Option<DiscardLimits> {
        self.discard.as_ref().and_then(discard::Discard::limits)
    }

    /// Whether a file has space for whole blocks between two places, as far as its file system
    /// tells; a device has no holes.
    pub fn has_space_for(&self, from: u64, to: u64) -> bool {
        const BLOCK: u64 = 4096;
        let (from, to) = (from.next_multiple_of(BLOCK), to / BLOCK * BLOCK);
        match lseek(&self.file, SeekFrom::Data(from)) {
            Ok(at) => at < to,
            Err(Errno::NXIO) => false,
            Err(_) => from < to,
        }
    }

    /// The next part of a file, from a place on, that may have data: all of it, if the file system does not tell.
    pub fn data_from(&self, from: u64) -> Option<Range<u64>> {
        match lseek(&self.file, SeekFrom::Data(from)) {
            Ok(data) => Some(data..lseek(&self.file, SeekFrom::Hole(data)).unwrap_or(u64::MAX)),
            Err(Errno::NXIO) => None,
            Err(_) => Some(from..u64::MAX),
        }
    }

    /// Whether new parts of an image get space before data are written to them.
    pub fn reserves_space(&self) -> bool {
        !self.thin
    }

    /// From now on zeros that are written leave the space where it is: see [`OpenOptions::keep_allocated`].
    pub fn keep_allocated(&self) {
        self.keeps_space.store(true, Ordering::Relaxed);
    }

    /// Whether zeros that are written leave the space where it is.
    pub fn keeps_allocated(&self) -> bool {
        self.keeps_space.load(Ordering::Relaxed)
    }

    /// Takes QEMU's locks, unless they are held. `false`: QEMU, or one of its tools, has the image open.
    pub fn shut_out_qemu(&self) -> bool {
        let mut has = self.has_qemus_locks.lock().unwrap_or_else(PoisonError::into_inner);
        // Not again: even a failed attempt holds locks for a moment.
        if !*has {
            *has = lock::share_with_qemu(&self.path, &self.file, self.read_only);
            if !*has {
                lock::stand_back(&self.file);
            }
        }
        *has
    }

    /// Has a keeper keep the file open when this process dies.
    pub fn keep(&self) {
        self.holds.iter().for_each(Hold::keep);
    }

    /// Has a keeper close the file.
    pub fn let_go(&self) {
        self.holds.iter().for_each(Hold::release);
    }

    /// The open file, for an engine.
    pub fn files(&self) -> Vec<Arc<OwnedFd>> {
        vec![self.file.clone()]
    }

    /// The place of a range: the same offset in the file.
    #[inline]
    pub fn map(&self, offset: u64, len: u64) -> Extent {
        if offset + len > self.tail {
            return self.map_at_tail(offset, len);
        }
        Extent::Data { file: 0, offset, len }
    }

    /// Reads whether the medium has grown. `Some`: the new size in sectors. An image that ends within a block (another
    /// process is making it longer) counts up to its last whole block.
    ///
    /// # Errors
    /// The size could not be read.
    pub fn refresh_size(&self) -> Result<Option<u64>, DiskError> {
        let bytes = size_bytes(&self.file, self.medium)
            .map_err(|e| io_error(&self.path, "its size could not be read", e))?;
        let block = u64::from(self.geometry.block_bytes);
        let now = bytes / block * block / SECTOR_BYTES;
        let before = self.sectors.fetch_max(now, Ordering::AcqRel);
        if now < before && !self.shrink_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                image = %self.path.display(),
                "the image has shrunk from {} to {} sectors while in use; the guest keeps the old \
                 size, and what is gone reads as errors",
                before,
                now,
            );
        }
        Ok((now > before).then_some(now))
    }

    /// A watch that notifies when the medium may have grown.
    pub fn growth_watch(&self) -> GrowthWatch {
        GrowthWatch::of(&self.file, self.medium)
    }

    /// Fills `buf` with the data at `offset`.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub async fn read(&self, port: &Port, offset: u64, buf: Span) -> std::io::Result<()> {
        if offset + buf.len() as u64 > self.tail {
            self.read_with_tail(port, offset, buf).await?;
        } else {
            port.io.read_exact(port.files[0], offset, buf).await?;
        }
        #[cfg(feature = "testing")]
        self.checked.demand(port.memory(), offset, buf)?;
        Ok(())
    }

    /// Makes all written data durable. Concurrent flushes share syncs.
    ///
    /// # Errors
    /// Errors of the kernel, once it has failed for good.
    pub async fn flush(&self, port: &Port) -> std::io::Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.commits.join(&port.io, self.commits.sync(port)).await
    }

    /// Has `witness` told of each failed sync of this medium.
    pub fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        self.commits.witness(witness);
    }

    /// Whether a sync of [`flush`](Self::flush) has failed.
    #[inline]
    pub fn is_faulty(&self) -> bool {
        self.commits.is_faulty()
    }
}

/// The present size of the medium. For a device this moves the file position, which nothing uses.
fn size_bytes(file: &OwnedFd, medium: Medium) -> rustix::io::Result<u64> {
    match medium {
        Medium::File => Ok(u64::try_from(fstat(file)?.st_size).unwrap_or(0)),
        Medium::BlockDevice => seek(file, SeekFrom::End(0)),
        Medium::Nvme => match Namespace::of(file.as_fd()) {
            Ok(namespace) => Ok(namespace.bytes),
            Err(e) => Err(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        },
    }
}

/// The controller's description of an NVMe namespace, if it can be used by commands.
fn namespace(path: &Path, opened: &Opened, read_only: bool) -> Result<Namespace, DiskError> {
    let refuse =
        |kind, why: String, help: &str| Err(DiskError::new(kind, cannot_open(path), why, help));
    match Namespace::of(opened.file.as_fd()) {
        Ok(found) if found.write_protected && !read_only => refuse(
            ErrorKind::Permission,
            "the namespace is write-protected".into(),
            &format!("{READ_ONLY}, or lift the protection"),
        ),
        Ok(found) => Ok(found),
        Err(e) => refuse(
            ErrorKind::Unsuitable,
            format!("it cannot be used by NVMe commands: {e}"),
            "name its block device (/dev/nvmeXnY) instead",
        ),
    }
}

fn check_size(path: &Path, bytes: u64, is_odd: bool) -> Result<(), DiskError> {
    let refuse = |why: String, help: &str| {
        Err(DiskError::new(ErrorKind::Unsuitable, cannot_open(path), why, help))
    };
    if bytes == 0 {
        return refuse(
            "it is empty".into(),
            "give it a size first (ferrite image create --force raw:FILE 16G), or insert a medium",
        );
    }
    if !bytes.is_multiple_of(SECTOR_BYTES) && !is_odd {
        return refuse(
            format!("its size, {bytes} bytes, is not a multiple of 512"),
            "check that it is a raw disk image and complete; if it is, make it longer with \
             truncate -s %512 FILE",
        );
    }
    Ok(())
}

fn inode(file: &OwnedFd, medium: Medium) -> rustix::io::Result<(u64, u64)> {
    let stat = fstat(file)?;
    Ok(match medium {
        Medium::File => (stat.st_dev, stat.st_ino),
        Medium::BlockDevice | Medium::Nvme => (stat.st_rdev, 0),
    })
}

impl fmt::Display for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let medium = match self.medium {
            Medium::File => "raw file",
            Medium::BlockDevice => "block device",
            Medium::Nvme => "NVMe namespace",
        };
        let mode = if self.read_only { "read-only" } else { "read-write" };
        let size = Human(self.sectors() * SECTOR_BYTES);
        write!(f, "{medium} {}, {size}, {mode}, {}, ", self.path.display(), self.geometry)?;
        match self.discard_limits() {
            Some(limits) => write!(f, "discard in units of {} bytes", limits.granularity_bytes),
            None => write!(f, "no discard"),
        }
    }
}
