//! Makes images: empty ones, and children.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_disk::Disk;
use ferrite_disk::pieces::look_at_layer;
use ferrite_disk_base::size::Human;
use ferrite_disk_base::{
    CONFIGURED_PARENTS, DiskError, ErrorKind, Format, ImageName, MAX_LAYERS, SECTOR_BYTES, journal,
    to_allow,
};
use ferrite_images::children::marks::{Held, Mark};
use ferrite_images::children::{self, absolute, marks};

use super::files::{NewFile, Over, check_apart, is_write_protected, protect, same_file, same_name};
use super::formats::Blank;
use super::io_context::IoContext;
use super::spec::{NewImage, Parent, absolute_dir};
use super::undo::Undo;
use super::{Done, ImageTools, MapChange, broken, formats, refused, unsuitable};

impl ImageTools<'_> {
    /// Makes an image, durably. A parent is made read-only, if it is not yet.
    ///
    /// # Errors
    /// It exists already, or cannot be made with these options.
    pub fn create(&self, name: &ImageName, new: &NewImage) -> Result<Done, DiskError> {
        let mut undo = Undo::new(self);
        let parent = match &new.parent {
            None => None,
            Some(parent) => Some(self.parent(name, parent)?),
        };
        let bytes = size(name, new, parent.as_ref())?;
        formats::check_new(name, new, parent.as_ref(), bytes)?;
        let mut file = self.new_file(&name.path, Over::forced(new.force))?;
        let mut notes = Vec::new();
        if let Some(parent) = &parent {
            self.keep(parent, &mut undo, &mut notes)?;
            let help = "say --unmarked if no image will ever be merged (coalesced) into the parent, or \
                        convert the parent into a copy";
            let help = (!new.unmarked).then_some(help);
            let path = &parent.name.path;
            undo.marked(path, self.mark(path, name, file.path(), help, &mut notes)?);
        }
        self.write_new(&mut file, name.format, new, (parent.as_ref(), Blank::Zeros), bytes)?;
        file.finish()?;
        undo.forget();
        notes.extend(formats::warnings(name, new, parent.as_ref(), bytes));
        notes.extend(parent.and_then(|parent| self.note_elsewhere(name, &parent)));
        Ok(done(name, bytes, notes))
    }

    /// A note about opening an image whose parents are in other folders.
    pub(super) fn note_elsewhere(&self, child: &ImageName, parent: &Parent) -> Option<String> {
        let mut paths = vec![parent.path.clone()];
        if let Disk::Image(image) = &parent.disk {
            let layers = image.layers()[1..].iter();
            paths.extend(layers.map(|layer| layer.medium().path().to_owned()));
        }
        let allowed = |path: &PathBuf| self.parents.allow(&child.path, path).unwrap_or(false);
        let mut options: Vec<String> = Vec::new();
        for path in paths.iter().filter(|path| !allowed(path)) {
            let path = absolute(path).unwrap_or_else(|_| path.clone());
            let option = format!("--parents {}", to_allow(&path).display());
            if !options.contains(&option) {
                options.push(option);
            }
        }
        let (path, options) = (child.path.display(), options.join(" "));
        (!options.is_empty()).then(|| {
            format!(
                "what it stands on is in another folder: {path} is opened with {options} only, \
                 or with that in {CONFIGURED_PARENTS}"
            )
        })
    }

    /// Writes a new image into its file, durably.
    pub(super) fn write_new(
        &self,
        file: &mut NewFile<'_>,
        format: Format,
        new: &NewImage,
        below: (Option<&Parent>, Blank),
        bytes: u64,
    ) -> Result<(), DiskError> {
        let written = self.write_under(file, format, new, below, bytes);
        written.map_err(|e| file.named(e))
    }

    /// [`write_new`](Self::write_new), with errors that name the file by its present name.
    fn write_under(
        &self,
        file: &mut NewFile<'_>,
        format: Format,
        new: &NewImage,
        below: (Option<&Parent>, Blank),
        bytes: u64,
    ) -> Result<(), DiskError> {
        let raw = file.open()?;
        let what = || format!("cannot make {}", file.path().display());
        journal::forget(self.readable_state(), &raw)?;
        let mut context = IoContext::new(self, 1).map_err(|e| broken(what(), e))?;
        let port = context.port_of(raw.files()).map_err(|e| broken(what(), e))?;
        let done =
            context.run(async { Ok(formats::empty(&port, &raw, format, new, below, bytes).await) });
        done.map_err(|e| broken(what(), e))?
    }

    /// Opens a parent for a new image.
    pub(super) fn parent(&self, child: &ImageName, name: &ImageName) -> Result<Parent, DiskError> {
        let what = || format!("cannot make {}", child.path.display());
        if child.format == Format::Raw {
            let help = "give it a name that ends in .vhd or .qcow2; ferrite image convert makes a \
                        raw copy";
            return Err(unsuitable(what(), "a raw image cannot have a parent", help));
        }
        if !formats::stands_on(child.format, name.format) {
            let why = format!("a {} cannot have a parent in format {}", child.format, name.format);
            return Err(unsuitable(what(), why, "give both the same format"));
        }
        self.recover(name)?;
        let disk = self.open(name, true)?;
        check_apart(what(), &disk, &child.path)?;
        check_length(what(), &disk, &name.path)?;
        self.check_recovered(&disk)?;
        let path = absolute(&name.path).map_err(|e| broken(what(), e))?;
        Ok(Parent { disk, name: name.clone(), path })
    }

    /// Makes a parent read-only.
    pub(super) fn keep(
        &self,
        parent: &Parent,
        undo: &mut Undo<'_>,
        notes: &mut Vec<String>,
    ) -> Result<(), DiskError> {
        let path = &parent.name.path;
        let cannot = |e| broken(format!("cannot make {} read-only", path.display()), e);
        if !self.is_device(path) && !is_write_protected(path).map_err(cannot)? {
            let mode = fs::metadata(path).map_err(cannot)?.mode() & 0o7777;
            match protect(path, true) {
                // A file system that is read-only has no writers.
                Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                    let path = path.display();
                    notes.push(format!(
                        "{path} is on a read-only file system: before that is made writable for \
                         others, chmod a-w {path}"
                    ));
                    return Ok(());
                }
                protected => protected,
            }
            .map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => {
                    let help = format!("have its owner do that: chmod a-w {}", path.display());
                    let what = format!("cannot make {} read-only", path.display());
                    let why =
                        format!("what has a child must not change, and only its owner may ({e})");
                    DiskError::new(ErrorKind::Permission, what, why, help).with_source(e)
                }
                _ => cannot(e),
            })?;
            undo.protected(path, mode);
            notes.push(format!("{} is read-only now, as it has a child", path.display()));
        }
        Ok(())
    }

    /// Adds a child to its parent's list, if it is not found by its name in the parent's folder. That comes before the
    /// child has its name; until then it is `made`. The caller keeps the result until it has. Without `help` it is no
    /// error if the list cannot be written.
    pub(super) fn mark(
        &self,
        parent: &Path,
        child: &ImageName,
        made: &Path,
        help: Option<&str>,
        notes: &mut Vec<String>,
    ) -> Result<Option<Held>, DiskError> {
        let path = parent.display();
        if self.is_device(parent) {
            let note = format!(
                "{path} is a device, so it has no mode that would protect it, and no command here \
                 knows that an image stands on it: make it read-only (lvchange --permission r)"
            );
            notes.push(note);
            return Ok(None);
        }
        let cannot = |e| broken(format!("cannot make {}", child.path.display()), e);
        let file = fs::canonicalize(parent).map_err(cannot)?;
        let path_of_child = absolute(&child.path).map_err(cannot)?;
        let is_mounted = children::is_mount_point(&file).unwrap_or(false);
        if !is_mounted && self.is_found(&file, &path_of_child, child.format) {
            return Ok(None);
        }
        let made = (!self.is_device(&path_of_child)).then_some(made);
        let mark = Mark::of(&file, path_of_child, made).map_err(cannot)?;
        let left = match children::is_mount_point(&file) {
            Ok(false) => children::leave_mark(self.directory, &file, &mark),
            Ok(true) => Err(io::Error::other(
                "it is mounted where it is, and a merge into it looks in its own folder",
            )),
            Err(e) => Err(e),
        };
        match (left, help) {
            (Ok(held), _) => Ok(Some(held)),
            (Err(e), None) => {
                notes.push(format!("{path} does not know of it ({e}): do not merge into that"));
                Ok(None)
            }
            (Err(e), Some(help)) => {
                let what = format!("cannot make {}", mark.child.display());
                let why = format!("its parent {path} could not be told of it ({e})");
                Err(DiskError::new(ErrorKind::Refused, what, why, help).with_source(e))
            }
        }
    }

    /// Whether a child is found in its parent's folder, as its name is that of an image.
    fn is_found(&self, file: &Path, child: &Path, format: Format) -> bool {
        let named = child.parent() == file.parent() && Format::of_path(child) == format;
        named && !self.is_device(child)
    }

    /// If a parent's list has `child`, adds the name that this image is about to get; or that of the image that is
    /// about to replace it.
    pub(super) fn mark_renamed(
        &self,
        parent: &Path,
        child: &ImageName,
        name: &ImageName,
        notes: &mut Vec<String>,
    ) -> Result<Option<Held>, DiskError> {
        if self.is_device(parent) {
            return Ok(None);
        }
        let cannot = |e| broken(format!("cannot make {}", name.path.display()), e);
        let file = fs::canonicalize(parent).map_err(cannot)?;
        let (made, format) = (absolute(&child.path).map_err(cannot)?, child.format);
        let marked =
            || marks::read(&file).map_or(true, |all| all.iter().any(|line| line.is_for(&made)));
        let known = self.is_found(&file, &made, format) || marked();
        let help = format!(
            "see to it that {} can be written; if no image will ever be merged into the parent, take the \
             line of {} out of it",
            marks::beside(&file).display(),
            made.display()
        );
        self.mark(parent, name, &made, known.then_some(&help), notes)
    }

    /// Writes of a killed backend, in its journal or in the page cache, are written to the medium: a parent has to be
    /// complete without them, and must not change any more.
    fn recover(&self, name: &ImageName) -> Result<(), DiskError> {
        let options = ImageTools::even_parents(self.options(false));
        let disk = match ImageTools::open_to_write(name, &options) {
            Ok(disk) => disk,
            // Readers have it open, so no process may write to it; or this user may not. It may be complete.
            Err(e) if matches!(e.kind(), ErrorKind::InUse | ErrorKind::Permission) => return Ok(()),
            Err(e) => return Err(e),
        };
        self.close(&disk, &name.path)
    }

    /// Checks that no parent has a journal to recover. A flush syncs the leaf only, so a parent's journal would stay on
    /// this host for ever.
    fn check_recovered(&self, parent: &Disk) -> Result<(), DiskError> {
        let Disk::Image(image) = parent else { return Ok(()) };
        for layer in image.layers() {
            if layer.has_journal(self.readable_state())? {
                let path = layer.medium().path().display();
                let what = format!("cannot make an image on {path}");
                let why = "what a killed backend has answered is not in it yet, and it cannot be \
                           written to now";
                let help = format!("close what reads it, then ferrite image repair --force {path}");
                return Err(DiskError::new(ErrorKind::InUse, what, why, help));
            }
        }
        Ok(())
    }

    /// Closes an image that was opened for writing.
    pub(super) fn close(&self, disk: &Disk, path: &Path) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot complete {}", path.display()), e);
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(disk).map_err(cannot)?;
        context.run(disk.close(&port)).map_err(cannot)
    }

    /// `leaf` becomes `parent`, and a new child of it gets the name `leaf`. Nothing is copied. Both names are in one
    /// directory.
    ///
    /// If a step fails, the second name is removed again, and the leaf keeps the first.
    ///
    /// The order:
    /// 1. The leaf's parent gets the second name on its list.
    /// 2. The file gets that name.
    /// 3. The new leaf is written and synced.
    /// 4. The disk's dirty maps fit both from then on (`dirty/carry.rs`).
    /// 5. The new leaf is renamed over the old name.
    ///
    /// A crash before the last step leaves the old leaf, a crash after it the new one, and there is always one.
    /// The old leaf can be written to then, as an unfinished new leaf is no child (`children/marks.rs`). The next
    /// snapshot makes its leaf anew: an unfinished one has never the disk's name.
    ///
    /// The dirty maps go on with the leaf. The parent keeps them as they are at this moment.
    ///
    /// # Errors
    /// The leaf is in use, or has children; `parent` exists and is another file.
    pub fn snapshot(&self, leaf: &ImageName, parent: &ImageName) -> Result<Done, DiskError> {
        self.snapshot_and(leaf, parent, None)
    }

    /// As [`snapshot`](Self::snapshot). With `begin`, the leaf has a dirty map of this name, in which nothing has
    /// changed since.
    ///
    /// # Errors
    /// As there; the map cannot be begun.
    pub fn snapshot_and(
        &self,
        leaf: &ImageName,
        parent: &ImageName,
        begin: Option<&str>,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot make a snapshot of {}", leaf.path.display());
        let cannot = |e: io::Error| broken(what(), e);
        self.check_snapshot_names(leaf, parent)?;
        let disk = self.open(leaf, false)?;
        let bytes = disk.sectors() * SECTOR_BYTES;
        let exists = parent.path.symlink_metadata().is_ok();
        if exists && self.is_parent(&disk, &parent.path)? {
            return self.snapshot_again(leaf, &parent.path, disk, begin);
        }
        if exists && !same_file(&leaf.path, &parent.path).map_err(cannot)? {
            let why = format!("{} exists and is another file", parent.path.display());
            return Err(refused(what(), why, "choose another name for the parent"));
        }
        check_length(what(), &disk, &leaf.path)?;
        self.close(&disk, &leaf.path)?;
        let maps = self.maps_to_carry(&disk, begin, what)?;
        // The lock stays on the file, which has the parent's name from the last step on.
        let path = absolute(&parent.path).map_err(cannot)?;
        let parent = Parent { disk, name: parent.clone(), path };
        let new = NewImage::default();
        formats::check_new(leaf, &new, Some(&parent), bytes)?;
        let mut notes = Vec::new();
        // Each is undone after the names have been restored.
        let mut undo_below = Undo::new(self);
        if let Some(below) = parent.disk.media().get(1) {
            let marked = self.mark_renamed(below.path(), leaf, &parent.name, &mut notes)?;
            undo_below.marked(below.path(), marked);
        }
        let _link = match exists {
            true => None,
            false => Some(self.link(&leaf.path, &parent.name.path)?),
        };
        let mut undo = Undo::new(self);
        let mut file = self.new_file(&leaf.path, Over::Mine)?;
        let help = "give both names the extension of their format";
        let marked = self.mark(&parent.path, leaf, file.path(), Some(help), &mut notes)?;
        undo.marked(&parent.path, marked);
        self.write_new(&mut file, leaf.format, &new, (Some(&parent), Blank::Zeros), bytes)?;
        if let Some(maps) = maps {
            self.freeze_maps(&maps, &parent.path)?;
            self.carry_maps(&maps, file.path(), &leaf.path)?;
            notes.extend(maps.notes);
        }
        file.finish()?;
        undo.forget();
        undo_below.forget();
        protect(&parent.path, true).map_err(cannot)?;
        notes.push(format!("the previous state is {} (read-only)", parent.name.path.display()));
        notes.extend(formats::warnings(leaf, &new, Some(&parent), bytes));
        Ok(done(leaf, bytes, notes))
    }

    /// Completes a snapshot that was interrupted after its last step, or was done: if nothing was written to the disk
    /// since, nothing is left to do.
    fn snapshot_again(
        &self,
        leaf: &ImageName,
        parent: &Path,
        disk: Disk,
        begin: Option<&str>,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot make a snapshot of {}", leaf.path.display());
        let cannot = |e| broken(what(), e);
        let (bytes, path) = (disk.sectors() * SECTOR_BYTES, parent.display());
        protect(parent, true).map_err(cannot)?;
        self.sync_dir(&leaf.path)?;
        if let Disk::Image(image) = &disk
            && (image
                .layers()
                .get(1)
                .is_some_and(|below| below.bytes() != image.layers()[0].bytes())
                || !self.is_blank(&disk).map_err(cannot)?)
        {
            let why = format!(
                "{path} is its parent already, of an earlier snapshot, and the disk has changed since"
            );
            return Err(refused(what(), why, "choose another name for what it is now"));
        }
        if let (Some(map), Ok(Some(seen))) = (begin, disk.maps(None))
            && !seen.maps.iter().any(|seen| seen.name == map)
        {
            drop(disk);
            return self.change_maps(leaf, &MapChange::Begin(map.to_owned()));
        }
        let note = format!("nothing to do: {path} is its parent already, and reads the same");
        Ok(done(leaf, bytes, vec![note]))
    }

    /// Whether a disk's own image has no data: everything is read from its parents.
    fn is_blank(&self, disk: &Disk) -> io::Result<bool> {
        let Disk::Image(image) = disk else { return Ok(false) };
        let mut context = IoContext::new(self, 0)?;
        let port = context.port(disk)?;
        context.run(async {
            let (mut at, end) = (0, disk.sectors() * SECTOR_BYTES);
            while at < end {
                match look_at_layer(&image.layers()[0], 0, &port, at, end - at).await? {
                    (None, len) => at += len,
                    (Some(_), _) => return Ok(false),
                }
            }
            Ok(true)
        })
    }

    fn check_snapshot_names(&self, leaf: &ImageName, parent: &ImageName) -> Result<(), DiskError> {
        let what = || format!("cannot make a snapshot of {}", leaf.path.display());
        if leaf.format == Format::Raw {
            let help = "make an image on it instead: ferrite image clone RAW NEW.qcow2";
            return Err(unsuitable(what(), "a raw image cannot have a parent", help));
        }
        if self.is_device(&leaf.path) {
            let help = "make an image on it instead: ferrite image clone";
            return Err(unsuitable(what(), "a block device has one name only", help));
        }
        if leaf.path.is_symlink() {
            let why = "it is a symbolic link, and would be one to the parent then";
            return Err(unsuitable(what(), why, "name the file that it leads to"));
        }
        if leaf.format != parent.format {
            let why =
                format!("the parent would be {}, but its name says {}", leaf.format, parent.format);
            return Err(unsuitable(
                what(),
                why,
                "give the parent a name with the image's extension",
            ));
        }
        if same_name(&leaf.path, &parent.path).map_err(|e| broken(what(), e))? {
            let why = format!("{} is the disk itself", parent.path.display());
            return Err(unsuitable(what(), why, "give what it was another name"));
        }
        let dirs = absolute_dir(&leaf.path).and_then(|a| Ok((a, absolute_dir(&parent.path)?)));
        match dirs.map_err(|e| broken(what(), e))? {
            (a, b) if a == b => Ok(()),
            _ => {
                let why = "the parent would be in another directory, where its own parent and its \
                           children would not find each other";
                Err(unsuitable(what(), why, "name a parent in the image's directory"))
            }
        }
    }

    fn is_parent(&self, disk: &Disk, path: &Path) -> Result<bool, DiskError> {
        let Disk::Image(image) = disk else { return Ok(false) };
        let Some(below) = image.layers().get(1) else { return Ok(false) };
        same_file(below.medium().path(), path)
            .map_err(|e| broken(format!("cannot look at {}", path.display()), e))
    }
}

