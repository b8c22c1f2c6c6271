//! The table of all disks that the daemon knows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use ferrite_serve::blkif::lifecycle::Tune;
use ferrite_serve::waker::Waker;
use rustix::io::Errno;

use crate::Failure;
use crate::asking::Questions;
use crate::joint_upgrade::Participant;
use crate::new_leaf::NewLeaf;
use crate::params::Image;
use crate::pause::{Pause, Resume};
use crate::state::{DiskId, DiskState, TapState};
use crate::suspended::LeftImage;
use crate::tuning::Tuning;

mod index;

pub(crate) use index::Counts;
use index::{Index, Seen};

/// The phase of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its image is being opened.
    Starting,
    /// The disk is served.
    Served,
    /// The disk cannot be served now, and is tried again.
    Failed(Failure),
    /// The drive has no medium, so there is nothing to serve.
    Empty,
    /// Its image is closed, and left to this later attachment of the same disk.
    Resting(DiskId),
    /// Its image is closed on request, and its guest waits.
    Paused,
    /// Its image is closed while its guest is suspended.
    Suspended,
}

/// The state of an upgrade of the disk's worker to another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Upgrade {
    /// No upgrade was requested.
    None,
    /// The disk is to be served by this program.
    Requested(PathBuf),
    /// The result of the last upgrade.
    Done(Result<(), Failure>),
}

/// Why a disk's thread was woken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WakeReason {
    /// The thread has to end.
    End,
    /// The disk is to be served by this program.
    Upgrade(PathBuf),
    /// The image is to be closed: it is left to a later attachment, or the disk is paused.
    Rest,
    /// The guest is suspended, and the image is to be closed.
    Leave,
    /// There is nothing to do any more.
    Nothing,
}

/// How a tap is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// When its guest has left it.
    WithoutGuest,
    /// Now.
    Now,
}

/// An attached disk.
pub struct Entry {
    /// The disk's phase.
    pub phase: Phase,
    /// Its image. `None` in an empty drive, and if the toolstack has named none.
    pub image: Option<Image>,
    /// The image's path with links resolved, once that was done.
    pub(crate) real: Option<PathBuf>,
    /// The disk's number for tapdisk's tools.
    pub minor: u32,
    /// The process number of its keeper, which stays the same while the disk is served.
    pub pid: Option<u32>,
    /// The path of its NBD socket.
    pub(crate) nbd: Option<PathBuf>,
    /// The time of the last change of the phase.
    pub since: SystemTime,
    /// How often the disk was started.
    pub starts: u64,
    /// Whether its worker was started with `fence = "weak-reservation"`, once that is known.
    pub(crate) weak: Option<bool>,
    /// The number of the error by which a tap's image could not be opened, if it had one.
    pub(crate) errno: Option<Errno>,
    /// Whether its image was open: a guest may have written.
    pub(crate) was_open: bool,
    /// The later attachment that it rests for, or is to rest for.
    pub(crate) rests_for: Option<DiskId>,
    /// Whether its guest is suspended, so that its image is to be closed.
    pub(crate) is_suspended: bool,
    /// The image as it was closed for that.
    pub(crate) left: Option<LeftImage>,
    /// The guest's disk that this stub domain's disk is served beside.
    pub(crate) beside: Option<DiskId>,
    /// Its pause, from the request until the image is open again.
    pub(crate) pause: Option<Pause>,
    /// The end of its pause, if one was requested.
    pub(crate) resume: Resume,
    /// How often the disk has gone on after a pause.
    pub(crate) resumed: u64,
    /// How often it is still tried to end the pause of an operation of the daemon before.
    pub(crate) tries: u32,
    /// The state of its upgrade.
    pub(crate) upgrade: Upgrade,
    /// Its part in a joint upgrade, until its thread takes it.
    pub(crate) participant: Option<Participant>,
    /// The socket of its group. One worker serves all disks with the same one.
    pub(crate) group: Option<PathBuf>,
    /// The further state of a tap.
    pub(crate) tap: Option<TapState>,
    /// Whether a tap is to be closed, and how.
    pub(crate) closing: Option<Closing>,
    /// The snapshot of a raw disk that is made.
    pub(crate) new_leaf: Option<NewLeaf>,
    /// The settings of the running disk.
    pub(crate) tune: Tune,
    /// The state of a change of that.
    pub(crate) tuning: Tuning,
    /// The questions to its worker.
    pub(crate) questions: Questions,
    stop: Arc<Waker>,
    /// Whether the thread was woken to end.
    ends: bool,
    has_ended: bool,
    thread: Option<JoinHandle<()>>,
}

