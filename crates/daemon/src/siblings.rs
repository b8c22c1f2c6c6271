//! Two attachments of one disk at a time, to two domains that are one VM: a migration within this
//! host (attachments.md).
//!
//! The earlier one is drained, its image is complete and closed, and it rests. Only then the later one
//! opens the image. So no old write comes after a new one. When the later one is gone, the earlier one
//! is served on: a migration that fails goes back to its source. But not to one whose target has run:
//! what that has written, the source's guest does not know.

use std::time::{Duration, Instant};

use ferrite_xen::store::{Store, StoreError};

use crate::directory::Look;
use crate::follow::Follower;
use crate::state::{DiskId, DiskState};
use crate::table::{Entry, Phase};
use crate::unserved::{End, stand_in};
use crate::{Failure, params::Image};

/// How long the later one waits for the earlier at a time: the toolstack gives it ten seconds.
const PATIENCE: Duration = Duration::from_secs(8);
/// How often is asked whether somebody else is gone, or whether we are to stop.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Whether two domains are one VM: the toolstack gives both the same identifier.
fn same_vm(store: &mut Store, a: DiskId, b: DiskId) -> Result<bool, StoreError> {
    let mut vm = |id: DiskId| match store.read(&format!("/local/domain/{}/vm", id.domid)) {
        // A driver domain may not look, and then no two are known to be one.
        Err(StoreError::Access { .. }) => Ok(None),
        vm => vm,
    };
    let (a, b) = (vm(a)?, vm(b)?);
    Ok(a.is_some_and(|vm| !vm.is_empty() && b == Some(vm)))
}

/// What xl appends to the name of a migration's target, until that may run.
const INCOMING: &str = "--incoming";
/// And to the source's, from just before the target may run.
const AWAY: &str = "--migratedaway";

fn name(store: &mut Store, id: DiskId) -> Result<String, StoreError> {
    match store.read(&format!("/local/domain/{}/name", id.domid)) {
        Err(StoreError::Access { .. }) => Ok(String::new()),
        name => Ok(String::from_utf8_lossy(&name?.unwrap_or_default()).into_owned()),
    }
}

/// Whether the toolstack moves a VM from the one domain to the other. An identifier alone does not say
/// so: a configuration that was copied has the same, and both guests may run.
fn is_move(store: &mut Store, from: DiskId, to: DiskId) -> Result<bool, StoreError> {
    let (source, target) = (name(store, from)?, name(store, to)?);
    let is_of = |name: &str| target.strip_suffix(INCOMING) == Some(name);
    Ok((is_of(&source) || source.strip_suffix(AWAY).is_some_and(is_of))
        && same_vm(store, from, to)?)
}

/// A guest's disk that it may not go on with.
fn outdated(later: DiskId) -> Failure {
    Failure {
        why: format!(
            "its guest was moved to the domain of disk {later}, which may have written to the image \
             and is gone: this guest would go on with what it remembers of older data"
        ),
        help: "destroy this domain (xl destroy), and start the guest anew".to_owned(),
    }
}

impl Follower {
    /// Before the image is opened: has the earlier attachment of the same disk rest, if there is one.
    /// An attachment is earlier if its guest is connected while ours is not.
    pub(crate) fn have_earlier_rest(&self, store: &mut Store) -> Result<(), Failure> {
        while let Some(earlier) = self.earlier(store).map_err(|e| Failure::store(&e))? {
            if self.have_rest(earlier)? {
                break;
            }
        }
        Ok(())
    }

