//! The replies of a server, decoded. Data of reads are not copied here: [`Next::Data`] says where they belong.

use std::fmt;

use super::{Command, MAX_REQUESTS, Ticket};
use crate::wire::{CHUNK_MAGIC, DONE, Fields, SIMPLE_REPLY_MAGIC, chunk};

/// Extents of one answer that are kept; further ones are left out.
pub const MAX_EXTENTS: usize = 4096;

/// Gaps between the parts of a read that have come, at most.
const MAX_GAPS: usize = 1024;
/// Chunks of the length 0 (`NONE`) of one reply, at most.
const MAX_EMPTY: u32 = 16;
/// The longest text of an error, with what is before and behind it.
const MAX_ERROR_BYTES: u32 = 4096 + 14;
/// The longest list of extents: nbdkit sends up to a million of them.
const MAX_STATUS_BYTES: u32 = 4 + 8 * (1 << 20);
/// Extents that are taken at once.
const STATUS_STEP: u32 = 512;

const SIMPLE_BYTES: usize = 16;
const CHUNK_BYTES: usize = 20;
/// A chunk without anything in it.
const NONE: u16 = 0;

/// The beginning of an extent's flags: nothing is stored there, it reads as zeros.
const HOLE: u32 = 1;
const ZERO: u32 = 2;

/// A rule that the server has broken. The connection ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(
    /// The violation, in words.
    pub &'static str,
);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the NBD server breaks the protocol: {}", self.0)
    }
}

/// The bytes to read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// So many bytes, for [`Replies::take`]. At most 4 KiB and a little.
    Bytes(usize),
    /// Data of a read, whose memory they belong in. [`Replies::took_data`] says how much came.
    Data {
        /// The place of the request in the table.
        slot: u16,
        /// The first byte, from the start of the request's range.
        at: u32,
        /// Bytes.
        len: u32,
    },
}

/// One extent of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes, more than 0.
    pub len: u64,
    /// It reads as zeros.
    pub zero: bool,
    /// It takes no space.
    pub hole: bool,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was done.
    Done,
    /// It was done; the extents of the beginning of the range, at least one.
    Extents(Vec<Allocation>),
    /// The server could not, and says why by a number of Linux.
    Failed(u32),
}

/// A part of a reply that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A part of a read is zeros.
    Zeros {
        /// The place of the request in the table.
        slot: u16,
        /// The first byte, from the start of the request's range.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// A request has ended; its place is free.
    Ended {
        /// The place of the request in the table.
        slot: u16,
        /// Its end.
        answer: Answer,
    },
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The first bytes of a reply, from which its length follows.
    Head,
    /// The rest of the head of a chunk.
    ChunkHead { first: [u8; SIMPLE_BYTES] },
    /// The offset of a chunk with data, or more of another one.
    Body { slot: u16, kind: u16, last: bool, len: u32 },
    /// Data of a read.
    Data { slot: u16, at: u32, len: u32, last: bool },
    /// Extents that are left.
    Status { slot: u16, last: bool, left: u32 },
    /// The violation has been reported.
    Broken,
}

/// One request under way.
#[derive(Debug, Default)]
struct Place {
    /// Its ticket and command; none: the place is free.
    request: Option<(Ticket, Command)>,
    /// The parts of a read that have come, as ranges that do not touch.
    come: Vec<(u32, u32)>,
    extents: Vec<Allocation>,
    /// Bytes that the server's extents cover.
    told: u64,
    /// Bytes that `extents` covers.
    kept: u64,
    empty_chunks: u32,
    error: Option<u32>,
}

impl Place {
    /// Adds an extent. False: there are enough.
    fn keep(&mut self, extent: Allocation) -> bool {
        let has_room = self.extents.len() < MAX_EXTENTS;
        match self.extents.last_mut() {
            Some(before) if (before.zero, before.hole) == (extent.zero, extent.hole) => {
                before.len += extent.len;
            }
            _ if has_room => self.extents.push(extent),
            _ => return false,
        }
        true
    }
}

