//! The resources of a group besides its disks: the socket where disks join, the socket for
//! commands, and the worker's lock.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use ferrite_host::clock;
use ferrite_host::process::take_given;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::log;
use crate::member::{CLIENTS, accept};
use crate::socket::{Endpoint, listen_at, remove};
use crate::spec::{DiskSpec, Group};
use crate::wire::{KEEPER, Request};
use crate::worker::{Worker, remove_alive};

/// Connections to the command socket that wait to be accepted.
const BACKLOG: i32 = 16;

/// The sockets and the lock of a group.
pub(crate) struct GroupEndpoint {
    group: Group,
    pub(crate) endpoint: Endpoint,
    pub(crate) clients: Vec<OwnedFd>,
    /// The listening socket for commands and its path.
    pub(crate) commands: Option<(OwnedFd, PathBuf)>,
}

impl GroupEndpoint {
    /// Takes the group's lock and listens at its sockets.
    ///
    /// # Errors
    /// `WouldBlock`: a keeper of this group lives. Otherwise errors of the file system.
    pub(crate) fn take(group: Group) -> io::Result<GroupEndpoint> {
        let endpoint = Endpoint::take(&group.socket)?;
        let commands = group.commands.as_deref().and_then(|path| {
            let log_failure = |e: &io::Error| {
                log(&format!(
                    "cannot listen for commands on the store, so they find it in use: {e}"
                ));
            };
            listen_for_commands(path).inspect_err(log_failure).ok()
        });
        Ok(GroupEndpoint { group, endpoint, clients: Vec::new(), commands })
    }

    /// Takes over the descriptors that the previous program of this keeper left open.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(crate) fn restore(
        group: Group,
        endpoint: Option<[RawFd; 2]>,
        commands: Option<(RawFd, PathBuf)>,
    ) -> io::Result<GroupEndpoint> {
        let [lock, listener] = endpoint.ok_or(io::ErrorKind::InvalidData)?;
        let endpoint = Endpoint { lock: take_given(lock)?, listener: take_given(listener)? };
        let commands = commands.map(|(fd, path)| Ok::<_, io::Error>((take_given(fd)?, path)));
        let commands = commands.transpose()?;
        Ok(GroupEndpoint { group, endpoint, clients: Vec::new(), commands })
    }

    /// Accepts a connection to the group's socket. It replaces the oldest one if there are too
    /// many.
    ///
    /// # Errors
    /// Errors of `accept`, such as too many open descriptors.
    pub(crate) fn accept(&mut self) -> io::Result<()> {
        let Some(client) = accept(&self.endpoint.listener)? else { return Ok(()) };
        if self.clients.len() >= CLIENTS {
            self.clients.remove(0);
        }
        self.clients.push(client);
        Ok(())
    }

    /// Reads the one request of connection `i`, and removes that connection. Returns it with the
    /// disk that is to join. `None`: there is no request yet, or the peer has gone.
    pub(crate) fn read_request(&mut self, i: usize) -> Option<(OwnedFd, io::Result<DiskSpec>)> {
        let received = KEEPER.try_receive(&self.clients[i]).transpose()?;
        let client = self.clients.remove(i);
        let request = match serde_json::from_slice(&received.ok()?.bytes) {
            Ok(Request::Join(spec)) => Ok(*spec),
            _ => Err(io::Error::other("a group takes no such request")),
        };
        Some((client, request))
    }

    /// Accepts a connection to the command socket and hands it to the worker.
    pub(crate) fn forward_client(&mut self, worker: &Worker) {
        let Some((commands, _)) = &self.commands else { return };
        match accept(commands) {
            Ok(Some(client)) => worker.command(client.as_fd()),
            Ok(None) => {}
            Err(_) => std::thread::sleep(crate::keeper::RETRY_PAUSE),
        }
    }

    /// Removes the group's sockets and locks, after its last disk.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.commands.as_ref().map_or(Ok(()), |(_, path)| remove(path))?;
        match remove_alive(&self.group.run_dir) {
            Ok(()) => self.endpoint.remove(&self.group.socket),
            // The lock's file stays while the worker's lock cannot be removed.
            Err(_) => remove(&self.group.socket),
        }
    }
}

/// Listens for commands at a new path that begins with `begin`.
///
/// The socket gets that name when it listens already, so a client that finds it can connect. Any
/// process removes sockets that it cannot connect to, but none whose name begins with `new.`. No name
/// is used twice: such a process could remove the new socket in place of the old one.
fn listen_for_commands(begin: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let number = format!("{:016x}", u64::from_ne_bytes(clock::secret()?));
    let mut path = begin.as_os_str().to_owned();
    path.push(&number);
    let path = PathBuf::from(path);
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    remove_stale(folder, begin);
    let unnamed = folder.join(format!("new.{number}"));
    let listener = listen_at(&unnamed, SocketType::STREAM, BACKLOG)?;
    fs::rename(&unnamed, &path).inspect_err(|_| drop(remove(&unnamed)))?;
    Ok((listener, path))
}

/// Removes sockets of this store that no process listens at. The attempt to connect does not block.
fn remove_stale(folder: &Path, begin: &Path) {
    let name = begin.file_name().unwrap_or_default().as_bytes();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let is_stale = || -> rustix::io::Result<bool> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            let connected = connect(&socket, &SocketAddrUnix::new(entry.path())?);
            Ok(connected == Err(Errno::CONNREFUSED))
        };
        if entry.file_name().as_bytes().starts_with(name) && is_stale() == Ok(true) {
            let _ = remove(&entry.path());
        }
    }
}
