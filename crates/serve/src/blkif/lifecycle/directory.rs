//! The disk's directories in xenstore: what both sides say, and what we publish.

use ferrite_xen::store::{StoreError, Transaction};

use super::look::{Look, State};
use super::{Backend, ServeError};
use crate::blkif::negotiate::{self, DiskFacts};

impl Backend<'_> {
    pub(super) fn look(&mut self) -> Result<Look, StoreError> {
        let moved = std::mem::take(&mut self.moved);
        self.directory_moved = false;
        let front = self.store.read(&format!("{}/state", self.attachment.frontend))?;
        let own = self.read("state")?;
        let online = self.read("online")?;
        let gone = self.read("frontend")?.is_none();
        let plugged = !self.attachment.has_script
            || self.read("hotplug-status")?.as_deref() == Some(b"connected");
        let dead = front.is_none() && self.guest_is_dead()?;
        Ok(Look {
            front: State::parse(front.as_deref()),
            moved,
            own: State::parse(own.as_deref()),
            online: online.as_deref() != Some(b"0"),
            plugged,
            gone,
            dead,
        })
    }

    /// Whether the guest's home has gone with it. A driver domain may not look, and waits for the
    /// toolstack.
    fn guest_is_dead(&mut self) -> Result<bool, StoreError> {
        match self.store.read(&format!("/local/domain/{}", self.domid)) {
            Ok(home) => Ok(home.is_none()),
            Err(StoreError::Access { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub(super) fn read(&mut self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(&format!("{}/{key}", self.backend))
    }

    /// Publishes all that is offered, together with our state; that of a disk that is to go is the
    /// toolstack's 5.
    pub(super) fn offer(&mut self, state: State) -> Result<(), ServeError> {
        let facts = self.facts()?;
        let discard = self.may_discard(&facts)?;
        let (backend, offer) = (self.backend, self.offer);
        let info = self.attachment.info(facts.read_only);
        self.update(|tx| {
            negotiate::publish(tx, backend, &facts, &offer, discard, info)?;
            match tx.read(&format!("{backend}/online"))?.as_deref() {
                Some(b"0") => Ok(()),
                _ => tx.write(&format!("{backend}/state"), (state as u32).to_string().as_bytes()),
            }
        })?;
        Ok(())
    }

    /// Changes our directory, if the toolstack has not removed it: a node written a moment later
    /// would make it again, and it would stay for ever.
    pub(super) fn update(
        &mut self,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let made_by_toolstack = format!("{}/frontend", self.backend);
        self.store.transaction(|tx| match tx.read(&made_by_toolstack)? {
            Some(_) => change(tx),
            None => Ok(()),
        })
    }

    /// Whether discard is offered: the disk can, and the toolstack does not mind.
    pub(super) fn may_discard(&mut self, facts: &DiskFacts) -> Result<bool, StoreError> {
        Ok(facts.discard.is_some() && self.read("discard-enable")?.as_deref() != Some(b"0"))
    }

    pub(super) fn write_state(&mut self, state: State) -> Result<(), StoreError> {
        let path = format!("{}/state", self.backend);
        self.update(|tx| tx.write(&path, (state as u32).to_string().as_bytes()))
    }
}
