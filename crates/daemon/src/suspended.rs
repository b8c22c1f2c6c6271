//! A guest that is suspended: to be moved to another host, or to be saved (attachments.md).
//!
//! Another host may open the image when the guest runs there. It cannot ask for it. So the worker
//! answers what is in flight, completes and closes the image as soon as the guest is suspended, and
//! keeps the guest's rings. The order:
//! 1. The image is closed, and its locks are free.
//! 2. The state file says so, and how the image looked. From here on no worker opens it by itself.
//! 3. The guest goes on here, as its migration has failed. The image is opened, which locks it.
//! 4. It looks as before: no other host has written. The state file says that it is not left any
//!    more. Then the guest is served.
//!
//! A guest whose image has changed is not served: it would go on with outdated data in its memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_serve::blkif::lifecycle::ServeError;
use ferrite_xen::hypervisor::{DomId, DomainState};
use ferrite_xen::store::StoreError;
use serde::{Deserialize, Serialize};

use crate::follow::{Follower, Next};
use crate::params::{Format, Image};
use crate::table::{Entry, Phase};
use crate::unserved::{End, stand_in};
use crate::wait::wait_for;
use crate::{Assignment, Failure, Shared, Step};

/// How often a suspended guest is looked at: no event tells that it goes on.
const INTERVAL: Duration = Duration::from_millis(100);
/// The pause before xenstore is connected to again.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// The watch that fires when a domain is suspended, shuts down, or is gone.
const WATCH: &str = "@releaseDomain";

/// An image as it was closed. Other hosts that write to a file change this. Writes to a block
/// device leave no such trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftImage {
    bytes: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl LeftImage {
    fn of(path: &Path) -> io::Result<LeftImage> {
        if !std::fs::metadata(path)?.is_file() {
            return Ok(LeftImage { bytes: 0, seconds: 0, nanoseconds: 0 });
        }
        // A network file system asks its server when a file is opened.
        let now = File::open(path)?.metadata()?;
        let (bytes, seconds, nanoseconds) = (now.len(), now.mtime(), now.mtime_nsec());
        Ok(LeftImage { bytes, seconds, nanoseconds })
    }

    /// Whether the image looks as it was left.
    fn check(&self, path: &Path) -> Result<(), Failure> {
        let now = LeftImage::of(path).map_err(|e| unseen(path, &e))?;
        match now == *self {
            true => Ok(()),
            false => Err(Failure {
                why: format!(
                    "{} was written while the guest was suspended, maybe by another host that the \
                     guest was moved to: this domain would go on with outdated data in its memory",
                    path.display()
                ),
                help: "destroy this domain (xl destroy), and start the guest anew".to_owned(),
            }),
        }
    }
}

fn unseen(path: &Path, e: &io::Error) -> Failure {
    Failure {
        why: format!("cannot examine {}: {e}", path.display()),
        help: "ferrite tries again; its storage may be missing".to_owned(),
    }
}

/// Starts the thread that has the images of suspended guests closed, if the hypervisor tells of
/// them.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn watch(shared: &Arc<Shared>) -> io::Result<()> {
    if shared.domains.is_none() {
        return Ok(());
    }
    let shared = shared.clone();
    let body = move || {
        while let Err(e) = follow(&shared) {
            tracing::debug!("suspended guests are not noticed: {e}");
            if shared.is_stopped(RECONNECT_PAUSE) {
                return;
            }
        }
    };
    std::thread::Builder::new().name("suspended".to_owned()).spawn(body).map(drop)
}

/// Follows xenstore until the daemon stops.
fn follow(shared: &Shared) -> Result<(), StoreError> {
    let mut store = (shared.connect)()?;
    store.watch(WATCH, "suspended")?;
    loop {
        while store.poll_event()?.is_some() {}
        find(shared);
        let [_, stopped] = wait_for([store.fd(), shared.stop.fd()], None);
        if stopped {
            return Ok(());
        }
    }
}

/// Finds guests that are suspended, and has their images closed.
fn find(shared: &Shared) {
    let Some(domains) = &shared.domains else { return };
    let domids: BTreeSet<u16> = shared.table.read(|disks| {
        let served = disks.iter().filter(|(_, entry)| may_be_left(entry));
        served.map(|(id, _)| id.domid).collect()
    });
    for domid in domids {
        match domains.state(DomId(domid)) {
            Ok(DomainState::Suspended) => {}
            Ok(_) => continue,
            Err(e) => {
                tracing::debug!("cannot ask for the state of domain {domid}: {e}");
                continue;
            }
        }
        let of_domain = |disks: &std::collections::BTreeMap<_, Entry>| {
            let ids = disks.keys().copied();
            ids.filter(|id: &crate::state::DiskId| id.domid == domid).collect::<Vec<_>>()
        };
        for id in shared.table.read(of_domain) {
            shared.table.change(id, |entry| {
                if may_be_left(entry) {
                    entry.is_suspended = true;
                    entry.wake();
                }
            });
        }
    }
}

