//! Two attachments of one disk at a time, to two domains that are one VM: a migration within this
//! host, or a guest that is restored before the saved one is destroyed (attachments.md).
//!
//! The earlier one is drained, its image is complete and closed, and it rests. Only then the later one
//! opens the image. So no old write comes after a new one. When the later one is gone, the earlier one
//! is served on: a migration that fails goes back to its source.

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

impl Follower {
    /// Before the image is opened: has the earlier attachment of the same disk rest, if there is one.
    /// An attachment is earlier if its guest is connected while ours is not.
    pub(crate) fn have_earlier_rest(&self, store: &mut Store) -> Result<(), Failure> {
        match self.earlier(store).map_err(|e| Failure::store(&e))? {
            Some(earlier) => self.have_rest(earlier),
            None => Ok(()),
        }
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
            if Look::take(store, id)?.own == 4 && same_vm(store, id, self.id)? {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Asks it to rest, and waits until it does.
    fn have_rest(&self, earlier: DiskId) -> Result<(), Failure> {
        tracing::info!("disk {} is to be served: disk {earlier} of the same VM rests", self.id);
        self.shared.table.have_rest(earlier, self.id);
        let end = Instant::now() + PATIENCE;
        loop {
            let rests = self.shared.table.wait_for(LOOK_AGAIN, |disks| match disks.get(&earlier) {
                None => Some(()),
                Some(entry) => matches!(entry.phase, Phase::Resting(_)).then_some(()),
            });
            if rests.is_some() {
                return Ok(());
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
        let state = DiskState::new(self.id, image, self.minor).resting_for(Some(later));
        self.shared.states.write(&state).map_err(|e| self.no_state(&e))?;
        self.shared.table.set(self.id, Phase::Resting(later));
        tracing::info!("disk {} rests while disk {later} of the same VM is served", self.id);
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        loop {
            let stood = stand_in(&mut store, self.id, false, Some(LOOK_AGAIN), &self.stop);
            match stood.map_err(|e| Failure::store(&e))? {
                End::Retry => {}
                end => return Ok(end),
            }
            if self.is_gone(&mut store, later).map_err(|e| Failure::store(&e))? {
                tracing::info!("disk {later} is gone: disk {} is served on", self.id);
                return Ok(End::Retry);
            }
        }
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
