//! Requests of a sweep that lie next to each other on the disk, in whatever order they came.
//!
//! Seen before any data are moved, because two things follow from it: a sweep of requests that are
//! close together, with gaps between them, is longer, since the rest of a batch may belong there;
//! and neighbours' buffers are exchanged, so that what is contiguous on the disk is contiguous in
//! memory and one plain transfer moves it (sources.md 4). A device pays for each
//! piece of scattered memory.

use ferrite_io::pool::Buf;

use super::flight::Flights;
use super::layout::Layout;

/// The stretch of a disk, in bytes, in which requests are close together: two of the largest
/// shared operations.
const CLOSE_BYTES: u64 = 1 << 20;

/// The key's bit that tells writes from reads. Offsets on a disk are below.
const WRITE: u64 = 1 << 63;

/// A request that was taken in this sweep.
#[derive(Clone, Copy)]
struct Here {
    /// Where its whole blocks begin on the disk, in bytes, and [`WRITE`].
    key: u64,
    bytes: u32,
    entry: u16,
}

impl Here {
    /// Whether `next` begins where this ends.
    fn touches(&self, next: &Here) -> bool {
        self.key + u64::from(self.bytes) == next.key
    }
}

/// The reads and writes of a sweep.
#[derive(Default)]
pub(super) struct Neighbours {
    requests: Vec<Here>,
    /// Used by [`order_buffers`](Self::order_buffers).
    bufs: Vec<Buf>,
}

impl Neighbours {
    /// One more of the sweep.
    pub(super) fn add(&mut self, entry: u16, write: bool, layout: &Layout) {
        let key = layout.offset | if write { WRITE } else { 0 };
        // A request is at most 1 MiB.
        self.requests.push(Here { key, bytes: layout.blocks.len() as u32, entry });
    }

    /// Whether they are close together and leave gaps.
    pub(super) fn leave_gaps(&self) -> bool {
        let (mut start, mut end, mut bytes) = (u64::MAX, 0, 0);
        for here in &self.requests {
            let at = here.key & !WRITE;
            start = start.min(at);
            end = end.max(at + u64::from(here.bytes));
            bytes += u64::from(here.bytes);
        }
        let stretch = end.saturating_sub(start);
        bytes < stretch && stretch <= CLOSE_BYTES
    }

    /// Gives neighbours each other's buffers, so that these follow each other as the requests do
    /// on the disk. Nothing may be in the buffers yet. Ends the sweep.
    pub(super) fn order_buffers(&mut self, flights: &mut Flights, block_bytes: usize) {
        if self.requests.len() > 1 {
            self.requests.sort_unstable_by_key(|here| here.key);
            let requests = std::mem::take(&mut self.requests);
            for run in requests.chunk_by(Here::touches).filter(|run| run.len() > 1) {
                self.order_run(run, flights, block_bytes);
            }
            self.requests = requests;
        }
        self.requests.clear();
    }

    /// Buffers of one size, so that each fits each, and which their data fill: others would not
    /// follow each other without a gap.
    fn order_run(&mut self, run: &[Here], flights: &mut Flights, block_bytes: usize) {
        let Some(first) = flights.at(run[0].entry).buf.as_ref().map(|buf| buf.span().len()) else {
            return;
        };
        let mut before = None;
        let mut ordered = true;
        for here in run {
            let span = flights.at(here.entry).buf.as_ref().map(Buf::span);
            if span.is_none_or(|span| span.len() != first || span.len() != here.bytes as usize) {
                return;
            }
            let at = span.map(|span| span.offset());
            ordered &= before < at;
            before = at;
        }
        if ordered {
            return;
        }
        self.bufs.extend(run.iter().filter_map(|here| flights.at(here.entry).buf.take()));
        self.bufs.sort_unstable_by_key(|buf| buf.span().offset());
        for (here, buf) in run.iter().zip(self.bufs.drain(..)) {
            let flight = flights.at(here.entry);
            flight.buf = Some(buf);
            flight.lay_out(block_bytes);
        }
    }
}