impl Entry {
    /// The path of its image, with links resolved if that was done.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.real.as_deref().or(self.image.as_ref().map(|image| image.path.as_path()))
    }

    /// Whether the tap's image is to be closed for good now.
    pub(crate) fn closes(&self) -> bool {
        let has_guest = self.tap.as_ref().is_some_and(|tap| tap.guest.is_some());
        self.closing.is_some_and(|closing| closing == Closing::Now || !has_guest)
    }

    /// Whether the disk's thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Asks the disk's thread to end, and nothing else. The disk stays as it is.
    pub(crate) fn end(&mut self) {
        self.ends = true;
        self.stop.wake();
    }

    /// Wakes the disk's thread, which reads the reason.
    pub(crate) fn wake(&self) {
        self.stop.wake();
    }
}

/// The failure of an upgrade of a disk that was detached.
pub(crate) fn detached() -> Failure {
    let (why, help) = ("the disk was detached meanwhile", "there is nothing to do");
    Failure { why: why.to_owned(), help: help.to_owned() }
}

/// Whether the disk can be upgraded. Only a served disk is known to go on.
fn may_upgrade(phase: &Phase) -> Result<(), Failure> {
    let (why, help) = match phase {
        Phase::Served | Phase::Paused => return Ok(()),
        Phase::Starting => {
            let help = "try again when it is open; ferrite disk show says what it waits for";
            ("its image is being opened", help)
        }
        Phase::Failed(failure) => {
            let why = format!("it is not served: {}", failure.why);
            return Err(Failure { why, help: format!("{}; then try again", failure.help) });
        }
        Phase::Empty => ("it is an empty drive", "there is nothing to do"),
        Phase::Suspended => {
            let help = "try again when the guest runs";
            ("its guest is suspended, and its image closed", help)
        }
        Phase::Resting(_) => {
            let help = "try again when that attachment is gone and the disk is served again";
            ("its image is closed and left to a later attachment", help)
        }
    };
    Err(Failure { why: why.to_owned(), help: help.to_owned() })
}

/// The disks, with a condition variable that signals each change.
#[derive(Default)]
pub struct Table {
    disks: Mutex<Disks>,
    /// Minors of disks that a predecessor knew and that are not in the table yet.
    reserved: Mutex<BTreeMap<DiskId, u32>>,
    changed: Condvar,
}

#[derive(Default)]
struct Disks {
    all: BTreeMap<DiskId, Entry>,
    index: Index,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Disks> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with all disks.
    pub fn read<T>(&self, f: impl FnOnce(&BTreeMap<DiskId, Entry>) -> T) -> T {
        f(&self.lock().all)
    }

    /// How many disks there are.
    pub(crate) fn counts(&self) -> Counts {
        self.lock().index.counts()
    }

    /// Whether there is a thread for this disk: its own, or that of its tap.
    pub(crate) fn is_known(&self, id: DiskId) -> bool {
        let disks = self.lock();
        disks.all.contains_key(&id) || disks.index.is_of_tap(id)
    }

    /// Whether a tap serves this guest's disk as its first.
    pub(crate) fn is_of_tap(&self, guest: DiskId) -> bool {
        self.lock().index.is_of_tap(guest)
    }

    /// Whether a tap serves any guest's disk.
    pub(crate) fn has_guests_of_taps(&self) -> bool {
        self.lock().index.has_guests()
    }

    /// The other disks with the file of this one, in order.
    pub(crate) fn sharers(&self, id: DiskId) -> Vec<DiskId> {
        let disks = self.lock();
        let file = disks.all.get(&id).and_then(Entry::file);
        let mut found = file.map_or_else(Vec::new, |file| disks.index.of_file(file));
        found.retain(|other| *other != id);
        found
    }

    /// Reserves tapdisk's minors for these disks, until they are inserted.
    pub(crate) fn reserve(&self, mut minors: BTreeMap<DiskId, u32>) {
        let disks = self.lock();
        minors.retain(|id, _| !disks.all.contains_key(id));
        *self.reserved.lock().unwrap_or_else(PoisonError::into_inner) = minors;
    }

