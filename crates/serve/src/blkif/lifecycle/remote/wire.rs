//! Messages of the line: a `SOCK_SEQPACKET` socket, JSON, bounded.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::messages::{Failure, Order, Reply, Report};

/// Most bytes of a message. The largest that there is, rings of 64 queues, has a quarter of that.
pub(super) const MAX_BYTES: usize = 64 << 10;

/// What a follower asks.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ask<W = What> {
    /// The answer names it.
    pub(super) number: u64,
    /// What is to be done.
    pub(super) what: W,
}

/// What a worker is to do.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum What {
    /// Have the image open, in this way and no other.
    Open {
        /// The guest may not write.
        read_only: bool,
        /// Nobody may give space back.
        #[serde(default)]
        keeps_all: bool,
    },
    /// Of an image that is open.
    Order(Order),
    /// Answer what is in flight and close the image, so that another process may go on.
    Retire,
    /// On the second line: serve this guest beside the first one, as soon as the image is open for that.
    Join {
        /// The guest may not write.
        read_only: bool,
        /// Its number.
        domid: u16,
    },
    /// On the second line: answer what is in flight, and forget this guest.
    Part {
        /// Its number.
        domid: u16,
    },
}

/// What a worker says.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Said {
    /// It is done, or could not be.
    Answer {
        /// Of what was asked.
        number: u64,
        /// What came of it.
        result: Result<Reply, Failure>,
    },
    /// Nobody has asked for it.
    Report(Report),
    /// It is time to look at all states: the medium may have grown, or the disk was exchanged.
    Look,
}

/// Sends a message. `wait`: until there is room for it.
///
/// # Errors
/// `WouldBlock`: there is none. Otherwise the other end is gone.
pub(super) fn say<T: Serialize>(line: BorrowedFd<'_>, message: &T, wait: bool) -> io::Result<()> {
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

/// Takes a message. `None`: there is none yet.
///
/// # Errors
/// `UnexpectedEof`: the other end is gone. `InvalidData`: it is no message of ours.
pub(super) fn hear<T: DeserializeOwned>(line: BorrowedFd<'_>) -> io::Result<Option<T>> {
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
