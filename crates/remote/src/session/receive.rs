//! Replies, from the socket to where they belong.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use ferrite_io::arena::Span;
use ferrite_io::socket::receive;
use ferrite_nbd::client::{Answer, Broken, Event, Next};
use ferrite_nbd::wire::error;
use rustix::io::Errno;

use super::op::Part;
use super::{Lost, Session};

/// Bytes that are received at once besides data that go to their memory directly.
const BUFFER_BYTES: usize = 32 << 10;
/// Calls in a row that each brought something, before others of the thread go first.
const IN_A_ROW: u32 = 64;
/// The error of a server that is shutting down (`ESHUTDOWN`).
const SHUT_DOWN: u32 = 108;

/// Bytes that have come and were not looked at.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new() -> Buffer {
        Buffer { bytes: vec![0; BUFFER_BYTES], start: 0, end: 0 }
    }

    fn left(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Moves what is left to the beginning, if that makes room.
    fn compact(&mut self) {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
    }
}

impl Session {
    /// Takes what comes, until the connection is lost.
    pub(super) async fn receive_all(&self, socket: BorrowedFd<'_>) -> Lost {
        let mut buffer = Buffer::new();
        let mut in_a_row = 0;
        loop {
            if let Err(lost) = self.decode(&mut buffer) {
                return lost;
            }
            match self.receive_some(socket, &mut buffer) {
                Ok(Some(())) => in_a_row += 1,
                Ok(None) => {
                    in_a_row = 0;
                    if let Err(e) = self.io.readable(socket.as_raw_fd()).await {
                        return Lost::Io(e);
                    }
                }
                Err(lost) => return lost,
            }
            if in_a_row >= IN_A_ROW {
                in_a_row = 0;
                self.io.yield_to_others().await;
            }
        }
    }

    /// Takes what has come, without waiting. None: there is nothing now.
    fn receive_some(
        &self,
        socket: BorrowedFd<'_>,
        buffer: &mut Buffer,
    ) -> Result<Option<()>, Lost> {
        buffer.compact();
        // Where data are next, the buffer is empty: they go to their memory, and what follows them to the buffer.
        let to = self.place_of_next()?.filter(|_| buffer.end == 0);
        let to = to.map(|(span, _)| span);
        let rest = &mut buffer.bytes[buffer.end..];
        let got = match receive(socket, &self.memory, to, rest) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(got) => got,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(Some(())),
            Err(e) => return Err(e.into()),
        };
        let direct = to.map_or(0, |span| span.len().min(got));
        buffer.end += got - direct;
        if direct > 0 {
            self.took(direct)?;
        }
        Ok(Some(()))
    }

    /// The memory of the data that come next, and their number there.
    fn place_of_next(&self) -> Result<Option<(Span, usize)>, Lost> {
        let inner = self.inner.borrow();
        let Next::Data { slot, at, len } = inner.replies.next() else { return Ok(None) };
        let part = inner.parts.get(usize::from(slot)).and_then(Option::as_ref);
        let memory = part.and_then(|part| part.op.memory(part.skip + at as usize));
        let span = memory.ok_or(Broken("it sends data that no request waits for"))?;
        let len = span.len().min(len as usize);
        Ok(Some((span.slice(0, len), len)))
    }

    /// So many bytes of data are in their memory.
    fn took(&self, bytes: usize) -> Result<(), Lost> {
        let mut events = std::mem::take(&mut self.inner.borrow_mut().events);
        self.inner.borrow_mut().replies.took_data(bytes as u32, &mut events)?;
        self.happened(events)
    }

    /// Looks at what is in the buffer, as far as it goes.
    fn decode(&self, buffer: &mut Buffer) -> Result<(), Lost> {
        loop {
            if let Some((span, len)) = self.place_of_next()? {
                let some = len.min(buffer.left().len());
                if some == 0 {
                    return Ok(());
                }
                self.memory.copy_in(span.slice(0, some), &buffer.left()[..some]);
                buffer.start += some;
                self.took(some)?;
                continue;
            }
            let needs = match self.inner.borrow().replies.next() {
                Next::Bytes(needs) => needs,
                Next::Data { .. } => continue,
            };
            if buffer.left().len() < needs {
                return Ok(());
            }
            let mut events = std::mem::take(&mut self.inner.borrow_mut().events);
            let taken = buffer.bytes.get(buffer.start..buffer.start + needs).unwrap_or(&[]);
            self.inner.borrow_mut().replies.take(taken, &mut events)?;
            buffer.start += needs;
            self.happened(events)?;
        }
    }

    fn happened(&self, mut events: Vec<Event>) -> Result<(), Lost> {
        for event in events.drain(..) {
            match event {
                Event::Zeros { slot, at, len } => self.zero(slot, at, len),
                Event::Ended { slot, answer } => self.answered(slot, answer)?,
            }
        }
        self.inner.borrow_mut().events = events;
        Ok(())
    }

    fn zero(&self, slot: u16, at: u32, len: u32) {
        let inner = self.inner.borrow();
        let Some(part) = inner.parts.get(usize::from(slot)).and_then(Option::as_ref) else {
            return;
        };
        let (mut done, len) = (0, len as usize);
        while done < len {
            let Some(span) = part.op.memory(part.skip + at as usize + done) else { return };
            let span = span.slice(0, span.len().min(len - done));
            self.memory.fill(span, 0);
            done += span.len();
        }
    }

    fn answered(&self, slot: u16, answer: Answer) -> Result<(), Lost> {
        let mut inner = self.inner.borrow_mut();
        if inner.outgoing.iter().any(|request| request.slot == slot) {
            return Err(Broken("it answers a request before it has all of it").into());
        }
        let Some(part) = inner.parts[usize::from(slot)].take() else { return Ok(()) };
        if answer == Answer::Failed(SHUT_DOWN) {
            // It was not executed, and is to be sent again.
            inner.waiting.push_front(Part { sent: false, ..part });
            return Err(Lost::ShutDown);
        }
        let has_waiting = !inner.waiting.is_empty();
        drop(inner);
        if has_waiting {
            self.to_send.raise();
        }
        match answer {
            Answer::Done => part.ended(None),
            Answer::Extents(extents) => part.op.ended(None, &extents),
            Answer::Failed(code) => part.ended(Some(errno_of(code))),
        }
        Ok(())
    }
}

/// The protocol's numbers are Linux's. Others say nothing that a caller could act by.
fn errno_of(code: u32) -> i32 {
    let errno = match code {
        error::PERM => Errno::PERM,
        12 => Errno::NOMEM,
        error::INVALID => Errno::INVAL,
        error::NO_SPACE => Errno::NOSPC,
        error::OVERFLOW => Errno::OVERFLOW,
        95 => Errno::OPNOTSUPP,
        _ => Errno::IO,
    };
    errno.raw_os_error()
}
