//! The images of a repository: what each call on a volume does to them.
//!
//! A snapshot or a clone is a new image on what the volume was. That gets a name of its own and is hidden, and the volume
//! goes on in a new image on it, with its own name, so that its URI stays. A volume that was not written to since needs
//! no new image: the next clone stands beside it. Hidden images go when no image stands on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use ferrite_disk::{ErrorKind, Format, ImageName};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{ImageTools, Info, NewImage, NewSize, Resize};
use ferrite_io::engines::EngineChoice;

use super::taps::{Row, Tap, Taps};
use super::uri::Image;
use super::volume_folder::{Folder, Record, new_uuid};
use super::{Fault, Kind, collect, files};
use crate::image::{ENTRIES, allow_many_files, state_dir};
use crate::parents::ParentsArgs;
use crate::serve::{IMAGES, RUN_DIR};

/// The bits of a mode by which an image must not be written.
const WRITERS: u32 = 0o222;
/// The bit of the file's owner.
const OWNER: u32 = 0o200;
/// The name of an image's list of children in other folders has this suffix.
const CHILDREN_ELSEWHERE: &str = ".ferrite-children";
/// The name of an image that is being written has this suffix.
const UNFINISHED: &str = ".ferrite-new";

/// Whether an image that is in use may be read: what is read may be stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Locked,
    Unlocked,
}

/// The images of a repository.
pub(super) struct Images<'a> {
    pub(super) folder: &'a Folder,
    pub(super) taps: &'a dyn Taps,
    pub(super) run_dir: &'a Path,
}

