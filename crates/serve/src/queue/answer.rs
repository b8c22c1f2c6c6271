//! Step 6: responses, in batches, in the order that `inflight.rs` sets down.

use std::io;

use ferrite_xen::abi::Response;

use super::Queue;
use super::flight::Ticket;

impl Queue {
    /// Fixes a request's status; it is answered with the next batch.
    pub(super) fn finish(&mut self, ticket: Ticket, status: i16) {
        self.flights.get(&ticket).status = status;
        self.finished.push(ticket);
    }

    /// Answers everything that is finished: one batch, published once, one event at most.
    pub(super) fn answer(&mut self) -> io::Result<()> {
        if self.finished.is_empty() {
            return Ok(());
        }
        let now_ns = self.clock.now_ns();
        // Buffers and entries are given back only after the guest can see the batch.
        std::mem::swap(&mut self.finished, &mut self.answered);
        for ticket in &self.answered {
            let flight = self.flights.get(ticket);
            flight.record.status = flight.status;
            flight.record.stages.answered_ns = now_ns;
            self.trace.push(&flight.record);
            let response =
                Response { id: flight.id, operation: flight.response_op, status: flight.status };
            self.table.answer(ticket.entry() as u32, self.ring.rsp_prod());
            self.ring.respond(response);
        }
        let notify = self.ring.publish();
        self.counters().requests.add(self.answered.len() as u64);
        self.counters().notifications.add(u64::from(notify));
        self.table.published(self.ring.rsp_prod());
        let mut answered = std::mem::take(&mut self.answered);
        for ticket in answered.drain(..) {
            self.table.free(ticket.entry() as u32);
            if let Some(buf) = self.flights.get(&ticket).buf.take() {
                self.pool.free(buf);
            }
            self.flights.release(ticket);
        }
        self.answered = answered;
        self.leave_if_idle();
        if notify { self.ring.link().notify() } else { Ok(()) }
    }
}
