//! Turns a client's request into one in flight.

use std::mem;

use ferrite_disk::{Disk, SECTOR_BYTES};
use ferrite_io::pool::{Buf, SLAB_BYTES};

use super::RequestPath;
use super::flight::Ticket;
use super::work::{Action, Outcome, Work};
use crate::counters::Kind;

/// The state of a request that was [admitted](RequestPath::admit).
#[derive(Debug)]
#[must_use = "a request that is not answered hangs its client"]
pub enum Admitted {
    /// The path goes on with it.
    Taken,
    /// The frontend has to put its data into [`data`](RequestPath::data), and call
    /// [`fetched`](RequestPath::fetched).
    Fetch(Ticket),
}

/// Bytes of a buffer besides those of a request: a range that begins or ends inside a block of the
/// medium is read whole.
fn slack(block_bytes: usize) -> usize {
    if block_bytes > SECTOR_BYTES as usize { block_bytes } else { 0 }
}

/// Bytes of the largest request that finds a buffer when no other is in flight.
pub fn largest_request(disk: &Disk) -> usize {
    SLAB_BYTES - slack(disk.block_bytes() as usize)
}

impl RequestPath {
    /// Begins to take requests. `false`: none may be taken now. This thread is woken when that
    /// ends.
    pub fn enter(&mut self) -> bool {
        self.look_at_limits();
        self.hold.stalled = false;
        self.hold.short = false;
        if self.is_holding_back() {
            return false;
        }
        if self.medium.is_resting() {
            self.hold.stalled = true;
            self.leave_if_idle();
            return false;
        }
        if self.buffers.rest_to_borrow(self.pieces.are_in_flight()) {
            self.hold.stalled = true;
            return false;
        }
        if !self.member.enter() {
            self.hold.stalled = true;
            // A busy path tries again when its work ends.
            if self.leave_if_idle() {
                self.member.wish();
            }
            return false;
        }
        true
    }

    /// Whether another guest may have the disk now. Then a path should [stay out](Self::stay_out)
    /// and not [`enter`](Self::enter) without requests: the other guest would have to wait for it.
    pub fn has_company(&self) -> bool {
        !self.member.is_at_home()
    }

    /// Notes that there are no requests to take, so nothing holds this path back.
    pub fn stay_out(&mut self) {
        self.hold.stalled = false;
        self.leave_if_idle();
    }

    /// Sets an entry aside for a request that was in it before a restart.
    pub fn set_aside(&mut self, entry: u32) {
        self.flights.reserve(entry);
    }

    /// The entry that the next [`take`](Self::take) uses. `None`: all are in use.
    pub fn next_entry(&self) -> Option<u32> {
        self.flights.peek_free()
    }

    /// A buffer for this many bytes of data, at most [`largest_request`]. `None`: all are in use.
    /// This thread notices by itself when one is free.
    pub fn buffer(&mut self, data_bytes: usize) -> Option<Buf> {
        let slack = slack(self.medium.block_bytes);
        if self.flights.in_use() == 0 && self.reactor.tasks() == 0 {
            self.buffers.borrow_more(&mut self.reactor);
        }
        let buf = self.buffers.alloc(data_bytes + slack, &mut self.reactor);
        if buf.is_none() {
            self.hold.stalled = true;
            self.hold.short = true;
            self.counters().shortages.add(1);
        }
        buf
    }

    /// Takes an entry for a request, with the [`buffer`](Self::buffer) for its data. `id` and
    /// `operation` are the client's values for the trace. `None`: all entries are in use.
    pub fn take(
        &mut self,
        id: u64,
        operation: u8,
        buf: Option<Buf>,
        now_ns: u64,
    ) -> Option<Ticket> {
        let ticket = self.flights.take(id, operation, now_ns)?;
        self.flights.get(&ticket).buf = buf;
        Some(ticket)
    }

