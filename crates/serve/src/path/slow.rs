//! Whatever has more than one step: flush, discard, barriers, writes below the medium's block,
//! ranges that lie in several places. One task a request, on this thread.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Allocation, Disk, Port};
use ferrite_io::arena::Arena;
use ferrite_io::engine::Transfer;

use super::RequestPath;
use super::flight::Ticket;
use super::layout::Layout;
use super::shared::Shared;
use super::work::{Action, Work};
use crate::counters::Page;

/// Discards of a path at once. The others wait: each takes little of a guest to ask for, and may be
/// of its whole disk. A flush waits for no more of them, nor does the end of the path.
const DISCARDS: usize = 4;

/// Places that one request for the status of a range looks at.
const QUESTIONS: usize = 512;

/// How long a discard may sleep that has to end when its path does.
const STOPS_WITHIN: Duration = Duration::from_millis(50);

/// Tasks that have ended: of which entry, and how.
pub(super) type TaskResults = Rc<RefCell<Vec<(u16, io::Result<()>)>>>;

/// What was found of where a disk has data, by the entry of who asked.
pub(super) type Statuses = Rc<RefCell<HashMap<u16, Vec<Allocation>>>>;

/// Discards of one path.
#[derive(Default)]
pub(super) struct Discards {
    /// Those that have not begun.
    waiting: VecDeque<Ticket>,
    /// How many have.
    running: usize,
}

impl Discards {
    pub(super) fn are_running(&self) -> bool {
        self.running > 0
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Ticket> {
        self.waiting.drain(..)
    }
}

impl RequestPath {
    /// Makes a task of a request; its result is found by [`collect_tasks`](Self::collect_tasks).
    pub(super) fn start_task(&mut self, ticket: Ticket) {
        let shared = self.shared.clone();
        let flight = self.flights.get(&ticket);
        let layout = flight.layout;
        let task = Task {
            arena: shared.pool.arena().clone(),
            shared,
            counters: self.account.page().clone(),
            disk: self.medium.disk.clone(),
            port: self.medium.port.clone(),
            work: flight.work,
            layout,
            entry: ticket.entry() as u16,
            statuses: self.statuses.clone(),
        };
        let results = self.tasks.clone();
        let entry = ticket.park();
        self.reactor.spawn(async move {
            let result = task.run().await;
            results.borrow_mut().push((entry, result));
        });
    }

    /// Takes up the requests whose tasks have ended.
    pub fn collect_tasks(&mut self, now_ns: u64) {
        let results = std::mem::take(&mut *self.tasks.borrow_mut());
        for (entry, result) in results {
            let ticket = Ticket::unpark(entry);
            self.end_alone();
            if self.flights.get(&ticket).work.action == Action::Discard {
                self.discards.running -= 1;
                self.start_discards(now_ns);
            }
            match result {
                Ok(()) => {
                    self.save_soon();
                    self.data_done(ticket, now_ns);
                }
                Err(e) => self.storage_failed(ticket, &e, now_ns),
            }
        }
    }

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
                self.start_task(ticket);
            }
        }
    }
}

/// A request as its task sees it.
struct Task {
    shared: Arc<Shared>,
    counters: Page,
    arena: Arc<Arena>,
    disk: Arc<Disk>,
    port: Port,
    work: Work,
    layout: Option<Layout>,
    entry: u16,
    statuses: Statuses,
}

impl Task {
    async fn run(&self) -> io::Result<()> {
        match self.work.action {
            Action::Read => self.transfer(Transfer::Read).await,
            Action::Write => self.write().await,
            Action::Flush => self.flush().await,
            Action::FlushThenWrite => {
                self.flush().await?;
                self.write().await
            }
            Action::Barrier => {
                self.flush().await?;
                if self.work.sectors > 0 {
                    self.write().await?;
                    self.flush().await?;
                }
                Ok(())
            }
            Action::Discard => self.discard().await,
            Action::Zero => self.zero().await,
            Action::Status => self.status().await,
        }
    }

    /// In parts, between which everything else goes first. A discard is a hint: it ends early,
    /// without an error, when the path is to stop or rest.
    async fn discard(&self) -> io::Result<()> {
        let shared = &self.shared;
        let (offset, bytes) = (self.work.offset(), self.work.bytes());
        let mut done = 0;
        while done < bytes && !shared.ends_discards() {
            done += self.disk.discard_part(&self.port, offset + done, bytes - done).await?;
            self.counters.counters().discard_parts.add(1);
            if done < bytes {
                self.pause().await;
            }
        }
        Ok(())
    }

    async fn zero(&self) -> io::Result<()> {
        let zeros = self.shared.pool.zero_page();
        let (offset, bytes) = (self.work.offset(), self.work.bytes());
        self.disk.write_zeroes(&self.port, offset, bytes, zeros).await
    }

    /// As much of the range as a bounded number of questions tells: its beginning at least.
    async fn status(&self) -> io::Result<()> {
        let (mut at, end) = (self.work.offset(), self.work.offset() + self.work.bytes());
        let mut found: Vec<Allocation> = Vec::new();
        for _ in 0..QUESTIONS {
            if at == end {
                break;
            }
            let next = self.disk.allocation(&self.port, at, end - at).await?;
            at += next.len;
            match found.last_mut() {
                Some(last) if last.zeros == next.zeros => last.len += next.len,
                _ => found.push(next),
            }
            self.port.io.yield_to_others().await;
        }
        self.statuses.borrow_mut().insert(self.entry, found);
        Ok(())
    }

    /// Lets everything else go first, and waits while the disk has used its processor time.
    async fn pause(&self) {
        let shared = &self.shared;
        self.port.io.yield_to_others().await;
        while let Some(left) = shared.processors.debt(shared.device.clock.now_ns())
            && !shared.ends_discards()
        {
            // A sleep that fails is none.
            let _ = self.port.io.sleep(left.min(STOPS_WITHIN)).await;
        }
    }

    /// Writes; for what is smaller than the medium's block, reads the blocks around it first.
    /// The caller has the disk for itself then.
    async fn write(&self) -> io::Result<()> {
        let Some(layout) = self.layout else { return Ok(()) };
        if layout.is_whole() {
            return self.transfer(Transfer::Write).await;
        }
        // The request's bytes step aside while the blocks are read around them.
        let mut data = vec![0; layout.data.len()];
        self.arena.copy_out(layout.data, &mut data);
        self.transfer(Transfer::Read).await?;
        self.arena.copy_in(layout.data, &data);
        self.transfer(Transfer::Write).await
    }

    /// Reads or writes the whole blocks.
    async fn transfer(&self, transfer: Transfer) -> io::Result<()> {
        let Some(layout) = self.layout else { return Ok(()) };
        let disk = &self.disk;
        match transfer {
            Transfer::Read => disk.read(&self.port, layout.offset, layout.blocks).await,
            Transfer::Write => disk.write(&self.port, layout.offset, layout.blocks).await,
        }
    }

    /// Everything answered before is on the medium, or the device refuses writes from now on.
    async fn flush(&self) -> io::Result<()> {
        self.shared.device.flush(&self.disk, &self.port).await
    }
}
