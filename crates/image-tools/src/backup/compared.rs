//! Backups of disks that have no dirty maps: volumes of stores, devices, exports of other servers. The whole
//! disk is read, and compared with the hashes of its last backup. Only regions that differ are written.
//!
//! No state is kept between two such backups but the backups themselves. So one that was interrupted leaves nothing
//! behind, and the next one begins anew.

use std::collections::BTreeMap;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, VolumeName};

use super::create::{BackUp, Making, info, manifest, name_of};
use super::folder::{Entries, Folder, MAX_CHAIN, depth, hashes};
use super::live::LiveDisk;
use super::manifest::{Hash, Manifest, Reference};
use super::{BackupDone, BackupKind};
use crate::{ImageTools, broken, refused};

/// The end of the name of a volume's snapshot that is there while a backup of the volume is made.
const SNAPSHOT: &str = ".ferrite-backup";

/// The backup that a new one stands on.
pub(super) struct Below {
    pub(super) parent: Reference,
    /// The hash of each region of its disk; a region without one is zeros.
    pub(super) hashes: BTreeMap<u32, Hash>,
}

impl ImageTools<'_> {
    /// Finds the backup on which one of a disk without maps can stand: the newest one of this disk.
    ///
    /// # Errors
    /// There is none, and an incremental backup is asked for.
    pub(super) fn below(
        &self,
        (folder, entries): (&Folder, &Entries),
        (image, bytes): (&ImageName, u64),
        how: &BackUp,
        notes: &mut Vec<String>,
    ) -> Result<Option<Below>, DiskError> {
        if how.kind == BackupKind::Full || how.map.is_none() {
            return Ok(None);
        }
        match last_of(folder, entries, &name_of(image), bytes) {
            Ok(below) => Ok(Some(below)),
            Err(why) if how.kind == BackupKind::Incremental => {
                let what = format!("cannot back up {}", image.path.display());
                Err(refused(what, why, "make a full backup first (--full)"))
            }
            Err(_) if entries.is_empty() => Ok(None),
            Err(why) => {
                notes.push(format!("this is a full backup: {why}"));
                Ok(None)
            }
        }
    }

    /// Makes a backup of a volume while its guest writes: from a snapshot in the store, which is removed afterwards. One
    /// that an interrupted backup has left is removed first.
    pub(super) fn back_up_live_volume(
        &self,
        disk: &dyn LiveDisk,
        volume: &ImageName,
        of: (&Folder, &Entries),
        how: &BackUp,
    ) -> Result<BackupDone, DiskError> {
        let snapshot = snapshot_of(volume)?;
        let mut notes = Vec::new();
        if self.is_left(&snapshot)? {
            disk.remove_snapshot(&snapshot)?;
            let name = snapshot.path.display();
            notes.push(format!("the snapshot {name} of an interrupted backup is removed"));
        }
        disk.snapshot(&snapshot, None)?;
        let done = self.copy_volume((volume, &snapshot), of, how, &mut notes);
        let removed = disk.remove_snapshot(&snapshot);
        let stays = |e: &DiskError| {
            let name = snapshot.path.display();
            format!("the snapshot {name} stays, and the next backup removes it: {e}; {}", e.help())
        };
        match (done, removed) {
            (Ok(done), Ok(())) => Ok(BackupDone { notes, ..done }),
            (Ok(done), Err(e)) => {
                notes.push(stays(&e));
                Ok(BackupDone { notes, ..done })
            }
            (Err(e), Ok(())) => Err(e),
            (Err(e), Err(also)) => {
                let help = format!("{}; {}", e.help(), stays(&also));
                Err(DiskError::new(e.kind(), e.what(), e.why(), help))
            }
        }
    }

    fn copy_volume(
        &self,
        (volume, snapshot): (&ImageName, &ImageName),
        (folder, entries): (&Folder, &Entries),
        how: &BackUp,
        notes: &mut Vec<String>,
    ) -> Result<BackupDone, DiskError> {
        let source = self.open(snapshot, true)?;
        let bytes = source.sectors() * ferrite_disk_base::SECTOR_BYTES;
        let below = self.below((folder, entries), (volume, bytes), how, notes)?;
        let manifest = manifest(folder, how, (volume, bytes), (None, below.as_ref()));
        let manifest =
            manifest.map_err(|e| broken(format!("cannot back up {}", volume.path.display()), e))?;
        let (speed, is_snapshot) = (how.speed, true);
        let mut making = Making { folder, source, maps: None, below, manifest, is_snapshot, speed };
        let read_bytes = self.make(&mut making)?;
        let backup = info(folder, &making.manifest, "complete");
        Ok(BackupDone { backup, read_bytes, resumed: false, notes: Vec::new() })
    }

    /// Whether there is a snapshot of this name.
    fn is_left(&self, snapshot: &ImageName) -> Result<bool, DiskError> {
        let is_snapshot = match self.open(snapshot, true) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            opened => match opened? {
                Disk::Store(volume) => volume.is_snapshot(),
                Disk::Elsewhere(volume) => volume.is_snapshot(),
                _ => false,
            },
        };
        match is_snapshot {
            true => Ok(true),
            false => {
                let what = format!("cannot snapshot {}", snapshot.path.display());
                let help = "give that volume another name (ferrite store rename): the snapshot has it meanwhile";
                Err(refused(what, "a volume has this name", help))
            }
        }
    }
}

/// The newest backup of a disk, or why no backup can stand on it.
fn last_of(folder: &Folder, entries: &Entries, disk: &str, bytes: u64) -> Result<Below, String> {
    let good = entries.values().filter_map(|entry| entry.as_ref().ok());
    let of_disk = good.filter(|manifest| manifest.disk.name == disk);
    let newest = |manifest: &&Manifest| (manifest.created_unix_s, depth(entries, manifest));
    let Some(last) = of_disk.max_by_key(newest) else {
        return Err("no backup of this disk in this folder can be used".to_owned());
    };
    if last.disk.virtual_bytes > bytes {
        return Err("the disk is smaller than it was".to_owned());
    }
    let chain = folder.chain(entries, Some(&last.name)).map_err(|e| e.why().to_owned())?;
    if chain.len() + 1 > MAX_CHAIN {
        return Err(format!("{MAX_CHAIN} backups stand on each other, and no more can"));
    }
    Ok(Below { parent: last.reference(), hashes: hashes(&chain) })
}

/// The name of the snapshot of a volume.
fn snapshot_of(volume: &ImageName) -> Result<ImageName, DiskError> {
    let name = |text: &str| VolumeName::new(&format!("{text}{SNAPSHOT}"));
    let found = volume.volume().and_then(|(store, own)| Some((store, name(own)?)));
    let Some((store, name)) = found else {
        let what = format!("cannot back up {}", volume.path.display());
        let why = format!(
            "its snapshot would have the name of the volume with {SNAPSHOT} behind it, which is too long"
        );
        return Err(refused(what, why, "give the volume a name of at most 48 letters"));
    };
    let mut path = store.as_os_str().to_owned();
    path.push("#");
    path.push(name.as_str());
    Ok(ImageName { format: Format::Store, path: path.into() })
}
