//! The listening socket's place in the file system.
//!
//! A name that a program listens at is refused. One that a killed program has left is taken. No
//! other process may interfere between the check and the removal: a file beside the socket is
//! locked from before the check until the socket is removed (nbd-rules.md 5).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, chmod, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// Why a socket was not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A program listens there.
    #[error("a program listens there already")]
    InUse,
    /// The file is not a socket.
    #[error("there is something that is no socket")]
    NoSocket,
    /// The system has failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// A listening socket. It is removed with its lock when this is dropped.
pub struct Bound {
    /// The listener for [`Server::run`](super::Server::run).
    pub listener: UnixListener,
    /// Whether a killed program had left the socket.
    pub was_left: bool,
    path: PathBuf,
    lock_path: PathBuf,
    /// Device and inode of the socket: no other file is removed.
    id: (u64, u64),
    _lock: File,
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Takes the lock beside a socket. Its last holder may have removed the file meanwhile.
fn lock(path: &Path) -> Result<File, BindError> {
    loop {
        let mut options = OpenOptions::new();
        options.write(true).create(true).mode(0o600);
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
        let file = options.open(path)?;
        if !file.metadata()?.is_file() {
            return Err(BindError::NoSocket);
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(BindError::InUse),
            Err(e) => return Err(io::Error::from(e).into()),
        }
        let ours = file.metadata()?;
        let there = std::fs::symlink_metadata(path);
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
            return Ok(file);
        }
    }
}

/// Listens at a path, for this user only (mode 0600). Links are not followed.
///
/// # Errors
/// See [`BindError`]. Nothing was changed.
pub fn bind(path: &Path) -> Result<Bound, BindError> {
    let lock_path = lock_path(path);
    let lock = lock(&lock_path)?;
    let was_left = match clear(path) {
        Ok(was_left) => was_left,
        Err(e) => {
            let _ = std::fs::remove_file(&lock_path);
            return Err(e);
        }
    };
    match listen(path) {
        Ok((listener, id)) => {
            let path = path.to_owned();
            Ok(Bound { listener, was_left, path, lock_path, id, _lock: lock })
        }
        Err(e) => {
            let _ = std::fs::remove_file(&lock_path);
            Err(e.into())
        }
    }
}

/// Listens at a path. Clients can connect only when the socket has its mode. Returns device and
/// inode, too.
fn listen(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let made = chmod(path, Mode::from_raw_mode(0o600)).and_then(|()| {
        rustix::net::listen(&socket, BACKLOG)?;
        rustix::fs::lstat(path)
    });
    match made {
        Ok(made) => Ok((socket.into(), (made.st_dev, made.st_ino))),
        Err(e) => {
            let _ = std::fs::remove_file(path);
            Err(e.into())
        }
    }
}

/// Removes a socket that no program listens at. Returns whether there was one.
fn clear(path: &Path) -> Result<bool, BindError> {
    let there = match std::fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e.into()),
    };
    if !there.file_type().is_socket() {
        return Err(BindError::NoSocket);
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)?;
            Ok(true)
        }
        // A program that does not lock has removed it meanwhile.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        // A full backlog belongs to a listener, too.
        Ok(_) => Err(BindError::InUse),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(BindError::InUse),
        Err(e) => Err(e.into()),
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let there = std::fs::symlink_metadata(&self.path);
        if there.is_ok_and(|there| (there.dev(), there.ino()) == self.id) {
            let _ = std::fs::remove_file(&self.path);
        }
        let _ = std::fs::remove_file(&self.lock_path);
    }
}
