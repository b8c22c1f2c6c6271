//! A paused disk: its image is closed, and its guest and clients of NBD wait without limit.
//!
//! Another program may change the image meanwhile, and the disk may go on with another one. The
//! order of steps:
//! 1. The worker answers the requests in flight, writes tables and journal back, and closes the image.
//! 2. The state file says that the disk is paused. From here on no worker opens an image, whichever
//!    process ends. If the file cannot be written, the disk goes on.
//! 3. To go on, the state file names the next image. The disk is paused still.
//! 4. A worker opens that image. If it cannot, the state file names the image before.
//! 5. The state file says that the disk is not paused any more. Then the guest is served.
//!
//! So a successor finds a paused disk, or one whose guest writes to the image that is named.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ferrite_serve::blkif::negotiate::DiskFacts;
use ferrite_xen::store::Store;
use serde::{Deserialize, Serialize};

use crate::follow::{Follower, Next};
use crate::params::Image;
use crate::state::{DiskId, DiskState, States};
use crate::table::{Entry, Phase, Upgrade, detached};
use crate::unserved::{AllowedStates, End, answer};
use crate::{Failure, Shared, Step, directory};

/// A pause that lasts longer is a warning.
pub const LONG: Duration = Duration::from_secs(60);
/// How often it is tried to end a pause that was a step of an operation of the daemon before, and the time between
/// tries. A program that this daemon started may have the image still.
const TRIES_AFTER_A_RESTART: u32 = 50;
const AGAIN: Duration = Duration::from_millis(200);
/// Most characters of the name of the person or operation that pauses a disk.
const BY: usize = 200;

/// A pause, as the state file has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pause {
    /// The time of the request, in seconds since 1970.
    pub since: u64,
    /// The user or program that has requested it.
    pub by: String,
    /// Whether it is a step of an operation of the daemon. The next daemon ends the pause: each
    /// operation leaves an image that can be served, wherever it is interrupted.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_step: bool,
    /// The image that the disk could not go on with last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refused: Option<Image>,
}

impl Pause {
    /// A pause that begins now and lasts until a client ends it.
    pub fn by(by: &str) -> Pause {
        let by = by.chars().filter(|c| !c.is_control()).take(BY).collect();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        Pause { since, by, is_step: false, refused: None }
    }

    /// A pause that ends with the operation `by`.
    pub(crate) fn step_of(by: &str) -> Pause {
        Pause { is_step: true, ..Pause::by(by) }
    }
}

/// The end of a pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Resume {
    /// It was not requested.
    #[default]
    None,
    /// The disk is to go on with this image.
    Requested(Image),
    /// The disk could not go on, and is paused as before; or it could not be paused, and goes on.
    Failed(Failure),
}

impl Resume {
    /// The request of the next daemon for a disk of this state.
    pub(crate) fn after_a_restart(state: &DiskState) -> Resume {
        match &state.pause {
            Some(pause) if pause.is_step => Resume::Requested(state.image()),
            _ => Resume::None,
        }
    }

    /// How often the next daemon tries that.
    pub(crate) fn tries_after_a_restart(state: &DiskState) -> u32 {
        match Resume::after_a_restart(state) {
            Resume::Requested(_) => TRIES_AFTER_A_RESTART,
            _ => 0,
        }
    }
}

/// Why a disk is not paused or does not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotDone {
    /// There is no such disk.
    NoDisk,
    /// It did not end in time.
    NotInTime(Failure),
    /// It failed.
    Failed(Failure),
}

fn refuse(why: String, help: &str) -> NotDone {
    NotDone::Failed(Failure { why, help: help.to_owned() })
}

/// Pauses a disk, and waits until its image is closed. A disk that is paused already stays so.
///
/// # Errors
/// The disk goes on as before.
pub(crate) fn pause(
    shared: &Shared,
    id: DiskId,
    pause: &Pause,
    within: Duration,
) -> Result<(), NotDone> {
    pause_and(shared, id, pause, within, |_| ())
}

