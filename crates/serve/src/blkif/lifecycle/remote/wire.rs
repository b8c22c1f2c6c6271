//! The messages of the line: a `SOCK_SEQPACKET` socket, JSON, of bounded size.

use std::io;
use std::os::fd::BorrowedFd;

use ferrite_host::frames::{Protocol, Version, first_version};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::messages::{Failure, Order, Reply, Report};

/// Messages in both directions. The largest one, with rings of 64 queues, has a quarter of that.
pub(super) const LINE: Protocol = Protocol { name: "the line", max_bytes: 64 << 10, max_files: 0 };
/// The version of the line. It grows with each new order, and with each field that the other half
/// has to read (processes.md 11).
pub(super) const VERSION: Version = Version { protocol: LINE.name, own: 2 };

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
        /// Whether it is only looked at until the guest connects, as another host may have it. An
        /// older worker opens it at once, and fails if another host does have it.
        #[serde(skip_serializing_if = "std::ops::Not::not", default)]
        defers: bool,
        /// The follower's [`VERSION`].
        #[serde(default = "first_version")]
        version: u32,
    },
    /// An order for an open image.
    Order(Order),
    /// Answer the requests in flight and close the image, so that another process can go on.
    Retire,
    /// As [`Retire`](Self::Retire). Besides, the guests' tables name no image any more: the next
    /// image that is opened may be another one.
    Pause,
    /// As [`Retire`](Self::Retire), as the guest is suspended. It is refused while there are clients
    /// of NBD: QEMU has its disks flushed when its guest is suspended.
    Leave,
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

impl RequestKind {
    /// Whether it connects a guest's rings.
    pub(super) fn connects(&self) -> bool {
        matches!(self, RequestKind::Order(Order::Connect(_) | Order::TakeOver { .. }))
    }
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
    match wait {
        true => LINE.send(line, &bytes, &[]),
        false => LINE.try_send(line, &bytes, &[]),
    }
}

/// Receives a message. `None`: there is none yet.
///
/// # Errors
/// `UnexpectedEof`: the other end is gone. `InvalidData`: the message is malformed.
pub(super) fn receive_message<T: DeserializeOwned>(line: BorrowedFd<'_>) -> io::Result<Option<T>> {
    let Some(frame) = LINE.try_receive(line)? else { return Ok(None) };
    let message = serde_json::from_slice(&frame.bytes);
    message.map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
