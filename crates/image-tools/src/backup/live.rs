//! Makes a backup of a disk while its guest writes: from a snapshot, which is merged away afterwards.
//!
//! The order of writes of [`ImageTools::back_up_live`], with the steps of the parent module in it:
//! 1. The record `IMAGE.ferrite-backup-record` beside the disk's image names the snapshot and the folder, durably. Then
//!    `MAP.begun` is written.
//! 2. In one pause of the guest the snapshot is made, and the next map is begun.
//! 3. Steps 2 to 5 of the parent module, from the snapshot: what its frozen last map names is copied.
//! 4. Only now, as the backup is durable, the last map is ended.
//! 5. The snapshot is merged away. Then `MAP.begun` and the record are removed.
//!
//! A command that ends before 4 leaves both maps: together they name all that the next backup has to copy. The next one
//! first merges the snapshot that the record, or the snapshot's own name, tells of. Then it goes on as after an
//! interrupted backup of a disk at rest: from a new snapshot, with what has changed since the first one.
//! The manifests alone say which map belongs to which backup, so it does not matter where a command has ended.

use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, SECTOR_BYTES, plain};
use ferrite_store::name::StoreName;
use serde::{Deserialize, Serialize};

use super::create::{BackUp, Making, check_name, info, manifest};
use super::folder::{Entries, Folder, Use};
use super::maps::{Chosen, Maps, Next};
use super::{BackupDone, BackupKind};
use crate::files::{beside, same_file};
use crate::io_context::IoContext;
use crate::stores::Change;
use crate::{ImageTools, MapChange, broken, parent_dir, refused};

/// The end of the name of a record.
const RECORD: &str = ".ferrite-backup-record";
/// The part of a snapshot's name before the extension.
const SNAPSHOT: &str = "ferrite-backup";
/// The part before the extension in the name of a raw disk that became the base of a qcow2 image.
const BASE: &str = "base";
/// The longest record.
pub(super) const MAX_RECORD: u64 = 64 << 10;

/// A disk that another process serves: only that changes its images.
pub trait LiveDisk {
    /// The image that the guest writes to now; `None`: the disk is detached.
    ///
    /// # Errors
    /// It cannot be asked.
    fn leaf(&self) -> Result<Option<ImageName>, DiskError>;

    /// Gives the disk as it is now the name `to`. The guest goes on in a new leaf. At the same moment a dirty map of this
    /// name is begun.
    ///
    /// # Errors
    /// The guest goes on as before. If the other process has died, the snapshot may have been made.
    fn snapshot(&self, to: &ImageName, begin_map: Option<&str>) -> Result<(), DiskError>;

    /// Ends a dirty map of the disk.
    ///
    /// # Errors
    /// The disk has the maps that it had.
    fn end_map(&self, map: &str) -> Result<(), DiskError>;

    /// Removes a snapshot of a volume of a store.
    ///
    /// # Errors
    /// It is in use, or the disk has no such snapshots.
    fn remove_snapshot(&self, snapshot: &ImageName) -> Result<(), DiskError>;

    /// Merges the leaf into the snapshot below it, which takes the leaf's name. It waits for the end of a merge that
    /// was begun before.
    ///
    /// # Errors
    /// The disk reads the same, and the snapshot may still be there.
    fn merge(&self, leaf: &ImageName, snapshot: &ImageName) -> Result<(), DiskError>;
}

/// A disk that is at rest, with the same operations.
pub struct AtRest<'a> {
    /// Changes the images.
    pub tools: &'a ImageTools<'a>,
    /// The disk's image.
    pub leaf: ImageName,
}

impl LiveDisk for AtRest<'_> {
    fn leaf(&self) -> Result<Option<ImageName>, DiskError> {
        Ok(Some(self.leaf.clone()))
    }

    fn snapshot(&self, to: &ImageName, begin_map: Option<&str>) -> Result<(), DiskError> {
        self.tools.snapshot_and(&self.leaf, to, begin_map).map(drop)
    }

    fn end_map(&self, map: &str) -> Result<(), DiskError> {
        self.tools.change_maps(&self.leaf, &MapChange::End(map.to_owned())).map(drop)
    }

    fn remove_snapshot(&self, snapshot: &ImageName) -> Result<(), DiskError> {
        let name = StoreName::parse(&snapshot.path)?;
        match &name.volume {
            Some(volume) => self.tools.change_volume(&name.path, volume, Change::Delete).map(drop),
            None => {
                let what = format!("cannot remove {name}");
                Err(refused(what, "it is no snapshot of a volume", "ferrite store list names them"))
            }
        }
    }

    fn merge(&self, leaf: &ImageName, snapshot: &ImageName) -> Result<(), DiskError> {
        self.tools.coalesce_into(leaf, snapshot, false).map(drop)
    }
}

