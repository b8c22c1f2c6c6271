//! When to poll for work before going to sleep, and for how long.
//!
//! A queue that has nothing to do either sleeps, which costs the time to be woken, or polls its
//! ring and its completions for a while, which costs a processor that others may want. Polling is
//! worth it when something usually comes within a few times the cost of being woken, and when
//! the processor has nothing else to do. `Poller` decides that from what it has seen; the only
//! times in it are those that it is given, so that a test can play any history to it.
//!
//! * The window grows while sleeps turn out short, to what would have found the end of the last
//!   one, up to a few times the measured cost of a wake-up; and it shrinks while they turn out
//!   long, as KVM's halt polling does.
//! * Polls that find nothing end it: below a quarter of hits it pauses, each time twice as
//!   long, and starts again. (A guest on our own processor cannot send while we poll.)
//! * Time that this thread had to wait for a processor, and gaps in which it did not run while it
//!   polled (another thread, or another domain had the processor), mean that the host has no
//!   processor to spare: it pauses. Both are judged over a millisecond or so: one interrupt is a
//!   gap, too, and a thread that sleeps is now and then woken on a processor that is taken for a
//!   moment while another is free.
//! * Where somebody asks the hypervisor for the host's processors ([`HostView`]), that decides. It
//!   begins where one is idle, and ends when next to none is left. A gap counts for nothing meanwhile:
//!   it is an emulated or throttled processor, and not one that others want. Without that answer, on a
//!   domain's only processor nobody polls: whoever we poll for may not be able to run.
//! * A disk has a [`Budget`] of processor time to poll with, all queues together, and shares
//!   what all disks of the host have.

use std::fmt;
use std::str::FromStr;

mod budget;
mod delay;
mod host;
mod wakeup;

pub(crate) use budget::HELD_NS;
pub use budget::{Budget, host_units};
pub(crate) use delay::RunDelay;
pub use host::{HostView, Teller};
pub use wakeup::wake_up_ns;

/// The longest window that can be asked for, in microseconds.
pub const MAX_WINDOW_US: u32 = 10_000;

/// The longest window that is found by itself, in nanoseconds: storage that takes longer than
/// this is not made noticeably slower by a wake-up.
const MAX_AUTO_NS: u64 = 200_000;
/// Windows are at least this long, in nanoseconds.
const MIN_AUTO_NS: u64 = 5_000;
/// A stretch without a reading of the clock of more than this, in nanoseconds, was not ours.
const GAP_NS: u64 = 30_000;
/// Another thread that has work for a processor keeps it for at least so long, in nanoseconds.
const SLICE_NS: u64 = 1_000_000;
/// Gaps are judged over so much polling, in nanoseconds.
const RECENT_NS: u64 = 1_000_000;
/// Pauses, in nanoseconds: the first, and the longest. Where there is no processor to spare, a
/// thread that is woken often waits for a slice at least once in the first.
const PAUSE_NS: (u64, u64) = (10_000_000, 1_000_000_000);
/// How often the time spent waiting for a processor is asked for, in nanoseconds.
const CHECK_NS: u64 = 1_000_000;
/// How often it is looked up what the host says of its processors, in nanoseconds.
const HEAR_NS: u64 = 1_000_000;
/// So much has to be idle for polling to begin, in thousandths of a processor: what polling takes of
/// one, where the rest is the request's own work.
const BEGINS_MILLI: u32 = 750;
/// And so much for it to go on: whoever wants a processor finds one.
const GOES_ON_MILLI: u32 = 125;
/// Pauses after it has taken the last of them, in nanoseconds: the first, and the longest. Hits forgive
/// none of these: on fast storage there are thousands of them before the host says what they cost.
const YIELD_NS: (u64, u64) = (200_000_000, 10_000_000_000);
/// Short sleeps in a row before polling begins.
const SHORT_SLEEPS: u32 = 3;
/// Polls in vain after a beginning that do not count.
const GRACE: u32 = 3;
/// Polls with success that halve the next pause.
const FORGIVEN_BY: u32 = 256;
/// The hit rate is kept as so many parts.
const WHOLE: u32 = 1 << 16;

/// How long a queue polls for work before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollWindow {
    /// As long as it pays.
    #[default]
    Auto,
    /// So many microseconds, always; 0: never.
    Fixed(u32),
}

impl fmt::Display for PollWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PollWindow::Auto => f.write_str("auto"),
            PollWindow::Fixed(us) => us.fmt(f),
        }
    }
}

impl FromStr for PollWindow {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if s == "auto" {
            return Ok(PollWindow::Auto);
        }
        match s.parse() {
            Ok(us) if us <= MAX_WINDOW_US => Ok(PollWindow::Fixed(us)),
            _ => Err(format!("it must be auto, or microseconds from 0 to {MAX_WINDOW_US}")),
        }
    }
}