    /// Inserts a disk, whose thread `start` starts. A disk that a predecessor knew keeps its minor.
    /// Any other gets the lowest free one that `is_allocated` does not say of.
    ///
    /// # Errors
    /// The thread cannot be started. The disk is not inserted.
    pub(crate) fn insert(
        &self,
        id: DiskId,
        image: Option<Image>,
        known: Option<&DiskState>,
        is_allocated: impl Fn(u32) -> bool,
        start: impl FnOnce(u32, Arc<Waker>) -> std::io::Result<JoinHandle<()>>,
    ) -> std::io::Result<()> {
        let stop = Arc::new(Waker::new()?);
        let rests_for = known.and_then(|state| state.rests_for);
        let mut disks = self.lock();
        let Disks { all, index } = &mut *disks;
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.remove(&id);
        let others: BTreeSet<u32> = reserved.values().copied().collect();
        let is_free = |minor: &u32| !index.has_minor(*minor) && !others.contains(minor);
        let minor = known.map(|state| state.minor).filter(|minor| is_free(minor));
        let is_unknown = |minor: &u32| is_free(minor) && !is_allocated(*minor);
        let minor = minor.or_else(|| (0..).find(is_unknown)).unwrap_or_default();
        // The new thread waits for the table's lock.
        let thread = start(minor, stop.clone())?;
        let entry = Entry {
            phase: Phase::Starting,
            image,
            real: None,
            minor,
            pid: None,
            nbd: None,
            since: SystemTime::now(),
            starts: 0,
            weak: None,
            errno: None,
            was_open: false,
            rests_for,
            is_suspended: known.is_some_and(|state| state.left.is_some()),
            left: known.and_then(|state| state.left.clone()),
            beside: known.and_then(|state| state.beside),
            pause: known.and_then(|state| state.pause.clone()),
            resume: known.map_or(Resume::None, Resume::after_a_restart),
            resumed: 0,
            tries: known.map_or(0, Resume::tries_after_a_restart),
            upgrade: Upgrade::None,
            participant: None,
            group: None,
            tap: known.and_then(|state| state.tap.clone()),
            closing: None,
            new_leaf: known.and_then(|state| state.new_leaf.clone()),
            tune: known.map(|state| state.tune.clone()).unwrap_or_default(),
            tuning: Tuning::default(),
            questions: Questions::default(),
            stop,
            ends: false,
            has_ended: false,
            thread: Some(thread),
        };
        if let Some(older) = all.remove(&id) {
            index.remove(id, &older);
        }
        index.insert(id, &entry);
        all.insert(id, entry);
        self.changed.notify_all();
        Ok(())
    }

    /// Changes a disk's entry.
    pub(crate) fn change(&self, id: DiskId, f: impl FnOnce(&mut Entry)) {
        let mut disks = self.lock();
        let Disks { all, index } = &mut *disks;
        if let Some(entry) = all.get_mut(&id) {
            let before = Seen::of(entry);
            f(entry);
            index.change(id, before, entry);
            self.changed.notify_all();
        }
    }

    /// Sets a disk's phase.
    pub(crate) fn set(&self, id: DiskId, phase: Phase) {
        self.change(id, |entry| {
            // The disk's worker is gone, so the requested upgrade cannot be done.
            if let (Upgrade::Requested(_), Err(why)) = (&entry.upgrade, may_upgrade(&phase)) {
                entry.upgrade = Upgrade::Done(Err(why));
                entry.participant = None;
            }
            if let Err(why) = may_upgrade(&phase) {
                entry.tuning.fail(&why);
            }
            if entry.phase != phase {
                (entry.phase, entry.since) = (phase, SystemTime::now());
            }
        });
    }

    /// Notes that a disk's thread has ended.
    pub(crate) fn mark_ended(&self, id: DiskId) {
        self.change(id, |entry| entry.has_ended = true);
    }

