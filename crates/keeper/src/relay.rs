//! The relay process of a disk, seen from its keeper. NBD clients are connected with the relay, so
//! they do not notice the end of a worker. It runs while there are clients.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use ferrite_host::frames::{self, RELAY, Version, first_version};
use ferrite_host::process::{FIRST_GIVEN, Program, environment_without, spawn, take_given};
use ferrite_host::sandbox::{Lockdown, Means};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::{Deserialize, Serialize};

use crate::log;
use crate::member::Connections;
use crate::sandbox;
use crate::spec::{DiskSpec, VARIABLE};

/// Descriptor of a relay's socket to its keeper.
const RELAY_FD: RawFd = FIRST_GIVEN;
/// The version of the relay's messages. A relay stays the old program when its keeper is upgraded.
const VERSION: Version = Version { protocol: RELAY.name, own: 1 };
/// How often the exit of a killed relay is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A running relay.
#[derive(Debug)]
struct Process {
    pid: Pid,
    socket: OwnedFd,
    /// Clients that the relay was given since its start.
    given: u64,
}

/// The relay of a disk, if it has clients.
#[derive(Debug)]
pub(crate) struct Relay {
    process: Option<Process>,
    /// Killed relays whose exit status was not collected yet.
    ended: Vec<Pid>,
    /// The version that the running relay speaks.
    version: u32,
}

impl Default for Relay {
    fn default() -> Relay {
        Relay { process: None, ended: Vec::new(), version: VERSION.own }
    }
}

/// The state of a relay for the keeper's next program.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RelayState {
    process: Option<(i32, RawFd, u64)>,
    ended: Vec<i32>,
    /// The version that the running relay speaks.
    #[serde(default = "first_version")]
    version: u32,
}

impl Default for RelayState {
    fn default() -> RelayState {
        RelayState { process: None, ended: Vec::new(), version: VERSION.own }
    }
}

impl Relay {
    /// Takes over the relay of the previous program. One that speaks an unknown version is ended, and
    /// its clients' connections with it.
    ///
    /// # Errors
    /// The descriptor is missing.
    pub(crate) fn take(handed: RelayState) -> io::Result<Relay> {
        let pid = |number| Pid::from_raw(number).ok_or(io::ErrorKind::InvalidData);
        let process = match handed.process {
            Some((number, fd, given)) => {
                Some(Process { pid: pid(number)?, socket: take_given(fd)?, given })
            }
            None => None,
        };
        let ended = handed.ended.into_iter().map(pid).collect::<Result<_, _>>()?;
        let mut relay = Relay { process, ended, version: handed.version };
        if let Err(e) = VERSION.agree(handed.version)
            && relay.process.is_some()
        {
            log(&format!("the relay of NBD clients is ended, and their connections end: {e}"));
            relay.end();
        }
        Ok(relay)
    }

    /// The state for the keeper's next program, which inherits the socket under its number.
    pub(crate) fn to_state(&self) -> RelayState {
        let number = |pid: Pid| pid.as_raw_nonzero().get();
        let process = self.process.as_ref();
        RelayState {
            process: process.map(|p| (number(p.pid), p.socket.as_raw_fd(), p.given)),
            ended: self.ended.iter().map(|pid| number(*pid)).collect(),
            version: self.version,
        }
    }

    /// A descriptor that is readable when the relay sends a message or has ended.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|process| process.socket.as_fd())
    }

    /// When to call [`reap`](Self::reap) at the latest.
    pub(crate) fn due(&self) -> Option<Duration> {
        (!self.ended.is_empty()).then_some(POLL_INTERVAL)
    }

    /// Hands a client to the relay, and starts one if there is none. A disk without a relay hands
    /// the client to the worker.
    ///
    /// # Errors
    /// There is no relay or no room for the client, which is turned away.
    pub(crate) fn admit(
        &mut self,
        client: BorrowedFd<'_>,
        spec: &DiskSpec,
        binary: &OwnedFd,
        connections: &Connections,
    ) -> io::Result<()> {
        let Some(arguments) = &spec.relay else { return connections.admit(client) };
        // A relay that has just ended does not take the client, so the next one is started for it.
        if let Some(process) = &mut self.process {
            match process.give(client) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(e),
                Err(_) => self.end(),
                Ok(()) => return Ok(()),
            }
        }
        let mut process = Process::start(arguments, spec, binary)?;
        let given = process.give(client);
        (self.process, self.version) = (Some(process), VERSION.own);
        given
    }

    /// Handles one message of the relay. A relay that sends anything unknown is killed.
    pub(crate) fn handle_message(&mut self, connections: &Connections) {
        let Some(process) = &self.process else { return };
        let received = match RELAY.try_receive(&process.socket) {
            Ok(None) => return,
            Ok(Some(frame)) => frame.bytes,
            Err(_) => Vec::new(),
        };
        let text = std::str::from_utf8(&received).unwrap_or_default();
        let number = |what| text.strip_prefix(what).and_then(|number| number.parse::<u64>().ok());
        let done = match (number("link "), number("idle ")) {
            (Some(number), _) => process.give_link(number, connections),
            // The counts differ while a new client is on its way to the relay, so the relay goes
            // on.
            (_, Some(given)) if given != process.given => Ok(()),
            (_, Some(_)) => return self.end(),
            _ if text.is_empty() => Err(io::Error::other("the relay has ended")),
            _ => Err(io::Error::other("the relay sent a malformed message")),
        };
        if let Err(e) = done {
            log(&format!("the relay of NBD clients failed, and their connections end: {e}"));
            self.end();
        }
    }

    /// Kills the relay, which ends its clients' connections.
    pub(crate) fn end(&mut self) {
        let Some(process) = self.process.take() else { return };
        // The kill fails if the relay has ended already.
        let _ = kill_process(process.pid, Signal::KILL);
        self.ended.push(process.pid);
        self.reap();
    }

    /// Collects the exit status of killed relays.
    pub(crate) fn reap(&mut self) {
        self.ended.retain(|pid| {
            matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None) | Err(Errno::INTR))
        });
    }
}

