//! A connection to a copy's server: how it begins, and its messages.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_helper::{Message, Outbox};
use ferrite_host::names::connect::begin;
use ferrite_nbd::address::Address;
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, reply,
};
use ferrite_pool::wire::{Extent, Greeting, HEADER_BYTES, Header, Kind, MAX_PAYLOAD, OPTION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_error};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

/// How long a connection may take, and then each answer of the handshake.
const CONNECTING: Duration = Duration::from_secs(2);
/// The longest reason that a server gives.
const MAX_REASON: u32 = 4096;

/// The data behind a header.
#[derive(Clone)]
pub(crate) enum Payload {
    /// Bytes of this message alone.
    Own(Vec<u8>),
    /// Bytes that several messages share.
    Shared(Arc<Vec<u8>>, Range<usize>),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Payload::Own(bytes) => bytes,
            Payload::Shared(bytes, range) => bytes.get(range.clone()).unwrap_or_default(),
        }
    }
}

struct Frame {
    head: [u8; HEADER_BYTES],
    data: Payload,
}

impl Message for Frame {
    fn head(&self) -> &[u8] {
        &self.head
    }

    fn data(&self) -> &[u8] {
        self.data.bytes()
    }
}

/// A connection behind its handshake.
pub(crate) struct Link {
    socket: OwnedFd,
    outbox: Outbox<Frame>,
    /// Requests without an answer: how many bytes each reads, or is not to read.
    asked: Mutex<BTreeMap<u64, u64>>,
}

impl Link {
    pub(crate) fn new(socket: OwnedFd) -> Link {
        Link { socket, outbox: Outbox::default(), asked: Mutex::default() }
    }

    /// Sends a request now, or later.
    pub(crate) fn send(&self, kind: Kind, op: u64, start: u64, len: u64, data: Payload) {
        let reads = if kind == Kind::Read { len } else { 0 };
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).insert(op, reads);
        // Its users split what is longer.
        let payload = data.bytes().len() as u32;
        let head = Header { kind, op, start, len, payload }.to_bytes();
        self.outbox.push(&self.socket, Frame { head, data });
    }

    /// Sends what the socket had no room for, until the connection is closed.
    pub(crate) fn run(&self) {
        self.outbox.run(&self.socket);
    }

    /// Ends it. Its thread sees the end.
    pub(crate) fn close(&self) {
        self.outbox.close();
        // It may have ended by itself.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// The next answer, to a request that was sent.
    ///
    /// # Errors
    /// The end of the connection, or a message that the server may not send.
    pub(crate) fn receive(&self) -> io::Result<(Header, Vec<u8>)> {
        let (header, payload) = message(&self.socket)?;
        if header.kind == Kind::Failed {
            return Ok((header, payload));
        }
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner).remove(&header.op);
        let fits = match header.kind {
            Kind::Done => asked == Some(u64::from(header.payload)),
            _ => asked.is_some(),
        };
        match fits {
            true => Ok((header, payload)),
            false => Err(odd("an answer that was not asked for, or of another length")),
        }
    }
}

/// Connects to a server, and names the server that is meant. Reads of the socket wait for data.
///
/// # Errors
/// In words.
pub(crate) fn connect(
    at: SocketAddr,
    tls: Option<&Path>,
    greeting: &Greeting,
) -> Result<OwnedFd, String> {
    let (host, port) = (at.ip().to_string(), at.port());
    let address = match tls {
        None => Address::Tcp { host, port },
        Some(folder) => Address::Tls { host, port, certificates: folder.to_owned() },
    };
    let socket = begin(&address, 0).map_err(|e| io::Error::from(e).to_string())?;
    let by = Timespec { tv_sec: CONNECTING.as_secs().cast_signed(), tv_nsec: 0 };
    match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&by)) {
        Ok(0) => return Err(format!("no connection within {} s", CONNECTING.as_secs())),
        Ok(_) => {}
        Err(e) => return Err(io::Error::from(e).to_string()),
    }
    if let Ok(Err(e)) = socket_error(&socket) {
        return Err(io::Error::from(e).to_string());
    }
    greet_server(&socket, greeting)?;
    Ok(socket)
}

/// Names the server that is meant, on a connected socket. Reads of it wait for data.
///
/// # Errors
/// In words.
pub(crate) fn greet_server(socket: &OwnedFd, greeting: &Greeting) -> Result<(), String> {
    greet(socket, greeting).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => format!("no answer within {} s", CONNECTING.as_secs()),
        _ => e.to_string(),
    })
}

