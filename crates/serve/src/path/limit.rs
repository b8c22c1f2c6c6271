//! The limits of a running disk: requests and bytes in a second, of reads, of writes, and of both.
//!
//! Each of the six limits is a token bucket, kept as one number: the time at which all tokens that
//! were taken are paid for. A request may begin if that time is less than a burst ahead. It then
//! moves the time by its own cost, however large it is. So a request that is larger than the burst
//! passes, and the requests behind it wait for it. A late wake-up loses nothing, as long as it is not later
//! than the burst.
//!
//! All queues of a disk and all its NBD clients share the buckets, without a lock. Each takes
//! tokens for some requests ahead. Requests without tokens stay on their ring or in their socket, and nothing of them is under way: a disk is
//! detached, stopped and parked as fast as without a limit. A ring is served in its order, so a
//! write waits behind a read that has no tokens.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::RequestPath;
use super::work::{Action, Work};
use allowance::Allowance;

mod allowance;

/// Parts of a nanosecond in which buckets count: rounding must not show in the rate.
const PARTS: u64 = 16;
/// The parts of a second.
const SECOND: u64 = 1_000_000_000 * PARTS;
/// The burst of a limit that names none: as much as the rate brings in this part of a second.
const BURST_PART: u64 = 10;
/// A queue without tokens waits until there are some for this time, so that it does not wake for
/// each request: a millisecond.
const QUANTUM: u64 = SECOND / 1000;
/// How long a disk that is to be closed has no limit, in nanoseconds. It is more than the requests
/// of full rings need.
const FAREWELL_NS: u64 = 1_000_000_000;
/// How long after that a disk that stays has its limit in any case.
const NEXT_FAREWELL_NS: u64 = 60_000_000_000;
/// The highest rate. A higher one is none.
pub const MOST: u64 = 1 << 40;
/// The lowest rate of bytes. A request of the largest size waits for seconds then, not for minutes.
pub const LEAST_BYTES: u64 = 64 << 10;

/// Number of limits.
pub const KINDS: usize = 6;
/// The names of the limits, in the order of [`Limits::rates`].
pub const NAMES: [&str; KINDS] =
    ["iops", "iops_read", "iops_write", "bytes", "bytes_read", "bytes_write"];
/// The limits that count a read, and those that count a write: bit N is that of [`NAMES`]'s N.
const OF_READS: u8 = 0b01_1011;
const OF_WRITES: u8 = 0b10_1101;
/// Tokens of a limit that is not set: more than a path takes in its life.
const FREE: i64 = i64::MAX;
/// The first limit of bytes.
const BYTES_FROM: usize = 3;

/// One limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Requests or bytes in a second.
    pub per_s: u64,
    /// Requests or bytes that may pass at once after a rest. `None`: a tenth of a second's.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub burst: Option<u64>,
}

/// The limits of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Requests in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub iops: Option<Rate>,
    /// Reads in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub iops_read: Option<Rate>,
    /// Writes, discards and requests for zeros in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub iops_write: Option<Rate>,
    /// Bytes in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes: Option<Rate>,
    /// Bytes that are read in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes_read: Option<Rate>,
    /// Bytes that are written in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes_write: Option<Rate>,
}

impl Limits {
    /// All limits in the order of [`NAMES`].
    pub fn rates(&self) -> [Option<Rate>; KINDS] {
        let Limits { iops, iops_read, iops_write, bytes, bytes_read, bytes_write } = *self;
        [iops, iops_read, iops_write, bytes, bytes_read, bytes_write]
    }

    /// The limit of this index in [`NAMES`].
    pub fn rate_mut(&mut self, index: usize) -> Option<&mut Option<Rate>> {
        let Limits { iops, iops_read, iops_write, bytes, bytes_read, bytes_write } = self;
        [iops, iops_read, iops_write, bytes, bytes_read, bytes_write].into_iter().nth(index)
    }

    /// Whether there is no limit.
    pub fn is_none(&self) -> bool {
        self.rates().iter().all(Option::is_none)
    }