    fn earlier(&self, store: &mut Store) -> Result<Option<DiskId>, StoreError> {
        if Look::take(store, self.id)?.own > 2 {
            return Ok(None);
        }
        // No name is looked up here: storage of another disk that hangs would stop all.
        let others: Vec<DiskId> = self.shared.table.look(|disks| {
            let ours = disks.get(&self.id).and_then(Entry::file);
            let of_image = disks.iter().filter(|(id, entry)| {
                id.domid != self.id.domid && ours.is_some() && entry.file() == ours
            });
            of_image.map(|(id, _)| *id).collect()
        });
        for id in others {
            if Look::take(store, id)?.own == 4 && is_move(store, id, self.id)? {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// With the disk of this host that is served from the same image: of its lock nobody could tell
    /// more than the number of a process.
    pub(crate) fn with_sharer(&self, failure: Failure) -> Failure {
        let sharer = self.shared.table.look(|disks| {
            let ours = disks.get(&self.id).and_then(Entry::file)?;
            let shares = |entry: &Entry| entry.phase == Phase::Served && entry.file() == Some(ours);
            let mut others = disks.iter().filter(|(id, entry)| **id != self.id && shares(entry));
            others.next().map(|(id, _)| *id)
        });
        match sharer {
            None => failure,
            Some(id) => Failure {
                help: format!("disk {id} is served from the same image; {}", failure.help),
                ..failure
            },
        }
    }

    /// Asks it to rest, and waits until it does. Not so if nobody sees to it any more: whether the
    /// image is closed then is to be asked again.
    fn have_rest(&self, earlier: DiskId) -> Result<bool, Failure> {
        tracing::info!("disk {} is to be served: disk {earlier} of the same VM rests", self.id);
        if !self.shared.table.have_rest(earlier, self.id) {
            return Err(Failure {
                why: format!("disk {earlier}, of the same VM, rests for another domain's"),
                help: "its guest is moved one way at a time; it is tried again".to_owned(),
            });
        }
        let end = Instant::now() + PATIENCE;
        loop {
            let rests = self.shared.table.wait_for(LOOK_AGAIN, |disks| match disks.get(&earlier) {
                None => Some(false),
                // For us: a third one's time is not ours.
                Some(entry) => (entry.phase == Phase::Resting(self.id)).then_some(true),
            });
            if let Some(rests) = rests {
                return Ok(rests);
            }
            if self.is_stopped(Duration::ZERO) || Instant::now() > end {
                return Err(Failure {
                    why: format!("disk {earlier}, of the same VM, has not let go of the image yet"),
                    help: "its storage takes long; it is tried again".to_owned(),
                });
            }
        }
    }

    /// Rests until the later attachment is gone. Our image is closed, and that is remembered before it
    /// is said: also the next daemon is to leave it to the later one.
    pub(crate) fn rest(&mut self, later: DiskId, image: &Image) -> Result<End, Failure> {
        let mut state = DiskState::new(self.id, image, self.minor).resting_for(Some(later));
        let known = self.shared.states.read(self.id).map_err(|e| self.no_state(&e))?;
        let known = known.filter(|known| known.rests_for == Some(later));
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        // Also what ran while no daemon looked.
        state.has_run = known.is_some_and(|known| known.has_run)
            || self.runs(&mut store, later).map_err(|e| Failure::store(&e))?;
        self.remember(&state)?;
        self.shared.table.set(self.id, Phase::Resting(later));
        tracing::info!("disk {} rests while disk {later} of the same VM is served", self.id);
        let mut told = false;
        loop {
            let stood = stand_in(&mut store, self.id, false, Some(LOOK_AGAIN), &self.stop);
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
            if !told {
                let failure = outdated(later);
                tracing::error!("disk {} is not served: {failure}", self.id);
                self.report(&mut store, Some(&failure));
                self.shared.table.set(self.id, Phase::Failed(failure));
                told = true;
            }
        }
    }

    fn remember(&self, state: &DiskState) -> Result<(), Failure> {
        self.shared.states.write(state).map_err(|e| self.no_state(&e))
    }

    /// Whether the later one's guest may write, or might have.
    fn runs(&self, store: &mut Store, later: DiskId) -> Result<bool, StoreError> {
        let look = Look::take(store, later)?;
        let is_connected = look.own == 4 || matches!(look.front, 4 | 5);
        Ok(is_connected && same_vm(store, later, self.id)?)
    }

    /// Whether the toolstack has given up our guest for the later one: it gives that leave to run next.
    /// If that cannot start, it gives ours its name back.
    fn is_away(&self, store: &mut Store) -> Result<bool, StoreError> {
        Ok(name(store, self.id)?.ends_with(AWAY))
    }

    /// Whether the later attachment has gone, and who has served it has let go of the image.
    fn is_gone(&self, store: &mut Store, later: DiskId) -> Result<bool, StoreError> {
        let is_known = self.shared.table.look(|disks| disks.contains_key(&later));
        let is_there = Look::take(store, later)?.is_there && same_vm(store, later, self.id)?;
        Ok(!is_known && !is_there)
    }

    /// The later attachment that this one rests for, as it was asked to or as the last daemon knew.
    pub(crate) fn rests_for(&self) -> Option<DiskId> {
        self.shared.table.look(|disks| disks.get(&self.id)?.rests_for)
    }

    /// It does not, any more.
    pub(crate) fn is_rested(&self) {
        self.shared.table.change(self.id, |entry| {
            entry.rests_for = None;
            entry.phase = Phase::Starting;
        });
    }
}
