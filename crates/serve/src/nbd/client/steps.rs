//! Turns a client's requests into requests of the path, and their outcomes into answers.

use ferrite_disk::SECTOR_BYTES;
use ferrite_io::arena::Span;
use ferrite_io::pool::Buf;
use ferrite_xen::abi::{OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, STATUS_ERROR, STATUS_OKAY};

use super::Client;
use super::output::Reply;
use super::requests::Slot;
use crate::path::limit::Counted;
use crate::path::work::{Action, Outcome, Work};
use crate::path::{Admitted, Data, Ticket};
use ferrite_nbd::wire::{Form, Head, command, error};

/// The largest part of a request with data.
pub(super) const PART_BYTES: usize = 1 << 20;
/// The largest part of a request for zeros. Other requests of this client may run between two
/// parts.
const ZERO_BYTES: u64 = 64 << 20;

/// The whole sectors inside a range: how far behind its beginning they begin, and their length in
/// bytes.
pub(super) fn inward(offset: u64, len: u64) -> (u64, u64) {
    let from = offset.next_multiple_of(SECTOR_BYTES);
    let end = offset + len;
    (from - offset, (end - end % SECTOR_BYTES).saturating_sub(from))
}

/// The operation of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Read,
    Write,
    /// Writes zeros that take space.
    WriteZeros,
    /// Makes the range read as zeros, by whatever means.
    Zero,
    Discard,
    Flush,
    Status,
    /// Reads the metadata that a later read of the range needs.
    Cache,
}

impl Doing {
    /// Returns the operation's number in blkif, for the trace.
    fn operation(self) -> u8 {
        match self {
            Doing::Read => OP_READ,
            Doing::Write | Doing::WriteZeros | Doing::Zero => OP_WRITE,
            Doing::Discard => OP_DISCARD,
            Doing::Flush => OP_FLUSH,
            Doing::Status | Doing::Cache => u8::MAX,
        }
    }

    /// How the limits of a disk count its parts.
    fn counted(self) -> Counted {
        match self {
            Doing::Read | Doing::Status | Doing::Cache => Counted::Read,
            Doing::Write | Doing::WriteZeros | Doing::Zero | Doing::Discard => Counted::Write,
            Doing::Flush => Counted::Not,
        }
    }
}

/// Work for the path that is handed over in parts.
pub(super) struct Step {
    /// The request that the step belongs to. None for the flush at a client's end, which has no
    /// answer.
    pub(super) slot: Option<Slot>,
    pub(super) doing: Doing,
    /// Where the rest of the step begins, in bytes from the start of the request.
    pub(super) at: u64,
    pub(super) len: u64,
    /// The client's data of a write: their buffer, and where in it they are.
    pub(super) filled: Option<(Buf, Span)>,
}

impl Step {
    pub(super) fn flush(slot: Option<Slot>) -> Step {
        Step { slot, doing: Doing::Flush, at: 0, len: 0, filled: None }
    }
}

/// A part on the path. The table of parts is indexed by the path's entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    slot: Option<Slot>,
    doing: Doing,
    /// Where it begins, in bytes from the start of the request.
    pub(super) at: u64,
    pub(super) len: u64,
}

impl Part {
    pub(super) const NONE: Part = Part { slot: None, doing: Doing::Flush, at: 0, len: 0 };
}

impl Client {
    /// Hands the path as many parts as it can take.
    pub(super) fn admit(&mut self) {
        if self.todo.is_empty() {
            return;
        }
        if self.path.is_throttled() {
            self.path.leave_if_idle();
            return;
        }
        if !self.path.enter() {
            return;
        }
        let now_ns = self.clock.now_ns();
        let mut admitted = false;
        while let Some(mut step) = self.todo.pop_front() {
            let more = self.admit_part(&mut step, now_ns);
            admitted |= more;
            if step.len > 0 || !more {
                self.todo.push_front(step);
            }
            if !more {
                break;
            }
        }
        if admitted {
            self.path.counters().sweeps.add(1);
        }
        self.path.leave_if_idle();
    }

