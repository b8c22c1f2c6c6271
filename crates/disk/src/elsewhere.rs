//! A volume of a store that another process has open, read through that process (docs/internals/store.md 8).
//!
//! That process, the owner, sends the data on stream sockets. Each socket has one request under way. The owner holds the
//! volume until the last socket is closed, so the content stays the same. It is not trusted: its messages are bounded.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ferrite_disk_base::size::Human;
use ferrite_disk_base::{DiskError, ImageName, Port, SECTOR_BYTES, warn_once};
use ferrite_io::arena::Span;
use ferrite_io::shared_lock::{Held, SharedLock};
use ferrite_io::socket::{self, Piece};
use ferrite_store::BLOCK_BYTES;

/// The most bytes of one read.
pub const MAX_READ_BYTES: usize = 1 << 20;

/// Asks the owner of a store for access to a volume. `None`: no process serves that store.
pub type AskOwner = fn(&Path, &str) -> Result<Option<Access>, DiskError>;

static ASK: OnceLock<AskOwner> = OnceLock::new();

/// Has this process read volumes through the owner of their store, if that is another process. Otherwise such a volume
/// is in use. The first call counts.
pub fn ask_owners(how: AskOwner) {
    let _ = ASK.set(how);
}

/// The access that an owner grants.
#[derive(Debug)]
pub struct Access {
    /// The size of the volume.
    pub bytes: u64,
    /// Whether it is a snapshot.
    pub is_snapshot: bool,
    /// At least one stream, which does not block. The owner reads requests from each.
    pub streams: Vec<UnixStream>,
}

/// See the module text.
#[derive(Debug)]
pub struct Elsewhere {
    /// `PATH#NAME`.
    path: PathBuf,
    bytes: u64,
    is_snapshot: bool,
    links: Vec<Link>,
    /// The link at which the next request looks first.
    next: AtomicUsize,
}

/// One stream to the owner.
#[derive(Debug)]
struct Link {
    stream: UnixStream,
    /// Held from the request to the end of its answer.
    turn: SharedLock,
    /// An answer was cut off, so the start of the next one is unknown.
    is_broken: AtomicBool,
}

