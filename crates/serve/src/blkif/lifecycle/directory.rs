//! The disk's directories in xenstore: what both sides say, and what we publish.

use ferrite_xen::store::{StoreError, Transaction};

use super::look::{Look, State};
use super::{Attached, Attachment, Backend, ServeError};
use crate::blkif::negotiate::{self, DiskFacts};

impl Backend<'_> {
    pub(super) fn look(&mut self) -> Result<Look, StoreError> {
        let moved = std::mem::take(&mut self.moved);
        self.directory_moved = false;
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

    /// Whether the guest's home has gone with it.
    fn guest_is_dead(&mut self) -> Result<bool, StoreError> {
        Ok(!is_there(self.store.read(&format!("/local/domain/{}", self.domid)))?)
    }

    pub(super) fn read(&mut self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(&format!("{}/{key}", self.backend))
    }

    /// Publishes all that is offered, together with our state; that of a disk that is to go is the
    /// toolstack's 5.
    pub(super) fn offer(&mut self, state: State) -> Result<(), ServeError> {
        let facts = self.facts()?;
        let discard = self.may_discard(&facts)?;
        let backend = self.backend;
        // The frontend measures itself by it before it sets up its rings, and may do requests of that
        // size before it reads another one.
        let offer = if state == State::InitWait { self.offer } else { self.standing };
        let info = self.attachment.info(facts.read_only);
        let frontend = self.attachment.frontend.clone();
        let begun = self.update(|tx| {
            if state == State::InitWait {
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

    /// Changes our directory, if that is still the attachment which we serve. A node written a moment
    /// after the toolstack has removed it would make it again, and it would stay for ever. `None`: it
    /// is not, and nothing was changed.
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

    /// Whether discard is offered: the disk can, and the toolstack does not mind.
    pub(super) fn may_discard(&mut self, facts: &DiskFacts) -> Result<bool, StoreError> {
        Ok(facts.discard.is_some() && self.read("discard-enable")?.as_deref() != Some(b"0"))
    }

    pub(super) fn write_state(&mut self, state: State) -> Result<(), StoreError> {
        let backend = self.backend;
        self.has_begun |= self.update(|tx| write_state(tx, backend, state))?.is_some();
        Ok(())
    }

    /// Says that the disk is unplugged, where somebody waits for that. It is asked once more: while
    /// storage held us up, the toolstack may have given us up, and have attached another disk.
    pub(super) fn announce_unplugged(&mut self) -> Result<(), StoreError> {
        let backend = self.backend;
        let home = format!("/local/domain/{}", self.domid);
        self.update(|tx| {
            let wanted = tx.read(&format!("{backend}/online"))?.as_deref() != Some(b"0");
            if wanted && is_there(tx.read(&home))? {
                return Ok(false);
            }
            write_state(tx, backend, State::Closed)
        })?;
        Ok(())
    }
}

/// The state that the toolstack makes a directory with. We never write it.
const NEW: Option<&[u8]> = Some(b"1");

/// Whether what stands there is the attachment that we serve. The toolstack may have removed that, and
/// have made a new one of the same name, with another image, for a frontend that begins anew. Its
/// state is 1, and ours is not any more as soon as we `has_begun`.
fn is_ours(
    attachment: &Attachment,
    has_begun: bool,
    frontend: Option<Vec<u8>>,
    own: Option<&[u8]>,
) -> bool {
    let same = frontend.as_deref() == Some(attachment.frontend.as_bytes());
    same && !(has_begun && own == NEW)
}

/// Whether one that nobody has begun with has the image that we were told of: it may have come in the
/// place of that one before we had written anything.
fn is_meant(
    attached: &Attached,
    own: Option<&[u8]>,
    params: impl FnOnce() -> Result<Option<Vec<u8>>, StoreError>,
) -> Result<bool, StoreError> {
    match attached {
        Attached::New(meant) if own == NEW => Ok(params()?.as_ref() == Some(meant)),
        _ => Ok(true),
    }
}

/// Keys that a frontend writes only for more than one queue or page, so that the next one finds them.
const KEYS_OF_MORE: [&str; 3] = ["multi-queue-num-queues", "ring-page-order", "num-ring-pages"];

/// Removes what an earlier driver of the guest has said of its rings, before the next one is offered
/// the disk: Linux and FreeBSD leave it, and write it for one queue of one page neither. A frontend
/// writes it after it has seen 2. So it is an old one's where we are beyond 2, and the frontend is at
/// its beginning in this same transaction.
fn remove_old_keys(
    tx: &mut Transaction<'_>,
    backend: &str,
    frontend: &str,
) -> Result<(), StoreError> {
    let own = State::parse(tx.read(&format!("{backend}/state"))?.as_deref());
    let front = State::parse(tx.read(&format!("{frontend}/state"))?.as_deref());
    let is_offered_again = matches!(own, State::Connected | State::Closing | State::Closed);
    if !is_offered_again || front != State::Initialising {
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

/// Always `true`: it is written.
fn write_state(tx: &mut Transaction<'_>, backend: &str, state: State) -> Result<bool, StoreError> {
    tx.write(&format!("{backend}/state"), (state as u32).to_string().as_bytes())?;
    Ok(true)
}

/// Whether a guest has a home. A driver domain may not look, and waits for the toolstack.
fn is_there(home: Result<Option<Vec<u8>>, StoreError>) -> Result<bool, StoreError> {
    match home {
        Ok(home) => Ok(home.is_some()),
        Err(StoreError::Access { .. }) => Ok(true),
        Err(e) => Err(e),
    }
}
