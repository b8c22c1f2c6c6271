//! The way to a keeper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ferrite_io::process::{receive_with, send_with};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::keep::Keep;
use crate::wire::{Answer, MAX_BYTES, Request};

/// How long an answer may take. A keeper waits for nobody; the host may be busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// A keeper that runs.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
}

/// The way to a worker.
#[derive(Debug)]
pub struct Line {
    /// The follower's end.
    pub fd: OwnedFd,
    /// Which start of a worker it belongs to.
    pub start: u64,
    /// The keeper's process, which stays the same.
    pub keeper: i32,
}

impl Keeper {
    /// Connects to the keeper with this socket.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused`: there is none.
    pub fn connect(path: &Path) -> io::Result<Keeper> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Keeper { socket })
    }

    /// The line to the worker, which may have to be started yet. `lost`: the worker of this start has
    /// ended, or must, and the next one is meant.
    ///
    /// # Errors
    /// The keeper has ended, or cannot; so for all of these.
    pub fn line(&self, lost: Option<u64>) -> io::Result<Line> {
        match self.ask(&Request::Line { lost })? {
            (Answer::Line { start, keeper }, Some(fd)) => Ok(Line { fd, start, keeper }),
            (answer, _) => Err(unexpected(answer)),
        }
    }

    /// What it keeps.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn keep(&self) -> io::Result<Keep> {
        match self.ask(&Request::Keep)?.0 {
            Answer::Keep(keep) => Ok(keep),
            answer => Err(unexpected(answer)),
        }
    }

    /// Ends the worker, if there is one, and the keeper. Its socket is gone when this returns.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn end(self) -> io::Result<()> {
        self.done(&Request::End)
    }

    /// Has the keeper and the next worker be this binary. The worker is killed. One that was asked to
    /// retire before has left nothing to do. The line is another one afterwards.
    ///
    /// # Errors
    /// As [`line`](Self::line). The keeper is what it was then, and its worker starts anew.
    pub fn upgrade(&self, binary: &Path) -> io::Result<()> {
        self.done(&Request::Upgrade { binary: binary.to_owned() })
    }

    /// Readable when the keeper has ended: it says nothing unasked.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn done(&self, request: &Request) -> io::Result<()> {
        match self.ask(request)?.0 {
            Answer::Done => Ok(()),
            answer => Err(unexpected(answer)),
        }
    }

    fn ask(&self, request: &Request) -> io::Result<(Answer, Option<OwnedFd>)> {
        send_with(&self.socket, &serde_json::to_vec(request)?, None)?;
        let (bytes, file) = receive_with(&self.socket, MAX_BYTES, true)?;
        if bytes.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper has ended"));
        }
        Ok((serde_json::from_slice(&bytes)?, file))
    }
}

fn unexpected(answer: Answer) -> io::Error {
    match answer {
        Answer::No(why) => io::Error::other(why),
        answer => io::Error::other(format!("the keeper answers {answer:?}: a bug in ferrite")),
    }
}
