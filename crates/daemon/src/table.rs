//! All disks that the daemon knows of, for whoever wants to see them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use ferrite_serve::waker::Waker;

use crate::Failure;
use crate::params::Image;
use crate::round::Ticket;
use crate::state::{DiskId, DiskState};

/// How far a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its image is being opened.
    Starting,
    /// It is served.
    Served,
    /// It cannot be served now, and is tried again.
    Failed(Failure),
    /// A drive without a medium: there is nothing to serve.
    Empty,
    /// Its image is closed, and left to this later attachment of the same disk.
    Resting(DiskId),
}

/// Another binary for those who serve a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Upgrade {
    /// Nobody has asked for one.
    None,
    /// This one is to serve it.
    Asked(PathBuf),
    /// That was tried.
    Done(Result<(), Failure>),
}

/// Why a disk's thread was woken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// To end.
    End,
    /// To have this binary serve the disk.
    Upgrade(PathBuf),
    /// To leave the image to a later attachment.
    Rest,
    /// That is done already.
    Nothing,
}

/// A disk that is attached.
pub struct Entry {
    /// How far it is.
    pub phase: Phase,
    /// Its image; none in an empty drive, and where the toolstack has named none.
    pub image: Option<Image>,
    /// The image after links, once that was looked up.
    pub(crate) real: Option<PathBuf>,
    /// tapdisk's number of it.
    pub minor: u32,
    /// The process that stands for it: the same as long as it is served.
    pub pid: Option<u32>,
    /// The socket by which clients of NBD find it.
    pub(crate) nbd: Option<PathBuf>,
    /// Since when the phase is this.
    pub since: SystemTime,
    /// Starts that it has taken.
    pub starts: u64,
    /// Its image was open: a guest may have written.
    pub(crate) was_open: bool,
    /// The later attachment that it is to rest for, or rests for.
    pub(crate) rests_for: Option<DiskId>,
    /// The guest's disk that it is served beside, as its stub domain's.
    pub(crate) beside: Option<DiskId>,
    /// What becomes of the binary that it is served by.
    pub(crate) upgrade: Upgrade,
    /// Its part in that, until its thread has it.
    pub(crate) ticket: Option<Ticket>,
    /// Disks with the same are served by one worker.
    pub(crate) group: Option<PathBuf>,
    stop: Arc<Waker>,
    /// That was woken for good.
    ends: bool,
    has_ended: bool,
    thread: Option<JoinHandle<()>>,
}

impl Entry {
    /// Its image after links, as far as that is known.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.real.as_deref().or(self.image.as_ref().map(|image| image.path.as_path()))
    }
}

/// A disk that is gone needs no other binary.
pub(crate) fn detached() -> Failure {
    let (why, help) = ("it was detached meanwhile", "there is nothing to do");
    Failure { why: why.to_owned(), help: help.to_owned() }
}

/// Whether another binary can serve the disk: only of one that is served it is known that it goes on.
fn may_upgrade(phase: &Phase) -> Result<(), Failure> {
    let (why, help) = match phase {
        Phase::Served => return Ok(()),
        Phase::Starting => {
            let help = "once it is open, ask again; ferrite disk show says what it waits for";
            ("its image is being opened", help)
        }
        Phase::Failed(failure) => {
            let why = format!("it is not served: {}", failure.why);
            return Err(Failure { why, help: format!("{}; then ask again", failure.help) });
        }
        Phase::Empty => ("it is an empty drive", "there is nothing to do"),
        Phase::Resting(_) => {
            let help = "its image is closed and left to a later attachment: if it is served again, ask \
                        again";
            ("it rests", help)
        }
    };
    Err(Failure { why: why.to_owned(), help: help.to_owned() })
}

/// The disks, and a bell that rings when one of them changes.
#[derive(Default)]
pub struct Table {
    disks: Mutex<BTreeMap<DiskId, Entry>>,
    /// The numbers of disks that a predecessor knew and that are not entered yet.
    reserved: Mutex<BTreeMap<DiskId, u32>>,
    changed: Condvar,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiskId, Entry>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A look at all of them.
    pub fn look<T>(&self, f: impl FnOnce(&BTreeMap<DiskId, Entry>) -> T) -> T {
        f(&self.lock())
    }

    /// Keeps tapdisk's numbers of these disks for them, until they are entered.
    pub(crate) fn reserve(&self, mut minors: BTreeMap<DiskId, u32>) {
        let disks = self.lock();
        minors.retain(|id, _| !disks.contains_key(id));
        *self.reserved.lock().unwrap_or_else(PoisonError::into_inner) = minors;
    }

