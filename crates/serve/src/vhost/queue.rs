//! One virtqueue, one thread: requests from the ring to the path and back.
//!
//! A request that is larger than a part of [`PART_BYTES`] goes to the path in several. It is answered when all of them have
//! ended. A request stays on the ring until all of the one before it was handed over.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_disk::SECTOR_BYTES;
use ferrite_host::clock::Clock;
use ferrite_io::engine::{Completion, Engine, Token};
use ferrite_io::foreign::Fault;
use ferrite_io::reactor::Wait;

use super::chain::Chain;
use super::inflight::QueueTable;
use super::memory::Place;
use super::request::{
    Doing, FAILED, ID_BYTES, OKAY, Parsed, Range, Request, Rules, UNSUPPORTED, parse,
};
use super::ring::{Broken, Ring, Violation};
use crate::blkif::queue::storm::Storm;
use crate::log_limit::limited;
use crate::path::client::{Client, Turns, serve};
use crate::path::shared::Shared;
use crate::path::work::{Action, Outcome};
use crate::path::{Admitted, Data, FRONTEND_TOKENS, RequestPath, Ticket, largest_request};

mod waiting;

use waiting::Waiting;

/// Completion of the kick's descriptor becoming readable.
const KICK: Token = FRONTEND_TOKENS;
/// Most parts in flight.
const ENTRIES: u32 = 256;
/// The largest part of a request with data.
const PART_BYTES: usize = 1 << 20;
/// Most requests that are taken in one turn.
const SWEEP: u16 = 32;
/// Requests that have ended and whose memory is kept.
const KEPT: usize = 64;
/// No descriptor: the part is the flush at the queue's end.
const NO_HEAD: u16 = u16::MAX;

/// An event descriptor of the front end that may be exchanged at any time.
pub(super) type SharedEvent = Arc<Mutex<Option<OwnedFd>>>;

