//! A volume that is read for another process, which does not have its store open.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Allocation, Disk, Volume};
use ferrite_disk_base::{DiskError, ErrorKind, SECTOR_BYTES};
use ferrite_io::arena::{Arena, Span};
use ferrite_store::journal::Name;
use ferrite_store::owned::{OpenEngine, StoreHandle, StoreKey};

use super::ServedStore;

/// A volume in use for reading, and memory for one read. It belongs to one thread. As long as it lives the volume is
/// neither written, deleted nor rolled back.
pub struct VolumeReader {
    disk: Disk,
    buffer: Span,
    /// The last field: its drop closes the store if no disk uses it.
    store: ServedStore,
}

impl VolumeReader {
    /// Opens a volume of a store that is open in this process. `None`: it is not. `path` is the client's path of the
    /// store, for texts only.
    ///
    /// # Errors
    /// There is no such volume, a disk writes it, or there is no engine or memory.
    pub fn open(
        key: StoreKey,
        path: &Path,
        volume: &Name,
        engine: OpenEngine<'_>,
    ) -> Option<Result<VolumeReader, DiskError>> {
        let joined = ServedStore::join_with(key, path, engine, 1)?;
        let handle = StoreHandle::join(key)?;
        Some(joined.and_then(|store| VolumeReader::of(store, handle, path, volume)))
    }

    fn of(
        mut store: ServedStore,
        handle: StoreHandle,
        path: &Path,
        volume: &Name,
    ) -> Result<VolumeReader, DiskError> {
        let opened =
            Volume::open_to_read(handle, path, volume.as_str()).map_err(|e| match e.kind() {
                ErrorKind::InUse => {
                    let why = "a disk writes to it, so its content changes while it is read";
                    let (path, name) = (path.display(), volume.as_str());
                    let help = format!(
                        "make a snapshot (ferrite store snapshot {path}#{name} NAME), and read that"
                    );
                    DiskError::new(ErrorKind::InUse, e.what(), why, help)
                }
                _ => e,
            })?;
        let buffer = store.context.buffer();
        let buffer = buffer.map_err(|e| super::failed(super::cannot_look(path), path, e))?;
        Ok(VolumeReader { disk: Disk::Store(opened), buffer, store })
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.disk.sectors() * SECTOR_BYTES
    }

    /// Whether it is a snapshot.
    pub fn is_snapshot(&self) -> bool {
        matches!(&self.disk, Disk::Store(volume) if volume.is_snapshot())
    }

    /// The memory that [`read`](Self::read) reads into.
    pub fn memory(&self) -> &Arc<Arena> {
        self.store.port.memory()
    }

    /// Reads a range. The data are in the returned part of the memory, until the next read.
    ///
    /// # Errors
    /// `InvalidInput`: it is empty, longer than 1 MiB, or not inside the volume. `InvalidData`: the content is damaged.
    /// Errors of the kernel.
    pub fn read(&mut self, offset: u64, len: u64) -> io::Result<Span> {
        if len == 0 || len > self.buffer.len() as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let span = self.buffer.slice(0, len as usize);
        let ServedStore { context, port, .. } = &mut self.store;
        context.run(self.disk.read(port, offset, span))?;
        Ok(span)
    }

    /// Whether the beginning of a range has data.
    ///
    /// # Errors
    /// As [`Disk::allocation`].
    pub fn look(&mut self, offset: u64, len: u64) -> io::Result<Allocation> {
        let ServedStore { context, port, .. } = &mut self.store;
        context.run(self.disk.allocation(port, offset, len))
    }
}