/// Whether a disk has an image that can be left to another host. A store has one host at a time. An export has no lock
/// and no date, so nothing would be seen of another host: its connections stay.
fn may_be_left(entry: &Entry) -> bool {
    matches!(entry.phase, Phase::Served | Phase::Starting)
        && !entry.is_suspended
        && entry.rests_for.is_none()
        && entry.pause.is_none()
        && entry.beside.is_none()
        && entry
            .image
            .as_ref()
            .is_some_and(|image| !matches!(image.format, Format::Store | Format::Nbd))
}

impl Assignment<'_> {
    /// Records that the image of a guest that was suspended is open again, and locked.
    ///
    /// # Errors
    /// Another host has written to it. The guest must not be served.
    pub(crate) fn end_suspension(&self) -> Result<(), Failure> {
        let (id, shared) = (self.id, self.shared);
        let Some(left) = shared.table.read(|disks| disks.get(&id)?.left.clone()) else {
            return Ok(());
        };
        left.check(self.image.file())?;
        let state = shared.states.read(id).map_err(|e| shared.state_failure(&e))?;
        if let Some(state) = state {
            shared.states.write(&state.leaving(None)).map_err(|e| shared.state_failure(&e))?;
        }
        shared.table.change(id, |entry| entry.left = None);
        tracing::info!("disk {id} is served on: its guest is not suspended any more");
        Ok(())
    }

    /// Records that the image stays open while the guest is suspended.
    pub(crate) fn keep_image(&self, why: &ServeError) {
        tracing::info!("disk {}: its guest is suspended, and its image stays open: {why}", self.id);
        self.shared.table.change(self.id, |entry| entry.is_suspended = false);
    }
}

impl Follower {
    /// Whether the image is closed as the guest is suspended, or is to be.
    pub(crate) fn is_left(&self) -> bool {
        let is_left = |entry: &Entry| entry.is_suspended || entry.left.is_some();
        self.shared.table.read(|disks| disks.get(&self.id).is_some_and(is_left))
    }

    /// The image as it was left.
    pub(crate) fn left(&self) -> Option<LeftImage> {
        self.shared.table.read(|disks| disks.get(&self.id)?.left.clone())
    }

    /// Leaves the image closed until the guest goes on, and serves it then.
    pub(crate) fn stay_suspended(&mut self, image: &Image) -> Result<Next, Failure> {
        match self.wait_suspended(image)? {
            End::Detached | End::Another => {
                self.add_unswept();
                return Ok(Next::Gone);
            }
            End::Stopped if self.ends() => return Ok(Next::Ended),
            End::Stopped => return Ok(Next::Again),
            End::Retry => {}
        }
        self.shared.table.change(self.id, |entry| entry.is_suspended = false);
        self.shared.table.set(self.id, Phase::Starting);
        let served = self.serve(image, false);
        if served.is_err() && self.left().is_some() {
            // It may have been opened: another host has written just before it was locked.
            if let Err(Failure { why, .. }) = self.shared.serving.close(self.id, &self.stop) {
                tracing::warn!("disk {}: {why}", self.id);
            }
        }
        Ok(self.next(served?))
    }

    /// Answers the toolstack until the guest can go on, the thread is woken or the disk is detached.
    fn wait_suspended(&mut self, image: &Image) -> Result<End, Failure> {
        let left = match self.left() {
            Some(left) => left,
            None => self.leave(image)?,
        };
        let mut store = (self.shared.connect)().map_err(|e| Failure::store(&e))?;
        let (mut within, mut is_logged) = (Duration::ZERO, false);
        loop {
            let end = stand_in(&mut store, self.id, false, Some(within), &self.stop);
            match end.map_err(|e| Failure::store(&e))? {
                End::Retry => within = INTERVAL,
                end => return Ok(end),
            }
            if !self.goes_on() {
                self.shared.table.set(self.id, Phase::Suspended);
                continue;
            }
            let Err(failure) = left.check(image.file()) else { return Ok(End::Retry) };
            if !is_logged {
                tracing::error!("disk {} is not served: {failure}", self.id);
                self.report(&mut store, Some(&failure));
                self.shared.table.set(self.id, Phase::Failed(failure));
                is_logged = true;
            }
        }
    }

    /// Records how the closed image looks.
    fn leave(&self, image: &Image) -> Result<LeftImage, Failure> {
        let path = image.file();
        let left = LeftImage::of(path).map_err(|e| unseen(path, &e))?;
        self.shared.table.change(self.id, |entry| entry.left = Some(left.clone()));
        // The next daemon must not open an image that another host may have.
        self.write_state(image)?;
        (self.shared.on_step)(Step::Suspended);
        tracing::info!("disk {}: its guest is suspended, and its image closed", self.id);
        Ok(left)
    }

    /// Whether the guest is not suspended any more. The lock protects the image where the hypervisor
    /// does not tell.
    fn goes_on(&self) -> bool {
        let Some(domains) = &self.shared.domains else { return true };
        match domains.state(DomId(self.id.domid)) {
            Ok(state) => state == DomainState::Runs,
            Err(e) => {
                tracing::debug!("cannot ask for the state of domain {}: {e}", self.id.domid);
                true
            }
        }
    }
}
