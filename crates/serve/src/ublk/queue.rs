//! One queue, one thread: requests from the driver to the path and back.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use ferrite_host::clock::Clock;
use ferrite_io::engine::{Completion, Engine, Op, Token};
use ferrite_io::reactor::Wait;
use ferrite_io::ublk::{Channel, Description, Ended, Operation};
use ferrite_xen::abi::{OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE};

use crate::log_limit::limited;
use crate::path::client::{COLD, Client, Turns, serve};
use crate::path::limit::Counted;
use crate::path::shared::Shared;
use crate::path::work::{Action, Outcome, Work};
use crate::path::{Admitted, Data, FRONTEND_TOKENS, RequestPath, Ticket, largest_request};

/// Completion of the channel's descriptor becoming readable.
const COMMANDS: Token = FRONTEND_TOKENS;
/// No tag: the flush at the queue's end.
const NO_TAG: u16 = u16::MAX;

/// Answers of requests that were not carried out.
const EIO: i32 = -5;
const ENOSPC: i32 = -28;
const EROFS: i32 = -30;
const EOPNOTSUPP: i32 = -95;
/// The end of a tag of a device that was stopped.
const ENODEV: i32 = -19;

/// A queue, on the thread that serves it.
pub(super) struct Queue {
    /// Declared first, so that it is dropped first: an operation of it waits on the channel's descriptor.
    path: RequestPath,
    channel: Box<dyn Channel>,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    read_only: bool,
    /// The tags that have a request which the path has not taken, oldest first.
    todo: VecDeque<u16>,
    /// The tag of each entry of the path.
    tags: Vec<u16>,
    /// Number of tags that have not ended.
    alive: u16,
    /// Number of requests that the path has.
    in_use: usize,
    /// The first request waits for the disk's limit, and was counted.
    limited: bool,
    /// No request can be taken now. The end of the reason wakes this thread.
    blocked: bool,
    /// An operation waits for the channel's descriptor.
    armed: bool,
    /// Unflushed writes were flushed at the end.
    saved: bool,
    /// Is called when all tags wait for requests.
    ready: Option<Box<dyn FnOnce() + Send>>,
    ended: Vec<Ended>,
    tickets: Vec<Ticket>,
    copy_in: Vec<Ticket>,
}

impl Queue {
    /// Makes a queue that runs on the calling thread.
    ///
    /// # Errors
    /// The engine does not take the disk's files.
    pub(super) fn new(
        shared: Arc<Shared>,
        number: usize,
        channel: Box<dyn Channel>,
        engine: Box<dyn Engine>,
        read_only: bool,
    ) -> io::Result<Queue> {
        // One entry more, for the flush at the end.
        let entries = u32::from(channel.depth()) + 1;
        let mut path = RequestPath::new(shared.clone(), number, engine, entries)?;
        path.client_keeps_data();
        Ok(Queue {
            path,
            clock: shared.device.clock.clone(),
            shared,
            read_only,
            todo: VecDeque::with_capacity(channel.depth().into()),
            tags: vec![NO_TAG; entries as usize],
            alive: channel.depth(),
            channel,
            in_use: 0,
            limited: false,
            blocked: false,
            armed: false,
            saved: false,
            ready: None,
            ended: Vec::new(),
            tickets: Vec::new(),
            copy_in: Vec::new(),
        })
    }

    /// Calls `ready` when all tags wait for requests.
    pub(super) fn when_ready(mut self, ready: Box<dyn FnOnce() + Send>) -> Queue {
        self.ready = Some(ready);
        self
    }

    /// Serves requests until the queue or its device is stopped. All requests that were taken are answered then.
    pub(super) fn run(mut self) -> io::Result<()> {
        (0..self.channel.depth()).for_each(|tag| self.channel.fetch(tag));
        serve(&mut self)
    }

