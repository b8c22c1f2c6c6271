//! The places where parents of an image are allowed.
//!
//! An image names its own parents, so its author chooses them. A user's image could name another user's disk, or any
//! file of the host, and a guest would read it. So parents have to be where the image is, or where the administrator
//! allows them. The place of a file is where its name finally leads, through links and `..`.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use ferrite_host::names;

use crate::{DiskError, ErrorKind};

/// The host's own list of folders, for all commands.
pub const CONFIGURED: &str = "/etc/ferrite/parents";

/// The images that may be parents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parents {
    /// Files in the folder of the opened image, and below it; and those listed here, or in a folder that is listed.
    Within(Vec<PathBuf>),
    /// Any file that the image names.
    Any,
}

impl Default for Parents {
    fn default() -> Parents {
        Parents::Within(Vec::new())
    }
}

impl Parents {
    /// Whether `parent` is allowed in the chain of `leaf`.
    ///
    /// # Errors
    /// One of the two cannot be found.
    pub fn allow(&self, leaf: &Path, parent: &Path) -> io::Result<bool> {
        self.allow_found(&names::canonicalize(leaf)?, parent, &names::canonicalize(parent)?)
    }

    /// Whether the file opened by the name `parent` is allowed in the chain of the file opened as `leaf`. The kernel
    /// gives the places of the open files, since a name may lead to another file each time.
    ///
    /// # Errors
    /// The kernel does not give the place of one of the files.
    pub fn allow_opened(
        &self,
        leaf: BorrowedFd<'_>,
        parent: &Path,
        opened: BorrowedFd<'_>,
    ) -> io::Result<bool> {
        match self {
            Parents::Any => Ok(true),
            Parents::Within(_) => self.allow_found(&place(leaf)?, parent, &place(opened)?),
        }
    }

    /// Checks paths without links; `found` is the file that `parent` leads to.
    fn allow_found(&self, leaf: &Path, parent: &Path, found: &Path) -> io::Result<bool> {
        let Parents::Within(named) = self else { return Ok(true) };
        let named: Vec<PathBuf> =
            named.iter().filter_map(|n| names::canonicalize(n).ok()).collect();
        let is_named = |path: &Path| named.iter().any(|n| path.starts_with(n));
        if is_named(found) {
            return Ok(true);
        }
        let meta = names::symlink_metadata(found)?;
        if meta.file_type().is_block_device() {
            // Volumes have links as names (/dev/VG/LV), in folders that only the system changes: those of the file
            // system of devices.
            let folder = names::canonicalize(folder(parent))?;
            let systems = names::metadata(&folder)?.dev() == meta.dev();
            let name = folder.join(parent.file_name().unwrap_or_default());
            return Ok(systems && is_named(&folder) && names::canonicalize(name)? == found);
        }
        let own = own_folder(leaf).filter(|_| names::is_file(leaf));
        Ok(meta.is_file() && own.is_some_and(|own| found.starts_with(own)))
    }

    /// The error for `image`, whose parent is not allowed.
    pub fn refusal(image: &Path, parent: &Path) -> DiskError {
        let found = names::canonicalize(parent).unwrap_or_else(|_| parent.to_owned());
        let leads = match found == parent {
            true => String::new(),
            false => format!(", which is {},", found.display()),
        };
        let allowed = to_allow(parent);
        let allowed = allowed.display();
        DiskError::new(
            ErrorKind::Parent,
            format!("cannot open image {}", image.display()),
            format!(
                "its parent {}{leads} is not in the image's folder or below, nor where parents \
                 are allowed",
                parent.display()
            ),
            format!(
                "an image can name any file of this host; if it is meant to stand on that one, say \
                 --parents {allowed}, or write {allowed} into {CONFIGURED}"
            ),
        )
    }

    /// The error for `image`, whose parent this process's keeper hides from it.
    pub fn outside(image: &Path, parent: &Path) -> DiskError {
        DiskError::new(
            ErrorKind::Parent,
            format!("cannot open image {}", image.display()),
            format!(
                "its parent {} is not in the image's folder or below, nor where the daemon allows \
                 parents",
                parent.display()
            ),
            format!(
                "an image can name any file of this host; if it is meant to stand on that one, \
                 write the folder {} into parent_folders of /etc/ferrite/ferrite.toml, restart the \
                 daemon, and attach the disk again",
                folder(parent).display()
            ),
        )
    }
}

/// The path that would allow `parent`: its folder, or the device itself.
pub fn to_allow(parent: &Path) -> PathBuf {
    match names::canonicalize(parent) {
        Ok(found) if names::is_file(&found) => folder(&found).to_owned(),
        _ => parent.to_owned(),
    }
}

/// The place of an open file.
fn place(file: BorrowedFd<'_>) -> io::Result<PathBuf> {
    names::of_open(file)
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The folder of an image, unless it is the root, which has every file below it.
fn own_folder(leaf: &Path) -> Option<&Path> {
    leaf.parent().filter(|dir| dir.parent().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_nobodys_own_folder() {
        assert_eq!(own_folder("/a/disk.vhd".as_ref()), Some("/a".as_ref()));
        assert_eq!(own_folder("/disk.vhd".as_ref()), None);
    }
}