    /// Enters a disk, whose thread `start` starts. Of one that a predecessor knew, tapdisk's number is
    /// the one it had, or else the lowest that no other has.
    ///
    /// # Errors
    /// No thread can be had: the disk is not entered.
    pub(crate) fn enter(
        &self,
        id: DiskId,
        image: Option<Image>,
        known: Option<&DiskState>,
        start: impl FnOnce(u32, Arc<Waker>) -> std::io::Result<JoinHandle<()>>,
    ) -> std::io::Result<()> {
        let stop = Arc::new(Waker::new()?);
        let rests_for = known.and_then(|state| state.rests_for);
        let mut disks = self.lock();
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.remove(&id);
        let is_free = |minor: &u32| {
            let mut taken = disks.values().map(|entry| &entry.minor).chain(reserved.values());
            taken.all(|taken| taken != minor)
        };
        let minor = known.map(|state| state.minor).filter(|minor| is_free(minor));
        let minor = minor.or_else(|| (0..).find(is_free)).unwrap_or_default();
        // The thread's first look at the table waits for the lock.
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
            was_open: false,
            rests_for,
            beside: known.and_then(|state| state.beside),
            upgrade: Upgrade::None,
            ticket: None,
            group: None,
            stop,
            ends: false,
            has_ended: false,
            thread: Some(thread),
        };
        disks.insert(id, entry);
        self.changed.notify_all();
        Ok(())
    }

    /// Changes what is known of a disk.
    pub(crate) fn change(&self, id: DiskId, f: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.lock().get_mut(&id) {
            f(entry);
            self.changed.notify_all();
        }
    }

    /// A disk's new phase.
    pub(crate) fn set(&self, id: DiskId, phase: Phase) {
        self.change(id, |entry| {
            // Nobody is there any more who would do what was asked.
            if let (Upgrade::Asked(_), Err(why)) = (&entry.upgrade, may_upgrade(&phase)) {
                entry.upgrade = Upgrade::Done(Err(why));
                entry.ticket = None;
            }
            if entry.phase != phase {
                (entry.phase, entry.since) = (phase, SystemTime::now());
            }
        });
    }

    /// A disk's thread is at its end.
    pub(crate) fn end(&self, id: DiskId) {
        self.change(id, |entry| entry.has_ended = true);
    }

    /// Takes those out whose threads are at their end, and waits for these, which takes no time.
    pub(crate) fn reap(&self) -> Vec<DiskId> {
        let mut ended = Vec::new();
        self.lock().retain(|id, entry| {
            if entry.has_ended {
                ended.push((*id, entry.thread.take()));
            }
            !entry.has_ended
        });
        if !ended.is_empty() {
            self.changed.notify_all();
        }
        let ids = ended.iter().map(|(id, _)| *id).collect();
        for (id, thread) in ended {
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("the thread of disk {id} has panicked: a bug; it is started again");
            }
        }
        ids
    }

    /// Asks all threads to end.
    pub(crate) fn stop_all(&self) {
        for entry in self.lock().values_mut() {
            entry.ends = true;
            entry.stop.wake();
        }
    }

    /// Asks a disk's thread to leave the image to a later attachment. One that rests for it does already.
    /// Not so one that rests for another: its guest may be older than the image.
    pub(crate) fn have_rest(&self, id: DiskId, later: DiskId) -> bool {
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

    /// From now on a disk is served beside another one. One is at a time.
    ///
    /// # Errors
    /// Which is.
    pub(crate) fn stand_beside(&self, id: DiskId, first: DiskId) -> Result<(), DiskId> {
        let mut disks = self.lock();
        let mut others = disks.iter().filter(|(other, _)| **other != id);
        match others.find(|(_, entry)| entry.beside == Some(first)) {
            Some((other, _)) => Err(*other),
            None => {
                disks.get_mut(&id).into_iter().for_each(|entry| entry.beside = Some(first));
                Ok(())
            }
        }
    }

    /// Why a disk's thread was woken. It can be woken again then, unless that was for good.
    pub(crate) fn why_woken(&self, id: DiskId) -> Woken {
        // The lock makes it one with whoever wakes.
        let disks = self.lock();
        let Some(entry) = disks.get(&id).filter(|entry| !entry.ends) else { return Woken::End };
        entry.stop.clear();
        match (&entry.upgrade, entry.rests_for) {
            (Upgrade::Asked(binary), _) => Woken::Upgrade(binary.clone()),
            (_, Some(_)) => Woken::Rest,
            (_, None) => Woken::Nothing,
        }
    }

    /// Asks for another binary, if the disk is served; so for all disks that its worker serves. Which these are.
    ///
    /// # Errors
    /// Why it has none that could be exchanged now.
    pub(crate) fn ask_upgrade(&self, id: DiskId, binary: &Path) -> Result<Vec<DiskId>, Failure> {
        let mut disks = self.lock();
        let Some(entry) = disks.get(&id) else { return Err(detached()) };
        if let Some(first) = entry.beside {
            return Err(Failure {
                why: format!("it is served with disk {first}, as its guest's stub domain has it"),
                help: format!("upgrade disk {first}: this one goes with it"),
            });
        }
        may_upgrade(&entry.phase)?;
        let group = entry.group.clone();
        // What is not open lets go of nothing.
        let goes_with_it = |other: &Entry| {
            group.is_some()
                && other.group == group
                && other.beside.is_none()
                && other.phase == Phase::Served
        };
        let all = disks.iter_mut().filter(|(other, entry)| **other == id || goes_with_it(entry));
        let all: Vec<_> = all.collect();
        let (tickets, mut ids) = (Ticket::of(all.len()), Vec::new());
        for ((id, entry), ticket) in all.into_iter().zip(tickets) {
            entry.upgrade = Upgrade::Asked(binary.to_owned());
            entry.ticket = Some(ticket);
            entry.stop.wake();
            ids.push(*id);
        }
        Ok(ids)
    }

    /// Waits until `f` finds what it looks for, or this time is over.
    pub fn wait_for<T>(
        &self,
        timeout: Duration,
        mut f: impl FnMut(&BTreeMap<DiskId, Entry>) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + timeout;
        let mut disks = self.lock();
        loop {
            if let Some(found) = f(&disks) {
                return Some(found);
            }
            let left = end.checked_duration_since(Instant::now())?;
            let waited = self.changed.wait_timeout(disks, left);
            disks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
