//! The thread of an open tap: it serves clients of NBD and the guest that has joined, as the thread
//! of each disk does, and goes on when the guest leaves.

use std::path::PathBuf;
use std::time::Duration;

use ferrite_serve::blkif::lifecycle::{Ahead, ExpectedAttachment, Outcome, remove_run_dir};

use super::errno::{check, errno_of};
use super::{TapError, empty, logs, motion};
use crate::directory::{self, Snapshot};
use crate::follow::{Ending, Follower, Next, RETRY, RETRY_MAX};
use crate::params::Image;
use crate::state::{DiskId, DiskState, TapState};
use crate::table::{Phase, WakeReason};
use crate::unserved::{AllowedStates, End, answer};
use crate::wait::{Backoff, wait_for};
use crate::{Assignment, Failure, Step};

impl Follower {
    /// Runs until the tap is closed or the daemon stops.
    pub(crate) fn run_tap(mut self) {
        let _end = Ending { shared: self.shared.clone(), id: self.id };
        let mut backoff = Backoff::new(RETRY, RETRY_MAX);
        let mut last = None;
        loop {
            let Some(image) = self.image() else { return };
            match self.serve_tap_once(&image) {
                Ok(Next::Gone) => return,
                Ok(Next::Ended) => return,
                Ok(Next::Again) => last = None,
                Err(failure) => {
                    let [woken] = wait_for([self.stop.fd()], Some(Duration::ZERO));
                    match self.shared.table.wake_reason(self.id) {
                        WakeReason::End => return,
                        _ if woken => continue,
                        _ => {}
                    }
                    if last.as_ref() != Some(&failure) {
                        self.log_failure(Some(&failure));
                        last = Some(failure.clone());
                    }
                    self.shared.table.set(self.id, Phase::Failed(failure));
                    if self.is_stopped(backoff.after(false)) {
                        return;
                    }
                }
            }
        }
    }

    /// Closes the tap, keeps it paused, serves its guest, or keeps it open without one, until the
    /// thread is woken.
    fn serve_tap_once(&mut self, image: &Image) -> Result<Next, Failure> {
        if self.shared.table.read(|disks| disks.get(&self.id).is_some_and(|tap| tap.closes())) {
            return self.close_tap(image).map(|()| Next::Gone);
        }
        if self.pause().is_some() {
            return self.stay_paused(image);
        }
        self.serve_tap(image, false)
    }

    /// Serves an open tap until the thread is woken or its guest leaves.
    pub(crate) fn serve_tap(&mut self, image: &Image, resumes: bool) -> Result<Next, Failure> {
        let Some(tap) = self.tap() else { return Ok(Next::Ended) };
        if resumes {
            check(image).map_err(|e| self.not_opened(e))?;
        }
        let real = image.real_file();
        self.shared.table.change(self.id, |entry| {
            entry.starts += 1;
            entry.errno = None;
            entry.real = real;
        });
        // The next daemon has to find the tap, and its guest, before either is served.
        let state = self.state(image, self.pause());
        self.shared.states.write(&state).map_err(|e| {
            let errno = errno_of(&e);
            self.not_opened(TapError { errno, failure: self.state_failure(&e) })
        })?;
        (self.shared.on_step)(Step::StateWritten);
        // Before a worker opens the image: no write may be missing in the log.
        let changes = logs::begin(&self.shared, self.id, &tap).map_err(|e| self.not_opened(e))?;
        let served = match tap.guest {
            None => {
                let disk = self.tap_assignment(image, (&tap, changes), self.id, resumes, None);
                self.shared.serving.hold(&disk, &self.stop)?
            }
            Some(guest) => self.serve_guest(image, (&tap, changes), guest, resumes)?,
        };
        match (served, tap.guest) {
            (Outcome::Unplugged, Some(guest)) => {
                tracing::info!("disk {guest} has left {}", self.id);
                self.guest_left(image)?;
                Ok(Next::Again)
            }
            (served, _) => Ok(self.next(served)),
        }
    }

