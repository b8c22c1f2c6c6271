//! The thread of one disk, which serves it from its attachment to its end.
//!
//! A failure concerns this disk only. It is reported where the toolstack looks and logged once.
//! Then it is tried again, as the cause may be temporary: missing storage, or an image that another
//! program has open.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ferrite_nbd::uri::Uri;
use ferrite_serve::blkif::lifecycle::{
    ExpectedAttachment, Outcome, Tune, clear_failure, remove_run_dir, report_failure,
};
use ferrite_serve::log_limit::{LogLimit, field};
use ferrite_serve::waker::Waker;
use ferrite_xen::store::{Store, StoreError};

use crate::directory::Snapshot;
use crate::new_leaf::NewLeaf;
use crate::params::{Image, place_of};
use crate::pause::Pause;
use crate::state::{DiskId, DiskState, TapState};
use crate::table::{Entry, Phase, Upgrade, WakeReason};
use crate::unserved::{AllowedStates, End, answer};
use crate::wait::{Backoff, wait_for};
use crate::{Assignment, Failure, Shared, Step, directory};

/// The pause before the second try. It doubles with each further one.
pub(crate) const RETRY: Duration = Duration::from_millis(250);
/// The longest pause between two tries.
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(5);

/// The task of the thread.
pub(crate) enum Task {
    /// Serve this image.
    Serve(Image),
    /// Nothing: the drive has no medium.
    Empty,
    /// Remove the leftovers of a disk that was detached while no daemon ran.
    Gone,
    /// Refuse the disk for this reason: the toolstack's keys are invalid.
    Refuse(String),
}

/// The next step when serving or resting ends.
pub(crate) enum Next {
    /// The disk is detached.
    Gone,
    /// The daemon stops.
    Ended,
    /// The thread changes between serving and resting.
    Again,
}

/// The thread of a disk.
pub(crate) struct Follower {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: DiskId,
    pub(crate) minor: u32,
    /// The attachment of this thread. Another attachment of the same name gets another thread.
    pub(crate) attached: ExpectedAttachment,
    /// Whether an older disk of this name may have left files.
    pub(crate) has_older: bool,
    /// Whether the state file names this disk, so that the next daemon knows which disk was
    /// announced.
    pub(crate) may_begin: bool,
    /// Whether no predecessor has had the image open for this attachment.
    pub(crate) is_untouched: bool,
    pub(crate) stop: Arc<Waker>,
    pub(crate) log: LogLimit,
}

impl Follower {
    /// Runs until the disk is detached or the daemon stops.
    pub(crate) fn run(mut self, task: Task) {
        let _end = Ending { shared: self.shared.clone(), id: self.id };
        if self.follow(task) {
            // The order matters: the disk's keeper ends before its state file is removed.
            if self.beside().is_some_and(|first| !self.part_from(first)) {
                return;
            }
            self.shared.serving.remove(self.id);
            self.shared.names.unlink(&self.shared.paths, self.id);
            if let Err(e) = remove_run_dir(&self.run_dir()) {
                tracing::warn!("cannot remove {} yet: {e}", self.run_dir().display());
            }
            (self.shared.on_step)(Step::Forgotten);
            self.shared.states.remove(self.id);
            self.info("is detached");
        }
    }