/// The requests of one connection under way, and the decoder of their replies.
#[derive(Debug)]
pub struct Replies {
    structured: bool,
    context: Option<u32>,
    places: Vec<Place>,
    free: Vec<u16>,
    serial: u32,
    state: State,
}

impl Replies {
    /// Of a connection whose handshake had this result.
    pub fn new(structured: bool, context: Option<u32>) -> Replies {
        let places = (0..MAX_REQUESTS).map(|_| Place::default()).collect();
        let free = (0..MAX_REQUESTS as u16).rev().collect();
        Replies { structured, context, places, free, serial: 0, state: State::Head }
    }

    /// Enters a request. None: there is no place until another one has ended.
    pub fn begin(&mut self, command: Command) -> Option<Ticket> {
        let slot = self.free.pop()?;
        self.serial = self.serial.wrapping_add(1);
        let ticket = Ticket { slot, serial: self.serial };
        let place = &mut self.places[usize::from(slot)];
        place.come.clear();
        place.extents = Vec::new();
        (place.told, place.kept, place.empty_chunks, place.error) = (0, 0, 0, None);
        place.request = Some((ticket, command));
        Some(ticket)
    }

    /// The number of requests under way.
    pub fn under_way(&self) -> usize {
        MAX_REQUESTS - self.free.len()
    }

    /// Whether a request can begin.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The bytes to read now.
    pub fn next(&self) -> Next {
        match self.state {
            State::Head | State::Broken => Next::Bytes(SIMPLE_BYTES),
            State::ChunkHead { .. } => Next::Bytes(CHUNK_BYTES - SIMPLE_BYTES),
            State::Body { kind, len, .. } => Next::Bytes(match kind {
                chunk::DATA => 8,
                chunk::BLOCK_STATUS => 4,
                _ => len as usize,
            }),
            State::Data { slot, at, len, .. } => Next::Data { slot, at, len },
            State::Status { left, .. } => Next::Bytes(left.min(STATUS_STEP * 8) as usize),
        }
    }

    /// Takes the bytes that [`next`](Self::next) has asked for, and adds what has come to `events`.
    ///
    /// # Errors
    /// The server breaks the protocol. The connection is of no use any more.
    pub fn take(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<(), Broken> {
        if Next::Bytes(bytes.len()) != self.next() {
            return Err(Broken("its bytes end within a message"));
        }
        match std::mem::replace(&mut self.state, State::Broken) {
            State::Head => self.head(bytes, events),
            State::ChunkHead { first } => self.chunk_head(&first, bytes, events),
            State::Body { slot, kind, last, len } => {
                self.body(slot, kind, last, len, bytes, events)
            }
            State::Status { slot, last, left } => self.extents(slot, last, left, bytes, events),
            State::Data { .. } | State::Broken => Err(Broken("its connection was given up")),
        }
    }

    /// So many bytes of the data that [`next`](Self::next) has asked for are in their memory.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn took_data(&mut self, bytes: u32, events: &mut Vec<Event>) -> Result<(), Broken> {
        match self.state {
            State::Data { slot, at, len, last } if bytes < len => {
                self.state = State::Data { slot, at: at + bytes, len: len - bytes, last };
                Ok(())
            }
            State::Data { slot, len, last, .. } if bytes == len => {
                self.chunk_end(slot, last, events)
            }
            _ => Err(Broken("more data came than were asked for")),
        }
    }

    fn find(&self, cookie: u64) -> Result<(u16, Command), Broken> {
        let slot = (cookie & 0xffff) as u16;
        let place = self.places.get(usize::from(slot));
        match place.and_then(|place| place.request) {
            Some((ticket, command)) if ticket.cookie() == cookie => Ok((slot, command)),
            _ => Err(Broken("it answers a request that is not under way")),
        }
    }

