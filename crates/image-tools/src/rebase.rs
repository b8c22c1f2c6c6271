//! Gives an image another parent.
//!
//! The order:
//! 1. A new child of the new parent, under a temporary name, gets the disk's differing data and is synced.
//! 2. It gets the old image's identity.
//! 3. The parent's list gets it.
//! 4. It gets its name, by one operation on the directory.
//!
//! Until step 4 the old image is unchanged. The disk reads the same before and after.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ferrite_disk::Disk;
use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, OpenOptions, SECTOR_BYTES};
use ferrite_images::{Image, Layer, children};

use super::compare::Side;
use super::copy::{Copying, Mode};
use super::create::done;
use super::files::{Over, is_write_protected, protect, same_file};
use super::formats::{Blank, leaf};
use super::io_context::{BUFFER_BYTES, IoContext};
use super::undo::Undo;
use super::{Done, ImageTools, NewImage, Progress, broken, formats, refused, unsuitable};

/// The unit in which differences are written.
const UNIT: usize = 64 << 10;

/// Whether the disk must read the same on the new parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rebase {
    /// It reads the same: where the parents differ, the image gets the old parent's data.
    Safe,
    /// Only the image's own data stay: for a parent that was moved, and has the same content.
    Unsafe,
}

/// An image that is about to get another parent, or none.
pub(super) struct Rebased {
    /// The image, locked. The writes of its journal are in it.
    pub(super) old: Disk,
    /// A new image with its way to allocate.
    pub(super) new: NewImage,
    /// Whether it was read-only.
    pub(super) was_protected: bool,
}

impl ImageTools<'_> {
    /// Gives an image another parent, which becomes read-only. With `force` the image may have children, if they are
    /// not open: they find it by its name and identity.
    ///
    /// # Errors
    /// One of them is in use; `Refused`; those of the images. The image is intact in any case.
    pub fn rebase(
        &self,
        name: &ImageName,
        parent: &ImageName,
        how: Rebase,
        force: bool,
    ) -> Result<Done, DiskError> {
        let cannot = |e| broken(format!("cannot rebase {}", name.path.display()), e);
        self.check_new_parent(name, parent)?;
        let Rebased { old, new, was_protected } = self.open_to_rebase(name, how, force)?;
        let mut notes = Vec::new();
        note_bitmaps(leaf(&old), &name.path, &mut notes);
        let mut undo = Undo::new(self);
        let below = self.parent(name, parent)?;
        let bytes = old.sectors() * SECTOR_BYTES;
        check_size(name, bytes, below.bytes())?;
        formats::check_new(name, &new, Some(&below), bytes)?;
        let mut file = self.new_file(&name.path, Over::Mine)?;
        self.keep(&below, &mut undo, &mut notes)?;
        let help =
            "see to it that files can be made beside the parent, or convert that into a copy";
        let marked = self.mark(&below.name.path, name, file.path(), Some(help), &mut notes)?;
        undo.marked(&below.name.path, marked);
        // This only tested that the list can be written. Other commands that make children of the parent do not wait
        // for the copy.
        undo.unlock_lists();
        self.write_new(&mut file, name.format, &new, (Some(&below), Blank::Zeros), bytes)?;
        let to = file.open_disk(name.format)?;
        match how {
            Rebase::Safe => self.equalize(&old, &to).map_err(cannot)?,
            Rebase::Unsafe => {
                let mut context = Copying::context(self).map_err(cannot)?;
                let copying = Copying::new(self, &mut context, Mode::Merge, &old, &to);
                context.run(copying.map_err(cannot)?.run()).map_err(cannot)?;
            }
        }
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(&to).map_err(cannot)?;
        let _locked = to.files();
        context.run(formats::take_identity(&port, to, &old)).map_err(cannot)?;
        // Another command may have removed the line as that of a missing child.
        let marked = self.mark(&below.name.path, name, file.path(), Some(help), &mut Vec::new())?;
        undo.marked(&below.name.path, marked);
        // Its children find it by its name.
        let kept = fs::canonicalize(&name.path).and_then(|kept| children::lists(&kept));
        let inherited = kept.and_then(|kept| children::inherit(self.directory, &kept, file.path()));
        inherited.map_err(cannot)?;
        // The contents are the same only where they were compared.
        if how == Rebase::Safe
            && let Some(maps) = self.maps_to_carry(&old, None, String::new)?
        {
            self.carry_maps(&maps, file.path(), &name.path)?;
        }
        file.finish()?;
        undo.forget();
        if was_protected {
            protect(&name.path, true).map_err(cannot)?;
        }
        Ok(done(name, bytes, notes))
    }

    /// Checks that an image can stand on a parent.
    fn check_new_parent(&self, name: &ImageName, parent: &ImageName) -> Result<(), DiskError> {
        let what = || format!("cannot rebase {}", name.path.display());
        let cannot = |e| broken(what(), e);
        if let Err(e) = fs::metadata(&parent.path) {
            let path = parent.path.display();
            return Err(broken(format!("cannot look at the new parent {path}"), e));
        }
        if same_file(&name.path, &parent.path).map_err(cannot)? {
            let why = "it would be its own parent";
            return Err(unsuitable(what(), why, "name another image as the parent"));
        }
        if children::is_below(&name.path, &parent.path).unwrap_or(false) {
            let why = format!("the new parent {} stands on it", parent.path.display());
            return Err(unsuitable(what(), why, "name an image that does not"));
        }
        Ok(())
    }

    /// Opens an image whose parent is about to change.
    pub(super) fn open_to_rebase(
        &self,
        name: &ImageName,
        how: Rebase,
        force: bool,
    ) -> Result<Rebased, DiskError> {
        let was_protected = self.check_rebase(name, force)?;
        let options = OpenOptions { even_parent: force, ..self.options(false) };
        let old = match how {
            Rebase::Safe => ImageTools::open_to_write(name, &options)?,
            // Its parent may be missing.
            Rebase::Unsafe => Disk::Image(Image::open_alone(name, &options)?),
        };
        let new = check_image(&old, name)?;
        // Writes that a killed backend has answered become the image's from here on.
        self.close(&old, &name.path)?;
        Ok(Rebased { old, new, was_protected })
    }

    /// Whether the image is read-only, if it can be rebased.
    fn check_rebase(&self, name: &ImageName, force: bool) -> Result<bool, DiskError> {
        let what = || format!("cannot rebase {}", name.path.display());
        let cannot = |e| broken(what(), e);
        if self.is_device(&name.path) {
            let help = "make an image in a file on the new parent: ferrite image clone";
            return Err(unsuitable(what(), "a block device cannot be replaced", help));
        }
        if name.path.is_symlink() {
            let why = "it is a symbolic link, which would be replaced";
            return Err(unsuitable(what(), why, "name the file that it leads to"));
        }
        let names = fs::metadata(&name.path).map_err(cannot)?.nlink();
        if names > 1 {
            let why = format!("it has {names} names (hard links), and only one would be rebased");
            let help = "remove the others (find . -samefile shows them)";
            return Err(unsuitable(what(), why, help));
        }
        let is_protected = is_write_protected(&name.path).map_err(cannot)?;
        if is_protected && !force {
            let why =
                "it is read-only by its mode: an image that stands on it would change with it";
            let help = "rebase the leaf of the chain; if the new parent reads as the old one, \
                        --force rebases this one";
            return Err(refused(what(), why, help));
        }
        Ok(is_protected)
    }

    /// Writes to a disk so that it reads as another one of the same size, and completes it.
    pub(super) fn equalize(&self, from: &Disk, to: &Disk) -> io::Result<()> {
        let mut context = IoContext::new(self, 2)?;
        let from = Side::new(&mut context, from)?;
        let to = Side::new(&mut context, to)?;
        let mut memory = [vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]];
        context.run(async {
            let mut at = 0;
            while at < from.bytes {
                let progress = Progress { done_bytes: at, total_bytes: from.bytes };
                if !(self.progress)(progress) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                at += equalize_piece(&from, &to, at, &mut memory).await?;
            }
            to.disk.close(&to.port).await
        })
    }
}

