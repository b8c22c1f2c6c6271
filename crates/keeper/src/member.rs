//! One disk of a keeper: its sockets, who asks there, and its ways to the worker.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use ferrite_io::process::{send_with, take_given};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, socketpair};

use crate::keep::{Keep, Other};
use crate::public;
use crate::relay::{Handed, Relay};
use crate::socket::{Place, remove};
use crate::worker::remove_alive;

/// Most who may ask at once: a daemon, its successor, and a look at it by hand.
pub(crate) const CLIENTS: usize = 8;

/// A disk, and all that stays when its worker ends.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) keep: Keep,
    pub(crate) place: Place,
    /// Where clients of NBD come.
    pub(crate) public: OwnedFd,
    pub(crate) relay: Relay,
    pub(crate) clients: Vec<OwnedFd>,
    /// Which of them has asked for the line last.
    pub(crate) follower: Option<RawFd>,
    pub(crate) seat: Seat,
}

/// A disk's ways to the worker. They are there always: what is said on them before the worker is there waits
/// for it.
#[derive(Debug)]
pub(crate) struct Seat {
    /// The followers' ends of both lines.
    pub(crate) lines: [OwnedFd; 2],
    /// What brings the worker clients.
    pub(crate) door: OwnedFd,
    /// The worker's own ends of all three, until it has them.
    pub(crate) own_ends: Option<[OwnedFd; 3]>,
}

impl Seat {
    pub(crate) fn new() -> io::Result<Seat> {
        let pair = || {
            let flags = SocketFlags::CLOEXEC;
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        };
        let ((first, own_first), (second, own_second)) = (pair()?, pair()?);
        let (door, own_door) = pair()?;
        let own_ends = Some([own_first, own_second, own_door]);
        Ok(Seat { lines: [first, second], door, own_ends })
    }

    /// Has the worker serve this client, as soon as it can.
    ///
    /// # Errors
    /// As many wait for it as there is room for.
    pub(crate) fn admit(&self, client: BorrowedFd<'_>) -> io::Result<()> {
        send_with(&self.door, b"client", Some(client))
    }
}

impl Member {
    /// One that comes. What a dead keeper has left of it is removed.
    ///
    /// # Errors
    /// `WouldBlock`: a keeper of this disk lives. Otherwise the file system's.
    pub(crate) fn new(keep: Keep) -> io::Result<Member> {
        let place = Place::take(&keep.socket)?;
        let public = public::listen(&keep.run_dir)?;
        Member::of(keep, place, public, Relay::default())
    }

    /// One that a keeper before has had: with its lock, its listening socket and its public one.
    ///
    /// # Errors
    /// They are not there.
    pub(crate) fn handed_on(
        keep: Keep,
        [lock, listener]: [RawFd; 2],
        public: Option<RawFd>,
        relay: Handed,
    ) -> io::Result<Member> {
        let place = Place { lock: take_given(lock)?, listener: take_given(listener)? };
        let public = public.map_or_else(|| public::listen(&keep.run_dir), take_given)?;
        Member::of(keep, place, public, Relay::take(relay)?)
    }

    fn of(keep: Keep, place: Place, public: OwnedFd, relay: Relay) -> io::Result<Member> {
        let (clients, follower, seat) = (Vec::new(), None, Seat::new()?);
        Ok(Member { keep, place, public, relay, clients, follower, seat })
    }

    /// For the keeper's next program.
    pub(crate) fn hand_on(&self) -> Other {
        let Place { lock, listener } = &self.place;
        let before = [lock, listener, &self.public].map(AsRawFd::as_raw_fd);
        Other { keep: self.keep.clone(), before, relay: self.relay.hand_on() }
    }

    /// Has somebody ask who has come.
    ///
    /// # Errors
    /// Out of descriptors, say.
    pub(crate) fn accept(&mut self) -> io::Result<()> {
        let Some(client) = accept(&self.place.listener)? else { return Ok(()) };
        // The oldest has been quiet for longest, or is not heard any more. Not so who follows: it has
        // nothing to ask while all is well.
        if self.clients.len() >= CLIENTS {
            let quiet = |client: &OwnedFd| Some(client.as_raw_fd()) != self.follower;
            let oldest = self.clients.iter().position(quiet).unwrap_or_default();
            self.clients.remove(oldest);
        }
        self.clients.push(client);
        Ok(())
    }

    /// Who has asked is gone.
    pub(crate) fn forget_client(&mut self, i: usize) {
        let gone = self.clients.remove(i);
        self.follower = self.follower.filter(|follower| *follower != gone.as_raw_fd());
    }

    /// Removes what others find it by. `alive` is the folder of the lock of a worker that has no other disk.
    /// Whoever served it is gone, or has let go of it.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn remove(&mut self, alive: Option<&Path>) -> io::Result<()> {
        self.relay.end();
        public::remove(&self.keep.run_dir);
        // The lock stays with what cannot be removed: a daemon that starts looks for it.
        match alive.map_or(Ok(()), remove_alive) {
            Ok(()) => self.place.remove(&self.keep.socket),
            Err(_) => remove(&self.keep.socket),
        }
    }
}

/// Who has come to a listening socket. `None`: who has come is gone.
///
/// # Errors
/// Out of descriptors, say: it is worth another try later.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(client) => Ok(Some(client)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
