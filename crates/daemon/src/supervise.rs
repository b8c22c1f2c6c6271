//! The daemon's main thread: it follows xenstore, and starts a thread for each attached disk.
//!
//! It is level-triggered: an event only says which disk to look at, and the look finds everything that is to be
//! done. So a daemon that starts late, or again, finds the same as one that ran before: it looks at all.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ferrite_serve::blkif::lifecycle::{ExpectedAttachment, report_failure, sweep, sweep_disk};
use ferrite_serve::log_limit::LogLimit;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;

use crate::directory::{self, KIND, Snapshot};
use crate::follow::{Follower, Task};
use crate::params::Params;
use crate::pending::Pending;
use crate::state::{DiskId, DiskState};
use crate::wait::{Backoff, wait_for};
use crate::{Shared, Xen, taps};

const TOKEN: &str = "all";
/// Most nodes whose changes wait to be looked at, of some forty disks. With more all disks are looked at.
const EVENTS: usize = 1024;
/// The pause between two scans, which bounds the work of a storm of events. It doubles after each
/// scan that finds nothing.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two scans.
const PAUSE_MAX: Duration = Duration::from_millis(320);
/// The first pause before xenstore is connected to again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause before xenstore is connected to again.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The longest sleep: systemd's watchdog expects a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Most disks at a time. The Xen interface allows far more than one host has.
const MAX_DISKS: u32 = 4096;

pub(crate) struct Supervisor<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) alive: &'a dyn Fn(&str),
    /// Whether a tap's guest has let go, and its frontend is still there: no event tells of its end.
    pub(crate) leaving: Cell<bool>,
    /// The guests' disks that have not joined their tap, with the reason. Each reason is logged once.
    pub(crate) refused: RefCell<BTreeMap<DiskId, String>>,
    /// The disks to look at.
    pub(crate) pending: RefCell<Pending>,
}

/// The result of a look at a disk.
struct Look {
    /// Whether something was done.
    found: bool,
    /// Whether the disk has to be looked at again, with the next event of any disk.
    again: bool,
}

