//! Steps 4 and 6: copies data between the guest's frames and the pool, one sweep per call.
//!
//! The ring's link decides how the bytes move ([`ferrite_xen::mover`]). Except for persistent
//! grants, which the frontend knows about, a grant is free again when the call returns, and so
//! before the response (blkif.md 2, rule 5).

use ferrite_xen::hypervisor::{CopySegment, Direction};

use super::Queue;
use crate::log_limit::limited;
use crate::path::{Data, Ticket};

impl Queue {
    /// Copies the data of all writes of the sweep, and makes them ready for storage.
    pub(super) fn copy_in(&mut self) {
        if self.copy_in.is_empty() {
            return;
        }
        let mut tickets = std::mem::take(&mut self.copy_in);
        self.copy_batch(Direction::FromGuest, &mut tickets);
        self.copy_in = tickets;
    }

    /// Copies the data of one write whose turn to run alone has come. Returns `false` if that
    /// failed.
    pub(super) fn copy_in_one(&mut self, ticket: &Ticket) -> bool {
        self.segments.clear();
        self.add_segments(ticket);
        self.segments.is_empty()
            || (self.copy_segments(Direction::FromGuest)
                && self.all_copied(ticket, 0, self.segments.len()))
    }

    /// Copies the data of all reads that are done to the guest.
    pub(super) fn copy_out(&mut self) {
        let mut tickets = std::mem::take(&mut self.copy_out);
        self.path.read(&mut tickets);
        if !tickets.is_empty() {
            self.copy_batch(Direction::ToGuest, &mut tickets);
        }
        self.copy_out = tickets;
    }

    /// Copies the data of all `tickets` in one call, then passes each ticket on with its own
    /// result.
    fn copy_batch(&mut self, direction: Direction, tickets: &mut Vec<Ticket>) {
        self.segments.clear();
        for ticket in tickets.iter() {
            self.add_segments(ticket);
        }
        let called = self.copy_segments(direction);
        let now_ns = self.clock.now_ns();
        let mut at = 0;
        for ticket in tickets.drain(..) {
            let end = at + self.segments_of[ticket.entry()].len();
            let ok = called && self.all_copied(&ticket, at, end);
            at = end;
            match direction {
                Direction::FromGuest => self.path.fetched(ticket, ok, now_ns),
                Direction::ToGuest => self.path.delivered(ticket, ok, now_ns),
            }
        }
    }

    fn add_segments(&mut self, ticket: &Ticket) {
        let Some(data) = self.path.data(ticket) else { return };
        let pool = &self.connection.shared.pool;
        let mut at = 0;
        self.segments.extend(self.segments_of[ticket.entry()].iter().map(|segment| {
            let bytes = segment.bytes();
            let local = match data {
                Data::Zeros => pool.zero_page().slice(0, bytes),
                Data::At(data) => data.slice(at, bytes),
            };
            at += bytes;
            CopySegment::new(local, segment.gref(), segment.offset())
        }));
    }

    /// Carries out the copies in `segments`. Returns `false` if the call itself failed.
    pub(super) fn copy_segments(&mut self, direction: Direction) -> bool {
        let arena = self.connection.shared.pool.arena();
        match self.ring.link().copy(arena, direction, &mut self.segments) {
            Ok(()) => true,
            Err(e) => {
                limited!(
                    warn,
                    self.connection.shared.device.log_limits.requests,
                    self.clock.now_ns(),
                    queue = self.index,
                    "grant copy failed: {e}"
                );
                false
            }
        }
    }

    /// Returns whether each of these segments was copied. One failed segment fails its whole
    /// request (XSA-361, XSA-365).
    pub(super) fn all_copied(&mut self, ticket: &Ticket, from: usize, to: usize) -> bool {
        let Some(bad) = self.segments[from..to].iter().find(|s| !s.is_ok()).copied() else {
            return true;
        };
        limited!(
            warn,
            self.connection.shared.device.log_limits.requests,
            self.clock.now_ns(),
            queue = self.index,
            "request {:#x} of the guest failed: its grant {} was refused with status {}",
            self.path.record(ticket).id,
            bad.gref().0,
            bad.status
        );
        false
    }
}
