//! A disk's request path: checked requests to storage and back, for any frontend.
//!
//! A [`RequestPath`] belongs to one thread: an engine, buffers, and the requests in flight. Its
//! frontend is a loop on that thread (for guests of Xen: [`blkif`](crate::blkif)). A turn of it:
//!
//! 1. [`follow`](RequestPath::follow) and [`enter`](RequestPath::enter); then for each request of its client a
//!    [`buffer`](RequestPath::buffer), a [`take`](RequestPath::take) and an
//!    [`admit`](RequestPath::admit); then [`leave_if_idle`](RequestPath::leave_if_idle). And a
//!    [`retry`](RequestPath::retry).
//! 2. [`order_buffers`](RequestPath::order_buffers); data that a request brings are put where
//!    [`data`](RequestPath::data) says, and it is [`fetched`](RequestPath::fetched).
//! 3. [`start`](RequestPath::start), and [`take_alone`](RequestPath::take_alone).
//! 4. [`turn`](RequestPath::turn): the one system call that submits and waits. Each completion
//!    below [`FRONTEND_TOKENS`] goes to [`completed`](RequestPath::completed), and all of them are
//!    followed by [`collect_tasks`](RequestPath::collect_tasks).
//! 5. Reads are [`read`](RequestPath::read): their data go to the client, and they are
//!    [`delivered`](RequestPath::delivered).
//! 6. A request with an [`outcome`](RequestPath::outcome) is in
//!    [`finished`](RequestPath::finished): the client is answered, then the ticket
//!    [released](RequestPath::release).
//!
//! A request in hand is a [`Ticket`]. All lists are taken out whole by swapping, so a request
//! costs no allocation.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use ferrite_disk::{Allocation, Disk};
use ferrite_host::clock::Clock;
use ferrite_io::arena::Span;
use ferrite_io::engine::{Completion, Engine, Op, Token};
use ferrite_io::pool::Buf;
use ferrite_io::reactor::{Reactor, Wait};
use ferrite_io::scratch::Scratch;

use crate::counters::{Account, QueueCounters};
use crate::trace::Record;

mod admission;
mod alone;
mod buffers;
pub(crate) mod client;
pub mod device;
mod discards;
mod flight;
pub mod full;
pub mod gate;
mod layout;
pub mod limit;
mod merge;
mod neighbours;
pub mod parking;
mod pieces;
mod ranges;
mod save;
pub mod shared;
mod slow;
mod space;
mod storage;
mod throttle;
mod turns;
pub mod work;

pub use admission::{Admitted, largest_request};
pub use flight::Ticket;

use alone::Alone;
use buffers::Buffers;
use device::Member;
use discards::Discards;
use flight::Flights;
use limit::Limited;
use merge::Placed;
use neighbours::Neighbours;
use parking::Medium;
use pieces::Pieces;
use save::Saver;
use shared::Shared;
pub(crate) use slow::QUESTIONS;
use slow::{Statuses, TaskResults};
use space::Space;
use throttle::Hold;
use work::Outcome;

/// The first token of the frontend's operations.
pub const FRONTEND_TOKENS: Token = 1 << 32;
/// The token of the path's waker. Tokens of pieces are below `u16::MAX`.
const WAKE: Token = FRONTEND_TOKENS - 1;

/// A disk's request path of one thread, see the module's text.
pub struct RequestPath {
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    index: usize,
    account: Account,
    /// It is declared before the member, so that it is dropped first: its drop waits for its last
    /// operation.
    reactor: Reactor,
    member: Member,
    medium: Medium,
    buffers: Buffers,
    flights: Flights,
    hold: Hold,
    limited: Limited,
    /// Number of flushes that were admitted; wraps.
    flushes: u32,
    /// Requests of this sweep that could share an operation.
    neighbours: Neighbours,
    /// Requests that storage can begin.
    ready: Vec<Ticket>,
    /// Requests that wait for the [range](ranges) that they write.
    unlocked: Vec<Ticket>,
    /// Pieces of requests whose place on the medium is known.
    pieces: Pieces,
    placed: Vec<Placed>,
    /// Number of data operations so far; wraps.
    operations: u32,
    alone: Alone,
    discards: Discards,
    space: Space,
    /// Whether the client keeps the data of a request until it is answered.
    refetches: bool,
    saver: Saver,
    tasks: TaskResults,
    /// The results of requests for the status of a range.
    statuses: Statuses,
    /// Reads that are done and whose data the client does not have yet.
    read: Vec<Ticket>,
    /// Requests whose outcome is final.
    finished: Vec<Ticket>,
}

/// The place of a request's data.
#[derive(Clone, Copy, Debug)]
pub enum Data {
    /// The data are in the pool's arena.
    At(Span),
    /// The data are all zeros, and are in no buffer.
    Zeros,
}

