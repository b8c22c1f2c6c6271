//! One ring, one thread: requests from the ring to storage and back.
//!
//! [`Queue::run`] is one loop; a turn of it is one sweep of ARCHITECTURE.md, "A request's way":
//! take (`take.rs`), copy in (`copy.rs`), submit and complete (`storage.rs`), copy out
//! (`copy.rs`), answer (`answer.rs`). Whatever has steps (flush, discard, barriers, ranges that
//! lie in several places) is a task (`slow.rs`) on the same thread.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

use ferrite_disk::Port;
use ferrite_io::clock::Clock;
use ferrite_io::engine::{Completion, Engine, Op, Token};
use ferrite_io::pool::QueuePool;
use ferrite_io::reactor::{Reactor, Wait};
use ferrite_io::scratch::Scratch;
use ferrite_xen::abi::RawSegment;
use ferrite_xen::hypervisor::CopySegment;
use ferrite_xen::ring::{BackRing, RingViolation};

use crate::connection::Connection;
use crate::counters::QueueCounters;
use crate::inflight::{QueueTable, Unanswered};
use crate::trace::TraceRing;

mod answer;
mod copy;
mod flight;
mod merge;
mod neighbours;
mod pieces;
mod slow;
mod storage;
mod storm;
mod take;
#[cfg(test)]
pub(crate) mod tests;
mod throttle;
mod wait;

use flight::{Flights, Ticket};
use merge::Placed;
use neighbours::Neighbours;
use pieces::Pieces;
use throttle::Throttled;
use wait::Waiting;

/// Completion of the event channel's descriptor becoming readable.
const EVENT: Token = 1 << 32;
/// Completion of the queue's waker becoming readable.
const WAKE: Token = EVENT + 1;
/// Completion of the event's being read.
const DRAIN: Token = EVENT + 2;
/// Failure to let the next event through.
const REARM: Token = EVENT + 3;

/// Everything that a queue is made of.
pub struct Parts {
    /// Shared with the other queues.
    pub connection: Arc<Connection>,
    /// Which one this is.
    pub index: usize,
    /// The ring, attached.
    pub ring: BackRing,
    /// The storage engine, built over the connection's arena.
    pub engine: Box<dyn Engine>,
    /// Its part of the in-flight table, started or resumed.
    pub table: QueueTable,
    /// What a predecessor left undone, oldest first.
    pub replay: Vec<Unanswered>,
    /// Where trace records go.
    pub trace: TraceRing,
}

/// How a queue ended.
#[derive(Debug)]
pub enum QueueEnd {
    /// As asked, with everything answered.
    Stopped,
    /// The engine or the event channel failed; the disk cannot go on.
    Failed(io::Error),
}

/// What a queue reports while it runs.
#[derive(Debug)]
pub enum QueueEvent {
    /// The frontend broke the ring; this queue takes nothing more.
    Violation(RingViolation),
}

/// An entry, and how its task ended.
type TaskResult = (u16, io::Result<()>);

/// A queue, on the thread that serves it.
pub struct Queue {
    connection: Arc<Connection>,
    clock: Arc<dyn Clock>,
    index: usize,
    /// Before the ring, so that it is dropped first: it waits on the descriptor of the ring's link.
    reactor: Reactor,
    ring: BackRing,
    port: Port,
    pool: QueuePool,
    flights: Flights,
    table: QueueTable,
    trace: TraceRing,
    /// The disk's.
    block_bytes: usize,

    replay: VecDeque<Unanswered>,
    /// The frontend broke the ring: nothing more is taken from it.
    broken: bool,
    /// Requests are there and cannot be taken: no buffer, or the gate is closed.
    stalled: bool,
    /// An operation waits for the event channel, or reads from it.
    event_armed: bool,
    /// It is one that reads, and was not handed over yet.
    drain_queued: bool,
    waiting: Waiting,
    throttled: Option<Throttled>,
    /// Flushes taken off the ring; wraps.
    flushes: u32,

    /// Requests of this sweep whose indirect pages are to be fetched.
    fetch: Vec<take::Fetch>,
    /// Those of this sweep that could share an operation.
    neighbours: Neighbours,
    /// Requests of this sweep whose data is to be copied from the guest.
    copy_in: Vec<Ticket>,
    /// Requests that storage can begin.
    ready: Vec<Ticket>,
    /// Those of them whose place on the medium is known.
    pieces: Pieces,
    placed: Vec<Placed>,
    /// Reads that are done and whose data is to be copied to the guest.
    copy_out: Vec<Ticket>,
    /// Requests whose status is final.
    finished: Vec<Ticket>,
    /// Requests that need the whole disk for themselves.
    alone: VecDeque<Ticket>,
    /// The first of them has been begun.
    alone_running: bool,
    /// Discards that have not begun.
    discards: VecDeque<Ticket>,
    /// Those that have.
    discarding: usize,
    /// A flush that no request asked for is under way.
    saving: Rc<Cell<bool>>,
    /// Tasks that have ended.
    task_results: Rc<RefCell<Vec<TaskResult>>>,

    // Scratch space, kept to be used again.
    segments: Vec<CopySegment>,
    raw_segments: Vec<RawSegment>,
    answered: Vec<Ticket>,
}

