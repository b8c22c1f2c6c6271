//! One disk's thread: it sees to it that the disk is served, from its attachment to its end.
//!
//! What fails here is this disk's alone. It is reported where the toolstack looks, told once to the
//! log, and tried again, as the cause may be mended: storage that was away, an image that somebody
//! else has open.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ferrite_serve::blkif::lifecycle::{
    Attached, Outcome, clear_failure, forget_run_dir, report_failure,
};
use ferrite_serve::log_limit::{LogLimit, field};
use ferrite_serve::waker::Waker;
use ferrite_xen::store::{Store, StoreError};

use crate::directory::Look;
use crate::params::Image;
use crate::state::{DiskId, DiskState};
use crate::table::{Entry, Phase, Upgrade, Woken};
use crate::unserved::{End, May, answer};
use crate::wait::{Pauses, wait_for};
use crate::{Assignment, Failure, Shared, Step, blktap, directory};

/// The pause before the second try; twice as long before each further one, up to the longest.
pub(crate) const RETRY: Duration = Duration::from_millis(250);
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(5);

/// What a thread is to see to.
pub(crate) enum Task {
    /// Serve this image.
    Serve(Image),
    /// There is nothing to serve.
    Empty,
    /// It was detached while no daemon ran. What it has left is to go.
    Gone,
    /// What the toolstack has written makes no sense.
    Refuse(String),
}

/// What follows from an end of serving or resting.
enum Next {
    /// The disk is detached.
    Gone,
    /// The daemon stops.
    Ended,
    /// The other of the two.
    Again,
}

pub(crate) struct Follower {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: DiskId,
    pub(crate) minor: u32,
    /// Which attachment it sees to. Another one of the same name is another thread's.
    pub(crate) attached: Attached,
    /// What an older disk of this name has left may be there.
    pub(crate) has_older: bool,
    /// The next daemon would know what disk it is that has begun.
    pub(crate) may_begin: bool,
    /// No predecessor has had the image open for this attachment.
    pub(crate) is_untouched: bool,
    pub(crate) stop: Arc<Waker>,
    pub(crate) log: LogLimit,
}

impl Follower {
    /// Until the disk is detached, or the daemon stops.
    pub(crate) fn run(mut self, task: &Task) {
        let _end = Ending { shared: self.shared.clone(), id: self.id };
        if self.follow(task) {
            // The order matters: who serves it is gone before nobody knows of it any more.
            if self.beside().is_some_and(|first| !self.parts(first)) {
                return;
            }
            self.shared.serving.forget(self.id);
            blktap::unlink(&self.shared.places, self.id);
            if let Err(e) = forget_run_dir(&self.run_dir()) {
                tracing::warn!("cannot remove {} yet: {e}", self.run_dir().display());
            }
            (self.shared.at)(Step::Forgotten);
            self.shared.states.remove(self.id);
            self.info("is detached");
        }
    }

    /// The same; whether the disk is detached.
    fn follow(&mut self, task: &Task) -> bool {
        let mut pauses = Pauses::new(RETRY, RETRY_MAX);
        // The last thing that was told: the same reason is told once.
        let mut told = None;
        loop {
            let (failure, again) = match (self.forget_older(task), task) {
                (Err(failure), _) => (Some(failure), true),
                (Ok(()), Task::Serve(image)) => match self.serve_or_rest(image) {
                    Ok(Next::Gone) => return true,
                    Ok(Next::Ended) => return false,
                    Ok(Next::Again) => continue,
                    Err(failure) => {
                        let [woken] = wait_for([self.stop.fd()], Some(Duration::ZERO));
                        match self.shared.table.why_woken(self.id) {
                            Woken::End => return false,
                            Woken::Rest if woken => continue,
                            _ => (Some(self.with_sharer(failure)), true),
                        }
                    }
                },
                (Ok(()), Task::Empty) => (None, false),
                (Ok(()), Task::Gone) => return true,
                (Ok(()), Task::Refuse(why)) => (Some(refused(why)), false),
            };
            let pause = pauses.after(self.was_served());
            self.shared.table.change(self.id, |entry| {
                if let (Upgrade::Asked(_), Some(failure)) = (&entry.upgrade, &failure) {
                    entry.upgrade = Upgrade::Done(Err(failure.clone()));
                    entry.ticket = None;
                }
            });
            let phase = failure.clone().map_or(Phase::Empty, Phase::Failed);
            self.shared.table.set(self.id, phase);
            if told.as_ref() != Some(&failure) {
                self.tell(failure.as_ref());
                told = Some(failure.clone());
            }
            match self.stand_in(again.then_some(pause), failure.as_ref()) {
                Ok(End::Detached) => {
                    self.is_unswept();
                    return true;
                }
                // Its own thread comes at once, and may fail as we did.
                Ok(End::Another) => return !self.is_stopped(RETRY),
                Ok(End::Stopped) if self.ends() => return false,
                Ok(End::Stopped | End::Retry) => {}
                Err(e) => {
                    tracing::debug!("disk {}: {e}", self.id);
                    if self.is_stopped(pause) {
                        return false;
                    }
                }
            }
        }
    }

