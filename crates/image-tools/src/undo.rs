//! Steps for a new image before it has its name. They are undone if it never gets it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ferrite_images::children::marks::{Held, Mark};
use ferrite_images::{children, open_medium};

use super::files::{protect, same_file};
use super::{DiskError, ImageTools, broken};

/// Undoes steps on a parent. It is made before the parent is opened, so that its drop runs after the parent's lock is
/// released: other commands that work on the parent lock it.
pub(super) struct Undo<'a> {
    tools: &'a ImageTools<'a>,
    /// The parent, and its former mode.
    protected: Option<(PathBuf, u32)>,
    /// Parents whose lists got the child, and the line.
    marked: Vec<(PathBuf, Mark)>,
    /// Their lists of children.
    held: Vec<Held>,
}

impl<'a> Undo<'a> {
    pub(super) fn new(tools: &'a ImageTools<'a>) -> Undo<'a> {
        Undo { tools, protected: None, marked: Vec::new(), held: Vec::new() }
    }

    /// Notes the parent's former mode.
    pub(super) fn protected(&mut self, parent: &Path, mode: u32) {
        self.protected = Some((parent.into(), mode));
    }

    /// Notes that the parent's list got the child. The list stays locked until the child has its name.
    pub(super) fn marked(&mut self, parent: &Path, held: Option<Held>) {
        let added = held.as_ref().and_then(|held| held.added.clone());
        self.marked.extend(added.map(|mark| (parent.into(), mark)));
        self.held.extend(held);
    }

    /// Allows other children of the parents; these lists get the child again before it has its name.
    pub(super) fn unlock_lists(&mut self) {
        self.held.clear();
    }

    /// The child has its name: nothing is undone.
    pub(super) fn forget(mut self) {
        self.protected = None;
        self.marked.clear();
    }

    /// Restores the mode. That comes first, since the mode decides whether an image can be opened for writing. The
    /// write permission is removed again if the parent has other children, or is about to get one.
    fn unprotect(&self, parent: &Path, mode: u32) -> std::io::Result<()> {
        fs::set_permissions(parent, Permissions::from_mode(mode))?;
        match open_medium(parent, &self.tools.medium_options(false)) {
            Ok(_) => Ok(()),
            Err(_) => protect(parent, true),
        }
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        self.unlock_lists();
        for (parent, mark) in self.marked.drain(..) {
            let path = parent.display();
            let take_back =
                |file: PathBuf| children::take_mark_back(self.tools.directory, &file, &mark);
            if let Err(e) = fs::canonicalize(&parent).and_then(take_back) {
                tracing::warn!("{path} has a line for an image that was not made ({e})");
            }
        }
        if let Some((parent, mode)) = self.protected.take()
            && let Err(e) = self.unprotect(&parent, mode)
        {
            let path = parent.display();
            tracing::warn!("{path} is read-only now, for an image that was not made ({e})");
        }
    }
}

/// A second name of an image. It is removed when this is dropped, unless the first name is another image's by then. The
/// caller has the image locked until then.
pub(super) struct Link<'a> {
    tools: &'a ImageTools<'a>,
    first: &'a Path,
    second: &'a Path,
}

impl ImageTools<'_> {
    /// Gives an image a second name, durably.
    pub(super) fn link<'a>(
        &'a self,
        first: &'a Path,
        second: &'a Path,
    ) -> Result<Link<'a>, DiskError> {
        let cannot = |e| broken(format!("cannot make {}", second.display()), e);
        self.directory.hard_link(first, second).map_err(cannot)?;
        let link = Link { tools: self, first, second };
        self.sync_dir(second)?;
        Ok(link)
    }
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        if !same_file(self.first, self.second).unwrap_or(false) {
            return;
        }
        let removed = self.tools.directory.remove(self.second);
        let synced = removed.map(|()| self.tools.sync_dir(self.second));
        if !matches!(synced, Ok(Ok(()))) {
            let (first, second) = (self.first.display(), self.second.display());
            tracing::warn!("{second} is a second name of {first} still: rm {second}");
        }
    }
}
