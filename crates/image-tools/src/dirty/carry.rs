//! The maps of a disk whose image is exchanged or changed by a step that leaves the disk's contents as they are.
//!
//! Another file takes the image's name (snapshot, merge of the leaf, rebase). The order:
//! 1. The old image is flushed and complete, and nothing writes to it. The other file is complete and synced.
//! 2. A new file of maps, synced, gets the name of the old one, and the folder is synced. It fits both files: each with
//!    the time of its last change.
//! 3. The other file gets the image's name.
//! 4. The first write to the disk binds the maps to the file that has the name then (`disk-base/src/dirty/tracker.rs`).
//!
//! A crash before 3 leaves the old image, after it the new one, and in both cases maps that fit.
//!
//! The image itself is changed (resize, another parent). The order:
//! 1. The head says "open", durably: the time of the last change does not count.
//! 2. The image is changed, and synced.
//! 3. The head says "closed", with the new time.

use std::path::{Path, PathBuf};

use ferrite_disk::Disk;
use ferrite_disk_base::dirty::layout::{Head, State, regions};
use ferrite_disk_base::dirty::{
    Blocks, Content, Found, Image, MAX_DISK_BYTES, MAX_MAPS, Map, MapId, REGION_BYTES,
    forget_blocks, image_at, path_of,
};
use ferrite_disk_base::{DiskError, Raw, SECTOR_BYTES, plain};
use ferrite_host::clock::secret;
use rustix::fs::OFlags;

use super::{MapChange, apply};
use crate::io_context::IoContext;
use crate::{ImageTools, broken, unsuitable};

/// The maps of a disk whose image is complete, and that nothing writes to.
pub(crate) struct Maps {
    /// The image's file.
    path: PathBuf,
    bytes: u64,
    /// The maps that fit, with changes that are about to be made.
    pub(super) maps: Vec<Map>,
    /// Notes for the user.
    pub(crate) notes: Vec<String>,
    /// As they are in the file.
    old: Option<Old>,
}

/// A valid file of maps.
struct Old {
    content: Content,
    blocks: Option<Blocks>,
}

impl Old {
    /// The blocks of a region that have changed; 0, if there was no such map.
    fn changed(&self, id: &MapId, region: u64) -> u64 {
        let Some(index) = self.content.maps.iter().position(|map| map.id == *id) else { return 0 };
        // A part of the last region may be new.
        let is_known = region < self.content.head.bytes / REGION_BYTES;
        match &self.blocks {
            Some(blocks) if is_known => blocks.changed(index, region),
            _ => u64::MAX,
        }
    }
}

impl Maps {
    fn blocks(&self, id: &MapId, region: u64) -> u64 {
        let old = self.old.as_ref().filter(|old| old.content.maps.iter().any(|m| m.id == *id));
        let is_set = |map: &Map| map.bits[region as usize / 64] >> (region % 64) & 1 != 0;
        match (old, self.maps.iter().find(|map| map.id == *id)) {
            (Some(old), _) => old.changed(id, region),
            // A new map of a mirror has all bits set.
            (None, Some(map)) if is_set(map) => u64::MAX,
            _ => 0,
        }
    }

    /// Adds the maps of another image with the same contents. A map that both have has the changes of both.
    fn add(&mut self, other: &Maps) {
        for map in &other.maps {
            if let Some(own) = self.maps.iter_mut().find(|own| own.id == map.id) {
                own.bits.iter_mut().zip(&map.bits).for_each(|(own, bits)| *own |= bits);
            } else if self.maps.len() < MAX_MAPS && self.maps.iter().all(|own| own.name != map.name)
            {
                self.maps.push(map.clone());
            } else {
                let (name, path) = (&map.name, other.path.display());
                self.notes.push(format!("the map {name} that {path} had is given up"));
            }
        }
    }
}

/// An image that is about to be changed by a step that leaves the disk's contents.
pub(crate) struct Changing(Option<Found>);

impl Changing {
    /// Notes that the change is made; the image is at `path`, complete and synced, and still locked.
    ///
    /// # Errors
    /// The file cannot be written. The maps are valid.
    pub(crate) fn end(self, path: &Path) -> Result<(), DiskError> {
        let Some(mut found) = self.0 else { return Ok(()) };
        let image = plain::open(path, OFlags::RDONLY)
            .map_err(|e| broken(format!("cannot look at {}", path.display()), e))?;
        found.end_change(&image)
    }
}

