//! Copies into images that are there, and copies that stand on a parent.

use ferrite_disk_base::{DiskError, ErrorKind, Format, ImageName, SECTOR_BYTES};

use super::copy::{Copying, Mode};
use super::create::done;
use super::files::{Over, check_apart};
use super::formats::Blank;
use super::rebase::check_size;
use super::undo::Undo;
use super::{Convert, Done, ImageTools, broken, formats};

impl ImageTools<'_> {
    /// Copies the content of `from` over the beginning of the disk `to`, which is there. The rest of `to` stays.
    ///
    /// # Errors
    /// `to` is smaller. Those of the two images. After a failure `to` has a part of the copy.
    pub fn convert_over(&self, from: &ImageName, to: &ImageName) -> Result<Done, DiskError> {
        let what = || format!("cannot convert {} to {}", from.path.display(), to.path.display());
        let cannot = |e| broken(what(), e);
        if to.format == Format::Store {
            return Err(to.no_image());
        }
        let source = self.open(from, true)?;
        check_apart(what(), &source, &to.path)?;
        let target = self.open(to, false)?;
        let bytes = target.sectors() * SECTOR_BYTES;
        let is_smaller = target.sectors() < source.sectors();
        let mut context = Copying::context(self).map_err(cannot)?;
        if is_smaller {
            // Opening for writing has begun a journal.
            self.close(&target, &to.path)?;
            let help = "make it larger first: ferrite image resize";
            return Err(DiskError::new(
                ErrorKind::Usage,
                what(),
                "the copy has no room in it",
                help,
            ));
        }
        let copying = Copying::new(self, &mut context, Mode::Replace, &source, &target);
        context.run(copying.map_err(cannot)?.run()).map_err(cannot)?;
        Ok(done(to, bytes, Vec::new()))
    }

    /// Copies a disk into a new image on `parent`, which gets only what the parent does not read the same. The parent
    /// keeps its mode. The copy cannot be resumed.
    ///
    /// # Errors
    /// `to` exists; it cannot stand on the parent. Those of the three images.
    pub fn convert_on(
        &self,
        from: &ImageName,
        to: &ImageName,
        parent: &ImageName,
        how: &Convert,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot convert {} to {}", from.path.display(), to.path.display());
        let cannot = |e| broken(what(), e);
        let mut undo = Undo::new(self);
        // First, as it may write what a killed server has left into the parent.
        let below = self.parent(to, parent)?;
        let source = self.open(from, true)?;
        check_apart(what(), &source, &to.path)?;
        let bytes = source.sectors() * SECTOR_BYTES;
        check_size(to, bytes, below.bytes())?;
        let new = how.new_image();
        formats::check_new(to, &new, Some(&below), bytes)?;
        let mut file = self.new_file(&to.path, Over::forced(how.force))?;
        let path = &below.name.path;
        let mut notes = vec![format!(
            "{to} stands on {parent}: nothing may write to that any more (chmod a-w {parent})",
            to = to.path.display(),
            parent = path.display()
        )];
        let help = "convert without a parent, or see to it that files can be made beside it";
        undo.marked(path, self.mark(path, to, file.path(), Some(help), &mut notes)?);
        self.write_new(&mut file, to.format, &new, (Some(&below), Blank::Zeros), bytes)?;
        let target = file.open_disk(to.format)?;
        self.equalize(&source, &target).map_err(cannot)?;
        drop(target);
        file.finish()?;
        undo.forget();
        notes.extend(formats::warnings(to, &new, Some(&below), bytes));
        notes.extend(self.note_elsewhere(to, &below));
        Ok(done(to, bytes, notes))
    }
}
