//! Requests that need the disk alone: barriers, and the first write below the medium's block
//! (`ranges.rs`).

use std::collections::VecDeque;

use super::RequestPath;
use super::flight::Ticket;
use super::work::{Action, Outcome};

/// The requests of one path that need the disk alone.
#[derive(Default)]
pub(super) struct Alone {
    waiting: VecDeque<Ticket>,
    /// Whether the path has closed the gate for the first of them.
    has_gate: bool,
    /// Whether that one has begun.
    running: bool,
}

impl Alone {
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn first(&self) -> Option<&Ticket> {
        self.waiting.front()
    }

    /// Puts a request in front, which was first before.
    pub(super) fn wait_first(&mut self, ticket: Ticket) {
        self.waiting.push_front(ticket);
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Ticket> {
        self.waiting.drain(..)
    }
}

/// Requests that have waited behind those without space are left to a successor with them.
impl Drop for Alone {
    fn drop(&mut self) {
        self.waiting.drain(..).for_each(|ticket| {
            ticket.park();
        });
    }
}

impl RequestPath {
    /// Queues a request until it can be alone. Its data are fetched then. Until then nothing else
    /// is taken.
    pub(super) fn wait_to_be_alone(&mut self, ticket: Ticket) {
        self.alone.waiting.push_back(ticket);
    }

    /// Whether no requests are taken, since one needs the disk alone.
    pub fn is_holding_back(&self) -> bool {
        self.alone.running || !self.alone.waiting.is_empty() || self.space.has_barrier()
    }

    /// Number of requests that storage or this thread works on: all except those that wait to be
    /// alone or for space.
    fn working(&self) -> usize {
        let waiting = self.alone.waiting.len() + self.space.waiting();
        self.flights.in_use() - self.flights.set_aside() - waiting
    }

    /// The request that needs the disk alone, if it can begin: nothing else of this path is under
    /// way, this path has the gate, and all other paths are idle. Fetch its data now, and call
    /// [`alone_fetched`](Self::alone_fetched).
    pub fn take_alone(&mut self) -> Option<Ticket> {
        if self.alone.running || self.alone.waiting.is_empty() || self.working() > 0 {
            return None;
        }
        if self.is_alone_behind_space() {
            self.give_gate_back();
            self.leave_if_idle();
            return None;
        }
        if !self.member.close() {
            // The gate's holder may be waiting for this path in turn.
            self.leave_if_idle();
            return None;
        }
        self.alone.has_gate = true;
        if !self.member.others_idle() {
            return None;
        }
        if self.is_alone_behind_space() {
            // Another path has found no space meanwhile, and needs the gate to try again.
            self.give_gate_back();
            return None;
        }
        let ticket = self.alone.waiting.pop_front()?;
        self.lay_out_again(&ticket);
        self.alone.running = true;
        if self.flights.see(&ticket).work.action == Action::Write {
            self.member.device().ranges.switch_on();
        }
        self.flights.get(&ticket).record.stages.submitted_ns = self.clock.now_ns();
        Some(ticket)
    }

    /// Goes on with the request that has the disk alone, after its data were fetched or could not
    /// be (`ok`).
    pub fn alone_fetched(&mut self, ticket: Ticket, ok: bool, now_ns: u64) {
        self.flights.get(&ticket).record.stages.copied_in_ns = now_ns;
        if ok {
            self.start_task(ticket);
        } else {
            self.end_alone();
            self.finish(ticket, Outcome::Failed);
        }
    }

    /// Opens the gate after the request that had the disk alone, if there was one.
    pub(super) fn end_alone(&mut self) {
        if std::mem::take(&mut self.alone.running) {
            self.give_gate_back();
        }
    }

    fn give_gate_back(&mut self) {
        if std::mem::take(&mut self.alone.has_gate) {
            self.member.open();
        }
    }

    /// Tells the gate and the paths that wait for it that this path is idle, if it is. Returns
    /// whether it is.
    pub fn leave_if_idle(&mut self) -> bool {
        self.settle_tokens();
        self.account.settle();
        let is_idle = self.working() == 0 && !self.alone.running && !self.medium.is_resting();
        if is_idle {
            self.member.leave(!self.alone.waiting.is_empty() || self.space.waiting() > 0);
        }
        is_idle
    }
}
