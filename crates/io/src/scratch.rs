//! A small part of the arena for what tasks read and write besides guests' data: tables, bitmaps.
//!
//! For one thread. A task that finds too little free waits, first come first served, so a task must
//! not hold a piece while it waits for a second one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use crate::arena::{Arena, Span};

/// The unit of allocation in bytes, and the alignment.
const UNIT_BYTES: usize = 4096;

/// Bytes that a task gets at most in one piece.
pub const MAX_PIECE_BYTES: usize = 64 << 10;

/// Bytes of the smallest region that serves: a largest piece.
pub const MIN_REGION_BYTES: usize = MAX_PIECE_BYTES;

struct State {
    /// By unit of the region.
    taken: Vec<bool>,
    /// Numbers and wakers of those that wait, the first to come first.
    waiting: VecDeque<(u64, Waker)>,
    next_number: u64,
}

/// See the module text. A handle; clones share the region.
#[derive(Clone)]
pub struct Scratch {
    arena: Arc<Arena>,
    region: Span,
    state: Rc<RefCell<State>>,
}

impl Scratch {
    /// Hands out pieces of `region`, which has no other user from now on; an empty one is for those
    /// that take none.
    ///
    /// # Panics
    /// If the region is not whole pages, or smaller than [`MIN_REGION_BYTES`] and not empty.
    pub fn new(arena: Arc<Arena>, region: Span) -> Scratch {
        let whole = region.offset().is_multiple_of(UNIT_BYTES);
        let large = region.is_empty() || region.len() >= MIN_REGION_BYTES;
        assert!(whole && large, "{region:?} is no scratch region");
        let taken = vec![false; region.len() / UNIT_BYTES];
        let state = State { taken, waiting: VecDeque::new(), next_number: 0 };
        Scratch { arena, region, state: Rc::new(RefCell::new(state)) }
    }

    /// A piece of `bytes`, rounded up to 4096; its content is left from its last use.
    ///
    /// # Panics
    /// For 0 bytes, or more than [`MAX_PIECE_BYTES`]; if the region is empty.
    pub async fn take(&self, bytes: usize) -> Piece {
        assert!(!self.region.is_empty(), "nothing was set aside to take from");
        assert!((1..=MAX_PIECE_BYTES).contains(&bytes), "a piece of {bytes} bytes");
        let units = bytes.div_ceil(UNIT_BYTES);
        let mut number = Number { scratch: self, number: None };
        let first = poll_fn(|cx| {
            let mut state = self.state.borrow_mut();
            let turn = match number.number {
                None => state.waiting.is_empty(),
                Some(n) => state.waiting.front().is_some_and(|(first, _)| *first == n),
            };
            if let Some(first) = turn.then(|| state.find(units)).flatten() {
                state.taken[first..first + units].fill(true);
                return Poll::Ready(first);
            }
            match number.number {
                None => {
                    let n = state.next_number;
                    state.next_number += 1;
                    state.waiting.push_back((n, cx.waker().clone()));
                    number.number = Some(n);
                }
                Some(n) => {
                    if let Some((_, waker)) = state.waiting.iter_mut().find(|(w, _)| *w == n) {
                        waker.clone_from(cx.waker());
                    }
                }
            }
            Poll::Pending
        })
        .await;
        let whole = self.region.slice(first * UNIT_BYTES, units * UNIT_BYTES);
        Piece { scratch: self.clone(), whole, bytes }
    }

    /// The arena that the pieces are of.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

impl State {
    fn find(&self, units: usize) -> Option<usize> {
        self.taken.windows(units).position(|w| !w.contains(&true))
    }

    fn wake_first(&self) {
        if let Some((_, waker)) = self.waiting.front() {
            waker.wake_by_ref();
        }
    }
}

/// A place in the queue of those that wait; given up when it is dropped.
struct Number<'a> {
    scratch: &'a Scratch,
    number: Option<u64>,
}

impl Drop for Number<'_> {
    fn drop(&mut self) {
        let Some(n) = self.number else { return };
        let mut state = self.scratch.state.borrow_mut();
        state.waiting.retain(|(w, _)| *w != n);
        state.wake_first();
    }
}

/// A piece of the arena, free again when it is dropped. No operation may be using it then.
pub struct Piece {
    scratch: Scratch,
    whole: Span,
    bytes: usize,
}

impl Piece {
    /// Where it is; as long as was asked for.
    pub fn span(&self) -> Span {
        self.whole.slice(0, self.bytes)
    }

    /// Copies its bytes out, from the start on.
    ///
    /// # Panics
    /// If `to` is longer than the piece.
    pub fn copy_out(&self, to: &mut [u8]) {
        self.scratch.arena.copy_out(self.whole.slice(0, to.len()), to);
    }

    /// Copies bytes in, from the start on.
    ///
    /// # Panics
    /// If `from` is longer than the piece.
    pub fn copy_in(&self, from: &[u8]) {
        self.scratch.arena.copy_in(self.whole.slice(0, from.len()), from);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut state = self.scratch.state.borrow_mut();
        let first = (self.whole.offset() - self.scratch.region.offset()) / UNIT_BYTES;
        state.taken[first..first + self.whole.len() / UNIT_BYTES].fill(false);
        state.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    fn scratch() -> Scratch {
        let arena = Arena::new(1).unwrap();
        let region = arena.span(4096, MIN_REGION_BYTES);
        Scratch::new(arena, region)
    }

    #[test]
    fn pieces_do_not_overlap_and_come_back() {
        let s = scratch();
        let mut cx = Context::from_waker(Waker::noop());
        let mut pieces = Vec::new();
        for _ in 0..16 {
            let Poll::Ready(piece) = pin!(s.take(4096)).poll(&mut cx) else {
                panic!("there is room");
            };
            assert!(pieces.iter().all(|p: &Piece| p.span() != piece.span()));
            pieces.push(piece);
        }
        assert!(pin!(s.take(1)).poll(&mut cx).is_pending());
        pieces.clear();
        assert!(pin!(s.take(MAX_PIECE_BYTES)).poll(&mut cx).is_ready());
    }

    #[test]
    fn who_waits_is_served_in_order_even_if_a_later_one_would_fit() {
        let s = scratch();
        let mut cx = Context::from_waker(Waker::noop());
        let Poll::Ready(held) = pin!(s.take(4096)).poll(&mut cx) else { panic!("there is room") };
        let mut large = Box::pin(s.take(MAX_PIECE_BYTES));
        let mut small = Box::pin(s.take(512));
        assert!(large.as_mut().poll(&mut cx).is_pending());
        assert!(small.as_mut().poll(&mut cx).is_pending());
        drop(large);
        let Poll::Ready(piece) = small.as_mut().poll(&mut cx) else { panic!("its turn now") };
        assert_eq!(piece.span().len(), 512);
        drop((held, piece));
        assert!(s.state.borrow().taken.iter().all(|t| !t));
    }
}
