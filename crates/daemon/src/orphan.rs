//! What a worker begins with: a guest that its predecessor has left, if no daemon runs that would see to it.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use ferrite_serve::blkif::lifecycle::{Orphan, ServeError, Start, TABLE};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};
use rustix::fs::{FlockOperation, flock};

use crate::Places;
use crate::directory;
use crate::state::{DiskId, States};

/// How long xenstore may take for each answer. A worker that waits hears nobody.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// What the worker of this disk begins with, in this folder for all that outlives a process. To be asked
/// while the worker has its rights: `connect` leads to xenstore.
pub fn start(run: &Path, id: DiskId, connect: impl FnOnce() -> Result<Store, StoreError>) -> Start {
    let places = Places { run: run.to_owned() };
    // Nobody was connected, or its daemon has said that another has the disk now.
    if !run.join(id.file_name()).join(TABLE).exists() || !is_to_be_served(&places, id) {
        return Start::Asked;
    }
    // A daemon knows more than xenstore: whether the disk is to rest, say. So it is left to that.
    if a_daemon_runs(&places) {
        return Start::Expecting;
    }
    match look(id, connect) {
        Ok(orphan) => orphan.map_or(Start::Asked, Start::Orphan),
        Err(e) => {
            tracing::warn!("no daemon runs, and it cannot be seen whether a guest waits: {e}");
            Start::Expecting
        }
    }
}

fn look(
    id: DiskId,
    connect: impl FnOnce() -> Result<Store, StoreError>,
) -> Result<Option<Orphan>, ServeError> {
    let mut store = connect()?.with_timeout(ANSWERED_WITHIN);
    Orphan::look(&mut store, &directory::path(id), DomId(id.domid), id.devid)
}

/// As the last daemon has left it.
fn is_to_be_served(places: &Places, id: DiskId) -> bool {
    let known = States::look(&places.states(), id);
    known.is_some_and(|known| known.rests_for.is_none() && known.beside.is_none())
}

fn a_daemon_runs(places: &Places) -> bool {
    let lock = File::open(places.lock());
    lock.is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
}
