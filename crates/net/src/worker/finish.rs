//! All pieces of a turn are copied; then each delivery is answered by its statuses.

use ferrite_xen::netif::{RSP_ERROR, RSP_OKAY, RX_EXTRA_INFO, RX_MORE_DATA, RxResponse};
use ferrite_xen::pages::Piece;

use super::{Delivery, Frame, From, To, Worker};
use crate::counters::{add, count};
use crate::switch::PortId;

impl Worker {
    /// Copies, then answers the receivers and judges the senders' packets.
    pub(super) fn copy_and_finish(&mut self) {
        let mut pieces = std::mem::take(&mut self.turn.pieces);
        let mut deliveries = std::mem::take(&mut self.turn.deliveries);
        let outcome = self.copy_pieces(&mut pieces);
        self.turn.pieces = pieces;
        self.are_copied();
        let pieces = std::mem::take(&mut self.turn.pieces);
        // In the order in which pages were taken: a frontend finds its page by the answer's place.
        for delivery in &mut deliveries {
            let own = pieces[delivery.pieces.clone()].iter();
            let is_ok = outcome && own.clone().all(Piece::is_ok);
            let is_ok = self.finish(delivery, is_ok);
            delivery.is_ok = is_ok;
            self.judge(&delivery.frame, is_ok);
        }
        self.are_answered(&deliveries);
        (self.turn.pieces, self.turn.deliveries) = (pieces, deliveries);
    }

    fn finish(&mut self, delivery: &mut Delivery, is_ok: bool) -> bool {
        match &delivery.to {
            To::Port { port, queue, rx } => {
                let (port, queue) = (*port, *queue);
                self.answer_rx(port, queue, &delivery.frame, rx.clone(), is_ok);
                let queue = self.vif(port).and_then(|vif| vif.queues.get(queue));
                delivery.rx_answers = queue.map_or(0, |queue| queue.rings.rx_answers());
                is_ok
            }
            To::Uplink(span) => {
                let Some(uplink) = self.start.uplink.as_mut().filter(|_| is_ok) else {
                    return false;
                };
                let bytes = &mut self.bytes[..span.len()];
                self.arena.copy_out(*span, bytes);
                uplink.send(bytes, delivery.frame.offload).unwrap_or(false)
            }
        }
    }

    fn answer_rx(
        &mut self,
        port: PortId,
        queue: usize,
        frame: &Frame,
        rx: std::ops::Range<usize>,
        is_ok: bool,
    ) {
        let extra = frame.offload.gso.map(crate::packet::Gso::extra);
        let requests = &self.turn.rx[rx];
        let vif = self.vifs.get_mut(usize::from(port.0)).and_then(Option::as_mut);
        let Some(vif) = vif else { return };
        let Some(q) = vif.queues.get_mut(queue) else { return };
        q.has_worked = true;
        if !is_ok {
            // The side at fault is unknown. The pages go back, each by itself.
            count(&vif.counters.failed);
            for room in requests {
                let (offset, flags, status) = (0, 0, RSP_ERROR);
                q.rings.answer_rx(RxResponse { id: room.request.id, offset, flags, status });
            }
            return;
        }
        count(&vif.counters.received_packets);
        add(&vif.counters.received_bytes, frame.size as u64);
        let last = requests.iter().rposition(|room| room.len.is_some());
        for (slot, room) in requests.iter().enumerate() {
            let Some(len) = room.len else {
                if let Some(extra) = extra {
                    q.rings.answer_rx_extra(extra);
                }
                continue;
            };
            let mut flags = if Some(slot) == last { 0 } else { RX_MORE_DATA };
            if slot == 0 {
                flags |= frame.offload.rx_flags();
                flags |= if extra.is_some() { RX_EXTRA_INFO } else { 0 };
            }
            let (id, status) = (room.request.id, len as i16);
            q.rings.answer_rx(RxResponse { id, offset: 0, flags, status });
        }
    }

    /// The sender's status: okay if at least one receiver got it.
    fn judge(&mut self, frame: &Frame, is_ok: bool) {
        let From::Guest(from) = frame.from else { return };
        if !is_ok {
            let is_sent = self.pending(from).is_some_and(|p| p.status == RSP_OKAY);
            if !is_sent {
                self.fail(frame.from);
            }
            return;
        }
        let Some(pending) = self.pending(from) else {
            return;
        };
        let was = std::mem::replace(&mut pending.status, RSP_OKAY);
        if was != RSP_OKAY
            && let Some(vif) = self.vif(from.port)
        {
            count(&vif.counters.sent_packets);
            add(&vif.counters.sent_bytes, frame.size as u64);
        }
    }
}
