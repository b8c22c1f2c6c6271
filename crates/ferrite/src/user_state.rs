//! The journals of a user other than root. They keep answered changes of metadata for the next process of that user
//! which opens the image. They are in the folder that a login gives its user on a tmpfs, as root's are in `/run/ferrite`.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use ferrite_image_tools::is_readable;
use rustix::process::geteuid;

use crate::exit::Failure;
use crate::serve::{IMAGES, RUN_DIR};

/// The variable that names a user's folder.
const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";
/// Where the folders of all users are.
const OF_USERS: &str = "/run/user";
/// The journals below such a folder.
const JOURNALS: &str = "ferrite/images";

/// The journals' folder of a process that serves an image.
pub(crate) struct State {
    /// `None`: the image is only read, and no journal can be.
    pub(crate) folder: Option<PathBuf>,
    /// Root's folder exists, and this user may not read it.
    pub(crate) unseen: bool,
}

/// Finds the folder, and makes it.
pub(crate) fn to_serve(read_only: bool) -> Result<State, Failure> {
    // An image that is only read can be served without this folder.
    let _ = make(Path::new(RUN_DIR));
    let images = Path::new(RUN_DIR).join(IMAGES);
    let unseen = !is_readable(&images);
    let folder = match own() {
        Some(folder) if !read_only => {
            prepare(&folder).map_err(|e| {
                let what = format!("cannot keep answered writes in {}", folder.display());
                let help = format!(
                    "{RUNTIME_DIR} must name a folder of this user that no other user may write to"
                );
                Failure::new(what, e, &help)
            })?;
            tracing::info!(
                "answered changes of an image's tables are kept in {} until they are durable",
                folder.display()
            );
            Some(folder)
        }
        own => match own.filter(|folder| folder.is_dir()) {
            Some(folder) => Some(folder),
            // A raw image has no journal. Another one is refused when its journal is to be made.
            None => (!unseen || !read_only).then_some(images),
        },
    };
    Ok(State { folder, unseen })
}

/// The folder of this user, if there are journals in it.
pub(crate) fn used() -> Option<PathBuf> {
    own().filter(|folder| has_entries(folder))
}

/// The folders of users that have journals, for root: it does not read what others may exchange.
pub(crate) fn of_others() -> Vec<PathBuf> {
    if !geteuid().is_root() {
        return Vec::new();
    }
    let users = std::fs::read_dir(OF_USERS).into_iter().flatten().flatten();
    let mut folders: Vec<_> = users.map(|user| user.path().join(JOURNALS)).collect();
    folders.retain(|folder| has_entries(folder));
    folders.sort();
    folders
}

fn own() -> Option<PathBuf> {
    if geteuid().is_root() {
        return None;
    }
    let folder = PathBuf::from(std::env::var_os(RUNTIME_DIR)?);
    folder.is_absolute().then(|| folder.join(JOURNALS))
}

fn has_entries(folder: &Path) -> bool {
    folder.read_dir().is_ok_and(|mut entries| entries.next().is_some())
}

fn make(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Makes the folder below the user's own. It and the two folders above it must be of this user alone: other users could
/// exchange the journals.
fn prepare(folder: &Path) -> io::Result<()> {
    make(folder)?;
    for folder in folder.ancestors().take(3) {
        let there = std::fs::symlink_metadata(folder)?;
        let is_own = there.is_dir() && there.uid() == geteuid().as_raw();
        if !is_own || there.mode() & 0o022 != 0 {
            let why = format!("others than this user may change {}", folder.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
    }
    Ok(())
}
