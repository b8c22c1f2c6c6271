//! Messages between the processes of this host: bounded frames on Unix sockets, and one rule for
//! their versions (docs/internals/processes.md 11).
//!
//! * [`Protocol`]: the bounds of a protocol. It sends and receives frames, each with its
//!   descriptors.
//! * [`Version`]: the version of a protocol whose ends may be different programs.
//! * [`lines`]: the frames of protocols on stream sockets, one line each.
//!
//! A frame has no more bytes and descriptors than its protocol says. The receiver of a longer one
//! refuses it, whatever the peer says of its length. Each protocol defines the meaning of its bytes.

pub mod lines;
mod versions;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
    socket_with, socketpair,
};

pub use versions::{UnknownVersion, Version, first_version};

/// Most descriptors that the kernel sends with one frame.
pub const MAX_FILES: usize = 253;

/// A protocol on `SOCK_SEQPACKET` sockets, where the kernel keeps frames apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Its name in the texts of errors, such as `a keeper's socket`.
    pub name: &'static str,
    /// Most bytes of a frame.
    pub max_bytes: usize,
    /// Most descriptors of a frame, [`MAX_FILES`] or fewer. The receiver closes others.
    pub max_files: usize,
}

/// The client channel, which brings clients from a keeper to its worker. Both are one program, so
/// there is one version. It stands here since the crates of the two do not know each other.
pub const CLIENT_CHANNEL: Protocol =
    Protocol { name: "the client channel", max_bytes: 512, max_files: 3 };

/// The bytes of a client of NBD in the client channel. Others have bytes that the keeper passes on.
pub const NBD_CLIENT: &[u8] = b"client";

/// The socket between a keeper and its relay, for the same reason. The relay may be an older program:
/// the keeper knows its version.
pub const RELAY: Protocol = Protocol { name: "the socket of a relay", max_bytes: 64, max_files: 1 };

/// The socket between a tunnel and the process that has started it. Both are one program, so there is one version.
pub const TUNNEL: Protocol =
    Protocol { name: "the socket of a tunnel", max_bytes: 64, max_files: 4 };

/// A frame that has come.
#[derive(Debug)]
pub struct Frame {
    /// Its bytes: at least one.
    pub bytes: Vec<u8>,
    /// Its descriptors. Some may be missing if this process had no number free for them.
    pub files: Vec<OwnedFd>,
}

impl Protocol {
    /// Sends a frame, and waits for room, no longer than the socket's timeout.
    ///
    /// # Errors
    /// `InvalidInput`: it exceeds the protocol's bounds. Otherwise the kernel's: the peer is gone,
    /// or the timeout has passed (`WouldBlock`).
    pub fn send(
        &self,
        socket: impl AsFd,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.send_by(socket, bytes, files, SendFlags::empty())
    }

    /// Sends a frame if there is room for it now.
    ///
    /// # Errors
    /// `WouldBlock`: there is no room. Otherwise as [`send`](Self::send).
    pub fn try_send(
        &self,
        socket: impl AsFd,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.send_by(socket, bytes, files, SendFlags::DONTWAIT)
    }

    fn send_by(
        &self,
        socket: impl AsFd,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        // A frame without bytes would be taken for the peer's end.
        if bytes.is_empty() || bytes.len() > self.max_bytes || files.len() > self.max_files {
            let (length, count) = (bytes.len(), files.len());
            let why = format!(
                "a message of {length} bytes and {count} descriptors exceeds the bounds of {}",
                self.name
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let mut space = self.space();
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = [IoSlice::new(bytes)];
        let flags = flags | SendFlags::NOSIGNAL;
        Ok(retry_on_intr(|| sendmsg(&socket, &bytes, &mut ancillary, flags)).map(drop)?)
    }

    /// Receives the next frame, and waits for it, no longer than the socket's timeout.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer has ended. If it has left frames of ours unread, this comes before
    /// its last frames. `InvalidData`: the frame is too long, and is dropped.
    /// `WouldBlock`: the timeout has passed. Otherwise the kernel's.
    pub fn receive(&self, socket: impl AsFd) -> io::Result<Frame> {
        self.receive_by(socket, RecvFlags::empty())
    }

    /// Receives the next frame, if it has come. `None`: there is none yet.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn try_receive(&self, socket: impl AsFd) -> io::Result<Option<Frame>> {
        match self.receive_by(socket, RecvFlags::DONTWAIT) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            received => received.map(Some),
        }
    }

    fn receive_by(&self, socket: impl AsFd, flags: RecvFlags) -> io::Result<Frame> {
        let mut bytes = vec![0; self.max_bytes];
        let mut space = self.space();
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
        let received = {
            let mut into = [IoSliceMut::new(&mut bytes)];
            retry_on_intr(|| recvmsg(&socket, &mut into, &mut ancillary, flags))
        };
        let len = match received {
            Ok(message) if message.bytes == 0 => return Err(ended()),
            // The peer has ended without reading everything.
            Err(Errno::CONNRESET) => return Err(ended()),
            received => received?.bytes,
        };
        let files = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        // All of them are taken out, so that those beyond the bound are closed.
        let mut files: Vec<OwnedFd> = files.flatten().collect();
        files.truncate(self.max_files);
        // The kernel says the frame's own length, however much of it was read.
        if len > self.max_bytes {
            return Err(too_long(self.name, self.max_bytes));
        }
        bytes.truncate(len);
        Ok(Frame { bytes, files })
    }

    /// The room for a frame's descriptors.
    fn space(&self) -> Vec<MaybeUninit<u8>> {
        let files = self.max_files.min(MAX_FILES);
        vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files))]
    }
}

/// A pair of connected sockets for frames.
///
/// # Errors
/// The kernel's: this process has too many descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Connects to the process that listens for frames at `path`. Each wait on the socket takes
/// `timeout` at most, also that for being accepted.
///
/// # Errors
/// `NotFound` or `ConnectionRefused`: no process listens there. `WouldBlock`: it does not accept.
pub fn connect(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
    // It also bounds the wait of a connection that has not been accepted.
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the process at the other end has ended")
}

fn too_long(name: &str, max_bytes: usize) -> io::Error {
    let why = format!("a message of {name} has more than {max_bytes} bytes");
    io::Error::new(io::ErrorKind::InvalidData, why)
}
