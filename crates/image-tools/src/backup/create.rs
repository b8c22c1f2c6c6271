//! Makes a backup.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use ferrite_disk::Disk;
use ferrite_disk_base::dirty::REGION_BYTES;
use ferrite_disk_base::dirty::found::Seen;
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, SECTOR_BYTES, VolumeName};
use ferrite_host::clock::{secret, unix_time_s};
use ferrite_images::children::{PARTIAL, absolute};

use super::compared::Below;
use super::folder::{Entries, Folder, Use};
use super::live::AtRest;
use super::manifest::{DiskOf, Hash, Manifest, NewManifest, Reference};
use super::maps::Maps;
use super::regions::{Plan, Regions, To};
use super::{BackupDone, BackupInfo, BackupKind};
use crate::files::{NewFile, Over, check_apart, check_regular, protect, same_file};
use crate::formats::{self, Blank};
use crate::io_context::IoContext;
use crate::{ImageTools, MapChange, NewImage, broken, refused};

/// After so many bytes the data are made durable, so that an interrupted backup can continue there.
const SYNC_EVERY: u64 = 1 << 30;

/// The options of a backup.
#[derive(Clone, Debug, Default)]
pub struct BackUp {
    /// Its name; `None`: the time in UTC.
    pub name: Option<String>,
    /// The name of the maps; `None`: no map is used or changed, and all is copied.
    pub map: Option<String>,
    /// The data that are copied.
    pub kind: BackupKind,
    /// Most bytes a second that are read; 0: no limit.
    pub speed: u64,
}

/// A backup that is being made.
pub(super) struct Making<'a> {
    pub(super) folder: &'a Folder,
    /// The disk, locked against writers; or a snapshot of it.
    pub(super) source: Disk,
    pub(super) maps: Option<Maps>,
    /// The last backup of a disk without maps.
    pub(super) below: Option<Below>,
    pub(super) manifest: Manifest,
    /// The source is a snapshot of the moment at which the next map was begun: it has the maps of that moment, without
    /// the new one.
    pub(super) is_snapshot: bool,
    /// As in [`BackUp`].
    pub(super) speed: u64,
}

/// Parts of a disk, in bytes, in order.
type Ranges = Vec<Range<u64>>;

