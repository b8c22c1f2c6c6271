//! The leaf of a chain that is in use is merged into an image below it.
//!
//! The leaf changes, so it is merged as the image that it was at a moment:
//! 1. *split*: the leaf's file gets another name, and a new leaf, empty, the old one. It is a snapshot: nothing has the
//!    leaf open meanwhile.
//! 2. The stretch from that image on is merged as any other one, while the new leaf is written to: copy, relink, clean.
//! 3. *leaf*: nothing has the chain open, and the new leaf, which is small, is merged into the lower end, which takes
//!    its name. A leaf that is not small stays: from 1 again.
//!
//! After each step the leaf's name shows the disk, and the result of the step is durable. A crash in a step leaves the
//! chain before it or after it. The order of a split is that of `ImageTools::snapshot`, the order of the last step that
//! of `ImageTools::coalesce`. Until the chain is relinked, *undo* goes back: the old leaf's file gets the data of the
//! new leaf, and its name again; the note of the copy goes after that.

use ferrite_disk::Disk;
use ferrite_disk::pieces::{What, look_at_layer};

use super::*;
use crate::coalesce::Pair;
use crate::files::protect;
use crate::io_context::IoContext;
use crate::rebase::check_snapshots;
use crate::room::Room;

/// The result for a leaf that was to be merged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeafMerge {
    /// Whether it is merged.
    pub merged: bool,
    /// Bytes of data in the leaf that is not merged.
    pub leaf_bytes: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl ImageTools<'_> {
    /// Tells what a merge of the leaf into an image below it would do.
    pub(super) fn leaf_plan(&self, stretch: &Stretch, force: bool) -> Result<MergePlan, DiskError> {
        let found = self.find_leaf(stretch)?;
        for pair in found.chain.windows(2).take(found.images.len()) {
            self.check_alone(&pair[0].name, &pair[1].name, force)?;
        }
        let needed_bytes = self.merge_needs(&found)?;
        let below = &found.to.name.path;
        let room = Room::at(below).map_err(|e| broken(found.what(), e))?;
        room.check(found.what(), needed_bytes, below)?;
        self.check_pair(
            &stretch.leaf,
            &Pair {
                parent: found.to.name.clone(),
                parent_bytes: found.to.bytes,
                child_bytes: found.from().bytes,
                below_bytes: found.below_bytes,
                needed_bytes,
            },
        )?;
        let leaf_bytes = self.leaf_bytes(&self.open_unlocked(&found)?, &stretch.leaf)?;
        Ok(MergePlan { leaf_bytes: Some(leaf_bytes), ..found.plan(needed_bytes) })
    }

    /// Finds the stretch from the leaf on. The image "above" it is the leaf, as there is none.
    fn find_leaf(&self, stretch: &Stretch) -> Result<Found, DiskError> {
        let leaf = &stretch.leaf;
        let chain = self.chain_of(leaf)?;
        let to = place(leaf, &chain, &stretch.to)?;
        if to == 0 {
            let help = "--to names an image that it stands on (ferrite image info)";
            return Err(unsuitable(cannot(leaf), "it cannot be merged into itself", help));
        }
        let found = Found {
            leaf: leaf.clone(),
            child: chain[0].clone(),
            images: chain[..to].to_vec(),
            to: chain[to].clone(),
            below_bytes: chain.get(to + 1).map_or(0, |below| below.bytes),
            chain,
        };
        self.check_found(&found)?;
        let upper = self.open_unlocked(&found)?;
        let Disk::Image(upper) = &upper else { return Ok(found) };
        let (upper, lower) = upper.layers().split_at(found.images.len());
        for layer in upper {
            check_snapshots(layer, found.what())?;
        }
        copy::check_units(&found, upper, lower.first())?;
        Ok(found)
    }

    /// The leaf's file gets the name `snapshot`, and a new leaf the old one. If that was done before, nothing is done,
    /// also if the new leaf was written to since.
    ///
    /// # Errors
    /// Errors of [`snapshot`](Self::snapshot).
    pub fn merge_split(&self, leaf: &ImageName, snapshot: &ImageName) -> Result<Done, DiskError> {
        let chain = self.chain_of(leaf)?;
        if chain.get(1).is_none_or(|below| !is_same(&below.name, snapshot)) {
            return self.snapshot(leaf, snapshot);
        }
        // It may have been cut off after its last rename.
        let path = &snapshot.path;
        protect(path, true).map_err(|e| broken(cannot(leaf), e))?;
        self.sync_dir(path)?;
        let note = format!("nothing to do: it stands on {} already", path.display());
        Ok(crate::create::done(leaf, chain[0].bytes, vec![note]))
    }

    /// Merges a leaf that stands on `to`, and has at most `most` bytes of data, into that, which takes its name.
    /// Nothing has the chain open. If that was done before, nothing is done.
    ///
    /// # Errors
    /// Errors of [`coalesce_into`](Self::coalesce_into). The disk reads the same in any case.
    pub fn merge_leaf(
        &self,
        leaf: &ImageName,
        to: &ImageName,
        most: u64,
        force: bool,
    ) -> Result<LeafMerge, DiskError> {
        let path = to.path.display();
        if is_gone(&to.path) {
            self.chain_of(leaf)?;
            forget_note(&to.path).map_err(|e| broken(cannot(leaf), e))?;
            self.sync_dir(&leaf.path)?;
            let note = format!("nothing to do: {path} is not there, as after the merge");
            return Ok(LeafMerge { merged: true, leaf_bytes: 0, notes: vec![note] });
        }
        // Writes that a killed process has answered become the leaf's own before it is measured.
        let options = ImageTools::even_parents(self.options(false));
        let opened = Disk::Image(Image::open_alone(leaf, &options)?);
        self.close(&opened, &leaf.path)?;
        let leaf_bytes = self.leaf_bytes(&opened, leaf)?;
        drop(opened);
        let chain = self.chain_of(leaf)?;
        let note = match place(leaf, &chain, to)? {
            1 if leaf_bytes <= most => {
                let notes = self.coalesce_into(leaf, to, force)?.notes;
                return Ok(LeafMerge { merged: true, leaf_bytes: 0, notes });
            }
            1 => format!("it has {}, which is more than {}", Human(leaf_bytes), Human(most)),
            _ => format!("it does not stand on {path} directly"),
        };
        Ok(LeafMerge { merged: false, leaf_bytes, notes: vec![note] })
    }

    /// Takes a split back: the image `snapshot` gets the leaf's data and its name, if these are at most `most` bytes.
    /// Nothing has the chain open. The note of a copy into `to` goes, too.
    ///
    /// # Errors
    /// Errors of [`snapshot`](Self::snapshot) and [`coalesce_into`](Self::coalesce_into). The disk reads the same in
    /// any case.
    pub fn merge_undo(
        &self,
        leaf: &ImageName,
        snapshot: &ImageName,
        to: &ImageName,
        most: u64,
    ) -> Result<LeafMerge, DiskError> {
        // A split that was cut off may have left a second name of the leaf, and lines in lists. It is completed first.
        if is_same(leaf, snapshot) {
            self.merge_split(leaf, snapshot)?;
        }
        let done = self.merge_leaf(leaf, snapshot, most, false)?;
        if done.merged {
            forget_note(&to.path).map_err(|e| broken(cannot(leaf), e))?;
        }
        Ok(done)
    }

    /// Opens the images of a stretch and the lower end as they are now, without a lock.
    pub(super) fn open_unlocked(&self, found: &Found) -> Result<Disk, DiskError> {
        let options = OpenOptions { unlocked: true, ..self.medium_options(true) };
        let options = self.chain_options(found, options);
        let count = found.images.len() + 1;
        Image::open_stretch(&found.from().name, &options, count).map(Disk::Image)
    }

    /// Bytes of data in a disk's own image.
    fn leaf_bytes(&self, disk: &Disk, name: &ImageName) -> Result<u64, DiskError> {
        let cannot = |e| broken(format!("cannot look at {}", name.path.display()), e);
        let Disk::Image(image) = disk else { return Ok(0) };
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(disk).map_err(cannot)?;
        let layer = &image.layers()[0];
        let counted = context.run(async {
            let (mut at, mut sum) = (0, 0);
            while at < layer.bytes() {
                let (piece, below) = look_at_layer(layer, 0, &port, at, layer.bytes() - at).await?;
                let len = piece.map_or(below, |piece| piece.len);
                if piece.is_some_and(|piece| piece.what != What::Zeros) {
                    sum += len;
                }
                at += len;
            }
            Ok(sum)
        });
        counted.map_err(cannot)
    }
}

/// Whether both names lead to one file.
fn is_same(a: &ImageName, b: &ImageName) -> bool {
    same_file(&a.path, &b.path).unwrap_or(false)
}

fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}
