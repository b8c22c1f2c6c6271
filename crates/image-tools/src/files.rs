//! Makes files under temporary names, and gives them their own.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_disk_base::{
    DiskError, ErrorKind, Format, ImageName, OpenOptions, Raw, plain, store_of_volume,
};
use ferrite_images::children::{self, Ask, NEW, identity};
use ferrite_images::open_medium;
use rustix::fs::{
    FlockOperation, OFlags, XattrFlags, flock, fremovexattr, fsetxattr, fstat, lgetxattr,
};
use rustix::io::Errno;

use super::{ImageTools, broken, parent_dir, refused, unsuitable};

/// The extended attributes for a file's access control list and for its SELinux label.
const LIST: &str = "system.posix_acl_access";
const LABEL: &str = "security.selinux";
/// The kernel's limit.
const MAX_ATTRIBUTE_BYTES: usize = 64 << 10;

/// What happens to an existing file of the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// It stays, and the new one is not made.
    Keep,
    /// It is replaced, if it is not in use.
    Lose,
    /// It is replaced: the caller has it locked.
    Mine,
}

impl Over {
    pub(super) fn forced(force: bool) -> Over {
        if force { Over::Lose } else { Over::Keep }
    }
}

/// A file that is being made. If it was made here and does not get its name, it is removed.
///
/// It is locked from its creation until it has its name. An unlocked one belongs to a killed program, and is removed by
/// the next command that needs its temporary name. Only while a file is locked is its name certain, so each name is
/// compared with the locked file before it is used.
pub(super) struct NewFile<'a> {
    tools: &'a ImageTools<'a>,
    path: PathBuf,
    /// The locked file.
    file: Option<Arc<OwnedFd>>,
    to: PathBuf,
    /// A file with that name exists, and is replaced.
    replaces: bool,
    /// The lock of the replaced file, so that no process uses it.
    _replaced: Option<Raw>,
    /// It gets no other name: a device, which is written in place.
    in_place: bool,
    /// It was made here, so it may be removed. A file that existed before belongs to another process, to an interrupted
    /// command, or is an image that happens to have this name.
    ours: bool,
}

/// Refuses a folder, a pipe and the like under a temporary name: it is not an unfinished file.
pub(super) fn check_regular(temporary: &Path, what: String) -> Result<(), DiskError> {
    match fs::symlink_metadata(temporary) {
        Ok(meta) if !meta.is_file() && !meta.is_symlink() => {
            let path = temporary.display();
            let why = format!("{path} is no file, and its name is needed meanwhile");
            Err(refused(what, why, "move that away, or choose another name"))
        }
        _ => Ok(()),
    }
}

/// Refuses the name of a volume without `store:`. It would be a file beside the store.
fn check_no_volume(to: &Path) -> Result<(), DiskError> {
    let Some(store) = store_of_volume(to) else { return Ok(()) };
    Err(DiskError::new(
        ErrorKind::Usage,
        format!("cannot make {}", to.display()),
        format!("{} is a store, and this would be a file beside it", store.display()),
        format!("say store:{} for a volume of it, or choose a name without #", to.display()),
    ))
}

/// Another name in the same directory.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path.file_name().unwrap_or_default());
    name.push(suffix);
    path.with_file_name(name)
}

impl ImageTools<'_> {
    /// Begins a file that will get the name `to`.
    pub(super) fn new_file(&self, to: &Path, over: Over) -> Result<NewFile<'_>, DiskError> {
        let what = || format!("cannot make {}", to.display());
        let mut file = self.old_file(to, NEW, over)?;
        if file.in_place {
            return Ok(file);
        }
        match file.create() {
            Ok(()) => {}
            // It belongs to a program that was killed, or to a running one.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                check_regular(&file.path, what())?;
                // Or, after a crash, it is a second name of a finished file.
                if !same_file(&file.path, to).unwrap_or(false) {
                    file.open()?;
                }
                self.directory.remove(&file.path).map_err(|e| broken(what(), e))?;
                file.create().map_err(|e| file.not_made(e))?;
            }
            Err(e) => return Err(file.not_made(e)),
        }
        Ok(file)
    }

    /// Continues with an existing file under its temporary name. It stays if that fails.
    pub(super) fn old_file(
        &self,
        to: &Path,
        suffix: &str,
        over: Over,
    ) -> Result<NewFile<'_>, DiskError> {
        check_no_volume(to)?;
        let new = |path, replaces, replaced, in_place| NewFile {
            tools: self,
            path,
            file: None,
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

    /// Whether the path is a block device, or used as one: it keeps its name.
    pub(super) fn is_device(&self, path: &Path) -> bool {
        let meta = fs::metadata(path);
        meta.is_ok_and(|m| m.file_type().is_block_device() || (self.fixed_size && m.is_file()))
    }

    /// The file that would be replaced, locked.
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
        let options = ImageTools::even_parents(self.medium_options(false));
        let replaced = open_medium(to, &options)?;
        children::check_none(&replaced, Ask::Named)?;
        Ok(Some(replaced))
    }

    /// Syncs the directory of `path`.
    pub(super) fn sync_dir(&self, path: &Path) -> Result<(), DiskError> {
        let dir = parent_dir(path);
        let failed = |e| broken(format!("cannot sync directory {}", dir.display()), e);
        self.directory.sync(dir).map_err(failed)
    }
}