    /// Removes the disks whose threads have ended, and joins these threads. They have ended, so it
    /// does not block.
    pub(crate) fn reap(&self) -> Vec<DiskId> {
        let mut ended = Vec::new();
        {
            let mut disks = self.lock();
            let Disks { all, index } = &mut *disks;
            for id in index.take_ended() {
                if let Some(mut entry) = all.remove(&id) {
                    index.remove(id, &entry);
                    ended.push((id, entry.thread.take()));
                }
            }
        }
        if !ended.is_empty() {
            self.changed.notify_all();
        }
        let ids = ended.iter().map(|(id, _)| *id).collect();
        for (id, thread) in ended {
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!(
                    "the thread of disk {id} has panicked: this is a bug in ferrite; starting it again"
                );
            }
        }
        ids
    }

    /// Asks all threads to end.
    pub(crate) fn stop_all(&self) {
        for entry in self.lock().all.values_mut() {
            entry.ends = true;
            entry.stop.wake();
        }
    }

    /// Asks a disk's thread to leave the image to the attachment `later`. `false`: it rests for
    /// another one, and its guest may be older than the image.
    pub(crate) fn request_rest(&self, id: DiskId, later: DiskId) -> bool {
        let mut asked = true;
        self.change(id, |entry| match entry.rests_for {
            Some(other) if other != later => asked = false,
            _ if entry.phase == Phase::Resting(later) => {}
            _ => {
                entry.rests_for = Some(later);
                entry.stop.wake();
            }
        });
        asked
    }

    /// Records that a disk is served beside `first`. Only one can be at a time.
    ///
    /// # Errors
    /// The disk that already is.
    pub(crate) fn stand_beside(&self, id: DiskId, first: DiskId) -> Result<(), DiskId> {
        let disks = &mut self.lock().all;
        let mut others = disks.iter().filter(|(other, _)| **other != id);
        match others.find(|(_, entry)| entry.beside == Some(first)) {
            Some((other, _)) => Err(*other),
            None => {
                disks.get_mut(&id).into_iter().for_each(|entry| entry.beside = Some(first));
                Ok(())
            }
        }
    }

    /// Why a disk's thread was woken. Clears its waker, unless the thread has to end.
    pub(crate) fn wake_reason(&self, id: DiskId) -> WakeReason {
        // The lock orders this with the code that wakes.
        let disks = self.lock();
        let Some(entry) = disks.all.get(&id).filter(|entry| !entry.ends) else {
            return WakeReason::End;
        };
        entry.stop.clear();
        let is_to_close = entry.rests_for.is_some() || entry.pause.is_some() || entry.closes();
        match &entry.upgrade {
            Upgrade::Requested(binary) => {
                // The thread reads the other reason after the upgrade.
                if (is_to_close || entry.is_suspended) && entry.phase == Phase::Served {
                    entry.stop.wake();
                }
                WakeReason::Upgrade(binary.clone())
            }
            _ if is_to_close => WakeReason::Rest,
            _ if entry.is_suspended => WakeReason::Leave,
            _ => WakeReason::Nothing,
        }
    }

    /// Requests an upgrade of a disk and of all disks that its worker serves. Returns these disks.
    ///
    /// # Errors
    /// The disk has no worker that could be replaced now.
    pub(crate) fn request_upgrade(
        &self,
        id: DiskId,
        binary: &Path,
    ) -> Result<Vec<DiskId>, Failure> {
        let disks = &mut self.lock().all;
        let Some(entry) = disks.get(&id) else { return Err(detached()) };
        if let Some(first) = entry.beside {
            return Err(Failure {
                why: format!("it is a stub domain's and served with disk {first}"),
                help: format!("upgrade disk {first}: this one goes with it"),
            });
        }
        may_upgrade(&entry.phase)?;
        let group = entry.group.clone();
        // A worker closes the images that are open only.
        let goes_with_it = |other: &Entry| {
            group.is_some()
                && other.group == group
                && other.beside.is_none()
                && other.phase == Phase::Served
        };
        let all = disks.iter_mut().filter(|(other, entry)| **other == id || goes_with_it(entry));
        let all: Vec<_> = all.collect();
        let (participants, mut ids) = (Participant::of(all.len()), Vec::new());
        for ((id, entry), participant) in all.into_iter().zip(participants) {
            entry.upgrade = Upgrade::Requested(binary.to_owned());
            entry.participant = Some(participant);
            entry.stop.wake();
            ids.push(*id);
        }
        Ok(ids)
    }

    /// Waits until `f` returns a value, or for the time `timeout`.
    pub fn wait_for<T>(
        &self,
        timeout: Duration,
        mut f: impl FnMut(&BTreeMap<DiskId, Entry>) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + timeout;
        let mut disks = self.lock();
        loop {
            if let Some(found) = f(&disks.all) {
                return Some(found);
            }
            let left = end.checked_duration_since(Instant::now())?;
            let waited = self.changed.wait_timeout(disks, left);
            disks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
