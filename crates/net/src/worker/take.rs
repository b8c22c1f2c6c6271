//! Packets are taken from transmit rings, and the first bytes of their frames copied.

use ferrite_xen::netif::{FRAME_BYTES_MIN, RSP_ERROR};
use ferrite_xen::pages::{Granted, Piece, Side};

use super::{Frame, From, HEADER_BYTES, QUEUE_MAX, TAKEN_MAX, Worker};
use crate::counters::count;
use crate::packet::{Stop, Taken};
use crate::switch::PortId;
use crate::vif::{Ref, Vif, sent};

/// Bytes that are copied before a frame is judged. Where a frontend has the headers in a part of their own, that part
/// is enough, and the other parts are copied as they are, each by one piece.
fn header_len(taken: &Taken) -> usize {
    let first = taken.parts().first().map_or(0, |part| usize::from(part.len));
    taken.size.min(HEADER_BYTES).min(first.max(FRAME_BYTES_MIN))
}

/// The pieces that bring the beginning of a guest's frame into the arena.
fn add_fetch(vifs: &[Option<Vif>], frame: &Frame, pieces: &mut Vec<Piece>) {
    let From::Guest(from) = frame.from else { return };
    let Some((domid, taken)) = sent(vifs, from) else { return };
    let mut at = 0;
    for (gref, offset, len) in taken.pieces(0, frame.header.len()) {
        let source = Side::Granted(Granted { domid, gref, offset });
        let dest = Side::Local(frame.header.slice(at, usize::from(len)));
        pieces.push(Piece::new(source, dest, len));
        at += usize::from(len);
    }
}

impl Worker {
    /// Takes packets from all queues, some from each.
    pub(super) fn take_all(&mut self) {
        let ports = self.vifs.len();
        for i in 0..ports {
            let at = (self.first + i) % ports;
            let queues = self.vifs[at].as_ref().map_or(0, |vif| vif.queues.len());
            for queue in 0..queues {
                let port = PortId(at as u16);
                if let Err(stop) = self.take_from(port, queue) {
                    self.turn.stops.push((port, stop));
                }
            }
        }
        self.first = (self.first + 1) % ports.max(1);
    }

    fn take_from(&mut self, port: PortId, queue: usize) -> Result<(), Stop> {
        for _ in 0..QUEUE_MAX {
            if self.turn.frames.len() >= TAKEN_MAX {
                return Ok(());
            }
            let Some(vif) = self.vif(port) else { return Ok(()) };
            let (epoch, q) = (vif.epoch, &mut vif.queues[queue]);
            let mut there = q.rings.tx_unconsumed()?;
            if there == 0 {
                return Ok(());
            }
            let taken = Taken::take(&mut q.rings, &mut there)?;
            q.has_worked = true;
            let (fault, size, offload) = (taken.fault, taken.size, taken.offload);
            let header_len = header_len(&taken);
            let seq = q.add(taken);
            if let Some(fault) = fault {
                count(&vif.counters.malformed);
                if let Some(pending) = q.get_mut(seq) {
                    pending.status = RSP_ERROR;
                }
                tracing::trace!("{}: {fault}", vif.id);
            }
            self.turn.has_worked = true;
            if fault.is_some() {
                continue;
            }
            let Some(room) = self.header_room() else { return Ok(()) };
            let header = room.slice(0, header_len);
            let from = From::Guest(Ref { port, epoch, queue, seq });
            let (seen_ns, fetched_ns) = (self.turn.now_ns, 0);
            self.turn.frames.push(Frame { from, header, size, offload, seen_ns, fetched_ns });
        }
        Ok(())
    }

    /// Copies the headers of all frames that were taken. A frame whose header cannot be copied is refused.
    pub(super) fn fetch_headers(&mut self) {
        let frames = std::mem::take(&mut self.turn.frames);
        // Not the turn's: those of held packets are there already.
        let mut pieces = std::mem::take(&mut self.turn.fetches);
        let mut ends = Vec::with_capacity(frames.len());
        for frame in &frames {
            add_fetch(&self.vifs, frame, &mut pieces);
            ends.push(pieces.len());
        }
        let outcome = self.copy_pieces(&mut pieces);
        let mut begin = 0;
        let mut fetched = frames;
        let mut ends = ends.into_iter();
        fetched.retain(|frame| {
            let end = ends.next().unwrap_or(begin);
            let is_ok = outcome && pieces[begin..end].iter().all(Piece::is_ok);
            begin = end;
            if !is_ok {
                self.fail(frame.from);
            }
            is_ok
        });
        pieces.clear();
        (self.turn.frames, self.turn.fetches) = (fetched, pieces);
    }

    /// A copy of a guest's frame failed.
    pub(super) fn fail(&mut self, from: From) {
        let From::Guest(from) = from else { return };
        if let Some(vif) = self.vif(from.port) {
            count(&vif.counters.failed);
        }
        if let Some(pending) = self.pending(from) {
            pending.status = RSP_ERROR;
        }
    }

    /// Carries out pieces. `false`: none of them counts.
    pub(super) fn copy_pieces(&mut self, pieces: &mut [Piece]) -> bool {
        if pieces.is_empty() {
            return true;
        }
        match self.start.pages.copy(&self.arena, pieces) {
            Ok(()) => true,
            Err(e) => {
                // Once, then each time that there are twice as many.
                self.copy_failures += 1;
                if self.copy_failures.is_power_of_two() {
                    tracing::error!(
                        "{} copies of packets have failed, the last one with: {e}; see the kernel's log",
                        self.copy_failures
                    );
                }
                false
            }
        }
    }
}
