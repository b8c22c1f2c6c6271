//! The client of a keeper's socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ferrite_host::frames::{self, Frame};
use rustix::net::{Shutdown, shutdown};

use crate::spec::DiskSpec;
use crate::wire::{KEEPER, Reply, Request, VERSION};

/// The longest wait for a reply. A keeper never blocks on another process, but the host may be
/// busy.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to a running keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
}

/// A connection to a worker.
#[derive(Debug)]
pub struct Line {
    /// The follower's end of the connection.
    pub fd: OwnedFd,
    /// Number of the worker's start, from 1. It grows by one with each worker.
    pub start: u64,
    /// Process number of the keeper. It stays the same while workers are replaced.
    pub keeper: i32,
}

impl Keeper {
    /// Connects to the keeper that listens at `path`.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused`: no keeper listens there.
    pub fn connect(path: &Path) -> io::Result<Keeper> {
        Keeper::connect_within(path, REPLY_TIMEOUT)
    }

    fn connect_within(path: &Path, patience: Duration) -> io::Result<Keeper> {
        // The timeout also bounds connections that the keeper has not accepted yet: its backlog has
        // room for a few.
        Ok(Keeper { socket: frames::connect(path, patience)? })
    }

    /// Requests the line to the worker, which may not have started yet. With `lost`, the keeper
    /// kills the worker of that start and returns the line to the next one.
    ///
    /// # Errors
    /// The keeper has ended or does not reply in time, or it could not carry out the request, or it
    /// speaks another version.
    pub fn line(&self, lost: Option<u64>) -> io::Result<Line> {
        self.ask_line(&Request::Line { lost, version: VERSION.own })
    }

    /// Requests the second line to the worker: that of a stub domain whose guest has the disk of
    /// the first line. It is replaced when the worker ends.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn second_line(&self) -> io::Result<Line> {
        self.ask_line(&Request::SecondLine)
    }

    fn ask_line(&self, request: &Request) -> io::Result<Line> {
        match self.exchange(request)? {
            (Reply::Line { start, keeper, version }, Some(fd)) => {
                VERSION.agree(version)?;
                Ok(Line { fd, start, keeper })
            }
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// Requests the description of the disk that is kept.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn spec(&self) -> io::Result<DiskSpec> {
        match self.exchange(&Request::Spec)?.0 {
            Reply::Spec(spec) => Ok(*spec),
            reply => Err(unexpected(reply)),
        }
    }

    /// Kills the worker, if there is one, and stops keeping the disk. The keeper ends with its last
    /// disk, otherwise the next worker has the other disks. The disk's socket is removed when this
    /// returns.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn end(self) -> io::Result<()> {
        self.done(&Request::End)
    }

    /// Ends the keeping of a disk that the worker has closed. The worker goes on with the other
    /// disks of its group. The keeper ends with its last disk.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn leave(self) -> io::Result<()> {
        self.done(&Request::Leave)
    }

    /// Adds a disk to the group that this keeper keeps.
    pub(crate) fn join(&self, spec: &DiskSpec) -> io::Result<()> {
        self.done(&Request::Join(Box::new(spec.clone())))
    }

    /// Has the next workers of a disk without a group started by this description: with another
    /// image, say. The worker is killed, so it must have closed the image. Clients of NBD wait for
    /// the next worker.
    ///
    /// # Errors
    /// As [`line`](Self::line). The keeper goes on as before.
    pub fn change(&self, spec: &DiskSpec) -> io::Result<()> {
        self.done(&Request::Change(Box::new(spec.clone())))
    }

    /// Gives a keeper without a worker this disk, with its sockets and run directory.
    ///
    /// # Errors
    /// As [`line`](Self::line). The keeper stays as it was.
    pub fn become_keeper_of(&self, spec: &DiskSpec) -> io::Result<()> {
        self.done(&Request::Become(Box::new(spec.clone())))
    }

    /// Replaces the programs of the keeper and of its workers by `binary`. The worker is killed, so
    /// ask it to retire first if it has work in hand. A new line belongs to the next worker.
    ///
    /// # Errors
    /// As [`line`](Self::line). The keeper keeps its old program then, and its worker is started
    /// anew.
    pub fn upgrade(&self, binary: &Path) -> io::Result<()> {
        self.done(&Request::Upgrade { binary: binary.to_owned() })
    }

    /// Hands the worker a client that is none of NBD, with at most three descriptors. The worker gets it as soon as its
    /// image is open. If the worker ends before, the client's descriptors are closed.
    ///
    /// # Errors
    /// As [`line`](Self::line). A keeper of an earlier program does not know the request.
    pub fn client(&self, about: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let request = Request::Client { about: about.to_owned() };
        match self.exchange_with(&request, files)?.0 {
            Reply::Done => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }

    /// A descriptor that becomes readable when the keeper has ended: a keeper sends nothing without
    /// a request.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn done(&self, request: &Request) -> io::Result<()> {
        match self.exchange(request)?.0 {
            Reply::Done => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }

    fn exchange(&self, request: &Request) -> io::Result<(Reply, Option<OwnedFd>)> {
        self.exchange_with(request, &[])
    }

    fn exchange_with(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
    ) -> io::Result<(Reply, Option<OwnedFd>)> {
        self.try_exchange(request, files).inspect_err(|_| {
            // A late reply would be taken for the reply to the next request.
            let _ = shutdown(&self.socket, Shutdown::Both);
        })
    }

    fn try_exchange(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
    ) -> io::Result<(Reply, Option<OwnedFd>)> {
        KEEPER.try_send(&self.socket, &serde_json::to_vec(request)?, files)?;
        let Frame { bytes, files } = KEEPER.receive(&self.socket)?;
        Ok((serde_json::from_slice(&bytes)?, files.into_iter().next()))
    }
}

fn unexpected(reply: Reply) -> io::Error {
    match reply {
        Reply::Failed(why) => io::Error::other(why),
        reply => io::Error::other(format!("the keeper sent {reply:?}: this is a bug in ferrite")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with,
    };

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    /// A listening socket at this path that accepts no connection.
    fn listener(path: &Path) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        listener
    }

    #[test]
    fn a_keeper_that_hangs_is_given_up_also_by_those_whom_it_has_not_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = listener(&path);
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut connected = Vec::new();
            let failed = loop {
                match Keeper::connect_within(&path, SHORT) {
                    Ok(keeper) => connected.push(keeper),
                    Err(e) => break e.kind(),
                }
            };
            sender.send(failed).unwrap();
        });
        assert_eq!(receiver.recv_timeout(REPLY_TIMEOUT), Ok(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn an_answer_that_comes_too_late_is_nobodys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = listener(&path);
        let keeper = Keeper::connect_within(&path, SHORT).unwrap();
        let accepted = accept(&listener).unwrap();
        assert!(keeper.spec().is_err());
        // The late reply to the first request.
        let late = serde_json::to_vec(&Reply::Done).unwrap();
        let _ = KEEPER.try_send(&accepted, &late, &[]);
        assert!(keeper.upgrade(Path::new("/new")).is_err());
    }
}
