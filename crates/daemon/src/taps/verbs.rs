//! The verbs of taps, as `tap-ctl` has them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferrite_serve::counters::{snapshot, stats_file};
use rustix::io::Errno;

use super::errno::{check, errno_of, recorded};
use super::{
    Attached, MINORS, Second, TapError, empty, is_paused, logs, mark, motion, start, take_keeper,
};
use crate::follow::Follower;
use crate::params::Image;
use crate::pause::{self, NotDone, Pause};
use crate::state::{DiskId, DiskState, TapState};
use crate::table::{Closing, Entry, Phase};
use crate::{Failure, Shared, devices, exports, vhost};

/// How long an image may take to be opened.
const OPENED_WITHIN: Duration = Duration::from_secs(60);

/// Allocates the lowest free minor.
pub(crate) fn allocate(shared: &Shared) -> Result<u32, TapError> {
    let _one = shared.taps.change();
    let is_taken = |minor: u32| shared.table.read(|disks| disks.values().any(|e| e.minor == minor));
    for minor in (0..MINORS).filter(|minor| !is_taken(*minor)) {
        match mark(&shared.paths, minor) {
            Ok(true) => return Ok(minor),
            Ok(false) => {}
            Err(e) => {
                let folder = shared.paths.allocated();
                let why = format!("cannot allocate a minor in {}: {e}", folder.display());
                return Err(TapError::new(
                    errno_of(&e),
                    why,
                    "make room on the file system of /run",
                ));
            }
        }
    }
    let why = format!("all {MINORS} minors are allocated");
    Err(TapError::new(Errno::NOSPC, why, "free some: tap-ctl list shows them"))
}

/// Starts a process that has no tap yet.
pub(crate) fn spawn(shared: &Shared) -> Result<u32, TapError> {
    let spawned = shared.serving.spawn();
    // tap-ctl's callers try again after this number.
    spawned.map_err(|failure| TapError { errno: Errno::PERM, failure })
}

/// Gives a process the tap of a minor.
pub(crate) fn attach(shared: &Arc<Shared>, pid: u32, minor: u32) -> Result<(), TapError> {
    let _one = shared.taps.change();
    let id = DiskId::tap(minor);
    if !super::is_allocated(&shared.paths, minor) {
        let why = format!("minor {minor} is not allocated");
        return Err(TapError::new(Errno::NOENT, why, "allocate it first: tap-ctl allocate"));
    }
    if shared.taps.lock().contains_key(&minor) {
        let why = format!("minor {minor} is attached");
        return Err(TapError::new(Errno::EXIST, why, "tap-ctl list shows its process"));
    }
    match shared.serving.give(pid, id) {
        Ok(true) => {}
        Ok(false) => {
            let why = format!("there is no process {pid} without a tap");
            return Err(TapError::new(Errno::NOENT, why, "start one first: tap-ctl spawn"));
        }
        Err(failure) => return Err(TapError { errno: Errno::NOENT, failure }),
    }
    take_keeper(shared, id, pid);
    Ok(())
}

/// Checks that the minor belongs to this process: the keeper or an earlier one of it, or the worker.
fn of_process(shared: &Shared, pid: u32, minor: u32) -> Result<(), TapError> {
    let attached = shared.taps.lock();
    let is_keeper = |tap: &Attached| tap.pid == pid || tap.earlier.contains(&pid);
    if attached.get(&minor).is_some_and(is_keeper) {
        return Ok(());
    }
    let has_tap = attached.contains_key(&minor);
    drop(attached);
    if has_tap && worker(shared, DiskId::tap(minor)) == Some(pid) {
        return Ok(());
    }
    // The keeper and the daemon were killed while it was paused: its next keeper is started when it goes on.
    let is_left =
        |disks: &BTreeMap<DiskId, Entry>| disks.get(&DiskId::tap(minor)).is_some_and(is_paused);
    let is_dead = !Path::new("/proc").join(pid.to_string()).exists();
    if !has_tap && is_dead && shared.table.read(is_left) {
        return Ok(());
    }
    let why = format!("process {pid} has no minor {minor}");
    Err(TapError::new(Errno::NOENT, why, "tap-ctl list shows processes and their minors"))
}

