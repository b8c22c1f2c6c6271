//! Connections to the servers of a disk's data. They are begun here, and not waited for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ferrite_nbd::address::Address;
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_linger, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
    set_tcp_nodelay,
};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, ipproto, socket_with,
    socketpair,
};
use rustix::process::{Pid, WaitOptions, geteuid, waitpid};

use super::wire::{Request, What};
use crate::helper::{self, Starter};
use crate::sandbox::user_of_tunnel;
use crate::tunnel::{Files, TunnelUser, start_outward};

/// A server's addresses that are tried, at most.
pub const MAX_ADDRESSES: usize = 16;

/// The root directory of tunnels that are started by root without a keeper.
const TUNNEL_ROOT: &str = "/run/ferrite/empty";
/// After so long without a byte of the other side the kernel asks whether it is there.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(10);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEPALIVES: u32 = 3;

/// A server that a worker may be connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its name, which the worker asks for.
    pub address: Address,
    /// The addresses that the name has, if it is that of a TCP port: they were found out before, since that waits.
    pub resolved: Vec<SocketAddr>,
}

/// The addresses of a host's port: at most [`MAX_ADDRESSES`]. This may wait for the host's resolver.
///
/// # Errors
/// The resolver's: there is no such host, or the resolver cannot say now.
pub fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let all: Vec<SocketAddr> = (host, port).to_socket_addrs()?.take(MAX_ADDRESSES).collect();
    match all.is_empty() {
        true => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
        false => Ok(all),
    }
}

/// Begins a connection to a server, or has the keeper do so. The stream does not block. It is connected when it is
/// writable; the first transfer then tells whether that failed. With several addresses, `attempt` says which of them is
/// taken. The first call in a process that has no keeper may wait for the host's resolver.
///
/// # Errors
/// The kernel's, for `AGAIN` of a Unix socket, whose listener has no room, too; `ACCESS`: the keeper does not allow
/// this server. `HOSTUNREACH`: its name has no address.
pub fn begin(address: &Address, attempt: u32) -> rustix::io::Result<OwnedFd> {
    if let Some(broker) = super::BROKER.get() {
        let ((first, second), what) = (address.to_bytes(), What::Connect);
        let request = Request { what, flags: attempt, mode: 0, first: &first, second };
        return broker.ask(&request, &[])?.file();
    }
    if let Address::Helped { by, read_only } = address {
        return helper::begin(by, *read_only, Starter::OwnThread);
    }
    let server = Server { address: address.clone(), resolved: remembered(address)? };
    let user = geteuid()
        .is_root()
        .then(|| TunnelUser { user: user_of_tunnel(std::process::id()), root: TUNNEL_ROOT.into() });
    begin_to(&server, attempt, user.as_ref())
}

/// The addresses of a name as they were when it was first asked for. A disk that lost its server must not wait for the
/// resolver, which may be what is lost.
fn remembered(address: &Address) -> rustix::io::Result<Vec<SocketAddr>> {
    static ALL: Mutex<BTreeMap<Address, Vec<SocketAddr>>> = Mutex::new(BTreeMap::new());
    let (Address::Tcp { host, port } | Address::Tls { host, port, .. }) = address else {
        return Ok(Vec::new());
    };
    let known = ALL.lock().unwrap_or_else(PoisonError::into_inner).get(address).cloned();
    if let Some(known) = known {
        return Ok(known);
    }
    let found = resolve(host, *port).map_err(|_| Errno::HOSTUNREACH)?;
    ALL.lock().unwrap_or_else(PoisonError::into_inner).insert(address.clone(), found.clone());
    Ok(found)
}

/// Begins a connection in this process; see [`begin`].
///
/// # Errors
/// As [`begin`].
pub(super) fn begin_to(
    server: &Server,
    attempt: u32,
    user: Option<&TunnelUser>,
) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    if let Address::Helped { by, read_only } = &server.address {
        return helper::begin(by, *read_only, Starter::ThisThread);
    }
    if let Address::Unix(path) = &server.address {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path.as_path())?)?;
        return Ok(socket);
    }
    let count = server.resolved.len().max(1);
    let at = server.resolved.get(attempt as usize % count).ok_or(Errno::HOSTUNREACH)?;
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    set_tcp_nodelay(&socket, true)?;
    set_socket_keepalive(&socket, true)?;
    set_tcp_keepidle(&socket, KEEPALIVE_AFTER)?;
    set_tcp_keepintvl(&socket, KEEPALIVE_EVERY)?;
    set_tcp_keepcnt(&socket, KEEPALIVES)?;
    // A process that closes it, or is killed, takes back the bytes that the kernel has not sent. Otherwise the kernel
    // would send writes for minutes, behind newer ones of the next connection (docs/internals/remotes.md 2).
    set_socket_linger(&socket, Some(Duration::ZERO))?;
    match connect(&socket, at) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(e) => return Err(e),
    }
    match &server.address {
        Address::Tls { host, certificates, .. } => through_tunnel(socket, host, certificates, user),
        _ => Ok(socket),
    }
}

/// The inner stream of a tunnel to a server. The tunnel waits for the connection, and says on the stream why it fails.
///
/// # Errors
/// The kernel's; `NOKEY`: the certificates cannot be opened, which the log says.
fn through_tunnel(
    socket: OwnedFd,
    host: &str,
    certificates: &Path,
    user: Option<&TunnelUser>,
) -> rustix::io::Result<OwnedFd> {
    reap_tunnels(None);
    let files = Files::of_client(certificates).map_err(|e| {
        tracing::warn!("cannot connect to {host} by TLS: {e}; correct tls-certificates=DIR");
        Errno::NOKEY
    })?;
    let failed = |e: io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
    let program = File::open("/proc/self/exe").map_err(failed)?;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let pid = start_outward(program.as_fd(), host, &files, socket.as_fd(), theirs.as_fd(), user);
    reap_tunnels(Some(pid.map_err(failed)?));
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok(ours)
}

/// Collects the exit status of tunnels that have ended, and remembers one more.
fn reap_tunnels(new: Option<Pid>) {
    static TUNNELS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
    let mut tunnels = TUNNELS.lock().unwrap_or_else(PoisonError::into_inner);
    tunnels.retain(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
    tunnels.extend(new);
}
