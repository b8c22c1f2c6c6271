//! The run directory of a disk, on tmpfs: made when a guest connects, removed with the disk.
//!
//! Whoever works in it has a lock on it, which the kernel gives back however the process ends. So a
//! backend that is at its end takes nothing away from the one that serves the same disk anew, and
//! [`sweep`] takes nothing away from anybody who lives.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ferrite_xen::store::{Store, StoreError};
use rustix::fs::{FlockOperation, OFlags, flock};

use super::refusal::clear_error;

/// What a successor finishes.
pub(super) const TABLE: &str = "inflight";
/// What remembers a failed flush until the disk is detached.
pub(super) const LATCH: &str = "flush-failed";
/// Which file was opened as a raw disk, for a successor: see [`Config::served_raw`](super::Config).
pub const SERVED_RAW: &str = "served-raw";
/// The last backend has ended by itself, with the image complete. Gone as soon as one connects.
pub const STOPPED: &str = "stopped";
/// With a queue's number: the records of its requests.
const TRACE: &str = "trace-";
/// Behind the name of a file that is being made.
const NEW: &str = ".new";

/// How often it is tried to make a directory that others remove.
const ATTEMPTS: u32 = 100;

/// A run directory that this process works in.
pub(super) struct RunDir {
    path: PathBuf,
    /// Holds the lock.
    _lock: File,
}

impl RunDir {
    /// Makes the directory, if it is not there, and locks it.
    ///
    /// # Errors
    /// The file system's; `WouldBlock`: another process works in it.
    pub(super) fn make(path: &Path) -> io::Result<RunDir> {
        for _ in 0..ATTEMPTS {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            if let Some(dir) = RunDir::existing(path)? {
                return Ok(dir);
            }
        }
        Err(io::Error::other("it vanishes again and again"))
    }

    /// Locks the directory. `None`: there is none.
    ///
    /// # Errors
    /// As [`make`](Self::make).
    pub(super) fn existing(path: &Path) -> io::Result<Option<RunDir>> {
        let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits() as i32;
        let lock = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            lock => lock?,
        };
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // Its last owner may have removed it before letting go of it.
        let same = match std::fs::symlink_metadata(path) {
            Ok(now) => now.ino() == lock.metadata()?.ino(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(e),
        };
        Ok(same.then(|| RunDir { path: path.to_owned(), _lock: lock }))
    }

    /// Removes our files, and the directory if nothing else is in it.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn remove(self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let name = name.strip_suffix(NEW).unwrap_or(&name);
            if [TABLE, LATCH, SERVED_RAW, STOPPED].contains(&name) || name.starts_with(TRACE) {
                std::fs::remove_file(entry.path())?;
            }
        }
        match std::fs::remove_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            done => done,
        }
    }
}

/// Where a queue's records are.
pub(super) fn trace_path(run_dir: &Path, queue: usize) -> PathBuf {
    run_dir.join(format!("{TRACE}{queue}"))
}

/// The name of a disk's run directory.
pub fn run_dir_name(domid: impl std::fmt::Display, devid: u32) -> String {
    format!("vbd-{domid}-{devid}")
}

/// The guest and the device of a run directory.
fn parse_name(name: &str) -> Option<(u16, u32)> {
    let (domid, devid) = name.strip_prefix("vbd-")?.split_once('-')?;
    let ids = (domid.parse().ok()?, devid.parse().ok()?);
    (run_dir_name(ids.0, ids.1) == name).then_some(ids)
}

/// Removes what killed backends have left of disks that are no more, in the folder of all run
/// directories and among the errors in xenstore. `kind` is the folder of the backends' directories,
/// `backend/vbd3`. What a successor may ask for stays: the guest lives, and the disk is attached.
///
/// # Errors
/// xenstore's. What cannot be removed is told in the log, and stays.
pub fn sweep(store: &mut Store, run_dirs: &Path, kind: &str) -> Result<(), StoreError> {
    let entries = std::fs::read_dir(run_dirs).into_iter().flatten().filter_map(Result::ok);
    for entry in entries {
        let Some((domid, devid)) = entry.file_name().to_str().and_then(parse_name) else {
            continue;
        };
        if !is_gone(store, kind, domid, devid)? {
            continue;
        }
        // Who is locked out lives; and once more: nobody connects the disk while we have the lock.
        let Ok(Some(dir)) = RunDir::existing(&entry.path()) else { continue };
        if is_gone(store, kind, domid, devid)?
            && let Err(e) = dir.remove()
        {
            tracing::warn!("cannot remove {}: {e}", entry.path().display());
        }
    }
    let errors = format!("error/{kind}");
    for domid in list(store, &errors)? {
        for devid in list(store, &format!("{errors}/{domid}"))? {
            if let (Ok(domid), Ok(devid)) = (domid.parse(), devid.parse())
                && is_gone(store, kind, domid, devid)?
            {
                clear_error(store, &format!("{kind}/{domid}/{devid}"))?;
            }
        }
    }
    Ok(())
}

/// The node's children; none if it is not there.
fn list(store: &mut Store, path: &str) -> Result<Vec<String>, StoreError> {
    match store.list(path) {
        Err(StoreError::NotFound { .. }) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Whether the toolstack has removed the disk, or its guest is no more. A driver domain may not look
/// for the guest.
fn is_gone(store: &mut Store, kind: &str, domid: u16, devid: u32) -> Result<bool, StoreError> {
    if store.read(&format!("{kind}/{domid}/{devid}/frontend"))?.is_none() {
        return Ok(true);
    }
    match store.read(&format!("/local/domain/{domid}")) {
        Ok(home) => Ok(home.is_none()),
        Err(StoreError::Access { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_run_directories_and_no_others() {
        assert_eq!(parse_name(&run_dir_name(7, 51712)), Some((7, 51712)));
        for name in
            ["vbd-7", "vbd-7-", "vbd--7-1", "vbd-07-1", "vbd-7-1-2", "vbd-70000-1", "map-budget"]
        {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_directory_is_one_processs_at_a_time_and_goes_with_our_files_only() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("a/vbd-1-2");
        assert!(RunDir::existing(&path).unwrap().is_none());
        let first = RunDir::make(&path).unwrap();
        assert_eq!(RunDir::make(&path).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        for name in [TABLE, LATCH, SERVED_RAW, STOPPED, "trace-0", "trace-63"] {
            std::fs::write(path.join(name), b"x").unwrap();
            std::fs::write(path.join(name).with_extension("new"), b"x").unwrap();
        }
        std::fs::write(path.join("theirs"), b"x").unwrap();
        first.remove().unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
        std::fs::remove_file(path.join("theirs")).unwrap();
        RunDir::make(&path).unwrap().remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_was_removed_by_its_last_owner_is_made_anew() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("vbd-1-2");
        let first = RunDir::make(&path).unwrap();
        let path_of_other = path.clone();
        // Somebody who has opened it and waits for nothing but the lock gets none of it.
        let waiting = File::open(&path).unwrap();
        first.remove().unwrap();
        flock(&waiting, FlockOperation::NonBlockingLockExclusive).unwrap();
        let second = RunDir::make(&path_of_other).unwrap();
        std::fs::write(path.join(TABLE), b"x").unwrap();
        second.remove().unwrap();
        assert!(!path.exists());
    }
}