/// The process number of the worker of an open tap.
pub(super) fn worker(shared: &Shared, id: DiskId) -> Option<u32> {
    let stats = stats_file(&shared.paths.run.join(id.file_name()));
    snapshot::read(&stats).ok().map(|seen| seen.pid)
}

/// Opens an image in an attached tap, and waits until it is served.
pub(crate) fn open(
    shared: &Arc<Shared>,
    pid: u32,
    minor: u32,
    image: &Image,
    read_only: bool,
    extras: Extras,
) -> Result<(), TapError> {
    let tap = TapState { read_only, log: extras.log, ..TapState::default() };
    open_as(shared, pid, minor, image, tap, extras.mirror.as_ref())
}

/// The further arguments of `open` and `unpause`, besides the image.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras {
    /// The log of changed blocks. Without one none are recorded.
    pub(crate) log: Option<PathBuf>,
    /// The second disk that writes go to. Without one it stays as it is.
    pub(crate) mirror: Option<Second>,
}

/// Opens an image in a tap of its own, for this daemon. Returns the minor.
pub(crate) fn open_own(
    shared: &Arc<Shared>,
    image: &Image,
    read_only: bool,
) -> Result<u32, TapError> {
    let minor = allocate(shared)?;
    let state = TapState { read_only, is_own: true, ..TapState::default() };
    let opened = spawn(shared).and_then(|pid| {
        attach(shared, pid, minor)?;
        open_as(shared, pid, minor, image, state, None)
    });
    if let Err(e) = opened {
        close_own(shared, minor);
        return Err(e);
    }
    Ok(minor)
}

/// Closes a tap of this daemon's own, as far as it was made.
pub(crate) fn close_own(shared: &Shared, minor: u32) {
    if let Err(e) = close_for_good(shared, minor, OPENED_WITHIN) {
        tracing::warn!("tap/{minor} of a device is not closed: {}", e.failure);
    }
}

/// Closes a tap, as far as it was made, and removes everything of it. A guest that has it waits for the
/// next process that serves it.
pub(crate) fn close_for_good(
    shared: &Shared,
    minor: u32,
    within: Duration,
) -> Result<(), TapError> {
    let pid = shared.taps.lock().get(&minor).map(|tap| tap.pid);
    if let Some(pid) = pid {
        close(shared, pid, minor, true, within)?;
        detach(shared, pid, minor)?;
    }
    free(shared, minor)
}

fn open_as(
    shared: &Arc<Shared>,
    pid: u32,
    minor: u32,
    image: &Image,
    mut tap: TapState,
    second: Option<&Second>,
) -> Result<(), TapError> {
    of_process(shared, pid, minor)?;
    let id = DiskId::tap(minor);
    check(image)?;
    if !shared.table.read(|disks| disks.contains_key(&id)) {
        match tap.is_own {
            false => shared.end_of_earlier(id),
            true => {
                exports::end_of_earlier(shared, id);
                vhost::end_of_earlier(shared, id);
                devices::end_of_earlier_held(shared, id);
            }
        }
    }
    {
        let _one = shared.taps.change();
        if shared.table.read(|disks| disks.contains_key(&id)) {
            let why = format!("{id} is open already");
            return Err(TapError::new(Errno::ALREADY, why, "close it first: tap-ctl close"));
        }
        logs::check(shared, id, tap.log.as_deref())?;
        if let Some(second) = second {
            tap.mirror = motion::change(shared, id, second)?;
        }
        let state = DiskState::new(id, image, minor).with_tap(Some(tap));
        start(shared, &state).map_err(|e| {
            TapError::new(errno_of(&e), format!("cannot start a thread: {e}"), "try again later")
        })?;
    }
    let opened = shared.table.wait_for(OPENED_WITHIN, |disks| match disks.get(&id) {
        None => Some(Err(gone(id))),
        Some(entry) => match &entry.phase {
            Phase::Served | Phase::Paused => Some(Ok(())),
            Phase::Failed(failure) => Some(Err(failure.clone())),
            Phase::Starting | Phase::Empty | Phase::Resting(_) | Phase::Suspended => None,
        },
    });
    let e = match opened {
        Some(Ok(())) => {
            shared.taps.set_closed(id, false);
            // A guest's disk may wait for it.
            shared.wake.wake();
            return Ok(());
        }
        Some(Err(failure)) => TapError { errno: recorded(shared, id), failure },
        None => {
            let why = format!("{} is still being opened", image.path.display());
            TapError::new(Errno::TIMEDOUT, why, "its storage is slow or does not answer")
        }
    };
    take_back(shared, id);
    Err(e)
}

