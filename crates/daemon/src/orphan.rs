//! The start of a new worker: with the guest that its predecessor has left, if no daemon runs that
//! would handle it.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use ferrite_serve::blkif::lifecycle::{Ahead, Orphan, ServeError, Start, TABLE};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};
use rustix::fs::{FlockOperation, flock};

use crate::Paths;
use crate::directory;
use crate::state::{DiskId, States, TapState};

/// The longest wait for a reply of xenstore. The worker handles nothing else meanwhile.
const XENSTORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Decides what the worker of this disk starts with. `run` is the run directory. Call it while the
/// worker has its rights, since `connect` opens a connection to xenstore.
pub fn start(run: &Path, id: DiskId, connect: impl FnOnce() -> Result<Store, StoreError>) -> Start {
    let paths = Paths { run: run.to_owned() };
    // Another attachment has the disk now.
    if !is_to_be_served(&paths, id) {
        return Start::WaitForFollower;
    }
    let known = States::peek(&paths.states(), id);
    let tap = known.as_ref().and_then(|known| known.tap.clone());
    let is_without_guest = tap.as_ref().is_some_and(|tap| tap.guest.is_none());
    // No guest was connected.
    if !is_without_guest && !run.join(id.file_name()).join(TABLE).exists() {
        return Start::WaitForFollower;
    }
    // A daemon knows more than xenstore, such as whether the disk is to rest. So it decides.
    if a_daemon_runs(&paths) {
        return Start::ExpectFollower;
    }
    let tune = known.map(|known| Box::new(known.tune)).unwrap_or_default();
    let guest = match &tap {
        None => id,
        Some(TapState { guest: Some(guest), .. }) => *guest,
        Some(TapState { read_only, is_own, .. }) => {
            let ahead = Ahead { read_only: *read_only, toolstack_locks: !is_own };
            return Start::Ahead { ahead, tune };
        }
    };
    match find(guest, connect) {
        Ok(Some(mut orphan)) => {
            orphan.read_only = tap.as_ref().map_or(orphan.read_only, |tap| tap.read_only);
            orphan.tune = tune;
            Start::Orphan(orphan)
        }
        Ok(None) => Start::WaitForFollower,
        Err(e) => {
            tracing::warn!("no daemon runs, and xenstore does not tell whether a guest waits: {e}");
            Start::ExpectFollower
        }
    }
}

fn find(
    id: DiskId,
    connect: impl FnOnce() -> Result<Store, StoreError>,
) -> Result<Option<Orphan>, ServeError> {
    let mut store = connect()?.with_timeout(XENSTORE_TIMEOUT);
    Orphan::find(&mut store, &directory::path(id), DomId(id.domid), id.devid)
}

/// Whether the last daemon's state file says that this disk is to be served.
fn is_to_be_served(paths: &Paths, id: DiskId) -> bool {
    let known = States::peek(&paths.states(), id);
    // Another host may have the image of a guest that is suspended.
    let known = known.filter(|known| known.left.is_none());
    known.is_some_and(|known| {
        let is_closed = known.pause.is_some() || known.tap.as_ref().is_some_and(|tap| tap.closed);
        known.rests_for.is_none() && known.beside.is_none() && !is_closed
    })
}

fn a_daemon_runs(paths: &Paths) -> bool {
    let lock = File::open(paths.lock());
    lock.is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
}
