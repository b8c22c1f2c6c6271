//! The exporter's process: one thread.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_host::listen::listen_tcp;
use ferrite_host::process::{Fork, fork};
use ferrite_host::sandbox::user_of_tunnel;
use ferrite_host::tunnel::TunnelUser;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with,
};
use rustix::process::{chdir, geteuid, setsid};

use super::{EXPORTER, ExporterSpec, SPEC, Started};
use crate::socket::Endpoint;
use crate::tunnel::{Tunnel, TunnelSpec};
use crate::{log, name_disk};

/// Connections to its socket. One more replaces the oldest.
const MAX_ASKERS: usize = 4;
/// The pause after an error whose cause stays.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The log has at most one line of clients' failures in this time.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// Why nothing is exported: the reason, the next step, and whether an address is taken.
type Refusal = (String, String, bool);

/// Runs an exporter, in the process that [`ExporterSpec::start`] has started. `check` looks whether a folder has what
/// a server of TLS needs, and returns the reason and the next step otherwise. Call it while there is one thread.
///
/// # Errors
/// The environment has no description of an exporter, or it could not start; the process that has started it was told.
pub fn run_exporter(
    check: impl FnOnce(&Path, bool) -> Result<(), (String, String)>,
) -> io::Result<Infallible> {
    let text = std::env::var(SPEC)
        .map_err(|_| io::Error::other("the daemon starts it: ferrite disk export"))?;
    let spec: ExporterSpec = serde_json::from_str(&text)?;
    // The starter waits for the exit of this process, so that it is not the exporter's parent.
    if fork()? == Fork::Parent {
        std::process::exit(0);
    }
    setsid()?;
    chdir("/")?;
    name_disk(&spec.socket.with_extension(""));
    let started = Process::new(spec, check);
    let first = match &started {
        Ok(process) => Started::Listening(process.addresses.clone()),
        Err((why, help, in_use)) => {
            let (why, help, in_use) = (why.clone(), help.clone(), *in_use);
            Started::Refused { why, help, in_use }
        }
    };
    let mut line = serde_json::to_string(&first)?;
    line.push('\n');
    // Without a reader no daemon would know of this process.
    let told = io::stdout().write_all(line.as_bytes()).and_then(|()| io::stdout().flush());
    if let (Err(e), Ok(process)) = (&told, &started) {
        let _ = process.endpoint.remove(&process.spec.socket);
        return Err(io::Error::new(e.kind(), format!("no process waits for it: {e}")));
    }
    match started {
        Ok(process) => process.run(),
        Err((why, _, _)) => Err(io::Error::other(why)),
    }
}

struct Process {
    spec: ExporterSpec,
    endpoint: Endpoint,
    addresses: Vec<SocketAddr>,
    tunnel: Tunnel,
    askers: Vec<OwnedFd>,
    logged: Option<Instant>,
}

impl Process {
    fn new(
        spec: ExporterSpec,
        check: impl FnOnce(&Path, bool) -> Result<(), (String, String)>,
    ) -> Result<Process, Refusal> {
        if let Some(tls) = &spec.tls {
            check(&tls.folder, tls.verifies).map_err(|(why, help)| (why, help, false))?;
        }
        let endpoint = Endpoint::take(&spec.socket).map_err(|e| {
            let why = format!("cannot listen at {}: {e}", spec.socket.display());
            (why, "run the same command again".to_owned(), false)
        })?;
        let (mut listeners, mut addresses) = (Vec::new(), Vec::new());
        let mut listen = |wanted: SocketAddr| -> io::Result<()> {
            let listener = listen_tcp(wanted)?;
            addresses.push(listener.local_addr()?);
            listeners.push(OwnedFd::from(listener));
            Ok(())
        };
        for wanted in &spec.listen {
            if let Err(e) = listen(*wanted) {
                let _ = endpoint.remove(&spec.socket);
                let help = "stop the program that listens there (ss -ltnp), or name an address of this host and \
                            a free port";
                let in_use = e.kind() == io::ErrorKind::AddrInUse;
                return Err((format!("cannot listen at {wanted}: {e}"), help.to_owned(), in_use));
            }
        }
        let program = File::open("/proc/self/exe").map_err(|e| {
            let _ = endpoint.remove(&spec.socket);
            (format!("cannot open this program: {e}"), "mount /proc".to_owned(), false)
        })?;
        let user = geteuid().is_root().then(|| TunnelUser {
            user: user_of_tunnel(std::process::id()),
            root: spec.root.clone(),
        });
        let tunnel = TunnelSpec {
            folder: spec.tls.as_ref().map(|tls| tls.folder.clone()),
            verifies: spec.tls.as_ref().is_some_and(|tls| tls.verifies),
            limits: Some(spec.limits()),
            user,
        };
        let tunnel = Tunnel::new(tunnel, program.into(), listeners);
        Ok(Process { spec, endpoint, addresses, tunnel, askers: Vec::new(), logged: None })
    }