/// Ends the thread of a tap whose image could not be opened. It is attached as before.
fn take_back(shared: &Arc<Shared>, id: DiskId) {
    shared.table.change(id, Entry::end);
    wait_until_gone(shared, id, OPENED_WITHIN);
    logs::salvage(shared, id);
    shared.states.remove(id);
    if let Err(e) = empty(shared, id) {
        tracing::warn!("{id}: {e}");
    }
}

fn wait_until_gone(shared: &Shared, id: DiskId, within: Duration) -> bool {
    let ended = shared.table.wait_for(within, |disks| match disks.get(&id) {
        Some(entry) if !entry.has_ended() => None,
        _ => Some(()),
    });
    // Without xenstore the main thread removes ended threads only once a second.
    shared.table.reap();
    ended.is_some()
}

fn gone(id: DiskId) -> Failure {
    Failure { why: format!("{id} was closed meanwhile"), help: "open it again".to_owned() }
}

/// Pauses an open tap. One that is paused or closed stays so.
pub(crate) fn pause(
    shared: &Shared,
    pid: u32,
    minor: u32,
    within: Duration,
) -> Result<(), TapError> {
    of_process(shared, pid, minor)?;
    match pause::pause(shared, DiskId::tap(minor), &Pause::by("tap-ctl"), within) {
        Ok(()) | Err(NotDone::NoDisk) => Ok(()),
        Err(NotDone::NotInTime(failure)) => Err(TapError { errno: Errno::TIMEDOUT, failure }),
        Err(NotDone::Failed(failure)) => Err(TapError { errno: Errno::INVAL, failure }),
    }
}

/// Lets a paused tap go on, with another image if one is named. If that fails it is paused as
/// before.
pub(crate) fn unpause(
    shared: &Shared,
    pid: u32,
    minor: u32,
    image: Option<Image>,
    extras: Extras,
) -> Result<(), TapError> {
    of_process(shared, pid, minor)?;
    let id = DiskId::tap(minor);
    let paused = shared.table.read(|disks| disks.get(&id).map(is_paused));
    if paused != Some(true) {
        let why = format!("{id} is not paused");
        return Err(TapError::new(Errno::INVAL, why, "tap-ctl list shows its state"));
    }
    logs::check(shared, id, extras.log.as_deref())?;
    let second = extras.mirror.as_ref().map(|second| motion::change(shared, id, second));
    let second = second.transpose()?;
    shared.table.change(id, |entry| {
        if let Some(tap) = &mut entry.tap {
            tap.log = extras.log;
            tap.mirror = second.unwrap_or(tap.mirror.take());
        }
    });
    pause::resume(shared, id, image, false, OPENED_WITHIN).map_err(|e| {
        let (errno, failure) = match e {
            NotDone::NoDisk => (Errno::NOENT, gone(id)),
            NotDone::NotInTime(failure) => (Errno::TIMEDOUT, failure),
            NotDone::Failed(failure) => (recorded(shared, id), failure),
        };
        TapError { errno, failure }
    })
}