/// As [`pause`]. `note` changes the entry together with the request, so the state file that has the
/// pause has that, too.
pub(crate) fn pause_and(
    shared: &Shared,
    id: DiskId,
    pause: &Pause,
    within: Duration,
    note: impl FnOnce(&mut Entry),
) -> Result<(), NotDone> {
    let mut asked = Err(NotDone::NoDisk);
    shared.table.change(id, |entry| {
        asked = request(entry, pause);
        if asked.is_ok() {
            note(entry);
        }
    });
    asked?;
    let done = shared.table.wait_for(within, |disks| match disks.get(&id) {
        None => Some(Err(NotDone::Failed(detached()))),
        Some(entry) if entry.phase == Phase::Paused => Some(Ok(())),
        Some(entry) => match (&entry.pause, &entry.resume) {
            (None, Resume::Failed(failure)) => Some(Err(NotDone::Failed(failure.clone()))),
            _ => None,
        },
    });
    done.unwrap_or_else(|| {
        let mut is_paused = false;
        shared.table.change(id, |entry| {
            is_paused = entry.phase == Phase::Paused;
            if !is_paused {
                entry.pause = None;
                entry.wake();
            }
        });
        if is_paused {
            return Ok(());
        }
        Err(NotDone::NotInTime(Failure {
            why: format!(
                "requests that are under way have not ended within {} s; the disk goes on as before",
                within.as_secs()
            ),
            help: "its storage is slow or does not answer (dmesg); try again, or allow more time \
                   with --timeout"
                .to_owned(),
        }))
    })
}

/// Records the request of a pause.
fn request(entry: &mut Entry, pause: &Pause) -> Result<(), NotDone> {
    if let Some(known) = &entry.pause {
        return match known.is_step || pause.is_step {
            false => Ok(()),
            true => Err(refuse(
                format!("it is paused by {}", known.by),
                "try again when that has ended; ferrite disk show has the state",
            )),
        };
    }
    if let Some(first) = entry.beside {
        let why = format!("it is a stub domain's and served with disk {first}");
        return Err(refuse(why, "pause that disk: this one waits with it"));
    }
    match &entry.phase {
        Phase::Served | Phase::Starting => {}
        Phase::Failed(failure) => {
            return Err(refuse(format!("it is not served: {}", failure.why), &failure.help));
        }
        Phase::Empty => return Err(refuse("it is an empty drive".to_owned(), "nothing to pause")),
        Phase::Resting(later) => {
            let why = format!("disk {later} of the same VM has its image");
            return Err(refuse(why, "pause that disk"));
        }
        Phase::Suspended => {
            let why = "its guest is suspended, and its image closed".to_owned();
            return Err(refuse(why, "try again when the guest runs"));
        }
        Phase::Paused => {}
    }
    entry.pause = Some(pause.clone());
    entry.resume = Resume::None;
    entry.wake();
    Ok(())
}

/// Lets a paused disk go on, with `image` if one is named, and waits until it is open.
///
/// # Errors
/// The disk stays paused, unless it is not.
pub(crate) fn resume(
    shared: &Shared,
    id: DiskId,
    image: Option<Image>,
    of_step: bool,
    within: Duration,
) -> Result<(), NotDone> {
    resume_by(shared, id, image, of_step, of_step, within)
}

/// As [`resume`]. `by_job`: the job that changes the disk's images asks.
pub(crate) fn resume_by(
    shared: &Shared,
    id: DiskId,
    image: Option<Image>,
    of_step: bool,
    by_job: bool,
    within: Duration,
) -> Result<(), NotDone> {
    let job = shared.jobs.of_disk(id).filter(|_| !by_job);
    let mut asked = Err(NotDone::NoDisk);
    shared.table.change(id, |entry| {
        if let (Some(job), true) = (job, image.is_some() && image != entry.image) {
            let help = format!("wait for it (ferrite job wait {job}), cancel it, or name no image");
            asked = Err(refuse(format!("job {job} changes the images of this disk"), &help));
            return;
        }
        asked = match (&entry.pause, image.or_else(|| entry.image.clone())) {
            (None, _) => {
                Err(refuse("it is not paused".to_owned(), "ferrite disk list shows the disks"))
            }
            (Some(pause), _) if pause.is_step != of_step => Err(refuse(
                format!("it is paused by {}, which ends the pause itself", pause.by),
                "try again when that has ended",
            )),
            (Some(_), None) => Err(refuse("it has no image".to_owned(), "name one")),
            (Some(_), Some(image)) => {
                entry.resume = Resume::Requested(image);
                entry.wake();
                Ok(())
            }
        };
    });
    asked?;
    let done = shared.table.wait_for(within, |disks| match disks.get(&id) {
        None => Some(Err(NotDone::Failed(detached()))),
        Some(entry) => match &entry.resume {
            Resume::Requested(_) => None,
            Resume::Failed(failure) => Some(Err(NotDone::Failed(failure.clone()))),
            Resume::None => (entry.phase == Phase::Served).then_some(Ok(())),
        },
    });
    done.unwrap_or_else(|| {
        Err(NotDone::NotInTime(Failure {
            why: "its image is still being opened".to_owned(),
            help: "look again later: ferrite disk show".to_owned(),
        }))
    })
}

/// Whether a paused disk's guest can go on with a disk of these facts.
pub(crate) fn fits(told_sectors: Option<u64>, facts: &DiskFacts) -> Result<(), Failure> {
    match told_sectors {
        Some(told) if told > facts.sectors => Err(Failure {
            why: format!(
                "it has {} sectors, and its guest knows of {told}; a disk cannot shrink in use",
                facts.sectors
            ),
            help: "resume it with an image that is no smaller".to_owned(),
        }),
        _ => Ok(()),
    }
}