impl NewFile<'_> {
    /// Opens it, and locks it until it has its name.
    pub(super) fn open(&mut self) -> Result<Raw, DiskError> {
        let options = ImageTools::even_parents(self.options());
        let raw = open_medium(&self.path, &options).map_err(|e| self.named(e))?;
        if self.file.is_none() {
            self.file = raw.files().pop();
        }
        Ok(raw)
    }

    /// Opens the disk in it.
    pub(super) fn open_disk(&self, format: Format) -> Result<Disk, DiskError> {
        let name = ImageName { format, path: self.path.clone() };
        Disk::open_image(&name, &self.options()).map_err(|e| self.named(e))
    }

    fn options(&self) -> OpenOptions {
        OpenOptions { opened: self.file.clone(), ..self.tools.medium_options(false) }
    }

    /// Whether the temporary name is still that of the locked file.
    pub(super) fn is_there(&self) -> bool {
        let found = fs::symlink_metadata(&self.path);
        let locked = self.file.as_ref().and_then(|file| fstat(file).ok());
        found.is_ok_and(|found| {
            locked.is_some_and(|file| (found.dev(), found.ino()) == (file.st_dev, file.st_ino))
        })
    }

    /// The error when it could not be made.
    pub(super) fn not_made(&self, e: io::Error) -> DiskError {
        let what = format!("cannot make {}", self.to.display());
        match e.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::ResourceBusy => {
                let why = "another command is making it at the same time";
                let help = "wait for that, or choose another name";
                DiskError::new(ErrorKind::InUse, what, why, help).with_source(e)
            }
            _ => broken(what, e),
        }
    }

    /// An error with the name that was asked for.
    pub(super) fn named(&self, e: DiskError) -> DiskError {
        e.renamed(&self.path, &self.to)
    }

    /// Its present path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, empty and locked. A process that takes it for an abandoned file before it is locked has it locked, or
    /// has removed it.
    pub(super) fn create(&mut self) -> io::Result<()> {
        let file = self.tools.directory.create_new(&self.path)?;
        let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        self.file = Some(Arc::new(file));
        // The process that has it locked is about to remove it.
        self.ours = locked != Err(Errno::AGAIN);
        match locked {
            Ok(()) if self.is_there() => Ok(()),
            Ok(()) | Err(Errno::AGAIN) => Err(io::ErrorKind::ResourceBusy.into()),
            Err(e) => Err(e.into()),
        }
    }

    /// Keeps it under its temporary name in any case, for a later command that resumes.
    pub(super) fn keep(&mut self) {
        self.ours = false;
    }

    /// Gives it its name, durably. Its content must be durable already.
    pub(super) fn finish(mut self) -> Result<(), DiskError> {
        if self.in_place {
            return Ok(());
        }
        let directory = self.tools.directory;
        let what = || format!("cannot make {}", self.to.display());
        if !self.is_there() {
            return Err(self.not_made(io::ErrorKind::ResourceBusy.into()));
        }
        if self.replaces {
            if self.to.exists() {
                // The replaced file may have been a parent; this one is not.
                take_rights(&self.path, &self.to, 0o200).map_err(|e| broken(what(), e))?;
            }
            directory.rename(&self.path, &self.to).map_err(|e| broken(what(), e))?;
        } else {
            // A link fails if another process has made a file of that name meanwhile; a rename does not.
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
        self.tools.sync_dir(&self.to)
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if self.ours && self.is_there() {
            let _ = self.tools.directory.remove(&self.path);
        }
    }
}

fn has_no_links(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied)
}

/// Whether two paths are the same file, or nodes of the same block device.
pub(super) fn same_file(a: &Path, b: &Path) -> io::Result<bool> {
    Ok(identity(&fs::metadata(a)?) == identity(&fs::metadata(b)?))
}

/// Whether two paths are one name, by any spelling, link or mount: replacing one replaces the other. Two names of one
/// file are not.
pub(super) fn same_name(a: &Path, b: &Path) -> io::Result<bool> {
    let same = match same_file(a, b) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        same => same?,
    };
    Ok(same && (fs::metadata(a)?.nlink() == 1 || fs::canonicalize(a)? == fs::canonicalize(b)?))
}

/// Refuses a destination that is a file of `source`, whatever path leads to it.
pub(super) fn check_apart(what: String, source: &Disk, to: &Path) -> Result<(), DiskError> {
    let Ok(target) = fs::metadata(to).map(|meta| identity(&meta)) else { return Ok(()) };
    for medium in source.media() {
        if medium.inode() == target {
            let (to, path) = (to.display(), medium.path().display());
            let why = format!("{to} is the same file as {path}, which the new image is made of");
            return Err(unsuitable(what, why, "name another destination"));
        }
    }
    Ok(())
}

