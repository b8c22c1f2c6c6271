//! Clients of other hosts: listening TCP sockets, in clear or behind a tunnel that speaks TLS.

use std::fs::DirBuilder;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use clap::Args;
use ferrite_daemon::control::protocol::ExportParams;
use ferrite_daemon::state::DiskId;
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::frames::{self, CLIENT_CHANNEL};
use ferrite_host::limited;
use ferrite_host::listen::listen_tcp;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_host::sandbox::user_of_tunnel;
use ferrite_host::tunnel::TunnelUser;
use ferrite_keeper::{Tunnel, TunnelSpec, admitted};
use ferrite_serve::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::geteuid;

use crate::exit::{Code, Failure};
use crate::serve::RUN_DIR;

/// The empty folder in the daemon's.
const EMPTY: &str = "empty";

/// Where clients of other hosts are served, and how.
#[derive(Debug, Args)]
pub(crate) struct NetworkArgs {
    /// Listen at this address and port, too, for clients of other hosts. It may be given several times. An address is an
    /// IP address of this host; 0.0.0.0 and [::] stand for all of them.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = address)]
    pub(crate) listen: Vec<SocketAddr>,

    /// Speak TLS with these clients, with the certificates in DIR: server-cert.pem, server-key.pem, and ca-cert.pem, which
    /// has to have signed the certificates of clients.
    #[arg(long, value_name = "DIR", requires = "listen")]
    pub(crate) tls: Option<PathBuf>,

    /// Serve clients without a certificate, too: every client that reaches the port can read and write the disk.
    #[arg(long, requires = "tls")]
    pub(crate) tls_any_client: bool,

    /// Speak without TLS: every client that reaches the port can read and write the disk, and so can every host on the
    /// way.
    #[arg(long, requires = "listen", conflicts_with = "tls")]
    pub(crate) plain: bool,
}

/// An address with its port. Names are refused, since one may stand for several addresses.
fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "it is no IP address with a port: write 192.0.2.5:10809 or [2001:db8::5]:10809, or for all addresses of this \
         host 0.0.0.0:10809 or [::]:10809"
            .to_owned()
    })
}

/// Listening sockets for clients of other hosts.
pub(crate) struct Network {
    /// Where they listen and how, for people.
    pub(crate) places: Vec<String>,
    pub(crate) clients: Clients,
}

/// Where these clients come from.
pub(crate) enum Clients {
    /// They speak in clear.
    Plain(Vec<TcpListener>),
    /// They speak TLS with the tunnel.
    Tls(TunnelThread),
}

/// Makes the directory that tunnels have as their root, for a process that may not do so later.
pub(crate) fn make_root(args: &NetworkArgs) -> std::io::Result<()> {
    match args.tls.is_some() && geteuid().is_root() {
        true => {
            let root = Path::new(RUN_DIR).join(EMPTY);
            DirBuilder::new().recursive(true).mode(0o755).create(root)
        }
        false => Ok(()),
    }
}

/// Listens. No client is served yet.
pub(crate) fn listen(args: &NetworkArgs) -> Result<Option<Network>, Failure> {
    if args.listen.is_empty() {
        return Ok(None);
    }
    let verifies = !args.tls_any_client;
    match &args.tls {
        Some(folder) => ferrite_tunnel::check_server(folder, verifies)
            .map_err(|fault| Failure::new(fault.what, fault.why, fault.help))?,
        None if args.plain => {}
        None => {
            return Err(Failure::new(
                "cannot serve clients of other hosts",
                "it is not said how they are known",
                "give --tls DIR with certificates (docs/access.md), or --plain where all who reach the port may read and \
                 write the disk",
            )
            .with_code(Code::USAGE));
        }
    }
    let (mut listeners, mut places) = (Vec::new(), Vec::new());
    for wanted in &args.listen {
        let listener = listen_tcp(*wanted).map_err(|e| {
            let busy = e.kind() == std::io::ErrorKind::AddrInUse;
            let help = "stop the program that listens there (ss -ltnp), or name an address of this host and a free port";
            let failure = Failure::new(format!("cannot listen at {wanted}"), e, help);
            if busy { failure.with_code(Code::BUSY) } else { failure }
        })?;
        let place = listener.local_addr().unwrap_or(*wanted);
        let how = if args.tls.is_some() { "by TLS" } else { "in clear" };
        places.push(format!("{place} {how}"));
        listeners.push(listener);
    }
    let clients = match &args.tls {
        None => Clients::Plain(listeners),
        Some(folder) => {
            let thread = TunnelThread::start(folder, verifies, listeners).map_err(|e| {
                let help =
                    "check the limits of this process (ulimit -a), then run the same command again";
                Failure::new("cannot start the process that speaks TLS", e, help)
            })?;
            Clients::Tls(thread)
        }
    };
    Ok(Some(Network { places, clients }))
}