/// A request under way. If it is dropped before its end its link is not used any more.
struct Turn<'a> {
    link: &'a Link,
    _held: Held<'a>,
    is_done: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.link.is_broken.store(true, Ordering::Relaxed);
            let _ = self.link.stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Elsewhere {
    /// Asks the owner for a volume that this process cannot open, because of `in_use`.
    pub(crate) fn open(name: &ImageName, in_use: DiskError) -> Result<Elsewhere, DiskError> {
        let Some((ask, (store, volume))) = ASK.get().zip(name.volume()) else { return Err(in_use) };
        let Some(Access { bytes, is_snapshot, streams }) = ask(store, volume)? else {
            return Err(in_use);
        };
        let link = |stream| Link { stream, turn: SharedLock::new(), is_broken: false.into() };
        let links: Vec<Link> = streams.into_iter().map(link).collect();
        if links.is_empty() || bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(in_use);
        }
        let path = name.path.clone();
        Ok(Elsewhere { path, bytes, is_snapshot, links, next: AtomicUsize::new(0) })
    }

    /// The name of the volume with its store, `PATH#NAME`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the store.
    pub fn store(&self) -> &Path {
        let name = self.path.as_os_str().as_encoded_bytes();
        let end = name.iter().rposition(|byte| *byte == b'#').unwrap_or(name.len());
        use std::os::unix::ffi::OsStrExt as _;
        Path::new(OsStr::from_bytes(&name[..end]))
    }

    /// Whether it is a snapshot, which is never written.
    pub fn is_snapshot(&self) -> bool {
        self.is_snapshot
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.bytes / SECTOR_BYTES
    }

    pub(crate) async fn read(&self, port: &Port, offset: u64, to: Span) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            let part = to.slice(done, (to.len() - done).min(MAX_READ_BYTES));
            let request =
                Request { kind: Kind::Read, offset: offset + done as u64, len: part.len() as u64 };
            let mut turn = self.ask(port, request).await?;
            let read = match self.answer(port, &turn).await? {
                Answer::Data(len) if len == part.len() as u64 => self.data(port, &turn, part).await,
                Answer::Failed(e) => {
                    turn.is_done = true;
                    return Err(e);
                }
                Answer::Data(_) | Answer::Zeros(_) => return Err(nonsense()),
            };
            read?;
            turn.is_done = true;
            done += part.len();
        }
        Ok(())
    }

    /// Whether the beginning of a range is zeros that take no space, and for at least how many bytes.
    pub(crate) async fn look(&self, port: &Port, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        let mut turn = self.ask(port, Request { kind: Kind::Look, offset, len }).await?;
        let answer = self.answer(port, &turn).await?;
        turn.is_done = true;
        match answer {
            Answer::Data(known) if (1..=len).contains(&known) => Ok((false, known)),
            Answer::Zeros(known) if (1..=len).contains(&known) => Ok((true, known)),
            Answer::Failed(e) => Err(e),
            Answer::Data(_) | Answer::Zeros(_) => Err(nonsense()),
        }
    }

    /// Sends a request on a link that is free, or becomes free.
    async fn ask(&self, port: &Port, request: Request) -> io::Result<Turn<'_>> {
        let turn = loop {
            let first = self.next.fetch_add(1, Ordering::Relaxed) % self.links.len();
            let links = self.links[first..].iter().chain(&self.links[..first]);
            let mut usable = links.filter(|link| !link.is_broken.load(Ordering::Relaxed));
            let free = usable.clone().find_map(|link| Some((link, link.turn.try_lock()?)));
            let (link, held) = match (free, usable.next()) {
                (Some(free), _) => free,
                (None, Some(link)) => (link, link.turn.lock(&port.io).await?),
                (None, None) => return Err(self.gone()),
            };
            if !link.is_broken.load(Ordering::Relaxed) {
                break Turn { link, _held: held, is_done: false };
            }
        };
        let bytes = request.encode();
        let piece = std::iter::once(Piece::Bytes(&bytes));
        // The socket has nothing else in it, so there is room for all of the request.
        match socket::send(turn.link.stream.as_fd(), port.memory(), piece) {
            Ok(sent) if sent == bytes.len() => Ok(turn),
            _ => Err(self.gone()),
        }
    }

    async fn answer(&self, port: &Port, turn: &Turn<'_>) -> io::Result<Answer> {
        let (mut head, mut got) = ([0; Answer::BYTES], 0);
        while got < head.len() {
            got += self.receive(port, turn, None, &mut head[got..]).await?;
        }
        Answer::decode(&head).ok_or_else(nonsense)
    }

    async fn data(&self, port: &Port, turn: &Turn<'_>, to: Span) -> io::Result<()> {
        let mut got = 0;
        while got < to.len() {
            let rest = to.slice(got, to.len() - got);
            got += self.receive(port, turn, Some(rest), &mut []).await?;
        }
        Ok(())
    }

    async fn receive(
        &self,
        port: &Port,
        turn: &Turn<'_>,
        span: Option<Span>,
        rest: &mut [u8],
    ) -> io::Result<usize> {
        let stream = &turn.link.stream;
        loop {
            match socket::receive(stream.as_fd(), port.memory(), span, rest) {
                Ok(0) => return Err(self.gone()),
                Ok(got) => return Ok(got),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    port.io.readable(stream.as_raw_fd()).await?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(self.gone()),
            }
        }
    }

    /// The error after the owner has ended, which the log has once.
    fn gone(&self) -> io::Error {
        let why = "the process that serves the store has ended, and it was read through that";
        warn_once(&format!("{} cannot be read any more: {why}", self.path.display()));
        io::Error::new(io::ErrorKind::ConnectionReset, why)
    }

    /// Disconnects from the owner, which then holds the volume no longer.
    pub(crate) fn unlock(&self) {
        for link in &self.links {
            link.is_broken.store(true, Ordering::Relaxed);
            let _ = link.stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn nonsense() -> io::Error {
    io::Error::other("the process that serves the store sent an invalid answer")
}

impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, size) = (self.path.display(), Human(self.bytes));
        write!(f, "volume {path}, {size}, read-only, through the process that serves its store")
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The data of a range, of at most [`MAX_READ_BYTES`].
    Read,
    /// Whether the beginning of a range has data.
    Look,
}

/// A request of a reader: kind (u32), zero (u32), offset (u64) and length in bytes (u64), little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The kind of the request.
    pub kind: Kind,
    /// The offset of the range in bytes.
    pub offset: u64,
    /// Bytes of the range.
    pub len: u64,
}

impl Request {
    /// Bytes of a request.
    pub const BYTES: usize = 24;

