//! The last step: merged images that no chain leads to are removed.
//!
//! The order: each image is locked, from the lowest one up. Its marks are removed first, then its file. Then the folder
//! is synced. The note is removed last, since it lists the images that are still to be removed.

use ferrite_images::open_medium;

use super::*;
use crate::files::Protected;
use crate::resume::Source;

/// The images that are removed, the upper one first, and why others stay.
struct Unused {
    removed: Vec<PathBuf>,
    notes: Vec<String>,
}

impl ImageTools<'_> {
    /// Removes the images of a stretch that was merged and relinked. An image that another one stands on stays, with all
    /// below it. If there is nothing to remove, nothing is done.
    ///
    /// # Errors
    /// `Refused`: the chain leads through them still. `InUse`; errors of the kernel.
    pub fn merge_clean(&self, stretch: &Stretch) -> Result<Done, DiskError> {
        let what = || cannot(&stretch.leaf);
        let chain = self.chain_of(&stretch.leaf)?;
        let to = &chain[place(&stretch.leaf, &chain, &stretch.to)?];
        let note = note(&to.name.path);
        let path = to.name.path.display();
        let Some(noted) = Resume::load(&note) else {
            let note = format!("nothing to do: no merge into {path} is noted");
            return Ok(crate::create::done(&to.name, to.bytes, vec![note]));
        };
        if noted.done_bytes != noted.virtual_bytes {
            let why = format!("{path} has not got all data yet");
            return Err(refused(what(), why, "copy them first (ferrite image merge-step copy)"));
        }
        let is_used = |image: &&Source| {
            let is_it = |link: &Link| same_file(&link.name.path, image.path()).unwrap_or(false);
            chain.iter().any(is_it)
        };
        let images = noted.sources.split_last().map_or(&[][..], |(_, images)| images);
        if let Some(used) = images.iter().find(is_used) {
            let why = format!("its chain leads through {} still", used.path().display());
            return Err(refused(what(), why, "relink it first (ferrite image merge-step relink)"));
        }
        let Unused { removed, mut notes } = unused(images).map_err(|e| broken(what(), e))?;
        for image in removed.iter().rev() {
            self.remove_image(&stretch.leaf, image)?;
        }
        notes.extend(removed.iter().map(|path| format!("{} is removed", path.display())));
        Resume::remove(&note).map_err(|e| broken(what(), e))?;
        self.sync_dir(&to.name.path)?;
        Ok(crate::create::done(&to.name, to.bytes, notes))
    }

    fn remove_image(&self, leaf: &ImageName, path: &Path) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("{}: {} stays", cannot(leaf), path.display()), e);
        let protected = Protected::lift(path).map_err(cannot)?;
        let _locked = open_medium(path, &ImageTools::even_parents(self.medium_options(false)))?;
        let lists = children::lists(path).map_err(cannot)?;
        children::forget_all(self.directory, &lists).map_err(cannot)?;
        self.directory.remove(path).map_err(cannot)?;
        self.forget_maps(path)?;
        forget_note(path).map_err(cannot)?;
        protected.forget();
        self.sync_dir(path)
    }
}

/// Finds the merged images that have no child, which may be removed.
fn unused(images: &[Source]) -> io::Result<Unused> {
    let mut found = Unused { removed: Vec::new(), notes: Vec::new() };
    for image in images {
        let path = image.path();
        match Source::of(path) {
            // It was removed before.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
            Ok(now) if now == *image => {}
            Ok(_) => {
                let note = format!("{} is another image now, and stays", path.display());
                found.notes.push(note);
                break;
            }
        }
        let upper = found.removed.last().map(PathBuf::as_path);
        let children = children::look(path, upper, Ask::All)?;
        let lost = || children.lost.as_ref().map(ToString::to_string);
        let why = match (&children.child, &children.unknown) {
            (Some(child), _) => Some(format!("{} stands on it", child.display())),
            (None, Some(unknown)) => Some(unknown.why.clone()),
            (None, None) => lost(),
        };
        if let Some(why) = why {
            let note = format!("{} stays, and so does what it stands on: {why}", path.display());
            found.notes.push(note);
            break;
        }
        found.removed.push(path.to_owned());
    }
    Ok(found)
}
