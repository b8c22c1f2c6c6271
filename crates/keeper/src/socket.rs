//! A keeper's socket, and the lock that says that it is somebody's.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use rustix::process::umask;

/// Those who have asked and were not yet heard.
const BACKLOG: i32 = 8;
/// How often it is tried to make a lock that others remove.
const ATTEMPTS: u32 = 100;

/// Where a keeper listens, as long as it has the lock.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) lock: OwnedFd,
    pub(crate) listener: OwnedFd,
}

impl Place {
    /// Takes the lock and listens. What a dead keeper has left is removed.
    ///
    /// # Errors
    /// `WouldBlock`: a keeper lives. Otherwise the file system's.
    pub(crate) fn take(socket: &Path) -> io::Result<Place> {
        if let Some(dir) = socket.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let lock = lock(&lock_path(socket))?;
        remove(socket)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let before = umask(Mode::XUSR | Mode::RWXG | Mode::RWXO);
        let bound = bind(&listener, &SocketAddrUnix::new(socket)?);
        umask(before);
        bound?;
        listen(&listener, BACKLOG)?;
        Ok(Place { lock, listener })
    }

    /// Removes both names, the lock's last: whoever has that may take the other.
    pub(crate) fn remove(&self, socket: &Path) -> io::Result<()> {
        remove(socket)?;
        remove(&lock_path(socket))
    }
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// A file of this name, which is locked for us alone.
fn lock(path: &Path) -> io::Result<OwnedFd> {
    for _ in 0..ATTEMPTS {
        let lock = File::options().create(true).append(true).mode(0o600).open(path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // Its last owner may have removed it before letting go of it.
        match fs::symlink_metadata(path) {
            Ok(now) if now.ino() == lock.metadata()?.ino() => return Ok(lock.into()),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Err(io::Error::other("its lock vanishes again and again"))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_one_keepers_at_a_time_and_what_a_dead_one_has_left_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keepers/vbd-1-2.sock");
        let first = Place::take(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Place::take(&path).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        let second = Place::take(&path).unwrap();
        second.remove(&path).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        // The one whose name is gone keeps nobody away.
        Place::take(&path).unwrap();
    }
}
