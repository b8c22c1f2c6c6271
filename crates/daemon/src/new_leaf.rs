//! A snapshot of a raw disk: its file gets another name, and a new qcow2 image on that is the disk.
//!
//! The order of steps, while the disk is paused:
//! 1. The state file has the [`NewLeaf`] with the pause.
//! 2. An empty file takes the leaf's name, so that no other program's file is overwritten. Then the
//!    raw file gets the snapshot's name as a second one. Then the leaf is written. It gets the disk's
//!    dirty maps, and the snapshot keeps them as they are.
//! 3. The disk goes on with the leaf (pause.rs, 3 to 5). `switched.json` leads the configured raw
//!    name to it.
//! 4. The raw file loses its old name and is write-protected. The state file has no [`NewLeaf`] any
//!    more.
//!
//! The image that the disk goes on with decides, also after the death of any process: with the leaf,
//! step 4 follows. With the raw file, the leaf of step 2 is removed. The old name stays until the
//! guest has gone on, so a successor finds the one or the other.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::params::{Format, Image};
use crate::pause::{self, NotDone, Pause};
use crate::state::DiskId;
use crate::verbs::{self, maps_of, refuse};
use crate::{Failure, Shared, Step};

/// The names of a snapshot that is made, as the state file has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewLeaf {
    /// The raw file's name until now.
    raw: PathBuf,
    /// The name that it gets.
    snapshot: PathBuf,
    /// The new image.
    leaf: PathBuf,
    /// The raw file's mode until now. An image on a file write-protects that.
    mode: u32,
}

impl NewLeaf {
    fn image(&self) -> Image {
        Image { format: Format::Qcow2, path: self.leaf.clone() }
    }

