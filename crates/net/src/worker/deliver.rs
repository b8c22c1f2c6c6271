//! The switch judges frames; each delivery takes pages of its receiver, and adds its pieces.

use ferrite_xen::hypervisor::PAGE_SIZE;
use ferrite_xen::netif::{FRAME_BYTES_MIN, PACKET_SLOTS, RSP_DROPPED};
use ferrite_xen::pages::{Granted, Piece, Side};

use super::{Delivery, Frame, From, Room, To, Worker};
use crate::counters::count;
use crate::packet::Stop;
use crate::switch::{PortId, Refused, Target};
use crate::trace::Outcome as Ended;
use crate::vif::{Vif, sent};

/// A frame of so many pages keeps the parts of its sender. A shorter one has few pieces anyway, and is one page at its
/// receiver more often.
const PARTS_KEPT_FROM: usize = 3;

/// Where the next bytes of a frame go.
#[derive(Clone, Copy, Default)]
struct Place {
    part: usize,
    offset: usize,
}

impl Place {
    /// The place of the next bytes, and how many of `most` fit there: at most a page, and at least one.
    fn take(&mut self, lens: &[u16], most: usize) -> (Place, usize) {
        let room = |place: &Place| lens.get(place.part).map(|len| usize::from(*len) - place.offset);
        while room(self) == Some(0) {
            (self.part, self.offset) = (self.part + 1, 0);
        }
        let len = most.min(room(self).unwrap_or(most)).min(PAGE_SIZE);
        let here = *self;
        self.offset += len;
        (here, len)
    }
}

/// The outcome of a frame for one of its receivers.
pub(super) enum Outcome {
    /// It is on its way, or was dropped for good.
    Done,
    /// The receiver has no pages for it now.
    NoPages,
}

