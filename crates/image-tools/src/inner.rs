//! Snapshots inside of qcow2 images that nothing uses.

use std::time::{SystemTime, UNIX_EPOCH};

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, Format, ImageName, SECTOR_BYTES, journal};
use ferrite_images::qcow2::{Change, Planned};
use ferrite_images::{Image, open_medium};

use super::create::done;
use super::io_context::IoContext;
use super::room::Room;
use super::{ImageTools, InnerDone, SnapshotInfo, broken, unsuitable};

/// A change of the snapshots inside of an image.
#[derive(Clone, Copy, Debug)]
pub enum Inner<'a> {
    /// Keep what the disk is now under this name.
    Create(&'a str),
    /// Make the disk what it was at the snapshot with this identifier or name.
    Apply(&'a [u8]),
    /// Delete the snapshot with this identifier or name.
    Delete(&'a [u8]),
}

impl ImageTools<'_> {
    /// Makes, applies or deletes a snapshot inside of an image. The journal of a killed backend is written into it first.
    ///
    /// # Errors
    /// The image is in use, read-only, damaged, of another format, or has children; there is no such snapshot, or one
    /// of that name already; its file system has no room for other tables.
    pub fn inner(&self, name: &ImageName, inner: Inner<'_>) -> Result<InnerDone, DiskError> {
        let what = || format!("cannot change the snapshots inside of {}", name.path.display());
        let cannot = |e| broken(what(), e);
        if name.format != Format::Qcow2 {
            let why = format!("format {} has none", name.format);
            let help = "keep a state as an image of its own: ferrite image snapshot DISK NEW";
            return Err(unsuitable(what(), why, help));
        }
        // Its parents are not opened: they may be missing.
        let disk = Disk::Image(Image::open_alone(name, &self.options(false))?);
        self.close(&disk, &name.path)?;
        let before = disk.sectors() * SECTOR_BYTES;
        drop(disk);
        let raw = open_medium(&name.path, &self.medium_options(false))?;
        if journal::any_at(self.readable_state(), &raw)? {
            let why = "a backend has used it just now, and was killed";
            return Err(unsuitable(what(), why, "run the same command again"));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = (since.as_secs(), since.subsec_nanos());
        let change = match inner {
            Inner::Create(name) => Change::Create { name, now },
            Inner::Apply(text) => Change::Apply(text),
            Inner::Delete(text) => Change::Delete(text),
        };
        let planned = Planned::new(&raw, change)?;
        if raw.is_file() {
            let room = Room::at(&name.path).map_err(cannot)?;
            room.check(what(), planned.needed_bytes, &name.path)?;
        }
        let (bytes, told) = (planned.disk_bytes(), planned.snapshot.clone());
        let notes = notes(before, bytes, planned.lost_bitmaps());
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port_of(raw.files()).map_err(cannot)?;
        context.run(async { Ok(planned.write(&port, &raw).await) }).map_err(cannot)??;
        let snapshot = SnapshotInfo {
            id: told.id,
            name: told.name,
            virtual_bytes: told.disk_bytes.unwrap_or(before),
            created_unix_s: told.created_unix_s,
            vm_state_bytes: told.vm_state_bytes,
        };
        Ok(InnerDone { done: done(name, bytes, notes), snapshot })
    }
}

fn notes(before: u64, bytes: u64, lost_bitmaps: u32) -> Vec<String> {
    let mut notes = Vec::new();
    if bytes != before {
        notes.push(format!("the disk has {bytes} bytes now, as at the snapshot, and had {before}"));
    }
    if lost_bitmaps > 0 {
        notes.push(format!(
            "dirty bitmaps inside of it that are out of date now: {lost_bitmaps} (an incremental backup \
             has to begin with a full one)"
        ));
    }
    notes
}
