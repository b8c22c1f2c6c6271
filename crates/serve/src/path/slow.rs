//! Requests with several steps: flushes, discards, barriers, writes below the medium's block, and
//! ranges in several places. Each is a task on the path's thread.

use std::cell::RefCell;
use std::collections::HashMap;
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

/// Most lookups for one request for the status of a range.
pub(crate) const QUESTIONS: usize = 512;

/// The longest sleep of a discard that has to end with its path.
const STOPS_WITHIN: Duration = Duration::from_millis(50);

/// The entries of tasks that have ended, with their results.
pub(super) type TaskResults = Rc<RefCell<Vec<(u16, io::Result<()>)>>>;

/// The allocation that was found, by the entry of the request.
pub(super) type Statuses = Rc<RefCell<HashMap<u16, Vec<Allocation>>>>;

impl RequestPath {
    /// Makes a task of a request. [`collect_tasks`](Self::collect_tasks) handles its result.
    pub(super) fn start_task(&mut self, ticket: Ticket) {
        let work = self.flights.see(&ticket).work;
        self.start_task_of(ticket, work);
    }

    /// As [`start_task`](Self::start_task), with the work of several [joined](super::discards)
    /// requests.
    pub(super) fn start_task_of(&mut self, ticket: Ticket, work: Work) {
        let shared = self.shared.clone();
        let flight = self.flights.get(&ticket);
        let layout = flight.layout;
        let task = Task {
            arena: shared.pool.arena().clone(),
            shared,
            counters: self.account.page().clone(),
            disk: self.medium.disk.clone(),
            port: self.medium.port.clone(),
            work,
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

    /// Goes on with the requests whose tasks have ended.
    pub fn collect_tasks(&mut self, now_ns: u64) {
        let results = std::mem::take(&mut *self.tasks.borrow_mut());
        for (entry, result) in results {
            let ticket = Ticket::unpark(entry);
            self.end_alone();
            if self.flights.get(&ticket).work.action == Action::Discard {
                self.discard_ended(entry, &result, now_ns);
            }
            match result {
                Ok(()) => {
                    self.save_soon();
                    self.data_done(ticket, now_ns);
                }
                Err(e) => self.storage_failed(ticket, &e, now_ns),
            }
        }
        self.count_lookups();
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

    /// Discards in parts, one at a time of all discards of the device. Between two parts everything
    /// else goes first, and has as much time as the part took. A discard is a hint: it ends early
    /// without an error when the path is to stop or rest.
    async fn discard(&self) -> io::Result<()> {
        let shared = &self.shared;
        let discards = shared.device.discards.begin();
        let (offset, bytes) = (self.work.offset(), self.work.bytes());
        let mut done = 0;
        while done < bytes {
            let turn = discards.turn(&self.port.io).await?;
            if shared.ends_discards() {
                break;
            }
            let from_ns = shared.device.clock.now_ns();
            done += self.disk.discard_part(&self.port, offset + done, bytes - done).await?;
            let took_ns = shared.device.clock.now_ns().saturating_sub(from_ns);
            self.counters.counters().discard_parts.add(1);
            if discards.gives_way() {
                self.rest(Duration::from_nanos(took_ns)).await;
            }
            drop(turn);
            if done < bytes {
                self.pause().await;
            }
        }
        Ok(())
    }

    /// Sleeps for this time, unless discards are to end.
    async fn rest(&self, mut left: Duration) {
        while !left.is_zero() && !self.shared.ends_discards() {
            let some = left.min(STOPS_WITHIN);
            // A failed sleep ends at once.
            let _ = self.port.io.sleep(some).await;
            left -= some;
        }
    }

    async fn zero(&self) -> io::Result<()> {
        let zeros = self.shared.pool.zero_page();
        let (offset, bytes) = (self.work.offset(), self.work.bytes());
        self.disk.write_zeroes(&self.port, offset, bytes, zeros).await
    }

    /// Finds the status of the range with a bounded number of lookups: at least that of its
    /// beginning.
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
                Some(last) if (last.zeros, last.depth) == (next.zeros, next.depth) => {
                    last.len += next.len;
                }
                _ => found.push(next),
            }
            self.port.io.yield_to_others().await;
        }
        self.statuses.borrow_mut().insert(self.entry, found);
        Ok(())
    }

    /// Yields to everything else, and waits while the disk has used its processor time.
    async fn pause(&self) {
        let shared = &self.shared;
        self.port.io.yield_to_others().await;
        while let Some(left) = shared.processors.debt(shared.device.clock.now_ns())
            && !shared.ends_discards()
        {
            // A failed sleep ends at once.
            let _ = self.port.io.sleep(left.min(STOPS_WITHIN)).await;
        }
    }

    /// Writes. For less than the medium's block it reads the blocks around it first, and the caller
    /// has the disk alone.
    async fn write(&self) -> io::Result<()> {
        let Some(layout) = self.layout else { return Ok(()) };
        if layout.is_whole() {
            return self.transfer(Transfer::Write).await;
        }
        // The request's bytes are copied aside while the blocks around them are read.
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

    /// Flushes: everything that was answered is on the medium then, or the device refuses writes
    /// from now on.
    async fn flush(&self) -> io::Result<()> {
        self.shared.device.flush(&self.disk, &self.port).await
    }
}
