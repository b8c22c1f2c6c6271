//! A keeper's socket, and the lock that shows that its keeper lives.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_host::lock_file::lock;
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use rustix::process::umask;

use crate::worker::remove_alive;

/// Suffix of a keeper's socket.
const SOCKET: &str = ".sock";
/// Suffix of a keeper's lock, after that of its socket.
const LOCK: &str = ".lock";
/// Connections that wait to be accepted.
const BACKLOG: i32 = 8;
/// Attempts to lock the file of a killed keeper. A child that it was about to start holds a copy of
/// the lock's descriptor for a moment.
const LOCK_TRIES: u32 = 50;
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A keeper's listening socket with its lock.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) lock: OwnedFd,
    pub(crate) listener: OwnedFd,
}

impl Endpoint {
    /// Takes the lock and listens. The socket of a dead keeper is removed.
    ///
    /// # Errors
    /// `WouldBlock`: a keeper lives. Otherwise errors of the file system.
    pub(crate) fn take(socket: &Path) -> io::Result<Endpoint> {
        if let Some(dir) = socket.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let lock = lock(&lock_path(socket))?;
        remove(socket)?;
        let listener = listen_at(socket, SocketType::SEQPACKET, BACKLOG)?;
        Ok(Endpoint { lock, listener })
    }

    /// Removes both files, the lock's last: the holder of the lock may remove the socket.
    pub(crate) fn remove(&self, socket: &Path) -> io::Result<()> {
        remove(socket)?;
        remove(&lock_path(socket))
    }
}

/// Removes the files of a dead keeper: its socket, its lock and its worker's lock. The locks stay
/// while I/O of its worker is under way. The caller must not start a keeper of this name meanwhile.
///
/// # Errors
/// `WouldBlock`: the keeper lives. Otherwise errors of the file system.
pub fn remove_leftovers(socket: &Path, run_dir: &Path) -> io::Result<()> {
    let lock_path = lock_path(socket);
    let mut tries = 0;
    let _lock = loop {
        match lock(&lock_path) {
            // The directory does not exist, so there is nothing in it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => break None,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && tries < LOCK_TRIES => tries += 1,
            locked => break Some(locked?),
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    remove(socket)?;
    crate::public::remove(run_dir);
    match remove_alive(run_dir) {
        // The lock goes last: a starting daemon finds leftovers by its name.
        Ok(()) => remove(&lock_path),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(()),
        Err(e) => Err(e),
    }
}

/// The keeper's name in the file name of its socket or lock. `None` for other files.
pub fn name_of(file: &str) -> Option<&str> {
    file.strip_suffix(LOCK).unwrap_or(file).strip_suffix(SOCKET)
}

/// The file name of the socket of the keeper `name`.
pub fn socket_name(name: &str) -> String {
    format!("{name}{SOCKET}")
}

/// Listens at `path` with access for this user only. The umask is changed meanwhile: a keeper has
/// one thread.
pub(crate) fn listen_at(path: &Path, kind: SocketType, backlog: i32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    let old_mask = umask(Mode::XUSR | Mode::RWXG | Mode::RWXO);
    let bound = bind(&listener, &SocketAddrUnix::new(path)?);
    umask(old_mask);
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
        let first = Endpoint::take(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Endpoint::take(&path).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        let second = Endpoint::take(&path).unwrap();
        second.remove(&path).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        // An endpoint whose files are removed does not block the next one.
        Endpoint::take(&path).unwrap();
    }
}