    /// As [`take`](Self::take), for an entry that was [set aside](Self::set_aside).
    pub fn take_set_aside(
        &mut self,
        entry: u32,
        id: u64,
        operation: u8,
        buf: Option<Buf>,
        now_ns: u64,
    ) -> Ticket {
        let ticket = self.flights.take_reserved(entry, id, operation, now_ns);
        self.flights.get(&ticket).buf = buf;
        ticket
    }

    /// Sends a request to its next stage. The caller has checked that its range is on the disk and
    /// that its data fit into its buffer.
    pub fn admit(&mut self, ticket: Ticket, work: Work) -> Admitted {
        self.admit_with(ticket, work, false)
    }

    /// As [`admit`](Self::admit), for a request that came with its data. They are in its buffer
    /// from [`begins_at`](Self::begins_at) on, and are not fetched.
    pub fn admit_filled(&mut self, ticket: Ticket, work: Work) {
        match self.admit_with(ticket, work, true) {
            Admitted::Taken => {}
            Admitted::Fetch(ticket) => self.ready.push(ticket),
        }
    }

    /// Says before a request is admitted that it does without the first `before` and the last
    /// `behind` bytes of its sectors, which are below the size of a sector each.
    pub fn cut(&mut self, ticket: &Ticket, before: usize, behind: usize) {
        self.flights.get(ticket).cut = (before as u16, behind as u16);
    }

    /// The place of a request's first byte in its buffer, if it begins at `offset` on the disk.
    pub fn begins_at(&self, offset: u64) -> usize {
        offset as usize & (self.medium.block_bytes - 1)
    }

    fn admit_with(&mut self, ticket: Ticket, work: Work, filled: bool) -> Admitted {
        if matches!(work.action, Action::Flush | Action::FlushThenWrite) {
            self.flushes = self.flushes.wrapping_add(1);
        }
        let flight = self.flights.get(&ticket);
        flight.flushes = self.flushes;
        flight.work = work;
        flight.kind = Kind::of(work.action);
        self.account.submitted(flight.kind);
        let taken_ns = flight.record.stages.taken_ns;
        flight.lay_out(self.medium.block_bytes);
        flight.record.sector = work.sector;
        flight.record.bytes = u32::try_from(work.bytes()).unwrap_or(u32::MAX);
        if self.limited.is_on() {
            self.take_tokens(&work, taken_ns);
        }
        let changes = !matches!(work.action, Action::Read | Action::Status);
        let device = self.member.device();
        if changes && device.flush_has_failed() || device.is_taken() {
            self.finish(ticket, Outcome::Failed);
            return Admitted::Taken;
        }
        if self.needs_to_be_alone(&ticket) {
            self.wait_to_be_alone(ticket);
            return Admitted::Taken;
        }
        // Neighbours exchange their buffers, which must be empty then.
        if self.shared.tuning.merge
            && !filled
            && let (Action::Read | Action::Write, Some(layout)) =
                (work.action, &self.flights.see(&ticket).layout)
        {
            let write = work.action == Action::Write;
            self.neighbours.add(ticket.entry() as u16, write, layout);
        }
        if work.action.takes_data() {
            return Admitted::Fetch(ticket);
        }
        self.ready.push(ticket);
        Admitted::Taken
    }

    /// Whether a request needs the disk alone.
    pub(super) fn needs_to_be_alone(&self, ticket: &Ticket) -> bool {
        let flight = self.flights.see(ticket);
        let below_block = flight.layout.is_some_and(|layout| !layout.is_whole());
        match flight.work.action {
            Action::Barrier => true,
            // From the first of them on they lock their range instead.
            Action::Write => below_block && !self.member.device().ranges.are_locked(),
            action => action.takes_data() && below_block,
        }
    }

    /// Whether the requests of this sweep are close together and leave gaps. The client's next
    /// requests may fill them.
    pub fn leave_gaps(&self) -> bool {
        self.neighbours.leave_gaps()
    }

