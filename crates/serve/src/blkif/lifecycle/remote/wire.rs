//! The messages of the line: a `SOCK_SEQPACKET` socket, JSON, of bounded size.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::messages::{Failure, Order, Reply, Report};

/// Most bytes of a message. The largest one, with rings of 64 queues, has a quarter of that.
pub(super) const MAX_BYTES: usize = 64 << 10;

/// A follower's request.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request<W = RequestKind> {
    /// The number, which the reply repeats.
    pub(super) number: u64,
    /// The request itself.
    pub(super) what: W,
}

/// A request to a worker.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RequestKind {
    /// Open the image in this mode.
    Open {
        /// Whether the guest may only read.
        read_only: bool,
        /// Whether discards are refused.
        #[serde(default)]
        keeps_all: bool,
    },
    /// An order for an open image.
    Order(Order),
    /// Answer the requests in flight and close the image, so that another process can go on.
    Retire,
    /// On the second line: serve this guest beside the first one, as soon as the image is open.
    Join {
        /// Whether the guest may only read.
        read_only: bool,
        /// The guest's domain number.
        domid: u16,
    },
    /// On the second line: answer the requests in flight, and remove this guest.
    Part {
        /// The guest's domain number.
        domid: u16,
    },
}

/// A worker's message.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The reply to a request.
    #[serde(rename = "Answer")]
    Reply {
        /// The request's number.
        number: u64,
        /// The request's result.
        result: Result<Reply, Failure>,
    },
    /// An unsolicited report.
    Report(Report),
    /// All states are to be read again: the medium may have grown, or the disk was exchanged.
    #[serde(rename = "Look")]
    Recheck,
}

/// Sends a message. `wait`: blocks until there is room for it.
///
/// # Errors
/// `WouldBlock`: there is no room. Otherwise the other end is gone.
pub(super) fn send_message<T: Serialize>(
    line: BorrowedFd<'_>,
    message: &T,
    wait: bool,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_BYTES {
        return Err(io::Error::other(format!("a message of {} bytes", bytes.len())));
    }
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, !wait);
    loop {
        match send(line, &bytes, flags) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives a message. `None`: there is none yet.
///
/// # Errors
/// `UnexpectedEof`: the other end is gone. `InvalidData`: the message is malformed.
pub(super) fn receive_message<T: DeserializeOwned>(line: BorrowedFd<'_>) -> io::Result<Option<T>> {
    let mut bytes = Vec::with_capacity(MAX_BYTES);
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let whole = match recv(line, rustix::buffer::spare_capacity(&mut bytes), flags) {
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        received => received?.1,
    };
    if whole == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if whole > bytes.len() {
        let why = format!("a message of {whole} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let message = serde_json::from_slice(&bytes);
    message.map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
