//! Merges in the middle of a chain: at rest, and the copy of one while the disk is in use.

use super::*;

/// A chain in which a parent can be merged into what it stands on.
const CHAIN: u64 = 3;

impl Images {
    pub(super) fn coalesce_inner(&self, place: &Place, layers: u64) -> Result<(), String> {
        let leaf = self.leaf(place);
        let done = self.tools(place, |tools| {
            let chain = tools.info(&leaf)?.chain;
            match chain.get(1) {
                Some(inner) if chain.len() as u64 == layers => {
                    let path = PathBuf::from(&inner.path);
                    tools.coalesce(&ImageName { format: self.kind, path }, false).map(drop)
                }
                _ => Ok(()),
            }
        });
        done.map_err(|e| e.to_string())
    }

    /// All steps of a merge of the leaf's parent. It goes on from a copy that was made in use. One that was interrupted
    /// behind its second step is cleaned up.
    pub(super) fn merge_stretch(&self, place: &Place, layers: u64) -> Result<(), String> {
        let leaf = self.leaf(place);
        let done = self.tools(place, |tools| {
            let chain = tools.info(&leaf)?.chain;
            if chain.len() as u64 == layers {
                return tools.coalesce_stretch(&leaf, None, None, false).map(drop);
            }
            for image in chain.iter().skip(1) {
                let to = ImageName { format: self.kind, path: PathBuf::from(&image.path) };
                let stretch = Stretch { leaf: leaf.clone(), from: to.clone(), to };
                match tools.merge_clean(&stretch) {
                    // A merge of other layers has been copied only.
                    Err(e) if e.kind() == ErrorKind::Refused => {}
                    cleaned => drop(cleaned?),
                }
            }
            Ok(())
        });
        done.map_err(|e| e.to_string())
    }
}

/// The copy of a merge of the leaf's parent, while a process has the leaf open and writes.
pub(super) fn copy(
    images: &Images,
    place: &Place,
    layers: u64,
) -> Option<Box<dyn Fn() -> io::Result<()>>> {
    if layers < CHAIN || !images.can(Operation::MergeStretch(layers)) {
        return None;
    }
    let (images, place) = (*images, place.clone());
    Some(Box::new(move || {
        let leaf = images.leaf(&place);
        let copied = images.tools(&place, |tools| {
            let stretch = tools.stretch(&leaf, None, None)?;
            tools.merge_copy(&stretch, &MergeCopy::default())
        });
        match copied {
            Err(_) if place.world.stopped() => Ok(()),
            // Images whose units differ are merged at rest.
            Err(e) if e.kind() == ErrorKind::Unsuitable => Ok(()),
            copied => copied.map(drop).map_err(io::Error::other),
        }
    }))
}
