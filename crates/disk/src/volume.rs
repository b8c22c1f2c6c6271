//! A volume of a store, as a disk (docs/internals/store.md).
//!
//! Whole blocks whose tables are in memory are mapped for reads; all else takes steps. Reads and writes have any
//! alignment.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{
    DiscardLimits, DiskError, ErrorKind, Extent, ImageName, OpenOptions, Port, READ_ONLY, Raw,
    Reader, SECTOR_BYTES,
};
use ferrite_images::open_store;
use ferrite_io::arena::Arena;
use ferrite_io::arena::Span;
use ferrite_io::engine::Engine;
use ferrite_store::BLOCK_BYTES;
use ferrite_store::background::ServiceEngine;
use ferrite_store::journal::VolumeId;
use ferrite_store::live::{Found, Live};
use ferrite_store::owned::{Owned, StoreHandle};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Bytes of a leaf of a volume's tree: a discard goes from leaf to leaf.
const LEAF: u64 = 512 * BLOCK;

/// See the module text.
pub struct Volume {
    store: Arc<Owned>,
    name: String,
    number: VolumeId,
    /// It only grows, in [`refresh_size`](Volume::refresh_size).
    sectors: AtomicU64,
    read_only: bool,
    is_snapshot: bool,
    /// `None`: the volume was closed, and other processes may use it.
    handle: Mutex<Option<StoreHandle>>,
}

impl Volume {
    /// Opens a volume of a store that is open in this process, or opens the store.
    pub(crate) fn open(name: &ImageName, options: &OpenOptions) -> Result<Volume, DiskError> {
        let (path, volume) = parts(name)?;
        Volume::of(StoreHandle::open(path, options, open_store)?, path, volume, options)
    }

    /// Opens a volume with the caller's engine: of a store that is open in this process, or opens the store.
    ///
    /// # Errors
    /// As [`Disk::open`](crate::Disk::open).
    pub fn open_on(
        name: &ImageName,
        options: &OpenOptions,
        engine: &dyn Fn(Arc<Arena>) -> io::Result<Box<dyn Engine>>,
    ) -> Result<Volume, DiskError> {
        let (path, volume) = parts(name)?;
        Volume::of(StoreHandle::open_on(path, options, open_store, engine)?, path, volume, options)
    }

