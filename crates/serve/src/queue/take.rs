//! Steps 2 and 3: off the ring, into private memory, checked.

use ferrite_io::arena::Span;
use ferrite_xen::abi::{
    MAX_INDIRECT_PAGES, Message, PlainOp, RawSegment, Request, SECTOR_BYTES, SEGMENT_BYTES,
    SEGMENTS_PER_INDIRECT_PAGE, STATUS_ERROR,
};
use ferrite_xen::hypervisor::{CopySegment, Direction, GrantRef, PAGE_SIZE};
use ferrite_xen::ring::RingViolation;

use super::Queue;
use super::copy::Layout;
use super::flight::Ticket;
use crate::log_limit::limited;
use crate::request::{
    Action, IndirectHead, Limits, Refusal, Work, check_data, check_direct, check_indirect_head,
    reserve_bytes,
};

/// Most requests that are taken in one sweep. Storage may do a whole sweep inside the call that
/// hands it over (what is in memory already), and nobody is answered before that ends: with all
/// of a ring in one sweep, guest and backend take turns, and each sleeps while the other works.
/// In smaller ones both work. As many segments are one grant copy of the hypervisor's (blkif.md
/// 4.3), so little is lost by it.
const SWEEP: u32 = 16;

/// Most requests of a sweep of requests that are close together and leave gaps. What comes after them
/// may belong there: cut in the middle, little of a batch would share an operation. With it whole,
/// there are few operations to wait for.
const LONG_SWEEP: u32 = 64;

/// An indirect request whose segments are still in the guest.
pub(super) struct Fetch {
    pub(super) ticket: Ticket,
    head: IndirectHead,
    pages: [GrantRef; MAX_INDIRECT_PAGES],
}

impl Queue {
    /// Takes requests until the ring is empty, the sweep is full, or something holds it back: no
    /// entry, no buffer, a closed gate. What is not taken stays on the ring: that is the
    /// backpressure.
    pub(super) fn take(&mut self) -> Result<(), RingViolation> {
        self.stalled = false;
        if self.is_holding_back() {
            return Ok(());
        }
        if !self.connection.gate.enter(self.index) {
            self.stalled = true;
            self.leave_if_idle();
            return Ok(());
        }
        let limits = self.connection.limits();
        let now_ns = self.clock.now_ns();
        self.take_replayed(&limits, now_ns);
        let may_take = self.replay.is_empty() && !self.broken && !self.connection.stopping();
        let taken = if may_take { self.take_from_ring(&limits, now_ns) } else { Ok(()) };
        // After a violation, too: nothing else may ever wake this queue, and others would wait for it.
        self.leave_if_idle();
        taken
    }

    fn take_from_ring(&mut self, limits: &Limits, now_ns: u64) -> Result<(), RingViolation> {
        let there = self.ring.unconsumed()?;
        let before = self.ring.req_cons();
        let (mut taken, mut limit) = (0, SWEEP);
        while taken < there && !self.is_holding_back() {
            if taken == limit {
                if limit == LONG_SWEEP || !self.neighbours.leave_gaps() {
                    break;
                }
                limit += SWEEP;
            }
            let Some(entry) = self.flights.peek_free() else { break };
            let slot = self.ring.peek();
            #[cfg(test)]
            super::tests::slot_was_read();
            let request = Request::decode(self.connection.protocol, &slot);
            let Ok(buf) = self.reserve(&request.message) else { break };
            let Some(ticket) = self.flights.take(request.id, request.response_op, now_ns) else {
                break;
            };
            self.flights.get(&ticket).buf = buf;
            self.table.take(entry, self.ring.req_cons(), &slot);
            self.ring.consume();
            self.check(ticket, &request, limits);
            taken += 1;
        }
        if self.ring.req_cons() != before {
            self.waiting.storm.taken();
            self.counters().sweeps.add(1);
        }
        Ok(())
    }

    /// Does again what a predecessor took and did not answer, oldest first, before anything new.
    fn take_replayed(&mut self, limits: &Limits, now_ns: u64) {
        while let Some(next) = self.replay.front() {
            if self.is_holding_back() {
                return;
            }
            let request = Request::decode(self.connection.protocol, &next.slot);
            let Ok(buf) = self.reserve(&request.message) else { return };
            let Some(next) = self.replay.pop_front() else { return };
            let ticket =
                self.flights.take_reserved(next.entry, request.id, request.response_op, now_ns);
            self.flights.get(&ticket).buf = buf;
            match check_indirect_head(&request.message, limits) {
                Some(head) if next.indirect.len() == usize::from(head.nr_segments) => {
                    self.check_segments(ticket, &head, &next.indirect, limits);
                }
                _ => self.check(ticket, &request, limits),
            }
        }
    }

    /// A buffer for the largest data that the request can have; none if it has none.
    fn reserve(&mut self, message: &Message) -> Result<Option<ferrite_io::pool::Buf>, ()> {
        let data = reserve_bytes(message, self.connection.max_indirect_segments);
        if data == 0 {
            return Ok(None);
        }
        // A range that begins or ends inside a block of the medium is read whole.
        let slack = if self.block_bytes > SECTOR_BYTES as usize { self.block_bytes } else { 0 };
        self.warm_up();
        match self.pool.alloc(data + slack) {
            Some(buf) => Ok(Some(buf)),
            None => {
                self.stalled = true;
                Err(())
            }
        }
    }

    fn check(&mut self, ticket: Ticket, request: &Request, limits: &Limits) {
        if matches!(request.message, Message::Plain { op: PlainOp::Barrier, .. }) {
            // What came before it has to be admitted before it, too.
            self.fetch_indirect();
        }
        if let (Message::Indirect { pages, .. }, Some(head)) =
            (&request.message, check_indirect_head(&request.message, limits))
        {
            self.fetch.push(Fetch { ticket, head, pages: *pages });
            return;
        }
        let segments = &mut self.flights.get(&ticket).segments;
        match check_direct(&request.message, limits, segments) {
            Ok(work) => self.admit(ticket, work),
            Err(refusal) => self.refuse(ticket, refusal),
        }
    }

