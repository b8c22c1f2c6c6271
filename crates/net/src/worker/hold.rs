//! Packets whose receiver has no pages for them now. They wait for a bounded time, a bounded number for each receive
//! ring. A receiver that let one wait in vain is starved: no packet waits for it until it has taken one again.

use super::deliver::Outcome;
use super::{Frame, From, Worker};
use crate::counters::count;
use crate::switch::PortId;
use crate::trace::Outcome as Ended;
use crate::vif::{HELD_MAX, Held};

impl Worker {
    /// Sends a frame, or has it wait.
    pub(super) fn send_or_hold(&mut self, frame: &Frame, port: PortId, queue: usize, may: bool) {
        // Behind those that wait already.
        let waits = |worker: &mut Worker| {
            worker.vif(port).is_some_and(|vif| !vif.queues[queue].held.is_empty())
        };
        if !waits(self) && matches!(self.try_send(frame, port, queue), Outcome::Done) {
            return;
        }
        let now_ns = self.turn.now_ns;
        let Some(vif) = self.vif(port) else { return };
        let q = &mut vif.queues[queue];
        let is_full = q.held.len() >= HELD_MAX || q.is_starved || !may;
        let From::Guest(from) = frame.from else {
            count(&vif.counters.starved);
            return self.is_dropped(frame, Some((port, queue)), Ended::Starved);
        };
        if is_full {
            count(&vif.counters.starved);
            self.is_dropped(frame, Some((port, queue)), Ended::Starved);
            return self.dropped(frame.from);
        }
        let mut header = vec![0; frame.header.len()];
        self.arena.copy_out(frame.header, &mut header);
        if let Some(pending) = self.pending(from) {
            pending.is_held = true;
        }
        if let Some(vif) = self.vif(port) {
            let (seen_ns, fetched_ns) = (frame.seen_ns, frame.fetched_ns);
            let held = Held { from, header, since_ns: now_ns, seen_ns, fetched_ns };
            vif.queues[queue].held.push_back(held);
        }
    }

    /// Sends held packets whose receivers have pages now, and drops those that have waited too long.
    pub(super) fn retry_held(&mut self) {
        for at in 0..self.vifs.len() {
            let queues = self.vifs[at].as_ref().map_or(0, |vif| vif.queues.len());
            for queue in 0..queues {
                self.retry(PortId(at as u16), queue);
            }
        }
    }

    fn retry(&mut self, port: PortId, queue: usize) {
        let (now_ns, hold_ns) = (self.turn.now_ns, self.start.hold_ms * 1_000_000);
        // Half of the room is for new packets.
        while self.turn.headers < super::HEADERS - super::TAKEN_MAX {
            let Some(q) = self.vif(port).and_then(|vif| vif.queues.get_mut(queue)) else { return };
            let Some(held) = q.held.pop_front() else { return };
            let Some(frame) = self.frame_of(&held) else { continue };
            match self.try_send(&frame, port, queue) {
                Outcome::Done => self.unhold(&held),
                Outcome::NoPages if now_ns.saturating_sub(held.since_ns) >= hold_ns => {
                    if let Some(vif) = self.vif(port) {
                        vif.queues[queue].is_starved = true;
                        count(&vif.counters.starved);
                    }
                    self.turn.has_worked = true;
                    self.is_dropped(&frame, Some((port, queue)), Ended::Starved);
                    self.dropped(From::Guest(held.from));
                }
                Outcome::NoPages => {
                    if let Some(vif) = self.vif(port) {
                        vif.queues[queue].held.push_front(held);
                    }
                    return;
                }
            }
        }
    }

    /// It is part of the turn now.
    fn unhold(&mut self, held: &Held) {
        if let Some(pending) = self.pending(held.from) {
            pending.is_held = false;
        }
    }

    /// The packet as a frame, its header in the arena again.
    fn frame_of(&mut self, held: &Held) -> Option<Frame> {
        let pending = self.pending(held.from)?;
        let (size, offload) = (pending.taken.size, pending.taken.offload);
        let header = self.header_room()?.slice(0, held.header.len());
        self.arena.copy_in(header, &held.header);
        let (seen_ns, fetched_ns) = (held.seen_ns, held.fetched_ns);
        Some(Frame { from: From::Guest(held.from), header, size, offload, seen_ns, fetched_ns })
    }
}