/// Whether no user has the permission to write it.
pub(super) fn is_write_protected(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.permissions().mode() & 0o222 == 0)
}

/// Gives a file that will replace another one that file's owner, access control list, label and mode, with `more`
/// permissions. A user who may not change the owner changes the group. If that fails, too, or the list cannot be set,
/// the group gets no permission: with a list, the mode's group bits are the most that the list grants.
pub(super) fn take_rights(path: &Path, from: &Path, more: u32) -> io::Result<()> {
    let old = fs::metadata(from)?;
    // Not through a link that another user has put there.
    let file = plain::open(path, OFlags::RDONLY)?;
    let (user, group) = (Some(old.uid()), Some(old.gid()));
    let given = fchown(&file, user, group).or_else(|_| fchown(&file, None, group));
    if let Ok(Some(label)) = attribute(from, LABEL) {
        // Without permission the file keeps its folder's label.
        let _ = fsetxattr(&file, LABEL, &label, XattrFlags::empty());
    }
    let listed = take_list(&file, from);
    let lost = if given.is_ok() && listed.is_ok() { 0 } else { 0o070 };
    file.set_permissions(Permissions::from_mode((old.mode() | more) & 0o777 & !lost))
}

/// Gives a file the access control list of another one; or none, if its folder gave it one.
fn take_list(file: &File, from: &Path) -> io::Result<()> {
    if let Some(list) = attribute(from, LIST)? {
        return Ok(fsetxattr(file, LIST, &list, XattrFlags::empty())?);
    }
    match fremovexattr(file, LIST) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        done => Ok(done?),
    }
}

/// An extended attribute of a file, if it has it.
fn attribute(path: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; MAX_ATTRIBUTE_BYTES];
    match lgetxattr(path, name, &mut value[..]) {
        Ok(len) => {
            value.truncate(len);
            Ok(Some(value))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// A file that becomes write-protected again when this is dropped, if it was before.
pub(super) struct Protected<'a>(Option<&'a Path>);

impl<'a> Protected<'a> {
    /// Keeps the present mode of a file.
    pub(super) fn of(path: &'a Path) -> io::Result<Protected<'a>> {
        Ok(Protected(is_write_protected(path)?.then_some(path)))
    }

    /// Gives its owner the permission to write until this is dropped.
    pub(super) fn lift(path: &'a Path) -> io::Result<Protected<'a>> {
        let guard = Protected::of(path)?;
        protect(path, false)?;
        Ok(guard)
    }

    /// Restores the mode.
    pub(super) fn restore(mut self) -> io::Result<()> {
        self.0.take().map_or(Ok(()), |path| protect(path, true))
    }

    /// Keeps the present mode.
    pub(super) fn forget(mut self) {
        self.0 = None;
    }
}

impl Drop for Protected<'_> {
    fn drop(&mut self) {
        let Some(path) = self.0 else { return };
        if let Err(e) = protect(path, true) {
            let path = path.display();
            tracing::error!("{path} could not be made read-only again ({e}): chmod a-w {path}");
        }
    }
}

/// Removes all write permissions, or gives one to the owner. Devices are skipped.
pub(super) fn protect(path: &Path, protect: bool) -> io::Result<()> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() {
        return Ok(());
    }
    let mode = meta.permissions().mode();
    let new = if protect { mode & !0o222 } else { mode | 0o200 };
    if new == mode { Ok(()) } else { fs::set_permissions(path, Permissions::from_mode(new)) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The list's mask would be the group's permission.
    #[test]
    fn where_the_list_cannot_be_had_the_group_gets_nothing() {
        let (dir, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (old, new) = (dir.path().join("old"), without.path().join("new"));
        fs::write(&old, "").unwrap();
        let mut list = 2u32.to_le_bytes().to_vec();
        for (tag, permissions) in [(1, 6), (2, 6), (4, 0), (16, 6), (32, 0)] {
            list.extend([tag, 0, permissions, 0, 0, 0, 0, 0]);
        }
        let listed = rustix::fs::setxattr(&old, LIST, &list, XattrFlags::empty());
        let mut mount = Command::new("mount");
        mount.args(["-t", "ramfs", "none"]).arg(without.path());
        if listed.is_err() || !mount.status().is_ok_and(|status| status.success()) {
            eprintln!("skipped: no lists, or mounting is not possible here");
            return;
        }
        fs::write(&new, "").unwrap();
        let taken = take_rights(&new, &old, 0);
        let mode = fs::metadata(&new).map(|meta| meta.mode() & 0o777);
        Command::new("umount").arg(without.path()).status().unwrap();
        taken.unwrap();
        assert_eq!(mode.unwrap(), 0o600);
    }
}
