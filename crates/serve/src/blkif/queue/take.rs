//! Steps 2 and 3: takes requests off the ring into private memory, and checks them.

use ferrite_io::arena::Span;
use ferrite_io::pool::{Buf, SLAB_BYTES};
use ferrite_xen::abi::{
    IndirectOp, MAX_INDIRECT_PAGES, Message, PlainOp, RawSegment, Request, SEGMENT_BYTES,
    SEGMENTS_PER_INDIRECT_PAGE,
};
use ferrite_xen::hypervisor::{CopySegment, Direction, GrantRef, PAGE_SIZE};
use ferrite_xen::ring::RingViolation;

use super::Queue;
use crate::blkif::request::{
    IndirectHead, Limits, Refusal, check_data, check_direct, check_indirect_head, reserve_bytes,
};
use crate::log_limit::limited;
use crate::path::limit::Counted;
use crate::path::work::{Outcome, Work};
use crate::path::{Admitted, Ticket};
use crate::trace::Noticed;

/// Most requests that are taken in one sweep. Storage may do a whole sweep inside the call that
/// hands it over (data in memory already), and no request is answered before that call ends. With
/// all of a ring in one sweep, guest and backend take turns, and each sleeps while the other works.
/// In smaller sweeps both work. The hypervisor copies as many segments in one grant copy (blkif.md
/// 4.3), so small sweeps cost little.
const SWEEP: u32 = 16;

/// Most requests of a sweep whose requests are close together and leave gaps. Later requests may
/// fill the gaps: if the batch were cut in the middle, little of it would share an operation. A
/// whole batch needs few operations.
const LONG_SWEEP: u32 = 64;

/// Bytes after which a sweep is long enough, however few its requests are. Storage that finishes a
/// whole sweep at once then has the next sweep's data in the same, warm buffers.
const SWEEP_BYTES: usize = SLAB_BYTES;

/// An indirect request whose segments are still in the guest.
pub(super) struct Fetch {
    pub(super) ticket: Ticket,
    head: IndirectHead,
    pages: [GrantRef; MAX_INDIRECT_PAGES],
}

impl Queue {
    /// Takes requests until the ring is empty, the sweep is full, or the path holds back: no entry,
    /// no buffer, a closed gate. Other requests stay on the ring: that is the backpressure.
    pub(super) fn take(&mut self) -> Result<(), RingViolation> {
        let is_empty =
            || self.replay.is_empty() && self.ring.unconsumed().is_ok_and(|there| there == 0);
        if self.path.has_company() && is_empty() {
            self.path.stay_out();
            return Ok(());
        }
        if !self.path.enter() {
            return Ok(());
        }
        let limits = self.connection.limits(self.path.disk());
        let now_ns = self.clock.now_ns();
        self.look_at_guest(now_ns);
        self.take_replayed(&limits, now_ns);
        let may_take = self.replay.is_empty() && !self.broken && !self.connection.shared.stopping();
        let taken = if may_take { self.take_from_ring(&limits, now_ns) } else { Ok(()) };
        // This is needed after a violation, too: no event may ever wake this queue again, and other
        // queues would wait for it.
        self.path.leave_if_idle();
        taken
    }

    fn take_from_ring(&mut self, limits: &Limits, now_ns: u64) -> Result<(), RingViolation> {
        let there = self.ring.unconsumed()?;
        let before = self.ring.req_cons();
        let (mut taken, mut limit, mut bytes) = (0, SWEEP, 0);
        let is_limited = self.path.is_limited();
        let noticed = std::mem::take(&mut self.diary.noticed);
        while taken < there && !self.path.is_holding_back() {
            if taken == limit || bytes >= SWEEP_BYTES {
                if taken == LONG_SWEEP || !self.path.leave_gaps() {
                    break;
                }
                (limit, bytes) = ((taken + SWEEP).min(LONG_SWEEP), 0);
            }
            let Some(entry) = self.path.next_entry() else { break };
            let slot = self.ring.peek();
            #[cfg(test)]
            super::tests::slot_was_read();
            let request = Request::decode(self.connection.protocol, &slot);
            if is_limited && !self.has_tokens(&request.message, there - taken, now_ns) {
                break;
            }
            let Ok(buf) = self.reserve(&request.message, limits) else { break };
            bytes += buf.as_ref().map_or(0, |buf| buf.span().len());
            let Some(ticket) = self.path.take(request.id, request.response_op, buf, now_ns) else {
                break;
            };
            self.path.record(&ticket).noticed = noticed;
            self.table.take(entry, self.ring.req_cons(), &slot);
            self.ring.consume();
            self.check(ticket, &request, limits);
            if is_limited {
                // The next request may begin only if this one, with its true size, leaves tokens.
                self.fetch_indirect();
            }
            taken += 1;
        }
        if self.ring.req_cons() != before {
            self.events.storm.taken();
            self.counters().sweeps.add(1);
        }
        Ok(())
    }

    /// Whether the next request on the ring may begin by the disk's limits. If not, it and those
    /// behind it, `there` in all, wait on the ring. The guest may change the slot after this, so
    /// the tokens are taken for what is admitted.
    #[inline]
    fn has_tokens(&mut self, message: &Message, there: u32, now_ns: u64) -> bool {
        let has = self.path.has_tokens(counted(message), now_ns);
        if !has {
            self.count_limited(there);
        }
        has
    }

    /// Counts the requests that begin to wait for the limit.
    #[cold]
    fn count_limited(&mut self, there: u32) {
        let (from, end) = (self.ring.req_cons(), self.ring.req_cons().wrapping_add(there));
        // Requests up to `limited_to` were counted before.
        let begin_to_wait = end.wrapping_sub(self.limited_to).min(end.wrapping_sub(from));
        self.limited_to = end;
        self.path.count_limited(begin_to_wait.into());
    }

