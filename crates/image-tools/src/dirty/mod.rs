//! The maps of what has changed on a disk: begun, cleared and ended while the image is not in use; and carried to
//! another image of the disk.
//!
//! The order of writes is in `disk-base/src/dirty/mod.rs`. A crash at any point leaves the old maps or the new ones.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_disk_base::dirty::layout::regions;
use ferrite_disk_base::dirty::{MAX_DISK_BYTES, MAX_MAPS, Map, MapId, found, path_of};
use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, SECTOR_BYTES, VolumeName};
use ferrite_host::clock::{secret, unix_time_s};
use ferrite_images::Image;

use super::files::{beside, check_regular};
use super::io_context::{BUFFER_BYTES, IoContext};
use super::report::{Changed, DirtyMap, DirtyMaps, Done};
use super::{ImageTools, broken, parent_dir, refused, unsuitable};

mod carry;

/// The end of the temporary name.
const NEW: &str = ".new";

/// A change of an image's maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapChange {
    /// Begins a map of this name, in which nothing has changed.
    Begin(String),
    /// Ends this map, and begins another of its name.
    Clear(String),
    /// Ends this map.
    End(String),
    /// Begins the map of a mirror, or begins it anew: its target lacks everything. Other maps have no such name.
    Mirror(String),
}

pub use ferrite_disk_base::dirty::MIRROR_MAP;

impl ImageTools<'_> {
    /// The maps of an image, with what has changed.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn dirty_maps(&self, name: &ImageName) -> Result<DirtyMaps, DiskError> {
        let disk = match name.format {
            // The maps are those of its own file, wherever its parents are.
            Format::Vhd | Format::Qcow2 => {
                Disk::Image(Image::open_alone(name, &ImageTools::even_parents(self.options(true)))?)
            }
            _ => self.open(name, true)?,
        };
        let virtual_bytes = disk.sectors() * SECTOR_BYTES;
        let Some(seen) = disk.maps(self.readable_state())? else {
            return Ok(DirtyMaps { virtual_bytes, ..DirtyMaps::default() });
        };
        let map = |map: &found::SeenMap| DirtyMap {
            name: map.name.clone(),
            id: hex(&map.id),
            begun_s: map.begun_s,
            changed_bytes: map.changed.iter().map(|part| part.end - part.start).sum(),
            changed: map
                .changed
                .iter()
                .map(|part| Changed {
                    start_bytes: part.start,
                    length_bytes: part.end - part.start,
                })
                .collect(),
        };
        Ok(DirtyMaps {
            virtual_bytes,
            path: Some(seen.path.display().to_string()),
            void: seen.void,
            damaged_sectors: seen.damaged,
            maps: seen.maps.iter().map(map).collect(),
        })
    }

    /// Changes the maps of an image that is not in use.
    ///
    /// # Errors
    /// The image is in use, or is no file; there is such a map, or none; too many maps; errors of the kernel. The old
    /// maps stay then.
    pub fn change_maps(&self, name: &ImageName, change: &MapChange) -> Result<Done, DiskError> {
        let what = || format!("cannot change the dirty maps of {}", name.path.display());
        let disk = Arc::new(self.open(name, false)?);
        let Some(raw) = disk.image_file() else {
            let why = "only an image in a file can have them: a device and a volume have no place beside them";
            return Err(unsuitable(
                what(),
                why,
                "use an image in a file; a store sends what has changed (ferrite store send)",
            ));
        };
        let bytes = disk.sectors() * SECTOR_BYTES;
        if bytes > MAX_DISK_BYTES {
            return Err(unsuitable(what(), "the disk is larger than 64 TiB", "leave its maps out"));
        }
        let mut context = IoContext::new(self, 1).map_err(|e| broken(what(), e))?;
        self.complete(&mut context, &disk).map_err(|e| broken(what(), e))?;
        drop(context);
        let mut maps = self.maps_of(raw, bytes)?;
        apply(&mut maps.maps, change, bytes, what)?;
        self.write_maps(&maps, raw.path()).map_err(|e| broken(what(), e))?;
        let mut notes = maps.notes;
        if let MapChange::Begin(_) | MapChange::Clear(_) = change {
            notes.push(format!("{} has to stay beside the image", path_of(raw.path()).display()));
        }
        Ok(Done {
            path: name.path.display().to_string(),
            format: name.format.name(),
            virtual_bytes: bytes,
            notes,
        })
    }

    /// Makes all data durable, and the image complete for other programs: no map will name what is durable now.
    fn complete(&self, context: &mut IoContext, disk: &Arc<Disk>) -> io::Result<()> {
        let port = context.port(disk)?;
        context.run(disk.close(&port))
    }

    fn remove_maps(&self, path: &Path) -> io::Result<()> {
        match self.directory.remove(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.directory.sync(parent_dir(path))
    }

    /// Gives the name to a file with these contents, durably. The order: the file is written under a temporary name and
    /// synced, it gets the name, and the folder is synced.
    pub(super) fn replace_file(
        &self,
        context: &mut IoContext,
        path: &Path,
        bytes: &[u8],
    ) -> io::Result<()> {
        let new = beside(path, NEW);
        let file = Arc::new(self.new_maps(&new)?);
        let buffer = context.buffer()?;
        let port = context.port_of(vec![file])?;
        context.run(async {
            for (i, part) in bytes.chunks(BUFFER_BYTES).enumerate() {
                let span = buffer.slice(0, part.len());
                port.memory().copy_in(span, part);
                port.io.write_all(port.files[0], (i * BUFFER_BYTES) as u64, span).await?;
            }
            port.io.sync(port.files[0]).await
        })?;
        self.directory.rename(&new, path)?;
        self.directory.sync(parent_dir(path))
    }

    /// Makes the file under its temporary name. One that is there was left by a program that was killed: the image is
    /// locked.
    fn new_maps(&self, new: &Path) -> io::Result<OwnedFd> {
        match self.directory.create_new(new) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                check_regular(new, String::new()).map_err(|e| io::Error::other(e.why()))?;
                self.directory.remove(new)?;
                self.directory.create_new(new)
            }
            made => made,
        }
    }
}