    /// Notes the tags that have a request, and those that have ended.
    fn reap(&mut self) {
        self.channel.reap(&mut self.ended);
        for Ended { tag, result } in self.ended.drain(..) {
            if result == 0 {
                self.todo.push_back(tag);
                continue;
            }
            self.alive -= 1;
            if result != ENODEV {
                let (device, now_ns) = (&self.shared.device, self.clock.now_ns());
                let e = io::Error::from_raw_os_error(-result);
                limited!(
                    warn,
                    device.log_limits.requests,
                    now_ns,
                    "the kernel gives no more requests of tag {tag}: {e}"
                );
            }
        }
    }

    /// Hands requests to the path.
    fn take_all(&mut self) {
        if self.path.has_company() && self.todo.is_empty() {
            self.blocked = false;
            self.path.stay_out();
            return;
        }
        if !self.path.enter() {
            self.blocked = true;
            return;
        }
        let now_ns = self.clock.now_ns();
        let before = self.todo.len();
        self.blocked = !self.hand_over(now_ns);
        if self.todo.len() < before {
            self.path.counters().sweeps.add(1);
        }
        self.path.leave_if_idle();
    }

    /// Hands over the requests that wait. `false`: not all of it is possible now.
    fn hand_over(&mut self, now_ns: u64) -> bool {
        // After a stop they stay with the driver, for the next server.
        while let Some(tag) = self.todo.front().copied().filter(|_| !self.shared.stopping()) {
            if self.path.is_holding_back() || self.path.next_entry().is_none() {
                return false;
            }
            let asked = self.channel.describe(tag);
            let (work, operation, counted) = match self.parse(&asked) {
                Ok(parsed) => parsed,
                Err(result) => {
                    self.todo.pop_front();
                    self.channel.commit(tag, result);
                    continue;
                }
            };
            if self.path.is_limited() && !self.path.has_tokens(counted, now_ns) {
                let begins = !std::mem::replace(&mut self.limited, true);
                self.path.count_limited(begins.into());
                return false;
            }
            let buf = match work.action {
                Action::Read | Action::Write => match self.path.buffer(work.bytes() as usize) {
                    Some(buf) => Some(buf),
                    None => return false,
                },
                _ => None,
            };
            let Some(ticket) = self.path.take(tag.into(), operation, buf, now_ns) else {
                return false;
            };
            self.limited = false;
            self.todo.pop_front();
            self.tags[ticket.entry()] = tag;
            self.in_use += 1;
            match self.path.admit(ticket, work) {
                Admitted::Taken => {}
                Admitted::Fetch(ticket) => self.copy_in.push(ticket),
            }
        }
        true
    }

    /// Checks a request. `Err`: its answer.
    fn parse(&self, asked: &Description) -> Result<(Work, u8, Counted), i32> {
        let disk = self.path.disk();
        let (action, operation, counted) = match asked.operation {
            Operation::Read => (Action::Read, OP_READ, Counted::Read),
            Operation::Write => (Action::Write, OP_WRITE, Counted::Write),
            Operation::Discard => (Action::Discard, OP_DISCARD, Counted::Write),
            Operation::Flush => (Action::Flush, OP_FLUSH, Counted::Not),
            Operation::Other(_) => return Err(EOPNOTSUPP),
        };
        if action == Action::Flush {
            return Ok((Work { action, sector: 0, sectors: 0 }, operation, counted));
        }
        if action.changes_medium() && (self.read_only || disk.read_only()) {
            return Err(EROFS);
        }
        let work = Work { action, sector: asked.sector, sectors: asked.sectors.into() };
        let is_inside =
            asked.sector.checked_add(work.sectors).is_some_and(|end| end <= disk.sectors());
        let fits = action == Action::Discard || work.bytes() <= largest_request(disk) as u64;
        match is_inside && fits && work.sectors > 0 {
            true => Ok((work, operation, counted)),
            false => Err(EIO),
        }
    }

    /// Whether data were copied. An error is logged.
    fn copied(&self, result: io::Result<()>) -> bool {
        let Err(e) = result else { return true };
        let (device, now_ns) = (&self.shared.device, self.clock.now_ns());
        limited!(
            warn,
            device.log_limits.requests,
            now_ns,
            "the kernel does not copy the data of a request: {e}"
        );
        false
    }

