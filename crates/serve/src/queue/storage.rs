//! Step 5: to the storage engine, and back from it.

use std::io;

use ferrite_disk::{Extent, Intent};
use ferrite_io::engine::{Completion, Transfer};
use ferrite_xen::abi::{STATUS_ERROR, STATUS_OKAY};

use super::Queue;
use super::copy::Layout;
use super::flight::Ticket;
use super::merge::{Placed, op};
use crate::quiet::told;
use crate::request::Action;

fn intent(transfer: Transfer) -> Intent {
    match transfer {
        Transfer::Read => Intent::Read,
        Transfer::Write => Intent::Write,
    }
}

/// How often in a row an operation may say "try again".
const RETRIES: u32 = 64;

impl Queue {
    /// Starts everything that is ready. Data that lies in one place goes straight to the engine,
    /// neighbours together; the rest becomes a task.
    pub(super) fn start_ready(&mut self) {
        if self.ready.is_empty() {
            return;
        }
        let now_ns = self.clock.now_ns();
        let mut ready = std::mem::take(&mut self.ready);
        for ticket in ready.drain(..) {
            self.flights.get(&ticket).record.stages.submitted_ns = now_ns;
            match self.flights.get(&ticket).work.action {
                Action::Read => self.place(ticket, Transfer::Read, now_ns),
                Action::Write => self.place(ticket, Transfer::Write, now_ns),
                Action::Flush | Action::FlushThenWrite | Action::Discard | Action::Barrier => {
                    self.start_task(ticket);
                }
            }
        }
        self.ready = ready;
        self.push_placed();
    }

    fn place(&mut self, ticket: Ticket, transfer: Transfer, now_ns: u64) {
        let disk = &self.connection.device.disk;
        let flight = self.flights.get(&ticket);
        let Some(layout) = flight.layout else {
            unreachable!("reads and writes have buffers");
        };
        let blocks = layout.blocks;
        let all = blocks.len() as u64;
        let extent = disk.map(layout.offset, all, intent(transfer));
        if disk.has_metadata() {
            let counters = self.connection.counters.queue(self.index);
            match extent {
                Extent::Slow { .. } => counters.metadata_misses.add(1),
                Extent::Data { .. } | Extent::Zeros { .. } => counters.metadata_hits.add(1),
            }
        }
        match extent {
            Extent::Data { file, offset, len } if len >= all => {
                let file = self.port.files[file];
                let flushes = flight.flushes;
                self.placed.push(Placed { ticket, transfer, file, offset, blocks, flushes });
            }
            Extent::Zeros { len } if len >= all => {
                flight.zeros = true;
                self.data_done(ticket, now_ns);
            }
            Extent::Data { .. } | Extent::Zeros { .. } | Extent::Slow { .. } => {
                self.start_task(ticket);
            }
        }
    }

    /// A data operation has ended: done, to be continued, to be tried again, or failed.
    pub(super) fn storage_completed(
        &mut self,
        ticket: Ticket,
        completion: Completion,
        now_ns: u64,
    ) {
        let disk = &self.connection.device.disk;
        let block_bytes = disk.block_bytes() as usize;
        let flight = self.flights.get(&ticket);
        let Some(layout) = flight.layout else {
            unreachable!("only data operations carry an entry's number");
        };
        match completion.result() {
            Ok(bytes) => {
                let before = flight.done_bytes;
                // A piece of a block cannot be continued from: it is done again.
                let now = before + bytes as usize;
                flight.done_bytes =
                    if now < layout.blocks.len() { now - now % block_bytes } else { now };
                if flight.done_bytes >= layout.blocks.len() {
                    if flight.work.action == Action::Write {
                        self.connection
                            .device
                            .disk
                            .wrote(layout.offset, layout.blocks.len() as u64);
                    }
                    self.data_done(ticket, now_ns);
                } else if flight.done_bytes > before {
                    flight.retries = 0;
                    self.push_rest(ticket, layout);
                } else {
                    let e = io::Error::new(io::ErrorKind::UnexpectedEof, "no progress");
                    self.storage_failed(ticket, &e, now_ns);
                }
            }
            Err(e) => {
                let again =
                    matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
                if again && flight.retries < RETRIES {
                    flight.retries += 1;
                    self.push_rest(ticket, layout);
                } else {
                    self.storage_failed(ticket, &e, now_ns);
                }
            }
        }
    }

    /// Starts what is left of a request's transfer, by itself. What a write was given is still
    /// its place, so the rest of it lies where the translation says.
    pub(super) fn push_rest(&mut self, ticket: Ticket, layout: Layout) {
        let flight = self.flights.get(&ticket);
        let done = flight.done_bytes;
        let rest = layout.blocks.slice(done, layout.blocks.len() - done);
        let from = layout.offset + done as u64;
        let transfer = match flight.work.action {
            Action::Read => Transfer::Read,
            _ => Transfer::Write,
        };
        match self.connection.device.disk.map(from, rest.len() as u64, intent(transfer)) {
            Extent::Data { file, offset, len } if len >= rest.len() as u64 => {
                let op = op(transfer, self.port.files[file], offset, rest);
                self.reactor.push(u64::from(ticket.park()), op);
            }
            // All of it again: the same bytes go to the same place.
            Extent::Data { .. } | Extent::Zeros { .. } | Extent::Slow { .. } => {
                self.start_task(ticket);
            }
        }
    }

    /// All data of a request is where it belongs.
    pub(super) fn data_done(&mut self, ticket: Ticket, now_ns: u64) {
        let flight = self.flights.get(&ticket);
        flight.record.stages.completed_ns = now_ns;
        if flight.work.action == Action::Read {
            self.copy_out.push(ticket);
        } else {
            self.finish(ticket, STATUS_OKAY);
        }
    }

    /// The request fails with an error; the disk goes on.
    pub(super) fn storage_failed(&mut self, ticket: Ticket, e: &io::Error, now_ns: u64) {
        let flight = self.flights.get(&ticket);
        flight.record.stages.completed_ns = now_ns;
        let work = flight.work;
        if let Some(held_back) = self.connection.device.quiet.storage.allow(now_ns) {
            tracing::error!(
                queue = self.index,
                held_back = told(held_back),
                "{:?} of sectors {}+{} failed: {e}; the guest gets an error for this request",
                work.action,
                work.sector,
                work.sectors
            );
        }
        let unsupported =
            work.action == Action::Discard && matches!(e.kind(), io::ErrorKind::Unsupported);
        // Linux then stops to send discards: right, if the medium cannot do them.
        let status =
            if unsupported { ferrite_xen::abi::STATUS_NOT_SUPPORTED } else { STATUS_ERROR };
        self.finish(ticket, status);
    }
}
