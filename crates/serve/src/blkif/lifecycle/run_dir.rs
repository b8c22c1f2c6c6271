//! The run directory of a disk, on tmpfs. It is made when a guest connects and removed with the
//! disk.
//!
//! The process that uses it holds a lock on it, which the kernel releases when the process ends. So
//! a backend that ends removes nothing of one that serves the same disk anew.
//! [`sweep`](super::sweep()) removes nothing of a running process.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_disk::DiskIdentity;
use ferrite_host::names;
use ferrite_xen::hypervisor::DomId;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

use super::messages::Failure;
use crate::blkif::inflight::ImageName;
use crate::counters::stats_file;
use crate::trace::queue_file;

/// The in-flight table, which a successor finishes. It also names the image.
pub const TABLE: &str = "inflight";
/// The latch that records a failed flush until the disk is detached.
const LATCH: &str = "flush-failed";
/// The mark that the last backend has ended normally, with a complete image. It is removed when a
/// backend connects.
pub const STOPPED: &str = "stopped";
/// The trace of a queue or NBD client. Its number follows.
const TRACE: &str = "trace-";
/// The subdirectory with the files of the guest's stub domain, which has the same disk.
const SECOND: &str = "second";
/// Suffix of a file that is being written.
const NEW: &str = ".new";

/// Attempts to make a directory that other processes remove.
const ATTEMPTS: u32 = 100;

/// A run directory that this process uses.
pub(super) struct RunDir {
    path: PathBuf,
    /// The open directory, which holds the lock.
    _lock: File,
}

impl RunDir {
    /// Makes the directory, if it is missing, and locks it.
    ///
    /// # Errors
    /// Errors of the file system; `WouldBlock`: another process uses the directory.
    pub(super) fn make(path: &Path) -> io::Result<RunDir> {
        for _ in 0..ATTEMPTS {
            names::create_dir_all(path, Mode::RWXU)?;
            if let Some(dir) = RunDir::existing(path)? {
                return Ok(dir);
            }
        }
        Err(io::Error::other("other processes keep removing it"))
    }

    /// Locks an existing directory. `None`: there is none.
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
        // The last owner may have removed the directory before it released the lock.
        let same = match names::symlink_metadata(path) {
            Ok(now) => now.ino() == lock.metadata()?.ino(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(e),
        };
        Ok(same.then(|| RunDir { path: path.to_owned(), _lock: lock }))
    }

