//! Two attachments of one disk at a time, in two domains that are one VM: a migration within this
//! host (attachments.md).
//!
//! The earlier one drains its requests, completes and closes the image, and rests. Only then the
//! later one opens the image. So no old write comes after a new one.
//!
//! When the later one is gone, the earlier one is served again: a failed migration goes back to its
//! source. It is not if the target has run: the source's guest does not know what the target has
//! written.

use std::time::{Duration, Instant};

use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;

use crate::directory::Snapshot;
use crate::follow::Follower;
use crate::state::{DiskId, DiskState};
use crate::table::{Entry, Phase};
use crate::unserved::{End, stand_in};
use crate::{Failure, params::Image};

/// How long the later attachment waits for the earlier one at a time. The toolstack gives it ten
/// seconds.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(8);
/// How often the state of the other attachment and the daemon's stop are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Whether two domains are one VM: the toolstack gives both the same identifier.
fn same_vm(store: &mut Store, a: DiskId, b: DiskId) -> Result<bool, StoreError> {
    let mut vm = |id: DiskId| match store.read(&format!("/local/domain/{}/vm", id.domid)) {
        // A driver domain may not read it. Then no two domains are taken for one VM.
        Err(StoreError::Access { .. }) => Ok(None),
        vm => vm,
    };
    let (a, b) = (vm(a)?, vm(b)?);
    Ok(a.is_some_and(|vm| !vm.is_empty() && b == Some(vm)))
}

/// What xl appends to the name of a migration's target, until the target may run.
pub(crate) const INCOMING: &str = "--incoming";
/// What xl appends to the name of a migration's source, just before the target may run.
const AWAY: &str = "--migratedaway";

pub(crate) fn name(store: &mut Store, id: DiskId) -> Result<String, StoreError> {
    match store.read(&format!("/local/domain/{}/name", id.domid)) {
        Err(StoreError::Access { .. }) => Ok(String::new()),
        name => Ok(String::from_utf8_lossy(&name?.unwrap_or_default()).into_owned()),
    }
}

/// Whether the toolstack moves a VM from one domain to the other. The identifier is not enough: a
/// copied configuration has the same one, and both guests may run.
fn is_move(store: &mut Store, from: DiskId, to: DiskId) -> Result<bool, StoreError> {
    let (source, target) = (name(store, from)?, name(store, to)?);
    let is_of = |name: &str| target.strip_suffix(INCOMING) == Some(name);
    Ok((is_of(&source) || source.strip_suffix(AWAY).is_some_and(is_of))
        && same_vm(store, from, to)?)
}

/// The failure of a disk whose guest must not go on.
fn outdated(later: DiskId) -> Failure {
    Failure {
        why: format!(
            "the guest was moved to the domain of disk {later}, which may have written to the image \
             and is gone: this domain would go on with outdated data in its memory"
        ),
        help: "destroy this domain (xl destroy), and start the guest anew".to_owned(),
    }
}