/// The durable record of a backup of a disk in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupRecord {
    /// The path of the snapshot.
    pub snapshot: PathBuf,
    /// The path of the disk's image.
    pub image: PathBuf,
    /// The folder of the backup.
    pub folder: PathBuf,
    /// The name of the maps, if maps are used.
    pub map: Option<String>,
}

impl BackupRecord {
    /// The record of an interrupted backup of the disk whose image this is; or of one that is being made.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn of(image: &Path) -> io::Result<Option<BackupRecord>> {
        match plain::read(&record_of(image), MAX_RECORD) {
            Ok(text) => BackupRecord::parse(&text).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub(super) fn parse(text: &[u8]) -> io::Result<BackupRecord> {
        serde_json::from_slice(text).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidData, "it is no record of a backup, or damaged")
        })
    }

    /// Whether the snapshot is still there.
    pub fn is_left(&self) -> bool {
        self.snapshot.symlink_metadata().is_ok()
    }
}

/// The path of an image's record.
fn record_of(image: &Path) -> PathBuf {
    beside(image, RECORD)
}

/// The name of the snapshot of a disk.
fn snapshot_of(leaf: &ImageName) -> ImageName {
    let word = if leaf.format == Format::Raw { BASE } else { SNAPSHOT };
    let mut name = leaf.path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".{word}"));
    if let Some(extension) = leaf.path.extension() {
        name.push(".");
        name.push(extension);
    }
    ImageName { format: leaf.format, path: leaf.path.with_file_name(name) }
}

fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

