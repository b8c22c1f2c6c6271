//! Merges a child into its parent.
//!
//! The order:
//! 1. The grandparent's list gets the child's name.
//! 2. The child's data are copied into the parent, then synced.
//! 3. The parent gets the child's identity, if the format has one, and its owner and mode.
//! 4. The disk's dirty maps fit both files from then on (`dirty/carry.rs`).
//! 5. The parent is renamed over the child.
//!
//! Until the last step the child hides every byte that changes, and reads as before. So a crash at any point leaves a
//! valid chain, and the same command does the rest.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, SECTOR_BYTES};
use ferrite_images::Image;
use ferrite_images::children::{self, Ask, absolute};

use super::copy::{Copying, Mode};
use super::create::done;
use super::files::{Protected, same_file, take_rights};
use super::formats::leaf;
use super::io_context::IoContext;
use super::merge;
use super::rebase::{check_snapshots, note_bitmaps};
use super::room::{self, Room};
use super::{Done, ImageTools, broken, formats, refused, unsuitable};

const UNKNOWN: &str = "mend that first (a clone that was moved: move it back, or, if it stands on nothing where it is, ferrite \
                       image rebase -u CLONE -b PARENT), or say --force if you know that there are none: they would be destroyed";
const LOST: &str = "if it stood on this image, say so (ferrite image rebase -u IMAGE -b PARENT, with the parent's name of \
                    now); otherwise give it its parent back, move it to another folder, or say --force";

/// The two images of a merge.
pub(super) struct Pair {
    pub(super) parent: ImageName,
    pub(super) parent_bytes: u64,
    pub(super) child_bytes: u64,
    /// Bytes of the grandparent's disk.
    pub(super) below_bytes: u64,
    /// The least space that the parent takes for the child's data.
    pub(super) needed_bytes: u64,
}

