//! A client's requests as they come from its socket, and the data of its writes.

use std::io;
use std::os::fd::AsFd;

use ferrite_io::arena::Span;
use ferrite_io::pool::Buf;
use ferrite_io::socket;

use super::super::negotiation::MAX_REQUEST_BYTES;
use super::Client;
use super::output::Reply;
use super::requests::{Request, Slot};
use super::steps::{Doing, PART_BYTES, Step, inward};
use ferrite_nbd::wire::{Form, RawRequest, ReplyTo, command, error, flag};

/// Size of the buffer for received bytes in front of the data of a large write, which go directly
/// into the memory of their part.
const INBOX_BYTES: usize = 64 << 10;
/// How often one turn of the loop may read from the socket.
const ROUNDS: usize = 16;

/// The data behind the request that was decoded last.
enum Payload {
    /// No data: a request comes next.
    None,
    /// The data of a refused write: `left` bytes are dropped before the write is answered. Clients
    /// look for no answer to what they are still sending.
    Dropped { slot: Slot, left: u64 },
    /// The next part of a write, from byte `at` of the request on, has no buffer yet.
    Waits { slot: Slot, at: u64 },
    /// A part of a write is being received into its buffer; `got` of its bytes are there.
    Comes { slot: Slot, at: u64, buf: Buf, data: Span, got: usize },
}

/// Why decoding stops.
enum Stop {
    /// More bytes must arrive.
    Starved,
    /// A request of this client must end first.
    Blocked,
}

/// Received bytes that were not decoded yet.
pub(super) struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    payload: Payload,
    /// The socket may have bytes to read.
    pub(super) readable: bool,
    /// An operation of the engine waits until the socket is readable.
    pub(super) armed: bool,
    /// Nothing more is read from the socket.
    pub(super) ended: bool,
    /// Decoding waits until a request ends, and nothing is read until then.
    pub(super) blocked: bool,
}