impl ImageTools<'_> {
    /// The maps of an image that fit it. Void ones are given up, with a note.
    pub(super) fn maps_of(&self, raw: &Raw, bytes: u64) -> Result<Maps, DiskError> {
        let (path, notes) = (raw.path().to_owned(), Vec::new());
        let mut maps = Maps { path, bytes, maps: Vec::new(), notes, old: None };
        let Some(found) = Found::open(raw, bytes, false)? else { return Ok(maps) };
        let blocks = self.readable_state().and_then(|dir| found.blocks(raw, dir));
        let content = match (found.void, found.content) {
            (None, Some(content)) => content,
            (void, content) => {
                let names: Vec<String> =
                    content.into_iter().flat_map(|c| c.maps).map(|map| map.name).collect();
                let why = void.unwrap_or_default();
                maps.notes.push(format!("void maps are given up ({}): {why}", names.join(", ")));
                return Ok(maps);
            }
        };
        maps.maps.clone_from(&content.maps);
        grow(&mut maps.maps, content.head.bytes, bytes);
        maps.old = Some(Old { content, blocks });
        Ok(maps)
    }

    /// The maps of a disk that is complete, to be carried to another file. With `begin`, a map of this name is among
    /// them, in which nothing has changed.
    ///
    /// # Errors
    /// They cannot be read; the map cannot be begun.
    pub(crate) fn maps_to_carry(
        &self,
        disk: &Disk,
        begin: Option<&str>,
        what: impl Fn() -> String,
    ) -> Result<Option<Maps>, DiskError> {
        let bytes = disk.sectors() * SECTOR_BYTES;
        let Some(raw) = disk.image_file().filter(|_| bytes <= MAX_DISK_BYTES) else {
            return match begin {
                None => Ok(None),
                Some(_) => Err(unsuitable(
                    what(),
                    "only a disk of at most 64 TiB in a file can have dirty maps",
                    "leave the map out",
                )),
            };
        };
        let mut maps = self.maps_of(raw, bytes)?;
        if let Some(name) = begin {
            apply(&mut maps.maps, &MapChange::Begin(name.to_owned()), bytes, what)?;
        }
        Ok(Some(maps))
    }

    /// Has the maps fit the file at `next`, too, which is about to get the image's name `name`: step 2.
    pub(crate) fn carry_maps(
        &self,
        maps: &Maps,
        next: &Path,
        name: &Path,
    ) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot carry the dirty maps of {}", name.display()), e);
        if maps.maps.is_empty() {
            return Ok(());
        }
        let old = image_at(&maps.path).map_err(cannot)?;
        let other = Some(image_at(next).map_err(cannot)?);
        let content = content(maps, old, other).map_err(cannot)?;
        self.leave_blocks(maps, &content.head, next).map_err(cannot)?;
        self.put_maps(maps, &content, name).map_err(cannot)
    }

    /// Leaves the maps as they are beside `parent`, another name of the image, which is not written any more.
    pub(crate) fn freeze_maps(&self, maps: &Maps, parent: &Path) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot keep the dirty maps for {}", parent.display()), e);
        let Some(old) = &maps.old else { return Ok(()) };
        let closed = image_at(&maps.path).map_err(cannot)?;
        let state = State::Closed(closed.changed.0, closed.changed.1);
        let head = Head { state, ..old.content.head.clone() };
        let content =
            Content { head, identity: closed.identity, other: None, ..old.content.clone() };
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        self.replace_file(&mut context, &path_of(parent), &content.to_bytes()).map_err(cannot)
    }

    /// Gives the image at `name` these maps, as its own.
    pub(super) fn write_maps(&self, maps: &Maps, name: &Path) -> std::io::Result<()> {
        if maps.maps.is_empty() {
            self.remove_maps(&path_of(name))?;
            return self.forget_blocks(name, None);
        }
        let content = content(maps, image_at(name)?, None)?;
        self.put_maps(maps, &content, name)?;
        // The old file of maps is gone for good.
        self.forget_blocks(name, Some(&content.head.file))
    }

    /// Removes what is in memory of an image's earlier files of maps.
    fn forget_blocks(&self, name: &Path, keep: Option<&MapId>) -> std::io::Result<()> {
        let Some(dir) = self.readable_state() else { return Ok(()) };
        let image = plain::open(name, OFlags::RDONLY)?;
        forget_blocks(dir, &image, name, keep);
        Ok(())
    }

    fn put_maps(&self, maps: &Maps, content: &Content, name: &Path) -> std::io::Result<()> {
        self.leave_blocks(maps, &content.head, &maps.path)?;
        let mut context = IoContext::new(self, 1)?;
        self.replace_file(&mut context, &path_of(name), &content.to_bytes())
    }

    /// Leaves the blocks in memory for the image at this path. It is done before the file of maps gets its name.
    fn leave_blocks(&self, maps: &Maps, head: &Head, path: &Path) -> std::io::Result<()> {
        let Some(dir) = self.readable_state() else { return Ok(()) };
        let image = plain::open(path, OFlags::RDONLY)?;
        let before = |map: usize, region: u64| maps.blocks(&maps.maps[map].id, region);
        Blocks::leave(dir, &image, path, head, before);
        Ok(())
    }

    /// Removes the maps of an image that is gone.
    pub(crate) fn forget_maps(&self, image: &Path) -> Result<(), DiskError> {
        let path = path_of(image);
        let cannot = |e| broken(format!("cannot remove {}", path.display()), e);
        self.remove_maps(&path).map_err(cannot)
    }

    /// Begins a change of an image that is complete, and that leaves the disk's contents.
    pub(crate) fn begin_change(&self, disk: &Disk) -> Result<Changing, DiskError> {
        let bytes = disk.sectors() * SECTOR_BYTES;
        let Some(raw) = disk.image_file() else { return Ok(Changing(None)) };
        let Some(mut found) = Found::open(raw, bytes, true)? else { return Ok(Changing(None)) };
        let begun = found.begin_change()?;
        Ok(Changing(begun.then_some(found)))
    }

    /// The valid maps of an image that is not written to, for another host: the bytes of a file of maps.
    ///
    /// # Errors
    /// They cannot be read, or are void.
    pub fn pack_maps(&self, name: &ferrite_disk_base::ImageName) -> Result<Vec<u8>, DiskError> {
        let what = || format!("cannot pack the dirty maps of {}", name.path.display());
        let disk = self.open(name, true)?;
        let mut maps = self.maps_to_carry(&disk, None, what)?;
        if let Some(maps) = &mut maps {
            // The map of a mirror says what its target lacks. It is of no use elsewhere.
            maps.maps.retain(|map| !map.name.starts_with(super::MIRROR_MAP));
        }
        match maps {
            Some(maps) if !maps.maps.is_empty() => {
                let own = image_at(&maps.path).map_err(|e| broken(what(), e))?;
                Ok(content(&maps, own, None).map_err(|e| broken(what(), e))?.to_bytes())
            }
            maps => {
                let notes =
                    maps.map(|maps| maps.notes.join("; ")).filter(|notes| !notes.is_empty());
                let why = notes.unwrap_or_else(|| "it has none".to_owned());
                Err(unsuitable(what(), why, "make a full backup where the disk is then"))
            }
        }
    }

    /// Gives an image the maps that [`pack_maps`](Self::pack_maps) has made of a disk with the same contents. They are
    /// written beside `path`, a name that the image is about to get.
    ///
    /// # Errors
    /// They are damaged, or of a larger disk; errors of the kernel.
    pub fn adopt_maps(
        &self,
        packed: &[u8],
        name: &ferrite_disk_base::ImageName,
        path: &Path,
    ) -> Result<crate::Done, DiskError> {
        let what = || format!("cannot adopt dirty maps for {}", name.path.display());
        let cannot = |e| broken(what(), e);
        let disk = std::sync::Arc::new(self.open(name, false)?);
        self.complete(&mut IoContext::new(self, 1).map_err(cannot)?, &disk).map_err(cannot)?;
        let bytes = disk.sectors() * SECTOR_BYTES;
        let content_of = Content::parse(packed)
            .map_err(|why| unsuitable(what(), why, "make a full backup of it"))?;
        if content_of.head.bytes > bytes || disk.image_file().is_none() {
            let why = "they are of a larger disk, or the image is no file";
            return Err(unsuitable(what(), why, "make a full backup of it"));
        }
        let mut maps = content_of.maps.clone();
        grow(&mut maps, content_of.head.bytes, bytes);
        let own = name.path.clone();
        // The blocks of the other host are not known: each region that has changed counts as a whole.
        let old = Some(Old { content: content_of, blocks: None });
        let maps = Maps { path: own, bytes, maps, notes: Vec::new(), old };
        let content =
            content(&maps, image_at(&name.path).map_err(cannot)?, None).map_err(cannot)?;
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        self.replace_file(&mut context, &path_of(path), &content.to_bytes()).map_err(cannot)?;
        Ok(crate::create::done(name, bytes, maps.notes))
    }

    /// Gives the maps of an image to another one, which reads the same; with `begin`, and a new one. The maps that the
    /// other one has stay, if their names are not taken.
    ///
    /// # Errors
    /// One of them is in use, or is no file; errors of the kernel. The other one has its old maps then.
    pub fn copy_maps(
        &self,
        from: &ferrite_disk_base::ImageName,
        to: &ferrite_disk_base::ImageName,
        begin: Option<&str>,
    ) -> Result<crate::Done, DiskError> {
        let (source, target) = (from.path.display(), to.path.display());
        let what = || format!("cannot copy the dirty maps of {source} to {target}");
        let cannot = |e| broken(what(), e);
        let disk = self.open(from, true)?;
        let bytes = disk.sectors() * SECTOR_BYTES;
        let Some(mut maps) = self.maps_to_carry(&disk, begin, what)? else {
            return Ok(crate::create::done(to, bytes, Vec::new()));
        };
        if crate::files::same_file(&from.path, &to.path).map_err(cannot)? {
            // Another name of the same file.
            self.write_maps(&maps, &to.path).map_err(cannot)?;
            return Ok(crate::create::done(to, bytes, maps.notes));
        }
        let other = std::sync::Arc::new(self.open(to, false)?);
        self.complete(&mut IoContext::new(self, 1).map_err(cannot)?, &other).map_err(cannot)?;
        let other_bytes = other.sectors() * SECTOR_BYTES;
        let Some(raw) = other.image_file() else {
            let help = "leave its maps out, and make a full backup of it";
            return Err(unsuitable(what(), format!("{target} cannot have maps"), help));
        };
        if other_bytes < bytes {
            let why = format!("{target} has {other_bytes} bytes, and {source} has {bytes}");
            return Err(unsuitable(what(), why, "name an image with the same contents"));
        }
        let own = self.maps_of(raw, other_bytes)?;
        grow(&mut maps.maps, bytes, other_bytes);
        maps.bytes = other_bytes;
        maps.add(&own);
        let content = image_at(&to.path).and_then(|image| content(&maps, image, None));
        let content = content.map_err(cannot)?;
        if let Some(dir) = self.readable_state() {
            let before = |map: usize, region: u64| {
                let id = &maps.maps[map].id;
                let is_new = region >= bytes / REGION_BYTES && bytes < other_bytes;
                let grown = if is_new { u64::MAX } else { 0 };
                maps.blocks(id, region) | own.blocks(id, region) | grown
            };
            Blocks::leave(dir, raw.fd(), raw.path(), &content.head, before);
        }
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        match maps.maps.is_empty() {
            true => {}
            false => self
                .replace_file(&mut context, &path_of(&to.path), &content.to_bytes())
                .map_err(cannot)?,
        }
        Ok(crate::create::done(to, other_bytes, maps.notes))
    }
}

/// Marks the part that the disk has grown by as changed.
fn grow(maps: &mut [Map], known: u64, bytes: u64) {
    for map in maps {
        map.bits.resize(regions(bytes).div_ceil(64) as usize, 0);
        if bytes > known {
            for region in known / REGION_BYTES..regions(bytes) {
                map.bits[region as usize / 64] |= 1 << (region % 64);
            }
        }
    }
}

/// A file of these maps for an image that is complete, and for another one.
fn content(maps: &Maps, image: Image, other: Option<Image>) -> std::io::Result<Content> {
    let Image { identity, changed: (seconds, nanoseconds) } = image;
    let state = State::Closed(seconds, nanoseconds);
    let (bytes, maps) = (maps.bytes, maps.maps.clone());
    let head = Head { file: secret()?, state, maps: maps.len(), bytes, opening: 0 };
    Ok(Content { head, identity, other, maps, damaged: 0 })
}
