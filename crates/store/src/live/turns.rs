//! Turns: the writes of one thread at one time, which share their operations (store.md 3).
//!
//! The first write is the leader. It lets all other tasks of its thread go first, and then carries out the writes that
//! have joined meanwhile. The others wait for its answers. All are tasks of one thread, so an answered task is polled in
//! the same turn of the reactor.

use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use foldhash::HashMap;

use crate::content::ContentHash;
use crate::journal::VolumeId;
use crate::medium;

/// The most leaves of one part: one of V2P, and for each content one of P2M and one of the hashes.
pub(super) const MAX_LEAVES: usize = 1 + 2 * medium::MAX_BLOCKS;

/// The most blocks of one turn. A journal block has room for this many records of new content, and a few more.
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

type SharedAnswer = Arc<Mutex<Answer>>;

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part that waits in a turn for its leader. Dropped without an answer, it fails.
pub(super) struct QueuedWrite {
    pub(super) part: Part,
    answer: SharedAnswer,
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
pub(super) struct Waiter(SharedAnswer);

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

/// The writes that have joined a turn.
struct Turn {
    parts: Vec<QueuedWrite>,
    blocks: usize,
}

/// The open turns of all threads.
pub(super) struct Turns {
    /// By thread. A turn that was full when another part came is not here, only its leader has it.
    open: Mutex<HashMap<usize, Arc<Mutex<Turn>>>>,
    /// The most leaves that one turn may change.
    most_leaves: usize,
}

impl Turns {
    /// Turns that change at most `most_leaves` leaves. A turn of one part may change as many as it needs.
    pub(super) fn new(most_leaves: usize) -> Turns {
        Turns { open: Mutex::default(), most_leaves: most_leaves.max(MAX_LEAVES) }
    }

    /// Adds a part to the turn of this thread. A task that gets a [`Leader`] must [close](Leader::close) the turn, and
    /// answer all its parts.
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

    /// Whether the turn can take `more` blocks. A part changes one leaf of V2P, and each content may change one leaf of
    /// P2M and one of the hashes.
    fn has_room(&self, turn: &Turn, more: usize) -> bool {
        let blocks = turn.blocks + more;
        blocks <= MAX_BLOCKS && turn.parts.len() + 1 + 2 * blocks <= self.most_leaves
    }
}

/// The right, and the duty, to carry a turn out.
pub(super) struct Leader<'a> {
    turns: &'a Turns,
    thread: usize,
    turn: Arc<Mutex<Turn>>,
}

impl Leader<'_> {
    /// Closes the turn: no part joins it any more. Gives its parts.
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
