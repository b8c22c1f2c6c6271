//! The discards of a path: a few at a time, and neighbours as one.

use std::collections::{HashMap, VecDeque};
use std::io;

use super::RequestPath;
use super::flight::Ticket;
use super::work::Work;

/// Most discards of a path at a time. The others wait: a discard is cheap for a guest to send, and
/// may cover its whole disk. Flushes and the end of the path wait for the running ones only.
const DISCARDS: usize = 4;

/// The discards of one path.
#[derive(Default)]
pub(super) struct Discards {
    /// Discards that have not begun.
    waiting: VecDeque<Ticket>,
    /// Number of running discards.
    running: usize,
    /// Discards that are done together with another one, by the entry of that one.
    joined: HashMap<u16, Vec<Ticket>>,
}

impl Discards {
    pub(super) fn are_running(&self) -> bool {
        self.running > 0
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Ticket> {
        self.waiting.drain(..).chain(self.joined.drain().flat_map(|(_, joined)| joined))
    }
}

impl RequestPath {
    /// Queues a discard.
    pub(super) fn discard_soon(&mut self, ticket: Ticket, now_ns: u64) {
        self.discards.waiting.push_back(ticket);
        self.start_discards(now_ns);
    }

    /// Begins as many discards as may run. If the path is about to stop or rest, they count as
    /// done.
    fn start_discards(&mut self, now_ns: u64) {
        while self.shared.ends_discards() || self.discards.running < DISCARDS {
            let Some(ticket) = self.discards.waiting.pop_front() else { break };
            if self.shared.ends_discards() {
                self.data_done(ticket, now_ns);
            } else {
                self.discards.running += 1;
                let work = self.join_neighbours(&ticket);
                self.start_task_of(ticket, work);
            }
        }
    }

    /// Joins waiting discards that continue this one. They are done with it.
    fn join_neighbours(&mut self, ticket: &Ticket) -> Work {
        let mut work = self.flights.see(ticket).work;
        let mut joined = Vec::new();
        while let Some(next) = self.discards.waiting.front() {
            let next = self.flights.see(next).work;
            if next.sector != work.sector + work.sectors {
                break;
            }
            work.sectors += next.sectors;
            joined.extend(self.discards.waiting.pop_front());
        }
        if !joined.is_empty() {
            self.discards.joined.insert(ticket.entry() as u16, joined);
        }
        work
    }

    /// Ends a discard, and those that were done with it.
    pub(super) fn discard_ended(&mut self, entry: u16, result: &io::Result<()>, now_ns: u64) {
        self.discards.running -= 1;
        for ticket in self.discards.joined.remove(&entry).into_iter().flatten() {
            match result {
                Ok(()) => self.data_done(ticket, now_ns),
                Err(e) => self.storage_failed(ticket, e, now_ns),
            }
        }
        self.start_discards(now_ns);
    }
}