    /// Removes the disk's files, and the directory if nothing else is in it. When the lock is
    /// released, the next disk of this name makes its own directory.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(super) fn remove(self) -> io::Result<()> {
        self.clear()?;
        match names::remove_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            done => done,
        }
    }

    /// Removes the disk's files and its counters.
    fn clear(&self) -> io::Result<()> {
        remove_counters(&self.path)?;
        remove_second(&self.path)?;
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

/// Removes the files of the second guest of the disk with this run directory. The second guest must
/// not be served any more.
///
/// # Errors
/// Errors of the file system.
pub fn remove_second(run_dir: &Path) -> io::Result<()> {
    let second = second(run_dir);
    match names::exists(&second) {
        true => clear(&second).and_then(|()| names::remove_dir(&second)),
        false => Ok(()),
    }
}

/// The directory with the files of a worker's second guest.
pub(super) fn second(run_dir: &Path) -> PathBuf {
    run_dir.join(SECOND)
}

/// Has the tables of the disk's guests name no image, if there are any: the guests go on with another one.
/// The requests in them stay. No process serves the disk.
///
/// # Errors
/// A table cannot be opened. Its guest would not be served from another image.
pub fn release_tables(run_dir: &Path) -> io::Result<()> {
    for table in [run_dir.join(TABLE), second(run_dir).join(TABLE)] {
        if let Some(name) = ImageName::open(&table)? {
            name.set(&DiskIdentity::default());
        }
    }
    Ok(())
}

/// Removes the counters of the disk with this run directory.
///
/// # Errors
/// Errors of the file system.
pub(super) fn remove_counters(run_dir: &Path) -> io::Result<()> {
    match names::remove_file(stats_file(run_dir)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes a disk's run directory, when the disk is not served.
///
/// # Errors
/// Errors of the file system; `WouldBlock`: another process uses the directory.
pub fn remove_run_dir(path: &Path) -> io::Result<()> {
    match RunDir::existing(path)? {
        Some(dir) => dir.remove(),
        None => remove_counters(path),
    }
}

/// All files that a worker opens by name, except for the counters.
pub(super) struct RunFiles {
    path: PathBuf,
    /// The locked directory, from the first connection on.
    dir: Option<RunDir>,
    /// Whether the directory holds files of an older disk, which could not be removed yet.
    must_clear: bool,
}

impl RunFiles {
    pub(super) fn new(path: &Path) -> RunFiles {
        RunFiles { path: path.to_owned(), dir: None, must_clear: false }
    }

    /// The path of the run directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the in-flight table.
    pub(super) fn table(&self) -> PathBuf {
        self.path.join(TABLE)
    }

    /// The path of the latch that records a failed flush.
    pub(super) fn latch(&self) -> PathBuf {
        self.path.join(LATCH)
    }

    /// The path of a queue's trace.
    pub(super) fn trace(&self, queue: usize) -> PathBuf {
        // Far fewer queues than that are offered.
        self.path.join(queue_file(queue as u16))
    }

    /// Makes the directory, if it is missing, and records that the image is in use.
    pub(super) fn enter(&mut self) -> Result<(), Failure> {
        let path = &self.path;
        if self.dir.is_none() || !names::exists(path) {
            let what = format!("work in {}", path.display());
            self.dir = Some(RunDir::make(path).map_err(|e| Failure::run_dir(what, e))?);
        }
        if self.must_clear
            && let Some(dir) = &self.dir
        {
            let what = "remove what an older disk has left";
            dir.clear().map_err(|e| Failure::run_dir(what, e))?;
            self.must_clear = false;
        }
        match names::remove_file(self.path.join(STOPPED)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Failure::run_dir("note that the image is in use", e))
            }
            _ => Ok(()),
        }
    }

    /// Removes the in-flight table: its guest is gone, and the disk stays.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(super) fn remove_table(&self) -> io::Result<()> {
        match names::remove_file(self.table()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Removes the directory, so that a successor finds nothing. If another process still uses it,
    /// its files are removed when this one enters it.
    pub(super) fn remove(&mut self) {
        let dir = match self.dir.take() {
            Some(dir) => Ok(Some(dir)),
            None => RunDir::existing(&self.path),
        };
        let counters = || remove_counters(&self.path);
        let removed = dir.and_then(|dir| dir.map_or_else(counters, RunDir::remove));
        self.must_clear = removed.is_err();
        if let Err(e) = removed {
            tracing::warn!("cannot remove {} yet: {e}", self.path.display());
        }
    }
}

/// The name of a disk's run directory: `vbd-D-N`. A disk of no domain ([`DomId::NONE`]) is a tap,
/// and its number is tapdisk's minor: `tap-N`.
pub fn run_dir_name(domid: impl Into<u16>, devid: u32) -> String {
    match domid.into() {
        domid if domid == DomId::NONE.0 => format!("tap-{devid}"),
        domid => format!("vbd-{domid}-{devid}"),
    }
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
    fn a_table_that_cannot_be_opened_is_not_released() {
        let run_dir = tempfile::tempdir().unwrap();
        release_tables(run_dir.path()).unwrap();
        std::fs::create_dir(run_dir.path().join(TABLE)).unwrap();
        assert!(release_tables(run_dir.path()).is_err());
    }

    #[test]
    fn a_directory_that_was_removed_by_its_last_owner_is_made_anew() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("vbd-1-2");
        let first = RunDir::make(&path).unwrap();
        let path_of_other = path.clone();
        // A process that has opened the old directory and waits for its lock does not get the new
        // one.
        let waiting = File::open(&path).unwrap();
        first.remove().unwrap();
        flock(&waiting, FlockOperation::LockExclusive).unwrap();
        let second = RunDir::make(&path_of_other).unwrap();
        std::fs::write(path.join(TABLE), b"x").unwrap();
        second.remove().unwrap();
        assert!(!path.exists());
    }
}