impl Images<'_> {
    pub(super) fn tools(&self, look: Look) -> Result<ImageTools<'static>, Fault> {
        allow_many_files();
        let own = self.run_dir.join(IMAGES);
        let state_dir = match self.run_dir == Path::new(RUN_DIR) {
            true => state_dir(false)?,
            false => own.is_dir().then_some(own),
        };
        Ok(ImageTools {
            directory: &HostDirectory,
            engine: &|arena| EngineChoice::Auto.open(arena, ENTRIES),
            state_dir,
            fixed_size: false,
            unlocked: look == Look::Unlocked,
            parents: ParentsArgs::of(&[]).allowed()?,
            progress: &|_| true,
        })
    }

    pub(super) fn name(&self, key: &str) -> Result<(Image, ImageName), Fault> {
        let image = self.folder.image(key)?;
        let name = ImageName { format: image.format, path: image.path() };
        Ok((image, name))
    }

    /// The properties of an image, as far as its chain can be read. It may be in use.
    pub(super) fn info(&self, key: &str) -> Result<Info, Fault> {
        Ok(self.tools(Look::Unlocked)?.info_as_far(&self.name(key)?.1)?.0)
    }

    /// Makes an empty image, durably.
    pub(super) fn create(&self, key: &str, bytes: u64) -> Result<(), Fault> {
        let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
        self.tools(Look::Locked)?.create(&self.name(key)?.1, &new)?;
        Ok(())
    }

    /// Makes an image that reads as the one of `key` does now, durably.
    pub(super) fn create_from(&self, key: &str, new: &str) -> Result<(), Fault> {
        let base = self.base_of(key)?;
        let parent = Some(self.name(&base)?.1);
        let new_image = NewImage { parent, ..NewImage::default() };
        self.tools(Look::Locked)?.create(&self.name(new)?.1, &new_image)?;
        Ok(())
    }

    /// Says by the mode of an image that it is not written to.
    pub(super) fn protect(&self, key: &str) -> Result<(), Fault> {
        self.set_protected(key, true)
    }

    /// Whether the mode of an image allows no writing.
    pub(super) fn set_protected(&self, key: &str, protected: bool) -> Result<(), Fault> {
        let path = self.folder.path.join(key);
        let protected = fs::metadata(&path).and_then(|there| {
            let mode = there.mode() & 0o7777;
            let mode = if protected { mode & !WRITERS } else { mode | OWNER };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            fs::File::open(&path)?.sync_all()
        });
        protected
            .map_err(|e| Fault::of_io(format!("cannot change the mode of {}", path.display()), e))
    }

    pub(super) fn is_protected(&self, key: &str) -> bool {
        let there = fs::metadata(self.folder.path.join(key));
        there.is_ok_and(|there| there.mode() & WRITERS == 0)
    }

    /// An image that reads as this one and never changes: another one can stand on it.
    fn base_of(&self, key: &str) -> Result<String, Fault> {
        let (image, name) = self.name(key)?;
        let taps = self.open_taps(&image)?;
        let info = match (self.is_protected(key), taps.is_empty()) {
            (true, _) => Some(self.info(key)?),
            // It is locked while it is read, so a writer elsewhere makes this fail; the snapshot says so.
            (false, true) => self.tools(Look::Locked)?.info(&name).ok(),
            (false, false) => None,
        };
        if let Some(below) = info.as_ref().and_then(|info| self.unwritten_on(info)) {
            return Ok(below);
        }
        if self.is_protected(key) {
            return Ok(key.to_owned());
        }
        let base = new_key(image.format)?;
        // The order: see `volume_folder`. If the snapshot fails or is interrupted, the hidden name is a second one of
        // the volume's own file, or there is none.
        self.folder.set_record(&base, &Record::hidden())?;
        let (tools, base_name) = (self.tools(Look::Locked)?, self.name(&base)?.1);
        self.paused(&image, &taps, || Ok(tools.snapshot(&name, &base_name).map(drop)?))?;
        Ok(base)
    }

    /// The parent in this folder, if all is read from it.
    fn unwritten_on(&self, info: &Info) -> Option<String> {
        let [leaf, below, ..] = info.chain.as_slice() else { return None };
        let same = !leaf.journal
            && leaf.allocated_bytes == Some(0)
            && leaf.virtual_bytes == below.virtual_bytes;
        let base = self.key_of(Path::new(&below.path)).filter(|_| same)?;
        self.is_protected(&base).then_some(base)
    }

    /// The key of an image in this folder.
    fn key_of(&self, path: &Path) -> Option<String> {
        let path = path.canonicalize().ok()?;
        let key = path.strip_prefix(&self.folder.path).ok()?.to_str()?;
        self.folder.image(key).is_ok().then(|| key.to_owned())
    }

    /// Makes a disk larger. The guest that uses it sees that when it goes on.
    pub(super) fn resize(&self, key: &str, bytes: u64) -> Result<(), Fault> {
        let (image, name) = self.name(key)?;
        let (taps, tools) = (self.open_taps(&image)?, self.tools(Look::Locked)?);
        let resize = || Ok(tools.resize(&name, NewSize::To(bytes), Resize::default()).map(drop)?);
        self.paused(&image, &taps, resize)
    }

    /// Refuses an image that is in use.
    pub(super) fn check_unused(&self, key: &str) -> Result<(), Fault> {
        let (image, name) = self.name(key)?;
        let used = match self.open_taps(&image)?.first() {
            Some(tap) => Some(format!("the tap of process {} has it open", tap.pid)),
            None => match self.tools(Look::Locked)?.info(&name) {
                Err(e) if e.kind() == ErrorKind::InUse => Some(e.why().to_owned()),
                _ => None,
            },
        };
        used.map_or(Ok(()), |why| {
            let help = "detach it from its guest first";
            let text = format!("cannot destroy {}: it is in use ({why}); {help}", image.path);
            Err(Fault::new(Kind::Failed, text))
        })
    }

    /// The taps that have an image open. Without a daemon there may be some: locks on the image tell.
    fn open_taps(&self, image: &Image) -> Result<Vec<Tap>, Fault> {
        let rows = match self.taps.list() {
            Err(e) if e.is_no_daemon() => Vec::new(),
            rows => rows?,
        };
        let is_open = |row: &&Row| row.is_open() && row.path() == Some(&image.path);
        Ok(rows.iter().filter(is_open).filter_map(Row::tap).collect())
    }

    /// The minors of taps that have images of this folder open, and the images' keys.
    pub(super) fn open_leaves(&self) -> Result<Vec<(u32, String)>, Fault> {
        let rows = match self.taps.list() {
            Err(e) if e.is_no_daemon() => Vec::new(),
            rows => rows?,
        };
        let leaf = |row: &Row| Some((row.minor?, self.key_of(Path::new(row.path()?))?));
        Ok(rows.iter().filter(|row| row.is_open()).filter_map(leaf).collect())
    }

    /// Changes an image while its taps are paused. They go on with the image of that name, changed or not. A tap that a
    /// death of this process leaves paused goes on after the next such change, or the next activate.
    fn paused(
        &self,
        image: &Image,
        taps: &[Tap],
        change: impl FnOnce() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        taps.iter().try_for_each(|tap| collect::end_jobs(self.run_dir, tap.minor))?;
        let paused = taps.iter().try_for_each(|tap| self.taps.pause(*tap));
        let changed = paused.map_err(Fault::from).and_then(|()| change());
        for tap in taps {
            let resumed = self.taps.unpause(*tap, image).map_err(Fault::from);
            if let (Ok(()), Err(fault)) = (&changed, resumed) {
                let Tap { pid, minor } = tap;
                let again = format!("its guest waits; tap-ctl unpause -p {pid} -m {minor}");
                let text = format!("cannot resume {}: {}; {again}", image.path, fault.text);
                return Err(Fault::new(fault.kind, text));
            }
        }
        changed
    }

    /// Removes hidden images that no image stands on, and then those that stood below them; and what killed calls have
    /// left of files that they were writing.
    ///
    /// The order: the image is removed, durably, then its file that says that it is hidden.
    pub(super) fn sweep(&self) -> Result<(), Fault> {
        self.folder.remove_unfinished();
        let keys = self.folder.keys()?;
        let mut hidden = BTreeSet::new();
        for key in self.folder.recorded() {
            if self.folder.record(&key)?.is_some_and(|record| record.hidden) {
                match self.folder.has(&key) {
                    true => drop(hidden.insert(key)),
                    false => self.remove(&key)?,
                }
            }
        }
        if hidden.is_empty() {
            return Ok(());
        }
        let Some(mut parents) = self.parents(&keys, &hidden)? else { return Ok(()) };
        while let Some(key) = hidden.iter().find(|key| !self.has_children(key, &parents)).cloned() {
            hidden.remove(&key);
            parents.remove(&key);
            self.remove(&key)?;
        }
        Ok(())
    }

    /// Removes an image, also one that was being written, then its file.
    fn remove(&self, key: &str) -> Result<(), Fault> {
        for name in [format!("{key}{UNFINISHED}"), key.to_owned()] {
            let path = self.folder.path.join(name);
            files::remove(&path)
                .map_err(|e| Fault::of_io(format!("cannot remove {}", path.display()), e))?;
        }
        self.folder.remove_record(key)
    }

    /// Whether images of other folders stand on it.
    pub(super) fn has_children_elsewhere(&self, key: &str) -> bool {
        let elsewhere = self.folder.path.join(format!("{key}{CHILDREN_ELSEWHERE}"));
        elsewhere.symlink_metadata().is_ok()
    }

    fn has_children(&self, key: &str, parents: &BTreeMap<String, String>) -> bool {
        self.has_children_elsewhere(key) || parents.values().any(|parent| parent == key)
    }

    /// The parent in this folder of each image that has one. `None`: an image that is in use as a volume cannot be read,
    /// and may stand on any.
    pub(super) fn parents(
        &self,
        keys: &[String],
        hidden: &BTreeSet<String>,
    ) -> Result<Option<BTreeMap<String, String>>, Fault> {
        let tools = self.tools(Look::Unlocked)?;
        let mut parents = BTreeMap::new();
        for key in keys {
            match tools.info_as_far(&self.name(key)?.1) {
                Ok((info, end)) => {
                    let below =
                        info.chain.get(1).and_then(|below| self.key_of(below.path.as_ref()));
                    match (below, end) {
                        (Some(below), _) => drop(parents.insert(key.clone(), below)),
                        (None, Some(_)) if !hidden.contains(key) => return Ok(None),
                        _ => {}
                    }
                }
                Err(_) if hidden.contains(key) => {}
                Err(_) => return Ok(None),
            }
        }
        Ok(Some(parents))
    }
}

/// The key of a new image.
pub(super) fn new_key(format: Format) -> Result<String, Fault> {
    Ok(format!("{}.{format}", new_uuid()?))
}

/// Whether a folder's file system has room, and how much.
pub(super) fn room(folder: &Path) -> io::Result<(u64, u64)> {
    let there = rustix::fs::statvfs(folder)?;
    Ok((there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize))
}

#[cfg(test)]
mod tests;
