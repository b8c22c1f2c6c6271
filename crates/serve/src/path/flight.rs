//! Requests in flight: a fixed table, and tickets that cannot be lost.

use std::io;

use ferrite_disk::Mark;
use ferrite_io::pool::Buf;

use super::layout::Layout;
use super::ranges::LockId;
use super::work::{Action, Outcome, Work};
use crate::counters::Kind;
use crate::trace::Record;

/// The right and the obligation to answer one request. It is passed by value. Dropping it is a bug,
/// and panics where debug assertions are on.
#[derive(Debug)]
#[must_use = "a request that is not answered hangs its client"]
pub struct Ticket(u16);

impl Ticket {
    /// The ticket's entry, below the path's number of entries.
    pub fn entry(&self) -> usize {
        usize::from(self.0)
    }

    /// Turns the ticket into its number. The engine, a task, or a successor that finds the request
    /// in a table goes on with it.
    pub fn park(self) -> u16 {
        let entry = self.0;
        std::mem::forget(self);
        entry
    }

    /// Turns the number of a [parked](Self::park) ticket back into the ticket.
    pub(super) fn unpark(entry: u16) -> Ticket {
        Ticket(entry)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && !std::thread::panicking() {
            panic!("request in entry {} was dropped without an answer", self.0);
        }
    }
}

/// One request on its way.
pub(super) struct Flight {
    /// The outcome, as far as it is known.
    pub(super) outcome: Outcome,
    /// The work; meaningless for refused requests.
    pub(super) work: Work,
    /// The bytes of its first and of its last sector that are not the request's.
    pub(super) cut: (u16, u16),
    /// The kind under which it is counted.
    pub(super) kind: Kind,
    /// The buffer of its data. `None`: it has no data.
    pub(super) buf: Option<Buf>,
    /// The place of its data in the buffer.
    pub(super) layout: Option<Layout>,
    /// Whether the data that were read are all zeros and not in `buf`.
    pub(super) zeros: bool,
    /// The mark of its operations' places. The disk is told when they have ended, and it is `None`
    /// then.
    pub(super) mapped: Option<Mark>,
    /// Number of pieces of its data.
    pub(super) pieces: usize,
    /// Number of pieces that have not ended.
    pub(super) pieces_left: usize,
    /// The first failure of a piece.
    pub(super) failed: Option<io::Error>,
    /// The lock of the range that it writes, which it has or waits for.
    pub(super) lock: Option<LockId>,
    /// Whether it has failed for want of space.
    pub(super) no_space: bool,
    /// Whether it has waited for space, and is counted as such.
    pub(super) waits: bool,
    /// Number of flushes that were admitted before it.
    pub(super) flushes: u32,
    /// The trace record.
    pub(super) record: Record,
}

impl Flight {
    /// Computes the place of its data in its buffer, if it has one.
    pub(super) fn lay_out(&mut self, block_bytes: usize) {
        let (before, behind) = (usize::from(self.cut.0), usize::from(self.cut.1));
        let offset = self.work.offset() + before as u64;
        let bytes = self.work.bytes() as usize - before - behind;
        let buf = self.buf.as_ref().map(Buf::span);
        self.layout = buf.map(|buf| Layout::of(buf, offset, bytes, block_bytes));
    }
}

/// The table of a path's requests, of a fixed size. With one entry for each ring slot, one is
/// always free for a request that the ring's rules allow.
pub(super) struct Flights {
    flights: Vec<Flight>,
    free: Vec<u16>,
    /// Number of entries that were set aside and not taken yet.
    set_aside: usize,
}

impl Flights {
    /// A table of `entries`, which is below `u16::MAX`.
    pub(super) fn new(entries: u32) -> Flights {
        let flight = || Flight {
            outcome: Outcome::Done,
            work: Work { action: Action::Flush, sector: 0, sectors: 0 },
            cut: (0, 0),
            kind: Kind::Refused,
            buf: None,
            layout: None,
            zeros: false,
            mapped: None,
            pieces: 0,
            pieces_left: 0,
            failed: None,
            lock: None,
            no_space: false,
            waits: false,
            flushes: 0,
            record: Record::default(),
        };
        Flights {
            flights: (0..entries).map(|_| flight()).collect(),
            free: (0..entries as u16).rev().collect(),
            set_aside: 0,
        }
    }

    /// Takes a free entry for a request. `None`: all are in use.
    pub(super) fn take(&mut self, id: u64, operation: u8, now_ns: u64) -> Option<Ticket> {
        let entry = self.free.pop()?;
        self.begin(entry, id, operation, now_ns);
        Some(Ticket(entry))
    }

    /// Sets an entry aside for a request that was in it before a restart.
    pub(super) fn reserve(&mut self, entry: u32) {
        self.free.retain(|&e| u32::from(e) != entry);
        self.set_aside += 1;
    }

    /// Takes a [reserved](Self::reserve) entry for its request.
    pub(super) fn take_reserved(
        &mut self,
        entry: u32,
        id: u64,
        operation: u8,
        now_ns: u64,
    ) -> Ticket {
        self.set_aside -= 1;
        self.begin(entry as u16, id, operation, now_ns);
        Ticket(entry as u16)
    }

    fn begin(&mut self, entry: u16, id: u64, operation: u8, now_ns: u64) {
        let f = &mut self.flights[usize::from(entry)];
        f.outcome = Outcome::Done;
        f.work = Work { action: Action::Flush, sector: 0, sectors: 0 };
        f.cut = (0, 0);
        f.kind = Kind::Refused;
        f.layout = None;
        f.zeros = false;
        f.no_space = false;
        f.waits = false;
        f.pieces = 0;
        f.pieces_left = 0;
        f.record = Record { id, operation, ..Record::default() };
        f.record.stages.taken_ns = now_ns;
    }

    /// The request of a ticket, for reading.
    pub(super) fn see(&self, ticket: &Ticket) -> &Flight {
        &self.flights[ticket.entry()]
    }

    /// The request of a ticket.
    pub(super) fn get(&mut self, ticket: &Ticket) -> &mut Flight {
        &mut self.flights[ticket.entry()]
    }

    /// The request in an entry, for a caller that has a part of it but not the ticket.
    pub(super) fn at(&mut self, entry: u16) -> &mut Flight {
        &mut self.flights[usize::from(entry)]
    }

    /// Frees the entry of a request whose response is published.
    pub(super) fn release(&mut self, ticket: Ticket) {
        self.free.push(ticket.park());
    }

    /// Number of entries that were set aside and not taken yet.
    pub(super) fn set_aside(&self) -> usize {
        self.set_aside
    }

    /// Number of entries in use, including those set aside.
    pub(super) fn in_use(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// The entry that the next [`take`](Self::take) uses.
    pub(super) fn peek_free(&self) -> Option<u32> {
        self.free.last().map(|&e| u32::from(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_go_round() {
        let mut flights = Flights::new(2);
        let a = flights.take(1, 0, 5).unwrap();
        let b = flights.take(2, 0, 5).unwrap();
        assert!(flights.take(3, 0, 5).is_none());
        assert_eq!(flights.get(&b).record.id, 2);
        flights.release(a);
        let c = flights.take(3, 0, 5).unwrap();
        flights.release(b);
        flights.release(c);
        assert_eq!(flights.in_use(), 0);
    }

    #[test]
    #[should_panic(expected = "dropped without an answer")]
    fn a_ticket_cannot_be_dropped() {
        let _ = Flights::new(2).take(1, 0, 5);
    }
}
