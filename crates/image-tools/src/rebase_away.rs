//! Takes an image's parent away. The order is that of `rebase`.

use std::fs;

use ferrite_disk_base::{DiskError, ImageName, SECTOR_BYTES};
use ferrite_images::children;

use super::copy::{Copying, Mode};
use super::create::done;
use super::files::{Over, protect};
use super::formats::{Blank, leaf};
use super::io_context::IoContext;
use super::rebase::{Rebased, note_bitmaps};
use super::{Done, ImageTools, Rebase, broken, formats};

impl ImageTools<'_> {
    /// Makes an image one without a parent: safely it gets all of its parents' data, otherwise it has only its own.
    ///
    /// # Errors
    /// As [`rebase`](Self::rebase).
    pub fn rebase_away(
        &self,
        name: &ImageName,
        how: Rebase,
        force: bool,
    ) -> Result<Done, DiskError> {
        let cannot = |e| broken(format!("cannot rebase {}", name.path.display()), e);
        let Rebased { old, new, was_protected } = self.open_to_rebase(name, how, force)?;
        let bytes = old.sectors() * SECTOR_BYTES;
        let parents = leaf(&old).map_or(Ok(None), |layer| layer.parents());
        // The name of a missing parent may not be understood: it is a parent all the same.
        if matches!(parents, Ok(None)) {
            return Ok(done(name, bytes, vec!["nothing to do: it has no parent".into()]));
        }
        let mut notes = Vec::new();
        note_bitmaps(leaf(&old), &name.path, &mut notes);
        formats::check_new(name, &new, None, bytes)?;
        let mut file = self.new_file(&name.path, Over::Mine)?;
        self.write_new(&mut file, name.format, &new, (None, Blank::Zeros), bytes)?;
        let to = file.open_disk(name.format)?;
        let mode = match how {
            Rebase::Safe => Mode::Fill,
            Rebase::Unsafe => Mode::Merge,
        };
        let mut context = Copying::context(self).map_err(cannot)?;
        let copying = Copying::new(self, &mut context, mode, &old, &to);
        context.run(copying.map_err(cannot)?.run()).map_err(cannot)?;
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(&to).map_err(cannot)?;
        let _locked = to.files();
        context.run(formats::take_identity(&port, to, &old)).map_err(cannot)?;
        // Its children find it by its name.
        let kept = fs::canonicalize(&name.path).and_then(|kept| children::lists(&kept));
        let inherited = kept.and_then(|kept| children::inherit(self.directory, &kept, file.path()));
        inherited.map_err(cannot)?;
        file.finish()?;
        if was_protected {
            protect(&name.path, true).map_err(cannot)?;
        }
        Ok(done(name, bytes, notes))
    }
}