impl ImageTools<'_> {
    /// Makes a backup of a disk that is not in use, in a folder, which is made if it is not there. The order of writes
    /// stands in the text of this module's parent. An interrupted backup is continued.
    ///
    /// # Errors
    /// The image is in use; there is a backup of this name; an incremental one is not possible and asked for; there is
    /// no room; `Interrupted` if the progress callback stopped it. All data that are not in a complete backup are copied
    /// by the next one then.
    pub fn back_up(
        &self,
        image: &ImageName,
        folder: &Path,
        how: &BackUp,
    ) -> Result<BackupDone, DiskError> {
        let what = || format!("cannot back up {}", image.path.display());
        let cannot = |e| broken(what(), e);
        // First, as nothing is changed if the disk is not there.
        drop(self.open(image, true)?);
        let folder = Folder::open(folder, Use::Add)?;
        let entries = folder.entries()?;
        if let Some(name) = &how.name {
            check_name(&folder, &entries, name)?;
        }
        let mut notes = Vec::new();
        if has_maps(image) {
            let disk = AtRest { tools: self, leaf: image.clone() };
            notes.extend(self.merge_leftover(&disk, image)?);
        }
        let maps = match &how.map {
            Some(map) if has_maps(image) => {
                Some(self.begin_maps(image, (&folder, &entries), (how, map), &mut notes)?)
            }
            None if how.kind == BackupKind::Incremental => {
                let why = "without maps it is not known what has changed";
                return Err(refused(what(), why, "leave --incremental or --no-map out"));
            }
            Some(_) | None => None,
        };
        let source = self.open(image, true)?;
        let is_resumed = maps.as_ref().is_some_and(|maps| maps.resumed.is_some());
        let bytes = source.sectors() * SECTOR_BYTES;
        let below = match maps {
            Some(_) => None,
            None => self.below((&folder, &entries), (image, bytes), how, &mut notes)?,
        };
        let of = (maps.as_ref(), below.as_ref());
        let manifest = manifest(&folder, how, (image, bytes), of).map_err(cannot)?;
        let speed = how.speed;
        let is_snapshot = false;
        let mut making =
            Making { folder: &folder, source, maps, below, manifest, is_snapshot, speed };
        let read_bytes = self.make(&mut making)?;
        if let Some(map) = &how.map {
            self.remove_if_there(&folder.begun(map)).map_err(cannot)?;
        }
        let Making { source, maps, manifest, .. } = making;
        drop(source);
        // Step 6.
        if let Some(Maps { last: Some((map, _)), .. }) = maps
            && let Err(e) = self.change_maps(image, &MapChange::End(map.name.clone()))
        {
            notes.push(format!("the next backup ends map {}: {e}", map.name));
        }
        let backup = info(&folder, &manifest, "complete");
        Ok(BackupDone { backup, read_bytes, resumed: is_resumed, notes })
    }

    /// Steps 2 to 5, and the first half of 6. Returns the bytes that were read.
    pub(super) fn make(&self, making: &mut Making<'_>) -> Result<u64, DiskError> {
        let folder = making.folder;
        let (to, bytes) = (folder.data(&making.manifest.name), making.manifest.disk.virtual_bytes);
        let what = || format!("cannot make backup {}", to.path.display());
        let cannot = |e| broken(what(), e);
        if making.source.sectors() * SECTOR_BYTES != bytes {
            let help = "run the same command again";
            return Err(DiskError::new(
                ErrorKind::InUse,
                what(),
                "the disk is being resized",
                help,
            ));
        }
        check_apart(what(), &making.source, &to.path)?;
        let (ranges, changed) = self.ranges(making)?;
        let (file, done) = self.data_file(making, &changed)?;
        let target = file.open_disk(Format::Qcow2)?;
        let is_incremental = making.manifest.parent.is_some();
        // It is not known exactly which data an earlier attempt has written.
        let zeros = is_incremental || making.maps.as_ref().is_some_and(|m| m.resumed.is_some());
        let mut context = Regions::context(self).map_err(cannot)?;
        let plan = Plan {
            from: &making.source,
            to: Some(To { disk: &target, zeros }),
            ranges,
            done,
            expected: None,
            same: making.below.take().map(|below| below.hashes),
            zeros_have_hashes: is_incremental,
            total: (0, bytes),
        };
        let regions = Regions::new(self, &mut context, plan).map_err(cannot)?;
        regions.limit(making.speed);
        loop {
            let finished = context.run(regions.run(SYNC_EVERY));
            if let Ok(true) = finished {
                break;
            }
            let hashes = regions.hashes();
            // Regions that were in flight when it was stopped have no hash.
            let noted = context
                .run(regions.flush())
                .map_err(cannot)
                .and_then(|()| self.note(folder, &mut making.manifest, hashes));
            // The first error counts, not its consequences.
            if let Err(e) = finished {
                return Err(stopped(what(), e, making.maps.is_some()));
            }
            noted?;
        }
        context.run(regions.close()).map_err(|e| stopped(what(), e, making.maps.is_some()))?;
        let (hashes, read_bytes) = (regions.hashes(), regions.read_bytes());
        drop(regions);
        drop(target);
        protect(file.path(), true).map_err(cannot)?;
        // Step 4.
        file.finish()?;
        // Step 5.
        making.manifest.regions = hashes.into_iter().collect();
        let text = making.manifest.sealed().map_err(cannot)?;
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        self.replace_file(&mut context, &folder.manifest(&making.manifest.name), &text)
            .map_err(cannot)?;
        // Step 6.
        self.remove_if_there(&folder.unfinished(&making.manifest.name)).map_err(cannot)?;
        Ok(read_bytes)
    }

    /// The ranges that are copied, and those that have changed since the interrupted attempt began.
    fn ranges(&self, making: &Making<'_>) -> Result<(Ranges, Ranges), DiskError> {
        let bytes = making.manifest.disk.virtual_bytes;
        let all = || std::iter::once(0..bytes).collect::<Vec<_>>();
        let Some(maps) = &making.maps else { return Ok((all(), Vec::new())) };
        let seen = making.source.maps(self.readable_state())?;
        let find = |of: &Reference| find(seen.as_ref(), of);
        let gone = || {
            let what = format!("cannot make backup {}", making.manifest.name);
            let why = "its maps have been changed meanwhile, by another command or program";
            DiskError::new(ErrorKind::InUse, what, why, "run the same command again")
        };
        let changed = match making.is_snapshot && maps.resumed.is_none() {
            // It was begun at the moment of the snapshot.
            true => Vec::new(),
            false => find(&maps.next).ok_or_else(gone)?,
        };
        let ranges = match &maps.last {
            Some((last, _)) => find(last).ok_or_else(gone)?,
            None => all(),
        };
        Ok((ranges, changed))
    }

    /// The file that gets the data, and the hashes of the regions that are complete in it. From here on the file stays,
    /// even after a failure, if the backup can be continued.
    fn data_file<'a>(
        &'a self,
        making: &mut Making<'_>,
        changed: &[Range<u64>],
    ) -> Result<(NewFile<'a>, BTreeMap<u32, Hash>), DiskError> {
        let (folder, manifest) = (making.folder, &mut making.manifest);
        let to = folder.data(&manifest.name);
        let what = || format!("cannot make backup {}", to.path.display());
        let cannot = |e| broken(what(), e);
        let is_resumed = making.maps.as_ref().is_some_and(|maps| maps.resumed.is_some());
        let partial = crate::files::beside(&to.path, PARTIAL);
        if is_resumed && to.path.exists() {
            // It was interrupted between steps 4 and 5; or in step 4, where the file has both names for a moment.
            if !partial.exists() {
                self.directory.rename(&to.path, &partial).map_err(cannot)?;
            } else if same_file(&to.path, &partial).map_err(cannot)? {
                self.directory.remove(&to.path).map_err(cannot)?;
            }
        }
        let mut file = self.old_file(&to.path, PARTIAL, Over::Keep)?;
        check_regular(file.path(), what())?;
        check_regular(&folder.unfinished(&manifest.name), what())?;
        if file.path().symlink_metadata().is_ok() {
            if is_resumed {
                protect(file.path(), false).map_err(cannot)?;
            }
            file.open()?;
            if is_resumed && file.is_there() {
                let regions = std::mem::take(&mut manifest.regions).into_iter();
                let done = regions.filter(|(number, _)| !has_changed(changed, *number));
                return Ok((file, done.collect()));
            }
            self.directory.remove(file.path()).map_err(cannot)?;
            file = self.old_file(&to.path, PARTIAL, Over::Keep)?;
        }
        manifest.regions.clear();
        let below = match &manifest.parent {
            Some(parent) => Some(self.parent(&to, &folder.data(&parent.name))?),
            None => None,
        };
        let bytes = manifest.disk.virtual_bytes;
        let new = NewImage::default();
        formats::check_new(&to, &new, below.as_ref(), bytes)?;
        file.create().map_err(|e| file.not_made(e))?;
        self.write_new(&mut file, Format::Qcow2, &new, (below.as_ref(), Blank::Zeros), bytes)?;
        if making.maps.is_some() {
            self.note(folder, manifest, BTreeMap::new())?;
            file.keep();
        }
        Ok((file, BTreeMap::new()))
    }

    /// Writes the unfinished manifest, durably. The data of these regions have to be durable.
    fn note(
        &self,
        folder: &Folder,
        manifest: &mut Manifest,
        hashes: BTreeMap<u32, Hash>,
    ) -> Result<(), DiskError> {
        if manifest.map.is_none() {
            // It cannot be continued.
            return Ok(());
        }
        let path = folder.unfinished(&manifest.name);
        let cannot = |e| broken(format!("cannot write {}", path.display()), e);
        manifest.regions = hashes.into_iter().collect();
        let text = manifest.sealed().map_err(cannot)?;
        manifest.regions = Vec::new();
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        self.replace_file(&mut context, &path, &text).map_err(cannot)
    }
}

