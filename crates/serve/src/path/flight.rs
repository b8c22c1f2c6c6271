//! Requests in flight: a fixed table, and tickets that cannot be lost.

use std::io;

use ferrite_disk::Mark;
use ferrite_io::pool::Buf;

use super::layout::Layout;
use super::work::{Action, Outcome, Work};
use crate::counters::Kind;
use crate::trace::Record;

/// The right, and the duty, to answer one request. It is handed on by value; dropping it is a
/// bug, and panics where debug assertions are on.
#[derive(Debug)]
#[must_use = "a request that is not answered hangs its client"]
pub struct Ticket(u16);

impl Ticket {
    /// The entry that it stands for, below the path's number of entries.
    pub fn entry(&self) -> usize {
        usize::from(self.0)
    }

    /// Gives the ticket to someone who will present its number later (the storage engine, a task),
    /// or to nobody: to a successor that finds the request in a table.
    pub fn park(self) -> u16 {
        let entry = self.0;
        std::mem::forget(self);
        entry
    }

    /// The opposite of [`park`](Self::park).
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
    /// The answer, as far as it is known.
    pub(super) outcome: Outcome,
    /// What to do; meaningless for refused requests.
    pub(super) work: Work,
    /// What it is counted as.
    pub(super) kind: Kind,
    /// Where its data is; none for requests without.
    pub(super) buf: Option<Buf>,
    /// How its data lies there.
    pub(super) layout: Option<Layout>,
    /// The data read is all zeros and is not in `buf`.
    pub(super) zeros: bool,
    /// Its data are on their way to or from where the disk has said, and the disk is to hear when that
    /// has ended. None as soon as it has.
    pub(super) mapped: Option<Mark>,
    /// The pieces that its data was cut into.
    pub(super) pieces: usize,
    /// Those that have not ended.
    pub(super) pieces_left: usize,
    /// The first failure among those that have.
    pub(super) failed: Option<io::Error>,
    /// It has failed as there was no space.
    pub(super) no_space: bool,
    /// It has waited for space, and is counted as such.
    pub(super) waits: bool,
    /// Flushes that were admitted before it.
    pub(super) flushes: u32,
    /// Its trace record.
    pub(super) record: Record,
}

impl Flight {
    /// Says how its data lies in its buffer, if it has one.
    pub(super) fn lay_out(&mut self, block_bytes: usize) {
        let (offset, bytes) = (self.work.offset(), self.work.bytes() as usize);
        let buf = self.buf.as_ref().map(Buf::span);
        self.layout = buf.map(|buf| Layout::of(buf, offset, bytes, block_bytes));
    }
}

/// The table of a path, of a fixed size. With one entry a ring slot, one is always free for a request
/// that the ring's rules allow.
pub(super) struct Flights {
    flights: Vec<Flight>,
    free: Vec<u16>,
    /// Entries that were set aside and not taken yet.
    set_aside: usize,
}

impl Flights {
    /// A table of `entries`, below `u16::MAX`.
    pub(super) fn new(entries: u32) -> Flights {
        let flight = || Flight {
            outcome: Outcome::Done,
            work: Work { action: Action::Flush, sector: 0, sectors: 0 },
            kind: Kind::Refused,
            buf: None,
            layout: None,
            zeros: false,
            mapped: None,
            pieces: 0,
            pieces_left: 0,
            failed: None,
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

    /// A free entry, made ready for a request; `None` if all are in use.
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

    /// Makes a [reserved](Self::reserve) entry ready for its request.
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

    /// The request of a ticket, to look at.
    pub(super) fn see(&self, ticket: &Ticket) -> &Flight {
        &self.flights[ticket.entry()]
    }

    /// The request of a ticket.
    pub(super) fn get(&mut self, ticket: &Ticket) -> &mut Flight {
        &mut self.flights[ticket.entry()]
    }

    /// The request in an entry, of which the caller has a part but not the ticket.
    pub(super) fn at(&mut self, entry: u16) -> &mut Flight {
        &mut self.flights[usize::from(entry)]
    }

    /// Ends the duty: the response is published.
    pub(super) fn release(&mut self, ticket: Ticket) {
        self.free.push(ticket.park());
    }

    /// Entries that were set aside and not taken yet.
    pub(super) fn set_aside(&self) -> usize {
        self.set_aside
    }

    /// Entries in use, those set aside included.
    pub(super) fn in_use(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// The number of the entry that the next [`take`](Self::take) gives.
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
