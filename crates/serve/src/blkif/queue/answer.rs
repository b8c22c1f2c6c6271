//! Step 6: writes responses in batches, in the order that `inflight.rs` prescribes.

use std::io;

use ferrite_xen::abi::{Response, STATUS_ERROR, STATUS_NOT_SUPPORTED, STATUS_OKAY};

use super::Queue;
use crate::path::work::Outcome;

fn status(outcome: Outcome) -> i16 {
    match outcome {
        Outcome::Done => STATUS_OKAY,
        Outcome::Failed => STATUS_ERROR,
        Outcome::Unsupported => STATUS_NOT_SUPPORTED,
    }
}

impl Queue {
    /// Answers all finished requests in one batch, which is published once and causes one event at
    /// most.
    pub(super) fn answer(&mut self) -> io::Result<()> {
        if !self.path.has_finished() {
            return Ok(());
        }
        let now_ns = self.clock.now_ns();
        // Buffers and entries are given back only once the guest can see the batch.
        self.path.finished(&mut self.answered);
        for ticket in &self.answered {
            let status = status(self.path.outcome(ticket));
            let record = self.path.record(ticket);
            record.status = status;
            record.stages.answered_ns = now_ns;
            record.answer = self.ring.rsp_prod().wrapping_add(1);
            let response = Response { id: record.id, operation: record.operation, status };
            self.table.answer(ticket.entry() as u32, self.ring.rsp_prod());
            self.ring.respond(response);
        }
        let notify = self.ring.publish();
        self.counters().requests.add(self.answered.len() as u64);
        self.counters().notifications.add(u64::from(notify));
        self.table.published(self.ring.rsp_prod());
        for ticket in self.answered.drain(..) {
            let record = self.path.record(&ticket);
            record.notified = notify;
            self.diary.ring.push(record);
            self.table.free(ticket.entry() as u32);
            self.path.release(ticket);
        }
        self.path.leave_if_idle();
        if notify { self.ring.link().notify() } else { Ok(()) }
    }
}