impl ImageTools<'_> {
    /// Merges `child` into its parent, which takes the child's name. The child's own children stay as they are. If the
    /// parent has another child, or may have one, that child's content would change: this needs `force`.
    ///
    /// # Errors
    /// One of the two is in use; `Refused`; those of the images. The child is intact in any case.
    pub fn coalesce(&self, child: &ImageName, force: bool) -> Result<Done, DiskError> {
        self.merge(child, &self.pair(child)?, force)
    }

    /// Merges the two. The facts that were read from the chain before the locks are checked again when both are locked.
    fn merge(&self, child: &ImageName, pair: &Pair, force: bool) -> Result<Done, DiskError> {
        let what = || format!("cannot coalesce {}", child.path.display());
        let cannot = |e| broken(what(), e);
        self.check_alone(child, &pair.parent, force)?;
        let below = &pair.parent.path;
        Room::at(below).map_err(cannot)?.check(what(), pair.needed_bytes, below)?;
        // Both are locked against all others, the child without its parent.
        let upper = Image::open_alone(child, &ImageTools::even_parents(self.options(false)))?;
        check_same(&upper, child, pair)?;
        check_snapshots(&upper.layers()[0], what())?;
        let upper = Disk::Image(upper);
        self.close(&upper, &child.path)?;
        // A file that is open for writing can be written to; other processes go by the mode, also after a crash.
        let protected = Protected::lift(&pair.parent.path).map_err(cannot)?;
        let (lower, lost) = self.lower(child, pair, force)?;
        protected.restore().map_err(cannot)?;
        let mut notes = Vec::new();
        note_bitmaps(leaf(&upper), &child.path, &mut notes);
        note_bitmaps(leaf(&lower), &pair.parent.path, &mut notes);
        if let Some(below) = lower.media().get(1) {
            self.mark_renamed(below.path(), &pair.parent, child, &mut notes)?;
        }
        let mut context = Copying::context(self).map_err(cannot)?;
        let copying = Copying::new(self, &mut context, Mode::Merge, &upper, &lower);
        let copying = copying.map_err(cannot)?;
        context.run(copying.run()).map_err(cannot)?;
        drop(copying);
        drop(context);
        self.take_place(upper, lower, child, &pair.parent)?;
        notes.push(format!("{} is gone: it has this name now", pair.parent.path.display()));
        notes.extend(lost);
        Ok(done(child, pair.child_bytes, notes))
    }

    /// Opens the parent, locked, as large as the child, and without other children; or reports which of these are lost.
    fn lower(
        &self,
        child: &ImageName,
        pair: &Pair,
        force: bool,
    ) -> Result<(Disk, Option<String>), DiskError> {
        let open = || {
            let options = ImageTools::even_parents(self.options(false));
            let disk = Disk::open_image(&pair.parent, &options)?;
            self.check_alone(child, &pair.parent, force).map(|lost| (disk, lost))
        };
        let (disk, lost) = open()?;
        if disk.sectors() * SECTOR_BYTES >= pair.child_bytes {
            return Ok((disk, lost));
        }
        self.set_size(disk, &pair.parent, pair.child_bytes)?;
        open()
    }

    /// As [`coalesce`](Self::coalesce), but into this parent only: if the two were merged before, and the caller
    /// perhaps missed that, the next image of the chain is not merged.
    ///
    /// # Errors
    /// As there; the child has another parent, and `NotFound` if no image has that name.
    pub fn coalesce_into(
        &self,
        child: &ImageName,
        parent: &ImageName,
        force: bool,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot coalesce {}", child.path.display());
        let named = parent.path.display();
        if parent.path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            self.sync_dir(&child.path)?;
            let why = format!("it does not stand on {named}, which is not there");
            let help = "if the two were merged before, there is nothing left to do; else name its \
                        parent, which ferrite image info shows";
            return Err(DiskError::new(ErrorKind::NotFound, what(), why, help));
        }
        if parent.path.is_symlink() {
            let why = format!("{named} is a symbolic link, which would lead nowhere then");
            return Err(unsuitable(what(), why, "name the file that it leads to"));
        }
        let pair = self.pair(child)?;
        let below = &pair.parent.path;
        if !same_file(below, &parent.path).map_err(|e| broken(what(), e))? {
            let why = format!("it stands on {}, not on {named}", below.display());
            return Err(unsuitable(what(), why, "ferrite image info shows its chain"));
        }
        self.merge(child, &pair, force)
    }

    /// The steps after the copy; the locks of both are held until the end.
    fn take_place(
        &self,
        upper: Disk,
        lower: Disk,
        child: &ImageName,
        parent: &ImageName,
    ) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot coalesce {}", child.path.display()), e);
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(&lower).map_err(cannot)?;
        let _locked = lower.files();
        context.run(formats::take_identity(&port, lower, &upper)).map_err(cannot)?;
        // The maps of the disk stay with its name.
        if let Some(maps) = self.maps_to_carry(&upper, None, String::new)? {
            self.carry_maps(&maps, &parent.path, &child.path)?;
        }
        self.hand_over(child, parent).map_err(cannot)?;
        let protected = Protected::of(&parent.path).map_err(cannot)?;
        take_rights(&parent.path, &child.path, 0).map_err(cannot)?;
        self.directory.rename(&parent.path, &child.path).map_err(cannot)?;
        protected.forget();
        self.forget_maps(&parent.path)?;
        merge::forget_note(&parent.path).map_err(cannot)?;
        self.sync_dir(&child.path)
    }

    /// Updates the lists of children. The parent's own children are lost, as it has the child's content; the child's
    /// children become its own. The lists are updated before the names: once the parent has the child's name, no later
    /// merge would update them. If the merge stops in between and the child is renamed rather than merged again, its
    /// children are not found under its new name.
    fn hand_over(&self, child: &ImageName, parent: &ImageName) -> io::Result<()> {
        let (child, parent) = (fs::canonicalize(&child.path)?, fs::canonicalize(&parent.path)?);
        let inherited = children::lists(&child)?;
        children::forget_all(self.directory, &children::lists(&parent)?)?;
        children::inherit(self.directory, &inherited, &parent)
    }

    /// The two images in the chain, if they can be merged.
    fn pair(&self, child: &ImageName) -> Result<Pair, DiskError> {
        let refuse = |why: String, help: &str| {
            Err(unsuitable(format!("cannot coalesce {}", child.path.display()), why, help))
        };
        let disk = self.open(child, true)?;
        let layers = match &disk {
            Disk::Image(image) => image.layers(),
            _ => &[],
        };
        let Some(below) = layers.get(1) else {
            return refuse("it has no parent".into(), "there is nothing to merge it into");
        };
        let path = below.medium().path().to_owned();
        let pair = Pair {
            parent: ImageName { format: below.format(), path },
            parent_bytes: below.bytes(),
            child_bytes: disk.sectors() * SECTOR_BYTES,
            below_bytes: layers.get(2).map_or(0, |layer| layer.bytes()),
            needed_bytes: self.space_for(child, &disk)?,
        };
        self.check_pair(child, &pair)?;
        Ok(pair)
    }

    /// Checks that the parent can take the child's name.
    pub(super) fn check_pair(&self, child: &ImageName, pair: &Pair) -> Result<(), DiskError> {
        let refuse = |why: String, help: &str| {
            Err(unsuitable(format!("cannot coalesce {}", child.path.display()), why, help))
        };
        if pair.parent.format != child.format {
            let why = format!("its parent is {}, and could not take its name", pair.parent.format);
            return refuse(why, "ferrite image convert makes one image of both");
        }
        if self.is_device(&child.path) || self.is_device(&pair.parent.path) {
            let help = "ferrite image convert makes one image of both";
            return refuse("a block device cannot take another one's name".into(), help);
        }
        for path in [&child.path, &pair.parent.path] {
            if path.is_symlink() {
                let why = format!("{} is a symbolic link, and would be replaced", path.display());
                return refuse(why, "name the files themselves, in the image, too");
            }
        }
        let dirs = absolute(&child.path).and_then(|c| Ok((c, absolute(&pair.parent.path)?)));
        let dirs =
            dirs.map_err(|e| broken(format!("cannot look at {}", child.path.display()), e))?;
        if dirs.0.parent() != dirs.1.parent() {
            let help = "ferrite image convert makes one image of both";
            return refuse("its parent is in another directory".into(), help);
        }
        if pair.child_bytes < pair.parent_bytes {
            let help = "ferrite image convert makes one image of both, without what its parent has \
                        behind its end";
            return refuse("it is smaller than its parent".into(), help);
        }
        if pair.parent_bytes < pair.child_bytes && pair.below_bytes > pair.parent_bytes {
            let help = "coalesce the parent first";
            return refuse(
                "it is larger than its parent, and so is what that stands on".into(),
                help,
            );
        }
        Ok(())
    }

    /// The least space that the parent takes for the child's data.
    fn space_for(&self, child: &ImageName, disk: &Disk) -> Result<u64, DiskError> {
        let cannot = |e| broken(format!("cannot look at {}", child.path.display()), e);
        let Disk::Image(image) = disk else { return Ok(0) };
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(disk).map_err(cannot)?;
        let bytes = disk.sectors() * SECTOR_BYTES;
        context.run(room::merged(image.layers(), 1, &port, bytes)).map_err(cannot)
    }

    /// Refuses a merge that would destroy another child of the parent, or might; with `force`, reports it.
    pub(super) fn check_alone(
        &self,
        child: &ImageName,
        parent: &ImageName,
        force: bool,
    ) -> Result<Option<String>, DiskError> {
        let what = || format!("cannot coalesce {}", child.path.display());
        let cannot = |e| broken(what(), e);
        let found = children::look(&parent.path, Some(&child.path), Ask::All).map_err(cannot)?;
        let path = parent.path.display();
        if let Some(other) = found.child {
            let other = other.display();
            if force {
                return Ok(Some(format!("{other} had the same parent, {path}, and is destroyed")));
            }
            let why = format!("{other} has the same parent, {path}, and would be destroyed");
            let help = "remove or flatten (convert) the other one first, or say --force";
            return Err(refused(what(), why, help));
        }
        let lost = || found.lost.as_ref().map(|lost| (lost.to_string(), LOST));
        let Some((unknown, help)) = found.unknown.map(|it| (it.why, UNKNOWN)).or_else(lost) else {
            let names = fs::metadata(&parent.path).map_err(cannot)?.nlink();
            if names == 1 || force {
                return Ok(None);
            }
            let why = format!("{path} has {names} names, and what all of them show would change");
            let help = "a snapshot that was cut off leaves one, a backup may have made them: remove \
                        what is not needed (find . -samefile shows them), or say --force";
            return Err(refused(what(), why, help));
        };
        if force {
            return Ok(Some(format!(
                "if {path} had other children, they are destroyed: {unknown}"
            )));
        }
        let why = format!("other children of {path} cannot be excluded: {unknown}");
        Err(refused(what(), why, help))
    }
}