/// NBD's handshake, up to our option.
fn greet(socket: &OwnedFd, greeting: &Greeting) -> io::Result<()> {
    ioctl_fionbio(socket, false)?;
    set_socket_timeout(socket, Timeout::Recv, Some(CONNECTING))?;
    set_socket_timeout(socket, Timeout::Send, Some(CONNECTING))?;
    let mut hello = [0; 18];
    read_exact(socket, &mut hello)?;
    let mut fields = Fields(&hello);
    let is_known = fields.u64() == Some(SERVER_MAGIC) && fields.u64() == Some(OPTION_MAGIC);
    if !is_known || fields.u16().is_none_or(|flags| flags & FIXED_NEWSTYLE == 0) {
        return Err(odd("it is no server of a pool"));
    }
    let data = greeting.to_bytes();
    let mut out = u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes().to_vec();
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(OPTION.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    write_all(socket, &out)?;
    let mut head = [0; 20];
    read_exact(socket, &mut head)?;
    let mut fields = Fields(&head);
    let (magic, option, kind, len) = (fields.u64(), fields.u32(), fields.u32(), fields.u32());
    let len = len.filter(|len| *len <= MAX_REASON);
    if (magic, option) != (Some(OPTION_REPLY_MAGIC), Some(OPTION)) {
        return Err(odd("it is no server of a pool"));
    }
    let mut text = vec![0; len.ok_or_else(|| odd("too long a reason"))? as usize];
    read_exact(socket, &mut text)?;
    match kind {
        Some(reply::ACK) => Ok(()),
        _ => Err(odd(&words(&text))),
    }
}

/// Makes a copy through a connection without a session. `is_whole`: an empty copy is what the disk has; otherwise it has to be
/// filled first. One that is there stays as it is.
///
/// # Errors
/// In words.
pub(crate) fn create(
    socket: &OwnedFd,
    extent: &Extent,
    bytes: u64,
    is_whole: bool,
) -> Result<(), String> {
    let payload = extent.to_bytes();
    let header = Header {
        kind: Kind::Create,
        op: 0,
        start: u64::from(!is_whole),
        len: bytes,
        payload: payload.len() as u32,
    };
    let sent = write_all(socket, &[&header.to_bytes()[..], &payload].concat());
    let (answer, text) = sent.and_then(|()| message(socket)).map_err(|e| e.to_string())?;
    match answer.kind {
        Kind::Done => Ok(()),
        _ => Err(words(&text)),
    }
}

/// From now on answers come when they come: whether a silent server is lost is the owner's to say.
pub(crate) fn wait_for_answers(socket: &OwnedFd) -> io::Result<()> {
    set_socket_timeout(socket, Timeout::Recv, None)?;
    Ok(())
}

fn message(socket: &OwnedFd) -> io::Result<(Header, Vec<u8>)> {
    let mut bytes = [0; HEADER_BYTES];
    read_exact(socket, &mut bytes)?;
    let header = Header::from_bytes(&bytes).map_err(|e| odd(&e.to_string()))?;
    debug_assert!(header.payload <= MAX_PAYLOAD);
    let mut payload = vec![0; header.payload as usize];
    read_exact(socket, &mut payload)?;
    Ok((header, payload))
}

/// A server's text, for people.
pub(crate) fn words(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).take(300).collect()
}

fn odd(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn read_exact(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match recv(socket, &mut bytes[done..], RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((n, _)) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn write_all(socket: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn answers_that_nobody_asked_for_or_of_another_length_end_a_connection() {
        let header = |kind, op, payload| Header { kind, op, start: 0, len: 0, payload };
        for (answers, fit) in [
            (vec![header(Kind::Done, 1, 512)], true),
            (vec![header(Kind::Done, 1, 511)], false),
            (vec![header(Kind::Done, 2, 0)], true),
            (vec![header(Kind::Done, 2, 512)], false),
            (vec![header(Kind::Done, 3, 0)], false),
            (vec![header(Kind::Done, 2, 0), header(Kind::Done, 2, 0)], false),
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let link = Link::new(ours.into());
            link.send(Kind::Read, 1, 0, 512, Payload::Own(Vec::new()));
            link.send(Kind::Flush, 2, 0, 0, Payload::Own(Vec::new()));
            for answer in &answers {
                theirs.write_all(&answer.to_bytes()).unwrap();
                theirs.write_all(&vec![0; answer.payload as usize]).unwrap();
            }
            let taken: Vec<_> = answers.iter().map(|_| link.receive().is_ok()).collect();
            assert_eq!(taken.iter().all(|taken| *taken), fit, "{answers:?}");
        }
    }
}
