//! Which maps a backup uses: the one that names what has changed since the last backup, and the one that is begun.

use ferrite_disk_base::{DiskError, ErrorKind, ImageName, VolumeName};

use super::BackupKind;
use super::create::BackUp;
use super::folder::{Entries, Folder, MAX_CHAIN, depth};
use super::manifest::{Manifest, Reference};
use crate::io_context::IoContext;
use crate::{DirtyMap, DirtyMaps, ImageTools, MapChange, broken, refused};

/// The part of a map's name that is the user's has at most so many bytes.
const NAME_BYTES: usize = 60;

/// The maps of a backup that is about to be made.
pub(super) struct Maps {
    /// The map that names what is copied, and the backup with which it was begun; `None`: everything is copied.
    pub(super) last: Option<(Reference, Reference)>,
    /// The map that this backup begins.
    pub(super) next: Reference,
    /// The unfinished backup that is continued.
    pub(super) resumed: Option<Manifest>,
}

/// Which maps a backup will use.
pub(super) struct Chosen {
    /// As in [`Maps`].
    pub(super) last: Option<(Reference, Reference)>,
    pub(super) next: Next,
}

/// The map that belongs to the next backup.
pub(super) enum Next {
    /// That of an unfinished backup, which is continued.
    Continued(Reference, Box<Manifest>),
    /// One that is to be begun.
    New(String),
}

/// The maps that were found.
struct Sorted<'a> {
    /// The map that belongs to the newest backup, and that backup.
    last: Option<(&'a DirtyMap, &'a Manifest)>,
    /// The maps that belong to no complete backup.
    open: Vec<&'a DirtyMap>,
    /// The map of an older backup: step 6 did not end it.
    older: Option<&'a DirtyMap>,
}

