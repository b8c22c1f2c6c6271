//! A guest whose worker has died while nobody follows.
//!
//! The next worker looks at xenstore once, before it gives its rights up, and goes on as a follower would
//! have it go on (processes.md 2). It decides by all states as they are now, and by no file of the dead
//! one's. It writes nothing there: what else there is to do waits for a follower.

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};

use super::attachment::Attachment;
use super::error::ServeError;
use super::look::{State, is_in_use};
use super::messages::Rings;
use super::refusal::Refusal;
use crate::blkif::negotiate::{self, Wanted};

/// What a worker begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Whoever follows asks, now or later.
    Asked,
    /// Somebody should follow, and may be about to end: a worker that nobody asks ends, and the next one
    /// looks anew.
    Expecting,
    /// Nobody follows.
    Orphan(Orphan),
}

/// A guest that is connected, as xenstore has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// How its image is to be open.
    pub(super) read_only: bool,
    pub(super) keeps_all: bool,
    /// See [`Order::TakeOver`](super::messages::Order::TakeOver).
    pub(super) rings: Rings,
    pub(super) told_sectors: Option<u64>,
}

impl Orphan {
    /// The guest with this directory, if a predecessor had connected it and it has not let go since.
    ///
    /// # Errors
    /// xenstore's. Somebody has to look again.
    pub fn look(
        store: &mut Store,
        backend: &str,
        domid: DomId,
        devid: u32,
    ) -> Result<Option<Orphan>, ServeError> {
        let Some(attachment) = Attachment::read(store, backend, domid)? else { return Ok(None) };
        let own = store.read(&format!("{backend}/state"))?;
        let front = store.read(&format!("{}/state", attachment.frontend))?;
        if !is_in_use(State::parse(own.as_deref()), State::parse(front.as_deref())) {
            return Ok(None);
        }
        match begun(store, backend, &attachment.frontend, (domid, devid)) {
            Ok((rings, told_sectors)) => {
                let Attachment { read_only, may_discard, .. } = attachment;
                Ok(Some(Orphan { read_only, keeps_all: !may_discard, rings, told_sectors }))
            }
            Err(Refusal::Host(e)) => Err(e),
            // Its keys make no sense: it is told so by who follows.
            Err(_) => Ok(None),
        }
    }
}

/// The connection that a predecessor has made, and the size that the guest was told.
pub(super) fn begun(
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

/// These rings, as a worker is told of them.
pub(super) fn rings(
    store: &mut Store,
    (domid, devid): (DomId, u32),
    wanted: &Wanted,
    max_indirect_segments: u16,
    discard: bool,
) -> Result<Rings, StoreError> {
    // Domain numbers are used again; a domain's uuid is not.
    // A driver domain may not look, and goes by the rest.
    let vm = match store.read_string(&format!("/local/domain/{domid}/vm")) {
        Err(StoreError::Access { .. }) => None,
        vm => vm?,
    };
    let vm = vm.unwrap_or_default();
    let guest = format!("domain={domid} vm={vm} device={devid}");
    Ok(Rings { wanted: wanted.clone(), guest, max_indirect_segments, discard })
}