    fn run(mut self) -> ! {
        loop {
            if let Err(e) = self.tunnel.advance() {
                self.log(&format!("cannot start the process that speaks with clients: {e}"));
            }
            let (is_connecting, asking, has_message) = self.wait();
            if has_message {
                let server = self.spec.server.clone();
                if let Err(e) = self.tunnel.handle_message(|| connect_to(&server)) {
                    self.log(&format!("clients of other hosts: {e}"));
                }
            }
            for i in asking.into_iter().rev() {
                self.answer(i);
            }
            if is_connecting {
                self.accept();
            }
        }
    }

    /// Waits for something to do: a connection, askers by index, a message of the tunnel.
    fn wait(&self) -> (bool, Vec<usize>, bool) {
        let due = self.tunnel.due();
        let due =
            due.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        let askers = self.askers.iter().map(|asker| asker.as_fd());
        let all = std::iter::once(self.endpoint.listener.as_fd()).chain(askers);
        let all = all.chain(self.tunnel.fd());
        let mut fds: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        if poll(&mut fds, due.as_ref()).is_err() {
            return (false, Vec::new(), false);
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let count = self.askers.len();
        let asking = (0..count).filter(|i| ready[i + 1]).collect();
        (ready[0], asking, ready.get(count + 1) == Some(&true))
    }

    fn accept(&mut self) {
        match accept_with(&self.endpoint.listener, SocketFlags::CLOEXEC) {
            Ok(asker) => {
                if self.askers.len() == MAX_ASKERS {
                    self.askers.remove(0);
                }
                self.askers.push(asker);
            }
            Err(e) => {
                self.log(&format!("cannot accept a connection: {e}"));
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }

    fn answer(&mut self, i: usize) {
        let question = match EXPORTER.try_receive(&self.askers[i]) {
            Ok(None) => return,
            Ok(Some(frame)) => frame.bytes,
            Err(_) => Vec::new(),
        };
        match question.as_slice() {
            b"pid" => {
                let pid = std::process::id().to_string();
                let _ = EXPORTER.try_send(&self.askers[i], pid.as_bytes(), &[]);
            }
            b"end" => {
                // Clients' connections end, then the names go. After the reply the addresses are free.
                self.tunnel.close();
                let _ = self.endpoint.remove(&self.spec.socket);
                let _ = EXPORTER.try_send(&self.askers[i], b"done", &[]);
                std::process::exit(0);
            }
            _ => drop(self.askers.remove(i)),
        }
    }

    fn log(&mut self, text: &str) {
        if self.logged.is_none_or(|at| at.elapsed() > LOG_PAUSE) {
            log(text);
            self.logged = Some(Instant::now());
        }
    }
}

/// A stream to the disk, without waiting: its socket may have no room.
fn connect_to(server: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&stream, &SocketAddrUnix::new(server)?)?;
    Ok(stream)
}
