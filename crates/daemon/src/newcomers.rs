//! Hands clients that speak no NBD to a disk's worker: devices of ublk, and front ends of vhost-user.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ferrite_serve::others::{self, Newcomer, Told};

use crate::Shared;
use crate::state::DiskId;
use crate::table::Phase;

/// How long a worker may take to say what becomes of a client.
const PATIENCE: Duration = Duration::from_secs(10);

/// The worker's reply about a client, and the daemon's end of the client's status socket. That socket ends when the
/// client is not served any more.
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
    file: Option<BorrowedFd<'_>>,
) -> io::Result<HandedOver> {
    let status = send(shared, disk, newcomer, file.as_slice())?;
    let told = others::told(&status, PATIENCE).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::other("the disk's worker has ended, or does not know this kind of client")
        }
        io::ErrorKind::WouldBlock => io::Error::other("the disk's worker does not answer"),
        _ => e,
    })?;
    Ok(HandedOver { told, status: status.into() })
}

/// As [`hand_over`], without waiting for what the worker says: that is to be read from the returned socket.
///
/// # Errors
/// As [`hand_over`].
pub(crate) fn send(
    shared: &Shared,
    disk: DiskId,
    newcomer: &Newcomer,
    files: &[BorrowedFd<'_>],
) -> io::Result<OwnedFd> {
    // A worker without an open image would get the client whenever it has one.
    if !is_served(shared, disk) {
        return Err(io::Error::other("the disk is not served now"));
    }
    let [theirs, ours] = others::status()?;
    let files: Vec<BorrowedFd<'_>> =
        std::iter::once(theirs.as_fd()).chain(files.iter().copied()).collect();
    shared.serving.client(disk, &serde_json::to_string(newcomer)?, &files)?;
    Ok(ours)
}

/// Whether a disk is served.
pub(crate) fn is_served(shared: &Shared, disk: DiskId) -> bool {
    shared.table.read(|disks| disks.get(&disk).is_some_and(|entry| entry.phase == Phase::Served))
}
