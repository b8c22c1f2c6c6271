//! Taps: disks that are open before their guest and after it, as XAPI's storage manager drives them
//! by `tap-ctl`.
//!
//! A tap goes through these states, each with its own record that a successor finds:
//! * allocated: the file `tapdisk/tapdisk-M` exists;
//! * attached: a keeper without an image has the tap's socket;
//! * open: it has a state file, and a thread like each disk. It is served to clients of NBD. One
//!   guest's disk joins it on its own thread, a second one beside it;
//! * closed: its state file says so, and its keeper has no image.
//!
//! Keepers that have no tap yet are found by their sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_serve::blkif::lifecycle::ExpectedAttachment;
use ferrite_serve::log_limit::LogLimit;
use rustix::io::Errno;

use crate::follow::Follower;
use crate::params::{Image, Params};
use crate::pause::Resume;
use crate::state::{DiskId, DiskState};
use crate::table::{Entry, Phase};
use crate::{Failure, Paths, Shared};

mod errno;
mod follow;
mod list;
mod logs;
mod motion;
mod passed;
mod statistics;
mod verbs;

pub(crate) use list::{list, statistics};
pub(crate) use motion::Second;
pub(crate) use verbs::{
    Extras, allocate, attach, close, close_for_good, close_own, detach, free, open, open_own,
    pause, spawn, unpause, upgrade_idle,
};

/// As many taps as tapdisk has numbers.
const MINORS: u32 = 16384;

/// Why a verb of a tap has failed. Callers compare the number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TapError {
    pub(crate) errno: Errno,
    pub(crate) failure: Failure,
}

impl TapError {
    pub(crate) fn new(errno: Errno, why: impl Into<String>, help: &str) -> TapError {
        TapError { errno, failure: Failure { why: why.into(), help: help.to_owned() } }
    }
}

/// An attached tap.
#[derive(Debug, Default)]
struct Attached {
    /// The process number of its keeper.
    pid: u32,
    /// Its keepers before that one. Scripts go on with the number that they were given.
    earlier: BTreeSet<u32>,
    /// Whether the tap was closed. It may be opened anew.
    is_closed: bool,
}

/// The taps that have a keeper.
#[derive(Default)]
pub(crate) struct Taps {
    attached: Mutex<BTreeMap<u32, Attached>>,
    /// Held while a verb changes which taps and keepers there are.
    changing: Mutex<()>,
    publishing: statistics::Publishing,
    passed: passed::Passed,
}

impl Taps {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Attached>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether a tap is closed.
    fn set_closed(&self, id: DiskId, is_closed: bool) {
        if let Some(tap) = self.lock().get_mut(&id.devid) {
            tap.is_closed = is_closed;
        }
    }

    /// Notes the keeper of a tap. Returns whether it is another one than before.
    fn set_keeper(&self, minor: u32, pid: u32) -> bool {
        let mut attached = self.lock();
        let tap = attached.entry(minor).or_default();
        let before = std::mem::replace(&mut tap.pid, pid);
        if before != pid && before != 0 {
            tap.earlier.insert(before);
        }
        before != pid
    }
}

impl Paths {
    /// The folder of the files that show which minors are allocated.
    pub(crate) fn allocated(&self) -> PathBuf {
        self.blktap().join("tapdisk")
    }

    /// The file that shows that a minor is allocated.
    pub fn allocated_minor(&self, minor: u32) -> PathBuf {
        self.allocated().join(format!("tapdisk-{minor}"))
    }
}

/// Whether a minor is allocated to a tap.
pub(crate) fn is_allocated(paths: &Paths, minor: u32) -> bool {
    paths.allocated_minor(minor).exists()
}

/// Whether `params` say that a hotplug script will name a tap.
pub(crate) fn is_named(params: &[u8]) -> bool {
    Params::parse(params) == Params::Tap
}

/// How a guest's disk has joined a tap.
pub(crate) enum Joined {
    /// The tap's thread serves it.
    AsFirst,
    /// Another guest has the tap, too; this one is served beside it, with this image.
    AsSecond(Image),
    /// It has not joined, for this reason.
    No(String),
}

/// Has a guest's disk join a tap. That it has is in the tap's state file before it is served.
pub(crate) fn join(shared: &Arc<Shared>, tap: DiskId, guest: DiskId) -> Joined {
    let mut joined = Joined::No(format!("{tap} is not open: tap-ctl list shows the taps"));
    shared.table.change(tap, |entry| {
        let (Some(state), Some(image)) = (&mut entry.tap, &entry.image) else { return };
        if entry.closing.is_some() {
            joined = Joined::No(format!("{tap} is being closed"));
            return;
        }
        if state.guest.is_some_and(|first| first != guest) {
            joined = Joined::AsSecond(image.clone());
            return;
        }
        if state.guest.is_none()
            && let Some(why) = shared.writers.in_the_way(tap)
        {
            joined = Joined::No(why);
            return;
        }
        state.guest = Some(guest);
        entry.wake();
        joined = Joined::AsFirst;
    });
    statistics::begin(shared);
    joined
}

