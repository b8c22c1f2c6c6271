//! The maps of what has changed on a disk (`disk-base/src/dirty/`), where the disk meets them.

use std::io;
use std::path::Path;

use ferrite_disk_base::changes::ChangeMap;
use ferrite_disk_base::dirty::{self, Tracker};
use ferrite_disk_base::{DiskError, ErrorKind, OpenOptions, Port, Raw, SECTOR_BYTES};

use crate::Disk;

/// Most bytes of a discard that are marked at once.
const PART_BYTES: u64 = 1 << 30;

/// The medium of a disk that can have maps: its own file. A device has no place beside it, and a volume shares its
/// medium with others.
fn file(disk: &Disk) -> Option<&Raw> {
    match disk {
        Disk::Raw(d) => Some(d),
        Disk::Image(d) => Some(d.medium()),
        _ => None,
    }
    .filter(|raw| raw.is_file())
}

/// Has the changes of a disk recorded, if it is open for writing and its image has maps.
pub(crate) fn begin(disk: &Disk, options: &OpenOptions) -> Result<(), DiskError> {
    let Some(raw) = file(disk).filter(|raw| !raw.read_only()) else { return Ok(()) };
    let (bytes, index) = (disk.sectors() * SECTOR_BYTES, disk.files().len());
    if let Some(tracker) = Tracker::open(raw, bytes, options, index)? {
        raw.track(tracker);
    }
    Ok(())
}

impl Disk {
    /// The maps of the disk's changes, if they are recorded.
    #[inline]
    pub(crate) fn tracker(&self) -> Option<&Tracker> {
        match self {
            Disk::Raw(d) => d.tracker(),
            Disk::Image(d) => d.medium().tracker(),
            _ => None,
        }
    }

    /// The changed blocks of a tap's disk, if they are recorded.
    #[inline]
    pub(crate) fn changes(&self) -> Option<&ChangeMap> {
        match self {
            Disk::Raw(d) => d.changes(),
            Disk::Image(d) => d.medium().changes(),
            _ => None,
        }
    }

    /// Has the disk's changed blocks recorded in a file that [`ChangeMapFile::create`] has made.
    ///
    /// [`ChangeMapFile::create`]: ferrite_disk_base::changes::ChangeMapFile::create
    ///
    /// # Errors
    /// The file cannot be used, or is a smaller disk's; the disk is no image.
    pub fn record_changes(&self, file: &Path) -> Result<(), DiskError> {
        let raw = match self {
            _ if self.read_only() => return Ok(()),
            Disk::Raw(d) => Some(d),
            Disk::Image(d) => Some(d.medium()),
            _ => None,
        };
        let what = "cannot record the changed blocks of the disk";
        let raw = raw.ok_or_else(|| {
            let help = "open it without -C";
            DiskError::new(ErrorKind::Unsuitable, what, "only those of images are recorded", help)
        })?;
        let map = ChangeMap::open(file, self.sectors() * SECTOR_BYTES).map_err(|e| {
            let help = "name a log of this disk's size (cbt-util set -s)";
            DiskError::new(ErrorKind::Unsuitable, what, e.to_string(), help)
        })?;
        raw.record(map);
        Ok(())
    }

    /// Marks a range before it is changed.
    pub(crate) async fn mark(&self, port: &Port, offset: u64, len: u64) -> io::Result<()> {
        if let Some(changes) = self.changes().filter(|_| len > 0) {
            changes.note(offset, len);
        }
        match self.tracker() {
            Some(tracker) => tracker.mark(port, offset, len).await,
            None => Ok(()),
        }
    }

    /// Marks the beginning of a range; returns its length.
    pub(crate) async fn mark_part(&self, port: &Port, offset: u64, len: u64) -> io::Result<u64> {
        let len = match (self.tracker(), self.changes()) {
            (None, None) => return Ok(len),
            _ => len.min(PART_BYTES),
        };
        if let Some(changes) = self.changes().filter(|_| len > 0) {
            changes.note(offset, len);
        }
        let Some(tracker) = self.tracker() else { return Ok(len) };
        tracker.mark(port, offset, len).await?;
        Ok(len)
    }

    /// The end of the disk's orderly use.
    pub(crate) async fn end_tracking(&self, port: &Port) -> io::Result<()> {
        match (self.tracker(), file(self)) {
            (Some(tracker), Some(raw)) => tracker.close(port, raw).await,
            _ => Ok(()),
        }
    }

    /// Whether the disk's changes are recorded in maps.
    pub fn is_tracked(&self) -> bool {
        self.tracker().is_some()
    }

    /// The maps beside the disk's image; `None`: it has none, or cannot have any. `state_dir` as in [`OpenOptions`].
    ///
    /// # Errors
    /// They cannot be read.
    pub fn maps(&self, state_dir: Option<&Path>) -> Result<Option<dirty::Seen>, DiskError> {
        let bytes = self.sectors() * SECTOR_BYTES;
        file(self).map_or(Ok(None), |raw| dirty::look(raw, bytes, state_dir))
    }

    /// The file of the disk's own image, beside which its maps are; `None`: it cannot have any.
    pub fn image_file(&self) -> Option<&Raw> {
        file(self)
    }
}
