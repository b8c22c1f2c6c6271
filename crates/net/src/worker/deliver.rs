//! The switch judges frames; each delivery takes pages of its receiver, and adds its pieces.

use ferrite_xen::hypervisor::{GrantRef, PAGE_SIZE};
use ferrite_xen::netif::RSP_DROPPED;
use ferrite_xen::pages::{Granted, Piece, Side};

use super::{Delivery, Frame, From, To, Worker};
use crate::counters::count;
use crate::packet::Stop;
use crate::switch::{PortId, Refused, Target};

/// What became of a frame and one of its receivers.
pub(super) enum Outcome {
    /// It is on its way, or was dropped for good.
    Done,
    /// The receiver has no pages for it now.
    NoPages,
}

impl Worker {
    /// Judges all frames of the turn.
    pub(super) fn deliver_all(&mut self) {
        let frames = std::mem::take(&mut self.turn.frames);
        for frame in &frames {
            self.deliver(frame);
        }
        self.turn.frames = frames;
    }

    fn deliver(&mut self, frame: &Frame) {
        // The private copy, which is also what the receiver gets.
        let mut header = [0; super::HEADER_BYTES];
        let seen = frame.header.len().min(header.len());
        self.arena.copy_out(frame.header.slice(0, seen), &mut header[..seen]);
        let mut targets = std::mem::take(&mut self.targets);
        match self.switch.route(Self::source(frame.from), &header[..seen], &mut targets) {
            Ok(()) => self.send_to(frame, &targets),
            Err(refused) => self.refuse(frame.from, refused),
        }
        self.targets = targets;
    }

    fn refuse(&mut self, from: From, refused: Refused) {
        let From::Guest(from) = from else { return };
        let Some(vif) = self.vif(from.port) else { return };
        match refused {
            Refused::Spoofed(_) => count(&vif.counters.spoofed),
            _ => count(&vif.counters.malformed),
        }
    }

    fn send_to(&mut self, frame: &Frame, targets: &[Target]) {
        if targets.is_empty() {
            self.drop_of(frame.from);
        }
        for target in targets {
            match target {
                Target::Uplink => self.send_up(frame),
                Target::Port(port) => {
                    let queue = self.receiving_queue(frame, *port);
                    // A packet for many waits for none of them.
                    let may_hold = targets.len() == 1;
                    self.send_or_hold(frame, *port, queue, may_hold);
                }
            }
        }
    }

    /// The packets of one sender's queue go to one queue of the receiver, so they stay in order.
    fn receiving_queue(&mut self, frame: &Frame, port: PortId) -> usize {
        let from = match frame.from {
            From::Guest(from) => from.queue,
            From::Uplink => 0,
        };
        from % self.vif(port).map_or(1, |vif| vif.queues.len().max(1))
    }

    fn drop_of(&mut self, from: From) {
        if let From::Guest(from) = from
            && let Some(vif) = self.vif(from.port)
        {
            count(&vif.counters.dropped);
        }
    }

    /// Takes pages of the receiver for a frame and adds the pieces, if there are enough pages.
    pub(super) fn try_send(&mut self, frame: &Frame, port: PortId, queue: usize) -> Outcome {
        let pages = frame.size.div_ceil(PAGE_SIZE);
        let slots = pages + usize::from(frame.offload.gso.is_some());
        let Some(vif) = self.vif(port) else { return Outcome::Done };
        if !vif.features.takes(frame.offload, pages) {
            count(&vif.counters.unsupported);
            self.drop_of(frame.from);
            return Outcome::Done;
        }
        let Some(q) = vif.queues.get_mut(queue) else { return Outcome::Done };
        let there = match q.rings.rx_unconsumed() {
            Ok(there) => there as usize,
            Err(violation) => {
                self.turn.stops.push((port, Stop::Ring(violation)));
                return Outcome::Done;
            }
        };
        if there < slots {
            return Outcome::NoPages;
        }
        q.is_starved = false;
        let domid = vif.domid;
        let first = self.turn.rx.len();
        for _ in 0..slots {
            let Some(q) = self.vif(port).and_then(|vif| vif.queues.get_mut(queue)) else { break };
            let request = q.rings.take_rx();
            self.turn.rx.push(request);
        }
        let rx = first..self.turn.rx.len();
        let extra = usize::from(frame.offload.gso.is_some());
        let begin = self.turn.pieces.len();
        self.for_sources(frame, |worker, at, source, len| {
            let page = at / PAGE_SIZE;
            // The second slot of a packet with an extra info is that.
            let slot = if page == 0 { 0 } else { page + extra };
            let gref = worker.turn.rx[first + slot].gref;
            let offset = (at % PAGE_SIZE) as u16;
            let dest = Side::Granted(Granted { domid, gref, offset });
            worker.turn.pieces.push(Piece::new(source, dest, len));
        });
        let pieces = begin..self.turn.pieces.len();
        let to = To::Port { port, queue, rx };
        self.turn.deliveries.push(Delivery { frame: *frame, to, pieces });
        self.turn.has_worked = true;
        Outcome::Done
    }