/// The thread that starts the tunnel, and the next one when it ends.
pub(crate) struct TunnelThread {
    /// Brings clients to the server.
    pub(crate) channel: OwnedFd,
    stop: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl TunnelThread {
    fn start(
        folder: &Path,
        verifies: bool,
        listeners: Vec<TcpListener>,
    ) -> std::io::Result<TunnelThread> {
        let (channel, tunnel_end) = frames::pair()?;
        let stop = Arc::new(Waker::new()?);
        let user = geteuid().is_root().then(|| TunnelUser {
            user: user_of_tunnel(std::process::id()),
            root: Path::new(RUN_DIR).join(EMPTY),
        });
        let folder = Some(std::path::absolute(folder)?);
        let spec = TunnelSpec { folder, verifies, limits: None, user };
        let program = std::fs::File::open("/proc/self/exe")?.into();
        let listeners = listeners.into_iter().map(OwnedFd::from).collect();
        let (mut tunnel, stopped) = (Tunnel::new(spec, program, listeners), stop.clone());
        let thread = std::thread::Builder::new().name("tunnel".to_owned());
        let thread = thread.spawn(move || keep(&mut tunnel, &tunnel_end, &stopped))?;
        Ok(TunnelThread { channel, stop, thread: Some(thread) })
    }
}

impl Drop for TunnelThread {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Has a tunnel run until `stop` is woken, and ends it then.
fn keep(tunnel: &mut Tunnel, server: &OwnedFd, stop: &Waker) {
    let limit = SharedLogLimit::default();
    loop {
        if let Err(e) = tunnel.advance() {
            limited!(warn, limit, SystemClock.now_ns(), "cannot start the tunnel: {e}");
        }
        let due = tunnel.due();
        let due =
            due.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        let fds = std::iter::once(stop.fd()).chain(tunnel.fd());
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // An error leaves nothing to do, and the next turn tries again.
        let _ = poll(&mut fds, due.as_ref());
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return;
        }
        if ready.get(1) == Some(&true) {
            let admit = |link: std::os::fd::BorrowedFd<'_>| {
                CLIENT_CHANNEL.try_send(server, b"client", &[link])
            };
            if let Err(e) = tunnel.handle_message(|| admitted(admit)) {
                limited!(warn, limit, SystemClock.now_ns(), "clients by TLS: {e}");
            }
        }
    }
}

/// The export that the daemon is asked for. `None`: there are no clients of other hosts.
///
/// # Errors
/// It is not said how clients are known, or a name is not UTF-8.
pub(crate) fn as_asked(
    args: &NetworkArgs,
    name: &str,
    read_only: bool,
    no_list: bool,
) -> Result<Option<ExportParams>, Failure> {
    let refuse = |why: &str, help: &str| {
        Failure::new("cannot listen for clients of other hosts", why, help).with_code(Code::USAGE)
    };
    if args.listen.is_empty() {
        return Ok(None);
    }
    if args.tls.is_none() && !args.plain {
        let help = "give --tls DIR with certificates (docs/access.md), or --plain where all who reach the port may read";
        return Err(refuse("it is not said how clients are known", help));
    }
    let absolute =
        |folder: &PathBuf| std::path::absolute(folder).ok()?.into_os_string().into_string().ok();
    let tls = match &args.tls {
        None => None,
        Some(folder) => Some(absolute(folder).ok_or_else(|| {
            refuse("the name of the folder of certificates is not UTF-8", "rename it")
        })?),
    };
    Ok(Some(ExportParams {
        // The daemon fills it in.
        disk: DiskId::tap(0),
        listen: args.listen.iter().map(ToString::to_string).collect(),
        vhost_user: None,
        queues: None,
        tls,
        any_client: args.tls_any_client,
        plain: args.plain,
        name: Some(name.to_owned()).filter(|name| !name.is_empty()),
        read_only,
        shared: false,
        no_list,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_said_whole_also_that_of_all_addresses() {
        for good in ["127.0.0.1:0", "[::1]:10809", "0.0.0.0:10809", "[::]:10809"] {
            assert_eq!(address(good).unwrap().to_string(), good);
        }
        for bad in ["10809", ":10809", "*:10809", "localhost:10809", "::1:10809", "192.0.2.5"] {
            assert!(address(bad).unwrap_err().contains("0.0.0.0:10809"), "{bad}");
        }
    }
}
