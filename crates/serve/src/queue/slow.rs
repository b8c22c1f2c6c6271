//! Whatever has more than one step: flush, discard, barriers, writes below the medium's block,
//! ranges that lie in several places. One task a request, on this thread.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, Intent, Port};
use ferrite_io::arena::Arena;
use ferrite_xen::abi::STATUS_ERROR;

use super::Queue;
use super::copy::Layout;
use super::flight::Ticket;
use crate::connection::Connection;
use crate::request::{Action, Work};

/// How long metadata may stay behind what was answered if no flush comes.
const SAVE_AFTER: Duration = Duration::from_secs(2);

/// Discards of a queue at once. The others wait: each takes little of a guest to ask for, and may be
/// of its whole disk. A flush waits for no more of them, nor does the end of the queue.
const DISCARDS: usize = 4;

/// How long a discard may sleep that has to end when its queue does.
const STOPS_WITHIN: Duration = Duration::from_millis(50);

impl Queue {
    /// Makes a task of a request; its result is found by
    /// [`collect_task_results`](Self::collect_task_results).
    pub(super) fn start_task(&mut self, ticket: Ticket) {
        let connection = self.connection.clone();
        let flight = self.flights.get(&ticket);
        let layout = flight.layout;
        let task = Task {
            arena: connection.pool.arena().clone(),
            connection,
            queue: self.index,
            port: self.port.clone(),
            work: flight.work,
            layout,
        };
        let results = self.task_results.clone();
        let entry = ticket.park();
        self.reactor.spawn(async move {
            let result = task.run().await;
            results.borrow_mut().push((entry, result));
        });
    }

    /// Takes up the requests whose tasks have ended.
    pub(super) fn collect_task_results(&mut self, now_ns: u64) {
        let results = std::mem::take(&mut *self.task_results.borrow_mut());
        for (entry, result) in results {
            let ticket = Ticket::unpark(entry);
            if self.alone_running {
                self.alone_running = false;
                self.connection.gate.open(self.index);
                self.connection.wake_all();
            }
            if self.flights.get(&ticket).work.action == Action::Discard {
                self.discarding -= 1;
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

    /// Begins discards, as many as there may be; with the queue about to stop, they are done.
    pub(super) fn start_discards(&mut self, now_ns: u64) {
        while self.connection.stopping() || self.discarding < DISCARDS {
            let Some(ticket) = self.discards.pop_front() else { break };
            if self.connection.stopping() {
                self.data_done(ticket, now_ns);
            } else {
                self.discarding += 1;
                self.start_task(ticket);
            }
        }
    }

    /// Sees to it that what was answered gets into the image's metadata though no flush asks for
    /// it: until then a crash of the host would lose it, however long ago it was written.
    pub(super) fn save_soon(&mut self) {
        let mut duty = self.connection.device.take_saving();
        if duty.is_none() {
            return;
        }
        let (device, port) = (self.connection.device.clone(), self.port.clone());
        let under_way = self.saving.clone();
        self.reactor.spawn(async move {
            while let Some(saving) = duty {
                // A sleep that fails is none.
                let _ = port.io.sleep(SAVE_AFTER).await;
                under_way.set(true);
                let saved = device.flush(&port).await;
                under_way.set(false);
                drop(saving);
                // Writes that were answered meanwhile found somebody at it. A flush that failed
                // has told so.
                duty = if saved.is_ok() { device.take_saving() } else { None };
            }
        });
    }

    /// Begins the request that needs the disk for itself, if its time has come: nothing else of
    /// this queue is under way, no other queue has the gate, and all others are idle.
    pub(super) fn start_alone(&mut self) {
        if self.alone_running || self.alone.is_empty() || self.working() > 0 {
            return;
        }
        let gate = &self.connection.gate;
        if !gate.close(self.index) {
            // Its holder may be waiting for this queue in turn.
            self.leave_if_idle();
            return;
        }
        if !gate.others_idle(self.index) {
            return;
        }
        let Some(ticket) = self.alone.pop_front() else { return };
        self.flights.get(&ticket).record.stages.submitted_ns = self.clock.now_ns();
        match self.copy_in_one(ticket) {
            Ok(ticket) => {
                self.alone_running = true;
                self.start_task(ticket);
            }
            Err(ticket) => {
                self.connection.gate.open(self.index);
                self.connection.wake_all();
                self.finish(ticket, STATUS_ERROR);
            }
        }
    }
}

/// A request as its task sees it.
struct Task {
    connection: Arc<Connection>,
    queue: usize,
    arena: Arc<Arena>,
    port: Port,
    work: Work,
    layout: Option<Layout>,
}

impl Task {
    async fn run(&self) -> io::Result<()> {
        match self.work.action {
            Action::Read => self.transfer(Intent::Read).await,
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
        }
    }

    /// In parts, between which everything else goes first. A discard is a hint: it ends early,
    /// without an error, when the queue is to stop.
    async fn discard(&self) -> io::Result<()> {
        let connection = &self.connection;
        let (offset, bytes) = (self.work.offset(), self.work.bytes());
        let mut done = 0;
        while done < bytes && !connection.stopping() {
            let disk = &connection.device.disk;
            done += disk.discard_part(&self.port, offset + done, bytes - done).await?;
            connection.counters.queue(self.queue).discard_parts.add(1);
            if done < bytes {
                self.pause().await;
            }
        }
        Ok(())
    }

    /// Lets everything else go first, and waits while the disk has used its processor time.
    async fn pause(&self) {
        let connection = &self.connection;
        self.port.io.yield_to_others().await;
        while let Some(left) = connection.processors.debt(connection.device.clock.now_ns())
            && !connection.stopping()
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
            return self.transfer(Intent::Write).await;
        }
        // The request's bytes step aside while the blocks are read around them.
        let mut data = vec![0; layout.data.len()];
        self.arena.copy_out(layout.data, &mut data);
        self.transfer(Intent::Read).await?;
        self.arena.copy_in(layout.data, &data);
        self.transfer(Intent::Write).await
    }

    /// Reads or writes the whole blocks.
    async fn transfer(&self, intent: Intent) -> io::Result<()> {
        let Some(layout) = self.layout else { return Ok(()) };
        let disk: &Disk = &self.connection.device.disk;
        match intent {
            Intent::Read => disk.read(&self.port, layout.offset, layout.blocks).await,
            Intent::Write => disk.write(&self.port, layout.offset, layout.blocks).await,
        }
    }

    /// Everything answered before is on the medium, or the device refuses writes from now on.
    async fn flush(&self) -> io::Result<()> {
        self.connection.device.flush(&self.port).await
    }
}
