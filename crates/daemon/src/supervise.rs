//! The daemon's main thread: it follows xenstore, and gives each disk that is attached a thread.
//!
//! It is level-triggered, as everything here: an event says when to look, and a look finds all that is
//! to be done. So a daemon that starts late, or again, finds the same as one that was there.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ferrite_serve::blkif::lifecycle::{Attached, sweep};
use ferrite_serve::log_limit::LogLimit;
use ferrite_xen::store::{Store, StoreError};

use crate::directory::{self, KIND, Look};
use crate::follow::{Follower, Task};
use crate::params::Params;
use crate::state::{DiskId, DiskState};
use crate::wait::{Pauses, wait_for};
use crate::{Shared, Xen, blktap};

const TOKEN: &str = "all";
/// The pause between two looks, so that no storm of events makes more work than this; twice as long
/// after each look that finds nothing, up to the longest.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(320);
/// When to ask for xenstore again, at first and later.
const NO_XEN: Duration = Duration::from_millis(50);
const NO_XEN_MAX: Duration = Duration::from_secs(1);
/// The longest sleep: whoever watches us hears that we live.
const ALIVE: Duration = Duration::from_secs(10);
/// Disks that are served at a time; the Xen interface has room for far more than a host.
const MAX_DISKS: usize = 4096;

pub(crate) struct Supervisor<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) alive: &'a dyn Fn(&str),
}

