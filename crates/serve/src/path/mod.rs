//! A disk's request path: checked requests to storage and back, whoever the frontend is.
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
//! 6. Whatever has an [`outcome`](RequestPath::outcome) is in
//!    [`finished`](RequestPath::finished): the client is answered, then the ticket
//!    [released](RequestPath::release).
//!
//! A request in hand is a [`Ticket`]. All lists are taken out whole by swapping, so a request
//! costs no allocation.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use ferrite_disk::{Allocation, Disk};
use ferrite_io::arena::Span;
use ferrite_io::clock::Clock;
use ferrite_io::engine::{Completion, Engine, Op, Token};
use ferrite_io::pool::Buf;
use ferrite_io::reactor::{Reactor, Wait};
use ferrite_io::scratch::Scratch;

use crate::counters::{Account, QueueCounters};
use crate::trace::Record;

mod admission;
mod alone;
mod buffers;
pub mod device;
mod discards;
mod flight;
pub mod full;
pub mod gate;
mod layout;
mod merge;
mod neighbours;
pub mod parking;
mod pieces;
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
use device::Seat;
use discards::Discards;
use flight::Flights;
use merge::Placed;
use neighbours::Neighbours;
use parking::Medium;
use pieces::Pieces;
use save::Saver;
use shared::Shared;
use slow::{Statuses, TaskResults};
use space::Space;
use throttle::Hold;
use work::Outcome;

/// From here on tokens of operations are the frontend's.
pub const FRONTEND_TOKENS: Token = 1 << 32;
/// Completion of the path's waker becoming readable. Those of pieces are below `u16::MAX`.
const WAKE: Token = FRONTEND_TOKENS - 1;

/// See the module's text.
pub struct RequestPath {
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    index: usize,
    account: Account,
    /// Before the seat, so that it is dropped first: it ends when its last operation has.
    reactor: Reactor,
    seat: Seat,
    medium: Medium,
    buffers: Buffers,
    flights: Flights,
    hold: Hold,
    /// Flushes that were admitted; wraps.
    flushes: u32,
    /// Requests of this sweep that could share an operation.
    neighbours: Neighbours,
    /// Requests that storage can begin.
    ready: Vec<Ticket>,
    /// Those of them whose place on the medium is known.
    pieces: Pieces,
    placed: Vec<Placed>,
    /// Operations for data so far; wraps.
    operations: u32,
    alone: Alone,
    discards: Discards,
    space: Space,
    /// The client has the data of a request until that is answered.
    refetches: bool,
    saver: Saver,
    tasks: TaskResults,
    /// What requests for it have found.
    statuses: Statuses,
    /// Reads that are done and whose data the client does not have yet.
    read: Vec<Ticket>,
    /// Requests whose outcome is final.
    finished: Vec<Ticket>,
}

/// Where a request's data are.
#[derive(Clone, Copy, Debug)]
pub enum Data {
    /// In the pool's arena.
    At(Span),
    /// Nowhere: all that was read are zeros.
    Zeros,
}

