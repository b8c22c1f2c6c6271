//! A stub domain and its guest have one disk at the same time: who serves the guest's serves the stub
//! domain's beside it (attachments.md, "A stub domain and its guest").
//!
//! Which domain is which one's stub domain the toolstack says in two places that no guest can write to
//! (threats.md T30). A disk that has begun so is never served in another way, by this daemon or the next:
//! what it has under way only the worker of its guest's disk knows.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_xen::store::{Store, StoreError};

use crate::Failure;
use crate::directory::Look;
use crate::follow::{Follower, RETRY, RETRY_MAX};
use crate::state::DiskId;
use crate::table::{Entry, Phase};
use crate::unserved::is_wanted;
use crate::wait::Pauses;

/// How long the guest's disk is waited for at a time, until it is known which file it has.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);

/// A domain's number that the toolstack has written.
fn number(store: &mut Store, path: &str) -> Result<Option<u16>, StoreError> {
    match store.read(path) {
        // A driver domain may not look, and then nobody is known to be a stub domain.
        Err(StoreError::Access { .. }) => Ok(None),
        text => Ok(text?.and_then(|text| std::str::from_utf8(&text).ok()?.parse().ok())),
    }
}

/// The guest whose stub domain this domain is. Both have to say so.
fn guest_of(store: &mut Store, domid: u16) -> Result<Option<u16>, StoreError> {
    let Some(guest) = number(store, &format!("/local/domain/{domid}/target"))? else {
        return Ok(None);
    };
    let stub = number(store, &format!("/local/domain/{guest}/image/device-model-domid"))?;
    Ok((stub == Some(domid) && guest != domid).then_some(guest))
}

/// Whether two disks have the same file; not known of one whose name is looked up just now.
fn have_one_file(disks: &BTreeMap<DiskId, Entry>, first: DiskId, second: DiskId) -> Option<bool> {
    let entry = disks.get(&first)?;
    let is_known = entry.real.is_some() || entry.phase != Phase::Starting;
    let ours = disks.get(&second).and_then(Entry::file);
    is_known.then(|| ours.is_some() && entry.file() == ours)
}

/// Whether the first of two disks is served with the file that the second is to have, too.
pub(crate) fn are_one(disks: &BTreeMap<DiskId, Entry>, first: DiskId, second: DiskId) -> bool {
    disks.get(&first).is_some_and(|entry| entry.phase == Phase::Served)
        && have_one_file(disks, first, second) == Some(true)
}

impl Follower {
    /// The guest's disk that this one is served beside.
    pub(crate) fn beside(&self) -> Option<DiskId> {
        self.shared.table.look(|disks| disks.get(&self.id)?.beside)
    }

    /// Before the image is opened: finds the guest's disk that this one is to be served beside. Not for
    /// one whose image was open: what it has begun with stays.
    pub(crate) fn stand_beside(&self, store: &mut Store) -> Result<(), Failure> {
        if self.beside().is_some() || !self.is_untouched || self.was_open() {
            return Ok(());
        }
        let guest = guest_of(store, self.id.domid).map_err(|e| Failure::store(&e))?;
        let Some(first) = guest.map(|domid| DiskId { domid, ..self.id }) else { return Ok(()) };
        if !Look::take(store, first).map_err(|e| Failure::store(&e))?.is_wanted() {
            return Ok(());
        }
        let table = &self.shared.table;
        match table.wait_for(KNOWN_WITHIN, |disks| have_one_file(disks, first, self.id)) {
            Some(true) => {}
            Some(false) => return Ok(()),
            None => {
                return Err(Failure {
                    why: format!("disk {first}, of its guest, was not looked at yet"),
                    help: "its storage takes long; it is tried again".to_owned(),
                });
            }
        }
        table.stand_beside(self.id, first).map_err(|other| Failure {
            why: format!("disk {other} is served beside disk {first} already"),
            help: "a guest has one stub domain; detach that disk".to_owned(),
        })?;
        tracing::info!("disk {} is served beside disk {first}: a stub domain's", self.id);
        Ok(())
    }

    /// Nobody serves it any more, so that nothing of it keeps its guest's disk waiting. `false`: the daemon
    /// is to end before that, and the next one sees to it.
    pub(crate) fn parts(&self, first: DiskId) -> bool {
        let mut pauses = Pauses::new(RETRY, RETRY_MAX);
        while let Err(failure) = self.shared.serving.part(self.id, first) {
            tracing::debug!("disk {} is not parted from disk {first}: {failure}", self.id);
            if self.is_stopped(pauses.after(false)) {
                return false;
            }
        }
        true
    }

    /// While it is not served: whether it may be said that it is gone.
    pub(crate) fn may_part(&self, store: &mut Store, first: DiskId) -> Result<bool, StoreError> {
        let look = Look::take(store, self.id)?;
        let is_left =
            look.is_of(&self.attached) && !look.is_held() && !is_wanted(store, self.id, &look)?;
        Ok(is_left && self.shared.serving.part(self.id, first).is_ok())
    }
}