impl Process {
    fn start(arguments: &[String], spec: &DiskSpec, binary: &OwnedFd) -> io::Result<Process> {
        let (socket, relay_end) = frames::pair()?;
        let name = std::iter::once("ferrite").chain(arguments.iter().map(String::as_str));
        let arguments = name.map(CString::new).collect::<Result<_, _>>()?;
        let mut environment = environment_without(VARIABLE);
        if let Some(sandbox) = &spec.sandbox {
            environment.extend(sandbox.environment_of_relay()?);
        }
        let program = Program { file: binary.as_fd(), arguments, environment };
        let pid = spawn(&program, &[Some(relay_end.as_fd())], &[])?;
        Ok(Process { pid, socket, given: 0 })
    }

    fn give(&mut self, client: BorrowedFd<'_>) -> io::Result<()> {
        RELAY.try_send(&self.socket, b"client", &[client])?;
        self.given += 1;
        Ok(())
    }

    /// Sends the relay a connection to the worker, or none if the worker has no room for one more.
    fn give_link(&self, number: u64, connections: &Connections) -> io::Result<()> {
        let kind = SocketType::STREAM;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let link = pair.ok().filter(|(_, relay_end)| connections.admit(relay_end.as_fd()).is_ok());
        let link: Vec<BorrowedFd<'_>> =
            link.iter().map(|(keeper_end, _)| keeper_end.as_fd()).collect();
        RELAY.try_send(&self.socket, format!("link {number}").as_bytes(), &link)
    }
}

/// Turns this process into the relay that its keeper has started. It gives up all rights for good
/// but those to the socket that it returns. Call it before there is a second thread.
///
/// # Errors
/// The process still has rights and must end, or no keeper has started it as a relay.
pub fn become_relay() -> io::Result<OwnedFd> {
    let socket = take_given(RELAY_FD)?;
    if let Some((user, root)) = sandbox::sandbox()? {
        Lockdown { user, root, means: Means { sockets_only: true, ..Means::default() } }.enter()?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd as _;
    use std::process::Command;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// A relay of the previous program that speaks this version. `None`: that program said none.
    fn handed(version: Option<u32>) -> (Relay, OwnedFd) {
        // A child of another test would have the descriptor that is left open.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (keeper_end, relay_end) = frames::pair().unwrap();
        let child = Command::new("sleep").arg("1000").spawn().unwrap().id();
        // As after `execve`: the descriptor was left open for this program.
        rustix::io::fcntl_setfd(&keeper_end, rustix::io::FdFlags::empty()).unwrap();
        let version = version.map_or(String::new(), |version| format!(r#","version":{version}"#));
        let fd = keeper_end.into_raw_fd();
        let state = format!(r#"{{"process":[{child},{fd},1],"ended":[]{version}}}"#);
        (Relay::take(serde_json::from_str(&state).unwrap()).unwrap(), relay_end)
    }

    #[test]
    fn a_relay_of_a_version_too_far_away_is_ended_and_others_go_on() {
        for (version, goes_on) in [(None, true), (Some(2), true), (Some(3), false)] {
            let (mut relay, relay_end) = handed(version);
            assert_eq!(relay.fd().is_some(), goes_on, "{version:?}");
            assert_eq!(RELAY.try_receive(&relay_end).is_ok(), goes_on, "{version:?}");
            let state = serde_json::to_value(relay.to_state()).unwrap();
            assert_eq!(state["version"], version.unwrap_or(1));
            relay.end();
            while relay.due().is_some() {
                std::thread::sleep(POLL_INTERVAL);
                relay.reap();
            }
        }
    }
}