    /// Serves the disk, or leaves its image to a later attachment for as long as there is one.
    fn serve_or_rest(&mut self, image: &Image) -> Result<Next, Failure> {
        if let Some(later) = self.rests_for() {
            return match self.rest(later, image)? {
                End::Detached | End::Another => {
                    self.is_unswept();
                    Ok(Next::Gone)
                }
                End::Stopped if self.ends() => Ok(Next::Ended),
                End::Stopped => Ok(Next::Again),
                End::Retry => {
                    self.is_rested();
                    self.states_changed(image)?;
                    Ok(Next::Again)
                }
            };
        }
        let served = self.serve(image);
        if served.is_err() {
            self.was_in_vain(image);
        }
        Ok(match served? {
            Outcome::Unplugged => Next::Gone,
            Outcome::Stopped | Outcome::Left if self.ends() => Next::Ended,
            // It has let go of the image.
            Outcome::Stopped | Outcome::Left => Next::Again,
        })
    }

    /// Whether this thread is to end. It can be woken again, for something else, if not.
    fn ends(&self) -> bool {
        self.shared.table.why_woken(self.id) == Woken::End
    }

    /// What predecessors left of it goes when the toolstack has removed it.
    fn is_unswept(&self) {
        let unswept = self.shared.unswept.lock();
        unswept.unwrap_or_else(PoisonError::into_inner).push(self.id);
    }

    /// Whether this thread is to end, or is told so within this time.
    pub(crate) fn is_stopped(&self, within: Duration) -> bool {
        let [woken] = wait_for([self.stop.fd()], Some(within));
        woken && self.ends()
    }

    fn serve(&mut self, image: &Image) -> Result<Outcome, Failure> {
        self.shared.table.change(self.id, |entry| entry.starts += 1);
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        if !self.is_attached(&mut store)? {
            self.is_unswept();
            return Ok(Outcome::Unplugged);
        }
        let checked = self.check_folder(image);
        if checked.is_ok() {
            self.stand_beside(&mut store)?;
        }
        // Before anybody serves it, or says 2: the next daemon has to know what to look for.
        self.states_changed(image)?;
        self.may_begin = true;
        (self.shared.at)(Step::StateWritten);
        checked?;
        let beside = self.beside();
        if beside.is_none() {
            self.have_earlier_rest(&mut store)?;
        }
        let qemu_first = directory::qemu_opens(&mut store, self.id, image.format)
            .map_err(|e| Failure::store(&e))?;
        let assignment = Assignment {
            id: self.id,
            backend: directory::path(self.id),
            image: image.clone(),
            options: self.shared.config.of_image(&image.path).clone(),
            qemu_first,
            minor: self.minor,
            attached: self.attached.clone(),
            shared: &self.shared,
        };
        let serving = &self.shared.serving;
        let served = match beside {
            None => serving.serve(&assignment, &mut store, &self.stop),
            Some(first) => serving.serve_beside(&assignment, first, &mut store, &self.stop),
        };
        // It may have begun. If it has not, the next thread begins anew.
        if self.was_open() {
            self.attached = Attached::Begun;
        }
        served
    }

    /// Whether what stands there is still the attachment that we see to.
    fn is_attached(&mut self, store: &mut Store) -> Result<bool, Failure> {
        let look = Look::take(store, self.id).map_err(|e| Failure::store(&e))?;
        let is_attached = look.is_of(&self.attached);
        if is_attached && look.has_begun() {
            self.attached = Attached::Begun;
        }
        Ok(is_attached)
    }

    /// Removes what an older disk of this name has left, before anything is said of this one: whoever
    /// serves that, its tables, and what the next daemon would take for this one's image.
    fn forget_older(&mut self, task: &Task) -> Result<(), Failure> {
        if self.has_older {
            let older = self.shared.states.read(self.id).map_err(|e| self.no_state(&e))?;
            if let Some(first) = older.and_then(|older| older.beside) {
                self.shared.serving.part(self.id, first)?;
            }
            self.shared.serving.forget_older(self.id)?;
            blktap::unlink(&self.shared.places, self.id);
            forget_run_dir(&self.run_dir()).map_err(|e| Failure {
                why: format!("cannot remove what an older disk of this name has left: {e}"),
                help: "it is tried again; its storage may take long".to_owned(),
            })?;
            self.shared.states.try_remove(self.id).map_err(|e| self.no_state(&e))?;
            self.has_older = false;
        }
        self.may_begin |= !matches!(task, Task::Serve(_));
        Ok(())
    }

