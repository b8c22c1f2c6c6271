//! Discards of a path: a few at once, and neighbours as one.

use std::collections::{HashMap, VecDeque};
use std::io;

use super::RequestPath;
use super::flight::Ticket;
use super::work::Work;

/// Discards of a path at once. The others wait: each takes little of a guest to ask for, and may be
/// of its whole disk. A flush waits for no more of them, nor does the end of the path.
const DISCARDS: usize = 4;

/// Discards of one path.
#[derive(Default)]
pub(super) struct Discards {
    /// Those that have not begun.
    waiting: VecDeque<Ticket>,
    /// How many have.
    running: usize,
    /// Those that are done together with another one, by its entry.
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
    /// A discard that is begun when its turn has come.
    pub(super) fn discard_soon(&mut self, ticket: Ticket, now_ns: u64) {
        self.discards.waiting.push_back(ticket);
        self.start_discards(now_ns);
    }

    /// Begins discards, as many as there may be; with the path about to stop or rest, they are done.
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

    /// Has the ones that continue this one, and wait right behind it, done with it.
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

    /// A discard has ended, and those that were done with it have, likewise.
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
