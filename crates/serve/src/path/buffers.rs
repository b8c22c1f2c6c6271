//! A path's data memory: it is used while there are requests, and given back after a while without.

use ferrite_io::pool::{Buf, QueuePool};
use ferrite_io::reactor::Reactor;

/// A path's part of the pool.
pub(super) struct Buffers {
    pool: QueuePool,
    /// Whether buffers were in use since memory was given back last.
    warm: bool,
    /// Whether the kernel does not unpin the memory.
    pinned: bool,
    /// The number of pages for which requests were held back once.
    rested_for: u32,
}

impl Buffers {
    pub(super) fn new(pool: QueuePool) -> Buffers {
        Buffers { pool, warm: false, pinned: false, rested_for: 0 }
    }

    /// A buffer. `None`: all are in use. The first one registers the pool with the engine.
    pub(super) fn alloc(&mut self, bytes: usize, reactor: &mut Reactor) -> Option<Buf> {
        if !std::mem::replace(&mut self.warm, true) {
            let all = self.pool.warm();
            reactor.pin(all);
        }
        self.pool.alloc(bytes)
    }

    /// Lets the pool [borrow](QueuePool::borrow_more) pages that it wants, unless buffers are in
    /// use. Call it when nothing is in flight.
    pub(super) fn borrow_more(&mut self, reactor: &mut Reactor) {
        if self.pool.wants_more() && !self.are_in_use() && reactor.unpin() {
            self.pool.borrow_more();
            reactor.pin(self.pool.warm());
        }
    }

    /// Whether to hold requests back until nothing is in flight, so that the pool can borrow. A
    /// guest that always has requests in flight would never let it. It is done once for each
    /// amount, since a request may be in flight for any time.
    pub(super) fn rest_to_borrow(&mut self, in_flight: bool) -> bool {
        let Some(pages) = self.pool.more_wanted().filter(|pages| *pages > self.rested_for) else {
            return false;
        };
        if !in_flight {
            self.rested_for = pages;
        }
        in_flight
    }

    pub(super) fn free(&mut self, buf: Buf) {
        self.pool.free(buf);
    }

    /// Whether any buffer is in use.
    pub(super) fn are_in_use(&self) -> bool {
        self.pool.in_use() > 0
    }

    /// Whether there is memory to give back.
    pub(super) fn are_warm(&self) -> bool {
        self.warm && !self.pinned
    }

    /// Gives the memory back. Returns whether that was done.
    pub(super) fn cool(&mut self, reactor: &mut Reactor) -> bool {
        if !reactor.unpin() {
            self.pinned = true;
            return false;
        }
        let warm = std::mem::take(&mut self.warm);
        if warm {
            self.rested_for = 0;
            // A remote's tasks wait for what comes with the memory in hand.
            match reactor.has_remotes() {
                true => self.pool.cool_buffers(),
                false => self.pool.cool(),
            }
        }
        warm
    }
}