/// The manifest of the backup that is continued, or a new one.
pub(super) fn manifest(
    folder: &Folder,
    how: &BackUp,
    (image, virtual_bytes): (&ImageName, u64),
    (maps, below): (Option<&Maps>, Option<&Below>),
) -> std::io::Result<Manifest> {
    if let Some(resumed) = maps.and_then(|maps| maps.resumed.clone()) {
        return Ok(resumed);
    }
    let created_unix_s = unix_time_s();
    let name = how.name.clone().unwrap_or_else(|| free_name(folder, created_unix_s));
    let id: [u8; 16] = secret()?;
    let last = maps.and_then(|maps| maps.last.as_ref());
    Ok(Manifest::new(NewManifest {
        name,
        id: format!("{:032x}", u128::from_be_bytes(id)),
        parent: last.map(|last| &last.1).or(below.map(|below| &below.parent)).cloned(),
        created_unix_s,
        disk: DiskOf { name: name_of(image), virtual_bytes },
        map: maps.map(|maps| maps.next.clone()),
    }))
}

/// The ranges of a map; `None`: it is not there any more, or void.
fn find(seen: Option<&Seen>, of: &Reference) -> Option<Vec<Range<u64>>> {
    let seen = seen.filter(|seen| seen.void.is_none())?;
    let id = |id: &[u8; 16]| format!("{:032x}", u128::from_be_bytes(*id));
    let map = seen.maps.iter().find(|map| map.name == of.name && id(&map.id) == of.id)?;
    Some(map.changed.clone())
}