/// Signals an event. An event that the front end does not read is full, which is as good.
pub(super) fn signal(event: &SharedEvent) {
    if let Some(event) = &*event.lock().unwrap_or_else(PoisonError::into_inner) {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// The parts that a queue is made of.
pub(super) struct Parts {
    pub(super) shared: Arc<Shared>,
    pub(super) ring: Ring,
    /// It does not block.
    pub(super) kick: Arc<OwnedFd>,
    pub(super) call: SharedEvent,
    pub(super) err: SharedEvent,
    pub(super) inflight: Option<QueueTable>,
    /// The requests that a predecessor has left, oldest first.
    pub(super) replay: Vec<u16>,
    pub(super) rights: Rights,
    pub(super) number: u16,
}

/// The guest's rights.
#[derive(Clone, Copy)]
pub(super) struct Rights {
    pub(super) read_only: bool,
    pub(super) discards: bool,
    pub(super) indirect: bool,
    pub(super) writes_through: bool,
    pub(super) id: [u8; ID_BYTES],
}

/// How a queue has ended.
pub(super) struct End {
    /// The next entry of the available ring.
    pub(super) next_avail: u16,
    pub(super) result: io::Result<()>,
}

/// A part on the path.
#[derive(Clone, Copy)]
struct Part {
    head: u16,
    /// Where its data begin among those of its request.
    at: u64,
    bytes: u64,
}

/// A queue, on the thread that serves it.
pub(super) struct Queue {
    /// Declared first, so that it is dropped first: its operations wait on the kick's descriptor.
    path: RequestPath,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    ring: Ring,
    kick: Arc<OwnedFd>,
    call: SharedEvent,
    err: SharedEvent,
    inflight: Option<QueueTable>,
    replay: VecDeque<u16>,
    rights: Rights,
    number: u16,
    part_sectors: u64,
    /// The unanswered requests, by their first descriptor.
    requests: Vec<Option<Box<Request>>>,
    /// Number of them.
    in_use: usize,
    /// Memory for the next request, and of some that have ended: a request allocates nothing, as a rule.
    chain: Chain,
    next: Box<Request>,
    #[expect(clippy::vec_box, reason = "a box moves to the requests as it is")]
    ended: Vec<Box<Request>>,
    /// Requests that were not handed over completely, the next one first.
    todo: VecDeque<u16>,
    /// No request can be taken or handed over now. The end of the reason wakes this thread.
    blocked: bool,
    parts: Vec<Part>,
    /// Requests on the used ring that are not published.
    answered: Vec<u16>,
    /// The guest broke the ring: no more requests are taken from it.
    broken: bool,
    /// An operation waits for the kick.
    armed: bool,
    storm: Storm,
    held_until_ns: u64,
    waiting: Waiting,
    /// Writes that the guest did not flush were flushed at the end.
    saved: bool,
    tickets: Vec<Ticket>,
    copy_in: Vec<Ticket>,
}

impl Queue {
    /// Makes a queue that runs on the calling thread.
    ///
    /// # Errors
    /// The engine does not take the disk's files.
    pub(super) fn new(parts: Parts, engine: Box<dyn Engine>) -> io::Result<Queue> {
        let mut path = RequestPath::new(parts.shared.clone(), 0, engine, ENTRIES)?;
        path.client_keeps_data();
        let part_bytes = PART_BYTES.min(largest_request(path.disk())) as u64;
        Ok(Queue {
            path,
            clock: parts.shared.device.clock.clone(),
            waiting: Waiting::new(&parts.shared),
            shared: parts.shared,
            requests: (0..parts.ring.entries).map(|_| None).collect(),
            ring: parts.ring,
            kick: parts.kick,
            call: parts.call,
            err: parts.err,
            inflight: parts.inflight,
            replay: parts.replay.into(),
            rights: parts.rights,
            number: parts.number,
            part_sectors: part_bytes / SECTOR_BYTES,
            in_use: 0,
            chain: Chain::default(),
            next: Box::default(),
            ended: Vec::new(),
            todo: VecDeque::new(),
            blocked: false,
            parts: vec![Part { head: NO_HEAD, at: 0, bytes: 0 }; ENTRIES as usize],
            answered: Vec::new(),
            broken: false,
            armed: false,
            storm: Storm::default(),
            held_until_ns: 0,
            saved: false,
            tickets: Vec::new(),
            copy_in: Vec::new(),
        })
    }

    /// Serves the ring until the queue is stopped. All requests that were taken are answered then.
    pub(super) fn run(mut self) -> End {
        // A predecessor may have published answers, and died before it told the guest.
        signal(&self.call);
        let result = serve(&mut self);
        End { next_avail: self.ring.next_avail, result }
    }

    /// Notes a violation, and goes on with what was taken. Lost memory ends the queue.
    fn break_off(&mut self, broken: Broken) -> io::Result<()> {
        self.path.leave_if_idle();
        let violation = match broken {
            Broken::Violation(violation) => violation,
            Broken::Memory(fault) => return Err(gone(fault)),
        };
        self.broken = true;
        let device = &self.shared.device;
        let (queue, now_ns) = (self.number, self.clock.now_ns());
        limited!(
            warn,
            device.log_limits.requests,
            now_ns,
            "queue {queue} of the guest takes no more requests until its driver starts again: {violation}"
        );
        signal(&self.err);
        Ok(())
    }

    /// Hands requests to the path: the rest of the one before, those of a predecessor, and those on the ring.
    fn take_all(&mut self) -> Result<(), Broken> {
        let is_empty = self.todo.is_empty()
            && self.replay.is_empty()
            && (self.broken || self.ring.waiting().is_ok_and(|there| there == 0));
        if self.path.has_company() && is_empty {
            self.blocked = false;
            self.path.stay_out();
            return Ok(());
        }
        if !self.path.enter() {
            self.blocked = true;
            return Ok(());
        }
        let now_ns = self.clock.now_ns();
        let mut taken = 0;
        loop {
            if !self.hand_over(now_ns) {
                break;
            }
            let (head, is_new) = match self.replay.pop_front() {
                Some(head) => (head, false),
                None if self.broken || self.shared.stopping() || taken == SWEEP => break,
                None if self.path.is_holding_back() || self.ring.waiting()? == 0 => break,
                None => (self.ring.peek()?, true),
            };
            self.take_one(head, is_new)?;
            taken += 1;
        }
        if taken > 0 {
            self.storm.taken();
            self.path.counters().sweeps.add(1);
            self.ring.be_quiet()?;
        }
        self.path.leave_if_idle();
        Ok(())
    }

    /// Takes a request, or answers it at once.
    fn take_one(&mut self, head: u16, is_new: bool) -> Result<(), Broken> {
        if self.requests[usize::from(head)].is_some() {
            return Err(Violation::Twice.into());
        }
        self.chain.read(&self.ring, head, self.rights.indirect)?;
        let rules = Rules {
            sectors: self.path.disk().sectors(),
            read_only: self.rights.read_only,
            discards: self.rights.discards,
            writes_through: self.rights.writes_through,
            id: &self.rights.id,
        };
        let parsed = parse(&self.ring.table, &mut self.chain, &rules, &mut self.next)?;
        if is_new {
            // First the note, then the ring: a successor counts both.
            if let Some(inflight) = &mut self.inflight {
                inflight.took(head)?;
            }
            self.ring.advance();
        }
        match parsed {
            Parsed::Work => {
                let next = self.ended.pop().unwrap_or_default();
                self.requests[usize::from(head)] = Some(std::mem::replace(&mut self.next, next));
                self.in_use += 1;
                self.todo.push_back(head);
                self.end_request(head)?;
            }
            Parsed::Answer(status_at, status, written) => {
                self.put_answer(head, status_at, status, written)?;
            }
        }
        Ok(())
    }

    /// Hands over the rest of the requests in hand. `false`: not all of it is possible now.
    fn hand_over(&mut self, now_ns: u64) -> bool {
        self.blocked = true;
        while let Some(head) = self.todo.front().copied() {
            let Some(request) = &mut self.requests[usize::from(head)] else {
                self.todo.pop_front();
                continue;
            };
            if request.left.is_empty() {
                self.todo.pop_front();
                continue;
            }
            if self.path.is_holding_back() || self.path.next_entry().is_none() {
                return false;
            }
            if self.path.is_limited() && !self.path.has_tokens(request.doing.counted(), now_ns) {
                let begins = !std::mem::replace(&mut request.limited, true);
                self.path.count_limited(begins.into());
                return false;
            }
            let work = request.next_part(self.part_sectors, || self.path.disk().block_bytes());
            let has_data = matches!(work.action, Action::Read | Action::Write);
            let buf = match has_data {
                true => match self.path.buffer(work.bytes() as usize) {
                    Some(buf) => Some(buf),
                    None => return false,
                },
                false => None,
            };
            let operation = request.doing.operation();
            let Some(ticket) = self.path.take(head.into(), operation, buf, now_ns) else {
                return false;
            };
            self.parts[ticket.entry()] = Part { head, at: request.at, bytes: work.bytes() };
            request.took(&work);
            match self.path.admit(ticket, work) {
                Admitted::Taken => {}
                Admitted::Fetch(ticket) => self.copy_in.push(ticket),
            }
        }
        self.blocked = false;
        true
    }

    /// Copies a write's data from the guest to its buffer.
    fn copy_in(&self, ticket: &Ticket) -> Result<(), Fault> {
        let Some(Data::At(span)) = self.path.data(ticket) else { return Ok(()) };
        let part = self.parts[ticket.entry()];
        let arena = self.shared.pool.arena();
        let Some(Some(request)) = self.requests.get(usize::from(part.head)) else { return Ok(()) };
        if request.doing != Doing::Write {
            arena.fill(span, 0);
            return Ok(());
        }
        let mut done = 0;
        self.ring.table.each(&request.data, part.at, span.len(), |memory, at, len| {
            let to = span.slice(done, len);
            done += len;
            memory.to_arena(at, arena, to)
        })
    }

    /// Copies the data of a read to the guest.
    fn copy_out(&self, ticket: &Ticket) -> Result<(), Fault> {
        let part = self.parts[ticket.entry()];
        let Some(Some(request)) = self.requests.get(usize::from(part.head)) else { return Ok(()) };
        let arena = self.shared.pool.arena();
        let data = self.path.data(ticket);
        let mut done = 0;
        self.ring.table.each(&request.data, part.at, part.bytes as usize, |memory, at, len| {
            let from = done;
            done += len;
            match data {
                Some(Data::At(span)) => memory.from_arena(at, arena, span.slice(from, len)),
                _ => memory.zero(at, len),
            }
        })
    }

    /// Answers all requests of which no part is left, and tells the guest once.
    fn answer_all(&mut self) -> Result<(), Fault> {
        while self.path.has_finished() {
            let mut tickets = std::mem::take(&mut self.tickets);
            self.path.finished(&mut tickets);
            let now_ns = self.clock.now_ns();
            let mut result = Ok(());
            for ticket in tickets.drain(..) {
                let ended = self.part_ended(ticket, now_ns);
                result = result.and(ended);
            }
            self.tickets = tickets;
            result?;
        }
        if self.ring.has_unpublished() {
            let wanted = self.ring.publish()?;
            if let Some(inflight) = &self.inflight {
                inflight.answered(&self.answered, self.ring.told)?;
            }
            self.answered.clear();
            if wanted {
                signal(&self.call);
                self.path.counters().notifications.add(1);
            }
        }
        self.path.leave_if_idle();
        Ok(())
    }

    fn part_ended(&mut self, ticket: Ticket, now_ns: u64) -> Result<(), Fault> {
        let part = self.parts[ticket.entry()];
        let outcome = self.path.outcome(&ticket);
        self.path.record(&ticket).stages.answered_ns = now_ns;
        self.path.release(ticket);
        let Some(Some(request)) = self.requests.get_mut(usize::from(part.head)) else {
            return Ok(());
        };
        request.under_way -= 1;
        let status = match outcome {
            Outcome::Done => OKAY,
            // A discard is a hint. This medium ignores it.
            Outcome::Unsupported if request.doing == Doing::Discard => OKAY,
            Outcome::Unsupported => UNSUPPORTED,
            Outcome::Failed => FAILED,
        };
        if request.status == OKAY {
            request.status = status;
        }
        if request.status != OKAY {
            request.skip();
        }
        self.end_request(part.head)
    }

    /// Answers a request if no part of it is left. With a flush to come, that is begun instead.
    fn end_request(&mut self, head: u16) -> Result<(), Fault> {
        let Some(request) = &mut self.requests[usize::from(head)] else { return Ok(()) };
        if !request.has_ended() {
            return Ok(());
        }
        if request.status == OKAY && std::mem::take(&mut request.flush_due) {
            // The guest does not flush, so the write has to be on the medium now.
            request.doing = Doing::Flush;
            request.left.push(Range { sector: 0, sectors: 0 });
            self.todo.push_front(head);
            return Ok(());
        }
        let (status_at, status) = (request.status_at, request.status);
        let written = if status == OKAY { request.written } else { 1 };
        if let Some(mut request) = self.requests[usize::from(head)].take()
            && self.ended.len() < KEPT
        {
            request.rest();
            self.ended.push(request);
        }
        self.in_use -= 1;
        self.path.counters().requests.add(1);
        self.put_answer(head, status_at, status, written)
    }

    /// Puts the status where the guest looks for it, and the request on the used ring.
    fn put_answer(
        &mut self,
        head: u16,
        status_at: Place,
        status: u8,
        written: u32,
    ) -> Result<(), Fault> {
        let (memory, at) = self.ring.table.at(status_at);
        memory.copy_in(at, &[status])?;
        if let Some(inflight) = &self.inflight {
            inflight.answers(head)?;
        }
        self.answered.push(head);
        self.ring.push_used(head, written)
    }
}

impl Client for Queue {
    fn turns(&mut self) -> Turns<'_> {
        Turns {
            path: &mut self.path,
            clock: &*self.clock,
            copy_in: &mut self.copy_in,
            tickets: &mut self.tickets,
            blocked: &mut self.blocked,
            saved: &mut self.saved,
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.stopping()
    }

    fn take(&mut self) -> io::Result<()> {
        self.take_all().or_else(|broken| self.break_off(broken))
    }

    fn fetch(&self, ticket: &Ticket) -> io::Result<bool> {
        self.copy_in(ticket).map(|()| true).map_err(gone)
    }

    fn give(&self, ticket: &Ticket) -> io::Result<bool> {
        self.copy_out(ticket).map(|()| true).map_err(gone)
    }

    fn answer(&mut self) -> io::Result<()> {
        self.answer_all().map_err(gone)
    }

    fn is_done(&self) -> bool {
        self.shared.stopping() && self.in_use == 0 && self.todo.is_empty()
    }

    fn has_no_request(&mut self, entry: usize) {
        self.parts[entry] = Part { head: NO_HEAD, at: 0, bytes: 0 };
    }

    /// Says in the table that nothing is in flight, if that is so: a predecessor's requests may have been left.
    fn end(&mut self) -> io::Result<()> {
        match &self.inflight {
            Some(inflight) if self.replay.is_empty() => inflight.end().map_err(gone),
            _ => Ok(()),
        }
    }

    fn next_wait(&mut self, started: bool) -> io::Result<Wait> {
        self.wait_for_kick(started)
    }

    fn slept(&mut self, took_ns: u64) {
        self.waiting.slept(took_ns);
    }

    fn dispatch(&mut self, completion: Completion, now_ns: u64) -> io::Result<()> {
        if completion.token != KICK {
            return self.path.completed(completion, now_ns);
        }
        completion.result()?;
        self.armed = false;
        // Another process may have read it before.
        let _ = rustix::io::read(&*self.kick, &mut [0; 8]);
        self.storm.event();
        if let Some(hold_ns) = self.storm.hold_ns() {
            self.held_until_ns = now_ns + hold_ns;
            self.path.counters().held_events.add(1);
        }
        self.path.counters().events.add(1);
        Ok(())
    }
}

fn gone(fault: Fault) -> io::Error {
    io::Error::other(format!("the guest's memory cannot be used: {fault}"))
}