impl RequestPath {
    /// A path ready to run on the calling thread, with room for so many requests in flight.
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
        let seat = shared.device.join(shared.side(), shared.waker(index).clone())?;
        let account = Account::new(shared.counters.page(seat.index())?);
        let space = Space::new(&shared.device, account.page());
        let scratch = Scratch::new(shared.pool.arena().clone(), shared.pool.scratch(index));
        let medium = Medium::load(shared.device.disk()?, &mut reactor, scratch)?;
        let saver = Saver::default();
        saver.remember(&medium);
        let fd = shared.waker(index).fd().as_raw_fd();
        reactor.push(WAKE, Op::Readable { fd });
        Ok(RequestPath {
            clock: shared.device.clock.clone(),
            buffers: Buffers::new(shared.pool.queue(index)),
            shared,
            index,
            account,
            reactor,
            seat,
            medium,
            flights: Flights::new(entries),
            hold: Hold::default(),
            flushes: 0,
            neighbours: Neighbours::default(),
            ready: Vec::with_capacity(entries as usize),
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

    /// The disk that the path has now.
    pub fn disk(&self) -> &Disk {
        &self.medium.disk
    }

    /// The engine, for operations of the frontend's, whose tokens begin at [`FRONTEND_TOKENS`].
    pub fn reactor(&mut self) -> &mut Reactor {
        &mut self.reactor
    }

    /// Hands over what was started, and waits as told. What has completed since is added to `out`.
    ///
    /// # Errors
    /// The engine's; the path cannot go on.
    pub fn turn(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        self.account.settle_all();
        self.reactor.turn(wait, out)
    }

    /// An operation of this path has completed.
    ///
    /// # Errors
    /// The waker cannot be waited for; the path cannot go on.
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

    /// Fixes a request's outcome; it is among the [finished](Self::finished) from now on.
    pub fn finish(&mut self, ticket: Ticket, outcome: Outcome) {
        self.flights.get(&ticket).outcome = outcome;
        self.finished.push(ticket);
    }

    /// Exchanges `into`, which is empty, for the reads whose data the client is to get.
    pub fn read(&mut self, into: &mut Vec<Ticket>) {
        std::mem::swap(&mut self.read, into);
    }

    /// The client has the data of a read, or could not be given them.
    pub fn delivered(&mut self, ticket: Ticket, ok: bool, now_ns: u64) {
        self.flights.get(&ticket).record.stages.copied_out_ns = now_ns;
        if ok {
            self.finished.push(ticket);
        } else {
            self.finish(ticket, Outcome::Failed);
        }
    }

    /// Exchanges `into`, which is empty, for the requests whose client is to be answered.
    pub fn finished(&mut self, into: &mut Vec<Ticket>) {
        std::mem::swap(&mut self.finished, into);
    }

    /// Whether any request is [finished](Self::finished).
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Ends the duty to answer: the client has its answer, and the [record](Self::record) says when.
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

    /// As [`release`](Self::release), for data that the client gets later: the buffer is the caller's
    /// until it is [freed](Self::free). The path rests, and others get the gate, without it.
    pub fn release_keeping(&mut self, ticket: Ticket) -> Option<Buf> {
        let buf = self.flights.get(&ticket).buf.take();
        self.count(&ticket);
        self.flights.release(ticket);
        buf
    }

    /// A request is answered.
    fn count(&mut self, ticket: &Ticket) {
        let flight = self.flights.see(ticket);
        if flight.waits {
            self.space.answered(ticket.entry());
            // The next one is tried now, whatever this thread is about to do.
            self.shared.waker(self.index).wake();
        }
        // It is of places, and moves nothing.
        let moves = flight.work.action != work::Action::Status;
        let sectors = if moves { flight.work.sectors } else { 0 };
        match flight.outcome {
            Outcome::Done => self.account.done(flight.kind, &flight.record.stages, sectors),
            _ => self.account.failed(flight.kind, &flight.record.stages),
        }
    }

    /// Takes back a buffer that no request has.
    pub fn free(&mut self, buf: Buf) {
        self.buffers.free(buf);
    }

    /// Whether a request has failed as there was no space for it.
    pub fn lacked_space(&self, ticket: &Ticket) -> bool {
        self.flights.see(ticket).no_space
    }

    /// What a request for [`Action::Status`](work::Action::Status) has found; once.
    pub fn status(&mut self, ticket: &Ticket) -> Vec<Allocation> {
        self.statuses.borrow_mut().remove(&(ticket.entry() as u16)).unwrap_or_default()
    }

    /// How a request has ended.
    pub fn outcome(&self, ticket: &Ticket) -> Outcome {
        self.flights.see(ticket).outcome
    }

    /// What the trace is to say of a request. The frontend fills in what only it knows.
    pub fn record(&mut self, ticket: &Ticket) -> &mut Record {
        &mut self.flights.get(ticket).record
    }

    /// Where an admitted request's data are, or belong; none for one without.
    pub fn data(&self, ticket: &Ticket) -> Option<Data> {
        let flight = self.flights.see(ticket);
        let layout = flight.layout?;
        Some(if flight.zeros { Data::Zeros } else { Data::At(layout.data) })
    }

    /// A request's whole buffer, before it is admitted.
    pub fn whole_buffer(&self, ticket: &Ticket) -> Option<Span> {
        self.flights.see(ticket).buf.as_ref().map(|buf| buf.span())
    }

    /// Whether data is on its way to or from storage, apart from that of tasks.
    pub fn has_transfers(&self) -> bool {
        self.pieces.are_in_flight()
    }

    /// Whether there is something to do at once.
    pub fn is_pending(&self) -> bool {
        !self.finished.is_empty() || !self.read.is_empty() || !self.ready.is_empty()
    }

    /// Whether a task lets all else go first: no reason to poll for work, or to sleep.
    pub fn has_yielded(&self) -> bool {
        self.discards.are_running() && self.reactor.has_ready()
    }

    /// Whether something that will wake this thread keeps it from taking requests.
    pub fn is_held_back(&self) -> bool {
        self.hold.stalled || self.is_holding_back()
    }

    /// Whether nothing is in flight. Metadata on its way must not meet that of the next who writes
    /// some, so a save is in flight, too.
    pub fn is_idle(&self) -> bool {
        self.flights.in_use() == 0 && !self.saver.is_under_way()
    }

    /// Whether the path has been told to stop, and nothing keeps it: nothing is in flight. One that
    /// rests has nothing begun. What it has set aside it keeps for the parker's end, unless a successor
    /// is to do it: who unplugs a disk needs the answers, as its guest cannot remove it before. What
    /// waits for space is left to a successor in any case, if nobody has given it up.
    pub fn may_end(&self) -> bool {
        if !self.shared.stopping() {
            return false;
        }
        let leaves = self.medium.is_resting() && self.shared.leaves();
        leaves || self.is_idle() || self.leaves_what_waits()
    }

    /// Whether nothing is in flight but what waits for space, with all that comes after it.
    fn leaves_what_waits(&self) -> bool {
        let behind = self.behind_space();
        let in_use = self.flights.in_use() - self.flights.set_aside();
        behind > 0 && behind == in_use && !self.saver.is_under_way()
    }

    /// Whether memory may be [given back](Self::give_memory_back) after a while: there is some,
    /// and no request needs it.
    pub fn may_cool(&self) -> bool {
        self.buffers.are_warm() && !self.buffers.are_in_use() && self.flights.in_use() == 0
    }

    /// Nothing has been asked for a while.
    pub fn give_memory_back(&mut self) {
        // A save is a task without a request, and has metadata in the scratch memory.
        let unused =
            self.flights.in_use() == 0 && self.reactor.tasks() == 0 && !self.buffers.are_in_use();
        if unused && self.buffers.cool(&mut self.reactor) {
            self.counters().releases.add(1);
        }
    }

    pub(crate) fn counters(&self) -> QueueCounters<'_> {
        self.account.counters()
    }

    /// The path has failed, and its client will not be answered by it.
    pub fn abandon(&mut self) {
        let lists = [&mut self.ready, &mut self.read, &mut self.finished];
        let tickets = lists.into_iter().flat_map(|list| list.drain(..));
        tickets.chain(self.alone.drain()).chain(self.discards.drain()).for_each(|ticket| {
            ticket.park();
        });
    }
}
