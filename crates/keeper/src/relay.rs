//! The relay of a disk, as its keeper has it: a process that clients of NBD are connected with, so that
//! they do not notice the end of a worker. It is there while there are clients.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use ferrite_io::process::{
    FIRST_GIVEN, Program, environment_without, receive_with, send_with, spawn, take_given,
};
use ferrite_io::sandbox::{Lockdown, Means};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::{Deserialize, Serialize};

use crate::keep::{Keep, VARIABLE};
use crate::member::Seat;
use crate::names;
use crate::tell;

/// The socket by which a relay and its keeper talk, as the number of a descriptor that it is started
/// with.
const RELAY_FD: RawFd = FIRST_GIVEN;
/// The longest of its messages.
const MESSAGE_BYTES: usize = 64;
/// How often it is looked whether one that was killed is gone.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// One that lives.
#[derive(Debug)]
struct Process {
    pid: Pid,
    socket: OwnedFd,
    /// Clients that it was given.
    given: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    process: Option<Process>,
    /// Those that were killed, and that nobody has asked for yet.
    ended: Vec<Pid>,
}

/// What the keeper's next program goes on with: the process, its socket, the clients that it was given,
/// and processes that have ended.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Handed {
    process: Option<(i32, RawFd, u64)>,
    ended: Vec<i32>,
}

impl Relay {
    /// Goes on with what a keeper before has handed on.
    ///
    /// # Errors
    /// The descriptor is not there.
    pub(crate) fn take(handed: Handed) -> io::Result<Relay> {
        let pid = |number| Pid::from_raw(number).ok_or(io::ErrorKind::InvalidData);
        let process = match handed.process {
            Some((number, fd, given)) => {
                Some(Process { pid: pid(number)?, socket: take_given(fd)?, given })
            }
            None => None,
        };
        let ended = handed.ended.into_iter().map(pid).collect::<Result<_, _>>()?;
        Ok(Relay { process, ended })
    }

    /// For the keeper's next program, which gets the socket under its number.
    pub(crate) fn hand_on(&self) -> Handed {
        let number = |pid: Pid| pid.as_raw_nonzero().get();
        let process = self.process.as_ref();
        Handed {
            process: process.map(|p| (number(p.pid), p.socket.as_raw_fd(), p.given)),
            ended: self.ended.iter().map(|pid| number(*pid)).collect(),
        }
    }

    /// Readable when it says something, or has ended.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|process| process.socket.as_fd())
    }

    /// When to look at those that have ended.
    pub(crate) fn due(&self) -> Option<Duration> {
        (!self.ended.is_empty()).then_some(LOOK_AGAIN)
    }

    /// Has a client served, by way of the relay. A keeper that has none gives it to the worker.
    ///
    /// # Errors
    /// There is no relay for it, or no room. It is turned away.
    pub(crate) fn admit(
        &mut self,
        client: BorrowedFd<'_>,
        keep: &Keep,
        binary: &OwnedFd,
        seat: &Seat,
    ) -> io::Result<()> {
        let Some(arguments) = &keep.relay else { return seat.admit(client) };
        // One that has just ended does not take it, and the next one does.
        if let Some(process) = &mut self.process {
            match process.give(client) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(e),
                Err(_) => self.end(),
                Ok(()) => return Ok(()),
            }
        }
        let mut process = Process::start(arguments, keep, binary)?;
        let given = process.give(client);
        self.process = Some(process);
        given
    }

    /// Does what it asks for, once. One that asks for anything else is ended.
    pub(crate) fn answer(&mut self, seat: &Seat) {
        let Some(process) = &self.process else { return };
        let heard = match receive_with(&process.socket, MESSAGE_BYTES, false) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
            heard => heard.map_or_else(|_| Vec::new(), |(bytes, _)| bytes),
        };
        let text = std::str::from_utf8(&heard).unwrap_or_default();
        let number = |what| text.strip_prefix(what).and_then(|number| number.parse::<u64>().ok());
        let done = match (number("link "), number("idle ")) {
            (Some(number), _) => process.give_link(number, seat),
            // A client may be on its way to it.
            (_, Some(given)) if given != process.given => Ok(()),
            (_, Some(_)) => return self.end(),
            _ if text.is_empty() => Err(io::Error::other("it has ended")),
            _ => Err(io::Error::other("it says what makes no sense")),
        };
        if let Err(e) = done {
            tell(&format!("the relay of NBD clients is lost, and they are: {e}"));
            self.end();
        }
    }

    /// Ends it, and its clients' connections.
    pub(crate) fn end(&mut self) {
        let Some(process) = self.process.take() else { return };
        // Fails if it has ended.
        let _ = kill_process(process.pid, Signal::KILL);
        self.ended.push(process.pid);
        self.reap();
    }

    /// Asks how those have ended that were killed.
    pub(crate) fn reap(&mut self) {
        self.ended.retain(|pid| {
            matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None) | Err(Errno::INTR))
        });
    }
}

impl Process {
    fn start(arguments: &[String], keep: &Keep, binary: &OwnedFd) -> io::Result<Process> {
        let kind = SocketType::SEQPACKET;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        let name = std::iter::once("ferrite").chain(arguments.iter().map(String::as_str));
        let arguments = name.map(CString::new).collect::<Result<_, _>>()?;
        let mut environment = environment_without(VARIABLE);
        if let Some(names) = &keep.names {
            environment.extend(names.environment_of_relay()?);
        }
        let program = Program { file: binary.as_fd(), arguments, environment };
        let pid = spawn(&program, &[Some(theirs.as_fd())], &[])?;
        Ok(Process { pid, socket, given: 0 })
    }

    fn give(&mut self, client: BorrowedFd<'_>) -> io::Result<()> {
        send_with(&self.socket, b"client", Some(client))?;
        self.given += 1;
        Ok(())
    }

    /// A way to the worker, or none if there is no room for one more now.
    fn give_link(&self, number: u64, seat: &Seat) -> io::Result<()> {
        let kind = SocketType::STREAM;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let link = pair.ok().filter(|(_, theirs)| seat.admit(theirs.as_fd()).is_ok());
        let link = link.as_ref().map(|(ours, _)| ours.as_fd());
        send_with(&self.socket, format!("link {number}").as_bytes(), link)
    }
}

/// Makes this process the relay that its keeper has started it as: it gives up all rights, for good, but
/// those on the socket that it is given. To be called before it has a second thread.
///
/// # Errors
/// It has rights still, and must end; or nobody has started it as a relay.
pub fn become_relay() -> io::Result<OwnedFd> {
    let socket = take_given(RELAY_FD)?;
    if let Some((user, root)) = names::sandbox()? {
        Lockdown { user, root, means: Means { sockets_only: true, ..Means::default() } }.enter()?;
    }
    Ok(socket)
}
