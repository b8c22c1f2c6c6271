//! Neighbours on the medium share one operation, whichever requests of a sweep they belong to.
//!
//! Requests in flight together have no order among them, so those between two flushes or barriers
//! are sorted by place, and runs become vectored transfers; nothing is moved across a flush or
//! a barrier. A run is bounded in bytes, so that a device still has several operations to work
//! on, and in pieces. When a shared operation fails or stops short, the pieces that it did not
//! cover are done again one by one: each request gets the status that it would have got alone.

use ferrite_io::arena::Span;
use ferrite_io::engine::{Completion, FileId, MAX_VECTORED, Op, Transfer};

use super::RequestPath;
use super::pieces::Piece;

/// The largest shared operation, in bytes.
const MAX_MERGED_BYTES: usize = 512 << 10;

/// A piece of a request's data, with its place.
pub(super) struct Placed {
    /// The sort key: the number of flushes before it, its file (31 bits, FileId), its transfer, and
    /// its place in the file. It is one number, since comparing several is most of what sorting
    /// them costs.
    key: u128,
    piece: u16,
    blocks: Span,
}

impl Placed {
    pub(super) fn new(index: u16, piece: &Piece, flushes: u32) -> Placed {
        let write = u64::from(piece.transfer == Transfer::Write);
        let kind = u64::from(flushes) << 32 | u64::from(piece.file.0) << 1 | write;
        let key = u128::from(kind) << 64 | u128::from(piece.offset);
        Placed { key, piece: index, blocks: piece.blocks }
    }

    /// Whether `next` begins where this piece ends.
    fn touches(&self, next: &Placed) -> bool {
        self.key + self.blocks.len() as u128 == next.key
    }
}

impl RequestPath {
    /// Submits all placed pieces.
    pub(super) fn push_placed(&mut self) {
        let mut placed = std::mem::take(&mut self.placed);
        let merge = self.shared.tuning.merge;
        if merge && placed.len() > 1 {
            placed.sort_unstable_by_key(|placed| placed.key);
        }
        for run in placed.chunk_by(|here, next| merge && here.touches(next)) {
            match run {
                [alone] => {
                    self.number_operation(std::slice::from_ref(alone));
                    self.push_shared(alone, &[alone.blocks]);
                }
                _ => self.push_run(run),
            }
        }
        placed.clear();
        self.placed = placed;
    }

    /// Submits neighbours in as few operations as the bounds of one allow.
    fn push_run(&mut self, mut run: &[Placed]) {
        while let [first, rest @ ..] = run {
            let mut shared = Run::new(first.blocks);
            let more = rest.iter().take_while(|next| shared.add(next.blocks)).count();
            for (here, next) in run.iter().zip(&rest[..more]) {
                self.pieces.get(here.piece).next = Some(next.piece);
            }
            self.counters().merged.add(more as u64);
            self.number_operation(&run[..=more]);
            self.push_shared(first, shared.pieces());
            run = &rest[more..];
        }
    }

    /// Records for all requests of these pieces that they share one operation.
    #[inline]
    fn number_operation(&mut self, pieces: &[Placed]) {
        // 0 means none, and numbers repeat only after four thousand million.
        self.operations = self.operations.wrapping_add(1).max(1);
        for placed in pieces {
            let entry = self.pieces.get(placed.piece).entry;
            let record = &mut self.flights.at(entry).record;
            // A request with several pieces records the operation of the first.
            if record.transfer == 0 {
                record.transfer = self.operations;
                record.sharing = pieces.len() as u16;
            }
        }
    }

    /// Submits one operation for `first` and the pieces after it that share it. `spans` is their
    /// memory.
    fn push_shared(&mut self, first: &Placed, spans: &[Span]) {
        self.counters().transfers.add(1);
        let Piece { transfer, file, offset, .. } = *self.pieces.get(first.piece);
        let token = u64::from(first.piece);
        match spans {
            [one] => self.reactor.push(token, op(transfer, file, offset, *one)),
            _ => self.reactor.push_vectored(token, transfer, file, offset, spans),
        }
    }

    /// Handles the end of a data operation of one or several pieces.
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

    /// Gives a piece its part of a shared operation's bytes. Without a whole block it is submitted
    /// alone.
    fn share_out(&mut self, index: u16, left: &mut usize, now_ns: u64) {
        let part = self.pieces.get(index).blocks.len().min(*left);
        *left -= part;
        // The place where a shared operation has stopped says nothing about a piece that it has not
        // reached.
        let part = part - part % self.medium.block_bytes;
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

    /// Adds a piece, and joins it with the last one if it follows that in memory. `false`: the run
    /// is full.
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
