//! Hands clients that speak no NBD to a disk's worker: devices of ublk, and front ends of vhost-user.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ferrite_serve::others::{self, Newcomer, Told};

use crate::Shared;
use crate::state::DiskId;
use crate::table::Phase;

/// How long a worker may take to say what becomes of a client.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a worker has said of a client, and the daemon's end of the client's status socket. That one ends when the client
/// is not served any more.
pub(crate) struct HandedOver {
    pub(crate) told: Told,
    pub(crate) status: UnixStream,
}

/// Hands a client to the worker of a disk that is served, with what the client is.
///
/// # Errors
/// The disk is not served now; its keeper or its worker does not take the client.
pub(crate) fn hand_over(
    shared: &Shared,
    disk: DiskId,
    newcomer: &Newcomer,
    file: Option<&OwnedFd>,
) -> io::Result<HandedOver> {
    let phase = shared.table.read(|disks| disks.get(&disk).map(|entry| entry.phase.clone()));
    // A worker without an open image would get the client whenever it has one.
    if phase != Some(Phase::Served) {
        return Err(io::Error::other("the disk is not served now"));
    }
    let [theirs, ours] = others::status()?;
    let files: Vec<BorrowedFd<'_>> =
        std::iter::once(theirs.as_fd()).chain(file.map(AsFd::as_fd)).collect();
    shared.serving.client(disk, &serde_json::to_string(newcomer)?, &files)?;
    drop(theirs);
    let told = others::told(&ours, PATIENCE).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::other("the disk's worker has ended, or does not know this kind of client")
        }
        io::ErrorKind::WouldBlock => io::Error::other("the disk's worker does not answer"),
        _ => e,
    })?;
    Ok(HandedOver { told, status: ours.into() })
}