    /// Checks all rates.
    ///
    /// # Errors
    /// A rate is outside of its bounds; the text names the rate and the bounds.
    pub fn check(&self) -> Result<(), String> {
        for (i, rate) in self.rates().iter().enumerate() {
            let Some(Rate { per_s, burst }) = rate else { continue };
            let (name, least) = (NAMES[i], if i < BYTES_FROM { 1 } else { LEAST_BYTES });
            if !(least..=MOST).contains(per_s) {
                return Err(format!("{name} is {per_s} a second; it takes {least} to {MOST}"));
            }
            // An hour's worth.
            let most = per_s.saturating_mul(3600);
            if burst.is_some_and(|burst| burst == 0 || burst > most) {
                return Err(format!("the burst of {name} takes 1 to {most}, an hour's worth"));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Limits {
    /// As in `iops=500,bytes_write=1048576:4194304`, where the burst is behind the colon; `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for (name, rate) in NAMES.iter().zip(self.rates()) {
            let Some(Rate { per_s, burst }) = rate else { continue };
            write!(f, "{between}{name}={per_s}")?;
            if let Some(burst) = burst {
                write!(f, ":{burst}")?;
            }
            between = ",";
        }
        if between.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

impl FromStr for Limits {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut limits = Limits::default();
        if s == "none" {
            return Ok(limits);
        }
        for part in s.split(',') {
            let (name, rate) = part.split_once('=').unwrap_or((part, ""));
            let (per_s, burst) = match rate.split_once(':') {
                Some((per_s, burst)) => (per_s.parse().ok(), burst.parse().ok().map(Some)),
                None => (rate.parse().ok(), Some(None)),
            };
            let index = NAMES.iter().position(|known| *known == name);
            let (Some(index), Some(per_s), Some(burst)) = (index, per_s, burst) else {
                let names = NAMES.join(", ");
                return Err(format!("{part:?} is no limit: write NAME=N or NAME=N:BURST; {names}"));
            };
            if let Some(rate) = limits.rate_mut(index) {
                *rate = Some(Rate { per_s, burst });
            }
        }
        limits.check().map(|()| limits)
    }
}

/// The parts of time that tokens take at this rate.
fn cost(tokens: u64, per_s: u64) -> u64 {
    match tokens.checked_mul(SECOND) {
        Some(parts) => parts / per_s,
        None => {
            let parts = u128::from(tokens) * u128::from(SECOND) / u128::from(per_s);
            u64::try_from(parts).unwrap_or(u64::MAX)
        }
    }
}

/// The tokens that these parts of time bring at this rate.
fn worth(parts: u64, per_s: u64) -> u64 {
    let tokens = u128::from(parts) * u128::from(per_s) / u128::from(SECOND);
    u64::try_from(tokens).unwrap_or(u64::MAX)
}

/// A token bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// Tokens in a second. 0: there is no limit.
    per_s: AtomicU64,
    /// The parts of time that the burst takes.
    burst: AtomicU64,
    /// The time at which all tokens that were taken are paid for, in parts.
    paid_at: AtomicU64,
}

impl Bucket {
    fn set(&self, rate: Option<Rate>, now: u64) {
        let (per_s, burst) = match rate {
            None => (0, 0),
            Some(Rate { per_s, burst: None }) => (per_s, SECOND / BURST_PART),
            Some(Rate { per_s, burst: Some(burst) }) => {
                let time = u128::from(burst) * u128::from(SECOND) / u128::from(per_s.max(1));
                (per_s, u64::try_from(time).unwrap_or(u64::MAX / 4))
            }
        };
        self.burst.store(burst, Relaxed);
        self.per_s.store(per_s, Relaxed);
        // A debt from another rate must not hold this one back for longer than its burst.
        let most = now.saturating_add(burst);
        let _ = self.paid_at.fetch_update(Relaxed, Relaxed, |at| (at > most).then_some(most));
    }

    /// Takes up to `ahead` tokens for requests that are about to begin, after it has paid for those that are `owed`. Gives
    /// how many, which is at least one if a request may begin.
    fn take(&self, ahead: u64, owed: u64, now: u64) -> i64 {
        let per_s = self.per_s.load(Relaxed);
        if per_s == 0 {
            return FREE;
        }
        let burst = self.burst.load(Relaxed);
        let (paid, all, mut taken) = (cost(owed, per_s), cost(ahead, per_s), 0);
        let pay = |at: u64| {
            let at = at.max(now).saturating_add(paid);
            taken = match now.saturating_add(burst).checked_sub(at) {
                None => 0,
                Some(free) if free >= all => ahead,
                Some(free) => ahead.min(worth(free, per_s).saturating_add(1)),
            };
            Some(at.saturating_add(if taken == ahead { all } else { cost(taken, per_s) }))
        };
        let _ = self.paid_at.fetch_update(Relaxed, Relaxed, pay);
        i64::try_from(taken).unwrap_or(FREE)
    }

    /// Gives back tokens that no request has taken.
    fn give_back(&self, tokens: u64) {
        let per_s = self.per_s.load(Relaxed);
        if per_s > 0 {
            let cost = cost(tokens, per_s);
            let _ = self.paid_at.fetch_update(Relaxed, Relaxed, |at| Some(at.saturating_sub(cost)));
        }
    }

    /// When a request may begin, in parts. `None`: at once.
    fn begins_at(&self, now: u64) -> Option<u64> {
        if self.per_s.load(Relaxed) == 0 {
            return None;
        }
        let burst = self.burst.load(Relaxed);
        let at = self.paid_at.load(Relaxed).saturating_sub(burst);
        (at > now).then(|| at.saturating_add(QUANTUM.min(burst / 2)))
    }
}

/// The limiter of a disk, which all its paths share.
#[derive(Debug, Default)]
pub struct Limiter {
    /// The limits that there are: bit N is that of [`NAMES`]'s N. A request looks at no others.
    set: AtomicU8,
    /// Number of changes of the limits; wraps.
    changes: AtomicU32,
    /// Until when requests begin without tokens, in nanoseconds: the disk is to be closed.
    lifted_until_ns: AtomicU64,
    buckets: [Bucket; KINDS],
    limits: Mutex<Limits>,
}

/// The direction of a request for the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// It counts as a read.
    Read,
    /// It counts as a write.
    Write,
    /// No limit counts it.
    Not,
}

impl Counted {
    /// The direction of an action. A discard and a request for zeros count as writes. A flush
    /// counts as nothing.
    fn of(action: Action) -> Counted {
        match action {
            Action::Read | Action::Status => Counted::Read,
            Action::Flush => Counted::Not,
            Action::Write
            | Action::FlushThenWrite
            | Action::Barrier
            | Action::Discard
            | Action::Zero => Counted::Write,
        }
    }