fn hex(id: &MapId) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

fn apply(
    maps: &mut Vec<Map>,
    change: &MapChange,
    bytes: u64,
    what: impl Fn() -> String,
) -> Result<(), DiskError> {
    let (MapChange::Begin(name)
    | MapChange::Clear(name)
    | MapChange::End(name)
    | MapChange::Mirror(name)) = change;
    if VolumeName::new(name).is_none() {
        let why = format!(
            "{name:?} cannot be the name of a map: it has up to 63 letters, digits, \"-\", \"_\" or \".\", and begins with a \
             letter or digit"
        );
        return Err(DiskError::new(ErrorKind::Usage, what(), why, "choose another name"));
    }
    let is_mirrors = matches!(change, MapChange::Mirror(_) | MapChange::End(_));
    if name.starts_with(MIRROR_MAP) && !is_mirrors {
        // A cleared one would say that the target lacks nothing.
        let why = format!("maps of mirrors alone have names that begin with {MIRROR_MAP:?}");
        return Err(DiskError::new(ErrorKind::Usage, what(), why, "choose another name"));
    }
    let at = maps.iter().position(|map| map.name == *name);
    match (change, at) {
        (MapChange::Begin(_), Some(_)) => {
            let help = "choose another name; ferrite image dirty clear begins this map anew";
            return Err(refused(what(), format!("there is a map {name}"), help));
        }
        (MapChange::Begin(_) | MapChange::Mirror(_), None) if maps.len() == MAX_MAPS => {
            let help = "end one that is not needed any more (ferrite image dirty remove)";
            return Err(refused(what(), format!("it has {MAX_MAPS} maps, and no more fit"), help));
        }
        (MapChange::Clear(_) | MapChange::End(_), None) => {
            let help = "ferrite image dirty list shows the maps that there are";
            let why = format!("there is no map {name} that fits the image");
            return Err(DiskError::new(ErrorKind::NotFound, what(), why, help));
        }
        (_, at) => at.map(|at| maps.remove(at)),
    };
    if !matches!(change, MapChange::End(_)) {
        let id = secret().map_err(|e| broken(what(), e))?;
        let word = if matches!(change, MapChange::Mirror(_)) { u64::MAX } else { 0 };
        let bits = vec![word; regions(bytes).div_ceil(64) as usize];
        maps.push(Map { name: name.clone(), id, begun_s: unix_time_s(), bits });
    }
    Ok(())
}