    /// Step 2, but for the leaf's contents.
    fn take_names(&self) -> io::Result<()> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.leaf)?;
        let named = fs::hard_link(&self.raw, &self.snapshot).and_then(|()| self.sync_folder());
        if named.is_err() {
            let _ = fs::remove_file(&self.leaf);
        }
        named
    }

    /// Takes back what the leaf's making has done to the raw file, which is to be opened again.
    fn unprotect(&self) -> io::Result<()> {
        fs::set_permissions(&self.raw, Permissions::from_mode(self.mode & 0o7777))
    }

    /// Whether both names are of the same file.
    fn has_both_names(&self) -> bool {
        let file = |path: &Path| path.symlink_metadata().map(|meta| (meta.dev(), meta.ino())).ok();
        file(&self.raw).is_some_and(|raw| file(&self.snapshot) == Some(raw))
    }

    /// Step 4.
    fn complete(&self) -> io::Result<()> {
        if self.has_both_names() {
            remove(&maps_of(&self.raw))?;
            fs::remove_file(&self.raw)?;
        }
        let mode = self.snapshot.metadata()?.mode() & !0o222;
        fs::set_permissions(&self.snapshot, Permissions::from_mode(mode))?;
        self.sync_folder()
    }

    /// Removes what step 2 has made.
    fn undo(&self) -> io::Result<()> {
        let is_empty = || self.leaf.symlink_metadata().is_ok_and(|meta| meta.len() == 0);
        if !self.has_both_names() {
            return if is_empty() { fs::remove_file(&self.leaf) } else { Ok(()) };
        }
        // The second name goes last: as long as it is there, the leaf is ours.
        remove(&maps_of(&self.leaf))?;
        remove(&self.leaf)?;
        remove(&maps_of(&self.snapshot))?;
        fs::remove_file(&self.snapshot)?;
        self.sync_folder()
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(self.raw.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

/// Removes a file that may be gone.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Gives a raw disk as it is now the name `new`, read-only. The guest goes on in a new qcow2 image,
/// which has the disk's name with that extension.
///
/// # Errors
/// The disk goes on as before, or is paused: the failure says which.
pub(crate) fn snapshot(
    shared: &Shared,
    id: DiskId,
    raw: &Image,
    new: &Path,
    begin_map: Option<&str>,
) -> Result<(), NotDone> {
    let names = checked(id, raw, new)?;
    let by = Pause::step_of("a snapshot");
    let noted = names.clone();
    pause::pause_and(shared, id, &by, verbs::WITHIN, |entry| entry.new_leaf = Some(noted))
        .inspect_err(|_| shared.table.change(id, |entry| entry.new_leaf = None))?;
    let made = make(shared, &names, begin_map).map(|()| names.image()).map_err(NotDone::Failed);
    (shared.on_step)(Step::LeafMade);
    verbs::go_on_with(shared, id, made, raw)
}

/// The names of a snapshot that can be made.
fn checked(id: DiskId, raw: &Image, new: &Path) -> Result<NewLeaf, NotDone> {
    if id.is_tap() {
        let why = "it is a tap, whose images the storage manager names";
        return Err(refuse(why, "let the storage manager make the snapshot"));
    }
    let path = raw.path.display();
    let meta = raw
        .path
        .symlink_metadata()
        .map_err(|e| refuse(format!("cannot look at {path}: {e}"), "look at its folder"))?;
    let names = NewLeaf {
        raw: raw.path.clone(),
        snapshot: new.to_owned(),
        leaf: raw.path.with_extension(Format::Qcow2.word()),
        mode: meta.mode(),
    };
    if [&names.raw, &names.snapshot, &names.leaf].into_iter().any(|path| path.to_str().is_none()) {
        return Err(refuse(format!("the name of {path} is not UTF-8"), "rename it"));
    }
    if !meta.is_file() {
        let why = format!("{path} is a block device or a link, and cannot get another name");
        let help = format!(
            "pause the disk, make an image on it (ferrite image clone {path} NEW.qcow2), and resume \
             the disk with that"
        );
        return Err(refuse(why, help));
    }
    let folder = |path: &Path| path.parent().and_then(|folder| folder.canonicalize().ok());
    if folder(&names.raw) != folder(&names.snapshot) {
        let why = format!("{} would be in another folder than the disk", new.display());
        return Err(refuse(why, "name a file in the folder of the disk's image"));
    }
    for file in [&names.snapshot, &names.leaf] {
        if file.symlink_metadata().is_ok() {
            let help = "name a file that does not exist yet; the leaf has the disk's name, with the \
                        extension qcow2";
            return Err(refuse(format!("{} exists", file.display()), help));
        }
    }
    Ok(names)
}

fn make(shared: &Shared, names: &NewLeaf, begin_map: Option<&str>) -> Result<(), Failure> {
    names.take_names().map_err(|e| Failure {
        why: format!(
            "cannot give {} the name {}: {e}",
            names.raw.display(),
            names.snapshot.display()
        ),
        help: "look at the folder's rights and space".to_owned(),
    })?;
    let parent = Image { format: Format::Raw, path: names.snapshot.clone() };
    let arguments = ["clone".into(), "--force".into(), parent.name(), names.image().name()];
    verbs::run(shared, &arguments)?;
    let raw = Image { format: Format::Raw, path: names.raw.clone() };
    verbs::copy_maps(shared, &raw, &parent, None)?;
    verbs::copy_maps(shared, &raw, &names.image(), begin_map)
}

impl Shared {
    /// Has the raw file of a snapshot that is not made be as it was, before it is opened as `image`.
    pub(crate) fn prepare_raw(&self, id: DiskId, image: &Image) {
        let names = self.table.read(|disks| disks.get(&id)?.new_leaf.clone());
        if let Some(names) = names.filter(|names| names.raw == image.path)
            && let Err(e) = names.unprotect()
        {
            tracing::warn!("disk {id}: cannot make {} writable: {e}", names.raw.display());
        }
    }

    /// Completes a snapshot of a raw disk, or takes it back: as says the image that the disk is
    /// served from. A paused disk may have either.
    pub(crate) fn settle_leaf(&self, id: DiskId, image: &Image) {
        let names = self.table.read(|disks| {
            let entry = disks.get(&id).filter(|entry| entry.pause.is_none())?;
            entry.new_leaf.clone()
        });
        let Some(names) = names else { return };
        let settled = match image.path == names.leaf {
            true => names.complete(),
            false => names.undo(),
        };
        if let Err(e) = settled {
            let (raw, snapshot) = (names.raw.display(), names.snapshot.display());
            tracing::warn!(
                "disk {id}: files of its snapshot are left: {e}; {raw} and {snapshot} are one file, of \
                 which the name that ferrite image info does not show can be removed"
            );
        }
        self.table.change(id, |entry| entry.new_leaf = None);
        let written = self.states.read(id).and_then(|state| match state {
            Some(state) => self.states.write(&state.with_new_leaf(None)),
            None => Ok(()),
        });
        if let Err(e) = written {
            tracing::warn!("disk {id}: {}", self.state_failure(&e));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> NewLeaf {
        let [raw, snapshot, leaf] = ["a.img", "b.img", "a.qcow2"].map(|name| dir.join(name));
        NewLeaf { raw, snapshot, leaf, mode: 0o640 }
    }

    fn files(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_snapshot_is_completed_or_taken_back_also_twice_and_touches_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let names = names(dir.path());
        fs::write(&names.raw, "raw").unwrap();
        names.take_names().unwrap();
        fs::write(&names.leaf, "leaf").unwrap();
        for _ in 0..2 {
            names.undo().unwrap();
            assert_eq!(files(dir.path()), ["a.img"]);
        }
        // `undo` keeps an image of this name that another program has made.
        fs::write(&names.leaf, "theirs").unwrap();
        names.undo().unwrap();
        assert!(names.take_names().is_err());
        assert_eq!(files(dir.path()), ["a.img", "a.qcow2"]);
        fs::remove_file(&names.leaf).unwrap();
        names.take_names().unwrap();
        for _ in 0..2 {
            names.complete().unwrap();
            assert_eq!(files(dir.path()), ["a.qcow2", "b.img"]);
        }
        // So does a new disk of the old name.
        fs::write(&names.raw, "next").unwrap();
        fs::write(&names.leaf, "leaf").unwrap();
        names.complete().unwrap();
        names.undo().unwrap();
        assert_eq!(files(dir.path()), ["a.img", "a.qcow2", "b.img"]);
        assert_eq!(fs::read(&names.raw).unwrap(), b"next");
    }
}