impl Input {
    /// Makes the input; `first` holds the bytes that arrived together with the negotiation.
    pub(super) fn new(first: &[u8]) -> Input {
        let mut bytes = vec![0; INBOX_BYTES.max(first.len())];
        bytes[..first.len()].copy_from_slice(first);
        Input {
            bytes: bytes.into(),
            start: 0,
            end: first.len(),
            payload: Payload::None,
            readable: true,
            armed: false,
            ended: false,
            blocked: false,
        }
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    /// Takes `bytes` bytes off the front.
    fn take(&mut self, bytes: usize) -> &[u8] {
        let from = self.start;
        self.start += bytes;
        &self.bytes[from..from + bytes]
    }

    /// Moves the bytes that are left to the front, so that there is room behind them.
    fn compact(&mut self) {
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}

impl Client {
    /// Decodes and reads what the socket has, as far as there is room. Returns `true` if there may
    /// be more to read at once.
    pub(super) fn take_input(&mut self) -> bool {
        for _ in 0..ROUNDS {
            if self.input.ended {
                return false;
            }
            self.input.blocked = false;
            match self.decode() {
                Stop::Blocked => {
                    self.input.blocked = true;
                    return false;
                }
                Stop::Starved if !self.input.readable || self.input.ended => return false,
                Stop::Starved => self.receive(),
            }
        }
        true
    }

    /// Ends reading, and gives up a write whose data arrived in part.
    pub(super) fn end_input(&mut self) {
        self.input.ended = true;
        match std::mem::replace(&mut self.input.payload, Payload::None) {
            Payload::Comes { slot, buf, .. } => {
                self.path.free(buf);
                self.give_up(slot);
            }
            Payload::Waits { slot, .. } | Payload::Dropped { slot, .. } => self.give_up(slot),
            Payload::None => {}
        }
    }

    fn receive(&mut self) {
        self.input.compact();
        let input = &mut self.input;
        let data = match &input.payload {
            Payload::Comes { data, got, .. } => Some(data.slice(*got, data.len() - got)),
            _ => None,
        };
        let direct = data.map_or(0, |data| data.len());
        let room = direct + input.bytes.len() - input.end;
        let arena = self.shared.pool.arena();
        let got = socket::receive(self.socket.as_fd(), arena, data, &mut input.bytes[input.end..]);
        match got {
            Ok(0) => self.end_input(),
            Ok(bytes) => {
                let first = bytes.min(direct);
                if let Payload::Comes { got, .. } = &mut input.payload {
                    *got += first;
                }
                input.end += bytes - first;
                // A short read means that the socket is empty. If it is not, the next wait for it
                // returns at once.
                input.readable = bytes == room;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => input.readable = false,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.end_input(),
        }
    }

    fn decode(&mut self) -> Stop {
        loop {
            let here = self.input.len();
            match &mut self.input.payload {
                Payload::None => {
                    if self.requests.is_full() || self.exclusive.is_some() {
                        return Stop::Blocked;
                    }
                    if here < self.agreed.form.request_bytes() {
                        return Stop::Starved;
                    }
                    self.take_request();
                    if self.input.ended {
                        return Stop::Starved;
                    }
                }
                &mut Payload::Dropped { slot, left: 0 } => {
                    self.input.payload = Payload::None;
                    self.end_request(slot);
                }
                Payload::Dropped { .. } if here == 0 => return Stop::Starved,
                Payload::Dropped { left, .. } => {
                    let bytes = (*left).min(here as u64);
                    *left -= bytes;
                    self.input.take(bytes as usize);
                }
                &mut Payload::Waits { slot, at } => {
                    if !self.begin_part(slot, at) {
                        return Stop::Blocked;
                    }
                }
                Payload::Comes { data, got, .. } if *got < data.len() => {
                    if here == 0 {
                        return Stop::Starved;
                    }
                    let bytes = here.min(data.len() - *got);
                    let to = data.slice(*got, bytes);
                    *got += bytes;
                    self.shared.pool.arena().copy_in(to, self.input.take(bytes));
                }
                Payload::Comes { .. } => self.end_part(),
            }
        }
    }

    /// Gets a buffer for a part of a write. Returns `false` if there is none now.
    fn begin_part(&mut self, slot: Slot, at: u64) -> bool {
        let raw = self.requests.get(slot).raw;
        let (offset, left) = (raw.offset + at, raw.len - at);
        let len = self.part_of(offset, left) as usize;
        let Some(buf) = self.buffer_for(offset, len) else { return false };
        let data = buf.span().slice(self.path.begins_at(offset), len);
        self.input.payload = Payload::Comes { slot, at, buf, data, got: 0 };
        true
    }

    /// Hands over a part of a write whose data are complete.
    fn end_part(&mut self) {
        let payload = std::mem::replace(&mut self.input.payload, Payload::None);
        let Payload::Comes { slot, at, buf, data, .. } = payload else {
            unreachable!("the caller has seen that");
        };
        let raw = self.requests.get(slot).raw;
        let len = data.len() as u64;
        if at + len < raw.len {
            self.input.payload = Payload::Waits { slot, at: at + len };
        }
        let step =
            Step { slot: Some(slot), doing: Doing::Write, at, len, filled: Some((buf, data)) };
        self.todo.push_back(step);
    }

    fn take_request(&mut self) {
        let form = self.agreed.form;
        let Some(raw) = form.parse(self.input.take(form.request_bytes())) else {
            // Where the next request begins is unknown (nbd-rules.md 2).
            return self.end_input();
        };
        if raw.command == command::DISCONNECT {
            return self.end_input();
        }
        let error = self.refusal(&raw);
        // The table has a free slot: the caller has checked that.
        let Some(slot) = self.requests.add(Request::new(raw)) else { return };
        if let Some(error) = error {
            let request = self.requests.get(slot);
            request.error = error;
            request.left = 0;
            let left = form.data_bytes(&raw);
            if left > 0 {
                self.input.payload = Payload::Dropped { slot, left };
                return;
            }
            return self.end_request(slot);
        }
        let doing = match raw.command {
            command::READ => Doing::Read,
            command::TRIM => return self.take_trim(slot),
            command::WRITE_ZEROES if raw.has(flag::NO_HOLE) => Doing::WriteZeros,
            command::WRITE_ZEROES => Doing::Zero,
            command::BLOCK_STATUS => Doing::Status,
            command::CACHE => Doing::Cache,
            command::WRITE => {
                self.input.payload = Payload::Waits { slot, at: 0 };
                return;
            }
            _ => Doing::Flush,
        };
        if doing == Doing::Read && self.is_long(&raw) && form == Form::Simple {
            self.exclusive = Some(slot);
        }
        let len = self.requests.get(slot).left;
        self.todo.push_back(Step { slot: Some(slot), doing, at: 0, len, filled: None });
    }

    /// Takes a TRIM, which is a hint. Bytes of sectors that it does not cover stay, and where the
    /// disk has no such thing all of them do.
    fn take_trim(&mut self, slot: Slot) {
        let request = self.requests.get(slot);
        let (at, len) = inward(request.raw.offset, request.raw.len);
        request.left = if self.export.trims { len } else { 0 };
        if request.left == 0 {
            return self.end_request(slot);
        }
        self.todo.push_back(Step {
            slot: Some(slot),
            doing: Doing::Discard,
            at,
            len,
            filled: None,
        });
    }

    /// Whether a request with data has more than one part.
    fn is_long(&self, raw: &RawRequest) -> bool {
        let len = raw.len;
        self.part_of(raw.offset, len) < len
    }

    /// Returns the error for a request that must not be carried out (nbd-rules.md 3).
    fn refusal(&self, raw: &RawRequest) -> Option<u32> {
        let extended = self.agreed.form == Form::Extended;
        let known = match raw.command {
            command::READ => flag::FUA | flag::DF,
            command::WRITE if extended => flag::FUA | flag::PAYLOAD_LEN,
            command::WRITE | command::FLUSH | command::TRIM | command::CACHE => flag::FUA,
            command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS if !self.agreed.contexts.is_empty() => flag::FUA | flag::REQ_ONE,
            _ => return Some(error::INVALID),
        };
        let splits = raw.has(flag::DF) && self.agreed.form == Form::Simple;
        if raw.flags & !known != 0 || splits {
            return Some(error::INVALID);
        }
        if raw.command == command::FLUSH {
            return None;
        }
        let changes = [command::WRITE, command::TRIM, command::WRITE_ZEROES].contains(&raw.command);
        if changes && self.export.read_only {
            return Some(error::PERM);
        }
        let has_data = [command::READ, command::WRITE].contains(&raw.command);
        if raw.len == 0 || (has_data && raw.len > MAX_REQUEST_BYTES.into()) {
            return Some(error::INVALID);
        }
        let end = raw.offset.checked_add(raw.len);
        if end.is_none_or(|end| end > self.export.bytes) {
            let writes = [command::WRITE, command::WRITE_ZEROES].contains(&raw.command);
            return Some(if writes { error::NO_SPACE } else { error::INVALID });
        }
        if raw.has(flag::DF) && self.is_long(raw) {
            return Some(error::OVERFLOW);
        }
        (raw.has(flag::FAST_ZERO) && !self.zeroes_fast(raw)).then_some(error::UNSUPPORTED)
    }

    /// Whether zeros take less time than a write of them: the medium has a means for that, and the range has one of
    /// its blocks. The parts of blocks at its ends are written.
    fn zeroes_fast(&self, raw: &RawRequest) -> bool {
        let disk = self.path.disk();
        let block = u64::from(disk.block_bytes());
        let has_whole = raw.offset.next_multiple_of(block) - raw.offset + block <= raw.len;
        has_whole && !raw.has(flag::NO_HOLE) && disk.zeroes_fast()
    }

    /// Makes the heads of the answer to a request.
    pub(super) fn reply_to(&self, raw: &RawRequest) -> ReplyTo {
        ReplyTo { form: self.agreed.form, cookie: raw.cookie, offset: raw.offset }
    }

    /// Answers a request that failed, or whose answer carries no data.
    pub(super) fn answer_without_data(&mut self, slot: Slot) {
        let Request { raw, error, .. } = *self.requests.get(slot);
        let to = self.reply_to(&raw);
        let head = match error {
            0 => to.done(),
            _ => to.error(error, [command::READ, command::BLOCK_STATUS].contains(&raw.command)),
        };
        self.output.push(Reply::new(head, Some(slot)));
    }
}

const _: () = assert!(PART_BYTES >= 64 << 10, "DF has to work for 64 KiB (nbd-rules.md 3)");