impl ImageTools<'_> {
    /// Chooses the maps, and begins the next one, durably.
    pub(super) fn begin_maps(
        &self,
        image: &ImageName,
        of: (&Folder, &Entries),
        (how, map): (&BackUp, &str),
        notes: &mut Vec<String>,
    ) -> Result<Maps, DiskError> {
        let found = self.dirty_maps(image)?;
        let end = |name: &str| self.change_maps(image, &MapChange::End(name.to_owned())).map(drop);
        let chosen = self.choose_maps((image, &found), of, (how, map), &end, notes)?;
        let last = chosen.last;
        match chosen.next {
            Next::Continued(next, old) => Ok(Maps { last, next, resumed: Some(*old) }),
            Next::New(next) => {
                self.write_begun(of.0, map, b"")?;
                self.change_maps(image, &MapChange::Begin(next.clone()))?;
                let next = self.begun_map(self, image, &next)?;
                Ok(Maps { last, next, resumed: None })
            }
        }
    }

    /// Writes, durably, that a map of this name is begun for this folder.
    pub(super) fn write_begun(
        &self,
        folder: &Folder,
        map: &str,
        text: &[u8],
    ) -> Result<(), DiskError> {
        let note = folder.begun(map);
        let cannot = |e| broken(format!("cannot write {}", note.display()), e);
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        self.replace_file(&mut context, &note, text).map_err(cannot)
    }

    /// The map that was begun just now.
    pub(super) fn begun_map(
        &self,
        reader: &ImageTools<'_>,
        image: &ImageName,
        name: &str,
    ) -> Result<Reference, DiskError> {
        let begun = reader.dirty_maps(image)?.maps.into_iter().find(|map| map.name == name);
        let begun = begun.ok_or_else(|| {
            let what = format!("cannot back up {}", image.path.display());
            let help = "run the same command again";
            DiskError::new(ErrorKind::InUse, what, "another command changes its maps", help)
        })?;
        Ok(Reference { name: begun.name, id: begun.id })
    }

    /// Chooses the maps among those that were found. Maps that are not needed any more are ended.
    pub(super) fn choose_maps(
        &self,
        (image, found): (&ImageName, &DirtyMaps),
        (folder, entries): (&Folder, &Entries),
        (how, map): (&BackUp, &str),
        end: &dyn Fn(&str) -> Result<(), DiskError>,
        notes: &mut Vec<String>,
    ) -> Result<Chosen, DiskError> {
        let what = format!("cannot back up {}", image.path.display());
        let usage =
            |why: String, help: &str| DiskError::new(ErrorKind::Usage, what.clone(), why, help);
        if VolumeName::new(map).is_none() || map.len() > NAME_BYTES {
            let why = format!("{map:?} cannot be the name of a map");
            return Err(usage(why, "take up to 60 letters, digits, \"-\", \"_\" or \".\""));
        }
        let names = [format!("{map}.1"), format!("{map}.2")];
        if let Some(why) = &found.void {
            notes.push(format!("the dirty maps are void, so all is copied: {why}"));
        }
        let ours = |m: &&DirtyMap| found.void.is_none() && names.contains(&m.name);
        let ours: Vec<&DirtyMap> = found.maps.iter().filter(ours).collect();
        let sorted = sort(&ours, entries);
        let unfinished = self.unfinished_of(folder, &sorted.open)?;
        // A process that ended between the begin of a map and its manifest has left this file.
        let was_begun = folder.begun(map).symlink_metadata().is_ok();
        let is_foreign = sorted.last.is_none()
            && unfinished.is_none()
            && !was_begun
            && how.kind != BackupKind::Full;
        if let Some(open) = sorted.open.first().filter(|_| is_foreign) {
            let why = format!(
                "its map {} belongs to no usable backup in {}",
                open.name,
                folder.path().display()
            );
            let help = "name the folder of that backup, or another map (--map); --full begins the map anew, and the \
                        next incremental backup into the other folder has to be a full one then";
            return Err(refused(what, why, help));
        }
        let last = self.last_of(&sorted, entries, (how, found.virtual_bytes), &what, notes)?;
        let resumed = unfinished.filter(|old| {
            old.parent == last.as_ref().map(|last| last.1.clone())
                && old.disk.virtual_bytes == found.virtual_bytes
                && how.name.as_ref().is_none_or(|name| *name == old.name)
        });
        if let Some(older) = sorted.older {
            end(&older.name)?;
        }
        let continued = resumed.and_then(|old| Some((old.map.clone()?, Box::new(old))));
        let is_kept =
            |map: &DirtyMap| continued.as_ref().is_some_and(|(next, _)| next.id == map.id);
        for open in sorted.open.iter().filter(|map| !is_kept(map)) {
            end(&open.name)?;
        }
        if let Some((next, old)) = continued {
            return Ok(Chosen { last, next: Next::Continued(next, old) });
        }
        let taken = sorted.last.map(|last| last.0.name.as_str());
        let [one, two] = names;
        let next = if taken == Some(one.as_str()) { two } else { one };
        Ok(Chosen { last, next: Next::New(next) })
    }

    /// The unfinished backup that began one of these maps.
    fn unfinished_of(
        &self,
        folder: &Folder,
        open: &[&DirtyMap],
    ) -> Result<Option<Manifest>, DiskError> {
        if open.is_empty() {
            return Ok(None);
        }
        for name in folder.names(super::folder::UNFINISHED)? {
            if let Ok(old) = Manifest::read(&folder.unfinished(&name), &name)
                && open.iter().any(|m| old.map.as_ref().is_some_and(|of| of.id == m.id))
            {
                return Ok(Some(old));
            }
        }
        Ok(None)
    }

    /// The last map and its backup, if an incremental backup is possible and asked for.
    fn last_of(
        &self,
        sorted: &Sorted<'_>,
        entries: &Entries,
        (how, bytes): (&BackUp, u64),
        what: &str,
        notes: &mut Vec<String>,
    ) -> Result<Option<(Reference, Reference)>, DiskError> {
        if how.kind == BackupKind::Full {
            return Ok(None);
        }
        let why = match sorted.last {
            None => "no map of the image belongs to a backup in this folder".to_owned(),
            Some((_, parent)) if depth(entries, parent) + 2 > MAX_CHAIN => {
                format!("{MAX_CHAIN} backups stand on each other, and no more can")
            }
            Some((_, parent)) if parent.disk.virtual_bytes > bytes => {
                "the disk is smaller than it was".to_owned()
            }
            Some((map, parent)) => {
                let last = Reference { name: map.name.clone(), id: map.id.clone() };
                return Ok(Some((last, parent.reference())));
            }
        };
        if how.kind == BackupKind::Incremental {
            let help = "make a full backup first (--full)";
            return Err(refused(what.to_owned(), why, help));
        }
        if !entries.is_empty() {
            notes.push(format!("this is a full backup: {why}"));
        }
        Ok(None)
    }
}

fn sort<'a>(ours: &[&'a DirtyMap], entries: &'a Entries) -> Sorted<'a> {
    let backup = |map: &DirtyMap| {
        let mut good = entries.values().filter_map(|entry| entry.as_ref().ok());
        good.find(|backup| backup.map.as_ref().is_some_and(|of| of.id == map.id))
    };
    let mut sorted = Sorted { last: None, open: Vec::new(), older: None };
    for map in ours {
        let Some(of) = backup(map) else {
            sorted.open.push(map);
            continue;
        };
        let is_newer = |than: &Manifest| {
            let stands = of.parent.as_ref().is_some_and(|parent| parent.id == than.id);
            let is_below = than.parent.as_ref().is_some_and(|parent| parent.id == of.id);
            stands || (!is_below && map.begun_s >= than.created_unix_s)
        };
        match sorted.last {
            Some((_, backup)) if !is_newer(backup) => sorted.older = Some(map),
            last => {
                sorted.older = last.map(|last| last.0);
                sorted.last = Some((map, of));
            }
        }
    }
    sorted
}
