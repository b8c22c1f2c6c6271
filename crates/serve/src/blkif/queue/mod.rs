//! One ring, one thread: requests from the ring to storage and back.
//!
//! [`Queue::run`] is a loop. One turn is one sweep of ARCHITECTURE.md, "A request's way": take
//! (`take.rs`), copy in (`copy.rs`), submit and complete ([`path`](crate::path)), copy out
//! (`copy.rs`), answer (`answer.rs`).

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use ferrite_host::clock::Clock;
use ferrite_io::engine::{Completion, Engine, Token};
use ferrite_io::reactor::Wait;
use ferrite_xen::abi::{MAX_DIRECT_SEGMENTS, RawSegment};
use ferrite_xen::hypervisor::CopySegment;
use ferrite_xen::ring::{BackRing, RingViolation};

use super::connection::Connection;
use super::inflight::{QueueTable, Unanswered};
use super::request::Segment;
use crate::counters::QueueCounters;
use crate::path::{Admitted, FRONTEND_TOKENS, RequestPath, Ticket};
use crate::trace::TraceRing;

mod answer;
mod copy;
mod diary;
mod prompt;
pub(crate) mod storm;
mod take;
#[cfg(test)]
pub(crate) mod tests;
mod wait;

use diary::Diary;
use prompt::Promptness;
use wait::{Events, Waiting};

/// Completion of the event channel's descriptor becoming readable.
const EVENT: Token = FRONTEND_TOKENS;
/// Failure to read an event.
const DRAIN: Token = EVENT + 1;
/// Failure to let the next event through.
const REARM: Token = EVENT + 2;

/// The parts that a queue is made of.
pub struct Parts {
    /// The connection, shared with the other queues.
    pub connection: Arc<Connection>,
    /// The queue's index, from 0.
    pub index: usize,
    /// The ring, attached to the guest's pages.
    pub ring: BackRing,
    /// The storage engine, built over the connection's arena.
    pub engine: Box<dyn Engine>,
    /// The queue's part of the in-flight table, started or resumed.
    pub table: QueueTable,
    /// Requests that a predecessor left unanswered, oldest first.
    pub replay: Vec<Unanswered>,
    /// Where trace records are written.
    pub trace: TraceRing,
}

/// How a queue ended.
#[derive(Debug)]
pub enum QueueEnd {
    /// The connection was stopped, and every request is answered.
    Stopped,
    /// The engine or the event channel failed; the disk cannot continue.
    Failed(io::Error),
}

/// An event that a running queue reports.
#[derive(Debug)]
pub enum QueueEvent {
    /// The frontend broke the ring; this queue takes no more requests.
    Violation(RingViolation),
}

/// A queue, owned by the thread that serves it.
pub struct Queue {
    connection: Arc<Connection>,
    clock: Arc<dyn Clock>,
    index: usize,
    /// Declared before the ring, so that it is dropped first: the path's operations wait on the
    /// descriptor of the ring's link.
    path: RequestPath,
    ring: BackRing,
    table: QueueTable,
    diary: Diary,
    /// Checked segments of each entry. Each has room for a direct request, or for the largest
    /// indirect request that the entry has had. So a deep ring costs no memory for large requests
    /// that the pool would not hold anyway.
    segments_of: Box<[Vec<Segment>]>,

    replay: VecDeque<Unanswered>,
    /// The frontend broke the ring: no more requests are taken from it.
    broken: bool,
    /// Up to this index of the ring, requests were counted as waiting for the disk's limit.
    limited_to: u32,
    events: Events,
    waiting: Waiting,
    prompt: Promptness,

    /// Requests of this sweep whose indirect pages must be fetched.
    fetch: Vec<take::Fetch>,
    /// Requests of this sweep whose data must be copied from the guest.
    copy_in: Vec<Ticket>,
    /// Reads whose data must be copied to the guest.
    copy_out: Vec<Ticket>,
    /// Requests that are answered in the same batch.
    answered: Vec<Ticket>,

    // Scratch space, kept to be used again.
    segments: Vec<CopySegment>,
    raw_segments: Vec<RawSegment>,
}

