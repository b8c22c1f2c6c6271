//! The way to a keeper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ferrite_io::process::{receive_with, send_with};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};

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
        Keeper::connect_within(path, PATIENCE)
    }

    fn connect_within(path: &Path, patience: Duration) -> io::Result<Keeper> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(patience))?;
        // Also for those whom it has not accepted yet: there is room for a few.
        set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
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

    /// The second line to the worker, of a stub domain whose guest has the disk of the first. It is another
    /// one when the worker has ended.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn second_line(&self) -> io::Result<Line> {
        match self.ask(&Request::SecondLine)? {
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
            Answer::Keep(keep) => Ok(*keep),
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

    /// As [`end`](Self::end), of a disk that the worker has closed: others of its group do not notice.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn leave(self) -> io::Result<()> {
        self.done(&Request::Leave)
    }

    /// Has a disk join the group that this one keeps.
    pub(crate) fn join(&self, keep: &Keep) -> io::Result<()> {
        self.done(&Request::Join(Box::new(keep.clone())))
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
        self.try_ask(request).inspect_err(|_| {
            // An answer that comes later would be taken for the next one's.
            let _ = shutdown(&self.socket, Shutdown::Both);
        })
    }

    fn try_ask(&self, request: &Request) -> io::Result<(Answer, Option<OwnedFd>)> {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rustix::net::{accept, bind, listen};

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    /// Who listens at this path and may do nothing else.
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
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut connected = Vec::new();
            let failed = loop {
                match Keeper::connect_within(&path, SHORT) {
                    Ok(keeper) => connected.push(keeper),
                    Err(e) => break e.kind(),
                }
            };
            tell.send(failed).unwrap();
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn an_answer_that_comes_too_late_is_nobodys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = listener(&path);
        let keeper = Keeper::connect_within(&path, SHORT).unwrap();
        let theirs = accept(&listener).unwrap();
        assert!(keeper.keep().is_err());
        // The first one's.
        let late = serde_json::to_vec(&Answer::Done).unwrap();
        let _ = send_with(&theirs, &late, None);
        assert!(keeper.upgrade(Path::new("/new")).is_err());
    }
}
