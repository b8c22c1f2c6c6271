//! What a group has besides its disks: where they join it, where commands come, and the worker's lock.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use ferrite_io::clock;
use ferrite_io::process::{receive_with, take_given};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::keep::{Group, Keep};
use crate::member::{CLIENTS, accept};
use crate::socket::{Place, listen_at, remove};
use crate::tell;
use crate::wire::{MAX_BYTES, Request};
use crate::worker::{Worker, remove_alive};

/// Those who want commands done and were not yet handed on.
const BACKLOG: i32 = 16;

/// See the module's text.
pub(crate) struct OfGroup {
    what: Group,
    pub(crate) place: Place,
    pub(crate) clients: Vec<OwnedFd>,
    /// Where they come, and the path of that.
    pub(crate) commands: Option<(OwnedFd, PathBuf)>,
}

impl OfGroup {
    /// # Errors
    /// `WouldBlock`: a keeper of this group lives. Otherwise the file system's.
    pub(crate) fn take(what: Group) -> io::Result<OfGroup> {
        let place = Place::take(&what.socket)?;
        let commands = what.commands.as_deref().and_then(|path| {
            let told = |e: &io::Error| {
                tell(&format!("no socket for commands, they are told that it is in use: {e}"));
            };
            listen_for_commands(path).inspect_err(told).ok()
        });
        Ok(OfGroup { what, place, clients: Vec::new(), commands })
    }

    /// With what the keeper before has had.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn handed_on(
        what: Group,
        place: Option<[RawFd; 2]>,
        commands: Option<(RawFd, PathBuf)>,
    ) -> io::Result<OfGroup> {
        let [lock, listener] = place.ok_or(io::ErrorKind::InvalidData)?;
        let place = Place { lock: take_given(lock)?, listener: take_given(listener)? };
        let commands = commands.map(|(fd, path)| Ok::<_, io::Error>((take_given(fd)?, path)));
        let commands = commands.transpose()?;
        Ok(OfGroup { what, place, clients: Vec::new(), commands })
    }

    /// Has somebody ask who has come.
    ///
    /// # Errors
    /// Out of descriptors, say.
    pub(crate) fn accept(&mut self) -> io::Result<()> {
        let Some(client) = accept(&self.place.listener)? else { return Ok(()) };
        if self.clients.len() >= CLIENTS {
            self.clients.remove(0);
        }
        self.clients.push(client);
        Ok(())
    }

    /// Who asks for something, and the disk that is to join. Each asks once.
    pub(crate) fn hear(&mut self, i: usize) -> Option<(OwnedFd, io::Result<Keep>)> {
        let heard = receive_with(&self.clients[i], MAX_BYTES, false);
        if heard.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
            return None;
        }
        let client = self.clients.remove(i);
        let bytes = heard.ok().map(|(bytes, _)| bytes).filter(|bytes| !bytes.is_empty())?;
        let asked = match serde_json::from_slice(&bytes) {
            Ok(Request::Join(keep)) => Ok(*keep),
            _ => Err(io::Error::other("that is nothing that is asked of a group")),
        };
        Some((client, asked))
    }

    /// Hands the next who wants a command done to the worker.
    pub(crate) fn admit(&mut self, worker: &Worker) {
        let Some((commands, _)) = &self.commands else { return };
        match accept(commands) {
            Ok(Some(client)) => worker.command(client.as_fd()),
            Ok(None) => {}
            Err(_) => std::thread::sleep(crate::keeper::REST),
        }
    }

    /// Removes what others find it by, after its last disk.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.commands.as_ref().map_or(Ok(()), |(_, path)| remove(path))?;
        match remove_alive(&self.what.run_dir) {
            Ok(()) => self.place.remove(&self.what.socket),
            // The lock stays with what cannot be removed.
            Err(_) => remove(&self.what.socket),
        }
    }
}

/// Whoever finds the socket by its name finds somebody who listens. One that is not listened at is
/// removed by whoever looks for it, but not under a name that begins so. So no name is used twice, either:
/// it could be removed for the one before.
fn listen_for_commands(begin: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let number = format!("{:016x}", u64::from_ne_bytes(clock::secret()?));
    let mut path = begin.as_os_str().to_owned();
    path.push(&number);
    let path = PathBuf::from(path);
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    remove_left(folder, begin);
    let unnamed = folder.join(format!("new.{number}"));
    let listener = listen_at(&unnamed, SocketType::STREAM, BACKLOG)?;
    fs::rename(&unnamed, &path).inspect_err(|_| drop(remove(&unnamed)))?;
    Ok((listener, path))
}

/// Removes sockets of this store at which nobody listens. It is waited for nobody who does.
fn remove_left(folder: &Path, begin: &Path) {
    let name = begin.file_name().unwrap_or_default().as_bytes();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let is_left = || -> rustix::io::Result<bool> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            let connected = connect(&socket, &SocketAddrUnix::new(entry.path())?);
            Ok(connected == Err(Errno::CONNREFUSED))
        };
        if entry.file_name().as_bytes().starts_with(name) && is_left() == Ok(true) {
            let _ = remove(&entry.path());
        }
    }
}
