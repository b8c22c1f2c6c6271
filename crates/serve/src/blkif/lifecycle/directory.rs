//! The disk's directories in xenstore: reading both sides' keys, and publishing the backend's.

use ferrite_xen::store::{StoreError, Transaction};

use super::states::Snapshot;
use super::{Attachment, Backend, ExpectedAttachment, ServeError};
use crate::blkif::negotiate::{self, DiskFacts};
use ferrite_xen::xenbus::XenbusState;

impl Backend<'_> {
    pub(super) fn read_states(&mut self) -> Result<Snapshot, StoreError> {
        let frontend_changed = std::mem::take(&mut self.frontend_changed);
        self.directory_changed = false;
        let front = self.store.read(&format!("{}/state", self.attachment.frontend))?;
        let own = self.read("state")?;
        let online = self.read("online")?;
        let frontend = self.read("frontend")?;
        let attached = self.attached;
        let is_meant = is_meant(attached, own.as_deref(), || self.read("params"))?;
        let gone =
            !is_meant || !is_ours(&self.attachment, self.has_begun, frontend, own.as_deref());
        self.has_begun |= !gone && own.is_some() && own.as_deref() != NEW;
        let plugged = !self.attachment.has_script
            || self.read("hotplug-status")?.as_deref() == Some(b"connected");
        let dead = front.is_none() && self.guest_is_dead()?;
        Ok(Snapshot {
            front: XenbusState::parse(front.as_deref()),
            frontend_changed,
            own: XenbusState::parse(own.as_deref()),
            online: online.as_deref() != Some(b"0"),
            plugged,
            gone,
            dead,
        })
    }

    /// Whether the guest's home directory is gone.
    fn guest_is_dead(&mut self) -> Result<bool, StoreError> {
        Ok(!is_there(self.store.read(&format!("/local/domain/{}", self.domid)))?)
    }

    pub(super) fn read(&mut self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(&format!("{}/{key}", self.backend))
    }

    /// Publishes all features together with the backend's state. A disk that is to go keeps the
    /// toolstack's state 5.
    pub(super) fn offer(&mut self, state: XenbusState) -> Result<(), ServeError> {
        let facts = self.facts()?;
        let discard = self.may_discard(&facts)?;
        let backend = self.backend;
        // The frontend sizes its requests by the offer before it sets up rings. It may send such
        // requests before it reads another offer.
        let offer = if state == XenbusState::InitWait { self.offer } else { self.standing };
        let info = self.attachment.info(facts.read_only);
        let frontend = self.attachment.frontend.clone();
        let begun = self.update(|tx| {
            if state == XenbusState::InitWait {
                remove_old_keys(tx, backend, &frontend)?;
            }
            negotiate::publish(tx, backend, &facts, &offer, discard, info)?;
            match tx.read(&format!("{backend}/online"))?.as_deref() {
                Some(b"0") => Ok(false),
                _ => write_state(tx, backend, state),
            }
        })?;
        self.has_begun |= begun == Some(true);
        self.standing = offer;
        Ok(())
    }

    /// Changes the backend's directory, if it is still the attachment that is served. A key that is
    /// written just after the toolstack has removed the directory would create it again for ever.
    /// `None`: it is another attachment, and nothing was changed.
    pub(super) fn update<T>(
        &mut self,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        let (backend, attachment, has_begun) = (self.backend, &self.attachment, self.has_begun);
        let attached = self.attached;
        self.store.transaction(|tx| {
            let frontend = tx.read(&format!("{backend}/frontend"))?;
            let own = tx.read(&format!("{backend}/state"))?;
            let is_meant =
                is_meant(attached, own.as_deref(), || tx.read(&format!("{backend}/params")))?;
            match is_meant && is_ours(attachment, has_begun, frontend, own.as_deref()) {
                true => change(tx).map(Some),
                false => Ok(None),
            }
        })
    }

    /// Whether discards are offered: the disk supports them, and the toolstack allows them.
    pub(super) fn may_discard(&mut self, facts: &DiskFacts) -> Result<bool, StoreError> {
        Ok(facts.discard.is_some() && self.read("discard-enable")?.as_deref() != Some(b"0"))
    }

    pub(super) fn write_state(&mut self, state: XenbusState) -> Result<(), StoreError> {
        let backend = self.backend;
        self.has_begun |= self.update(|tx| write_state(tx, backend, state))?.is_some();
        Ok(())
    }

    /// Announces the end to a waiting toolstack. It checks the directory once more: while storage
    /// was slow, the toolstack may have given up and attached another disk.
    pub(super) fn announce_unplugged(&mut self) -> Result<(), StoreError> {
        let backend = self.backend;
        let home = format!("/local/domain/{}", self.domid);
        self.update(|tx| {
            let wanted = tx.read(&format!("{backend}/online"))?.as_deref() != Some(b"0");
            if wanted && is_there(tx.read(&home))? {
                return Ok(false);
            }
            write_state(tx, backend, XenbusState::Closed)
        })?;
        Ok(())
    }
}

