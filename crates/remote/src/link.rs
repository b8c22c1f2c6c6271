//! One connection to a server, from its first byte to the end of the handshake.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ferrite_host::names::connect;
use ferrite_io::reactor::Io;
use ferrite_nbd::address::{Address, Helped};
use ferrite_nbd::client::{Command, Export, Handshake, Refusal, Wanted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::signal::first;

/// A connection whose handshake is over.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) socket: OwnedFd,
    pub(crate) export: Export,
    /// The last request is in the socket as a whole. Bytes behind a part of one would be taken for its data.
    pub(crate) is_between_requests: AtomicBool,
}

impl Drop for Link {
    /// Ends the session in good order, if there is room for these few bytes.
    fn drop(&mut self) {
        if !self.is_between_requests.load(Ordering::Relaxed) {
            return;
        }
        let _ = try_send(self.socket.as_fd(), &Command::disconnect());
    }
}

/// How a connection waits: on a reactor, or in a thread that has none yet.
pub(crate) enum Waiting<'a> {
    Here,
    On(&'a Io),
}

impl Waiting<'_> {
    async fn until(
        &self,
        socket: BorrowedFd<'_>,
        flags: PollFlags,
        end: Instant,
    ) -> io::Result<()> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match self {
            Waiting::Here => wait_here(socket, flags, left),
            Waiting::On(io) => {
                let fd = socket.as_raw_fd();
                let ready = async {
                    match flags {
                        PollFlags::OUT => io.writable(fd).await,
                        _ => io.readable(fd).await,
                    }
                };
                let late = async {
                    io.sleep(left).await?;
                    Err(io::ErrorKind::TimedOut.into())
                };
                first(ready, late).await
            }
        }
    }
}

fn wait_here(socket: BorrowedFd<'_>, flags: PollFlags, left: Duration) -> io::Result<()> {
    let mut fds = [PollFd::new(&socket, flags)];
    let left = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&left)) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Runs what waits [here](Waiting::Here), and so never needs to be polled twice.
pub(crate) fn run_here<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("it waits in poll(2)"),
    }
}

/// Connects and greets, until `end` at the latest.
///
/// # Errors
/// The server cannot be reached, or has no such export; in words for the user.
pub(crate) async fn open(
    waiting: &Waiting<'_>,
    address: &Address,
    attempt: u32,
    wanted: Wanted,
    end: Instant,
) -> Result<Link, Refusal> {
    let failed = |e: io::Error| unreachable_server(address, &e);
    let socket = connect::begin(address, attempt).map_err(|e| failed(e.into()))?;
    waiting.until(socket.as_fd(), PollFlags::OUT, end).await.map_err(failed)?;
    let mut handshake = Handshake::new(wanted)?;
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    loop {
        bytes.resize(handshake.needs(), 0);
        if !receive_all(waiting, socket.as_fd(), &mut bytes, end).await.map_err(failed)? {
            return Err(handshake.closed());
        }
        let export = handshake.take(&bytes, &mut out)?;
        send_all(waiting, socket.as_fd(), &out, end).await.map_err(failed)?;
        out.clear();
        if let Some(export) = export {
            return Ok(Link { socket, export, is_between_requests: AtomicBool::new(true) });
        }
    }
}

/// False: the stream has ended.
async fn receive_all(
    waiting: &Waiting<'_>,
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    end: Instant,
) -> io::Result<bool> {
    let mut done = 0;
    while done < bytes.len() {
        match recv(socket, &mut bytes[done..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(false),
            Ok((n, _)) => done += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => waiting.until(socket, PollFlags::IN, end).await?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

async fn send_all(
    waiting: &Waiting<'_>,
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    end: Instant,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match try_send(socket, &bytes[done..]) {
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => waiting.until(socket, PollFlags::OUT, end).await?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn try_send(socket: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

/// Why there is no connection, and what to do.
fn unreachable_server(address: &Address, e: &io::Error) -> Refusal {
    let place = match address {
        Address::Unix(path) => path.display().to_string(),
        Address::Tcp { host, port } | Address::Tls { host, port, .. } => {
            format!("{host}, port {port}")
        }
        Address::Helped { by, .. } => return without_helper(by, e),
    };
    let errno = e.raw_os_error().map(Errno::from_raw_os_error);
    let (why, help) = match (errno, e.kind()) {
        (Some(Errno::NOENT), _) => (
            format!("there is no socket {place}"),
            "start the server, or correct the path behind socket=".to_owned(),
        ),
        (Some(Errno::CONNREFUSED | Errno::PROTOTYPE), _) => (
            format!("no server listens at {place}"),
            "start the server, or correct its address".to_owned(),
        ),
        (Some(Errno::ACCESS | Errno::PERM), _) => (
            format!("this process may not connect to {place}"),
            "check the mode of the socket, or run as a user who may".to_owned(),
        ),
        (Some(Errno::NOKEY), _) => (
            format!("the certificates for {place} cannot be opened"),
            "name a folder with ca-cert.pem, and both client-cert.pem and client-key.pem or none: \
             ?tls-certificates=DIR"
                .to_owned(),
        ),
        (Some(Errno::HOSTUNREACH | Errno::NETUNREACH), _) => (
            format!("{place} cannot be reached, or its name has no address"),
            "check the name (getent hosts), the network and its routes".to_owned(),
        ),
        (Some(Errno::AGAIN), _) => (
            format!("the server at {place} takes no more clients now"),
            "end other clients, or let it take more (qemu-nbd -e)".to_owned(),
        ),
        (_, io::ErrorKind::TimedOut) => (
            format!("the server at {place} does not answer"),
            "check that it runs, and does not serve another client only (qemu-nbd -e)".to_owned(),
        ),
        _ => (format!("{place}: {e}"), "check the server and the network".to_owned()),
    };
    Refusal { why, help, passes: true }
}

/// Why no helper process serves a disk.
fn without_helper(disk: &Helped, e: &io::Error) -> Refusal {
    let errno = e.raw_os_error().map(Errno::from_raw_os_error);
    let name = disk.short();
    let (program, package, silent, check) = match disk {
        Helped::Rbd(_) => (
            "ferrite-rbd",
            "install it: it is in the package ferrite, and is built by cargo build -p ferrite-rbd",
            format!("the cluster does not answer for {name}"),
            "check the cluster (ceph -s, ceph pg stat), and the network to its OSDs",
        ),
        Helped::Pool(_) => (
            "ferrite",
            "install it: it is in the package ferrite",
            format!("the servers of the pool do not answer for {name}"),
            "check them and etcd (ferrite pool status), and the network to them",
        ),
    };
    let (why, help) = match (errno, e.kind()) {
        (Some(Errno::NOENT), _) => {
            (format!("the program {program} is not beside this one"), package)
        }
        (_, io::ErrorKind::TimedOut) => (silent, check),
        _ => (format!("the helper process of {name} is lost: {e}"), "look into the log"),
    };
    Refusal { why, help: help.to_owned(), passes: true }
}
