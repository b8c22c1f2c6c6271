//! The disk's directories in xenstore: what both sides say, and what we publish.

use ferrite_xen::store::{StoreError, Transaction};

use super::look::{Look, State};
use super::{Backend, ServeError};
use crate::negotiate;

impl Backend<'_> {
    pub(super) fn look(&mut self, frontend: &str) -> Result<Look, ServeError> {
        let moved = std::mem::take(&mut self.moved);
        self.directory_moved = false;
        let front = self.store.read(&format!("{frontend}/state"))?;
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
        match self.store.read(&format!("/local/domain/{}", self.config.domid)) {
            Ok(home) => Ok(home.is_none()),
            Err(StoreError::Access { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub(super) fn read(&mut self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(&format!("{}/{key}", self.config.backend))
    }

    /// Publishes all that is offered, together with our state; that of a disk that is to go is the
    /// toolstack's 5.
    pub(super) fn offer(&mut self, state: State) -> Result<(), ServeError> {
        let discard = self.may_discard()?;
        let (backend, offer, disk) = (&self.config.backend, self.offer, &self.device.disk);
        let info = self.attachment.info(disk.read_only());
        self.update(|tx| {
            negotiate::publish(tx, backend, disk, &offer, discard, info)?;
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
        let made_by_toolstack = format!("{}/frontend", self.config.backend);
        self.store.transaction(|tx| match tx.read(&made_by_toolstack)? {
            Some(_) => change(tx),
            None => Ok(()),
        })
    }

    /// Whether discard is offered: the disk can, and the toolstack does not mind.
    pub(super) fn may_discard(&mut self) -> Result<bool, StoreError> {
        let disk = &self.device.disk;
        let can = disk.discard_limits().is_some() && !disk.read_only();
        Ok(can && self.read("discard-enable")?.as_deref() != Some(b"0"))
    }

    pub(super) fn set_state(&mut self, look: Look, state: State) -> Result<(), ServeError> {
        if look.own != state {
            self.write_state(state)?;
        }
        Ok(())
    }

    pub(super) fn write_state(&mut self, state: State) -> Result<(), StoreError> {
        let path = format!("{}/state", self.config.backend);
        self.update(|tx| tx.write(&path, (state as u32).to_string().as_bytes()))
    }
}