/// One poll, from its beginning to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Poll {
    /// When it began.
    pub(crate) from_ns: u64,
    /// When it ended.
    pub(crate) to_ns: u64,
    /// The time of it in which the thread did not run.
    pub(crate) stolen_ns: u64,
    /// Whether something came.
    pub(crate) hit: bool,
}

/// The gap since the last reading of the clock, if it was none of ours.
pub(crate) fn stolen_ns(since_ns: u64) -> u64 {
    if since_ns > GAP_NS { since_ns } else { 0 }
}

/// What the host says of its processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostLook {
    pub(crate) cpus: u32,
    /// How many were idle of late, in thousandths.
    pub(crate) idle_milli: u32,
}

/// Whether there is a processor to spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spare {
    /// Nobody says: what is seen here decides.
    Unknown,
    Some,
    None,
}

/// Decides for one queue; see the module text.
#[derive(Debug)]
pub(crate) struct Poller {
    window: PollWindow,
    /// This process has one processor.
    alone: bool,
    spare: Spare,
    /// When to look again at what the host says; `u64::MAX`: never.
    hear_at_ns: u64,
    /// Since when there is a processor to spare.
    spare_since_ns: u64,
    /// The next pause after the last one was taken.
    yield_ns: u64,
    /// The smallest window of [`PollWindow::Auto`].
    min_ns: u64,
    /// The window now; 0: none.
    now_ns: u64,
    short_sleeps: u32,
    /// Of the last polls, weighted by age; of [`WHOLE`].
    hit_rate: u32,
    /// Polls in a row that found most things.
    hits: u32,
    /// Polls that may still find nothing while the window grows to what is needed.
    grace: u32,
    paused_until_ns: u64,
    pause_ns: u64,
    /// When the time spent waiting was last asked for, and what it was.
    checked: Option<(u64, u64)>,
    check_at_ns: u64,
    /// Time spent polling since then.
    polled_ns: u64,
    recent: Recent,
}

/// The last polls together; older ones count less.
#[derive(Debug, Default)]
struct Recent {
    /// The time in which the thread did not run.
    stolen_ns: u64,
    /// All of it.
    took_ns: u64,
}

impl Poller {
    /// Nothing is known yet. `wake_up_ns`: what it takes to wake a thread on this machine; `cpus`:
    /// processors that this process may use; `hears`: somebody may say what the host has.
    pub(crate) fn new(window: PollWindow, wake_up_ns: u64, cpus: usize, hears: bool) -> Poller {
        let alone = cpus < 2;
        let never = window == PollWindow::Auto && alone && !hears;
        let window = if never { PollWindow::Fixed(0) } else { window };
        let hears = hears && window == PollWindow::Auto;
        let min_ns = wake_up_ns.clamp(MIN_AUTO_NS, MAX_AUTO_NS / 4);
        Poller {
            window,
            alone,
            spare: Spare::Unknown,
            hear_at_ns: if hears { 0 } else { u64::MAX },
            spare_since_ns: 0,
            yield_ns: YIELD_NS.0,
            min_ns,
            now_ns: 0,
            short_sleeps: 0,
            hit_rate: WHOLE / 2,
            hits: 0,
            grace: GRACE,
            paused_until_ns: 0,
            pause_ns: PAUSE_NS.0,
            checked: None,
            check_at_ns: 0,
            polled_ns: 0,
            recent: Recent::default(),
        }
    }

    /// How long to poll now, in nanoseconds; 0: not at all.
    pub(crate) fn window_ns(&self, now_ns: u64) -> u64 {
        match self.window {
            PollWindow::Fixed(us) => u64::from(us) * 1000,
            PollWindow::Auto if now_ns < self.paused_until_ns || !self.may() => 0,
            PollWindow::Auto => self.now_ns,
        }
    }

    /// Whether there is a processor for it, as far as that is known.
    fn may(&self) -> bool {
        match self.spare {
            Spare::Unknown => !self.alone,
            Spare::Some => true,
            Spare::None => false,
        }
    }

    /// Whether [`heard`](Self::heard) wants to be told.
    pub(crate) fn listens(&self, now_ns: u64) -> bool {
        now_ns >= self.hear_at_ns
    }

    /// Whether it would poll, if there was a processor for it: somebody is to ask.
    pub(crate) fn wants(&self) -> bool {
        self.now_ns > 0
    }

    /// What the host says of its processors, if it does.
    pub(crate) fn heard(&mut self, now_ns: u64, host: Option<HostLook>) {
        self.hear_at_ns = now_ns + HEAR_NS;
        let polls = self.spare == Spare::Some && self.window_ns(now_ns) > 0;
        let least_milli = if polls { GOES_ON_MILLI } else { BEGINS_MILLI };
        let spare = match host {
            None => Spare::Unknown,
            Some(host) if host.cpus > 1 && host.idle_milli >= least_milli => Spare::Some,
            Some(_) => Spare::None,
        };
        if spare == Spare::Some && self.spare != Spare::Some {
            self.spare_since_ns = now_ns;
        }
        self.spare = spare;
        if polls && spare == Spare::None {
            self.yield_processor(now_ns);
        }
    }

