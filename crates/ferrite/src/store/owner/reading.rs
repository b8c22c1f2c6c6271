//! Reads of a volume for a process that does not have the store open: the owner's end of
//! [`elsewhere`](ferrite_disk::elsewhere).
//!
//! Each stream has a thread, an engine and memory for one read. No disk waits for a reader: places of the store are in
//! use during a read only, and not while its data are sent.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::PoisonError;

use ferrite_disk::Allocation;
use ferrite_disk::elsewhere::{Answer, Kind, Request};
use ferrite_image_tools::stores::served::VolumeReader;
use ferrite_io::arena::{Arena, Span};
use ferrite_io::socket::{self, Piece};
use ferrite_serve::waker::Waker;
use ferrite_store::journal::Name;
use rustix::event::{PollFd, PollFlags, poll};

use super::super::wire::{self, Reading, Reply};
use super::{COURTESY, ENTRIES, Mutex, What};
use crate::exit::{Code, Failure};

/// The most streams of readers at a time.
pub(super) const MAX_READERS: usize = 16;

/// A process that reads a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reader {
    pub(super) volume: Name,
    /// The number of its process, as that says.
    pub(super) process: u32,
}

/// The readers of a store.
#[derive(Default)]
pub(super) struct Readers(Mutex<Vec<Reader>>);

/// A reader in the list. It is taken out when this is dropped.
struct Listed<'a>(&'a Readers, Reader);

impl Readers {
    fn list(&self) -> std::sync::MutexGuard<'_, Vec<Reader>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self) -> usize {
        self.list().len()
    }

    /// Adds one, if there is room for it.
    fn add(&self, reader: Reader) -> Option<Listed<'_>> {
        let mut list = self.list();
        (list.len() < MAX_READERS).then(|| {
            list.push(reader.clone());
            Listed(self, reader)
        })
    }

    /// A failure of a change of this volume: if that is in use by a reader, with the reader's name.
    pub(super) fn name_in(&self, failure: Failure, volume: Option<&Name>) -> Failure {
        let list = self.list();
        let reads = |reader: &&Reader| Some(&reader.volume) == volume;
        match list.iter().find(reads) {
            Some(Reader { process, .. }) if failure.code == Code::BUSY => Failure {
                why: format!("process {process} reads it"),
                help: "wait until that has ended, or stop it".to_owned(),
                ..failure
            },
            _ => failure,
        }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        let mut list = self.0.list();
        if let Some(at) = list.iter().position(|reader| *reader == self.1) {
            list.swap_remove(at);
        }
    }
}

/// Serves a reader until it has gone, or this process ends. `Some`: it cannot read.
pub(super) fn serve(
    what: &What,
    stream: &UnixStream,
    path: &Path,
    reader: Reader,
) -> Option<Reply> {
    let volume = reader.volume.clone();
    let Some(_listed) = what.readers.add(reader) else {
        let why = format!("it has {MAX_READERS} streams to readers already");
        let failure = Failure::new(
            format!("cannot read volume {} of store {}", volume.as_str(), path.display()),
            why,
            "try again when one has ended",
        );
        return Some(failure.with_code(Code::BUSY).into());
    };
    let engine = |arena| (what.engine)(arena, ENTRIES);
    let mut volume = match VolumeReader::open(what.key, path, &volume, &engine) {
        None => return Some(Reply::NotOpen),
        Some(Err(e)) => return Some(Failure::from(e).into()),
        Some(Ok(volume)) => volume,
    };
    let reading = Reading { bytes: volume.bytes(), snapshot: volume.is_snapshot() };
    let done = match serde_json::to_value(reading) {
        Ok(done) => Reply::Done(done),
        Err(e) => {
            return Some(Failure::new("cannot answer", e, "this is a bug in ferrite").into());
        }
    };
    let begun = wire::write_line(stream, &Reply::Begun, COURTESY)
        .and_then(|()| wire::write_line(stream, &done, COURTESY));
    // A reader that has gone needs no answer.
    if let Err(e) = begun.and_then(|()| answer_all(stream, &mut volume, &what.end)) {
        tracing::debug!("a reader is lost: {e}");
    }
    None
}

/// Answers requests until the reader ends the stream.
fn answer_all(stream: &UnixStream, volume: &mut VolumeReader, end: &Waker) -> io::Result<()> {
    let memory = volume.memory().clone();
    let waits = |flags| wait(stream, flags, end);
    while let Some(request) = receive(stream, &memory, &waits)? {
        let (head, data) = answer(volume, request);
        send(stream, &memory, &head, data, &waits)?;
    }
    Ok(())
}

fn answer(volume: &mut VolumeReader, request: Request) -> (Answer, Option<Span>) {
    let Request { kind, offset, len } = request;
    let answered = match kind {
        Kind::Read => volume.read(offset, len).map(|data| (Answer::Data(len), Some(data))),
        Kind::Look => volume.look(offset, len).map(|Allocation { len, zeros, .. }| {
            (if zeros { Answer::Zeros(len) } else { Answer::Data(len) }, None)
        }),
    };
    answered.unwrap_or_else(|e| (Answer::Failed(e), None))
}

/// The next request. `None`: the stream has ended.
fn receive(
    stream: &UnixStream,
    memory: &Arena,
    waits: &dyn Fn(PollFlags) -> io::Result<()>,
) -> io::Result<Option<Request>> {
    let (mut bytes, mut got) = ([0; Request::BYTES], 0);
    while got < bytes.len() {
        match socket::receive(stream.as_fd(), memory, None, &mut bytes[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => got += more,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => waits(PollFlags::IN)?,
            Err(e) => return Err(e),
        }
    }
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "it sent no request");
    Request::decode(&bytes).map(Some).ok_or_else(nonsense)
}

fn send(
    stream: &UnixStream,
    memory: &Arena,
    head: &Answer,
    data: Option<Span>,
    waits: &dyn Fn(PollFlags) -> io::Result<()>,
) -> io::Result<()> {
    let (head, mut sent) = (head.encode(), 0);
    let all = head.len() + data.map_or(0, |span| span.len());
    while sent < all {
        let left = sent.min(head.len());
        let skipped = sent - left;
        let data = data.map(|span| span.slice(skipped, span.len() - skipped)).map(Piece::Memory);
        let pieces = std::iter::once(Piece::Bytes(&head[left..])).chain(data);
        match socket::send(stream.as_fd(), memory, pieces) {
            Ok(more) => sent += more,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => waits(PollFlags::OUT)?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Waits for the stream, however long its reader takes.
///
/// # Errors
/// This process ends.
fn wait(stream: &UnixStream, flags: PollFlags, end: &Waker) -> io::Result<()> {
    let mut fds = [PollFd::new(stream, flags), PollFd::from_borrowed_fd(end.fd(), PollFlags::IN)];
    match poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    match fds[1].revents().is_empty() {
        true => Ok(()),
        false => Err(io::Error::other("this process ends")),
    }
}
