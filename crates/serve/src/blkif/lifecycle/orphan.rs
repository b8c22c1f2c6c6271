//! A guest whose worker has died while there is no follower.
//!
//! The next worker reads xenstore once, before it gives up its rights, and goes on as a follower
//! would order it (processes.md 2). It decides by the current states, and by no file of the dead
//! worker. It writes nothing to xenstore: everything else waits for a follower.

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};

use super::attachment::Attachment;
use super::config::Ahead;
use super::error::ServeError;
use super::messages::Rings;
use super::refusal::Refusal;
use super::states::is_in_use;
use super::tune::Tune;
use crate::blkif::negotiate::{self, Wanted};
use ferrite_xen::xenbus::XenbusState;

/// The start of a new worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// The worker waits for a follower's requests.
    WaitForFollower,
    /// There should be a follower, which may be about to end. A worker that gets no request ends,
    /// and the next one decides anew.
    ExpectFollower,
    /// There is no follower, and a guest is connected.
    Orphan(Orphan),
    /// There is no follower, and the disk is open without a guest: clients of NBD may wait.
    Ahead {
        /// How the image is opened.
        ahead: Ahead,
        /// The settings of the running disk.
        tune: Box<Tune>,
    },
}

/// A connected guest, as xenstore describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub(super) domid: DomId,
    /// Whether the image is opened for reading only. The caller knows it of a disk that is open
    /// without a guest.
    pub read_only: bool,
    pub(super) keeps_all: bool,
    /// The rings, see [`Order::TakeOver`](super::messages::Order::TakeOver).
    pub(super) rings: Rings,
    pub(super) told_sectors: Option<u64>,
    /// The settings of the running disk. The caller knows them, and xenstore does not.
    pub tune: Box<Tune>,
}

impl Orphan {
    /// The guest of this directory, if a predecessor had connected it and it has not let go since.
    ///
    /// # Errors
    /// Errors of xenstore. The states have to be read again.
    pub fn find(
        store: &mut Store,
        backend: &str,
        domid: DomId,
        devid: u32,
    ) -> Result<Option<Orphan>, ServeError> {
        let Some(attachment) = Attachment::read(store, backend, domid)? else { return Ok(None) };
        let own = store.read(&format!("{backend}/state"))?;
        let front = store.read(&format!("{}/state", attachment.frontend))?;
        if !is_in_use(XenbusState::parse(own.as_deref()), XenbusState::parse(front.as_deref())) {
            return Ok(None);
        }
        match predecessors_rings(store, backend, &attachment.frontend, (domid, devid)) {
            Ok((rings, told_sectors)) => {
                let Attachment { read_only, may_discard, .. } = attachment;
                let (keeps_all, tune) = (!may_discard, Box::default());
                Ok(Some(Orphan { domid, read_only, keeps_all, rings, told_sectors, tune }))
            }
            Err(Refusal::Host(e)) => Err(e),
            // Its keys are invalid. The next follower reports that.
            Err(_) => Ok(None),
        }
    }
}

/// The rings that a predecessor had connected, and the size in sectors that the guest was told.
pub(super) fn predecessors_rings(
    store: &mut Store,
    backend: &str,
    frontend: &str,
    disk: (DomId, u32),
) -> Result<(Rings, Option<u64>), Refusal> {
    let (offer, discard) = negotiate::published_offer(store, backend)?;
    let wanted = negotiate::read_frontend(store, frontend, &offer)?;
    let told = store.read_string(&format!("{backend}/sectors"))?;
    let told_sectors = told.and_then(|told| told.parse().ok());
    let rings = rings(store, disk, &wanted, offer.max_indirect_segments, discard)?;
    Ok((rings, told_sectors))
}

/// The description of a frontend's rings for a worker.
pub(super) fn rings(
    store: &mut Store,
    (domid, devid): (DomId, u32),
    wanted: &Wanted,
    max_indirect_segments: u16,
    discard: bool,
) -> Result<Rings, StoreError> {
    // Domain numbers are used again, and a domain's uuid is not. A driver domain may not read it,
    // and uses the rest.
    let vm = match store.read_string(&format!("/local/domain/{domid}/vm")) {
        Err(StoreError::Access { .. }) => None,
        vm => vm?,
    };
    let vm = vm.unwrap_or_default();
    let guest = format!("domain={domid} vm={vm} device={devid}");
    Ok(Rings { wanted: wanted.clone(), guest, max_indirect_segments, discard })
}
