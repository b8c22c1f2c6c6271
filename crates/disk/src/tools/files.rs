//! New files under temporary names, and how they get their own.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::{Workshop, broken, parent_dir, refused, unsuitable};
use crate::children::{self, NEW, identity};
use crate::{Disk, DiskError, Raw};

/// What becomes of a file that has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Nothing: it stays, and the new one is not made.
    Keep,
    /// It is lost, if nobody is using it.
    Lose,
    /// The caller has it locked, and knows.
    Mine,
}

impl Over {
    pub(super) fn forced(force: bool) -> Over {
        if force { Over::Lose } else { Over::Keep }
    }
}

/// A file that is being made; away again if it was made here and does not get its name.
pub(super) struct NewFile<'a> {
    shop: &'a Workshop<'a>,
    path: PathBuf,
    to: PathBuf,
    /// There is a file with that name, which is replaced.
    replaces: bool,
    /// It is locked, so that nobody is using it.
    _replaced: Option<Raw>,
    /// It needs no other name: a device, which is written where it is.
    in_place: bool,
    /// Made here, and nobody's loss if it goes. What was there before is somebody else's: of a
    /// program at work, of one that was interrupted, or an image that happens to have this name.
    ours: bool,
}

/// Another name in the same directory.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path.file_name().unwrap_or_default());
    name.push(suffix);
    path.with_file_name(name)
}

impl Workshop<'_> {
    /// Begins a file that is to be called `to`.
    pub(super) fn new_file(&self, to: &Path, over: Over) -> Result<NewFile<'_>, DiskError> {
        let what = || format!("cannot make {}", to.display());
        let mut file = self.old_file(to, NEW, over)?;
        if file.in_place {
            return Ok(file);
        }
        match file.create() {
            Ok(()) => {}
            // Of a program that was killed, or of one that is at work.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // Or, after a crash, a second name of a file that was finished.
                if !same_file(&file.path, to).unwrap_or(false) {
                    file.open()?;
                }
                self.directory.remove(&file.path).map_err(|e| broken(what(), e))?;
                file.create().map_err(|e| broken(what(), e))?;
            }
            Err(e) => return Err(broken(what(), e)),
        }
        Ok(file)
    }

    /// Goes on with a file that is there under its temporary name. It stays if that fails.
    pub(super) fn old_file(
        &self,
        to: &Path,
        suffix: &str,
        over: Over,
    ) -> Result<NewFile<'_>, DiskError> {
        let new = |path, replaces, replaced, in_place| NewFile {
            shop: self,
            path,
            to: to.into(),
            replaces,
            _replaced: replaced,
            in_place,
            ours: false,
        };
        if self.is_device(to) {
            if over == Over::Keep {
                let what = format!("cannot make {}", to.display());
                let help = "name another device, or overwrite it with --force";
                return Err(refused(what, "all that is on the device would be lost", help));
            }
            return Ok(new(to.to_owned(), false, None, true));
        }
        let path = beside(to, suffix);
        if over == Over::Mine {
            return Ok(new(path, true, None, false));
        }
        let replaced = self.replaced(to, over == Over::Lose)?;
        Ok(new(path, replaced.is_some(), replaced, false))
    }

    /// A block device, or what is used as one, has one name for all that is ever in it.
    pub(super) fn is_device(&self, path: &Path) -> bool {
        let meta = fs::metadata(path);
        meta.is_ok_and(|m| m.file_type().is_block_device() || (self.fixed_size && m.is_file()))
    }

    /// What would be replaced, locked.
    fn replaced(&self, to: &Path, force: bool) -> Result<Option<Raw>, DiskError> {
        let what = || format!("cannot make {}", to.display());
        let meta = match fs::symlink_metadata(to) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            meta => meta.map_err(|e| broken(what(), e))?,
        };
        if !meta.is_file() {
            let help = "name a file that is not there yet, in a directory that is";
            return Err(unsuitable(what(), "something that is no regular file is there", help));
        }
        if !force {
            let why = format!("it exists and would be lost, with {} bytes in it", meta.len());
            return Err(refused(what(), why, "choose another name, or overwrite it with --force"));
        }
        let options = Workshop::even_parents(self.medium_options(false));
        let replaced = Raw::open_medium(to, &options)?;
        children::check_none(&replaced)?;
        Ok(Some(replaced))
    }

    /// Makes what was done to the directory of `path` durable.
    pub(super) fn sync_dir(&self, path: &Path) -> Result<(), DiskError> {
        let dir = parent_dir(path);
        let failed = |e| broken(format!("cannot sync directory {}", dir.display()), e);
        self.directory.sync(dir).map_err(failed)
    }
}

