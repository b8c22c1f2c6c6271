//! Listening TCP sockets.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use rustix::net::sockopt::{
    set_ipv6_v6only, set_socket_keepalive, set_socket_reuseaddr, set_tcp_keepcnt, set_tcp_keepidle,
    set_tcp_keepintvl, set_tcp_nodelay,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// A connection without a byte for this long is asked whether it lives.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// The time between such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// So many questions without an answer end a connection.
const KEEPALIVE_COUNT: u32 = 6;
/// A listening socket. Accepted ones inherit its options.
///
/// # Errors
/// `AddrInUse`: another program listens there. Otherwise the kernel's.
pub fn listen_tcp(wanted: SocketAddr) -> std::io::Result<TcpListener> {
    let family = if wanted.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    set_socket_reuseaddr(&socket, true)?;
    if wanted.is_ipv6() {
        // `[::]` is said of IPv6 only.
        set_ipv6_v6only(&socket, true)?;
    }
    set_tcp_nodelay(&socket, true)?;
    set_socket_keepalive(&socket, true)?;
    set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
    set_tcp_keepcnt(&socket, KEEPALIVE_COUNT)?;
    rustix::net::bind(&socket, &wanted)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}