    /// Calls `each` with pieces of the frame, in order, none of which crosses a page of the receiver: first byte in
    /// the frame, where it is, bytes. The header is the private copy.
    fn for_sources(&mut self, frame: &Frame, mut each: impl FnMut(&mut Worker, usize, Side, u16)) {
        let mut at = 0;
        while at < frame.header.len() {
            let len = (frame.header.len() - at).min(PAGE_SIZE - at % PAGE_SIZE);
            each(self, at, Side::Local(frame.header.slice(at, len)), len as u16);
            at += len;
        }
        let From::Guest(from) = frame.from else { return };
        let Some(domid) = self.vif(from.port).map(|vif| vif.domid) else { return };
        let Some(taken) =
            self.queue_of(from).and_then(|q| q.get(from.seq)).map(|p| p.taken.clone())
        else {
            return;
        };
        for (gref, mut offset, mut len) in taken.pieces(at, frame.size) {
            while len > 0 {
                let part = len.min((PAGE_SIZE - at % PAGE_SIZE) as u16);
                let gref = GrantRef(gref.0);
                each(self, at, Side::Granted(Granted { domid, gref, offset }), part);
                (at, offset, len) = (at + usize::from(part), offset + part, len - part);
            }
        }
    }

    /// Brings a guest's frame into the arena for the uplink.
    fn send_up(&mut self, frame: &Frame) {
        let Some(room) = self.uplink_room() else { return self.drop_of(frame.from) };
        let room = room.slice(0, frame.size);
        // The header as it was judged, then the rest.
        let mut header = vec![0; frame.header.len()];
        self.arena.copy_out(frame.header, &mut header);
        self.arena.copy_in(room.slice(0, header.len()), &header);
        let begin = self.turn.pieces.len();
        let rest = frame.header.len();
        self.for_sources(frame, |worker, at, source, len| {
            if at >= rest {
                let dest = Side::Local(room.slice(at, usize::from(len)));
                worker.turn.pieces.push(Piece::new(source, dest, len));
            }
        });
        let pieces = begin..self.turn.pieces.len();
        self.turn.deliveries.push(Delivery { frame: *frame, to: To::Uplink(room), pieces });
    }

    /// Takes frames of the uplink.
    pub(super) fn receive_uplink(&mut self) {
        for _ in 0..super::UPLINK_FRAMES / 2 {
            let Some(uplink) = &mut self.start.uplink else { return };
            let (len, offload) = match uplink.receive(&mut self.bytes) {
                Ok(Some(received)) => received,
                Ok(None) => return,
                Err(e) => {
                    tracing::error!("the uplink is broken: {e}; guests reach each other only");
                    self.start.uplink = None;
                    return;
                }
            };
            self.turn.has_worked = true;
            if !(ferrite_xen::netif::FRAME_BYTES_MIN..=self.bytes.len()).contains(&len) {
                continue;
            }
            let Some(room) = self.uplink_room() else { return };
            let header = room.slice(0, len);
            self.arena.copy_in(header, &self.bytes[..len]);
            self.turn.frames.push(Frame { from: From::Uplink, header, size: len, offload });
        }
    }

    /// The status of a packet that was dropped.
    pub(super) fn dropped(&mut self, from: From) {
        self.drop_of(from);
        if let From::Guest(from) = from {
            self.release(from, RSP_DROPPED);
        }
    }
}
