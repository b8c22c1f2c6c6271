//! A keeper's socket, and the lock that says that it is somebody's.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_io::lock_file::lock;
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use rustix::process::umask;

use crate::worker::remove_alive;

/// How its socket's name ends,
const SOCKET: &str = ".sock";
/// and, behind that, its lock's.
const LOCK: &str = ".lock";
/// Those who have asked and were not yet heard.
const BACKLOG: i32 = 8;
/// How long a keeper may take to be gone that was killed: who it was about to start has its descriptors
/// for a moment.
const GONE: u32 = 50;
const LOOK_AGAIN: Duration = Duration::from_millis(20);

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
        let listener = listen_at(socket, SocketType::SEQPACKET, BACKLOG)?;
        Ok(Place { lock, listener })
    }

    /// Removes both names, the lock's last: whoever has that may take the other.
    pub(crate) fn remove(&self, socket: &Path) -> io::Result<()> {
        remove(socket)?;
        remove(&lock_path(socket))
    }
}

/// Removes what a keeper that is dead has left: its socket, its lock and its worker's. While operations
/// of its worker are under way the locks stay. No keeper of this name must be started meanwhile.
///
/// # Errors
/// `WouldBlock`: it lives. Otherwise the file system's.
pub fn forget(socket: &Path, run_dir: &Path) -> io::Result<()> {
    let lock_path = lock_path(socket);
    let mut looks = 0;
    let _lock = loop {
        match lock(&lock_path) {
            // There is no folder, and nothing in it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => break None,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && looks < GONE => looks += 1,
            locked => break Some(locked?),
        }
        std::thread::sleep(LOOK_AGAIN);
    };
    remove(socket)?;
    crate::public::remove(run_dir);
    match remove_alive(run_dir) {
        // The lock last: by its name a daemon that starts finds what is left.
        Ok(()) => remove(&lock_path),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(()),
        Err(e) => Err(e),
    }
}

/// The socket and the lock of which keeper this file is.
pub fn name_of(file: &str) -> Option<&str> {
    file.strip_suffix(LOCK).unwrap_or(file).strip_suffix(SOCKET)
}

/// The file name of a keeper's socket.
pub fn socket_name(name: &str) -> String {
    format!("{name}{SOCKET}")
}

/// Listens at a path, for this user only. A keeper has one thread, and so one mask.
pub(crate) fn listen_at(path: &Path, kind: SocketType, backlog: i32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    let before = umask(Mode::XUSR | Mode::RWXG | Mode::RWXO);
    let bound = bind(&listener, &SocketAddrUnix::new(path)?);
    umask(before);
    bound?;
    listen(&listener, backlog)?;
    Ok(listener)
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(LOCK);
    name.into()
}

pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

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
