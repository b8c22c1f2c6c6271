//! Orders about the volume of a store that a worker has open. Other processes cannot change it, as the worker has the
//! store.

use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, DiskError, Repeated, SECTOR_BYTES, Session};
use serde::{Deserialize, Serialize};

use super::connected::EngineFactory;
use crate::path::device::Device;

/// Operations in flight of a session that changes a volume.
const ENTRIES: u32 = 32;
/// How long requests under way may take before a volume grows.
const PATIENCE: Duration = Duration::from_secs(20);

/// An order to a worker about its volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum VolumeOrder {
    /// Tell its size.
    Look,
    /// Tell whether a snapshot of it could get this name.
    Check(String),
    /// Keep what it is now as a snapshot in the same store. Guests go on.
    Snapshot {
        /// The name of the snapshot.
        name: String,
        /// Whether a worker may have done it already.
        again: bool,
    },
    /// Make it larger, to this size in bytes. Guests wait meanwhile, and are told.
    Grow(u64),
}

/// A worker's reply to a [`VolumeOrder`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeReply {
    /// It was done. The volume has this size in bytes.
    Done(u64),
    /// Nothing has changed.
    Refused {
        /// The reason.
        why: String,
        /// The next step for the administrator.
        help: String,
    },
}

impl VolumeReply {
    pub(super) fn refused(why: impl Into<String>, help: &str) -> VolumeReply {
        VolumeReply::Refused { why: why.into(), help: help.to_owned() }
    }

    /// The image is closed, or not open yet.
    pub(super) fn not_open() -> VolumeReply {
        VolumeReply::refused("the disk is not open", "look at its phase: ferrite disk show")
    }

    fn of(done: Result<u64, DiskError>) -> VolumeReply {
        match done {
            Ok(bytes) => VolumeReply::Done(bytes),
            Err(e) => VolumeReply::refused(format!("{}: {}", e.what(), e.why()), e.help()),
        }
    }
}

/// Carries out an order for the disk that is served.
pub(super) fn carry_out(
    device: &Arc<Device>,
    engine: &EngineFactory,
    order: &VolumeOrder,
) -> VolumeReply {
    let changes = matches!(order, VolumeOrder::Snapshot { .. } | VolumeOrder::Grow(_));
    if device.flush_has_failed() && changes {
        let help = "detach the disk first";
        return VolumeReply::refused("a flush of this disk has failed", help);
    }
    match order {
        VolumeOrder::Look => look(device, |_| Ok(())),
        VolumeOrder::Check(name) => look(device, |disk| match disk {
            Disk::Store(volume) => volume.check_new_name(name),
            _ => Ok(()),
        }),
        VolumeOrder::Snapshot { name, again } => {
            let repeated = if *again { Repeated::Maybe } else { Repeated::No };
            snapshot(device, engine, name, repeated)
        }
        VolumeOrder::Grow(bytes) => grow(device, engine, *bytes),
    }
}

fn bytes(disk: &Disk) -> u64 {
    disk.sectors() * SECTOR_BYTES
}

fn look(device: &Device, check: impl FnOnce(&Disk) -> Result<(), DiskError>) -> VolumeReply {
    match device.disk() {
        Ok(disk) => VolumeReply::of(check(&disk).map(|()| bytes(&disk))),
        Err(e) => VolumeReply::refused(e.to_string(), "attach the disk again"),
    }
}

fn snapshot(
    device: &Device,
    engine: &EngineFactory,
    name: &str,
    repeated: Repeated,
) -> VolumeReply {
    let disk = match device.disk() {
        Ok(disk) => disk,
        Err(e) => return VolumeReply::refused(e.to_string(), "attach the disk again"),
    };
    match session(&disk, engine) {
        Ok(mut session) => {
            VolumeReply::of(session.snapshot_volume(name, repeated).map(|()| bytes(&disk)))
        }
        Err(reply) => reply,
    }
}

/// Queues and clients of NBD rest while the volume grows: they map it without a lock.
fn grow(device: &Arc<Device>, engine: &EngineFactory, to: u64) -> VolumeReply {
    let (disk, away) = match device.park(PATIENCE) {
        Ok(parked) => parked,
        Err(e) => return VolumeReply::refused(e.to_string(), "try again"),
    };
    let disk = Arc::new(disk);
    let reply = match session(&disk, engine) {
        Ok(mut session) => VolumeReply::of(session.grow_volume(to).map(|()| bytes(&disk))),
        Err(reply) => reply,
    };
    // The session has ended, and it had the only other copy.
    let Some(disk) = Arc::into_inner(disk) else {
        return VolumeReply::refused(
            "the disk is still in use: this is a bug in ferrite",
            "report it",
        );
    };
    match away.go_on_with(disk) {
        Ok(()) => reply,
        Err(refused) => VolumeReply::refused(
            format!("the disk cannot go on: {}", refused.unfit),
            "its worker is started again",
        ),
    }
}

fn session(disk: &Arc<Disk>, engine: &EngineFactory) -> Result<Session, VolumeReply> {
    Session::new(disk.clone(), |arena| engine(arena, ENTRIES)).map_err(|e| {
        let help = "the host may lack memory; try again";
        VolumeReply::refused(format!("cannot begin the change: {e}"), help)
    })
}
