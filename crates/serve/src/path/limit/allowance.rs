//! The tokens that one path may take without a look at the shared buckets.
//!
//! A look at a bucket is a division and an atomic change. So a path takes tokens for some requests ahead, counts them
//! down, and gives back at the end of its turn those that are left. Meanwhile other paths do not find them, so all paths
//! together begin no more than they may.

use super::{BYTES_FROM, Counted, FREE, KINDS, Limiter, OF_READS, OF_WRITES, moved};
use crate::path::work::Work;

/// Requests for which tokens are taken at once, and their bytes.
const AHEAD: i64 = 16;
const BYTES_AHEAD: i64 = AHEAD * 4096;

/// The tokens that a path has taken ahead for requests of one direction. Each counts for all limits of this direction that
/// are set. Negative: what the last request took beyond them. It is owed.
#[derive(Clone, Copy, Default)]
struct Tokens {
    requests: i64,
    bytes: i64,
}

impl Tokens {
    #[inline]
    fn are_there(self) -> bool {
        self.requests > 0 && self.bytes > 0
    }

    /// The tokens that this limit counts: requests, or bytes.
    fn of(&mut self, kind: usize) -> &mut i64 {
        if kind < BYTES_FROM { &mut self.requests } else { &mut self.bytes }
    }
}

/// The tokens that a path has taken ahead.
#[derive(Default)]
pub(in crate::path) struct Allowance {
    reads: Tokens,
    writes: Tokens,
    /// Whether there are some, or some are owed.
    holds: bool,
    /// When the last were taken, in nanoseconds.
    taken_ns: u64,
}

impl Allowance {
    /// Whether a request of this direction may begin.
    #[inline]
    pub(super) fn allows(&mut self, counted: Counted, limiter: &Limiter, now_ns: u64) -> bool {
        match counted {
            Counted::Read => self.reads.are_there() || self.fill(OF_READS, limiter, now_ns),
            Counted::Write => self.writes.are_there() || self.fill(OF_WRITES, limiter, now_ns),
            Counted::Not => true,
        }
    }

    fn of(&mut self, set: u8) -> &mut Tokens {
        if set == OF_READS { &mut self.reads } else { &mut self.writes }
    }

    /// Takes tokens of the limits of this direction, after it has settled what it has of them. `false`: a bucket has none.
    #[cold]
    fn fill(&mut self, set: u8, limiter: &Limiter, now_ns: u64) -> bool {
        let had = std::mem::take(self.of(set));
        settle(had, set, limiter, self.taken_ns);
        let mut took = [FREE; KINDS];
        let mut tokens = Tokens { requests: AHEAD, bytes: BYTES_AHEAD };
        for kind in kinds(set) {
            let most = tokens.of(kind);
            took[kind] = limiter.take(kind, most.unsigned_abs(), 0, now_ns);
            *most = took[kind].min(*most);
        }
        // A limit that comes later may have less than the one before it gave.
        for kind in kinds(set).filter(|kind| took[*kind] < FREE) {
            limiter.give_back(kind, (took[kind] - *tokens.of(kind)).unsigned_abs());
        }
        *self.of(set) = tokens;
        (self.holds, self.taken_ns) = (true, now_ns);
        tokens.are_there()
    }

    /// Counts the tokens of a request.
    #[inline]
    pub(super) fn count(&mut self, work: &Work, now_ns: u64) {
        let tokens = match Counted::of(work.action) {
            Counted::Read => &mut self.reads,
            Counted::Write => &mut self.writes,
            Counted::Not => return,
        };
        // A disk has fewer bytes than this counts.
        tokens.requests = tokens.requests.wrapping_sub(1);
        tokens.bytes = tokens.bytes.wrapping_sub_unsigned(moved(work));
        (self.holds, self.taken_ns) = (true, now_ns);
    }

    /// Gives back the tokens that are left, and pays for what is owed.
    #[inline]
    pub(super) fn settle(&mut self, limiter: &Limiter) {
        if self.holds {
            self.settle_all(limiter);
        }
    }

    #[cold]
    fn settle_all(&mut self, limiter: &Limiter) {
        for set in [OF_READS, OF_WRITES] {
            let had = std::mem::take(self.of(set));
            settle(had, set, limiter, self.taken_ns);
        }
        self.holds = false;
    }
}

/// The limits of a set.
fn kinds(set: u8) -> impl Iterator<Item = usize> {
    (0..KINDS).filter(move |kind| set >> kind & 1 == 1)
}

fn settle(mut had: Tokens, set: u8, limiter: &Limiter, taken_ns: u64) {
    for kind in kinds(set) {
        match *had.of(kind) {
            0 => {}
            left @ 1.. => limiter.give_back(kind, left.unsigned_abs()),
            owed => _ = limiter.take(kind, 0, owed.unsigned_abs(), taken_ns),
        }
    }
}
