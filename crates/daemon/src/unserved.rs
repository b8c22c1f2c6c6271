//! The answers for a disk that nobody serves: an empty drive, or an image that cannot be opened.
//!
//! The toolstack waits for two of them. Where it runs a script it waits for our 2 first, and the
//! script then says why the disk does not come. And it waits for our 6 when it detaches the disk. We
//! never say 4, so no guest takes such a disk for one that works. We say 6 only once the toolstack has
//! asked for the end and the guest has let go, and only of an image that nobody has open: another host
//! may open it at once. What was answered may be in this host's journal until the image is closed.

use std::time::{Duration, Instant};

use ferrite_serve::blkif::lifecycle::Attached;
use ferrite_serve::waker::Waker;
use ferrite_xen::store::{Store, StoreError};

use crate::directory::{self, Look};
use crate::state::DiskId;
use crate::wait::wait_for;

/// Why that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The disk is detached, or its directory is gone.
    Detached,
    /// Another attachment stands in its place.
    Another,
    /// It is time to try again.
    Retry,
    /// We are asked to stop.
    Stopped,
}

const TOKEN: &str = "unserved";
/// Nothing tells of a guest that dies: its disks are looked at so often.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// What may be said of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct May {
    /// Our 2: the next daemon would know what disk that was said of.
    pub(crate) begin: bool,
    /// The same also where no script is run.
    pub(crate) offer: bool,
    /// Our 6: its image is closed, or was never open.
    pub(crate) announce: bool,
}

/// Answers for a disk that was served and whose image is closed, until it is detached, for so long at most. `offers`: also
/// before a script.
pub(crate) fn stand_in(
    store: &mut Store,
    id: DiskId,
    offers: bool,
    how_long: Option<Duration>,
    stop: &Waker,
) -> Result<End, StoreError> {
    let may = May { begin: true, offer: offers, announce: true };
    answer(store, id, may, &mut Attached::Begun, how_long, stop)
}

/// Answers for the disk as far as it may, until it is detached, for so long at most.
pub(crate) fn answer(
    store: &mut Store,
    id: DiskId,
    may: May,
    attached: &mut Attached,
    how_long: Option<Duration>,
    stop: &Waker,
) -> Result<End, StoreError> {
    let end = how_long.map(|how_long| Instant::now() + how_long);
    store.watch(&directory::path(id), TOKEN)?;
    loop {
        while store.poll_event()?.is_some() {}
        let look = Look::take(store, id)?;
        if !look.is_there {
            return Ok(End::Detached);
        }
        if !look.is_of(attached) {
            return Ok(End::Another);
        }
        let mut has_begun = look.has_begun();
        if !is_wanted(store, id, &look)? {
            // Otherwise the next try closes the image, and says it.
            if may.announce && !look.is_held() && write(store, id, &look, b"6")? {
                return Ok(End::Detached);
            }
        } else if look.own == 1 && may.begin && (may.offer || look.has_script) {
            has_begun |= write(store, id, &look, b"2")?;
        }
        // A 1 after that is another attachment's.
        if has_begun {
            *attached = Attached::Begun;
        }
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(End::Retry);
        }
        let timeout = match store.poll_event()? {
            Some(_) => Duration::ZERO,
            None => left.map_or(LOOK_AGAIN, |left| left.min(LOOK_AGAIN)),
        };
        let [_, stopped] = wait_for([store.fd(), stop.fd()], Some(timeout));
        if stopped {
            return Ok(End::Stopped);
        }
    }
}

/// Whether toolstack and guest want the disk.
pub(crate) fn is_wanted(store: &mut Store, id: DiskId, look: &Look) -> Result<bool, StoreError> {
    let home = match store.read(&format!("/local/domain/{}", id.domid)) {
        Err(StoreError::Access { .. }) => return Ok(look.online),
        home => home?,
    };
    Ok(look.online && home.is_some())
}

/// Writes our state where all is still as it was seen: another attachment may have come. Whether it was.
fn write(store: &mut Store, id: DiskId, seen: &Look, state: &[u8]) -> Result<bool, StoreError> {
    let dir = directory::path(id);
    let path = format!("{dir}/state");
    store.transaction(|tx| {
        let is_seen = tx.read(&path)?.is_some_and(|now| now == seen.own.to_string().as_bytes())
            && tx.read(&format!("{dir}/params"))? == seen.params;
        if is_seen {
            tx.write(&path, state)?;
        }
        Ok(is_seen)
    })
}