/// Closes a tap, and waits until it is. One that is closed stays so.
pub(crate) fn close(
    shared: &Shared,
    pid: u32,
    minor: u32,
    is_forced: bool,
    within: Duration,
) -> Result<(), TapError> {
    of_process(shared, pid, minor)?;
    let id = DiskId::tap(minor);
    shared.table.change(id, |entry| {
        let how = if is_forced { Closing::Now } else { Closing::WithoutGuest };
        // A request to close at once is not taken back.
        if entry.closing != Some(Closing::Now) {
            entry.closing = Some(how);
        }
        entry.wake();
    });
    if wait_until_gone(shared, id, within) {
        return Ok(());
    }
    let why = match shared.table.read(|disks| disks.get(&id)?.tap.as_ref()?.guest) {
        Some(guest) => format!("{id} is not closed yet: disk {guest} has it"),
        None => format!("{id} is not closed yet: requests are under way"),
    };
    let help = "it is closed when that is done; tap-ctl list shows it until then";
    Err(TapError::new(Errno::TIMEDOUT, why, help))
}

/// Takes a closed tap from its process, which ends.
pub(crate) fn detach(shared: &Shared, pid: u32, minor: u32) -> Result<(), TapError> {
    of_process(shared, pid, minor)?;
    let _one = shared.taps.change();
    let id = DiskId::tap(minor);
    if shared.table.read(|disks| disks.contains_key(&id)) {
        let why = format!("{id} is open");
        return Err(TapError::new(Errno::INVAL, why, "close it first: tap-ctl close"));
    }
    Follower::forget_tap(shared, id);
    shared.taps.lock().remove(&minor);
    Ok(())
}

/// Replaces the program of the processes of taps that are not open, and of those without a tap. Those of open ones go on as
/// disks do.
pub(crate) fn upgrade_idle(shared: &Shared, binary: &Path) -> Vec<(DiskId, Result<(), Failure>)> {
    let _one = shared.taps.change();
    shared.serving.upgrade_spares(binary);
    let attached: Vec<DiskId> =
        shared.taps.lock().keys().map(|minor| DiskId::tap(*minor)).collect();
    let is_idle = |id: &DiskId| {
        let is_open = shared.table.read(|disks| disks.contains_key(id));
        !is_open && shared.serving.keeper_of(*id).is_some()
    };
    let idle = attached.into_iter().filter(is_idle);
    idle.map(|id| (id, shared.serving.upgrade_closed(id, binary))).collect()
}

/// Frees a minor.
pub(crate) fn free(shared: &Shared, minor: u32) -> Result<(), TapError> {
    let _one = shared.taps.change();
    let id = DiskId::tap(minor);
    let is_attached = shared.taps.lock().contains_key(&minor);
    let is_open = shared.table.read(|disks| disks.contains_key(&id));
    // The daemon was killed, too, and this one starts no keeper for a tap that is paused.
    let is_left = |entry: &Entry| {
        is_paused(entry) && entry.tap.as_ref().is_some_and(|tap| tap.guest.is_none())
    };
    let is_left = shared.table.read(|disks| disks.get(&id).is_some_and(is_left));
    if (is_attached || is_left) && shared.serving.keeper_of(id).is_none() {
        // The process was killed, and all that it had open is closed with it.
        shared.table.change(id, Entry::end);
        wait_until_gone(shared, id, OPENED_WITHIN);
    } else if is_attached || is_open {
        let why = format!("minor {minor} is attached to a process");
        return Err(TapError::new(Errno::AGAIN, why, "detach it first: tap-ctl detach"));
    }
    Follower::forget_tap(shared, id);
    shared.taps.lock().remove(&minor);
    remove_mark(&shared.paths.allocated_minor(minor), minor)
}

fn remove_mark(path: &Path, minor: u32) -> Result<(), TapError> {
    std::fs::remove_file(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            let why = format!("minor {minor} is not allocated");
            TapError::new(Errno::NOENT, why, "tap-ctl list shows the minors")
        }
        _ => TapError::new(errno_of(&e), format!("cannot remove {}: {e}", path.display()), ""),
    })
}