    fn serve_guest(
        &mut self,
        image: &Image,
        tap: (&TapState, Option<PathBuf>),
        guest: DiskId,
        resumes: bool,
    ) -> Result<Outcome, Failure> {
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        let seen = Snapshot::read(&mut store, guest).map_err(|e| Failure::store(&e))?;
        if !seen.is_there {
            return Ok(Outcome::Unplugged);
        }
        self.attached = match seen.has_begun() {
            true => ExpectedAttachment::Begun,
            false => ExpectedAttachment::New(seen.params.unwrap_or_default()),
        };
        let told = match resumes {
            true => store.read_string(&format!("{}/sectors", directory::path(guest))),
            false => Ok(None),
        };
        let told = told.map_err(|e| Failure::store(&e))?.and_then(|told| told.parse().ok());
        let disk = self.tap_assignment(image, tap, guest, resumes, told);
        self.shared.serving.serve(&disk, &mut store, &self.stop)
    }

    fn tap_assignment(
        &self,
        image: &Image,
        (tap, changes): (&TapState, Option<PathBuf>),
        guest: DiskId,
        resumes: bool,
        told_sectors: Option<u64>,
    ) -> Assignment<'_> {
        Assignment {
            id: self.id,
            backend: directory::path(guest),
            guest,
            ahead: Some(Ahead { read_only: tap.read_only, toolstack_locks: !tap.is_own }),
            image: image.clone(),
            options: self.shared.config.of_image(&image.path).clone(),
            qemu_first: false,
            defers: false,
            minor: self.minor,
            attached: self.attached.clone(),
            mirror: motion::spec(&self.shared, self.id, tap)
                .or_else(|| self.shared.jobs.mirror_of(image)),
            changes,
            resumes,
            told_sectors,
            shared: &self.shared,
        }
    }

    /// Keeps a tap paused until its thread is woken, and answers the toolstack for its guest.
    pub(crate) fn wait_paused_tap(
        &mut self,
        image: &Image,
        guest: Option<DiskId>,
    ) -> Result<Next, Failure> {
        let Some(guest) = guest else {
            wait_for([self.stop.fd()], None);
            return Ok(if self.ends() { Next::Ended } else { Next::Again });
        };
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        let may = AllowedStates { begin: false, offer: false, announce: true };
        let mut attached = ExpectedAttachment::Any;
        let end = answer(&mut store, guest, may, &mut attached, None, &self.stop);
        match end.map_err(|e| Failure::store(&e))? {
            End::Detached | End::Another => self.guest_left(image).map(|()| Next::Again),
            End::Stopped if self.ends() => Ok(Next::Ended),
            End::Stopped | End::Retry => Ok(Next::Again),
        }
    }

    /// Records that the tap's guest has left. Another one may join.
    pub(crate) fn guest_left(&self, image: &Image) -> Result<(), Failure> {
        self.shared.table.change(self.id, |entry| {
            entry.tap.iter_mut().for_each(|tap| tap.guest = None);
        });
        // The directory may be removed now, which the main thread does.
        self.shared.wake.wake();
        self.write_state(image)
    }

    /// Closes the tap's image. The order:
    /// 1. The worker writes everything back and closes.
    /// 2. The log gets the changed blocks.
    /// 3. The state file says that the tap is closed, so that no successor opens the image.
    /// 4. The keeper forgets it.
    fn close_tap(&self, image: &Image) -> Result<(), Failure> {
        self.shared.serving.close(self.id, &self.stop)?;
        self.end_log()?;
        motion::end(&self.shared, self.id);
        let tap = self.tap().map(|tap| TapState {
            closed: true,
            guest: None,
            log: None,
            mirror: None,
            ..tap
        });
        let state = DiskState::new(self.id, image, self.minor).with_tap(tap);
        self.shared.states.write(&state).map_err(|e| self.state_failure(&e))?;
        (self.shared.on_step)(Step::Forgotten);
        empty(&self.shared, self.id)?;
        self.shared.taps.set_closed(self.id, true);
        tracing::info!("{} is closed", self.id);
        Ok(())
    }

    /// Puts the changed blocks of a tap whose image is closed into its log.
    pub(crate) fn end_log(&self) -> Result<(), Failure> {
        self.tap().map_or(Ok(()), |tap| logs::end(&self.shared, self.id, &tap))
    }

    /// Removes what a tap has left that is detached.
    pub(crate) fn forget_tap(shared: &crate::Shared, id: DiskId) {
        shared.serving.remove(id);
        logs::salvage(shared, id);
        motion::end(shared, id);
        shared.taps.passed.forget(id.devid);
        shared.names.unlink(&shared.paths, id);
        let run_dir = shared.paths.run.join(id.file_name());
        if let Err(e) = remove_run_dir(&run_dir) {
            tracing::warn!("cannot remove {} yet: {e}", run_dir.display());
        }
        shared.states.remove(id);
    }
}