    /// Gives neighbours of the sweep neighbouring buffers, before there are data in them.
    pub fn order_buffers(&mut self) {
        self.neighbours.order_buffers(&mut self.flights, self.medium.block_bytes);
    }

    /// Goes on with a request whose data were fetched, or could not be (`ok`).
    pub fn fetched(&mut self, ticket: Ticket, ok: bool, now_ns: u64) {
        self.flights.get(&ticket).record.stages.copied_in_ns = now_ns;
        if ok {
            self.ready.push(ticket);
        } else {
            self.finish(ticket, Outcome::Failed);
        }
    }

    /// Starts all requests that are ready. Returns whether there were any.
    pub fn start(&mut self) -> bool {
        if !self.unlocked.is_empty() {
            self.take_unlocked();
        }
        if self.ready.is_empty() {
            return false;
        }
        let mut ready = mem::take(&mut self.ready);
        self.start_all(&mut ready);
        self.ready = ready;
        true
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ferrite_disk::Disk;
    use ferrite_host::clock::SystemClock;
    use ferrite_io::arena::{Arena, Lender, Span};
    use ferrite_io::engine::{FileId, Transfer};
    use ferrite_io::engines::test_engine;
    use ferrite_io::pool::{Growth, HostMemory, Others, PAGE_BYTES, Pool, SLAB_BYTES, STEP_BYTES};

    use super::RequestPath;
    use crate::counters::{Counters, Kind};
    use crate::path::device::Device;
    use crate::path::gate::Side;
    use crate::path::pieces::Piece;
    use crate::path::shared::Shared;
    use crate::path::work::Action;
    use crate::tuning::Tuning;

    /// A path without a thread.
    pub(in super::super) fn path(device: &Arc<Device>, side: Side) -> RequestPath {
        path_with(device, side, None)
    }

    fn path_with(device: &Arc<Device>, side: Side, lender: Option<Box<dyn Lender>>) -> RequestPath {
        let others = Others { lender, growth: None };
        path_of(device, side, others)
    }

    fn path_of(device: &Arc<Device>, side: Side, others: Others) -> RequestPath {
        let pool = Pool::with_others(1 << 20, 1, Disk::MAX_SCRATCH_BYTES, others).unwrap();
        let (processors, counters) = (Arc::default(), Counters::default());
        let shared =
            Shared::new(device.clone(), pool, 1, Tuning::default(), processors, counters).unwrap();
        let engine = test_engine().open(shared.pool.arena().clone(), 8).unwrap();
        RequestPath::new(Arc::new(shared.on_side(side)), 0, engine, 8).unwrap()
    }

    /// Otherwise it would sleep without noticing its client's requests.
    #[test]
    fn a_path_that_was_refused_for_nothing_is_not_held_back_when_it_stays_out() {
        let device = Arc::new(Device::new(Disk::nothing(), SystemClock::shared()));
        let [mut first, mut second] = [Side::First, Side::Second].map(|side| path(&device, side));
        assert!(first.enter() && !first.has_company());
        assert!(!second.enter() && second.has_company() && second.is_held_back());
        second.stay_out();
        assert!(!second.is_held_back());
        // The turn stays marked as wanted, and no path waits for it for ever.
        assert!(first.has_company());
        first.stay_out();
        assert!(second.enter() && !first.enter());
        second.stay_out();
        assert!(first.enter());
    }

    /// Counts the pages that are requested from it, and has none.
    struct Asked(Arc<AtomicUsize>);

    impl Lender for Asked {
        fn lend(&self, _: &Arena, wanted: Span) {
            self.0.fetch_add(wanted.len() / PAGE_BYTES, Ordering::Relaxed);
        }

        fn take_back(&self, _: &Arena, wanted: Span) {
            self.0.fetch_sub(wanted.len() / PAGE_BYTES, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_request_without_a_buffer_has_the_memory_grow_when_the_one_before_took_long() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostMemory::open(&dir.path().join("memory"), 1 << 30).unwrap();
        let device = Arc::new(Device::new(Disk::nothing(), SystemClock::shared()));
        for (slow, short, grown) in [(true, true, STEP_BYTES), (false, true, 0), (true, false, 0)] {
            let growth = Growth { most_bytes: 1 << 30, host: host.clone() };
            let others = Others { lender: None, growth: Some(growth) };
            let mut path = path_of(&device, Side::First, others);
            assert!(path.enter());
            let buf = path.buffer(SLAB_BYTES);
            let ticket = path.take(1, 0, buf, 0).unwrap();
            path.flights.get(&ticket).kind = Kind::of(Action::Read);
            let stages = &mut path.flights.get(&ticket).record.stages;
            stages.completed_ns = if slow { 20_000_000 } else { 2_000_000 };
            let mut others = Vec::new();
            while short && let Some(buf) = path.buffer(SLAB_BYTES) {
                others.push(buf);
            }
            path.release(ticket);
            others.into_iter().for_each(|buf| path.free(buf));
            assert_eq!(host.claimed_bytes(), grown, "slow {slow}, short {short}");
            path.stay_out();
        }
        assert_eq!(host.claimed_bytes(), 0);
    }

    #[test]
    fn large_requests_have_pages_borrowed_when_nothing_is_in_flight() {
        let asked = Arc::new(AtomicUsize::new(0));
        let pages = || asked.load(Ordering::Relaxed);
        let device = Arc::new(Device::new(Disk::nothing(), SystemClock::shared()));
        let mut path = path_with(&device, Side::First, Some(Box::new(Asked(asked.clone()))));
        assert!(path.enter());
        let large = path.buffer(SLAB_BYTES / 2);
        assert_eq!(pages(), 16, "it does not know yet how large requests are");
        let ticket = path.take(1, 0, large, 0).unwrap();
        path.flights.get(&ticket).kind = Kind::of(Action::Read);
        let small = path.buffer(1).unwrap();
        assert_eq!(pages(), 16, "a request is in flight");
        path.release(ticket);
        let next = path.buffer(1).unwrap();
        assert_eq!(pages(), 16, "a buffer is in use");
        path.free(small);
        path.free(next);
        let next = path.buffer(1).unwrap();
        assert_eq!(pages(), 256);
        path.free(next);
        path.give_memory_back();
        assert_eq!(pages(), 0);
    }

    #[test]
    fn a_path_that_always_has_something_in_flight_rests_once_to_borrow() {
        let asked = Arc::new(AtomicUsize::new(0));
        let pages = || asked.load(Ordering::Relaxed);
        let device = Arc::new(Device::new(Disk::nothing(), SystemClock::shared()));
        let mut path = path_with(&device, Side::First, Some(Box::new(Asked(asked.clone()))));
        let piece = Piece {
            entry: 0,
            transfer: Transfer::Read,
            file: FileId(0),
            offset: 0,
            blocks: path.shared.pool.zero_page(),
            done_bytes: 0,
            retries: 0,
            next: None,
        };
        assert!(path.enter());
        let large = path.buffer(SLAB_BYTES / 4);
        let ticket = path.take(1, 0, large, 0).unwrap();
        path.flights.get(&ticket).kind = Kind::of(Action::Read);
        let in_flight = path.pieces.add(piece);
        assert!(!path.enter() && path.is_held_back());
        path.pieces.remove(in_flight);
        assert!(path.enter(), "the request waits for something else");
        let in_flight = path.pieces.add(piece);
        assert!(path.enter(), "it has rested for so many");
        let larger = path.buffer(SLAB_BYTES / 2).unwrap();
        assert!(!path.enter());
        path.pieces.remove(in_flight);
        path.release(ticket);
        path.free(larger);
        assert!(path.enter());
        assert_eq!(pages(), 16);
        let next = path.buffer(1).unwrap();
        assert_eq!(pages(), 256);
        path.free(next);
    }
}