    /// Hands over one more part of a step. Returns `false` if that is not possible now.
    fn admit_part(&mut self, step: &mut Step, now_ns: u64) -> bool {
        let mut offset = step.at;
        if let Some(slot) = step.slot {
            let request = self.requests.get(slot);
            offset += request.raw.offset;
            if request.error != 0 {
                self.skip(slot, step);
                return true;
            }
            if self.exclusive == Some(slot)
                && (request.under_way > 0 || self.requests.in_use() > 1 || !self.output.is_empty())
            {
                return false;
            }
        }
        if self.path.is_holding_back() || self.path.next_entry().is_none() {
            return false;
        }
        if self.path.is_limited() && !self.path.has_tokens(step.doing.counted(), now_ns) {
            self.count_limited(step);
            return false;
        }
        let (action, len) = self.next_part(step, offset);
        let buf = match action {
            Action::Read | Action::Write => match self.buffer(step, offset, len) {
                Some(buf) => Some(buf),
                None => return false,
            },
            _ => None,
        };
        // There is a free entry: it was checked above.
        let cookie = step.slot.map_or(0, |slot| self.requests.get(slot).raw.cookie);
        let operation = step.doing.operation();
        let Some(ticket) = self.path.take(cookie, operation, buf, now_ns) else { return false };
        self.path.record(&ticket).noticed = self.noticed;
        self.parts[ticket.entry()] = Part { slot: step.slot, doing: step.doing, at: step.at, len };
        step.at += len;
        step.len -= len;
        if let Some(slot) = step.slot {
            let request = self.requests.get(slot);
            request.under_way += 1;
            request.left -= len;
        }
        let (sector, end) = (offset / SECTOR_BYTES, (offset + len).div_ceil(SECTOR_BYTES));
        let sectors = match step.doing {
            // The path is for its order with other users of the disk only: dirty maps do not ask for places.
            Doing::Status if !self.agreed.contexts.need_places() => 1,
            _ => end - sector,
        };
        let work = Work { action, sector, sectors };
        let (before, behind) = (offset % SECTOR_BYTES, end * SECTOR_BYTES - (offset + len));
        self.path.cut(&ticket, before as usize, behind as usize);
        match action {
            Action::Write => self.path.admit_filled(ticket, work),
            _ => match self.path.admit(ticket, work) {
                Admitted::Taken => {}
                Admitted::Fetch(_) => unreachable!("only what takes data is fetched"),
            },
        }
        true
    }

    /// Counts the requests that wait for the disk's limit: that of this step, and those behind it.
    fn count_limited(&mut self, step: &Step) {
        let mut begin_to_wait = 0;
        for slot in [step].into_iter().chain(&self.todo).filter_map(|step| step.slot) {
            let before = std::mem::replace(&mut self.requests.get(slot).limited, true);
            begin_to_wait += u64::from(!before);
        }
        self.path.count_limited(begin_to_wait);
    }

    /// Returns the action and the length in bytes of the next part of a step.
    fn next_part(&self, step: &Step, offset: u64) -> (Action, u64) {
        let data = match &step.filled {
            Some((_, data)) => data.len() as u64,
            None => self.part_of(offset, step.len),
        };
        match step.doing {
            Doing::Read => (Action::Read, data),
            Doing::Write | Doing::WriteZeros => (Action::Write, data),
            Doing::Flush => (Action::Flush, 0),
            Doing::Discard => (Action::Discard, step.len),
            Doing::Status | Doing::Cache => (Action::Status, step.len),
            Doing::Zero => {
                let block = u64::from(self.path.disk().block_bytes());
                let before = offset.next_multiple_of(block) - offset;
                match () {
                    () if before > 0 => (Action::Write, before.min(step.len)),
                    () if step.len < block => (Action::Write, step.len),
                    () => (Action::Zero, (step.len - step.len % block).min(ZERO_BYTES)),
                }
            }
        }
    }

    /// Returns how many of the bytes that are left of a request its next part has. That depends on
    /// nothing but the request: the disk may be exchanged between two parts.
    pub(super) fn part_of(&self, offset: u64, left: u64) -> u64 {
        left.min(self.part_bytes as u64 - offset % SECTOR_BYTES)
    }

    /// Returns a buffer for a part with the whole sectors around it. `None`: there is none now.
    pub(super) fn buffer_for(&mut self, offset: u64, len: usize) -> Option<Buf> {
        self.path.buffer((offset % SECTOR_BYTES) as usize + len)
    }

    /// Returns the buffer of a part, filled if the part is written from it. Returns `None` if there
    /// is none now.
    fn buffer(&mut self, step: &mut Step, offset: u64, len: u64) -> Option<Buf> {
        // A part is at most PART_BYTES.
        let len = len as usize;
        let begins_at = self.path.begins_at(offset);
        let Some((buf, data)) = step.filled.take() else {
            let buf = self.buffer_for(offset, len)?;
            if step.doing != Doing::Read {
                self.shared.pool.arena().fill(buf.span().slice(begins_at, len), 0);
            }
            return Some(buf);
        };
        let belongs = buf.span().slice(begins_at, len);
        if belongs != data {
            // The disk was exchanged meanwhile for one with other block sizes.
            let mut bytes = vec![0; len];
            self.shared.pool.arena().copy_out(data, &mut bytes);
            self.shared.pool.arena().copy_in(belongs, &bytes);
        }
        Some(buf)
    }

    /// Skips the rest of a step whose request has failed.
    fn skip(&mut self, slot: Slot, step: &mut Step) {
        if let Some((buf, _)) = step.filled.take() {
            self.path.free(buf);
        }
        self.requests.get(slot).left -= step.len;
        step.len = 0;
        self.end_request(slot);
    }

