//! The front end's socket: whole messages in, answers out. Only the thread that has it uses it, and it never waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::message::{HEADER_BYTES, Header, MAX_FILES, Malformed};

/// A message as it came.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) files: Vec<OwnedFd>,
}

/// Why no more messages come.
#[derive(Debug)]
pub(super) enum Ended {
    /// The front end has closed the connection.
    Closed,
    /// It has sent what is no message.
    Malformed(Malformed),
    System(io::Error),
}

impl From<Malformed> for Ended {
    fn from(malformed: Malformed) -> Ended {
        Ended::Malformed(malformed)
    }
}

/// The socket, and the part of the next message that has come.
pub(super) struct Socket {
    stream: UnixStream,
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

impl Socket {
    pub(super) fn new(stream: UnixStream) -> io::Result<Socket> {
        stream.set_nonblocking(true)?;
        Ok(Socket { stream, bytes: Vec::new(), files: Vec::new() })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The next message, if all of it has come. Nothing behind it is read, so descriptors belong to it.
    pub(super) fn receive(&mut self) -> Result<Option<Received>, Ended> {
        loop {
            let header = match self.bytes.first_chunk::<HEADER_BYTES>() {
                Some(header) => Some(Header::decode(header)?),
                None => None,
            };
            let wanted = HEADER_BYTES + header.map_or(0, |header| header.size);
            if let Some(header) = header
                && self.bytes.len() == wanted
            {
                let bytes = std::mem::take(&mut self.bytes);
                let (body, files) =
                    (bytes[HEADER_BYTES..].to_vec(), std::mem::take(&mut self.files));
                return Ok(Some(Received { header, body, files }));
            }
            if !self.receive_more(wanted - self.bytes.len())? {
                return Ok(None);
            }
        }
    }

    /// Reads at most so many bytes. `false`: there are none yet.
    fn receive_more(&mut self, most: usize) -> Result<bool, Ended> {
        let mut into = vec![0; most];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = {
            let mut into = [IoSliceMut::new(&mut into)];
            retry_on_intr(|| recvmsg(&self.stream, &mut into, &mut ancillary, flags))
        };
        let message = match received {
            Ok(message) if message.bytes > 0 => message,
            Ok(_) | Err(Errno::CONNRESET) => return Err(Ended::Closed),
            Err(Errno::AGAIN) => return Ok(false),
            Err(e) => return Err(Ended::System(e.into())),
        };
        // The kernel has closed those that it had no room for.
        let cut = message.flags.contains(ReturnFlags::CTRUNC);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        if cut || self.files.len() > MAX_FILES {
            let why = format!("a message has more than {MAX_FILES} descriptors");
            return Err(Malformed(why).into());
        }
        self.bytes.extend_from_slice(&into[..message.bytes]);
        Ok(true)
    }

    /// Sends an answer, with a descriptor if there is one.
    ///
    /// # Errors
    /// Also if there is no room: a front end that reads nothing is let go.
    pub(super) fn send(&self, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        send(&self.stream, bytes, file)
    }
}

/// Sends a message on a socket as a whole.
pub(super) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().collect();
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let slices = [IoSlice::new(bytes)];
    let sent = retry_on_intr(|| sendmsg(&socket, &slices, &mut ancillary, flags))?;
    match sent == bytes.len() {
        true => Ok(()),
        false => Err(io::Error::other("the front end does not read its answers")),
    }
}
