//! All steps at once, of a disk that nothing uses.

use ferrite_disk::Disk;

use super::*;

impl ImageTools<'_> {
    /// Merges the stretch of a chain from `from` (by default the leaf's parent) down into `to` (by default the parent of
    /// `from`). `to` keeps its name. If `from` is the leaf, the leaf's name shows the merged disk.
    ///
    /// # Errors
    /// One of the images is in use; `Refused`; those of the images. The disk reads the same in any case.
    pub fn coalesce_stretch(
        &self,
        leaf: &ImageName,
        from: Option<&ImageName>,
        to: Option<&ImageName>,
        force: bool,
    ) -> Result<Done, DiskError> {
        if let (Some(from), Some(to)) = (from, to)
            && let Some(done) = self.finish(leaf, from, to)?
        {
            return Ok(done);
        }
        let stretch = self.stretch(leaf, from, to)?;
        if same_file(&stretch.from.path, &leaf.path).map_err(|e| broken(cannot(leaf), e))? {
            return self.coalesce_leaf(leaf, &stretch.to, force);
        }
        // From here on nothing uses the chain by this leaf.
        let options = ImageTools::even_parents(self.options(false));
        let locked = Disk::Image(Image::open_alone(leaf, &options)?);
        self.close(&locked, &leaf.path)?;
        let found = self.find(&stretch)?;
        let mut done =
            self.copy_into(&found, &MergeCopy { force, ..MergeCopy::default() }, false)?;
        let is_leaf = same_file(&found.child.name.path, &leaf.path);
        let (opened, _locked) = match is_leaf.map_err(|e| broken(cannot(leaf), e))? {
            true => (Some(locked), None),
            false => (None, Some(locked)),
        };
        done.notes.extend(self.relink_child(&found, opened)?.notes);
        done.notes.extend(self.merge_clean(&stretch)?.notes);
        Ok(done)
    }

    /// What is left of a merge that was cut off behind its second step.
    fn finish(
        &self,
        leaf: &ImageName,
        from: &ImageName,
        to: &ImageName,
    ) -> Result<Option<Done>, DiskError> {
        let Some(noted) = Resume::load(&note(&to.path)) else { return Ok(None) };
        let is_it = noted
            .sources
            .first()
            .is_some_and(|upper| absolute(&from.path).is_ok_and(|from| from == upper.path()));
        let chain = self.chain_of(leaf)?;
        if !is_it || place(leaf, &chain, from).is_ok() || place(leaf, &chain, to).is_err() {
            return Ok(None);
        }
        let stretch = Stretch { leaf: leaf.clone(), from: from.clone(), to: to.clone() };
        self.merge_clean(&stretch).map(Some)
    }

    /// Merges the leaf, and all between, into `to`, which takes the leaf's name.
    fn coalesce_leaf(
        &self,
        leaf: &ImageName,
        to: &ImageName,
        force: bool,
    ) -> Result<Done, DiskError> {
        let chain = self.chain_of(leaf)?;
        let mut notes = Vec::new();
        if place(leaf, &chain, to)? > 1 {
            let upper = &chain[1].name;
            notes = self.coalesce_stretch(leaf, Some(upper), Some(to), force)?.notes;
        }
        let mut done = self.coalesce_into(leaf, to, force)?;
        done.notes.splice(0..0, notes);
        Ok(done)
    }
}
