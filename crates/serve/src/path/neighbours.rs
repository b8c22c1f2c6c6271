//! Requests of a sweep that are adjacent on the disk, in any order of arrival.
//!
//! They are found before data are moved, for two reasons. A sweep of requests that are close
//! together with gaps is extended, since the rest of a batch may belong there. And neighbours'
//! buffers are exchanged: data that are contiguous on the disk become contiguous in memory, and one
//! plain transfer moves them (sources.md 4). A device pays for each piece of scattered memory.

use ferrite_io::pool::Buf;

use super::flight::Flights;
use super::layout::Layout;

/// The stretch of a disk in which requests are close together, in bytes: two of the largest shared
/// operations.
const CLOSE_BYTES: u64 = 1 << 20;

/// The bit of the key that tells writes from reads. Offsets on a disk are below it.
const WRITE: u64 = 1 << 63;

/// A request of this sweep.
#[derive(Clone, Copy)]
struct Here {
    /// Offset of its whole blocks on the disk in bytes, with [`WRITE`].
    key: u64,
    bytes: u32,
    entry: u16,
}

impl Here {
    /// Whether `next` begins where this request ends.
    fn touches(&self, next: &Here) -> bool {
        self.key + u64::from(self.bytes) == next.key
    }
}

/// The reads and writes of a sweep.
#[derive(Default)]
pub(super) struct Neighbours {
    requests: Vec<Here>,
    /// Scratch space of [`order_buffers`](Self::order_buffers).
    bufs: Vec<Buf>,
}

impl Neighbours {
    /// Adds a request of the sweep.
    #[inline]
    pub(super) fn add(&mut self, entry: u16, write: bool, layout: &Layout) {
        let key = layout.offset | if write { WRITE } else { 0 };
        // A request is at most 1 MiB.
        self.requests.push(Here { key, bytes: layout.blocks.len() as u32, entry });
    }

    /// Whether the requests are close together and leave gaps.
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

    /// Exchanges the buffers of neighbours, so that these have the order of the requests on the
    /// disk. The buffers must be empty. It ends the sweep.
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

    /// Exchanges the buffers of one run. They have to be of one size, so that each fits each
    /// request, and full: others would leave gaps.
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