    /// Opens a volume to read it, of a store that this process has open. `path` is the caller's path of the store, for
    /// texts only.
    ///
    /// # Errors
    /// As [`Disk::open`](crate::Disk::open).
    pub fn open_to_read(handle: StoreHandle, path: &Path, name: &str) -> Result<Volume, DiskError> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        Volume::of(handle, path, name, &options)
    }

    fn of(
        mut handle: StoreHandle,
        path: &Path,
        name: &str,
        options: &OpenOptions,
    ) -> Result<Volume, DiskError> {
        let what = format!("cannot open volume {name} of store {}", path.display());
        let store = handle.store().clone();
        // Until its use is registered, the volume may be deleted, and its number reused.
        let changing = store.changing();
        let Some(Found { number, blocks, is_snapshot }) = store.live().volume_called(name) else {
            let help = format!("ferrite store list {} names those that it has", path.display());
            let why = "the store has no such volume";
            return Err(DiskError::new(ErrorKind::NotFound, what, why, help));
        };
        if is_snapshot && !options.read_only {
            let why = "it is a snapshot, which takes no writes";
            let help = format!("{READ_ONLY}, or make a clone of it (ferrite store clone)");
            return Err(DiskError::new(ErrorKind::Permission, what, why, help));
        }
        if !handle.take(number, !options.read_only) {
            let why = "another disk of this process uses it";
            let help = "give each disk a volume of its own (ferrite store clone), or open it \
                        read-only everywhere";
            return Err(DiskError::new(ErrorKind::InUse, what, why, help));
        }
        drop(changing);
        Ok(Volume {
            store,
            name: name.to_owned(),
            number,
            sectors: AtomicU64::new(blocks * BLOCK / SECTOR_BYTES),
            read_only: options.read_only,
            is_snapshot,
            handle: Mutex::new(Some(handle)),
        })
    }

    /// Its store.
    pub fn store(&self) -> &Arc<Owned> {
        &self.store
    }

    fn live(&self) -> &Live {
        self.store.live()
    }

    /// The file or device of the store.
    #[inline]
    pub fn medium(&self) -> &Raw {
        self.store.raw()
    }

    /// Whether other disks of this process use the store.
    pub(crate) fn is_shared(&self) -> bool {
        let is_user = self.handle.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.store.users_but(is_user) > 0
    }

    /// Its name in the store.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The name of the volume with its store, `PATH#NAME`.
    pub fn path(&self) -> PathBuf {
        let mut path = self.medium().path().as_os_str().to_owned();
        path.push("#");
        path.push(&self.name);
        path.into()
    }

    /// Its number in the store.
    pub(crate) fn number(&self) -> VolumeId {
        self.number
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.sectors() * SECTOR_BYTES
    }

    /// Takes the size that the store knows, after the volume has grown.
    pub(crate) fn refresh_size(&self) {
        if let Some(Found { blocks, .. }) = self.live().volume_called(&self.name) {
            self.sectors.fetch_max(blocks * BLOCK / SECTOR_BYTES, Ordering::Relaxed);
        }
    }

    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether it is a snapshot, which is never written.
    pub fn is_snapshot(&self) -> bool {
        self.is_snapshot
    }

    pub(crate) fn discard_limits(&self) -> Option<DiscardLimits> {
        let granularity_bytes = BLOCK as u32;
        (!self.read_only).then_some(DiscardLimits { granularity_bytes, alignment_bytes: 0 })
    }

    pub(crate) fn is_faulty(&self) -> bool {
        self.live().is_faulty()
    }

    /// See [`Disk::map`](crate::Disk::map).
    pub(crate) fn map(&self, offset: u64, len: u64) -> Extent {
        self.live().map(self.number, offset, len)
    }

    /// See [`Disk::check`](crate::Disk::check).
    pub(crate) fn check(&self, memory: &Arena, offset: u64, data: Span) -> bool {
        self.live().check(memory, self.number, offset, data)
    }

    /// See [`Disk::reader`](crate::Disk::reader).
    pub(crate) fn reader(&self) -> Reader {
        self.live().reader()
    }

    /// See [`Disk::while_mapped`](crate::Disk::while_mapped).
    pub(crate) async fn while_mapped<T>(&self, steps: impl Future<Output = T>) -> T {
        self.live().while_mapped(steps).await
    }

    pub(crate) async fn read(&self, port: &Port, offset: u64, to: Span) -> io::Result<()> {
        self.live().read(port, self.number, offset, to).await
    }

    pub(crate) async fn write(&self, port: &Port, offset: u64, from: Span) -> io::Result<()> {
        let done = self.live().write(port, self.number, offset, from).await;
        self.live().keep_up(port).await;
        done
    }

    pub(crate) async fn flush(&self, port: &Port) -> io::Result<()> {
        let done = self.live().flush(port).await;
        self.live().keep_up(port).await;
        done
    }

    /// Makes a checkpoint. It does not disturb other volumes that are in use, and the last one makes the next opening
    /// short.
    pub(crate) async fn close(&self, port: &Port) -> io::Result<()> {
        self.live().close(port).await
    }

    /// Discards the whole blocks of at most one leaf, or all up to the next one that is there; partial blocks at the ends
    /// stay unchanged.
    pub(crate) async fn discard_part(&self, port: &Port, offset: u64, len: u64) -> io::Result<u64> {
        let (first, end) = (offset.next_multiple_of(BLOCK), (offset + len) / BLOCK * BLOCK);
        if first >= end {
            return Ok(len);
        }
        let nothing = self.live().nothing_from(port, self.number, first, end - first).await?;
        let mut part = first + nothing;
        if nothing == 0 {
            part = end.min(first - first % LEAF + LEAF);
            self.live().write_zeros(port, self.number, first, part - first).await?;
            self.live().keep_up(port).await;
        }
        Ok(if part == end { len } else { part - offset })
    }

    pub(crate) async fn write_zeroes(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        let done = self.live().write_zeros(port, self.number, offset, len).await;
        self.live().keep_up(port).await;
        done
    }

    /// Whether the beginning of a range is zeros that take no space, and for at least how many bytes.
    pub(crate) async fn look(&self, port: &Port, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        let (is_zeros, blocks) = self.live().zeros_from(port, self.number, offset / BLOCK).await?;
        let end = (offset / BLOCK + blocks) * BLOCK;
        Ok((is_zeros, len.min(end - offset)))
    }

    /// Begins the background work of the store, as its disks are served from now on.
    pub(crate) fn begin_service(&self, engine: &ServiceEngine) -> io::Result<()> {
        self.handle().as_ref().map_or(Ok(()), |handle| handle.serve(engine))
    }

    fn handle(&self) -> MutexGuard<'_, Option<StoreHandle>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the closed volume, and the store if no other disk of this process uses it.
    pub(crate) fn unlock(&self) {
        if let Some(handle) = self.handle().take() {
            handle.leave();
        }
    }
}

fn parts(name: &ImageName) -> Result<(&Path, &str), DiskError> {
    name.volume().ok_or_else(|| {
        let what = format!("cannot open {}", name.path.display());
        let help = "write store:PATH#NAME";
        DiskError::new(ErrorKind::Usage, what, "it is no name of a store's volume", help)
    })
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.read_only { "read-only" } else { "read-write" };
        let size = Human(self.bytes());
        let store = self.medium();
        write!(f, "volume {} of a store, {size}, {mode}; the store: {store}", self.name)
    }
}
