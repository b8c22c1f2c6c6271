//! The run directory of a disk, on tmpfs: made when a guest connects, removed with the disk.
//!
//! Whoever works in it has a lock on it, which the kernel gives back however the process ends. So a
//! backend that is at its end takes nothing away from the one that serves the same disk anew, and
//! [`sweep`](super::sweep()) takes nothing away from anybody who lives.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_io::names;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

use super::messages::Failure;
use crate::counters::stats_file;
use crate::trace::queue_file;

/// What a successor finishes, and which image it is.
pub const TABLE: &str = "inflight";
/// What remembers a failed flush until the disk is detached.
const LATCH: &str = "flush-failed";
/// The last backend has ended by itself, with the image complete. Gone as soon as one connects.
pub const STOPPED: &str = "stopped";
/// With the number of a queue or client: the records of its requests.
const TRACE: &str = "trace-";
/// In the run directory: that of the guest's stub domain, which has the disk, too.
const SECOND: &str = "second";
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
            names::create_dir_all(path, Mode::RWXU)?;
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
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let lock = match names::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            lock => File::from(lock?),
        };
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // Its last owner may have removed it before letting go of it.
        let same = match names::symlink_metadata(path) {
            Ok(now) => now.ino() == lock.metadata()?.ino(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(e),
        };
        Ok(same.then(|| RunDir { path: path.to_owned(), _lock: lock }))
    }

    /// Removes our files, and the directory if nothing else is in it. With the lock let go, the next
    /// disk of this name makes its own.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn remove(self) -> io::Result<()> {
        self.clear()?;
        match names::remove_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            done => done,
        }
    }

    /// Removes our files, and the counters.
    fn clear(&self) -> io::Result<()> {
        remove_counters(&self.path)?;
        forget_second(&self.path)?;
        clear(&self.path)
    }
}

fn clear(path: &Path) -> io::Result<()> {
    for entry in names::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let name = name.strip_suffix(NEW).unwrap_or(&name);
        if [TABLE, LATCH, STOPPED].contains(&name) || name.starts_with(TRACE) {
            names::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes what a worker with this run directory has left of its second guest; nobody serves that.
///
/// # Errors
/// The file system's.
pub fn forget_second(run_dir: &Path) -> io::Result<()> {
    let second = second(run_dir);
    match names::exists(&second) {
        true => clear(&second).and_then(|()| names::remove_dir(&second)),
        false => Ok(()),
    }
}

/// Where a worker keeps what is of its second guest alone.
pub(super) fn second(run_dir: &Path) -> PathBuf {
    run_dir.join(SECOND)
}

/// Removes the counters of the disk that has this run directory.
///
/// # Errors
/// The file system's.
pub(super) fn remove_counters(run_dir: &Path) -> io::Result<()> {
    match names::remove_file(stats_file(run_dir)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes what is left in a disk's run directory, when nobody serves the disk.
///
/// # Errors
/// The file system's; `WouldBlock`: another process works in it.
pub fn forget_run_dir(path: &Path) -> io::Result<()> {
    match RunDir::existing(path)? {
        Some(dir) => dir.remove(),
        None => remove_counters(path),
    }
}

/// All that a worker opens by name, but for the counters.
pub(super) struct RunFiles {
    path: PathBuf,
    /// Since the first connection.
    dir: Option<RunDir>,
    /// What is in it is not to be heeded, and could not be removed yet.
    to_be_cleared: bool,
}

impl RunFiles {
    pub(super) fn new(path: &Path) -> RunFiles {
        RunFiles { path: path.to_owned(), dir: None, to_be_cleared: false }
    }

    /// The run directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What a successor finishes.
    pub(super) fn table(&self) -> PathBuf {
        self.path.join(TABLE)
    }

    /// What remembers a failed flush until the disk is attached again.
    pub(super) fn latch(&self) -> PathBuf {
        self.path.join(LATCH)
    }

    /// Where a queue's records are.
    pub(super) fn trace(&self, queue: usize) -> PathBuf {
        // Far fewer queues than that are offered.
        self.path.join(queue_file(queue as u16))
    }

    /// Makes the directory, if it is not there, and notes in it that the image is in use.
    pub(super) fn enter(&mut self) -> Result<(), Failure> {
        let path = &self.path;
        if self.dir.is_none() || !names::exists(path) {
            let what = format!("work in {}", path.display());
            self.dir = Some(RunDir::make(path).map_err(|e| Failure::run_dir(what, e))?);
        }
        if self.to_be_cleared
            && let Some(dir) = &self.dir
        {
            let what = "remove what an older disk has left";
            dir.clear().map_err(|e| Failure::run_dir(what, e))?;
            self.to_be_cleared = false;
        }
        match names::remove_file(self.path.join(STOPPED)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Failure::run_dir("note that the image is in use", e))
            }
            _ => Ok(()),
        }
    }

    /// Removes the directory: nothing of this disk is left for a successor. Where another process still
    /// works in it, that is done as soon as we enter it.
    pub(super) fn forget(&mut self) {
        let dir = match self.dir.take() {
            Some(dir) => Ok(Some(dir)),
            None => RunDir::existing(&self.path),
        };
        let counters = || remove_counters(&self.path);
        let removed = dir.and_then(|dir| dir.map_or_else(counters, RunDir::remove));
        self.to_be_cleared = removed.is_err();
        if let Err(e) = removed {
            tracing::warn!("cannot remove {} yet: {e}", self.path.display());
        }
    }
}

/// The name of a disk's run directory.
pub fn run_dir_name(domid: impl std::fmt::Display, devid: u32) -> String {
    format!("vbd-{domid}-{devid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_one_processs_at_a_time_and_goes_with_our_files_only() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("a/vbd-1-2");
        assert!(RunDir::existing(&path).unwrap().is_none());
        let first = RunDir::make(&path).unwrap();
        assert_eq!(RunDir::make(&path).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        for name in [TABLE, LATCH, STOPPED, "trace-0", "trace-63", "trace-nbd-0"] {
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
        flock(&waiting, FlockOperation::LockExclusive).unwrap();
        let second = RunDir::make(&path_of_other).unwrap();
        std::fs::write(path.join(TABLE), b"x").unwrap();
        second.remove().unwrap();
        assert!(!path.exists());
    }
}