    fn head(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<(), Broken> {
        let mut fields = Fields(bytes);
        match fields.u32() {
            Some(CHUNK_MAGIC) if self.structured => {
                let mut first = [0; SIMPLE_BYTES];
                first.copy_from_slice(bytes);
                self.state = State::ChunkHead { first };
                Ok(())
            }
            Some(SIMPLE_REPLY_MAGIC) => {
                let (Some(error), Some(cookie)) = (fields.u32(), fields.u64()) else {
                    return Err(Broken("its bytes end within a message"));
                };
                self.simple(error, cookie, events)
            }
            _ => Err(Broken("a reply begins with a wrong magic number")),
        }
    }

    fn simple(&mut self, error: u32, cookie: u64, events: &mut Vec<Event>) -> Result<(), Broken> {
        let (slot, command) = self.find(cookie)?;
        let place = &mut self.places[usize::from(slot)];
        match command {
            Command::Read { .. } | Command::Status { .. } if self.structured => {
                return Err(Broken("it answers a read without chunks, though chunks were agreed"));
            }
            Command::Read { len, .. } if error == 0 => {
                place.come.push((0, len));
                self.state = State::Data { slot, at: 0, len, last: true };
                return Ok(());
            }
            _ => {}
        }
        if error != 0 {
            place.error = Some(error);
        }
        self.chunk_end(slot, true, events)
    }

    fn chunk_head(
        &mut self,
        first: &[u8; SIMPLE_BYTES],
        rest: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), Broken> {
        let mut fields = Fields(&first[4..]);
        let head = (fields.u16(), fields.u16(), fields.u64(), Fields(rest).u32());
        let (Some(flags), Some(kind), Some(cookie), Some(len)) = head else {
            return Err(Broken("its bytes end within a message"));
        };
        let (slot, command) = self.find(cookie)?;
        let last = flags & DONE != 0;
        let is_read = matches!(command, Command::Read { .. });
        let fits = match kind {
            NONE => len == 0,
            chunk::DATA => is_read && len > 8,
            chunk::HOLE => is_read && len == 12,
            chunk::BLOCK_STATUS => {
                matches!(command, Command::Status { .. })
                    && (12..=MAX_STATUS_BYTES).contains(&len)
                    && (len - 4).is_multiple_of(8)
            }
            kind if kind >> 15 == 1 => (6..=MAX_ERROR_BYTES).contains(&len),
            _ => return Err(Broken("it sends a chunk of an unknown kind")),
        };
        if !fits {
            return Err(Broken("it sends a chunk that does not fit its request, or its kind"));
        }
        if kind == NONE {
            let place = &mut self.places[usize::from(slot)];
            place.empty_chunks += 1;
            if place.empty_chunks > MAX_EMPTY {
                return Err(Broken("it answers without end"));
            }
            return self.chunk_end(slot, last, events);
        }
        self.state = State::Body { slot, kind, last, len };
        Ok(())
    }

    fn body(
        &mut self,
        slot: u16,
        kind: u16,
        last: bool,
        len: u32,
        bytes: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), Broken> {
        const CUT_OFF: Broken = Broken("its bytes end within a message");
        let mut fields = Fields(bytes);
        match kind {
            chunk::DATA => {
                let at = self.arrives(slot, fields.u64().ok_or(CUT_OFF)?, len - 8)?;
                self.state = State::Data { slot, at, len: len - 8, last };
                return Ok(());
            }
            chunk::HOLE => {
                let (offset, len) = fields.u64().zip(fields.u32()).ok_or(CUT_OFF)?;
                let at = self.arrives(slot, offset, len)?;
                events.push(Event::Zeros { slot, at, len });
            }
            chunk::BLOCK_STATUS => {
                if fields.u32() != self.context || self.context.is_none() {
                    return Err(Broken("it tells extents of a context that was not asked"));
                }
                if self.places[usize::from(slot)].told > 0 {
                    return Err(Broken("it tells the extents of a range twice"));
                }
                self.state = State::Status { slot, last, left: len - 4 };
                return Ok(());
            }
            _ => self.error(slot, fields)?,
        }
        self.chunk_end(slot, last, events)
    }

    fn error(&mut self, slot: u16, mut fields: Fields<'_>) -> Result<(), Broken> {
        let Some(error) = fields.u32().filter(|error| *error != 0) else {
            return Err(Broken("it sends an error that is none"));
        };
        let text = fields.u16().and_then(|len| fields.bytes(usize::from(len)));
        // An error with an offset has that behind the text.
        if text.is_none() || !matches!(fields.0.len(), 0 | 8) {
            return Err(Broken("the text of an error is cut off"));
        }
        self.places[usize::from(slot)].error.get_or_insert(error);
        Ok(())
    }

    /// Enters a part of a read; returns where it begins in the request.
    fn arrives(&mut self, slot: u16, offset: u64, len: u32) -> Result<u32, Broken> {
        let place = &mut self.places[usize::from(slot)];
        let Some((_, Command::Read { offset: start, len: wanted })) = place.request else {
            return Err(Broken("it sends data for what is no read"));
        };
        let at = offset.checked_sub(start).filter(|at| *at <= u64::from(wanted));
        let end = at.and_then(|at| at.checked_add(len.into()));
        let (Some(at), Some(end)) = (at, end.filter(|end| *end <= u64::from(wanted))) else {
            return Err(Broken("it sends data outside of the range of their request"));
        };
        // Both are at most `wanted`.
        let (at, end) = (at as u32, end as u32);
        if len == 0 || !add_range(&mut place.come, at, end) {
            return Err(Broken("it sends the same bytes twice"));
        }
        if place.come.len() > MAX_GAPS {
            return Err(Broken("it sends a read in too many parts without order"));
        }
        Ok(at)
    }

    fn extents(
        &mut self,
        slot: u16,
        last: bool,
        left: u32,
        bytes: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), Broken> {
        let place = &mut self.places[usize::from(slot)];
        let wanted = place.request.map_or(0, |(_, command)| u64::from(command.range().1));
        let mut fields = Fields(bytes);
        while let Some((len, flags)) = fields.u32().zip(fields.u32()) {
            if len == 0 || place.told >= wanted {
                return Err(Broken("it tells an extent that is empty, or outside of the range"));
            }
            // The last extent may be longer than the range.
            let len = u64::from(len).min(wanted - place.told);
            let extent = Allocation { len, zero: flags & ZERO != 0, hole: flags & HOLE != 0 };
            if place.kept == place.told && place.keep(extent) {
                place.kept += len;
            }
            place.told += len;
        }
        match left - bytes.len() as u32 {
            0 => self.chunk_end(slot, last, events),
            left => {
                self.state = State::Status { slot, last, left };
                Ok(())
            }
        }
    }

    /// The end of a chunk, and of its request if it was the last.
    fn chunk_end(&mut self, slot: u16, last: bool, events: &mut Vec<Event>) -> Result<(), Broken> {
        self.state = State::Head;
        if !last {
            return Ok(());
        }
        let place = &mut self.places[usize::from(slot)];
        let Some((_, command)) = place.request.take() else {
            return Err(Broken("it answers a request that is not under way"));
        };
        let answer = match (place.error, command) {
            (Some(error), _) => Answer::Failed(error),
            (None, Command::Read { len, .. }) if place.come[..] != [(0, len)] => {
                self.state = State::Broken;
                return Err(Broken("its answer to a read lacks a part"));
            }
            (None, Command::Status { .. }) if place.extents.is_empty() => {
                self.state = State::Broken;
                return Err(Broken("its answer has no extents"));
            }
            (None, Command::Status { .. }) => Answer::Extents(std::mem::take(&mut place.extents)),
            (None, _) => Answer::Done,
        };
        self.free.push(slot);
        events.push(Event::Ended { slot, answer });
        Ok(())
    }
}

/// Adds a range to ranges in order that do not touch. False: a part of it was there.
fn add_range(ranges: &mut Vec<(u32, u32)>, start: u32, end: u32) -> bool {
    let at = ranges.partition_point(|range| range.1 < start);
    // The ranges before `at` end before it; at most two touch it.
    let mut new = (start, end);
    let mut until = at;
    while let Some(range) = ranges.get(until).filter(|range| range.0 <= end) {
        if range.1 != start && range.0 != end {
            return false;
        }
        new = (new.0.min(range.0), new.1.max(range.1));
        until += 1;
    }
    ranges.splice(at..until, [new]);
    true
}
