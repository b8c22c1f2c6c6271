//! Writes of one turn of a thread, which share their operations (store.md 3).
//!
//! The first one to come leads: it lets all else of its thread go first, and then carries out what has come
//! meanwhile. The others wait for what it tells them. All of them are tasks of one thread, so whoever is
//! told is polled in the same turn.

use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use foldhash::HashMap;

use crate::content::ContentHash;
use crate::journal::VolumeId;
use crate::medium;

/// Leaves of one part, at most: one of V2P, and of each of its contents one of P2M and one of the hashes.
pub(super) const MAX_LEAVES: usize = 1 + 2 * medium::MAX_BLOCKS;

/// Blocks of one turn, at most: a journal block has as many records of new content, and a few more.
const MAX_BLOCKS: usize = 64;

/// The content that a block refers to after a write.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockTarget {
    /// Content that the store has, by its number, or zeros.
    Number(u64),
    /// Content that the store lacks: its hash and checksum.
    New(ContentHash, u32),
}

/// A write whose blocks are locked, and which is in an epoch: blocks in a row, in one leaf.
pub(super) struct Part {
    pub(super) volume: VolumeId,
    pub(super) domain: u16,
    pub(super) first: u64,
    pub(super) bytes: Vec<u8>,
    /// The target of each block.
    pub(super) gets: Vec<BlockTarget>,
}

/// The state between a queued write and its waiter.
enum Answer {
    Open(Option<Waker>),
    Given(io::Result<()>),
    /// The waiter was dropped. Another task may have locked the blocks since.
    Left,
}

type Shared = Arc<Mutex<Answer>>;

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part that waits in a turn for its leader. Dropped without an answer, it fails.
pub(super) struct QueuedWrite {
    pub(super) part: Part,
    answer: Shared,
}

impl QueuedWrite {
    pub(super) fn answer(&self, result: io::Result<()>) {
        let mut answer = lock(&self.answer);
        if let Answer::Open(waker) = &mut *answer {
            let waker = waker.take();
            *answer = Answer::Given(result);
            drop(answer);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    /// Whether its waiter still holds the locks of its blocks.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(*lock(&self.answer), Answer::Open(_))
    }
}

impl Drop for QueuedWrite {
    fn drop(&mut self) {
        self.answer(Err(io::ErrorKind::BrokenPipe.into()));
    }
}

/// Waits for the answer to a queued write.
pub(super) struct Waiter(Shared);

impl Waiter {
    pub(super) async fn wait(self) -> io::Result<()> {
        poll_fn(|cx| {
            let answer = &mut *lock(&self.0);
            match std::mem::replace(answer, Answer::Left) {
                Answer::Given(result) => Poll::Ready(result),
                _ => {
                    *answer = Answer::Open(Some(cx.waker().clone()));
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        *lock(&self.0) = Answer::Left;
    }
}

struct Turn {
    parts: Vec<QueuedWrite>,
    blocks: usize,
}

/// See the module text.
pub(super) struct Turns {
    /// By thread. One that was full when another part came is its leader's only.
    open: Mutex<HashMap<usize, Arc<Mutex<Turn>>>>,
    /// Of one turn, in the worst case.
    most_leaves: usize,
}

impl Turns {
    /// Turns whose changes take so many leaves at most, and those of one part in any case.
    pub(super) fn new(most_leaves: usize) -> Turns {
        Turns { open: Mutex::default(), most_leaves: most_leaves.max(MAX_LEAVES) }
    }

    /// Hands a part over to the turn of this thread. Whoever is told to lead has to
    /// [close](Leader::close) it, and to answer all.
    pub(super) fn join(&self, thread: usize, part: Part) -> (Waiter, Option<Leader<'_>>) {
        let answer = Arc::new(Mutex::new(Answer::Open(None)));
        let waiter = Waiter(answer.clone());
        let blocks = part.gets.len();
        let queued = QueuedWrite { part, answer };
        let mut open = lock(&self.open);
        let place = open.entry(thread);
        if let Entry::Occupied(known) = &place {
            let mut turn = lock(known.get());
            if self.has_room(&turn, blocks) {
                turn.blocks += blocks;
                turn.parts.push(queued);
                return (waiter, None);
            }
        }
        let turn = Arc::new(Mutex::new(Turn { parts: vec![queued], blocks }));
        place.insert_entry(turn.clone());
        (waiter, Some(Leader { turns: self, thread, turn }))
    }

    /// Each part is in one leaf of V2P, and each content may be in one of P2M and of the hashes each.
    fn has_room(&self, turn: &Turn, more: usize) -> bool {
        let blocks = turn.blocks + more;
        blocks <= MAX_BLOCKS && turn.parts.len() + 1 + 2 * blocks <= self.most_leaves
    }
}

/// Who carries a turn out.
pub(super) struct Leader<'a> {
    turns: &'a Turns,
    thread: usize,
    turn: Arc<Mutex<Turn>>,
}

impl Leader<'_> {
    /// Nobody joins any more. All who did.
    pub(super) fn close(self) -> Vec<QueuedWrite> {
        self.leave();
        std::mem::take(&mut lock(&self.turn).parts)
    }

    fn leave(&self) {
        let mut open = lock(&self.turns.open);
        if open.get(&self.thread).is_some_and(|turn| Arc::ptr_eq(turn, &self.turn)) {
            open.remove(&self.thread);
        }
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}
