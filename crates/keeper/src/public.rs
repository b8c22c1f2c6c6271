//! A disk's public socket: where clients of NBD find it, as long as there is the disk.
//!
//! The keeper listens and accepts, so that the socket stays when a worker ends, and a worker needs no
//! right to listen.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::net::{SocketFlags, SocketType, accept_with};

use crate::socket::listen_at;

/// Those who have come and were not accepted yet: more wait in their own `connect`.
const BACKLOG: i32 = 16;
/// The name in the run directory.
const NAME: &str = "nbd";

/// The socket by which others find the disk that has this run directory: NBD, on a stream.
pub fn nbd_socket(run_dir: &Path) -> PathBuf {
    run_dir.join(NAME)
}

/// Listens. Whoever calls has the keeper's lock: what a dead keeper has left is removed.
///
/// # Errors
/// The file system's.
pub(crate) fn listen(run_dir: &Path) -> io::Result<OwnedFd> {
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
    remove(run_dir);
    listen_at(&nbd_socket(run_dir), SocketType::STREAM, BACKLOG)
}

/// Removes the socket, of a keeper that is at its end or dead.
pub(crate) fn remove(run_dir: &Path) {
    // What stays is nobody's, and the next keeper's to remove.
    let _ = std::fs::remove_file(nbd_socket(run_dir));
}

/// The next who has come. `None`: nobody, or nobody who is still there.
///
/// # Errors
/// Out of descriptors, say: it is worth another try later.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    use rustix::io::Errno;
    match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(client) => Ok(Some(client)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
