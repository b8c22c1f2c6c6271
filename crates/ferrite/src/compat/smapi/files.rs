//! Small JSON files that are replaced as a whole, and locks.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The suffix of a file that is being written.
pub(super) const NEW: &str = ".new";

/// Makes a folder for its owner alone.
pub(super) fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Replaces a file, durably. The caller has the lock for it.
///
/// The order: the new content is written beside it and synced; it is renamed over the old one; the folder is synced. So
/// a crash leaves the old content or the new one.
pub(super) fn replace(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(content).map_err(io::Error::other)?;
    let mut new = path.as_os_str().to_owned();
    new.push(NEW);
    let mut file =
        File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    sync_folder_of(path)
}

/// Removes a file, durably. One that is gone already is a success.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => sync_folder_of(path),
    }
}

/// Makes the entries of a file's folder durable.
pub(super) fn sync_folder_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Reads a file; `None`: there is none.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whether to wait for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    UntilFree,
    Never,
}

/// A file of this name, which is locked for us and others that share it.
pub(super) fn lock_shared(path: &Path) -> io::Result<OwnedFd> {
    let lock = File::options().create(true).append(true).mode(0o600).open(path)?;
    flock(&lock, FlockOperation::LockShared)?;
    Ok(lock.into())
}

/// A file of this name, which is locked for us alone. Its owner may remove the name, and releases the lock afterwards.
pub(super) fn lock(path: &Path, wait: Wait) -> io::Result<OwnedFd> {
    let how = match wait {
        Wait::UntilFree => FlockOperation::LockExclusive,
        Wait::Never => FlockOperation::NonBlockingLockExclusive,
    };
    loop {
        let lock = File::options().create(true).append(true).mode(0o600).open(path)?;
        flock(&lock, how)?;
        // Its last owner may have removed it before releasing it.
        match fs::symlink_metadata(path) {
            Ok(now) if now.ino() == lock.metadata()?.ino() => return Ok(lock.into()),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
}
