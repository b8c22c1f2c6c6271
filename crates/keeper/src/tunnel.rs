//! The tunnel of a disk or an export, seen from the process that has started it. NBD clients from other hosts are
//! connected with the tunnel, which speaks TLS (docs/internals/processes.md 14).
//!
//! The listening sockets are this process's: clients wait in them while a tunnel that has ended is replaced.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferrite_host::frames::{self, TUNNEL};
use ferrite_host::tunnel::{ExportLimits, Files, Inward, TunnelUser, start_inward};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::backoff::RestartBackoff;

/// How often the exit of a killed tunnel is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A stream whose other end `admit` hands to a server in this process.
///
/// # Errors
/// The server has no room, or the kernel none.
pub fn admitted(admit: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<OwnedFd> {
    let (server, link) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    admit(server.as_fd()).map(|()| link)
}

/// The description of a tunnel.
#[derive(Clone, Debug)]
pub struct TunnelSpec {
    /// The folder of certificates. Its files are opened anew for each client. Without one they speak in clear.
    pub folder: Option<PathBuf>,
    /// Whether clients need certificates.
    pub verifies: bool,
    /// The rights of clients, if the server is told.
    pub limits: Option<ExportLimits>,
    /// The user of the process, if this one is root's.
    pub user: Option<TunnelUser>,
}

/// A running tunnel.
#[derive(Debug)]
struct Process {
    pid: Pid,
    socket: OwnedFd,
    since: Instant,
}

/// The tunnel, and the next one when it ends. The thread that calls [`advance`](Self::advance) has to live as long as
/// the tunnel.
#[derive(Debug)]
pub struct Tunnel {
    spec: TunnelSpec,
    /// The program `ferrite`, opened and not looked up by name.
    program: OwnedFd,
    listeners: Vec<OwnedFd>,
    process: Option<Process>,
    /// Killed tunnels whose exit status was not collected yet.
    ended: Vec<Pid>,
    backoff: RestartBackoff,
    /// When the next one is started.
    start_at: Option<Instant>,
}

impl Tunnel {
    /// A tunnel for these listening sockets, which must not block. [`advance`](Self::advance) starts it.
    pub fn new(spec: TunnelSpec, program: OwnedFd, listeners: Vec<OwnedFd>) -> Tunnel {
        let (process, ended, backoff) = (None, Vec::new(), RestartBackoff::default());
        let start_at = Some(Instant::now());
        Tunnel { spec, program, listeners, process, ended, backoff, start_at }
    }

    /// A descriptor that is readable when the tunnel has sent a message or has ended.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|process| process.socket.as_fd())
    }

    /// The number of the running process.
    pub fn pid(&self) -> Option<Pid> {
        self.process.as_ref().map(|process| process.pid)
    }

    /// When to call [`advance`](Self::advance) at the latest.
    pub fn due(&self) -> Option<Duration> {
        let start = self.start_at.map(|at| at.saturating_duration_since(Instant::now()));
        start.into_iter().chain((!self.ended.is_empty()).then_some(POLL_INTERVAL)).min()
    }

    /// Starts the tunnel when it is time, and collects the exit status of killed ones.
    ///
    /// # Errors
    /// It could not be started. The next call after a pause tries again.
    pub fn advance(&mut self) -> io::Result<()> {
        self.reap();
        if self.start_at.is_none_or(|at| at > Instant::now()) {
            return Ok(());
        }
        self.start_at = None;
        match self.start() {
            Ok(process) => {
                self.process = Some(process);
                Ok(())
            }
            Err(e) => {
                self.restart_after(Duration::ZERO);
                Err(e)
            }
        }
    }

    fn start(&self) -> io::Result<Process> {
        let (socket, own) = frames::pair()?;
        let TunnelSpec { folder, verifies, user, limits } = &self.spec;
        let how = match folder {
            Some(_) => Inward::Tls { verifies: *verifies },
            None => Inward::Plain,
        };
        let (program, own) = (self.program.as_fd(), own.as_fd());
        let pid = start_inward(program, own, &how, limits.as_ref(), user.as_ref())?;
        let process = Process { pid, socket, since: Instant::now() };
        // They wait in the socket until the process reads them.
        for listener in &self.listeners {
            if let Err(e) = TUNNEL.try_send(&process.socket, b"listen", &[listener.as_fd()]) {
                let _ = kill_process(pid, Signal::KILL);
                let _ = waitpid(Some(pid), WaitOptions::empty());
                return Err(e);
            }
        }
        Ok(process)
    }

    /// Plans the next start. Returns how many ends were not logged, if this one is to be.
    fn restart_after(&mut self, lived: Duration) -> Option<u32> {
        let now = Instant::now();
        let (pause, logged) = self.backoff.after(lived, now);
        self.start_at = Some(now + pause);
        logged
    }

    /// Handles one message. `link` makes a stream to the server. A tunnel that has ended or sends anything unknown is
    /// replaced.
    ///
    /// # Errors
    /// What is to be logged. The rate is bounded.
    pub fn handle_message(&mut self, link: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<()> {
        let Some(process) = &self.process else { return Ok(()) };
        let received = match TUNNEL.try_receive(&process.socket) {
            Ok(None) => return Ok(()),
            Ok(Some(frame)) => frame.bytes,
            Err(_) => Vec::new(),
        };
        let text = std::str::from_utf8(&received).unwrap_or_default();
        let number = |what| text.strip_prefix(what).and_then(|number| number.parse::<u64>().ok());
        let done = match (number("link "), number("files ")) {
            (Some(number), _) => process.give_link(number, link),
            (_, Some(number)) => {
                let folder = self.spec.folder.as_deref();
                let folder = folder.ok_or_else(|| io::Error::other("there is no folder for TLS"));
                let files = folder.and_then(|at| Files::of_server(at, self.spec.verifies));
                process.give_files(number, files.as_ref().ok()).and(files.map(drop))
            }
            _ if text.is_empty() => {
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the tunnel has ended"))
            }
            _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a message of it is malformed")),
        };
        match done {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => self.replace(&e),
            done => done,
        }
    }

    fn replace(&mut self, why: &io::Error) -> io::Result<()> {
        let lived = self.process.as_ref().map(|process| process.since.elapsed());
        self.end();
        let Some(unlogged) = self.restart_after(lived.unwrap_or_default()) else { return Ok(()) };
        let more = if unlogged > 0 { format!("; {unlogged} more ends") } else { String::new() };
        Err(io::Error::other(format!(
            "{why}, and its clients' connections end; another one is started{more}"
        )))
    }

    /// Kills the tunnel, which ends its clients' connections.
    pub fn end(&mut self) {
        self.start_at = None;
        let Some(process) = self.process.take() else { return };
        // The kill fails if it has ended already.
        let _ = kill_process(process.pid, Signal::KILL);
        self.ended.push(process.pid);
        self.reap();
    }

    /// Ends the tunnel for good: its clients' connections have ended and no process listens when this returns.
    pub fn close(&mut self) {
        self.end();
        self.listeners.clear();
        for pid in self.ended.drain(..) {
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }

    fn reap(&mut self) {
        self.ended.retain(|pid| {
            matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None) | Err(Errno::INTR))
        });
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.end();
        for pid in &self.ended {
            let _ = waitpid(Some(*pid), WaitOptions::empty());
        }
    }
}

impl Process {
    /// Sends the tunnel a stream to the server, or none if the server has no room for one more.
    fn give_link(&self, number: u64, link: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<()> {
        let made = link();
        let link: Vec<_> = made.iter().map(OwnedFd::as_fd).collect();
        TUNNEL.try_send(&self.socket, format!("link {number}").as_bytes(), &link)
    }

    /// Sends the tunnel the files of certificates, or none if they cannot be opened.
    fn give_files(&self, number: u64, files: Option<&Files>) -> io::Result<()> {
        let Some(files) = files else {
            return TUNNEL.try_send(&self.socket, format!("files {number}").as_bytes(), &[]);
        };
        let text = format!("files {number} {}", files.letters());
        let files: Vec<_> = files.iter().map(|(_, file)| file.as_fd()).collect();
        TUNNEL.try_send(&self.socket, text.as_bytes(), &files)
    }
}
