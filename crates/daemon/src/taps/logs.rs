//! The logs of changed blocks of taps (`tap-ctl open -C`, `unpause -c`).
//!
//! The storage manager names a log, in tapdisk's format. A worker has no right to it: it notes blocks in a file of the
//! run directory, which survives it. The order of writes is in `disk-base/src/changes/mod.rs`; steps 1, 3 and 4 are
//! done here. All of them may be done again by the next daemon.

use std::io;
use std::path::{Path, PathBuf};

use ferrite_disk::change_log::ChangeMapFile;
use ferrite_disk::change_log::log::{Log, LogError};
use rustix::io::Errno;

use super::TapError;
use super::errno::errno_of;
use crate::state::{DiskId, TapState};
use crate::{Failure, Paths, Shared};

impl Paths {
    /// The file in which the worker of a tap notes changed blocks.
    fn changes(&self, id: DiskId) -> PathBuf {
        self.run.join("changes").join(format!("{}.map", id.file_name()))
    }
}

impl From<LogError> for TapError {
    fn from(e: LogError) -> TapError {
        let errno = match e.errno {
            // Callers repeat what has failed with these.
            Errno::IO | Errno::AGAIN => Errno::INVAL,
            errno => errno,
        };
        TapError::new(errno, e.why, e.help)
    }
}

/// Checks a log before a tap gets it, and forgets the rest of an earlier log of the tap.
pub(super) fn check(shared: &Shared, id: DiskId, log: Option<&Path>) -> Result<(), TapError> {
    forget(shared, id);
    let Some(log) = log else { return Ok(()) };
    Log::open(log, true)?;
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let own = real(log);
    let other = shared.table.read(|disks| {
        let logs = disks.iter().filter(|(other, _)| **other != id);
        let mut logs = logs.filter_map(|(id, e)| Some((*id, e.tap.as_ref()?.log.clone()?)));
        logs.find(|(_, log)| real(log) == own).map(|(id, _)| id)
    });
    match other {
        None => Ok(()),
        Some(other) => {
            let why = format!("{} is the log of {other}", log.display());
            Err(TapError::new(Errno::BUSY, why, "name another log, or close that tap first"))
        }
    }
}

/// Has the changes of a tap recorded from now on: its log is not consistent, durably, before this returns. The file for
/// the worker stays as it is if a worker before has left it. `None`: the tap has no log.
pub(super) fn begin(
    shared: &Shared,
    id: DiskId,
    tap: &TapState,
) -> Result<Option<PathBuf>, TapError> {
    let Some(path) = tap.log.as_ref().filter(|_| !tap.read_only) else { return Ok(None) };
    let file = shared.paths.changes(id);
    let known = ChangeMapFile::open(&file);
    let mut log = match (Log::open(path, true), &known) {
        // The disk is open already, and its guest is not to wait: the end tells of the log.
        (Err(e), Ok(_)) => {
            tracing::warn!("the log of {id} cannot be read now: {e}");
            return Ok(Some(file));
        }
        (log, _) => log?,
    };
    let consistent = match known {
        Ok(_) => None,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Some(log.head.consistent != 0),
        Err(e) => {
            tracing::error!("the changed blocks of {id} are lost: {}: {e}", file.display());
            Some(false)
        }
    };
    if let Some(consistent) = consistent {
        ChangeMapFile::create(&file, log.head.bytes, consistent).map_err(|e| {
            let why = format!("cannot make {}: {e}", file.display());
            TapError::new(errno_of(&e), why, "make room on the file system of /run")
        })?;
    }
    if log.head.consistent != 0 {
        log.set(|head| head.consistent = 0)?;
    }
    Ok(Some(file))
}

/// Puts the changed blocks into the log. The tap's image is closed.
pub(super) fn end(shared: &Shared, id: DiskId, tap: &TapState) -> Result<(), Failure> {
    let Some(path) = tap.log.as_ref().filter(|_| !tap.read_only) else { return Ok(()) };
    let file = shared.paths.changes(id);
    let map = match ChangeMapFile::open(&file) {
        // It was never open, or this was done before.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => {
            tracing::error!("the changed blocks of {id} are lost: {}: {e}", file.display());
            forget(shared, id);
            return Ok(());
        }
        Ok(map) => map,
    };
    let failure = |e: LogError| Failure {
        why: format!("the changed blocks are not in the log: {}", e.why),
        help:
            "mend the log; if it is removed, the disk goes on without it, and its changes are lost"
                .to_owned(),
    };
    let mut log = match Log::open(path, true) {
        // The storage manager has removed the log, so it will not read the changes.
        Err(e) if e.errno == Errno::NOENT => {
            tracing::warn!("the log of {id} is gone, and with it what it had: {}", path.display());
            forget(shared, id);
            return Ok(());
        }
        log => log.map_err(failure)?,
    };
    let is_complete = log.add_map(&map).map_err(failure)?;
    if !is_complete {
        tracing::error!(
            "{} is not consistent: {id} was made larger while it was open; begin a new log",
            path.display()
        );
    } else if map.was_consistent {
        log.set(|head| head.consistent = 1).map_err(failure)?;
    }
    forget(shared, id);
    Ok(())
}

/// As [`end`], of a tap whose process was killed.
pub(super) fn salvage(shared: &Shared, id: DiskId) {
    let state = shared.states.read(id).ok().flatten();
    if let Some(tap) = state.and_then(|state| state.tap)
        && let Err(e) = end(shared, id, &tap)
    {
        tracing::error!("{id}: {e}");
        forget(shared, id);
    }
}

/// Removes the file that the worker notes blocks in.
fn forget(shared: &Shared, id: DiskId) {
    let file = shared.paths.changes(id);
    if let Err(e) = std::fs::remove_file(&file)
        && e.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}: {e}", file.display());
    }
}