    /// The request's bytes.
    pub fn encode(&self) -> [u8; Request::BYTES] {
        let kind: u32 = match self.kind {
            Kind::Read => 1,
            Kind::Look => 2,
        };
        let mut bytes = [0; Request::BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// The request that these bytes are. `None`: they are none.
    pub fn decode(bytes: &[u8; Request::BYTES]) -> Option<Request> {
        let kind = match (word(bytes, 0), word(bytes, 4)) {
            (1, 0) => Kind::Read,
            (2, 0) => Kind::Look,
            _ => return None,
        };
        Some(Request { kind, offset: long(bytes, 8), len: long(bytes, 16) })
    }
}

/// The head of an owner's answer: status (u32), error number (u32) and bytes (u64), little-endian. The data that were
/// asked for follow.
#[derive(Debug)]
pub enum Answer {
    /// Of a read: so many bytes follow. Of a look: so many bytes are data.
    Data(u64),
    /// Of a look: so many bytes are zeros that take no space.
    Zeros(u64),
    /// It has failed. Errors are sent by their number, and damage as such.
    Failed(io::Error),
}

/// The number that stands for damaged content: no error of the kernel has it.
const DAMAGED: u32 = u32::MAX;
/// The error number (EIO) of errors without one.
const EIO: i32 = 5;
/// The largest error number of the kernel.
const MAX_ERRNO: u32 = 4095;

impl Answer {
    /// Bytes of the head.
    pub const BYTES: usize = 16;

    /// The head's bytes.
    pub fn encode(&self) -> [u8; Answer::BYTES] {
        let (status, errno, len): (u32, u32, u64) = match self {
            Answer::Data(len) => (0, 0, *len),
            Answer::Zeros(len) => (1, 0, *len),
            Answer::Failed(e) if e.kind() == io::ErrorKind::InvalidData => (2, DAMAGED, 0),
            Answer::Failed(e) => (2, e.raw_os_error().unwrap_or(EIO).unsigned_abs(), 0),
        };
        let mut bytes = [0; Answer::BYTES];
        bytes[..4].copy_from_slice(&status.to_le_bytes());
        bytes[4..8].copy_from_slice(&errno.to_le_bytes());
        bytes[8..].copy_from_slice(&len.to_le_bytes());
        bytes
    }

    /// The head that these bytes are. `None`: they are none.
    pub fn decode(bytes: &[u8; Answer::BYTES]) -> Option<Answer> {
        match (word(bytes, 0), word(bytes, 4), long(bytes, 8)) {
            (0, 0, len) => Some(Answer::Data(len)),
            (1, 0, len) => Some(Answer::Zeros(len)),
            (2, DAMAGED, 0) => {
                let why = "content of the store does not fit its checksum";
                Some(Answer::Failed(io::Error::new(io::ErrorKind::InvalidData, why)))
            }
            (2, errno @ 1..=MAX_ERRNO, 0) => {
                Some(Answer::Failed(io::Error::from_raw_os_error(errno as i32)))
            }
            _ => None,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_come_back_as_they_were_and_all_else_is_refused() {
        for kind in [Kind::Read, Kind::Look] {
            let request = Request { kind, offset: 1 << 40 | 512, len: 4096 };
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        for (at, value) in [(0, 3), (0, 0), (1, 1), (4, 1)] {
            let mut bytes = Request { kind: Kind::Read, offset: 0, len: 1 }.encode();
            bytes[at] = value;
            assert_eq!(Request::decode(&bytes), None, "{at} {value}");
        }
        let said = |answer: Answer| format!("{:?}", Answer::decode(&answer.encode()));
        assert_eq!(said(Answer::Data(7)), "Some(Data(7))");
        assert_eq!(said(Answer::Zeros(1 << 40)), "Some(Zeros(1099511627776))");
        assert!(said(Answer::Failed(io::Error::from_raw_os_error(28))).contains("code: 28"));
        assert!(said(Answer::Failed(io::Error::other("x"))).contains("code: 5"));
        let damaged = Answer::Failed(io::ErrorKind::InvalidData.into());
        assert!(said(damaged).contains("InvalidData"));
        for (at, value) in [(0, 3), (4, 1), (0, 2)] {
            let mut bytes = Answer::Data(512).encode();
            bytes[at] = value;
            assert!(Answer::decode(&bytes).is_none(), "{at} {value}");
        }
    }
}
