//! The records of packets: a time for each stage of a turn, and what guests say that they have consumed.
//!
//! The clock is read once for a stage of a turn, whatever number of packets it has.

use ferrite_host::clock::Clock;

use super::{Delivery, Frame, From, To, Worker};
use crate::switch::PortId;
use crate::trace::{End, Noticed, Outcome, Record, Stage, TraceRing};
use crate::vif::Answered;

/// The records, and the times of this turn.
#[derive(Default)]
pub(super) struct Tracer {
    ring: Option<TraceRing>,
    /// How the thread came to this turn.
    pub(super) noticed: Noticed,
    chosen_ns: u64,
    copied_ns: u64,
    /// When the receivers of this turn were answered: the answers of all are published next.
    pub(super) answered_ns: Option<u64>,
}

impl Tracer {
    pub(super) fn new(ring: Option<TraceRing>) -> Tracer {
        Tracer { ring, ..Tracer::default() }
    }

    /// A time of a record.
    fn set(&mut self, n: u64, stage: Stage, at_ns: u64) {
        if let Some(ring) = &mut self.ring {
            ring.set(n, stage, at_ns);
        }
    }
}

impl Worker {
    /// The header of all frames of this turn were fetched.
    pub(super) fn are_fetched(&mut self) {
        if self.tracer.ring.is_none() || self.turn.frames.is_empty() {
            return;
        }
        let now_ns = self.clock.now_ns();
        self.turn.frames.iter_mut().for_each(|frame| frame.fetched_ns = now_ns);
    }

    /// The receivers of this turn were chosen.
    pub(super) fn are_chosen(&mut self) {
        if self.tracer.ring.is_some() && !self.turn.deliveries.is_empty() {
            self.tracer.chosen_ns = self.clock.now_ns();
        }
    }

    /// The bytes of this turn were copied.
    pub(super) fn are_copied(&mut self) {
        if self.tracer.ring.is_some() && !self.turn.pieces.is_empty() {
            self.tracer.copied_ns = self.clock.now_ns();
        }
    }

    /// The receivers of these deliveries were answered. Each has a flag: it is received.
    pub(super) fn are_answered(&mut self, deliveries: &[Delivery]) {
        if self.tracer.ring.is_none() || deliveries.is_empty() {
            return;
        }
        let now_ns = self.clock.now_ns();
        self.tracer.answered_ns = Some(now_ns);
        let together = deliveries.len().min(usize::from(u16::MAX)) as u16;
        for delivery in deliveries {
            let (to, pages) = match &delivery.to {
                To::Port { port, queue, rx } => (self.end(*port, *queue), rx.len()),
                To::Uplink(_) => (End::Uplink, 0),
            };
            let outcome = if delivery.is_ok { Outcome::Received } else { Outcome::Failed };
            let mut record = self.record(&delivery.frame, to, outcome);
            (record.pages, record.together) = (pages as u8, together);
            record.pieces = delivery.pieces.len().min(255) as u8;
            let times = [
                (Stage::Chosen, self.tracer.chosen_ns),
                (Stage::Copied, self.tracer.copied_ns),
                (Stage::RxAnswered, now_ns),
            ];
            times.into_iter().for_each(|(stage, ns)| record.times_ns[stage as usize] = ns);
            let n = self.push(&record, delivery.frame.from);
            if let To::Port { port, queue, .. } = &delivery.to
                && let Some(q) = self.vif(*port).and_then(|vif| vif.queues.get_mut(*queue))
            {
                q.rx_answered.push(Answered { record: n, answers: delivery.rx_answers });
            }
        }
    }

    /// A packet, or one of its receivers, is done without a delivery.
    pub(super) fn is_dropped(&mut self, frame: &Frame, to: Option<(PortId, usize)>, why: Outcome) {
        if self.tracer.ring.is_none() {
            return;
        }
        let to = to.map_or(End::Nobody, |(port, queue)| self.end(port, queue));
        let record = self.record(frame, to, why);
        self.push(&record, frame.from);
    }

    fn end(&self, port: PortId, queue: usize) -> End {
        let vif = self.vifs.get(usize::from(port.0)).and_then(Option::as_ref);
        vif.map_or(End::Nobody, |vif| End::Vif {
            domid: vif.id.domid,
            handle: vif.id.handle,
            queue: queue as u8,
        })
    }

    fn record(&self, frame: &Frame, to: End, outcome: Outcome) -> Record {
        let from = match frame.from {
            From::Guest(from) => self.end(from.port, from.queue),
            From::Uplink => End::Uplink,
        };
        let segment_bytes = frame.offload.gso.map_or(0, |gso| gso.size);
        let (bytes, noticed) = (frame.size as u32, self.tracer.noticed);
        let mut record =
            Record { from, to, bytes, segment_bytes, outcome, noticed, ..Record::default() };
        record.times_ns[Stage::Seen as usize] = frame.seen_ns;
        record.times_ns[Stage::Fetched as usize] = frame.fetched_ns;
        record
    }

    /// Appends a record. The times of its sender's answer follow.
    fn push(&mut self, record: &Record, from: From) -> u64 {
        let Some(ring) = &mut self.tracer.ring else { return 0 };
        let n = ring.push(record);
        if let From::Guest(from) = from
            && let Some(pending) = self.pending(from)
        {
            pending.record = Some(n);
        }
        n
    }

    /// All answers are published. Guests that asked for it were notified, one after the other: they have the time of the
    /// last one.
    pub(super) fn are_published(&mut self, has_notified: bool) {
        let answered_ns = self.tracer.answered_ns.unwrap_or_default();
        let notified_ns = if has_notified { self.clock.now_ns() } else { 0 };
        for queue in self.vifs.iter_mut().flatten().flat_map(|vif| &mut vif.queues) {
            let notified_ns = if queue.was_notified { notified_ns } else { 0 };
            for answered in queue.tx_answered.drain(..) {
                self.tracer.set(answered.record, Stage::TxAnswered, answered_ns);
                self.tracer.set(answered.record, Stage::TxNotified, notified_ns);
                queue.tx_unseen.add(answered);
            }
            for answered in queue.rx_answered.drain(..) {
                self.tracer.set(answered.record, Stage::RxNotified, notified_ns);
                queue.rx_unseen.add(answered);
            }
        }
    }

    /// Looks what guests say that they have consumed.
    pub(super) fn look_at_consumed(&mut self, now_ns: u64) {
        let queues = self.vifs.iter_mut().flatten().flat_map(|vif| &mut vif.queues);
        for queue in queues {
            let ends = [
                (&mut queue.tx_unseen, queue.rings.tx_said_consumed(), Stage::TxConsumed),
                (&mut queue.rx_unseen, queue.rings.rx_said_consumed(), Stage::RxConsumed),
            ];
            for (unseen, consumed, stage) in ends {
                while let Some(record) = unseen.next_consumed(consumed) {
                    self.tracer.set(record, stage, now_ns);
                }
            }
        }
    }
}