impl RequestPath {
    /// A path ready to run on the calling thread, with room for `entries` requests in flight.
    ///
    /// # Errors
    /// The engine does not take the disk's files.
    pub fn new(
        shared: Arc<Shared>,
        index: usize,
        engine: Box<dyn Engine>,
        entries: u32,
    ) -> io::Result<RequestPath> {
        let mut reactor = Reactor::new(engine);
        let one_queue = shared.device.disk()?.one_queue();
        let member = shared.device.join(shared.side(), shared.waker(index).clone(), one_queue)?;
        let account = Account::new(shared.counters.page(member.index())?);
        let space = Space::new(&shared.device, account.page());
        let queue = shared.queue(index);
        let scratch = Scratch::new(shared.pool.arena().clone(), shared.pool.scratch(queue));
        let medium = Medium::load(shared.device.disk()?, &mut reactor, scratch)?;
        let saver = Saver::default();
        saver.remember(&medium);
        let fd = shared.waker(index).fd().as_raw_fd();
        reactor.push(WAKE, Op::Readable { fd });
        Ok(RequestPath {
            clock: shared.device.clock.clone(),
            buffers: Buffers::new(shared.pool.queue(queue)),
            shared,
            index,
            account,
            reactor,
            member,
            medium,
            flights: Flights::new(entries),
            hold: Hold::default(),
            limited: Limited::default(),
            flushes: 0,
            neighbours: Neighbours::default(),
            ready: Vec::with_capacity(entries as usize),
            unlocked: Vec::new(),
            pieces: Pieces::new(entries),
            placed: Vec::with_capacity(entries as usize),
            operations: 0,
            alone: Alone::default(),
            discards: Discards::default(),
            space,
            refetches: false,
            saver,
            tasks: TaskResults::default(),
            statuses: Statuses::default(),
            read: Vec::with_capacity(entries as usize),
            finished: Vec::with_capacity(entries as usize),
        })
    }

    /// The current disk of the path.
    pub fn disk(&self) -> &Disk {
        &self.medium.disk
    }

    /// The reactor, for operations of the frontend. Their tokens begin at [`FRONTEND_TOKENS`].
    pub fn reactor(&mut self) -> &mut Reactor {
        &mut self.reactor
    }

    /// Submits operations, and waits according to `wait`. Completions are added to `out`.
    ///
    /// # Errors
    /// Errors of the engine. The path cannot go on.
    pub fn turn(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        self.account.settle_all();
        self.reactor.turn(wait, out)
    }

    /// Handles the completion of one of this path's operations.
    ///
    /// # Errors
    /// The waker cannot be waited for. The path cannot go on.
    pub fn completed(&mut self, completion: Completion, now_ns: u64) -> io::Result<()> {
        if completion.token == WAKE {
            completion.result()?;
            let waker = self.shared.waker(self.index);
            waker.clear();
            let fd = waker.fd().as_raw_fd();
            self.reactor.push(WAKE, Op::Readable { fd });
        } else {
            self.transfer_completed(completion.token as u16, completion, now_ns);
        }
        Ok(())
    }

    /// Sets a request's outcome, and adds it to the [finished](Self::finished) requests.
    pub fn finish(&mut self, ticket: Ticket, outcome: Outcome) {
        self.flights.get(&ticket).outcome = outcome;
        self.finished.push(ticket);
    }

    /// Swaps `into`, which is empty, with the list of reads whose data the client is to get.
    pub fn read(&mut self, into: &mut Vec<Ticket>) {
        std::mem::swap(&mut self.read, into);
    }

    /// Ends a read whose data were delivered to the client, or could not be (`ok`).
    pub fn delivered(&mut self, ticket: Ticket, ok: bool, now_ns: u64) {
        self.flights.get(&ticket).record.stages.copied_out_ns = now_ns;
        if ok {
            self.finished.push(ticket);
        } else {
            self.finish(ticket, Outcome::Failed);
        }
    }

    /// Swaps `into`, which is empty, with the list of requests whose client is to be answered.
    pub fn finished(&mut self, into: &mut Vec<Ticket>) {
        std::mem::swap(&mut self.finished, into);
    }

    /// Whether there are [finished](Self::finished) requests.
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Frees a request's entry after its client was answered. The time is in its
    /// [record](Self::record).
    pub fn release(&mut self, ticket: Ticket) {
        let flight = self.flights.get(&ticket);
        if let Some(buf) = flight.buf.take() {
            let stages = &flight.record.stages;
            if self.hold.short {
                self.shared.pool.grow(stages.submitted_ns, stages.completed_ns);
            }
            self.buffers.free(buf);
        }
        self.count(&ticket);
        self.flights.release(ticket);
    }

    /// As [`release`](Self::release), for data that the client gets later. The caller keeps the
    /// buffer until it is [freed](Self::free). The path can rest, and others can get the gate
    /// meanwhile.
    pub fn release_keeping(&mut self, ticket: Ticket) -> Option<Buf> {
        let buf = self.flights.get(&ticket).buf.take();
        self.count(&ticket);
        self.flights.release(ticket);
        buf
    }