impl Shared {
    pub(crate) fn state_failure(&self, e: &std::io::Error) -> Failure {
        Failure {
            why: format!("cannot write the disk's state to {}: {e}", self.paths.states().display()),
            help: "make room on the file system of /run".to_owned(),
        }
    }

    fn record_failure(&self, e: &std::io::Error) -> Failure {
        let folder = self.config.state_folder.display();
        Failure {
            why: format!("cannot record in {folder} which image the disk has: {e}"),
            help: "mend that folder, or name another one (state_folder), and try again".to_owned(),
        }
    }

    /// Records that the disk goes on with this image: first in the state file.
    pub(crate) fn end_pause(&self, id: DiskId, image: &Image, minor: u32) -> Result<(), Failure> {
        let of_entry =
            |entry: &Entry| (entry.tune.clone(), entry.tap.clone(), entry.new_leaf.clone());
        let (tune, tap, leaf) =
            self.table.read(|disks| disks.get(&id).map(of_entry)).unwrap_or_default();
        let state = DiskState::new(id, image, minor).tuned(tune).with_tap(tap).with_new_leaf(leaf);
        // A predecessor may have died between its record of a switch and the switch.
        if !id.is_tap()
            && let Err(e) = self.switched.settle(image)
        {
            // The guest is not to wait for that.
            tracing::error!("disk {id}: {}", self.record_failure(&e));
        }
        self.states.write(&state).map_err(|e| self.state_failure(&e))?;
        self.table.change(id, |entry| {
            (entry.pause, entry.resume) = (None, Resume::None);
            (entry.resumed, entry.tries) = (entry.resumed + 1, 0);
        });
        Ok(())
    }
}

impl Follower {
    /// The pause of this disk, from its request on.
    pub(crate) fn pause(&self) -> Option<Pause> {
        self.shared.table.read(|disks| disks.get(&self.id)?.pause.clone())
    }

    /// The size that the guest was told, if the disk is paused.
    pub(crate) fn told_sectors(&self, store: &mut Store) -> Result<Option<u64>, Failure> {
        if self.pause().is_none() {
            return Ok(None);
        }
        let told = store.read_string(&format!("{}/sectors", directory::path(self.id)));
        Ok(told.map_err(|e| Failure::store(&e))?.and_then(|told| told.parse().ok()))
    }

    /// Keeps the disk paused until its thread is woken, or lets it go on.
    pub(crate) fn stay_paused(&mut self, image: &Image) -> Result<Next, Failure> {
        let requested =
            || match self.shared.table.read(|disks| Some(disks.get(&self.id)?.resume.clone())) {
                Some(Resume::Requested(next)) => Some(next),
                _ => None,
            };
        // The request may have come before this thread slept. Its wake would end serving at once.
        if requested().is_some() && self.ends() {
            return Ok(Next::Ended);
        }
        if let Some(next) = requested() {
            return self.go_on_with(&next, image);
        }
        let keeper = self.shared.serving.close(self.id, &self.stop)?;
        self.shared.table.change(self.id, |entry| entry.pid = keeper.or(entry.pid));
        // The storage manager reads the log while the tap is paused.
        if let Err(failure) = self.end_log() {
            return self.cannot_pause(failure);
        }
        // The next daemon must not open an image that another program may change.
        if let Err(failure) = self.write_state(image) {
            return self.cannot_pause(failure);
        }
        self.may_begin = true;
        self.upgrade_closed();
        (self.shared.on_step)(Step::Paused);
        self.shared.table.set(self.id, Phase::Paused);
        let Some(pause) = self.pause() else { return Ok(Next::Again) };
        if let Some(tap) = self.tap() {
            return self.wait_paused_tap(image, tap.guest);
        }
        tracing::info!("disk {} is paused by {}", self.id, pause.by);
        self.wait_paused(&pause)
    }

    /// Withdraws a pause that no state file has: the next daemon would open the image.
    fn cannot_pause(&self, failure: Failure) -> Result<Next, Failure> {
        let known = States::peek(&self.shared.paths.states(), self.id);
        if known.is_none_or(|state| state.pause.is_some()) {
            return Err(failure);
        }
        self.shared.table.change(self.id, |entry| {
            (entry.pause, entry.resume) = (None, Resume::Failed(failure));
        });
        // The reason that has ended serving is gone. A later one is looked at before serving again.
        Ok(if self.ends() { Next::Ended } else { Next::Again })
    }