/// Checks that a child which is locked now has not changed: another command may have made a snapshot of it, merged or
/// resized it.
fn check_same(upper: &Image, child: &ImageName, pair: &Pair) -> Result<(), DiskError> {
    let is_parent = |path: &PathBuf| same_file(path, &pair.parent.path).unwrap_or(false);
    let same = formats::parents_of(upper).iter().any(is_parent);
    if same && upper.sectors() * SECTOR_BYTES == pair.child_bytes {
        return Ok(());
    }
    let what = format!("cannot coalesce {}", child.path.display());
    let why = "another command has changed its chain meanwhile";
    let help = "look at it (ferrite image info) and run the same command again";
    Err(DiskError::new(ErrorKind::InUse, what, why, help))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ferrite_disk_base::Format;

    use super::*;
    use crate::NewImage;
    use crate::files::is_write_protected;
    use ferrite_host::directory::HostDirectory;
    use ferrite_io::engines::EngineChoice;

    fn work<T>(work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
        let kind = EngineChoice::Auto.decide().unwrap().kind;
        work(&ImageTools {
            fixed_size: false,
            parents: ferrite_disk_base::Parents::default(),
            directory: &HostDirectory,
            unlocked: false,
            engine: &move |arena| kind.open(arena, 64),
            state_dir: None,
            progress: &|_| true,
        })
    }

    /// A parent and a child in a directory.
    fn chain(dir: &Path, format: Format) -> [ImageName; 2] {
        let [parent, child] = ["parent", "child"]
            .map(|n| ImageName { format, path: dir.join(format!("{n}.{format}")) });
        let new = NewImage { bytes: Some(8 << 20), ..NewImage::default() };
        work(|tools| tools.create(&parent, &new)).unwrap();
        let on = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
        work(|tools| tools.create(&child, &on)).unwrap();
        [parent, child]
    }

    fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>, bool)> {
        let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let read = |path: PathBuf| {
            (path.clone(), fs::read(&path).unwrap(), is_write_protected(&path).unwrap())
        };
        let mut all: Vec<_> = paths.map(read).collect();
        all.sort();
        all
    }

    /// The command must notice changes between its reading of the chain and its locks.
    fn refused_after(force: bool, between: impl Fn(&ImageTools<'_>, &[ImageName; 2])) {
        for format in [Format::Vhd, Format::Qcow2] {
            let dir = tempfile::TempDir::new().unwrap();
            let names = chain(dir.path(), format);
            work(|tools| {
                let pair = tools.pair(&names[1]).unwrap();
                between(tools, &names);
                let before = contents(dir.path());
                let error = tools.merge(&names[1], &pair, force).unwrap_err();
                let expected = [ErrorKind::InUse, ErrorKind::Refused];
                assert!(expected.contains(&error.kind()), "{error}");
                assert!(contents(dir.path()) == before, "{format}");
            });
        }
    }

    #[test]
    fn a_snapshot_between_the_look_and_the_locks_is_seen() {
        refused_after(true, |tools, [_, child]| {
            let middle = child.path.with_file_name(format!("middle.{}", child.format));
            tools.snapshot(child, &ImageName { path: middle, ..child.clone() }).unwrap();
        });
    }

    #[test]
    fn a_clone_of_the_parent_between_the_look_and_the_locks_is_seen() {
        refused_after(false, |tools, [parent, child]| {
            let other = child.path.with_file_name(format!("other.{}", child.format));
            let on = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
            tools.create(&ImageName { path: other, ..child.clone() }, &on).unwrap();
        });
    }

    #[test]
    fn another_size_between_the_look_and_the_locks_is_seen() {
        refused_after(true, |tools, [_, child]| {
            tools.resize(child, 16 << 20, false).unwrap();
        });
    }
}