    /// Processes the tickets that have finished, and queues their answers.
    pub(super) fn answer(&mut self) {
        let mut tickets = std::mem::take(&mut self.tickets);
        self.path.read(&mut tickets);
        if !tickets.is_empty() {
            let now_ns = self.clock.now_ns();
            tickets.drain(..).for_each(|ticket| self.path.delivered(ticket, true, now_ns));
        }
        self.path.finished(&mut tickets);
        if !tickets.is_empty() {
            let now_ns = self.clock.now_ns();
            tickets.drain(..).for_each(|ticket| self.part_ended(ticket, now_ns));
            // This comes before anything is sent, so that other users of the disk do not wait for a
            // client that does not read.
            self.path.leave_if_idle();
        }
        self.tickets = tickets;
    }

    fn part_ended(&mut self, ticket: Ticket, now_ns: u64) {
        let part = self.parts[ticket.entry()];
        let error = match self.path.outcome(&ticket) {
            Outcome::Done => 0,
            // Discard is a hint. This medium ignores it.
            Outcome::Unsupported if part.doing == Doing::Discard => 0,
            _ if self.path.lacked_space(&ticket) => error::NO_SPACE,
            _ => error::IO,
        };
        let found = match part.doing {
            Doing::Status | Doing::Cache => self.path.status(&ticket),
            _ => Vec::new(),
        };
        let data = self.path.data(&ticket);
        let record = self.path.record(&ticket);
        record.stages.answered_ns = now_ns;
        if let Some(trace) = &mut self.trace {
            record.status = if error == 0 { STATUS_OKAY } else { STATUS_ERROR };
            trace.push(record);
        }
        let mut buf = self.path.release_keeping(ticket);
        if let Some(slot) = part.slot {
            let request = self.requests.get(slot);
            request.under_way -= 1;
            if error != 0 && request.error == 0 {
                request.error = error;
            }
            if error == 0 {
                match part.doing {
                    Doing::Read => self.answer_read(slot, part, data, &mut buf),
                    Doing::Status if !self.answer_status(slot, part, &found) => {
                        self.requests.get(slot).error = error::IO;
                    }
                    _ => {}
                }
            }
        }
        if let Some(buf) = buf {
            self.path.free(buf);
        }
        if let Some(slot) = part.slot {
            self.end_request(slot);
        }
    }

    /// Queues the answer to a part of a read. The buffer with the data goes out with it.
    fn answer_read(&mut self, slot: Slot, part: Part, data: Option<Data>, buf: &mut Option<Buf>) {
        let request = self.requests.get(slot);
        if request.error != 0 || request.silent {
            return;
        }
        let (done, raw) = (request.has_ended(), request.raw);
        let (offset, len) = (raw.offset + part.at, part.len as u32);
        let ends = done.then_some(slot);
        if self.agreed.form != Form::Simple {
            let to = self.reply_to(&raw);
            let mut reply = Reply::new(to.data(done, offset, len), ends);
            match (data, buf.take()) {
                (Some(Data::At(span)), Some(taken)) => reply.data = Some((taken, span)),
                (_, untouched) => {
                    reply.head = to.hole(done, offset, len);
                    *buf = untouched;
                }
            }
            self.output.push(reply);
        } else if let Some(taken) = buf.take() {
            // The head is sent once, before the first part. The parts follow one another.
            let span = match data {
                Some(Data::At(span)) => span,
                _ => {
                    let span = taken.span().slice(0, part.len as usize);
                    self.shared.pool.arena().fill(span, 0);
                    span
                }
            };
            let request = self.requests.get(slot);
            let head = match std::mem::replace(&mut request.promised, true) {
                false => Head::simple(raw.cookie, 0),
                true => Head::none(),
            };
            self.output.push(Reply { data: Some((taken, span)), ..Reply::new(head, ends) });
        }
    }

    /// Answers a request if no part of it is left.
    pub(super) fn end_request(&mut self, slot: Slot) {
        let request = self.requests.get(slot);
        if !request.has_ended() {
            return;
        }
        if request.silent {
            return self.free_slot(slot);
        }
        if request.error == 0 && std::mem::take(&mut request.flush_due) {
            // The flush goes to the front: a read that waits until it is alone would also wait for
            // this request.
            return self.todo.push_front(Step::flush(Some(slot)));
        }
        self.path.counters().requests.add(1);
        let answered = [command::READ, command::BLOCK_STATUS].contains(&request.raw.command);
        if request.error != 0 && request.promised {
            // Data were promised; only the end of the stream says that they do not come (nbd-rules.md 2).
            self.broken = true;
        } else if request.error != 0 || !answered {
            self.answer_without_data(slot);
        }
    }

    /// Gives up a write that the client did not send completely.
    pub(super) fn give_up(&mut self, slot: Slot) {
        let waiting: u64 =
            self.todo.iter().filter(|step| step.slot == Some(slot)).map(|step| step.len).sum();
        let request = self.requests.get(slot);
        request.silent = true;
        request.left = waiting;
        self.end_request(slot);
    }

    /// Frees the slot of a request that is over.
    pub(super) fn free_slot(&mut self, slot: Slot) {
        if self.exclusive == Some(slot) {
            self.exclusive = None;
        }
        self.requests.remove(slot);
    }
}
