//! The pieces of requests' data: one for each place on the medium.

use ferrite_io::arena::Span;
use ferrite_io::engine::{FileId, Transfer};

/// Most pieces of one request. One with more places is done step by step.
pub(super) const MAX_PIECES: usize = 16;

/// Most pieces in flight of a queue, besides one for each request.
const SPARE_PIECES: usize = 256;

/// A part of a request's data that is in one place, on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The request's entry.
    pub(super) entry: u16,
    pub(super) transfer: Transfer,
    pub(super) file: FileId,
    /// Offset in the file, in bytes.
    pub(super) offset: u64,
    pub(super) blocks: Span,
    /// Bytes that storage has done.
    pub(super) done_bytes: usize,
    /// Times in a row that storage has asked to try again.
    pub(super) retries: u32,
    /// The next piece on the medium that shares the operation.
    pub(super) next: Option<u16>,
}

/// A queue's pieces: a fixed table, so that a piece's number is a token for the engine.
pub(super) struct Pieces {
    slots: Vec<Option<Piece>>,
    free: Vec<u16>,
    /// Number of free pieces that are not kept for the first pieces of requests.
    spare: usize,
}

impl Pieces {
    /// A table for a ring of this many entries.
    pub(super) fn new(entries: u32) -> Pieces {
        let all = entries as usize + SPARE_PIECES;
        // A ring has at most 512 entries.
        Pieces {
            slots: vec![None; all],
            free: (0..all as u16).rev().collect(),
            spare: SPARE_PIECES,
        }
    }

    /// Reserves `count - 1` pieces for a request: the first one is always kept for it. `false`:
    /// there are too few now.
    pub(super) fn reserve(&mut self, count: usize) -> bool {
        let more = count - 1;
        let ok = more <= self.spare;
        if ok {
            self.spare -= more;
        }
        ok
    }

    /// Returns the [reserved](Self::reserve) pieces of a request that is done.
    pub(super) fn give_back(&mut self, count: usize) {
        self.spare += count - 1;
    }

    /// Adds a piece that is [reserved](Self::reserve), or the first of its request.
    pub(super) fn add(&mut self, piece: Piece) -> u16 {
        let Some(index) = self.free.pop() else {
            unreachable!("there is a piece for each entry, and those beyond are counted");
        };
        self.slots[usize::from(index)] = Some(piece);
        index
    }

    /// Whether any piece is in flight.
    pub(super) fn are_in_flight(&self) -> bool {
        self.free.len() < self.slots.len()
    }

    pub(super) fn get(&mut self, index: u16) -> &mut Piece {
        match &mut self.slots[usize::from(index)] {
            Some(piece) => piece,
            None => unreachable!("piece {index} is not in flight"),
        }
    }

    /// Removes a piece that has ended.
    pub(super) fn remove(&mut self, index: u16) -> Piece {
        match self.slots[usize::from(index)].take() {
            Some(piece) => {
                self.free.push(index);
                piece
            }
            None => unreachable!("piece {index} is not in flight"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_io::arena::Arena;

    #[test]
    fn every_entry_finds_a_piece_however_many_others_take() {
        let arena = Arena::new(1).unwrap();
        let piece = |entry| Piece {
            entry,
            transfer: Transfer::Read,
            file: FileId(0),
            offset: 0,
            blocks: arena.span(0, 512),
            done_bytes: 0,
            retries: 0,
            next: None,
        };
        let mut pieces = Pieces::new(32);
        let mut taken = Vec::new();
        for entry in 0..32 {
            let count = if pieces.reserve(MAX_PIECES) { MAX_PIECES } else { 1 };
            taken.extend((0..count).map(|_| pieces.add(piece(entry))));
        }
        assert!(!pieces.reserve(MAX_PIECES));
        assert_eq!(taken.len(), 32 + SPARE_PIECES / (MAX_PIECES - 1) * (MAX_PIECES - 1));
        for index in taken {
            pieces.remove(index);
        }
        pieces.give_back(1 + SPARE_PIECES / (MAX_PIECES - 1) * (MAX_PIECES - 1));
        assert!(pieces.spare == SPARE_PIECES && pieces.free.len() == 32 + SPARE_PIECES);
    }
}
