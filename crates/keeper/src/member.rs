//! One disk of a keeper: its sockets, the clients of its socket, and its connections to the worker.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use ferrite_host::frames::{self, CLIENT_CHANNEL, NBD_CLIENT};
use ferrite_host::process::take_given;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::public;
use crate::relay::{Relay, RelayState};
use crate::socket::{Endpoint, remove};
use crate::spec::{DiskSpec, Other};
use crate::worker::remove_alive;

/// Most clients of a disk's socket at a time: a daemon, its successor, and a few manual queries.
pub(crate) const CLIENTS: usize = 8;

/// A disk, with everything of it that outlives its worker.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) spec: DiskSpec,
    pub(crate) endpoint: Endpoint,
    /// The listening socket for NBD clients.
    pub(crate) public: OwnedFd,
    pub(crate) relay: Relay,
    pub(crate) clients: Vec<OwnedFd>,
    /// The client that requested the line last.
    pub(crate) follower: Option<RawFd>,
    pub(crate) connections: Connections,
}

/// A disk's connections to the worker. They exist before the worker does: messages wait in them.
#[derive(Debug)]
pub(crate) struct Connections {
    /// The followers' ends of both lines.
    pub(crate) lines: [OwnedFd; 2],
    /// The keeper's end of the client channel, which brings NBD clients to the worker.
    pub(crate) client_channel: OwnedFd,
    /// The worker's ends of both lines and of the client channel, until they are handed over.
    pub(crate) worker_ends: Option<[OwnedFd; 3]>,
}

impl Connections {
    pub(crate) fn new() -> io::Result<Connections> {
        let (first, own_first) = frames::pair()?;
        let (second, own_second) = frames::pair()?;
        let (client_channel, own_client_channel) = frames::pair()?;
        let worker_ends = Some([own_first, own_second, own_client_channel]);
        Ok(Connections { lines: [first, second], client_channel, worker_ends })
    }

    /// Hands an NBD client to the worker.
    ///
    /// # Errors
    /// `WouldBlock`: as many clients as the channel has room for wait already.
    pub(crate) fn admit(&self, client: BorrowedFd<'_>) -> io::Result<()> {
        CLIENT_CHANNEL.try_send(&self.client_channel, NBD_CLIENT, &[client])
    }

    /// Hands a client of another kind to the worker, with what the daemon says of it.
    ///
    /// # Errors
    /// As [`admit`](Self::admit); `InvalidInput`: it says too much.
    pub(crate) fn admit_other(&self, about: &str, files: &[OwnedFd]) -> io::Result<()> {
        if about.as_bytes() == NBD_CLIENT {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        CLIENT_CHANNEL.try_send(&self.client_channel, about.as_bytes(), &files)
    }
}

impl Member {
    /// Creates a member with new sockets. Leftovers of a dead keeper are removed.
    ///
    /// # Errors
    /// `WouldBlock`: a keeper of this disk lives. Otherwise errors of the file system.
    pub(crate) fn new(spec: DiskSpec) -> io::Result<Member> {
        let endpoint = Endpoint::take(&spec.socket)?;
        let public = public::listen(&spec.run_dir, spec.public.as_deref())?;
        Member::of(spec, endpoint, public, Relay::default())
    }

    /// Takes over a member of the previous program: its lock, its listening socket and its public
    /// socket.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(crate) fn restore(
        spec: DiskSpec,
        [lock, listener]: [RawFd; 2],
        public: Option<RawFd>,
        relay: RelayState,
    ) -> io::Result<Member> {
        let endpoint = Endpoint { lock: take_given(lock)?, listener: take_given(listener)? };
        let public = match public {
            Some(public) => take_given(public)?,
            None => public::listen(&spec.run_dir, spec.public.as_deref())?,
        };
        Member::of(spec, endpoint, public, Relay::take(relay)?)
    }

    fn of(spec: DiskSpec, endpoint: Endpoint, public: OwnedFd, relay: Relay) -> io::Result<Member> {
        let (clients, follower, connections) = (Vec::new(), None, Connections::new()?);
        Ok(Member { spec, endpoint, public, relay, clients, follower, connections })
    }

    /// The state for the keeper's next program.
    pub(crate) fn to_state(&self) -> Other {
        let Endpoint { lock, listener } = &self.endpoint;
        let before = [lock, listener, &self.public].map(AsRawFd::as_raw_fd);
        Other { spec: self.spec.clone(), before, relay: self.relay.to_state() }
    }

    /// Accepts a connection to the disk's socket. It replaces the oldest one if there are too many.
    ///
    /// # Errors
    /// Errors of `accept`, such as too many open descriptors.
    pub(crate) fn accept(&mut self) -> io::Result<()> {
        let Some(client) = accept(&self.endpoint.listener)? else { return Ok(()) };
        // The oldest client has been silent for longest, or is gone. The follower is excepted: it
        // has nothing to request while all is well.
        if self.clients.len() >= CLIENTS {
            let quiet = |client: &OwnedFd| Some(client.as_raw_fd()) != self.follower;
            let oldest = self.clients.iter().position(quiet).unwrap_or_default();
            self.clients.remove(oldest);
        }
        self.clients.push(client);
        Ok(())
    }

    /// Removes a client that has disconnected.
    pub(crate) fn remove_client(&mut self, i: usize) {
        let gone = self.clients.remove(i);
        self.follower = self.follower.filter(|follower| *follower != gone.as_raw_fd());
    }

    /// Removes the disk's sockets and locks. `alive` is the run directory whose worker lock is
    /// removed too, unless other disks share that lock. The disk must not be open in a worker any
    /// more.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn remove(&mut self, alive: Option<&Path>) -> io::Result<()> {
        self.relay.end();
        public::remove(&self.spec.run_dir);
        // The lock's file stays while `alive` cannot be removed: a starting daemon finds the
        // leftovers by it.
        match alive.map_or(Ok(()), remove_alive) {
            Ok(()) => self.endpoint.remove(&self.spec.socket),
            Err(_) => remove(&self.spec.socket),
        }
    }
}

/// Accepts a connection. `None`: there was none, or its peer has gone again.
///
/// # Errors
/// Errors of `accept`, such as too many open descriptors. The caller may try again later.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(client) => Ok(Some(client)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