/// Calls `each` with pieces of the frame, in order, none of which crosses the end of a part of `lens` bytes: where it
/// goes, where it is, bytes. The header is the private copy.
fn for_sources(
    vifs: &[Option<Vif>],
    frame: &Frame,
    lens: &[u16],
    mut each: impl FnMut(Place, Side, u16),
) {
    let mut place = Place::default();
    let mut at = 0;
    while at < frame.header.len() {
        let (to, len) = place.take(lens, frame.header.len() - at);
        each(to, Side::Local(frame.header.slice(at, len)), len as u16);
        at += len;
    }
    let From::Guest(from) = frame.from else { return };
    let Some((domid, taken)) = sent(vifs, from) else { return };
    for (gref, mut offset, rest) in taken.pieces(at, frame.size) {
        let mut rest = usize::from(rest);
        while rest > 0 {
            let (to, len) = place.take(lens, rest);
            each(to, Side::Granted(Granted { domid, gref, offset }), len as u16);
            (offset, rest) = (offset + len as u16, rest - len);
        }
    }
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
        let mut header = [0; FRAME_BYTES_MIN];
        self.arena.copy_out(frame.header.slice(0, FRAME_BYTES_MIN), &mut header);
        let mut targets = std::mem::take(&mut self.targets);
        match self.switch.route(Self::source(frame.from), &header, &mut targets) {
            Ok(()) => self.send_to(frame, &targets),
            Err(refused) => {
                self.is_dropped(frame, None, Ended::Refused);
                self.refuse(frame.from, refused);
            }
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
            self.is_dropped(frame, None, Ended::Dropped);
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
        let mut lens = std::mem::take(&mut self.lens);
        self.layout(frame, &mut lens);
        let outcome = self.send_in(frame, port, queue, &lens);
        self.lens = lens;
        outcome
    }

    /// How many bytes of a frame go into each page of its receiver. A large frame keeps the parts of its sender: they
    /// are whole pages mostly, so each is one piece. Filled pages would be fewer by one, but nearly each would take two
    /// pieces, as headers come first.
    fn layout(&mut self, frame: &Frame, lens: &mut Vec<u16>) {
        lens.clear();
        let pages = frame.size.div_ceil(PAGE_SIZE);
        if let (From::Guest(from), true) = (frame.from, pages >= PARTS_KEPT_FROM)
            && let Some((_, taken)) = sent(&self.vifs, from)
        {
            let parts = taken.parts();
            if parts.len() <= PACKET_SLOTS.min(pages + 1) {
                lens.extend(parts.iter().map(|part| part.len));
                return;
            }
        }
        let mut rest = frame.size;
        while rest > 0 {
            let len = rest.min(PAGE_SIZE);
            lens.push(len as u16);
            rest -= len;
        }
    }

    fn send_in(&mut self, frame: &Frame, port: PortId, queue: usize, lens: &[u16]) -> Outcome {
        let extra = frame.offload.gso.is_some();
        let slots = lens.len() + usize::from(extra);
        let vif = self.vifs.get_mut(usize::from(port.0)).and_then(Option::as_mut);
        let Some(vif) = vif else { return Outcome::Done };
        if !vif.features.takes(frame.offload, lens.len()) {
            count(&vif.counters.unsupported);
            self.is_dropped(frame, Some((port, queue)), Ended::Dropped);
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
        for slot in 0..slots {
            let request = q.rings.take_rx();
            // The second slot of a packet with an extra info is that.
            let len = match (slot, extra) {
                (1, true) => None,
                (2.., true) => Some(lens[slot - 1]),
                _ => Some(lens[slot]),
            };
            self.turn.rx.push(Room { request, len });
        }
        let super::Turn { rx, pieces, .. } = &mut self.turn;
        let begin = pieces.len();
        for_sources(&self.vifs, frame, lens, |place, source, len| {
            let slot = if place.part == 0 { 0 } else { place.part + usize::from(extra) };
            let gref = rx[first + slot].request.gref;
            let dest = Side::Granted(Granted { domid, gref, offset: place.offset as u16 });
            pieces.push(Piece::new(source, dest, len));
        });
        let (rx, pieces) = (first..rx.len(), begin..pieces.len());
        let to = To::Port { port, queue, rx };
        self.turn.deliveries.push(Delivery::new(frame, to, pieces));
        self.turn.has_worked = true;
        Outcome::Done
    }

    /// Brings a guest's frame into the arena for the uplink.
    fn send_up(&mut self, frame: &Frame) {
        let room = self.room_to_uplink().slice(0, frame.size);
        // The header as it was judged, then the rest.
        let mut header = vec![0; frame.header.len()];
        self.arena.copy_out(frame.header, &mut header);
        self.arena.copy_in(room.slice(0, header.len()), &header);
        let pieces = &mut self.turn.pieces;
        let (begin, rest) = (pieces.len(), frame.header.len());
        let lens = [frame.size as u16];
        for_sources(&self.vifs, frame, &lens, |Place { offset, .. }, source, len| {
            if offset >= rest {
                let dest = Side::Local(room.slice(offset, usize::from(len)));
                pieces.push(Piece::new(source, dest, len));
            }
        });
        let pieces = begin..pieces.len();
        self.turn.deliveries.push(Delivery::new(frame, To::Uplink(room), pieces));
    }

    /// Takes frames of the uplink.
    pub(super) fn receive_uplink(&mut self) {
        if self.start.uplink.is_none() || !self.events.is_uplink_due() {
            return;
        }
        for _ in 0..super::UPLINK_RECEIVED {
            let Some(uplink) = &mut self.start.uplink else { return };
            let (len, offload) = match uplink.receive(&mut self.bytes) {
                Ok(Some(received)) => received,
                Ok(None) => {
                    self.events.has_frames = false;
                    return;
                }
                Err(e) => {
                    tracing::error!("the uplink is broken: {e}; guests reach each other only");
                    return self.lose_uplink();
                }
            };
            self.turn.has_worked = true;
            if !(FRAME_BYTES_MIN..=self.bytes.len()).contains(&len) {
                continue;
            }
            let Some(room) = self.room_from_uplink() else { return };
            let header = room.slice(0, len);
            self.arena.copy_in(header, &self.bytes[..len]);
            let (size, seen_ns, fetched_ns) = (len, self.turn.now_ns, 0);
            let from = From::Uplink;
            self.turn.frames.push(Frame { from, header, size, offload, seen_ns, fetched_ns });
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