    fn limits(self) -> u8 {
        match self {
            Counted::Read => OF_READS,
            Counted::Write => OF_WRITES,
            Counted::Not => 0,
        }
    }
}

/// The bytes of a request that limits of bytes count: those that it moves.
fn moved(work: &Work) -> u64 {
    match work.action {
        Action::Read | Action::Write | Action::FlushThenWrite | Action::Barrier => work.bytes(),
        Action::Flush | Action::Discard | Action::Zero | Action::Status => 0,
    }
}

impl Limiter {
    /// Sets the limits. Limits that stay as they are keep their debts.
    pub fn set(&self, limits: &Limits, now_ns: u64) {
        let mut current = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = current.rates().into_iter().zip(limits.rates());
        for (bucket, (before, after)) in self.buckets.iter().zip(changed) {
            if before != after {
                bucket.set(after, now_ns.saturating_mul(PARTS));
            }
        }
        *current = *limits;
        let set =
            limits.rates().iter().rev().fold(0, |set, rate| set << 1 | u8::from(rate.is_some()));
        self.set.store(set, Release);
        self.changes.fetch_add(1, Release);
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lifts the limits for a second, because the disk is to be closed. Linux closes a disk without
    /// waiting for the requests on its rings. A guest that asks for it again and again has the
    /// limits for most of the time.
    pub fn lift(&self, now_ns: u64) {
        let lift = |until_ns: u64| {
            let again_ns = until_ns.saturating_add(NEXT_FAREWELL_NS);
            (until_ns == 0 || now_ns >= again_ns).then(|| now_ns.saturating_add(FAREWELL_NS))
        };
        if self.lifted_until_ns.fetch_update(Relaxed, Relaxed, lift).is_ok() {
            self.changes.fetch_add(1, Release);
        }
    }

    fn is_on(&self) -> bool {
        self.set.load(Acquire) != 0
    }

    /// The limits that there are for this direction, by their numbers in [`NAMES`].
    fn of(&self, counted: Counted) -> impl Iterator<Item = usize> {
        let mut left = self.set.load(Relaxed) & counted.limits();
        std::iter::from_fn(move || {
            let kind = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (kind < KINDS).then_some(kind)
        })
    }

    /// Takes tokens of this limit: see [`Bucket::take`].
    fn take(&self, kind: usize, ahead: u64, owed: u64, now_ns: u64) -> i64 {
        self.buckets[kind].take(ahead, owed, now_ns.saturating_mul(PARTS))
    }

    fn give_back(&self, kind: usize, tokens: u64) {
        self.buckets[kind].give_back(tokens);
    }

    /// When a request of this direction may begin, in nanoseconds. `None`: at once.
    fn begins_at(&self, counted: Counted, now_ns: u64) -> Option<u64> {
        let now = now_ns.saturating_mul(PARTS);
        let at = self.of(counted).filter_map(|kind| self.buckets[kind].begins_at(now)).max()?;
        (now_ns >= self.lifted_until_ns.load(Relaxed)).then(|| at.div_ceil(PARTS))
    }
}

/// A path's view of the limiter.
#[derive(Default)]
pub(super) struct Limited {
    /// Whether there was a limit at the last look, once a turn.
    is_on: bool,
    held: Option<Held>,
    allowance: Allowance,
}

/// A path that waits for tokens.
#[derive(Clone, Copy)]
struct Held {
    since_ns: u64,
    until_ns: u64,
    /// The limiter's number of changes when it began to wait.
    changes: u32,
}

impl Limited {
    /// How long the path still waits for tokens at this time.
    pub(super) fn left(&self, now_ns: u64) -> Option<Duration> {
        let until_ns = self.held.as_ref()?.until_ns;
        Some(Duration::from_nanos(until_ns.saturating_sub(now_ns)))
    }

    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

impl RequestPath {
    fn limiter(&self) -> &Limiter {
        &self.shared.device.limiter
    }