impl Queue {
    /// A queue ready to run on the calling thread.
    ///
    /// # Errors
    /// The engine does not take the disk's files.
    pub fn new(parts: Parts) -> io::Result<Queue> {
        let Parts { connection, index, ring, engine, table, replay, trace } = parts;
        let mut reactor = Reactor::new(engine);
        let files = connection.device.disk.files();
        let files: Vec<_> =
            files.into_iter().map(|f| reactor.add_file(f)).collect::<io::Result<_>>()?;
        let scratch = connection.pool.scratch(index);
        let scratch = Scratch::new(connection.pool.arena().clone(), scratch);
        let port = Port { io: reactor.io(), files: files.into(), scratch };
        let max_segments = usize::from(connection.max_indirect_segments).max(11);
        let mut flights = Flights::new(ring.entries());
        for unanswered in &replay {
            flights.reserve(unanswered.entry);
        }
        let entries = ring.entries() as usize;
        Ok(Queue {
            clock: connection.device.clock.clone(),
            pool: connection.pool.queue(index),
            waiting: Waiting::new(&connection.tuning),
            throttled: None,
            block_bytes: connection.device.disk.block_bytes() as usize,
            connection,
            index,
            ring,
            reactor,
            port,
            flights,
            table,
            trace,
            replay: replay.into(),
            broken: false,
            stalled: false,
            event_armed: false,
            drain_queued: false,
            flushes: 0,
            fetch: Vec::with_capacity(entries),
            neighbours: Neighbours::default(),
            copy_in: Vec::with_capacity(entries),
            ready: Vec::with_capacity(entries),
            pieces: Pieces::new(entries as u32),
            placed: Vec::with_capacity(entries),
            copy_out: Vec::with_capacity(entries),
            finished: Vec::with_capacity(entries),
            alone: VecDeque::new(),
            alone_running: false,
            discards: VecDeque::new(),
            discarding: 0,
            saving: Rc::default(),
            task_results: Rc::default(),
            segments: Vec::new(),
            raw_segments: Vec::with_capacity(max_segments),
            answered: Vec::with_capacity(entries),
        })
    }

    /// Serves the ring until the connection is stopped. `report` hears of what the control
    /// thread should know meanwhile.
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
        let wake_fd = self.connection.waker(self.index).fd().as_raw_fd();
        self.reactor.push(WAKE, Op::Readable { fd: wake_fd });
        // A predecessor may have published responses and died before it said so.
        self.ring.link().notify()?;
        let mut completions = Vec::new();
        loop {
            if self.is_throttled() {
                self.leave_if_idle();
            } else if let Err(violation) = self.take() {
                self.broken = true;
                report(QueueEvent::Violation(violation));
            }
            self.fetch_indirect();
            self.order_buffers();
            self.copy_in();
            let started = !self.ready.is_empty();
            self.start_ready();
            self.answer()?;
            self.start_alone();
            // Metadata on its way must not meet that of the next who writes some.
            let idle = self.flights.in_use() == 0 && !self.saving.get();
            if self.connection.stopping() && idle {
                return Ok(());
            }
            // What was started may be done by the time the kernel has taken it; asking the guest
            // for an event before would have it send one for nothing.
            let wait = if started { Wait::No } else { self.next_wait()? };
            self.reactor.turn(wait, &mut completions)?;
            let now_ns = self.clock.now_ns();
            self.woke(wait != Wait::No, completions.is_empty(), now_ns);
            self.throttle(now_ns);
            for completion in completions.drain(..) {
                self.dispatch(completion, now_ns)?;
            }
            self.collect_task_results(now_ns);
            self.copy_out();
            self.answer()?;
        }
    }

    fn dispatch(&mut self, completion: Completion, now_ns: u64) -> io::Result<()> {
        match completion.token {
            EVENT => {
                completion.result()?;
                self.event_came()?;
            }
            DRAIN => self.event_drained(completion.result())?,
            REARM => {
                completion.result()?;
            }
            WAKE => {
                completion.result()?;
                let waker = self.connection.waker(self.index);
                waker.clear();
                let fd = waker.fd().as_raw_fd();
                self.reactor.push(WAKE, Op::Readable { fd });
            }
            piece => {
                self.transfer_completed(piece as u16, completion, now_ns);
            }
        }
        Ok(())
    }

    fn work_is_pending(&self) -> bool {
        !self.finished.is_empty() || !self.copy_out.is_empty() || !self.ready.is_empty()
    }

    fn counters(&self) -> &QueueCounters {
        self.connection.counters.queue(self.index)
    }

    /// Nothing is taken off the ring while a request needs the disk for itself.
    fn is_holding_back(&self) -> bool {
        self.alone_running || !self.alone.is_empty()
    }

    /// Requests that storage or this thread works on: all but those that wait to be alone.
    fn working(&self) -> usize {
        self.flights.in_use() - self.alone.len() - self.replay.len()
    }

    /// The queue has failed and its guest will not be answered; the table still says for what, so
    /// that a successor can do it.
    fn abandon(&mut self) {
        let lists = [&mut self.copy_in, &mut self.ready, &mut self.copy_out, &mut self.finished];
        for ticket in lists.into_iter().flat_map(|l| l.drain(..)) {
            ticket.park();
        }
        self.alone.drain(..).chain(self.discards.drain(..)).for_each(|ticket| {
            ticket.park();
        });
        self.fetch.drain(..).for_each(|fetch| {
            fetch.ticket.park();
        });
        self.answered.drain(..).for_each(|ticket| {
            ticket.park();
        });
    }
}