/// The state with which the toolstack makes a directory. A backend never writes it.
const NEW: Option<&[u8]> = Some(b"1");

/// Whether the directory holds the attachment that is served. The toolstack may have removed that
/// and made a new one of the same name, with another image. The new one has state 1, which the
/// served one has left once it `has_begun`.
fn is_ours(
    attachment: &Attachment,
    has_begun: bool,
    frontend: Option<Vec<u8>>,
    own: Option<&[u8]>,
) -> bool {
    let same = frontend.as_deref() == Some(attachment.frontend.as_bytes());
    same && !(has_begun && own == NEW)
}

/// Whether a new attachment has the image that was configured. Another one may have taken its place
/// before the backend wrote anything.
fn is_meant(
    attached: &ExpectedAttachment,
    own: Option<&[u8]>,
    params: impl FnOnce() -> Result<Option<Vec<u8>>, StoreError>,
) -> Result<bool, StoreError> {
    match attached {
        ExpectedAttachment::New(meant) if own == NEW => Ok(params()?.as_ref() == Some(meant)),
        _ => Ok(true),
    }
}

/// Keys that a frontend writes only for several queues or pages. The next frontend may find them.
const KEYS_OF_MORE: [&str; 3] = ["multi-queue-num-queues", "ring-page-order", "num-ring-pages"];

/// Removes the ring keys of an earlier driver, before the next driver is offered the disk. Linux
/// and FreeBSD leave them there, and do not write them for one queue of one page.
///
/// A frontend writes them after it has read state 2. So they are old if this transaction finds the
/// backend beyond 2 and the frontend at its beginning.
fn remove_old_keys(
    tx: &mut Transaction<'_>,
    backend: &str,
    frontend: &str,
) -> Result<(), StoreError> {
    let own = XenbusState::parse(tx.read(&format!("{backend}/state"))?.as_deref());
    let front = XenbusState::parse(tx.read(&format!("{frontend}/state"))?.as_deref());
    let is_offered_again =
        matches!(own, XenbusState::Connected | XenbusState::Closing | XenbusState::Closed);
    if !is_offered_again || front != XenbusState::Initialising {
        return Ok(());
    }
    for key in KEYS_OF_MORE {
        let path = format!("{frontend}/{key}");
        let removed = match tx.read(&path) {
            Ok(Some(_)) => tx.remove(&path),
            Ok(None) => Ok(()),
            Err(e) => Err(e),
        };
        match removed {
            // A driver domain may only read.
            Ok(()) | Err(StoreError::Access { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes the state, and returns `true`.
fn write_state(
    tx: &mut Transaction<'_>,
    backend: &str,
    state: XenbusState,
) -> Result<bool, StoreError> {
    tx.write(&format!("{backend}/state"), state.to_string().as_bytes())?;
    Ok(true)
}

/// Whether a guest's home directory exists. A driver domain may not read it, and relies on the
/// toolstack.
fn is_there(home: Result<Option<Vec<u8>>, StoreError>) -> Result<bool, StoreError> {
    match home {
        Ok(home) => Ok(home.is_some()),
        Err(StoreError::Access { .. }) => Ok(true),
        Err(e) => Err(e),
    }
}