    /// Counts a request that was answered.
    fn count(&mut self, ticket: &Ticket) {
        let flight = self.flights.see(ticket);
        if flight.waits {
            self.space.answered(ticket.entry());
            // The next request that waits for space is tried now, whatever this thread is about to
            // do.
            self.shared.waker(self.index).wake();
        }
        // A status request names a range, but moves no data.
        let moves = flight.work.action != work::Action::Status;
        let sectors = if moves { flight.work.sectors } else { 0 };
        match flight.outcome {
            Outcome::Done => self.account.done(flight.kind, &flight.record.stages, sectors),
            _ => self.account.failed(flight.kind, &flight.record.stages),
        }
    }

    /// Frees a buffer that belongs to no request.
    pub fn free(&mut self, buf: Buf) {
        self.buffers.free(buf);
    }

    /// Whether a request has failed for want of space.
    pub fn lacked_space(&self, ticket: &Ticket) -> bool {
        self.flights.see(ticket).no_space
    }

    /// The result of a request for [`Action::Status`](work::Action::Status). It is returned once.
    pub fn status(&mut self, ticket: &Ticket) -> Vec<Allocation> {
        self.statuses.borrow_mut().remove(&(ticket.entry() as u16)).unwrap_or_default()
    }

    /// The outcome of a request.
    pub fn outcome(&self, ticket: &Ticket) -> Outcome {
        self.flights.see(ticket).outcome
    }

    /// The trace record of a request. The frontend adds its own values.
    pub fn record(&mut self, ticket: &Ticket) -> &mut Record {
        &mut self.flights.get(ticket).record
    }

    /// The place of an admitted request's data. `None`: it has none.
    pub fn data(&self, ticket: &Ticket) -> Option<Data> {
        let flight = self.flights.see(ticket);
        let layout = flight.layout?;
        Some(if flight.zeros { Data::Zeros } else { Data::At(layout.data) })
    }

    /// A request's whole buffer, before it is admitted.
    pub fn whole_buffer(&self, ticket: &Ticket) -> Option<Span> {
        self.flights.see(ticket).buf.as_ref().map(|buf| buf.span())
    }

    /// Whether data are on their way to or from storage, except for those of tasks.
    pub fn has_transfers(&self) -> bool {
        self.pieces.are_in_flight()
    }

    /// Whether there is something to do at once.
    pub fn is_pending(&self) -> bool {
        !self.finished.is_empty() || !self.read.is_empty() || !self.ready.is_empty()
    }

    /// Whether a task has yielded: then there is no reason to poll for work or to sleep.
    pub fn has_yielded(&self) -> bool {
        self.discards.are_running() && self.reactor.has_ready()
    }

    /// Whether something that will wake this thread keeps it from taking requests.
    pub fn is_held_back(&self) -> bool {
        self.hold.stalled || self.is_holding_back()
    }

    /// Whether nothing is in flight. A save counts as in flight: its metadata must not meet those
    /// of the next writer.
    pub fn is_idle(&self) -> bool {
        self.flights.in_use() == 0 && !self.saver.is_under_way()
    }

    /// Whether the path may end: it was told to stop, and nothing is in flight.
    ///
    /// A resting path has begun nothing. It keeps entries that were set aside until the parker is
    /// done, unless a successor is to do them: before a disk can be unplugged, its guest needs the
    /// answers. Requests that wait for space are left to a successor in any case, unless they were
    /// given up.
    pub fn may_end(&self) -> bool {
        if !self.shared.stopping() {
            return false;
        }
        let leaves = self.medium.is_resting() && self.shared.leaves();
        leaves || self.is_idle() || self.leaves_what_waits()
    }

    /// Whether nothing is in flight except for requests that wait for space, and those after them.
    fn leaves_what_waits(&self) -> bool {
        let behind = self.behind_space();
        let in_use = self.flights.in_use() - self.flights.set_aside();
        behind > 0 && behind == in_use && !self.saver.is_under_way()
    }

    /// Whether memory may be [given back](Self::give_memory_back) after a while: there is some, and
    /// no request needs it.
    pub fn may_cool(&self) -> bool {
        self.buffers.are_warm() && !self.buffers.are_in_use() && self.flights.in_use() == 0
    }

    /// Gives memory back, after a while without requests.
    pub fn give_memory_back(&mut self) {
        // A save is a task without a request, and has metadata in the scratch memory.
        let tasks_rest = match self.reactor.has_remotes() {
            true => !self.saver.is_under_way(),
            false => self.reactor.tasks() == 0,
        };
        let unused = self.flights.in_use() == 0 && tasks_rest && !self.buffers.are_in_use();
        if unused && self.buffers.cool(&mut self.reactor) {
            self.counters().releases.add(1);
        }
    }

    pub(crate) fn counters(&self) -> QueueCounters<'_> {
        self.account.counters()
    }

    /// Drops all requests of a path that has failed. It will not answer its client.
    pub fn abandon(&mut self) {
        let lists = [&mut self.ready, &mut self.unlocked, &mut self.read, &mut self.finished];
        let tickets = lists.into_iter().flat_map(|list| list.drain(..));
        tickets.chain(self.alone.drain()).chain(self.discards.drain()).for_each(|ticket| {
            ticket.park();
        });
    }
}
