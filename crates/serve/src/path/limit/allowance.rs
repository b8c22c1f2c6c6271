//! What one path may take without a look at the shared buckets.
//!
//! A look at a bucket is a division and an atomic change. So a path takes tokens for some requests ahead, counts them
//! down, and gives back at the end of its turn those that are left. Meanwhile other paths do not find them, so all paths
//! together begin no more than they may.

use super::{BYTES_FROM, Counted, KINDS, Limiter, OF_READS, OF_WRITES, moved};
use crate::path::work::Work;

/// Tokens of a limit that is not set: more than a path takes in its life.
pub(super) const FREE: i64 = i64::MAX / 2;
/// The least that is left of them.
const FREE_STILL: i64 = FREE / 2;
/// Requests for which tokens are taken at once, and their bytes.
const AHEAD: u64 = 8;
const BYTES_AHEAD: u64 = AHEAD * 4096;

/// The tokens that a path has taken ahead, in the order of [`NAMES`](super::NAMES).
#[derive(Default)]
pub(in crate::path) struct Allowance {
    /// Negative: what the last request took beyond them. It is owed.
    left: [i64; KINDS],
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
            Counted::Read => {
                least_of::<OF_READS>(&self.left) > 0 || self.fill(OF_READS, limiter, now_ns)
            }
            Counted::Write => {
                least_of::<OF_WRITES>(&self.left) > 0 || self.fill(OF_WRITES, limiter, now_ns)
            }
            Counted::Not => true,
        }
    }

    /// Takes tokens of the limits of this set that have none left. `false`: a bucket has none.
    #[cold]
    fn fill(&mut self, set: u8, limiter: &Limiter, now_ns: u64) -> bool {
        (self.holds, self.taken_ns) = (true, now_ns);
        let mut all = true;
        for (kind, left) in self.left.iter_mut().enumerate() {
            if set >> kind & 1 == 1 && *left <= 0 {
                let ahead = if kind < BYTES_FROM { AHEAD } else { BYTES_AHEAD };
                *left = limiter.take(kind, ahead, left.unsigned_abs(), now_ns);
                all &= *left > 0;
            }
        }
        all
    }

    /// Counts the tokens of a request.
    #[inline]
    pub(super) fn count(&mut self, work: &Work, now_ns: u64) {
        match Counted::of(work.action) {
            Counted::Read => self.subtract::<OF_READS>(moved(work)),
            Counted::Write => self.subtract::<OF_WRITES>(moved(work)),
            Counted::Not => return,
        }
        (self.holds, self.taken_ns) = (true, now_ns);
    }

    #[inline]
    fn subtract<const SET: u8>(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(FREE);
        for (kind, left) in
            self.left.iter_mut().enumerate().filter(|(kind, _)| SET >> kind & 1 == 1)
        {
            *left = left.saturating_sub(if kind < BYTES_FROM { 1 } else { bytes });
        }
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
        for (kind, left) in self.left.iter_mut().enumerate() {
            match std::mem::take(left) {
                // The limit was not set, and is perhaps now.
                FREE_STILL.. | 0 => {}
                left @ 1.. => limiter.give_back(kind, left.unsigned_abs()),
                owed => _ = limiter.take(kind, 0, owed.unsigned_abs(), self.taken_ns),
            }
        }
        self.holds = false;
    }
}

/// The least number of tokens that the limits of this set have.
#[inline]
fn least_of<const SET: u8>(left: &[i64; KINDS]) -> i64 {
    let has = |kind: usize| if SET >> kind & 1 == 1 { left[kind] } else { FREE };
    (0..KINDS).map(has).fold(FREE, i64::min)
}