fn has_changed(changed: &[Range<u64>], number: u32) -> bool {
    let start = u64::from(number) * REGION_BYTES;
    let first = changed.partition_point(|range| range.end <= start);
    changed.get(first).is_some_and(|range| range.start < start + REGION_BYTES)
}

/// Whether a disk can have maps.
pub(super) fn has_maps(image: &ImageName) -> bool {
    let is_image = image.volume().is_none() && image.export().is_none();
    is_image && ferrite_host::names::is_file(&image.path)
}

/// The name by which the backups of a disk are known.
pub(super) fn name_of(image: &ImageName) -> String {
    if image.export().is_some() {
        return image.path.display().to_string();
    }
    let path = match image.volume() {
        Some((store, volume)) => absolute(store).map(|s| format!("{}#{volume}", s.display())),
        None => absolute(&image.path).map(|path| path.display().to_string()),
    };
    path.unwrap_or_else(|_| image.path.display().to_string())
}

pub(super) fn check_name(folder: &Folder, entries: &Entries, name: &str) -> Result<(), DiskError> {
    let what = || format!("cannot make backup {name} in {}", folder.path().display());
    if VolumeName::new(name).is_none() {
        let why = "a name has up to 63 letters, digits, \"-\", \"_\" or \".\", and begins with a letter or digit";
        return Err(DiskError::new(ErrorKind::Usage, what(), why, "choose another name"));
    }
    if entries.contains_key(name) {
        let help = "choose another name, or remove that one (ferrite backup prune --name)";
        return Err(refused(what(), "there is a backup of this name", help));
    }
    Ok(())
}

/// A name that no backup has: the time.
fn free_name(folder: &Folder, unix_s: u64) -> String {
    let name = crate::date::compact(unix_s);
    let is_free = |name: &str| {
        let data = folder.data(name).path;
        let partial = crate::files::beside(&data, PARTIAL);
        [folder.manifest(name), folder.unfinished(name), data, partial]
            .iter()
            .all(|path| path.symlink_metadata().is_err())
    };
    let more = (2..).map(|number| format!("{name}-{number}"));
    let mut names = std::iter::once(name.clone()).chain(more);
    names.find(|name| is_free(name)).unwrap_or(name)
}

/// The report of a backup.
pub(super) fn info(folder: &Folder, manifest: &Manifest, state: &'static str) -> BackupInfo {
    let data = folder.data(&manifest.name).path;
    let partial = crate::files::beside(&data, PARTIAL);
    let meta = data.symlink_metadata().or_else(|_| partial.symlink_metadata());
    BackupInfo {
        name: manifest.name.clone(),
        id: manifest.id.clone(),
        parent: manifest.parent.as_ref().map(|parent| parent.name.clone()),
        created_unix_s: manifest.created_unix_s,
        disk: manifest.disk.name.clone(),
        virtual_bytes: manifest.disk.virtual_bytes,
        data_bytes: meta.map_or(0, |meta| meta.len()),
        map: manifest.map.as_ref().map(|map| map.name.clone()),
        state,
        snapshot: None,
        why: None,
    }
}

/// The error of a backup that ended before it was complete.
fn stopped(what: String, e: std::io::Error, is_continued: bool) -> DiskError {
    let help = match is_continued {
        true => "; the next backup of this disk into this folder continues",
        false => "",
    };
    let e = broken(what, e);
    DiskError::new(e.kind(), e.what(), e.why(), format!("{}{help}", e.help()))
}