    fn run_dir(&self) -> PathBuf {
        self.shared.places.run.join(self.id.file_name())
    }

    /// It was, until now.
    fn was_served(&self) -> bool {
        let phase = |entry: &Entry| entry.phase == Phase::Served;
        self.shared.table.look(|disks| disks.get(&self.id).is_some_and(phase))
    }

    pub(crate) fn was_open(&self) -> bool {
        self.shared.table.look(|disks| disks.get(&self.id).is_none_or(|entry| entry.was_open))
    }

    /// Writes the disk's state as that of one that is served.
    fn states_changed(&self, image: &Image) -> Result<(), Failure> {
        let state = DiskState::new(self.id, image, self.minor).beside(self.beside());
        self.shared.states.write(&state).map_err(|e| self.no_state(&e))
    }

    /// Serving has failed. If nobody has ever had the image open, the next daemon is to know: it may
    /// announce the end of a disk whose image it cannot open.
    fn was_in_vain(&self, image: &Image) {
        if !self.may_begin || !self.is_untouched || self.was_open() || self.beside().is_some() {
            return;
        }
        let state = DiskState::new(self.id, image, self.minor).never_open();
        if let Err(e) = self.shared.states.write(&state) {
            tracing::debug!("disk {}: its state stays as it was: {e}", self.id);
        }
    }

    pub(crate) fn no_state(&self, e: &std::io::Error) -> Failure {
        let states = self.shared.places.states();
        Failure {
            why: format!("cannot write its state to {}: {e}", states.display()),
            help: "make room on the file system of /run".to_owned(),
        }
    }

    /// Images are served from the configured folders only; links are looked through.
    fn check_folder(&self, image: &Image) -> Result<(), Failure> {
        let path = image.path.display();
        let real = image.file().canonicalize().map_err(|e| Failure {
            why: format!("cannot open {path}: {e}"),
            help: "correct the disk's target, or make the image; it is tried again".to_owned(),
        })?;
        // A link in an allowed folder to a volume is how volumes are named.
        match self.shared.config.allows(&real) {
            true => {
                // Two volumes of a store are two disks.
                let real = match image.volume() {
                    None => real,
                    Some((_, name)) => [real.as_os_str(), "#".as_ref(), name]
                        .into_iter()
                        .collect::<std::ffi::OsString>()
                        .into(),
                };
                self.shared.table.change(self.id, |entry| entry.real = Some(real));
                Ok(())
            }
            false => Err(Failure {
                why: format!("{path} is in none of the folders that images are served from"),
                help: format!(
                    "add the folder of {} to image_folders in the daemon's configuration and \
                     restart the daemon, or move the image",
                    real.display()
                ),
            }),
        }
    }

    fn stand_in(
        &mut self,
        how_long: Option<Duration>,
        failure: Option<&Failure>,
    ) -> Result<End, StoreError> {
        let mut store = (self.shared.connect)()?;
        self.report(&mut store, failure);
        let announce = match self.beside() {
            None => self.is_untouched && !self.was_open(),
            Some(first) => self.may_part(&mut store, first)?,
        };
        let may = May { begin: self.may_begin, offer: failure.is_none(), announce };
        answer(&mut store, self.id, may, &mut self.attached, how_long, &self.stop)
    }

    /// Says in xenstore why the disk is not served. That xenstore refuses it changes nothing.
    pub(crate) fn report(&self, store: &mut Store, failure: Option<&Failure>) {
        let path = directory::path(self.id);
        let reported = match failure {
            Some(failure) => report_failure(store, &path, &failure.to_string()),
            None => clear_failure(store, &path),
        };
        if let Err(e) = reported {
            tracing::debug!("cannot report the state of disk {}: {e}", self.id);
        }
    }

    fn tell(&mut self, failure: Option<&Failure>) {
        match failure {
            None => self.info("is an empty drive"),
            Some(failure) => {
                if let Some(held_back) = self.log.allow(self.shared.clock.now_ns()) {
                    let id = self.id;
                    tracing::error!(
                        held_back = field(held_back),
                        "disk {id} is not served: {failure}"
                    );
                }
            }
        }
    }

    fn info(&mut self, what: &str) {
        if let Some(held_back) = self.log.allow(self.shared.clock.now_ns()) {
            tracing::info!(held_back = field(held_back), "disk {} {what}", self.id);
        }
    }
}

/// Says that a disk's thread is at its end, also of one that panics.
struct Ending {
    shared: Arc<Shared>,
    id: DiskId,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.shared.table.end(self.id);
        self.shared.wake.wake();
    }
}

fn refused(why: &str) -> Failure {
    Failure {
        why: why.to_owned(),
        help: "detach the disk, correct its target and attach it again".to_owned(),
    }
}