    /// Serves or refuses the disk until its end. Returns whether it is detached.
    fn follow(&mut self, task: Task) -> bool {
        let mut task = task;
        let mut backoff = Backoff::new(RETRY, RETRY_MAX);
        // The last logged failure: the same one is logged once.
        let mut last_logged = None;
        loop {
            if let (Task::Serve(image), Some(now)) = (&mut task, self.image()) {
                // A pause may have ended with another image.
                *image = now;
            }
            let (failure, again) = match (self.remove_older(&task), &task) {
                (Err(failure), _) => (Some(failure), true),
                (Ok(()), Task::Serve(image)) => match self.serve_or_rest(image) {
                    Ok(Next::Gone) => return true,
                    Ok(Next::Ended) => return false,
                    Ok(Next::Again) => continue,
                    Err(failure) => {
                        let [woken] = wait_for([self.stop.fd()], Some(Duration::ZERO));
                        match self.shared.table.wake_reason(self.id) {
                            WakeReason::End => return false,
                            WakeReason::Rest | WakeReason::Leave if woken => continue,
                            _ => (Some(self.with_sharer(failure)), true),
                        }
                    }
                },
                (Ok(()), Task::Empty) => (None, false),
                (Ok(()), Task::Gone) => return true,
                (Ok(()), Task::Refuse(why)) => (Some(refused(why)), false),
            };
            let pause = backoff.after(self.was_served());
            self.shared.table.change(self.id, |entry| {
                if let (Upgrade::Requested(_), Some(failure)) = (&entry.upgrade, &failure) {
                    entry.upgrade = Upgrade::Done(Err(failure.clone()));
                    entry.participant = None;
                }
            });
            let phase = failure.clone().map_or(Phase::Empty, Phase::Failed);
            self.shared.table.set(self.id, phase);
            if last_logged.as_ref() != Some(&failure) {
                self.log_failure(failure.as_ref());
                last_logged = Some(failure.clone());
            }
            match self.stand_in(again.then_some(pause), failure.as_ref()) {
                Ok(End::Detached) => {
                    self.add_unswept();
                    return true;
                }
                // The supervisor starts the new attachment's thread at once, and that may fail as
                // this one did.
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

    /// The image that the disk is served from.
    pub(crate) fn image(&self) -> Option<Image> {
        self.shared.table.read(|disks| disks.get(&self.id)?.image.clone())
    }

    /// Serves the disk, or leaves its image closed while it is paused or a later attachment has it.
    fn serve_or_rest(&mut self, image: &Image) -> Result<Next, Failure> {
        if self.pause().is_some() {
            return self.stay_paused(image);
        }
        if let Some(later) = self.rests_for() {
            return match self.rest(later, image)? {
                End::Detached | End::Another => {
                    self.add_unswept();
                    Ok(Next::Gone)
                }
                End::Stopped if self.ends() => Ok(Next::Ended),
                End::Stopped => Ok(Next::Again),
                End::Retry => {
                    self.end_rest();
                    self.write_state(image)?;
                    Ok(Next::Again)
                }
            };
        }
        if self.is_left() {
            return self.stay_suspended(image);
        }
        let served = self.serve(image, false);
        if served.is_err() {
            self.record_never_open(image);
        }
        Ok(self.next(served?))
    }

    /// The next step when serving has ended.
    pub(crate) fn next(&self, served: Outcome) -> Next {
        match served {
            Outcome::Unplugged => Next::Gone,
            Outcome::Stopped | Outcome::Left if self.ends() => Next::Ended,
            // The worker has closed the image.
            Outcome::Stopped | Outcome::Left => Next::Again,
        }
    }

    /// Whether this thread has to end. If not, its waker is cleared for the next reason.
    pub(crate) fn ends(&self) -> bool {
        self.shared.table.wake_reason(self.id) == WakeReason::End
    }

    /// Marks the disk: a predecessor's files are removed when the toolstack has removed the
    /// directory.
    pub(crate) fn add_unswept(&self) {
        let unswept = self.shared.unswept.lock();
        unswept.unwrap_or_else(PoisonError::into_inner).push(self.id);
    }

    /// Whether this thread has to end. Waits for that for the time `within`.
    pub(crate) fn is_stopped(&self, within: Duration) -> bool {
        let [woken] = wait_for([self.stop.fd()], Some(within));
        woken && self.ends()
    }

    pub(crate) fn serve(&mut self, image: &Image, resumes: bool) -> Result<Outcome, Failure> {
        self.shared.table.change(self.id, |entry| entry.starts += 1);
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        if !self.is_attached(&mut store)? {
            self.add_unswept();
            return Ok(Outcome::Unplugged);
        }
        let checked = self.check_folder(image);
        if checked.is_ok() {
            self.stand_beside(&mut store)?;
        }
        // This comes before the disk is served or state 2 is written: the next daemon has to find
        // it.
        // A pause that is requested just now is written when the image is closed.
        let pause = if resumes { self.pause() } else { None };
        self.write_state_with(image, pause)?;
        self.may_begin = true;
        (self.shared.on_step)(Step::StateWritten);
        checked?;
        let beside = self.beside();
        let is_alone = beside.is_none() && !self.suspend_earlier(&mut store)?;
        let defers = is_alone && !resumes && self.comes_from_another_host(&mut store, image)?;
        let qemu_first = directory::qemu_opens(&mut store, self.id, image.format)
            .map_err(|e| Failure::store(&e))?;
        let assignment = Assignment {
            id: self.id,
            backend: directory::path(self.id),
            guest: self.id,
            ahead: None,
            image: image.clone(),
            options: self.shared.config.of_image(&image.path).clone(),
            qemu_first,
            defers,
            minor: self.minor,
            attached: self.attached.clone(),
            mirror: self.shared.jobs.mirror_of(image),
            changes: None,
            resumes,
            told_sectors: self.told_sectors(&mut store)?,
            shared: &self.shared,
        };
        let serving = &self.shared.serving;
        // A disk that goes on has a guest that waits; one that is beside another opens nothing.
        if beside.is_none() && !resumes {
            self.shared.openings.enter(self.id, &self.stop);
        }
        let served = match beside {
            None => serving.serve(&assignment, &mut store, &self.stop),
            Some(first) => serving.serve_beside(&assignment, first, &mut store, &self.stop),
        };
        self.shared.openings.leave(self.id);
        // The attachment may have begun. If it has not, the next thread begins anew.
        if self.was_open() {
            self.attached = ExpectedAttachment::Begun;
        }
        served
    }

    /// Whether xenstore still holds this thread's attachment.
    fn is_attached(&mut self, store: &mut Store) -> Result<bool, Failure> {
        let seen = Snapshot::read(store, self.id).map_err(|e| Failure::store(&e))?;
        let is_attached = seen.is_of(&self.attached);
        if is_attached && seen.has_begun() {
            self.attached = ExpectedAttachment::Begun;
        }
        Ok(is_attached)
    }

    /// Removes everything of an older disk of this name: its worker, its tables and its state file.
    /// It comes before the new disk is announced. The next daemon would take the old state for the
    /// new disk's.
    fn remove_older(&mut self, task: &Task) -> Result<(), Failure> {
        if self.has_older {
            let older = self.shared.states.read(self.id).map_err(|e| self.state_failure(&e))?;
            if let Some(first) = older.and_then(|older| older.beside) {
                self.shared.serving.part(self.id, first)?;
            }
            self.shared.serving.remove_older(self.id)?;
            self.shared.names.unlink(&self.shared.paths, self.id);
            remove_run_dir(&self.run_dir()).map_err(|e| Failure {
                why: format!("cannot remove what an older disk of this name has left: {e}"),
                help: "ferrite tries again; its storage may be slow".to_owned(),
            })?;
            self.shared.states.try_remove(self.id).map_err(|e| self.state_failure(&e))?;
            self.has_older = false;
        }
        self.may_begin |= !matches!(task, Task::Serve(_));
        Ok(())
    }

    fn run_dir(&self) -> PathBuf {
        self.shared.paths.run.join(self.id.file_name())
    }

    /// Whether the disk was served until now.
    fn was_served(&self) -> bool {
        let phase = |entry: &Entry| entry.phase == Phase::Served;
        self.shared.table.read(|disks| disks.get(&self.id).is_some_and(phase))
    }

    pub(crate) fn was_open(&self) -> bool {
        self.shared.table.read(|disks| disks.get(&self.id).is_none_or(|entry| entry.was_open))
    }

    /// Writes the state file of a served disk.
    pub(crate) fn write_state(&self, image: &Image) -> Result<(), Failure> {
        self.write_state_with(image, self.pause())
    }

    fn write_state_with(&self, image: &Image, pause: Option<Pause>) -> Result<(), Failure> {
        let written = self.shared.states.write(&self.state(image, pause));
        written.map_err(|e| self.shared.state_failure(&e))
    }

    /// The state of a served disk with this image.
    pub(crate) fn state(&self, image: &Image, pause: Option<Pause>) -> DiskState {
        let state = DiskState::new(self.id, image, self.minor).with_tap(self.tap());
        let state = state.beside(self.beside()).paused(pause).tuned(self.tune());
        state.leaving(self.left()).with_new_leaf(self.new_leaf())
    }

    /// The further state of a tap.
    pub(crate) fn tap(&self) -> Option<TapState> {
        self.shared.table.read(|disks| disks.get(&self.id)?.tap.clone())
    }

    fn new_leaf(&self) -> Option<NewLeaf> {
        self.shared.table.read(|disks| disks.get(&self.id)?.new_leaf.clone())
    }

    /// The settings of the running disk.
    pub(crate) fn tune(&self) -> Tune {
        let of_entry = |entry: &Entry| entry.tune.clone();
        self.shared.table.read(|disks| disks.get(&self.id).map(of_entry)).unwrap_or_default()
    }

    /// Notes in the state file that the image was never open. The next daemon may then announce the
    /// end of a disk whose image it cannot open.
    fn record_never_open(&self, image: &Image) {
        let is_known = self.beside().is_some() || self.pause().is_some();
        if !self.may_begin || !self.is_untouched || self.was_open() || is_known {
            return;
        }
        let state = DiskState::new(self.id, image, self.minor).never_open().tuned(self.tune());
        if let Err(e) = self.shared.states.write(&state) {
            tracing::debug!("disk {}: its state stays as it was: {e}", self.id);
        }
    }

    pub(crate) fn state_failure(&self, e: &std::io::Error) -> Failure {
        self.shared.state_failure(e)
    }

    /// Checks that an export's server is one of the configured ones. Only the worker connects to it.
    fn check_server(&self, uri: &Uri) -> Result<(), Failure> {
        // The storage manager that opened the tap has named its image.
        let of_tap = self.beside().is_some_and(DiskId::is_tap);
        if !of_tap {
            self.shared.config.check_export(uri)?;
        }
        let place = place_of(uri);
        self.shared.table.change(self.id, |entry| entry.real = Some(place));
        Ok(())
    }

    /// Checks that the image is in one of the configured directories. Links are resolved first.
    fn check_folder(&self, image: &Image) -> Result<(), Failure> {
        if let Some(uri) = image.export() {
            return self.check_server(&uri);
        }
        let path = image.path.display();
        let real = image.file().canonicalize().map_err(|e| Failure {
            why: format!("cannot open {path}: {e}"),
            help: "correct the disk's target, or create the image; ferrite tries again".to_owned(),
        })?;
        // A volume may be named by a link in an allowed directory.
        // The storage manager that opened the tap has named its image.
        let of_tap = self.beside().is_some_and(DiskId::is_tap);
        match of_tap || self.shared.config.allows(&real) {
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
        let may = AllowedStates { begin: self.may_begin, offer: failure.is_none(), announce };
        answer(&mut store, self.id, may, &mut self.attached, how_long, &self.stop)
    }

    /// Writes to xenstore why the disk is not served. An error of xenstore is ignored.
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

    pub(crate) fn log_failure(&mut self, failure: Option<&Failure>) {
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

/// Notes the end of a disk's thread when dropped, also after a panic.
pub(crate) struct Ending {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: DiskId,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.shared.table.mark_ended(self.id);
        self.shared.wake.wake();
    }
}

fn refused(why: &str) -> Failure {
    Failure {
        why: why.to_owned(),
        help: "detach the disk, correct its target and attach it again".to_owned(),
    }
}