impl Supervisor<'_> {
    /// Until the daemon is to stop. The disks' threads have connections of their own: what becomes of
    /// this one's does not concern them, and each sees to its own.
    pub(crate) fn run(&self) {
        let mut told = false;
        let mut pauses = Pauses::new(NO_XEN, NO_XEN_MAX);
        loop {
            let mut followed = None;
            match self.connect() {
                Ok(mut store) => {
                    told = false;
                    followed = Some(Instant::now());
                    let Some(e) = self.follow(&mut store).err() else { return };
                    self.tell(|| tracing::error!("{e}; asking for xenstore again"));
                    self.shared.set_xen(Xen::Gone(e.to_string()));
                }
                Err(e) => {
                    if !told {
                        tracing::warn!("no Xen: {e}; asking for it every second");
                        told = true;
                    }
                    self.shared.set_xen(Xen::Gone(e.to_string()));
                }
            }
            (self.alive)("no Xen: waiting for xenstore");
            let pause = pauses.after(followed.is_some_and(|since| since.elapsed() > NO_XEN_MAX));
            let [stopped] = wait_for([self.shared.stop.fd()], Some(pause));
            if stopped {
                return;
            }
        }
    }

    fn connect(&self) -> Result<Store, StoreError> {
        let mut store = (self.shared.connect)()?;
        self.sweep(&mut store)?;
        store.watch(KIND, TOKEN)?;
        self.shared.set_xen(Xen::Connected);
        Ok(store)
    }

    /// Removes what is left of disks that were detached while no daemon ran.
    fn sweep(&self, store: &mut Store) -> Result<(), StoreError> {
        let mut known: BTreeSet<DiskId> = self.shared.serving.all().into_iter().collect();
        known.extend(blktap::linked(&self.shared.places));
        let mut minors: BTreeMap<DiskId, u32> =
            self.shared.states.all().iter().map(|state| (state.id, state.minor)).collect();
        known.extend(minors.keys());
        for id in known {
            // One that has a thread is that one's: xenstore was away, and is there again.
            let is_followed = self.shared.table.look(|disks| disks.contains_key(&id));
            let look = Look::take(store, id)?;
            if !is_followed && !look.is_wanted() {
                tracing::info!("disk {id} was detached meanwhile");
                let state = self.shared.states.read(id).ok().flatten();
                if let Some(state) = state.filter(|state| state.beside.is_some()) {
                    // Its guest's disk may have to be served before: that takes a thread.
                    self.start(id, Task::Gone, &look, Some(&state));
                    continue;
                }
                // Its image may take a while to be closed.
                (self.alive)(&format!("disk {id} was detached meanwhile"));
                self.shared.serving.forget(id);
                blktap::unlink(&self.shared.places, id);
                self.shared.states.remove(id);
                minors.remove(&id);
            }
        }
        self.shared.table.reserve(minors);
        sweep(store, &self.shared.places.run, KIND)
    }

    fn follow(&self, store: &mut Store) -> Result<(), StoreError> {
        let mut pause = PAUSE;
        let mut last = None::<Instant>;
        loop {
            let found = self.look(store)?;
            pause = if found { PAUSE } else { (pause * 2).min(PAUSE_MAX) };
            let disks = self.shared.table.look(|disks| disks.len());
            (self.alive)(&format!("{disks} disks"));
            // A quiet while: the next event is looked at almost at once.
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

    /// Waits for something to look at. Whether this is the end.
    fn wait(&self, store: &mut Store) -> Result<bool, StoreError> {
        loop {
            let mut news = false;
            while let Some(event) = store.poll_event()? {
                news |= !self.is_followed(&event.path);
            }
            if news {
                return Ok(false);
            }
            let shared = self.shared;
            let fds = [store.fd(), shared.wake.fd(), shared.stop.fd()];
            let [_, ended, stopped] = wait_for(fds, Some(ALIVE));
            if ended {
                shared.wake.clear();
                return Ok(false);
            }
            if stopped {
                return Ok(true);
            }
            (self.alive)(&format!("{} disks", shared.table.look(|disks| disks.len())));
        }
    }

    /// Whether a change there is its own thread's to see, and nothing new: most changes are ours.
    fn is_followed(&self, path: &str) -> bool {
        let of_disk = path.rsplit_once('/').and_then(|(dir, _)| directory::id_of(dir));
        of_disk.is_some_and(|id| self.shared.table.look(|disks| disks.contains_key(&id)))
    }

    /// Looks at all directories, and sees to those that nobody sees to. Whether there were any.
    fn look(&self, store: &mut Store) -> Result<bool, StoreError> {
        let mut found = !self.shared.table.reap().is_empty();
        self.sweep_ended(store)?;
        for id in directory::all(store)? {
            if self.shared.table.look(|disks| disks.contains_key(&id)) {
                continue;
            }
            let look = Look::take(store, id)?;
            if !look.is_wanted() {
                continue;
            }
            let known = match self.known(id, &look) {
                Ok(known) => known,
                // It says which image the guest has. Another guess could be another image.
                Err(e) => {
                    self.tell(|| tracing::error!("cannot read the state of disk {id} yet: {e}"));
                    self.shared.wake.wake();
                    continue;
                }
            };
            if let Some(task) = task(known.as_ref(), &look) {
                found = true;
                self.start(id, task, &look, known.as_ref());
            }
        }
        Ok(found)
    }

    /// Removes what predecessors have left of disks that ended while nobody served them, once the
    /// toolstack has removed them.
    fn sweep_ended(&self, store: &mut Store) -> Result<(), StoreError> {
        let unswept = || self.shared.unswept.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = unswept().clone();
        for id in ended {
            if !Look::take(store, id)?.is_there {
                sweep(store, &self.shared.places.run, KIND)?;
                unswept().retain(|other| *other != id);
            }
        }
        Ok(())
    }

    /// What a predecessor has known of the disk, if this is still the one that it has begun with.
    fn known(&self, id: DiskId, look: &Look) -> io::Result<Option<DiskState>> {
        Ok(self.shared.states.read(id)?.filter(|_| look.has_begun()))
    }

    fn start(&self, id: DiskId, task: Task, look: &Look, known: Option<&DiskState>) {
        if self.shared.table.look(|disks| disks.len()) >= MAX_DISKS {
            self.tell(|| tracing::error!("disk {id} is not served: there are {MAX_DISKS} already"));
            return;
        }
        let image = match &task {
            Task::Serve(image) => Some(image.clone()),
            Task::Empty | Task::Gone | Task::Refuse(_) => None,
        };
        let attached = match look.has_begun() {
            true => Attached::Begun,
            false => Attached::New(look.params.clone().unwrap_or_default()),
        };
        let has_older = !look.has_begun();
        let is_untouched = is_untouched(&task, known, look);
        let entered = self.shared.table.enter(id, image, known, |minor, stop| {
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
            std::thread::Builder::new().name(name).spawn(move || follower.run(&task))
        });
        if let Err(e) = entered {
            self.tell(|| tracing::error!("disk {id} is not served: cannot start a thread: {e}"));
            return;
        }
        self.tell(|| tracing::info!("disk {id} is attached"));
    }

    /// A toolstack that attaches and detaches without end does not fill the log.
    fn tell(&self, line: impl FnOnce()) {
        if self.shared.log.allow(self.shared.clock.now_ns()).is_some() {
            line();
        }
    }
}

/// What is to be done for a disk; `None` while the toolstack has not said that. A guest that a
/// predecessor has begun with keeps the image that it was attached with, whatever became of `params`
/// since.
fn task(known: Option<&DiskState>, look: &Look) -> Option<Task> {
    if let Some(state) = known {
        return Some(Task::Serve(state.image()));
    }
    Some(match Params::parse(look.params.as_deref()?) {
        Params::Image(image) => Task::Serve(image),
        Params::Empty => Task::Empty,
        Params::Odd(why) => Task::Refuse(why),
    })
}

/// Whether no predecessor can have had the disk's image open for this attachment: its state file comes
/// before that, and says when it was in vain. Beyond 2, the disk may have been served by hand, or the
/// file may be lost.
fn is_untouched(task: &Task, known: Option<&DiskState>, look: &Look) -> bool {
    match (task, known) {
        (Task::Empty | Task::Gone, _) => true,
        (Task::Serve(_) | Task::Refuse(_), None) => !look.has_begun() || look.own == 2,
        (Task::Serve(_) | Task::Refuse(_), Some(state)) => !look.has_begun() || state.never_open,
    }
}