    /// Repeats the requests that a predecessor took and did not answer, oldest first, before any
    /// new one.
    fn take_replayed(&mut self, limits: &Limits, now_ns: u64) {
        while let Some(next) = self.replay.front() {
            if self.path.is_holding_back() {
                return;
            }
            let request = Request::decode(self.connection.protocol, &next.slot);
            let Ok(buf) = self.reserve(&request.message, limits) else { return };
            let Some(next) = self.replay.pop_front() else { return };
            // From here on the path is busy until this request is answered.
            self.connection.shared.count_replay();
            let (id, operation) = (request.id, request.response_op);
            let ticket = self.path.take_set_aside(next.entry, id, operation, buf, now_ns);
            self.path.record(&ticket).noticed = Noticed::Replayed;
            match check_indirect_head(&request.message, limits) {
                Some(head) if next.indirect.len() == usize::from(head.nr_segments) => {
                    self.check_segments(ticket, &head, &next.indirect, limits);
                }
                _ => self.check(ticket, &request, limits),
            }
        }
    }

    /// Gets a buffer for the largest data that the request can have, or none if it has no data.
    /// Fails if there is no buffer now.
    fn reserve(&mut self, message: &Message, limits: &Limits) -> Result<Option<Buf>, ()> {
        let data = reserve_bytes(message, limits.max_indirect_segments);
        if data == 0 {
            return Ok(None);
        }
        self.path.buffer(data).map(Some).ok_or(())
    }

    fn check(&mut self, ticket: Ticket, request: &Request, limits: &Limits) {
        if matches!(request.message, Message::Plain { op: PlainOp::Barrier, .. }) {
            // Earlier requests must be admitted before a barrier.
            self.fetch_indirect();
        }
        if let (Message::Indirect { pages, .. }, Some(head)) =
            (&request.message, check_indirect_head(&request.message, limits))
        {
            self.fetch.push(Fetch { ticket, head, pages: *pages });
            return;
        }
        let segments = &mut self.segments_of[ticket.entry()];
        match check_direct(&request.message, limits, segments) {
            Ok(work) => self.admit(ticket, work),
            Err(refusal) => self.refuse(ticket, refusal),
        }
    }

    /// Fetches the indirect pages of the whole sweep in one call. It fetches only the bytes that
    /// hold descriptors. They go into the requests' own buffers, where the data overwrite them
    /// later.
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
        let limits = self.connection.limits(self.path.disk());
        let mut copied = 0;
        for Fetch { ticket, head, pages: _ } in fetches {
            let pages = usize::from(head.nr_segments).div_ceil(SEGMENTS_PER_INDIRECT_PAGE);
            let ok = called && self.all_copied(&ticket, copied, copied + pages);
            copied += pages;
            if !ok {
                self.path.finish(ticket, Outcome::Failed);
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
        let arena = self.connection.shared.pool.arena().clone();
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
        let segments = &mut self.segments_of[ticket.entry()];
        match check_data(head.action, head.sector, raw.iter().copied(), limits, segments) {
            Ok(work) => self.admit(ticket, work),
            Err(refusal) => self.refuse(ticket, refusal),
        }
    }

    /// Passes a checked request to its next stage.
    fn admit(&mut self, ticket: Ticket, work: Work) {
        let segments = self.segments_of[ticket.entry()].len();
        self.path.record(&ticket).segments = segments as u16;
        match self.path.admit(ticket, work) {
            Admitted::Taken => {}
            Admitted::Fetch(ticket) => self.copy_in.push(ticket),
        }
    }

    fn refuse(&mut self, ticket: Ticket, refusal: Refusal) {
        limited!(
            warn,
            self.connection.shared.device.log_limits.requests,
            self.clock.now_ns(),
            queue = self.index,
            "request {:#x} of the guest refused: {refusal}",
            self.path.record(&ticket).id
        );
        self.path.finish(ticket, refusal.outcome());
    }

    /// Returns the whole buffer of a request that has data.
    fn buffer(&mut self, ticket: &Ticket) -> Span {
        match self.path.whole_buffer(ticket) {
            Some(buffer) => buffer,
            None => unreachable!("only requests with a reserved buffer get here"),
        }
    }
}

/// How the limits of a disk count a request.
fn counted(message: &Message) -> Counted {
    match message {
        Message::Plain { op: PlainOp::Read, .. }
        | Message::Indirect { op: IndirectOp::Read, .. } => Counted::Read,
        Message::Plain { op: PlainOp::Flush, nr_segments: 0, .. } => Counted::Not,
        // It is refused.
        Message::Indirect { op: IndirectOp::Other(_), .. } | Message::Unknown => Counted::Not,
        Message::Plain { .. } | Message::Indirect { .. } | Message::Discard { .. } => {
            Counted::Write
        }
    }
}

/// Returns where the descriptors of an indirect request go: page number and span in its buffer.
fn descriptor_spans(buf: Span, head: &IndirectHead) -> impl Iterator<Item = (usize, Span)> {
    let count = usize::from(head.nr_segments);
    (0..count.div_ceil(SEGMENTS_PER_INDIRECT_PAGE)).map(move |page| {
        let here = (count - page * SEGMENTS_PER_INDIRECT_PAGE).min(SEGMENTS_PER_INDIRECT_PAGE);
        (page, buf.slice(page * PAGE_SIZE, here * SEGMENT_BYTES))
    })
}