    /// Fetches the indirect pages of the whole sweep in one call: only the bytes that hold
    /// descriptors, into the requests' own buffers, which their data will overwrite.
    pub(super) fn fetch_indirect(&mut self) {
        if self.fetch.is_empty() {
            return;
        }
        let fetches = std::mem::take(&mut self.fetch);
        self.segments.clear();
        for fetch in &fetches {
            for (page, span) in descriptor_spans(self.buffer(&fetch.ticket), &fetch.head) {
                self.segments.push(CopySegment::new(span, fetch.pages[page], 0));
            }
        }
        let called = self.copy_segments(Direction::FromGuest);
        let limits = self.connection.limits();
        let mut copied = 0;
        for Fetch { ticket, head, pages: _ } in fetches {
            let pages = usize::from(head.nr_segments).div_ceil(SEGMENTS_PER_INDIRECT_PAGE);
            let ok = called && self.all_copied(&ticket, copied, copied + pages);
            copied += pages;
            if !ok {
                self.finish(ticket, STATUS_ERROR);
                continue;
            }
            let raw = self.read_descriptors(&ticket, &head);
            self.table.add_indirect(ticket.entry() as u32, &raw);
            self.check_segments(ticket, &head, &raw, &limits);
            self.raw_segments = raw;
        }
    }

    fn read_descriptors(&mut self, ticket: &Ticket, head: &IndirectHead) -> Vec<RawSegment> {
        let mut raw = std::mem::take(&mut self.raw_segments);
        raw.clear();
        let arena = self.connection.pool.arena().clone();
        for (_, span) in descriptor_spans(self.buffer(ticket), head) {
            let mut bytes = [0; 32 * SEGMENT_BYTES];
            for at in (0..span.len()).step_by(bytes.len()) {
                let len = bytes.len().min(span.len() - at);
                let here = &mut bytes[..len];
                arena.copy_out(span.slice(at, here.len()), here);
                let (segments, _) = here.as_chunks();
                raw.extend(segments.iter().map(RawSegment::decode));
            }
        }
        raw
    }

    fn check_segments(
        &mut self,
        ticket: Ticket,
        head: &IndirectHead,
        raw: &[RawSegment],
        limits: &Limits,
    ) {
        let segments = &mut self.flights.get(&ticket).segments;
        match check_data(head.action, head.sector, raw.iter().copied(), limits, segments) {
            Ok(work) => self.admit(ticket, work),
            Err(refusal) => self.refuse(ticket, refusal),
        }
    }

    /// Sends a checked request to its next stage.
    fn admit(&mut self, ticket: Ticket, work: Work) {
        if matches!(work.action, Action::Flush | Action::FlushThenWrite) {
            self.flushes = self.flushes.wrapping_add(1);
        }
        let flight = self.flights.get(&ticket);
        flight.flushes = self.flushes;
        flight.work = work;
        flight.layout = Layout::of(flight, self.block_bytes);
        flight.record.sector = work.sector;
        flight.record.bytes = u32::try_from(work.bytes()).unwrap_or(u32::MAX);
        flight.record.segments = flight.segments.len() as u16;
        let below_block = flight.layout.is_some_and(|layout| !layout.is_whole());
        if work.action != Action::Read && self.connection.device.flush_has_failed() {
            self.finish(ticket, STATUS_ERROR);
        } else if work.action == Action::Barrier || (work.action.takes_data() && below_block) {
            // Its data is copied when its turn has come; until then nothing else is taken.
            self.alone.push_back(ticket);
        } else {
            if self.connection.tuning.merge
                && let (Action::Read | Action::Write, Some(layout)) = (work.action, &flight.layout)
            {
                let write = work.action == Action::Write;
                self.neighbours.add(ticket.entry() as u16, write, layout);
            }
            if work.action.takes_data() {
                self.copy_in.push(ticket);
            } else {
                self.ready.push(ticket);
            }
        }
    }

    fn refuse(&mut self, ticket: Ticket, refusal: Refusal) {
        limited!(
            warn,
            self.connection.device.log_limits.requests,
            self.clock.now_ns(),
            queue = self.index,
            "request {:#x} of the guest refused: {refusal}",
            self.flights.get(&ticket).id
        );
        self.finish(ticket, refusal.status());
    }

    /// Tells the gate that nothing is under way here, if so, and whoever waits for that.
    pub(super) fn leave_if_idle(&mut self) {
        if self.working() == 0
            && !self.alone_running
            && let Some(holder) = self.connection.gate.leave(self.index)
        {
            self.connection.wake(holder);
        }
    }

    /// The whole buffer of a request that has data.
    pub(super) fn buffer(&mut self, ticket: &Ticket) -> Span {
        match &self.flights.get(ticket).buf {
            Some(buf) => buf.span(),
            None => unreachable!("only requests with a reserved buffer get here"),
        }
    }
}

/// Where the descriptors of an indirect request go: page number and place in its buffer.
fn descriptor_spans(buf: Span, head: &IndirectHead) -> impl Iterator<Item = (usize, Span)> {
    let count = usize::from(head.nr_segments);
    (0..count.div_ceil(SEGMENTS_PER_INDIRECT_PAGE)).map(move |page| {
        let here = (count - page * SEGMENTS_PER_INDIRECT_PAGE).min(SEGMENTS_PER_INDIRECT_PAGE);
        (page, buf.slice(page * PAGE_SIZE, here * SEGMENT_BYTES))
    })
}