impl NewFile<'_> {
    /// Opens and locks it.
    pub(super) fn open(&self) -> Result<Raw, DiskError> {
        let options = Workshop::even_parents(self.shop.medium_options(false));
        Raw::open_medium(&self.path, &options).map_err(|e| self.named(e))
    }

    /// An error, of the name that was asked for.
    pub(super) fn named(&self, e: DiskError) -> DiskError {
        e.renamed(&self.path, &self.to)
    }

    /// Where it is while it is being made.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, empty.
    pub(super) fn create(&mut self) -> io::Result<()> {
        self.shop.directory.create_new(&self.path)?;
        self.ours = true;
        Ok(())
    }

    /// Whatever comes, it stays under its temporary name, for somebody who goes on later.
    pub(super) fn keep(&mut self) {
        self.ours = false;
    }

    /// Gives it its name, durably. Its content must be durable already.
    pub(super) fn finish(mut self) -> Result<(), DiskError> {
        if self.in_place {
            return Ok(());
        }
        let directory = self.shop.directory;
        let what = || format!("cannot make {}", self.to.display());
        if self.replaces {
            if let Ok(old) = fs::metadata(&self.to) {
                // What is replaced may have been a parent; this one is not.
                let mode = old.mode() | 0o200;
                take_rights(&self.path, &old, mode).map_err(|e| broken(what(), e))?;
            }
            directory.rename(&self.path, &self.to).map_err(|e| broken(what(), e))?;
        } else {
            // A link fails if somebody has made a file of that name meanwhile; a rename does not.
            match directory.hard_link(&self.path, &self.to) {
                Ok(()) => directory.remove(&self.path).map_err(|e| broken(what(), e))?,
                Err(e) if has_no_links(&e) => {
                    directory.rename(&self.path, &self.to).map_err(|e| broken(what(), e))?;
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    let why = "a file of that name was made meanwhile";
                    let help = "move that away and run the same command again";
                    return Err(refused(what(), why, help));
                }
                Err(e) => return Err(broken(what(), e)),
            }
        }
        self.ours = false;
        self.shop.sync_dir(&self.to)
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if self.ours {
            let _ = self.shop.directory.remove(&self.path);
        }
    }
}

fn has_no_links(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied)
}

/// Whether two paths are of the same file, or nodes of the same block device.
pub(super) fn same_file(a: &Path, b: &Path) -> io::Result<bool> {
    Ok(identity(&fs::metadata(a)?) == identity(&fs::metadata(b)?))
}

/// Whether two paths are one name, by whichever spelling, link or mount: what replaces the one
/// replaces the other. Two names of one file are not.
pub(super) fn same_name(a: &Path, b: &Path) -> io::Result<bool> {
    let same = match same_file(a, b) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        same => same?,
    };
    Ok(same && (fs::metadata(a)?.nlink() == 1 || fs::canonicalize(a)? == fs::canonicalize(b)?))
}

/// Refuses to make an image of what is read for it: a file of `source`, whatever leads to it.
pub(super) fn check_apart(what: String, source: &Disk, to: &Path) -> Result<(), DiskError> {
    let Ok(target) = fs::metadata(to).map(|meta| identity(&meta)) else { return Ok(()) };
    for medium in source.media() {
        if medium.inode().is_ok_and(|inode| inode == target) {
            let (to, path) = (to.display(), medium.path().display());
            let why = format!("{to} is the same file as {path}, which the new image is made of");
            return Err(unsuitable(what, why, "name another destination"));
        }
    }
    Ok(())
}

/// Whether nobody has the permission to write it.
pub(super) fn is_write_protected(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.permissions().mode() & 0o222 == 0)
}

/// Gives a file that is about to take another one's name that one's owner, and a mode. Who may not
/// give it away gives it to the group; if that may not be, either, the group gets nothing.
pub(super) fn take_rights(path: &Path, old: &Metadata, mode: u32) -> io::Result<()> {
    // Not through a link that somebody has put there.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let (user, group) = (Some(old.uid()), Some(old.gid()));
    let given = fchown(&file, user, group).or_else(|_| fchown(&file, None, group));
    let lost = if given.is_ok() { 0 } else { 0o070 };
    file.set_permissions(Permissions::from_mode(mode & 0o777 & !lost))
}

/// Takes everybody's permission to write away, or gives it to the owner. Not a device's.
pub(super) fn protect(path: &Path, protect: bool) -> io::Result<()> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() {
        return Ok(());
    }
    let mode = meta.permissions().mode();
    let new = if protect { mode & !0o222 } else { mode | 0o200 };
    if new == mode { Ok(()) } else { fs::set_permissions(path, Permissions::from_mode(new)) }
}