    fn answer_one(&mut self, ticket: Ticket) {
        let tag = std::mem::replace(&mut self.tags[ticket.entry()], NO_TAG);
        let (outcome, is_full) = (self.path.outcome(&ticket), self.path.lacked_space(&ticket));
        self.path.record(&ticket).stages.answered_ns = self.clock.now_ns();
        self.path.release(ticket);
        if tag == NO_TAG {
            return;
        }
        self.in_use -= 1;
        let asked = self.channel.describe(tag);
        let result = match (outcome, asked.operation) {
            // The number of bytes: a write that is answered by 0 would be sent again, for ever.
            (Outcome::Done, Operation::Read | Operation::Write) => {
                i32::try_from(u64::from(asked.sectors) * 512).unwrap_or(EIO)
            }
            (Outcome::Done, _) => 0,
            // A discard is a hint. This medium ignores it.
            (Outcome::Unsupported, Operation::Discard) => 0,
            (Outcome::Unsupported, _) => EOPNOTSUPP,
            (Outcome::Failed, _) if is_full => ENOSPC,
            (Outcome::Failed, _) => EIO,
        };
        self.path.counters().requests.add(1);
        self.channel.commit(tag, result);
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

    fn look(&mut self) {
        self.reap();
    }

    fn is_stopping(&self) -> bool {
        self.shared.stopping() || self.alive == 0
    }

    fn take(&mut self) -> io::Result<()> {
        self.take_all();
        Ok(())
    }

    fn fetch(&self, ticket: &Ticket) -> io::Result<bool> {
        let Some(Data::At(span)) = self.path.data(ticket) else { return Ok(true) };
        let (tag, arena) = (self.tags[ticket.entry()], self.shared.pool.arena());
        Ok(self.copied(self.channel.copy_in(tag, 0, arena, span)))
    }

    fn give(&self, ticket: &Ticket) -> io::Result<bool> {
        let (tag, arena) = (self.tags[ticket.entry()], self.shared.pool.arena());
        let given = match self.path.data(ticket) {
            Some(Data::At(span)) => self.channel.copy_out(tag, 0, arena, span),
            _ => {
                let bytes = u64::from(self.channel.describe(tag).sectors) * 512;
                self.channel.zero(tag, 0, bytes)
            }
        };
        Ok(self.copied(given))
    }

    fn answer(&mut self) -> io::Result<()> {
        while self.path.has_finished() {
            let mut tickets = std::mem::take(&mut self.tickets);
            self.path.finished(&mut tickets);
            tickets.drain(..).for_each(|ticket| self.answer_one(ticket));
            self.tickets = tickets;
        }
        self.path.leave_if_idle();
        Ok(())
    }

    /// Answers go to the driver before the last one of them lets this thread end.
    fn send(&mut self) -> io::Result<()> {
        self.channel.submit()?;
        if let Some(ready) = self.ready.take() {
            ready();
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        let has_more = !self.shared.stopping() && !self.todo.is_empty();
        self.is_stopping() && !has_more && self.in_use == 0
    }

    fn has_no_request(&mut self, entry: usize) {
        self.tags[entry] = NO_TAG;
    }

    fn next_wait(&mut self, started: bool) -> io::Result<Wait> {
        // A task begins in the turn itself.
        let begins = started && !self.path.has_transfers();
        let more = !self.todo.is_empty() && !self.blocked && !self.shared.stopping();
        if begins || more || self.path.is_pending() || self.path.has_yielded() {
            return Ok(Wait::No);
        }
        let left = self.path.throttled_for(self.clock.now_ns());
        if !std::mem::replace(&mut self.armed, true) {
            let fd = self.channel.fd();
            self.path.reactor().push(COMMANDS, Op::Readable { fd });
        }
        Ok(Wait::Until(left.or_else(|| self.path.may_cool().then_some(COLD))))
    }

    fn dispatch(&mut self, completion: Completion, now_ns: u64) -> io::Result<()> {
        if completion.token != COMMANDS {
            return self.path.completed(completion, now_ns);
        }
        completion.result()?;
        self.armed = false;
        self.path.counters().events.add(1);
        Ok(())
    }
}