    /// Others had to wait for what it polled with: it tries again, and ever less if it is no better.
    fn yield_processor(&mut self, now_ns: u64) {
        if now_ns - self.spare_since_ns > 4 * self.yield_ns {
            self.yield_ns = YIELD_NS.0;
        }
        self.pause(now_ns);
        self.paused_until_ns = now_ns + self.yield_ns;
        self.yield_ns = (self.yield_ns * 2).min(YIELD_NS.1);
    }

    /// Whether [`waited`](Self::waited) wants to be told.
    pub(crate) fn asks_for_wait(&self, now_ns: u64) -> bool {
        self.window == PollWindow::Auto && now_ns >= self.check_at_ns && self.may()
    }

    /// The time that this thread has spent ready to run but waiting for a processor, ever. If that
    /// is a time slice more than at the last call, or an eighth of a time most of which was spent
    /// polling, there is no processor to spare.
    pub(crate) fn waited(&mut self, now_ns: u64, total_ns: u64) {
        self.check_at_ns = now_ns + CHECK_NS;
        let polled_ns = std::mem::take(&mut self.polled_ns);
        let Some((then_ns, before_ns)) = self.checked.replace((now_ns, total_ns)) else {
            // Nothing is known yet, and the first poll may move the guest to where others work.
            self.paused_until_ns = now_ns + PAUSE_NS.0;
            return;
        };
        let (waited_ns, of_ns) = (total_ns.saturating_sub(before_ns), now_ns - then_ns);
        let while_polling = polled_ns * 2 > of_ns && waited_ns * 8 > of_ns;
        if while_polling || waited_ns >= SLICE_NS {
            self.pause(now_ns);
        }
    }

    /// A poll is over.
    pub(crate) fn polled(&mut self, poll: Poll) {
        let took_ns = poll.to_ns - poll.from_ns;
        self.polled_ns += took_ns;
        if self.spare == Spare::Unknown {
            self.recent.stolen_ns += poll.stolen_ns;
        }
        self.recent.took_ns += took_ns;
        if self.recent.stolen_ns * 4 > self.recent.took_ns.max(RECENT_NS) {
            return self.pause(poll.to_ns);
        }
        if self.recent.took_ns > RECENT_NS {
            self.recent.stolen_ns /= 2;
            self.recent.took_ns /= 2;
        }
        if !poll.hit && self.grace > 0 {
            self.grace -= 1;
            return;
        }
        let score = if poll.hit { WHOLE } else { 0 };
        self.hit_rate = (self.hit_rate * 7 + score) / 8;
        if self.hit_rate < WHOLE / 4 {
            self.pause(poll.to_ns);
        } else if self.hit_rate > WHOLE / 4 * 3 {
            self.hits = self.hits.saturating_add(1);
            if self.hits.is_multiple_of(FORGIVEN_BY) {
                self.pause_ns = (self.pause_ns / 2).max(PAUSE_NS.0);
            }
        }
    }

    /// Stops polling for a while, and begins anew then. A pause that there is already becomes no
    /// shorter, and as long as a first one from now on.
    fn pause(&mut self, now_ns: u64) {
        let for_ns = if now_ns < self.paused_until_ns {
            PAUSE_NS.0
        } else {
            let next_ns = (self.pause_ns * 2).min(PAUSE_NS.1);
            std::mem::replace(&mut self.pause_ns, next_ns)
        };
        self.paused_until_ns = self.paused_until_ns.max(now_ns + for_ns);
        self.now_ns = 0;
        self.short_sleeps = 0;
        self.hit_rate = WHOLE / 2;
        self.hits = 0;
        self.grace = GRACE;
        self.recent = Recent::default();
    }

    /// A sleep of so many nanoseconds is over, counted from the beginning of the poll before it if
    /// there was one.
    pub(crate) fn slept(&mut self, idle_ns: u64) {
        if idle_ns > MAX_AUTO_NS {
            self.short_sleeps = 0;
            self.now_ns = if self.now_ns / 2 < self.min_ns { 0 } else { self.now_ns / 2 };
            return;
        }
        self.short_sleeps = (self.short_sleeps + 1).min(SHORT_SLEEPS);
        if self.short_sleeps == SHORT_SLEEPS {
            // What would have found this, and a bit: no two sleeps are alike.
            let enough_ns = (idle_ns + idle_ns / 4).clamp(self.min_ns, MAX_AUTO_NS);
            self.now_ns = self.now_ns.max(enough_ns);
        }
    }
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