/// Refuses a child of a chain that already has the maximum length.
fn check_length(what: String, parent: &Disk, path: &Path) -> Result<(), DiskError> {
    let layers = parent.media().len();
    if layers < MAX_LAYERS {
        return Ok(());
    }
    let why = format!("its chain would have {} images, and may have {MAX_LAYERS}", layers + 1);
    let help = format!("make the chain shorter first: ferrite image coalesce {}", path.display());
    Err(unsuitable(what, why, &help))
}

pub(super) fn done(name: &ImageName, virtual_bytes: u64, notes: Vec<String>) -> Done {
    let path = name.path.display().to_string();
    Done { path, format: name.format.name(), virtual_bytes, notes }
}

pub(super) fn size(
    name: &ImageName,
    new: &NewImage,
    parent: Option<&Parent>,
) -> Result<u64, DiskError> {
    let refuse = |why: String, help: &str| {
        let what = format!("cannot make {}", name.path.display());
        Err(DiskError::new(ErrorKind::Usage, what, why, help))
    };
    match (new.bytes, parent.map(Parent::bytes)) {
        (None, None) => refuse("it has no size".into(), "give a size, or a parent"),
        (Some(0), _) => refuse("its size is 0".into(), "give a size"),
        (Some(bytes), _) if !bytes.is_multiple_of(SECTOR_BYTES) => {
            refuse(format!("{bytes} bytes are no whole sectors"), "give a multiple of 512")
        }
        (Some(bytes), Some(least)) if bytes < least => refuse(
            format!("it would be smaller than its parent, which has {}", Human(least)),
            "leave the size out, or give a larger one",
        ),
        (bytes, parent) => Ok(bytes.or(parent).unwrap_or_default()),
    }
}