/// Records which process keeps a tap. Nothing is done for other disks.
pub(crate) fn take_keeper(shared: &Arc<Shared>, id: DiskId, pid: u32) {
    let Some(minor) = id.minor_of_tap() else { return };
    if shared.taps.set_keeper(minor, pid) {
        passed::listen(shared, pid, minor);
    }
}

/// Takes the image from the keeper of a tap whose worker has closed it.
fn empty(shared: &Arc<Shared>, id: DiskId) -> Result<(), Failure> {
    let next = shared.serving.empty(id)?;
    if let (Some(pid), Some(minor)) = (next, id.minor_of_tap()) {
        take_keeper(shared, id, pid);
        shared.names.link(&shared.paths, id, pid, minor);
    }
    Ok(())
}

/// Takes up the taps of a predecessor: attached ones, and open ones with their threads. Xenstore is
/// not needed for that.
pub(crate) fn restore(shared: &Arc<Shared>) {
    for id in shared.serving.kept_disks() {
        // The threads of other disks ask their keepers themselves.
        let Some(minor) = id.minor_of_tap() else { continue };
        let Some(pid) = shared.serving.keeper_of(id) else { continue };
        take_keeper(shared, id, pid);
        shared.names.link(&shared.paths, id, pid, minor);
    }
    shared.taps.passed.sweep(&shared.paths);
    for state in shared.states.all() {
        let (Some(minor), Some(tap)) = (state.id.minor_of_tap(), &state.tap) else { continue };
        if tap.closed {
            let mut attached = shared.taps.lock();
            match attached.get_mut(&minor) {
                Some(tap) => tap.is_closed = true,
                // Its keeper has ended, so there is nothing to open anew.
                None => shared.states.remove(state.id),
            }
            continue;
        }
        if let Err(e) = start(shared, &state) {
            tracing::error!("{} is not served: cannot start a thread: {e}", state.id);
        }
    }
    statistics::begin(shared);
    sweep(shared);
}

/// Removes the files of taps that have no keeper and no thread: their keepers were killed while they had no image.
fn sweep(shared: &Shared) {
    let mut left: BTreeSet<DiskId> = shared.names.linked(&shared.paths).into_iter().collect();
    left.extend(shared.serving.kept_disks());
    for id in left.into_iter().filter(|id| id.is_tap()) {
        let is_attached = shared.taps.lock().contains_key(&id.devid);
        if !is_attached && !shared.table.read(|disks| disks.contains_key(&id)) {
            Follower::forget_tap(shared, id);
        }
    }
}

/// Starts the thread of an open tap. One that is opened anew has had [`Shared::end_of_earlier`].
fn start(shared: &Arc<Shared>, state: &DiskState) -> io::Result<()> {
    let (id, image) = (state.id, state.image());
    shared.table.insert(
        id,
        Some(image.clone()),
        Some(state),
        |_| false,
        |minor, stop| {
            let follower = Follower {
                shared: shared.clone(),
                id,
                minor,
                attached: ExpectedAttachment::Begun,
                has_older: false,
                may_begin: true,
                is_untouched: false,
                stop,
                log: LogLimit::default(),
            };
            std::thread::Builder::new().name(id.file_name()).spawn(move || follower.run_tap())
        },
    )
}

/// Makes the file that allocates a minor. `false`: it was there.
fn mark(paths: &Paths, minor: u32) -> io::Result<bool> {
    let path = paths.allocated_minor(minor);
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    }
}

/// The minors of all allocated taps.
fn marked(paths: &Paths) -> Vec<u32> {
    let entries = std::fs::read_dir(paths.allocated()).into_iter().flatten().flatten();
    let minor = |name: &Path| name.to_str()?.strip_prefix("tapdisk-")?.parse().ok();
    entries.filter_map(|entry| minor(Path::new(&entry.file_name()))).collect()
}

/// Whether an open tap is paused.
fn is_paused(entry: &Entry) -> bool {
    // A tap that could not go on is paused again in a moment.
    let has_failed = matches!(entry.resume, Resume::Failed(_));
    // A predecessor has paused it, and its thread has not looked at it yet.
    let is_found = entry.starts == 0 && entry.resume == Resume::None;
    entry.pause.is_some() && (entry.phase == Phase::Paused || has_failed || is_found)
}