impl Supervisor<'_> {
    /// Runs until the daemon is to stop. Each disk's thread has a connection of its own to
    /// xenstore, so the loss of this one does not affect them.
    pub(crate) fn run(&self) {
        let mut is_logged = false;
        let mut backoff = Backoff::new(RECONNECT_PAUSE, RECONNECT_PAUSE_MAX);
        loop {
            let mut followed = None;
            match self.connect() {
                Ok(mut store) => {
                    is_logged = false;
                    followed = Some(Instant::now());
                    let Some(e) = self.follow(&mut store).err() else { return };
                    self.log(|| tracing::error!("{e}; connecting to xenstore again"));
                    self.shared.set_xen(Xen::Gone(e.to_string()));
                }
                Err(e) => {
                    if !is_logged {
                        tracing::warn!("no Xen: {e}; trying again every second");
                        is_logged = true;
                    }
                    self.shared.set_xen(Xen::Gone(e.to_string()));
                }
            }
            self.shared.table.reap();
            (self.alive)("no Xen: waiting for xenstore");
            let pause =
                backoff.after(followed.is_some_and(|since| since.elapsed() > RECONNECT_PAUSE_MAX));
            let [stopped] = wait_for([self.shared.stop.fd()], Some(pause));
            if stopped {
                return;
            }
        }
    }

    fn connect(&self) -> Result<Store, StoreError> {
        let mut store = (self.shared.connect)()?;
        self.sweep(&mut store)?;
        store.watch_nodes(KIND, TOKEN, EVENTS)?;
        self.pending.borrow_mut().add_all();
        self.shared.set_xen(Xen::Connected);
        Ok(store)
    }

    /// Removes what is left of disks that were detached while no daemon ran.
    fn sweep(&self, store: &mut Store) -> Result<(), StoreError> {
        let mut known: BTreeSet<DiskId> = self.shared.serving.kept_disks().into_iter().collect();
        known.extend(self.shared.names.linked(&self.shared.paths));
        let mut minors: BTreeMap<DiskId, u32> =
            self.shared.states.all().iter().map(|state| (state.id, state.minor)).collect();
        known.extend(minors.keys());
        for id in known.into_iter().filter(|id| !id.is_tap()) {
            // The thread of a disk handles it, if there is one. There is one when xenstore was away and is back.
            let is_followed = self.shared.table.read(|disks| disks.contains_key(&id));
            let seen = Snapshot::read(store, id)?;
            if !is_followed && !seen.is_wanted() {
                tracing::info!("disk {id} was detached while the daemon did not follow xenstore");
                let state = self.shared.states.read(id).ok().flatten();
                if let Some(state) = state.filter(|state| state.beside.is_some()) {
                    // The guest's disk may have to be served first, which takes a thread.
                    self.start(id, Task::Gone, &seen, Some(&state));
                    continue;
                }
                // Closing the image may take a while.
                (self.alive)(&format!(
                    "disk {id} was detached while the daemon did not follow xenstore"
                ));
                self.shared.serving.remove(id);
                self.shared.names.unlink(&self.shared.paths, id);
                self.shared.states.remove(id);
                minors.remove(&id);
            }
        }
        self.shared.table.reserve(minors);
        sweep(store, &self.shared.paths.run, KIND)
    }

    fn follow(&self, store: &mut Store) -> Result<(), StoreError> {
        let mut pause = PAUSE;
        let mut last = None::<Instant>;
        loop {
            let found = self.scan(store)?;
            pause = if found { PAUSE } else { (pause * 2).min(PAUSE_MAX) };
            let disks = self.shared.table.counts().disks;
            (self.alive)(&format!("{disks} disks"));
            // After a quiet while the next event is handled almost at once.
            if last.is_some_and(|last| last.elapsed() > PAUSE_MAX) {
                pause = PAUSE;
            }
            let [stopped] = wait_for([self.shared.stop.fd()], Some(pause));
            if stopped || self.wait(store)? {
                return Ok(());
            }
            last = Some(Instant::now());
        }
    }

    /// Waits for something to scan. Returns whether the daemon is to stop.
    fn wait(&self, store: &mut Store) -> Result<bool, StoreError> {
        loop {
            let mut news = false;
            while let Some(event) = store.poll_event()? {
                if !self.is_followed(&event.path) {
                    self.pending.borrow_mut().add_changed(&event.path);
                    news = true;
                }
            }
            if news {
                return Ok(false);
            }
            let shared = self.shared;
            let fds = [store.fd(), shared.wake.fd(), shared.stop.fd()];
            let is_leaving = self.leaving.replace(false);
            let within = if is_leaving { PAUSE_MAX } else { HEARTBEAT };
            let [_, ended, stopped] = wait_for(fds, Some(within));
            if is_leaving && !stopped {
                return Ok(false);
            }
            if ended {
                shared.wake.clear();
                return Ok(false);
            }
            if stopped {
                return Ok(true);
            }
            (self.alive)(&format!("{} disks", shared.table.counts().disks));
        }
    }

    /// Whether a disk's own thread handles a change at this path. Most changes are this daemon's
    /// own.
    fn is_followed(&self, path: &str) -> bool {
        let of_disk = path.rsplit_once('/').and_then(|(dir, _)| directory::id_of(dir));
        of_disk.is_some_and(|id| self.is_known(id))
    }

    /// Whether a thread handles the disk: its own, or that of its tap.
    fn is_known(&self, id: DiskId) -> bool {
        self.shared.table.is_known(id)
    }

    /// Has a guest's disk join the tap that its script has named. Returns whether something was
    /// done. A tap that is not open yet is looked at again when it is.
    fn join_tap(&self, store: &mut Store, id: DiskId, seen: &Snapshot) -> Result<bool, StoreError> {
        let Some(tap) = seen.tap().map(DiskId::tap) else { return Ok(false) };
        match taps::join(self.shared, tap, id) {
            taps::Joined::AsFirst => {
                self.log(|| tracing::info!("disk {id} has joined {tap}"));
                Ok(true)
            }
            taps::Joined::AsSecond(image) => {
                // The worker serves both; this one has a thread of its own (attachments.md).
                let state = DiskState::new(id, &image, 0).beside(Some(tap));
                self.shared.end_of_earlier(id);
                self.start(id, Task::Serve(image), seen, Some(&state));
                self.log(|| tracing::info!("disk {id} has joined {tap} as the second"));
                Ok(true)
            }
            taps::Joined::No(why) => {
                report_failure(store, &directory::path(id), &why)?;
                let mut refused = self.refused.borrow_mut();
                if refused.get(&id) != Some(&why) {
                    self.log(|| tracing::warn!("disk {id} has not joined {tap}: {why}"));
                    refused.insert(id, why);
                }
                Ok(false)
            }
        }
    }

    /// Removes the directory of a tap's guest that has left, as XAPI expects: when the frontend's
    /// state is gone. Returns whether to look again soon.
    fn remove_left(
        &self,
        store: &mut Store,
        id: DiskId,
        seen: &Snapshot,
    ) -> Result<bool, StoreError> {
        let is_left = seen.is_there
            && seen.own == XenbusState::Closed
            && seen.params.as_deref().is_some_and(taps::is_named);
        if !is_left {
            return Ok(false);
        }
        match seen.has_front {
            true => self.leaving.set(true),
            false => store.remove(&directory::path(id))?,
        }
        Ok(true)
    }

    /// Looks at all disks that have to be looked at, and starts threads for them. Returns whether there were any.
    fn scan(&self, store: &mut Store) -> Result<bool, StoreError> {
        let ended = self.shared.table.reap();
        let mut found = !ended.is_empty();
        let mut pending = self.pending.borrow_mut();
        for id in ended {
            pending.add(id);
        }
        self.sweep_ended(store)?;
        let disks = pending.disks(store)?;
        self.refused.borrow_mut().retain(|id, _| pending.contains(*id) && !self.is_known(*id));
        for id in disks {
            if self.shared.table.read(|disks| disks.contains_key(&id)) {
                // The end of its thread adds it again.
                pending.remove(id);
            } else if !self.shared.table.is_of_tap(id) {
                let seen = Snapshot::read(store, id)?;
                let look = self.look(store, id, &seen)?;
                found |= look.found;
                if !look.again {
                    pending.remove(id);
                }
            }
        }
        Ok(found)
    }

    /// Looks at a disk without a thread, and starts one if it needs one.
    fn look(&self, store: &mut Store, id: DiskId, seen: &Snapshot) -> Result<Look, StoreError> {
        if !seen.is_wanted() {
            let is_leaving = self.remove_left(store, id, seen)?;
            return Ok(Look { found: is_leaving, again: is_leaving });
        }
        let known = match self.known(id, seen) {
            Ok(known) => known,
            // The state file names the guest's image. A guess could give it another one.
            Err(e) => {
                self.log(|| tracing::error!("cannot read the state of disk {id} yet: {e}"));
                self.shared.wake.wake();
                return Ok(Look { found: false, again: true });
            }
        };
        if known.is_none() && seen.params.as_deref().is_some_and(taps::is_named) {
            return Ok(Look { found: self.join_tap(store, id, seen)?, again: true });
        }
        let Some(task) = self.task(known.as_ref(), seen) else {
            return Ok(Look { found: false, again: true });
        };
        if known.is_none() {
            self.shared.end_of_earlier(id);
        }
        self.start(id, task, seen, known.as_ref());
        // Without a thread it is tried again.
        Ok(Look { found: true, again: true })
    }

    /// Removes files of predecessors, of disks that ended without being served. It waits until the
    /// toolstack has removed their directories.
    fn sweep_ended(&self, store: &mut Store) -> Result<(), StoreError> {
        let unswept = || self.shared.unswept.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = unswept().clone();
        for id in ended {
            if !Snapshot::read(store, id)?.is_there {
                sweep_disk(store, &self.shared.paths.run, KIND, (DomId(id.domid), id.devid))?;
                unswept().retain(|other| *other != id);
            }
        }
        Ok(())
    }

    /// The state file of a predecessor, if the attachment is still the one that it began with.
    fn known(&self, id: DiskId, seen: &Snapshot) -> io::Result<Option<DiskState>> {
        Ok(self.shared.states.read(id)?.filter(|_| seen.has_begun()))
    }

    /// The task for a disk, with the image that it was switched to.
    fn task(&self, known: Option<&DiskState>, seen: &Snapshot) -> Option<Task> {
        let task = task(known, seen)?;
        let Task::Serve(image) = &task else { return Some(task) };
        if known.is_some() {
            return Some(task);
        }
        Some(match self.shared.switched.current(image) {
            Ok(current) => {
                if current != *image {
                    let (from, to) = (image.path.display(), current.path.display());
                    tracing::info!("{from} is named, and the disk was switched to {to}");
                }
                Task::Serve(current)
            }
            Err(e) => {
                let folder = self.shared.config.state_folder.display();
                Task::Refuse(format!(
                    "cannot read which images disks were switched to, and {} may be outdated: {e} (in \
                     {folder})",
                    image.path.display()
                ))
            }
        })
    }

    fn start(&self, id: DiskId, task: Task, seen: &Snapshot, known: Option<&DiskState>) {
        if self.shared.table.counts().disks >= MAX_DISKS {
            self.log(|| {
                tracing::error!("disk {id} is not served: {MAX_DISKS} disks are attached already")
            });
            return;
        }
        let image = match &task {
            Task::Serve(image) => Some(image.clone()),
            Task::Empty | Task::Gone | Task::Refuse(_) => None,
        };
        let attached = match seen.has_begun() {
            true => ExpectedAttachment::Begun,
            false => ExpectedAttachment::New(seen.params.clone().unwrap_or_default()),
        };
        let has_older = !seen.has_begun();
        let is_untouched = is_untouched(&task, known, seen);
        let is_allocated = |minor| taps::is_allocated(&self.shared.paths, minor);
        let entered = self.shared.table.insert(id, image, known, is_allocated, |minor, stop| {
            let shared = self.shared.clone();
            let log = LogLimit::default();
            let follower = Follower {
                shared,
                id,
                minor,
                attached,
                has_older,
                may_begin: false,
                is_untouched,
                stop,
                log,
            };
            let name = id.file_name();
            std::thread::Builder::new().name(name).spawn(move || follower.run(task))
        });
        if let Err(e) = entered {
            self.log(|| tracing::error!("disk {id} is not served: cannot start a thread: {e}"));
            return;
        }
        self.log(|| tracing::info!("disk {id} is attached"));
    }

    /// Bounds the log: a toolstack may attach and detach without end.
    fn log(&self, line: impl FnOnce()) {
        if self.shared.log.allow(self.shared.clock.now_ns()).is_some() {
            line();
        }
    }
}

/// The task for a disk; `None` while the toolstack has not written `params`. A guest that a
/// predecessor has announced a disk to keeps its image, whatever `params` says now.
fn task(known: Option<&DiskState>, seen: &Snapshot) -> Option<Task> {
    if let Some(state) = known {
        return Some(Task::Serve(state.image()));
    }
    Some(match Params::parse(seen.params.as_deref()?) {
        Params::Image(image) => Task::Serve(image),
        Params::Empty => Task::Empty,
        // It has an image when it has joined its tap.
        Params::Tap => return None,
        Params::Invalid(why) => Task::Refuse(why),
    })
}

/// Whether no predecessor can have had the image open for this attachment. The state file is
/// written before that, and notes if it was never opened. Beyond state 2, the disk may have been
/// served by hand, or the file may be lost.
fn is_untouched(task: &Task, known: Option<&DiskState>, seen: &Snapshot) -> bool {
    match (task, known) {
        (Task::Empty | Task::Gone, _) => true,
        (Task::Serve(_) | Task::Refuse(_), None) => {
            !seen.has_begun() || seen.own == XenbusState::InitWait
        }
        (Task::Serve(_) | Task::Refuse(_), Some(state)) => !seen.has_begun() || state.never_open,
    }
}