impl ImageTools<'_> {
    /// Makes a backup of a disk while its guest writes, as [`back_up`](Self::back_up) does of a disk at rest. See the
    /// module text for the order. The caller sees to it that no second one of the same disk is made meanwhile.
    ///
    /// The snapshot of a raw disk stays: it becomes the base of a qcow2 image. That of a volume is in its store, and is
    /// removed.
    ///
    /// # Errors
    /// As those of [`back_up`](Self::back_up), and those of the disk. The snapshot is merged away again, or the error
    /// names it.
    pub fn back_up_live(
        &self,
        disk: &dyn LiveDisk,
        folder: &Path,
        how: &BackUp,
    ) -> Result<BackupDone, DiskError> {
        let leaf = disk.leaf()?.ok_or_else(|| {
            let why = "there is no such disk, or it is detached";
            let help = "ferrite disk list shows the disks; a disk that is not in use is named by its image";
            DiskError::new(ErrorKind::NotFound, "cannot back up the disk", why, help)
        })?;
        let folder = Folder::open(folder, Use::Add)?;
        let entries = folder.entries()?;
        if let Some(name) = &how.name {
            check_name(&folder, &entries, name)?;
        }
        if leaf.volume().is_some() {
            return self.back_up_live_volume(disk, &leaf, (&folder, &entries), how);
        }
        let mut notes = Vec::new();
        notes.extend(self.merge_leftover(disk, &leaf)?);
        let maps = match &how.map {
            Some(map) => {
                Some(self.maps_of_live(disk, &leaf, (&folder, &entries), (how, map), &mut notes)?)
            }
            None if how.kind == BackupKind::Incremental => {
                let what = format!("cannot back up {}", leaf.path.display());
                let why = "without maps it is not known what has changed";
                return Err(refused(what, why, "leave --incremental or --no-map out"));
            }
            None => None,
        };
        let snapshot = snapshot_of(&leaf);
        self.begin_live(&leaf, &snapshot, &folder, how)?;
        let new = maps.as_ref().and_then(|maps| match &maps.next {
            Next::New(name) => Some(name.as_str()),
            Next::Continued(..) => None,
        });
        if let Err(e) = disk.snapshot(&snapshot, new) {
            return Err(self.given_up(disk, &leaf, e));
        }
        let now = match disk.leaf() {
            Ok(now) => now.unwrap_or_else(|| leaf.clone()),
            Err(e) => return Err(self.given_up(disk, &leaf, e)),
        };
        let (making, read_bytes) = self
            .copy_live(&now, &snapshot, &folder, how, maps)
            .map_err(|e| self.given_up(disk, &now, e))?;
        if leaf.format == Format::Raw {
            let (now, base) = (now.path.display(), snapshot.path.display());
            notes.push(format!("the disk is {now} now, on {base}, which has to stay"));
        }
        let done = self.end_live(disk, &now, how, making, notes)?;
        Ok(BackupDone { read_bytes, ..done })
    }

    /// Steps 4 and 5, after a backup that is durable. The next backup does the steps that fail here.
    fn end_live(
        &self,
        disk: &dyn LiveDisk,
        leaf: &ImageName,
        how: &BackUp,
        making: Making<'_>,
        mut notes: Vec<String>,
    ) -> Result<BackupDone, DiskError> {
        let resumed = making.maps.as_ref().is_some_and(|maps| maps.resumed.is_some());
        let Making { folder, source, maps, manifest, .. } = making;
        drop(source);
        if let Some(Maps { last: Some((map, _)), .. }) = maps
            && let Err(e) = self.on(disk, leaf, |disk| disk.end_map(&map.name))
        {
            notes.push(format!("the next backup ends map {}: {e}", map.name));
        }
        match self.merge_leftover(disk, leaf) {
            Ok(_) => {
                if let Some(map) = &how.map {
                    let begun = folder.begun(map);
                    let cannot = |e| broken(format!("cannot remove {}", begun.display()), e);
                    self.remove_if_there(&begun).map_err(cannot)?;
                }
            }
            Err(e) => notes.push(format!(
                "the snapshot {} stays, and the next backup merges it: {e}; {}",
                snapshot_of(leaf).path.display(),
                e.help()
            )),
        }
        let backup = info(folder, &manifest, "complete");
        Ok(BackupDone { backup, read_bytes: 0, resumed, notes })
    }

    /// The maps as they are before the snapshot, beside the process that writes to the disk.
    fn maps_of_live(
        &self,
        disk: &dyn LiveDisk,
        leaf: &ImageName,
        of: (&Folder, &Entries),
        (how, map): (&BackUp, &str),
        notes: &mut Vec<String>,
    ) -> Result<Chosen, DiskError> {
        let found = self.beside_writers().dirty_maps(leaf)?;
        let end = |name: &str| disk.end_map(name);
        self.choose_maps((leaf, &found), of, (how, map), &end, notes)
    }

    /// Step 1.
    fn begin_live(
        &self,
        leaf: &ImageName,
        snapshot: &ImageName,
        folder: &Folder,
        how: &BackUp,
    ) -> Result<(), DiskError> {
        let what = || format!("cannot back up {}", leaf.path.display());
        let cannot = |e| broken(what(), e);
        if is_there(&snapshot.path) {
            let why = format!("{} exists", snapshot.path.display());
            return Err(refused(
                what(),
                why,
                "give that another name: the snapshot has it meanwhile",
            ));
        }
        let record = BackupRecord {
            snapshot: snapshot.path.clone(),
            image: leaf.path.clone(),
            folder: std::path::absolute(folder.path()).map_err(cannot)?,
            map: how.map.clone(),
        };
        let text = serde_json::to_vec(&record).map_err(|e| cannot(e.into()))?;
        // The base of a raw disk is not merged away.
        if leaf.format != Format::Raw {
            let mut context = IoContext::new(self, 1).map_err(cannot)?;
            let path = record_of(&leaf.path);
            self.replace_file(&mut context, &path, &text)
                .map_err(|e| broken(format!("cannot write {}", path.display()), e))?;
        }
        match &how.map {
            Some(map) => self.write_begun(folder, map, &text),
            None => Ok(()),
        }
    }

    /// Step 3.
    fn copy_live<'a>(
        &self,
        leaf: &ImageName,
        snapshot: &ImageName,
        folder: &'a Folder,
        how: &BackUp,
        maps: Option<Chosen>,
    ) -> Result<(Making<'a>, u64), DiskError> {
        let what = || format!("cannot back up {}", leaf.path.display());
        let maps = match maps {
            None => None,
            Some(Chosen { last, next: Next::Continued(next, old) }) => {
                Some(Maps { last, next, resumed: Some(*old) })
            }
            Some(Chosen { last, next: Next::New(name) }) => {
                let next = self.begun_map(&self.beside_writers(), leaf, &name)?;
                Some(Maps { last, next, resumed: None })
            }
        };
        let source = self.open(snapshot, true)?;
        let bytes = source.sectors() * SECTOR_BYTES;
        let manifest = manifest(folder, how, (leaf, bytes), (maps.as_ref(), None));
        let manifest = manifest.map_err(|e| broken(what(), e))?;
        let speed = how.speed;
        let mut making =
            Making { folder, source, maps, below: None, manifest, is_snapshot: true, speed };
        let read_bytes = self.make(&mut making)?;
        Ok((making, read_bytes))
    }

    /// Merges the snapshot that a backup has left, and removes its record. Returns what was done, if there was one.
    ///
    /// # Errors
    /// Those of the merge: the record stays, and the next backup tries again.
    pub fn merge_leftover(
        &self,
        disk: &dyn LiveDisk,
        leaf: &ImageName,
    ) -> Result<Option<String>, DiskError> {
        let path = record_of(&leaf.path);
        let snapshot = snapshot_of(leaf);
        if leaf.format == Format::Raw {
            return Ok(None);
        }
        let is_left = is_there(&snapshot.path);
        if is_left {
            self.on(disk, leaf, |disk| merge_away(disk, leaf, &snapshot)).map_err(|e| {
                let help = format!(
                    "{}; {} is the snapshot of an interrupted backup, and can be merged by hand, too \
                     (ferrite disk coalesce --from {} --to {0})",
                    e.help(),
                    snapshot.path.display(),
                    leaf.path.display(),
                );
                DiskError::new(e.kind(), e.what(), e.why(), help)
            })?;
        }
        let cannot = |e| broken(format!("cannot remove {}", path.display()), e);
        if is_there(&path) {
            self.directory.sync(parent_dir(&leaf.path)).map_err(cannot)?;
            self.remove_if_there(&path).map_err(cannot)?;
        }
        let note =
            format!("the snapshot {} of an interrupted backup is merged", snapshot.path.display());
        Ok(is_left.then_some(note))
    }

    /// The error of a backup whose snapshot is merged away again, if that is possible.
    fn given_up(&self, disk: &dyn LiveDisk, leaf: &ImageName, e: DiskError) -> DiskError {
        let Err(stays) = self.merge_leftover(disk, leaf) else { return e };
        let help = format!(
            "{}; the snapshot {} stays, and the next backup merges it ({stays})",
            e.help(),
            snapshot_of(leaf).path.display()
        );
        DiskError::new(e.kind(), e.what(), e.why(), help)
    }

    /// Does something with a disk, also if it was detached meanwhile.
    fn on(
        &self,
        disk: &dyn LiveDisk,
        leaf: &ImageName,
        what: impl Fn(&dyn LiveDisk) -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        match disk.leaf()? {
            Some(_) => what(disk),
            None => what(&AtRest { tools: self, leaf: leaf.clone() }),
        }
    }

    /// The same tools, which read images that are in use without a lock.
    fn beside_writers(&self) -> ImageTools<'_> {
        ImageTools {
            directory: self.directory,
            engine: self.engine,
            state_dir: self.state_dir.clone(),
            fixed_size: self.fixed_size,
            unlocked: true,
            parents: self.parents.clone(),
            progress: self.progress,
        }
    }
}

fn merge_away(
    disk: &dyn LiveDisk,
    leaf: &ImageName,
    snapshot: &ImageName,
) -> Result<(), DiskError> {
    // A snapshot that was cut off has left a second name of the leaf's file. Only a process that has the disk to itself
    // may decide about it: it is completed first.
    let is_cut_off = || same_file(&leaf.path, &snapshot.path).unwrap_or(false);
    if is_cut_off()
        && let Err(e) = disk.snapshot(snapshot, None)
        && is_cut_off()
    {
        return Err(e);
    }
    disk.merge(leaf, snapshot)?;
    match is_there(&snapshot.path) {
        false => Ok(()),
        true => {
            let what = format!("cannot merge {}", leaf.path.display());
            let why = format!("{} is still there", snapshot.path.display());
            Err(refused(what, why, "ferrite image info shows the disk's chain"))
        }
    }
}