    /// Looks whether there is a limit. It is done once a turn, so that requests without one pay
    /// only for a look at a field.
    pub(super) fn look_at_limits(&mut self) {
        self.limited.is_on = self.limiter().is_on();
    }

    /// Gives back the tokens that the requests of this turn did not need.
    #[inline]
    pub(super) fn settle_tokens(&mut self) {
        self.limited.allowance.settle(&self.shared.device.limiter);
    }

    /// Whether the disk has a limit. Then each request needs [tokens](Self::has_tokens).
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.limited.is_on
    }

    /// Whether a request of this direction may begin by the disk's limits. If not, the path
    /// [takes](Self::is_throttled) none before there are tokens. It is called for paths with a
    /// [limit](Self::is_limited).
    #[inline]
    pub fn has_tokens(&mut self, counted: Counted, now_ns: u64) -> bool {
        self.limited.allowance.allows(counted, &self.shared.device.limiter, now_ns)
            || self.begins_in_spite(counted, now_ns)
    }

    /// Whether a request may begin for which no tokens are left. If not, the path is held until there are.
    #[cold]
    fn begins_in_spite(&mut self, counted: Counted, now_ns: u64) -> bool {
        let limiter = &self.shared.device.limiter;
        let changes = limiter.changes.load(Acquire);
        self.limited.allowance.settle(limiter);
        let Some(until_ns) = limiter.begins_at(counted, now_ns) else { return true };
        self.limited.held = Some(Held { since_ns: now_ns, until_ns, changes });
        false
    }

    /// Counts requests that begin to wait for the limit.
    pub fn count_limited(&mut self, requests: u64) {
        self.counters().limit_waits.add(requests);
    }

    /// Takes the tokens of an admitted request.
    #[inline]
    pub(super) fn take_tokens(&mut self, work: &Work, now_ns: u64) {
        self.limited.allowance.count(work, now_ns);
    }

    /// Ends the wait for tokens if it is time, or if the limits were changed or lifted.
    #[cold]
    pub(super) fn end_limited(&mut self, now_ns: u64) {
        let Some(held) = self.limited.held else { return };
        if now_ns < held.until_ns && self.limiter().changes.load(Acquire) == held.changes {
            return;
        }
        self.limited.held = None;
        self.counters().limit_waited_ns.add(now_ns.saturating_sub(held.since_ns));
    }
}

#[cfg(test)]
mod tests;
