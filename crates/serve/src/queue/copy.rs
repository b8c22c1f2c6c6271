//! Steps 4 and 6: data between the guest's frames and the pool, a sweep's worth a call.
//!
//! How the bytes move is the link's matter ([`ferrite_xen::mover`]). But for persistent grants, of
//! which frontends know, a grant is free again as soon as the call returns, and so before the
//! response (blkif.md 2, rule 5).

use ferrite_io::arena::Span;
use ferrite_xen::abi::STATUS_ERROR;
use ferrite_xen::hypervisor::{CopySegment, Direction};

use super::Queue;
use super::flight::{Flight, Ticket};
use crate::log_limit::limited;

/// Where a request's data stands in its buffer: from the offset in the medium's block that it has
/// on the medium, so that the whole blocks around it can be read and written in place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// First byte on the disk of the whole blocks.
    pub(super) offset: u64,
    /// The whole blocks.
    pub(super) blocks: Span,
    /// The request's own bytes.
    pub(super) data: Span,
}

impl Layout {
    /// `None` for a request without a buffer. `block_bytes` is a power of two.
    pub(super) fn of(flight: &Flight, block_bytes: usize) -> Option<Layout> {
        let buf = flight.buf.as_ref()?.span();
        let in_block = block_bytes - 1;
        let (offset, bytes) = (flight.work.offset(), flight.work.bytes() as usize);
        let before = offset as usize & in_block;
        let whole = (before + bytes + in_block) & !in_block;
        Some(Layout {
            offset: offset - before as u64,
            blocks: buf.slice(0, whole),
            data: buf.slice(before, bytes),
        })
    }

    /// Whether the request is of whole blocks only.
    pub(super) fn is_whole(&self) -> bool {
        self.blocks.len() == self.data.len()
    }
}

impl Queue {
    /// Copies the data of all writes of the sweep, and makes them ready for storage.
    pub(super) fn copy_in(&mut self) {
        if self.copy_in.is_empty() {
            return;
        }
        let tickets = std::mem::take(&mut self.copy_in);
        let mut ready = std::mem::take(&mut self.ready);
        self.copy_batch(Direction::FromGuest, tickets, |queue, ticket, ok, now_ns| {
            queue.flights.get(&ticket).record.stages.copied_in_ns = now_ns;
            if ok {
                ready.push(ticket);
            } else {
                queue.finish(ticket, STATUS_ERROR);
            }
        });
        self.ready = ready;
    }

    /// Copies the data of one write whose turn to be alone has come.
    pub(super) fn copy_in_one(&mut self, ticket: Ticket) -> Result<Ticket, Ticket> {
        self.segments.clear();
        self.add_segments(&ticket);
        let ok = self.segments.is_empty()
            || (self.copy_segments(Direction::FromGuest)
                && self.all_copied(&ticket, 0, self.segments.len()));
        self.flights.get(&ticket).record.stages.copied_in_ns = self.clock.now_ns();
        if ok { Ok(ticket) } else { Err(ticket) }
    }

    /// Copies the data of all reads that are done.
    pub(super) fn copy_out(&mut self) {
        if self.copy_out.is_empty() {
            return;
        }
        let tickets = std::mem::take(&mut self.copy_out);
        self.copy_batch(Direction::ToGuest, tickets, |queue, ticket, ok, now_ns| {
            queue.flights.get(&ticket).record.stages.copied_out_ns = now_ns;
            if ok {
                queue.finished.push(ticket);
            } else {
                queue.finish(ticket, STATUS_ERROR);
            }
        });
    }

    /// Copies for all `tickets` in one call, then hands each on with its success. The list goes
    /// back to where it came from, empty.
    fn copy_batch(
        &mut self,
        direction: Direction,
        mut tickets: Vec<Ticket>,
        mut next: impl FnMut(&mut Queue, Ticket, bool, u64),
    ) {
        self.segments.clear();
        for ticket in &tickets {
            self.add_segments(ticket);
        }
        let called = self.copy_segments(direction);
        let now_ns = self.clock.now_ns();
        let mut at = 0;
        for ticket in tickets.drain(..) {
            let end = at + self.flights.get(&ticket).segments.len();
            let ok = called && self.all_copied(&ticket, at, end);
            at = end;
            next(self, ticket, ok, now_ns);
        }
        match direction {
            Direction::FromGuest => self.copy_in = tickets,
            Direction::ToGuest => self.copy_out = tickets,
        }
    }

    fn add_segments(&mut self, ticket: &Ticket) {
        let pool = &self.connection.pool;
        let flight = self.flights.get(ticket);
        let Some(layout) = flight.layout else { return };
        let mut at = 0;
        self.segments.extend(flight.segments.iter().map(|segment| {
            let bytes = segment.bytes();
            let local = match flight.zeros {
                true => pool.zero_page().slice(0, bytes),
                false => layout.data.slice(at, bytes),
            };
            at += bytes;
            CopySegment::new(local, segment.gref(), segment.offset())
        }));
    }

    /// Carries out what is in `segments`. `false`: the call itself failed.
    pub(super) fn copy_segments(&mut self, direction: Direction) -> bool {
        let arena = self.connection.pool.arena();
        match self.ring.link().copy(arena, direction, &mut self.segments) {
            Ok(()) => true,
            Err(e) => {
                limited!(
                    warn,
                    self.connection.device.log_limits.requests,
                    self.clock.now_ns(),
                    queue = self.index,
                    "grant copy failed: {e}"
                );
                false
            }
        }
    }

    /// Whether every one of these pieces was copied; one that was not fails its whole request
    /// (XSA-361, XSA-365).
    pub(super) fn all_copied(&mut self, ticket: &Ticket, from: usize, to: usize) -> bool {
        let Some(bad) = self.segments[from..to].iter().find(|s| !s.is_ok()).copied() else {
            return true;
        };
        limited!(
            warn,
            self.connection.device.log_limits.requests,
            self.clock.now_ns(),
            queue = self.index,
            "request {:#x} of the guest failed: its grant {} was refused with status {}",
            self.flights.get(ticket).id,
            bad.gref().0,
            bad.status
        );
        false
    }
}