/// Equalizes the beginning of a range; returns the bytes that are equal now.
async fn equalize_piece(
    from: &Side<'_>,
    to: &Side<'_>,
    at: u64,
    memory: &mut [Vec<u8>; 2],
) -> io::Result<u64> {
    let left = from.bytes - at;
    let ((no_data, len), (is_zero, len_to)) =
        (from.ahead(at, left).await?, to.ahead(at, left).await?);
    let len = len.min(len_to);
    if no_data && is_zero {
        return Ok(len);
    }
    let len = len.min(BUFFER_BYTES as u64);
    let [wanted, found] = memory.each_mut().map(|bytes| &mut bytes[..len as usize]);
    from.read(at, no_data, wanted).await?;
    to.read(at, is_zero, found).await?;
    for (i, (wanted, found)) in wanted.chunks(UNIT).zip(found.chunks(UNIT)).enumerate() {
        if wanted != found {
            let span = to.buf.slice(0, wanted.len());
            to.port.memory().copy_in(span, wanted);
            to.disk.write(&to.port, at + (i * UNIT) as u64, span).await?;
        }
    }
    Ok(len)
}

/// Refuses a parent that is larger than the disk: data past the disk's end would become visible if the disk grows.
pub(super) fn check_size(name: &ImageName, bytes: u64, parent_bytes: u64) -> Result<(), DiskError> {
    if bytes >= parent_bytes {
        return Ok(());
    }
    let what = format!("cannot rebase {}", name.path.display());
    let why =
        format!("the parent is larger: {}, and the disk has {}", Human(parent_bytes), Human(bytes));
    let help = "put its old parent back to where it was, if that was moved; ferrite image convert \
                then makes a copy without a parent";
    Err(DiskError::new(ErrorKind::Usage, what, why, help))
}

/// Refuses to replace an image that has snapshots inside.
pub(super) fn check_snapshots(layer: &Layer, what: String) -> Result<(), DiskError> {
    if formats::inner_snapshots(layer).map_err(|e| broken(what.clone(), e))? == 0 {
        return Ok(());
    }
    let why = "there are snapshots inside of it, which would be lost";
    Err(refused(what, why, "delete them first (ferrite image snapshot -d)"))
}

/// Notes that the dirty bitmaps of the image with this layer will be lost.
pub(super) fn note_bitmaps(layer: Option<&Layer>, path: &Path, notes: &mut Vec<String>) {
    let count = layer.map_or(0, formats::dirty_bitmaps);
    if count > 0 {
        notes.push(format!(
            "dirty bitmaps that were inside of {} and are lost: {count} (an incremental backup has \
             to begin with a full one)",
            path.display()
        ));
    }
}

/// Checks that the image itself can be made again; returns the properties that it will have.
fn check_image(old: &Disk, name: &ImageName) -> Result<NewImage, DiskError> {
    let what = || format!("cannot rebase {}", name.path.display());
    let Some(layer) = leaf(old) else {
        let help = "ferrite image clone makes an image on the parent";
        return Err(unsuitable(what(), "a raw image has no parent", help));
    };
    check_snapshots(layer, what())?;
    Ok(formats::like(layer))
}
