//! The second step: the image above the stretch gets the lower end as its parent.
//!
//! The order:
//! 1. The copy was synced, and noted after that.
//! 2. The lower end's list gets the child, if it is to have it.
//! 3. The child's header names the new parent, in one step (see `Vhd::relink` and `Qcow2::relink`). The child reads the
//!    same before and after it.

use ferrite_disk::Disk;

use super::*;
use crate::files::Protected;
use crate::io_context::IoContext;
use crate::spec::Parent;

impl ImageTools<'_> {
    /// Gives the image that stands on the upper end of a stretch the lower end as its parent. Nothing has that image
    /// open meanwhile. If it has that parent already, nothing is done.
    ///
    /// # Errors
    /// `Refused`: the data were not copied. `InUse`; those of the images.
    pub fn merge_relink(&self, stretch: &Stretch) -> Result<Done, DiskError> {
        if let Some(done) = self.relinked(stretch)? {
            return Ok(done);
        }
        let found = self.find(stretch)?;
        self.relink_child(&found, None)
    }

    /// That nothing is left to do, if the chain does not lead through the upper end any more.
    fn relinked(&self, stretch: &Stretch) -> Result<Option<Done>, DiskError> {
        let chain = self.chain_of(&stretch.leaf)?;
        let at = |name| place(&stretch.leaf, &chain, name);
        match (at(&stretch.from), at(&stretch.to)) {
            (Err(_), Ok(to)) => {
                let path = stretch.to.path.display();
                let note = format!("nothing to do: the chain leads to {path} already");
                let to = &chain[to];
                Ok(Some(crate::create::done(&to.name, to.bytes, vec![note])))
            }
            _ => Ok(None),
        }
    }

    /// `opened` is the child, if the caller has it locked and alone.
    pub(super) fn relink_child(
        &self,
        found: &Found,
        opened: Option<Disk>,
    ) -> Result<Done, DiskError> {
        let cannot = |e| broken(found.what(), e);
        let child = &found.child.name;
        let noted = self.progress_of(found)?;
        if noted.done_bytes != noted.virtual_bytes {
            let why = format!("{} has not got all data yet", found.to.name.path.display());
            return Err(refused(
                found.what(),
                why,
                "copy them first (ferrite image merge-step copy)",
            ));
        }
        // A merge that writes to it, or below it, is refused from here on.
        let options = self.chain_options(found, self.options(true));
        let lower = Disk::open_image(&found.to.name, &options)?;
        let path = absolute(&found.to.name.path).map_err(cannot)?;
        let parent = Parent { disk: lower, name: found.to.name.clone(), path };
        let protected = Protected::lift(&child.path).map_err(cannot)?;
        let disk = match opened {
            Some(disk) => disk,
            None => self.open_child(found)?,
        };
        let mut notes = Vec::new();
        let help = "see to it that files can be made beside the lower end";
        let _listed = self.mark(&parent.path, child, &child.path, Some(help), &mut notes)?;
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(&disk).map_err(cannot)?;
        let _locked = disk.files();
        let changing = self.begin_change(&disk)?;
        let relinked = context.run(async { Ok(formats::relink(&port, disk, &parent).await) });
        relinked.map_err(cannot)??;
        changing.end(&child.path)?;
        protected.restore().map_err(cannot)?;
        Ok(done(found, notes))
    }

    /// Opens the child, locked, without its parents. Answered writes of a killed process become its own.
    fn open_child(&self, found: &Found) -> Result<Disk, DiskError> {
        let child = &found.child.name;
        let image = Image::open_alone(child, &ImageTools::even_parents(self.options(false)))?;
        let parents = formats::parents_of(&image);
        let from = &found.from().name.path;
        if !parents.iter().any(|path| same_file(path, from).unwrap_or(false)) {
            return Err(changed(found.what()));
        }
        let disk = Disk::Image(image);
        self.close(&disk, &child.path)?;
        Ok(disk)
    }
}
