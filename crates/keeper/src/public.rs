//! A disk's public socket, where NBD clients connect.
//!
//! The keeper listens and accepts. So the socket outlives a worker, and a worker needs no right to
//! listen.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use rustix::net::{SocketFlags, SocketType, accept_with};

use crate::socket::listen_at;

/// Connections that wait to be accepted. Further clients wait in `connect`.
const BACKLOG: i32 = 16;
/// The socket's name in the run directory.
const NAME: &str = "nbd";

/// The path of the NBD stream socket of the disk with this run directory.
pub fn nbd_socket(run_dir: &Path) -> PathBuf {
    run_dir.join(NAME)
}

/// Listens at the public socket, which is made at `public` if that is given. The caller holds the
/// keeper's lock: a leftover socket is removed.
///
/// # Errors
/// Errors of the file system.
pub(crate) fn listen(run_dir: &Path, public: Option<&Path>) -> io::Result<OwnedFd> {
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
    remove(run_dir);
    let name = nbd_socket(run_dir);
    let Some(public) = public else { return listen_at(&name, SocketType::STREAM, BACKLOG) };
    if let Some(folder) = public.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    crate::socket::remove(public)?;
    let listener = listen_at(public, SocketType::STREAM, BACKLOG)?;
    symlink(public, &name)?;
    Ok(listener)
}

/// Removes the socket of a keeper that ends or is dead.
pub(crate) fn remove(run_dir: &Path) {
    let name = nbd_socket(run_dir);
    // A socket that stays is unused, and the next keeper removes it.
    if let Ok(public) = std::fs::read_link(&name) {
        let _ = std::fs::remove_file(public);
    }
    let _ = std::fs::remove_file(name);
}

/// Accepts an NBD client. `None`: there was none, or it has gone again.
///
/// # Errors
/// Errors of `accept`, such as too many open descriptors. The caller may try again later.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    use rustix::io::Errno;
    match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(client) => Ok(Some(client)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
