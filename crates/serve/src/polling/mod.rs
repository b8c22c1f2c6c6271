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
//! * The host's processors decide where a process asks the hypervisor for them ([`HostView`]).
//!   Polling begins where one is idle, and ends when next to none is left. A gap does not count
//!   then: it comes from an emulated or throttled processor, and not from other users. Without
//!   these numbers, a domain's only processor is not polled with: the process that is waited for
//!   may not be able to run.
//! * A disk has a [`Budget`] of processor time to poll with, all queues together, and shares
//!   what all disks of the host have.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

mod budget;
mod delay;
mod host;
mod wakeup;

pub(crate) use budget::HELD_NS;
pub use budget::{Budget, host_units};
pub(crate) use delay::RunDelay;
pub use host::{HostMonitor, HostView};
pub use wakeup::wake_up_ns;

/// The longest window that can be configured, in microseconds.
pub const MAX_WINDOW_US: u32 = 10_000;

/// The longest automatic window, in nanoseconds. A wake-up does not slow slower storage down
/// noticeably.
const MAX_AUTO_NS: u64 = 200_000;
/// The shortest automatic window, in nanoseconds.
const MIN_AUTO_NS: u64 = 5_000;
/// The thread did not run in a longer interval between two readings of the clock, in nanoseconds.
const GAP_NS: u64 = 30_000;
/// The shortest time for which another thread with work keeps a processor, in nanoseconds.
const SLICE_NS: u64 = 1_000_000;
/// The polling time over which gaps are judged, in nanoseconds.
const RECENT_NS: u64 = 1_000_000;
/// The first and the longest pause, in nanoseconds. Where no processor is to spare, a thread that
/// is woken often waits for a slice at least once in the first.
const PAUSE_NS: (u64, u64) = (10_000_000, 1_000_000_000);
/// How often the time spent waiting for a processor is read, in nanoseconds.
const CHECK_NS: u64 = 1_000_000;
/// How often the host's numbers are read, in nanoseconds.
const HOST_CHECK_NS: u64 = 1_000_000;
/// The idle part of a processor that is needed for polling to begin, in thousandths. Polling takes
/// that much, and the rest is the request's own work.
const BEGINS_MILLI: u32 = 750;
/// The idle part that is needed for polling to go on, so that another user finds a processor.
const GOES_ON_MILLI: u32 = 125;
/// The first and the longest pause after polling has taken the last idle processor, in nanoseconds.
/// Hits do not shorten them: fast storage gives thousands of hits before the host's numbers show
/// their cost.
const YIELD_NS: (u64, u64) = (200_000_000, 10_000_000_000);
/// Short sleeps in a row before polling begins.
const SHORT_SLEEPS: u32 = 3;
/// Polls without success after a beginning that do not count.
const GRACE: u32 = 3;
/// Polls with success that halve the next pause.
const FORGIVEN_BY: u32 = 256;
/// The unit of the hit rate.
const WHOLE: u32 = 1 << 16;

/// How long a queue polls for work before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PollWindow {
    /// As long as it pays.
    #[default]
    Auto,
    /// This number of microseconds always; 0: never.
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

impl From<PollWindow> for String {
    fn from(window: PollWindow) -> String {
        window.to_string()
    }
}

impl TryFrom<String> for PollWindow {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
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
    /// The time at its beginning.
    pub(crate) from_ns: u64,
    /// The time at its end.
    pub(crate) to_ns: u64,
    /// The part of it in which the thread did not run.
    pub(crate) stolen_ns: u64,
    /// Whether work came.
    pub(crate) hit: bool,
}

/// The time since the last reading of the clock, if the thread did not run in it; 0 otherwise.
pub(crate) fn stolen_ns(since_ns: u64) -> u64 {
    if since_ns > GAP_NS { since_ns } else { 0 }
}

/// The host's numbers of its processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostLoad {
    pub(crate) cpus: u32,
    /// Thousandths of processors that were idle recently.
    pub(crate) idle_milli: u32,
}

/// Whether a processor is to spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spare {
    /// There are no numbers of the host: the queue's own observations decide.
    Unknown,
    Some,
    None,
}

/// Decides about polling for one queue, see the module's text.
#[derive(Debug)]
pub(crate) struct Poller {
    window: PollWindow,
    /// Whether this process has one processor only.
    alone: bool,
    spare: Spare,
    /// The time of the next reading of the host's numbers; `u64::MAX`: never.
    host_check_at_ns: u64,
    /// The time since when a processor is to spare.
    spare_since_ns: u64,
    /// The next pause after polling has taken the last idle processor.
    yield_ns: u64,
    /// The smallest window of [`PollWindow::Auto`].
    min_ns: u64,
    /// The current window; 0: none.
    now_ns: u64,
    short_sleeps: u32,
    /// The hit rate of the last polls, weighted by age, in units of [`WHOLE`].
    hit_rate: u32,
    /// Polls in a row that found most things.
    hits: u32,
    /// Polls that may still find nothing while the window grows.
    grace: u32,
    paused_until_ns: u64,
    pause_ns: u64,
    /// The time of the last reading of the time spent waiting, and its value.
    checked: Option<(u64, u64)>,
    check_at_ns: u64,
    /// The time spent polling since then.
    polled_ns: u64,
    recent: Recent,
}

