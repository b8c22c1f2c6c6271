//! Opens an image whose toolstack does the locking ([`Locking::Toolstack`]).
//!
//! The same locks are taken, as far as they are free, and no use by another process is an error. Two things are kept:
//! * A lock that no living process of this host holds is waited for, as ever: the last write of a killed process may
//!   not have ended, and would overtake ours.
//! * A device that is mounted is refused: that is no disk of a toolstack.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::names;
use rustix::fs::{FlockOperation, Mode, OFlags, Stat, flock, major, minor};

use super::growth::is_remote;
use super::lock::{Attempt, GONE_GRACE, OWN_GRACE, flags, holder};
use super::lock::{mounted_at, other_way, share_with_qemu, stand_back};
use super::medium::Medium;
use super::merging;
use super::proc_locks::flock_holder;
use crate::{Locking, OpenOptions};

/// How long an image on a network waits for a lock that no process of this host holds. It may be another host's, or that
/// of a process of this host that has just ended.
const REMOTE_GRACE: Duration = Duration::from_secs(1);

/// Whether the toolstack does the locking.
pub(super) fn is_theirs(options: &OpenOptions) -> bool {
    options.locking == Locking::Toolstack
}

/// The decision when another process has the `flock` of an image. `None`: it is opened beside that process, with the
/// readers' lock if that is free. `insists`: it was waited for.
pub(super) fn beside(
    path: &Path,
    file: &OwnedFd,
    stat: &Stat,
    reads: bool,
    insists: bool,
) -> Option<Attempt> {
    // A reader writes nothing, so no order with the writes of others has to be kept.
    if reads {
        tracing::debug!(image = %path.display(), "another process writes to it");
        return None;
    }
    let pid = flock_holder((major(stat.st_dev), minor(stat.st_dev)), stat.st_ino);
    let name = pid.and_then(holder);
    // A device manager locks a device for a moment only.
    let is_short = name.as_ref().is_some_and(|name| name.contains("udev"));
    if !insists && (is_short || pid == Some(std::process::id())) {
        return Some(Attempt::Later(OWN_GRACE));
    }
    if flock(file, FlockOperation::NonBlockingLockShared).is_ok() {
        tracing::debug!(image = %path.display(), "other processes read it");
        return None;
    }
    match (pid, name) {
        (Some(pid), Some(name)) => tell(path, &format!("process {pid} ({name})")),
        (None, _) if is_remote(file) && !insists => return Some(Attempt::Later(REMOTE_GRACE)),
        (None, _) if is_remote(file) => tell(path, "a process of another host"),
        _ => {
            let why = "a process had locked it and has ended, but its last operations still hold the lock";
            return Some(Attempt::Busy(GONE_GRACE, why.to_owned()));
        }
    }
    None
}

/// Takes the other locks of an image whose `flock` is held, as far as they are free.
pub(super) fn take_others(
    path: &Path,
    file: &OwnedFd,
    (stat, medium): (&Stat, Medium),
    options: &OpenOptions,
) {
    let reads = options.read_only || options.beside_readers;
    if !options.qemu_first && !share_with_qemu(path, file, reads) {
        stand_back(file);
        if !reads {
            tell(path, "QEMU (or one of its tools)");
        }
    }
    // A merge of this program's is announced; to keep other programs apart is the toolstack's task.
    let _ = merging::claim(file, options);
    if !reads && let Some(why) = other_way(stat, medium) {
        tell(path, &format!("another program (as {why})"));
    }
}

/// Warns of another writer.
fn tell(path: &Path, who: &str) {
    tracing::warn!(
        image = %path.display(),
        "{who} may write to it, too; it is opened all the same, as the toolstack has to keep the two apart",
    );
}

/// Opens a block device for writing that another process has opened exclusively. `None`: it is mounted, or cannot be
/// opened.
pub(super) fn open_claimed(path: &Path, stat: &Stat) -> Option<Arc<OwnedFd>> {
    if mounted_at(stat).is_some() {
        return None;
    }
    let flags = flags(Medium::BlockDevice, false) - OFlags::EXCL;
    let file = names::open(path, flags, Mode::empty()).ok()?;
    tell(path, "another process, which has it open exclusively,");
    Some(Arc::new(file))
}