impl Queue {
    /// Makes a queue that runs on the calling thread.
    ///
    /// # Errors
    /// Fails if the engine does not accept the disk's files.
    pub fn new(parts: Parts) -> io::Result<Queue> {
        let Parts { connection, index, ring, engine, table, replay, trace } = parts;
        let shared = connection.shared.clone();
        let mut path = RequestPath::new(shared.clone(), index, engine, ring.entries())?;
        // The guest keeps a request's data until it is answered.
        path.client_keeps_data();
        replay.iter().for_each(|unanswered| path.set_aside(unanswered.entry));
        let max_segments = usize::from(connection.max_indirect_segments).max(MAX_DIRECT_SEGMENTS);
        let entries = ring.entries() as usize;
        let segments_of = (0..entries).map(|_| Vec::with_capacity(MAX_DIRECT_SEGMENTS)).collect();
        Ok(Queue {
            clock: shared.device.clock.clone(),
            waiting: Waiting::new(&shared.tuning, &shared.processors),
            connection,
            index,
            path,
            diary: Diary::new(trace, ring.said_consumed(), shared.device.clock.now_ns()),
            ring,
            table,
            segments_of,
            replay: replay.into(),
            broken: false,
            limited_to: 0,
            events: Events::default(),
            prompt: Promptness::default(),
            fetch: Vec::with_capacity(entries),
            copy_in: Vec::with_capacity(entries),
            copy_out: Vec::with_capacity(entries),
            answered: Vec::with_capacity(entries),
            segments: Vec::new(),
            raw_segments: Vec::with_capacity(max_segments),
        })
    }

    /// Serves the ring until the connection is stopped. `report` is called with events for the
    /// control thread.
    pub fn run(mut self, report: impl Fn(QueueEvent)) -> QueueEnd {
        match self.serve(&report) {
            Ok(()) => QueueEnd::Stopped,
            Err(e) => {
                self.abandon();
                QueueEnd::Failed(e)
            }
        }
    }

    fn serve(&mut self, report: &impl Fn(QueueEvent)) -> io::Result<()> {
        // A predecessor may have published responses and died before it notified the guest.
        self.ring.link().notify()?;
        let mut completions = Vec::new();
        loop {
            self.path.follow()?;
            if self.path.is_throttled() {
                self.path.leave_if_idle();
            } else if let Err(violation) = self.take() {
                self.broken = true;
                report(QueueEvent::Violation(violation));
            }
            if let Some(Admitted::Fetch(ticket)) = self.path.retry() {
                self.copy_in.push(ticket);
            }
            self.fetch_indirect();
            self.path.order_buffers();
            self.copy_in();
            let started = self.path.start();
            self.answer()?;
            self.start_alone();
            if self.path.may_end() {
                return Ok(());
            }
            // A task needs no hand-over: it begins in the turn itself.
            let handed = started && self.path.has_transfers();
            let looks = handed && self.prompt.looks();
            let begins = started && !handed;
            let wait = if looks || begins { Wait::No } else { self.next_wait(handed)? };
            self.path.turn(wait, &mut completions)?;
            let now_ns = self.clock.now_ns();
            let slept = wait != Wait::No;
            if slept {
                let event = completions.iter().any(|completion| completion.token == EVENT);
                self.diary.slept(event, now_ns);
            }
            self.woke(slept, completions.is_empty(), now_ns);
            self.path.throttle(now_ns);
            for completion in completions.drain(..) {
                self.dispatch(completion, now_ns)?;
            }
            if looks {
                self.prompt.seen(!self.path.has_transfers());
            }
            self.path.collect_tasks(now_ns);
            self.copy_out();
            self.answer()?;
        }
    }

    fn dispatch(&mut self, completion: Completion, now_ns: u64) -> io::Result<()> {
        match completion.token {
            EVENT => {
                completion.result()?;
                self.event_came()
            }
            DRAIN => self.event_not_read(completion),
            REARM => completion.result().map(drop),
            _ => self.path.completed(completion, now_ns),
        }
    }

    /// Starts the request that must run alone, if its turn has come.
    fn start_alone(&mut self) {
        if let Some(ticket) = self.path.take_alone() {
            let ok = self.copy_in_one(&ticket);
            self.path.alone_fetched(ticket, ok, self.clock.now_ns());
        }
    }

    fn counters(&self) -> QueueCounters<'_> {
        self.path.counters()
    }

    /// Ends a failed queue, whose guest gets no more answers. The table still holds the unanswered
    /// requests, so a successor can carry them out.
    fn abandon(&mut self) {
        let lists = [&mut self.copy_in, &mut self.copy_out, &mut self.answered];
        let fetched = self.fetch.drain(..).map(|fetch| fetch.ticket);
        lists.into_iter().flat_map(|list| list.drain(..)).chain(fetched).for_each(|ticket| {
            ticket.park();
        });
        self.path.abandon();
    }
}
