//! The xenbus states of a disk that is not served: an empty drive, or an image that cannot be
//! opened.
//!
//! The toolstack waits for two states. If it runs a script, it first waits for the backend's 2, and
//! the script then reports why the disk fails. When it detaches the disk, it waits for 6.
//!
//! State 4 is never written, so no guest takes the disk for a working one. State 6 is written after
//! the toolstack has asked for the end and the guest has let go. The image must not be open then,
//! since another host may open it at once: this host's journal may hold answered writes until the
//! image is closed.

use std::time::{Duration, Instant};

use ferrite_serve::blkif::lifecycle::ExpectedAttachment;
use ferrite_serve::waker::Waker;
use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;

use crate::directory::{self, Snapshot};
use crate::state::DiskId;
use crate::wait::wait_for;

/// Why `answer` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The disk is detached, or its directory is gone.
    Detached,
    /// Another attachment has taken the directory.
    Another,
    /// It is time to try to serve the disk again.
    Retry,
    /// The thread was woken.
    Stopped,
}

const TOKEN: &str = "unserved";
/// How often the disk is checked: xenstore sends no event when a guest dies.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The states that may be written for a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllowedStates {
    /// State 2, before a script: the state file names the disk.
    pub(crate) begin: bool,
    /// State 2 also without a script.
    pub(crate) offer: bool,
    /// State 6: the image is closed, or was never open.
    pub(crate) announce: bool,
}

/// Answers for a disk whose image is closed again, until it is detached or `how_long` is over.
/// `offers`: writes state 2 also without a script.
pub(crate) fn stand_in(
    store: &mut Store,
    id: DiskId,
    offers: bool,
    how_long: Option<Duration>,
    stop: &Waker,
) -> Result<End, StoreError> {
    let may = AllowedStates { begin: true, offer: offers, announce: true };
    answer(store, id, may, &mut ExpectedAttachment::Begun, how_long, stop)
}

/// Answers for a disk with the allowed states, until it is detached or `how_long` is over.
pub(crate) fn answer(
    store: &mut Store,
    id: DiskId,
    may: AllowedStates,
    attached: &mut ExpectedAttachment,
    how_long: Option<Duration>,
    stop: &Waker,
) -> Result<End, StoreError> {
    let end = how_long.map(|how_long| Instant::now() + how_long);
    store.watch(&directory::path(id), TOKEN)?;
    loop {
        while store.poll_event()?.is_some() {}
        let seen = Snapshot::read(store, id)?;
        if !seen.is_there {
            return Ok(End::Detached);
        }
        if !seen.is_of(attached) {
            return Ok(End::Another);
        }
        let mut has_begun = seen.has_begun();
        if !is_wanted(store, id, &seen)? {
            // Otherwise the next try closes the image, and announces the end.
            if may.announce && !seen.is_held() && write(store, id, &seen, XenbusState::Closed)? {
                return Ok(End::Detached);
            }
        } else if seen.own == XenbusState::Initialising
            && may.begin
            && (may.offer || seen.has_script)
        {
            has_begun |= write(store, id, &seen, XenbusState::InitWait)?;
        }
        // A state of 1 after that belongs to another attachment.
        if has_begun {
            *attached = ExpectedAttachment::Begun;
        }
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(End::Retry);
        }
        let timeout = match store.poll_event()? {
            Some(_) => Duration::ZERO,
            None => left.map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL)),
        };
        let [_, stopped] = wait_for([store.fd(), stop.fd()], Some(timeout));
        if stopped {
            return Ok(End::Stopped);
        }
    }
}

/// Whether both toolstack and guest want the disk.
pub(crate) fn is_wanted(
    store: &mut Store,
    id: DiskId,
    seen: &Snapshot,
) -> Result<bool, StoreError> {
    let home = match store.read(&format!("/local/domain/{}", id.domid)) {
        Err(StoreError::Access { .. }) => return Ok(seen.online),
        home => home?,
    };
    Ok(seen.online && home.is_some())
}

/// Writes the backend's state unless the directory has changed since `seen`: another attachment may
/// have come. Returns whether it was written.
fn write(
    store: &mut Store,
    id: DiskId,
    seen: &Snapshot,
    state: XenbusState,
) -> Result<bool, StoreError> {
    let dir = directory::path(id);
    let path = format!("{dir}/state");
    store.transaction(|tx| {
        let is_seen = XenbusState::parse(tx.read(&path)?.as_deref()) == seen.own
            && tx.read(&format!("{dir}/params"))? == seen.params;
        if is_seen {
            tx.write(&path, state.to_string().as_bytes())?;
        }
        Ok(is_seen)
    })
}
