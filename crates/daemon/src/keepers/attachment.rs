//! The facts that a keeper's disk needs of its directory in xenstore, and those that its keeper says of it.

use std::path::Path;

use ferrite_disk::Fencing;
use ferrite_keeper::DiskSpec;
use ferrite_serve::blkif::lifecycle::{Attachment, FollowConfig};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::Mover;
use ferrite_xen::store::{Store, StoreError};

use super::{Programs, not_served};
use crate::{Assignment, Failure};

/// Whether the attachment was not served yet.
pub(super) fn is_new(store: &mut Store, disk: &Assignment<'_>) -> Result<bool, Failure> {
    let state = store.read(&format!("{}/state", disk.backend)).map_err(|e| Failure::store(&e))?;
    Ok(state.as_deref() == Some(b"1"))
}

/// Whether the toolstack lets the guest write. A worker of a read-only disk gets no right to write.
pub(super) fn is_written(store: &mut Store, disk: &Assignment<'_>) -> Result<bool, Failure> {
    match Attachment::read(store, &disk.backend, DomId(disk.id.domid)).map_err(not_served)? {
        Some(attachment) => Ok(!attachment.read_only),
        None => Err(Failure {
            why: "the toolstack has not written all keys of the disk's directory".to_owned(),
            help:
                "ferrite tries again; look at the toolstack's directory of the disk (xenstore-ls)"
                    .to_owned(),
        }),
    }
}

/// Writes the keeper's process number and the NBD socket to xenstore.
///
/// Toolstacks set that process's priority and read its statistics. They give QEMU the socket, by
/// which an HVM guest boots. So it is written before the disk is announced.
pub(super) fn name_keeper(
    store: &mut Store,
    disk: &Assignment<'_>,
    pid: i32,
    nbd: Option<&Path>,
) -> Result<(), Failure> {
    let dir = &disk.backend;
    let socket = format!("{dir}/physical-device-path");
    let named = store.transaction(|tx| {
        // Nothing is written to a directory that has gone, since that would create it again.
        match tx.read(&format!("{dir}/state"))? {
            Some(_) => tx.write(&format!("{dir}/kthread-pid"), pid.to_string().as_bytes())?,
            None => return Ok(()),
        }
        // A path that a script has written stays.
        match (nbd, tx.read(&socket)?) {
            (Some(nbd), None) => tx.write(&socket, nbd.as_os_str().as_encoded_bytes()),
            _ => Ok(()),
        }
    });
    match named {
        // A quota, for example. The disk is served without it.
        Err(e) if !e.is_fatal() => {
            tracing::debug!("cannot name the keeper of disk {}: {e}", disk.id);
            Ok(())
        }
        named => named.map_err(|e: StoreError| Failure::store(&e)),
    }
}

pub(super) fn follow_config(disk: &Assignment<'_>) -> FollowConfig {
    let options = &disk.options;
    let offer = Offer {
        max_queues: options.queues,
        max_ring_order: options.ring_order,
        max_indirect_segments: options.indirect,
        persistent: options.mover == Mover::Persistent,
    };
    let backend = disk.backend.clone();
    let (domid, devid) = (DomId(disk.guest.domid), disk.guest.devid);
    let (attached, ahead, defers) = (disk.attached.clone(), disk.ahead, disk.defers);
    FollowConfig { backend, domid, devid, offer, attached, ahead, defers }
}

/// Whether the disk's worker is started with `fence = "weak-reservation"`. To parse all its arguments takes far longer
/// than to look for this one.
pub(super) fn is_weak(programs: &dyn Programs, spec: &DiskSpec) -> bool {
    let weak = Fencing::WeakReservation;
    let word = weak.to_string();
    spec.worker.iter().any(|argument| argument.contains(&word))
        && programs.options(&spec.worker).is_some_and(|options| options.fence == weak)
}
