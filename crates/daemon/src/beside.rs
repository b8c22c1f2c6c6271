//! A stub domain and its guest have one disk at the same time. The worker of the guest's disk
//! serves the stub domain's beside it (attachments.md, "A stub domain and its guest").
//!
//! The toolstack says in two places which domain is a guest's stub domain. No guest can write to
//! these (threats.md T30). A disk that began beside another is never served in another way, by this
//! daemon or the next: only the worker of its guest's disk knows its requests under way.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_xen::store::{Store, StoreError};

use crate::Failure;
use crate::directory::Snapshot;
use crate::follow::{Follower, RETRY, RETRY_MAX};
use crate::state::DiskId;
use crate::table::{Entry, Phase};
use crate::unserved::is_wanted;
use crate::wait::Backoff;

/// How long to wait until the file of the guest's disk is known.
const FILE_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads a domain's number that the toolstack has written.
fn number(store: &mut Store, path: &str) -> Result<Option<u16>, StoreError> {
    match store.read(path) {
        // A driver domain may not read it. Then no domain is taken for a stub domain.
        Err(StoreError::Access { .. }) => Ok(None),
        text => Ok(text?.and_then(|text| std::str::from_utf8(&text).ok()?.parse().ok())),
    }
}

/// The guest whose stub domain this domain is. Both domains' keys have to say so.
fn guest_of(store: &mut Store, domid: u16) -> Result<Option<u16>, StoreError> {
    let Some(guest) = number(store, &format!("/local/domain/{domid}/target"))? else {
        return Ok(None);
    };
    let stub = number(store, &format!("/local/domain/{guest}/image/device-model-domid"))?;
    Ok((stub == Some(domid) && guest != domid).then_some(guest))
}

/// Whether two disks have the same file. `None` while the path of `first` is being resolved.
fn have_one_file(disks: &BTreeMap<DiskId, Entry>, first: DiskId, second: DiskId) -> Option<bool> {
    let entry = disks.get(&first)?;
    let is_known = entry.real.is_some() || entry.phase != Phase::Starting;
    let ours = disks.get(&second).and_then(Entry::file);
    is_known.then(|| ours.is_some() && entry.file() == ours)
}

/// Whether `first` is served with the file that `second` is to have.
pub(crate) fn are_one(disks: &BTreeMap<DiskId, Entry>, first: DiskId, second: DiskId) -> bool {
    disks.get(&first).is_some_and(|entry| entry.phase == Phase::Served)
        && have_one_file(disks, first, second) == Some(true)
}

impl Follower {
    /// The guest's disk that this one is served beside.
    pub(crate) fn beside(&self) -> Option<DiskId> {
        self.shared.table.read(|disks| disks.get(&self.id)?.beside)
    }

    /// Finds the guest's disk to serve this one beside, before the image is opened. A disk whose
    /// image was open keeps the way in which it began.
    pub(crate) fn stand_beside(&self, store: &mut Store) -> Result<(), Failure> {
        if self.beside().is_some() || !self.is_untouched || self.was_open() {
            return Ok(());
        }
        let guest = guest_of(store, self.id.domid).map_err(|e| Failure::store(&e))?;
        let Some(first) = guest.map(|domid| DiskId { domid, ..self.id }) else { return Ok(()) };
        if !Snapshot::read(store, first).map_err(|e| Failure::store(&e))?.is_wanted() {
            return Ok(());
        }
        let table = &self.shared.table;
        match table.wait_for(FILE_TIMEOUT, |disks| have_one_file(disks, first, self.id)) {
            Some(true) => {}
            Some(false) => return Ok(()),
            None => {
                return Err(Failure {
                    why: format!("the image of disk {first} of the guest is not known yet"),
                    help: "its storage is slow; ferrite tries again".to_owned(),
                });
            }
        }
        table.stand_beside(self.id, first).map_err(|other| Failure {
            why: format!("disk {other} is served beside disk {first} already"),
            help: "a guest has one stub domain; detach that disk".to_owned(),
        })?;
        tracing::info!("disk {} of a stub domain is served beside disk {first}", self.id);
        Ok(())
    }

    /// Parts a disk that is not served any more from its guest's disk, which must not wait for it.
    /// `false`: the daemon stops first, and the next one does it.
    pub(crate) fn part_from(&self, first: DiskId) -> bool {
        let mut backoff = Backoff::new(RETRY, RETRY_MAX);
        while let Err(failure) = self.shared.serving.part(self.id, first) {
            tracing::debug!("disk {} is not parted from disk {first}: {failure}", self.id);
            if self.is_stopped(backoff.after(false)) {
                return false;
            }
        }
        true
    }

    /// Whether the end of a disk that is not served may be announced.
    pub(crate) fn may_part(&self, store: &mut Store, first: DiskId) -> Result<bool, StoreError> {
        let seen = Snapshot::read(store, self.id)?;
        let is_left =
            seen.is_of(&self.attached) && !seen.is_held() && !is_wanted(store, self.id, &seen)?;
        Ok(is_left && self.shared.serving.part(self.id, first).is_ok())
    }
}