/// The last polls together. Older ones count less.
#[derive(Debug, Default)]
struct Recent {
    /// The time in which the thread did not run.
    stolen_ns: u64,
    /// The whole time.
    took_ns: u64,
}

impl Poller {
    /// A poller without observations. `wake_up_ns`: the time to wake a thread on this machine;
    /// `cpus`: processors that this process may use; `has_host`: whether the host's numbers may come.
    pub(crate) fn new(window: PollWindow, wake_up_ns: u64, cpus: usize, has_host: bool) -> Poller {
        let alone = cpus < 2;
        let never = window == PollWindow::Auto && alone && !has_host;
        let window = if never { PollWindow::Fixed(0) } else { window };
        let has_host = has_host && window == PollWindow::Auto;
        let min_ns = wake_up_ns.clamp(MIN_AUTO_NS, MAX_AUTO_NS / 4);
        Poller {
            window,
            alone,
            spare: Spare::Unknown,
            host_check_at_ns: if has_host { 0 } else { u64::MAX },
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

    /// Whether a processor is to spare, as far as that is known.
    fn may(&self) -> bool {
        match self.spare {
            Spare::Unknown => !self.alone,
            Spare::Some => true,
            Spare::None => false,
        }
    }

    /// Whether it is time to call [`observe_host`](Self::observe_host).
    pub(crate) fn is_host_check_due(&self, now_ns: u64) -> bool {
        now_ns >= self.host_check_at_ns
    }

    /// Whether it would poll if a processor were to spare, so that the numbers are to be requested.
    pub(crate) fn wants_host_load(&self) -> bool {
        self.now_ns > 0
    }

    /// Takes the host's numbers, if there are any.
    pub(crate) fn observe_host(&mut self, now_ns: u64, host: Option<HostLoad>) {
        self.host_check_at_ns = now_ns + HOST_CHECK_NS;
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

    /// Pauses because other users had to wait for its processor. The pauses grow while this
    /// repeats.
    fn yield_processor(&mut self, now_ns: u64) {
        if now_ns - self.spare_since_ns > 4 * self.yield_ns {
            self.yield_ns = YIELD_NS.0;
        }
        self.pause(now_ns);
        self.paused_until_ns = now_ns + self.yield_ns;
        self.yield_ns = (self.yield_ns * 2).min(YIELD_NS.1);
    }

    /// Whether it is time to call [`waited`](Self::waited).
    pub(crate) fn is_wait_check_due(&self, now_ns: u64) -> bool {
        self.window == PollWindow::Auto && now_ns >= self.check_at_ns && self.may()
    }

    /// Takes the total time that this thread was ready to run but waited for a processor. No
    /// processor is to spare if it grew by a time slice since the last call, or by an eighth of a
    /// time most of which was spent polling.
    pub(crate) fn waited(&mut self, now_ns: u64, total_ns: u64) {
        self.check_at_ns = now_ns + CHECK_NS;
        let polled_ns = std::mem::take(&mut self.polled_ns);
        let Some((then_ns, before_ns)) = self.checked.replace((now_ns, total_ns)) else {
            // Nothing is known yet, and the first poll may move the guest to a busy processor.
            self.paused_until_ns = now_ns + PAUSE_NS.0;
            return;
        };
        let (waited_ns, of_ns) = (total_ns.saturating_sub(before_ns), now_ns - then_ns);
        let while_polling = polled_ns * 2 > of_ns && waited_ns * 8 > of_ns;
        if while_polling || waited_ns >= SLICE_NS {
            self.pause(now_ns);
        }
    }

    /// Takes the result of a poll.
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

    /// Stops polling for a while, and begins anew then. A longer pause that there is already stays,
    /// and the next pause is as long as a first one.
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

    /// Takes the end of a sleep of this many nanoseconds, counted from the beginning of the poll
    /// before it, if there was one.
    pub(crate) fn slept(&mut self, idle_ns: u64) {
        if idle_ns > MAX_AUTO_NS {
            self.short_sleeps = 0;
            self.now_ns = if self.now_ns / 2 < self.min_ns { 0 } else { self.now_ns / 2 };
            return;
        }
        self.short_sleeps = (self.short_sleeps + 1).min(SHORT_SLEEPS);
        if self.short_sleeps == SHORT_SLEEPS {
            // The window that would have found this, and a bit more, since no two sleeps are alike.
            let enough_ns = (idle_ns + idle_ns / 4).clamp(self.min_ns, MAX_AUTO_NS);
            self.now_ns = self.now_ns.max(enough_ns);
        }
    }
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