impl Follower {
    /// Lets the earlier attachment of the same disk rest, if there is one, before the image is
    /// opened. An attachment is earlier if its guest is connected and this one's is not. Returns
    /// whether there is one.
    pub(crate) fn suspend_earlier(&self, store: &mut Store) -> Result<bool, Failure> {
        while let Some(earlier) = self.earlier(store).map_err(|e| Failure::store(&e))? {
            if self.request_rest(earlier)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn earlier(&self, store: &mut Store) -> Result<Option<DiskId>, StoreError> {
        if Snapshot::read(store, self.id)?.own > XenbusState::InitWait {
            return Ok(None);
        }
        // The paths are compared without resolving them: hanging storage of another disk would
        // block all.
        let mut others = self.shared.table.sharers(self.id);
        others.retain(|id| id.domid != self.id.domid);
        for id in others {
            if Snapshot::read(store, id)?.own == XenbusState::Connected
                && is_move(store, id, self.id)?
            {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Adds to a failure which disk of this host is served from the same image. The image's lock
    /// tells only a process number.
    pub(crate) fn with_sharer(&self, failure: Failure) -> Failure {
        let sharers = self.shared.table.sharers(self.id);
        let is_served = |id: &DiskId| {
            let of_entry = |entry: &Entry| entry.phase == Phase::Served;
            self.shared.table.read(|disks| disks.get(id).is_some_and(of_entry))
        };
        let sharer = sharers.into_iter().find(is_served);
        match sharer {
            None => failure,
            Some(id) => Failure {
                help: format!("disk {id} is served from the same image; {}", failure.help),
                ..failure
            },
        }
    }

    /// Waits for the end of the earlier attachment's pause, if the pause is a step of an operation.
    fn wait_for_pause(&self, earlier: DiskId) -> Result<(), Failure> {
        let end = Instant::now() + HANDOVER_TIMEOUT;
        let paused = || self.shared.table.read(|disks| disks.get(&earlier)?.pause.clone());
        while let Some(pause) = paused() {
            if !pause.is_step || Instant::now() > end || self.is_stopped(Duration::ZERO) {
                return Err(Failure {
                    why: format!("disk {earlier} of the same VM is paused by {}", pause.by),
                    help: format!("end that first: ferrite disk resume {earlier}"),
                });
            }
            self.shared.table.wait_for(POLL_INTERVAL, |disks| {
                disks.get(&earlier).is_none_or(|entry| entry.pause.is_none()).then_some(())
            });
        }
        Ok(())
    }

    /// Asks the earlier attachment to rest, and waits until it does. `false`: its thread has ended,
    /// so its state has to be read again.
    fn request_rest(&self, earlier: DiskId) -> Result<bool, Failure> {
        self.wait_for_pause(earlier)?;
        tracing::info!("disk {} is to be served: disk {earlier} of the same VM rests", self.id);
        if !self.shared.table.request_rest(earlier, self.id) {
            return Err(Failure {
                why: format!("disk {earlier} of the same VM rests for a disk of another domain"),
                help: "a guest can be moved to one domain at a time; ferrite tries again"
                    .to_owned(),
            });
        }
        let end = Instant::now() + HANDOVER_TIMEOUT;
        loop {
            let rests =
                self.shared.table.wait_for(POLL_INTERVAL, |disks| match disks.get(&earlier) {
                    None => Some(false),
                    // A disk that rests for a third attachment does not rest for this one.
                    Some(entry) => (entry.phase == Phase::Resting(self.id)).then_some(true),
                });
            if let Some(rests) = rests {
                return Ok(rests);
            }
            if self.is_stopped(Duration::ZERO) || Instant::now() > end {
                return Err(Failure {
                    why: format!("disk {earlier} of the same VM has not closed the image yet"),
                    help: "its storage is slow; ferrite tries again".to_owned(),
                });
            }
        }
    }

    /// Rests until the later attachment is gone. The image is closed. The state file says so before
    /// the phase does: the next daemon has to leave the image to the later one, too.
    pub(crate) fn rest(&mut self, later: DiskId, image: &Image) -> Result<End, Failure> {
        let mut state = DiskState::new(self.id, image, self.minor).resting_for(Some(later));
        state.tune = self.tune();
        state.tune = self.tune();
        let known = self.shared.states.read(self.id).map_err(|e| self.state_failure(&e))?;
        let known = known.filter(|known| known.rests_for == Some(later));
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        // The later attachment may have run while there was no daemon.
        state.has_run = known.is_some_and(|known| known.has_run)
            || self.runs(&mut store, later).map_err(|e| Failure::store(&e))?;
        self.remember(&state)?;
        self.shared.table.set(self.id, Phase::Resting(later));
        tracing::info!("disk {} rests while disk {later} of the same VM is served", self.id);
        let mut is_logged = false;
        loop {
            let stood = stand_in(&mut store, self.id, false, Some(POLL_INTERVAL), &self.stop);
            match stood.map_err(|e| Failure::store(&e))? {
                End::Retry => {}
                end => return Ok(end),
            }
            if !state.has_run && self.runs(&mut store, later).map_err(|e| Failure::store(&e))? {
                state.has_run = true;
                self.remember(&state)?;
            }
            if !self.is_gone(&mut store, later).map_err(|e| Failure::store(&e))? {
                continue;
            }
            if !state.has_run && !self.is_away(&mut store).map_err(|e| Failure::store(&e))? {
                tracing::info!("disk {later} is gone: disk {} is served on", self.id);
                return Ok(End::Retry);
            }
            if !is_logged {
                let failure = outdated(later);
                tracing::error!("disk {} is not served: {failure}", self.id);
                self.report(&mut store, Some(&failure));
                self.shared.table.set(self.id, Phase::Failed(failure));
                is_logged = true;
            }
        }
    }

    fn remember(&self, state: &DiskState) -> Result<(), Failure> {
        self.shared.states.write(state).map_err(|e| self.state_failure(&e))
    }

    /// Whether the later attachment's guest may write, or may have written.
    fn runs(&self, store: &mut Store, later: DiskId) -> Result<bool, StoreError> {
        let seen = Snapshot::read(store, later)?;
        let is_connected = seen.own == XenbusState::Connected
            || matches!(seen.front, XenbusState::Connected | XenbusState::Closing);
        Ok(is_connected && same_vm(store, later, self.id)?)
    }

    /// Whether the toolstack has given this guest up for the later one, which may run next. If that
    /// cannot start, the toolstack restores this domain's name.
    fn is_away(&self, store: &mut Store) -> Result<bool, StoreError> {
        Ok(name(store, self.id)?.ends_with(AWAY))
    }

    /// Whether the later attachment is gone, and its thread has closed the image.
    fn is_gone(&self, store: &mut Store, later: DiskId) -> Result<bool, StoreError> {
        let is_known = self.shared.table.read(|disks| disks.contains_key(&later));
        let is_there = Snapshot::read(store, later)?.is_there && same_vm(store, later, self.id)?;
        Ok(!is_known && !is_there)
    }

    /// The later attachment that this one rests for, by request or by the last daemon's state file.
    pub(crate) fn rests_for(&self) -> Option<DiskId> {
        self.shared.table.read(|disks| disks.get(&self.id)?.rests_for)
    }

    /// Ends the rest.
    pub(crate) fn end_rest(&self) {
        self.shared.table.change(self.id, |entry| {
            entry.rests_for = None;
            // This rest has its own rule for an image that has changed.
            (entry.is_suspended, entry.left) = (false, None);
            entry.phase = Phase::Starting;
        });
    }
}