    /// Answers the toolstack until the thread is woken or the disk is detached.
    fn wait_paused(&mut self, pause: &Pause) -> Result<Next, Failure> {
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        self.report(&mut store, None);
        let may = AllowedStates { begin: true, offer: false, announce: true };
        let mut attached = self.attached.clone();
        let mut within = Some(LONG);
        loop {
            let end = answer(&mut store, self.id, may, &mut attached, within, &self.stop);
            return Ok(match end.map_err(|e| Failure::store(&e))? {
                End::Retry => {
                    let (id, by) = (self.id, &pause.by);
                    tracing::warn!(
                        "disk {id} is paused by {by} for more than {} s, and its guest waits; to end \
                         that: ferrite disk resume {id}",
                        LONG.as_secs()
                    );
                    within = None;
                    continue;
                }
                End::Detached | End::Another => {
                    self.add_unswept();
                    Next::Gone
                }
                End::Stopped if self.ends() => Next::Ended,
                End::Stopped => {
                    self.attached = attached;
                    Next::Again
                }
            });
        }
    }

    /// Replaces the program of a disk that has no image open.
    fn upgrade_closed(&self) {
        let mut requested = None;
        self.shared.table.change(self.id, |entry| {
            if let Upgrade::Requested(binary) = &entry.upgrade {
                requested = Some(binary.clone());
            }
        });
        let Some(binary) = requested else { return };
        let outcome = self.shared.serving.upgrade_closed(self.id, &binary);
        self.shared.table.change(self.id, |entry| {
            (entry.upgrade, entry.participant) = (Upgrade::Done(outcome), None);
        });
    }

    fn resumed(&self) -> Option<u64> {
        self.shared.table.read(|disks| Some(disks.get(&self.id)?.resumed))
    }

    /// Records that disks with the image `from` have `to` now, if that is another one.
    fn record_switch(&self, from: &Image, to: &Image) -> Result<(), Failure> {
        // The storage manager of a tap names its images itself.
        if from == to || self.id.is_tap() {
            return Ok(());
        }
        self.shared.switched.record(from, to).map_err(|e| self.shared.record_failure(&e))
    }

    /// Whether it is tried again to end the pause of an operation of the daemon before. Nothing else ends that pause.
    fn is_tried_again(&self) -> bool {
        let mut is_tried = false;
        self.shared.table.change(self.id, |entry| {
            let is_step = entry.pause.as_ref().is_some_and(|pause| pause.is_step);
            is_tried = is_step && entry.tries > 0;
            entry.tries -= u32::from(is_tried);
        });
        is_tried
    }

    /// Serves a paused disk with the image `next`. If that cannot be opened, the disk stays paused
    /// with the image `before`.
    fn go_on_with(&mut self, next: &Image, before: &Image) -> Result<Next, Failure> {
        self.shared.table.change(self.id, |entry| {
            (entry.image, entry.real) = (Some(next.clone()), None);
        });
        self.shared.table.set(self.id, Phase::Starting);
        self.shared.prepare_raw(self.id, next);
        // A guest that is started again by the same configuration gets the image that it has written
        // last, so this is recorded before it can write. A record of an image that was not opened is
        // taken back.
        let recorded = self.record_switch(before, next);
        (self.shared.on_step)(Step::Recorded);
        let resumed = self.resumed();
        let served = recorded.and_then(|()| match self.id.is_tap() {
            true => self.serve_tap(next, true),
            false => self.serve(next, true).map(|outcome| self.next(outcome)),
        });
        // There may be another pause by now.
        if self.resumed() != resumed {
            return served;
        }
        let failure = match served {
            Err(failure) => failure,
            Ok(next) => match next {
                Next::Again => Failure {
                    why: "the request was withdrawn".to_owned(),
                    help: "try again".to_owned(),
                },
                next => return Ok(next),
            },
        };
        if next == before && self.is_tried_again() {
            tracing::debug!("disk {} does not go on yet: {failure}", self.id);
            return Ok(if self.is_stopped(AGAIN) { Next::Ended } else { Next::Again });
        }
        if let Err(e) = self.record_switch(next, before) {
            tracing::error!("disk {}: {e}", self.id);
        }
        self.shared.table.change(self.id, |entry| {
            (entry.image, entry.real) = (Some(before.clone()), None);
            if let Some(pause) = &mut entry.pause {
                // From here on the administrator ends the pause: the operation may have ended.
                pause.is_step = false;
                pause.refused = Some(next.clone());
            }
        });
        // The next daemon tells of the failure, too. If it cannot be written, the disk is paused all
        // the same.
        if let Err(e) = self.write_state(before) {
            tracing::warn!("disk {}: {e}", self.id);
        }
        self.shared.table.change(self.id, |entry| entry.resume = Resume::Failed(failure));
        Ok(Next::Again)
    }
}
