//! Neighbours on the medium share one operation, whichever requests of a sweep they belong to.
//!
//! Requests in flight together have no order among them, so those between two flushes or barriers
//! are sorted by place, and runs become vectored transfers; nothing is moved across a flush or
//! a barrier. A run is bounded in bytes, so that a device still has several operations to work
//! on, and in pieces. When a shared operation fails or stops short, the pieces that it did not
//! cover are done again one by one: each request gets the status that it would have got alone.

use ferrite_io::arena::Span;
use ferrite_io::engine::{Completion, FileId, MAX_VECTORED, Op, Transfer};

use super::Queue;

/// The largest shared operation, in bytes.
const MAX_MERGED_BYTES: usize = 512 << 10;

/// A piece of a request's data, and where it lies.
pub(super) struct Placed {
    pub(super) piece: u16,
    pub(super) transfer: Transfer,
    pub(super) file: FileId,
    pub(super) offset: u64,
    pub(super) blocks: Span,
    /// Flushes that were taken off the ring before it.
    pub(super) flushes: u32,
}

impl Placed {
    fn key(&self) -> (u32, u32, bool, u64) {
        (self.flushes, self.file.0, self.transfer == Transfer::Write, self.offset)
    }

    /// Whether `next` begins where this ends.
    fn touches(&self, next: &Placed) -> bool {
        let end = self.offset + self.blocks.len() as u64;
        let here = (self.flushes, self.file, self.transfer, end);
        here == (next.flushes, next.file, next.transfer, next.offset)
    }
}

impl Queue {
    /// Lets neighbours of the sweep have neighbouring buffers, before there are data in them.
    pub(super) fn order_buffers(&mut self) {
        self.neighbours.order_buffers(&mut self.flights, &self.connection.device.disk);
    }

    /// Gives all placed pieces to the engine.
    pub(super) fn push_placed(&mut self) {
        let mut placed = std::mem::take(&mut self.placed);
        if self.connection.tuning.merge && placed.len() > 1 {
            placed.sort_unstable_by_key(Placed::key);
        }
        let mut all = placed.drain(..).peekable();
        while let Some(first) = all.next() {
            let (transfer, file, offset) = (first.transfer, first.file, first.offset);
            let mut run = Run::new(first.blocks);
            let leader = first.piece;
            let mut last = first;
            while self.connection.tuning.merge
                && let Some(next) = all.next_if(|next| last.touches(next) && run.add(next.blocks))
            {
                self.pieces.get(last.piece).next = Some(next.piece);
                self.counters().merged.add(1);
                last = next;
            }
            self.counters().transfers.add(1);
            match run.pieces() {
                [one] => self.reactor.push(u64::from(leader), op(transfer, file, offset, *one)),
                pieces => {
                    self.reactor.push_vectored(u64::from(leader), transfer, file, offset, pieces);
                }
            }
        }
        drop(all);
        self.placed = placed;
    }

    /// An operation for data has ended: of one piece, or of several.
    pub(super) fn transfer_completed(&mut self, leader: u16, completion: Completion, now_ns: u64) {
        let Some(mut next) = self.pieces.get(leader).next.take() else {
            return self.piece_completed(leader, completion, now_ns);
        };
        let mut left = completion.result().map_or(0, |bytes| bytes as usize);
        self.share_out(leader, &mut left, now_ns);
        loop {
            let after = self.pieces.get(next).next.take();
            self.share_out(next, &mut left, now_ns);
            match after {
                Some(after) => next = after,
                None => return,
            }
        }
    }

    /// Gives a piece its part of a shared operation's bytes; without one it goes on alone.
    fn share_out(&mut self, index: u16, left: &mut usize, now_ns: u64) {
        let part = self.pieces.get(index).blocks.len().min(*left);
        *left -= part;
        if part == 0 {
            return self.push_rest(index);
        }
        // A request is at most 1 MiB.
        self.piece_completed(index, Completion { token: 0, raw: part as i32 }, now_ns);
    }
}

/// The operation for one piece of memory.
pub(super) fn op(transfer: Transfer, file: FileId, offset: u64, buf: Span) -> Op {
    match transfer {
        Transfer::Read => Op::Read { file, offset, buf },
        Transfer::Write => Op::Write { file, offset, buf },
    }
}

/// The memory of a shared operation.
struct Run {
    pieces: [Span; MAX_VECTORED],
    count: usize,
    bytes: usize,
}

impl Run {
    fn new(first: Span) -> Run {
        Run { pieces: [first; MAX_VECTORED], count: 1, bytes: first.len() }
    }

    /// Adds a piece, to the last one if it follows it in memory. `false`: the run is full.
    fn add(&mut self, piece: Span) -> bool {
        if self.bytes + piece.len() > MAX_MERGED_BYTES {
            return false;
        }
        match self.pieces[self.count - 1].join(piece) {
            Some(joined) => self.pieces[self.count - 1] = joined,
            None if self.count == MAX_VECTORED => return false,
            None => {
                self.pieces[self.count] = piece;
                self.count += 1;
            }
        }
        self.bytes += piece.len();
        true
    }

    fn pieces(&self) -> &[Span] {
        &self.pieces[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_io::arena::Arena;

    #[test]
    fn pieces_that_follow_each_other_in_memory_become_one() {
        let arena = Arena::new(4 << 20).unwrap();
        let mut run = Run::new(arena.span(0, 4096));
        assert!(run.add(arena.span(4096, 8192)));
        assert_eq!(run.pieces(), [arena.span(0, 12288)]);
        assert!(run.add(arena.span(20480, 4096)));
        assert_eq!(run.pieces(), [arena.span(0, 12288), arena.span(20480, 4096)]);
    }

    #[test]
    fn a_run_is_bounded_in_pieces_and_in_bytes() {
        let arena = Arena::new(4 << 20).unwrap();
        let mut run = Run::new(arena.span(0, 4096));
        for i in 1..MAX_VECTORED {
            assert!(run.add(arena.span(i * 8192, 4096)));
        }
        assert!(!run.add(arena.span(1 << 20, 4096)));
        let mut run = Run::new(arena.span(0, MAX_MERGED_BYTES - 4096));
        assert!(!run.add(arena.span(1 << 20, 8192)));
        assert!(run.add(arena.span(1 << 20, 4096)));
    }
}
